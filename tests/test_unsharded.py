"""Inside ``with em.unsharded(...)``: training as outside it, to the bit, and by name what cannot be."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from tests.cases import spill_of, with_further
from tests.ranks import RankPool
from tests.test_habits import D, Net, adamw, mean_square

Ranks = Callable[[int], RankPool]
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(chunk_numel=600),
    "offload": em.Plan.offload(rcache_blocks=5, device_chunks=1, chunk_numel=600),
    "disk": em.Plan.offload(rcache_blocks=5, disk_chunks=2, chunk_numel=600),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rows(step: int) -> Tensor:
    return torch.randn(8, D, generator=torch.Generator().manual_seed(step))


def wrapped(plan: str, dtype: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    return em.wrap(model, adamw(model), plan=PLANS[plan], compute_dtype=DTYPES[dtype], **spill_of(PLANS[plan]))


def train(plan: str, dtype: str, lent: bool) -> dict[str, Any]:
    """Steps of two backwards, those of a step in one block if `lent`; the second step forgets what came before."""
    model, optimizer = wrapped(plan, dtype)
    norms = []
    for step in range(3):
        with em.unsharded(model.last, write=True) if lent else contextlib.nullcontext():
            for micro in range(2):
                mean_square(model, rows(2 * step + micro).to(DTYPES[dtype])).backward()
                if (step, micro) == (1, 0):
                    optimizer.zero_grad()
        norms.append(optimizer.clip_grad_norm_(0.5).item())
        optimizer.step()
    state = em.full_state_dict(model)
    optimizer.close()
    return {"norms": norms, "state": state}


def train_both(plan: str, dtype: str) -> list[dict[str, Any]]:
    return [train(plan, dtype, lent) for lent in (False, True)]


CASES = [(plan, dtype, world) for plan in PLANS for dtype in DTYPES for world in (1, 2)]


@pytest.mark.parametrize(("plan", "dtype", "world"), with_further(CASES, [case for case in CASES if case[1] == "bf16"]))
def test_gradients_that_come_inside_a_block_are_none_other(plan: str, dtype: str, world: int, ranks: Ranks) -> None:
    """Of weights used in place the gradients wait for the block's end, since they take the values' place."""
    for outside, inside in ranks(world).run(train_both, plan, dtype):
        assert inside["norms"] == outside["norms"]
        for name, value in outside["state"].items():
            assert torch.equal(inside["state"][name], value), name


def unseen(plan: str, dtype: str) -> dict[bool, dict[str, Tensor]]:
    """What is said where `write` was forgotten, and what the weights are with and without such a block."""
    found = {}
    for forgets in (False, True):
        model, optimizer = wrapped(plan, dtype)
        for step in range(2):
            for change in CHANGES if forgets else ():
                with pytest.raises(em.ConfigError, match=r"last\.bias.*pass write=True"):
                    forget(model, change)
            mean_square(model, rows(step).to(DTYPES[dtype])).backward()
            optimizer.step()
        found[forgets] = em.full_state_dict(model)
        optimizer.close()
    return found


def forget(model: Any, change: Callable[[nn.Parameter], Any]) -> None:
    with em.unsharded(model.last):
        change(model.last.bias)
        em.full_state_dict(model)
        with torch.no_grad():
            model(rows(0).to(model.last.bias.dtype))


def fill(bias: nn.Parameter) -> None:
    bias.data.fill_(6.0)


def flip(bias: nn.Parameter) -> None:
    bias.data.copy_(bias.data.flip(0))


def replace(bias: nn.Parameter) -> None:
    bias.data = torch.ones(D, dtype=bias.dtype)


def fill_and_fail(bias: nn.Parameter) -> None:
    fill(bias)
    raise ZeroDivisionError


CHANGES = [fill, flip, replace, fill_and_fail]
MOVING = [("offload", "fp32"), ("offload", "bf16"), ("zero2", "bf16"), ("ddp", "bf16")]


@pytest.mark.parametrize(("plan", "dtype"), MOVING)
def test_a_block_that_forgets_to_say_that_it_writes(plan: str, dtype: str, ranks: Ranks) -> None:
    """An error on all ranks, also on those that have no part of the bias at home; nothing of it is left."""
    for found in ranks(2).run(unseen, plan, dtype):
        for name, value in found[False].items():
            assert torch.equal(found[True][name], value), name


@pytest.fixture
def alone() -> None:
    em.init_mesh(device_type="cpu")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("plan", ["offload", "zero2"])
def test_blocks_inside_blocks(plan: str) -> None:
    """What the outer one may write is kept, whatever the inner one said."""
    model, optimizer = wrapped(plan, "bf16")
    with em.unsharded(model.last, write=True):
        model.last.bias.data.fill_(1.0)
        with em.unsharded(model.last.bias):
            model.last.bias.data += 1.0
        with em.unsharded(model.first, write=True):
            model.first.bias.data.fill_(3.0)
        model.last.weight.data.fill_(4.0)
    state = em.full_state_dict(model)
    for name, value in {"last.bias": 2.0, "first.bias": 3.0, "last.weight": 4.0}.items():
        assert state[name].unique().tolist() == [value], name
    optimizer.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("plan", ["offload", "zero2"])
def test_what_would_move_the_weights_of_a_block_is_refused(plan: str, tmp_path: Path) -> None:
    model, optimizer = wrapped(plan, "bf16")
    em.save(tmp_path / "saved", model, optimizer)
    mean_square(model, rows(0).bfloat16()).backward()
    refused: dict[str, Callable[[], Any]] = {
        "optimizer.clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "optimizer.step": optimizer.step,
        "em.load": lambda: em.load(tmp_path / "saved", model, optimizer),
    }
    for what, act in refused.items():
        said = pytest.raises(em.ElixirError, match=rf"{what}\(\) inside em\.unsharded.*'last\.bias'")
        with em.unsharded(model.last.bias, write=True), said:
            act()
    with em.unsharded(model.last.bias, write=True):
        mean_square(model, rows(0).bfloat16()).backward()
        with pytest.raises(em.ElixirError, match="gradients wait for a step"):
            em.save(tmp_path / "never", model, optimizer)
    optimizer.close()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("plan", ["offload", "zero2"])
def test_a_block_in_which_something_fails(plan: str) -> None:
    """What was written before is kept; what comes after the failure is refused, or the error of all of it."""
    model, optimizer = wrapped(plan, "bf16")
    bias, x = model.last.bias, rows(0).bfloat16()
    said = pytest.raises(em.ConfigError, match=r"inside em\.unsharded.*'last\.bias'.*begin the block anew")
    with said, em.unsharded(bias, write=True):
        kept = bias.data.fill_(2.0)
        interrupted = model.layers[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        interrupted.remove()
        with torch.no_grad():
            model(x)
        kept.fill_(3.0)
    assert em.full_state_dict(model)["last.bias"].tolist() == [2.0] * D
    with pytest.raises(ZeroDivisionError), em.unsharded(bias, write=True):
        bias.data.fill_(4.0)
        model.first.register_forward_hook(lambda *_: 1 / 0)
        model(x)
    assert em.full_state_dict(model)["last.bias"].tolist() == [4.0] * D
    optimizer.close()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt
