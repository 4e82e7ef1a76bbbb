"""Updates of whole matrices: what is joined has come."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elixir_moe.distributed.collectives import Work
from elixir_moe.runtime.phase import BROKEN, Phase
from elixir_moe.runtime.whole_updates import WholeUpdates


def test_slices_of_a_matrix_are_joined_when_they_have_come() -> None:
    def gather(slices: torch.Tensor, tag: int, *, of: str) -> Work:
        return Work(finish=partial(slices[3:].fill_, 2))

    nothing, communicator = cast(Any, None), cast(Any, SimpleNamespace(index=0, all_gather=gather))
    updates = WholeUpdates(nothing, nothing, None, nothing, nothing, Phase(), {(0, 1): communicator})
    assert updates.join(torch.ones(3), [((0, 1), 0)]).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def test_an_interrupt_of_an_exchange_leaves_the_ranks_apart() -> None:
    def gather(*_: Any, **__: Any) -> Work:
        raise KeyboardInterrupt

    nothing, phase, communicator = cast(Any, None), Phase(), cast(Any, SimpleNamespace(index=0, all_gather=gather))
    updates = WholeUpdates(nothing, nothing, None, nothing, nothing, phase, {(0, 1): communicator})
    phase.write("a step")
    with pytest.raises(KeyboardInterrupt):
        updates.join(torch.ones(3), [((0, 1), 0)])
    assert phase.now is BROKEN
