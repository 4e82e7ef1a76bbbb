"""The cost of hooks: CPU time of forward and backward of one small unit, compared with plain torch and FSDP2.

Owns this measurement and its rows. The units are so small that kernels take no time, and only the thread that runs the
model is timed: other ranks and the threads of gloo do not count. A row's `ours` less that of plain torch is what this
library adds to each unit, and FSDP2's less that of plain torch what `fully_shard` adds to it. gloo itself takes a part
of that: the peer "plain torch and gloo" sends as many messages of the same bytes and does nothing else, so `ours` less
that peer is what the library's own work costs. Calls of Python are counted too, which a busy machine does not change.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
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
_FSDP = {"zero2": False, "zero3, 3 blocks": True}
"""For the plans that FSDP2 has too: whether it reshards a unit after forward."""
_IN_BACKWARD = {"zero2": 1, "zero3, 3 blocks": 2, "offload, 3 blocks": 2, "zero3, 3 blocks, checkpointed": 1}
"""Collectives of a unit behind its forward, which runs again if it is checkpointed."""
ROWS = tuple(f"hooks of a unit: {name}" for name in _PLANS)
_PARTS = ("forward", "backward")


def rows(name: str, quick: bool, _: Any, rounds: int) -> list[dict[str, Any]]:
    """The rows called `name`: time and calls of forward and of backward, compared with each peer. Collective."""
    key = name.split(": ")[1]
    plan, checkpointed = _PLANS[key]
    units = 4 if quick else _UNITS
    mine = _Model(units, checkpointed=checkpointed)
    mine, optimizer = em.wrap(mine, torch.optim.AdamW(mine.parameters(), lr=LEARNING_RATE), plan=plan)
    peers = {"plain torch": _Model(units, checkpointed=checkpointed)}
    peers["plain torch and gloo"] = _with_messages(_Model(units, checkpointed=checkpointed), _IN_BACKWARD[key])
    if key in _FSDP:
        peers["FSDP2"] = _fsdp(_Model(units, checkpointed=checkpointed), reshard_after_forward=_FSDP[key])
    found = []
    for peer, theirs in peers.items():
        theirs_step = torch.optim.AdamW(theirs.parameters(), lr=LEARNING_RATE)
        for unit, read in (("us", time.thread_time), ("calls", _calls)):
            for part, shown in enumerate(_PARTS):
                workload = f"{units} units of {_UNIT_NUMEL} parameters"
                what = {"name": name, "peer": f"{peer}, {shown}", "workload": workload}
                measured = in_turn(_cost(mine, optimizer, part, read), _cost(theirs, theirs_step, part, read), rounds)
                per_unit = [(mine / units, theirs / units) for mine, theirs in measured]
                found.append(race_row(what | {"ranks": dist.get_world_size(), "limit": None}, per_unit, unit))
    optimizer.close()
    return found


def _fsdp(model: _Model, *, reshard_after_forward: bool) -> nn.Module:
    """Each unit sharded by itself; the model around them has no parameters of its own."""
    mesh = em.init_mesh(device_type="cpu")["dp"]
    for unit in model.units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return fully_shard(model, mesh=mesh)


def _with_messages(model: _Model, in_backward: int) -> _Model:
    """Each unit waits for one exchange of half its bytes between two ranks in forward, and for some in backward."""
    rank, halves = dist.get_rank(), torch.zeros(2, _UNIT_NUMEL // 2)
    group = dist.new_group()

    def exchange(times: int) -> None:
        for _ in range(times):
            works = [
                dist.irecv(halves[1 - rank], group=group, group_src=1 - rank),
                dist.isend(halves[rank], group=group, group_dst=1 - rank),
            ]
            for work in works:
                work.wait()

    def behind(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(lambda _: exchange(in_backward))

    for unit in model.units:
        unit.register_forward_pre_hook(lambda *_: exchange(1))
        unit.register_forward_hook(behind)
    return model


def _cost(
    model: nn.Module, optimizer: torch.optim.Optimizer, part: int, read: Callable[[], float]
) -> Callable[[int], float]:
    """How far `read` advances in that part of a step, the least of a round's steps."""

    def measured(_: int) -> float:
        found = []
        for _ in range(_STEPS):
            x = torch.ones(2, _WIDTH, requires_grad=True)
            with _counting() if read is _calls else nullcontext():
                marks = [read()]
                loss = model(x).sum()
                marks.append(read())
                loss.backward()
                marks.append(read())
            optimizer.step()
            optimizer.zero_grad()
            found.append(marks[part + 1] - marks[part])
        return min(found)

    return measured


_counted = [0]


def _calls() -> float:
    """Calls of functions of Python, and by them of functions of C, that this thread has made while `_counting`."""
    return _counted[0]


@contextmanager
def _counting() -> Iterator[None]:
    def count(_: FrameType, event: str, __: Any) -> None:
        _counted[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
