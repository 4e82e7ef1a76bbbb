"""The update of one shard by the user's optimizer.

Owns the two ways to update each element by itself. `torch.optim.Adam` and `AdamW` make one pass over a run of pieces:
it reads the gradient in the dtype of its reduction, unscales it, and writes the values along with the master. Any other
elementwise optimizer runs unchanged, on one tensor per piece. Adam's state may be narrower than fp32, depending on the
chunk's key: then a run is one piece, whose random bits depend on its place in the logical parameter. Whole matrices are
updated in `muon`. Never decides whether or when to update.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import mul
from typing import Any

import torch
from torch import nn

from elixir_moe.chunks.packing import Piece
from elixir_moe.chunks.param_spec import StateArray
from elixir_moe.chunks.plan import Tier
from elixir_moe.kernels import (
    Moment,
    Rounding,
    adam_step,
    divisor_of,
    fuses,
    host_threads,
    narrow_step,
    windows,
)
from elixir_moe.memory.elements import Coded, Elements
from elixir_moe.memory.shard_state import ShardState
from elixir_moe.memory.slabs import allocation, host_zeros
from elixir_moe.optim.accepted import check_kept, is_cut, like, modes_of
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.parallel.rules import UNCUT, pattern_of
from elixir_moe.parallel.tiles import tile_of, whole_name, whole_shape
from elixir_moe.runtime.chunk import Chunk


@dataclass(kw_only=True, slots=True)
class TrainedPiece:
    """A non-empty piece of this rank's shard that the optimizer updates."""

    parameter: nn.Parameter
    piece: Piece
    group: int
    """Index into `param_groups`."""
    name: str = ""
    """The first name of the logical parameter; for a tile, that of the whole parameter."""
    first: int = 0
    """The number of the piece's first element in the logical parameter."""
    steps: int = 0
    """Updates so far, for Adam's bias correction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Adjacent pieces of a shard with the same settings."""

    start: int
    stop: int
    gradient: torch.Tensor | None
    """None if the gradient is passed along with master and moments."""
    settings: dict[str, Any]
    rounding: Rounding | None = None
    """The random bits of the elements; None if all state is fp32."""


class FlatMoments:
    """The moments of chunks: arrays as long as their shards, in memory unless they are on disk."""

    def __init__(self, chunks: Sequence[Chunk], names: Sequence[str]) -> None:
        """`names` are those of the moments in the state of torch's optimizer."""
        self._names = names
        self._arrays: dict[int, list[torch.Tensor]] = {}
        """The arrays of each chunk whose state is in memory."""
        for chunk in chunks:
            if not chunk.shard.on_disk:
                nbytes = len(names) * chunk.spec.key.precision.moment_bytes(chunk.spec.shard_numel)
                with allocation(nbytes, f"the moments of {chunk.label}", chunk.shard.tier):
                    self._arrays[chunk.spec.index] = [_zeros(chunk, array) for array in self.kinds(chunk)[1:]]

    def kinds(self, chunk: Chunk) -> tuple[StateArray, ...]:
        """Describes the weight and the arrays of the moments of a chunk."""
        return chunk.spec.key.precision.arrays(len(self._names))

    def in_memory(self, chunk: Chunk) -> Sequence[torch.Tensor]:
        """The arrays of a chunk; none if they are on disk."""
        return self._arrays.get(chunk.spec.index, ())

    def state(self, chunk: Chunk, trained: TrainedPiece) -> dict[str, Any]:
        """The state of a piece by name, as flat elements."""
        numel, kept = chunk.spec.shard_numel, chunk.shard.moments(self.in_memory(chunk))
        if chunk.spec.key.precision.moments == "int8":
            kept = [Coded(kept[0], kept[1], numel, signed=True), Coded(kept[2], kept[3], numel, signed=False)]
        return {name: moment[trained.piece.here] for name, moment in zip(self._names, kept, strict=True)}

    def replace_state(
        self, chunk: Chunk, trained: TrainedPiece, dtypes: dict[str, torch.dtype], values: dict[str, Any]
    ) -> Mapping[str, Elements]:
        """Allocates another state with the same names; returns its flat elements, which the caller must write."""
        state = self.state(chunk, trained)
        assert state.keys() == dtypes.keys() and not values, "the state of another class of update"
        return state

    def state_bytes(self, chunk: Chunk) -> int:
        return sum(array.nbytes for array in self.in_memory(chunk))


