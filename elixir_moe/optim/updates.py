"""The updates of all chunks of a model: those of an elementwise optimizer, and those of whole matrices.

Owns the choice of an update for each chunk. Never decides whether or when to update.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from elixir_moe.optim.accepted import is_adam
from elixir_moe.optim.joined import elementwise_of
from elixir_moe.optim.muon_update import MuonUpdate
from elixir_moe.optim.shard_update import AdamUpdate, ElementwiseUpdate, TrainedPiece
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.whole_updates import WholeUpdates


class Updates:
    """The update of each chunk."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        chunks: Sequence[Chunk],
        pieces: list[list[TrainedPiece]],
        groups: list[dict[str, Any]],
        whole: WholeUpdates,
        seed: int,
    ) -> None:
        """`seed` is that of stochastic rounding."""
        alike = [(chunk, mine) for chunk, mine in zip(chunks, pieces, strict=True) if not chunk.spec.key.optimizer]
        matrices = [chunk for chunk in chunks if chunk.spec.key.optimizer]
        self.elementwise: AdamUpdate | ElementwiseUpdate | None = None
        self.whole = MuonUpdate(matrices, groups, whole) if matrices else None
        if (elementwise := elementwise_of(inner)) is None:
            return
        if is_adam(elementwise):
            self.elementwise = AdamUpdate([chunk for chunk, _ in alike], groups, seed)
            return
        own = {id(group) for group in elementwise.param_groups}
        self.elementwise = ElementwiseUpdate(
            elementwise,
            [mine for _, mine in alike],
            [chunk for chunk, _ in alike],
            {index: group for index, group in enumerate(groups) if id(group) in own},
        )

    def of(self, chunk: Chunk) -> AdamUpdate | ElementwiseUpdate | MuonUpdate:
        found = self.whole if chunk.spec.key.optimizer else self.elementwise
        assert found is not None
        return found

    def __iter__(self) -> Iterator[AdamUpdate | ElementwiseUpdate | MuonUpdate]:
        return (update for update in (self.whole, self.elementwise) if update is not None)
