"""Loads any checkpoint into any layout, from files to shards.

Owns the checks before anything changes, and the copy of each element to its new place. First, every file is hashed;
then every parameter, shape and tensor is looked up, on all ranks. No shard is written before all ranks agree.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.distributed.all_ranks import disagreement, raise_on_all_ranks
from elixir_moe.errors import CheckpointError
from elixir_moe.optim.agreement import LossScale
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.optim.state import OptimizerState
from elixir_moe.optim.whole_matrix import fixed_options
from elixir_moe.parallel.state_dict import modules_with_extra_state
from elixir_moe.state.checkpoint.frozen import frozen_records
from elixir_moe.state.checkpoint.held import HeldPiece, buffers_of, held_pieces, wrapped_of
from elixir_moe.state.checkpoint.manifest import (
    WEIGHT,
    Base,
    Buffer,
    FrozenRecord,
    Manifest,
    ParameterRecord,
    SavedPiece,
)
from elixir_moe.state.checkpoint.rng import read_random_states, seed_new_rank, set_random_states
from elixir_moe.state.checkpoint.save import CODES, CODING, UPDATES, optimizer_name, saved_name, wait_for_earlier_save
from elixir_moe.state.checkpoint.shard_ranges import Box, Span, overlap
from elixir_moe.state.checkpoint.storage import MANIFEST, path_of, read_manifest, verify
from elixir_moe.state.checkpoint.tensors import Files
from elixir_moe.state.checkpoint.values import decode
from elixir_moe.state.safetensors_format import DTYPES
from elixir_moe.state.wrapped import Wrapped

_MOST_NAMED = 8
_MOST_TEXT = 100
"""Most characters of a saved value in an error message."""
_MOST_STEPS = 2**32
"""More steps than any training has; ranks compare step counts in this many bits (`optim.agreement`)."""
_RATES = ("lr", "initial_lr")
"""Options that must be numbers even if the optimizer lacks them now: a scheduler adds one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Move:
    """The copies that fill one local shard."""

    held: HeldPiece
    parts: list[tuple[SavedPiece, list[tuple[Box, Box]]]]
    """Source pieces, with pairs of (part of the shard, part of the piece)."""
    names: tuple[str, ...]
    """Names of the tensors read from each piece."""
    updates: int | None
    """How often the parameter has been updated; None if its optimizer state stays as it is."""
    values: dict[str, Any]
    """{name: value} that the optimizer keeps for the whole piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Todo:
    """All work of this rank, checked in advance."""

    moves: list[_Move]
    buffers: list[tuple[torch.Tensor, str, str]]
    """(buffer, file, tensor in it)."""
    extra_states: list[tuple[nn.Module, Any]]
    """(module, its extra state)."""
    random: dict[str, Any] | None
    options: list[dict[str, Any]]
    loss_scale: LossScale | None
    extra: Any


def load(
    path: str | os.PathLike[str], model: nn.Module, optimizer: ShardedOptimizer, *, convert_state: bool = False
) -> Any:
    """Restores model, optimizer and random generators from the checkpoint `path`; returns its `extra`.

    World size, meshes, degrees of parallelism, plan and compute dtype may all differ from those of the save. The
    options of each param_group, such as learning rates, are restored. Gradients are dropped. A rank without a
    counterpart in the save gets newly seeded random generators. Collective.

    Args:
        path: a checkpoint made by `save`.
        model: a wrapped model with the same parameters.
        optimizer: the optimizer that `wrap` returned with the model, of the same class and with the same param_groups.
            A parameter that was frozen in the save and is trainable now keeps its present optimizer state.
        convert_state: load master weights and moments of another precision than the plan's (`Plan.master`,
            `Plan.moments`) too, rounded to the nearest. By default that is an error.

    Raises:
        CheckpointError: on all ranks, with nothing changed: a file is damaged, missing, a link or of another version; a
            parameter or buffer is missing, unknown, or has another shape; another optimizer was saved, or its state in
            another precision; an option of a param_group has a different type than the current one; a number of updates
            is invalid; or it was saved with ``frozen=False``, and the frozen weights of the model differ from those of
            the save.
        UsageError: model or optimizer are not wrapped, or parameters or buffers have changed since `wrap`.
    """
    wrapped = wrapped_of(model, optimizer)
    wait_for_earlier_save(wrapped, f"em.load({str(path)!r})")
    wrapped.kept.check_last_step()
    control = wrapped.groups.control
    manifests: list[Manifest] = []

    def hash_files() -> str:
        directory = path_of(path)
        manifests.append(read_manifest(directory))
        verify(directory, manifests[0], _my_share(manifests[0]))
        return f"{directory.name} of {manifests[0].saved_ns}"

    found = raise_on_all_ranks("hashed the files of a checkpoint", hash_files, control, error=CheckpointError)
    if (different := disagreement("the checkpoint to load", found)) is not None:
        raise CheckpointError(f"{different}: name one on all ranks, in a folder that all of them see")
    todo: list[_Todo] = []
    directory = path_of(path)
    files = Files(directory)
    wrapped.scheduler.writes.finish_shared_reads()
    raise_on_all_ranks(
        "looked up all parameters in a checkpoint",
        lambda: todo.append(_look_up(manifests[0], files, directory, model, wrapped, convert_state)),
        control,
        error=CheckpointError,
    )
    if manifests[0].base is not None:
        _check_base(manifests[0].base, frozen_records(wrapped, control), directory)
    raise_on_all_ranks(
        "loaded a checkpoint",
        lambda: _apply(todo[0], files, wrapped, found[0]),
        control,
        error=CheckpointError,
    )
    return todo[0].extra


def _my_share(manifest: Manifest) -> list[str]:
    """The files that this rank hashes. Each file belongs to one rank, and ranks have about equally many bytes."""
    ranks = dist.get_world_size()
    loads, mine = [0] * ranks, []
    for name, record in sorted(manifest.files.items(), key=lambda item: -item[1].nbytes):
        rank = loads.index(min(loads))
        loads[rank] += record.nbytes
        if rank == dist.get_rank():
            mine.append(name)
    return mine


# --------------------------------------------------------------------------------------------------------- looking up


def _look_up(
    manifest: Manifest,
    files: Files,
    directory: Path,
    model: nn.Module,
    wrapped: Wrapped,
    convert_state: bool,
) -> _Todo:
    where = str(directory / MANIFEST)
    holdings = list(held_pieces(wrapped))
    buffers = buffers_of(model)
    problems = [*_differences(manifest, wrapped, holdings, buffers), *_other_extra_states(manifest, model)]
    if problems:
        more = f"\n  and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
        raise CheckpointError(f"{directory} does not fit the model: " + "\n  ".join(problems[:_MOST_NAMED]) + more)
    if any(chunk.spec.key.trainable for chunk in wrapped.scheduler.chunks):
        _check_optimizer(manifest, wrapped, directory)
    present = [held for held in holdings if held.span.numel and held.name in manifest.parameters]
    _check_codings(present, manifest, directory)
    if not convert_state:
        _check_precisions(present, manifest, wrapped.kept, directory)
    moves = [_move(held, manifest.parameters[held.name], files, directory, wrapped.kept) for held in present]
    rank = dist.get_rank()
    sources = []
    for name, buffer in buffers.items():
        saved = manifest.buffers[name]
        file = saved.file_of_rank[rank if rank < manifest.world else 0]
        files.check(file, Buffer.key(name), saved.dtype, saved.shape)
        sources.append((buffer, file, Buffer.key(name)))
    extra_states = _extra_states(manifest, rank)
    modules = modules_with_extra_state(model)
    scale = decode(manifest.loss_scale, f"{where}: loss_scale")
    return _Todo(
        moves=moves,
        buffers=sources,
        extra_states=[(modules[key], decode(value, f"{where}: {key}")) for key, value in extra_states.items()],
        random=read_random_states(manifest.rng[rank], f"{where}: rng {rank}") if rank < manifest.world else None,
        options=[
            _options(saved.options, group, f"{where}: param_groups[{index}]")
            for index, (saved, group) in enumerate(
                zip(manifest.param_groups, wrapped.optimizer.param_groups, strict=False)
            )
        ],
        loss_scale=_loss_scale(scale, where) if scale is not None else None,
        extra=decode(manifest.extra, f"{where}: extra"),
    )


def _differences(
    manifest: Manifest, wrapped: Wrapped, holdings: list[HeldPiece], buffers: dict[str, torch.Tensor]
) -> Iterator[str]:
    own = {held.name: held for held in holdings}
    left_out = {} if manifest.base is None else manifest.base.parameters
    yield from _unfit(left_out, own)
    for kind, saved, found in (("parameter", manifest.parameters, own), ("buffer", manifest.buffers, buffers)):
        yield from (
            f"{kind} {name!r} of the model is not in the checkpoint"
            for name in found
            if name not in saved and name not in left_out
        )
        yield from (f"{kind} {name!r} of the checkpoint is not in the model" for name in saved if name not in found)
    for name, held in own.items():
        entry = manifest.parameters.get(name)
        if entry is None:
            continue
        tied = tuple(wrapped.spec.names[held.parameter])
        if entry.names != tied:
            yield f"parameter {name!r} has the names {list(entry.names)} in the checkpoint, {list(tied)} in the model"
        yield from _unlike(f"parameter {name!r}", entry, held.global_shape, held.values.dtype)
        uncut = held.span.shape == held.grid or all(piece.span.shape == entry.grid for piece in entry.pieces)
        if entry.shape == held.global_shape and entry.grid != held.grid and not uncut:
            yield f"parameter {name!r} is cut as {entry.grid} in the checkpoint, as {held.grid} in the model"
    for name, buffer in buffers.items():
        if any(size > 1 and not step for size, step in zip(buffer.shape, buffer.stride(), strict=True)):
            yield f"buffer {name!r} is expanded, and its elements share memory: register it with .contiguous()"
        if name in manifest.buffers:
            yield from _unlike(f"buffer {name!r}", manifest.buffers[name], tuple(buffer.shape), buffer.dtype)


def _extra_states(manifest: Manifest, rank: int) -> dict[str, Any]:
    """Returns {key: encoded extra state of a module} for that rank; a rank that the save lacks gets rank 0's."""
    found = manifest.extra_states
    return {**found[0], **(found[rank] if rank < len(found) else {})} if found else {}


