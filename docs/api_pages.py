"""The pages of every public name, made from the docstrings whenever the site is built (docs/conf.py).

Owns the form of these pages and which name is on which. They are not committed.
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

PAGES = {
    "plan": ("Plan and wrap", "wrap accumulate Plan AutoPlan Tier ShardedOptimizer Muon sharded_init unsharded"),
    "memory": ("Less memory", "tile quantize dequantize linear_cross_entropy"),
    "patterns": (
        "Patterns and mixtures",
        "init_mesh expert_mesh annotate Pattern MoE group_experts spread_experts megatron",
    ),
    "state": ("Save and load", "save load latest Saving full_state_dict save_pretrained"),
    "inspect": ("Look", "inspect Inspection Footprint Statistics"),
    "errors": (
        "Errors",
        "ElixirError ConfigError UsageError PlanError LayoutError TierError DiskError CheckpointError OutOfStepError",
    ),
}
"""{file: (title, its public names)}: every name of `em.__all__`, once."""
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$")
_ENTRY = re.compile(r"^(\w[\w, ]*): (.*)$")


def page(name: str) -> str:
    """One page."""
    title, names = PAGES[name]
    parts = [f"# {title}\n"]
    for public in names.split():
        value = getattr(em, public)
        if isinstance(value, ModuleType):
            parts.append(f"## em.{public}\n\n{_text(value)}")
            inside = getattr(value, "__all__", None) or [n for n, f in _functions(value)]
            parts += [_entry(f"em.{public}.{inner}", getattr(value, inner), "###") for inner in inside]
        else:
            parts.append(_entry(f"em.{public}", value, "##"))
    return "\n".join(parts)


def write(folder: Path) -> None:
    """Writes all pages into the folder."""
    folder.mkdir(exist_ok=True)
    for name in PAGES:
        (folder / f"{name}.md").write_text(page(name))


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
