"""What takes long to import, for the server that forks the ranks of the tests.

Starts no thread and computes nothing, since neither survives a fork: transformers' Trainer, whose import starts a
thread, is left out.
"""

import peft  # noqa: F401  # with transformers and what its models share
import torch._dynamo  # torch's optimizers import it at their first use
import torch.distributed.checkpoint  # noqa: F401

from tests.support import checkpoint_cases, hf_cases, megatron_cases, train_cases  # noqa: F401
