"""The manifest of a checkpoint: its content, its format and its validation.

Owns the manifest: all parameters, the file of each run of their elements, and the hash of each file. It is JSON whose
first line is the hash of the rest, so that no bit can change unnoticed. Parsing trusts nothing: file names stay inside
the directory, each element of each parameter is present exactly once, and fields that have a wrong type, are unknown
or occur twice are refused.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, NoReturn

from elixir_moe.errors import CheckpointError
from elixir_moe.records import Check, Size, build
from elixir_moe.state.checkpoint.hashing import digest_of
from elixir_moe.state.checkpoint.shard_ranges import Span, flaw
from elixir_moe.state.safetensors_format import DTYPES

FORMAT = "elixir-moe checkpoint"
VERSION = 5
WEIGHT = "weight"
"""Name of the parameter itself in a piece's state; all other names are the optimizer's."""
_Sizes = tuple[Size, ...]
_Dtype = Annotated[str, Check("a dtype of safetensors", DTYPES.__contains__)]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
_Name = Annotated[str, Check("the name of a file, a plain *.safetensors", _NAME.fullmatch)]
_Digest = Annotated[str, Check("a hash", re.compile(r"[0-9a-f]{64}").fullmatch)]
_Sum = Annotated[str, Check("a hash of a parameter", re.compile(r"[0-9a-f]{16}").fullmatch)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPiece:
    """A run of elements of one parameter in one file, with its optimizer state."""

    file: str
    span: Span
    state: Mapping[str, _Dtype]
    """{name: dtype} of the values per element: the parameter itself and moments."""
    scalars: Mapping[str, Any]
    """{name: value} for the whole run, such as the number of updates; encoded by `values.encode`."""

    def key(self, parameter: str, name: str) -> str:
        """Name of the (numel,) tensor in the file."""
        return f"{parameter}[{','.join(map(str, self.span.offset))}]+{self.span.start}/{name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRecord:
    """One logical parameter."""

    names: tuple[str, ...]
    """All names, in order of registration; several if the parameter is tied."""
    shape: _Sizes
    """Shape of the whole parameter, experts of all ranks included."""
    grid: _Sizes
    """Shape of the whole parameter that pieces refer to; differs from `shape` if the pattern has a `view`."""
    dtype: _Dtype
    """Dtype before `wrap`, and of exports."""
    trainable: bool
    pieces: tuple[SavedPiece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One buffer, whose values may differ between ranks."""

    shape: _Sizes
    dtype: _Dtype
    file_of_rank: tuple[str, ...]
    """File with each rank's values; ranks with equal values share one."""

    @staticmethod
    def key(name: str) -> str:
        """Name of the tensor in the file."""
        return f"{name}/buffer"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Expected size and hash of one file."""

    nbytes: Size
    digest: _Digest
    """Hash from `hashing.file_digest`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenRecord:
    """One frozen parameter that the checkpoint does not hold."""

    shape: _Sizes
    """Shape of the whole parameter."""
    dtype: _Dtype
    """Dtype in which it was held, the compute dtype."""
    digest: _Sum
    """Hash from `frozen.frozen_records`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The frozen parameters that the checkpoint does not hold."""

    source: str
    """The folder of their weights, or a model's name; may be empty."""
    parameters: Mapping[str, FrozenRecord]
    """{first name: its record}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamGroup:
    """One of the optimizer's `param_groups`."""

    params: tuple[str, ...]
    """First names of its parameters."""
    options: Mapping[str, Any]
    """Encoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole manifest. Encoded values are encoded by `values.encode`."""

    saved_ns: Size
    """Time of the save in nanoseconds since 1970; orders checkpoints by age."""
    world: Size
    """Number of ranks that saved it."""
    optimizer: str
    """Class of the optimizer."""
    param_groups: tuple[ParamGroup, ...]
    loss_scale: Any
    """Encoded; None without loss scaling (fp16)."""
    keys: Mapping[str, str | None]
    """{key in the plain model's state dict: first name of its parameter or buffer}, in order; None for values that the
    model computes, and for extra state."""
    parameters: Mapping[str, ParameterRecord]
    """{first name: its record}."""
    buffers: Mapping[str, Buffer]
    files: Mapping[_Name, FileRecord]
    rng: tuple[Mapping[str, Any], ...]
    """Random states by rank, encoded."""
    extra: Any
    """The user's `extra`, encoded."""
    extra_states: tuple[Mapping[str, Any], ...]
    """{key: encoded extra state of a module} by rank: all for rank 0, those that differ for other ranks."""
    base: Base | None
    """None if the checkpoint holds all parameters."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(record.nbytes for record in self.files.values())

    @property
    def numel(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(entry.numel for entry in self.parameters.values())


def dump(manifest: Manifest) -> bytes:
    """Returns the bytes of the manifest's file."""
    whole = {"format": FORMAT, "version": VERSION, **_fields_of(manifest)}
    text = json.dumps(whole, allow_nan=False, separators=(",", ":"), default=_fields_of).removeprefix("{") + "\n"
    return _first_line(text.encode()) + text.encode()


