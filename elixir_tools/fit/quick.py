"""Whether a step fits and how long it takes, in formulas: no trace, no layout and no search.

Owns the formulas. They know a transformer by its config and by the shapes of its parameters, and hold for layers that
are recomputed in backward. Bytes and operations of a step are `Profile`'s, seconds are `cost`'s, and state is spread
over the tiers as a search would: as much on the device as fits, the rest in host memory, then on disk. The coefficients
are fitted to traces; `docs/quick_error.py` compares the answers with exact ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from elixir_moe.errors import ConfigError
from elixir_moe.ext.models import logical_numel, packed_parameters, weights_behind
from elixir_moe.ext.planner import Profile, Task, bytes_a_weight, cost
from elixir_moe.ext.plans import Precision, Tier
from elixir_tools.fit.figures import Figures

_STATE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_HEAD_PASSES = 2
"""Products of a frozen head in a loss without logits: the logits, and the gradient of what the head reads."""
_ATTENTION = 9
"""Operations of causal attention for each token, token of its row and element of a query: 2, 2 again, 5 backward."""
_EAGER_ATTENTION = 16
"""Operations where scores are computed whole."""
_SCORE_BYTES, _SCORE_TRAFFIC = 5.2, 90
"""Bytes held, and read and written, of each score that is computed whole."""
_WIDTH_TRAFFIC, _INNER_TRAFFIC, _VOCABULARY_TRAFFIC = 384, 50, 30
"""Bytes read and written in a layer for each element of a token's width, queries, keys and values; of the inner width
of its MLPs; and in the loss for each entry of the vocabulary."""
_ROUTED = 1.3
"""A routed row, in elements of the inner width."""
_LAYER_BYTES, _ROUTED_BYTES = 14, 8.4
"""Bytes held in the backward of a layer for each element of a token's width and of its inner width, and of routed
rows."""
_LOSS_BYTES = 8
"""Bytes held in the loss for each element of a token's width, besides a gradient of the head in two dtypes."""
_BLOCKS = 2
"""Largest layers that are gathered at once: one in use, and one on its way."""
_FORWARD = 0.25
"""Part of the products of a step that are its forward's, behind which updates in host memory hide."""
_TILED_IN_DEVICE = 0.25
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
    trained, frozen_bytes, decoded = 0, 0, 0.0
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
        if p in schemes:
            decoded += 3 * numel * bytes_a_weight(schemes[p], dtype, native=True)
    head_numel, head_trains = sizes.vocabulary * sizes.width, head is not None and head.requires_grad
    passes = _HEAD_PASSES + head_trains * (1 + recompute)
    eager = getattr(config, "_attn_implementation", "sdpa") == "eager"
    scores = tokens * seq * sizes.heads
    attention = (_EAGER_ATTENTION if eager else _ATTENTION) * tokens * seq * sizes.queries * len(layers)
    inner = sizes.inner + _ROUTED * sizes.routed
    traffic = (
        len(layers) * tokens * (_WIDTH_TRAFFIC * (sizes.width + sizes.queries + sizes.keys) + _INNER_TRAFFIC * inner)
    )
    traffic += _VOCABULARY_TRAFFIC * tokens * sizes.vocabulary + decoded + eager * _SCORE_TRAFFIC * scores * len(layers)
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
        layer_bytes=max(nbytes for nbytes, _ in groups.values()),
        layer_trained_bytes=layer_trained,
        layers=len(layers),
        can_tile=not any("experts" in name and "lora_" in name for name, _ in model.named_parameters()),
    )


def quick(step: Step, task: Task, *, precision: Precision, itemsize: int) -> Figures:
    """The answer for the machine of `task`, whose profile is the step's; elements have `itemsize` bytes."""
    kept = (0,) if task.hardware.one_memory else (0, 1)
    found = [_placed(step, task.keeping(regions), precision, itemsize) for regions in kept]
    return min(found, key=lambda found: (sum(found.missing.values()), found.seconds.step))


