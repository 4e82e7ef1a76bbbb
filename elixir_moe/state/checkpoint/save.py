"""Saves a checkpoint: every rank writes the elements it holds, by name and position in the logical parameters.

Owns the contents of a save, their division among ranks, and the steps of a save, synchronous or in the background.

Before an asynchronous `save` returns, it copies everything that user code can change unnoticed: buffers, and shards
that parameters view in place. Anything else changes only by an update, a load, or a user's write that is stored in the
shard; each of these waits until the thread has copied everything (`Gate.wait_for_reader`). Updates of the last step
may still run when `save` is called: the thread waits for them, one shard at a time (`Elements.read`).
"""

import logging
import os
import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.accelerator import current_stream, is_accelerator, new_stream, on_stream
from elixir_moe.chunks.plan import Tier
from elixir_moe.distributed.all_ranks import disagreement, raise_on_all_ranks
from elixir_moe.errors import CheckpointError, ConfigError, UsageError, did_you_mean
from elixir_moe.kernels import work_on
from elixir_moe.memory.elements import Coded, InMemory, OnDisk
from elixir_moe.optim.agreement import Options
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.optim.state import OptimizerState
from elixir_moe.parallel.pattern import is_whole
from elixir_moe.runtime.phase import READY, Place
from elixir_moe.state.checkpoint.frozen import frozen_records
from elixir_moe.state.checkpoint.hashing import digest_of
from elixir_moe.state.checkpoint.held import (
    HeldPiece,
    buffers_of,
    extra_states_of,
    held_pieces,
    share_of,
    wrapped_of,
)
from elixir_moe.state.checkpoint.manifest import (
    WEIGHT,
    Base,
    Buffer,
    FileRecord,
    Manifest,
    ParameterRecord,
    ParamGroup,
    SavedPiece,
    dump,
    parse,
)
from elixir_moe.state.checkpoint.rng import random_states
from elixir_moe.state.checkpoint.storage import MANIFEST, Draft, next_save_time, path_of, retain
from elixir_moe.state.checkpoint.tensors import FileImage, Item
from elixir_moe.state.checkpoint.values import encode
from elixir_moe.state.marked import partial_of
from elixir_moe.state.safetensors_format import name_of
from elixir_moe.state.wrapped import Wrapped

_LOG = logging.getLogger(__name__)

UPDATES = "updates"
"""Name of the number of updates in a piece's scalars."""
CODES = "codes"
"""Name, in the scalars too, of the `CODING` of 8-bit moments; the file has the decoded values."""
CODING = 2
"""The 8-bit coding of moments (csrc/narrow.hpp); values decoded from one coding do not fit another."""
_OPTIMIZER_PREFIX = "optimizer."
"""Prefix for a name of the optimizer's that equals `WEIGHT`, `UPDATES` or `CODES`."""


class Saving:
    """A save in progress, with the methods of a `concurrent.futures.Future`: `done`, `result`, `exception`.

    All ranks fail together. Training and later saves can continue after a failure; the next `save`, `load` or
    ``optimizer.close()`` raises it if nothing has retrieved it before.
    """

    def __init__(
        self,
        path: Path,
        wrapped: Wrapped,
        future: "Future[None] | None" = None,
        copied: threading.Event | None = None,
    ) -> None:
        self.path = path
        """Directory of the checkpoint."""
        self._wrapped = wrapped
        self._future = future
        self._copied = copied
        self._failure: CheckpointError | None = None
        if future is not None:
            _finish_at_exit()
            _UNRETRIEVED.add(self)
            future.add_done_callback(lambda ended: _UNRETRIEVED.discard(self) if ended.exception() is None else None)

    def done(self) -> bool:
        """Whether this rank's part has ended, successfully or not. Not collective."""
        return self._future is None or self._future.done()

    def join(self) -> None:
        """Blocks until this rank's part has ended, successfully or not. Not collective."""
        if self._future is not None:
            self._future.exception()

    def wait_for_copy(self) -> None:
        """Blocks until everything is copied, so that the next update need not wait. Not collective."""
        if self._copied is not None:
            self._copied.wait()

    def poll(self) -> bool:
        """Whether the checkpoint is complete, the same on all ranks. Raises CheckpointError on failure. Collective."""
        if self._future is not None:
            done = raise_on_all_ranks("asked whether a save has ended", self.done, self._wrapped.groups.control)
            if not all(done):
                return False
        self.result()
        return True

    def exception(self) -> CheckpointError | None:
        """Blocks until the save has ended; returns the failure, or None. Collective."""
        try:
            self.result()
        except CheckpointError as error:
            return error
        return None

    def result(self) -> Path:
        """Blocks until the checkpoint is complete; returns its path. Raises CheckpointError on failure. Collective."""
        future, self._future = self._future, None
        _UNRETRIEVED.discard(self)
        if future is not None:
            self._wrapped.kept.pending = None
            control = self._wrapped.groups.control
            try:
                raise_on_all_ranks("saved a checkpoint", future.result, control, error=CheckpointError)
            except CheckpointError as error:
                self._failure = error
        if self._failure is not None:
            raise self._failure
        return self.path


