"""Which modules unshard together: the units, and the order in which a step uses them.

Owns the walk over a model that finds them. Every rank enters the units in the same order, or there would be no telling
which gather comes next; that is the one thing to get right here.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elixir_moe.chunks.walk import Use, by_first_use
from elixir_moe.guard import Guard
from elixir_moe.parallel.annotate import pattern_of
from elixir_moe.parallel.pattern import EXPERT_AXIS


@dataclass(slots=True, eq=False)
class Unit:
    """A module that unshards as one: every rank enters it, so every rank takes part in its gathers."""

    name: str
    module: nn.Module
    slots: list[tuple[int, int]]
    """(chunk, index in the chunk) of its parameters."""
    chunks: tuple[int, ...]
    parameters: tuple[nn.Parameter, ...] = ()
    is_cover: bool = False
    """It unshards with all units beneath it; see `find_covers`."""
    around: "tuple[Unit, ...]" = ()
    """The covers it is beneath."""
    label: str = field(init=False)
    """What messages call it."""

    def __post_init__(self) -> None:
        self.label = f"module {self.name!r}"


def find_units(model: nn.Module, slot_of: dict[nn.Parameter, tuple[int, int]]) -> Iterator[Unit]:
    """The modules that unshard as one, outermost first.

    Each module that owns parameters is a unit; what has no forward (`nn.ParameterList`) belongs to its owner. Two kinds
    are one unit with all that is beneath them. A module that owns a list of modules that are alike and inside another
    list, or beside a router with an output for each, or with all parameters sharded over experts: they are taken for
    experts, of which each rank may run others, and gathers must not depend on routing. And a compiled module, which
    does not run the hooks of its parts.
    """

    def walk(module: nn.Module, name: str, in_list: bool) -> Iterator[Unit]:
        whole = _is_compiled(module) or any(_may_choose(child, module, in_list) for child in module.children())
        own = dict.fromkeys(module.parameters() if whole else _own_parameters(module))
        parameters = tuple(p for p in own if p in slot_of)
        slots = [slot_of[p] for p in parameters]
        if slots:
            yield Unit(name, module, slots, tuple(sorted({chunk for chunk, _ in slots})), parameters)
        if not whole:
            for child_name, child in module.named_children():
                inner = in_list or isinstance(child, (nn.ModuleList, nn.ModuleDict))
                yield from walk(child, f"{name}.{child_name}".lstrip("."), inner)

    yield from walk(model, "", False)


def find_covers(model: nn.Module, units: Sequence[Unit], moves: Callable[[int], bool], longest: int) -> list[Unit]:
    """Modules that unshard as one with all units beneath them, which are told so, and then ask for nothing.

    They are those whose parameters lie in `longest` chunks at most, not counting chunks of which `moves` says that they
    always stay. With one, such a module holds while it runs what any part of it would. It needs a block more only where
    backward comes to another part of the model inside it.
    """
    units_of: dict[int, list[Unit]] = {}
    for unit in units:
        units_of.setdefault(id(unit.module), []).append(unit)
    covers: list[Unit] = []
    for name, module in model.named_modules():
        parts = [unit for m in module.modules() for unit in units_of.get(id(m), ())]
        pairs = dict.fromkeys(pair for unit in parts for pair in zip(unit.slots, unit.parameters, strict=True))
        slots, parameters = [slot for slot, _ in pairs], tuple(p for _, p in pairs)
        chunks = tuple(sorted({chunk for chunk, _ in slots}))
        beneath = any(unit.module is not module for unit in parts)
        if beneath and _is_callable(module) and sum(map(moves, chunks)) <= longest:
            covers.append(Unit(name, module, slots, chunks, parameters, is_cover=True))
    for cover in covers:
        units_of.setdefault(id(cover.module), []).append(cover)
    for cover in covers:
        for m in cover.module.modules():
            for unit in units_of.get(id(m), ()) if m is not cover.module else ():
                unit.around += (cover,)
    return covers


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Those of the module itself and of what it holds that cannot be called."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not _is_callable(child):
            yield from _own_parameters(child)


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _is_compiled(module: nn.Module) -> bool:
    """By ``torch.compile(module)`` or ``module.compile()``."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _may_choose(module: nn.Module, owner: nn.Module, in_list: bool) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or len(module) < 2:
        return False
    alike = len({type(child) for child in module.children()}) == 1
    patterns = [pattern_of(p) for p in module.parameters()]
    experts = bool(patterns) and all(p is not None and EXPERT_AXIS in dict(p.shard) for p in patterns)
    return (alike and (in_list or experts)) or _has_router(owner, len(module))


