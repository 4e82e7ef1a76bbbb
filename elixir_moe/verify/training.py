"""The same few steps twice: in some way on all ranks, and in plain PyTorch in one process.

Owns both runs, what they record, and the way of this library's plans; those of others are in `peers`. In the plain run
every rank's rows go through the model one after another and the gradients are averaged, which is what a step on several
ranks means. Compares nothing.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe import MoE, ShardedOptimizer, full_state_dict, load, save, save_pretrained, wrap
from elixir_moe.peft_models import base_of, has_own_adapters, is_peft_model
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

QUANTIZED, HALF, ADAPTERS, FOLDER = "quantized base", "bf16 compute", "adapters", "weights read from a folder"
RESUME, OTHER_RANKS = "resume", "resume on other ranks"
"""Parts of a comparison that not every way has."""

Weights = dict[str, Tensor]


class Trainee(Protocol):
    """A model on this rank, and what trains it. Every method is collective."""

    subject: Subject
    """The model by the names of the plain one, with its loss and its batches."""
    runs: nn.Module
    """What a batch is given to: the model, or what is around it."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Of a micro-batch, whose loss is the mean over this rank's rows; `last` of its step."""

    def norms(self) -> dict[str, float]:
        """Of each parameter's gradient, before a clip."""

    def update(self) -> float:
        """Clips to a norm of `CLIP`, updates and forgets the gradients; returns the norm that was."""

    def weights(self) -> Weights:
        """All of them, on rank 0; fp32 masters where there are some."""

    def moments(self) -> dict[str, Weights]:
        """Of AdamW, on rank 0; the square root of the second."""

    def save(self, folder: Path) -> None:
        """Writes a checkpoint."""

    def load(self, folder: Path) -> None:
        """Reads one."""

    def export(self, folder: Path) -> None:
        """Writes what transformers and peft read, or ``*.safetensors`` of a model that is not theirs."""

    def close(self) -> None:
        """Lets go of what it holds beside the model."""


class Way(Protocol):
    """How a model is trained on several ranks; it can be sent to other processes."""

    @property
    def not_done(self) -> Mapping[str, str]:
        """{a part of the comparison that it has not: the reason}."""

    def begin(self, setup: "Setup", seed: int) -> Trainee:
        """A trainee that is drawn from `seed`. Collective."""

    def started(self, setup: "Setup") -> Weights:
        """The weights of a model that read the folder of one drawn from `SEED`; none where it has no such way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What both runs do."""

    source: Source
    """The model, its loss and its batches."""
    way: Way
    """What is verified."""
    ranks: int
    """Processes that train, until the save."""
    resumed_ranks: int
    """Processes that load and go on; they are others if there are more or fewer of them."""
    steps: int
    """Steps before the save, and as many after the load."""
    accumulation: int
    """Micro-batches of a step."""
    compute_dtype: torch.dtype | None
    """Of forward and backward."""
    folder: Path
    """For the checkpoint, the export and the records."""

    @property
    def resumes(self) -> bool:
        """Whether the run is saved and goes on."""
        return RESUME not in self.way.not_done

    @property
    def all_steps(self) -> int:
        """Before the save and after the load."""
        return self.steps * (1 + self.resumes)


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
    labeled: list[int] = field(default_factory=list)
    """Rows of the first micro-batch whose loss reaches the logits, for each position; none without such logits."""
    started: Weights = field(default_factory=dict)
    """Weights that `em.wrap(weights=...)` read from a folder of transformers."""
    modules: dict[str, float] = field(default_factory=dict)
    """Sum of squares of what each module returned in the first micro-batch, over all rows; in order of their ends."""
    outputs: Tensor | None = None
    """Logits after the last step; the loss where the model has none."""


# ------------------------------------------------------------------------------------------------------- on all ranks


def run_on_ranks(setup: Setup, on_ranks: Callable[..., Any]) -> None:
    """Calls the functions below on the ranks that `setup` asks for, through ``on_ranks(ranks, function, setup)``."""
    if setup.resumed_ranks == setup.ranks:
        on_ranks(setup.ranks, on_these_ranks, setup)
    else:
        on_ranks(setup.ranks, train_and_save, setup)
        on_ranks(setup.resumed_ranks, load_and_go_on, setup)


def on_these_ranks(setup: Setup) -> None:
    """Trains, saves, loads into a new model, trains on and exports. Rank 0 leaves a record. Collective."""
    train_and_save(setup)
    if setup.resumes:
        load_and_go_on(setup)