_UNRETRIEVED: set[Saving] = set()
"""Asynchronous saves that are running or have failed, and whose result nothing has retrieved."""


@cache
def _finish_at_exit() -> None:
    """Makes a program wait for its saves at exit, and log those that have failed.

    It runs before Python shuts executors down: a save that is still running needs them. No public function of Python
    registers anything that early.
    """
    threading._register_atexit(_finish_saves)  # type: ignore[attr-defined]


def _finish_saves() -> None:
    for saving in list(_UNRETRIEVED):
        failure = None if saving._future is None else saving._future.exception()
        if failure is not None:
            _LOG.error("the save of %s has failed, and the program ends: %s", saving.path, failure)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: ShardedOptimizer,
    *,
    extra: Any = None,
    keep: int | None = None,
    asynchronous: bool = False,
    frozen: bool | Collection[str] = True,
) -> Saving:
    """Saves model, optimizer and random generators as the checkpoint `path`, completely or not at all. Collective.

    Call it between `optimizer.step` and the next backward. The directory must be on storage that all ranks share; an
    existing one is never changed.

    Args:
        path: the directory to create; ``~`` is the home directory, as in every path given to the library.
        model: a wrapped model.
        optimizer: the optimizer that `wrap` returned with it.
        extra: a value for `load` to return, equal on all ranks: None, numbers, strings, bytes, lists, tuples, dicts,
            small tensors and arrays. For an LR scheduler, pass its ``state_dict()``.
        keep: afterwards, remove all but the `keep` latest checkpoints in the parent directory of `path`. If one cannot
            be removed, it stays, with a warning.
        asynchronous: copy to host memory (as many bytes as this rank's file) and write in the background. The next
            update waits until the copy is complete. If the plan has chunks on disk, the copy takes as long as the
            writes, so that the file need not fit in memory. A program waits for its saves when it ends.
        frozen: write frozen parameters too. False stores only their hashes, and the folder of ``em.wrap(...,
            weights=folder)`` if there was one; `load` then needs a model that has them. They are read once, at the
            first such save. A collection of names: write these frozen parameters, and store the hashes of the others.

    Returns:
        A `Saving`, complete unless `asynchronous`. The next save waits for it.

    Raises:
        CheckpointError: on all ranks: the directory exists, the disk is full, ranks disagree on path or `extra`,
            `extra` or the extra state of a module has a value of another type, `frozen` has a name that is not a frozen
            parameter's, gradients wait for a step, or an earlier asynchronous save failed and nothing has raised it.
        ConfigError: `keep` is not a whole number of at least 1.
        OutOfStepError: ranks have taken different steps, as after an interrupt; on all ranks.
        UsageError: model or optimizer are not wrapped, parameters or buffers have changed since `wrap`, or ranks
            took the last step with different options.
    """
    wrapped = wrapped_of(model, optimizer)
    if keep is not None and not is_whole(keep, least=1):
        raise ConfigError(f"keep={keep!r}: expected a whole number of at least 1, or None to keep all")
    wait_for_earlier_save(wrapped, f"em.save({str(path)!r})")
    control = wrapped.groups.control
    written = frozen if isinstance(frozen, bool) else frozenset(frozen)
    facts = raise_on_all_ranks(
        "looked at what to save",
        lambda: _facts(path, model, extra, wrapped, written, asynchronous),
        control,
        error=CheckpointError,
    )
    wrapped.phase.compare([found.place for found in facts], range(len(facts)))
    wrapped.kept.decision.compare_stepped([found.stepped for found in facts])
    _compare(facts)
    base = None if written is True else _base(model, wrapped, written or frozenset(), control)
    first, *others = raise_on_all_ranks(  # apart from the rest: a module may gather a parameter for it
        "took the extra state of modules", lambda: extra_states_of(model), control, error=CheckpointError
    )
    extra_states = (first, *({k: v for k, v in found.items() if v != first.get(k)} for found in others))
    fixed = {**facts[0].fixed, "base": base, "extra_states": extra_states}
    target = Path(facts[dist.get_rank()].target)
    contents: list[_Contents] = []
    drafts: list[Draft] = []

    def begin() -> None:
        if dist.get_rank() == 0:
            drafts.append(Draft(target))
        on_disk = any(chunk.shard.tier is Tier.DISK for chunk in wrapped.scheduler.chunks)  # may exceed memory
        bounded = on_disk or not asynchronous
        contents.append(_Contents(model, wrapped, facts, bounded=bounded, left_out=base.parameters if base else ()))
        if asynchronous:
            contents[0].copy_mutable()

    def write(process_group: dist.ProcessGroup, taken: Callable[[], None]) -> None:
        _write(process_group, target, contents[0], drafts, fixed, keep, taken)

    with _abandoning(drafts):
        raise_on_all_ranks("began a checkpoint", begin, control, error=CheckpointError)
    if not asynchronous:
        with _abandoning(drafts):
            write(control, lambda: None)
        return Saving(target, wrapped)
    copied = threading.Event()

    def write_in_background() -> None:
        try:
            with _abandoning(drafts), stream:
                write(background, copied.set)
        finally:
            copied.set()

    with _abandoning(drafts, copied.set):
        background, stream = wrapped.groups.background(), _stream_behind(wrapped)
        for chunk in wrapped.scheduler.chunks:
            chunk.shard.begin_save(copied)
        executor = ThreadPoolExecutor(1, thread_name_prefix="elixir-save")
        saving = Saving(target, wrapped, executor.submit(write_in_background), copied)
        executor.shutdown(wait=False)
        wrapped.kept.pending = saving
    return saving