def _has_router(owner: nn.Module, choices: int) -> bool:
    """Whether a matrix of the module itself, or of a layer right beneath it, has one row for each choice."""
    layers = [
        child for child in owner.children() if not isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Embedding))
    ]
    matrices = (p for layer in (owner, *layers) for p in layer.parameters(recurse=False) if p.dim() == 2)
    return any(matrix.shape[0] == choices for matrix in matrices)


@torch.no_grad()
def traced_uses(
    model: nn.Module, step: Callable[[nn.Module, Any], Any], sample: Any
) -> tuple[Sequence[str], Sequence[Use]]:
    """The uses in ``step(model, sample)``, run once without gradients on the model before `wrap`.

    Returns the names of all parameters in order of first use, and the uses, whose parameters are indices into that
    order. Random state and buffers are restored.
    """
    uses: list[Use] = []
    running: list[int] = []
    clock = itertools.count()
    handles = []
    index_of = {p: index for index, p in enumerate(model.parameters())}
    units = list(find_units(model, {p: (0, index) for p, index in index_of.items()}))

    def entered(*_: object) -> None:
        running.append(next(clock))

    def read(parameters: Sequence[nn.Parameter]) -> None:
        params = tuple(index_of[p] for p in parameters)
        uses.append(Use(entered=next(clock), left=next(clock), params=params, is_read=True))

    for unit in units:

        def left(*_: object, params: tuple[int, ...] = tuple(index_of[p] for p in unit.parameters)) -> None:
            uses.append(Use(entered=running.pop(), left=next(clock), params=params))

        handles.append(unit.module.register_forward_pre_hook(entered))
        handles.append(unit.module.register_forward_hook(left))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices), reads_heard([(u.module, u.parameters) for u in units], read):
            step(model, sample)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return _in_order(model, uses)


@contextmanager
def reads_heard(
    units: Iterable[tuple[nn.Module, Sequence[nn.Parameter]]], read: Callable[[Sequence[nn.Parameter]], None]
) -> Iterator[None]:
    """Tells `read` of each function that reads parameters outside the forward of their unit, before it runs.

    Args:
        units: the module and the parameters of each, of a model that is not wrapped.
        read: is told the parameters that the wrapped model will have to gather for the function.
    """
    opened = list(units)

    @contextmanager
    def lend(parameters: list[nn.Parameter]) -> Iterator[None]:
        read(parameters)
        doors = guard.doors(parameters)
        guard.open(doors)
        try:
            yield
        finally:
            guard.close(doors)

    def assign(parameter: nn.Parameter, value: torch.Tensor) -> None:
        with lend([parameter]):
            parameter.data = value

    everything = dict.fromkeys(p for _, parameters in opened for p in parameters)
    guard = Guard(everything, lend=lend, gave=lambda *_: None, assign=assign, has_gradient=lambda _: False)
    handles = []
    for module, parameters in opened:
        doors = guard.doors(parameters)
        handles.append(module.register_forward_pre_hook(lambda *_, doors=doors: guard.open(doors)))
        handles.append(module.register_forward_hook(lambda *_, doors=doors: guard.close(doors), always_call=True))
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled module would be compiled for this run alone
            yield
    finally:
        for handle in handles:
            handle.remove()
        guard.remove()


def registered_uses(model: nn.Module) -> tuple[Sequence[str], Sequence[Use]]:
    """The uses if each unit ran once, in order of registration, and nothing were read outside; as `traced_uses`."""
    index_of = {p: index for index, p in enumerate(model.parameters())}
    units = find_units(model, {p: (0, index) for p, index in index_of.items()})
    params = {id(unit.module): tuple(index_of[p] for p in unit.parameters) for unit in units}
    uses: list[Use] = []
    clock = itertools.count()

    def visit(module: nn.Module) -> None:
        mine = params.get(id(module))
        entered = -1 if mine is None else next(clock)
        for child in module.children():
            visit(child)
        if mine is not None:
            uses.append(Use(entered=entered, left=next(clock), params=mine))

    visit(model)
    return _in_order(model, uses)


def _in_order(model: nn.Module, uses: Sequence[Use]) -> tuple[Sequence[str], Sequence[Use]]:
    """From uses of parameters as `model` lists them."""
    names = [name for name, _ in model.named_parameters()]
    order, numbered = by_first_use(uses, range(len(names)))
    return [names[index] for index in order], numbered
