"""The update of one shard by the user's optimizer, whichever it is.

Owns the cut of parameters into the segments of a shard, and the two ways to update them: `torch.optim.Adam` and
`AdamW` in one pass over a run of segments (`kernels`: the gradient is read in the dtype it travelled in and unscaled,
the compute shard is written along with the master), any other elementwise optimizer as it is, on one tensor for each
segment. Never decides whether or when.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from numbers import Real
from types import NoneType
from typing import Any

import torch
from torch import nn

from elixir_moe.chunks.chunk import Chunk
from elixir_moe.chunks.home import InMemory, Kept, OnDisk
from elixir_moe.errors import ConfigError
from elixir_moe.kernels import adam_step, host_threads
from elixir_moe.parallel.dtensor import local_of

_WHOLE_TENSOR = {"LBFGS", "Adafactor", "SparseAdam", "Muon"}
"""Optimizers of torch whose update of one element looks at others."""

_TRIED_NUMEL = 2**17
"""Elements of the tensor on which it is seen what an optimizer keeps; those of 8 bits begin at 4096 to keep blocks."""


@dataclass(kw_only=True, slots=True)
class Segment:
    """The part of one parameter that lies in this rank's shard of a chunk."""

    parameter: nn.Parameter
    group: int
    """Index into `param_groups`."""
    start: int
    """First element, counted from the start of the shard."""
    stop: int
    offset: int
    """Where it starts in the parameter, flattened."""
    steps: int = 0
    """Updates so far; what Adam's bias correction goes by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Neighbours in a shard that are updated alike."""

    start: int
    stop: int
    gradient: torch.Tensor
    settings: dict[str, Any]


