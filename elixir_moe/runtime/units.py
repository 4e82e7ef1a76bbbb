"""The parts of a model that can unshard as one, the order in which a step uses them, and the units chosen from them.

Owns the walk over a model that finds its parts. Every rank must enter the units in the same order, since the order of
gathers follows from it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from elixir_moe.accelerator import fork_random_states
from elixir_moe.chunks.events import ENTER, LEAVE, READ, EventKind, ModuleInfo, StepEvent
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.step_machine import Unit
from elixir_moe.chunks.units import chosen_units, units_of
from elixir_moe.parallel.pattern import EXPERT_AXIS
from elixir_moe.parallel.regather import saves_no_weights
from elixir_moe.parallel.rules import pattern_of
from elixir_moe.runtime.param_access import ParamAccess


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a model, outermost first, and their description for `chunks.units`."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    parameters: tuple[tuple[nn.Parameter, ...], ...]
    """Each part's own parameters."""
    specs: tuple[ModuleInfo, ...]
    """Descriptions of the parts, with parameters numbered as ``model.parameters()`` gives them."""


def find_parts(model: nn.Module) -> Parts:
    """The modules that can be called and have parameters; a module without forward (`nn.ParameterList`) is its owner's.

    Two kinds of modules have no parts of their own. One is a compiled module, which does not run the hooks of its
    submodules. The other is a module that owns a list of experts: ranks may run different experts, and gathers must not
    depend on routing. A list is taken for experts if the owner has a router with an output for each of its modules, or
    if its modules are of one class and either the list is inside another list or all its parameters are sharded over
    experts.
    """
    index_of = {p: index for index, p in enumerate(model.parameters())}
    number_of: dict[nn.Module, int] = {}
    names: list[str] = []
    modules: list[nn.Module] = []
    specs: list[ModuleInfo] = []

    def visit(module: nn.Module, name: str, parent: int | None, in_list: bool, again: bool) -> None:
        if module in number_of:
            number = number_of[module]
            specs[number] = replace(specs[number], shared=True)
            return
        again = again or _is_checkpointed(module)
        whole = _is_compiled(module) or any(_may_choose(child, module, in_list) for child in module.children())
        if _is_callable(module) and any(True for _ in module.parameters()):
            own = module.parameters() if whole else _own_parameters(module)
            number_of[module] = len(specs)
            names.append(name)
            modules.append(module)
            params = tuple(dict.fromkeys(index_of[p] for p in own))
            traits = {"rank_dependent": whole, "saves_no_weights": saves_no_weights(module), "recomputed": again}
            specs.append(ModuleInfo(params=params, parent=parent, compiled=_is_compiled(module), **traits))
            parent = number_of[module]
        if not whole:
            for child_name, child in module.named_children():
                inner = in_list or isinstance(child, (nn.ModuleList, nn.ModuleDict))
                visit(child, f"{name}.{child_name}".lstrip("."), parent, inner, again)

    visit(model, "", None, False, False)
    everything = list(index_of)
    own = tuple(tuple(everything[i] for i in spec.params) for spec in specs)
    return Parts(tuple(names), tuple(modules), own, tuple(specs))


def callers_of_parts(parts: Parts) -> list[nn.Module]:
    """The parts that have others in them."""
    return [parts.modules[number] for number in {spec.parent for spec in parts.specs} if number is not None]


def build_units(parts: Parts, layout: Layout) -> dict[Unit, nn.Module]:
    """The units of a packed model, whose parameters `layout` numbers as `parts` does, and their modules."""
    units = units_of(chosen_units(parts.specs, layout), layout, lambda part: f"module {parts.names[part]!r}")
    return {unit: parts.modules[part] for part, unit in units.items()}


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of the module itself and of its children that cannot be called."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not _is_callable(child):
            yield from _own_parameters(child)


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or _is_compiled(module)  # whose forward is the instance's own


