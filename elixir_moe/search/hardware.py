"""How fast a machine is: figures read from a file that ships with the package or that the user gives.

Owns `Hardware`, the format of its files and the messages about them. Measures nothing itself.
Source of the format: Elixir v2, Tables 4 and 5. Bandwidths are 1e9 bytes a second, and those of the n GPUs together.
"""

import json
import math
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, Self

from elixir_moe.errors import ConfigError

_GIGA = 1e9


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
            return cls.parse(path.read_text(encoding="utf-8"), name)
        near = get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"no hardware is called {name!r} and no such file exists{hint} There are: {', '.join(known)}")

    @classmethod
    def parse(cls, text: str, name: str) -> Self:
        """From the JSON of a hardware file. Raises ConfigError, which names every figure that is missing or wrong."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"hardware {name!r} is not valid JSON: {error}") from error
        problems: list[str] = []
        plain = _figures(
            data, ("gpu_bytes", "cpu_bytes", "gpus_per_node", "peak_tflops", "memory_bandwidth"), "", problems
        )
        fitted = _figures(_part(data, "fitted"), Fitted.__dataclass_fields__, "fitted.", problems)
        links: dict[int, Links] = {}
        for gpus, figures in _part(data, "by_gpus").items():
            needed = [f for f in Links.__dataclass_fields__ if f != "b_g2g" or gpus != "1"]
            found = _figures(figures, needed, f"by_gpus.{gpus}.", problems)
            if not str(gpus).isdecimal() or int(gpus) < 1:
                problems.append(f"by_gpus.{gpus} (a number of GPUs is expected)")
            elif len(found) == len(needed):
                links[int(gpus)] = Links(**found)
        if not links and not problems:
            problems.append("by_gpus.1")
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
        )

    def links(self, gpus: int) -> Links:
        """The figures for `gpus` GPUs: those of the file, or, between two of the file, on the line through them.

        Raises:
            ConfigError: the file has none for that many.
        """
        if gpus in self.by_gpus:
            return self.by_gpus[gpus]
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

    def collective_seconds(self, nbytes: int, ranks: int) -> float:
        """An all-gather or reduce-scatter of `nbytes` over `ranks`: each sends what the others lack."""
        if ranks == 1:
            return 0.0
        bandwidth = self.links(ranks).b_g2g
        assert bandwidth is not None, "links() has b_g2g for every number but 1"
        return nbytes * (ranks - 1) / (bandwidth * _GIGA)


def _part(data: Any, key: str) -> dict[str, Any]:
    part = data.get(key, {}) if isinstance(data, dict) else {}
    return part if isinstance(part, dict) else {}


def _figures(data: Any, names: Any, where: str, problems: list[str]) -> dict[str, float]:
    """The positive numbers under `names`; what is missing or no such number is added to `problems`."""
    found: dict[str, float] = {}
    for name in names:
        value = data.get(name) if isinstance(data, dict) else None
        if value is None:
            problems.append(f"{where}{name}")
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            problems.append(f"{where}{name} (found {value!r}, expected a number above 0)")
        else:
            found[name] = value
    return found
