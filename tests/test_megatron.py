"""Megatron-core models, wrapped, against the same models in one process under plain torch."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.errors import ConfigError, ElixirError, LayoutError
from elixir_moe.parallel import megatron
from tests.megatron_cases import (
    CHUNK,
    EXPERT_FFN,
    HIDDEN,
    VOCAB,
    Case,
    build,
    config_of,
    load,
    model_parallel,
    place,
    plain,
    shims,
    state_of,
    wrapped,
)
from tests.parity import compare
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
NO_BIAS: dict[str, Any] = {"experts": 4, "bias": False}
CASES: dict[int, list[Case]] = {
    1: [Case(), Case(experts=4, tie=True)],
    2: [
        Case(tp=2, tie=True),
        Case(**SP, qk_layernorm=True),
        Case(tp=2, recompute=True, qk_layernorm=True),
        Case(ep=2, experts=4),
        Case(ep=2, experts=4, dispatcher="alltoall", aux=0.05),
        Case(ep=2, **NO_BIAS, grouped=True),
        Case(**SP, ep=2, etp=1, experts=4),
        Case(**SP, etp=1, **NO_BIAS),
        Case(**SP, etp=2, **NO_BIAS, gated=True, shared_expert=True),
    ],
    4: [
        Case(**SP, gated=True, tie=True),
        Case(ep=2, experts=4, dispatcher="alltoall"),
        Case(**SP, ep=4, etp=1, experts=4, aux=0.05),
        Case(**SP, ep=2, etp=2, **NO_BIAS, gated=True, grouped=True),
        Case(ep=2, etp=2, **NO_BIAS),
    ],
}
LOOPS: list[tuple[int, float | None]] = [(1, 0.5), (2, None)]
"""(accumulation, clipping)."""


@pytest.fixture(scope="module")
def oracle(ranks: Ranks) -> Callable[..., dict[str, Any]]:
    """``oracle(case, accumulation, clip, parts)``: plain torch in one process, once for each model."""
    known: dict[Any, dict[str, Any]] = {}

    def get(case: Case, *loop: Any) -> dict[str, Any]:
        key = (case.one(), *loop)
        if key not in known:
            known[key] = ranks(1).run(plain, *key)[0]
        return known[key]

    return get


@pytest.mark.parametrize(
    ("world", "case", "index"),
    [pytest.param(world, case, i, id=f"{world}-{i}") for world, cases in CASES.items() for i, case in enumerate(cases)],
)
def test_every_layout_and_plan(
    world: int, case: Case, index: int, ranks: Ranks, oracle: Callable[..., dict[str, Any]]
) -> None:
    chunk = CHUNK * 2 if case.gated or case.shared_expert or case.grouped else CHUNK
    loop = LOOPS[index % 2]
    dp = world // case.tp
    wanted = oracle(case, *loop, dp if case.aux else 1)  # auxiliary losses are those of each rank's own micro-batch

    def run(name: str, plan: em.Plan) -> int:
        found = ranks(world).run(wrapped, case, plan, *loop, wanted["start"])
        for rank, result in enumerate(found):
            compare(result, wanted, f"world {world} {case} {name} {loop} rank {rank}")
            assert result["statistics"]["blocks_replaced"] == 0
            assert result["statistics"]["off_schedule"] == 0
        least: int = found[0]["least_blocks"]
        return least

    least = run("zero2", em.Plan.zero2(chunk_numel=chunk))
    if index % 2:
        run("zero3", em.Plan.zero3(rcache_blocks=least, chunk_numel=chunk))
    else:
        run("offload", em.Plan.offload(rcache_blocks=least, device_chunks=index % 4, chunk_numel=chunk))


# -------------------------------------------------------------------------------------------------------------- layers


def _gradients(model: nn.Module, backward: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """Of every parameter, as one process would see it: what plain gradient descent with a rate of 1 takes away."""
    megatron.annotate(model)
    plan = em.Plan.zero3(rcache_blocks=2, chunk_numel=4096)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), plan=plan)
    before = megatron.as_one_process(model, em.full_state_dict(model))
    backward(model)
    optimizer.step()
    after = megatron.as_one_process(model, em.full_state_dict(model))
    optimizer.close()
    return {name: before[name] - after[name] for name in before}


def parallel_layer(kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    """{what: (wrapped, dense)} of one tensor-parallel layer, on two ranks; every rank has the whole input."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

    case = Case(tp=2)
    results = {}
    with shims(), model_parallel(case):
        config, rank = config_of(case), place()["tp"][0]
        torch.manual_seed(3)
        x, g = torch.randn(5, 3, HIDDEN), torch.randn(5, 3, HIDDEN)
        ids = torch.randint(VOCAB, (5, 3))
        options: dict[str, Any] = {"config": config, "init_method": nn.init.normal_, "bias": True}
        torch.manual_seed(4)  # Megatron draws the whole weight on each rank and cuts it
        if kind == "column":
            layer: nn.Module = ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=True, **options)
        elif kind == "row":
            layer = RowParallelLinear(HIDDEN, HIDDEN, input_is_parallel=False, skip_bias_add=False, **options)
        else:
            layer = VocabParallelEmbedding(VOCAB, HIDDEN, init_method=nn.init.normal_, config=config)
        torch.manual_seed(4)
        weight = nn.init.normal_(torch.empty(VOCAB if kind == "vocab" else HIDDEN, HIDDEN)).requires_grad_()
        bias = torch.zeros(HIDDEN, requires_grad=True)
        dense_in, wrapped_in = (x.clone().requires_grad_() for _ in range(2))
        wanted = F.embedding(ids, weight) if kind == "vocab" else F.linear(dense_in, weight, bias)
        wanted.backward(g)

        def backward(layer: nn.Module) -> None:
            out = layer(ids) if kind == "vocab" else layer(wrapped_in)[0]
            out.backward(g)
            results["forward"] = (out.detach(), wanted.detach())

        gradients = _gradients(layer, backward)
        assert weight.grad is not None
        results["weight"] = (gradients["weight"], weight.grad)
        if kind != "vocab":
            assert wrapped_in.grad is not None and dense_in.grad is not None and bias.grad is not None
            results["input"] = (wrapped_in.grad, dense_in.grad)
            results["bias"] = (gradients["bias"], bias.grad)
        assert rank == dist.get_rank()
    return results


