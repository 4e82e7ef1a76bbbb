"""The comparison of both runs, and what it says.

Owns the checks, their tolerances and the first difference. Trains nothing.

Tolerances in fp32. Both runs add the same numbers in another order: over ranks, micro-batches and for the norm. An
element of a gradient of size up to 1 then carries an error of a few ulps, 3e-7, and gradients are clipped to a norm of
1. AdamW divides by the root of the second moment plus eps = 1e-4, so a step of lr = 1e-2 differs by at most
lr * 3e-7 / eps = 3e-5 (`WEIGHT`), and after n steps weights differ by n times that. What is computed from such weights
is held to a part of its size: loss and global norm to 2e-5, the norm of one gradient to 1e-4 plus 2e-5 of the global
norm, an element of a moment to 1e-3 of the largest, logits to 1e-4 for each step. What a module returns in the first
step is computed from equal weights; its norm is held to 1e-4, in each later step to 1e-4 more.

A model may make more of such errors than these bounds allow: a batch normalization of two rows divides by their
difference. So where a difference exceeds its bound, the plain run is repeated with errors of `ROUNDING` put into it: of
that part of each first weight, and of that part of the global norm into each element of a gradient, with random signs.
A check in which this run differs from the plain one by k > 1 bounds is allowed k times its bound. Bounds stay as they
are with an optimizer that has other moments than AdamW.

In bf16 the plain run has bf16 weights with fp32 masters too. Where masters differ in the last bit, their bf16 copies
differ by 2**-8 here and there, and an element of a gradient that nearly cancels may change its sign. So loss and norm
are held to 2e-2. Single gradients and weights are not compared, but all weights together: they may be apart by a
quarter of their way from the start, since about 2 in 100 elements can turn. What is moved and not computed (loads,
saves, exports) and what must not move (frozen weights) is compared bit for bit in any dtype.

Two checks hold of both runs, since a fault of the model itself is in both: each router that is trained gets a gradient,
and the loss reaches the logits of as many rows at each position.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from elixir_tools.verify.training import Record, Setup, Sums, Weights, exported, in_plain_pytorch, record_of

ROUNDING = 3e-7
WEIGHT, LOSS, GRADIENT, GRADIENT_OF_ALL = 3e-5, 2e-5, 1e-4, 2e-5
HALF_LOSS, HALF_WAY = 2e-2, 0.25
_ROUTERS = {"router", "gate"}
"""Names of modules that choose experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the certificate."""

    name: str
    """The quantity that was compared."""
    difference: float
    """The largest one, by its tolerance."""
    tolerance: float
    """The largest difference allowed there; 0 is bit for bit."""
    ok: bool
    """Whether every difference is within its tolerance."""
    where: str
    """If not: the first place that differs, in order of forward, and by how much."""


@dataclass(frozen=True, slots=True)
class _Difference:
    place: str
    size: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.size <= self.tolerance

    @property
    def badness(self) -> float:
        """The difference in tolerances."""
        return 0.0 if self.size == 0 else self.size / self.tolerance if self.tolerance else math.inf


def certify(setup: Setup) -> list[Check]:
    """Runs the plain half, reads the ranks' record and compares both."""
    ours = record_of(setup)
    plain, order = in_plain_pytorch(setup)
    weights, outputs = exported(setup)
    checks = list(_checks(setup, ours, plain, order, weights, outputs, {}))
    if first_failed(checks) is None or setup.compute_dtype is not None or not plain.moments:
        return checks  # errors are those of AdamW
    other, _ = in_plain_pytorch(setup, error=ROUNDING)
    assert other.outputs is not None
    as_read = replace(other, loaded=other.weights[setup.steps], kept=ours.kept, found=ours.kept)
    errors = list(_checks(setup, as_read, plain, order, other.weights[-1], other.outputs, {}))
    measured = (one for one in errors if not one.ok and one.tolerance and math.isfinite(one.difference))
    widened = {one.name: one.difference / one.tolerance for one in measured}
    return list(_checks(setup, ours, plain, order, weights, outputs, widened))


def first_failed(checks: list[Check]) -> Check | None:
    """The failed check that comes first in the run."""
    return next((check for check in checks if not check.ok), None)


