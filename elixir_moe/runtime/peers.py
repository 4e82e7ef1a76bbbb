"""The agreement of all ranks on the chunks that a backward reduces, and on their order.

Owns one small exchange among the ranks of a model at the beginning of each backward.

Ranks may run different modules: layers dropped at random, a head for each task, a tower only for pictures. Chunks that
every rank has whole are reduced all the same, with zeros from ranks that did not use them. Scattered chunks must be
gathered by all ranks in the same order. If they were not, all ranks raise here, before gradients of different chunks
are summed. Where backward gathers them again, the losses of all ranks must depend on the same parameters, except those
of units that choose. If they do not, all ranks raise here, before the first gather. The same holds if ranks are at
different places in training (`phase`), or if one has issued a collective that others have not (`Communicator.issued`).
"""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from elixir_moe.chunks.step_machine import Answer, ParamId
from elixir_moe.distributed.all_ranks import ControlGroups, disagreement
from elixir_moe.distributed.collectives import Work, end_gloo
from elixir_moe.distributed.waits import Series, Wait
from elixir_moe.errors import LayoutError
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.phase import Phase

Agreement = Callable[[Sequence[int], Sequence[ParamId], Sequence[int], Phase], Callable[[], Answer]]
"""Starts the exchange, given the chunks this rank used, in its order, the parameters on whose gradients ranks must
agree, the chunks this rank gathered since the last backward, and its place in training. The function it returns waits
for the answer."""


def of_one_rank(
    used: Sequence[int], awaited: Sequence[ParamId], gathered: Sequence[int], phase: Phase
) -> Callable[[], Answer]:
    """The agreement of a single rank."""
    return lambda: Answer(list(used))


_WHAT = "the agreement on a backward"


class Peers:
    """The agreement of ranks that hold the same chunks.

    Args:
        groups: has the process group of these ranks, for CPU tensors, until it is closed.
        chunks: all chunks.
        stays: no weights need leave the rCache in a step, so ranks may await gradients of different parameters.
    """

    def __init__(self, groups: ControlGroups, chunks: Sequence[Chunk], *, stays: bool) -> None:
        self._stays = stays
        self._groups = groups
        self._communicators = list({id(chunk.communicator): chunk.communicator for chunk in chunks}.values())
        self._scattered = [chunk.spec.shards > 1 for chunk in chunks]
        self._labels = [chunk.label for chunk in chunks]
        self._names = [chunk.names for chunk in chunks]
        self._ranks = groups.peers
        self._turns = Series("agreements", self._ranks, lambda: end_gloo(groups.peers_group))

    def __call__(
        self, used: Sequence[int], awaited: Sequence[ParamId], gathered: Sequence[int], phase: Phase
    ) -> Callable[[], Answer]:
        """The first rank's order, then chunks that only others used. Collective, as is the returned function.

        Raises:
            LayoutError: ranks have gathered or used different scattered chunks, or await gradients of different
                parameters; on all ranks, from the returned function.
            OutOfStepError: ranks are at different places in training, or some have issued more collectives than others;
                likewise.
        """
        chunks = len(self._scattered)
        issued = [n for communicator in self._communicators for n in communicator.issued]
        gradients = _digest([number for slot in sorted(set(awaited)) for number in slot])
        facts = [*phase.place, _digest(issued), _digest(gathered), len(gathered), gradients, len(used)]
        mine = torch.tensor([*facts, *used, *[-1] * (chunks - len(used))], device="cpu")
        table = mine.new_empty(len(self._ranks), len(mine))
        turn = self._turns.next()
        with Wait(_WHAT, self._ranks, turn):
            work = dist.all_gather(list(table), mine, group=self._groups.peers_group, async_op=True)
        kept = tuple(awaited), tuple(gathered)
        return lambda: self._answer(Work([work], what=_WHAT, ranks=self._ranks, turn=turn), table, *kept, phase)

    def _answer(
        self, work: Work, table: torch.Tensor, awaited: Sequence[ParamId], gathered: Sequence[int], phase: Phase
    ) -> Answer:
        work.wait()
        rows = table.tolist()
        phase.compare([(steps, backwards) for steps, backwards, *_ in rows], self._ranks)
        orders = [row[7 : 7 + row[6]] for row in rows]
        scattered = [{chunk for chunk in order if self._scattered[chunk]} for order in orders]
        found = ""
        if (table[:, 3:5] != table[0, 3:5]).any():
            found = self._difference("gathered", gathered)
        elif any(theirs != scattered[0] for theirs in scattered):
            found = self._difference("used", sorted(scattered[self._ranks.index(dist.get_rank())]))
        if (table[:, 2] != table[0, 2]).any():
            phase.desync(
                f"some ranks have issued more gathers or reductions than others, as after an interrupt that strikes "
                f"them at different places{', or where they run other modules: ' * bool(found)}{found}. What comes "
                f"next would meet another chunk's"
            )
        if found:
            raise LayoutError(
                f"{found}: weights that are scattered must be used by all ranks, in one order. Run the same modules on "
                f"every rank (multiply by zero what is not wanted), or keep weights whole with Plan.ddp()"
            )
        same_gradients = bool((table[:, 5] == table[0, 5]).all())
        if not same_gradients and not self._stays:
            self._refuse_other_gradients(awaited)
        order = list(dict.fromkeys(chunk for order in orders for chunk in order))
        return Answer(order, all(o == orders[0] for o in orders), same_gradients)

    def _refuse_other_gradients(self, awaited: Sequence[ParamId]) -> NoReturn:
        """Raises LayoutError with the first parameter that gets a gradient on some ranks only. Collective."""
        everyone = self._exchanged(awaited)
        found = [set(theirs) for theirs in everyone]
        chunk, index = next(slot for theirs in everyone for slot in theirs if any(slot not in own for own in found))
        name = self._names[chunk][index]
        having, lacking = (
            next(rank for rank, own in zip(self._ranks, found, strict=True) if ((chunk, index) in own) is has)
            for has in (True, False)
        )
        raise LayoutError(
            f"the loss of rank {having} depends on parameter {name!r}, and that of rank {lacking} does not: where "
            f"backward gathers scattered weights again, the losses of all ranks must depend on the same parameters. "
            f"Add what is left out times zero (0.0 * output.sum()), or keep weights gathered with Plan.zero2()"
        )

    def _difference(self, verb: str, chunks: Sequence[int]) -> str:
        """The first difference between ranks, in words. Collective."""
        everyone = [[self._labels[chunk] for chunk in theirs] for theirs in self._exchanged(chunks)]
        return disagreement(f"the chunks {verb} since the last backward", everyone, self._ranks) or ""

    def _exchanged(self, mine: Sequence[Any]) -> list[Any]:
        """The list of every rank. Collective."""
        everyone: list[Any] = [None] * len(self._ranks)
        with Wait("the comparison of what ranks have run", self._ranks):
            dist.all_gather_object(everyone, list(mine), group=self._groups.peers_group)
        return everyone


def _digest(numbers: Sequence[int]) -> int:
    return zlib.crc32(torch.tensor(numbers, dtype=torch.int64, device="cpu").numpy().tobytes())
