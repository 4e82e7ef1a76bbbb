"""Autograd functions and kernels that are handed a weight outside of its module: it has its memory while they run.

The oracle is the same function in plain torch, step by step. Tolerances as in `tests.support.parity`. Kernels of others
run where their packages are; those written in Triton run in its interpreter, if pytest is started with
`TRITON_INTERPRET=1`, which Triton reads when it is imported.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elixir_moe as em
from tests.runtime.test_torch_features import AtAddress, AtAddressByName
from tests.support.parity import TOLERANCE, assert_alike, make_optimizer, trained
from tests.support.ranks import RankPool
from tests.test_linear_cross_entropy import PLANS, D, Tied, V
from tests.wrapping.test_tiling import mine

Ranks = Callable[[int], RankPool]


def by_address(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """Two kernels in a row, one of which keeps the weight as an attribute."""
    weight = model.head.weight
    logits = AtAddress.apply(hidden.flatten(0, 1), weight) + AtAddressByName.apply(hidden.flatten(0, 1), weight)
    return F.cross_entropy(logits, labels.flatten())


def by_liger(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    found = LigerFusedLinearCrossEntropyFunction.apply(hidden.flatten(0, 1), model.head.weight, labels.flatten())
    loss: Tensor = found[0] if isinstance(found, tuple) else found
    return loss


def by_trl(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """What SFTTrainer computes its loss by."""
    from trl.kernels import ChunkedLogProbFunction

    kept = labels != -100
    given = hidden[kept], model.head.weight, model.head.bias, labels[kept]
    loss: Tensor = -ChunkedLogProbFunction.apply(*given, 1.0, 32)[0].mean()
    return loss


def by_cce(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden, model.head.weight, labels, filter_eps=None)  # type: ignore[no-any-return]


LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "by address": (by_address, ()),
    "trl": (by_trl, ("trl",)),
    "liger": (by_liger, ("liger_kernel", "triton")),
    "liger's norm": (by_trl, ("trl", "liger_kernel", "triton")),
    "cut-cross-entropy": (by_cce, ("cut_cross_entropy", "triton")),
}
"""And the packages without which they cannot run."""


def run(case: str, plan: em.Plan | None) -> dict[str, Any]:
    """Three steps; `case` is the name of a loss, and whether it runs inside the model's forward."""
    name, _, place = case.partition(", ")
    loss = LOSSES[name][0]

    def build() -> tuple[nn.Module, Any]:
        if plan is not None:
            em.init_mesh(device_type="cpu")
        model: Any = Tied(tied=True, inside=place == "inside")
        if name == "liger's norm":
            from liger_kernel.transformers import LigerRMSNorm

            model.layers.append(LigerRMSNorm(D))
        return model, make_optimizer(model)

    def backward(model: Any, step: int) -> None:
        tokens = torch.randint(V, (4, 6), generator=torch.Generator().manual_seed(step))
        labels = tokens.roll(-1, 1)
        if plan is not None:
            tokens, labels = mine(tokens), mine(labels)
        found = model(tokens, labels, loss)
        (found if model.inside else loss(model, found, labels)).backward()

    return trained(build, backward, plan, 3)


def run_all(name: str, plans: list[str]) -> dict[str, Any]:
    """What `run` gives, by plan and place."""
    return {f"{plan}, {place}": run(f"{name}, {place}", PLANS[plan]) for plan in plans for place in ("inside", "loss")}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_has_its_memory_for_the_call_and_for_its_backward(name: str, world: int, ranks: Ranks) -> None:
    for package in LOSSES[name][1]:
        pytest.importorskip(package, reason=f"{package} is not installed: it is no dependency of this library")
    if "triton" in LOSSES[name][1] and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels of Triton need its interpreter here: start pytest with TRITON_INTERPRET=1")
    try:
        (wanted,) = ranks(1).run(plainly, name)
    except AssertionError as error:
        if "InterpreterError" not in str(error):
            raise
        pytest.skip("Triton's interpreter cannot run these kernels, in plain torch either: they need a GPU")
    # One rank under two plans that differ there: weights that stay, and weights that are fetched.
    plans = ["ddp", "offload"] if world == 1 else ["zero2", "zero3", "offload"]
    for found in ranks(world).run(run_all, name, plans):
        for case, result in found.items():
            assert_alike(result, wanted, f"{name}, {case}", TOLERANCE, rel=1e-4)


def plainly(name: str) -> dict[str, Any]:
    return run(f"{name}, inside", None)


def evaluated(plan: str) -> list[float]:
    """(rank) What a kernel reads outside of training: without gradients, before and behind a step."""
    em.init_mesh(device_type="cpu")
    torch.manual_seed(0)
    model: Any = Tied(tied=False, inside=False)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), plan=PLANS[plan])
    wanted = em.full_state_dict(model, all_ranks=True)["head.weight"]
    rows, found = torch.eye(D), []
    for _ in range(2):
        with torch.no_grad():
            found.append(float((AtAddress.apply(rows, model.head.weight) - wanted.t()).abs().max()))
        model.layers(torch.ones(2, D)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(em.UsageError, match=r"data_ptr of parameter 'head\.weight'.*in an autograd function"):
        model.head.weight.data_ptr()
    optimizer.close()
    return found


@pytest.mark.parametrize("plan", ["ddp", "zero3", "offload"])
def test_what_a_kernel_reads_between_steps_and_no_address_outside_of_functions(plan: str, ranks: Ranks) -> None:
    assert ranks(2).run(evaluated, plan) == [[0.0, 0.0]] * 2
