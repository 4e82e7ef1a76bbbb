"""Trains the same few steps twice: by some backend on all ranks, and in plain PyTorch in one process.

Owns both runs, what they record, and how a model is trained under a plan. In the plain run every rank's rows go through
the model one after another and the gradients are averaged, which is what a step on several ranks means. Compares
nothing.
"""

import gc
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from elixir_moe import MoE, ShardedOptimizer, accumulate, full_state_dict, load, save, save_pretrained, wrap
from elixir_moe.errors import ConfigError
from elixir_moe.ext.checkpoints import Whole, read_manifest
from elixir_moe.ext.hf import base_of, has_own_adapters, is_peft_model
from elixir_moe.ext.models import SCALES, packed_parameters, persistent_buffers, tree_leaves, tree_map
from elixir_moe.ext.optimizers import join
from elixir_moe.ext.ranks import gathered
from elixir_tools.verify.cases import Source, TestCase, batch_of, own_loss, parts_of
from elixir_tools.verify.plans import AskedPlan

LR, EPS, CLIP = 1e-2, 1e-4, 1.0
"""Options of AdamW at most, and the largest gradient norm. The tolerances are derived from them."""
GROUPS: tuple[dict[str, Any], ...] = (
    {"lr": LR, "eps": EPS, "weight_decay": 0.1},
    {"lr": LR / 2, "eps": EPS, "weight_decay": 1.0, "betas": (0.8, 0.99)},
)
"""Options of AdamW's param_groups: parameters go to them in turn."""
DECAY = 0.9
"""Factor of all learning rates, after each step."""
SEED, _OTHER_SEED, _PROBE = 5, 6, 999
"""Seeds of the first weights and of those that a load overwrites, and the number of the batch that no step has seen."""

QUANTIZED, HALF, ADAPTERS, FOLDER = "quantized base", "bf16 compute", "adapters", "weights read from a folder"
RESUME, OTHER_RANKS, OWN_STATE = "resume", "resume on other ranks", "buffers and random generators in the checkpoint"
"""Parts of a comparison that not every backend has."""

Weights = dict[str, Tensor]
Sums = dict[str, tuple[float, int]]
"""For each module, in order of their ends: the sum of squares of what it returned, and how many numbers that were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The settings of both runs."""

    source: Source
    """The model, its loss and its batches."""
    backend: "Planned"
    """The model that is verified."""
    ranks: int
    """Processes that train, until the save."""
    resumed_ranks: int
    """Processes that load and continue; they are others if there are more or fewer of them."""
    steps: int
    """Steps before the save, and as many after the load."""
    accumulation: int
    """Micro-batches of a step."""
    compute_dtype: torch.dtype | None
    """The dtype of forward and backward."""
    together: int = 1
    """Micro-batches that pass each layer together under the plan; 1 is the plain loop."""
    folder: Path
    """For the checkpoint, the export and the records."""
    device: str = "cpu"
    """Where the ranks train: "cpu" or the kind of accelerator. The plain run is always on the CPU."""

    @property
    def resumes(self) -> bool:
        """Whether the run is saved and continues."""
        return RESUME not in self.backend.not_done

    @property
    def all_steps(self) -> int:
        """Before the save and after the load."""
        return self.steps * (1 + self.resumes)