def _placed(step: Step, task: Task, precision: Precision, itemsize: int) -> Figures:
    ranks, allowed, host = task.gpus, task.allowed_bytes, task.host_bytes
    sums = 4 if task.passes > 1 else 0
    state = _STATE_BYTES[precision.master] + task.moments * _STATE_BYTES[precision.moments]
    whole = (step.trained * (itemsize + state + sums) + step.frozen_bytes) // ranks
    widened = step.layer_trained_bytes * 4 // itemsize if ranks > 1 else 0
    blocks = _BLOCKS * step.layer_bytes + step.layer_trained_bytes + widened
    if step.can_tile:
        blocks = min(blocks, int(_TILED_IN_DEVICE * task.capacity_bytes))
    if ranks == 1 and whole + step.layer_trained_bytes <= allowed:
        blocks = step.layer_trained_bytes  # weights are used where they are
    on_device = max(0, min(whole, allowed - blocks))
    away = whole - on_device
    on_host = min(away, max(host, 0)) if task.disk_bytes else away
    on_disk = away - on_host
    missing = {Tier.DEVICE: blocks - allowed, Tier.HOST: on_host - host}
    if task.disk_bytes:
        missing[Tier.DISK] = on_disk - task.disk_bytes
    outside, disk = (away / whole, on_disk / whole) if whole else (0.0, 0.0)
    cached = min(1.0, blocks / step.values_bytes)
    gathers = task.passes * (2 - cached)
    numel = step.trained // ranks
    in_host = int(outside * step.frozen_bytes)  # frozen weights lie once in a host's memory, and each rank fetches all
    fetched = gathers * (in_host + outside * step.trained * itemsize / ranks)
    gathered = gathers * (step.trained * itemsize + step.frozen_bytes - in_host)
    reduced = task.passes * step.trained * 4
    everyone, narrow = tuple(range(ranks)), precision.is_narrow
    on_gpu, on_cpu, on_nvme = (int(numel * share) for share in (1 - outside, outside - disk, disk))
    moved = cost.Traffic(
        fetched_bytes=int(fetched),
        read_bytes=0,
        offloaded_bytes=int(task.passes * outside * numel * itemsize),
        summed_bytes=0,
        kept_bytes=task.accumulation * task.kept_bytes // task.together,
        gathered_bytes=int(gathered) * (ranks > 1),
        reduced_bytes=reduced * (ranks > 1),
        device_numel=on_gpu,
        host_numel=on_cpu,
        narrow_numel=(on_gpu * narrow, on_cpu * narrow),
        disk_numel=on_nvme,
        disk_read_bytes=on_nvme * state,
        disk_written_bytes=on_nvme * state,
        collectives=((everyone, int(gathered + reduced), 3 * step.layers),) if ranks > 1 else (),
        gathered_numel=step.profile.parameters,
        units=step.layers,
    )
    seconds = task.seconds(moved)
    forward = _FORWARD * max(seconds.compute, seconds.fetch) / task.passes
    hidden = min(seconds.host_update, outside * forward) if task.overlaps_updates else 0.0
    held = min(on_device + blocks, allowed) if blocks <= allowed else on_device + blocks
    return Figures(
        task=task,
        exact=False,
        device_bytes=cost.device_peak(task.profile, held, task.imbalance),
        host_bytes=on_host + task.kept_bytes,
        disk_bytes=on_disk,
        seconds=replace(seconds, hidden_update=hidden),
        moved=moved,
        missing={tier: nbytes for tier, nbytes in missing.items() if nbytes > 0},
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
        )


def _layers(model: nn.Module) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


def _parameters(model: nn.Module, layers: nn.ModuleList) -> Iterator[tuple[str, nn.Parameter, str]]:
    """(name, parameter, number of its layer or the name of its module)."""
    number = {p: str(i) for i, layer in enumerate(layers) for p in layer.parameters()}
    for name, p in model.named_parameters():
        yield name, p, number.get(p, name)