class AdamUpdate(FlatMoments):
    """Adam and AdamW: two flat moments for each master shard, and one pass for each run of pieces."""

    def __init__(self, chunks: Sequence[Chunk], groups: list[dict[str, Any]], seed: int) -> None:
        super().__init__(chunks, ("exp_avg", "exp_avg_sq"))
        self._groups, self._seed = groups, seed
        self._counts: dict[int, torch.Tensor] = {}
        """{number of the step: a scalar on the GPU}, shared by all runs in one step of the optimizer."""
        self._divisors: dict[float, torch.Tensor | None] = {}
        """{gradient scale: its divisor on the GPU}, shared in the same way."""

    def prepare(
        self,
        chunk: Chunk,
        pieces: list[TrainedPiece],
        used: set[nn.Parameter],
        scale: float | torch.Tensor,
        skip: torch.Tensor | None = None,
        options: Sequence[Mapping[str, Any]] = (),
    ) -> "Callable[[], Sequence[Future[None]]]":
        """Returns the update of a chunk with the current gradients, to be run once, on any thread.

        `skip` as in `kernels.adam_step`; `options` of each group, or none for the current ones. The update returns the
        futures of unfinished work: updates of slices on disk.
        """
        shard = chunk.shard
        shard.finish_sum()
        compute = shard.values_shard
        fused = shard.tier is Tier.DEVICE and fuses(shard.storage.device) and not chunk.spec.key.precision.is_narrow
        divisor = self._divisor(scale, shard.storage.device) if fused else None

        def run(start: int, stop: int, group: int, steps: int, rounding: Rounding | None = None) -> _Run:
            chosen = (options or self._groups)[group]
            beta1, beta2 = chosen["betas"]
            settings = {
                "lr": float(chosen["lr"]),
                "beta1": float(beta1),
                "beta2": float(beta2),
                "eps": chosen["eps"],
                "weight_decay": chosen["weight_decay"],
                "step": steps + 1,
                "grad_scale": scale,
                "skip": skip,
                "decoupled": chosen["decoupled_weight_decay"],
                "maximize": chosen["maximize"],
                "threads": host_threads(chunk.device) if not shard.on_disk else 1,
            }
            if fused:
                settings |= {"count": self._count(steps + 1, shard.storage.device), "divisor": divisor}
            gradient = None if shard.gradient_comes_along else shard.gradient(start, stop)
            return _Run(start=start, stop=stop, gradient=gradient, settings=settings, rounding=rounding)

        precision = chunk.spec.key.precision
        if precision.is_narrow:
            runs = [
                run(p.piece.start + start, p.piece.start + stop, p.group, p.steps, self._rounding(p, start))
                for p in pieces
                if p.parameter in used
                for start, stop in windows(p.first, p.piece.numel, coded=precision.moments == "int8")
            ]
        else:
            runs = [run(*alike) for alike in _runs(pieces, used)]
        unused = [] if compute is None else [(p.piece.start, p.piece.stop) for p in pieces if p.parameter not in used]
        work = partial(_adam, runs, unused, compute, self.kinds(chunk))
        return partial(shard.change, work, self.in_memory(chunk))

    def _rounding(self, trained: TrainedPiece, start: int) -> Rounding:
        """The random bits for a piece's elements from `start` on in its next update."""
        return Rounding.of(self._seed, trained.name, trained.steps + 1, trained.first + start)

    def finish(self) -> None:
        """Drops the scalars of this step; call it after the update of every chunk."""
        self._counts.clear()
        self._divisors.clear()

    def _count(self, step: int, device: torch.device) -> torch.Tensor:
        if step not in self._counts:
            self._counts[step] = torch.full((), step, dtype=torch.float32, device=device)
        return self._counts[step]

    def _divisor(self, scale: float | torch.Tensor, device: torch.device) -> torch.Tensor | None:
        if isinstance(scale, torch.Tensor):
            return divisor_of(scale, device)
        if scale not in self._divisors:
            self._divisors[scale] = divisor_of(scale, device)
        return self._divisors[scale]