@dataclass(kw_only=True, slots=True)
class Record:
    """The record of a run; lists have an entry for each step."""

    losses: list[float] = field(default_factory=list)
    """Means over ranks and micro-batches."""
    norms: list[float] = field(default_factory=list)
    """Norm of the gradient of the whole model, before it is clipped."""
    gradients: list[dict[str, float]] = field(default_factory=list)
    """Norm of each parameter's gradient."""
    weights: list[Weights] = field(default_factory=list)
    """Before the first step, and after each."""
    moments: dict[str, Weights] = field(default_factory=dict)
    """Moments of AdamW at the save; the square root of the second, which has the size of a gradient."""
    loaded: Weights = field(default_factory=dict)
    """Weights after the load into a model that was made again."""
    frozen: list[str] = field(default_factory=list)
    """Parameters that are not trained, in the plain run."""
    labeled: list[int] = field(default_factory=list)
    """Rows of the first micro-batch whose loss reaches the logits, for each position; none without such logits."""
    started: Weights = field(default_factory=dict)
    """Weights that `em.wrap(weights=...)` read from a folder of transformers."""
    modules: list[Sums] = field(default_factory=list)
    """In the first micro-batch of each step, over all rows."""
    ends: list[tuple[float, Sums]] = field(default_factory=list)
    """Before the save and after the last step: the loss of another batch, and what modules returned."""
    kept: list[Weights] = field(default_factory=list)
    """For each rank, what the checkpoint is to keep besides weights and moments, when it was saved."""
    found: list[Weights] = field(default_factory=list)
    """Moments after the load."""
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
    trainer = setup.backend.begin(setup, SEED)
    schedule = schedule_of(trainer.optimizer)
    _seed_generators(SEED)
    for step in range(setup.steps):
        _step(setup, trainer, schedule, record, step)
    _end_half(setup, trainer, record)
    if setup.resumes:
        record.kept = gathered(_kept(setup, trainer, schedule))
        trainer.save(setup.folder / "checkpoint", {"schedule": schedule.state_dict()})
        record.moments = trainer.moments()
        trainer.close()
    else:
        record.moments = trainer.moments()
        _end(setup, trainer, record)
    _leave(setup, record)
    del trainer, schedule
    gc.collect()  # hooks and model point at each other


def load_and_go_on(setup: Setup) -> None:
    """The second half of `on_these_ranks`, in the same ranks or in others. Collective."""
    dist.barrier()
    record = record_of(setup)
    trainer = setup.backend.begin(setup, _OTHER_SEED)
    schedule = schedule_of(trainer.optimizer)
    _change_all(setup, trainer)
    schedule.load_state_dict(trainer.load(setup.folder / "checkpoint")["schedule"])
    record.found = gathered(_kept(setup, trainer, schedule))
    for step in range(setup.steps, setup.all_steps):
        _step(setup, trainer, schedule, record, step)
    _end_half(setup, trainer, record)
    _end(setup, trainer, record)
    _leave(setup, record)


def record_of(setup: Setup) -> Record:
    """The record of the run on ranks so far."""
    return Record(**torch.load(setup.folder / "record.pt", weights_only=True))


def _end(setup: Setup, trainer: "Wrapped", record: Record) -> None:
    record.outputs = _outputs(trainer.case, trainer.runs, setup.device)
    trainer.export(setup.folder / "export")
    trainer.close()
    record.started = setup.backend.started(setup)


def _leave(setup: Setup, record: Record) -> None:
    if dist.get_rank() == 0:
        torch.save({name: getattr(record, name) for name in Record.__dataclass_fields__}, setup.folder / "record.pt")


def _step(setup: Setup, trainer: "Wrapped", schedule: LambdaLR, record: Record, step: int) -> None:
    """Weights are read behind a forward that has used them: to read them might bring them up to date."""
    case, losses, sums = trainer.case, torch.zeros((), dtype=torch.float64), Sums()

    def loss_of(model: nn.Module, micro: int) -> Tensor:
        rows = own_rows(batch_of(case, step, micro), setup.device)
        labeled = labels_counted(case.model, record.labeled, counted=not (step or micro))
        with labeled, _modules_watched(case.model, sums, watched=not micro):
            return case.step(model, rows)

    for loss in trainer.backwards(loss_of) if setup.together > 1 else _one_by_one(setup, trainer, loss_of):
        losses += loss.detach().cpu() / setup.accumulation
    record.losses.append(_mean(losses))
    record.modules.append(_added(gathered(sums)))
    if step == 0:
        record.labeled = [sum(rows) for rows in zip(*gathered(record.labeled), strict=True)]
    if step == setup.steps:
        record.loaded = trainer.weights()
    else:
        record.weights.append(trainer.weights())
    record.gradients.append(trainer.norms())
    record.norms.append(trainer.update())
    schedule.step()


