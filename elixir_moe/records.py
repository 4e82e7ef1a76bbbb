"""Checked records: plain data from a file or a command line into frozen dataclasses.

Owns the conversion by the types of the fields, the checks written beside them, and the words of what is wrong. Opens no
file and knows no record by name: a dataclass says what its fields mean, which values they take, and what others call
them.

    steps: Annotated[int, at_least(1), called("max_steps"), called("epochs", but="epochs x rows / batch")] = 100
    parts: Mapping[str, tuple[Part, ...]]           # records in records
    shape: Circle | Box | Text                      # one of several: the first, or that whose first field is given

Nothing is guessed: True is no number, 1.0 no whole one. A command line has only texts, which are read by the type.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from elixir_moe.errors import ConfigError, ElixirError, meant

T = TypeVar("T")
_MOST = 8
"""Most mistakes that a message lists."""
_LONGEST = 80
"""Longest text of a value in a message."""
_NEAR = 0.7
"""Likeness of an unknown key and the known one that was meant: below it, most pairs mean different things."""


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """What a field's value, or each item of a tuple, must be beyond its type. None is not checked."""

    what: str
    holds: Callable[[Any], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Called:
    """What a field is called in other programs."""

    names: tuple[str, ...]
    but: str
    """In what the field differs from theirs, or which values it takes; empty if it is the same."""


def called(*names: str, but: str = "") -> Called:
    """For a user who knows a field by one of these names: the message about an unknown key leads to the field."""
    return Called(names, but)


@dataclasses.dataclass(frozen=True, slots=True)
class Respelled:
    """Gives a text another spelling before it is checked."""

    spell: Callable[[str], str]


def at_least(least: float, unit: str = "") -> Check:
    """A number from `least` on."""
    return Check(f"at least {least:g} {unit}".rstrip(), lambda value: value >= least)


ABOVE_0 = Check("a finite number above 0", lambda value: 0 < value < math.inf)
Size = Annotated[int, Check("a size", lambda size: 0 <= size < 2**62)]


def check(record: Any, section: str) -> None:
    """Raises ConfigError if a field of a dataclass breaks its check; `section` begins the key."""
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
    """An instance of the dataclass `cls`, nested ones included.

    Args:
        cls: the dataclass. A section (a field that is a dataclass) that is left out has its default, or is empty.
        values: plain data, with a mapping for each dataclass.
        texts: whether a text may stand for a number, for True or False, and for a list with commas.
        noun: what a key is, for messages.
        error: makes the error from its message.
        given: values of fields that are not in the data.

    Raises:
        ElixirError: as `error` makes it. It names every unknown key with the nearest known one, every missing key and
            every value that is not as expected. Errors of the dataclasses' own checks pass.
    """
    reader = _Reader(noun, texts, {key: names for key, names in keys(cls).items() if key not in given})
    made: T | None = reader.record(cls, values, "", given)
    faults = reader.faults
    if faults:
        more = f"; and {len(faults) - _MOST} more" if len(faults) > _MOST else ""
        raise error("; ".join(faults[:_MOST]) + more)
    assert made is not None
    return made


def keys(cls: Any, where: str = "") -> dict[str, tuple[Called, ...]]:
    """{the dotted key of every field, those of its sections in its place: what it is called in other programs}."""
    found: dict[str, tuple[Called, ...]] = {}
    for name, kind in _kinds(cls).items():
        if not kind.records:
            found[where + name] = kind.called
        for record in kind.records:
            for key, names in keys(record, f"{where}{name}.").items():
                found[key] = found.get(key, ()) + names
    return found


def records_in(cls: type) -> dict[str, tuple[type, ...]]:
    """{field: the dataclasses of which its value may be one}; empty for a field of plain data."""
    return {name: kind.records for name, kind in _kinds(cls).items()}


def mark_of(cls: Any) -> str:
    """The first field of a dataclass, by which it is told from others in its place."""
    return dataclasses.fields(cls)[0].name


def unknown(noun: str, key: str, known: Mapping[str, tuple[Called, ...]]) -> str:
    """The words for an unknown key, with the one of `keys` that other programs call so, or with the nearest; keys with
    the same last part, and those of a section of this name, are nearer than others."""
    last = key.rpartition(".")[2]
    theirs = last.replace("-", "_")
    here = [(k, mark.but) for k, marks in known.items() for mark in marks if theirs in mark.names]
    alike = [k for k in known if k.rpartition(".")[2] == theirs or k.startswith(f"{key}.")]
    if alike:
        hint = f"did you mean {alike[0]!r}?"
    elif here:
        name, but = here[0]
        hint = f"give {name!r} instead: {but}" if but else f"it is called {name!r} here"
    else:
        sections = {k.rpartition(".")[0] for k in known} - {"", key}
        hint = meant(key[:_LONGEST], [*known, *sections], _NEAR)
    return f"unknown {noun} {key[:_LONGEST]!r}" + (f"; {hint}" if hint else "")


class _Kind:
    """The type of a field, taken apart once."""

    __slots__ = ("called", "checks", "is_record", "origin", "parts", "records", "respelled", "type")

    def __init__(self, hint: Any) -> None:
        marks: tuple[Any, ...] = ()
        if get_origin(hint) is Annotated:
            hint, marks = hint.__origin__, hint.__metadata__
        self.checks = tuple(mark for mark in marks if isinstance(mark, Check))
        self.called = tuple(mark for mark in marks if isinstance(mark, Called))
        self.respelled = tuple(mark.spell for mark in marks if isinstance(mark, Respelled))
        self.type, self.origin = hint, get_origin(hint)
        self.parts: tuple[Any, ...] = get_args(hint)
        if self.origin is not Literal:
            self.parts = tuple(_Kind(part) for part in self.parts)
        self.is_record = dataclasses.is_dataclass(hint)
        members = [part for part in self.parts if isinstance(part, _Kind) and part.type is not types.NoneType]
        one_of = self.origin in (Union, types.UnionType) and all(part.is_record for part in members)
        self.records: tuple[Any, ...] = (hint,) if self.is_record else tuple(p.type for p in members if one_of)
        """The dataclasses of which a value is one."""

    def record_of(self, values: Any) -> Any:
        """The dataclass of these values: that whose first field is among them; the first of all has no such mark."""
        given = values if isinstance(values, Mapping) else ()
        return next((cls for cls in self.records[1:] if mark_of(cls) in given), self.records[0])

    def __str__(self) -> str:
        """The type as it is written, without modules and checks."""
        if self.origin in (Union, types.UnionType):
            return " | ".join(map(str, self.parts))
        if self.origin is Literal:
            return " | ".join(map(repr, self.parts))
        name = {...: "...", types.NoneType: "None"}.get(self.type) or (self.origin or self.type).__name__
        return name + (f"[{', '.join(map(str, self.parts))}]" if self.parts else "")

    def broken(self, value: Any, key: str) -> Iterator[str]:
        """What is wrong with a value of this type; nothing with None."""
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
    """Converts values, and notes what is wrong with them."""

    def __init__(self, noun: str, texts: bool, known: Mapping[str, tuple[Called, ...]]) -> None:
        self.faults: list[str] = []
        self._noun, self._texts, self._known = noun, texts, known

    def record(self, cls: Any, values: Any, where: str, given: Mapping[str, Any]) -> Any:
        """The record, if all is right; `where` is its key with a dot."""
        if not isinstance(values, Mapping):
            self.faults.append(_wrong(where.rstrip(".") or self._noun, "a section with keys", values))
            return None
        kinds, before, arguments = _kinds(cls), len(self.faults), dict(given)
        for name in values:
            if name not in kinds or name in given:
                known = {**{where + other: () for other in kinds if other not in given}, **self._known}
                self.faults.append(unknown(self._noun, f"{where}{name}", known))
        for field in dataclasses.fields(cls):
            name, kind = field.name, kinds[field.name]
            if name in given:
                continue
            if name in values:
                arguments[name] = self.value(values[name], kind, where + name)
            elif field.default is not field.default_factory:
                pass
            elif kind.records:
                arguments[name] = self.one_of(kind, {}, f"{where}{name}.")
            else:
                self.faults.append(f"{where}{name} is missing: give {kind}")
        return cls(**arguments) if len(self.faults) == before else None

    def one_of(self, kind: _Kind, values: Any, where: str) -> Any:
        """The record that the values are of those that may be here."""
        cls = kind.record_of(values)
        for name in [*values] if isinstance(values, Mapping) else ():
            owners = [other for other in kind.records if name in _kinds(other)]
            if owners and cls not in owners:
                first = cls is kind.records[0]
                marked = (
                    f"without {where}{mark_of(owners[0])}" if first else f"with {where}{mark_of(cls)}: leave it out"
                )
                self.faults.append(f"{where}{name} means nothing {marked}")
                values = {key: value for key, value in values.items() if key != name}
        return self.record(cls, values, where, {})

    def value(self, value: Any, kind: _Kind, key: str, shown: _Kind | None = None) -> Any:
        """The value as `kind` says, if it is right; messages say the type `shown`."""
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
        if kind.records and not (value is None and not kind.is_record):
            return self.one_of(kind, value, f"{key}.")
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
            names = _Reader(self._noun, True, self._known)  # keys are texts in JSON
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
        """The items of a list, or of a text with commas."""
        if self._texts and isinstance(value, str):
            text = value.strip()
            text = text[1:-1] if text[:1] + text[-1:] in ("[]", "()") else text
            return [part.strip() for part in text.split(",") if part.strip()]
        return list(value) if isinstance(value, list | tuple) else None

    def _plain(self, value: Any, kind: Any) -> Any:
        """`value` as a bool, int, float or text; None if it is no such thing."""
        if type(value) is kind:
            return value
        is_text = self._texts and isinstance(value, str)
        if kind is bool and is_text:
            return {"true": True, "false": False}.get(value.lower())
        if (kind is float and type(value) is int) or (kind in (int, float) and is_text):
            with suppress(ValueError, OverflowError):
                return kind(value)
        return None
