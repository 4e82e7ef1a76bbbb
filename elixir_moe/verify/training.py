"""The same few steps twice: under the plan on all ranks, and in plain PyTorch in one process.

Owns both runs and what they record. In the plain run every rank's rows go through the model one after another and the
gradients are averaged, which is what a step on several ranks means. Compares nothing.
"""

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe import MoE, Plan, ShardedOptimizer, full_state_dict, load, save, save_pretrained, wrap
from elixir_moe.state.checkpoint.storage import read_manifest
from elixir_moe.state.checkpoint.whole import Whole
from elixir_moe.verify.subject import Source, Subject, batch_of, own_loss, parts_of

LR, EPS, CLIP = 1e-2, 1e-4, 1.0
"""Of AdamW, and the largest gradient norm. The tolerances are derived from them."""
_SEED, _OTHER_SEED, _PROBE = 5, 6, 999

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What both runs do."""

    source: Source
    """The model, its loss and its batches."""
    plan: Plan
    """The plan to verify."""
    ranks: int
    """Processes of the run under the plan."""
    steps: int
    """Steps before the save, and as many after the load."""
    accumulation: int
    """Micro-batches of a step."""
    compute_dtype: torch.dtype | None
    """Of `em.wrap`."""
    folder: Path
    """For the checkpoint, the export and the records."""


@dataclass(kw_only=True, slots=True)
class Record:
    """What a run has seen; lists have an entry for each step."""

    losses: list[float] = field(default_factory=list)
    """Means over ranks and micro-batches."""
    norms: list[float] = field(default_factory=list)
    """Of the gradient of the whole model, before it is clipped."""
    gradients: list[dict[str, float]] = field(default_factory=list)
    """Norm of each parameter's gradient."""
    weights: list[Weights] = field(default_factory=list)
    """Before the first step, and after each."""
    moments: dict[str, Weights] = field(default_factory=dict)
    """Of AdamW, when the checkpoint was saved; the square root of the second, which has the size of a gradient."""
    loaded: Weights = field(default_factory=dict)
    """Weights after the load into a model that was made anew."""
    started: Weights = field(default_factory=dict)
    """Weights that `em.wrap(weights=...)` read from a folder of transformers."""
    outputs: Tensor | None = None
    """Logits after the last step; the loss where the model has none."""


# ------------------------------------------------------------------------------------------------------ under the plan


def under_the_plan(setup: Setup) -> None:
    """Trains, saves, loads into a new model, trains on and exports. Rank 0 leaves a record. Collective."""
    record = Record()
    subject, model, optimizer = _wrapped(setup, _SEED)
    record.weights.append(_full(model))
    for step in range(setup.steps):
        _wrapped_step(setup, subject, model, optimizer, record, step)
    save(setup.folder / "checkpoint", model, optimizer)
    optimizer.close()
    del subject, model, optimizer
    gc.collect()  # hooks and model point at each other
    subject, model, optimizer = _wrapped(setup, _OTHER_SEED)
    load(setup.folder / "checkpoint", model, optimizer)
    record.loaded = _full(model)
    for step in range(setup.steps, 2 * setup.steps):
        _wrapped_step(setup, subject, model, optimizer, record, step)
    record.outputs = _outputs(subject, model)
    save_pretrained(model, setup.folder / "export")
    optimizer.close()
    _start_from_a_folder(setup, record)
    if dist.get_rank() == 0:
        torch.save({name: getattr(record, name) for name in Record.__dataclass_fields__}, setup.folder / "record.pt")


def _wrapped(setup: Setup, seed: int, **options: Any) -> tuple[Subject, nn.Module, ShardedOptimizer]:
    torch.manual_seed(seed)
    subject = setup.source.build(over_ranks=True)
    sample = list(parts_of(batch_of(subject, 0, 0), setup.ranks))[dist.get_rank()]
    model, optimizer = wrap(
        subject.model,
        _optimizer(p for p in subject.model.parameters() if p.requires_grad),
        plan=setup.plan,
        step=subject.step,
        sample=sample,
        compute_dtype=setup.compute_dtype,
        device=torch.device("cpu"),
        **options,
    )
    return subject, model, optimizer


def _wrapped_step(
    setup: Setup, subject: Subject, model: nn.Module, optimizer: ShardedOptimizer, record: Record, step: int
) -> None:
    losses = torch.zeros((), dtype=torch.float64)
    for micro in range(setup.accumulation):
        rows = list(parts_of(batch_of(subject, step, micro), setup.ranks))[dist.get_rank()]
        loss = subject.step(model, rows) / setup.accumulation
        loss.backward()
        losses += loss.detach()
    dist.all_reduce(losses)
    record.losses.append(losses.item() / setup.ranks)
    record.gradients.append(optimizer.grad_norms())
    record.norms.append(float(optimizer.clip_grad_norm_(CLIP)))
    optimizer.step()
    optimizer.zero_grad()
    record.weights.append(_full(model))


def _full(model: nn.Module) -> Weights:
    return {name: value.float() for name, value in full_state_dict(model).items() if isinstance(value, torch.Tensor)}


def _start_from_a_folder(setup: Setup, record: Record) -> None:
    """Has transformers save the model and `em.wrap` read it; models with adapters start from plain ones."""
    torch.manual_seed(_SEED)
    model: Any = setup.source.build(over_ranks=True).model
    if not _of_transformers(model):
        return
    folder = setup.folder / "pretrained"
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    with torch.device("meta"):
        empty = type(model)(model.config)
    trained = _optimizer(empty.parameters())
    empty, optimizer = wrap(empty, trained, plan=setup.plan, weights=folder, device=torch.device("cpu"))
    record.started = _full(empty)
    optimizer.close()


