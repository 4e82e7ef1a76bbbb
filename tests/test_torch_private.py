"""The private names of torch: one file has them all, each with its reason, and this torch has each of them.

A torch that lacks one ends the import with a sentence that names it, and one newer than the tested ones is reported.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from elixir_moe import torch_private
from elixir_moe.errors import ConfigError, TorchVersionError
from tests.support.fresh import Ended, Fresh
from tests.support.rules import assert_none, tree_of

PACKAGE = Path(__file__).parent.parent / "elixir_moe"
HOME = PACKAGE / "torch_private.py"
OTHERS = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "elixir_tools").rglob("*.py")} - {HOME})
TREE = tree_of(HOME)
ATTRIBUTES = torch_private.ATTRIBUTES
IN_PLACE = {path.split(".")[1] for path in ATTRIBUTES}


class _Subclass(torch.Tensor):
    pass


def _stepped() -> torch.optim.Optimizer:
    """An optimizer that has stepped, with an LR scheduler on it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    return optimizer


OWNERS: dict[str, Any] = {
    "torch": torch,
    "Tensor": torch.Tensor,
    "Parameter": nn.Parameter(torch.ones(1).as_subclass(_Subclass)),
    "DTensor": DTensor,
    "Module": nn.Module(),
    "OptimizedModule": torch.compile(nn.Linear(1, 1)),
    "Optimizer": _stepped(),
    "OpOverload": torch.ops.aten.add.Tensor,
    "Node": torch.autograd.graph.Node,
    "Storage": torch.UntypedStorage,
    "ProcessGroup": dist.ProcessGroup,
    "Backend": torch._C._distributed_c10d.Backend,
    "Options": torch._C._distributed_c10d.Backend.Options,
    "DeviceMesh": DeviceMesh,
}
"""What has private attributes: classes, or an instance where the constructor makes them."""
if hasattr(dist, "ProcessGroupNCCL"):
    OWNERS["ProcessGroupNCCL"] = dist.ProcessGroupNCCL


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


PRIVATE = {name for owner in OWNERS.values() for name in dir(owner) if is_private(name)}


@pytest.mark.parametrize(
    "path", [*ATTRIBUTES, "Optimizer._opt_called", "ProcessGroupNCCL._group_start", "ProcessGroupNCCL._group_end"]
)
def test_torch_has_every_attribute(path: str) -> None:
    owner, name = path.split(".")
    if owner == "ProcessGroupNCCL" and owner not in OWNERS:
        pytest.skip("this torch has no NCCL")
    assert hasattr(OWNERS[owner], name), f"torch {torch.__version__} has no {path}"


def reasons() -> Iterator[tuple[str, str]]:
    """Each name that the file has of torch, and why."""
    yield from ATTRIBUTES.items()
    yield from torch_private.IMPORTED.items()
    for node, below in zip(TREE.body, [*TREE.body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, ast.get_docstring(node) or ""
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and "_torch(" in ast.unparse(node):
            said = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            yield ast.unparse(node).split(" =")[0], str(below.value.value) if said else ""


def test_every_name_has_a_reason() -> None:
    found = dict(reasons())
    assert "Tensor._version" in found and "graph_task_id: Callable[[], int]" in found
    assert not [name for name, reason in found.items() if len(reason.split()) < 2]


def imported(fresh: Fresh, setup: str) -> Ended:
    """Imports the file in a process in which `setup` has changed torch."""
    return fresh.run(f"import torch\n{setup}\nimport elixir_moe.torch_private")


@pytest.mark.parametrize(
    ("setup", "name"),
    [
        ("del torch._C._current_graph_task_id", "torch._C._current_graph_task_id"),
        ("del torch.utils._triton.has_triton", "has_triton"),
        ("torch.nn.Module = type('Module', (), {})", "Module._parameters"),
        (
            "del torch.distributed.device_mesh.DeviceMesh._flatten",
            "torch.distributed.device_mesh.DeviceMesh._flatten",
        ),
    ],
    ids=["alias", "import", "attribute", "in a function"],
)
def test_a_torch_that_lacks_a_name_ends_the_import_with_it(setup: str, name: str, fresh: Fresh) -> None:
    done = imported(fresh, setup)
    assert done.returncode and "TorchVersionError" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert name in last and torch.__version__ in last and torch_private.NEWEST in last
    assert issubclass(TorchVersionError, ConfigError) and issubclass(TorchVersionError, ImportError)


@pytest.mark.parametrize(("version", "warned"), [("2.11.0", 0), ("2.15.1+cu132", 0), ("2.16.0", 1), ("3.0.0a0", 1)])
def test_a_torch_newer_than_the_tested_ones_is_reported(version: str, warned: int, fresh: Fresh) -> None:
    done = imported(fresh, f"torch.__version__ = torch.torch_version.TorchVersion('{version}')")
    assert not done.returncode, done.stderr
    assert done.stderr.count(f"torch {version} is newer than {torch_private.NEWEST}") == warned


def dotted(node: ast.expr) -> str | None:
    """``a.b.c`` as text; None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def roots_of(tree: ast.AST) -> dict[str, str]:
    """{name in a file: torch's path} of all that a file imports from torch."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias for alias in node.names if alias.name.split(".")[0] == "torch"]
            found |= {alias.asname or "torch": alias.name if alias.asname else "torch" for alias in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def paths_in(node: ast.AST, roots: dict[str, str]) -> Iterator[str]:
    """Torch's private paths that `node` names, each as long as it is written, with their lines."""
    inside = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and id(part) not in inside and (path := dotted(part)) is not None:
            root, _, rest = path.partition(".")
            if root in roots and any(map(is_private, rest.split("."))):
                yield f"{part.lineno}: {roots[root]}.{rest}"


def private_names(tree: ast.AST) -> list[str]:
    """The private names of torch that a file has beside `ATTRIBUTES`, with their lines."""
    roots, found = roots_of(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [f"{node.lineno}: {path}" for path in paths if any(map(is_private, path.split(".")))]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
            found += [f"{node.lineno}: {path}" for path in paths if any(map(is_private, path.split(".")))]
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found += [f"{node.lineno}: {ast.unparse(node)}"] * (node.attr in PRIVATE - IN_PLACE and not own)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = node.value in PRIVATE - IN_PLACE or node.value.startswith("torch._")
            found += [f"{node.lineno}: {node.value!r}"] * named
    return [*found, *paths_in(tree, roots)]


def test_no_other_file_has_private_names() -> None:
    """A name that is needed gets an alias and a reason in elixir_moe/torch_private.py."""
    assert_none(
        f"{path.relative_to(PACKAGE.parent)}:{found}" for path in OTHERS for found in private_names(tree_of(path))
    )


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch.nn as n\nn.modules.dropout._DropoutNd",
        "import torch._dynamo",
        "import_module('torch._dynamo')",
        "from torch.utils._pytree import tree_map",
        "from torch.distributed.distributed_c10d import _world",
        "group._get_backend(device)",
        "setattr(optimizer, '_opt_called', True)",
    ],
)
def test_private_names_are_found(code: str) -> None:
    assert private_names(ast.parse(code))


def test_every_attribute_is_used() -> None:
    text = "".join(path.read_text() for path in OTHERS)
    assert not [path for path in ATTRIBUTES if path.split(".")[1] not in text]
