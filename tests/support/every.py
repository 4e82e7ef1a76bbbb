"""`all` for assertions: it fails where there is nothing to look at, so that an empty list proves nothing."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def every(answers: Iterable[object]) -> bool:
    """Whether all answers are true.

    Raises:
        AssertionError: there are none.
    """
    found = list(answers)
    assert found, "nothing was compared"
    return all(found)


def same_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether two dicts have the same names, with the same values bit for bit.

    Raises:
        AssertionError: there are none.
    """
    return found.keys() == wanted.keys() and every(torch.equal(found[name], value) for name, value in wanted.items())
