"""Megatron-core models, wrapped, against the same models in one process under plain torch."""

import contextlib
import io
import re
import runpy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.errors import ConfigError, ElixirError, LayoutError, PlanError, UsageError
from elixir_moe.parallel import megatron
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.megatron_cases import (
    CHUNK,
    EXPERT_FFN,
    FFN,
    HIDDEN,
    LEGACY_GROUPED,
    SEQ,
    VOCAB,
    Attention,
    Case,
    aux_scale,
    build,
    config_of,
    lm_loss,
    load,
    model_parallel,
    place,
    plain,
    shims,
    state_of,
    wrapped,
)
from tests.support.parity import ROWS, compare, make_optimizer, tokens
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]

SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
NO_BIAS: dict[str, Any] = {"experts": 4, "bias": False}
CASES: dict[int, list[Case]] = {
    1: [Case(), Case(experts=4, tie=True)],
    2: [
        Case(tp=2, tie=True),
        Case(**SP, qk_layernorm=True),
        Case(tp=2, recompute=True, qk_layernorm=True),
        Case(**SP, sinks=True),
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
    8: [
        Case(**SP, ep=2, etp=2, **NO_BIAS, gated=True),
        Case(tp=2, tie=True),
        Case(**SP, ep=4, etp=2, **NO_BIAS),
        Case(**SP, ep=4, etp=1, experts=4, aux=0.05),
        Case(**SP, ep=2, etp=1, experts=4),
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
    [
        pytest.param(world, case, i, id=f"{world}-{i}", marks=[pytest.mark.slow] if i >= min(2, 8 // world - 1) else [])
        for world, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
)
def test_every_layout_and_plan(
    world: int, case: Case, index: int, ranks: Ranks, oracle: Callable[..., dict[str, Any]]
) -> None:
    if case.grouped and not LEGACY_GROUPED:
        pytest.skip("this Megatron-core has no GroupedMLP")
    chunk = CHUNK * 2 if case.gated or case.shared_expert or case.grouped else CHUNK
    loop = LOOPS[index % 2]
    dp = world // case.tp
    wanted = oracle(case, *loop, dp if case.aux else 1)  # auxiliary losses are those of each rank's own micro-batch

    def run(name: str, plan: em.Plan) -> None:
        found = ranks(world).run(wrapped, case, plan, *loop, wanted["start"])
        for rank, result in enumerate(found):
            compare(result, wanted, f"world {world} {case} {name} {loop} rank {rank}")
            assert result["statistics"]["blocks_replaced"] == 0
            assert result["statistics"]["off_schedule"] == 0

    plenty = em.Plan.zero2(chunk_numel=chunk) if index % 2 else em.Plan.offload(rcache_blocks="all", chunk_numel=chunk)
    if world < 4:
        run("a plenty", plenty)
    if index % 2:
        run("the least zero3", em.Plan.zero3(rcache_blocks=1, chunk_numel=chunk))
    else:
        run("the least offload", em.Plan.offload(rcache_blocks=1, device_chunks=index % 4, chunk_numel=chunk))


TOGETHER = {f"{world}-{i}": (world, case) for world, cases in CASES.items() for i, case in enumerate(cases)}
TOGETHER_PLANS = {
    "zero3": partial(em.Plan.zero3, rcache_blocks=1),
    "offload": partial(em.Plan.offload, rcache_blocks=1),
}
QUICK_TOGETHER = [("1-1", "offload"), ("2-5", "zero3"), ("2-5", "offload"), ("4-0", "zero3")]


@pytest.mark.parametrize(("name", "plan"), with_further(product(TOGETHER, TOGETHER_PLANS), QUICK_TOGETHER))
def test_batches_that_pass_each_layer_together(
    name: str, plan: str, ranks: Ranks, oracle: Callable[..., dict[str, Any]]
) -> None:
    world, case = TOGETHER[name]
    if case.grouped and not LEGACY_GROUPED:
        pytest.skip("this Megatron-core has no GroupedMLP")
    chunk = CHUNK * 2 if case.gated or case.shared_expert or case.grouped else CHUNK
    loop = 3, 0.5
    wanted = oracle(case, *loop, world // case.tp if case.aux else 1)
    found = ranks(world).run(
        wrapped, case, TOGETHER_PLANS[plan](chunk_numel=chunk), *loop, wanted["start"], at_once=True
    )
    for rank, result in enumerate(found):
        compare(result, wanted, f"{name} {case} {plan} rank {rank}")
        assert result["statistics"]["blocks_replaced"] == 0


TE_GROUPED = {
    "biases": (2, Case(ep=2, experts=4, te_grouped=True)),
    "cut and gated": (2, Case(**SP, etp=2, **NO_BIAS, gated=True, te_grouped=True)),
    "cut, four ranks": (4, Case(**SP, ep=2, etp=2, **NO_BIAS, gated=True, te_grouped=True)),
}
"""(ranks, model)."""


@pytest.mark.parametrize("name", with_further(TE_GROUPED, ["biases"]))
def test_grouped_experts_of_transformer_engine_equal_sequential_ones(
    name: str, ranks: Ranks, oracle: Callable[..., dict[str, Any]]
) -> None:
    """TransformerEngine's layer is a stand-in, Megatron's TEGroupedMLP is its own; the oracle is a SequentialMLP."""
    world, case = TE_GROUPED[name]
    wanted = oracle(case, *LOOPS[0], 1)
    plan = em.Plan.zero3(rcache_blocks=1, chunk_numel=2 * CHUNK)
    for rank, result in enumerate(ranks(world).run(wrapped, case, plan, *LOOPS[0], wanted["start"])):
        compare(result, wanted, f"{name}, rank {rank}")


BALANCED = {
    "biases": (2, Case(ep=2, experts=4, expert_bias=True)),
    "loss over a step": (2, Case(ep=2, experts=4, aux=0.5, global_aux=True)),
    "both, recomputed": (2, Case(ep=2, experts=4, aux=0.5, global_aux=True, expert_bias=True, recompute=True)),
    "both, tensor-parallel": (2, Case(**SP, etp=2, **NO_BIAS, aux=0.5, global_aux=True, expert_bias=True)),
    "both, four ranks": (4, Case(**SP, ep=2, etp=2, **NO_BIAS, aux=0.5, global_aux=True, expert_bias=True)),
}
"""(ranks, model)."""


@pytest.mark.parametrize("accumulation", with_further([1, 2], [2]))
@pytest.mark.parametrize("name", with_further(BALANCED, ["biases", "loss over a step"]))
def test_experts_are_balanced_as_in_one_process(
    name: str, accumulation: int, ranks: Ranks, oracle: Callable[..., dict[str, Any]]
) -> None:
    """A rank's part of the loss over a step is a part of a sum over the ranks, of which data parallelism, Megatron's as
    this one, takes the mean: one process has the same gradient with 1 / dp of the coefficient.
    """
    world, case = BALANCED[name]
    loop = (accumulation, 0.5)
    wanted = oracle(replace(case, aux=case.aux * case.tp / world), *loop, 1)
    bias = "decoder.layers.1.mlp.router.expert_bias"
    assert case.expert_bias == (bias in wanted["state"]) and (not case.expert_bias or wanted["state"][bias].any())
    for rank, result in enumerate(
        ranks(world).run(wrapped, case, em.Plan.zero2(chunk_numel=CHUNK), *loop, wanted["start"])
    ):
        compare(result, wanted, f"{name}, {accumulation} batches, rank {rank}")


def beside_its_own(case: Case, whole: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (wrapped, in Megatron's data parallelism)}: this rank's slices behind two steps of gradient descent."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    def train(model: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> None:
        rank, world = place()["dp"]
        for step in range(2):
            begin()
            for micro in range(2):
                rows = tokens(step, micro, SEQ, VOCAB).chunk(world)[rank]
                with aux_scale(0.5):
                    (lm_loss(model, rows) / 2).backward()
            end()

    with shims(), model_parallel(case):
        own, model = build(case), build(case)
        for each in (own, model):
            load(each, whole, case)
        parallel = DistributedDataParallel(own.config, DistributedDataParallelConfig(), own)

        @torch.no_grad()
        def descend() -> None:
            finalize_model_grads([parallel])
            for parameter in own.parameters():
                parameter -= parameter.main_grad

        train(parallel, parallel.zero_grad_buffer, descend)
        megatron.annotate(model)
        plan = em.Plan.zero2(chunk_numel=CHUNK)
        model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), plan=plan)
        train(model, optimizer.zero_grad, optimizer.step)
        theirs = dict((*own.named_parameters(), *own.named_buffers()))
        ours = (*model.named_parameters(), *model.named_buffers())
        found = {name: (tensor.detach().clone(), theirs[name].detach().clone()) for name, tensor in ours}
        optimizer.close()
        return found


@pytest.mark.parametrize("name", with_further(BALANCED, ["loss over a step"]))
def test_experts_are_balanced_as_in_its_own_data_parallelism(
    name: str, ranks: Ranks, oracle: Callable[..., dict[str, Any]]
) -> None:
    """Two steps at a rate of 1, which sum in another order: as in `test_layers_equal_their_dense_equivalents`."""
    world, case = BALANCED[name]
    start = oracle(case, 1, 0.5, 1)["start"]
    for found in ranks(world).run(beside_its_own, case, start):
        assert "decoder.layers.1.mlp.router.weight" in found
        for what, (ours, theirs) in found.items():
            torch.testing.assert_close(
                ours, theirs, rtol=2e-5, atol=2e-5, msg=lambda text, what=what: f"{name}, {what}: {text}"
            )


def counts_of_sixteen_bits(folder: Path) -> dict[str, torch.dtype]:
    """{buffer: dtype} of a router in bf16, behind `wrap` and a load before its first forward."""
    case = Case(experts=4, aux=0.5, global_aux=True, expert_bias=True)
    found = {}
    for path in (None, folder):
        with shims(), model_parallel(case):
            model = build(case).bfloat16()
            megatron.annotate(model)
            model, optimizer = em.wrap(model, make_optimizer(model), plan=em.Plan.zero2(chunk_numel=CHUNK))
            if path is not None:
                em.load(path, model, optimizer)
            else:
                em.save(folder, model, optimizer)
            found = {name: buffer.dtype for name, buffer in model.decoder.layers[1].mlp.router.named_buffers()}
            optimizer.close()
    return found


def test_a_router_counts_in_fp32(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks(1).run(counts_of_sixteen_bits, tmp_path / "saved")
    names = ["expert_bias", "ga_steps", "global_tokens_per_expert", "local_tokens_per_expert"]
    assert sorted(found) == names and set(found.values()) == {torch.float32}


def counts_of_given_up_gradients() -> dict[str, float]:
    """{when: tokens that a router has counted} about calls of ``zero_grad()``."""
    case = Case(experts=4, aux=0.5, global_aux=True, expert_bias=True)
    with shims(), model_parallel(case):
        model = build(case)
        megatron.annotate(model)
        model, optimizer = em.wrap(model, make_optimizer(model), plan=em.Plan.zero2(chunk_numel=CHUNK))
        router, found = model.decoder.layers[1].mlp.router, {}

        def note(when: str) -> None:
            found[when] = router.local_tokens_per_expert.sum().item()
            assert router.global_tokens_per_expert.sum() == found[when]

        loss = lm_loss(model, tokens(0, 0, SEQ, VOCAB))
        note("forward")
        optimizer.zero_grad()  # as programs do that clear the gradients of the last step here
        note("before its backward")
        loss.backward()
        optimizer.zero_grad()
        note("given up")
        assert not router.expert_bias.any()
        lm_loss(model, tokens(0, 0, SEQ, VOCAB)).backward()
        optimizer.step()
        note("step")
        assert router.expert_bias.any()
        optimizer.close()
        return found


def test_tokens_of_given_up_gradients_do_not_count(ranks: Ranks) -> None:
    (found,) = ranks(1).run(counts_of_given_up_gradients)
    routed = 2 * SEQ * ROWS
    assert found == {"forward": routed, "before its backward": routed, "given up": 0, "step": 0}


@pytest.mark.parametrize("values_on_disk", [False, True])
def test_chunks_on_disk(
    values_on_disk: bool, ranks: Ranks, oracle: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    case = Case(ep=2, experts=4)
    wanted = oracle(case, *LOOPS[1], 1)
    plan = em.Plan.offload(
        rcache_blocks=1, chunk_numel=CHUNK, disk=str(tmp_path), disk_chunks=2, values_on_disk=values_on_disk
    )
    for rank, result in enumerate(ranks(2).run(wrapped, case, plan, *LOOPS[1], wanted["start"])):
        compare(result, wanted, f"disk, rank {rank}")
    assert not list(tmp_path.iterdir())


# -------------------------------------------------------------------------------------------------------------- shapes

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"add_bias_linear": True, "add_qkv_bias": True},
    "gated": {"gated_linear_unit": True, "qk_layernorm": True},
    "learned sinks": {"softmax_type": "learnable"},
    "gated attention": {"attention_output_gate": True},
    "one head of keys for two ranks": {"num_query_groups": 1},
    "mixture": {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": FFN, "moe_shared_expert_gate": True},
    "latent attention": {"multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_layernorm": True},
    "further tokens": {"mtp_num_layers": 1},
}
"""Settings of Megatron-core that bring parameters of their own."""


def _kind(settings: dict[str, Any], tp: int) -> nn.Module:
    """A GPTModel with `settings`, of Megatron's own parts without TransformerEngine."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    options: dict[str, Any] = {"num_query_groups": 2, "add_bias_linear": False} | settings
    latent = "multi_latent_attention" in settings
    config = (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=tp,
        expert_tensor_parallel_size=tp,
        use_cpu_initialization=True,
        **options,
    )
    spec = get_gpt_layer_local_spec(config.num_moe_experts, False, config.qk_layernorm, latent)
    if latent:  # Megatron's own attention without TransformerEngine takes no latent keys
        spec.submodules.self_attention.submodules.core_attention = Attention
    further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    return GPTModel(config, spec, VOCAB, SEQ, mtp_block_spec=further)


def shapes(tp: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """{kind: {name: shape of the logical parameter}} of models on `tp` ranks."""
    found = {}
    from megatron.core.transformer import multi_latent_attention

    no_layer = mock.patch.object(multi_latent_attention, "TELinear", type("TELinear", (), {}))  # it asks for the class
    with shims(), no_layer, model_parallel(Case(tp=tp, etp=tp)):
        for kind, settings in KINDS.items():
            model = _kind(settings, tp)
            megatron.annotate(model)
            found[kind] = {
                name: parameter._elixir_pattern.global_shape(parameter.shape)
                for name, parameter in model.named_parameters()
            }
    return found


def test_logical_parameters_have_the_shapes_of_one_process(ranks: Ranks) -> None:
    """So each parameter whose shape depends on the ranks is known to be cut, with an attribute of Megatron's or not."""
    (wanted,) = ranks(1).run(shapes, 1)
    assert wanted["learned sinks"]["decoder.layers.0.self_attention.core_attention.softmax_offset"] == (4,)
    for found in ranks(2).run(shapes, 2):
        assert found == wanted


# -------------------------------------------------------------------------------------------------------------- layers


def _gradients(model: nn.Module, backward: Callable[[nn.Module], None]) -> dict[str, Tensor]:
    """Of every parameter, as one process would see it: what plain gradient descent with a rate of 1 takes away."""
    megatron.annotate(model)
    plan = em.Plan.zero3(rcache_blocks=2, chunk_numel=4096)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), plan=plan)
    before = megatron.as_one_process(model, em.full_state_dict(model, all_ranks=True))
    backward(model)
    optimizer.step()
    after = megatron.as_one_process(model, em.full_state_dict(model, all_ranks=True))
    optimizer.close()
    return {name: before[name] - after[name] for name in before if before[name] is not None}  # no extra state


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
            torch.testing.assert_close(
                found, wanted, rtol=2e-5, atol=2e-5, msg=lambda text, what=what: f"{what}: {text}"
            )


# ----------------------------------------------------------------------------------------------------- refused inputs


def _message(kind: type[ElixirError], fn: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(kind) as caught:
        fn(*args)
    return str(caught.value)


def _column(case: Case) -> nn.Module:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    return ColumnParallelLinear(HIDDEN, HIDDEN, config=config_of(case), init_method=nn.init.normal_)


def _mixer() -> nn.Module:
    """What Megatron's MambaMixer has beside its linear layers; the class itself needs kernels for GPUs."""
    mixer = type("MambaMixer", (nn.Module,), {"__module__": "megatron.core.ssm.mamba_mixer"})()
    mixer.conv1d, mixer.A_log, mixer.D = nn.Conv1d(8, 8, 4, groups=8), *(nn.Parameter(torch.ones(4)) for _ in range(2))
    for parameter in mixer.parameters():
        parameter.tensor_model_parallel = True
    mixer.D.partition_dim = -1  # some programs set what Megatron leaves out
    mixer.A_log.partition_dim = 0  # as later versions do
    return mixer


def uncut_mixer() -> None:
    with shims(), model_parallel(Case()):
        mixer = _mixer()
        megatron.annotate(mixer)
        for parameter in mixer.parameters():
            pattern = parameter._elixir_pattern
            assert pattern.replicate_ranks == (0, 1) and pattern.gradient_divisor == 2


def test_uncut_mixers_of_state_spaces_are_replicated(ranks: Ranks) -> None:
    ranks(2).run(uncut_mixer)


def bad_inputs() -> dict[str, str]:
    """{what was done: the message}, on two ranks."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    case, said = Case(tp=2), {}
    with shims():
        said["not initialized"] = _message(ConfigError, megatron.annotate, nn.Linear(2, 2))
        early = _column(case)
        with model_parallel(case.one()):
            stale = _column(case.one())
        with model_parallel(case):
            said["built before"] = _message(LayoutError, megatron.annotate, early)
            said["built on other groups"] = _message(LayoutError, megatron.annotate, stale)

            layer = _column(case)
            said["no pattern"] = _message(LayoutError, megatron.check, layer)
            em.annotate(layer, {"*": megatron.Pattern(megatron._grid().dense, replicate=("dp", "tp"))})
            said["pattern by hand"] = _message(LayoutError, megatron.annotate, layer)
            assert said["pattern by hand"] == _message(LayoutError, megatron.check, layer)
            right = megatron.Pattern(megatron._grid().dense, replicate="dp", shard={"tp": 0}, dtype=torch.bfloat16)
            em.annotate(layer, {"*": right})
            megatron.annotate(layer)
            megatron.check(layer)
            assert layer.weight._elixir_pattern is right

            tied = nn.Module()
            tied.cut, tied.whole = _column(case), nn.Linear(HIDDEN, HIDDEN)
            tied.whole.bias = None
            tied.whole.weight = nn.Parameter(tied.cut.weight.detach().clone())
            tied.cut.weight = tied.whole.weight  # no attributes: a Linear would hold all of it, a column layer a slice
            said["tied"] = _message(LayoutError, megatron.annotate, tied)

            layer = _column(case)
            layer.weight.partition_dim = 1
            said["attribute"] = _message(LayoutError, megatron.annotate, layer)
            layer = _column(case)
            layer.weight.shared_embedding = True
            said["shared by stages"] = _message(LayoutError, megatron.annotate, layer)
            for what, setting, value in (
                ("fusion", "gradient_accumulation_fusion", True),
                ("one tensor", "moe_single_grouped_weight", True),
                ("quantiles", "moe_router_load_balancing_type", "quantile_balancing"),
                ("own reduction", "finalize_model_grads_func", finalize_model_grads),
                ("weights cut further", "gtp_weight_remat_size", 2),
            ):
                layer = _column(case)
                setattr(layer.config, setting, value)
                said[what] = _message(ConfigError, megatron.annotate, layer)
            layer = _column(case)
            layer.config.__class__ = type("Provider", (type(layer.config),), {"__module__": "of_the_user"})
            layer.config.calculate_per_token_loss = True
            said["a derived config"] = _message(ConfigError, megatron.annotate, layer)
            said["mixer"] = _message(LayoutError, megatron.annotate, _mixer())
            wrapper = nn.Sequential(_column(case))
            wrapper.ddp_config = SimpleNamespace()
            said["Megatron's DDP"] = _message(ConfigError, megatron.annotate, wrapper)

            with mock.patch("megatron.core.__version__", "0.99.0"), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                megatron.annotate(build(case))
            said["version"] = "\n".join(str(w.message) for w in caught if "0.99.0" in str(w.message))
            megatron.check(nn.Linear(2, 2))  # not Megatron's: none of its business
        assert not parallel_state.model_parallel_is_initialized()
        megatron.check(nn.Linear(2, 2))
    return said


def test_what_cannot_be_right_is_refused_by_name(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks(2).run(bad_inputs)):
        expected = {
            "not initialized": "initialize_model_parallel(...) before the model is built",
            "built before": "was built with tp_group none, Megatron's is [0, 1] now",
            "built on other groups": "was built with tp_group none, Megatron's is [0, 1] now",
            "no pattern": "'weight' has the Pattern(mesh(dp=2), replicate=('dp',)), but Megatron built it with",
            "pattern by hand": "em.megatron.annotate(model)",
            "tied": "'whole.weight' is tied to 'cut.weight', which has another pattern",
            "attribute": "'weight' has partition_dim=1, but ColumnParallelLinear shards it on dim 0",
            "shared by stages": "share_embeddings_and_output_weights=False",
            "fusion": "TransformerConfig.gradient_accumulation_fusion is on",
            "one tensor": "set moe_single_grouped_weight=False",
            "quantiles": "moe_router_enable_expert_bias",
            "own reduction": "set finalize_model_grads_func=None",
            "weights cut further": "set tensor_parallel_num_weight_shards and",
            "a derived config": "Provider.calculate_per_token_loss is on",
            "mixer": "'A_log' of a MambaMixer is sharded in a way that Megatron's attributes do not describe",
            "Megatron's DDP": "in Megatron's own data parallelism",
            "version": "megatron-core 0.99.0 has not been tested",
        }
        assert set(said) == set(expected), rank
        for what, text in expected.items():
            assert text in said[what], (rank, what, said[what])
        assert every(
            f"parameter {name!r} of a" in said["mixer"] for name in ("A_log", "D", "conv1d.weight", "conv1d.bias")
        )
        assert said["version"].count("\n") == 0, "one warning"


def of_its_own_data_parallelism(folder: Path) -> dict[str, str]:
    """{what programs for Megatron's data parallelism do: the message}, on two ranks."""
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    case, said = Case(tp=2), {}
    with shims(), model_parallel(case):
        model = build(case)
        megatron.annotate(model)
        model, optimizer = em.wrap(model, make_optimizer(model), plan=em.Plan.zero2(chunk_numel=CHUNK))

        def save(part: Any) -> None:
            dist_checkpointing.save(part.sharded_state_dict(), folder)

        said["save"] = _message(UsageError, save, model)
        said["save a part"] = _message(UsageError, save, model.decoder)
        said["finalize"] = _message(UsageError, finalize_model_grads, [model])
        said["zero"] = _message(UsageError, model.zero_grad_buffer)
        model.config.finalize_model_grads_func = finalize_model_grads
        batch = torch.zeros(1, SEQ, dtype=torch.int64)

        def step(_: Any, model: nn.Module) -> Any:
            return model(batch, batch, None, labels=batch), lambda loss: (loss.mean(), {})

        said["schedule"] = _message(
            UsageError,
            lambda: get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=None,
                model=[model],
                num_microbatches=1,
                seq_length=SEQ,
                micro_batch_size=1,
            ),
        )
        optimizer.close()
    return said


def test_calls_of_its_own_data_parallelism_name_what_to_write(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(of_its_own_data_parallelism, tmp_path / "saved"):
        assert "Save with em.save(folder, model, optimizer)" in said["save"]
        assert said["save a part"] == said["save"]
        assert "set config.finalize_model_grads_func = None" in said["finalize"]
        assert said["schedule"] == said["finalize"]
        assert "call optimizer.zero_grad()" in said["zero"]
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------ examples

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str) -> tuple[str, list[str]]:
    """What it prints on this rank, and warnings, without a shim but its own; Megatron's state is put away behind it."""
    from megatron.core import parallel_state

    said = io.StringIO()
    with (
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(said),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
        mock.patch.object(torch.cuda, "current_device", torch.cuda.current_device),  # put back what the example puts in
    ):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    parallel_state.destroy_model_parallel()
    return said.getvalue(), [str(warning.message) for warning in warned]


@pytest.mark.parametrize("name", ["megatron_gpt.py", "megatron_moe.py"])
def test_the_examples_run_and_learn(name: str, ranks: Ranks) -> None:
    for rank, (text, warned) in enumerate(ranks(2).run(run_example, name)):
        assert not [text for text in warned if "hold different experts" in text]
        losses = [float(loss) for loss in re.findall(rf"^rank {rank} step \d+: loss (\d+\.\d+)", text, re.MULTILINE)]
        assert len(losses) == 10 and losses[-1] < 0.9 * losses[0], text


# ------------------------------------------------------------------------------------------------------------ pipeline


STAGES = [(None, Case(pp=2)), (3, Case(pp=2)), (None, Case(pp=2, experts=4, expert_bias=True))]
"""(blocks of the rCache, model)."""


@pytest.mark.parametrize(("blocks", "case"), with_further(STAGES, STAGES[:2]))
def test_pipeline_stages_wrap_each_for_itself(
    blocks: int | None, case: Case, ranks: Ranks, oracle: Callable[..., dict[str, Any]]
) -> None:
    """Megatron's 1F1B schedule with three micro-batches: a forward runs while another one awaits its backward."""
    loop = (3, 0.5)
    plan = (
        em.Plan.zero2(chunk_numel=CHUNK) if blocks is None else em.Plan.zero3(rcache_blocks=blocks, chunk_numel=CHUNK)
    )
    wanted = oracle(case, *loop, 1)
    found = ranks(2).run(wrapped, case, plan, *loop, wanted["start"])
    state = {name: value for result in found for name, value in result["state"].items()}
    for rank, result in enumerate(found):
        compare({**result, "state": state}, wanted, f"stage {rank}, {plan}")


def refused_stages(folder: Path) -> dict[str, str]:
    """{what was done: the message}, on two ranks, of models of two pipeline stages."""
    said = {}
    with shims(), model_parallel(Case(pp=2)):
        model = build(Case(pp=2))
        megatron.annotate(model)
        plan = em.Plan.zero2(chunk_numel=CHUNK)
        does_not_fit = mock.patch(
            "elixir_moe.wrapping.resolve_plan.resolve_counts", side_effect=PlanError("too few blocks")
        )
        with does_not_fit if dist.get_rank() == 0 else contextlib.nullcontext():
            said["plan of one"] = _message(PlanError, partial(em.wrap, plan=plan), model, make_optimizer(model))
        model, optimizer = em.wrap(model, make_optimizer(model), plan=plan)
        said["save"] = _message(em.CheckpointError, em.save, folder, model, optimizer)
        optimizer.close()
        said["tied"] = _message(LayoutError, megatron.annotate, build(Case(pp=2, tie=True)))
    return said


def test_what_pipeline_stages_cannot_do_is_refused_by_name(ranks: Ranks, tmp_path: Path) -> None:
    for rank, said in enumerate(ranks(2).run(refused_stages, tmp_path / "saved")):
        assert "too few blocks" in said["plan of one"]
        assert "save em.full_state_dict(model) of each stage instead" in said["save"]
        shared = "embedding.word_embeddings.weight" if rank == 0 else "output_layer.weight"
        assert f"parameter {shared!r} is shared by several pipeline stages" in said["tied"]
    assert not list(tmp_path.iterdir())
