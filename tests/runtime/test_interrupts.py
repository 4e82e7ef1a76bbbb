"""Ctrl-C wherever Python looks for it in the library: after `zero_grad` nothing is lost, or an error says to load.

A run is interrupted once in each step. It then goes on from the weights it has, and must have the bits of a run that
nobody has interrupted.
"""

import contextlib
import random
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dis import opname
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.distributed.collectives import Communicator
from elixir_moe.errors import OutOfStepError
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.runtime.saved_tensors import SavedTensors
from tests.support.every import every
from tests.support.ranks import RankPool

D = 16
STEPS = 6
DISK = tempfile.gettempdir()
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(),
    "zero3": em.Plan.zero3(),
    "offload": em.Plan.offload(rcache_blocks=3, chunk_numel=800),
    "disk": em.Plan.offload(rcache_blocks=3, disk_chunks=2, chunk_numel=800, disk=DISK),
    "values on disk": em.Plan.offload(rcache_blocks=3, disk_chunks=3, chunk_numel=800, disk=DISK, values_on_disk=True),
}
CASES = [
    pytest.param(name, dtype, 12, marks=[pytest.mark.slow] if name in ("zero2", "zero3") else [])
    for name in PLANS
    for dtype in (torch.float32, torch.bfloat16)
]
MANY = [
    pytest.param(name, dtype, 1700, marks=pytest.mark.slow)
    for name in PLANS
    for dtype in (torch.float32, torch.bfloat16)
]


class Tied(nn.Module):
    """Two blocks, and a weight that is also read outside its own module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.linear(x, self.first.weight)


class Interrupt:
    """Raises KeyboardInterrupt at one of the places in the library where Python looks for signals.

    These are the entry of a function, a jump back and the end of a call.
    """

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.places = 0
        self.where = ""
        self._before: dict[FrameType, str] = {}

    def __enter__(self) -> "Interrupt":
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for such a frame only in `settrace`
        sys.settrace(self._enter_function)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._before.clear()

    def _enter_function(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        if "elixir_moe/" not in frame.f_code.co_filename or _finalizes(frame):
            return None
        frame.f_trace_opcodes = True
        self._before[frame] = "RESUME"
        return self._run_instruction

    def _run_instruction(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "return":
            self._before.pop(frame, None)
        elif event == "opcode":
            before = self._before.get(frame, "")
            self._before[frame] = opname[frame.f_code.co_code[frame.f_lasti]]
            if before.startswith(("RESUME", "CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")):
                self.places += 1
                if self.places == self.at:
                    self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                    sys.settrace(None)
                    raise KeyboardInterrupt
        return self._run_instruction


def _finalizes(frame: FrameType) -> bool:
    """Whether a frame runs because an object is freed: Python ignores exceptions there, and 3.11 may confuse the frame
    that it interrupts when a trace function raises one."""
    caller: FrameType | None = frame
    while caller is not None and "elixir_moe/" in caller.f_code.co_filename and caller.f_code.co_name != "__del__":
        caller = caller.f_back
    return caller is not None and (caller.f_code.co_name == "__del__" or caller.f_code.co_filename == weakref.__file__)


def wrapped(name: str, dtype: torch.dtype, device: str = "cpu") -> tuple[nn.Module, ShardedOptimizer]:
    model = Tied().to(dtype)
    return em.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=PLANS[name], device=device)


def train(model: Any, optimizer: ShardedOptimizer, number: int, folder: Path | None = None) -> None:
    """A micro-batch, an evaluation, two at once, a read, a clip, a step, two writes, and perhaps a save."""
    draw = torch.Generator().manual_seed(number)
    like = next(model.parameters())
    first, *others = torch.randn(3, 4, D, generator=draw).to(like)
    loss_of(model, first).backward()
    with torch.no_grad():
        model(torch.ones(1, D).to(like))
    em.accumulate(model, loss_of, others)
    next(model.parameters()).norm()
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()
    with torch.no_grad():
        model.first.weight.mul_(1.0)
    with em.unsharded(model.first, write=True):
        model.first.bias.data.mul_(1.0)
    if folder is not None:
        em.save(folder, model, optimizer)


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    return loss


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[key], wanted[key]) for key in wanted)


def interrupted(model: nn.Module, optimizer: ShardedOptimizer, number: int, at: int, folder: Path | None) -> str:
    """Takes a step with an interrupt; returns the place."""
    with Interrupt(at) as interrupt, contextlib.suppress(KeyboardInterrupt):
        train(model, optimizer, number, folder)
    restore_torch()
    return interrupt.where


def restore_torch() -> None:
    """Ends what torch's own guards, which are interrupted too, have begun."""
    torch.set_grad_enabled(True)
    while not torch._C._is_torch_function_enabled():
        torch._C.DisableTorchFunctionSubclass().__exit__(None, None, None)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    remove_hooks()


