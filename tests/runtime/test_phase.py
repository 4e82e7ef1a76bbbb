"""What may happen when: the legal moves of a phase, what each state refuses, and what an optimizer shows of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.distributed.collectives import Communicator
from elixir_moe.errors import DiskError, OutOfStepError, UsageError
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.runtime.phase import (
    BROKEN,
    CLIPPED,
    CLOSED,
    EARLY,
    LATE,
    LOST,
    OPEN,
    READABLE,
    READY,
    REDUCED,
    UPDATING,
    WHOLE,
    Phase,
    State,
)
from tests.runtime.test_interrupts import D, same, wrapped
from tests.support.ranks import RankPool

WAYS: dict[State, Callable[[Phase], Any]] = {
    READY: lambda phase: None,
    REDUCED: lambda phase: phase.reduce(),
    CLIPPED: lambda phase: phase.move(CLIPPED),
    LATE: lambda phase: (phase.move(CLIPPED), phase.reduce()),
    LOST: lambda phase: phase.drop_gradients(),
    EARLY: lambda phase: phase.early.setdefault(0),
    UPDATING: lambda phase: phase.write("a test"),
    BROKEN: lambda phase: phase.move(BROKEN, "ranks are apart"),
    CLOSED: lambda phase: phase.move(CLOSED),
}
MOVES: dict[str, tuple[Callable[[Phase], Any], str]] = {
    #          READY   REDUCED CLIPPED LATE   LOST    EARLY    UPDATING BROKEN   CLOSED
    "reduce": (
        lambda phase: phase.reduce(),
        "REDUCED REDUCED LATE LATE LOST EARLY UPDATING BROKEN CLOSED",
    ),
    "drop_gradients": (
        lambda phase: phase.drop_gradients(),
        "LOST LOST LOST LOST LOST UPDATING UPDATING BROKEN CLOSED",
    ),
    "clear": (lambda phase: phase.clear(), "READY REDUCED CLIPPED LATE READY EARLY UPDATING BROKEN CLOSED"),
    "clip": (lambda phase: phase.move(CLIPPED), "CLIPPED CLIPPED CLIPPED no CLIPPED no no no no"),
    "write": (
        lambda phase: phase.write("a test"),
        "UPDATING UPDATING UPDATING UPDATING UPDATING UPDATING UPDATING UPDATING no",
    ),
    "written": (lambda phase: phase.written(3), "no no no no READY no READY no no"),
}
REFUSED: dict[State, str] = {
    REDUCED: "em.x() while gradients wait for a step",
    CLIPPED: "em.x() while gradients wait for a step",
    LATE: "backward ran after clip_grad_norm_",
    LOST: "a backward failed, and a part of its gradients is gone: call zero_grad()",
    EARLY: "em.x() between a backward in optimizer.update_in_backward() and optimizer.step()",
    UPDATING: "em.x() after a test that stopped halfway: some weights are new and others are old; em.load a checkpoint",
    BROKEN: "ranks are apart",
    CLOSED: "optimizer.close() was called",
}


def phase_in(state: State) -> Phase:
    phase = Phase()
    WAYS[state](phase)
    assert phase.now is state
    return phase


@pytest.mark.parametrize("move", MOVES)
def test_the_table_of_moves(move: str) -> None:
    make, after = MOVES[move]
    for state, wanted in zip(State, after.split(), strict=True):
        phase = phase_in(state)
        if wanted == "no":
            with pytest.raises(AssertionError, match="is not legal"):
                make(phase)
        else:
            make(phase)
            assert phase.now is State[wanted], (state, move)


def test_each_state_refuses_with_what_to_do() -> None:
    for allowed in ((READY,), WHOLE, READABLE, OPEN):
        for state in State:
            phase = phase_in(state)
            if state in allowed:
                phase.require(allowed, "em.x()")
                continue
            with pytest.raises(OutOfStepError if state is BROKEN else UsageError) as raised:
                phase.require(allowed, "em.x()")
            assert REFUSED[state] in str(raised.value)


def test_a_failed_backward_is_noticed_by_the_next_call() -> None:
    for state, after in ((READY, LOST), (CLIPPED, LOST), (UPDATING, UPDATING), (BROKEN, BROKEN)):
        phase = phase_in(READY)
        phase.begin_call()
        phase.begin_backward()
        WAYS[state](phase)
        phase.end_call()
        assert phase.unfinished
        with pytest.raises(em.ElixirError):
            phase.require((READY, CLIPPED), "em.x()")
        assert phase.now is after
        phase.abort()
        assert phase.unfinished
        phase.recover()
        assert not phase.unfinished


def test_a_collective_that_fails_parts_the_ranks_and_says_why() -> None:
    phase = phase_in(CLIPPED)
    with phase.issuing("chunk 1"):
        assert phase.now is BROKEN
    assert phase.now is CLIPPED
    for error, words in (
        (DiskError("the disk is full"), r"has failed \(the disk is full\)"),
        (KeyboardInterrupt(), ""),
    ):
        phase = phase_in(READY)
        with pytest.raises(type(error)), phase.issuing("chunk 1"):
            raise error
        words = words or "was interrupted"
        with pytest.raises(OutOfStepError, match=rf"of chunk 1 {words}, and other ranks.*start all ranks again"):
            phase.require(OPEN, "em.x()")


def test_an_optimizer_shows_torchs_names_and_the_verbs_of_users_alone() -> None:
    optimizer = wrapped("ddp", torch.float32)[1]
    own = {name for name in dir(optimizer) if not name.startswith("_")} - set(dir(torch.optim.AdamW([nn.Parameter()])))
    assert own == {
        "clip_grad_norm_",
        "clip_grad_value_",
        "close",
        "grad_norms",
        "loss_scale",
        "scale",
        "update_in_backward",
    }
    optimizer.close()


def stepped(interrupt: bool) -> dict[str, Tensor]:
    """The weights after a step with two clippings by value, of which the first may have been interrupted."""
    model, optimizer = wrapped("offload", torch.float32)
    change, changed = ShardState.change_gradient, []

    def stop(*args: Any) -> None:
        change(*args)
        changed.append(args)
        raise KeyboardInterrupt

    if interrupt:
        model(torch.ones(2, D)).square().mean().backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ShardState, "change_gradient", stop)
            for kind in {type(chunk.shard) for chunk in model._elixir.scheduler.chunks}:
                patch.setattr(kind, "change_gradient", stop)
            with pytest.raises(KeyboardInterrupt):
                optimizer.clip_grad_value_(1e-3)
        assert changed, "one chunk is clipped, and others are not"
        with pytest.raises(
            UsageError, match=r"a clipping stopped halfway, and a part of its gradients is gone: call zer"
        ):
            optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(2, D)).square().mean().backward()
    optimizer.clip_grad_value_(1e-3)
    optimizer.step()
    found = em.full_state_dict(model)
    optimizer.close()
    return found


def test_a_clipping_that_stops_halfway_is_no_step() -> None:
    assert same(stepped(interrupt=True), stepped(interrupt=False))


def test_nothing_of_a_step_runs_inside_a_backward() -> None:
    model, optimizer = wrapped("zero3", torch.float32)
    said = []

    def call(gradient: Tensor) -> None:
        for verb in (optimizer.step, optimizer.zero_grad, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(
                UsageError, match=r"inside a backward: call it when backward\(\) has returned"
            ) as raised:
                verb()
            said.append(str(raised.value).partition(" inside")[0])

    model.blocks[0].register_forward_hook(lambda *args: args[-1].register_hook(call) and None)
    model(torch.ones(2, D)).square().mean().backward()
    assert said == ["optimizer.step()", "optimizer.zero_grad()", "optimizer.clip_grad_norm_()"]
    optimizer.step()
    optimizer.close()


def disk_fails() -> list[str]:
    """(rank) What is said after a reduction that a disk has ended."""
    model, optimizer = wrapped("zero3", torch.float32)
    issue = Communicator.reduce_scatter

    def stop(*args: Any, **kwargs: Any) -> None:
        issue(*args, **kwargs)
        raise DiskError("the disk is full")

    loss = model(torch.ones(2, D)).square().mean()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "reduce_scatter", stop)
        with pytest.raises(DiskError):
            loss.backward()
    with pytest.raises(OutOfStepError) as raised:
        model(torch.ones(2, D))
    optimizer.close()
    return [str(raised.value)]


def test_a_disk_that_fails_in_a_reduction_is_told_as_what_it_is(ranks: Callable[[int], RankPool]) -> None:
    for (said,) in ranks(2).run(disk_fails):
        assert "has failed (the disk is full)" in said and "interrupted" not in said
