"""Tensors with a shape and no data: meta and fake tensors, on which the planner runs a model.

Owns the test whether a tensor has data, and the routing assumed without data.
"""

from torch import Tensor

from elixir_moe.torch_private import FakeTensor


def has_data(tensor: Tensor) -> bool:
    """False for meta and fake tensors: nothing to send, nothing to read."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def even_counts(total: int, num_experts: int) -> list[int]:
    """`total` choices spread over the experts as evenly as whole numbers allow, as balanced routing would."""
    share, rest = divmod(total, num_experts)
    return [share + (e < rest) for e in range(num_experts)]
