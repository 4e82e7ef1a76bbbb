"""The same few steps twice: under the plan on all ranks, and in plain PyTorch in one process.

Owns both runs and what they record. In the plain run every rank's rows go through the model one after another and the
gradients are averaged, which is what a step on several ranks means. Compares nothing.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe import MoE, ShardedOptimizer, full_state_dict, load, save, save_pretrained, wrap
from elixir_moe.quantized.packed import SCALES, packed_parameters
from elixir_moe.state.checkpoint.storage import read_manifest
from elixir_moe.state.checkpoint.whole import Whole
from elixir_moe.torch_private import tree_leaves
from elixir_moe.verify.plans import AskedPlan
from elixir_moe.verify.subject import Source, Subject, batch_of, own_loss, parts_of

LR, EPS, CLIP = 1e-2, 1e-4, 1.0
"""Of AdamW, and the largest gradient norm. The tolerances are derived from them."""
SEED, _OTHER_SEED, _PROBE = 5, 6, 999
"""Of the first weights, of those that a load overwrites, and the number of the batch that no step has seen."""

Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What both runs do."""

    source: Source
    """The model, its loss and its batches."""
    plan: AskedPlan
    """The plan to verify."""
    ranks: int
    """Processes of the run under the plan, until the save."""
    resumed_ranks: int
    """Processes that load and go on; they are others if there are more or fewer of them."""
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
    frozen: list[str] = field(default_factory=list)
    """Parameters that are not trained, in the plain run."""
    labelled: list[int] = field(default_factory=list)
    """Rows of the first micro-batch whose loss reaches the logits, for each position; none without such logits."""
    started: Weights = field(default_factory=dict)
    """Weights that `em.wrap(weights=...)` read from a folder of transformers."""
    modules: dict[str, float] = field(default_factory=dict)
    """Sum of squares of what each module returned in the first micro-batch, over all rows; in order of their ends."""
    outputs: Tensor | None = None
    """Logits after the last step; the loss where the model has none."""


# ------------------------------------------------------------------------------------------------------ under the plan


def run_under_the_plan(setup: Setup, on_ranks: Callable[..., Any]) -> None:
    """Calls the functions below on the ranks that `setup` asks for, through ``on_ranks(ranks, function, setup)``."""
    if setup.resumed_ranks == setup.ranks:
        on_ranks(setup.ranks, under_the_plan, setup)
    else:
        on_ranks(setup.ranks, train_and_save, setup)
        on_ranks(setup.resumed_ranks, load_and_go_on, setup)


def under_the_plan(setup: Setup) -> None:
    """Trains, saves, loads into a new model, trains on and exports. Rank 0 leaves a record. Collective."""
    train_and_save(setup)
    load_and_go_on(setup)


def train_and_save(setup: Setup) -> None:
    """The first half of `under_the_plan`. Collective."""
    record = Record()
    subject, model, optimizer = _wrapped(setup, SEED)
    record.weights.append(_full(model))
    for step in range(setup.steps):
        _wrapped_step(setup, subject, model, optimizer, record, step)
    save(setup.folder / "checkpoint", model, optimizer)
    optimizer.close()
    _leave(setup, record)
    del subject, model, optimizer
    gc.collect()  # hooks and model point at each other


def load_and_go_on(setup: Setup) -> None:
    """The second half of `under_the_plan`, in the same ranks or in others. Collective."""
    dist.barrier()
    record = record_of(setup)
    subject, model, optimizer = _wrapped(setup, _OTHER_SEED)
    load(setup.folder / "checkpoint", model, optimizer)
    record.loaded = _full(model)
    for step in range(setup.steps, 2 * setup.steps):
        _wrapped_step(setup, subject, model, optimizer, record, step)
    record.outputs = _outputs(subject, model)
    save_pretrained(model, setup.folder / "export")
    optimizer.close()
    _start_from_a_folder(setup, record)
    _leave(setup, record)


def record_of(setup: Setup) -> Record:
    """What the run under the plan has seen so far."""
    return Record(**torch.load(setup.folder / "record.pt", weights_only=True))


def _leave(setup: Setup, record: Record) -> None:
    if dist.get_rank() == 0:
        torch.save({name: getattr(record, name) for name in Record.__dataclass_fields__}, setup.folder / "record.pt")


def _wrapped(setup: Setup, seed: int) -> tuple[Subject, nn.Module, ShardedOptimizer]:
    torch.manual_seed(seed)
    subject = setup.source.build(under_plan=True)
    sample = _own_rows(batch_of(subject, 0, 0))
    model, optimizer = wrap(
        subject.model,
        _optimizer(subject, (p for p in subject.model.parameters() if p.requires_grad)),
        compute_dtype=setup.compute_dtype,
        device=torch.device("cpu"),
        **setup.plan.of(subject.step, sample),
    )
    return subject, model, optimizer


