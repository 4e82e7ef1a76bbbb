"""Which waits, events and records of the library a run on the accelerator of threads notices when they are left out.

Mutations are made from the source: each statement of `ROOMS` that only calls a method of `ORDERING` is left out, and
each count that is changed by one in `COUNTED` is changed by two. A run with a mutation trains, saves and loads with
late streams, and is compared with plain torch. Run as a program, it writes a table; ``--list`` only shows the
mutations.
"""

import argparse
import ast
import importlib
import inspect
import signal
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.accelerator.build import build
from tests.accelerator.device import BACKENDS, NAME, delayed, start
from tests.accelerator.test_training import trains_on_two_streams
from tests.support import gpu_cases
from tests.support.ranks import RankError, RankPool
from tests.support.rules import ROOT, place

ROOMS = (
    "runtime",
    "memory",
    "distributed/async_copy.py",
    "distributed/collectives.py",
    "optim",
    "state/checkpoint/save.py",
)
"""Files and folders of the library."""
ORDERING = {
    *(
        "wait",
        "wait_stream",
        "wait_event",
        "wait_for_event",
        "synchronize",
        "record",
        "record_stream",
        "mark",
        "marked",
    ),
    *("join_compute", "keep_for_reducing", "finish_keeping", "end_keeping", "fetch_after_compute", "end_step"),
    *("enter_compute", "wait_for_update", "finish", "result"),
}
"""Methods that order streams, threads and the lives of memory."""
COUNTED = ("memory/blocks.py", "runtime/gathers.py", "runtime/reductions.py")
LATE = {"compute": (1500, 0), "others": (0, 4000), "random": (1000, 1000)}
SECONDS = 100
"""The longest that a run may take before it counts as hanging."""
BF16, FP32 = torch.bfloat16, torch.float32
ALONE = [("dense", "offload", BF16, "compute"), ("mixture", "offload, some on disk", FP32, "others")]
ALONE += [("adapted", "offload, values on disk", BF16, "random")]
ALONE += [("dense", "zero3, inputs on the host", FP32, late) for late in ("compute", "others")]
TOGETHER = [("mixture", "zero3", FP32, "compute"), ("mixture", "offload", BF16, "others")]


@dataclass(frozen=True)
class Mutation:
    """A statement that is left out or changed."""

    path: Path
    line: int
    column: int
    function: str
    """The qualified name of the outermost function around it."""
    text: str

    def __str__(self) -> str:
        return f"{place(self.path, self.line)} `{self.text}`"


def mutations() -> Iterator[Mutation]:
    """Every mutation, in the order of files and lines."""
    library = ROOT / "elixir_moe"
    for room in ROOMS:
        for path in sorted((library / room).rglob("*.py")) if (library / room).is_dir() else [library / room]:
            tree = ast.parse(path.read_text())
            counts = str(path.relative_to(library)) in COUNTED
            for function, node in _functions(tree):
                for statement in ast.walk(node):
                    if _orders(statement) or (counts and _counts(statement)):
                        text = ast.unparse(statement).partition("\n")[0]
                        yield Mutation(path, statement.lineno, statement.col_offset, function, text)


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _orders(node: ast.AST) -> bool:
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    called = node.value.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in ORDERING


def _counts(node: ast.AST) -> bool:
    by_one = isinstance(node, ast.AugAssign) and isinstance(node.value, ast.Constant) and node.value.value == 1
    return by_one and "_statistics" not in ast.unparse(node)


class _Mutator(ast.NodeTransformer):
    def __init__(self, mutation: Mutation) -> None:
        self.where = (mutation.line, mutation.column)

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and (node.lineno, node.col_offset) == self.where:
            if isinstance(node, ast.AugAssign):
                node.value = ast.copy_location(ast.Constant(2), node.value)
                return node
            if isinstance(node, ast.Expr):
                return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


def apply(mutation: Mutation) -> None:
    """Changes the function in this process, for whoever has imported it."""
    tree = _Mutator(mutation).visit(ast.parse(mutation.path.read_text()))
    module = compile(tree, str(mutation.path), "exec", dont_inherit=True)
    code = next(code for code in _codes(module) if code.co_qualname == mutation.function)
    name = ".".join(mutation.path.relative_to(ROOT).with_suffix("").parts)
    found: Any = importlib.import_module(name)
    for part in mutation.function.split("."):
        found = inspect.getattr_static(found, part)
    while not isinstance(found, types.FunctionType) or hasattr(found, "__wrapped__"):
        found = getattr(found, "fget", None) or getattr(found, "__wrapped__", None) or found.__func__
    found.__code__ = code


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def trains(mutation: Mutation | None, cases: list[Any], alone: bool) -> None:
    """(rank) Trains with the mutation; `alone`, also on two streams, and saves and loads."""
    signal.alarm(SECONDS)
    if mutation is not None:
        apply(mutation)
    for model, plan, dtype, late in cases:
        with delayed(*LATE[late]):
            loops = [(2, "non_reentrant")]
            gpu_cases.trains_as_plain_torch(model, plan, dtype, NAME, oracle="cpu", loops=loops)
    if alone:
        with delayed(*LATE["random"]):
            trains_on_two_streams("offload")
        with delayed(*LATE["random"]), tempfile.TemporaryDirectory() as folder:
            gpu_cases.saves_and_loads("offload, some on the device", "zero3", NAME, str(Path(folder) / "saved"))
    signal.alarm(0)


def noticed(mutation: Mutation | None) -> str:
    """How a run with the mutation fails; empty if it does not."""
    for world, cases in ((1, ALONE), (2, TOGETHER)):
        pool = RankPool(world, backend=BACKENDS, prepare=start)
        try:
            pool.run(trains, mutation, cases, world == 1)
        except RankError as error:
            kind = next(iter(error.types.values()))
            last = str(error).strip().splitlines()[-1]
            return f"{world} rank(s): {kind}: {last[:90]}"
        finally:
            pool.close()
    return ""


def main() -> int:
    """Writes a table of the mutations whose place contains one of the arguments, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="text in the place of a mutation, as in streams.py:87")
    parser.add_argument("--list", action="store_true", help="show the mutations and run none")
    arguments = parser.parse_args()
    chosen = [m for m in mutations() if not arguments.only or any(text in str(m) for text in arguments.only)]
    write = partial(print, flush=True)
    if arguments.list:
        write(*chosen, sep="\n")
        return 0
    build()
    if (failed := noticed(None)) != "":
        sys.exit(f"without a mutation: {failed}")
    write("| mutation | noticed |\n|---|---|")
    for mutation in chosen:
        write(f"| {mutation} | {noticed(mutation) or 'no'} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