def _one_by_one(setup: Setup, trainer: "Wrapped", loss_of: Callable[[nn.Module, int], Tensor]) -> Iterator[Tensor]:
    """Runs forward and backward of each micro-batch of a step; yields their losses."""
    for micro in range(setup.accumulation):
        loss = loss_of(trainer.runs, micro)
        trainer.backward(loss, last=micro + 1 == setup.accumulation)
        yield loss


def _end_half(setup: Setup, trainer: "Wrapped", record: Record) -> None:
    """A forward with the weights of the last step, before they are read."""
    case, sums = trainer.case, Sums()
    with torch.no_grad(), _modules_watched(case.model, sums, watched=True):
        loss = case.step(trainer.runs, own_rows(batch_of(case, _PROBE, 0), setup.device))
    record.ends.append((_mean(loss.detach().double().cpu()), _added(gathered(sums))))
    record.weights.append(trainer.weights())


def _mean(loss: Tensor) -> float:
    """Over the ranks."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def _added(found: list[Sums]) -> Sums:
    """Returns the sums of all ranks together."""
    return {name: (sum(f[name][0] for f in found), sum(f[name][1] for f in found)) for name in found[0]}


def schedule_of(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """The schedule of the learning rates of both runs. Raises ConfigError if there are none."""
    if any("lr" not in group for group in optimizer.param_groups):
        raise ConfigError(
            f"{type(optimizer).__name__} has param_groups without 'lr', which verify multiplies by {DECAY} after each "
            f"step: give it one"
        )
    return LambdaLR(optimizer, lambda step: DECAY**step)


def _seed_generators(seed: int) -> None:
    """Gives each rank random generators of its own."""
    seed = 100 * seed + dist.get_rank()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _change_all(setup: Setup, trainer: "Wrapped") -> None:
    """Changes what a load is to restore: options, and what `OWN_STATE` means."""
    for group in trainer.optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, float):
                group[name] = value / 2
            elif isinstance(value, tuple) and _has_numbers(value):
                group[name] = tuple(part / 2 for part in value)
    _seed_generators(_OTHER_SEED)
    if OWN_STATE not in setup.backend.not_done:
        for buffer in persistent_buffers(trainer.case.model):
            buffer.copy_(buffer + 1)


def _kept(setup: Setup, trainer: "Wrapped", schedule: LambdaLR) -> Weights:
    """Returns {name: value} of what a checkpoint keeps of this rank besides weights and moments."""
    groups = trainer.optimizer.param_groups
    said = {f"param_group {i}, {name}": group[name] for i, group in enumerate(groups) for name in group}
    said |= {f"schedule, {name}": value for name, value in schedule.state_dict().items()}
    if OWN_STATE not in setup.backend.not_done:
        buffers = persistent_buffers(trainer.case.model)
        said |= {f"buffer {names[0]}": buffer.detach().cpu().clone() for buffer, names in buffers.items()}
        numpy = np.random.get_state(legacy=False)["state"]
        said["random generator of torch"] = torch.get_rng_state()
        said["random generator of Python"] = random.getstate()[1]
        said["random generator of numpy"] = [*numpy["key"].tolist(), numpy["pos"]]
    return {name: torch.as_tensor(value).double() for name, value in said.items() if _has_numbers(value)}


def _has_numbers(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return bool(value) and all(map(_has_numbers, value))
    return isinstance(value, int | float) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))


def own_rows(batch: Any, device: str = "cpu") -> Any:
    """This rank's part of a batch, on its device."""
    return _moved(list(parts_of(batch, dist.get_world_size()))[dist.get_rank()], device)


def _moved(batch: Any, device: str) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)


