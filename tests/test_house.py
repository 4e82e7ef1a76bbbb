"""The walls of the house: what may import what, and where state may live."""

import ast
import copy
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import elixir_moe
from tests.support.fresh import Fresh
from tests.support.rules import ROOT, assert_none, place, tree_of

PACKAGE, TOOLS = ROOT / "elixir_moe", ROOT / "elixir_tools"
FILES = sorted([*PACKAGE.rglob("*.py"), *TOOLS.rglob("*.py")])
FUNCTIONS = type(elixir_moe).functions
"""Public functions that have the names of their files."""

STOREYS: list[set[str]] = [
    {"errors"},
    {"records", "names", "hf.peft"},
    {"torch_private", "native", "accelerator"},
    {"triton_kernels"},
    {"kernels"},
    {"distributed", "spans"},
    {"parallel"},
    {"moe"},
    {"hf.fused_experts"},
    {"quantized"},
    {"hf.import_quantized"},
    {"linear_cross_entropy"},
    {"hf.fused_loss"},
    {"chunks.param_spec", "chunks.residence", "chunks.plan_options"},
    {"chunks.packing"},
    {"chunks.cache_policy", "chunks.step_machine", "chunks.events"},
    {"chunks.calls", "chunks.units", "chunks.legs"},
    {"chunks.plan", "chunks.replay", "chunks.statistics"},
    {"chunks.ledger"},
    {"chunks.resolve"},
    {"memory"},
    {"runtime"},
    {"optim"},
    {"hf.shipped", "state.safetensors_format"},
    {"hf.pretrained"},
    {"state"},
    {"hf.save_pretrained"},
    {"planner"},
    {"wrapping", "page"},
    {"accumulate", "wrap", "inspect"},
    {"public"},
    {"__init__"},
    {"hf.routers"},
    {"hf.steps"},
    {"hf.accelerate", "hf.fabric", "hf.one_pass"},
    {"hf.trainer"},
    {"ext"},
    {"elixir_tools.settings", "elixir_tools.names", "elixir_tools.garbage"},
    {"elixir_tools.models"},
    {"elixir_tools.watch", "elixir_tools.report"},
    {"elixir_tools.verify", "elixir_tools.train"},
    {"elixir_tools.finetune"},
    {"elixir_tools.fit"},
    {"elixir_tools.cli"},
    {"__main__"},
]
"""From the ground up: a file imports what lies below it, or its neighbors in one room."""
FLOORS = ("chunks", "hf")
"""Rooms whose files are on storeys of their own."""
PURE = ["parallel.pattern"]
PURE += [f"chunks.{name}" for name in ("param_spec", "residence", "packing", "plan", "ledger", "resolve")]
PURE += [f"chunks.{name}" for name in ("cache_policy", "step_machine", "events", "calls", "units", "replay")]
PURE += [f"planner.{name}" for name in ("cost", "hardware", "profile", "solve")]
PURE += ["elixir_tools.fit.estimate"]
BUILDERS = {"dict", "list", "set", "deque", "Counter"}
"""Calls that make an object which can change."""
HEAVY = ["megatron", "matplotlib", "rich", "yaml", "safetensors", "transformers", "triton"]


WRITERS = {"chunk": None, "weights": "runtime.gathers", "gradients": "runtime.reductions"}
"""Who may set attributes of such an object: one file, or nobody."""
PARTS_OF_A_SHARD = ["memory.gate", "memory.values", "memory.gradient_sum"]


