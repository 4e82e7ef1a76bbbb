"""Makes the backend torch's device "threads" in this process, and controls it.

Owns the module ``torch.threads``, the backend "threads" of torch.distributed, and how late streams are. A process that
has called `start` has an accelerator for the rest of its life, so tests call it only in ranks of their own.
"""

import functools
import importlib.util
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.accelerator.build import build

NAME = "threads"
BACKENDS = f"cpu:gloo,{NAME}:{NAME}"
"""For ``init_process_group``."""


@functools.cache
def native() -> Any:
    """The compiled backend; the first call registers it."""
    spec = importlib.util.spec_from_file_location("_accelerator", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(module))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # else `model.to` unties weights, as on no device of torch

    def group(store: dist.Store, rank: int, world: int, timeout: Any) -> Any:
        return module.group(dist.ProcessGroupGloo(store, rank, world, timeout))

    dist.Backend.register_backend(NAME, group, devices=[NAME])
    return module


def start() -> None:
    """Gives this process its accelerator."""
    native()


def _device_module(native: Any) -> types.ModuleType:
    """What torch and the library look for in ``torch.cuda`` and its like."""

    def seed(number: int) -> None:
        native.generator().manual_seed(number)

    def set_rng_state(state: torch.Tensor, device: object = NAME) -> None:
        native.generator().set_state(state)

    @contextmanager
    def stream(chosen: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(chosen)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def properties(device: object = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(uuid="threads-0", is_integrated=False, total_memory=native.memory_info()[1])

    module = types.ModuleType(f"torch.{NAME}")
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=0: "threads of the CPU",
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
        "synchronize": lambda device=None: native.synchronize(),
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "Stream": lambda device=None, priority=0: torch.Stream(device=NAME, priority=priority),
        "Event": lambda enable_timing=False, blocking=False: torch.Event(NAME, enable_timing=enable_timing),
        "stream": stream,
        "mem_get_info": lambda device=None: native.memory_info(),
        "memory_allocated": lambda device=None: torch.accelerator.memory_allocated(),
        "memory_reserved": lambda device=None: torch.accelerator.memory_reserved(),
        "get_device_properties": properties,
        "cudart": lambda: _HostMemory(native),
        "default_generators": (native.generator(),),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "initial_seed": lambda: native.generator().initial_seed(),
        "get_rng_state": lambda device=NAME: native.generator().get_state(),
        "set_rng_state": set_rng_state,
    }.items():
        setattr(module, name, value)
    return module


class _HostMemory:
    """Page-locking of memory that exists, by the names of CUDA's functions."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return 0 if self._native.register_host(address, nbytes) else 2  # cudaErrorMemoryAllocation

    def cudaHostUnregister(self, address: int) -> int:
        self._native.unregister_host(address)
        return 0


# ------------------------------------------------------------------------------------------------------------- control


@contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """While the context lasts, `stream` begins nothing of what it has been given."""
    native().hold(stream.stream_id, True)
    try:
        yield
    finally:
        native().hold(stream.stream_id, False)


UNTIL_AWAITED = -1
"""A delay: tasks begin when another stream or the host waits for them. For one rank: two might wait for each other."""


@contextmanager
def delayed(compute: int, others: int, seed: int = 0) -> Iterator[None]:
    """The default stream begins some of its tasks, and others all, up to so many microseconds late.

    Or each begins all of them as late as `UNTIL_AWAITED` says.
    """
    native().delay(compute, others, seed)
    try:
        yield
    finally:
        native().delay(0, 0, seed)


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """The device has only so much memory; what is allocated already counts."""
    total = native().memory_info()[1]
    native().limit(nbytes)
    try:
        yield
    finally:
        native().limit(total)


@contextmanager
def host_limited(nbytes: int) -> Iterator[None]:
    """The host can page-lock only so many bytes more."""
    native().limit_host(nbytes)
    try:
        yield
    finally:
        native().limit_host(1 << 40)
