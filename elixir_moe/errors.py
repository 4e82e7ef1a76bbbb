"""The errors a user can meet.

Owns the exception types, the answer to whether an error is out of memory, and the suggestion of the nearest known name.
Every message names the parameter, chunk or rank, what was expected, what was found and what to change. An `assert`
elsewhere in the package means a bug of ours, never a user's mistake.
"""

import errno
from collections.abc import Iterable
from difflib import get_close_matches

import torch

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


class ElixirError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(ElixirError):
    """A setting, file or command-line value is wrong."""


class UsageError(ElixirError):
    """A wrapped model or its optimizer was used in a way that cannot work."""


class LayoutError(ElixirError):
    """A mesh, pattern or rule does not fit the model or the ranks."""


class PlanError(ElixirError):
    """A plan cannot be carried out on this model, or was broken while it ran."""


class TierError(ElixirError):
    """A memory tier (device, host, disk) cannot hold what the plan puts there."""


class DiskError(TierError):
    """The disk tier failed while it was used: the state on it is lost, though the plan fits."""


class CheckpointError(ElixirError):
    """A checkpoint is missing, damaged, hostile or does not fit the model."""


class OutOfStepError(ElixirError):
    """Collectives or steps of this rank no longer match those of other ranks."""


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


def nothing_called(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """The error for a `name` that no `what` ("model") has, with the nearest known name and all known names."""
    known = list(known)
    hint = meant(name, known)
    return ConfigError(f"no {what} is called {name!r}{f'; {hint}' if hint else '.'} There are: {', '.join(known)}")


def meant(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?``, or "" if no known name is near."""
    near = get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else ""
