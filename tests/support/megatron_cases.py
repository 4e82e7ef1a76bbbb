"""Megatron-core models on CPU ranks: how they are built, trained plain in one process, and trained wrapped on several.

Owns the shims without which megatron-core 0.16 and 0.19 do not run on a CPU, the cases, and the cut of a one-process
model into what each rank holds, written down by hand from Megatron's documentation of its layers and not with the code
under test. The oracle is the same Megatron model in one process under plain torch; the tolerance is that of
`tests.support.parity`.
"""

import gc
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import files
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.parallel import megatron
from tests.support.cases import least_said
from tests.support.parity import ROWS, STEPS, make_optimizer, tokens

VOCAB, SEQ, HIDDEN, HEADS, FFN, EXPERT_FFN = 32, 8, 16, 4, 32, 24
CHUNK = 512
LEGACY_GROUPED = any(file.name == "grouped_gemm_util.py" for file in files("megatron-core") or ())
"""Whether this Megatron has GroupedMLP, all experts in one matrix, which 0.19 has not. Found without an import."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how it is spread over ranks; the data-parallel degree follows from the world."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    sequence_parallel: bool = False
    experts: int | None = None
    """Experts of the second layer; the first is always dense."""
    grouped: bool = False
    """Experts are a GroupedMLP."""
    te_grouped: bool = False
    """Experts are a TEGroupedMLP over `TEGroupedLinear`; in one process they are a SequentialMLP all the same."""
    dispatcher: str = "allgather"
    gated: bool = False
    bias: bool = True
    qk_layernorm: bool = False
    tie: bool = False
    shared_expert: bool = False
    layers: int = 2
    aux: float = 0.0
    global_aux: bool = False
    """The auxiliary loss is of all batches of a step, not of each."""
    expert_bias: bool = False
    """Experts are chosen by sigmoids with biases that each step moves towards balance."""
    recompute: bool = False
    """Each layer is recomputed in backward."""
    recompute_modules: tuple[str, ...] = ()
    """Parts of layers are, and the inputs of others: Megatron's names."""
    rope: bool = False
    sinks: bool = False
    """A learned term for each head in the denominator of its softmax, in Megatron's own attention."""

    def one(self) -> "Case":
        """The same model in one process."""
        return replace(self, tp=1, pp=1, ep=1, etp=None, sequence_parallel=False, te_grouped=False)


class _Stream:
    """What the all-to-all dispatcher asks of a CUDA stream."""

    def wait_stream(self, _other: Any) -> None: ...
    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


def _grouped_product(rows: Tensor, weights: Tensor, counts: Tensor, trans_b: bool) -> Tensor:
    """What the grouped_gemm package does on a GPU."""
    parts = rows.split(counts.tolist())
    return torch.cat([part @ (w.t() if trans_b else w) for part, w in zip(parts, weights, strict=True)])


class _TorchWithoutCuda:
    """The torch that Megatron's schedules and masks see: they make tensors on a literal "cuda"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *sizes: Any, device: Any, **options: Any) -> Tensor:
        return torch.zeros(*sizes, **options)

    def ones(self, *sizes: Any, device: Any, **options: Any) -> Tensor:
        return torch.ones(*sizes, **options)


def _to_host(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """On a CPU too, splits must become numbers."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


