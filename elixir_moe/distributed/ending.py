"""How a process ends that still has process groups, as after an error.

Owns the last thing that is done before Python finalizes. gloo's workers free the tensors of a collective when it is
done, and take Python's lock for that; a worker that asks while Python finalizes would end the process with SIGABRT
(csrc/ending.hpp). Nobody can tell from outside whether a worker is done, and to wait for one whose peers are gone
would be a hang, so such a worker is left standing. It holds its process group's mutex then, and the destructor of the
group would wait for both: the groups stay until the process has exited.
"""

import atexit
from collections.abc import Iterator

import torch.distributed as dist

try:
    from elixir_moe import _native
except ImportError:  # a source tree that was never built: the exit code is as torch leaves it
    _native = None  # type: ignore[assignment]


def keep_exit_codes() -> None:
    """Has this process end with its own exit code, whatever gloo's workers are doing then."""
    if _native is not None and dist.is_available():
        atexit.register(lambda: _native.begin_exit(list(_gloo_backends())))


def _gloo_backends() -> Iterator[object]:
    for group in dist.distributed_c10d._world.pg_map:
        backends = (group._get_backend(device) for device in group._device_types)
        yield from (backend for backend in backends if backend.name() == "gloo")