@contextmanager
def labels_counted(model: nn.Module, rows: list[int], *, counted: bool) -> Iterator[None]:
    """Adds to `rows`, for each position of the logits, the rows of the batch whose loss depends on them.

    Counts only forwards of this thread: in one pass, each micro-batch has one.
    """
    thread = threading.get_ident()

    def note(gradient: Tensor) -> None:
        reached = (gradient != 0).any(-1).sum(0).tolist()
        rows[:] = [a + b for a, b in zip(rows or [0] * len(reached), reached, strict=True)]

    def watch(_module: nn.Module, _arguments: Any, output: Any) -> None:
        logits = getattr(output, "logits", None)
        mine = threading.get_ident() == thread
        if mine and isinstance(logits, Tensor) and logits.dim() == 3 and logits.requires_grad:
            logits.register_hook(note)

    called = base_of(model)  # peft may call it past all that is around it
    hook = called.register_forward_hook(watch, prepend=True) if counted else None  # hooks of peers may replace logits
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def _modules_watched(model: nn.Module, sums: Sums, *, watched: bool) -> Iterator[None]:
    """Adds to `sums` what each module returns for rows; numbers of a whole batch depend on how rows are shared out.

    Counts only forwards of this thread.
    """
    hooks, thread = [], threading.get_ident()
    for name, module in model.named_modules() if watched else ():

        def note(_module: nn.Module, _arguments: Any, output: Any, name: str = name) -> None:
            if threading.get_ident() != thread:
                return
            square, numel = sums.pop(name, (0.0, 0))  # a module may be called again
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1:
                    square, numel = square + float(leaf.detach().double().square().sum()), numel + leaf.numel()
            sums[name] = square, numel

        hooks.append(module.register_forward_hook(note))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# ------------------------------------------------------------------------------------------------------ under a plan


@dataclass(frozen=True, slots=True)
class Planned:
    """Training under a plan of this library. It can be sent to other processes.

    Whatever has the same methods can take its place in a `Setup`, as other libraries do in tests.
    """

    plan: AskedPlan

    @property
    def not_done(self) -> Mapping[str, str]:
        """{a part of the comparison that cannot be made: the reason}."""
        return {}

    def begin(self, setup: Setup, seed: int) -> "Wrapped":
        """A trainer that is drawn from `seed`. Collective."""
        torch.manual_seed(seed)
        case = setup.source.build(under_plan=True)
        sample = own_rows(batch_of(case, 0, 0), setup.device)
        model, optimizer = wrap(
            case.model,
            optimizer_of(case, (p for p in case.model.parameters() if p.requires_grad)),
            compute_dtype=setup.compute_dtype,
            device=setup.device,
            **self.plan.of(case.step, sample, setup.together),
        )
        return Wrapped(case=case, runs=model, optimizer=optimizer, setup=setup)

    def started(self, setup: Setup) -> Weights:
        """The weights of a model that read the folder of one drawn from `SEED`, as transformers writes it.

        There are none for a model with adapters, which has no such folder.
        """
        torch.manual_seed(SEED)
        case = setup.source.build(under_plan=True)
        model: Any = case.model
        if not _of_transformers(model):
            return {}
        folder = setup.folder / "pretrained"
        if dist.get_rank() == 0:
            model.save_pretrained(folder)
        dist.barrier()
        with torch.device("meta"):
            empty = type(model)(model.config)
        trained = optimizer_of(case, empty.parameters())
        sample = own_rows(batch_of(case, 0, 0), setup.device)
        plan = self.plan.of(case.step, sample, setup.together)["plan"]  # no step can run without data
        empty, optimizer = wrap(empty, trained, plan=plan, weights=folder, device=setup.device)
        weights = _full(empty)
        optimizer.close()
        return weights