def as_dicts(checks: list[Check]) -> list[dict[str, Any]]:
    """For JSON: a number that is not finite becomes a string."""
    return [
        {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(check).items()}
        for check in checks
    ]


def _checks(
    setup: Setup,
    ours: Record,
    plain: Record,
    order: list[str],
    read: Weights,
    outputs: Tensor,
    widened: Mapping[str, float],
) -> Iterator[Check]:
    """`widened`: the factors of some checks' bounds."""

    def check(name: str, differences: list[_Difference]) -> Check:
        return _check(name, [replace(one, tolerance=one.tolerance * widened.get(name, 1.0)) for one in differences])

    exact, half = setup.compute_dtype is None, setup.compute_dtype is not None
    yield check("weights after wrap", _tensors(order, ours.weights[0], plain.weights[0], 0.0))
    if plain.started:
        yield check("weights read from a folder", _tensors(order, ours.started, plain.started, 0.0))
    halves = [(0, setup.steps, ""), (setup.steps, 2 * setup.steps, " after the load")]
    for first, last, when in halves[: 1 + setup.resumes]:
        ranks = setup.resumed_ranks if first else setup.ranks
        if first:
            moved = {name: ours.weights[first][name] for name in order}
            yield check("weights after the load", _tensors(order, ours.loaded, moved, 0.0))
            yield check("state after the load", list(_state(ours)))
        for step in range(first, last):
            of = f"of step {step + 1}{when}"
            both = ours.losses[step], plain.losses[step]
            if not step and plain.labeled:
                yield check("labels of step 1", list(_labels(ours, plain)))
            if exact and plain.modules[step]:
                modules = _modules(order, ours.modules[step], plain.modules[step], plain.frozen, step + 1)
                yield check(f"outputs of modules in step {step + 1}{when}", list(modules))
            yield check(f"loss {of}", [_number(*both, LOSS if exact else HALF_LOSS, _as_if(*both, ranks))])
            if not step and (routers := list(_routers(order, ours, plain))):
                yield check("gradients of routers in step 1", routers)
            if exact:
                yield check(f"gradients {of}", list(_gradients(order, ours, plain, step)))
            norms = ours.norms[step], plain.norms[step]
            weighed = _weighed(order, ours.norms[step], ours.gradients[step], ranks)
            yield check(f"gradient norm {of}", [_number(*norms, LOSS if exact else HALF_LOSS, weighed)])
            after = ours.weights[step + 1], plain.weights[step + 1]
            if plain.frozen:
                kept = [name for name in order if name in set(plain.frozen)]
                yield check(f"frozen weights {of}", _tensors(kept, after[0], plain.weights[0], 0.0))
            if exact:
                yield check(f"weights {of}", _tensors(order, *after, WEIGHT * (step + 1)))
            else:
                yield check(f"way of the weights {of}", [_way(order, *after, plain.weights[0])])
        (loss, sums), (plain_loss, plain_sums) = ours.ends[bool(first)], plain.ends[bool(first)]
        if exact and plain_sums:
            modules = _modules(order, sums, plain_sums, plain.frozen, last + 1)
            yield check(f"outputs of modules after step {last}", list(modules))
        yield check(f"loss after step {last}", [_number(loss, plain_loss, LOSS if exact else HALF_LOSS)])
        if not first and plain.moments:
            yield check("moments when saved", _moments(order, ours.moments, plain.moments, half))
    last_weights = {name: ours.weights[-1][name] for name in order}
    yield check("exported weights", _tensors(order, read, last_weights, 0.0))
    assert ours.outputs is not None and plain.outputs is not None
    allowed = (GRADIENT * setup.all_steps if exact else HALF_LOSS) * max(1.0, plain.outputs.abs().max().item())
    yield check("outputs after the export", [_tensor("outputs", outputs, ours.outputs, allowed)])


def _check(name: str, differences: list[_Difference]) -> Check:
    """`differences` are in order of forward."""
    wrong = [one for one in differences if not one.ok]
    worst = max(differences, key=lambda one: one.badness)
    where = ""
    if wrong:
        several = f"; first of {len(wrong)} that differ, of {len(differences)}" if len(differences) > 1 else ""
        where = f"{wrong[0].place}: differs by {wrong[0].size:.3g}, allowed {wrong[0].tolerance:.2g}{several}"
        worst = wrong[0] if len(wrong) == 1 else worst
    return Check(name=name, difference=worst.size, tolerance=worst.tolerance, ok=not wrong, where=where)


