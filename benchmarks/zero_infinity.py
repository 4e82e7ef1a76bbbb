"""ZeRO-Infinity's estimates: memory and bandwidth of massive models, and the figures that the paper prints.

Owns the formulas of sections 3 and 4 (equations 1 to 4), the tables made of them, and the paper's figures
(`zero_infinity.json`). Pure arithmetic; knows no model and no plan of this library.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

States = Literal["gradients", "optimizer", "checkpoints"]
"""The data that moves: parameters and gradients, optimizer states, or activation checkpoints."""
Row = dict[str, Any]
_KIBI, _TEBI, _GIBI = 2**10, 2**40, 2**30
SEQ = 1024
"""Tokens of a sequence in all of the paper's figures."""
PEAK = 70e12
"""Operations a second that a V100 reaches without communication (4.2)."""
_SIZES = {2 * _KIBI: "2K", 8 * _KIBI: "8K", 16 * _KIBI: "16K", 32 * _KIBI: "32K", 64 * _KIBI: "64K"}
BATCHES, HIDDEN = (1, 2, 4, 8, 16), tuple(_SIZES)
"""The curves of Figure 3: batch sizes of a GPU, and hidden sizes."""
BANDWIDTHS: dict[States, tuple[float, ...]] = {
    "gradients": (1, 5, 10, 30, 70, 100, 300, 1000),
    "optimizer": (10, 30, 100, 280, 500, 1000, 1500, 5000),
    "checkpoints": (0.1, 0.3, 0.5, 1, 2, 3, 10, 30),
}
"""Bandwidths at which `figure-3` is printed, in 1e9 bytes a second; the paper's are in its pictures only."""
FORMULAS: dict[States, str] = {
    "gradients": "seq * bsz",
    "optimizer": "seq * bsz / 4",
    "checkpoints": "24 * hd * ci",
}
"""The paper's results of section 4.1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A GPT-3-like model as ZeRO-Infinity counts it."""

    layers: int
    hidden: int
    heads: int
    checkpoint_interval: int = 1
    """ci: Transformer blocks between two activation checkpoints."""

    @property
    def parameters(self) -> int:
        """12 · nl · hd²."""
        return 12 * self.layers * self.hidden**2

    @property
    def model_state_bytes(self) -> int:
        """Mixed-precision Adam, 20 bytes a parameter."""
        return 20 * self.parameters

    def activation_bytes(self, batch: int, seq: int) -> int:
        """All activations of all blocks: `working_activation_bytes` counts one per element, this 2 bytes."""
        return 2 * self.layers * self.working_activation_bytes(batch, seq) // self.checkpoint_interval

    def checkpoint_bytes(self, batch: int, seq: int) -> int:
        """Equation 1: 2 · bsz · seq · hd · nl / ci."""
        return 2 * batch * seq * self.hidden * self.layers // self.checkpoint_interval

    def working_state_bytes(self) -> int:
        """Parameter and gradient of the largest operator, from hd to 4 hd: 4 · hd · 4 hd."""
        return 4 * self.hidden * 4 * self.hidden

    def working_activation_bytes(self, batch: int, seq: int) -> int:
        """Activations between two checkpoints: bsz · seq · ci · (16 · hd + 2 · heads · seq)."""
        return batch * seq * self.checkpoint_interval * (16 * self.hidden + 2 * self.heads * seq)

    def step_operations(self, batch: int, seq: int) -> int:
        """Equation 3, of forward, backward and recomputation: 2 · 4 · bsz · seq · parameters."""
        return 2 * 4 * batch * seq * self.parameters

    def moved_bytes(self, states: States, batch: int, seq: int) -> int:
        """Bytes of `states` that a step moves (4.1).

        Parameters are loaded in forward, backward and recomputation and gradients stored, 2 bytes each; optimizer
        states of 16 bytes a parameter are read and written, and so are activation checkpoints.
        """
        if states == "gradients":
            return 2 * 4 * self.parameters
        return 2 * (16 * self.parameters if states == "optimizer" else self.checkpoint_bytes(batch, seq))

    def intensity(self, states: States, batch: int, seq: int) -> float:
        """ait: operations of a step for each byte of `states` that it moves."""
        return self.step_operations(batch, seq) / self.moved_bytes(states, batch, seq)