def _zeros(chunk: Chunk, array: StateArray) -> torch.Tensor:
    """Allocates zeros for an array; in host memory, the threads that first touched the weights touch it first."""
    numel, device = array.numel(chunk.spec.shard_numel), chunk.shard.storage.device
    if device.type == "cpu":
        return host_zeros(numel, array.dtype, host_threads(chunk.device), shown=False)
    return torch.zeros(numel, dtype=array.dtype, device=device)


def _adam(
    runs: list[_Run],
    unused: list[tuple[int, int]],
    compute: torch.Tensor | None,
    kinds: Sequence[StateArray],
    first: int,
    arrays: Sequence[torch.Tensor],
) -> None:
    """Updates a part of a shard: `arrays` are the weight and the moments of the elements from `first` on.

    `kinds` describes the arrays; for a chunk wholly on disk, the gradient is the last of them. Elements in `unused` get
    their values back, which a gradient of zeros has overwritten. With int8 codes, runs and parts begin where a block of
    codes does.
    """
    weight, *kept = arrays
    last = first + weight.numel()
    for run in runs:
        start, stop = max(run.start, first), min(run.stop, last)
        if start >= stop:
            continue
        low, high = start - first, stop - first
        mine = weight[low:high]
        exp_avg, exp_avg_sq = _moments(kinds[1:], kept, low, high)
        gradient = kept[-1][low:high] if run.gradient is None else run.gradient[start - run.start : stop - run.start]
        values = None if compute is None else compute[start:stop]
        sent = None if values is None or values.dtype in (torch.float32, mine.dtype) else values
        if run.rounding is None:
            adam_step(mine, exp_avg, exp_avg_sq, gradient, sent, **run.settings)  # type: ignore[arg-type]  # no codes
        else:
            rounding = run.rounding.behind(start - run.start)
            narrow_step(mine, exp_avg, exp_avg_sq, gradient, sent, rounding, **run.settings)
        if values is not None and sent is None:
            values.copy_(mine)
    for start, stop in unused:
        start, stop = max(start, first), min(stop, last)
        if start < stop:
            assert compute is not None
            compute[start:stop] = weight[start - first : stop - first]