def _module_of(name: str) -> str:
    module, _, own = name.rpartition(".")
    return f"module {module or '(the model itself)'}, {own}"


def _difference(place: str, size: float, tolerance: float) -> _Difference:
    return _Difference(place, math.inf if math.isnan(size) else size, tolerance)


def _tensor(place: str, ours: Tensor | None, plain: Tensor | None, tolerance: float) -> _Difference:
    if ours is None or plain is None:
        return _Difference(
            f"{place} ({'missing here' if ours is None else 'not in the plain run'})", math.inf, tolerance
        )
    if ours.shape != plain.shape:
        return _Difference(f"{place} ({tuple(ours.shape)} here, {tuple(plain.shape)} plain)", math.inf, tolerance)
    return _difference(place, (ours - plain).abs().max().item() if ours.numel() else 0.0, tolerance)


def _tensors(order: list[str], ours: Weights, plain: Weights, tolerance: float) -> list[_Difference]:
    return [_tensor(_module_of(name), ours.get(name), plain.get(name), tolerance) for name in order]


def _number(ours: float, plain: float, relative: float, hint: str = "") -> _Difference:
    place = f"{ours:.6g} here, {plain:.6g} plain{hint}"
    return _difference(place, abs(ours - plain), relative * (1.0 + abs(plain)))


def _as_if(ours: float, plain: float, ranks: int) -> str:
    """Explains the ratio of two losses by the ranks."""
    if ranks > 1 and plain:
        for factor, words in ((ranks, "multiplied"), (1 / ranks, "divided")):
            if abs(ours / plain - factor) < LOSS * factor:
                return f": as if {words} by the {ranks} ranks"
    return ""


def _weighed(order: list[str], ours: float, gradients: dict[str, float], ranks: int) -> str:
    """Which parameters the global norm leaves out or weighs by the ranks, if it is not that of its own gradients.

    Parameters are tried together whose names share a word, such as all experts, as a norm treats a kind of them alike.
    """
    squares = {name: gradients.get(name, 0.0) ** 2 for name in order}
    if abs(sum(squares.values()) ** 0.5 - ours) <= LOSS * (1.0 + ours):
        return ""  # gradients differ, and not how they are weighed
    words = {word: None for name in order for word in name.split(".") if not word.isdecimal()}
    found: dict[str, float] = {}
    for factor, said in ((0.0, "left out"), (1 / ranks, f"averaged over {ranks} ranks"), (ranks, f"counted {ranks}x")):
        for word in words if factor != 1 else ():
            members = [name for name in order if word in name.split(".")]
            norm = max(sum(squares.values()) + (factor - 1) * sum(squares[name] for name in members), 0.0) ** 0.5
            if len(members) < len(order):
                told = f": as if the squares of {_module_of(members[0])} and all of {word!r} were {said}"
                found[told] = abs(norm - ours)
    best = min(found, key=found.__getitem__, default="")
    return best if found.get(best, math.inf) <= LOSS * (1.0 + ours) else ""


def _labels(ours: Record, plain: Record) -> Iterator[_Difference]:
    """Rows whose loss reaches the logits, for each position; the last one has no label in either run."""
    positions = max(len(ours.labeled), len(plain.labeled))
    for position in range(positions):
        rows = [one.labeled[position] if position < len(one.labeled) else 0 for one in (ours, plain)]
        place = f"logits of position {position + 1} of {positions}: the loss of {rows[0]} rows here, {rows[1]} plain"
        yield _difference(place, abs(rows[0] - rows[1]), 0.0)