def train_and_save(setup: Setup) -> None:
    """The first half of `on_these_ranks`. Collective."""
    record = Record()
    trainee = setup.way.begin(setup, SEED)
    record.weights.append(trainee.weights())
    for step in range(setup.steps):
        _step(setup, trainee, record, step)
    if setup.resumes:
        trainee.save(setup.folder / "checkpoint")
        record.moments = trainee.moments()
        trainee.close()
    else:
        record.moments = trainee.moments()
        _end(setup, trainee, record)
    _leave(setup, record)
    del trainee
    gc.collect()  # hooks and model point at each other


def load_and_go_on(setup: Setup) -> None:
    """The second half of `on_these_ranks`, in the same ranks or in others. Collective."""
    dist.barrier()
    record = record_of(setup)
    trainee = setup.way.begin(setup, _OTHER_SEED)
    trainee.load(setup.folder / "checkpoint")
    record.loaded = trainee.weights()
    for step in range(setup.steps, setup.all_steps):
        _step(setup, trainee, record, step)
    _end(setup, trainee, record)
    _leave(setup, record)


def record_of(setup: Setup) -> Record:
    """What the run on ranks has seen so far."""
    return Record(**torch.load(setup.folder / "record.pt", weights_only=True))


def _end(setup: Setup, trainee: Trainee, record: Record) -> None:
    record.outputs = _outputs(trainee.subject, trainee.runs)
    trainee.export(setup.folder / "export")
    trainee.close()
    record.started = setup.way.started(setup)


def _leave(setup: Setup, record: Record) -> None:
    if dist.get_rank() == 0:
        torch.save({name: getattr(record, name) for name in Record.__dataclass_fields__}, setup.folder / "record.pt")


def _step(setup: Setup, trainee: Trainee, record: Record, step: int) -> None:
    subject, losses = trainee.subject, torch.zeros((), dtype=torch.float64)
    for micro in range(setup.accumulation):
        rows = own_rows(batch_of(subject, step, micro))
        with labels_counted(subject.model, record.labeled, counted=not (step or micro)):
            with _modules_watched(subject.model, record.modules, watched=not (step or micro)):
                loss = subject.step(trainee.runs, rows)
            trainee.backward(loss, last=micro + 1 == setup.accumulation)
        losses += loss.detach() / setup.accumulation
    dist.all_reduce(losses)
    record.losses.append(losses.item() / dist.get_world_size())
    if step == 0:
        _add_over_ranks(record)
    record.gradients.append(trainee.norms())
    record.norms.append(trainee.update())
    record.weights.append(trainee.weights())


def own_rows(batch: Any) -> Any:
    """This rank's part of a batch."""
    return list(parts_of(batch, dist.get_world_size()))[dist.get_rank()]


