"""Checked records: plain data from a file or a command line into frozen dataclasses.

Owns the conversion by the types of the fields, the checks in their annotations, and the messages about mistakes. Opens
no file and knows no record by name: a dataclass defines what its fields mean, and which values they accept.

    steps: Annotated[int, at_least(1)] = 100
    parts: Mapping[str, tuple[Part, ...]]           # records in records

Nothing is guessed: True is not a number, 1.0 is not an integer. A command line only has strings, which are converted by
the type.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from elixir_moe.errors import ConfigError, ElixirError, did_you_mean

T = TypeVar("T")
_MOST = 8
"""Most mistakes that a message lists."""
_LONGEST = 80
"""Most characters of a value in a message."""
_NEAR = 0.7
"""Least similarity of an unknown key to a suggested one: below it, most pairs mean different things."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """A condition on a field's value, or on each item of a tuple, beyond its type. None is not checked."""

    what: str
    holds: Callable[[Any], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Respelled:
    """Changes the spelling of a string before it is checked."""

    spell: Callable[[str], str]


def at_least(least: float, unit: str = "") -> Check:
    """Returns the check for a number of at least `least`."""
    return Check(f"at least {least:g} {unit}".rstrip(), lambda value: value >= least)


ABOVE_0 = Check("a finite number above 0", lambda value: 0 < value < math.inf)
Size = Annotated[int, Check("a size", lambda size: 0 <= size < 2**62)]


def check(record: Any, section: str) -> None:
    """Raises ConfigError if a field of a dataclass fails its check; `section` is the first part of the key."""
    cls: Any = type(record)
    for name, kind in _kinds(cls).items():
        for problem in kind.broken(getattr(record, name), f"{section}.{name}"):
            raise ConfigError(problem)


def build(
    cls: type[T],
    values: Any,
    *,
    texts: bool = False,
    noun: str = "setting",
    error: Callable[[str], ElixirError] = ConfigError,
    **given: Any,
) -> T:
    """Builds an instance of the dataclass `cls`, including nested ones.

    Args:
        cls: the dataclass. A section (a field that is a dataclass) that is left out has its default, or is empty.
        values: plain data, with a mapping for each dataclass.
        texts: whether a string may represent a number, True or False, or a list separated by commas.
        noun: the name of a key in messages.
        error: makes the error from its message.
        given: values of fields that are not in the data.

    Raises:
        ElixirError: made by `error`. It names every unknown key with the nearest known one, every missing key and every
            unexpected value. Errors of the dataclasses' own checks are not changed.
    """
    reader = _Reader(noun, texts, [key for key in keys(cls) if key not in given])
    made: T | None = reader.record(cls, values, "", given)
    faults = reader.faults
    if faults:
        more = f"; and {len(faults) - _MOST} more" if len(faults) > _MOST else ""
        raise error("; ".join(faults[:_MOST]) + more)
    assert made is not None
    return made


def keys(cls: Any, where: str = "") -> list[str]:
    """The dotted keys of all fields, with those of a section in its place."""
    found: list[str] = []
    for name, kind in _kinds(cls).items():
        found += keys(kind.type, f"{where}{name}.") if kind.is_record else [where + name]
    return found


def unknown(noun: str, key: str, known: Sequence[str]) -> str:
    """Describes an unknown key, with the nearest known one.

    Keys with the same last part, and those of a section of this name, are nearer than others.
    """
    last = key.rpartition(".")[2].replace("-", "_")
    alike = [k for k in known if k.rpartition(".")[2] == last or k.startswith(f"{key}.")]
    sections = {k.rpartition(".")[0] for k in known} - {"", key}
    hint = f"did you mean {alike[0]!r}?" if alike else did_you_mean(key[:_LONGEST], [*known, *sections], _NEAR)
    return f"unknown {noun} {key[:_LONGEST]!r}" + (f"; {hint}" if hint else "")


class _Kind:
    """The type of a field, analyzed once."""

    __slots__ = ("checks", "is_record", "origin", "parts", "respelled", "type")

    def __init__(self, hint: Any) -> None:
        marks: tuple[Any, ...] = ()
        if get_origin(hint) is Annotated:
            hint, marks = hint.__origin__, hint.__metadata__
        self.checks = tuple(mark for mark in marks if isinstance(mark, Check))
        self.respelled = tuple(mark.spell for mark in marks if isinstance(mark, Respelled))
        self.type, self.origin = hint, get_origin(hint)
        self.parts: tuple[Any, ...] = get_args(hint)
        if self.origin is not Literal:
            self.parts = tuple(_Kind(part) for part in self.parts)
        self.is_record = dataclasses.is_dataclass(hint)

    def __str__(self) -> str:
        """Returns the type as it is written, without modules and checks."""
        if self.origin in (Union, types.UnionType):
            return " | ".join(map(str, self.parts))
        if self.origin is Literal:
            return " | ".join(map(repr, self.parts))
        name = {...: "...", types.NoneType: "None"}.get(self.type) or (self.origin or self.type).__name__
        return name + (f"[{', '.join(map(str, self.parts))}]" if self.parts else "")

    def broken(self, value: Any, key: str) -> Iterator[str]:
        """Yields the failed checks of a value of this type; None never fails."""
        if self.checks and value is not None:
            is_tuple = isinstance(value, tuple)
            items = [(f"{key}[{i}]", item) for i, item in enumerate(value)] if is_tuple else [(key, value)]
            for rule in self.checks:
                yield from (_wrong(where, rule.what, item) for where, item in items if not rule.holds(item))


@functools.cache
def _kinds(cls: Any) -> dict[str, _Kind]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: _Kind(hints[field.name]) for field in dataclasses.fields(cls)}


