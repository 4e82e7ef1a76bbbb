"""Settings: from YAML and the command line into frozen dataclasses, and back, and the help about them.

Owns the YAML of settings, the overrides of the command line, and the help. `records` makes the dataclasses. Knows no
setting by name: the dataclass of a setting defines its meaning and its valid values.
"""

import argparse
import ast
import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from elixir_moe.errors import ConfigError
from elixir_moe.ext import records
from elixir_moe.ext.options import field_docstrings

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
    """An instance of the dataclass `cls`, as by `records.build`.

    Args:
        cls: the dataclass, of settings or of sections of settings.
        values: plain data, with a mapping for each section.
        overrides: (dotted key, text) pairs that override `values`; the last one of a key counts.

    Raises:
        ConfigError: as `records.build` says.
    """
    known = records.keys(cls)
    merged = {name: dict(part) if isinstance(part, Mapping) else part for name, part in values.items()}
    for key, text in overrides:
        if key not in known:
            raise ConfigError(records.unknown("setting", key, known))
        section, _, name = key.rpartition(".")
        part = merged.setdefault(section, {}) if section else merged
        if isinstance(part, dict):  # another one is refused below
            part[name] = None if text in ("null", "None") else text
    return records.build(cls, merged, texts=True)


def to_yaml(config: Any) -> str:
    """The settings as YAML, from which `build` makes an equal object."""
    return yaml.dump(dataclasses.asdict(config), Dumper=_Dumper, sort_keys=False)


def help_of(cls: type) -> str:
    """Help text for every setting of a dataclass of sections: the docstring under its field, its type and default."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    group = parser.add_argument_group("settings, in the file or as --section.key value")
    for section, kind in get_type_hints(cls).items():
        hints, words = get_type_hints(kind), docstrings(kind)
        for field in dataclasses.fields(kind):
            facts = f"type: {inspect.formatannotation(hints[field.name])}"
            is_needed = field.default is field.default_factory
            facts = f"required, {facts}" if is_needed else f"{facts}, default: {field.default}"
            text = f"{words[field.name]} ({facts})".replace("%", "%%")
            group.add_argument(f"--{section}.{field.name}", metavar=field.name.upper(), help=text)
    return parser.format_help()


def docstrings(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, those of its bases first, and `help` in a field's metadata."""
    found: dict[str, str] = {}
    for kind in reversed(cls.__mro__):
        if dataclasses.is_dataclass(kind):
            (definition,) = ast.parse(inspect.getsource(kind)).body
            assert isinstance(definition, ast.ClassDef)
            found |= {name: " ".join(text.split()) for name, text in field_docstrings(definition)}
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    return found | {field.name: field.metadata["help"] for field in fields if "help" in field.metadata}


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
            text = f"{str(node.value)[:80]!r} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # those stand there next
        mapping = super().construct_mapping(node, deep=deep)
        if len(set(keys)) < len(keys):
            twice = max(keys, key=keys.count)
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} stands twice", node.start_mark)
        return mapping


class _Dumper(yaml.SafeDumper):
    """YAML's safe dumper, but tuples become lists on one line."""


_Dumper.add_representer(tuple, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, True))
