"""What user code has with an address: parameters inside ``with em.unsharded(...)``.

Owns the open blocks, what is brought home at their ends, and what is refused meanwhile. Forward, backward and
evaluation may run inside a block; what would take the parameters out of their memory may not.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from elixir_moe.errors import ConfigError
from elixir_moe.runtime.chunk import ATTACHED, Mark
from elixir_moe.runtime.scheduler import Scheduler

Slot = tuple[int, int]


@dataclass(slots=True, eq=False)
class Loan:
    """An open block."""

    slots: list[Slot]
    """(chunk, index in it) of its parameters."""
    write: bool
    """What they are at its end is kept, however it was written."""
    marks: list[Mark]
    """What they were at its beginning, where only writes that tell of themselves are kept."""
    unseen: str | None
    """`Scheduler.written_unseen` at its beginning."""
    lost: bool = False
    """The parameters have left their memory, because what ran inside has failed."""


class Loans:
    """The open blocks of one wrapped model."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._open: list[Loan] = []

    @contextmanager
    def lend(self, slots: list[Slot], *, write: bool) -> Iterator[None]:
        """Parameters that are gathered and held are user code's for a while.

        Raises:
            ConfigError: they were written in a way that is not kept, or have left their memory.
        """
        marks = [] if write else self._marks(slots)
        loan = Loan(slots, write, marks, self._scheduler.written_unseen)
        self._open.append(loan)
        self._tell()
        try:
            yield
        except BaseException:
            self._end(loan)
            raise
        self._end(loan)
        if loan.lost:
            raise ConfigError(
                f"what ran inside em.unsharded(...) of {self._names(slots)} has failed, and with it the block: what "
                f"was written since is lost; begin the block anew after a failure"
            )

    def lose(self) -> None:
        """All that is gathered leaves its memory."""
        for loan in self._open:
            loan.lost = True
        self._open.clear()
        self._tell()

    def refuse(self, what: str) -> None:
        """Brings home what user code has written so far.

        Raises:
            ConfigError: `what` would take parameters out of their memory.
        """
        lent = [slot for loan in self._open for slot in loan.slots]
        moving = [(chunk, i) for chunk, i in lent if self._scheduler.chunks[chunk].placement is not ATTACHED]
        if moving:
            raise ConfigError(
                f"{what} inside em.unsharded(...) of {self._names(moving)}: it takes these parameters out of their "
                f"memory; end the block before"
            )
        for chunk in {chunk for chunk, _ in lent}:
            self._scheduler.keep_writes(self._scheduler.chunks[chunk])

    def _tell(self) -> None:
        self._scheduler.lent = [slot for loan in self._open if loan.write for slot in loan.slots]

    def _end(self, loan: Loan) -> None:
        if loan.lost:
            return
        self._open.remove(loan)
        self._tell()
        if loan.write:
            self._scheduler.store(loan.slots)
        else:
            self._refuse_unseen(loan)

    def _refuse_unseen(self, loan: Loan) -> None:
        """Undoes writes that told nothing of themselves, and says so on all ranks that have made them alike."""
        kept = {*self._scheduler.lent}  # a block around this one keeps them
        found = [
            slot
            for slot, before, now in zip(loan.slots, loan.marks, self._marks(loan.slots), strict=True)
            if slot not in kept and now.version == before.version and now != before
        ]
        if not found:
            return
        for index in {index for index, _ in found}:
            chunk = self._scheduler.chunks[index]
            self._scheduler.keep_writes(chunk)
            with torch.inference_mode(False), torch.no_grad():
                chunk.restore()
        self._scheduler.written_unseen = loan.unseen
        self._scheduler.failed = True  # of other ranks' parts the block still has what was written
        raise ConfigError(
            f"parameter {self._names(found[:1])} was written through .data or its address inside em.unsharded(...): "
            f"pass write=True"
        )

    def _marks(self, slots: Sequence[Slot]) -> list[Mark]:
        return [self._scheduler.chunks[chunk].mark(index) for chunk, index in slots]

    def _names(self, slots: Sequence[Slot]) -> str:
        names = [repr(self._scheduler.chunks[chunk].names[index]) for chunk, index in slots[:4]]
        return ", ".join([*names, "..."] if len(slots) > len(names) else names)
