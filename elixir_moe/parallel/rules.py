"""The patterns of parameters: rules by their names, as globs, and by the classes of their modules.

Owns the match of rules to parameters and the attribute that carries a pattern. Never decides about memory.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn

from elixir_moe.errors import LayoutError, UsageError
from elixir_moe.parallel.dtensor import is_dtensor, pattern_of_dtensor, tensor_parallel_degree
from elixir_moe.parallel.pattern import EXPERT_AXIS, Pattern, RankMesh
from elixir_moe.parallel.tiles import tile_of, whole_name, whole_shape

_ATTRIBUTE = "_elixir_pattern"
UNCUT = Pattern(RankMesh.world(1, 0), replicate=("dp",))
"""The pattern of tensors without one: the slice is the whole tensor."""


Rule = str | type[nn.Module]
"""A glob over names of parameters, or a class of modules."""


def annotate(model: nn.Module, rules: Mapping[str, Pattern] | Mapping[Rule, Pattern]) -> None:
    """Gives every parameter of `model` the pattern of the first rule that matches it, in the order of `rules`.

    A glob matches names: those of ``model.named_parameters()``, and for tiles (`tile`) those of the whole parameters.
    Globs are `fnmatch`'s, so ``*`` also matches dots. A class matches all parameters in modules of this class or of a
    subclass, and in the modules inside them. Neither kind of rule comes before the other.

    Raises:
        LayoutError: no rule matches a parameter; a rule matches nothing, or only parameters of earlier rules; the names
            of a tied parameter match rules with different patterns; a parameter lacks a sharded dim. The message lists
            all names concerned. Also if `model` is not an nn.Module, or `rules` is not a mapping of globs and
            classes to patterns.
        UsageError: the model is wrapped.
    """
    if not isinstance(model, nn.Module):
        raise LayoutError(f"annotate: model is a {type(model).__name__}, expected an nn.Module")
    if getattr(model, "_elixir", None) is not None:
        raise UsageError(
            "annotate() of a wrapped model, whose chunks follow its patterns: call em.annotate before em.wrap"
        )
    if not isinstance(rules, Mapping):
        raise LayoutError(
            f"annotate: rules is a {type(rules).__name__}, expected a mapping of globs to patterns, such as "
            "{'*': em.Pattern(mesh, replicate=('dp',))}"
        )
    by_rule: dict[Rule, Pattern] = {}
    for rule, pattern in rules.items():
        is_class = isinstance(rule, type) and issubclass(rule, nn.Module)
        if not (is_class or isinstance(rule, str)) or not isinstance(pattern, Pattern):
            raise LayoutError(
                f"annotate: rules maps {rule!r} to a {type(pattern).__name__}, expected a glob (str) or a subclass of "
                "nn.Module, and its em.Pattern"
            )
        by_rule[rule] = pattern
    won: dict[Rule, int] = dict.fromkeys(by_rule, 0)
    matched: dict[Rule, int] = dict.fromkeys(by_rule, 0)
    chosen: dict[nn.Parameter, tuple[str, Pattern]] = {}
    problems: list[str] = []
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = whole_name(path, parameter)
        matching = [rule for rule in by_rule if _matches(rule, name, _around(model, path))]
        for rule in matching:
            matched[rule] += 1
        if not matching:
            problems.append(
                f"parameter {name!r} {tuple(parameter.shape)} is matched by no rule: add one, or a last rule '*'"
            )
            continue
        pattern = by_rule[matching[0]]
        won[matching[0]] += 1
        first_name, first_pattern = chosen.setdefault(parameter, (name, pattern))
        if first_pattern != pattern:
            problems.append(
                f"parameter {name!r} is tied to {first_name!r}, which has another pattern "
                f"({first_pattern}, not {pattern}): one tensor has one pattern"
            )
        try:
            pattern.check_shape(parameter.shape)
        except LayoutError as error:
            problems.append(f"parameter {name!r}: {error}")
    for rule in by_rule:
        shown, kind = (repr(rule), "glob") if isinstance(rule, str) else (rule.__qualname__, "class")
        if not matched[rule]:
            problems.append(f"rule {shown} matches no parameter: correct the {kind} or remove the rule")
        elif not won[rule]:
            problems.append(
                f"rule {shown} never applies: earlier rules match all its parameters; put the narrower rule first"
            )
    if problems:
        raise LayoutError("annotate: " + "\n  ".join(problems))
    for parameter, (_, pattern) in chosen.items():
        attach(parameter, pattern)


def _matches(rule: Rule, name: str, around: Iterable[nn.Module]) -> bool:
    """Whether a rule matches the parameter called `name` in the modules `around` it."""
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    return any(isinstance(module, rule) for module in around)


def _around(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yields the modules that contain the parameter at `path`, the model first."""
    yield model
    for child in path.split(".")[:-1]:
        model = model.get_submodule(child)
        yield model


