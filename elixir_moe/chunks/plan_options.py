"""The options of plans as settings of programs: names, types, presets and meanings.

Owns the table, read from the source of `plan`, where an option is written once: its field, and the presets that have
it. A program that offers the presets offers a new option without a change. Never imports torch, so that help is quick.
"""

import ast
import functools
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elixir_moe.names import Master, Moments

PRESETS = ("ddp", "zero2", "zero3", "offload", "auto")
"""The presets of `Plan`."""
_OF_A_STEP = ("step", "sample", "accumulation")
"""Arguments of `Plan.auto` that are not options: a program has its own step."""
_AS_TEXT = {"os.PathLike[str]": "str", "torch.dtype": "str"}
"""Types of arguments that a setting passes as a string."""


@dataclass(frozen=True, slots=True)
class Option:
    """An argument of presets of `Plan`."""

    name: str
    type: Any
    """The type of the setting; None leaves the value to the preset."""
    presets: tuple[str, ...]
    """The presets that have it."""
    meaning: str

    @property
    def is_size(self) -> bool:
        """Whether its value is a number of bytes or a string with a unit."""
        return self.type == int | str | None


@functools.cache
def options() -> Mapping[str, Option]:
    """Returns {name: option} of all presets; the options of `Plan.offload` come first."""
    classes = {node.name: node for node in ast.parse(_source()).body if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in classes["Plan"].body if isinstance(node, ast.FunctionDef)}
    presets = {name: functions[name] for name in sorted(PRESETS, key="offload".__ne__)}
    meanings = {name.removesuffix("_bytes"): _plain(text) for name, text in field_docstrings(classes["Plan"])}
    for preset in reversed(presets.values()):
        meanings |= _of_arguments(ast.get_docstring(preset) or "")
    types = {name: kind for preset in presets.values() for name, kind in _typed(preset)}
    having = {name: tuple(each for each in PRESETS if name in dict(_typed(presets[each]))) for name in types}
    return {name: Option(name, kind, having[name], meanings[name]) for name, kind in types.items()}


def _source() -> str:
    return Path(__file__).with_name("plan.py").read_text(encoding="utf-8")


def _typed(preset: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Yields (name, type) of the arguments of a preset that are options."""
    for argument in preset.args.kwonlyargs:
        if argument.arg not in _OF_A_STEP and argument.annotation is not None:
            text = ast.unparse(argument.annotation)
            for kind, written in _AS_TEXT.items():
                text = text.replace(kind, written)
            yield argument.arg, eval(text, {"Literal": Literal, "Master": Master, "Moments": Moments}) | None


def field_docstrings(definition: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yields (name, docstring) of the fields of a dataclass."""
    for field, text in itertools.pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            yield ast.unparse(field.target), ast.literal_eval(text.value)


def _of_arguments(docstring: str) -> dict[str, str]:
    """Returns {name: meaning} of the arguments that a docstring explains; the field explains the others."""
    _, _, entries = inspect.cleandoc(docstring).partition("Args:\n")
    found: dict[str, str] = {}
    name = ""
    for line in entries.splitlines():
        if line.startswith("        "):
            found[name] += f" {line}"
        elif line.startswith("    "):
            name, _, found[name] = line.strip().partition(": ")
        else:
            break
    return {name: _plain(text) for name, text in found.items() if name.isidentifier() and "as in `" not in text}


def _plain(text: str) -> str:
    words = " ".join(text.replace("`", "").split()).removesuffix(".")
    return f"{words[:1].upper()}{words[1:]}."
