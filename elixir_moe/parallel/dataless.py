"""Tensors that have a shape and no data: meta and fake tensors, on which a planner runs a model.

Owns the question whether a tensor has data, and the routing assumed where it has none.
"""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_data(tensor: Tensor) -> bool:
    """False for meta and fake tensors: nothing to send, nothing to read."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def even_counts(total: int, num_experts: int) -> list[int]:
    """`total` choices spread over the experts as evenly as whole numbers allow: what balanced routing would give."""
    share, rest = divmod(total, num_experts)
    return [share + (e < rest) for e in range(num_experts)]