@dataclass(kw_only=True, slots=True)
class Wrapped:
    """A model on this rank that `em.wrap` has wrapped, and its training. Every method is collective."""

    case: TestCase
    """The model by the names of the plain one, with its loss and its batches."""
    runs: nn.Module
    """The module that a batch is given to: the model, or its wrapper."""
    optimizer: ShardedOptimizer
    """The one whose options a schedule changes."""
    setup: Setup

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Runs the backward of a micro-batch, whose loss is the mean over this rank's rows; `last` of its step."""
        (loss / self.setup.accumulation).backward()

    def backwards(self, loss_of: Callable[[nn.Module, int], Tensor]) -> list[Tensor]:
        """Runs forward and backward of all micro-batches of a step by `accumulate`; returns their losses."""
        return accumulate(self.runs, loss_of, range(self.setup.accumulation))

    def norms(self) -> dict[str, float]:
        """Norm of each parameter's gradient, before a clip."""
        return self.optimizer.grad_norms()

    def update(self) -> float:
        """Clips to a norm of `CLIP`, updates and forgets the gradients; returns the norm that was."""
        norm = float(self.optimizer.clip_grad_norm_(CLIP))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def weights(self) -> Weights:
        """All of them, on rank 0; fp32 masters where there are some."""
        return _full(self.runs)

    def moments(self) -> dict[str, Weights]:
        """Moments of AdamW in the checkpoint that was saved, on rank 0; the square root of the second."""
        return _saved_moments(self.setup.folder / "checkpoint") if dist.get_rank() == 0 else {}

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Writes a checkpoint with what the user's program keeps there."""
        save(folder, self.runs, self.optimizer, extra=extra)

    def load(self, folder: Path) -> dict[str, Any]:
        """Reads one; returns `extra`."""
        found: dict[str, Any] = load(folder, self.runs, self.optimizer)
        return found

    def export(self, folder: Path) -> None:
        """Writes what transformers and peft read, or ``*.safetensors`` of a model that is not theirs."""
        save_pretrained(self.runs, folder)

    def close(self) -> None:
        """Releases what it holds in addition to the model."""
        self.optimizer.close()


def _full(model: nn.Module) -> Weights:
    """All weights on rank 0, those of quantized ones as they decode."""
    whole = full_state_dict(model)
    if whole:
        for name, _, _, packed in packed_parameters(model):
            decoded = packed.decode(whole[name], whole.pop(name + SCALES), packed.dtype)
            whole[name] = decoded.transpose(-1, -2).contiguous() if packed.transposed else decoded
    return {name: value.float().cpu() for name, value in whole.items() if isinstance(value, torch.Tensor)}


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


def in_plain_pytorch(setup: Setup, *, error: float = 0.0) -> tuple[Record, list[str]]:
    """The record of one process, and the parameters' names in order of forward.

    `error` is put into first weights, as a part of each, and into elements of gradients, as a part of the global norm.
    """
    record, signs = Record(), torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    case = setup.source.build()
    model = case.model
    order = _order_of_forward(case)
    masters = {name: _master(p) for name, p in model.named_parameters() if p.requires_grad}
    if setup.compute_dtype is not None:
        for p in model.parameters():
            p.data = p.data.to(setup.compute_dtype)
    optimizer = optimizer_of(case, masters.values())
    schedule = schedule_of(optimizer)
    record.frozen = [name for name in order if name not in masters]
    record.weights.append(_weights(model, masters))
    if error:
        for name, p in model.named_parameters():
            p.data *= 1 + error * _signs(p, signs)
            masters.get(name, p).data.copy_(p)
    for step in range(setup.all_steps):
        sums = _plain_backwards(setup, case, list(masters), record, step)
        if error:
            norm = sum(float(gradient.square().sum()) for gradient in sums.values()) ** 0.5
            sums = {name: gradient + error * norm * _signs(gradient, signs) for name, gradient in sums.items()}
        _plain_update(model, masters, optimizer, sums, record)
        schedule.step()
        if step + 1 in (setup.steps, setup.all_steps):
            record.ends.append(_plain_end(setup, case, step))
        if step + 1 == setup.steps:
            record.moments = _moments(optimizer, masters)
    record.outputs = _outputs(case, model)
    if FOLDER not in setup.backend.not_done and _of_transformers(model):
        record.started = record.weights[0]
    return record, order


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2, like.shape, generator=generator) * 2 - 1


