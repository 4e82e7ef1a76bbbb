"""Experts that one seed has made equal on the ranks that share them out are named by a warning; what may be is not."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import elixir_moe as em
from elixir_moe.models.gpt import GPT, GPTConfig
from tests.support.ranks import RankPool

D, HERE = 8, 2
"""Width, and experts of each rank."""
Ranks = Callable[[int], RankPool]


class Layer(nn.Module):
    """What experts of a rank may look like: stacked, or in a list; with biases that begin as zeros."""

    def __init__(self, seed: int, copies: bool = False, transposed: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        torch.manual_seed(seed)
        stacked = torch.randn(1, D, D).expand(HERE, D, D) if copies else torch.randn(HERE, D, D)
        listed = [nn.Linear(D, D) for _ in range(HERE)]
        if copies:
            listed = [copy.deepcopy(listed[0]) for _ in listed]
        self.experts = nn.ModuleDict({"list": nn.ModuleList(listed)})
        self.experts.up = nn.Parameter(stacked.mT if transposed else stacked.clone())
        self.experts.bias = nn.Parameter(torch.zeros(HERE, D))
        self.experts.norm = nn.Parameter(torch.ones(HERE, D))


def warned(kind: str) -> list[str]:
    """What wrap says of the first values on this rank."""
    mesh = em.init_mesh()
    experts = em.expert_mesh(mesh, ep=2)
    torch.manual_seed(0)
    if kind == "the library's own":
        model: nn.Module = GPT(GPTConfig(experts=(0, 4, 0, 4), ep=(1, 2, 1, 2)), mesh)
    else:
        seed = experts.get_local_rank("ep") if kind == "own seeds" else 5
        model = nn.Sequential(Layer(seed, copies=kind == "copies on purpose", transposed=kind == "transposed"))
    rules = {
        "*.experts.*": em.Pattern(experts, replicate=("edp",), shard={"ep": 0}),
        "*": em.Pattern(mesh, replicate=("dp",)),
    }
    em.annotate(model, rules)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero2())
    optimizer.close()
    return [str(warning.message) for warning in said if "hold different experts" in str(warning.message)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["one seed", "transposed"])
def test_one_seed_is_named_once(kind: str, world: int, ranks: Ranks) -> None:
    first, *others = ranks(world).run(warned, kind)
    assert others == [[]] * (world - 1)
    assert len(first) == 1 and "parameter '0.experts.up' has the same values on ranks 0, 1" in first[0]
    assert "and 4 other parameters are equal like this" in first[0] and "torch.manual_seed(seed + " in first[0]


@pytest.mark.parametrize("kind", ["own seeds", "copies on purpose", "the library's own"])
def test_what_may_be_equal_is_not_named(kind: str, ranks: Ranks) -> None:
    """Zeros and ones, what one rank has several times, replicated weights."""
    assert ranks(2).run(warned, kind) == [[], []]