@contextmanager
def shims() -> Iterator[None]:
    """Megatron-core on a CPU without TransformerEngine, Apex and grouped_gemm."""
    with ExitStack() as stack:
        # Importing Megatron compiles functions nobody calls here, which takes longer than the tests.
        stack.enter_context(mock.patch.object(torch, "compile", lambda fn=None, **_: fn if fn else lambda f: f))
        import megatron.core.tensor_parallel.random as random
        import megatron.core.transformer.moe.moe_utils as moe_utils
        import megatron.core.transformer.utils as masks
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer.moe import token_dispatcher

        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # CUDA's generators are not there
        stack.enter_context(mock.patch.object(random, "_get_cuda_rng_state", lambda **_: None))
        stack.enter_context(mock.patch.object(random, "_set_cuda_rng_state", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")))
        stack.enter_context(mock.patch.object(Tensor, "cuda", lambda tensor: tensor))
        stack.enter_context(mock.patch.object(torch.cuda, "current_stream", _Stream))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", lambda _: nullcontext()))
        no_fp8 = SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
        stack.enter_context(mock.patch.object(random, "FP8GlobalStateManager", no_fp8, create=True))
        for name in ("activation_recompute_forward", "fp8_autocast"):
            stack.enter_context(mock.patch.object(random, name, lambda **_: nullcontext(), create=True))
        for module in (schedules, masks):
            stack.enter_context(mock.patch.object(module, "torch", _TorchWithoutCuda()))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _to_host))
        dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
        stack.enter_context(mock.patch.object(dispatcher, "cuda_dtoh_stream", _Stream()))
        if LEGACY_GROUPED:
            from megatron.core.transformer.moe import grouped_gemm_util

            gemm = SimpleNamespace(ops=SimpleNamespace(gmm=_grouped_product))
            stack.enter_context(mock.patch.object(grouped_gemm_util, "grouped_gemm", gemm))
            stack.enter_context(mock.patch.object(grouped_gemm_util, "ops", gemm.ops))
        yield


@contextmanager
def model_parallel(case: Case) -> Iterator[None]:
    """Megatron's process groups for one case; destroyed behind it, since each costs threads."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        create_gloo_process_groups=False,
    )
    yield
    groups = [g for g in parallel_state._global_process_group_list or [] if g is not None]
    parallel_state.destroy_model_parallel()
    gc.collect()  # hooks and model point at each other, and a process group costs threads until it is freed
    dist.barrier()
    for group in groups:
        dist.destroy_process_group(group)


class Norm(nn.LayerNorm):
    """Apex's layer norm as Megatron uses it, marks for sequence parallelism included."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class Attention(nn.Module):
    """Causal attention of (s, b, heads, d) tensors; no parameters."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class TEGroupedLinear(nn.Module):
    """TransformerEngine's GroupedLinear as Megatron's subclass builds it, with a loop for its kernel.

    Under the name and the module by which Megatron's subclass is known, with the attributes that either version gives
    it: where the dispatcher communicates, TransformerEngine knows no tensor parallelism and states dim 0.
    """

    __module__ = "megatron.core.extensions.transformer_engine"
    mode: str

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        self.config, self.num_gemms, self.use_bias = config, num_gemms, bias
        self.te_return_bias = skip_bias_add and bias
        self._tp_group = pg_collection.expt_tp
        degree = self._tp_group.size()
        self.explicit_expert_comm = degree > 1 or config.expert_model_parallel_size > 1
        self.tp_group = None if self.explicit_expert_comm else self._tp_group
        self.parallel_mode = None if self.explicit_expert_comm else self.mode
        cut = int(self.mode == "row")
        shape = [output_size, input_size]
        shape[cut] //= degree
        for gemm in range(num_gemms):
            weight = nn.Parameter(torch.empty(shape))
            init_method(weight)
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
            if self.parallel_mode:
                weight.partition_dim = cut
            self.register_parameter(f"weight{gemm}", weight)
            if bias:
                self.register_parameter(f"bias{gemm}", nn.Parameter(torch.zeros(shape[0])))
        for parameter in self.parameters():
            parameter.allreduce = config.expert_model_parallel_size == 1

    def forward(self, rows: Tensor, counts: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        biases = [getattr(self, f"bias{gemm}") if self.use_bias else None for gemm in range(self.num_gemms)]
        parts = [
            F.linear(part, getattr(self, f"weight{gemm}"), None if self.te_return_bias else biases[gemm])
            for gemm, part in enumerate(rows.split(counts))
        ]
        return torch.cat(parts), biases if self.te_return_bias else None


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    __module__ = TEGroupedLinear.__module__
    mode = "column"


class TERowParallelGroupedLinear(TEGroupedLinear):
    __module__ = TEGroupedLinear.__module__
    mode = "row"


class _BuildsTEGroupedMLP:
    """Megatron's TEGroupedMLP over the layers above, as a class, since 0.16 builds from nothing else."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        layers = SimpleNamespace(
            linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear, activation_func=None
        )
        return TEGroupedMLP(*args, submodules=layers, **options)


