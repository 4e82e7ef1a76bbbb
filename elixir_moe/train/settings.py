"""Settings: from YAML and the command line into frozen dataclasses, and back.

Owns the walk from plain data to dataclasses, its type checks and its messages. Knows no setting by name: what a setting
means and which values make sense is said by the dataclass that holds it. Never unpickles and never evaluates anything.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from elixir_moe.errors import ConfigError

T = TypeVar("T")


class CommandLineText(str):
    """A value as it was typed; its setting's type decides how it is read."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One line of the help: a leaf of the settings tree."""

    key: str
    """Dotted key, as in ``--run.steps``."""
    type: str
    """Its type, as a user would write it."""
    default: str
    """The default as text; "required" where there is none."""
    doc: str
    """The docstring under the field."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError if there is none, or a key stands twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the settings file {str(path)!r}: {error}") from error
    try:
        values = yaml.load(text, Loader=_OnceLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"the settings file {str(path)!r} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"the settings file {str(path)!r} must hold sections with keys, got {_shown(values)}")
    return values


def with_overrides(values: Mapping[str, Any], overrides: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A copy of `values` in which each dotted key has the text that was typed for it; of two, the last one counts."""
    result: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    for key, text in overrides:
        *sections, leaf = key.split(".")
        place = result
        for section in sections:
            below = place.setdefault(section, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{key}: {section!r} is no section of the settings, but holds {_shown(below)}")
            place = below
        place[leaf] = CommandLineText(text)
    return result


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """An instance of the dataclass `cls`, nested dataclasses included, from plain data.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a missing key, a value of the wrong type, or whatever
            the dataclasses find wrong themselves.
    """
    return typing.cast(T, _build(cls, values, "", [setting.key for setting in settings_of(cls)]))


def to_yaml(config: Any) -> str:
    """The settings as YAML that `build` reads back to an equal object."""
    return yaml.dump(_plain(config), Dumper=_Dumper, sort_keys=False)


def settings_of(cls: type, prefix: str = "") -> Iterator[Setting]:
    """Every leaf setting of a dataclass, in the order of definition."""
    hints, docs = typing.get_type_hints(cls), _field_docs(cls)
    for field in dataclasses.fields(cls):
        hint, key = hints[field.name], prefix + field.name
        if dataclasses.is_dataclass(hint):
            yield from settings_of(typing.cast(type, hint), key + ".")
        else:
            yield Setting(key=key, type=_type_text(hint), default=_default_text(field), doc=docs.get(field.name, ""))


def nearest(key: str, known: Sequence[str]) -> str:
    """The known key most like `key`; one whose last part is the same goes before all others."""
    leaf = key.rpartition(".")[2]
    same_leaf = [k for k in known if k.rpartition(".")[2] == leaf]
    return difflib.get_close_matches(key, same_leaf or known, n=1, cutoff=0.0)[0]


class _OnceLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a key given twice is an error: one of the two would be ignored silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep=deep)
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node)  # type: ignore[no-untyped-call]
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return mapping


class _Dumper(yaml.SafeDumper):
    """YAML's safe dumper, with lists on one line."""


_Dumper.add_representer(list, lambda dumper, values: dumper.represent_sequence("tag:yaml.org,2002:seq", values, True))


def _build(cls: type, values: Any, where: str, known: Sequence[str]) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where.rstrip('.')}: expected a section with keys, got {_shown(values)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    sections = [name for name in fields if dataclasses.is_dataclass(hints[name])]
    arguments = {}
    for name, value in values.items():
        key = f"{where}{name}"
        if name not in fields:
            right = nearest(key, sections if sections and isinstance(value, Mapping) else known)
            raise ConfigError(f"unknown setting {key!r}; did you mean {right!r}?")
        if name in sections:
            arguments[name] = _build(typing.cast(type, hints[name]), value, key + ".", known)
        else:
            arguments[name] = _convert(value, hints[name], key)
    for name, field in fields.items():
        if name in arguments:
            continue
        if name in sections:  # so that a section nobody mentions is checked like one that is there but empty
            arguments[name] = _build(typing.cast(type, hints[name]), {}, f"{where}{name}.", known)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            kind = _type_text(hints[name])
            raise ConfigError(f"setting '{where}{name}' is missing and has no default: give {kind}")
    return cls(**arguments)


def _convert(value: Any, hint: Any, key: str) -> Any:
    """`value` as the type `hint`; raises ConfigError if it is of another type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None or (isinstance(value, CommandLineText) and value in ("null", "none", "None")):
            return None
        return _convert(value, next(a for a in arguments if a is not types.NoneType), key)
    if origin is typing.Literal:
        if value not in arguments:
            names = [str(a) for a in arguments]
            right = nearest(str(value), names)
            raise ConfigError(f"{key}: expected {', '.join(names)}, got {str(value)!r}; did you mean {right!r}?")
        return str(value)
    if origin is tuple:
        return _convert_tuple(value, hint, key)
    if hint is str:
        if not isinstance(value, str):
            raise _wrong_type(value, hint, key)
        return str(value)
    return _convert_scalar(_parsed(value), hint, key)


def _convert_tuple(value: Any, hint: Any, key: str) -> tuple[Any, ...]:
    arguments = typing.get_args(hint)
    if isinstance(value, CommandLineText):
        value = [CommandLineText(part.strip()) for part in value.strip("[]() ").split(",") if part.strip()]
    if not isinstance(value, (list, tuple)):
        raise _wrong_type(value, hint, key)
    kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(value):
        raise _wrong_type(value, hint, key)
    return tuple(_convert(v, kind, f"{key}[{i}]") for i, (v, kind) in enumerate(zip(value, kinds, strict=True)))


def _convert_scalar(value: Any, kind: type, key: str) -> Any:
    if kind is float and not isinstance(value, bool):
        try:  # YAML 1.1 takes "1e-3", without a dot, for a string
            number = float(value)
        except (TypeError, ValueError):
            raise _wrong_type(value, kind, key) from None
        if not math.isfinite(number):
            raise ConfigError(f"{key}: expected a finite number, got {value}")
        return number
    elif type(value) is kind:
        return value
    raise _wrong_type(value, kind, key)


def _parsed(value: Any) -> Any:
    if not isinstance(value, CommandLineText):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return str(value)


def _wrong_type(value: Any, hint: Any, key: str) -> ConfigError:
    return ConfigError(f"{key}: expected {_type_text(hint)}, got {_shown(value)}")


def _shown(value: Any) -> str:
    kind = "text" if isinstance(value, str) else type(value).__name__
    return "nothing" if value is None else f"{kind} {str(value)!r}" if isinstance(value, str) else f"{kind} {value!r}"


def _type_text(hint: Any) -> str:
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        inner = ", ".join("..." if a is Ellipsis else _type_text(a) for a in arguments)
        return f"[{inner}]"
    if arguments:
        return "|".join(_type_text(a) for a in arguments)
    return "null" if hint is types.NoneType else {"str": "text"}.get(hint.__name__, hint.__name__)


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return _value_text(field.default_factory())
    return "required" if field.default is dataclasses.MISSING else _value_text(field.default)


def _value_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a class, which Python itself forgets; empty where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):
        return {}
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    return {
        field.target.id: " ".join(str(doc.value.value).split())
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value
