"""Checked records: plain data from a file or a command line into frozen dataclasses.

Owns the conversion by the types of the fields, the checks written beside them, and the words of what is wrong. Opens no
file and knows no record by name: a dataclass says what its fields mean, and which values they take.

    steps: Annotated[int, at_least(1)] = 100
    parts: Mapping[str, tuple[Part, ...]]           # records in records

Nothing is guessed: True is no number, 1.0 no whole one. A command line has only texts, which are read by the type.
"""

import dataclasses
import functools
import inspect
import math
import re
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


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """What a field's value, or each item of a tuple, must be beyond its type. None is not checked."""

    what: str
    holds: Callable[[Any], object]


def at_least(least: float, unit: str = "") -> Check:
    """A number from `least` on."""
    return Check(f"at least {least:g} {unit}".rstrip(), lambda value: value >= least)


ABOVE_0 = Check("a finite number above 0", lambda value: 0 < value < math.inf)
Size = Annotated[int, Check("a size", lambda size: 0 <= size < 2**62)]


def check(record: Any, section: str) -> None:
    """Raises ConfigError if a field of a dataclass breaks its check; `section` begins the key."""
    cls: Any = type(record)
    for name, hint in _hints(cls).items():
        for problem in _broken(getattr(record, name), hint, f"{section}.{name}"):
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
        cls: the dataclass. A section (a field that is a dataclass) that is left out is an empty one.
        values: plain data, with a mapping for each dataclass.
        texts: whether a text may stand for a number, for True or False, and for a list with commas.
        noun: what a key is, for messages.
        error: makes the error from its message.
        given: values of fields that are not in the data.

    Raises:
        ElixirError: as `error` makes it. It names every unknown key with the nearest known one, every missing key and
            every value that is not as expected. Errors of the dataclasses' own checks pass.
    """
    reader = _Reader(noun, texts, [key for key in keys(cls) if key not in given])
    made: T | None = reader.record(cls, values, "", given)
    faults = reader.faults
    if faults:
        more = f"; and {len(faults) - _MOST} more" if len(faults) > _MOST else ""
        raise error("; ".join(faults[:_MOST]) + more)
    assert made is not None
    return made


def keys(cls: Any, where: str = "") -> Iterator[str]:
    """The dotted key of every field, those of its sections in its place."""
    for name, hint in _hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from keys(hint, f"{where}{name}.")
        else:
            yield where + name


def unknown(noun: str, key: str, known: list[str]) -> str:
    """The words for an unknown key, with the nearest known one; keys with the same last part are nearer than others."""
    alike = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    sections = {k.rpartition(".")[0] for k in known} - {"", key}
    hint = f"did you mean {alike[0]!r}?" if alike else meant(key[:_LONGEST], [*known, *sections])
    return f"unknown {noun} {key[:_LONGEST]!r}" + (f"; {hint}" if hint else "")


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, with their checks."""
    found = get_type_hints(cls, include_extras=True)
    return {field.name: found[field.name] for field in dataclasses.fields(cls)}


def _wrong(key: str, expected: str, value: Any) -> str:
    return f"{key}: expected {expected}, got {repr(value)[:_LONGEST]}"


def _broken(value: Any, hint: Any, key: str) -> Iterator[str]:
    """What is wrong with a value of the right type."""
    if get_origin(hint) is not Annotated or value is None:
        return
    items = [(f"{key}[{i}]", item) for i, item in enumerate(value)] if isinstance(value, tuple) else [(key, value)]
    for rule in hint.__metadata__:
        yield from (_wrong(where, rule.what, item) for where, item in items if not rule.holds(item))


