"""What takes long to import, for the server that forks the ranks of the tests.

Starts no thread and computes nothing, since neither survives a fork.
"""

import torch._dynamo  # torch's optimizers import it at their first use
import torch.distributed.checkpoint  # noqa: F401
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_dtensor_caches

import elixir_moe  # noqa: F401

__all__ = ["clear_dtensor_caches"]
