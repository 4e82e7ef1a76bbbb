"""The GPT model: every layout against one process, and what it reports.

Tolerances: fp32, two or three layers; a layout rounds differently in the last bits: 1e-5 of losses of about 5 and
gradients well below 1.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe.errors import ConfigError, LayoutError
from elixir_moe.parallel.mesh import init_mesh
from elixir_moe.parallel.rules import annotate, pattern_of
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, generate, gpt_patterns, lm_loss, tokens_per_expert
from elixir_tools.models.presets import named_model
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
TINY: dict[str, Any] = {"vocab_size": 64, "seq_len": 16, "n_layers": 3, "d_model": 32, "n_heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "untied": {"tie_embeddings": False},
    "moe": {"experts": (4, 0, 4), "top_k": 2, "z_coefficient": 0.01},
    "pr-moe": {"experts": (0, 4, 8), "residual": True, "capacity_factor": 0.8},
    "reentrant": {"experts": (0, 4, 8), "residual": True, "checkpoint": "reentrant"},
    "non-reentrant": {"experts": (0, 4, 8), "top_k": 2, "checkpoint": "non_reentrant"},
}
DEGREES = {1: [(1, 1, 1)], 2: [(1, 2, 2), (2, 1, 1)], 4: [(1, 2, 4), (4, 1, 2), (1, 1, 1)]}
"""By world size: the expert-parallel degree of each layer, made 1 where the layer is dense."""


def world_mesh(tp: int = 1) -> DeviceMesh:
    """One mesh a rank and degree: process groups stay until the process ends."""
    return init_mesh(tp, device_type="cpu")


def config_of(name: str, degrees: tuple[int, ...]) -> GPTConfig:
    experts = CASES[name].get("experts", (0, 0, 0))
    ep = tuple(degree if n else 1 for n, degree in zip(experts, degrees, strict=True))
    return GPTConfig(**TINY, **CASES[name], ep=ep)


def layouts(world: int) -> list[tuple[str, tuple[int, ...]]]:
    """(case, degrees); dense models have no degrees to try."""
    return [(name, d) for name in CASES for d in DEGREES[world] if "experts" in CASES[name] or d == DEGREES[world][0]]


def batch_of(sequences: int = 4) -> Tensor:
    return torch.randint(64, (sequences, 17), generator=torch.Generator().manual_seed(3))


def build(config: GPTConfig, mesh: Any = None) -> GPT:
    torch.manual_seed(5)
    return GPT(config, mesh)


def full(name: str, parts: list[Tensor], ep: int) -> Tensor:
    """The mean over all ranks' losses of a gradient, from each rank's part."""
    if ".experts." not in name:
        return torch.stack(parts).mean(0)
    return torch.cat([torch.stack(parts[i::ep]).sum(0) for i in range(ep)]) / len(parts)


def run_layouts() -> dict[Any, Any]:
    mesh = world_mesh()
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, degrees in layouts(world):
        model = build(config_of(name, degrees), mesh)
        annotate(model, gpt_patterns(model))
        for parameter in model.parameters():
            assert pattern_of(parameter).gradient_divisor == world
        loss = lm_loss(model, batch_of()[rank * 4 // world : (rank + 1) * 4 // world])
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        results[name, degrees] = (loss.detach(), grads, tokens_per_expert(model))
    return results


@pytest.mark.parametrize("world", with_further([1, 2, 4], [1, 2]))
def test_every_layout_equals_one_process(ranks: Ranks, world: int) -> None:
    by_rank = ranks(world).run(run_layouts)
    for name, degrees in layouts(world):
        config = config_of(name, degrees)
        model = build(config)
        loss = lm_loss(model, batch_of())
        loss.backward()
        got = [r[name, degrees] for r in by_rank]
        where = f"{name} {degrees}"
        torch.testing.assert_close(torch.stack([g[0] for g in got]).mean(), loss.detach(), rtol=1e-5, atol=1e-6)
        for parameter, p in model.named_parameters():
            ep = config.ep[int(parameter.split(".")[1])] if ".experts." in parameter else 1
            mean = full(parameter, [g[1][parameter] for g in got], ep)
            torch.testing.assert_close(
                mean, p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, w=where, n=parameter: f"{w} {n}: {m}"
            )
        assert every(g[2] == tokens_per_expert(model) for g in got), where


def test_checkpointing_changes_no_bit() -> None:
    want: list[Tensor] = []
    for kind in ("none", "reentrant", "non_reentrant"):
        model = build(GPTConfig(**TINY, experts=(0, 4, 8), residual=True, dropout=0.1, checkpoint=kind))
        torch.manual_seed(1)
        loss = lm_loss(model, batch_of())
        loss.backward()
        got = [loss.detach(), *(p.grad for p in model.parameters())]
        want = want or got
        assert every(torch.equal(a, b) for a, b in zip(got, want, strict=True)), kind


def test_it_learns() -> None:
    model = build(GPTConfig(**TINY, experts=(0, 2, 4), residual=True, top_k=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    batch, losses = batch_of(), []
    for _ in range(30):
        loss = lm_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(4.16, abs=0.15) and losses[-1] < 1.5, losses


def run_generate() -> tuple[Tensor, Tensor]:
    config = GPTConfig(**TINY, experts=(0, 4, 8), ep=(1, 2, 2), top_k=2)
    model = build(config, world_mesh())
    prompt = batch_of(2)[:, :14]
    greedy = generate(model, prompt, 5, temperature=0)
    sampled = generate(model, prompt, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    return greedy, sampled


def test_generate_in_lockstep(ranks: Ranks) -> None:
    (greedy, first), (again, second) = ranks(2).run(run_generate)
    model = build(GPTConfig(**TINY, experts=(0, 4, 8), top_k=2))
    model.train()
    want = generate(model, batch_of(2)[:, :14], 5, temperature=0)
    assert model.training and not want.requires_grad
    assert torch.equal(greedy, want) and torch.equal(again, want)
    assert want.shape == (2, 19) and torch.equal(want[:, :14], batch_of(2)[:, :14])
    assert first.shape == second.shape == (2, 19) and not torch.equal(first, second)


def test_initial_loss_and_tied_embeddings() -> None:
    model = build(GPTConfig(**TINY))
    assert model.head.weight is model.tokens.weight
    names = [name for name, _ in model.named_parameters()]
    assert "tokens.weight" in names and "head.weight" not in names
    assert tokens_per_expert(model) == {} and gpt_patterns(model) == {}
    assert model(batch_of()[:, :-1]).aux_loss == 0


def test_a_copy_shares_the_meshes() -> None:
    model = build(GPTConfig(**TINY, experts=(0, 4, 8)))
    again = copy.deepcopy(model)
    assert again.meshes is model.meshes and again.tokens.weight is not model.tokens.weight
    assert torch.equal(lm_loss(again, batch_of()), lm_loss(model, batch_of()))


@pytest.mark.parametrize(
    ("name", "billions"), [("gpt2-4b", 3.8), ("gpt2-10b", 9.9), ("gpt2-15b", 14.9), ("gpt2-20b", 19.8)]
)
def test_a_model_by_name_has_its_size_and_no_memory(name: str, billions: float) -> None:
    model = named_model(name, batch=1, seq=8).model
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.1)
    assert next(model.parameters()).is_meta


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gpt2-20b'"):
        named_model("gpt2-20B", batch=1, seq=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": (4, 4)}, "2 numbers for 3 layers"),
        ({"experts": (0, 0, 4), "ep": (1, 2, 1)}, "layer 1 is dense"),
        ({"experts": (0, 0, 4), "ep": (1, 1, 3)}, r"ep=3 does not divide 4 experts, choose among \[1, 2, 4\]"),
        ({"experts": (0, 0, -1)}, "experts=-1"),
        ({"experts": (0, 0, 4), "top_k": 5}, "top_k=5 of 4"),
        ({"experts": (0, 0, 4), "top_k": 0}, "top_k=0"),
        ({"experts": (0, 0, 4), "capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"residual": True}, "residual=True is set, but no layer has experts"),
        ({"top_k": 2}, "top_k=2 is set"),
        ({"n_heads": 5}, "d_model=32 is not a multiple of n_heads=5"),
        ({"n_layers": 0}, "n_layers=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"checkpoint": "yes"}, "checkpoint='yes'"),
    ],
)
def test_errors_of_the_configuration(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**{**TINY, **settings})


def test_too_long_a_sequence() -> None:
    with pytest.raises(ConfigError, match="17 tokens are longer than the model's seq_len=16"):
        build(GPTConfig(**TINY))(batch_of())


def run_errors() -> list[str]:
    messages = []
    for mesh, ep, heads in ((world_mesh(2), 1, 1), (world_mesh(), 4, 4)):
        try:
            GPT(GPTConfig(**{**TINY, "n_heads": heads}, experts=(0, 0, 4), ep=(1, 1, ep)), mesh)
        except LayoutError as error:
            messages.append(str(error))
    return messages


def test_errors_of_meshes(ranks: Ranks) -> None:
    for messages in ranks(2).run(run_errors):
        tp, degree = messages
        assert "tp=2 does not divide n_heads=1" in tp and "ep=4" in degree and "[1, 2]" in degree
