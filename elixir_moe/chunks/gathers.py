"""The line of gathers that were decided and have not begun.

Owns their order, which is that of the decisions and so the same on all ranks, and when the next may begin. Nobody waits
for an update whose chunk is not needed yet, nor, but for the next chunk, for a reduction on its way out of the block.
"""

from collections import deque
from collections.abc import Callable

from elixir_moe.chunks.chunk import Chunk
from elixir_moe.chunks.policy import CacheState
from elixir_moe.chunks.rcache import Block


class Gathers:
    """The line of one wrapped model on one rank."""

    def __init__(self, cache: CacheState, begin: Callable[[Chunk, Block], None]) -> None:
        """`begin` starts the gather of a chunk into its block."""
        self._cache = cache
        self._begin = begin
        self._line: deque[tuple[Chunk, Block]] = deque()

    def add(self, chunk: Chunk, block: Block) -> None:
        """Puts a gather last in line."""
        self._line.append((chunk, block))

    def begin(self, until: Chunk | None = None) -> None:
        """Begins gathers as long as the first in line may; in any case up to `until`, which is in line."""
        while self._line:
            chunk, block = self._line[0]
            if until is None and not self._may_begin(chunk, block):
                break
            self._begin(chunk, block)
            self._line.popleft()  # not before: what interrupts it leaves it in line
            until = None if chunk is until else until

    def finish(self) -> None:
        """Begins all that is in line."""
        if self._line:
            self.begin(until=self._line[-1][0])

    def clear(self) -> None:
        """Nothing is to be gathered any more."""
        self._line.clear()

    def _may_begin(self, chunk: Chunk, block: Block) -> bool:
        soon = chunk.spec.index in self._cache.upcoming
        if chunk.communicator.tagged:
            updating = chunk.home.updating
        else:  # when an update ends differs from rank to rank, and so would the order among process groups
            updating = chunk.home.has_update and not soon
        return not updating and (block.quiet or soon)
