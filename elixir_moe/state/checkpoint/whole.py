"""A checkpoint without a model: whole parameters, other files, other formats.

Owns the operations of a single process on a checkpoint: join each logical parameter, export for Hugging Face or plain
torch, and write the same checkpoint in another number of files. One tensor is in memory at a time, except for the plain
torch file.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.state.checkpoint.manifest import WEIGHT, Buffer, Manifest, ParameterRecord, SavedPiece, dump
from elixir_moe.state.checkpoint.shard_ranges import Span, overlap
from elixir_moe.state.checkpoint.storage import Draft
from elixir_moe.state.checkpoint.tensors import FileImage, Files, Item
from elixir_moe.state.checkpoint.values import decode
from elixir_moe.state.marked import StagingFolder, name_in_errors, partial_of
from elixir_moe.state.safetensors_format import DTYPES, INDEX, NAMES, files_of, index_of

_TORCH = "export it with --format torch, or load it and use em.full_state_dict(model)"


class Whole:
    """The whole tensors of one checkpoint; verify its files first."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._files = Files(directory)
        self._manifest = manifest

    def parameter(self, name: str, kept: str = WEIGHT) -> torch.Tensor:
        """Reads a whole parameter by its first name, or its optimizer state `kept`, in the saved dtype."""
        entry = self._manifest.parameters[name]
        span = Span(offset=(0,) * len(entry.grid), shape=entry.grid, start=0, stop=entry.numel)
        return self._cell(name, kept, entry.pieces, span).view(entry.shape)

    def _converted(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.parameter(name).to(dtype)

    def buffer(self, name: str, rank: int = 0) -> torch.Tensor:
        """Reads a buffer with the values of that rank."""
        buffer = self._manifest.buffers[name]
        self._files.check(buffer.file_of_rank[rank], Buffer.key(name), buffer.dtype, buffer.shape)
        return self._files.read(buffer.file_of_rank[rank], Buffer.key(name))

    def state_dict(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Item]]:
        """Yields (key, tensor to write) of the plain model's state dict, in its order, floating parameters as `dtype`.

        Raises CheckpointError without frozen weights, or if the model's state dict computes a value.
        """
        base = self._manifest.base
        if base is not None:
            raise CheckpointError(
                f"the checkpoint was saved with frozen=False and holds no frozen weights, which came from "
                f"{base.source or 'no named folder'!r}: load it into a wrapped model and write "
                f"that model with em.save_pretrained"
            )
        for key, name in self._manifest.keys.items():
            if name is not None and name in self._manifest.buffers:
                buffer = self._manifest.buffers[name]
                yield key, Item(key=key, dtype=buffer.dtype, shape=buffer.shape, tensor=partial(self.buffer, name))
            elif name is not None and name in self._manifest.parameters:
                entry = self._manifest.parameters[name]
                to = dtype if dtype is not None and DTYPES[entry.dtype].is_floating_point else DTYPES[entry.dtype]
                yield key, Item(key=key, dtype=NAMES[to], shape=entry.shape, tensor=partial(self._converted, name, to))
            elif key not in self.extra_states():
                raise CheckpointError(
                    f"{key!r} is computed by the model's own state_dict(), or sparse: load the checkpoint into a "
                    f"wrapped model and take em.full_state_dict(model)"
                )

    def extra_states(self) -> dict[str, Any]:
        """Returns {key: extra state of a module} of rank 0."""
        states = self._manifest.extra_states
        return {key: decode(value, key) for key, value in (states[0] if states else {}).items()}

    def cells(self, name: str) -> Iterator[tuple[SavedPiece, list[Item]]]:
        """Yields each slice of a parameter as one piece, with its tensors; the caller sets the piece's file.

        Raises CheckpointError if the pieces of a slice have different optimizer state.
        """
        entry = self._manifest.parameters[name]
        slices: dict[tuple[int, ...], list[SavedPiece]] = {}
        for piece in entry.pieces:
            slices.setdefault(piece.span.offset, []).append(piece)
        for pieces in slices.values():
            first = pieces[0]
            if any((p.state, p.scalars) != (first.state, first.scalars) for p in pieces):
                raise CheckpointError(f"parameter {name!r}: its pieces differ in optimizer state and cannot be joined")
            joined = replace(first, span=replace(first.span, start=0, stop=sum(p.span.numel for p in pieces)))
            items = [
                Item(
                    key=joined.key(name, kept),
                    dtype=dtype,
                    shape=(joined.span.numel,),
                    tensor=partial(self._cell, name, kept, tuple(pieces), joined.span),
                )
                for kept, dtype in first.state.items()
            ]
            yield joined, items

    def _cell(self, name: str, kept: str, pieces: tuple[SavedPiece, ...], span: Span) -> torch.Tensor:
        """Reads the elements of `span`, as shape (numel,)."""
        dtype = DTYPES[pieces[0].state[kept]] if pieces else DTYPES[self._manifest.parameters[name].dtype]
        flat = torch.empty(span.numel, dtype=dtype, device="cpu")
        for piece in pieces:
            key = piece.key(name, kept)
            self._files.check(piece.file, key, piece.state[kept], (piece.span.numel,))
            read = self._files.read(piece.file, key)
            for here, there in overlap(span, piece.span):
                here.of(flat).copy_(there.of(read))
        return flat


