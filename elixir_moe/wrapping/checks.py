"""Checks of arguments and models before `wrap` starts any work.

Owns the messages. Checks only this rank; comparisons between ranks, and of memory, are in `agreement`.
"""

import os
import socket
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import AutoPlan, Plan, Tier
from elixir_moe.errors import ConfigError, LayoutError, TierError
from elixir_moe.hf.fused_experts import STACKS, adapted_parameter
from elixir_moe.hf.import_quantized import check_layers
from elixir_moe.hf.peft import adapters_of_layers, base_of, begins_with_weight, reads_weight
from elixir_moe.hf.pretrained import names_in_base
from elixir_moe.memory.slabs import is_one_memory
from elixir_moe.optim.accepted import check_optimizer, is_adam, modes_of, updates_on_disk
from elixir_moe.optim.joined import elementwise_of, trained_whole
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.quantized.packed import packed_in, packed_parameters
from elixir_moe.runtime.model_spec import TRAINED_IN
from elixir_moe.runtime.param_access import ShardedParameter
from elixir_moe.wrapping.deferred_init import computed_from, record_of, was_loaded
from elixir_moe.wrapping.expert_parallel import check_spread
from elixir_moe.wrapping.shared_memory import check_sharing

_OTHER_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel"}
"""Classes of torch that reduce gradients or shard parameters of their own."""


def check_arguments(
    model: Any, optimizer: Any, plan: Any, sample: Any, step: Any, compute_dtype: torch.dtype | None
) -> None:
    """Raises ConfigError for wrong arguments of `wrap`, or a model and optimizer that do not fit together."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"wrap needs a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"wrap needs a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not isinstance(plan, (Plan, AutoPlan)):
        raise ConfigError(f"plan={plan!r}: expected an em.Plan, such as em.Plan.zero2(), or em.Plan.auto(step, sample)")
    if isinstance(plan, AutoPlan) and step is not None:
        raise ConfigError("step and sample were given to em.Plan.auto: leave them out of em.wrap")
    if (step is None) != (sample is None):
        raise ConfigError("sample and step go together: step(model, sample) is run to learn the order of first use")
    if step is not None and not callable(step):
        raise ConfigError(f"step={step!r}: expected a function of model and batch")
    if compute_dtype not in (None, *TRAINED_IN):
        raise ConfigError(f"compute_dtype={compute_dtype!r}: expected one of {TRAINED_IN}, or None")
    guarded = any(isinstance(parameter, ShardedParameter) for parameter in model.parameters())
    if guarded or isinstance(optimizer, ShardedOptimizer) or any(hasattr(m, "_elixir") for m in model.modules()):
        raise ConfigError("this model, a part of it or the optimizer is wrapped already: call wrap once, on the whole")
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if others := sorted(kinds & _OTHER_WRAPPERS):
        raise ConfigError(f"{others[0]} holds this model's parameters already: wrap the plain model instead")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(
                f"the model has lazy modules, {name.rpartition('.')[0]!r} with {name!r}: run a forward before wrap, so "
                f"that their shapes are known; of em.sharded_init(), inside the context"
            )
    check_layers(model)
    _check_listing(model)
    check_optimizer(optimizer)
    names = {p: name for name, p in model.named_parameters()}
    given = {p for group in optimizer.param_groups for p in group["params"]}
    if not given <= names.keys():
        raise ConfigError("the optimizer has parameters that are not the model's: build it from model.parameters()")
    missing = [name for p, name in names.items() if p.requires_grad and p not in given]
    if missing:
        raise ConfigError(f"trainable parameters are in no param_group of the optimizer: {missing}; add or freeze them")
    if kept := [name for name, p in model.named_parameters() if p.requires_grad and p.grad is not None]:
        raise ConfigError(
            f"parameters have gradients of a backward before wrap: {kept[:8]}; wrap keeps none: call "
            f"optimizer.zero_grad() before wrap"
        )


def _check_listing(model: nn.Module) -> None:
    """Raises ConfigError for a module that replaces its parameters while they are listed."""

    def replaces(module: nn.Module) -> bool:
        before = list(module.parameters())
        return any(old is not new for old, new in zip(before, module.parameters(), strict=True))

    if replaces(model):
        name, module = max((item for item in model.named_modules() if replaces(item[1])), key=lambda item: len(item[0]))
        raise ConfigError(
            f"{name!r} ({type(module).__module__}.{type(module).__name__}) puts new parameters in the place of its own "
            f"whenever they are listed, so that no shard or optimizer can hold them: leave it out of target_modules if "
            f"it is an adapter's, and adapt projections that are nn.Linear instead"
        )


def check_whole_matrices(plan: Plan | AutoPlan, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if an optimizer of whole matrices cannot train under the plan, or with the other one."""
    whole, elementwise = trained_whole(optimizer), elementwise_of(optimizer)
    if not whole:
        return
    name = next(iter(whole.values()))
    if elementwise is not None and (modes := modes_of(elementwise)):
        raise ConfigError(
            f"{type(elementwise).__name__} has {modes[0]}(), and cannot be joined with {name}: use one that is always "
            f"in the same mode, such as AdamW"
        )
    if plan.precision.is_narrow:
        raise ConfigError(
            f"master={plan.master!r} and moments={plan.moments!r} are for Adam and AdamW, and {name} keeps fp32: leave "
            f"both out of the plan"
        )


