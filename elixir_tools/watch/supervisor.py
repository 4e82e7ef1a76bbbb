"""Decides what to do with a step, from its loss, gradient norm and other figures.

Owns the decisions and nothing else. Its input is agreed on by all ranks, so all ranks decide alike; the trainer carries
the decision out. Reads no clock, file or tensor. Source: the supervision layer of HTMS (3.2.1): trends of the loss,
scales of tensors, resources that exceed the allowable time, and a divergence that is identified, logged and ended with
its state saved.

A loss is *off* if it is more than `deviations` robust standard deviations above the median of the last good losses. The
robust standard deviation is 1.4826 times the median distance from the median, and at least 2 % of the median.
`patience` consecutive steps with such a loss are a divergence.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import median
from typing import Annotated, Any, Literal

from elixir_moe.ext.records import ABOVE_0, Check, at_least, check

DIVERGED = 3
"""Exit code of a run that the supervisor stopped, with its state saved."""
_FEWEST = 8
_DEVIATION = 1.4826
_LEAST_SPREAD = 0.02
_NORM_GROWTH = 100.0
_SCALE_GROWTH = 10.0
_LONGEST_OVERFLOW = 32
"""Consecutive overflows, each of which halves the loss scale, after which the scale cannot be the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """Supervision of the run: faults to detect, and how to react."""

    on_nan: Literal["skip", "back", "stop"] = "stop"
    """Reaction to a loss or gradient that is not finite: skip the batch, go back to the last good checkpoint, or save
    the state and stop. Overflows of fp16 gradients are skipped first, up to 31 in a row."""
    on_divergence: Literal["note", "skip", "back", "stop"] = "stop"
    """Reaction to losses far above recent ones: note it as an event, or as for on_nan."""
    window: Annotated[int, at_least(1)] = 64
    """Number of recent good steps to compare with."""
    deviations: Annotated[float, ABOVE_0] = 10.0
    """A loss is too high if it exceeds the median of recent losses by this many robust standard deviations."""
    patience: Annotated[int, at_least(1)] = 3
    """Consecutive steps with too high a loss that count as a divergence; with skip, the number of consecutive steps
    skipped before the run stops."""
    back_rate: Annotated[float, Check("a share above 0, at most 1", lambda share: 0 < share <= 1)] = 0.5
    """Factor on the learning rate each time the run goes back."""
    avoid_batch: bool = True
    """After going back, leave out the batches that caused it."""
    tries: Annotated[int, at_least(0)] = 3
    """Number of times the run goes back before it stops."""
    straggler_score: Annotated[float, Check("a number above 1", lambda score: score > 1)] = 1.5
    """Report a rank whose busy time exceeds the median rank's by this factor."""
    scales_every: Annotated[int | None, at_least(1, "step")] = 100
    """Steps between checks of the root mean square of every parameter; null: never."""

    def __post_init__(self) -> None:
        check(self, "watch")