def export_huggingface(
    whole: Whole, out: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = 5 * 10**9
) -> list[Path]:
    """Writes a new folder of weights in Hugging Face's format; returns its files.

    Tied parameters get their first name. The files are ``model.safetensors``, or several of at most `shard_bytes` with
    ``model.safetensors.index.json``.

    Raises:
        CheckpointError: the folder exists, or modules have extra state.
    """
    if more := [key for key, state in whole.extra_states().items() if state is not None]:
        raise CheckpointError(f"{more[0]!r} is extra state of a module, and the folder holds only tensors: {_TORCH}")
    seen: set[str | None] = set()
    items: dict[str, Item] = {}
    for key, item in whole.state_dict(dtype):
        if (name := whole._manifest.keys[key]) not in seen:
            items[key] = item
            seen.add(name)
    sizes = {name: item.nbytes for name, item in items.items()}
    files = files_of(sizes, shard_bytes)
    with _made_for(out, "folder") as folder:
        for file, names in files.items():
            FileImage([items[name] for name in names], {"format": "pt"}).write(folder.path / file)
        if len(files) > 1:
            with name_in_errors(folder.path / INDEX):
                (folder.path / INDEX).write_text(index_of(files, sum(sizes.values())))
        folder.move_to(out)
    return [out / file for file in (*files, *[INDEX] * (len(files) > 1))]


def export_torch(whole: Whole, out: Path, *, dtype: torch.dtype | None = None) -> list[Path]:
    """Writes a new file with the plain model's state dict, for ``torch.load(..., weights_only=True)``.

    Raises CheckpointError if the file exists.
    """
    tensors: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = dict.fromkeys(whole._manifest.keys) | whole.extra_states()
    for key, item in whole.state_dict(dtype):
        name = str(whole._manifest.keys[key])
        state[key] = tensors[name] = tensors[name] if name in tensors else item.tensor()
    with _made_for(out, "file") as folder:
        with name_in_errors(out), open(folder.path / "state_dict.pt", "xb") as file:
            torch.save(state, file)
        _check_free(out, "file")
        os.rename(folder.path / "state_dict.pt", out)
    return [out]


def reshard(whole: Whole, target: Path, files: int) -> Manifest:
    """Rewrites the checkpoint as `files` files of about equal size, or one for each tensor if those are fewer.

    Raises:
        CheckpointError: the target exists.
        ConfigError: a buffer has more versions than there are files.
    """
    manifest = whole._manifest
    most = sum(len(entry.pieces) for entry in manifest.parameters.values())
    most += sum(len(set(buffer.file_of_rank)) for buffer in manifest.buffers.values())
    files = min(files, max(1, most))
    names = [f"part-{i:05d}.safetensors" for i in range(files)]
    items: list[list[Item]] = [[] for _ in names]
    sizes = [0] * files

    def put(new: list[Item], at: int | None = None) -> str:
        at = sizes.index(min(sizes)) if at is None else at
        items[at] += new
        sizes[at] += sum(item.nbytes for item in new)
        return names[at]

    entries: dict[str, ParameterRecord] = {}
    for name, entry in manifest.parameters.items():
        pieces = [replace(piece, file=put(tensors)) for piece, tensors in whole.cells(name)]
        entries[name] = replace(entry, pieces=tuple(pieces))
    buffers = {}
    for name, buffer in manifest.buffers.items():
        versions = list(dict.fromkeys(buffer.file_of_rank))
        if len(versions) > files:
            raise ConfigError(f"files={files}: buffer {name!r} has {len(versions)} versions; give at least as many")
        for at, file in enumerate(versions):
            rank = buffer.file_of_rank.index(file)
            give = partial(whole.buffer, name, rank)
            put([Item(key=Buffer.key(name), dtype=buffer.dtype, shape=buffer.shape, tensor=give)], at)
        moved = {file: names[at] for at, file in enumerate(versions)}
        buffers[name] = replace(buffer, file_of_rank=tuple(moved[file] for file in buffer.file_of_rank))
    draft = Draft(target)
    try:
        written = zip(names, items, strict=True)
        records = {name: FileImage(tensors).write(draft.path / name) for name, tensors in written if tensors}
        new = replace(manifest, parameters=entries, buffers=buffers, files=records)
        draft.commit(dump(new))
    except BaseException:
        draft.abandon()
        raise
    return new


def _check_free(out: Path, kind: str) -> None:
    """Raises CheckpointError if `out`, the new file or folder, exists."""
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists: name another {kind}")


def _made_for(out: Path, kind: str) -> StagingFolder:
    """Creates the folder in which `out` is written before it appears. Raises CheckpointError."""
    _check_free(out, kind)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return StagingFolder(partial_of(out), without_locks=True)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be made: {error.strerror}; name another place") from error
