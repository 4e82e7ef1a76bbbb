"""How fast a machine is: figures read from a file that ships with the package or that the user gives.

Owns `Hardware`, the format of its files and the messages about them. Measures nothing itself (`measure` does).
Source of the format: Elixir v2, Tables 4 and 5. Bandwidths are 1e9 bytes a second, and those of the n GPUs together.

What a file may leave out: `node_bandwidth`, without which nothing spans nodes, the disk's figures, and `wires`, which
say of single process groups what `by_gpus` says of their number of ranks.
"""

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Self

from elixir_moe.errors import ConfigError

_GIGA = 1e9
_MOST = sys.float_info.max
_OPTIONAL = ("node_bandwidth", "disk_bytes", "disk_read", "disk_write")


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """What n GPUs that work at the same time reach together."""

    b_c2g: float
    """Host to device, 1e9 bytes a second."""
    b_g2c: float
    """Device to host, 1e9 bytes a second."""
    v_g: float
    """Adam on the devices, 1e9 parameters a second."""
    v_c: float
    """Adam on the host, 1e9 parameters a second."""
    b_g2g: float | None = None
    """Between devices, 1e9 bytes a second; None for one GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """The gathers and reductions of one process group, as measured."""

    ranks: tuple[int, ...]
    """Its global ranks."""
    latency_us: float
    """Microseconds a collective takes however small it is."""
    bandwidth: float
    """1e9 bytes of gathered chunks a second, beyond that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """What no data sheet says: four constants, measured or fitted for the whole machine, never for one model."""

    device_efficiency: float
    """Part of the device's peaks, of products and of memory traffic alike, that kernels reach."""
    exposed_collectives: float
    """Part of the time of gathers and reductions that compute does not hide."""
    host_update_slowdown: float
    """How much longer an update in host memory takes within a step than Adam alone: unscaling, casts, page faults."""
    overhead_ns_per_parameter: float
    """Time a step spends for each gathered parameter whatever the batch: launches, hooks, copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A machine, or a cluster of equal ones."""

    name: str
    gpu_bytes: int
    """Memory of one GPU."""
    cpu_bytes: int
    """Host memory of one node."""
    gpus_per_node: int
    peak_tflops: float
    """Matrix products of one GPU in the compute dtype by its data sheet, 1e12 operations a second."""
    memory_bandwidth: float
    """Device memory of one GPU by its data sheet, 1e9 bytes a second."""
    fitted: Fitted
    by_gpus: dict[int, Links]
    """By number of GPUs."""
    node_bandwidth: float | None = None
    """Of a node's network, each way, 1e9 bytes a second; None if there is one node."""
    disk_bytes: int | None = None
    """Room for shards on a node's disks; None if there is none."""
    disk_read: float | None = None
    """Of a node's disks, 1e9 bytes a second; None if they are not known."""
    disk_write: float | None = None
    wires: tuple[Wire, ...] = ()
    """Process groups that were measured."""

    @classmethod
    def named(cls, name: str) -> Self:
        """A machine that ships with the package, or the file of that path.

        Raises:
            ConfigError: there is neither; the nearest name is suggested. Or the file lacks a figure.
        """
        folder = resources.files("elixir_moe.search").joinpath("machines")
        known = sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))
        if name in known:
            return cls.parse(folder.joinpath(f"{name}.json").read_text(encoding="utf-8"), name)
        path = Path(name)
        if path.is_file():
            try:
                return cls.parse(path.read_text(encoding="utf-8"), name)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"hardware {name!r} cannot be read: {error}") from error
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"no hardware is called {name!r} and no such file exists{hint} There are: {', '.join(known)}")

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """From the JSON of a hardware file. Raises ConfigError, which names every figure that is missing or wrong."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"hardware {name!r} is not valid JSON: {error}") from error
        problems: list[str] = []
        plain = _figures(
            data, ("gpu_bytes", "cpu_bytes", "gpus_per_node", "peak_tflops", "memory_bandwidth"), "", problems
        )
        whole = ("gpu_bytes", "cpu_bytes", "gpus_per_node")
        problems += [
            f"{name} (found {plain[name]!r}, expected a whole number)" for name in whole if plain.get(name, 0) % 1
        ]
        problems += _unknown(data, {*cls.__dataclass_fields__} - {"name"}, "")
        problems += _unknown(
            data.get("fitted") if isinstance(data, dict) else None, Fitted.__dataclass_fields__, "fitted."
        )
        fitted = _figures(_part(data, "fitted"), Fitted.__dataclass_fields__, "fitted.", problems)
        optional = {name: data[name] for name in _OPTIONAL if isinstance(data, dict) and data.get(name) is not None}
        optional = _figures(optional, optional, "", problems)
        if "disk_bytes" in optional:
            problems += [name for name in ("disk_read", "disk_write") if name not in optional]
        links: dict[int, Links] = {}
        for gpus, figures in _part(data, "by_gpus").items():
            needed = [f for f in Links.__dataclass_fields__ if f != "b_g2g" or gpus != "1"]
            found = _figures(figures, needed, f"by_gpus.{gpus}.", problems)
            problems += _unknown(figures, Links.__dataclass_fields__, f"by_gpus.{gpus}.")
            if not str(gpus).isdecimal() or int(gpus) < 1:
                problems.append(f"by_gpus.{gpus} (a number of GPUs is expected)")
            elif len(found) == len(needed):
                links[int(gpus)] = Links(**found)
        if not links and not problems:
            problems.append("by_gpus.1")
        wires = list(_wires(data, problems))
        if problems:
            raise ConfigError(f"hardware {name!r} lacks {', '.join(problems)}")
        return cls(
            name=name,
            gpu_bytes=int(plain["gpu_bytes"]),
            cpu_bytes=int(plain["cpu_bytes"]),
            gpus_per_node=int(plain["gpus_per_node"]),
            peak_tflops=plain["peak_tflops"],
            memory_bandwidth=plain["memory_bandwidth"],
            fitted=Fitted(**fitted),
            by_gpus=dict(sorted(links.items())),
            wires=tuple(wires),
            node_bandwidth=optional.get("node_bandwidth"),
            disk_bytes=int(optional["disk_bytes"]) if "disk_bytes" in optional else None,
            disk_read=optional.get("disk_read"),
            disk_write=optional.get("disk_write"),
        )

    def to_json(self) -> str:
        """What `parse` reads back to an equal machine."""
        figures = {key: value for key, value in asdict(self).items() if key != "name" and value is not None}
        for links in figures["by_gpus"].values():
            if links["b_g2g"] is None:
                del links["b_g2g"]
        return json.dumps(figures, indent=2)

    def links(self, gpus: int) -> Links:
        """The figures for `gpus` GPUs: those of the file, or, between two of the file, on the line through them.

        Of several whole nodes they are so many times a node's; what lies between nodes is `node_bandwidth`'s.

        Raises:
            ConfigError: the file has none for that many.
        """
        if gpus in self.by_gpus:
            return self.by_gpus[gpus]
        if self.node_bandwidth is not None and gpus > self.gpus_per_node and gpus % self.gpus_per_node == 0:
            node, nodes = self.links(self.gpus_per_node), gpus // self.gpus_per_node
            return Links(b_c2g=nodes * node.b_c2g, b_g2c=nodes * node.b_g2c, v_g=nodes * node.v_g, v_c=nodes * node.v_c)
        low = max((n for n in self.by_gpus if n < gpus), default=None)
        high = min((n for n in self.by_gpus if n > gpus), default=None)
        if low is None or high is None:
            raise ConfigError(
                f"hardware {self.name!r} lacks by_gpus.{gpus}: it has figures for "
                f"{', '.join(map(str, self.by_gpus))} GPUs"
            )
        a, b, part = self.by_gpus[low], self.by_gpus[high], (gpus - low) / (high - low)

        def between(x: float, y: float) -> float:
            return x + part * (y - x)

        g2g = b.b_g2g if a.b_g2g is None or b.b_g2g is None else between(a.b_g2g, b.b_g2g)
        return Links(
            b_c2g=between(a.b_c2g, b.b_c2g),
            b_g2c=between(a.b_g2c, b.b_g2c),
            v_g=between(a.v_g, b.v_g),
            v_c=between(a.v_c, b.v_c),
            b_g2g=g2g,
        )

    def host_bytes_per_rank(self, gpus: int) -> int:
        """Host memory for each of `gpus` ranks: a node's, shared by those on it."""
        return self.cpu_bytes // min(gpus, self.gpus_per_node)

    def disk_bytes_per_rank(self, gpus: int) -> int:
        """Room on disk for each of `gpus` ranks: a node's, shared by those on it."""
        return (self.disk_bytes or 0) // min(gpus, self.gpus_per_node)

    def disk_seconds(self, nbytes: int, gpus: int) -> float:
        """For each of `gpus` ranks to read `nbytes` from its node's disks and write them back.

        Raises:
            ConfigError: the file does not say how fast the disks are.
        """
        if self.disk_read is None or self.disk_write is None:
            missing = [name for name in ("disk_read", "disk_write") if getattr(self, name) is None]
            raise ConfigError(f"hardware {self.name!r} lacks {', '.join(missing)}, which chunks on disk need")
        ranks = min(gpus, self.gpus_per_node)
        return ranks * nbytes * (1 / self.disk_read + 1 / self.disk_write) / _GIGA

    def gather_seconds(self, ranks: Sequence[int], nbytes: int, times: int = 1) -> float:
        """All-gathers, or reduce-scatters, of chunks over one process group: each rank sends what the others lack.

        Between nodes they go around a ring, on which every node passes on all that is not its own; the process groups
        of its other ranks do so too.

        Args:
            ranks: the global ranks.
            nbytes: bytes of the gathered chunks together.
            times: how many collectives they are.
        """
        wire = next((wire for wire in self.wires if wire.ranks == tuple(ranks)), None)
        if wire is not None:
            return times * wire.latency_us / 1e6 + nbytes / (wire.bandwidth * _GIGA)
        return self._moved_seconds(ranks, nbytes, nbytes)

    def exchange_seconds(self, ranks: Sequence[int], nbytes: int) -> float:
        """All-to-alls to which every rank gives `nbytes`, its own part included."""
        nodes = self._nodes(ranks)
        return self._moved_seconds(ranks, nbytes, nbytes * len(ranks) / nodes)

    def _moved_seconds(self, ranks: Sequence[int], nbytes: float, node_bytes: float) -> float:
        """Each rank sends (n - 1) / n of `nbytes` within its node, each of m nodes (m - 1) / m of `node_bytes` out."""
        nodes = self._nodes(ranks)
        members = len(ranks) // nodes
        within = across = 0.0
        if members > 1:
            bandwidth = self.links(members).b_g2g
            assert bandwidth is not None, "links() has b_g2g for every number but 1, up to a node's"
            within = nbytes * (members - 1) / (bandwidth * _GIGA)
        if nodes > 1:
            assert self.node_bandwidth is not None, "one node otherwise"
            alike = self.gpus_per_node / members
            across = node_bytes * (nodes - 1) / nodes * alike / (self.node_bandwidth * _GIGA)
        return max(within, across)

    def _nodes(self, ranks: Sequence[int]) -> int:
        """Nodes over which the ranks are spread."""
        return 1 if self.node_bandwidth is None else len({rank // self.gpus_per_node for rank in ranks})


def _part(data: Any, key: str) -> dict[str, Any]:
    part = data.get(key, {}) if isinstance(data, dict) else {}
    return part if isinstance(part, dict) else {}


def _wires(data: Any, problems: list[str]) -> Iterator[Wire]:
    listed = data.get("wires", []) if isinstance(data, dict) else []
    if not isinstance(listed, list):
        problems.append(f"wires (found {listed!r}, expected a list)")
        return
    for number, wire in enumerate(listed):
        found = _figures(wire, ("latency_us", "bandwidth"), f"wires.{number}.", problems)
        ranks = wire.get("ranks") if isinstance(wire, dict) else None
        if not isinstance(ranks, list) or not all(isinstance(rank, int) for rank in ranks):
            problems.append(f"wires.{number}.ranks (a list of ranks is expected)")
        elif len(found) == 2:
            yield Wire(ranks=tuple(ranks), **found)


def _unknown(data: Any, names: Collection[str], where: str) -> Iterator[str]:
    """What nobody would read, with the name that was meant perhaps."""
    for name in data if isinstance(data, dict) else ():
        if name not in names and not name.startswith("_"):  # those are notes
            near = get_close_matches(name, names, n=1)
            yield f"{where}{name} (unknown{f': did you mean {near[0]!r}?' if near else ''})"


def _figures(data: Any, names: Any, where: str, problems: list[str]) -> dict[str, float]:
    """The positive numbers under `names`; what is missing or no such number is added to `problems`."""
    found: dict[str, float] = {}
    for name in names:
        value = data.get(name) if isinstance(data, dict) else None
        if value is None:
            problems.append(f"{where}{name}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
            problems.append(f"{where}{name} (found {value!r}, expected a number above 0)")
        else:
            found[name] = value
    return found