class Verdict(StrEnum):
    """The decision about a step's gradients."""

    GO = "go"
    """Apply the gradients."""
    SKIP = "skip"
    """Drop the gradients; the next step takes the next batch."""
    BACK = "back"
    """Drop everything since the last good checkpoint."""
    STOP = "stop"
    """Drop the gradients, save the state apart, and end the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The facts that all ranks share about a step whose gradients are not applied yet."""

    step: int
    """Number of the step, from 1."""
    batch: int
    """Number of its batch of samples."""
    losses: tuple[float, ...]
    """Loss of each rank."""
    norm: float
    """Global gradient norm before clipping."""
    scaled: bool = False
    """Whether the loss was scaled (fp16): the optimizer then skips gradients that overflowed."""
    busy_seconds: tuple[float, ...] = ()
    """Time of each rank without its waits for other ranks."""
    places: Sequence[str] = ()
    """Where each rank runs, for messages."""
    tokens_per_expert: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """{mixture layer: tokens of each expert}."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Root mean square of each parameter; empty in steps without this check."""

    @property
    def loss(self) -> float:
        """Mean loss over the ranks."""
        return sum(self.losses) / len(self.losses)


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """An event for the log."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """The decision about a step, with its details."""

    verdict: Verdict = Verdict.GO
    reason: str = ""
    """The reason if the verdict is not GO."""
    not_finite: bool = False
    """The reason is a loss or gradient that is not finite."""
    notes: tuple[Note, ...] = ()
    before: int = 0
    """With BACK: only checkpoints with fewer steps than this are good."""
    avoid: tuple[int, ...] = ()
    """With BACK: batches not to be drawn again."""
    rate: float = 1.0
    """With BACK: factor on the learning rate from now on."""


class Supervisor:
    """Watches one run."""

    def __init__(self, config: WatchConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self._norms: deque[float] = deque(maxlen=config.window)
        self._off: list[tuple[int, int]] = []
        """(step, batch) of the latest consecutive steps whose losses were off."""
        self._overflows = 0
        self._backs = 0
        self._busy: deque[tuple[float, ...]] = deque(maxlen=config.window)
        self._idle: dict[tuple[str, int], int] = {}
        self._scales: dict[str, float] = {}
        self._said: set[str] = set()

    def observe(self, seen: Observation) -> Action:
        """Records a step and returns the decision about it."""
        notes = tuple(self._notes(seen))
        finite = all(map(math.isfinite, seen.losses))
        if finite and math.isfinite(seen.norm):
            self._overflows = 0
            return self._judge_loss(seen, notes)
        if finite and seen.scaled:
            self._overflows += 1
            if self._overflows < _LONGEST_OVERFLOW:
                return Action(notes=notes)
        action = self._act(self._config.on_nan, self._not_finite(seen), [(seen.step, seen.batch)], notes)
        return replace(action, not_finite=True)

    @property
    def keeps_weights(self) -> bool:
        """Whether the verdict on the next step may be to drop its gradients and keep the weights from before it.

        Otherwise it is GO, or BACK to a checkpoint from before that step.
        """
        config = self._config
        goes_back = self._backs < config.tries
        loss_keeps = {"note": False, "skip": True, "back": not goes_back, "stop": config.patience == 1}
        return config.on_nan != "back" or not goes_back or loss_keeps[config.on_divergence] or bool(self._off)

    def scores(self) -> list[float]:
        """Busy time of each rank relative to the median rank; empty until there are enough steps."""
        if len(self._busy) < min(_FEWEST, self._config.window):
            return []
        means = [sum(times) / len(times) for times in zip(*self._busy, strict=True)]
        middle = median(means)
        return [mean / middle for mean in means] if middle > 0 else []

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, so that a resumed run is judged like an uninterrupted one."""
        return {"losses": list(self._losses), "norms": list(self._norms), "off": list(self._off), "backs": self._backs}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`, but the number of times the run went back never decreases."""
        self._losses = deque(state["losses"], maxlen=self._config.window)
        self._norms = deque(state["norms"], maxlen=self._config.window)
        self._off = [(step, batch) for step, batch in state["off"]]
        self._backs = max(self._backs, state["backs"])

    # -------------------------------------------------------------------------------------------------------- verdicts

    def _judge_loss(self, seen: Observation, notes: tuple[Note, ...]) -> Action:
        if not self._is_off(seen.loss):
            self._losses.append(seen.loss)
            self._norms.append(seen.norm)
            self._off.clear()
            return Action(notes=notes)
        self._off.append((seen.step, seen.batch))
        config = self._config
        reason = (
            f"step {seen.step}: the loss is {seen.loss:.4g}, that of the last {len(self._losses)} good steps was "
            f"{median(self._losses):.4g}"
        )
        notes += (Note(kind="loss", text=reason),)
        if config.on_divergence == "skip" and len(self._off) <= config.patience:
            return Action(verdict=Verdict.SKIP, reason=reason, notes=notes)
        if len(self._off) < config.patience:
            return Action(notes=notes)
        first = self._off[0][0]
        reason = f"the run diverges since step {first}; " + reason
        if config.on_divergence == "note":
            self._losses.clear()  # the next steps say what is usual now
            self._off.clear()
            return Action(notes=(*notes, Note(kind="divergence", text=reason)))
        policy = "stop" if config.on_divergence == "skip" else config.on_divergence
        return self._act(policy, reason, list(self._off), notes)

    def _act(self, policy: str, reason: str, steps: list[tuple[int, int]], notes: tuple[Note, ...]) -> Action:
        config = self._config
        if policy == "skip":
            self._off = [*self._off, *steps][: config.patience + 1]
            if len(self._off) <= config.patience:
                return Action(verdict=Verdict.SKIP, reason=reason, notes=notes)
            return Action(verdict=Verdict.STOP, reason=f"{reason}; {config.patience} steps in a row", notes=notes)
        if policy == "back":
            self._backs += 1
            if self._backs <= config.tries:
                return Action(
                    verdict=Verdict.BACK,
                    reason=reason,
                    notes=notes,
                    before=steps[0][0],
                    avoid=tuple(batch for _, batch in steps) if config.avoid_batch else (),
                    rate=config.back_rate,
                )
            reason += f"; the run went back {config.tries} times already"
        return Action(verdict=Verdict.STOP, reason=reason, notes=notes)

    def _is_off(self, loss: float) -> bool:
        if len(self._losses) < min(_FEWEST, self._config.window):
            return False
        middle = median(self._losses)
        spread = _DEVIATION * median(abs(value - middle) for value in self._losses)
        return loss - middle > self._config.deviations * max(spread, _LEAST_SPREAD * abs(middle))

    def _not_finite(self, seen: Observation) -> str:
        bad = [rank for rank, loss in enumerate(seen.losses) if not math.isfinite(loss)]
        if bad:
            return f"step {seen.step}: the loss of rank {bad[0]} is {seen.losses[bad[0]]}"
        return f"step {seen.step}: the global gradient norm is {seen.norm}"

    # ----------------------------------------------------------------------------------------------------------- notes

    def _notes(self, seen: Observation) -> Iterator[Note]:
        if len(self._norms) >= _FEWEST and _NORM_GROWTH * median(self._norms) < seen.norm < math.inf:
            text = f"step {seen.step}: the gradient norm is {seen.norm:.3g}, it was {median(self._norms):.3g}"
            yield Note(kind="norm", text=text)
        yield from self._stragglers(seen)
        yield from self._starved(seen)
        yield from self._grown(seen)

    def _stragglers(self, seen: Observation) -> Iterator[Note]:
        if seen.busy_seconds:
            self._busy.append(seen.busy_seconds)
        for rank, score in enumerate(self.scores()):
            slow = score > self._config.straggler_score
            where = f" ({seen.places[rank]})" if seen.places else ""
            text = (
                f"rank {rank}{where} is slow: its share of a step takes {score:.2f} times as long as the median rank's"
            )
            yield from self._once(f"rank {rank}", slow, Note(kind="straggler", text=text))

    def _starved(self, seen: Observation) -> Iterator[Note]:
        for layer, counts in seen.tokens_per_expert.items():
            for expert, count in enumerate(counts):
                place = (layer, expert)
                self._idle[place] = 0 if count else self._idle.get(place, 0) + 1
                text = f"expert {expert} of {layer} has had no token for {self._config.window} steps"
                yield from self._once(
                    f"{layer} {expert}", self._idle[place] >= self._config.window, Note(kind="expert", text=text)
                )

    def _grown(self, seen: Observation) -> Iterator[Note]:
        for name, scale in seen.scales.items():
            first = self._scales.setdefault(name, scale)
            grown = not math.isfinite(scale) or (first > 0 and scale > _SCALE_GROWTH * first)
            text = f"parameter {name!r} has grown: its root mean square is {scale:.3g}, it was {first:.3g}"
            yield from self._once(f"scale {name}", grown, Note(kind="scale", text=text))

    def _once(self, what: str, holds: bool, note: Note) -> Iterator[Note]:
        """Yields the note when the condition `holds` begins, and not again before it has ended."""
        if holds and what not in self._said:
            yield note
        (self._said.add if holds else self._said.discard)(what)