def name_of(path: Path) -> str:
    """``elixir_moe/chunks/plan.py`` -> ``chunks.plan``; a room's ``__init__`` is the room, tools have a prefix."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__" and parts != ("elixir_moe", "__init__"):
        parts = parts[:-1]
    return ".".join(parts[1:] if parts[0] == "elixir_moe" else parts)


def room_of(module: str) -> tuple[str, ...]:
    """``planner.solve`` -> (planner,), ``elixir_tools.cli.main`` -> (elixir_tools, cli)."""
    parts = tuple(module.split("."))
    return parts[:2] if parts[0] == "elixir_tools" else parts[:1]


def storey_of(module: str) -> int | None:
    """Which storey a module is on; None if it is on none."""
    found = [i for i, rooms in enumerate(STOREYS) for room in rooms if f"{module}.".startswith(f"{room}.")]
    return found[0] if found else None


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and modules of the two packages that a file imports, anywhere in it."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path, node.lineno)}: relative import"
            names = [node.module or ""]
            if (ROOT / (node.module or "").replace(".", "/")).is_dir():
                names = [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in FUNCTIONS]
                names += [node.module] * any(alias.name in FUNCTIONS for alias in node.names)
        else:
            continue
        for name in names:
            if name.split(".")[0] in (PACKAGE.name, TOOLS.name):
                there = ROOT / name.replace(".", "/")
                exists = there.is_dir() or there.with_suffix(".py").exists() or name == "elixir_moe._native"
                module = name if exists else name.rpartition(".")[0]
                yield node.lineno, module.removeprefix("elixir_moe").lstrip(".") or "__init__"


def upward_imports(path: Path) -> Iterator[str]:
    """The imports of a file that do not run downward, each with its place and the reason."""
    module = name_of(path)
    storey = storey_of(module)
    if path.name == "__init__.py" and module != "__init__":
        yield from (f"{place(path, line)}: a room's door holds nothing" for line, _ in imports_of(path))
        return
    if storey is None:
        yield f"{place(path, 1)}: {module} is on no storey: give it a place in STOREYS"
        return
    for line, imported in imports_of(path):
        if imported in ("_native", module):
            continue
        below = storey_of(imported)
        same_room = room_of(module) == room_of(imported) and room_of(module)[0] not in FLOORS
        if below is None:
            yield f"{place(path, line)}: {imported} is on no storey"
        elif below >= storey and not same_room:
            yield f"{place(path, line)}: {module} (storey {storey}) imports {imported} (storey {below})"


def test_imports_run_downward() -> None:
    assert_none(found for path in FILES for found in upward_imports(path))


def test_programs_use_the_public_names_the_errors_and_the_port() -> None:
    allowed = {"__init__", "errors", "ext"}
    assert_none(
        f"{place(path, line)}: imports {module} of the library"
        for path in FILES
        if path.is_relative_to(TOOLS)
        for line, module in imports_of(path)
        if room_of(module)[0] not in allowed | {"elixir_tools"}
    )


def test_the_port_has_no_code() -> None:
    """Only imports, and its version."""
    lines = (ast.Expr, ast.ImportFrom, ast.Assign)
    port = [path for path in FILES if path.is_relative_to(PACKAGE / "ext")]
    assert len(port) > 5
    assert_none(place(path, node.lineno) for path in port for node in tree_of(path).body if not isinstance(node, lines))


def test_no_imports_run_in_a_circle() -> None:
    """Files of one room may import each other, but never in a circle, late imports included."""
    needs = {name_of(path): {module for _, module in imports_of(path)} - {name_of(path)} for path in FILES}
    while done := {module for module, imported in needs.items() if not imported & needs.keys()}:
        needs = {module: imported for module, imported in needs.items() if module not in done}
    assert not needs, f"a circle is among {sorted(needs)}"


def names_imported(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and modules that a file imports, of any package."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


def path_of(module: str) -> Path:
    """The file of a module by the name that `name_of` gives."""
    return (ROOT if module.startswith("elixir_tools") else PACKAGE) / f"{module.replace('.', '/')}.py"


def test_pure_files_know_no_ranks_and_no_device() -> None:
    found = []
    for path in map(path_of, PURE):
        found += [
            f"{place(path, line)}: imports {name}"
            for line, name in names_imported(path)
            if name.startswith("torch.") and name != "torch.distributed.device_mesh"
        ]
        found += [
            f"{place(path, line)}: {word}"
            for line, text in enumerate(path.read_text().splitlines(), 1)
            for word in ("dist.", ".cuda")
            if word in text
        ]
    assert_none(found)


def test_one_file_asks_for_cuda() -> None:
    """The library and its programs ask for the accelerator, whatever its kind."""
    assert_none(
        place(path, line)
        for path in FILES
        if path != PACKAGE / "accelerator.py"
        for line, text in enumerate(path.read_text().splitlines(), 1)
        if "torch.cuda" in text or 'device("cuda' in text
    )


def test_a_file_says_what_it_owns() -> None:
    trees = ((path, tree_of(path)) for path in FILES)
    assert_none(place(path, 1) for path, tree in trees if tree.body and not ast.get_docstring(tree))


def shared_state(path: Path) -> Iterator[str]:
    """What could change in a module or a class while a program runs."""
    tree = tree_of(path)
    yield from (f"{place(path, node.lineno)}: global" for node in ast.walk(tree) if isinstance(node, ast.Global))
    mutable = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
    bodies = [(tree.body, "")]
    bodies += [(node.body, " instances") for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for body, sharers in bodies:
        for node in body:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)):
                continue
            value = node.value
            built = isinstance(value, ast.Call) and ast.unparse(value.func) in BUILDERS
            if not isinstance(value, mutable) and not built:
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                name = ast.unparse(target)
                constant = name.isupper() or (name.startswith("__") and name.endswith("__"))
                if not constant:
                    yield f"{place(path, node.lineno)}: {name} is shared by all{sharers}"


def test_no_state_in_modules() -> None:
    assert_none(found for path in FILES for found in shared_state(path))


def test_the_makefile_names_tests_that_exist() -> None:
    lines = enumerate((ROOT / "Makefile").read_text().splitlines(), 1)
    named = [(line, path) for line, text in lines for path in re.findall(r"tests/[\w/]+(?:\.py)?", text)]
    assert len(named) > 10
    assert_none(f"{place(ROOT / 'Makefile', line)}: {path}" for line, path in named if not (ROOT / path).exists())


def test_an_import_changes_nothing(fresh: Fresh) -> None:
    """Neither the environment nor the end of the process: a call of the library does."""
    code = """
