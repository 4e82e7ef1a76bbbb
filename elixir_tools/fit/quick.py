"""Whether a step fits and how long it takes, in formulas: no trace, no layout and no search.

Owns the formulas. They know a transformer by its config and by the shapes of its parameters, and hold for layers that
are recomputed in backward. Bytes and operations of a step are `Profile`'s, seconds are `cost`'s, and memory is divided
as a search would: blocks for more or less of the weights, state in the rest of the device, then in host memory, then on
disk. The coefficients are those of traces; `docs/quick_error.py` compares the answers with exact ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from elixir_moe.errors import ConfigError
from elixir_moe.ext.models import logical_numel, packed_parameters, weights_behind
from elixir_moe.ext.planner import Profile, Task, bytes_a_weight, cost
from elixir_moe.ext.plans import Precision, Tier
from elixir_tools.fit.figures import Figures

_STATE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_SUM_BYTES = 4
"""An element of a sum of gradients."""
_HEAD_PASSES = 2
"""Products of a frozen head in a loss without logits: the logits, and the gradient of what the head reads."""
_ATTENTION = 9
"""Operations of causal attention for each token, token of its row and element of a query: 2, 2 again, 5 backward."""
_EAGER_ATTENTION = 16
"""Operations where scores are computed whole."""
_SCORE_BYTES, _SCORE_TRAFFIC = 5.2, 100
"""Bytes held, and of traffic, of each score that is computed whole."""
_WIDTH_TRAFFIC, _QUERY_TRAFFIC, _KEY_TRAFFIC, _ROUTED_TRAFFIC = 48, 124, 62, 70
"""Bytes of traffic, as `Profile` counts it, in forward, recomputation and backward of a layer, without its norms and
adapters, for each element of a token's width, its queries, its keys and values, and the rows of its experts."""
_INNER_TRAFFIC, _EXPERTS_INNER_TRAFFIC, _CLAMPED_TRAFFIC = 42, 74, 175
"""Likewise for the inner width of its MLP, of its experts, and of experts whose activation is clamped."""
_NORM_TRAFFIC, _HEAD_NORM_TRAFFIC, _SCALE_TRAFFIC = 204, 232, 8
"""Bytes of a norm for each element, of one of each head, and more if its weight is trained."""
_ADAPTER_TRAFFIC, _EXPERT_TRAFFIC = (6, 24), (6, 12)
"""Bytes of an adapter for each element that it reads, and that it adds to; likewise of an expert's."""
_ENTRY_TRAFFIC, _LOGIT_TRAFFIC, _HEAD_TRAFFIC = 80, 44, 16
"""Bytes of a loss without logits for each token and entry of the vocabulary, of one with logits, and for each element
of a head that is trained."""
_LAYER_BYTES, _ROUTED_BYTES = 14, 8.4
"""Bytes held in the backward of a layer for each element of a token's width and of its inner width, and of routed
rows."""
_LOSS_BYTES = 8
"""Bytes held in the loss for each element of a token's width, besides a gradient of the head in two dtypes."""
_BLOCKS = 2
"""Largest layers that are gathered at once: one in use, and one on its way."""
_CACHED = tuple(part / 8 for part in range(9))
"""Parts of the weights for which blocks are tried."""
_FORWARD = 0.25
"""Part of the products of a step that are its forward's, behind which updates in host memory hide."""
_TILED_IN_DEVICE = 0.2
"""Part of a device that blocks take at most where parameters can be cut into tiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The needs of a step on any machine."""

    profile: Profile
    """Without parameters, parts and events."""
    trained: int
    """Elements of this rank that are trained, before they are sharded."""
    frozen_bytes: int
    values_bytes: int
    """Bytes of all weights as a step reads them."""
    numel: int
    """Elements of all weights as they lie in chunks, quantized ones packed."""
    layer_bytes: int
    """Bytes of the largest layer, embedding or head."""
    layer_trained_bytes: int
    """The trained ones among them."""
    layers: int
    can_tile: bool