def remove_hooks() -> None:
    """Removes the hooks on saved tensors that torch's own contexts have left; the library leaves none."""
    left = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        left.append(top[0])
        torch._C._autograd._pop_saved_tensors_default_hooks()
    assert not any(isinstance(getattr(pack, "__self__", None), SavedTensors) for pack in left), left


@pytest.mark.parametrize(("name", "dtype", "points"), [*CASES, *MANY])
def test_an_interrupt_anywhere_loses_nothing_silently(
    name: str, dtype: torch.dtype, points: int, tmp_path: Path
) -> None:
    interrupt_anywhere(name, dtype, points, tmp_path)


def interrupt_anywhere(
    name: str, dtype: torch.dtype, points: int, folder: Path, device: str = "cpu", seed: int = 0
) -> None:
    """Interrupts so many steps, each at a random place; what follows has the bits of a run without interrupts."""
    model, optimizer = wrapped(name, dtype, device)
    em.save(folder / "start", model, optimizer)
    wanted = [em.full_state_dict(model)]
    counted = Interrupt(None)
    for number in range(STEPS):
        last = number == STEPS - 1
        with counted if last else contextlib.nullcontext():
            train(model, optimizer, number, folder / "counted" if last else None)
        optimizer.zero_grad()
        wanted.append(em.full_state_dict(model))
    assert counted.places > 1000
    em.load(folder / "start", model, optimizer)
    draw, step, refused = random.Random(seed), 0, 0
    for point in range(points):
        if step == STEPS:
            em.load(folder / "start", model, optimizer)
            step = 0
        saves = folder / f"save-{point}" if draw.random() < 0.2 else None
        where = interrupted(model, optimizer, step, draw.randrange(1, counted.places), saves)
        try:
            optimizer.zero_grad()
        except em.UsageError as error:
            assert "em.load a checkpoint" in str(error), where
            em.load(folder / "start", model, optimizer)
            step, refused = 0, refused + 1
            continue
        found = em.full_state_dict(model)
        if same(found, wanted[step]):
            train(model, optimizer, step)
            optimizer.zero_grad()
            found = em.full_state_dict(model)
        step += 1
        assert same(found, wanted[step]), where
    assert refused < points / 2
    optimizer.close()


def test_a_step_that_stops_halfway_says_to_load_a_checkpoint(tmp_path: Path) -> None:
    model, optimizer = wrapped("ddp", torch.float32)
    em.save(tmp_path / "start", model, optimizer)
    before = em.full_state_dict(model)
    model(torch.ones(1, D)).sum().backward()
    update, updates = optimizer._begin_update, []

    def stop(*args: Any) -> None:
        update(*args)
        updates.append(args)
        raise KeyboardInterrupt

    optimizer._begin_update = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert updates, "a chunk is updated"
    optimizer._begin_update = update  # type: ignore[method-assign]
    for what in (
        optimizer.zero_grad,
        optimizer.step,
        lambda: model(torch.ones(1, D)),
        lambda: em.full_state_dict(model),
        lambda: em.save(tmp_path / "half", model, optimizer),
    ):
        with pytest.raises(em.ElixirError, match=r"optimizer.step\(\) that stopped halfway.*em.load a checkpoint"):
            what()
    em.load(tmp_path / "start", model, optimizer)
    assert same(em.full_state_dict(model), before)
    model(torch.ones(1, D)).sum().backward()
    optimizer.step()
    assert not same(em.full_state_dict(model), before)
    optimizer.close()


def interrupted_after(name: str, collective: str) -> list[str]:
    """What a model says after an interrupt between the issue of a collective and its record, on every rank."""
    model, optimizer = wrapped(name, torch.float32)
    issue, messages = getattr(Communicator, collective), []

    def stop(*args: Any, **kwargs: Any) -> None:
        issue(*args, **kwargs)
        raise KeyboardInterrupt

    train(model, optimizer, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, collective, stop)
        with pytest.raises(KeyboardInterrupt):
            train(model, optimizer, 1)
    for again in (optimizer.zero_grad, lambda: train(model, optimizer, 1)):
        try:
            again()
        except OutOfStepError as error:
            messages.append(str(error))
    optimizer.close()
    return messages


@pytest.mark.parametrize(
    ("name", "collective"),
    [("zero3", "all_gather"), ("zero3", "reduce_scatter"), ("offload", "reduce_scatter"), ("ddp", "all_reduce")],
)
def test_a_collective_is_not_issued_twice(name: str, collective: str, ranks: Callable[[int], RankPool]) -> None:
    for messages in ranks(2).run(interrupted_after, name, collective):
        assert messages and every("start all ranks again" in message for message in messages)