class _Reader:
    """Converts values, and notes what is wrong with them."""

    def __init__(self, noun: str, texts: bool, known: list[str]) -> None:
        self.faults: list[str] = []
        self._noun, self._texts, self._known = noun, texts, known

    def record(self, cls: Any, values: Any, where: str, given: Mapping[str, Any]) -> Any:
        """The record, if all is right; `where` is its key with a dot."""
        if not isinstance(values, Mapping):
            self.faults.append(_wrong(where.rstrip(".") or self._noun, "a section with keys", values))
            return None
        hints, before, arguments = _hints(cls), len(self.faults), dict(given)
        known = [*self._known, *(where + name for name in hints if name not in given)]
        self.faults += [
            unknown(self._noun, f"{where}{name}", known) for name in values if name not in hints or name in given
        ]
        for field in dataclasses.fields(cls):
            name, hint = field.name, hints[field.name]
            if name in given:
                continue
            if name in values:
                arguments[name] = self.value(values[name], hint, where + name)
            elif dataclasses.is_dataclass(hint):
                arguments[name] = self.record(hint, {}, f"{where}{name}.", {})
            elif field.default is field.default_factory:  # there is no default
                self.faults.append(f"{where}{name} is missing: give {_named(_type(hint))}")
        return cls(**arguments) if len(self.faults) == before else None

    def value(self, value: Any, hint: Any, key: str, shown: Any = None) -> Any:
        """The value as `hint` says, if it is right; messages say the type `shown`."""
        before = len(self.faults)
        found = self._of_type(value, _type(hint), key, _type(shown or hint))
        if len(self.faults) == before:
            self.faults += _broken(found, hint, key)
        return found

    def _of_type(self, value: Any, hint: Any, key: str, shown: Any) -> Any:
        origin, parts = get_origin(hint), get_args(hint)
        if hint is Any or (value is None and types.NoneType in parts):
            return value
        if dataclasses.is_dataclass(hint):
            return self.record(hint, value, f"{key}.", {})
        if origin in (Union, types.UnionType):
            members = [part for part in parts if part is not types.NoneType]
            if len(members) == 1:
                return self.value(value, members[0], key, shown)
            for part in members:
                trial = _Reader(self._noun, self._texts, self._known)
                found = trial.value(value, part, key)
                if not trial.faults:
                    return found
        elif origin is tuple:
            items = self._items(value)
            kinds = parts if parts[-1] is not ... else (parts[0],) * len(items or ())
            if items is not None and len(items) == len(kinds):
                return tuple(self.value(v, k, f"{key}[{i}]") for i, (v, k) in enumerate(zip(items, kinds, strict=True)))
        elif isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
            inside = [(name, f"{key}.{str(name)[:_LONGEST]}") for name in value]
            names = _Reader(self._noun, True, self._known)  # keys are texts in JSON
            made = {names.value(name, parts[0], k): self.value(value[name], parts[1], k) for name, k in inside}
            self.faults += names.faults
            return made
        elif origin is Literal and any(type(value) is type(part) and value == part for part in parts):
            return value
        elif origin is None and (found := self._plain(value, hint)) is not None:
            if isinstance(found, float) and not math.isfinite(found):
                self.faults.append(_wrong(key, "a finite number", value))
            return found
        self.faults.append(_wrong(key, _named(shown), value))
        return None

    def _items(self, value: Any) -> list[Any] | None:
        """The items of a list, or of a text with commas."""
        if self._texts and isinstance(value, str):
            return [part.strip() for part in value.strip("[]() ").split(",") if part.strip()]
        return list(value) if isinstance(value, list | tuple) else None

    def _plain(self, value: Any, hint: Any) -> Any:
        """`value` as a bool, int, float or text; None if it is no such thing."""
        if type(value) is hint:
            return value
        is_text = self._texts and isinstance(value, str)
        if hint is bool and is_text:
            return {"true": True, "false": False}.get(value.lower())
        if (hint is float and type(value) is int) or (hint in (int, float) and is_text):
            with suppress(ValueError, OverflowError):
                return hint(value)
        return None


def _named(hint: Any) -> str:
    """A type as it is written, without the modules of its parts."""
    return re.sub(r"(\w+\.)+", "", inspect.formatannotation(hint))


def _type(hint: Any) -> Any:
    """A type without its checks."""
    return hint.__origin__ if get_origin(hint) is Annotated else hint