_MODELS = (
    Transformer(layers=80, hidden=10 * _KIBI, heads=128),
    Transformer(layers=100, hidden=20 * _KIBI, heads=160),
    Transformer(layers=128, hidden=25 * _KIBI, heads=256),
    Transformer(layers=195, hidden=64 * _KIBI, heads=512),
    Transformer(layers=315, hidden=160 * _KIBI, heads=1024),
)
"""The models of Figure 2a."""
_TRILLION = _MODELS[2]


def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """Equation 2: ait · bw / (ait · bw + peak), in operations per byte, bytes per second and operations per second."""
    return ait * bandwidth / (ait * bandwidth + peak)


def bandwidth_for(share: float, ait: float, peak: float) -> float:
    """Equation 2 solved for the bandwidth at which the efficiency is `share`."""
    return share / (1 - share) * peak / ait


def curve(states: States, case: int, bandwidth: float) -> float:
    """A point of Figure 3: efficiency at `bandwidth` bytes a second.

    Args:
        states: what moves.
        case: the batch of a GPU, or for activation checkpoints the hidden size; the other makes no difference.
        bandwidth: in bytes a second.
    """
    hidden, batch = (case, 1) if states == "checkpoints" else (8 * _KIBI, case)
    return efficiency(Transformer(layers=1, hidden=hidden, heads=1).intensity(states, batch, SEQ), bandwidth, PEAK)


def printed(table: str) -> list[Row]:
    """The rows that the paper prints, as text where it prints a figure."""
    rows: list[Row] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))[table]
    return rows


def rows_of(table: str) -> list[Row]:
    """The rows of one of `TABLES`. What the paper prints of a row is under "printed", where it is not what the formula
    gives the reason is under "departs"; facts about machines are the paper's."""
    return list(TABLES[table]())


def _beside(table: str, computed: Iterator[Row]) -> Iterator[Row]:
    for mine, theirs in zip(computed, printed(table), strict=True):
        figures = {name: text for name, text in theirs.items() if isinstance(mine.get(name), float)}
        given = {name: text for name, text in theirs.items() if name not in mine and name != "_departs"}
        yield mine | given | {"printed": figures, "departs": theirs.get("_departs", {})}


def _figure_2a() -> Iterator[Row]:
    """Batch 32 per node, 4 per GPU; TB and GB are binary units."""
    node, gpu = 32, 4
    for model in _MODELS:
        yield {
            "parameters_trillion": model.parameters / 1e12,
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "model_states_tb": model.model_state_bytes / _TEBI,
            "activations_tb": model.activation_bytes(node, SEQ) / _TEBI,
            "checkpoints_tb": model.checkpoint_bytes(node, SEQ) / _TEBI,
            "working_state_gb": model.working_state_bytes() / _GIBI,
            "working_activations_gb": model.working_activation_bytes(gpu, SEQ) / _GIBI,
        }


def _figure_2b() -> Iterator[Row]:
    """A DGX-2 has 16 GPUs of 32 GB, 1.5 TB of host memory and 28 TB of NVMe. All GPUs of a node read 48 GB/s from the
    host and 25 GB/s from NVMe together (6.1), and one GPU at most 12 GB/s (5.2.1)."""
    for nodes, gpus in ((1, 1), (1, 16), (4, 64), (16, 256), (64, 1024), (96, 1536)):
        each = gpus // nodes
        yield {
            "nodes": nodes,
            "gpus": gpus,
            "gpu_tb": gpus * 32 / _KIBI,
            "cpu_tb": nodes * 1.5,
            "nvme_tb": nodes * 28.0,
            "cpu_gb_s": min(12.0, 48 / each),
            "nvme_gb_s": min(12.0, 25 / each),
        }


def _intensities() -> Iterator[Row]:
    """Section 4.1 on a model of a trillion parameters, for batches of a GPU, and on others for hidden sizes."""
    kinds: tuple[States, ...] = ("gradients", "optimizer")
    cases: list[tuple[States, int, Transformer]] = [(states, batch, _TRILLION) for states in kinds for batch in BATCHES]
    cases += [("checkpoints", 1, Transformer(layers=128, hidden=hidden, heads=256)) for hidden in HIDDEN]
    for states, batch, model in cases:
        yield {
            "states": states,
            "batch": batch,
            "hidden": model.hidden,
            "operations": model.step_operations(batch, SEQ),
            "moved_bytes": model.moved_bytes(states, batch, SEQ),
            "ait": model.intensity(states, batch, SEQ),
            "formula": FORMULAS[states],
        }


