"""Our GPT on meshes with tp: every layout and plan against one process, from the initial values to the checkpoint.

The oracle is the same model without a mesh under plain torch (see `parity`). Initial values and what a checkpoint
brings back are compared bitwise.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import elixir_moe as em
from elixir_moe.errors import LayoutError
from elixir_moe.parallel.linear import CutLinear
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.support.cases import placed, with_further
from tests.support.every import same_tensors
from tests.support.parity import compare, make_optimizer, mesh_of_world, plain, tokens, wrapped
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
SHAPE: dict[str, Any] = {"vocab_size": 32, "seq_len": 8, "n_layers": 3, "d_model": 16, "n_heads": 4, "mlp_ratio": 2}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"tie_embeddings": False},
    "mixture": {"experts": (0, 4, 8), "residual": True, "top_k": 2, "z_coefficient": 0.01},
    "capacity": {"experts": (0, 4, 8), "capacity_factor": 0.8, "checkpoint": "reentrant"},
    "recomputed": {"experts": (0, 4, 0), "checkpoint": "non_reentrant"},
}
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(chunk_numel=4096),
    "zero3": em.Plan.zero3(chunk_numel=4096),
    "offload": em.Plan.offload(chunk_numel=4096),
    "disk": em.Plan.offload(chunk_numel=4096, disk_chunks=2),
}
LOOP: dict[str, tuple[int, float | None]] = {
    "ddp": (1, 0.5),
    "zero2": (3, 0.5),
    "zero3": (3, 0.5),
    "offload": (1, 0.5),
    "disk": (3, 0.5),
}
"""By plan: (accumulation, clipping)."""
QUICK = [(2, 2, 1, "mixture", "zero3"), (2, 2, 1, "dense", "offload"), (2, 2, 1, "recomputed", "ddp")]
CASES = [
    (world, tp, ep, model, plan)
    for world, tp, ep in ((2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 2, 2), (4, 4, 1))
    for model in MODELS
    for plan in PLANS
    if ep == 1 or "experts" in MODELS[model]
]
CASES.append((8, 2, 2, "capacity", "zero3"))


def config_of(model: str, ep: int = 1) -> GPTConfig:
    experts = MODELS[model].get("experts", (0, 0, 0))
    return GPTConfig(**SHAPE, **MODELS[model], ep=tuple(ep if n else 1 for n in experts))


@pytest.fixture(scope="module")
def oracles() -> dict[Any, dict[str, Any]]:
    return {}


@pytest.mark.parametrize(("world", "tp", "ep", "model", "plan"), with_further(CASES, QUICK))
def test_every_layout_and_plan(
    world: int, tp: int, ep: int, model: str, plan: str, ranks: Ranks, oracles: dict[Any, dict[str, Any]]
) -> None:
    key = model, LOOP[plan]
    if key not in oracles:
        oracles[key] = plain(config_of(model), *LOOP[plan])
    found = ranks(world).run(wrapped, config_of(model, ep), PLANS[plan], *LOOP[plan], tp=tp)
    for rank, result in enumerate(found):
        compare(result, oracles[key], f"world {world} tp {tp} ep {ep} {model} {plan} rank {rank}")
        assert result["statistics"]["off_schedule"] == 0


def build(tp: int, model: str, seed: int = 5) -> GPT:
    torch.manual_seed(seed)
    gpt = GPT(config_of(model), mesh_of_world(tp))
    em.annotate(gpt, gpt_patterns(gpt))
    return gpt


def initial(model: str) -> list[Any]:
    """(rank) By way of construction: the whole state of the model, the next random number, this rank's elements."""
    found = []
    for context in (torch.enable_grad, em.sharded_init):
        with context():
            gpt = build(2, model)
        drawn, numel = torch.rand(()), sum(m.weight.numel() for m in gpt.modules() if isinstance(m, CutLinear))
        gpt, optimizer = em.wrap(gpt, make_optimizer(gpt), plan=PLANS["zero3"])
        found.append((em.full_state_dict(gpt, all_ranks=True), drawn, numel))
        optimizer.close()
    return found


def test_initial_values_do_not_depend_on_tp(ranks: Ranks) -> None:
    for found in ranks(2).run(initial, "mixture"):
        torch.manual_seed(5)
        whole = GPT(config_of("mixture"))
        drawn, wanted = torch.rand(()), whole.state_dict()
        cut = [m for name, m in whole.named_modules() if name.endswith((".qkv", ".out", "blocks.0.mlp.w_in"))]
        cut.append(whole.get_submodule("blocks.0.mlp.w_out"))
        for state, after, numel in found:
            assert torch.equal(after, drawn)
            assert {n: v.shape for n, v in state.items()} == {n: v.shape for n, v in wanted.items()}
            assert same_tensors(state, wanted)
            assert numel == sum(m.weight.numel() for m in cut) // 2


STEPS = 2


def train(model: Any, optimizer: Any, first: int, place: tuple[int, int]) -> None:
    rank, of = place
    for step in range(first, first + STEPS):
        rows = tokens(step, 0, SHAPE["seq_len"], SHAPE["vocab_size"]).chunk(of)[rank]
        lm_loss(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()


def moved(folder: str, degrees: tuple[int, int], plan: str) -> tuple[dict[str, Tensor], ...]:
    """(rank) The state saved under one tp, what another tp loads of it, and that after further steps."""
    states = []
    for i, tp in enumerate(degrees):
        gpt = build(tp, "mixture", seed=5 + i)
        gpt, optimizer = em.wrap(gpt, make_optimizer(gpt), plan=placed(PLANS[plan]))
        mesh = mesh_of_world(tp)
        if i:
            em.load(folder, gpt, optimizer)
            states.append(em.full_state_dict(gpt, all_ranks=True))
        train(gpt, optimizer, i * STEPS, (mesh.get_local_rank("dp"), mesh.size(0)))
        states.append(em.full_state_dict(gpt, all_ranks=True))
        if not i:
            em.save(folder, gpt, optimizer)
        optimizer.close()
        del gpt, optimizer
        gc.collect()
    return tuple(states)


@pytest.mark.parametrize(("degrees", "plan"), with_further([((2, 1), "zero3"), ((1, 2), "offload")], []))
def test_a_checkpoint_loads_under_another_tp(degrees: tuple[int, int], plan: str, ranks: Ranks, tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = GPT(config_of("mixture"))
    optimizer = make_optimizer(whole)
    train(whole, optimizer, 0, (0, 1))
    train(whole, optimizer, STEPS, (0, 1))
    for saved, loaded, after in ranks(2).run(moved, str(tmp_path / "state"), degrees, plan):
        assert same_tensors(loaded, saved)
        torch.testing.assert_close(after, dict(whole.state_dict()), rtol=0, atol=1e-4)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"tp=3 does not divide n_heads=4: choose tp among \[1, 2, 4\]"):
        GPTConfig(**SHAPE).check_tp(3)
    with pytest.raises(LayoutError, match=r"dropout=0\.1 with tp=2: .* set dropout=0, or tp=1"):
        GPTConfig(**SHAPE, dropout=0.1).check_tp(2)
    GPTConfig(**SHAPE, dropout=0.1).check_tp(1)