class AdamUpdate:
    """Adam and AdamW: flat moments beside each master shard, one pass a run of segments."""

    beside = True
    """Its updates may run beside training, on another thread."""

    def __init__(self, chunks: Sequence[Chunk], groups: list[dict[str, Any]]) -> None:
        self._groups = groups
        self._state: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Of chunks whose master is in memory."""
        for chunk in chunks:
            master = chunk.home.master
            if master is not None:
                self._state[chunk.spec.index] = torch.zeros_like(master), torch.zeros_like(master)

    def prepare(
        self, chunk: Chunk, segments: list[Segment], used: set[nn.Parameter], scale: float
    ) -> "Callable[[], Sequence[Future[None]]]":
        """The update of a chunk with the options and gradients of now, to be run once, on any thread.

        It returns what it has begun and not ended: the update of slices on disk.
        """
        home = chunk.home
        compute = home.compute if home.sends_compute else None
        runs = []
        for start, stop, group, steps in _runs(segments, used, apart=home.pieces is not None):
            options = self._groups[group]
            beta1, beta2 = options["betas"]
            settings = {
                "lr": float(options["lr"]),
                "beta1": float(beta1),
                "beta2": float(beta2),
                "eps": options["eps"],
                "weight_decay": options["weight_decay"],
                "step": steps + 1,
                "grad_scale": scale,
                "decoupled": options["decoupled_weight_decay"],
                "maximize": options["maximize"],
                "threads": host_threads(chunk.device) if home.spilled is None else 1,
            }
            runs.append(_Run(start=start, stop=stop, gradient=home.gradient(start, stop), settings=settings))
        unused = [] if compute is None else [(s.start, s.stop) for s in segments if s.parameter not in used]
        work = partial(_adam, runs, unused, compute)
        if home.spilled is not None:
            return partial(home.spilled.change, work)
        assert home.master is not None
        return partial(_at_once, partial(work, 0, [home.master, *self._state[chunk.spec.index]]))

    def state(self, chunk: Chunk, segment: Segment) -> dict[str, Any]:
        """What is kept for a segment: by name its flat elements, or a value for all of it."""
        spilled, wait = chunk.home.spilled, chunk.home.await_update
        if spilled is not None:
            ends = segment.start, segment.stop
            return {"exp_avg": OnDisk(spilled, 1, *ends, wait), "exp_avg_sq": OnDisk(spilled, 2, *ends, wait)}
        here = slice(segment.start, segment.stop)
        exp_avg, exp_avg_sq = self._state[chunk.spec.index]
        return {"exp_avg": InMemory(exp_avg[here], wait), "exp_avg_sq": InMemory(exp_avg_sq[here], wait)}

    def replace_state(
        self, chunk: Chunk, segment: Segment, dtypes: dict[str, torch.dtype], values: dict[str, Any]
    ) -> Mapping[str, Kept]:
        """Makes room for another state of the same names; returns its flat elements, to be written."""
        state = self.state(chunk, segment)
        assert state.keys() == dtypes.keys() and not values, "a state that another class of update has left"
        return state

    def state_bytes(self, chunk: Chunk) -> int:
        """Bytes in memory of what is kept for a chunk."""
        return sum(t.nbytes for t in self._state.get(chunk.spec.index, ()))

    def finish(self) -> None:
        """Every chunk has had its update."""


def _adam(
    runs: list[_Run],
    unused: list[tuple[int, int]],
    compute: torch.Tensor | None,
    first: int,
    arrays: Sequence[torch.Tensor],
) -> None:
    """Updates a part of a shard: `arrays` are master and moments of the elements from `first` on.

    What is `unused` gets its values back, where a gradient of zeros has lain.
    """
    last = first + arrays[0].numel()
    for run in runs:
        start, stop = max(run.start, first), min(run.stop, last)
        if start >= stop:
            continue
        gradient = run.gradient[start - run.start : stop - run.start]
        here = [array[start - first : stop - first] for array in arrays]
        shown = None if compute is None else compute[start:stop]
        narrow = None if shown is None or shown.dtype == torch.float32 else shown
        master, exp_avg, exp_avg_sq = here
        adam_step(master, exp_avg, exp_avg_sq, gradient, narrow, **run.settings)
        if shown is not None and narrow is None:
            shown.copy_(master)
    for start, stop in unused:
        start, stop = max(start, first), min(stop, last)
        if start < stop:
            assert compute is not None
            compute[start:stop] = arrays[0][start - first : stop - first]


class ElementwiseUpdate:
    """Any other optimizer of torch: an instance of the user's class on views of the master shards."""

    beside = False

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        segments: list[list[Segment]],
        chunks: Sequence[Chunk],
        groups: list[dict[str, Any]],
    ) -> None:
        self._groups = groups
        self._changes: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, nn.Parameter] = {}
        self._optimizers: dict[tuple[int, int], torch.optim.Optimizer] = {}
        for chunk, parts in zip(chunks, segments, strict=True):
            assert chunk.home.master is not None
            for index, members in groupby(sorted(parts, key=lambda part: part.group), key=lambda part: part.group):
                pieces = []
                for part in members:
                    piece = self._pieces[id(part)] = nn.Parameter(chunk.home.master[part.start : part.stop])
                    pieces.append((piece, _cut_state(inner.state.get(part.parameter, {}), part)))
                self._optimizers[chunk.spec.index, index] = _like(inner, pieces, groups[index])

    def prepare(
        self, chunk: Chunk, segments: list[Segment], used: set[nn.Parameter], scale: float
    ) -> "Callable[[], Sequence[Future[None]]]":
        """As `AdamUpdate.prepare`, but for the thread of the caller, at once."""
        return partial(_at_once, partial(self._run, chunk, segments, used, scale))

    def _run(self, chunk: Chunk, segments: list[Segment], used: set[nn.Parameter], scale: float) -> None:
        home = chunk.home
        assert home.master is not None
        active = [segment for segment in segments if segment.parameter in used]
        for segment in active:
            self._pieces[id(segment)].data = home.master[segment.start : segment.stop]  # which may have moved
            self._pieces[id(segment)].grad = home.gradient(segment.start, segment.stop).float() * scale
        for index in sorted({segment.group for segment in active}):
            optimizer = self._optimizers[chunk.spec.index, index]
            options = {name: value for name, value in self._groups[index].items() if name != "params"}
            optimizer.param_groups[0].update(options)
            optimizer.step()
            changed = {n: v for n, v in optimizer.param_groups[0].items() if n != "params" and v is not options.get(n)}
            self._changes.setdefault(index, {}).update(changed)
        for segment in active:
            self._pieces[id(segment)].grad = None
        if home.compute.dtype != torch.float32:
            home.compute.copy_(home.master)

    def state_bytes(self, chunk: Chunk) -> int:
        """As `AdamUpdate.state_bytes`."""
        optimizers = [optimizer for (index, _), optimizer in self._optimizers.items() if index == chunk.spec.index]
        values = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def finish(self) -> None:
        """Every chunk has had its update: gives the user's groups what the optimizer has changed in them (counters)."""
        for index, changed in self._changes.items():
            self._groups[index].update(changed)
        self._changes.clear()

    def state(self, chunk: Chunk, segment: Segment) -> dict[str, Any]:
        """As `AdamUpdate.state`; the names are those of the user's optimizer, none before its first step."""
        optimizer, piece = self._optimizers[chunk.spec.index, segment.group], self._pieces[id(segment)]
        state = optimizer.state.get(piece, {})
        _check_kept(optimizer, state, piece)
        wait = chunk.home.await_update
        return {n: InMemory(v, wait) if isinstance(v, torch.Tensor) and v.dim() else v for n, v in state.items()}

    def replace_state(
        self, chunk: Chunk, segment: Segment, dtypes: dict[str, torch.dtype], values: dict[str, Any]
    ) -> Mapping[str, Kept]:
        """As `AdamUpdate.replace_state`, of any names."""
        piece = self._pieces[id(segment)]
        tensors = {name: torch.empty_like(piece, dtype=dtype) for name, dtype in dtypes.items()}
        self._optimizers[chunk.spec.index, segment.group].state[piece] = {**tensors, **values}
        return {name: InMemory(tensor, chunk.home.await_update) for name, tensor in tensors.items()}


