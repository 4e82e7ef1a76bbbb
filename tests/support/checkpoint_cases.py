"""Trainings that are saved and go on elsewhere: what every rank of a pool runs.

A small GPT of dense and mixture layers, trained on tokens that depend on the step alone. All layouts of it start from
the same weights, so a checkpoint of one can be loaded by any other.
"""

import gc
import math
import os
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.state.checkpoint import save as save_module
from elixir_moe.state.checkpoint.load import load
from elixir_moe.state.checkpoint.save import save
from elixir_moe.state.checkpoint.storage import read_manifest, verify
from elixir_moe.state.checkpoint.tensors import FileImage
from elixir_moe.state.checkpoint.whole import Whole
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.support.cases import placed
from tests.support.every import same_tensors
from tests.support.parity import make_optimizer, mesh_of_world, tokens

ROWS = 4
PATIENCE_SECONDS = 60
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(),
    "zero3": em.Plan.zero3(rcache_blocks=4, chunk_numel=2500),
    "offload": em.Plan.offload(rcache_blocks=6, device_chunks=1, chunk_numel=4096),
    "disk": em.Plan.offload(rcache_blocks=6, disk_chunks=3, chunk_numel=4096),
}


def config(ep: int, dropout: float = 0.0) -> GPTConfig:
    return GPTConfig(
        vocab_size=29,
        seq_len=8,
        n_layers=2,
        d_model=16,
        n_heads=2,
        mlp_ratio=2,
        experts=(0, 4),
        ep=(1, ep),
        residual=True,
        dropout=dropout,
        tie_embeddings=True,
    )


class Run:
    """A model and an optimizer with an LR schedule, between two steps."""

    def __init__(self, ep: int, plan: str, *, dropout: float = 0.0, clip: float | None = None, **options: Any) -> None:
        self.config, self.clip, self.step = config(ep, dropout), clip, 0
        torch.manual_seed(5)
        model = GPT(self.config, mesh_of_world())
        model.positions.weight.requires_grad_(False)
        em.annotate(model, gpt_patterns(model))
        options |= {"plan": placed(PLANS[plan])}
        self.model, self.optimizer = em.wrap(model, make_optimizer_of_trainable(model), **options)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        torch.manual_seed(100 + dist.get_rank())

    def train(self, steps: int) -> list[float]:
        rank, world = dist.get_rank(), dist.get_world_size()
        rows = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        losses = []
        for _ in range(steps):
            loss = lm_loss(self.model, tokens(self.step, 0, 8, 29)[rows])
            self.optimizer.scale(loss).backward()
            if self.clip is not None:
                self.optimizer.clip_grad_norm_(self.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, path: Path, **options: Any) -> Any:
        extra = {"step": self.step, "schedule": self.schedule.state_dict()}
        return save(path, self.model, self.optimizer, extra=extra, **options)

    def load(self, path: Path) -> None:
        extra = load(path, self.model, self.optimizer)
        self.step = extra["step"]
        self.schedule.load_state_dict(extra["schedule"])

    def close(self) -> None:
        self.optimizer.close()
        del self.model, self.optimizer, self.schedule
        gc.collect()


def make_optimizer_of_trainable(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p.requires_grad]
    return optimizer


def everything(path: Path) -> dict[str, Tensor]:
    """All whole tensors of a checkpoint, what the optimizer keeps included."""
    manifest = read_manifest(path)
    verify(path, manifest)
    whole = Whole(path, manifest)
    found = {f"{name} buffer": whole.buffer(name).clone() for name in manifest.buffers}
    for name, entry in manifest.parameters.items():
        for kept in entry.pieces[0].state if entry.pieces else ():
            found[f"{name} {kept}"] = whole.parameter(name, kept)
        updates = {piece.scalars.get("updates") for piece in entry.pieces} or {0}
        assert len(updates) == 1
        found[f"{name} updates"] = torch.tensor(updates.pop() or 0)
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], case: str) -> None:
    assert a.keys() == b.keys(), case
    for name, value in a.items():
        assert value.dtype == b[name].dtype and torch.equal(value, b[name]), f"{case}: {name}"