def _moments(
    kinds: Sequence[StateArray], arrays: Sequence[torch.Tensor], start: int, stop: int
) -> tuple[Moment, Moment]:
    """Returns elements `start` to `stop` of both moments, which are the first of `arrays`, described by `kinds`."""
    cut = [array[start // kind.block : -(-stop // kind.block)] for kind, array in zip(kinds, arrays, strict=False)]
    return (cut[0], cut[1]) if len(cut) == 2 else ((cut[0], cut[1]), (cut[2], cut[3]))


class UpdateAtOnce(ABC):
    """An update on the caller's thread, which leaves no unfinished work."""

    def prepare(
        self,
        chunk: Chunk,
        pieces: list[TrainedPiece],
        used: set[nn.Parameter],
        scale: float | torch.Tensor,
        skip: torch.Tensor | None = None,
    ) -> "Callable[[], Sequence[Future[None]]]":
        """Returns the update like `AdamUpdate.prepare`, to be run immediately on the caller's thread; never skips."""
        assert skip is None, "only Adam's update can be skipped on the device"

        def run() -> tuple[()]:
            self._run(chunk, pieces, used, scale)
            return ()

        return run

    @abstractmethod
    def _run(
        self, chunk: Chunk, pieces: list[TrainedPiece], used: set[nn.Parameter], scale: float | torch.Tensor
    ) -> None:
        """Updates the chunk."""


class ElementwiseUpdate(UpdateAtOnce):
    """Any other optimizer: instances of the user's class on views of the master shards."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        pieces: list[list[TrainedPiece]],
        chunks: Sequence[Chunk],
        groups: Mapping[int, dict[str, Any]],
    ) -> None:
        """`groups` are those of `inner`, by their number in `param_groups`."""
        self._inner, self._groups = inner, groups
        self._changes: dict[int, dict[str, Any]] = {}
        """{group that has run: options that the optimizer has changed in this step}."""
        self._views: dict[int, nn.Parameter] = {}
        """{id of a piece: its elements in the master shard}."""
        self._optimizers: dict[tuple[int, int], torch.optim.Optimizer] = {}
        for chunk, mine in zip(chunks, pieces, strict=True):
            assert chunk.shard.master is not None
            for index, members in groupby(sorted(mine, key=lambda one: one.group), key=lambda one: one.group):
                views = []
                for one in members:
                    view = self._views[id(one)] = nn.Parameter(chunk.shard.master[one.piece.here])
                    views.append((view, _cut_state(inner.state.get(one.parameter, {}), one)))
                self._optimizers[chunk.spec.index, index] = like(inner, views, groups[index])

    def _run(
        self, chunk: Chunk, pieces: list[TrainedPiece], used: set[nn.Parameter], scale: float | torch.Tensor
    ) -> None:
        shard = chunk.shard
        assert shard.master is not None
        active = [one for one in pieces if one.parameter in used]
        for one in active:
            self._views[id(one)].grad = shard.gradient(one.piece.start, one.piece.stop).float() * scale
        for index in sorted({one.group for one in active}):
            self._run_group(index, self._optimizers[chunk.spec.index, index])
        for one in active:
            self._views[id(one)].grad = None
        copy_master(shard)

    def check_mode(self) -> None:
        """Raises the error of the optimizer's step in evaluation mode, before it changes a weight."""
        if modes_of(self._inner):
            for group in self._groups.values():
                _without_gradients(self._inner, group).step()

    def switch(self, mode: str, chunks: Sequence[Chunk]) -> None:
        """Calls one of the optimizer's `MODES` on all pieces; `finish` must follow."""
        for (_, index), optimizer in self._optimizers.items():
            self._run_group(index, optimizer, mode)
        for chunk in chunks:
            copy_master(chunk.shard)

    def _run_group(self, index: int, optimizer: torch.optim.Optimizer, method: str = "step") -> None:
        """Calls a method of one of the group's optimizers with the group's options, and notes the ones it changes."""
        options = {name: value for name, value in self._groups[index].items() if name != "params"}
        optimizer.param_groups[0].update(options)
        getattr(optimizer, method)()
        changed = {n: v for n, v in optimizer.param_groups[0].items() if n != "params" and v is not options.get(n)}
        self._changes.setdefault(index, {}).update(changed)

    def state_bytes(self, chunk: Chunk) -> int:
        optimizers = [optimizer for (index, _), optimizer in self._optimizers.items() if index == chunk.spec.index]
        values = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def finish(self, method: str = "step") -> None:
        """Copies the options that `method` has changed (counters, a mode) to the user's groups, after all updates.

        A group that has nothing to update on this rank counts its steps as on the other ranks.
        """
        for index, group in self._groups.items():
            if index not in self._changes:
                self._run_group(index, _without_gradients(self._inner, group), method)
        for index, changed in self._changes.items():
            self._groups[index].update(changed)
        self._changes.clear()

    def state(self, chunk: Chunk, trained: TrainedPiece) -> dict[str, Any]:
        """The state of a piece by the names of the user's optimizer; mostly empty before the first step."""
        optimizer, view = self._optimizers[chunk.spec.index, trained.group], self._views[id(trained)]
        state = optimizer.state.get(view, {})
        check_kept(optimizer, state, view)
        elements_of = chunk.shard.elements_of
        return {n: elements_of(v) if isinstance(v, torch.Tensor) and v.dim() else v for n, v in state.items()}

    def replace_state(
        self, chunk: Chunk, trained: TrainedPiece, dtypes: dict[str, torch.dtype], values: dict[str, Any]
    ) -> Mapping[str, Elements]:
        """Allocates another state with any names; returns its flat elements, which the caller must write."""
        view = self._views[id(trained)]
        tensors = {name: torch.empty_like(view, dtype=dtype) for name, dtype in dtypes.items()}
        self._optimizers[chunk.spec.index, trained.group].state[view] = {**tensors, **values}
        return {name: chunk.shard.elements_of(tensor) for name, tensor in tensors.items()}


def _without_gradients(inner: torch.optim.Optimizer, group: dict[str, Any]) -> torch.optim.Optimizer:
    """Returns an optimizer like the user's whose only parameter has no gradient."""
    return like(inner, [(nn.Parameter(torch.empty(0, device="cpu")), {})], group)


def copy_master(shard: ShardState) -> None:
    """Copies the master of a shard to its values, if they are separate."""
    if shard.values_shard is not None:
        assert shard.master is not None
        shard.values_shard.copy_(shard.master)


def _cut_state(state: dict[str, Any], trained: TrainedPiece) -> dict[str, Any]:
    """Returns the piece's part of the state that the constructor has set (Adagrad's sums)."""
    cut = {}
    shape = local_of(trained.parameter).shape
    for name, value in state.items():
        value = local_of(value) if isinstance(value, torch.Tensor) else value
        if is_cut(name, value, shape):
            value = value.flatten()[trained.piece.there]
        cut[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return cut


def trained_pieces(
    chunks: Sequence[Chunk], groups: list[dict[str, Any]], name_of: Callable[[nn.Parameter], str]
) -> list[list[TrainedPiece]]:
    """Lists the pieces of each chunk's shard on this rank that the optimizer updates, in order."""
    group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
    return [
        [
            TrainedPiece(
                parameter=parameter,
                piece=piece,
                group=group_of[parameter],
                name=whole_name(name_of(parameter), parameter),
                first=_first_of(parameter, tuple(local.shape)) + piece.offset,
            )
            for parameter, local, piece in zip(chunk.parameters, chunk.locals, chunk.pieces, strict=True)
            if piece.numel and parameter in group_of
        ]
        for chunk in chunks
    ]


def _first_of(parameter: nn.Parameter, shape: tuple[int, ...]) -> int:
    """Returns the number of the first element of this rank's slice, of `shape`, in the logical parameter.

    The elements after it get the next numbers, even if the slice is cut on another dim than the first, so that other
    elements lie between them: their random bits then depend on the degree of that cut, as the order of sums does.
    """
    pattern, tile, before = pattern_of(parameter) or UNCUT, tile_of(parameter), 0
    if tile is not None:  # the rows of a tile are consecutive elements of the whole slice
        before, shape = tile.start * math.prod(shape[1:]), whole_shape(parameter)
    grid = pattern.grid_shape(shape)
    strides = [math.prod(grid[dim + 1 :]) for dim in range(len(grid))]
    return before + sum(map(mul, pattern.local_offset(shape), strides))


def _runs(pieces: list[TrainedPiece], used: set[nn.Parameter]) -> Iterator[tuple[int, int, int, int]]:
    """Yields (start, stop, group, steps) of adjacent used pieces with the same settings; gaps stay zeros."""
    for alike, run in groupby(pieces, key=lambda p: (p.parameter in used, p.group, p.steps)):
        members = [one.piece for one in run]
        if alike[0]:
            yield members[0].start, members[-1].stop, *alike[1:]
