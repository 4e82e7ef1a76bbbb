"""How far this rank is in training, and whether the ranks of a model can still go on together.

Owns the count of steps and backwards, their comparison between ranks, and the reason why ranks can no longer go on. An
interrupt may stop each rank at a different place: one gives up a step or a backward that another takes. From then on
they would mix weights or gradients of different steps, so all ranks raise at their next agreement.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from elixir_moe.distributed.all_ranks import gathered
from elixir_moe.errors import OutOfStepError

Place = tuple[int, int]
"""Number of steps since `wrap` or the last load, and of backwards since gradients were cleared."""
_REMEDY = "start all ranks again, from the latest checkpoint"


class Progress:
    """The place of this rank in training; ranks that train together are at the same one."""

    def __init__(self) -> None:
        self.steps = 0
        """Number of steps since `wrap` or the last load."""
        self.backwards = 0
        """Number of backwards that have begun since gradients were cleared."""
        self.out_of_step = ""
        """Why the ranks can no longer go on together; empty if they can."""

    @property
    def place(self) -> Place:
        """This rank's place."""
        return self.steps, self.backwards

    def check(self) -> None:
        """Raises OutOfStepError if the ranks can no longer go on together."""
        if self.out_of_step:
            raise OutOfStepError(self.out_of_step)

    def refuse(self, reason: str) -> None:
        """Raises OutOfStepError, now and ever after."""
        self.out_of_step = f"{reason}: {_REMEDY}"
        self.check()

    def compare(self, places: Sequence[Place], ranks: Sequence[int]) -> None:
        """Raises OutOfStepError, now and ever after, unless the places of all `ranks` are the same."""
        for rank, place in zip(ranks, places, strict=True):
            if place != places[0]:
                self.refuse(
                    f"rank {ranks[0]} {_in_words(places[0])}, rank {rank} {_in_words(place)}, as after an interrupt "
                    f"where one rank gave up what another did; they would mix different steps"
                )

    def agree(self, process_group: dist.ProcessGroup) -> None:
        """Compares the places of all ranks of a process group. Collective; raises as `compare`."""
        self.compare(gathered(self.place, process_group), dist.get_process_group_ranks(process_group))

    @contextmanager
    def issuing(self, what: str) -> Iterator[None]:
        """Around the issue of a collective and its record: what is interrupted between them would be issued twice.

        Another rank's next message would then be taken for this one's.
        """
        self.check()
        self.out_of_step = (
            f"the gather or reduction of {what} was interrupted, and other ranks may have a part of it, which what "
            f"comes next would meet: {_REMEDY}"
        )
        yield
        self.out_of_step = ""  # not after an error


def _in_words(place: Place) -> str:
    return f"has taken {place[0]} steps and {place[1]} backwards of the next one"