def train_and_save(path: Path, ep: int, plan: str, steps: int, **options: Any) -> dict[str, Tensor]:
    run = Run(ep, plan, **options)
    run.train(steps)
    run.save(path)
    state = em.full_state_dict(run.model, all_ranks=True)
    run.close()
    return state


def load_and_save(source: Path, target: Path, ep: int, plan: str, steps: int, **options: Any) -> list[float]:
    """Into another layout, out of it again, and a few steps further; the losses are those of the whole batch."""
    run = Run(ep, plan, **options)
    run.load(source)
    run.save(target)
    losses = torch.tensor(run.train(steps), dtype=torch.float64)
    dist.all_reduce(losses)
    run.close()
    return (losses / dist.get_world_size()).tolist()


def unbroken_and_resumed(directory: Path, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Four steps; and two, a checkpoint, and two more in a model built anew, perhaps under another plan."""
    run = Run(**first)
    losses = run.train(2)
    run.save(directory / "middle")
    losses += run.train(2)
    run.save(directory / "unbroken")
    run.close()
    run = Run(**second)
    run.load(directory / "middle")
    resumed = run.train(2)
    run.save(directory / "resumed")
    run.close()
    return {"unbroken": losses[2:], "resumed": resumed}


def failing(act: Callable[[], Any]) -> str:
    """The text of the CheckpointError that `act` raises."""
    try:
        act()
    except em.CheckpointError as error:
        return str(error)
    raise AssertionError("no CheckpointError")


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """On that rank no file can grow beyond 10,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 if dist.get_rank() == rank else soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def beside_training(directory: Path) -> dict[str, Any]:
    """A save beside the training, one that fails, and one after that."""
    run = Run(2, "zero3")
    run.train(1)
    run.save(directory / "at-once")
    saving = run.save(directory / "beside", asynchronous=True)
    run.train(2)
    assert saving.result() == directory / "beside" and saving.poll()
    assert saving.done() and saving.exception() is None
    with full_disk(1):
        failed = run.save(directory / "failed", asynchronous=True)
        text = failing(lambda: [None for _ in iter(failed.poll, True)])
        synchronous = failing(lambda: run.save(directory / "failed"))
    dist.barrier()  # rank 0 clears up
    left = sorted(path.name for path in directory.iterdir())
    assert failing(failed.poll) == failing(failed.result) == str(failed.exception()) == text, "a failure stays one"
    run.train(1)
    at_once, beside = everything(directory / "at-once"), everything(directory / "beside")
    assert_same(at_once, beside, "a save beside the training holds the moment it began")
    dist.barrier()
    run.save(directory / "next", asynchronous=True, keep=1)
    run.close()  # waits for it
    return {"error": text, "synchronous": synchronous, "left": left}


def held_back(directory: Path, ep: int, plan: str) -> None:
    """Saves beside a training that goes on at once; the copying begins when something waits for its end, or later."""

    def by_hand(run: Run) -> None:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(2)
                with em.unsharded(parameter, write=True):
                    parameter.data.add_(1)
        em.full_state_dict(run.model, all_ranks=True)  # brings home what was written

    def update(run: Run) -> None:
        run.train(1)
        assert go.is_set(), "an update waits for the copying"

    run = Run(ep, plan)
    write = FileImage.write
    for change in (update, by_hand, update):
        run.train(1)
        name, go = f"{run.step}-{change.__name__}", threading.Event()
        run.save(directory / f"{name}-at-once")
        with mock.patch.object(FileImage, "write", lambda *of, go=go: (go.wait(), write(*of))[1]):
            saving = run.save(directory / f"{name}-beside", asynchronous=True)
            (copied,) = {chunk.shard._gate.reader for chunk in run.model._elixir.scheduler.chunks}
            copied.wait = lambda copied=copied, go=go: (go.set(), threading.Event.wait(copied))
            change(run)
            go.set()
            saving.result()
        at_once, beside = everything(directory / f"{name}-at-once"), everything(directory / f"{name}-beside")
        assert_same(at_once, beside, name)
    after = everything(saving.path)
    run.save(directory / "after")
    changed = everything(directory / "after")
    moved = [name for name in after if name.endswith(" exp_avg")]
    assert moved and not any(torch.equal(after[name], changed[name]) for name in moved), "the update was one"
    run.close()


def updates_under_way(directory: Path, plan: em.Plan, copies_late: bool) -> None:
    """A save while updates are held back until the training has gone on, and one that waits for all, of the same step.

    The copying begins at once and waits for the updates; or, if it `copies_late`, when the next update waits for it.
    """

    def wrapped() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = Norms()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        return em.wrap(
            model,
            optimizer,
            plan=placed(plan),
        )

    extra: dict[str, Any] = {"seen": [0, 1]}
    model, optimizer = wrapped()
    take_step(model, optimizer, 0)
    take_step(model, optimizer, 1)
    save(directory / "at-once", model, optimizer, extra=extra)
    optimizer.close()

    model, optimizer = wrapped()
    take_step(model, optimizer, 0)
    go_on, copy, write = threading.Event(), threading.Event(), FileImage.write
    held_back = optimizer._update_thread.submit(go_on.wait, PATIENCE_SECONDS)
    take_step(model, optimizer, 1)
    if not copies_late:
        copy.set()
    with mock.patch.object(FileImage, "write", lambda *of: (copy.wait(PATIENCE_SECONDS), write(*of))[1]):
        saving = save(directory / "beside", model, optimizer, extra=extra, asynchronous=True)
        assert not held_back.done(), "the save waits for updates"
        extra["seen"].append(2)
        optimizer.param_groups[0]["lr"] = 0.5
        torch.rand(1), random.random(), np.random.rand()
        (copied,) = {chunk.shard._gate.reader for chunk in model._elixir.scheduler.chunks}
        copied.wait = lambda: (copy.set(), threading.Event.wait(copied))
        model.register_forward_pre_hook(lambda *_: go_on.set())
        take_step(model, optimizer, 2)
        assert copy.is_set(), "the next update waits for the copying"
        saving.result()
    optimizer.close()

    assert_same(everything(directory / "at-once"), everything(directory / "beside"), "updates under way")
    wanted, found = (read_manifest(directory / name) for name in ("at-once", "beside"))
    for field in ("param_groups", "rng", "extra", "buffers"):
        assert getattr(wanted, field) == getattr(found, field), field


def take_step(model: nn.Module, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    model(torch.randn(8, 4, generator=generator)).square().mean().backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()


def dying(directory: Path) -> None:
    """Rank 1 is killed when it would write its file."""
    run = Run(1, "zero2")
    run.save(directory / "good")
    if dist.get_rank() == 1:
        save_module.FileImage.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    run.save(directory / "bad")


def refused(directory: Path) -> dict[str, str]:
    """All that load and save refuse; afterwards the model is what it was, and trains."""
    run = Run(2, "zero3")
    run.train(1)
    path, rank, model, optimizer = directory / "good", dist.get_rank(), run.model, run.optimizer
    run.save(path)
    before = em.full_state_dict(model, all_ranks=True)
    generator = torch.get_rng_state()
    found = {
        "exists": failing(lambda: run.save(path)),
        "paths": failing(lambda: save(directory / f"rank-{rank}", model, optimizer)),
        "extra": failing(lambda: save(directory / "x", model, optimizer, extra=rank)),
        "one rank's extra": failing(lambda: save(directory / "x", model, optimizer, extra=object if rank else 0)),
        "missing": failing(lambda: load(directory / "none", model, optimizer)),
        "asynchronous": failing(lambda: save(directory / "x", model, optimizer, asynchronous=rank > 0)),
    }
    lm_loss(model, tokens(7, 0, 8, 29)[:2]).backward()
    found["gradients"] = failing(lambda: run.save(directory / "x"))
    optimizer.zero_grad()
    file = path / "rank-00001.safetensors"
    data = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    dist.barrier()
    found["damaged"] = failing(lambda: load(path, model, optimizer))
    if rank == 0:
        file.write_bytes(data)
    dist.barrier()
    after = em.full_state_dict(model, all_ranks=True)
    assert same_tensors(after, before)
    assert torch.equal(generator, torch.get_rng_state())
    run.load(path)
    run.train(1)
    run.close()
    return found


def unlike_buffers(directory: Path) -> str:
    """What a save says of a buffer that has another shape on each rank."""
    model = nn.Linear(4, 4)
    model.register_buffer("queue", torch.zeros(2 + dist.get_rank()))
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), 0.1), plan=em.Plan.zero2())
    found = failing(lambda: save(directory / "x", model, optimizer))
    optimizer.close()
    return found