def cases_of(states: States) -> dict[str, int]:
    """{name: batch or hidden size} of the curves in one panel of Figure 3."""
    if states == "checkpoints":
        return {f"hd_{name}": hidden for hidden, name in _SIZES.items()}
    return {f"batch_{batch}": batch for batch in BATCHES}


def _figure_3() -> Iterator[Row]:
    """The curves at some bandwidths, then what the text says of them."""
    for states, bandwidths in BANDWIDTHS.items():
        for gb_s in bandwidths:
            points = {name: curve(states, case, gb_s * 1e9) for name, case in cases_of(states).items()}
            yield {"states": states, "gb_s": gb_s, **points}
    for claim in printed("figure-3"):
        case = claim.get("batch") or claim["hidden"]
        value = curve(claim["states"], case, claim["gb_s"] * 1e9)
        yield {
            "states": claim["states"],
            "gb_s": claim["gb_s"],
            "batch or hd": case,
            "efficiency": value,
            "at_least": claim["at_least"],
            "where": claim["where"],
        }


def _table_3() -> Iterator[Row]:
    """The bandwidths at which a device of more compute is as efficient as a V100 with 3 GB/s of slow memory, 512 of
    them, and 70 GB/s between GPUs (5.2); the efficiencies are those of batch 2 and 1."""
    devices, slow, gpu = 512, 3e9, 70e9
    optimizer, gradients = _TRILLION.intensity("optimizer", 2, SEQ), _TRILLION.intensity("gradients", 1, SEQ)
    shares = efficiency(optimizer, devices * slow, PEAK), efficiency(gradients, gpu, PEAK)
    for compute in (1, 10, 100):
        peak = compute * PEAK
        all_slow = bandwidth_for(shares[0], optimizer, peak)
        yield {
            "compute": compute,
            "devices": devices,
            "pflops": peak / 1e15,
            "slow_gb_s": all_slow / devices / 1e9,
            "slow_tb_s": all_slow / 1e9 / _KIBI,
            "gpu_gpu_gb_s": bandwidth_for(shares[1], gradients, peak) / 1e9,
            "update_efficiency": shares[0],
            "gradient_efficiency": shares[1],
        }


def _table_4() -> Iterator[Row]:
    """Models with all states on NVMe and checkpoints in host memory, on 512 GPUs (section 7, and Table 1): what each of
    the three costs of the efficiency, and the TFLOPS of a GPU: the least with a peak of 62, the most with one of 78 and
    overlap, which gives up to 1.3 times."""
    gpu, nvme, host = 70e9, 512 * 1.6e9, 3e9
    for name, layers, hidden, batch in (("5T", 174, 48, 3), ("10T", 200, 64, 2), ("20T", 205, 88, 1.25)):
        model = Transformer(layers=layers, hidden=hidden * _KIBI, heads=1)
        # batches come in quarters
        of_four = {states: model.intensity(states, int(4 * batch), SEQ) / 4 for states in ("gradients", "optimizer")}
        lost = {
            "gradients_lost": 1 - efficiency(of_four["gradients"], gpu, PEAK),
            "optimizer_lost": 1 - efficiency(of_four["optimizer"], nvme, PEAK),
            "checkpoints_lost": 1 - efficiency(model.intensity("checkpoints", 1, SEQ), host, PEAK),
        }
        share = 1 - sum(lost.values())
        yield {"model": name, **lost, "efficiency": share, "min_tflops": 62 * share, "max_tflops": 78 * 1.3 * share}


def _text() -> Iterator[Row]:
    """Sections 7.2 to 7.6, from other figures of the paper."""
    for figure in (32 / 0.65, 20 / 0.5, 49 / 125, 49 / 70, 64 * 44 / 1e3, 13 / 1.4, 1000 / 1.4, 512 * 1.6, 0.7 * 100):
        yield {"figure": figure}


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "figure-2a": lambda: _beside("figure-2a", _figure_2a()),
    "figure-2b": lambda: _beside("figure-2b", _figure_2b()),
    "intensities": _intensities,
    "figure-3": _figure_3,
    "table-3": lambda: _beside("table-3", _table_3()),
    "table-4": lambda: _beside("table-4", _table_4()),
    "text": lambda: _beside("text", _text()),
}
"""The tables that `python -m benchmarks.paper_zero_infinity` prints, by name."""
