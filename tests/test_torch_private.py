"""The private names of torch: one file has them all, each with its reason, and this torch has each of them.

Reads that file and does not import it, since a name that torch has dropped would end the import.
"""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

PACKAGE = Path(__file__).parent.parent / "elixir_moe"
HOME = PACKAGE / "torch_private.py"
OTHERS = sorted(set(PACKAGE.rglob("*.py")) - {HOME})
TREE = ast.parse(HOME.read_text())


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
USED = {
    "running_node": ["Node._sequence_nr"],
    "storage_id": ["Storage._cdata"],
    "storage_uses": ["Storage._cdata"],
    "sparse_parts": ["Tensor._indices", "Tensor._values"],
    "devices_of": ["ProcessGroup._device_types"],
    "backend_on": ["ProcessGroup._get_backend"],
    "issued_on": ["Backend._get_sequence_number_for_group"],
    "timeout_on": ["Options._timeout"],
    "abort_together": ["ProcessGroupNCCL._group_start", "ProcessGroupNCCL._group_end"],
    "root_mesh": ["DeviceMesh._get_root_mesh"],
    "flattened": ["DeviceMesh._flatten"],
    "mark_stepped": ["Optimizer._opt_called"],
}
"""The attributes that the functions of the file use."""
if hasattr(dist, "ProcessGroupNCCL"):
    OWNERS["ProcessGroupNCCL"] = dist.ProcessGroupNCCL


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__")


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
    """Torch's private paths that `node` names, each as long as it is written."""
    inside = {id(n.value) for n in ast.walk(node) if isinstance(n, ast.Attribute)}
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and id(part) not in inside and (path := dotted(part)) is not None:
            root, _, rest = path.partition(".")
            if root in roots and any(map(is_private, rest.split("."))):
                yield f"{roots[root]}.{rest}"


def exported() -> dict[str, tuple[list[str], str]]:
    """{name that the file exports: (paths in torch, reason)}."""
    roots, found = roots_of(TREE), {}
    imported = ast.literal_eval(_value_of("IMPORTED"))
    for node, below in zip(TREE.body, [*TREE.body[1:], None], strict=True):
        if isinstance(node, ast.ImportFrom) and any(map(is_private, (node.module or "").split("."))):
            for alias in node.names:
                found[alias.asname or alias.name] = [f"{node.module}.{alias.name}"], imported[alias.name]
        elif isinstance(node, ast.Assign) and (paths := list(paths_in(node.value, roots))):
            assert isinstance(below, ast.Expr), f"{ast.unparse(node)} has no reason"
            found[ast.unparse(node.targets[0])] = paths, ast.literal_eval(below.value)
        elif isinstance(node, ast.FunctionDef):
            inner = [
                f"{n.module}.{alias.name}" for n in ast.walk(node) if isinstance(n, ast.ImportFrom) for alias in n.names
            ]
            paths = [*paths_in(node, roots), *inner, *USED.get(node.name, [])]
            found[node.name] = paths, ast.get_docstring(node) or ""
    return {name: (paths, " ".join(reason.split())) for name, (paths, reason) in found.items()}


def _value_of(name: str) -> ast.expr:
    return next(n.value for n in TREE.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name)


EXPORTED = exported()
ATTRIBUTES: dict[str, str] = ast.literal_eval(_value_of("ATTRIBUTES"))
IN_PLACE = {path.split(".")[1] for path in ATTRIBUTES}
PRIVATE = {name for owner in OWNERS.values() for name in dir(owner) if is_private(name)}


def lacks(path: str) -> bool:
    """Whether this torch has no such path."""
    first, *rest = path.split(".")
    found: Any = OWNERS[first]
    for i, name in enumerate(rest):
        try:
            found = getattr(found, name)
        except AttributeError:
            try:
                found = import_module(".".join([first, *rest[: i + 1]]))
            except ImportError:
                return True
    return False


def check(name: str, paths: list[str], reason: str) -> None:
    """Fails with the name, what torch lacks, and the reason why it is needed."""
    assert paths, f"{name} names nothing of torch: it does not belong here, or USED lacks it"
    assert len(reason.split()) >= 3, f"{name} has no reason"
    for path in paths:
        assert not lacks(path), f"torch {torch.__version__} has no {path}, for which {name} stands: {reason}"


@pytest.mark.parametrize("name", EXPORTED)
def test_torch_has_every_name(name: str) -> None:
    paths, reason = EXPORTED[name]
    if paths == USED["abort_together"] and not hasattr(dist, "ProcessGroupNCCL"):
        pytest.skip("this torch has no NCCL")
    check(name, paths, reason)


@pytest.mark.parametrize("path", ATTRIBUTES)
def test_torch_has_every_attribute(path: str) -> None:
    reason = ATTRIBUTES[path]
    if reason.startswith("As `"):
        other = reason.split("`")[1]
        reason += " " + next(why for known, why in ATTRIBUTES.items() if known.split(".")[1] == other)
    check(path, [path], reason)


def test_a_name_that_torch_drops_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    paths, reason = EXPORTED["graph_task_id"]
    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    with pytest.raises(AssertionError) as caught:
        check("graph_task_id", paths, reason)
    assert "torch._C._current_graph_task_id" in str(caught.value)
    assert reason in str(caught.value)


def test_every_attribute_of_the_file_is_looked_for() -> None:
    """Also those that its functions read of objects."""
    looked_for = {name for paths, _ in EXPORTED.values() for path in paths for name in path.split(".")}
    read = {node.attr for node in ast.walk(TREE) if isinstance(node, ast.Attribute) and is_private(node.attr)}
    assert read <= looked_for


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


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_file_has_private_names(path: Path) -> None:
    assert not private_names(ast.parse(path.read_text())), (
        "give it an alias and a reason in elixir_moe/torch_private.py"
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
