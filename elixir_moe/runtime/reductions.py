"""The reductions of a step: gradients come from autograd, are summed over the ranks, and reach their shards.

Owns the reductions in flight and every change of `Gradients`. Knows nothing of modules and autograd (`hooks`) or of
updates (`optim`).

    gradient  ->  cache.acquire  ->  copied to a block  ->  reduce  ->  shard

On NCCL the shard is given the gradient when the reduction is issued, on gloo when it is waited for. The block is
released when the reduction is issued, and filled again when it has ended. The step machine keeps the order, on which
all ranks agree once a backward (`peers`). A step's update waits for all reductions, an early one (`optim.early`) for
its chunk's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch

from elixir_moe.chunks.cache_policy import ACQUIRE, RELEASE, gradients_of
from elixir_moe.chunks.ledger import REDUCTIONS_IN_FLIGHT
from elixir_moe.chunks.plan import Tier
from elixir_moe.chunks.residence import ATTACHED, CACHED, IN_PLACE
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.chunks.step_machine import Answer, ParamId
from elixir_moe.distributed.collectives import Work
from elixir_moe.errors import PlanError
from elixir_moe.memory.blocks import Blocks
from elixir_moe.memory.host_sums import HostSums
from elixir_moe.runtime.autograd import unrecorded
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.gathers import Gathers
from elixir_moe.runtime.gradients import Gradients
from elixir_moe.runtime.peers import Agreement
from elixir_moe.runtime.phase import WHOLE, Phase
from elixir_moe.runtime.streams import Streams
from elixir_moe.runtime.weights import GATHERING, Weights
from elixir_moe.runtime.writes import Writes
from elixir_moe.spans import span

_SMALL_BYTES, _MOST_SMALL = 1 << 16, 16
"""Gradients of at most so many bytes wait, at most so many, and are then copied together."""


class Reductions:
    """Takes gradients and brings them to their shards, for one wrapped model on one rank."""

    def __init__(
        self,
        weights: Sequence[Weights],
        gradients: Sequence[Gradients],
        gathers: Gathers,
        blocks: Blocks,
        staging: torch.Tensor | None,
        sums: HostSums | None,
        streams: Streams,
        statistics: Statistics,
        phase: Phase,
        writes: Writes,
        agreement: Agreement,
    ) -> None:
        self.used: set[tuple[int, int]] = set()
        """(chunk, index in the chunk) of parameters that got a gradient since the last update, on this rank."""
        self.issued = 0
        """Number of reductions so far."""
        self.apart = False
        """The ranks await different gradients in this backward."""
        self._reduced_early: Callable[[Chunk, Callable[[], None]], None] | None = None
        self.sums = sums
        """Adds gradients in host memory while backward runs, if they are added there."""
        self._weights, self._gradients, self._gathers, self._blocks = weights, gradients, gathers, blocks
        self._staging = staging
        self._streams, self._statistics, self._phase, self._writes = streams, statistics, phase, writes
        self._agreement = agreement
        self._has_host_shards = any(one.chunk.shard.tier is not Tier.DEVICE for one in weights)
        self._gradient_blocks = 0
        """Number of blocks that hold gradients."""
        self._in_flight: deque[Work] = deque()
        """Reductions that the host must wait for."""
        self._outside: deque[Gradients] = deque()
        """Gradients that left memory outside the blocks, which the device may still use; oldest first."""
        gathers.free_a_block = self._move_gradients_out

    # --------------------------------------------------------------------------------------------------- gradients come

    def add_gradient(self, index: int, position: int, gradient: torch.Tensor) -> None:
        """Takes the gradient of parameter `position` of chunk `index`, of the parameter's shape.

        Small ones that follow the first stay as autograd made them until a large one comes, many have come, or the
        reduction. Then they are copied together.
        """
        gradients = self._gradients[index]
        if index in self._phase.early:
            hint = "reentrant checkpoints bring them; train without update_in_backward, a Trainer by =False"
            self._phase.check(WHOLE, f"a second gradient of {gradients.chunk.names[position]!r} ({hint})")
        self._streams.enter_compute()  # autograd may have made it on a stream of its own
        self.used.add((index, position))
        gradients.pending.append((position, gradient))
        small = gradient.nbytes <= _SMALL_BYTES and len(gradients.pending) <= _MOST_SMALL
        if gradients.buffer is None or not small:
            self._copy_in(gradients)

    def reserve(self, index: int) -> None:
        """Requests a block for gradients that only some ranks get, so that all ranks request it at the same time."""
        if self._gradients[index].chunk.spec.residence is CACHED:
            self._copy_in(self._gradients[index])

    def _copy_in(self, gradients: Gradients, *, at_once: bool = False) -> None:
        """Copies the gradients that have come to the chunk's memory.

        While there is no block for them, gradients stay the tensors autograd made. `at_once`: they get temporary memory
        outside the rCache instead, since the plan did not foresee the order in which they have come.
        """
        self._streams.enter_compute()
        with unrecorded():
            if gradients.buffer is None:
                if gradients.chunk.spec.residence is CACHED and not self._has_block(gradients):
                    if not at_once:
                        return
                    self._statistics.blocks_replaced += 1
                gradients.order_behind_reduction()  # the last one's sum may have to be read, or moved
                self._make_way(gradients)
                gradients.open()
            self._streams.join_compute(gradient for _, gradient in gradients.pending)
            gradients.copy_pending()

    def _make_way(self, gradients: Gradients) -> None:
        """Has the host wait until another gradient outside the blocks keeps within the plan.

        Its memory is not used again before the host knows that the reduction has ended, and a host runs far ahead.
        """
        if gradients.block is None and gradients.chunk.spec.residence is not ATTACHED:
            while len(self._outside) > REDUCTIONS_IN_FLIGHT or gradients in self._outside:
                reduction = self._outside.popleft().reduction
                if reduction is not None:
                    reduction.synchronize()

    def _has_block(self, gradients: Gradients) -> bool:
        """Requests a block for gradients; returns whether they got one."""
        if self._gradient_blocks >= (self._blocks.foreseen_gradients if self.apart else self._blocks.for_gradients):
            return False  # where ranks differ, weights leave for no gradients: each rank would drop others
        item = gradients_of(gradients.chunk.spec.index)
        try:
            self._gathers.ask(ACQUIRE, (item,), tracked=True, who=f"a gradient of {gradients.chunk.label}")
        except PlanError:
            return False
        gradients.block = self._blocks.shared[self._gathers.cache.block_of(item)]
        self._gradient_blocks += 1
        return True

    def _move_gradients_out(self) -> bool:
        """Moves the gradients of one block to temporary memory; False if all blocks of gradients were foreseen."""
        if self._gradient_blocks <= self._blocks.foreseen_gradients:
            return False
        gradients = next(gradients for gradients in self._gradients if gradients.block is not None)
        assert gradients.buffer is not None
        self._statistics.blocks_replaced += 1
        with unrecorded():
            gradients.buffer.move_out()
        self._leave_block(gradients, self._streams.all_compute())
        return True

    def _leave_block(self, gradients: Gradients, work: Work) -> None:
        """Releases the gradients' block, which may be written again when `work` has ended."""
        assert gradients.block is not None
        gradients.block.vacate(work)
        gradients.block = None
        self._gradient_blocks -= 1
        self._gathers.ask(RELEASE, (gradients_of(gradients.chunk.spec.index),), tracked=True, who="a release")

    # ----------------------------------------------------------------------------------------------------- the backward

    def agree(self, used: Sequence[int], awaited: Sequence[ParamId]) -> Callable[[], Answer]:
        """Implements `StepActions.agree`. Collective; waits for the other ranks only where backward may gather."""
        answer = self._agreement(used, awaited, self._gathers.gathered, self._phase)
        self._phase.count_backward()
        self._gathers.gathered.clear()
        if not self._gathers.of_several_ranks:
            return answer
        agreed = answer()  # before this rank asks for what another does not need
        if not agreed.same_gradients:
            self.apart = True
            self._gathers.keep_gathered()
        return lambda: agreed

    def update_early(self, begin: Callable[[Chunk, Callable[[], None]], None] | None) -> None:
        """Lets updates begin in the next backward, or, given None, no more.

        `begin` is called with a chunk of `Phase.early` whose gradient is on its way to its shard, and a function that
        waits for it.
        """
        self._reduced_early = begin

    @contextmanager
    def before_others(self) -> Iterator[None]:
        """A context around a backward that others of the same step follow: no update begins in it."""
        begin, self._reduced_early = self._reduced_early, None
        try:
            yield
        finally:
            self._reduced_early = begin

    # ----------------------------------------------------------------------------------------------------------- reduce

    def finish_backward(self) -> None:
        """Reduces the remaining gradients; to be called when no further gradient can come."""
        for gradients in reversed(self._gradients):
            if gradients.buffer is not None or gradients.pending:
                self.reduce(gradients.chunk.spec.index)
        self._writes.end_backward()

    def reduce(self, index: int) -> None:
        """Issues the reduction of a chunk's gradients: every rank gets the sum for its shard."""
        gradients = self._gradients[index]
        chunk = gradients.chunk
        self._copy_in(gradients, at_once=True)
        assert gradients.buffer is not None
        self._phase.reduce()
        if self._phase.watched and chunk.spec.residence is not CACHED:  # the sum may take the place of the weights
            self._writes.keep(self._weights[index])
        self._let_update(gradients)
        with unrecorded():
            sent = gradients.buffer.complete()
        issuing = self._phase.issuing(chunk.label) if chunk.communicator.size > 1 else nullcontext()
        with self._streams.reducing(), issuing, span("reduce", chunk.label):
            work = self._streams.marked(self._issue(gradients, sent))
            work.lost = self._phase.drop_gradients
            if work.pending:
                self._in_flight.append(work)
            gradients.reduction, gradients.buffer = work, None
        if gradients.block is None:
            self._streams.keep_for_reducing(sent)
            if chunk.spec.residence is not ATTACHED:
                self._outside.append(gradients)
        self.issued += 1
        self._leave_in_flight(REDUCTIONS_IN_FLIGHT)
        if gradients.block is not None:
            self._leave_block(gradients, work)

    def _let_update(self, gradients: Gradients) -> None:
        """Lets the chunk's update begin once its gradient is reduced, if it may in this backward; alike on all ranks.

        A gather in the queue would read the shard during the update. A watched one looks for writes first.
        """
        if self._reduced_early is None or self._phase.watched or gradients.chunk.shard.tier is Tier.DEVICE:
            return
        weights = self._weights[gradients.chunk.spec.index]
        if weights.state is not GATHERING and weights.moved() is None:
            self._writes.keep(weights)
            self._phase.early.setdefault(gradients.chunk.spec.index)

    def _issue(self, gradients: Gradients, sent: torch.Tensor) -> Work:
        chunk = gradients.chunk

        def add(reduced: torch.Tensor, squares: float | None = None) -> None:
            with unrecorded():
                self._add_reduced(gradients, reduced, squares)
                if self._reduced_early is not None and chunk.spec.index in self._phase.early:
                    self._reduced_early(chunk, self._streams.until_issued_ends())
            self._statistics.bytes_offloaded[chunk.shard.gradient_tier.value] += reduced.nbytes

        communicator, spec = chunk.communicator, chunk.spec
        nbytes = spec.reduced_bytes(over_gloo=communicator.over_gloo)
        staging = self._staging_for(chunk, spec.key.reduce_dtype) if nbytes > spec.nbytes else None
        counts = self._statistics.collective_bytes
        if spec.shards == 1:
            if communicator.size > 1:
                counts[chunk.group, "all_reduce"] += 2 * nbytes
            return communicator.all_reduce(sent, add, staging, of=chunk.label)
        counts[chunk.group, "reduce_scatter"] += nbytes
        near = chunk.shard.tier is Tier.DEVICE or sent.device.type == "cpu"
        place = chunk.shard.place_for_gradient() if near and communicator.over_gloo else None
        if communicator.needs_staging(place):
            staging = self._staging_for(chunk, sent.dtype)
        return communicator.reduce_scatter(sent, staging, add, place, tag=spec.index, of=chunk.label)

    def _staging_for(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """The staging buffer, which serves one reduction at a time."""
        assert self._staging is not None
        self._leave_in_flight(0)
        return self._staging[: chunk.spec.staging_bytes(over_gloo=chunk.communicator.over_gloo)].view(dtype)

    # ---------------------------------------------------------------------------------------------------- to the shards

    def _add_reduced(self, gradients: Gradients, reduced: torch.Tensor, squares: float | torch.Tensor | None) -> None:
        """Adds this rank's part of the reduced gradient to the shard, after the last use of values it overwrites."""
        chunk = gradients.chunk
        if chunk.spec.residence is IN_PLACE:
            if self._weights[chunk.spec.index].holds:
                gradients.waiting.append((reduced, squares))
                return
            self._gathers.make_room(chunk.spec.index)
        chunk.shard.add_gradient(reduced, squares)

    def add_waiting(self, index: int) -> None:
        """Adds gradients to the shard that waited for the last use of the values, as the end of their reduction."""
        gradients = self._gradients[index]
        if gradients.waiting and not self._weights[index].holds:
            self._streams.join_compute()  # any compute stream may have used the values
            with unrecorded(), self._streams.reducing():
                self._finish(partial(self._add_all_waiting, gradients))
                gradients.reduction = self._streams.marked(Work())

    def _add_all_waiting(self, gradients: Gradients) -> None:
        waiting, gradients.waiting = gradients.waiting, []
        for reduced, squares in waiting:
            self._add_reduced(gradients, reduced, squares)

    def _leave_in_flight(self, most: int) -> None:
        while len(self._in_flight) > most:
            self._in_flight[0].wait()
            self._in_flight.popleft()  # not before: after an interrupt `drain` waits again

    def _finish(self, end: Callable[[], None]) -> None:
        """Does the last part of reductions; if it fails or is interrupted, a sum is lost."""
        try:
            end()
        except BaseException:
            self._phase.drop_gradients()
            raise

    def drain(self) -> None:
        """Waits until every gradient is in its shard and every fetch has left it.

        The host waits too if a shard is outside the device tier.
        """
        self._leave_in_flight(0)
        for gradients in self._gradients:
            self.add_waiting(gradients.chunk.spec.index)
        self._finish(partial(self._streams.end_step, host=self._has_host_shards))
        if self.sums is not None:
            self._finish(self.sums.finish)

    def clear(self) -> None:
        """Drops all gradients that have been reduced, without an update."""
        for gradients in self._gradients:
            if gradients.chunk.spec.key.trainable:
                gradients.clear()

    # ------------------------------------------------------------------------------------------------------------ reset

    def rewind(self) -> None:
        """Starts another step."""
        self.apart = False

    def reset(self) -> None:
        """Drops gradients that are not reduced yet; to be called when nobody holds weights."""
        for gradients in self._gradients:
            with unrecorded():
                self._finish(partial(self._add_all_waiting, gradients))
            gradients.drop_unreduced()
        self._gradient_blocks = 0

    def abandon(self) -> None:
        """Drops all gradients, when the process groups are gone."""
        self._in_flight.clear()
        for gradients in self._gradients:
            gradients.reduction = None
            gradients.drop_unreduced()
        self.clear()