def check_disk(plan: Plan | AutoPlan, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if chunks on disk lack a folder, or the optimizer cannot update them; TierError if the folder
    cannot be used, even if no chunk would go there today."""
    if isinstance(plan, Plan) and plan.disk_chunks and plan.disk is None:
        raise ConfigError(
            f"the plan has disk_chunks={plan.disk_chunks}: say in which folder their file goes, with "
            f"em.Plan.offload(disk=...) or dataclasses.replace(plan, disk=...)"
        )
    trains = any(p.requires_grad for group in optimizer.param_groups for p in group["params"])
    if plan.disk is not None and trains and not updates_on_disk(optimizer):
        raise ConfigError(
            f"chunks on disk are updated by Adam and AdamW of torch, without amsgrad, and by Muon; this is "
            f"{type(elementwise_of(optimizer)).__name__}: use one of them, or leave disk out"
        )
    if plan.disk is not None and not os.access(plan.disk, os.W_OK | os.X_OK):
        why = "cannot be written" if os.path.isdir(plan.disk) else "does not exist"
        raise TierError(f"the folder disk={plan.disk!r} {why} on {socket.gethostname()}: make it, or name another")


def warn_of_one_memory(plan: Plan, layout: Layout, device: torch.device) -> None:
    """Warns of chunks that are kept in host memory where that is the GPU's memory."""
    if not is_one_memory(device):
        return
    offloaded = sum(plan.tier_of(layout, chunk) is Tier.HOST for chunk in layout.chunks)
    if offloaded:
        warnings.warn(
            f"this GPU and its host have one memory: {offloaded} of {len(layout.chunks)} chunks kept in host memory "
            "free nothing on the device, and are copied within that memory to be used; keep them on the device "
            "(em.Plan.zero3()), or let em.Plan.auto(..., disk=...) put on a disk what does not fit",
            stacklevel=3,
        )


def check_precision(plan: Plan | AutoPlan, optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if the optimizer cannot keep its state as the plan says."""
    if plan.precision.is_narrow and not is_adam(optimizer):
        raise ConfigError(
            f"master={plan.master!r} and moments={plan.moments!r} are for Adam and AdamW of torch, without amsgrad; "
            f"this is {type(optimizer).__name__}: use one of them, or leave both out of the plan"
        )


def check_modules(model: nn.Module) -> None:
    """Raises ConfigError for modules whose forward bypasses autograd or hooks, for adapters that peft has left out, and
    for tensors that share a parameter's memory."""
    _check_targets(model)
    _check_begun(model)
    check_adapted_bytes(model)
    check_spread(model)
    check_sharing(model)
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigError(
                f"{name!r} is of torch.jit, which holds its parameters where wrap cannot reach: wrap the plain module, "
                f"not what torch.jit makes of it"
            )
        if getattr(module, "max_norm", None) is not None and dist.get_world_size() > 1:
            raise ConfigError(
                f"{name!r} writes to its weight in forward (max_norm), on each rank to the rows it meets: ranks would "
                f"diverge; clip row norms after optimizer.step() instead, on all ranks alike"
            )


def _check_targets(model: Any) -> None:
    """Raises ConfigError for adapters whose ranks follow from gradients, and for parameters that were to be adapted and
    are not in the model: peft only warns of them."""
    found = [
        f".{name}.{adapted_parameter(module)}".replace(".base_layer", "") for name, module in model.named_modules()
    ]
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        kind = getattr(config, "peft_type", None)
        if (kind == "ADALORA" or (kind == "ADAMSS" and config.use_asa)) and not config.inference_mode:
            raise ConfigError(
                f"adapter {adapter!r} is of {kind.value}, which chooses ranks by parameter.grad after each step: "
                f"gradients are in shards, and step() clears them; train LoRA, whose rank is fixed"
                f"{', or leave use_asa out' * (kind == 'ADAMSS')}"
            )
        for target in getattr(config, "target_parameters", None) or ():
            if not any(name.endswith(f".{target}") for name in found):
                some = [name for name, p in base_of(model).named_parameters() if p.dim() > 2][:2]
                raise ConfigError(
                    f"target_parameters of adapter {adapter!r} has {target!r}, which is not in the model, so that peft "
                    f"trains nothing there: correct it, or leave it out; names are as {some}"
                )


def _check_begun(model: nn.Module) -> None:
    """Raises ConfigError for adapters that began with the bytes of a weight in the place of its numbers."""
    found = [getattr(module, "peft_config", None) for module in model.modules()]
    configs = [item for each in found if isinstance(each, dict) for item in each.items()]
    kinds = {adapter: begins_with_weight(config) for adapter, config in configs}
    adapters = adapters_of_layers(model)
    for name, module, _, packed in packed_parameters(model):
        for adapter in sorted(adapters.get(module, set()) - packed.adapters):
            if (kind := kinds.get(adapter)) is not None:
                raise ConfigError(
                    f"adapter {adapter!r} is of {kind}, which begins with what peft computes from the weight, and "
                    f"{name!r} was packed as {packed.scheme} before: build the model again, and add the adapters "
                    f"before em.quantize"
                )


def check_adapted_bytes(model: nn.Module) -> None:
    """Raises ConfigError for adapters that peft would add to the bytes of a weight, and for those that read them."""
    for name, module in model.named_modules():
        reading = reads_weight(module)
        if reading is not None and (packed := packed_in(module.get_base_layer())):  # type: ignore[operator]
            raise ConfigError(
                f"{name!r} has {reading}, which read the base's weight, and it is packed as "
                f"{next(iter(packed.values())).scheme}: take LoRA, or quantize only other layers "
                f"(em.quantize(..., skip=...))"
            )
        own = adapted_parameter(module)
        if own is not None and own not in STACKS:
            packed = packed_in(module.get_base_layer())  # type: ignore[operator]
            if own in packed:
                raise ConfigError(
                    f"{name!r} has adapters (target_parameters) on {own!r}, which is packed as {packed[own].scheme}: "
                    f"peft adds them to the weight itself. Adapt linear layers by target_modules, or leave these "
                    f"weights as they are, as in em.quantize(..., skip=...)"
                )


def check_data(model: nn.Module, weights: Any, step: Any) -> None:
    """Raises LayoutError if parameters on meta have no source, ConfigError if `step` would run on them, or if adapters
    would be drawn from a base that is not the folder's."""
    on_meta = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta}
    without = [name for name, tensor in on_meta.items() if record_of(tensor) is None]
    if without and weights is None:
        raise LayoutError(
            f"{without[0]!r} and {len(without) - 1} more are on the meta device: build the model inside "
            f"em.sharded_init(), pass weights=, a folder of safetensors, or materialize the model before wrap"
        )
    if on_meta and step is not None:
        raise ConfigError("step cannot run a model on the meta device: leave step and sample out")
    if weights is not None and hasattr(model, "peft_config"):
        _check_adapters(model, on_meta)


def _check_adapters(model: nn.Module, on_meta: Mapping[str, torch.Tensor]) -> None:
    base = names_in_base(model)
    of_base = {name: tensor for name, tensor in on_meta.items() if tensor in base}
    of_adapters = {name: tensor for name, tensor in on_meta.items() if tensor not in base}
    for name, tensor in of_base.items():
        if tensor.requires_grad and was_loaded(tensor):
            raise ConfigError(
                f"{name!r} has been loaded with an adapter, and weights= would read the base's in its place: load "
                f"the base with from_pretrained before the adapter, and leave weights out"
            )
    for name, tensor in of_adapters.items():
        if record_of(tensor) is None:
            raise LayoutError(
                f"{name!r} belongs to an adapter and is on the meta device, and the folder has only the base: build "
                f"the peft model inside em.sharded_init()"
            )
    instead = "load the base with from_pretrained before peft, and leave weights out"
    if (computed := computed_from(of_adapters, base)) is not None:
        raise ConfigError(
            f"{computed!r} is computed from weights of the base, which are in the folder and not read yet: {instead}"
        )
    if (kasa := next((name for name in of_adapters if ".lora_diag." in name), None)) is not None:
        raise ConfigError(
            f"{kasa!r} belongs to KaSA, for which peft has changed weights of the base, and weights= would read the "
            f"folder's in their place: {instead}"
        )
