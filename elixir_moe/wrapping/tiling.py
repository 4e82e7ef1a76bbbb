"""`tile`: a module with a large parameter becomes several that hold some rows of it each.

Owns the tiled modules and the choice of rows. Knows nothing of chunks: a tile is a parameter like any other, so it is
packed, gathered, reduced and updated on its own, and no more than a few tiles are ever gathered. `parallel.tiles` has
their names, which in state dicts and checkpoints are those of the whole parameters.
Source: ZeRO-Infinity, 5.1.3 (memory-centric tiling).

    Linear     each tile gives some of the outputs
    Embedding  each tile looks up the indices that are among its rows
    experts    each tile is some of the experts, and runs the rows routed to them
"""

import math
from collections.abc import Iterator, Mapping, Set
from copy import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from elixir_moe.chunks.plan import size_bytes
from elixir_moe.errors import ConfigError, UsageError
from elixir_moe.hf.fused_experts import (
    Adapters,
    FusedExperts,
    FusedTile,
    UnmergedAdapters,
    adapted_parameter,
    become_fused,
    is_fused_experts,
    is_spread,
    run_adapters_unmerged,
)
from elixir_moe.hf.peft import reads_weight
from elixir_moe.kernels import CODE_BLOCK
from elixir_moe.moe.experts import GroupedExperts, Groups
from elixir_moe.optim.joined import trained_whole
from elixir_moe.parallel.dtensor import is_dtensor
from elixir_moe.parallel.regather import RegatherLinear, mark_saves_no_weights
from elixir_moe.parallel.rules import UNCUT, pattern_of
from elixir_moe.parallel.te_fastpath import call_linear_layers
from elixir_moe.parallel.tiles import Tile, child_name, mark, tile_of
from elixir_moe.quantized.decoders import FP8_BLOCK

_TILES_IN_ROOM = 16
"""Tiles that fit in device memory together: a few are gathered, and activations take the rest."""