def attach(parameter: torch.Tensor, pattern: Pattern) -> None:
    """Sets the pattern of `parameter`."""
    setattr(parameter, _ATTRIBUTE, pattern)


def annotate_dtensors(model: nn.Module) -> None:
    """Gives DTensors without a pattern that of their placements. Raises LayoutError if no pattern can express one."""
    tp = tensor_parallel_degree(model.parameters())
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter) and pattern_of(parameter) is None:
            attach(parameter, pattern_of_dtensor(name, parameter, tp))


def pattern_of(parameter: torch.Tensor, default: Pattern | None = None) -> Pattern | None:
    """Returns the pattern that `annotate` gave this parameter, or `default`."""
    return getattr(parameter, _ATTRIBUTE, default)


def ranks_of_a_batch(model: nn.Module) -> int:
    """Returns how many ranks need the same rows, because weights are sharded over them or gradients summed (`partial`).

    Patterns on expert meshes are ignored: ranks along their axes may have different rows.
    """
    found = 1
    for parameter in model.parameters():
        pattern = pattern_of(parameter)
        if pattern is not None and EXPERT_AXIS not in pattern.mesh.axes:
            axes = (*(axis for axis, _ in pattern.shard), *pattern.partial)
            found = max(found, math.prod(pattern.mesh.size(axis) for axis in axes))
    return found


def names_of(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Returns all names of each parameter, then of each buffer, in the model's order; a tied one has several."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(tensor, []).append(name)
    return names


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields all parameters and buffers, under each of their names; tiles under those of the whole parameter."""
    yield from _named_parameters(model)
    yield from model.named_buffers(remove_duplicate=False)


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield whole_name(name, parameter), parameter


def logical_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of the logical tensor of which this rank has a part; for a DTensor its own shape."""
    pattern = UNCUT if is_dtensor(tensor) else pattern_of(tensor) or UNCUT
    return pattern.global_shape(whole_shape(tensor))


def logical_numel(tensor: torch.Tensor) -> int:
    """Returns the elements of the logical tensor; for a tile, its share of them."""
    tile, numel = tile_of(tensor), math.prod(logical_shape(tensor))
    return numel if tile is None else numel * (tile.stop - tile.start) // tile.rows


def logical_box(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Returns the part of the logical tensor that this rank's tensor covers, for a pattern without a view."""
    offset, tile = (pattern_of(tensor) or UNCUT).local_offset(whole_shape(tensor)), tile_of(tensor)
    first = (tile.start if tile is not None else 0, *(0,) * (tensor.dim() - 1))
    return tuple(slice(o + f, o + f + n) for o, f, n in zip(offset, first, tensor.shape, strict=False))


def replicated_everywhere() -> Pattern:
    """Returns the default pattern: equal on every rank of the world."""
    return Pattern(RankMesh.world(dist.get_world_size(), dist.get_rank()), replicate=("dp",))