import atexit, os, sys
import torch, torch._dynamo

before, register, said = dict(os.environ), atexit.register, []

def noted(function, *rest, **named):
    said.append(sys._getframe(1).f_code.co_filename)
    return register(function, *rest, **named)

atexit.register = noted
import elixir_moe.public
print(dict(os.environ) == before, [file for file in said if "elixir_moe" in file])
elixir_moe.init_mesh(device_type="cpu")
print(len([file for file in said if "elixir_moe" in file]))
"""
    done = fresh.run(code)
    assert done.stdout.splitlines() == ["True []", "2"], done.stdout + done.stderr  # exit codes; the world of one


def test_the_core_is_light_to_import(fresh: Fresh) -> None:
    code = f"import elixir_moe.public, sys; print([name for name in {HEAVY} if name in sys.modules])"
    done = fresh.run(code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("arguments", ["--help", "train --help", "plan --help", "verify --help", "plan --gpu"])
def test_help_and_mistakes_need_no_torch(arguments: str) -> None:
    code = f"""
import sys
from elixir_tools.cli.main import main

try:
    code = main({arguments.split()})
except SystemExit as end:
    code = end.code
print("|", code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    code_of = "0" if "--help" in arguments else "2"
    assert done.stdout.rpartition("|")[2].split() == [code_of, "False"], done.stdout + done.stderr


def test_public_names_come_at_their_first_use() -> None:
    code = """
import sys
import elixir_moe as em

assert "torch" not in sys.modules and not hasattr(em, "no_such_name")
import elixir_tools.models.gpt, elixir_tools.train.trainer  # which import the files of public functions
from elixir_moe import *
from elixir_moe import public

assert {*public.__all__} <= {*dir(em)}
assert [name for name in public.__all__ if not globals()[name] is getattr(em, name) is getattr(public, name)] == []
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


_FIRST = """
import {name}
import elixir_moe as em

assert em.kernels._native is not None, "{name} imports the kernels of torch without the library's"
assert all(type(f).__name__ == "function" for f in (em.wrap, em.inspect, em.linear_cross_entropy)), "{name}"
"""


@pytest.mark.parametrize("name", ["kernels", "quantized.formats", "hf.fabric"])
def test_a_file_may_be_imported_first(name: str, fresh: Fresh) -> None:
    done = fresh.run(_FIRST.format(name=f"elixir_moe.{name}"))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_any_file_may_be_imported_first(fresh: Fresh) -> None:
    files = [path for path in FILES if find_spec("triton") is not None or path.stem != "triton_kernels"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files if not path.stem.startswith("__")]
    done = {name: fresh.run(_FIRST.format(name=name)) for name in names}
    assert_none(f"{name}: {end.stderr}" for name, end in done.items() if end.returncode)


def test_a_public_function_is_not_replaced_by_the_file_of_its_name(fresh: Fresh) -> None:
    beside = {path.stem for path in PACKAGE.iterdir()}
    assert {name for name in elixir_moe.__all__ if name in beside} == type(elixir_moe).functions
    code = """
import elixir_moe.wrap, elixir_moe.inspect, elixir_moe.linear_cross_entropy
import elixir_moe as em

assert all(type(f).__name__ == "function" for f in (em.wrap, em.inspect, em.linear_cross_entropy))
"""
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr


def test_the_package_is_pickled_by_its_name() -> None:
    """Ray, Dask and submitit send functions with cloudpickle, and the modules that they name with them."""
    assert pickle.loads(pickle.dumps(elixir_moe)) is elixir_moe is copy.deepcopy(elixir_moe)


def test_a_name_that_was_set_before_the_first_use_is_kept(fresh: Fresh) -> None:
    code = """
import elixir_moe as em

em.wrap = print
assert em.Plan and em.wrap is print
"""
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_explained() -> None:
    assert len(set(elixir_moe.__all__)) == len(elixir_moe.__all__)
    for name in elixir_moe.__all__:
        public = getattr(elixir_moe, name)
        assert (public.__doc__ or "").strip(), f"{name} has no docstring"
        assert not public.__doc__.startswith(f"{name}("), f"{name} has only the docstring dataclass makes"
        for attribute, value in vars(public).items() if isinstance(public, type) else []:
            if not attribute.startswith("_") and (callable(value) or isinstance(value, (property, classmethod))):
                inner = getattr(value, "__func__", value)
                assert (inner.__doc__ or "").strip(), f"{name}.{attribute} has no docstring"


def test_a_chunk_is_written_by_nobody_and_its_weights_and_gradients_by_one_file_each() -> None:
    found = [
        f"{place(path, node.lineno)}: sets {target.value.id}.{target.attr}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for targets in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(targets)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        if target.value.id in WRITERS and WRITERS[target.value.id] != name_of(path)
    ]
    assert_none(found)


def test_nobody_reaches_through_a_shard() -> None:
    """Its parts are private: another room calls `ShardState`."""
    reaches, imports = [], []
    for path in FILES:
        if name_of(path).startswith("memory."):
            continue
        imports += [
            f"{place(path, line)}: imports {part}" for line, part in imports_of(path) if part in PARTS_OF_A_SHARD
        ]
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else ast.unparse(node.value)
                reaches += [f"{place(path, node.lineno)}: reads {owner}.{node.attr}"] * (owner == "shard")
    assert_none([*reaches, *imports])


def test_assertions_on_all_of_something_look_at_something() -> None:
    """`all(...)` holds for an empty list: tests use `every` and `same_tensors` of tests/support/every.py."""
    assert_none(
        place(path, call.lineno)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for statement in ast.walk(tree_of(path))
        if isinstance(statement, ast.Assert)
        for call in ast.walk(statement.test)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "all"
    )