def _wrong(key: str, expected: object, value: Any) -> str:
    return f"{key}: expected {expected}, got {repr(value)[:_LONGEST]}"


class _Reader:
    """Converts values, and collects the mistakes in them."""

    def __init__(self, noun: str, texts: bool, known: Sequence[str]) -> None:
        self.faults: list[str] = []
        self._noun, self._texts, self._known = noun, texts, known

    def record(self, cls: Any, values: Any, where: str, given: Mapping[str, Any]) -> Any:
        """Returns the record if all values are right; `where` is its key with a dot."""
        if not isinstance(values, Mapping):
            self.faults.append(_wrong(where.rstrip(".") or self._noun, "a section with keys", values))
            return None
        kinds, before, arguments = _kinds(cls), len(self.faults), dict(given)
        for name in values:
            if name not in kinds or name in given:
                known = [*(where + other for other in kinds if other not in given), *self._known]
                self.faults.append(unknown(self._noun, f"{where}{name}", known))
        for field in dataclasses.fields(cls):
            name, kind = field.name, kinds[field.name]
            if name in given:
                continue
            if name in values:
                arguments[name] = self.value(values[name], kind, where + name)
            elif field.default is not field.default_factory:
                pass
            elif kind.is_record:
                arguments[name] = self.record(kind.type, {}, f"{where}{name}.", {})
            else:
                self.faults.append(f"{where}{name} is missing: give {kind}")
        return cls(**arguments) if len(self.faults) == before else None

    def value(self, value: Any, kind: _Kind, key: str, shown: _Kind | None = None) -> Any:
        """Converts the value to `kind`, if it is right; messages name the type `shown`."""
        before = len(self.faults)
        for spell in kind.respelled if isinstance(value, str) else ():
            value = spell(value)
        found = value if type(value) is kind.type is not float else self._of_kind(value, kind, key, shown or kind)
        if kind.checks and len(self.faults) == before:
            self.faults += kind.broken(found, key)
        return found

    def _of_kind(self, value: Any, kind: _Kind, key: str, shown: _Kind) -> Any:
        origin, parts = kind.origin, kind.parts
        if kind.type is Any:
            return value
        if kind.is_record:
            return self.record(kind.type, value, f"{key}.", {})
        if origin in (Union, types.UnionType):
            members = [part for part in parts if part.type is not types.NoneType]
            if value is None and len(members) < len(parts):
                return None
            if len(members) == 1:
                return self.value(value, members[0], key, shown)
            for part in members:
                trial = _Reader(self._noun, self._texts, self._known)
                found = trial.value(value, part, key)
                if not trial.faults:
                    return found
        elif origin is tuple:
            items = self._items(value)
            each = parts if parts[-1].type is not ... else parts[:1] * len(items or ())
            if items is not None and len(items) == len(each):
                return tuple(self.value(v, k, f"{key}[{i}]") for i, (v, k) in enumerate(zip(items, each, strict=True)))
        elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
            inside = [(name, f"{key}.{str(name)[:_LONGEST]}") for name in value]
            names = _Reader(self._noun, True, self._known)  # keys are strings in JSON
            made = {names.value(name, parts[0], k): self.value(value[name], parts[1], k) for name, k in inside}
            self.faults += names.faults
            return made
        elif origin is Literal and any(type(value) is type(part) and value == part for part in parts):
            return value
        elif origin is None and (found := self._plain(value, kind.type)) is not None:
            if isinstance(found, float) and not math.isfinite(found):
                self.faults.append(_wrong(key, "a finite number", value))
            return found
        self.faults.append(_wrong(key, shown, value))
        return None

    def _items(self, value: Any) -> list[Any] | None:
        """Returns the items of a list, or of a string separated by commas."""
        if self._texts and isinstance(value, str):
            text = value.strip()
            text = text[1:-1] if text[:1] + text[-1:] in ("[]", "()") else text
            return [part.strip() for part in text.split(",") if part.strip()]
        return list(value) if isinstance(value, list | tuple) else None

    def _plain(self, value: Any, kind: Any) -> Any:
        """Converts `value` to a bool, int, float or string; None if that is impossible."""
        if type(value) is kind:
            return value
        is_text = self._texts and isinstance(value, str)
        if kind is bool and is_text:
            return {"true": True, "false": False}.get(value.lower())
        if (kind is float and type(value) is int) or (kind in (int, float) and is_text):
            with suppress(ValueError, OverflowError):
                return kind(value)
        return None
