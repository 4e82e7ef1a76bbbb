"""Mutations of the library's order: what keeps streams, threads and memory apart is left out, one statement at a time.

Owns the mutations and how one is made in a running process; `mutation_table` tries them. They are made from the source,
so that no list has to be kept. In the files of `ROOMS`,

    left out      a statement that only calls one of `ORDERING` does nothing
    one more      a count that is changed by n is changed by n + 1 (in `COUNTED`); a bound of `BOUNDS` is larger by one
    earlier       what records how far a stream is (`RECORDING`) changes places with the statement before it
    elsewhere     memory is not allocated for the stream that frees it last (`ALLOCATING`)
    pageable      host memory is not page-locked (`LOCKING`)
"""

import ast
import copy
import importlib
import inspect
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from tests.support.rules import ROOT, place

ROOMS = ("runtime", "memory", "distributed/async_copy.py", "distributed/collectives.py", "distributed/waits.py")
ROOMS += ("optim", "state/checkpoint", "state/full.py", "accelerator.py", "moe/dispatch.py")
ROOMS += ("chunks/cache_policy.py", "chunks/step_machine.py")
"""Files and folders of the library."""
ORDERING = frozenset(
    [
        "wait",
        "wait_stream",
        "wait_event",
        "wait_for_event",
        "synchronize",
        "record",
        "record_stream",
        "mark",
        "marked",
        "join_compute",
        "keep_for_reducing",
        "finish_keeping",
        "end_keeping",
        "fetch_after_compute",
        "end_step",
        "enter_compute",
        "order_behind_reduction",
        "finish_shared_reads",
        "vacate",
        "make_writable",
        "make_room",
        "drain",
        "add_waiting",
        "result",
        "exception",
        "finish",
        "finish_update",
        "drop_update",
        "wait_for_update",
        "wait_for_reader",
        "open_for_writing",
        "begin_update",
        "begin_save",
        "finish_sum",
        "leave_sum",
        "wait_for_earlier_save",
        "end",
    ]
)
"""Methods that order streams, threads and the lives of memory."""
COUNTED = ("memory/blocks.py", "memory/host_sums.py", "runtime/gathers.py", "runtime/reductions.py")
COUNTED += ("chunks/cache_policy.py", "chunks/step_machine.py")
"""Files whose counts decide what waits or what is free."""
BOUNDS = frozenset(
    ["idle_uses", "_compute", "REDUCTIONS_IN_FLIGHT", "SUMS_IN_FLIGHT", "most", "for_gradients", "holds"]
)
"""Names in comparisons that guard memory."""
STATISTICS = frozenset(["_statistics", "counts"])
"""Counts that only people read."""
RECORDING = frozenset(["recorded_event", "record_event", "marked", "mark", "all_compute", "until_issued_ends"])
ALLOCATING = "allocating"
LOCKING = frozenset(["register_host_memory", "page_lock"])


@dataclass(frozen=True)
class Mutation:
    """A change of one statement."""

    path: Path
    line: int
    column: int
    kind: str
    function: str
    """The qualified name of the outermost function around it."""
    text: str

    def __str__(self) -> str:
        return f"{place(self.path, self.line)} {self.kind}: `{self.text}`"

    @property
    def module(self) -> str:
        """The name of the changed module."""
        return ".".join(self.path.relative_to(ROOT).with_suffix("").parts)

    def code(self) -> types.CodeType:
        """The changed module, compiled."""
        tree = _Mutator(self).visit(copy.deepcopy(_tree(self.path)))
        return compile(ast.fix_missing_locations(tree), str(self.path), "exec", dont_inherit=True)


def mutations() -> Iterator[Mutation]:
    """Every mutation, in the order of files and lines."""
    library = ROOT / "elixir_moe"
    for room in ROOMS:
        for path in sorted((library / room).rglob("*.py")) if (library / room).is_dir() else [library / room]:
            counted = str(path.relative_to(library)) in COUNTED
            for function, body in _functions(_tree(path)):
                found = {(*_start(node), kind): node for kind, node in _changes(body, counted=counted)}
                for (line, column, kind), node in sorted(found.items(), key=lambda item: item[0]):
                    yield Mutation(path, line, column, kind, function, ast.unparse(node).partition("\n")[0])


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _start(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _changes(function: ast.AST, *, counted: bool) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(function):
        if (isinstance(node, ast.Expr) and (_called(node.value) & ORDERING or _keeps_a_record(node))) or (
            isinstance(node, ast.Return) and isinstance(node.value, ast.Attribute) and node.value.attr == "synchronize"
        ):
            yield "left out", node
        elif counted and isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
            if not isinstance(node.target, ast.Name) and not _names(node.target) & STATISTICS:
                yield "one more", node
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Gt, ast.GtE, ast.LtE)):
            if _names(node) & BOUNDS:
                yield "one more", node
        elif isinstance(node, ast.withitem) and _called(node.context_expr) == {ALLOCATING}:
            yield "elsewhere", node.context_expr
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            yield "pageable", node.value
        elif isinstance(node, ast.Call) and _called(node) & LOCKING:
            yield "pageable", node
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            for before, statement in pairwise(statements) if _is_list(statements) else ():
                if _calls_in(statement) & RECORDING and _may_change_places(before, statement):
                    yield "earlier", statement


def _is_list(statements: Any) -> bool:
    return isinstance(statements, list)