def config_of(case: Case) -> Any:
    """Megatron's configuration of a case."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=case.layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=2,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=EXPERT_FFN if case.experts else None,
        num_moe_experts=case.experts,
        moe_router_topk=2,
        moe_router_load_balancing_type=("global_aux_loss" if case.global_aux else "aux_loss") if case.aux else "none",
        moe_router_score_function="sigmoid" if case.expert_bias else "softmax",
        moe_router_enable_expert_bias=case.expert_bias,
        moe_router_bias_update_rate=0.05,
        moe_aux_loss_coeff=case.aux,
        moe_token_dispatcher_type=case.dispatcher,
        moe_grouped_gemm=case.grouped or case.te_grouped,
        **({"moe_use_legacy_grouped_gemm": case.grouped} if LEGACY_GROUPED else {}),
        moe_shared_expert_intermediate_size=FFN if case.shared_expert else None,
        bf16=case.grouped,  # GroupedMLP asks for the flag; the weights stay fp32
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        sequence_parallel=case.sequence_parallel,
        gated_linear_unit=case.gated,
        activation_func=F.silu if case.gated else F.gelu,
        add_bias_linear=case.bias,
        qk_layernorm=case.qk_layernorm,
        recompute_granularity="full" if case.recompute else "selective" if case.recompute_modules else None,
        recompute_modules=list(case.recompute_modules) or None,
        recompute_method="uniform" if case.recompute else None,
        recompute_num_layers=1 if case.recompute else None,
        softmax_type="learnable" if case.sinks else "vanilla",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        batch_p2p_sync=False,
        init_method=lambda w: nn.init.normal_(w, std=0.2),
        output_layer_init_method=lambda w: nn.init.normal_(w, std=0.2),
    )


def build(case: Case, config: Any = None) -> nn.Module:
    """This rank's GPTModel, or its pipeline stage of it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = config or config_of(case)
    specs = []
    for layer in range(case.layers):
        experts = case.experts if layer == 1 else None
        spec = get_gpt_layer_local_spec(experts, case.grouped, case.qk_layernorm)
        parts, attention = spec.submodules, spec.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        if not case.sinks and "core_attn" not in case.recompute_modules:
            attention.core_attention = Attention
        if case.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
        if case.te_grouped and experts:
            mixture = parts.mlp  # a ModuleSpec in 0.16, a functools.partial in 0.19
            getattr(mixture, "keywords", vars(mixture))["submodules"].experts = _BuildsTEGroupedMLP
        specs.append(spec)
    first = get_transformer_layer_offset(config, pp_rank=parallel_state.get_pipeline_model_parallel_rank())
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=specs[first:][: case.layers // case.pp], layer_norm=Norm),
        vocab_size=VOCAB,
        max_sequence_length=SEQ,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=case.tie,
        position_embedding_type="rope" if case.rope else "learned_absolute",
    )
    for module in model.modules():
        if getattr(
            module, "is_expert", False
        ):  # else an expert's bias is added in place to a view, which torch refuses
            module.explicit_expert_comm = True
    return model


# ------------------------------------------------------------------------------------------ from one process to a rank

Sizes = dict[str, tuple[int, int]]
"""(rank, degree) by kind of parallelism."""


def place() -> Sizes:
    """Where this rank stands."""
    from megatron.core import parallel_state as ps

    return {
        "tp": (ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()),
        "pp": (ps.get_pipeline_model_parallel_rank(), ps.get_pipeline_model_parallel_world_size()),
        "dp": (ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()),
        "ep": (ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size()),
        "etp": (ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()),
    }


