"""Whether an error says that memory is exhausted.

Owns the answer. Raises nothing.
"""

import errno

import torch

from elixir_moe.errors import ElixirError

_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, its driver, page-locked memory, NCCL's "Cuda failure 2 'out of memory'", Triton
    "ALLOC_FAILED",  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER, cuFFT
    "ALLOCATION_FAILED",  # cuDNN 9
    "can't allocate memory",  # torch's allocators of host memory
    "not enough memory",
    "Cannot allocate memory",  # the system
    "bad_alloc",
)
"""Parts of the messages of those who have no exception type for it: they raise RuntimeError or a subclass."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device or the host refused an allocation; an error of this library is asked for its cause.

    CUDA's own type is `torch.OutOfMemoryError`, a RuntimeError like `torch.AcceleratorError` (other failures of CUDA)
    and `torch.distributed.DistBackendError` (NCCL), which only their texts tell apart.
    """
    if isinstance(error, ElixirError):
        return is_out_of_memory(error.__cause__)
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