@contextmanager
def labels_counted(model: nn.Module, rows: list[int], *, counted: bool) -> Iterator[None]:
    """Adds to `rows`, for each position of the logits, the rows of the batch whose loss depends on them."""

    def note(gradient: Tensor) -> None:
        reached = (gradient != 0).any(-1).sum(0).tolist()
        rows[:] = [a + b for a, b in zip(rows or [0] * len(reached), reached, strict=True)]

    def watch(_module: nn.Module, _arguments: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        if isinstance(logits, Tensor) and logits.dim() == 3 and logits.requires_grad:
            logits.register_hook(note)

    called = base_of(model)  # peft may call it past all that is around it
    hook = called.register_forward_hook(watch, prepend=True) if counted else None  # hooks of peers may replace logits
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def _modules_watched(model: nn.Module, sums: dict[str, float], *, watched: bool) -> Iterator[None]:
    """Adds to `sums` what each module returns; nothing where `MoE` sends rows to other ranks."""
    hooks = []
    for name, module in model.named_modules() if watched and not counts_over_ranks(model) else ():

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
    dist.all_gather_object(seen, (record.labeled, record.modules))
    record.labeled = [sum(rows) for rows in zip(*(labeled for labeled, _ in seen), strict=True)]
    record.modules = {name: sum(modules.get(name, 0.0) for _, modules in seen) for name in record.modules}


# ------------------------------------------------------------------------------------------------------ under a plan


@dataclass(frozen=True, slots=True)
class Planned:
    """Training under a plan of this library."""

    plan: AskedPlan

    @property
    def not_done(self) -> Mapping[str, str]:
        """See `Way.not_done`."""
        return {}

    def begin(self, setup: Setup, seed: int) -> "Wrapped":
        """See `Way.begin`."""
        torch.manual_seed(seed)
        subject = setup.source.build(under_plan=True)
        sample = own_rows(batch_of(subject, 0, 0))
        model, optimizer = wrap(
            subject.model,
            optimizer_of(subject, (p for p in subject.model.parameters() if p.requires_grad)),
            compute_dtype=setup.compute_dtype,
            device=torch.device("cpu"),
            **self.plan.of(subject.step, sample),
        )
        return Wrapped(subject=subject, runs=model, optimizer=optimizer, setup=setup)

    def started(self, setup: Setup) -> Weights:
        """See `Way.started`: transformers saves the model and `em.wrap` reads it; models with adapters have none."""
        torch.manual_seed(SEED)
        subject = setup.source.build(under_plan=True)
        model: Any = subject.model
        if not _of_transformers(model):
            return {}
        folder = setup.folder / "pretrained"
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        with torch.device("meta"):
            empty = type(model)(model.config)
        trained = optimizer_of(subject, empty.parameters())
        plan = self.plan.of(subject.step, own_rows(batch_of(subject, 0, 0)))["plan"]  # no step can run without data
        empty, optimizer = wrap(empty, trained, plan=plan, weights=folder, device=torch.device("cpu"))
        weights = _full(empty)
        optimizer.close()
        return weights


@dataclass(kw_only=True, slots=True)
class Wrapped:
    """A model that `em.wrap` has wrapped. See `Trainee`."""

    subject: Subject
    runs: nn.Module
    optimizer: ShardedOptimizer
    setup: Setup

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Trainee.backward`."""
        (loss / self.setup.accumulation).backward()

    def norms(self) -> dict[str, float]:
        """See `Trainee.norms`."""
        return self.optimizer.grad_norms()

    def update(self) -> float:
        """See `Trainee.update`."""
        norm = float(self.optimizer.clip_grad_norm_(CLIP))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def weights(self) -> Weights:
        """See `Trainee.weights`."""
        return _full(self.runs)

    def moments(self) -> dict[str, Weights]:
        """Those of the checkpoint that was saved."""
        return _saved_moments(self.setup.folder / "checkpoint") if dist.get_rank() == 0 else {}

    def save(self, folder: Path) -> None:
        """See `Trainee.save`."""
        save(folder, self.runs, self.optimizer)

    def load(self, folder: Path) -> None:
        """See `Trainee.load`."""
        load(folder, self.runs, self.optimizer)

    def export(self, folder: Path) -> None:
        """See `Trainee.export`."""
        save_pretrained(self.runs, folder)

    def close(self) -> None:
        """See `Trainee.close`."""
        self.optimizer.close()


def _full(model: nn.Module) -> Weights:
    """All weights on rank 0, those of quantized ones as they decode."""
    whole = full_state_dict(model)
    if whole:
        for name, _, _, packed in packed_parameters(model):
            decoded = packed.decode(whole[name], whole.pop(name + SCALES), packed.dtype)
            whole[name] = decoded.transpose(-1, -2).contiguous() if packed.transposed else decoded
    return {name: value.float() for name, value in whole.items() if isinstance(value, torch.Tensor)}


def _saved_moments(path: Path) -> dict[str, Weights]:
    """Moments in a checkpoint of this library."""
    manifest = read_manifest(path)
    whole = Whole(path, manifest)
    kept = {name: entry.pieces[0].state for name, entry in manifest.parameters.items() if entry.pieces}
    found: dict[str, Weights] = {}
    for name, state in kept.items():
        if {"exp_avg", "exp_avg_sq"} <= set(state):
            second = whole.parameter(name, "exp_avg_sq").float().sqrt()
            found[name] = {"exp_avg": whole.parameter(name, "exp_avg").float(), "exp_avg_sq": second}
    return found


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
    optimizer = optimizer_of(subject, masters.values())
    record.frozen = [name for name in order if name not in masters]
    record.weights.append(_weights(model, masters))
    for step in range(setup.all_steps):
        _plain_step(setup, subject, masters, optimizer, record, step)
        if step + 1 == setup.steps:
            record.moments = _moments(optimizer, masters)
    record.outputs = _outputs(subject, model)
    if FOLDER not in setup.way.not_done and _of_transformers(model):
        record.started = record.weights[0]
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
        parts = [batch] if counts_over_ranks(model) else list(parts_of(batch, ranks))
        for rows in parts:
            with labels_counted(model, record.labeled, counted=not (step or micro)):
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


def counts_over_ranks(model: nn.Module) -> bool:
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


def exported(setup: Setup) -> tuple[Weights, Tensor]:
    """Weights and outputs of a plain model that reads what the ranks have exported."""
    torch.manual_seed(SEED)
    subject = setup.source.build()
    model: Any = subject.model
    folder = setup.folder / "export"
    if is_peft_model(model):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model.unload(), folder)
    elif has_own_adapters(model):
        model.delete_adapter(list(model.peft_config))
        model.load_adapter(folder)
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


def optimizer_of(subject: Subject, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The subject's own, or AdamW."""
    if subject.optimizer is not None:
        return subject.optimizer(parameters)
    return torch.optim.AdamW(parameters, lr=LR, eps=EPS, weight_decay=0.1)