def as_sequential(name: str) -> str:
    """The name in a SequentialMLP of what TEGroupedMLP calls ``linear_fc1.weight3``."""
    return re.sub(r"experts\.(linear_fc\d)\.(weight|bias)(\d+)$", r"experts.local_experts.\3.\1.\2", name)


def slice_of(name: str, whole: dict[str, Tensor], case: Case, at: Sizes) -> Tensor:
    """What a rank holds under `name`, from the state of the one-process model."""

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{int(match[1]) + at['pp'][0] * case.layers // at['pp'][1]}."

    def expert(match: re.Match[str]) -> str:
        assert case.experts is not None
        return f"local_experts.{int(match[1]) + at['ep'][0] * case.experts // at['ep'][1]}."

    name = as_sequential(re.sub(r"decoder\.layers\.(\d+)\.", layer, name))
    value = whole[re.sub(r"local_experts\.(\d+)\.", expert, name)]
    rank, degree = at["etp" if ".experts." in name else "tp"]
    if name.endswith("experts.weight1"):  # (hidden, experts * ffn), with memory by expert
        mine = value.view(case.experts, HIDDEN, -1).chunk(at["ep"][1])[at["ep"][0]]
        return torch.cat([half.chunk(degree, 2)[rank] for half in mine.chunk(1 + case.gated, 2)], 2).reshape(HIDDEN, -1)
    if name.endswith("experts.weight2"):
        mine = value.view(case.experts, -1, HIDDEN).chunk(at["ep"][1])[at["ep"][0]]
        return mine.chunk(degree, 1)[rank].reshape(-1, HIDDEN)
    if "linear_fc1." in name and case.gated:
        return torch.cat([half.chunk(degree)[rank] for half in value.chunk(2)])
    if re.search(r"(linear_qkv|linear_fc1)\.(weight|bias)|(word_embeddings|output_layer)\.weight|softmax_offset", name):
        return value.chunk(degree)[rank]
    if re.search(r"(linear_proj|linear_fc2)\.weight", name):
        return value.chunk(degree, 1)[rank]
    return value


@torch.no_grad()
def load(model: nn.Module, whole: dict[str, Tensor], case: Case) -> None:
    """Gives this rank's model its slices."""
    for name, parameter in model.named_parameters():
        parameter.copy_(slice_of(name, whole, case, place()))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A plain model's state, without Megatron's empty extra states."""
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


# ---------------------------------------------------------------------------------------------------------------- runs


def lm_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """(rows, SEQ + 1) tokens -> mean cross-entropy."""
    positions = torch.arange(SEQ).expand(len(batch), SEQ)
    loss: Tensor = model(batch[:, :-1], positions, None, labels=batch[:, 1:]).mean()
    return loss


@contextmanager
def aux_scale(scale: float) -> Iterator[None]:
    """The weight of auxiliary losses in backward, which Megatron keeps in a class."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([scale]))
    yield
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([1.0]))


def _accumulate(model: nn.Module, batches: list[Tensor], parts: int) -> float:
    scale = 1 / len(batches) / parts
    total = 0.0
    for part in [part for batch in batches for part in batch.chunk(parts)]:
        with aux_scale(scale):
            loss = lm_loss(model, part) * scale
            loss.backward()
        total += loss.item()
    return total


def _at_once(model: nn.Module, batches: list[Tensor]) -> float:
    with aux_scale(1 / len(batches)):
        return sum(loss.item() / len(batches) for loss in em.accumulate(model, lm_loss, batches))


def _pipeline(model: nn.Module, batches: list[Tensor]) -> float:
    """Megatron's 1F1B schedule; the loss is known to the last stage only."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(source: Iterator[Tensor], model: nn.Module) -> Any:
        batch = next(source)
        positions = torch.arange(SEQ).expand(len(batch), SEQ)
        out = model(batch[:, :-1], positions, None, labels=batch[:, 1:])
        return out, lambda loss: (loss.mean(), {"loss": loss.mean().item()})

    losses = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=SEQ,
        micro_batch_size=len(batches[0]),
    )
    return sum(item["loss"] for item in losses) / len(batches)


def _balance(model: Any) -> None:
    """What Megatron's finalize_model_grads does beside the reduction of gradients."""
    from megatron.core.distributed import finalize_model_grads

    own: Any = sys.modules[finalize_model_grads.__module__]
    if model.config.moe_router_enable_expert_bias:
        own._update_router_expert_bias([model], model.config)
    own.reset_model_temporary_tensors(model.config, [model])


