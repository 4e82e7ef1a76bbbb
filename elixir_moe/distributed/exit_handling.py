"""The exit of a process that still has process groups, as after an error.

Owns the last action before Python finalizes: gloo's worker threads are left blocked where they ask for Python's GIL
(docs/design/processes.md). A blocked one may hold the mutex of its process group, which the group's destructor needs.
So all process groups are kept until the process has exited, including destroyed ones that torch's caches and meshes
may hold.
"""

import atexit
from functools import cache
from weakref import WeakSet

import torch.distributed as dist

from elixir_moe.native import native as _native
from elixir_moe.torch_private import backend_on, devices_of, process_groups


def keep_exit_codes() -> None:
    """Makes this process end with its own exit code, whatever gloo's workers are doing then.

    Without the native module it changes nothing.
    """
    if _native is not None and dist.is_available():
        _seen().update(process_groups())


@cache  # one hook is enough
def _seen() -> WeakSet[dist.ProcessGroup]:
    """The process groups to keep at exit, unless they are gone by then."""
    seen: WeakSet[dist.ProcessGroup] = WeakSet()

    def keep() -> None:
        seen.update(process_groups())
        backends = [backend_on(group, device) for group in seen for device in devices_of(group)]
        _native.begin_exit([backend for backend in backends if backend.name() == "gloo"])

    atexit.register(keep)
    return seen
