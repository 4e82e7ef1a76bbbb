"""The manifest of a checkpoint: its content, its format and its validation.

Owns the manifest: all parameters, the file of each run of their elements, and the hash of each file. It is JSON whose
first line is the hash of the rest, so that no bit can change unnoticed. Parsing trusts nothing: file names stay inside
the directory, each element of each parameter is present exactly once, and fields of the wrong type, duplicate or
unknown ones are refused.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeVar

from elixir_moe.errors import CheckpointError
from elixir_moe.state.checkpoint.hashing import digest_of
from elixir_moe.state.checkpoint.shard_ranges import Span, flaw
from elixir_moe.state.safetensors_format import DTYPES

FORMAT = "elixir-moe checkpoint"
VERSION = 5
READ = (3, 4, VERSION)
"""Versions that can be read: 3 has neither `base` nor `extra_states`, 4 has no `extra_states`; both have `keys` alone,
without the names of their tensors."""
WEIGHT = "weight"
"""Name of the parameter itself in a piece's state; all other names are those of the optimizer."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SUM = re.compile(r"[0-9a-f]{16}")
_LARGEST = 2**62
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPiece:
    """A run of elements of one parameter in one file, with its optimizer state."""

    file: str
    span: Span
    state: Mapping[str, str]
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
    shape: tuple[int, ...]
    """Shape of the whole parameter, experts of all ranks included."""
    grid: tuple[int, ...]
    """Shape of the whole parameter that pieces refer to; differs from `shape` if the pattern has a `view`."""
    dtype: str
    """Dtype before `wrap`, and of exports."""
    trainable: bool
    pieces: tuple[SavedPiece, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One buffer, whose values may differ between ranks."""

    shape: tuple[int, ...]
    dtype: str
    file_of_rank: tuple[str, ...]
    """File with each rank's values; ranks with equal values share one."""

    @staticmethod
    def key(name: str) -> str:
        """Name of the tensor in the file."""
        return f"{name}/buffer"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Expected size and hash of one file."""

    nbytes: int
    digest: str
    """Hash from `hashing.file_digest`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenRecord:
    """One frozen parameter that the checkpoint does not hold."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: str
    """Dtype in which it was held, the compute dtype."""
    digest: str
    """Hash from `frozen.frozen_records`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The frozen parameters that the checkpoint does not hold."""

    source: str
    """The folder of their weights, or a model's name; may be empty."""
    parameters: Mapping[str, FrozenRecord]
    """By first name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole manifest. Encoded values are encoded by `values.encode`."""

    saved_ns: int
    """Time of the save in nanoseconds since 1970; orders checkpoints by age."""
    world: int
    """Number of ranks that saved it."""
    optimizer: str
    """Class of the optimizer."""
    param_groups: tuple[Mapping[str, Any], ...]
    """For each: "params" (first names) and "options" (encoded)."""
    loss_scale: Any
    """Encoded; None without loss scaling (fp16)."""
    keys: Mapping[str, str | None]
    """{key in the plain model's state dict: first name of its parameter or buffer}, in order; None for what the model
    computes, and for extra state."""
    parameters: Mapping[str, ParameterRecord]
    """By first name."""
    buffers: Mapping[str, Buffer]
    files: Mapping[str, FileRecord]
    rng: tuple[Any, ...]
    """Random states by rank, encoded."""
    extra: Any
    """The user's `extra`, encoded."""
    extra_states: tuple[Mapping[str, Any], ...] = ()
    """{key: extra state of a module, encoded} by rank: all of rank 0, and of another rank those that differ."""
    base: Base | None = None
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
    """The manifest as the bytes of its file."""
    whole = {"format": FORMAT, "version": VERSION, **_fields_of(manifest)}
    text = json.dumps(whole, allow_nan=False, separators=(",", ":"), default=_fields_of).removeprefix("{") + "\n"
    return _first_line(text.encode()) + text.encode()


def parse(data: bytes, where: str) -> Manifest:
    """The inverse of `dump`. Raises CheckpointError, which names `where`, for anything but a valid manifest."""
    first, newline, rest = data.partition(b"\n")
    if first + newline != _first_line(rest):
        raise CheckpointError(f"{where} is damaged: its first line is not the hash of the rest; use another checkpoint")
    try:
        fields = json.loads(b"{" + rest, object_pairs_hook=_once, parse_constant=_refuse)
        return _manifest(_Fields(fields, where))
    except RecursionError as error:
        raise CheckpointError(f"{where}: nested too deep for a manifest") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is no manifest: {error}") from error


def _fields_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _first_line(rest: bytes) -> bytes:
    return b'{"digest":"' + digest_of(rest).encode() + b'",\n'


class _Fields:
    """A JSON object whose fields are taken out by type; `where` names the object in messages."""

    def __init__(self, fields: Any, where: str) -> None:
        self.where = where
        self._fields: dict[str, Any] = self._checked(fields, dict, where)

    def take(self, key: str, kind: type[T]) -> T:
        """Takes the field, of exactly that type."""
        return self._checked(self.any(key), kind, f"{self.where}: {key}")

    def any(self, key: str) -> Any:
        """Takes the field, of any type."""
        if key not in self._fields:
            raise CheckpointError(f"{self.where}: {key} is missing")
        return self._fields.pop(key)

    def whole(self, key: str) -> int:
        """Takes the field, a whole number in the range of a size."""
        return self._size(self.any(key), f"{self.where}: {key}")

    def each(self, key: str, kind: type[T]) -> tuple[T, ...]:
        """Takes the field, a list with items of exactly that type."""
        return tuple(self._checked(item, kind, f"{self.where}: {key}") for item in self.take(key, list))

    def sizes(self, key: str) -> tuple[int, ...]:
        """Takes the field, a list of sizes."""
        return tuple(self._size(item, f"{self.where}: {key}") for item in self.take(key, list))

    def one_of(self, key: str, choices: Iterable[str]) -> str:
        """Takes the field, one of the texts `choices`."""
        return _known(self.any(key), choices, f"{self.where}: {key}")

    def objects(self, key: str) -> "dict[str, _Fields]":
        """Takes the field, an object of objects."""
        return {k: _Fields(v, f"{self.where}: {key} {k[:200]!r}") for k, v in self.take(key, dict).items()}

    def rows(self, key: str) -> "list[_Fields]":
        """Takes the field, a list of objects."""
        return [_Fields(item, f"{self.where}: {key} {i}") for i, item in enumerate(self.take(key, list))]

    def rest(self) -> dict[str, Any]:
        """Takes all remaining fields."""
        fields, self._fields = self._fields, {}
        return fields

    def end(self) -> None:
        """Raises CheckpointError if fields remain."""
        if self._fields:
            raise CheckpointError(f"{self.where}: unknown fields {sorted(self._fields)[:8]}")

    @staticmethod
    def _checked(value: Any, kind: type[T], where: str) -> T:
        if type(value) is not kind:
            raise CheckpointError(f"{where}: expected {kind.__name__}, got {type(value).__name__} {str(value)[:80]}")
        return value

    @classmethod
    def _size(cls, value: Any, where: str) -> int:
        if not 0 <= cls._checked(value, int, where) < _LARGEST:
            raise CheckpointError(f"{where}: {str(value)[:40]} is no size")
        return int(value)


def _manifest(fields: _Fields) -> Manifest:
    if fields.any("format") != FORMAT:
        raise CheckpointError(f"{fields.where}: not the manifest of an {FORMAT}")
    version = fields.any("version")
    if version not in READ:
        raise CheckpointError(
            f"{fields.where}: version {str(version)[:40]!r} of the format, this elixir_moe reads {READ[0]} to "
            f"{READ[-1]}: use the elixir_moe that saved it"
        )
    files = {name: _record(name, item) for name, item in fields.objects("files").items()}
    parameters = {name: _entry(name, item, files) for name, item in fields.objects("parameters").items()}
    world = fields.whole("world")
    manifest = Manifest(
        saved_ns=fields.whole("saved_ns"),
        world=world,
        optimizer=fields.take("optimizer", str),
        param_groups=tuple(_param_group(item) for item in fields.rows("param_groups")),
        loss_scale=fields.any("loss_scale"),
        keys=_keys(fields) if version == VERSION else _former_keys(fields, parameters),
        parameters=parameters,
        buffers={name: _buffer(item, files, world) for name, item in fields.objects("buffers").items()},
        files=files,
        rng=fields.each("rng", dict),
        extra=fields.any("extra"),
        extra_states=fields.each("extra_states", dict) if version == VERSION else (),
        base=None if version == READ[0] else _base(fields),
    )
    fields.end()
    if len(manifest.rng) != world:
        raise CheckpointError(f"{fields.where}: {len(manifest.rng)} states of random generators for {world} ranks")
    return manifest


def _keys(fields: _Fields) -> Mapping[str, str | None]:
    keys = fields.take("keys", dict)
    for key, name in keys.items():
        if name is not None and not isinstance(name, str):
            raise CheckpointError(f"{fields.where}: keys {key[:200]!r}: expected a name or null, got {str(name)[:80]}")
    return keys


def _former_keys(fields: _Fields, parameters: Mapping[str, ParameterRecord]) -> Mapping[str, str | None]:
    first_of = {name: first for first, entry in parameters.items() for name in entry.names}
    return {key: first_of.get(key, key) for key in fields.each("keys", str)}


def _known(value: Any, choices: Iterable[str], where: str) -> str:
    if not isinstance(value, str) or value not in choices:
        raise CheckpointError(f"{where} is {str(value)[:80]!r}, which is not known here")
    return value


def _record(name: str, fields: _Fields) -> FileRecord:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{fields.where}: not the name of a file of a checkpoint: a plain *.safetensors is")
    record = FileRecord(nbytes=fields.whole("nbytes"), digest=fields.take("digest", str))
    if not _DIGEST.fullmatch(record.digest):
        raise CheckpointError(f"{fields.where}: {record.digest[:80]!r} is no hash")
    fields.end()
    return record


def _entry(name: str, fields: _Fields, files: Mapping[str, FileRecord]) -> ParameterRecord:
    entry = ParameterRecord(
        names=fields.each("names", str),
        shape=fields.sizes("shape"),
        grid=fields.sizes("grid"),
        dtype=fields.one_of("dtype", DTYPES),
        trainable=fields.take("trainable", bool),
        pieces=tuple(_piece(item, files) for item in fields.rows("pieces")),
    )
    fields.end()
    if not entry.names or entry.names[0] != name:
        raise CheckpointError(f"{fields.where}: its names are {entry.names}")
    if math.prod(entry.grid) != entry.numel:
        raise CheckpointError(f"{fields.where} of shape {entry.shape} cannot be seen as {entry.grid}")
    problem = flaw(entry.grid, (piece.span for piece in entry.pieces))
    if problem is not None:
        raise CheckpointError(f"{fields.where} of shape {entry.grid} is not whole: {problem}")
    return entry


def _base(fields: _Fields) -> Base | None:
    found = fields.any("base")
    if found is None:
        return None
    fields = _Fields(found, f"{fields.where}: base")
    base = Base(
        source=fields.take("source", str),
        parameters={name: _frozen(item) for name, item in fields.objects("parameters").items()},
    )
    fields.end()
    return base


def _frozen(fields: _Fields) -> FrozenRecord:
    record = FrozenRecord(
        shape=fields.sizes("shape"), dtype=fields.one_of("dtype", DTYPES), digest=fields.take("digest", str)
    )
    fields.end()
    if not _SUM.fullmatch(record.digest):
        raise CheckpointError(f"{fields.where}: {record.digest[:80]!r} is no hash of a parameter")
    return record


def _piece(fields: _Fields, files: Mapping[str, FileRecord]) -> SavedPiece:
    span, state = _Fields(fields.any("span"), fields.where), _Fields(fields.any("state"), fields.where)
    piece = SavedPiece(
        file=fields.one_of("file", files),
        span=Span(
            offset=span.sizes("offset"),
            shape=span.sizes("shape"),
            start=span.whole("start"),
            stop=span.whole("stop"),
        ),
        state={name: _known(dtype, DTYPES, state.where) for name, dtype in state.rest().items()},
        scalars=fields.take("scalars", dict),
    )
    span.end()
    fields.end()
    if WEIGHT not in piece.state:
        raise CheckpointError(f"{fields.where}: {WEIGHT} is missing")
    return piece


def _buffer(fields: _Fields, files: Mapping[str, FileRecord], world: int) -> Buffer:
    buffer = Buffer(
        shape=fields.sizes("shape"),
        dtype=fields.one_of("dtype", DTYPES),
        file_of_rank=fields.each("file_of_rank", str),
    )
    fields.end()
    if len(buffer.file_of_rank) != world or not set(buffer.file_of_rank) <= set(files):
        raise CheckpointError(f"{fields.where}: file_of_rank does not name a file for each of {world} ranks")
    return buffer


def _param_group(fields: _Fields) -> Mapping[str, Any]:
    group = {"params": fields.each("params", str), "options": fields.take("options", dict)}
    fields.end()
    return group


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
