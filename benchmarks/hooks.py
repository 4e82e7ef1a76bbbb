"""What hooks cost the host: the CPU time of forward and backward of one small unit, beside plain torch.

Owns this measurement and its rows. The units are so small that kernels take no time, and only the thread that runs the
model is timed: other ranks and the threads of gloo do not count. A row's `ours` less the peer's is what this library
adds to each unit.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from benchmarks.contenders import LEARNING_RATE
from benchmarks.measure import in_turn
from benchmarks.report import race_row
from benchmarks.workload import SEED

_WIDTH = 16
"""All parameters then end on a cache line, and a unit fills its chunk."""
_UNITS = 32
_STEPS = 5
"""In a round."""


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.second = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.norm(x)))


def _unit() -> nn.Module:
    """A block of 12 parameters, as many as a transformer's."""
    return nn.Sequential(_Half(), _Half())


class _Model(nn.Module):
    def __init__(self, units: int, *, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.units = nn.ModuleList(_unit() for _ in range(units))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=False) if self.checkpointed else unit(x)
        return x


_UNIT_NUMEL = sum(p.numel() for p in _unit().parameters())
_PLANS = {
    "zero2": (em.Plan.zero2(chunk_numel=_UNIT_NUMEL), False),
    "zero3, 3 blocks": (em.Plan.zero3(rcache_blocks=3, chunk_numel=_UNIT_NUMEL), False),
    "offload, 3 blocks": (em.Plan.offload(rcache_blocks=3, chunk_numel=_UNIT_NUMEL), False),
    "zero3, 3 blocks, checkpointed": (em.Plan.zero3(rcache_blocks=3, chunk_numel=_UNIT_NUMEL), True),
}
"""By name: the plan, and whether each unit is checkpointed."""
ROWS = tuple(f"hooks of a unit: {name}" for name in _PLANS)
_PARTS = ("forward", "backward")


def rows(name: str, quick: bool, _: Any, rounds: int) -> list[dict[str, Any]]:
    """The rows called `name`, one for forward and one for backward. Collective."""
    plan, checkpointed = _PLANS[name.split(": ")[1]]
    units = 4 if quick else _UNITS
    mine, theirs = (_Model(units, checkpointed=checkpointed) for _ in range(2))
    mine, optimizer = em.wrap(mine, torch.optim.AdamW(mine.parameters(), lr=LEARNING_RATE), plan=plan)
    found = []
    for part, peer in enumerate(_PARTS):
        what = {"name": name, "peer": f"plain torch, {peer}", "workload": f"{units} units of {_UNIT_NUMEL} parameters"}
        theirs_step = torch.optim.AdamW(theirs.parameters(), lr=LEARNING_RATE)
        times = in_turn(_seconds(mine, optimizer, part), _seconds(theirs, theirs_step, part), rounds)
        per_unit = [(mine / units, theirs / units) for mine, theirs in times]
        found.append(race_row(what | {"ranks": dist.get_world_size(), "limit": None}, per_unit, "us"))
    optimizer.close()
    return found


def _seconds(model: nn.Module, optimizer: torch.optim.Optimizer, part: int) -> Callable[[int], float]:
    """CPU seconds of this thread for that part of a step, the median of a round's steps."""

    def timed(_: int) -> float:
        found = []
        for _ in range(_STEPS):
            x = torch.ones(2, _WIDTH, requires_grad=True)
            marks = [time.thread_time()]
            loss = model(x).sum()
            marks.append(time.thread_time())
            loss.backward()
            marks.append(time.thread_time())
            optimizer.step()
            optimizer.zero_grad()
            found.append(marks[part + 1] - marks[part])
        return sorted(found)[_STEPS // 2]

    return timed