def step_of(
    model: nn.Module, batch: int, seq: int, *, dtype: torch.dtype, fused: bool = True, recompute: bool = False
) -> Step:
    """The step of a Hugging Face model without data, with its adapters and its quantized weights.

    The loss has no logits if `fused`; `recompute` is that of `linear_cross_entropy`.

    Raises ConfigError if the config lacks the sizes that the formulas need.
    """
    config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
    tokens, sizes = batch * seq, _Sizes.of(config)
    behind = weights_behind(model)
    schemes = {getattr(module, own): packed.scheme for _, module, own, packed in packed_parameters(model)}
    layers = _layers(model)
    products = 0.0
    groups: dict[str, list[int]] = {}
    trained, frozen_bytes, decoded, traffic = 0, 0, 0.0, 0.0
    head = getattr(model.get_output_embeddings(), "weight", None)  # type: ignore[operator]
    for name, p, layer in _parameters(model, layers):
        numel, wide = behind.get(p, logical_numel(p)), p.is_floating_point()
        nbytes = numel * dtype.itemsize if wide and p not in behind else p.numel() * p.itemsize
        group = groups.setdefault(layer, [0, 0])
        group[0] += nbytes
        if p.requires_grad:
            trained, group[1] = trained + numel, group[1] + nbytes
        else:
            frozen_bytes += nbytes
        if p.dim() > 1 and layer.isdigit():
            share = sizes.active / sizes.experts if sizes.experts and "experts" in name.split(".") else 1.0
            # the last product of a layer is not run again, unless something of the layer reads its result
            last = name.endswith("mlp.down_proj.weight") and p.requires_grad and not sizes.reads_last
            products += 2 * tokens * numel * share * (3 + p.requires_grad - last)
        if layer.isdigit():
            traffic += tokens * _of_norms_and_adapters(name, p, sizes)
        if p in schemes:
            decoded += 3 * numel * bytes_a_weight(schemes[p], dtype, native=True)
    head_numel, head_trains = sizes.vocabulary * sizes.width, head is not None and head.requires_grad
    passes = _HEAD_PASSES + head_trains * (1 + recompute)
    eager = getattr(config, "_attn_implementation", "sdpa") == "eager"
    scores = tokens * seq * sizes.heads
    attention = (_EAGER_ATTENTION if eager else _ATTENTION) * tokens * seq * sizes.queries * len(layers)
    each = _WIDTH_TRAFFIC * sizes.width + _QUERY_TRAFFIC * sizes.queries + _KEY_TRAFFIC * sizes.keys
    inner = _CLAMPED_TRAFFIC if sizes.clamps else _EXPERTS_INNER_TRAFFIC if sizes.experts else _INNER_TRAFFIC
    each += _ROUTED_TRAFFIC * sizes.routed + inner * sizes.inner
    traffic += len(layers) * (tokens * each + eager * _SCORE_TRAFFIC * scores) + decoded
    traffic += (_ENTRY_TRAFFIC if fused else _LOGIT_TRAFFIC) * tokens * sizes.vocabulary
    traffic += _HEAD_TRAFFIC * head_numel * head_trains
    kept = len(layers) * tokens * sizes.width * dtype.itemsize
    within = tokens * (_LAYER_BYTES * (sizes.width + sizes.inner) + _ROUTED_BYTES * sizes.routed)
    within += eager * _SCORE_BYTES * scores
    in_loss = _LOSS_BYTES * tokens * sizes.width
    if head is not None and head.requires_grad:
        in_loss += (4 + dtype.itemsize) * head_numel
    if not fused:
        in_loss += 3 * 4 * tokens * sizes.vocabulary
    held = int(max(within, in_loss))
    layer_trained = max(nbytes for _, nbytes in groups.values())
    sums, of_region = 4 * layer_trained // dtype.itemsize, kept // max(len(layers), 1)
    profile = Profile(
        params=(),
        order=(),
        parts=(),
        events=(),
        parameters=sum(behind.get(p, logical_numel(p)) for p in model.parameters()),
        tokens=tokens,
        flops=int(products + passes * 2 * tokens * head_numel + attention),
        traffic_bytes=int(traffic),
        activation_bytes=kept + held,
        buffer_bytes=0,
        kept=(kept,),
        kept_peaks=(kept + held, held + 2 * of_region),
        pass_peaks=(((kept + held + sums, kept),), ((held + sums + 2 * of_region, of_region),)),
    )
    return Step(
        profile=profile,
        trained=trained,
        frozen_bytes=frozen_bytes,
        values_bytes=sum(nbytes for nbytes, _ in groups.values()),
        numel=sum(p.numel() for p in model.parameters()),
        layer_bytes=max(nbytes for nbytes, _ in groups.values()),
        layer_trained_bytes=layer_trained,
        layers=len(layers),
        can_tile=not any("experts" in name and "lora_" in name for name, _ in model.named_parameters()),
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to keep weights and state, as a search chooses among plans."""

    regions: int
    """Whether the inputs of layers are in host memory: 0 or 1."""
    cached: float
    """The part of the weights for which there are blocks, if a step does not need more. State takes the rest of the
    device."""
    values_on_disk: bool
    """Whether values and sums of gradients are on disk with the state that is there."""


def quick(step: Step, task: Task, *, precision: Precision, itemsize: int) -> Figures:
    """The answer for the machine of `task`, whose profile is the step's; elements have `itemsize` bytes."""
    regions = (0,) if task.hardware.one_memory else (0, 1)
    ways = [_Way(*way) for way in product(regions, _CACHED, (False, True) if task.disk_bytes else (False,))]
    found = []
    for together in task.dials if task.batches_per_pass is None else [task.batches_per_pass]:
        passing = task.passing(together)
        summed = (task.accumulation - passing.passes) * cost.SUM_TRAFFIC * step.trained // task.accumulation
        profile = replace(passing.profile, traffic_bytes=passing.profile.traffic_bytes + summed)
        passing = replace(passing, profile=profile)
        found += [_placed(step, passing, way, precision, itemsize) for way in ways]
    return min(found, key=lambda found: (sum(found.missing.values()), found.seconds.step))


def _placed(step: Step, task: Task, way: _Way, precision: Precision, itemsize: int) -> Figures:
    task = task.keeping(way.regions)
    ranks, allowed, host = task.gpus, task.allowed_bytes, task.host_bytes
    sums = _SUM_BYTES if task.passes > 1 else 0
    state = _STATE_BYTES[precision.master] + task.moments * _STATE_BYTES[precision.moments]
    numel, frozen = step.trained // ranks, step.frozen_bytes // ranks
    whole = numel * (itemsize + state + sums) + frozen
    widened = step.layer_trained_bytes * _SUM_BYTES // itemsize if ranks > 1 else 0
    blocks = _BLOCKS * step.layer_bytes + step.layer_trained_bytes + widened
    if step.can_tile:
        blocks = min(blocks, int(_TILED_IN_DEVICE * task.capacity_bytes))
    if ranks == 1 and whole + step.layer_trained_bytes <= allowed:
        blocks = step.layer_trained_bytes  # weights are used where they are
    blocks = max(blocks, min(int(way.cached * step.values_bytes), allowed))
    room = max(0, allowed - blocks)
    in_memory = 0 if way.values_on_disk else numel * (itemsize + sums)  # even if all state is on disk
    away, disk = max(0.0, 1 - room / whole) if whole else 0.0, 0.0  # parts of the whole, and of what is away
    if task.hardware.one_memory:
        disk = float(bool(task.disk_bytes) and away > 0)
        away = min(1.0, away * whole / (whole - in_memory)) * disk
    elif task.disk_bytes and away:
        disk = min(1.0, max(0.0, away * whole - host) / (away * (whole - in_memory)))
    held = int((1 - away) * whole) + blocks
    on_host = int(away * ((1 - disk) * whole + disk * in_memory))
    on_disk = int(away * disk * (numel * (state + way.values_on_disk * (itemsize + _SUM_BYTES)) + frozen))
    missing = {tier: nbytes for tier, nbytes in task.missing_bytes(held, on_host).items() if nbytes > 0}
    if task.disk_bytes and on_disk > task.disk_bytes:
        missing[Tier.DISK] = on_disk - task.disk_bytes

    served = step.values_bytes * (away if ranks == 1 else 1)  # one rank uses in place what is on its device
    again = 1 - min(1.0, blocks / served) if served else 0.0
    gathers = 1 + (2 * task.passes - 1) * again  # an update ends what is cached of trained weights
    frozen_gathers = 2 * task.passes * again
    in_host = away * (1 - disk) * step.frozen_bytes  # frozen weights lie there once, and each rank fetches all
    read = frozen_gathers * away * disk * frozen
    values = gathers * away * numel * itemsize
    gathered = gathers * step.trained * itemsize + frozen_gathers * (step.frozen_bytes - in_host)
    reduced = task.passes * step.trained * 4
    everyone, narrow = tuple(range(ranks)), precision.is_narrow
    on_gpu, on_cpu, on_nvme = (int(numel * share) for share in (1 - away, away * (1 - disk), away * disk))
    summed = on_nvme * _SUM_BYTES * way.values_on_disk
    moved = cost.Traffic(
        fetched_bytes=int(frozen_gathers * in_host + read + values),
        read_bytes=int(read + way.values_on_disk * disk * values),
        offloaded_bytes=int(task.passes * away * numel * itemsize),
        summed_bytes=summed,
        kept_bytes=task.accumulation * task.kept_bytes // task.together,
        gathered_bytes=int(gathered) * (ranks > 1),
        reduced_bytes=reduced * (ranks > 1),
        device_numel=on_gpu,
        host_numel=on_cpu,
        narrow_numel=(on_gpu * narrow, on_cpu * narrow),
        disk_numel=on_nvme,
        disk_read_bytes=on_nvme * state + summed,
        disk_written_bytes=on_nvme * (state + way.values_on_disk * itemsize),
        collectives=((everyone, int(gathered + reduced), 3 * step.layers),) if ranks > 1 else (),
        gathered_numel=step.numel,
        units=step.layers,
    )
    seconds = task.seconds(moved)
    # a forward waits for the update of its first chunk, which is taken to be as long as a layer
    forward = _FORWARD * max(seconds.compute, seconds.fetch, seconds.disk) / task.passes
    first = min(1.0, step.layer_bytes / (step.trained * itemsize)) if step.trained else 0.0
    hidden = min((1 - first) * seconds.host_update, away * forward) if task.overlaps_updates else 0.0
    return Figures(
        task=task,
        exact=False,
        device_bytes=cost.device_peak(task.profile, held, task.imbalance),
        host_bytes=on_host + task.kept_bytes,
        disk_bytes=on_disk,
        seconds=replace(seconds, hidden_update=hidden),
        moved=moved,
        missing=missing,
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The sizes of a transformer."""

    width: int
    vocabulary: int
    heads: int
    queries: int
    """Elements of a token's queries."""
    keys: int
    """Elements of its keys and values."""
    inner: int
    """Inner width of its MLPs or of the experts that it is sent to."""
    experts: int
    active: int
    routed: int
    """Elements of the rows that its experts are given."""
    reads_last: bool
    """Whether a layer has a norm behind its MLP."""
    clamps: bool
    """Whether its MLPs clamp what they multiply."""

    @classmethod
    def of(cls, config: Any) -> "_Sizes":
        def first(*names: str, default: int | None = None) -> int:
            for name in names:
                if isinstance(value := getattr(config, name, None), int):
                    return value
            if default is None:
                raise ConfigError(f"--quick has no formulas for {config.model_type}, whose config lacks {names[0]}: "
                                  "ask without --quick")  # fmt: skip
            return default

        width, heads = first("hidden_size"), first("num_attention_heads")
        head = first("head_dim", default=width // heads)
        if getattr(config, "kv_lora_rank", None):
            head = config.qk_nope_head_dim + config.qk_rope_head_dim
        groups = heads if getattr(config, "kv_lora_rank", None) else first("num_key_value_heads", default=heads)
        experts = first("num_experts", "num_local_experts", "n_routed_experts", default=0)
        active = first("num_experts_per_tok", default=0) if experts else 0
        inner = first("intermediate_size")
        if experts:
            each = first("moe_intermediate_size", "intermediate_size")
            inner = each * (active + first("n_shared_experts", default=0))
        return cls(
            width=width,
            vocabulary=first("vocab_size"),
            heads=heads,
            queries=heads * head,
            keys=2 * groups * head,
            inner=inner,
            experts=experts,
            active=active,
            routed=active * width,
            reads_last="gemma" in config.model_type,
            clamps=config.model_type == "gpt_oss",
        )


def _layers(model: nn.Module) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


def _of_norms_and_adapters(name: str, p: nn.Parameter, sizes: _Sizes) -> float:
    """Bytes that a token reads and writes for a norm or an adapter of a layer."""
    *_, module, own = name.split(".")
    if "norm" in module and own == "weight":
        of_heads = {"q_norm": sizes.queries, "k_norm": sizes.keys // 2}.get(module)
        elements, each = (p.numel(), _NORM_TRAFFIC) if of_heads is None else (of_heads, _HEAD_NORM_TRAFFIC)
        return elements * (each + _SCALE_TRAFFIC * p.requires_grad)
    if ".lora_" not in name:
        return 0
    rows, added = (sizes.active, _EXPERT_TRAFFIC) if ".experts." in name else (1, _ADAPTER_TRAFFIC)
    adds = ".lora_B." in name
    return rows * added[adds] * p.shape[1 - adds]


def _parameters(model: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[str, nn.Parameter, str]]:
    """(name, parameter, number of its layer or the name of its module)."""
    number = {p: str(i) for i, layer in enumerate(layers) for p in layer.parameters()}
    for name, p in model.named_parameters():
        yield name, p, number.get(p, name)