def parse(data: bytes, where: str) -> Manifest:
    """Parses the bytes of `dump`. Raises CheckpointError, which names `where`, for anything but a valid manifest."""
    first, newline, rest = data.partition(b"\n")
    if first + newline != _first_line(rest):
        raise CheckpointError(f"{where} is damaged: its first line is not the hash of the rest; use another checkpoint")
    try:
        fields = json.loads(b"{" + rest, object_pairs_hook=_once, parse_constant=_refuse)
        return _manifest(fields, where)
    except RecursionError as error:
        raise CheckpointError(f"{where}: nested too deep for a manifest") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not a manifest: {error}") from error


def _fields_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _first_line(rest: bytes) -> bytes:
    return b'{"digest":"' + digest_of(rest).encode() + b'",\n'


def _manifest(fields: dict[str, Any], where: str) -> Manifest:
    if fields.pop("format", None) != FORMAT:
        raise CheckpointError(f"{where}: not the manifest of an {FORMAT}")
    version = fields.pop("version", None)
    if version != VERSION:
        raise CheckpointError(
            f"{where}: version {str(version)[:40]!r} of the format, this elixir_moe reads {VERSION}: use the "
            f"elixir_moe that saved it"
        )

    def error(text: str) -> CheckpointError:
        return CheckpointError(f"{where}: {text}")

    manifest = build(Manifest, fields, noun="field", error=error)
    for text in _flaws(manifest):
        raise error(text)
    return manifest


def _flaws(manifest: Manifest) -> Iterator[str]:
    """Yields the contradictions between fields that are valid by themselves."""
    if len(manifest.rng) != manifest.world:
        yield f"{len(manifest.rng)} states of random generators for {manifest.world} ranks"
    for name, entry in manifest.parameters.items():
        where = f"parameters {name[:200]!r}"
        if not entry.names or entry.names[0] != name:
            yield f"{where}: its names are {entry.names}"
        if math.prod(entry.grid) != entry.numel:
            yield f"{where} of shape {entry.shape} cannot be seen as {entry.grid}"
        for piece in entry.pieces:
            if piece.file not in manifest.files:
                yield f"{where}: file is {piece.file[:80]!r}, which the manifest does not list"
            if WEIGHT not in piece.state:
                yield f"{where}: {WEIGHT} is missing in the state of a piece"
        problem = flaw(entry.grid, (piece.span for piece in entry.pieces))
        if problem is not None:
            yield f"{where} of shape {entry.grid} is not whole: {problem}"
    yield from _files_too_small(manifest)
    for name, buffer in manifest.buffers.items():
        if len(buffer.file_of_rank) != manifest.world or not set(buffer.file_of_rank) <= set(manifest.files):
            yield f"buffers {name[:200]!r}: file_of_rank does not name a file for each of {manifest.world} ranks"


def _files_too_small(manifest: Manifest) -> Iterator[str]:
    """Yields files too small for their tensors, so that no shape is larger than a file, whose size is checked."""
    held = dict.fromkeys(manifest.files, 0)
    for entry in manifest.parameters.values():
        for piece in entry.pieces:
            if piece.file in held:
                held[piece.file] += piece.span.numel * sum(DTYPES[dtype].itemsize for dtype in piece.state.values())
    for buffer in manifest.buffers.values():
        for file in held.keys() & set(buffer.file_of_rank):
            held[file] += math.prod(buffer.shape) * DTYPES[buffer.dtype].itemsize
    for file, nbytes in held.items():
        if nbytes > manifest.files[file].nbytes:
            yield f"files {file!r} has {manifest.files[file].nbytes:,} bytes, too few for {nbytes:,} of tensors"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")