def _other_extra_states(manifest: Manifest, model: nn.Module) -> Iterator[str]:
    modules, saved = modules_with_extra_state(model), _extra_states(manifest, 0)
    for key, module in modules.items():
        if key not in saved and module.get_extra_state() is not None:
            yield f"extra state {key!r} of the model is not in the checkpoint"
    for key in saved:
        if key not in modules or type(modules[key]).set_extra_state is nn.Module.set_extra_state:
            yield f"extra state {key!r} of the checkpoint has no module with set_extra_state in the model"


def _unfit(left_out: Mapping[str, FrozenRecord], own: dict[str, HeldPiece]) -> Iterator[str]:
    """Yields the problems of the model's parameters that the checkpoint does not hold."""
    for name, saved in left_out.items():
        held = own.get(name)
        if held is None:
            yield f"parameter {name!r}, frozen in the save, is not in the model"
        elif held.chunk.spec.key.trainable:
            yield f"parameter {name!r} is trainable now; it was frozen and left out (em.save(..., frozen=False))"
        elif held.global_shape != saved.shape:
            yield f"parameter {name!r} was of shape {saved.shape} in the save, is of {held.global_shape} in the model"
        elif held.values.dtype != DTYPES[saved.dtype]:
            yield (
                f"frozen parameter {name!r} was held in {DTYPES[saved.dtype]} in the save, is in {held.values.dtype}: "
                f"its hash needs the same compute_dtype"
            )