def saved_name(name: str) -> str:
    """The name in a piece for the optimizer's value `name`."""
    return _OPTIMIZER_PREFIX + name if name in (WEIGHT, UPDATES, CODES) or name.startswith(_OPTIMIZER_PREFIX) else name


def optimizer_name(saved: str) -> str:
    """The inverse of `saved_name`."""
    return saved.removeprefix(_OPTIMIZER_PREFIX)


def wait_for_earlier_save(wrapped: Wrapped, call: str) -> None:
    """Waits for an earlier asynchronous save whose result nothing has retrieved. Collective.

    Raises CheckpointError if it has failed; the message adds that `call` has done nothing yet.
    """
    saving: Saving | None = wrapped.kept.pending
    if saving is not None and (failure := saving.exception()) is not None:
        raise CheckpointError(
            f"the earlier save of {saving.path} has failed: {failure}. Its result was not read before {call}, which "
            f"has done nothing yet: call it again"
        ) from failure


@contextmanager
def _abandoning(drafts: list[Draft], also: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Removes the drafts, and calls `also`, if the rest of the save fails."""
    try:
        yield
    except BaseException:
        also()
        for draft in drafts:
            draft.abandon()
        raise


def _stream_behind(wrapped: Wrapped) -> AbstractContextManager[object]:
    """A context in which the thread copies from the GPU on its own stream, after all work issued so far."""
    there = (c.shard.storage for c in wrapped.scheduler.chunks if c.shard.tier is Tier.DEVICE)
    device = next((shown.device for shown in there if is_accelerator(shown.device)), None)
    if device is None:
        return nullcontext()
    stream = new_stream(device)
    stream.wait_stream(current_stream(device))
    return _on(stream)


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    """Makes the thread use `stream` and its GPU; by default a thread uses the first GPU, perhaps another rank's."""
    work_on(stream.device)
    with on_stream(stream):
        yield


# ---------------------------------------------------------------------------------------------------- what all agree on


@dataclass(frozen=True, kw_only=True, slots=True)
class _Facts:
    """The facts that ranks exchange before a save."""

    target: str
    extra_digest: str
    buffer_digests: dict[str, str]
    rng: Any
    buffer_forms: dict[str, str]
    frozen: bool | frozenset[str]
    """Whether the checkpoint holds frozen parameters, or which of them."""
    asynchronous: bool
    place: Place
    stepped: Options
    fixed: dict[str, Any]
    """Fields of the manifest that are equal on all ranks; filled on rank 0 only."""


def _facts(
    path: Any, model: nn.Module, extra: Any, wrapped: Wrapped, frozen: bool | frozenset[str], asynchronous: bool
) -> _Facts:
    target = path_of(path)
    if not isinstance(frozen, bool):
        known = {held.name for held in held_pieces(wrapped) if not held.chunk.spec.key.trainable}
        for name in sorted(frozen - known):
            hint = did_you_mean(name, known)
            raise CheckpointError(
                f"frozen: {name!r} is not a frozen parameter of the model: give names of model.named_parameters()"
                f"{hint and f'; {hint}'}"
            )
    wrapped.kept.check_last_step()
    wrapped.phase.require((READY,), "em.save()")
    if len(wrapped.spec.ranks) < dist.get_world_size():
        raise UsageError(
            f"this model is a pipeline stage of ranks {list(wrapped.spec.ranks)}, and a checkpoint is of one model of "
            f"all ranks: save em.full_state_dict(model) of each stage instead"
        )
    wrapped.scheduler.writes.keep_all()
    encoded, buffers = encode(extra, "extra"), buffers_of(model)
    fixed = {}
    if dist.get_rank() == 0:
        scale = wrapped.optimizer.loss_scale
        fixed = {
            "optimizer": wrapped.kept.kind,
            "param_groups": tuple(
                ParamGroup(
                    params=tuple(dict.fromkeys(wrapped.spec.names[p][0] for p in group["params"])),
                    options={k: encode(v, f"param_group[{k!r}]") for k, v in group.items() if k != "params"},
                )
                for group in wrapped.optimizer.param_groups
            ),
            "loss_scale": encode(None if scale is None else asdict(scale), "the loss scale"),
            "keys": wrapped.spec.keys,
            "extra": encoded,
        }
    return _Facts(
        target=str(target),
        extra_digest=digest_of(repr(encoded).encode()),
        buffer_digests={name: digest_of(_bytes(buffer)) for name, buffer in buffers.items()},
        buffer_forms={name: f"{buffer.dtype} of shape {tuple(buffer.shape)}" for name, buffer in buffers.items()},
        rng=random_states(),
        frozen=frozen,
        asynchronous=asynchronous,
        place=wrapped.phase.place,
        stepped=wrapped.kept.decision.stepped,
        fixed=fixed,
    )


def _compare(facts: list[_Facts]) -> None:
    """Raises CheckpointError unless all ranks save the same."""
    forms = [{name: found.buffer_forms.get(name) for name in facts[0].buffer_forms} for found in facts]
    for what, everyone, remedy in (
        ("the directory of the checkpoint", [found.target for found in facts], "name one"),
        (
            "extra, by its hash",
            [found.extra_digest for found in facts],
            "put values that differ between ranks into a list of all (torch.distributed.all_gather_object)",
        ),
        ("frozen", [f.frozen if isinstance(f.frozen, bool) else sorted(f.frozen) for f in facts], "pass one value"),
        ("asynchronous", [found.asynchronous for found in facts], "pass one value"),
        (
            "the buffers",
            forms,
            "a checkpoint stores one shape of a buffer: use one on all ranks, or register it with persistent=False and "
            "keep it in extra",
        ),
    ):
        if (different := disagreement(what, everyone)) is not None:
            raise CheckpointError(f"{different}: {remedy}")


def _base(model: nn.Module, wrapped: Wrapped, written: frozenset[str], process_group: dist.ProcessGroup) -> Base | None:
    """The record of the frozen parameters that are not written; None if there are none. Collective."""
    found = frozen_records(wrapped, process_group)
    records = {name: record for name, record in found.items() if name not in written}
    named = getattr(getattr(model, "config", None), "_name_or_path", "")
    return Base(source=wrapped.weights or str(named), parameters=records) if records else None


# ----------------------------------------------------------------------------------------------------- this rank's part


class _Contents:
    """The tensors this rank writes, and their positions in the logical parameters."""

    def __init__(
        self,
        model: nn.Module,
        wrapped: Wrapped,
        facts: list[_Facts],
        *,
        bounded: bool,
        left_out: Container[str],
    ) -> None:
        self.file = f"rank-{dist.get_rank():05d}.safetensors"
        self._items: list[Item] = []
        self._may_change: list[str] = []
        self.entries: dict[str, ParameterRecord] = {}
        self.rng = tuple(found.rng for found in facts)
        for held in held_pieces(wrapped):
            if held.name in left_out:
                continue
            pieces = self._pieces(held, wrapped.kept)
            earlier = self.entries[held.name].pieces if held.name in self.entries else ()  # of other tiles
            self.entries[held.name] = ParameterRecord(
                names=tuple(wrapped.spec.names[held.parameter]),
                shape=held.global_shape,
                grid=held.grid,
                dtype=name_of(held.chunk.original_dtypes[held.index], held.name),
                trainable=held.chunk.spec.key.trainable,
                pieces=(*earlier, *pieces),
            )
        self.buffers: dict[str, Buffer] = {}
        for name, buffer in buffers_of(model).items():
            self._add_buffer(name, buffer, [found.buffer_digests[name] for found in facts])
        self.image = FileImage(self._items, bounded=bounded) if self._items else None

    def copy_mutable(self) -> None:
        """Copies the tensors that user code can change unnoticed."""
        if self.image is not None:
            self.image.take(self._may_change)

    def _pieces(self, held: HeldPiece, state: OptimizerState) -> Iterator[SavedPiece]:
        """Yields one piece, or none if this rank has no elements to write."""
        written = held.cut(*share_of(held.chunk))
        if not written.span.numel:
            return
        kept, scalars = {WEIGHT: written.values}, {}
        trained = state.piece_of(held.parameter)
        if trained is not None:
            scalars[UPDATES] = trained.steps
            inside = slice(written.here.start - held.here.start, written.here.stop - held.here.start)
            for name, value in state.of(held.parameter).items():
                if isinstance(value, (Coded, InMemory, OnDisk)):
                    kept[saved_name(name)] = value[inside]
                    scalars |= {CODES: CODING} if isinstance(value, Coded) else {}
                else:
                    scalars[saved_name(name)] = encode(value, f"{name!r}, kept by the optimizer for {held.name!r},")
        dtypes = {name: name_of(elements.dtype, held.name) for name, elements in kept.items()}
        piece = SavedPiece(file=self.file, span=written.span, state=dtypes, scalars=scalars)
        for name, elements in kept.items():
            key = piece.key(held.name, name)
            stays = isinstance(elements, InMemory) and not is_accelerator(elements.tensor.device)
            self._items.append(
                Item(key=key, dtype=dtypes[name], shape=(written.span.numel,), tensor=elements.read, stays=stays)
            )
            if name == WEIGHT and held.chunk.spec.shows_only_weights:
                self._may_change.append(key)
        yield piece

    def _add_buffer(self, name: str, buffer: torch.Tensor, digests: list[str]) -> None:
        """Adds a buffer. Among ranks with equal values, the first one writes them."""
        writers = [digests.index(digest) for digest in digests]
        dtype, shape = name_of(buffer.dtype, name), tuple(buffer.shape)
        files = tuple(f"rank-{rank:05d}.safetensors" for rank in writers)
        self.buffers[name] = Buffer(shape=shape, dtype=dtype, file_of_rank=files)
        if dist.get_rank() in writers:
            self._items.append(Item(key=Buffer.key(name), dtype=dtype, shape=shape, tensor=buffer.detach))
            self._may_change.append(Buffer.key(name))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# ------------------------------------------------------------------------------------------------------------- writing


def _write(
    process_group: dist.ProcessGroup,
    target: Path,
    contents: _Contents,
    drafts: list[Draft],
    fixed: Mapping[str, Any],
    keep: int | None,
    taken: Callable[[], None],
) -> None:
    """Writes this rank's file; rank 0 writes the manifest when all files are complete. Collective."""

    def write_file() -> tuple[str, FileRecord] | None:
        directory = partial_of(target)
        if not directory.is_dir():
            raise CheckpointError(
                f"{directory}, made by rank 0, is not there: a checkpoint must be on storage that all ranks share"
            )
        image = contents.image
        return None if image is None else (contents.file, image.write(directory / contents.file, taken))

    records = raise_on_all_ranks("wrote their files", write_file, process_group, error=CheckpointError)
    everything: list[Any] | None = [None] * dist.get_world_size(process_group) if drafts else None
    dist.gather_object((contents.entries, contents.buffers), everything, dst=0, group=process_group)

    def commit() -> None:
        for draft in drafts:
            assert everything is not None
            files = dict(record for record in records if record is not None)
            manifest = dump(_merge(next_save_time(target.parent), everything, files, contents.rng, fixed))
            parse(manifest, str(target / MANIFEST))  # proves that it can be read again
            draft.commit(manifest)
            if keep is not None:
                retain(target.parent, keep)

    raise_on_all_ranks("committed a checkpoint", commit, process_group, error=CheckpointError)


def _merge(
    saved_ns: int,
    everything: list[tuple[dict[str, ParameterRecord], dict[str, Buffer]]],
    files: Mapping[str, FileRecord],
    rng: tuple[Any, ...],
    fixed: Mapping[str, Any],
) -> Manifest:
    first, buffers = everything[0]
    entries = {}
    for name, entry in first.items():
        pieces = [piece for theirs, _ in everything for piece in theirs[name].pieces]
        pieces.sort(key=lambda piece: (piece.span.offset, piece.span.start))
        entries[name] = replace(entry, pieces=tuple(pieces))
    return Manifest(
        saved_ns=saved_ns, world=len(rng), parameters=entries, buffers=buffers, files=files, rng=rng, **fixed
    )