def _wrapped_step(
    setup: Setup, subject: Subject, model: nn.Module, optimizer: ShardedOptimizer, record: Record, step: int
) -> None:
    losses = torch.zeros((), dtype=torch.float64)
    for micro in range(setup.accumulation):
        rows = _own_rows(batch_of(subject, step, micro))
        with _labels_counted(model, record.labelled, counted=not (step or micro)):
            with _modules_watched(model, record.modules, watched=not (step or micro)):
                loss = subject.step(model, rows) / setup.accumulation
            loss.backward()
        losses += loss.detach()
    dist.all_reduce(losses)
    record.losses.append(losses.item() / dist.get_world_size())
    if step == 0:
        _add_over_ranks(record)
    record.gradients.append(optimizer.grad_norms())
    record.norms.append(float(optimizer.clip_grad_norm_(CLIP)))
    optimizer.step()
    optimizer.zero_grad()
    record.weights.append(_full(model))


def _own_rows(batch: Any) -> Any:
    return list(parts_of(batch, dist.get_world_size()))[dist.get_rank()]


@contextmanager
def _labels_counted(model: nn.Module, rows: list[int], *, counted: bool) -> Iterator[None]:
    """Adds to `rows`, for each position of the logits, the rows of the batch whose loss depends on them."""

    def note(gradient: Tensor) -> None:
        reached = (gradient != 0).any(-1).sum(0).tolist()
        rows[:] = [a + b for a, b in zip(rows or [0] * len(reached), reached, strict=True)]

    def watch(_module: nn.Module, _arguments: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.dim() == 3 and logits.requires_grad:
            logits.register_hook(note)

    hook = model.register_forward_hook(watch) if counted else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def _modules_watched(model: nn.Module, sums: dict[str, float], *, watched: bool) -> Iterator[None]:
    """Adds to `sums` what each module returns; nothing where `MoE` sends rows to other ranks."""
    hooks = []
    for name, module in model.named_modules() if watched and not _counts_over_ranks(model) else ():

        def note(_module: nn.Module, _arguments: Any, output: Any, name: str = name) -> None:
            floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            found = sum(float(leaf.detach().double().square().sum()) for leaf in floats)
            sums[name] = sums.get(name, 0.0) + found

        hooks.append(module.register_forward_hook(note))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add_over_ranks(record: Record) -> None:
    """Makes what one rank has seen of the first micro-batch what all have."""
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (record.labelled, record.modules))
    record.labelled = [sum(rows) for rows in zip(*(labelled for labelled, _ in seen), strict=True)]
    record.modules = {name: sum(modules.get(name, 0.0) for _, modules in seen) for name in record.modules}


def _full(model: nn.Module) -> Weights:
    """All weights on rank 0, those of quantised ones as they decode."""
    whole = full_state_dict(model)
    if whole:
        for name, _, _, packed in packed_parameters(model):
            decoded = packed.decode(whole[name], whole.pop(name + SCALES), packed.dtype)
            whole[name] = decoded.transpose(-1, -2).contiguous() if packed.transposed else decoded
    return {name: value.float() for name, value in whole.items() if isinstance(value, torch.Tensor)}


def _start_from_a_folder(setup: Setup, record: Record) -> None:
    """Has transformers save the model and `em.wrap` read it; models with adapters start from plain ones."""
    torch.manual_seed(SEED)
    subject = setup.source.build(under_plan=True)
    model: Any = subject.model
    if not _of_transformers(model):
        return
    folder = setup.folder / "pretrained"
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    with torch.device("meta"):
        empty = type(model)(model.config)
    trained = _optimizer(subject, empty.parameters())
    plan = setup.plan.of(subject.step, _own_rows(batch_of(subject, 0, 0)))["plan"]  # no step can run without data
    empty, optimizer = wrap(empty, trained, plan=plan, weights=folder, device=torch.device("cpu"))
    record.started = _full(empty)
    optimizer.close()


# ----------------------------------------------------------------------------------------------------- in plain PyTorch


def in_plain_pytorch(setup: Setup) -> tuple[Record, list[str]]:
    """The record of one process, and the parameters' names in order of forward."""
    record = Record()
    torch.manual_seed(SEED)
    subject = setup.source.build()
    model = subject.model
    order = _order_of_forward(subject)
    masters = {name: _master(p) for name, p in model.named_parameters() if p.requires_grad}
    if setup.compute_dtype is not None:
        for p in model.parameters():
            p.data = p.data.to(setup.compute_dtype)
    optimizer = _optimizer(subject, masters.values())
    record.frozen = [name for name in order if name not in masters]
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
        ranks = setup.ranks if step < setup.steps else setup.resumed_ranks
        parts = [batch] if _counts_over_ranks(model) else list(parts_of(batch, ranks))
        for rows in parts:
            with _labels_counted(model, record.labelled, counted=not (step or micro)):
                with _modules_watched(model, record.modules, watched=not (step or micro)):
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
        if {"exp_avg", "exp_avg_sq"} <= set(state)
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
    torch.manual_seed(SEED)
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


def _optimizer(subject: Subject, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if subject.optimizer is not None:
        return subject.optimizer(parameters)
    return torch.optim.AdamW(parameters, lr=LR, eps=EPS, weight_decay=0.1)
