"""The exit of a process that still has process groups, as after an error.

Owns the last action before Python finalizes. gloo's worker threads free the tensors of a finished collective, for which
they take Python's GIL. A worker that asks for the GIL while Python finalizes would end the process with SIGABRT
(csrc/ending.hpp). Whether a worker is done cannot be seen from outside, and waiting for a worker whose peers are gone
would hang, so such a worker is left blocked. It may then hold the mutex of its process group, for which the group's
destructor would wait, so process groups are kept until the process has exited.
"""

import atexit
from collections.abc import Iterator
from functools import cache

import torch.distributed as dist

from elixir_moe.torch_private import backend_on, devices_of, process_groups

try:
    from elixir_moe import _native
except ImportError:  # a source tree that was never built: the exit code is as torch leaves it
    _native = None  # type: ignore[assignment]


@cache  # one hook is enough
def keep_exit_codes() -> None:
    """Makes this process end with its own exit code, whatever gloo's workers are doing then."""
    if _native is not None and dist.is_available():
        atexit.register(lambda: _native.begin_exit(list(_gloo_backends())))


def _gloo_backends() -> Iterator[object]:
    for group in process_groups():
        backends = (backend_on(group, device) for device in devices_of(group))
        yield from (backend for backend in backends if backend.name() == "gloo")