def moe_layer(dispatcher: str) -> dict[str, tuple[Tensor, Tensor]]:
    """{what: (wrapped, dense)} of an MoE layer with its experts on two ranks; each rank has tokens of its own."""
    case = Case(ep=2, **NO_BIAS, dispatcher=dispatcher)
    results = {}
    with shims(), model_parallel(case.one()):
        torch.manual_seed(6)
        whole = state_of(build(case.one()))
    at = "decoder.layers.1.mlp."
    x, g = torch.randn(2, 5, 3, HIDDEN), torch.randn(2, 5, 3, HIDDEN)
    router = whole[f"{at}router.weight"].clone().requires_grad_()
    w_in = torch.stack([whole[f"{at}experts.local_experts.{e}.linear_fc1.weight"] for e in range(4)]).requires_grad_()
    w_out = torch.stack([whole[f"{at}experts.local_experts.{e}.linear_fc2.weight"] for e in range(4)]).requires_grad_()
    assert w_in.shape == (4, EXPERT_FFN, HIDDEN)
    dense_in = x.clone().requires_grad_()
    best, experts = (dense_in @ router.t()).topk(2, dim=-1)
    weights = torch.zeros(2, 5, 3, 4).scatter(-1, experts, best.softmax(dim=-1))
    hidden = F.gelu(torch.einsum("rsbh,efh->rsbef", dense_in, w_in))
    wanted = torch.einsum("rsbef,ehf,rsbe->rsbh", hidden, w_out, weights)
    (wanted * g / 2).sum().backward()  # the mean over two ranks
    assert router.grad is not None and w_in.grad is not None and w_out.grad is not None and dense_in.grad is not None
    with shims(), model_parallel(case):
        model, rank = build(case), dist.get_rank()
        load(model, whole, case)
        layer = model.decoder.layers[1].mlp
        mine = x[rank].clone().requires_grad_()

        def backward(layer: nn.Module) -> None:
            out = layer(mine)[0]
            out.backward(g[rank])
            results["forward"] = (out.detach(), wanted[rank].detach())

        gradients = _gradients(layer, backward)
        assert mine.grad is not None
        results["input"] = (mine.grad / 2, dense_in.grad[rank])
        results["router"] = (gradients["router.weight"], router.grad)
        for e in range(4):
            results[f"in {e}"] = (gradients[f"experts.local_experts.{e}.linear_fc1.weight"], w_in.grad[e])
            results[f"out {e}"] = (gradients[f"experts.local_experts.{e}.linear_fc2.weight"], w_out.grad[e])
    return results


@pytest.mark.parametrize(
    ("fn", "argument"),
    [(parallel_layer, kind) for kind in ("column", "row", "vocab")]
    + [(moe_layer, dispatcher) for dispatcher in ("allgather", "alltoall")],
)
def test_layers_equal_their_dense_equivalents(fn: Callable[[str], Any], argument: str, ranks: Ranks) -> None:
    """Sums of up to 64 products of order 1, in another order: 64 ulps of 1e-7 and as much for weight minus gradient."""
    for result in ranks(2).run(fn, argument):
        assert len(result) >= 2
        for what, (found, wanted) in result.items():
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5, msg=lambda text, what=what: f"{what}: {text}")
