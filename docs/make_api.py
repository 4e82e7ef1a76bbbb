"""Writes docs/api.md from the docstrings of the public names: ``python docs/make_api.py``.

Owns the form of the page. A test compares the page with what this makes.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import elixir_moe as em

PAGE = Path(__file__).with_name("api.md")
_HEAD = """# Every public name

Made from the docstrings by `python docs/make_api.py`. `em` is `import elixir_moe as em`. All other names are internal.
"""
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$")
_ENTRY = re.compile(r"^(\w[\w, ]*): (.*)$")


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name in sorted(em.__all__, key=str.lower):
        value = getattr(em, name)
        if isinstance(value, ModuleType):
            parts.append(f"## em.{name}\n\n{_text(value)}")
            names = getattr(value, "__all__", None) or [n for n, f in _functions(value)]
            parts += [_entry(f"em.{name}.{inner}", getattr(value, inner), "###") for inner in names]
        else:
            parts.append(_entry(f"em.{name}", value, "##"))
    return "\n".join(parts)


def _functions(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name, value


def _entry(name: str, value: Any, level: str) -> str:
    if not inspect.isclass(value):
        return f"{level} {name}\n\n{_signature(name, value)}\n{_text(value)}"
    if issubclass(value, BaseException):
        (base,) = value.__bases__
        return f"{level} {name}\n\n{_text(value)}\nA kind of `{base.__name__}`.\n"
    parts = [f"{level} {name}\n\n{_text(value)}"]
    fields = [f"- `{field}`: {text}" for field, text in _fields(value)]
    parts += ["\n".join(fields) + "\n"] if fields else []
    for method, function in vars(value).items():
        kind = function
        function = inspect.unwrap(getattr(function, "__func__", getattr(function, "fget", function)))
        if method.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if isinstance(kind, property):
            parts.append(f"**`.{method}`** {_text(function)}")
        else:
            parts.append(f"{_signature(f'.{method}', function)}\n{_text(function)}")
    return "\n".join(parts)


def _fields(kind: type) -> Iterator[tuple[str, str]]:
    """(attribute, the text under it) of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        names = (
            [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        )
        for name in names:
            if isinstance(name, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                yield name.id, " ".join(str(after.value.value).split())


def _signature(name: str, function: Any) -> str:
    """A block of code; `self` and `cls` left out."""
    parameters = [
        re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z]\w*)", "", str(p).replace("elixir_moe.", ""))
        for p in inspect.signature(function).parameters.values()
        if p.name not in ("self", "cls")
    ]
    kinds = [p.kind for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    star = inspect.Parameter.KEYWORD_ONLY
    if star in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(star), "*")
    line = f"{name}({', '.join(parameters)})"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + ")"
    return f"```python\n{line}\n```\n"


def _text(value: Any) -> str:
    """A docstring as Markdown: its sections become lists."""
    out: list[str] = []
    in_section = False
    for line in inspect.cleandoc(value.__doc__ or "").splitlines():
        if match := _SECTION.match(line):
            out += [f"{match[1]}:", ""]
            in_section = True
        elif in_section and (match := _ENTRY.match(line.removeprefix("    "))) and not line.startswith("     "):
            out.append(f"- `{match[1]}`: {match[2]}")
        elif in_section and line.strip():
            out.append(f"  {line.strip()}" if out[-1] else line.strip())
        else:
            out.append(line.replace("``", "`"))
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