def _check_base(base: Base, found: Mapping[str, FrozenRecord], directory: Path) -> None:
    """Raises CheckpointError unless the model's frozen weights equal those of the save."""
    others = [name for name, saved in base.parameters.items() if found[name].digest != saved.digest]
    if others:
        name = others[0]
        raise CheckpointError(
            f"{directory} was saved without its frozen weights, which came from {base.source or 'no named folder'!r}. "
            f"{len(others)} of {len(base.parameters)} frozen parameters of this model have other values: {name!r} has "
            f"the hash {found[name].digest}, expected {base.parameters[name].digest}. Wrap the model with the frozen "
            f"weights of the save"
        )


def _unlike(what: str, saved: ParameterRecord | Buffer, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[str]:
    if saved.shape != shape:
        yield f"{what} is of shape {saved.shape} in the checkpoint, {shape} in the model"
    before = DTYPES[saved.dtype]
    if before != dtype and not (before.is_floating_point and dtype.is_floating_point):
        yield f"{what} is of {before} in the checkpoint, {dtype} in the model"


def _check_optimizer(manifest: Manifest, wrapped: Wrapped, directory: Path) -> None:
    if manifest.optimizer != wrapped.kept.kind:
        raise CheckpointError(
            f"{directory} was saved with the optimizer {manifest.optimizer[:200]!r}, this is {wrapped.kept.kind!r}, "
            f"whose state is different: build the optimizer as it was"
        )
    groups = [{wrapped.spec.names[p][0] for p in group["params"]} for group in wrapped.optimizer.param_groups]
    saved = [set(group.params) for group in manifest.param_groups]
    if len(groups) != len(saved):
        raise CheckpointError(f"{directory} has {len(saved)} param_groups, the optimizer has {len(groups)}")
    for index, (ours, theirs) in enumerate(zip(groups, saved, strict=True)):
        if ours != theirs:
            raise CheckpointError(
                f"param_group {index} has other parameters than in {directory}: {sorted(ours ^ theirs)[:_MOST_NAMED]} "
                f"are in one of the two only; build the optimizer as it was"
            )


def _check_codings(present: list[HeldPiece], manifest: Manifest, directory: Path) -> None:
    """Raises CheckpointError if 8-bit moments were saved in another coding than this release's."""
    for held in present:
        for piece in manifest.parameters[held.name].pieces:
            coding = piece.scalars.get(CODES, CODING)
            if coding != CODING:
                raise CheckpointError(
                    f"{directory}: the moments of parameter {held.name!r} were saved with moments='int8' in another "
                    f"8-bit coding: expected number {CODING}, found {coding}: load it with the release that saved it, "
                    f"and begin a new run from weights that it saves with em.save_pretrained"
                )


def _check_precisions(present: list[HeldPiece], manifest: Manifest, state: OptimizerState, directory: Path) -> None:
    """Raises CheckpointError if Adam's state of a parameter has another precision than in the save."""
    for held in present:
        entry, key = manifest.parameters[held.name], held.chunk.spec.key
        if not (key.trainable and entry.trainable and state.keeps_always_the_same and entry.pieces):
            continue
        saved, now = _precision_of(entry.pieces[0]), key.precision
        if saved != (now.master, now.moments):
            raise CheckpointError(
                f"{directory}: the state of parameter {held.name!r} was saved with master={saved[0]!r} and "
                f"moments={saved[1]!r}, the plan has master={now.master!r} and moments={now.moments!r} for it: give "
                f"the plan those of the save, or convert with em.load(..., convert_state=True)"
            )


def _precision_of(piece: SavedPiece) -> tuple[str, str]:
    """Returns (master, moments) of the state in a save, by the plan's names."""
    names = {"F32": "fp32", "BF16": "bf16"}
    master, moments = (
        str(next(dtype for name, dtype in piece.state.items() if (name == WEIGHT) is is_weight))
        for is_weight in (True, False)
    )
    return names.get(master, master), "int8" if CODES in piece.scalars else names.get(moments, moments)


def _move(held: HeldPiece, entry: ParameterRecord, files: Files, directory: Path, state: OptimizerState) -> _Move:
    parts = [(piece, pairs) for piece in entry.pieces if (pairs := list(overlap(*_in_one_grid(held, entry, piece))))]
    first = parts[0][0]
    names: tuple[str, ...] = (WEIGHT,)
    updates: int | None = None
    values: dict[str, Any] = {}
    if held.chunk.spec.key.trainable and entry.trainable:
        names = tuple(first.state)
        _check_state(held, [piece for piece, _ in parts], directory, state)
        updates, values = _read_scalars(first, f"{directory / MANIFEST}: parameter {held.name!r}")
    for piece, _ in parts:
        for name in names:
            files.check(piece.file, piece.key(held.name, name), piece.state[name], (piece.span.numel,))
    return _Move(held=held, parts=parts, names=names, updates=updates, values=values)


def _in_one_grid(held: HeldPiece, entry: ParameterRecord, piece: SavedPiece) -> tuple[Span, Span]:
    """Returns the spans of `held` and `piece` in one grid; the span of an uncut parameter is the same in any grid."""
    if held.grid == entry.grid:
        return held.span, piece.span
    if piece.span.shape == entry.grid:
        return held.span, piece.span.of_uncut(held.grid)
    return held.span.of_uncut(entry.grid), piece.span


def _check_state(held: HeldPiece, pieces: list[SavedPiece], directory: Path, state: OptimizerState) -> None:
    """Raises CheckpointError unless the pieces agree in the optimizer's values, so that one set can serve them."""
    first = pieces[0]
    for piece in pieces:
        if piece.state != first.state or piece.scalars != first.scalars:
            raise CheckpointError(
                f"{directory}: experts of parameter {held.name!r} have had different numbers of updates "
                f"({str(dict(first.scalars))[:100]}, {str(dict(piece.scalars))[:100]}): load it with the degree of "
                f"expert parallelism it was saved with"
            )
    kept = {WEIGHT, *state.of(held.parameter)}
    if UPDATES not in first.scalars or (kept != set(first.state) and state.keeps_always_the_same):
        raise CheckpointError(
            f"{directory / MANIFEST}: for parameter {held.name!r} it has {sorted(first.state)} and "
            f"{sorted(first.scalars)}, expected {sorted(kept)} and {[UPDATES]}"
        )


def _read_scalars(piece: SavedPiece, where: str) -> tuple[int, dict[str, Any]]:
    """Returns the number of updates of a piece, and the optimizer's values for all of it. Raises CheckpointError."""
    values = {name: decode(value, f"{where}: {name!r}") for name, value in piece.scalars.items()}
    for name in (UPDATES, "step"):
        if name not in values:
            continue
        count = _number(values[name])
        if count is None or not 0 <= count < _MOST_STEPS or (name == UPDATES and type(values[name]) is not int):
            raise CheckpointError(
                f"{where}: {name!r} is {str(values[name])[:_MOST_TEXT]}, expected a number of updates, from 0 to "
                f"{_MOST_STEPS - 1}: use another checkpoint"
            )
    updates = values.pop(UPDATES)
    return updates, {optimizer_name(name): value for name, value in values.items() if name != CODES}


def _options(saved: Mapping[str, Any], group: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the saved options of a param_group, without the names of its parameters.

    Raises CheckpointError, with `where` and the option's name, if its type differs from that of the current value, or
    an option is fixed in `wrap` and has another value.
    """
    if "params" in saved:
        raise CheckpointError(f"{where}['params']: parameters are not an option; use another checkpoint")
    if "lr" in group and "lr" not in saved:
        raise CheckpointError(f"{where}['lr'] is missing; use another checkpoint")
    options = {name: decode(value, f"{where}[{name!r}]") for name, value in saved.items() if name != "param_names"}
    for name, fixed in fixed_options(options).items():
        if name in options and fixed != (present := fixed_options(group)[name]):
            raise CheckpointError(
                f"{where}[{name!r}] is {fixed!r}, and {present!r} in the optimizer, which was wrapped with it: build "
                f"the optimizer with {name}={fixed!r}"
            )
    for name, value in options.items():
        present = group.get(name, 0.0 if name in _RATES else None)
        if (expected := _other_kind(value, present)) is not None:
            raise CheckpointError(
                f"{where}[{name!r}] is {str(value)[:_MOST_TEXT]!r}, expected {expected}: use another checkpoint, or "
                f"set the option to a value of the saved type before em.load"
            )
    return options


def _other_kind(saved: Any, present: Any) -> str | None:
    """Says what is expected instead of a saved option, if its type differs from that of the present one; else None."""
    number = _number(present)
    if isinstance(present, (list, tuple)):
        fits = isinstance(saved, (list, tuple)) and len(saved) == len(present)
        if not fits or any(_other_kind(*both) is not None for both in zip(saved, present, strict=True)):
            return f"{len(present)} values, as in {present}"
    elif number is not None:
        found = _number(saved)
        if found is None or math.isfinite(number) > math.isfinite(found):
            return f"a finite number, such as {present}"
    elif isinstance(present, bool) and not isinstance(saved, (bool, NoneType)):
        return "True or False"
    elif isinstance(present, str) and not isinstance(saved, str):
        return f"a string, such as {present!r}"
    return None


def _number(value: Any) -> float | None:
    """Converts a number, or a tensor of one number, to a float; None for anything else, including True and False."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _loss_scale(fields: Any, where: str) -> LossScale:
    fits = isinstance(fields, dict) and fields.keys() == {"scale", "growth_interval", "clean_steps"}
    numbers = {name: _number(value) for name, value in fields.items()} if fits else {}
    for name, least in (("scale", math.ulp(0.0)), ("growth_interval", 1), ("clean_steps", 0)):
        number = numbers.get(name)
        if number is None or not least <= number < math.inf:
            raise CheckpointError(f"{where}: {str(fields)[:_MOST_TEXT]} is not a loss scale; use another checkpoint")
    return LossScale(**fields)


# ------------------------------------------------------------------------------------------------------------- loading


@torch.no_grad()
def _apply(todo: _Todo, files: Files, wrapped: Wrapped, source: str) -> None:
    optimizer = wrapped.optimizer
    with wrapped.kept.rewriting():
        for move in todo.moves:
            wrapped.scheduler.writes.forget_sums(move.held.chunk.spec.index)
            _fill(move, files, wrapped.kept)
        for buffer, file, key in todo.buffers:
            buffer.copy_(files.read(file, key))
        for module, state in todo.extra_states:
            module.set_extra_state(state)
        for group, options in zip(optimizer.param_groups, todo.options, strict=False):
            group.update(options)
        if optimizer.loss_scale is not None and todo.loss_scale is not None:
            optimizer.loss_scale = todo.loss_scale
        if todo.random is not None:
            set_random_states(todo.random)
        else:
            seed_new_rank(dist.get_rank(), source)


def _fill(move: _Move, files: Files, state: OptimizerState) -> None:
    held, (first, _) = move.held, move.parts[0]
    kept = {WEIGHT: held.values}
    if move.updates is not None:
        dtypes = {optimizer_name(name): DTYPES[first.state[name]] for name in move.names if name != WEIGHT}
        room = state.replace(held.parameter, dtypes, move.values)
        kept |= {saved_name(name): elements for name, elements in room.items()}
        trained = state.piece_of(held.parameter)
        assert trained is not None
        trained.steps = move.updates
    shard = held.chunk.shard
    for name in move.names:
        saved = DTYPES[first.state[name]]
        same = kept[name].dtype == saved
        place = kept[name].read() if same else torch.empty(held.span.numel, dtype=saved, device="cpu")
        for piece, pairs in move.parts:
            read = files.read(piece.file, piece.key(held.name, name))
            for here, there in pairs:
                here.of(place).copy_(there.of(read))
        kept[name].write(place)
        if name == WEIGHT:
            shard.write_values(held.here.start, place)
