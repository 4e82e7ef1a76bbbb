"""Selective activation checkpointing: what it keeps of a region is of the model's operators alone."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import elixir_moe as em
from tests.runtime.test_habits import Net, Ranks, adamw, mean_square, rows_of
from tests.support.parity import assert_alike, trained

RECOMPUTED: dict[str, tuple[Any, ...]] = {
    "nothing": (),
    "activations": (torch.ops.aten.gelu.default,),
    "products": (torch.ops.aten.mm.default, torch.ops.aten.addmm.default),
}
"""Operators that run again, where a policy keeps all others."""
KEPT: dict[str, tuple[Any, ...]] = {"none": (), "kept products": RECOMPUTED["products"]}
"""Operators whose results are kept, where a policy recomputes all others."""


def keeps(name: str, context: Any, operator: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    kept = operator in KEPT[name] if name in KEPT else operator not in RECOMPUTED[name]
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Net):
    """Each region is a layer, or two."""

    def __init__(self, policy: str, length: int) -> None:
        super().__init__()
        self.policy, self.length = policy, length

    def run(self, x: Tensor, start: int) -> Tensor:
        for layer in self.layers[start : start + self.length]:
            x = layer(x)
        return x

    def body(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, partial(keeps, self.policy))
        for start in range(0, len(self.layers), self.length):
            x = checkpoint(self.run, x, start, use_reentrant=False, context_fn=contexts)
        return x


def train(policy: str, length: int, plan: em.Plan | None) -> dict[str, Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Selective(policy, length)
        return model, adamw(model)

    def backward(model: nn.Module, step: int) -> None:
        for _ in range(2):
            mean_square(model, rows_of(step, plan)).backward()

    return trained(build, backward, plan, 3)


@pytest.mark.parametrize(
    ("policy", "length", "world"),
    [("none", 2, 1), ("kept products", 2, 2), ("nothing", 2, 1), ("activations", 1, 1), ("products", 2, 2)],
)
def test_a_policy_meets_no_operator_of_the_library(policy: str, length: int, world: int, ranks: Ranks) -> None:
    """Their number differs between forward and recomputation: results of others would be taken for theirs."""
    plan = em.Plan.offload(rcache_blocks=7, chunk_numel=1100)
    wanted = train(policy, length, None)
    for found in ranks(world).run(train, policy, length, plan):
        assert_alike(found, wanted, policy, 2e-5, rel=1e-5, abs=1e-5)