def tile_for(model: nn.Module, nbytes: int, itemsize: int) -> None:
    """Tiles of at most `nbytes` in the dtype of a step, whose elements have `itemsize` bytes; `tile` has the rest."""
    tile(model, at_most=nbytes * max(p.itemsize for p in model.parameters()) // itemsize)


def tile(model: nn.Module, *, at_most: int | str) -> nn.Module:
    """Cuts every parameter of more than `at_most` bytes into tiles along dim 0, in place; returns the model.

    To be called before the optimizer is built and before `wrap`. Linear and Embedding layers, the library's experts and
    Hugging Face's fused experts can be tiled. The result differs from the whole layer's by the order of sums at most. A
    module that has been tiled has no ``weight``. Names and shapes in `full_state_dict`, `save` and `save_pretrained`
    stay those of the whole parameters. Hooks of a tiled module run as before, with the tiled module for the whole one.

    Backward gathers a tile's weight again, so a checkpointed region too holds a few tiles at a time. No tile cuts a
    block where a tile may have so many rows: tiles of frozen Linear layers begin at multiples of 128 rows, as quantized
    blocks do, and those of trainable parameters at multiples of 256 elements, as blocks of int8 moments do.

    Args:
        model: a model that is not wrapped; parameters may be on meta.
        at_most: bytes of the largest parameter, in its present dtype, or a string such as "2 GiB".

    Raises:
        ConfigError: one row is larger than `at_most`; a large parameter belongs to another kind of module, or is
            shared by modules that cannot have the same tiles; something expects the whole module or parameter (a hook
            of a parameter or of state dicts, a buffer, a module inside, a forward of the instance, a gradient);
            `at_most` is less than 1 byte.
        PlanError: `at_most` is not a size.
        UsageError: the model is wrapped.
    """
    if getattr(model, "_elixir", None) is not None:
        raise UsageError(
            "tile() of a wrapped model: call em.tile(model) before em.wrap, and build the optimizer after it"
        )
    most = size_bytes("at_most", at_most)
    if most is None or most < 1:
        raise ConfigError(f"at_most={at_most!r}: expected a size of at least 1 byte")
    _tile(model, most)
    return model


def _tile(
    model: nn.Module, most: int, whole: Set[nn.Parameter] = frozenset()
) -> dict[nn.Parameter, list[nn.Parameter]]:
    """Does the work of `tile`, but for modules with a parameter in `whole`; returns the tiles of each parameter that
    has some."""
    run_adapters_unmerged(model)
    bounds = _bounds(model, most, whole)
    for module in filter(is_fused_experts, bounds):
        become_fused(module)
    tiles: dict[tuple[nn.Parameter, int], nn.Parameter] = {}
    tiled = {module: _tiled(module, cuts, tiles) for module, cuts in bounds.items()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in tiled:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, tiled[module])
    call_linear_layers(model, lambda module: isinstance(module, TiledLinear))
    made: dict[nn.Parameter, list[nn.Parameter]] = {}
    for (parameter, _), part in tiles.items():
        made.setdefault(parameter, []).append(part)
    return made


def tile_to_fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, room: int, compute_dtype: torch.dtype | None
) -> None:
    """Tiles the model if a single parameter and its gradient would need more than `room` bytes of a device.

    The tiles take their parameters' places in the optimizer. What cannot be tiled stays as it is, and so do matrices
    that are updated as a whole.
    """
    whole = {parameter for parameter in trained_whole(optimizer) if parameter.dim() == 2}

    def needs(parameter: nn.Parameter) -> int:
        narrow = compute_dtype is not None and parameter.is_floating_point()
        itemsize = compute_dtype.itemsize if narrow and compute_dtype is not None else parameter.itemsize
        return parameter.numel() * itemsize * (1 + parameter.requires_grad)

    if max((needs(parameter) for parameter in model.parameters() if parameter not in whole), default=0) <= room:
        return
    try:
        made = _tile(model, room // _TILES_IN_ROOM, whole)
    except ConfigError:  # the search refuses the whole parameter, and says how many bytes are missing
        return
    names = {p: name for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        if "param_names" in group:
            named = zip(group["params"], group["param_names"], strict=True)
            group["param_names"] = [
                tiled for p, own in named for tiled in ([names[part] for part in made[p]] if p in made else [own])
            ]
        group["params"] = [tile for p in group["params"] for tile in made.get(p, [p])]


class TiledLinear(nn.Module):
    """(..., in) -> (..., out): the outputs of its tiles side by side."""

    def __init__(self, whole: nn.Linear, tiles: list[nn.Module], bounds: list[int]) -> None:
        super().__init__()
        self.in_features, self.out_features = whole.in_features, whole.out_features
        _add(self, tiles)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return torch.cat([part(x) for part in self.children()], -1)


class TiledEmbedding(nn.Module):
    """Indices (...) -> (..., d): each row from the tile that has it."""

    def __init__(self, whole: nn.Embedding, tiles: list[nn.Module], bounds: list[int]) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self._bounds = bounds
        _add(self, tiles)

    def forward(self, indices: Tensor) -> Tensor:
        """(...) -> (..., d)."""
        found = None
        for part, (start, stop) in zip(self.children(), pairwise(self._bounds), strict=True):
            # A row of this tile for the others' indices too. Those before the first row or behind the last belong to
            # nobody: the first and the last tile look them up, and fail as the whole embedding does.
            lowest = 0 if start else None
            highest = stop - start - 1 if stop < self.num_embeddings else None
            rows = part((indices - start).clamp(lowest, highest))
            found = rows if found is None else torch.where((indices >= start).unsqueeze(-1), rows, found)
        assert found is not None
        return found


class TiledExperts(nn.Module):
    """The library's experts: (n, d) rows, sorted by expert -> (n, d)."""

    def __init__(self, whole: GroupedExperts, tiles: list[nn.Module], bounds: list[int]) -> None:
        super().__init__()
        self.first_expert, self._bounds = whole.first_expert, bounds
        _add(self, tiles)

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """(n, d) rows -> (n, d). The host waits for the number of rows of each expert."""
        shares = zip(self.children(), _shares(groups, self._bounds), strict=True)
        return torch.cat([part(rows[mine], here) for part, (mine, here) in shares])


class TiledFusedExperts(FusedExperts):
    """Fused experts of Hugging Face: tokens (T, d), experts (T, k), weights (T, k) -> (T, d)."""

    def __init__(self, whole: FusedExperts, tiles: list[nn.Module], bounds: list[int]) -> None:
        super().__init__()
        self.num_experts, self._bounds = bounds[-1], bounds
        if is_spread(whole):
            self.ranks = whole.ranks
        _add(self, tiles)

    def of_rows(self, rows: Tensor, groups: Groups, adapters: Adapters) -> Tensor:
        """(n, d) rows -> (n, d). The host waits for the number of rows of each expert."""
        outputs = []
        shares = zip(self.children(), pairwise(self._bounds), _shares(groups, self._bounds), strict=True)
        for part, bounds, (mine, here) in shares:
            own = {name: [adapter.of(*bounds) for adapter in those] for name, those in adapters.items()}
            outputs.append(part(rows[mine], here, own))
        return torch.cat(outputs)


class TiledFusedTile(TiledFusedExperts, FusedTile):
    """A tile in tiles."""

    forward = FusedTile.forward


def _shares(groups: Groups, bounds: list[int]) -> Iterator[tuple[slice, Groups]]:
    """The rows of each tile and, counted from its first expert, their groups."""
    counts, begin = groups.on_host(), 0
    for start, stop in pairwise(bounds):
        mine = counts[start:stop]
        end = begin + sum(mine)
        experts, ends = groups.experts[begin:end] - start, groups.bounds[start : stop + 1] - begin
        yield slice(begin, end), Groups(experts=experts, bounds=ends, counts=mine)
        begin = end


def _add(tiled: nn.Module, tiles: list[nn.Module]) -> None:
    """Registers the tiles by name: a `ModuleList` would be taken for experts of which each rank runs others."""
    for index, part in enumerate(tiles):
        tiled.add_module(child_name(index), part)


def _tiled(module: nn.Module, bounds: list[int], made: dict[tuple[nn.Parameter, int], nn.Parameter]) -> nn.Module:
    """The module as tiles; `made` has the parameters of tiles that other modules share."""
    tiles = [_part(module, start, stop, bounds[-1], made) for start, stop in pairwise(bounds)]
    kind = next(tiled for whole, tiled in _KINDS.items() if isinstance(module, whole))
    made_of_them: nn.Module = kind(module, tiles, bounds)
    vars(made_of_them).update({hooks: getattr(module, hooks) for hooks in _HOOKS})
    return made_of_them


_KINDS: Mapping[type[nn.Module], Any] = {
    RegatherLinear: TiledLinear,
    nn.Linear: TiledLinear,
    nn.Embedding: TiledEmbedding,
    GroupedExperts: TiledExperts,
    FusedTile: TiledFusedTile,
    FusedExperts: TiledFusedExperts,
}


def _bounds(model: nn.Module, most: int, whole: Set[nn.Parameter]) -> dict[nn.Module, list[int]]:
    """{module: the rows at which its tiles begin, and their number}, for modules without a parameter in `whole`.

    Raises ConfigError with all problems.
    """
    names = {p: name for name, p in model.named_parameters()}
    users: dict[nn.Parameter, dict[str, nn.Module]] = {}
    found: dict[nn.Module, list[int]] = {}
    problems: list[str] = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        for p in own:
            users.setdefault(p, {})[name] = module
        large = max(own, key=lambda p: p.nbytes, default=None)
        if large is None or large.nbytes <= most or not whole.isdisjoint(own):
            continue
        if (problem := _refusal(model, name, module)) is not None:
            problems.append(problem)
            continue
        rows, row_bytes = len(large), large.nbytes // len(large)
        if row_bytes > most:
            problems.append(
                f"a row of parameter {names[large]!r} {tuple(large.shape)} has {row_bytes} bytes: expected at_most of "
                f"at least that, got {most}"
            )
            continue
        found[module] = _cuts(rows, most // row_bytes, large)
    for p, those in users.items():
        cuts = [found.get(module) for module in those.values()]
        if any(cut != cuts[0] for cut in cuts):
            shared = ", ".join(map(repr, those))
            problems.append(f"parameter {names[p]!r} is shared by modules that cannot have the same tiles: {shared}")
    if problems:
        raise ConfigError("tile: " + "\n  ".join(problems))
    return found


def _cuts(rows: int, most: int, weight: nn.Parameter) -> list[int]:
    """The rows at which tiles of at most `most` rows begin, and their number.

    Where a tile can hold one, a cut is between blocks: those of a frozen weight that may become bytes, and those of a
    trainable one whose moments may become codes.
    """
    if weight.requires_grad:
        block = CODE_BLOCK // math.gcd(CODE_BLOCK, weight[0].numel())
    else:
        block = FP8_BLOCK if weight.dim() == 2 else 1
    block = block if most >= block else 1
    blocks = math.ceil(rows / block)
    count = math.ceil(blocks / (most // block))
    return [min(blocks * index // count * block, rows) for index in range(count + 1)]


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_is_full_backward_hook", "_backward_pre_hooks"),
)
"""Attributes of a module that go to the tiled one, where hooks run once, with the whole input, output and gradient."""
_HOOKS_OF_STATES = (
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_STATES = ("state_dict", "_save_to_state_dict", "_load_from_state_dict", "get_extra_state", "set_extra_state")


def _refusal(model: nn.Module, name: str, module: nn.Module) -> str | None:
    """Why the module cannot be tiled; None if it can."""
    parameters = list(module.parameters(recurse=False))
    kind = type(module)
    if name == "":
        return f"the model itself ({kind.__name__}) owns a parameter that is too large: put it into a module of its own"
    if any(getattr(module, hooks) for hooks in _HOOKS_OF_STATES):
        return (
            f"module {name!r} has hooks of state dicts, which expect the whole parameters: tile the model before them"
        )
    if changed := [own for own in _STATES if getattr(kind, own) is not getattr(nn.Module, own)]:
        return f"module {name!r} is a {kind.__name__} with a {changed[0]} of its own, which expects the whole module"
    if module._is_full_backward_hook is False:
        return f"module {name!r} has hooks of register_backward_hook: use register_full_backward_hook"
    if kept := [attribute for attribute, value in vars(module).items() if isinstance(value, Tensor)]:
        return f"module {name!r} keeps a tensor, {kept[0]!r}, which belongs to the whole module"
    name_above = name.rpartition(".")[0]
    above = model.get_submodule(name_above)
    if (reading := reads_weight(above, or_bias=True)) is not None:
        return f"module {name!r} has {reading}, which read the whole of it: take LoRA, or a larger at_most"
    *path, inner, _ = ("", "", *name.split("."))
    if inner.startswith("lora_") and isinstance(model.get_submodule(".".join(path).strip(".")), UnmergedAdapters):
        needed = max(p.nbytes for p in parameters)
        return f"module {name!r} is a factor of adapters, which peft reads whole: expected at_most of {needed} or more"
    while (
        adapted := adapted_parameter(above)
    ) is not None:  # wrappers of one module's parameters lie around each other
        if not isinstance(above, UnmergedAdapters):
            whose = f"parameter {adapted!r} of module {name!r} has adapters"
            return f"{whose}, which peft adds to the whole of it: tile the model without target_parameters there"
        name_above = name_above.rpartition(".")[0]
        above = model.get_submodule(name_above)
    if "forward" in vars(module):
        return f"module {name!r} has a forward of its own, which runs the whole module: set it after em.tile"
    for own, p in module.named_parameters(prefix=name, recurse=False):
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            return f"parameter {own!r} has hooks, which expect the whole gradient: register them on its tiles"
        if p.grad is not None:
            return f"parameter {own!r} has a gradient, which its tiles would lose: set it to None"
    if module._buffers:
        return f"module {name!r} has buffers ({', '.join(module._buffers)}), which belong to the whole module"
    if any(is_dtensor(p) or (pattern_of(p) or UNCUT).view is not None for p in parameters):
        return f"module {name!r} has DTensors or patterns with a view: tile the model before it is cut"
    if is_fused_experts(module):
        return _refusal_of_experts(name, module)
    whole = next((base for base in _KINDS if isinstance(module, base)), None)
    if whole is not None and kind.forward is not whole.forward:
        return f"module {name!r} is a {kind.__name__}, which changes the forward of {whole.__name__}"
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse or module.scale_grad_by_freq):
        return f"module {name!r} has max_norm, sparse or scale_grad_by_freq, which need the whole weight"
    if whole is not None and module._modules:
        inside = ", ".join(module._modules)
        return (
            f"module {name!r} has modules inside ({inside}), which {whole.__name__} has not: tile the model before them"
        )
    if whole is not None:
        return None
    return (
        f"module {name!r} is a {kind.__name__}: expected Linear, Embedding, elixir_moe's experts or fused experts of "
        f"transformers"
    )


def _refusal_of_experts(name: str, module: nn.Module) -> str | None:
    """Why fused experts cannot be tiled; None if they can."""
    if "packed" in vars(module):
        return f"module {name!r} is quantized: tile the model before em.quantize"
    inner = [own for own, child in module.named_children() for _ in child.parameters()]
    odd = [own for own, p in module.named_parameters(recurse=False) if p.dim() < 2 or len(p) != module.num_experts]
    if inner or odd:
        return (
            f"module {name!r} has {(inner + odd)[0]!r}, which has no row for each of its {module.num_experts} experts"
        )
    return None


def _part(
    module: nn.Module, start: int, stop: int, rows: int, tiles: dict[tuple[nn.Parameter, int], nn.Parameter]
) -> nn.Module:
    """The module with rows `start` .. `stop` of its parameters; `tiles` has those of earlier modules."""
    kind = RegatherLinear if type(module) is nn.Linear else type(module)
    part = module.__new__(kind)
    own = {name: copy(value) for name, value in module.__dict__.items() if isinstance(value, dict)}
    hookless = {name: copy(value) for name, value in vars(nn.Module()).items() if name in _HOOKS}
    part.__dict__.update(module.__dict__ | own | hookless)  # the same settings, and registries of its own
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if (parameter, start) not in tiles:
            cut = nn.Parameter(parameter.data[start:stop], requires_grad=parameter.requires_grad)  # versions of its own
            cut.__dict__.update(parameter.__dict__)
            around = tile_of(parameter) or Tile(start=0, stop=rows, rows=rows)  # the model may be tiled already
            mark(cut, Tile(start=around.start + start, stop=around.start + stop, rows=around.rows))
            tiles[parameter, start] = cut
        part._parameters[name] = tiles[parameter, start]
    if isinstance(part, FusedExperts):
        become_fused(part, FusedTile)
    if not isinstance(part, nn.Linear) or type(part) is RegatherLinear:
        mark_saves_no_weights(part)
    if isinstance(part, nn.Linear):
        part.out_features = stop - start
    elif isinstance(part, nn.Embedding):
        part.num_embeddings = stop - start
        inside = part.padding_idx is not None and start <= part.padding_idx < stop
        part.padding_idx = part.padding_idx - start if inside and part.padding_idx is not None else None
    elif isinstance(part, GroupedExperts):
        part.first_expert += start
    else:
        part.num_experts = stop - start  # type: ignore[assignment]
    return part