class Norms(nn.Module):
    """Has buffers that differ between ranks, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def buffers(directory: Path, saves: bool) -> tuple[Tensor, Tensor]:
    """The running mean that was saved or loaded here, and what was drawn next."""
    torch.manual_seed(dist.get_rank())
    model, optimizer = em.wrap(model := Norms(), torch.optim.SGD(model.parameters(), 0.1), plan=em.Plan.zero2())
    if saves:
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        save(directory / "norms", model, optimizer)
    else:
        load(directory / "norms", model, optimizer)
    optimizer.close()
    return model.norm.running_mean, torch.rand(4)


SHAPES = {
    "column": (8, 6),
    "row": (6, 8),
    "twice": (8, 3),
    "both": (4, 4, 2),
    "whole": (5,),
    "one": (),
    "none": (0, 2),
}
CUTS = {
    "column": {"tp": 0},
    "row": {"tp": 1},
    "twice": {"ep": 0, "tp": 0},
    "both": {"ep": 0, "tp": 1},
    "whole": {},
    "one": {},
    "none": {},
}


class Sliced(nn.Module):
    """Linear maps cut along either dim, a dim cut twice, a scalar, an empty parameter; values are elements' numbers."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            cut = CUTS[name]
            pattern = em.Pattern(mesh, replicate=[a for a in ("edp", "ep", "tp") if a not in cut], shard=cut)
            local = tuple(n // pattern.shards_of(dim) for dim, n in enumerate(shape))
            whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
            offset = pattern.local_offset(local)
            window = tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))
            self.register_parameter(name, nn.Parameter(whole[window].clone()))
            self.register_buffer(
                f"{name}_factor", torch.sin(whole[window]) / pattern.gradient_divisor, persistent=False
            )
            self.rules = {**getattr(self, "rules", {}), name: pattern}

    def forward(self) -> Tensor:
        return sum((getattr(self, name) * getattr(self, f"{name}_factor")).sum() for name in SHAPES)


def sliced(source: Path | None, target: Path, ep: int, tp: int, plan: str, uneven: bool = False) -> str:
    """Trains, or loads, and saves; returns what loading failed of. With `uneven`, rank 1 has made one update more."""
    model = Sliced(em.expert_mesh(mesh_of_world(), ep, etp=tp))
    em.annotate(model, model.rules)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer = em.wrap(model, optimizer, plan=PLANS[plan])
    if uneven and source is not None and ep == 1:
        text = failing(lambda: load(source, model, optimizer))
        optimizer.close()
        return text
    if source is not None:
        load(source, model, optimizer)
    else:
        for _ in range(2):
            model().backward()
            optimizer.step()
        if uneven and dist.get_rank() == 1:
            model._elixir.kept.piece_of(model.twice).steps += 1
    save(target, model, optimizer)
    optimizer.close()
    return ""