def _is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` or ``module.compile()`` was called."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def _is_checkpointed(module: nn.Module) -> bool:
    """Whether the module says that backward runs its forward again: a layer of transformers, or one in torch's wrapper.

    Other calls of ``checkpoint`` only a traced step shows.
    """
    classes = {cls.__name__ for cls in type(module).__mro__}
    by_transformers = "GradientCheckpointingLayer" in classes and getattr(module, "gradient_checkpointing", False)
    return "CheckpointWrapper" in classes or bool(by_transformers)


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
def traced_forward(
    model: nn.Module, parts: Parts, step: Callable[[nn.Module, Any], Any], sample: Any
) -> list[StepEvent]:
    """The events of ``step(model, sample)``, run once without gradients on the model before `wrap`.

    Random state and buffers are restored.
    """
    events: list[StepEvent] = []
    handles = []
    index_of = {p: index for index, p in enumerate(model.parameters())}

    def read(parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        events.append(StepEvent(READ, params=tuple(index_of[p] for p in parameters)))
        return nullcontext()

    def note(kind: EventKind, number: int, *_: object) -> None:
        events.append(StepEvent(kind, number))

    for number, module in enumerate(parts.modules):
        handles.append(module.register_forward_pre_hook(partial(note, ENTER, number)))
        handles.append(module.register_forward_hook(partial(note, LEAVE, number)))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    owned = zip(parts.modules, parts.parameters, strict=True)
    try:
        with fork_random_states(), reads_heard(owned, read):
            step(model, sample)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, before in buffers:
            buffer.copy_(before)
    return events


@contextmanager
def reads_heard(
    owned: Iterable[tuple[nn.Module, Sequence[nn.Parameter]]],
    read: Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]],
) -> Iterator[None]:
    """A context that calls `read` before each function that reads parameters outside their part.

    `owned` has the parts of a model that is not wrapped, each with its own parameters. `read` gets those that the
    wrapped model may have to gather for the function, and returns a context for it.
    """
    parts = list(owned)

    @contextmanager
    def unshard_for_call(parameters: list[nn.Parameter]) -> Iterator[None]:
        switches = access.switches(parameters)
        with read(parameters):
            access.open(switches)
            try:
                yield
            finally:
                access.close(switches)

    def lend(parameter: nn.Parameter) -> bool:
        with read([parameter]):
            return True

    def name_of(parameter: nn.Parameter) -> str:
        named = ((type(module), name, p) for module, _ in parts for name, p in module.named_parameters())
        return next(f"{kind.__name__}.{name}" for kind, name, p in named if p is parameter)

    access = ParamAccess(
        dict.fromkeys(p for _, parameters in parts for p in parameters),
        unshard_for_call=unshard_for_call,
        unshard_for_block=lambda parameters, write: unshard_for_call(parameters),
        lend=lend,
        keep_exactly=lambda *_: None,
        has_gradient=lambda _: False,
        name_of=name_of,
    )
    handles = []
    for module, parameters in parts:
        switches = access.switches(parameters)
        handles.append(module.register_forward_pre_hook(lambda *_, switches=switches: access.open(switches)))
        handles.append(
            module.register_forward_hook(lambda *_, switches=switches: access.close(switches), always_call=True)
        )
    try:
        with torch.compiler.set_stance("force_eager"):  # a compiled module would be compiled only for this run
            yield
    finally:
        for handle in handles:
            handle.remove()
        access.remove()


def registered_forward(parts: Parts) -> list[StepEvent]:
    """The events of a forward in which all parts run once, in order of registration."""
    children: dict[int | None, list[int]] = {}
    for number, part in enumerate(parts.specs):
        children.setdefault(part.parent, []).append(number)

    def visit(number: int) -> Iterator[StepEvent]:
        yield StepEvent(ENTER, number)
        for child in children.get(number, ()):
            yield from visit(child)
        yield StepEvent(LEAVE, number)

    return [event for number in children.get(None, ()) for event in visit(number)]