# ----------------------------------------------------------------------------------------------------- in plain PyTorch


def in_plain_pytorch(setup: Setup) -> tuple[Record, list[str]]:
    """The record of one process, and the parameters' names in order of forward."""
    record = Record()
    torch.manual_seed(_SEED)
    subject = setup.source.build()
    model = subject.model
    order = _order_of_forward(subject)
    masters = {name: _master(p) for name, p in model.named_parameters() if p.requires_grad}
    if setup.compute_dtype is not None:
        for p in model.parameters():
            p.data = p.data.to(setup.compute_dtype)
    optimizer = _optimizer(masters.values())
    record.weights.append(_weights(model, masters))
    for step in range(2 * setup.steps):
        _plain_step(setup, subject, masters, optimizer, record, step)
        if step + 1 == setup.steps:
            record.moments = _moments(optimizer, masters)
    record.outputs = _outputs(subject, model)
    record.started = record.weights[0] if _of_transformers(model) else {}
    return record, order


def _plain_step(
    setup: Setup,
    subject: Subject,
    masters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    record: Record,
    step: int,
) -> None:
    model, total = subject.model, 0.0
    parameters = dict(model.named_parameters())
    sums: dict[str, Tensor] = {}
    for micro in range(setup.accumulation):
        batch = batch_of(subject, step, micro)
        parts = [batch] if _counts_over_ranks(model) else list(parts_of(batch, setup.ranks))
        for rows in parts:
            loss = subject.step(model, rows) / (setup.accumulation * len(parts))
            loss.backward()
            total += float(loss.detach())
            for name in masters:
                gradient, parameters[name].grad = parameters[name].grad, None
                if gradient is not None:
                    sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()
    for name, master in masters.items():
        master.grad = sums.get(name)
    record.losses.append(total)
    record.gradients.append({name: gradient.norm().item() for name, gradient in sums.items()})
    record.norms.append(nn.utils.clip_grad_norm_(masters.values(), CLIP).item())
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, master in masters.items():
            parameters[name].copy_(master)
    record.weights.append(_weights(model, masters))


def _counts_over_ranks(model: nn.Module) -> bool:
    """Whether the model's own loss of routing is that of all ranks' rows together."""
    return any(isinstance(module, MoE) for module in model.modules())


def _master(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().float().clone())


def _weights(model: nn.Module, masters: dict[str, nn.Parameter]) -> Weights:
    own = model.named_parameters()
    return {name: masters.get(name, p).detach().float().clone() for name, p in own}


def _moments(optimizer: torch.optim.Optimizer, masters: dict[str, nn.Parameter]) -> dict[str, Weights]:
    states = {name: optimizer.state[p] for name, p in masters.items() if p in optimizer.state}
    return {
        name: {"exp_avg": state["exp_avg"].clone(), "exp_avg_sq": state["exp_avg_sq"].sqrt()}
        for name, state in states.items()
    }


def _order_of_forward(subject: Subject) -> list[str]:
    """Names of parameters in the order in which their modules run; those of modules that do not run come last."""
    ran: dict[nn.Module, int] = {}
    modules = dict(subject.model.named_modules())

    def note(module: nn.Module, _: Any) -> None:
        ran.setdefault(module, len(ran))

    hooks = [module.register_forward_pre_hook(note) for module in modules.values()]
    with torch.no_grad():
        subject.step(subject.model, batch_of(subject, 0, 0))
    for hook in hooks:
        hook.remove()
    names = [name for name, _ in subject.model.named_parameters()]
    return sorted(names, key=lambda name: ran.get(modules[name.rpartition(".")[0]], len(modules)))


# --------------------------------------------------------------------------------------------------------- what is left


def saved_moments(setup: Setup) -> dict[str, Weights]:
    """Moments in the checkpoint that the ranks have saved."""
    path = setup.folder / "checkpoint"
    manifest = read_manifest(path)
    whole = Whole(path, manifest)
    kept = {name: entry.pieces[0].state for name, entry in manifest.parameters.items() if entry.pieces}
    found: dict[str, Weights] = {}
    for name, state in kept.items():
        if {"exp_avg", "exp_avg_sq"} <= set(state):
            second = whole.parameter(name, "exp_avg_sq").float().sqrt()
            found[name] = {"exp_avg": whole.parameter(name, "exp_avg").float(), "exp_avg_sq": second}
    return found


def exported(setup: Setup) -> tuple[Weights, Tensor]:
    """Weights and outputs of a plain model that reads what the ranks have exported."""
    torch.manual_seed(_SEED)
    subject = setup.source.build()
    model: Any = subject.model
    folder = setup.folder / "export"
    if hasattr(model, "peft_config"):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model.unload(), folder)
    elif _of_transformers(model):
        model = type(model).from_pretrained(folder, dtype=torch.float32)
    else:
        from safetensors.torch import load_file

        for file in folder.glob("*.safetensors"):
            model.load_state_dict(load_file(file), strict=False)
    weights = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    if setup.compute_dtype is not None:
        for p in model.parameters():
            p.data = p.data.to(setup.compute_dtype)
    return weights, _outputs(subject, model)


def _of_transformers(model: nn.Module) -> bool:
    return hasattr(model, "save_pretrained") and hasattr(model, "config") and not hasattr(model, "peft_config")


def _outputs(subject: Subject, model: nn.Module) -> Tensor:
    """Logits of a batch that no step has seen; the loss where the model is not transformers'."""
    batch = batch_of(subject, _PROBE, 0)
    model.eval()
    with torch.no_grad():
        made = model(**batch).logits if subject.step is own_loss else subject.step(model, batch)
    model.train()
    return made.float().clone()


def _optimizer(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LR, eps=EPS, weight_decay=0.1)
