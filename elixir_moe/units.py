"""Which modules unshard together: the units, and the order in which a step uses them.

Owns the walk over a model that finds them. Every rank enters the units in the same order, or there would be no telling
which gather comes next; that is the one thing to get right here.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elixir_moe.chunks.walk import Use, by_first_use
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
def traced_uses(model: nn.Module, step: Callable[[nn.Module, Any], Any], sample: Any) -> list[Use]:
    """The uses of all units in ``step(model, sample)``, run once without gradients on the model before `wrap`.

    Units are numbered as in `find_units`, parameters in order of first use. Random state and buffers are restored.
    """
    uses: list[tuple[int, int, int]] = []
    running: list[int] = []
    clock = itertools.count()
    handles = []
    units = _units_of(model)
    for number, unit in enumerate(units):

        def left(*_: object, number: int = number) -> None:
            uses.append((running.pop(), next(clock), number))

        handles.append(unit.module.register_forward_pre_hook(lambda *_: running.append(next(clock))))
        handles.append(unit.module.register_forward_hook(left))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
            step(model, sample)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return _numbered(units, uses)


def registered_uses(model: nn.Module) -> list[Use]:
    """The uses of all units if each ran once, in order of registration; numbered as by `traced_uses`."""
    units = _units_of(model)
    numbers = {id(unit.module): number for number, unit in enumerate(units)}
    uses: list[tuple[int, int, int]] = []
    clock = itertools.count()

    def visit(module: nn.Module) -> None:
        number = numbers.get(id(module))
        entered = -1 if number is None else next(clock)
        for child in module.children():
            visit(child)
        if number is not None:
            uses.append((entered, next(clock), number))

    visit(model)
    return _numbered(units, uses)


def order_of_first_use(model: nn.Module, uses: Sequence[Use]) -> list[nn.Parameter]:
    """The parameters in the order in which forward first enters their units; those it never enters come last."""
    units = _units_of(model)
    used = [units[use.unit] for use in sorted(uses, key=lambda use: use.entered)]
    return list(dict.fromkeys(parameter for unit in (*used, *units) for parameter in unit.parameters))


def _units_of(model: nn.Module) -> list[Unit]:
    """The units of a model whose parameters are in no chunk yet: each slot is (0, index of the parameter)."""
    return list(find_units(model, {p: (0, index) for index, p in enumerate(model.parameters())}))


def _numbered(units: Sequence[Unit], uses: Sequence[tuple[int, int, int]]) -> list[Use]:
    """The uses that (entered, left, number of the unit) tell of."""
    params = [tuple(index for _, index in unit.slots) for unit in units]
    found = [Use(entered=entered, left=left, unit=unit, params=params[unit]) for entered, left, unit in uses]
    return by_first_use(found, itertools.chain.from_iterable(params))[1]