def _modules(order: list[str], ours: Sums, plain: Sums, frozen: list[str], steps: int) -> Iterator[_Difference]:
    """Root of the sum of squares of what each module returned, in the order in which they end: inner ones first.

    What does not depend on rows is returned once in each run and on each rank: numbers are weighed by how many there
    are in the plain run.
    """
    trained = [one for one in order if one not in frozen]
    for name, (square, numel) in plain.items():
        found, of = ours.get(name, (math.nan, 1))
        mine, wanted = (found * numel / max(of, 1)) ** 0.5, square**0.5
        place = f"module {name or '(the model itself)'}{_made_of(trained, name)}, output of norm {mine:.6g} here, "
        allowed = (GRADIENT * wanted + GRADIENT_OF_ALL) * steps
        yield _difference(f"{place}{wanted:.6g} plain", abs(mine - wanted), allowed)


def _state(ours: Record) -> Iterator[_Difference]:
    """Options, schedule, buffers and random generators of the ranks that were there before and after the load."""
    for rank, (kept, found) in enumerate(zip(ours.kept, ours.found, strict=False)):
        for name in {**kept, **found}:
            yield _tensor(f"{name} of rank {rank}", found.get(name), kept.get(name), 0.0)


def _made_of(trained: list[str], module: str) -> str:
    """The trained parameters of a module, and of the adapters around it."""
    whole = module.partition(".base_layer")[0]
    own = [name.removeprefix(f"{whole}.") for name in trained if name.startswith(f"{whole}.")]
    names = [name for name in own if name.count(".") <= 3][:6]
    return f" with {', '.join(names)}" if names and whole else ""


def _routers(order: list[str], ours: Record, plain: Record) -> Iterator[_Difference]:
    """Whether each router that is trained has a gradient, in both runs."""
    for name in order:
        if name not in plain.frozen and not _ROUTERS.isdisjoint(name.split(".")):
            mine, wanted = (one.gradients[0].get(name, 0.0) for one in (ours, plain))
            place = f"{_module_of(name)}, which is trained and has no gradient {'here' if wanted else 'in either run'}"
            yield _difference(place, 0.0 if mine else math.inf, 0.0)


def _gradients(order: list[str], ours: Record, plain: Record, step: int) -> Iterator[_Difference]:
    """Norms of single gradients; where one has none, 0 stands in its place."""
    here, there = ours.gradients[step], plain.gradients[step]
    for name in order:
        if name in here or name in there:
            mine, wanted = here.get(name, 0.0), there.get(name, 0.0)
            allowed = GRADIENT * wanted + GRADIENT_OF_ALL * plain.norms[step]
            place = f"{_module_of(name)}, gradient norm {mine:.6g} here, {wanted:.6g} plain"
            yield _difference(place, abs(mine - wanted), allowed)


def _moments(order: list[str], ours: dict[str, Weights], plain: dict[str, Weights], half: bool) -> list[_Difference]:
    """Single moments, to a part of their largest element; in bf16 the norm of all first moments and of all second.

    Plain AdamW has none for a parameter that no step has used: there they are zeros, bit for bit.
    """
    kinds = ("exp_avg", "exp_avg_sq")
    if half:
        totals = [
            [sum(float(one[kind].square().sum()) for one in each.values()) ** 0.5 for each in (ours, plain)]
            for kind in kinds
        ]
        return [
            _difference(f"norm of all {k}: {a:.6g} here, {b:.6g} plain", abs(a - b), HALF_WAY * b)
            for k, (a, b) in zip(kinds, totals, strict=True)
        ]
    found = []
    for name in (name for name in order if name in ours or name in plain):
        for kind in kinds:
            mine, wanted = ours.get(name, {}).get(kind), plain.get(name, {}).get(kind)
            if wanted is None and mine is not None:
                found.append(_tensor(f"{_module_of(name)}, {kind} of no step", mine, torch.zeros_like(mine), 0.0))
                continue
            largest = 0.0 if wanted is None or not wanted.numel() else wanted.abs().max().item()
            found.append(_tensor(f"{_module_of(name)}, {kind}", mine, wanted, 10 * GRADIENT * largest + 1e-6))
    return found


def _way(order: list[str], ours: Weights, plain: Weights, start: Weights) -> _Difference:
    """How far the weights are apart, measured by the way the plain ones have gone."""
    apart = sum(float((ours[name] - plain[name]).square().sum()) for name in order) ** 0.5
    gone = sum(float((plain[name] - start[name]).square().sum()) for name in order) ** 0.5
    return _difference(f"all weights, which went {gone:.3g}", apart, HALF_WAY * gone)
