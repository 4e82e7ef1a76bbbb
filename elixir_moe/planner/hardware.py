"""The speed of a machine: figures from a file that ships with the package or that the user provides.

Owns `Hardware`, the format of its files and the messages about them. Never measures, which `measure` does.
Source of the format: Elixir v2, Tables 4 and 5. Bandwidths are in 1e9 bytes per second, for n GPUs together. Figures
with a default are optional in a file.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self

from elixir_moe.errors import ConfigError, unknown_name
from elixir_moe.records import ABOVE_0, Check, at_least, build

_GIGA = 1e9
ORIGINS = ("measured", "data sheet", "assumed", "given")
"""The origins of a figure; "given" figures come from the user."""
NARROW_UPDATE = 1.2
"""`Hardware.narrow_update` if it was not measured, for a bf16 master and moments of 8 bits: arithmetic bounds it, while
memory bounds an update in fp32."""
NARROW_UPDATE_ON_DEVICE = 44.0
"""`Hardware.narrow_update_on_device` if it was not measured: from the bytes that torch's operators move."""
_Origin = Annotated[str, Check(f"one of {', '.join(ORIGINS)}", ORIGINS.__contains__)]
_Name = Annotated[str, Check("the name of a figure", lambda name: name in _figures())]
_Speed = Annotated[float, ABOVE_0]
_Bytes = Check(f"bytes (64 GiB are {64 * 2**30})", lambda n: 2**20 <= n < 2**62)  # a smaller number is in another unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """The combined speed of n GPUs that work at the same time."""

    b_c2g: _Speed
    """Host to device, in 1e9 bytes per second."""
    b_g2c: _Speed
    """Device to host, in 1e9 bytes per second."""
    v_g: _Speed
    """Adam on the devices, in 1e9 parameters per second."""
    v_c: _Speed
    """Adam on the host, in 1e9 parameters per second."""
    b_g2g: Annotated[float | None, ABOVE_0] = None
    """Between devices, in 1e9 bytes per second; None for one GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """Measured speed of gathers and reductions over one process group."""

    ranks: tuple[int, ...]
    """Global ranks of the process group."""
    latency_us: _Speed
    """Fixed time of a collective, in microseconds."""
    bandwidth: _Speed
    """Bandwidth beyond that, in 1e9 bytes of gathered chunks per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """Four constants that no data sheet lists, fitted to a machine, or corrected by the steps of one model on it."""

    device_efficiency: _Speed
    """Fraction of the device's peaks that kernels reach, for matrix products and memory traffic alike."""
    exposed_collectives: _Speed
    """Fraction of the time of gathers and reductions that compute does not hide."""
    host_update_slowdown: _Speed
    """Time of an update in host memory within a step, relative to Adam by itself: unscaling, casts, page faults."""
    overhead_ns_per_parameter: _Speed
    """Nanoseconds of a step per gathered parameter, for any batch: launches, hooks, copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """A machine, or a cluster of equal ones."""

    name: str
    gpu_bytes: Annotated[int, _Bytes]
    """Memory of one GPU."""
    cpu_bytes: Annotated[int, _Bytes]
    """Host memory of one node."""
    gpus_per_node: Annotated[int, at_least(1)]
    peak_tflops: _Speed
    """Peak of one GPU's matrix products in the compute dtype, by its data sheet, in 1e12 operations per second."""
    memory_bandwidth: _Speed
    """Bandwidth of device memory of one GPU, by its data sheet, in 1e9 bytes per second."""
    fitted: Fitted
    by_gpus: Annotated[dict[Annotated[int, at_least(1)], Links], Check("figures for one number of GPUs or more", bool)]
    """{number of GPUs: their combined speed}."""
    node_bandwidth: Annotated[float | None, ABOVE_0] = None
    """Bandwidth of a node's network, each way, in 1e9 bytes per second; None if there is one node."""
    disk_bytes: Annotated[int | None, _Bytes] = None
    """Bytes for shards on a node's disks; None if there are none."""
    disk_read: Annotated[float | None, ABOVE_0] = None
    """Bandwidth of a node's disks, like `disk_write` in 1e9 bytes per second; None if unknown."""
    disk_write: Annotated[float | None, ABOVE_0] = None
    peer_to_peer: bool = True
    """Whether the GPUs of a node reach each other's memory. If not, gathers and reductions cross the host link both
    ways, in addition to fetches and offloads."""
    one_memory: bool = False
    """Whether GPU and host share one memory, so that the `gpu_bytes` of a node's GPUs add up to its `cpu_bytes`. State
    can then be offloaded only to a disk."""
    grouped_kernel: bool = False
    """Whether a fused kernel multiplies the rows of all experts at once, on NVIDIA's GPUs of compute capability 9 and
    10. More quantized experts are decoded at a time for it."""
    unit_us: _Speed = 60.0
    """Host time that a unit adds to a forward and its backward, in microseconds: hooks, and requests to the rCache."""
    narrow_update: _Speed = NARROW_UPDATE
    """Time of an update on the host whose master or moments have fewer bytes than fp32, relative to one in fp32."""
    narrow_update_on_device: _Speed = NARROW_UPDATE_ON_DEVICE
    """`narrow_update` on the device, where the update is made of torch's operators, unless the device is the CPU."""
    wires: tuple[Wire, ...] = ()
    """Single process groups that were measured, whose figures go before those of `by_gpus`."""
    origins: Mapping[_Name, _Origin] = field(default_factory=dict)
    """{name of a figure: one of `ORIGINS`}; unknown for figures that are not listed."""
    mean_error: Annotated[float | None, ABOVE_0] = None
    """Mean relative error of predicted steps against steps measured on this machine; None if none was measured."""

    def of_origin(self, origin: str) -> list[str]:
        """Returns the names of the figures with this origin."""
        return [name for name, found in self.origins.items() if found == origin]

    @classmethod
    def named(cls, name: str) -> Self:
        """Returns a machine that ships with the package, or the one in the file at this path.

        Raises:
            ConfigError: neither exists (the nearest name is suggested), or the file is invalid.
        """
        folder = resources.files("elixir_moe.planner").joinpath("machines")
        known = sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))
        if name in known:
            return cls.parse(folder.joinpath(f"{name}.json").read_text(encoding="utf-8"), name)
        path = Path(os.path.expanduser(name))
        if path.is_file():
            try:
                return cls.parse(path.read_text(encoding="utf-8"), name)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"hardware {name!r} cannot be read: {error}") from error
        raise unknown_name("hardware or file", name, known)

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """Reads the JSON of a hardware file. Raises ConfigError that names all figures that are missing or wrong."""
        try:
            data = json.loads(text, parse_float=_number)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"hardware {name!r} is not valid JSON: {error}") from error
        found = build(
            cls,
            _without_notes(data),
            noun="figure",
            error=lambda text: ConfigError(f"hardware {name!r}: {text}"),
            name=name,
        )
        lacks = [f"by_gpus.{n}.b_g2g" for n, links in found.by_gpus.items() if n > 1 and links.b_g2g is None]
        if found.disk_bytes is not None:
            lacks += [key for key in ("disk_read", "disk_write") if getattr(found, key) is None]
        if lacks:
            raise ConfigError(f"hardware {name!r}: {' and '.join(lacks)} {'are' if len(lacks) > 1 else 'is'} missing")
        if found.node_bandwidth is None and max(found.by_gpus) > found.gpus_per_node:
            raise ConfigError(
                f"hardware {name!r}: by_gpus has figures for {max(found.by_gpus)} GPUs, but gpus_per_node is "
                f"{found.gpus_per_node}: raise gpus_per_node, or give node_bandwidth"
            )
        if found.one_memory and found.cpu_bytes != found.gpus_per_node * found.gpu_bytes:
            raise ConfigError(
                f"hardware {name!r}: with one_memory, cpu_bytes must be gpus_per_node x gpu_bytes = "
                f"{found.gpus_per_node * found.gpu_bytes}, got {found.cpu_bytes}"
            )
        return replace(found, by_gpus=dict(sorted(found.by_gpus.items())))

    def to_json(self) -> str:
        """Writes the machine as JSON that `parse` reads."""
        figures = {key: value for key, value in asdict(self).items() if key != "name" and value is not None}
        for links in figures["by_gpus"].values():
            if links["b_g2g"] is None:
                del links["b_g2g"]
        return json.dumps(figures, indent=2)

    def links(self, gpus: int) -> Links:
        """Returns the figures for `gpus` GPUs: from the file, or interpolated linearly between two entries of it.

        Figures of n whole nodes are n times those of one node; traffic between nodes is left to `node_bandwidth`.

        Raises:
            ConfigError: the file has no figures for this number of GPUs.
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
                f"{', '.join(map(str, self.by_gpus))} GPUs{self._of_nodes()}"
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

    def _of_nodes(self) -> str:
        """The end of a message about a number of GPUs that is too large for the file."""
        if self.node_bandwidth is not None:
            return f" and for whole nodes, multiples of {self.gpus_per_node}"
        return "; more nodes need node_bandwidth, which --gpu has for the GPUs of data centers"

    def host_bytes_per_rank(self, gpus: int) -> int:
        """Host memory of each of `gpus` ranks: the memory of a node, divided among the ranks on it."""
        return self.cpu_bytes // min(gpus, self.gpus_per_node)

    def disk_bytes_per_rank(self, gpus: int) -> int:
        """Disk space of each of `gpus` ranks: the space of a node, divided among the ranks on it."""
        return (self.disk_bytes or 0) // min(gpus, self.gpus_per_node)

    def disk_seconds(self, read: int, written: int, gpus: int) -> float:
        """Time for each rank to read and write bytes of its node's disks. Raises ConfigError without their speeds."""
        if self.disk_read is None or self.disk_write is None:
            missing = [name for name in ("disk_read", "disk_write") if getattr(self, name) is None]
            raise ConfigError(f"hardware {self.name!r} lacks {', '.join(missing)}, which chunks on disk need")
        ranks = min(gpus, self.gpus_per_node)
        return ranks * (read / self.disk_read + written / self.disk_write) / _GIGA

    def gather_seconds(self, ranks: Sequence[int], nbytes: int, times: float = 1) -> float:
        """Time of so many `times` an all-gather, or reduce-scatter, of `nbytes` of gathered chunks over global `ranks`.

        Between nodes, data moves around a ring on which each node forwards all but its own part; the process groups of
        the node's other ranks share the network.
        """
        wire = next((wire for wire in self.wires if wire.ranks == tuple(ranks)), None)
        if wire is not None:
            return times * wire.latency_us / 1e6 + nbytes / (wire.bandwidth * _GIGA)
        return self._moved_seconds(ranks, nbytes, nbytes)

    def exchange_seconds(self, ranks: Sequence[int], nbytes: int) -> float:
        """Time of all-to-alls with `nbytes` from every rank, its own part included."""
        nodes = self._nodes(ranks)
        return self._moved_seconds(ranks, nbytes, nbytes * len(ranks) / nodes)

    def _moved_seconds(self, ranks: Sequence[int], nbytes: float, node_bytes: float) -> float:
        """Each rank sends (n - 1) / n of `nbytes` within its node, each of m nodes (m - 1) / m of `node_bytes` out."""
        nodes = self._nodes(ranks)
        members = len(ranks) // nodes
        within = across = 0.0
        if members > 1:
            bandwidth = self.links(members).b_g2g
            assert bandwidth is not None, "links() has b_g2g for every number of GPUs from 2 to a node's"
            within = nbytes * (members - 1) / (bandwidth * _GIGA)
        if nodes > 1:
            assert self.node_bandwidth is not None, "without it there is one node"
            alike = self.gpus_per_node / members
            across = node_bytes * (nodes - 1) / nodes * alike / (self.node_bandwidth * _GIGA)
        return max(within, across)

    def _nodes(self, ranks: Sequence[int]) -> int:
        """The number of nodes that the ranks span."""
        return 1 if self.node_bandwidth is None else len({rank // self.gpus_per_node for rank in ranks})


def _figures() -> set[str]:
    return {*Hardware.__dataclass_fields__, *Links.__dataclass_fields__}


def _without_notes(data: Any) -> Any:
    """Returns plain data without keys that begin with an underscore."""
    if not isinstance(data, dict):
        return data
    return {key: _without_notes(value) for key, value in data.items() if not key.startswith("_")}


def _number(text: str) -> int | float:
    """Converts a JSON number with a point or an exponent; to an int if it is whole, like 64e9."""
    number = float(text)
    return int(number) if number.is_integer() else number