def _called(node: ast.AST) -> set[str]:
    """The names of the function that an expression calls; of both if it chooses one."""
    if not isinstance(node, ast.Call):
        return set()
    functions = [node.func.body, node.func.orelse] if isinstance(node.func, ast.IfExp) else [node.func]
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in functions}


def _keeps_a_record(node: ast.Expr) -> bool:
    return _called(node.value) == {"append"} and bool(_calls_in(node) & RECORDING)


def _names(node: ast.AST) -> set[str]:
    """Variables and attributes in an expression."""
    return {
        n.attr if isinstance(n, ast.Attribute) else n.id
        for n in ast.walk(node)
        if hasattr(n, "ctx") and isinstance(n, (ast.Attribute, ast.Name))
    }


def _calls_in(statement: ast.stmt) -> set[str]:
    if not isinstance(statement, (ast.Expr, ast.Assign)):
        return set()
    return {name for node in ast.walk(statement) for name in _called(node)}


def _may_change_places(before: ast.stmt, statement: ast.stmt) -> bool:
    """Whether `before` does something, and neither needs a variable that the other sets."""
    if not isinstance(before, (ast.Expr, ast.With)) or isinstance(getattr(before, "value", None), ast.Constant):
        return False
    (set_before, got_before), (set_then, got_then) = _variables(before), _variables(statement)
    return not (set_before & (got_then | set_then) or set_then & got_before)


def _variables(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """(set, read)."""
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    written = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    return written, {node.id for node in names if isinstance(node.ctx, ast.Load)}


class _Mutator(ast.NodeTransformer):
    def __init__(self, mutation: Mutation) -> None:
        self._where, self._kind = (mutation.line, mutation.column), mutation.kind

    def _is(self, node: Any, kind: str, *types: type) -> bool:
        return self._kind == kind and isinstance(node, types) and _start(node) == self._where

    def visit(self, node: ast.AST) -> Any:
        if self._is(node, "left out", ast.Expr):
            return ast.copy_location(ast.Pass(), node)
        if self._is(node, "left out", ast.Return):
            return ast.copy_location(ast.Return(ast.parse("lambda: None", mode="eval").body), node)
        if self._is(node, "one more", ast.AugAssign):
            node.value = ast.copy_location(ast.BinOp(node.value, ast.Add(), ast.Constant(1)), node.value)
            return node
        if self._is(node, "one more", ast.Compare):
            node.comparators[0] = ast.BinOp(node.comparators[0], ast.Add(), ast.Constant(1))
            return node
        if self._is(node, "pageable", ast.Constant, ast.Call) and (
            isinstance(node, ast.Constant) or _called(node) & LOCKING
        ):
            return ast.copy_location(ast.Constant(None), node)
        if self._is(node, "elsewhere", ast.Call):
            return ast.copy_location(ast.parse("__import__('contextlib').nullcontext()", mode="eval").body, node)
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            for at in range(1, len(statements)) if _is_list(statements) else ():
                if self._is(statements[at], "earlier", ast.stmt):
                    statements[at - 1 : at + 1] = statements[at], statements[at - 1]
                    return node
        return self.generic_visit(node)


@contextmanager
def applied(mutation: Mutation | None) -> Iterator[None]:
    """While the context lasts, the function is the changed one for whoever calls it in this process."""
    if mutation is None:
        yield
        return
    function = _function(mutation)
    before = function.__code__
    function.__code__ = next(code for code in _codes(mutation.code()) if code.co_qualname == mutation.function)
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def marked() -> Iterator[None]:
    """While the context lasts, statements that a mutation would change say so first, with its number."""
    before = []
    for path, group in groupby(enumerate(mutations()), lambda one: one[1].path):
        found = [*group]
        numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for number, mutation in found:
            numbers[mutation.line, mutation.column].append(number)
        tree = _Marker(numbers).visit(copy.deepcopy(_tree(path)))
        code = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
        changed = {one.co_qualname: one for one in _codes(code)}
        for _, mutation in found:
            function = _function(mutation)
            before.append((function, function.__code__))
            function.__code__ = changed[mutation.function]
    try:
        yield
    finally:
        for function, code in reversed(before):
            function.__code__ = code


class _Marker(ast.NodeTransformer):
    def __init__(self, numbers: Mapping[tuple[int, int], list[int]]) -> None:
        self._numbers = numbers

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if _is_list(statements) and not isinstance(node, (ast.Module, ast.ClassDef)):
                statements[:] = [each for statement in statements for each in (*self._marks(statement), statement)]
        return node

    def _marks(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        starts = {_start(node) for node in _own(statement)} & self._numbers.keys()
        for number in sorted(number for start in starts for number in self._numbers[start]):
            text = f"__import__('tests.accelerator.changed', fromlist=['_']).reached({number})"
            mark = ast.parse(text).body[0]
            for node in ast.walk(mark):
                ast.copy_location(node, statement)
            yield mark


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and its expressions, without the statements within."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from (one for one in _own(child) if hasattr(one, "lineno"))


def _function(mutation: Mutation) -> types.FunctionType:
    found: Any = importlib.import_module(mutation.module)
    for part in mutation.function.split("."):
        found = inspect.getattr_static(found, part)
    while not isinstance(found, types.FunctionType) or hasattr(found, "__wrapped__"):
        found = getattr(found, "fget", None) or getattr(found, "__wrapped__", None) or found.__func__
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)
