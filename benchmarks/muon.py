"""The step of Muon against AdamW's on the same model, and against torch's own; the bytes of state of both.

Owns these measurements and their rows. Muon trains the matrices of blocks, and AdamW the rest. A rank with torch's own
optimizers updates the whole model, as under DDP.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from benchmarks.measure import in_turn, slowest
from benchmarks.report import race_row
from benchmarks.workload import SEED, Workload, fresh_model
from elixir_moe.ext.optimizers import matrices_of_layers
from elixir_tools.models.gpt import lm_loss

PLANS = {"zero2": em.Plan.zero2(), "offload": em.Plan.offload()}
STEP_ROWS = {f"step of Muon, {name}": plan for name, plan in PLANS.items()}
BYTES_LIMIT = 0.85
"""Two thirds of fp32 state where Muon trains everything; embeddings keep AdamW's."""


def _optimizers(model: nn.Module, *, muon: bool) -> list[torch.optim.Optimizer]:
    matrices = dict.fromkeys(matrices_of_layers(model).values() if muon else ())
    rest = [p for p in model.parameters() if p not in matrices]
    adamw = torch.optim.AdamW(rest, lr=1e-4, fused=True)
    return [torch.optim.Muon(matrices, lr=1e-3), adamw] if muon else [adamw]


class _Plain:
    """A model that torch's own Muon and AdamW train in this process."""

    def __init__(self, workload: Workload) -> None:
        self._model = fresh_model(workload.model)
        self._optimizers = _optimizers(self._model, muon=True)
        for parameter in self._model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)

    def step(self) -> float:
        """The seconds of the steps of both optimizers on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        for optimizer in self._optimizers:
            optimizer.step()
        return slowest(time.perf_counter() - start)


class _Trained:
    """A wrapped model and its optimizer; `step` takes only the optimizer's time."""

    def __init__(self, workload: Workload, plan: em.Plan, *, muon: bool) -> None:
        model = fresh_model(workload.model)
        optimizers = _optimizers(model, muon=muon)
        self.model, self.optimizer = em.wrap(model, optimizers, plan=plan)
        shape = workload.batch, workload.model.seq_len + 1
        self._batch = torch.randint(
            workload.model.vocab_size, shape, generator=torch.Generator().manual_seed(SEED + dist.get_rank())
        )

    def step(self) -> float:
        """The seconds of `optimizer.step` on the slowest rank, with updates that it leaves to the next forward."""
        lm_loss(self.model, self._batch).backward()
        self.optimizer.clip_grad_norm_(1.0)
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.step()
        for chunk in self.model._elixir.scheduler.chunks:  # type: ignore[union-attr]
            chunk.shard.finish_update()
        return slowest(time.perf_counter() - start)

    @property
    def state_bytes(self) -> int:
        """Bytes of values, masters and moments on this rank."""
        return sum(em.inspect(self.model).footprint.shard_bytes.values())


def rows(name: str, _: bool, workload: Workload, rounds: int) -> list[dict[str, Any]]:
    """The rows under one plan: the step, and the bytes of state."""
    ours, theirs = (_Trained(workload, STEP_ROWS[name], muon=muon) for muon in (True, False))
    for trained in (ours, theirs):  # warms up
        trained.step()
    times = in_turn(lambda _: ours.step(), lambda _: theirs.step(), rounds)
    plain = _Plain(workload)
    to_torch = in_turn(lambda _: ours.step(), lambda _: plain.step(), rounds)
    held = float(ours.state_bytes), float(theirs.state_bytes)
    ours.optimizer.close()
    theirs.optimizer.close()
    what = {"peer": "AdamW", "workload": workload.name, "ranks": dist.get_world_size()}
    return [
        race_row({"name": name, **what, "limit": None}, times),
        race_row({"name": name, **what, "peer": "torch's Muon on each rank", "limit": None}, to_torch),
        race_row({"name": f"{name}: bytes of state", **what, "limit": BYTES_LIMIT}, [held], "bytes"),
    ]
