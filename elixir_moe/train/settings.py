"""Settings: from YAML and the command line into frozen dataclasses, and back; jsonargparse reads the values.

Owns the conversion of plain data to dataclasses. jsonargparse sees one value and its type at a time, so it opens no
file and imports no class, whatever the YAML contains; it is imported only when settings are read. Knows no setting by
name: the dataclass of a setting defines its meaning and its valid values.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from elixir_moe.errors import ConfigError

T = TypeVar("T")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError if the file is unreadable, not a mapping, or has a key twice."""
    try:
        if Path(path).is_fifo():  # reading a pipe would block
            raise OSError("it is a pipe")
        return parse_yaml(Path(path).read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {str(path)!r}: {error}") from error


def parse_yaml(text: str, path: str | Path) -> dict[str, Any]:
    """The mapping in the text of a YAML file; `path` is for messages. Raises ConfigError like `read_yaml`."""
    try:
        values = yaml.load(text, Loader=_OnceLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"the settings file {str(path)!r} is not valid YAML: {_flaw(error, text)}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"the settings file {str(path)!r} must hold sections with keys, got {values!r}")
    return values or {}


def build(cls: type[T], values: Mapping[str, Any], overrides: Sequence[tuple[str, str]] = ()) -> T:
    """An instance of the dataclass `cls`, nested dataclasses included.

    Args:
        cls: the dataclass.
        values: plain data, with a mapping for each nested dataclass.
        overrides: (dotted key, text) pairs that override `values`; the last one of a key counts.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing key, a value of the wrong type, or an error
            from the dataclasses' own checks.
    """
    known = list(_keys(cls))
    typed = {key: None if text in ("null", "None") else text for key, text in overrides}
    for key in typed:
        if key not in known:
            raise _unknown(key, known)
    return _build(cls, values, typed, "", known)


def to_yaml(config: Any) -> str:
    """The settings as YAML, from which `build` makes an equal object."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False)


def help_of(cls: type) -> str:
    """Help text for every setting of a dataclass of sections: the docstring under its field, its type and default."""
    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    group = parser.add_argument_group("settings, in the file or as --section.key value")
    for name, section in typing.get_type_hints(cls).items():
        group.add_class_arguments(section, name, as_group=False)
    return parser.format_help()


def _flaw(error: yaml.YAMLError | RecursionError, text: str) -> str:
    """Place and cause of a YAML error in `text`, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        why = ": ".join(filter(None, (error.context, error.problem)))
        return f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}: {why}"
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        place = f"line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"
        return f"{place}: unacceptable character #x{ord(text[error.position]):04x}"
    return "it is nested too deep"


class _OnceLoader(yaml.SafeLoader):
    """YAML's safe loader, but a duplicate key is an error, since one of its values would be ignored silently.

    A value that is invalid for its type, such as the 30th of February, is an error with its place, too.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError) as error:
            text = f"{str(node.value)[:80]!r} is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        keys = [key.value for key, _ in node.value]
        if len(mapping) < len(keys):
            twice = max(keys, key=keys.count)
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} stands twice", node.start_mark)
        return mapping


class _Dumper(yaml.SafeDumper):
    """YAML's safe dumper, but tuples become lists on one line."""


_Dumper.add_representer(tuple, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, True))


def _build(cls: Any, values: Any, typed: Mapping[str, str | None], where: str, known: Sequence[str]) -> Any:
    """A `cls` from `values`, overridden by `typed`; `where` is the section's key with a dot."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where.rstrip('.')}: expected a section with keys, got {values!r}")
    hints, arguments = typing.get_type_hints(cls), {}
    for name in values:
        if name not in hints:
            raise _unknown(f"{where}{name}", known)
    for field in dataclasses.fields(cls):
        key, hint = where + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):  # a missing section is checked like an empty one
            arguments[field.name] = _build(hint, values.get(field.name, {}), typed, f"{key}.", known)
        elif key in typed or field.name in values:
            arguments[field.name] = _converted(key, hint, typed.get(key, values.get(field.name)))
        elif field.default is field.default_factory:  # there is no default
            raise ConfigError(f"setting {key!r} is missing and has no default: give {inspect.formatannotation(hint)}")
    return cls(**arguments)


@functools.cache
def _parser(hint: Any) -> Any:
    """A parser for values of type `hint`; cached, since there are few types and parsers are slow to create."""
    import jsonargparse

    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser


def _converted(key: str, hint: Any, value: Any) -> Any:
    """`value` converted to the type `hint`. Raises ConfigError if it has another type."""
    wrong = ConfigError(f"{key}: expected {inspect.formatannotation(hint)}, got {value!r}")
    if value is None and types.NoneType in typing.get_args(hint):
        return None
    if typing.get_origin(hint) is tuple and isinstance(value, str):
        value = [part.strip() for part in value.strip("[]() ").split(",") if part.strip()]
    try:
        found = _parser(hint).parse_object({"value": value}).value
    except (argparse.ArgumentError, ValueError, OverflowError):
        raise wrong from None
    if found is None:  # jsonargparse accepts None for any type
        raise wrong
    for number in found if isinstance(found, tuple) else (found,):
        if isinstance(number, float) and not math.isfinite(number):
            raise ConfigError(f"{key}: expected a finite number, got {value}")
    return found


def _keys(cls: Any, where: str = "") -> Iterator[str]:
    """The dotted key of every setting."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from _keys(hint, f"{where}{name}.")
        else:
            yield where + name


def _unknown(key: str, known: Sequence[str]) -> ConfigError:
    """The error for an unknown `key`, with the nearest setting or section; settings with the same last part first."""
    likely = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
    likely = likely or [*known, *{k.rpartition(".")[0] for k in known} - {""}]
    return ConfigError(f"unknown setting {key!r}; did you mean {difflib.get_close_matches(key, likely, 1, 0.0)[0]!r}?")