def _at_once(work: Callable[[], None]) -> tuple[()]:
    """Does the work; nothing of it is left to be waited for."""
    work()
    return ()


def _like(
    inner: torch.optim.Optimizer, pieces: list[tuple[nn.Parameter, dict[str, Any]]], group: dict[str, Any]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings, whatever its constructor takes, on other parameters."""
    twin = object.__new__(type(inner))
    twin.__dict__.update({name: value for name, value in inner.__dict__.items() if name != "step"})  # a scheduler's
    twin.param_groups = [{**group, "params": [piece for piece, _ in pieces]}]
    twin.state = defaultdict(dict, {piece: state for piece, state in pieces if state})
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin


def _cut_state(state: dict[str, Any], segment: Segment) -> dict[str, Any]:
    """What the constructor put there (Adagrad's sums), for a piece of the parameter."""
    cut = {}
    shape = local_of(segment.parameter).shape
    for name, value in state.items():
        value = local_of(value) if isinstance(value, torch.Tensor) else value
        if isinstance(value, torch.Tensor) and value.shape == shape and value.dim():
            value = value.flatten()[segment.offset :][: segment.stop - segment.start]
        cut[name] = value.clone() if isinstance(value, torch.Tensor) else value
    return cut


def moments_of(optimizer: torch.optim.Optimizer) -> int:
    """fp32 values that an optimizer keeps for each element; 2 where it is not known."""

    def any_group(option: str) -> bool:
        return any(group.get(option) for group in optimizer.param_groups)

    match type(optimizer).__name__:
        case "SGD":
            return int(any_group("momentum"))
        case "Adagrad":
            return 1
        case "RMSprop":
            return 1 + any_group("momentum") + any_group("centered")
        case _:
            return 2 + any_group("amsgrad")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError for an optimizer that has been stepped, is not elementwise, or keeps what cannot be cut."""
    if any(state and state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise ConfigError(
            "the optimizer has been stepped, or has loaded a state: wrap it before the first step, and go on from a "
            "checkpoint of em.save, by em.load"
        )
    kind = type(optimizer)
    whole = [base.__name__ for base in kind.__mro__ if base.__name__ in _WHOLE_TENSOR]
    ours = kind.__module__.startswith("torch.optim")
    if not whole and not ours:
        for parameter, state in optimizer.state.items():
            _check_kept(optimizer, state, local_of(parameter))
    if whole or not (ours or all(_is_elementwise(optimizer, group) for group in optimizer.param_groups)):
        raise ConfigError(
            f"{[*whole, kind.__name__][0]} looks at whole tensors (their norm, their shape), but a rank holds only "
            f"flat pieces: use an elementwise one, as AdamW, and param_groups for what should be updated otherwise"
        )
    for group in () if ours else optimizer.param_groups:
        piece = nn.Parameter(torch.ones(_TRIED_NUMEL, device="cpu"))
        _check_kept(optimizer, _tried(optimizer, group, [piece], [torch.ones_like(piece)]).state[piece], piece)


def _check_kept(optimizer: torch.optim.Optimizer, state: dict[str, Any], piece: torch.Tensor) -> None:
    """Raises ConfigError unless all that is kept for `piece` can be cut with it, or is a value for all of it."""
    for name, value in state.items():
        found = local_of(value) if isinstance(value, torch.Tensor) else value
        plain = type(found) in (torch.Tensor, nn.Parameter) and found.layout is torch.strided
        if isinstance(found, (Real, str, NoneType)) or (plain and found.shape in (piece.shape, ())):
            continue
        form = f"a {found.dtype} tensor of shape {tuple(found.shape)}" if plain else f"a {type(found).__name__}"
        raise ConfigError(
            f"{type(optimizer).__name__} keeps {name!r}, {form}, for {piece.numel()} elements of a parameter: only "
            f"plain tensors with a value for each element can be cut between ranks and saved. Use torch.optim.AdamW "
            f"with em.Plan.offload, which has the moments in host memory or, with disk_chunks, on disk"
        )


def _is_elementwise(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether a few updates of a small matrix are those of its two halves, flattened: tried with the user's class."""
    draw = torch.Generator().manual_seed(0)
    start, gradients = (torch.randn(*shape, generator=draw, device="cpu") for shape in ((4, 6), (3, 4, 6)))
    whole = [nn.Parameter(start.clone())]
    halves = [nn.Parameter(half.clone()) for half in start.flatten().chunk(2)]
    results = []
    for pieces in (whole, halves):
        _tried(optimizer, group, pieces, gradients)
        results.append(torch.cat([piece.detach().flatten() for piece in pieces]))
    return torch.allclose(results[0], results[1], rtol=1e-5, atol=1e-7)


def _tried(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    pieces: list[nn.Parameter],
    gradients: Iterable[torch.Tensor],
) -> torch.optim.Optimizer:
    """One like the user's that has updated `pieces` with each of the `gradients`, of all of them; compiles nothing."""
    twin = _like(optimizer, [(piece, _state_alike(optimizer, group, piece)) for piece in pieces], group)
    for gradient in gradients:
        for piece, part in zip(pieces, gradient.flatten().chunk(len(pieces)), strict=True):
            piece.grad = part.view_as(piece).clone()
        try:
            with torch.compiler.set_stance("force_eager"):
                twin.step()
        except Exception as error:
            raise ConfigError(
                f"{type(optimizer).__name__} could not be tried on a small tensor, to see whether it updates each "
                f"element by itself: {type(error).__name__}: {error}; use an optimizer of torch.optim, as AdamW"
            ) from error
    return twin


def _state_alike(optimizer: torch.optim.Optimizer, group: dict[str, Any], piece: nn.Parameter) -> dict[str, Any]:
    """What the constructor put into the state of the group's first parameter, in the shape of `piece`."""
    state: dict[str, Any] = {}
    for name, value in next((optimizer.state.get(p, {}) for p in group["params"]), {}).items():
        first = group["params"][0]
        cut = isinstance(value, torch.Tensor) and value.dim() and value.shape == first.shape and value.numel()
        state[name] = torch.full_like(piece, value.flatten()[0].item()) if cut else copy(value)
    return state


def update_for(
    inner: torch.optim.Optimizer, chunks: Sequence[Chunk], segments: list[list[Segment]], groups: list[dict[str, Any]]
) -> AdamUpdate | ElementwiseUpdate:
    """The way to update that suits the user's optimizer."""
    if is_adam(inner):
        return AdamUpdate(chunks, groups)
    return ElementwiseUpdate(inner, segments, chunks, groups)


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `AdamUpdate` does what this optimizer does."""
    plain = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    return plain and not any(group["amsgrad"] for group in optimizer.param_groups)


def cut(chunks: Sequence[Chunk], groups: list[dict[str, Any]]) -> list[list[Segment]]:
    """The segments of each chunk's shard on this rank, in order."""
    group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
    cut = []
    for chunk in chunks:
        low, high = chunk.spec.shard_bounds(chunk.communicator.rank)
        pieces = []
        for slot, parameter in zip(chunk.spec.slots, chunk.parameters, strict=True):
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop and parameter in group_of:
                pieces.append(
                    Segment(
                        parameter=parameter,
                        group=group_of[parameter],
                        start=start - low,
                        stop=stop - low,
                        offset=start - slot.start,
                    )
                )
        cut.append(pieces)
    return cut


def _runs(segments: list[Segment], used: set[nn.Parameter], *, apart: bool) -> Iterator[tuple[int, int, int, int]]:
    """(start, stop, group, steps): used neighbours with the same settings as one; the zeros between them stay zeros.

    `apart` leaves each on its own.
    """
    for alike, run in groupby(segments, key=lambda s: (s.parameter in used, s.group, s.steps)):
        pieces = list(run)
        if alike[0]:
            for first, last in zip(pieces, pieces, strict=True) if apart else ((pieces[0], pieces[-1]),):
                yield first.start, last.stop, *alike[1:]
