"""Which chunks a backward reduces, and in which order: the same on all ranks.

Owns the order, what each chunk still waits for, and one small exchange at the beginning of each backward among the
ranks that hold one model. Which modules a rank runs is the user's business: layers dropped at random, a head for each
task, a tower for pictures alone. Chunks that every rank has whole are reduced all the same, with zeros from ranks that
did not use them. Chunks that are scattered have to be gathered by all ranks alike; where they were not, all ranks learn
it here, and no gradient is summed with another's. So it is where a rank has issued a collective that others have not,
and nothing but their order tells which belong together: an interrupt strikes each rank at another place.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from elixir_moe.distributed.collectives import Work
from elixir_moe.distributed.waits import Wait
from elixir_moe.errors import LayoutError, OutOfStepError
from elixir_moe.runtime.chunk import Chunk

Agreement = Callable[[Sequence[int], Sequence[int]], Callable[[], list[int]]]
"""Asks, for the chunks this rank used, in its order, and those it has gathered since the last backward; what it returns
waits for the answer: all that are to be reduced, in the order of all."""


def alone(used: Sequence[int], gathered: Sequence[int]) -> Callable[[], list[int]]:
    """There is nobody to agree with."""
    return lambda: list(used)


_WHAT = "the agreement on a backward"


class Peers:
    """The ranks of a process group hold the same chunks.

    Args:
        process_group: on CPU tensors.
        chunks: all of them.
    """

    def __init__(self, process_group: dist.ProcessGroup, chunks: Sequence[Chunk]) -> None:
        self._process_group = process_group
        self._communicators = list({id(chunk.communicator): chunk.communicator for chunk in chunks}.values())
        self._scattered = [chunk.spec.shards > 1 for chunk in chunks]
        self._names = [chunk.label for chunk in chunks]
        self._ranks = dist.get_process_group_ranks(process_group)

    def __call__(self, used: Sequence[int], gathered: Sequence[int]) -> Callable[[], list[int]]:
        """The order of the first rank, then what others have used besides. Collective; so is what it returns.

        Raises:
            LayoutError: ranks have gathered or used different scattered chunks; on all ranks, with the answer.
            OutOfStepError: some have issued more collectives than others; likewise.
        """
        chunks = len(self._scattered)
        issued = [n for communicator in self._communicators for n in communicator.issued]
        facts = [_digest(issued), _digest(gathered), len(gathered), len(used)]
        mine = torch.tensor([*facts, *used, *[-1] * (chunks - len(used))], device="cpu")
        table = mine.new_empty(self._process_group.size(), len(mine))
        with Wait(_WHAT, self._ranks):
            work = dist.all_gather(list(table), mine, group=self._process_group, async_op=True)
        kept = tuple(gathered)
        return lambda: self._answer(Work([work], what=_WHAT, ranks=self._ranks), table, kept)

    def _answer(self, work: Work, table: torch.Tensor, gathered: Sequence[int]) -> list[int]:
        work.wait()
        orders = [row[4 : 4 + row[3]] for row in table.tolist()]
        scattered = [{chunk for chunk in order if self._scattered[chunk]} for order in orders]
        found = ""
        if (table[:, 1:3] != table[0, 1:3]).any():
            found = self._difference("gathered", gathered)
        elif any(theirs != scattered[0] for theirs in scattered):
            found = self._difference("used", sorted(scattered[self._process_group.rank()]))
        if (table[:, 0] != table[0, 0]).any():
            raise OutOfStepError(
                f"some ranks have issued more gathers or reductions than others, as after an interrupt that strikes "
                f"them at different places{', or where they run other modules: ' * bool(found)}{found}. What comes "
                f"next would meet another chunk's: start all ranks again, from the latest checkpoint"
            )
        if found:
            raise LayoutError(
                f"{found}: weights that are scattered must be used by all ranks, in one order. Run the same modules on "
                f"every rank (multiply by zero what is not wanted), or keep weights whole with Plan.ddp()"
            )
        return list(dict.fromkeys(chunk for order in orders for chunk in order))

    def _difference(self, verb: str, chunks: Sequence[int]) -> str:
        """The first one, in words. Collective."""
        everyone: list[Any] = [None] * self._process_group.size()
        with Wait("the comparison of what ranks have run", self._ranks):
            dist.all_gather_object(everyone, list(chunks), group=self._process_group)
        other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        pairs = zip_longest(everyone[0], everyone[other])
        first, second = next((self._name(a), self._name(b)) for a, b in pairs if a != b)
        return (
            f"since the last backward rank {self._ranks[0]} has {verb} {first} where rank {self._ranks[other]} has "
            f"{verb} {second}"
        )

    def _name(self, chunk: int | None) -> str:
        return "nothing more" if chunk is None else self._names[chunk]


def _digest(numbers: Sequence[int]) -> int:
    return zlib.crc32(torch.tensor(numbers, dtype=torch.int64, device="cpu").numpy().tobytes())


class Reductions:
    """The order of one backward's reductions."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self.gathered: list[int] = []
        """Chunks whose shards were gathered since the last backward."""
        self.out_of_step = ""
        """Why no collective of these ranks is to be trusted any more."""
        self._answer: Callable[[], list[int]] | None = None
        self._order: deque[int] = deque()
        self._awaited: dict[int, set[int]] = {}
        self._news = False

    def begin(self, used: Sequence[int], awaited: Mapping[int, set[int]]) -> None:
        """A backward begins. Collective; nobody is waited for before a first chunk is complete.

        Args:
            used: trainable chunks used in its forward on this rank, those used last first.
            awaited: for each, the indices of its parameters whose gradients are awaited.
        """
        self._answer = self._agreement(used, self.gathered)
        self.gathered.clear()
        self._awaited = {chunk: awaited[chunk] for chunk in used}

    def awaits(self, chunk: int, position: int) -> bool:
        """Whether the gradient of parameter `position` of `chunk` is still expected."""
        return position in self._awaited.get(chunk, ())

    def awaits_any(self, chunk: int) -> bool:
        """Whether gradients of `chunk` are still expected."""
        return bool(self._awaited.get(chunk))

    def expect_no_more(self, chunk: int, position: int) -> bool:
        """It has come, or will not come in this backward; returns whether the chunk waits for nothing any more."""
        awaited = self._awaited.get(chunk)
        if awaited is None:
            return False
        awaited.discard(position)
        self._news |= not awaited
        return not awaited

    def expect_nothing(self) -> None:
        """No gradient can come any more."""
        for positions in self._awaited.values():
            positions.clear()
        self._news = True

    def ready(self) -> Iterator[int]:
        """The next chunks that wait for nothing, those that only other ranks have used among them."""
        if not self._news:
            return
        self._news = False
        if self._answer is not None:
            answer, self._answer = self._answer, None
            try:
                self._order = deque(answer())
            except OutOfStepError as error:
                self.out_of_step = str(error)
                raise
        while self._order and not self._awaited.get(self._order[0]):
            yield self._order.popleft()

    def clear(self) -> None:
        """The backward is over, or given up."""
        self._answer = None
        self._order.clear()
        self._awaited = {}
        self._news = False