def _plain_backwards(setup: Setup, case: TestCase, trained: list[str], record: Record, step: int) -> dict[str, Tensor]:
    """The gradients of a step."""
    model, total, seen = case.model, 0.0, Sums()
    parameters = dict(model.named_parameters())
    sums: dict[str, Tensor] = {}
    for micro in range(setup.accumulation):
        parts = _parts(setup, case, step, batch_of(case, step, micro))
        for rows in parts:
            with labels_counted(model, record.labeled, counted=not (step or micro)):
                with _modules_watched(model, seen, watched=not micro):
                    loss = case.step(model, rows) / (setup.accumulation * len(parts))
                loss.backward()
            total += float(loss.detach())
            for name in trained:
                gradient, parameters[name].grad = parameters[name].grad, None
                if gradient is not None:
                    sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()
    record.losses.append(total)
    record.modules.append(seen)
    return sums


def _plain_update(
    model: nn.Module,
    masters: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    sums: dict[str, Tensor],
    record: Record,
) -> None:
    for name, master in masters.items():
        master.grad = sums.get(name)
    record.gradients.append({name: gradient.norm().item() for name, gradient in sums.items()})
    record.norms.append(nn.utils.clip_grad_norm_(masters.values(), CLIP).item())
    optimizer.step()
    optimizer.zero_grad()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, master in masters.items():
            parameters[name].copy_(master)
    record.weights.append(_weights(model, masters))


def _parts(setup: Setup, case: TestCase, step: int, batch: Any) -> list[Any]:
    """Returns what each rank of a step has of a batch; all in one where the model counts over ranks."""
    ranks = setup.ranks if step < setup.steps else setup.resumed_ranks
    return [batch] if counts_over_ranks(case.model) else list(parts_of(batch, ranks))


def _plain_end(setup: Setup, case: TestCase, step: int) -> tuple[float, Sums]:
    """See `_end_half`."""
    parts, sums = _parts(setup, case, step, batch_of(case, _PROBE, 0)), Sums()
    with torch.no_grad(), _modules_watched(case.model, sums, watched=True):
        losses = [float(case.step(case.model, rows)) for rows in parts]
    return sum(losses) / len(losses), sums


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


def _order_of_forward(case: TestCase) -> list[str]:
    """Names of parameters in the order in which their modules run; those of modules that do not run come last."""
    ran: dict[nn.Module, int] = {}
    modules = dict(case.model.named_modules())

    def note(module: nn.Module, _: Any) -> None:
        for inner in module.modules() if isinstance(module, MoE) else (module,):  # the plain one calls no inner module
            ran.setdefault(inner, len(ran))

    hooks = [module.register_forward_pre_hook(note) for module in modules.values()]
    with torch.no_grad():
        case.step(case.model, batch_of(case, 0, 0))
    for hook in hooks:
        hook.remove()
    names = [name for name, _ in case.model.named_parameters()]
    return sorted(names, key=lambda name: ran.get(modules[name.rpartition(".")[0]], len(modules)))


# --------------------------------------------------------------------------------------------------------- what is left


def exported(setup: Setup) -> tuple[Weights, Tensor]:
    """Weights and outputs of a plain model that reads what the ranks have exported."""
    torch.manual_seed(SEED)
    case = setup.source.build()
    model: Any = case.model
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
    return weights, _outputs(case, model)


def _of_transformers(model: nn.Module) -> bool:
    return hasattr(model, "save_pretrained") and hasattr(model, "config") and not hasattr(model, "peft_config")


def _outputs(case: TestCase, model: nn.Module, device: str = "cpu") -> Tensor:
    """Logits of a batch that no step has seen; the loss where the model is not transformers'."""
    batch = _moved(batch_of(case, _PROBE, 0), device)
    model.eval()
    with torch.no_grad():
        made = model(**batch).logits if case.step is own_loss else case.step(model, batch)
    model.train()
    return made.float().cpu().clone()


def optimizer_of(case: TestCase, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The case's own, or AdamW with two param_groups."""
    if case.optimizer is not None:
        return join(case.optimizer(parameters))
    trained = list(parameters)
    shared_out = [{"params": trained[i :: len(GROUPS)], **options} for i, options in enumerate(GROUPS)]
    return torch.optim.AdamW([group for group in shared_out if group["params"]])