def train(
    model: nn.Module,
    optimizer: Any,
    accumulation: int,
    clip: float | None,
    rank: int,
    world: int,
    parts: int = 1,
    *,
    at_once: bool = False,
) -> dict[str, Any]:
    """The same loop for the plain and the wrapped model; with `at_once`, by `em.accumulate`.

    `parts` cuts each micro-batch, as data parallelism would.
    """
    whole = model.pre_process and model.post_process
    rows = ROWS // world
    losses, norms = [], []
    for step in range(STEPS):
        batches = [tokens(step, micro, SEQ, VOCAB)[rank * rows : (rank + 1) * rows] for micro in range(accumulation)]
        if at_once:
            total = _at_once(model, batches)
        else:
            total = _accumulate(model, batches, parts) if whole else _pipeline(model, batches)
        plain = not isinstance(optimizer, em.ShardedOptimizer)
        if plain:
            _balance(model)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip) if plain else optimizer.clip_grad_norm_(clip)
            norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {"loss": losses, "norm": norms}


def plain(case: Case, accumulation: int, clip: float | None, parts: int = 1) -> dict[str, Any]:
    """The oracle, in one process; a rank of a larger world computes it alone."""
    case = case.one()
    with shims(), model_parallel(case):
        torch.manual_seed(5)
        model = build(case)
        start = state_of(model)
        result = train(model, make_optimizer(model), accumulation, clip, 0, 1, parts)
        return {**result, "start": start, "state": state_of(model)}


def wrapped(
    case: Case, plan: Any, accumulation: int, clip: float | None, start: dict[str, Tensor], *, at_once: bool = False
) -> dict[str, Any]:
    """The same run on this rank under `plan`, which "auto" finds for a machine of four GPUs."""
    with shims(), model_parallel(case):
        model = build(case)
        load(model, start, case)
        megatron.annotate(model)
        rank, world = place()["dp"]
        options: dict[str, Any] = {}
        sample = tokens(0, 0, SEQ, VOCAB)[: ROWS // world]
        if plan == "auto":
            plan = em.Plan.auto(lm_loss, sample, hardware="a100-80g-pcie-x4")
        elif plan.rcache_blocks != "all" and case.pp == 1:
            options = {"sample": sample, "step": lm_loss}
        model, optimizer = wrap_with_least(model, plan, options)
        result = train(model, optimizer, accumulation, clip, rank, world, at_once=at_once)
        losses = torch.tensor(result["loss"], dtype=torch.float64)
        dist.all_reduce(losses)
        result["loss"] = (losses * case.pp / dist.get_world_size()).tolist()
        state = megatron.as_one_process(model, em.full_state_dict(model, all_ranks=True))
        result["state"] = {name: value for name, value in state.items() if value is not None}  # no extra state
        first = place()["pp"][0] * case.layers // case.pp
        result["state"] = {
            as_sequential(re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + first}", name)): value
            for name, value in result["state"].items()
        }
        result["statistics"] = em.inspect(model).statistics.as_dict()
        optimizer.close()
        return result


def wrap_with_least(model: nn.Module, plan: Any, options: dict[str, Any]) -> tuple[nn.Module, em.ShardedOptimizer]:
    """Under `plan`, with as many blocks as it takes."""
    try:
        return em.wrap(model, make_optimizer(model), plan=plan, **options)
    except em.PlanError as error:
        return em.wrap(model, make_optimizer(model), plan=replace(plan, rcache_blocks=least_said(error)), **options)


def everything(work: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Several runs in one message."""
    return [fn(*args) for fn, args in work]
