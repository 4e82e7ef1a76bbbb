"""Accelerators of any kind: streams, events and random states of a device, and the one file that names CUDA.

Owns what torch has no general form for: page-locking of memory that exists, the backend of collectives, and which
kernels a device runs. Decides nothing, and holds no state. For NVIDIA's and AMD's GPUs, whose device is "cuda",
everything here is a call of `torch.cuda`; for others, the same call of their module, as `torch.get_device_module` finds
it. A device whose module has no streams, such as "mps", is refused by name.
"""

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elixir_moe.errors import ConfigError

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
"""The environment of a process that is to see no GPU of NVIDIA or AMD."""
_CUDA = "cuda"
_NEEDED = ("Event", "Stream", "current_stream", "stream", "synchronize", "set_device", "mem_get_info")
"""Names that the module of a device must have."""


def is_accelerator(device: torch.device) -> bool:
    """Whether the host runs ahead of `device`, which has memory of its own."""
    return device.type not in ("cpu", "meta")


def api(device: torch.device) -> Any:
    """The module of a device: `torch.cuda`, or that of another accelerator."""
    return torch.get_device_module(device)


def kind() -> torch.device | None:
    """The kind of accelerator that this torch is for, if the library supports it; without an index."""
    device = torch.accelerator.current_accelerator()
    return None if device is None or _missing(device) else device


def found() -> torch.device | None:
    """The kind of accelerator that this process can use; without an index."""
    device = kind()
    return device if device is not None and api(device).is_available() else None


def count() -> int:
    """How many accelerators this process sees."""
    device = kind()
    return 0 if device is None else int(api(device).device_count())


def visible_without(excluded: Collection[int]) -> dict[str, str]:
    """Returns the environment of processes that see the GPUs of this one, except those of these numbers."""
    ((name, _),) = HIDDEN.items()
    given = os.environ.get(name)
    visible = list(map(str, range(count()))) if given is None else given.split(",")
    return {name: ",".join(gpu for number, gpu in enumerate(visible) if number not in excluded)}


def current(device: torch.device) -> torch.device:
    """The current one of the kind of `device`, with its index."""
    return torch.device(device.type, api(device).current_device())


def check_supported(device: torch.device) -> None:
    """Raises ConfigError if torch knows the device and its module lacks what the library needs."""
    if is_accelerator(device) and (missing := _missing(device)):
        raise ConfigError(
            f"device={str(device)!r}: torch.{device.type} has no {', '.join(missing)}, which the library needs"
        )


def _missing(device: torch.device) -> list[str]:
    module = getattr(torch, device.type, None)
    return [name for name in _NEEDED if not hasattr(module, name)]


# -------------------------------------------------------------------------------------------------- streams and events


def new_stream(device: torch.device, *, priority: int = 0) -> torch.Stream:
    """Returns a stream of `device`; a negative `priority` runs first."""
    stream: torch.Stream = api(device).Stream(device, priority=priority)
    return stream


def current_stream(device: torch.device | None) -> torch.Stream:
    """Returns the current stream of `device`."""
    assert device is not None
    stream: torch.Stream = api(device).current_stream(device)
    return stream


def on_stream(stream: torch.Stream) -> AbstractContextManager[object]:
    """A context in which `stream` is the current one of its device."""
    context: AbstractContextManager[object] = api(stream.device).stream(stream)
    return context


def on_same_stream(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Returns what makes, on another thread, a context with this thread's device and stream."""
    if not is_accelerator(device):
        return nullcontext
    stream = current_stream(device)
    return lambda: on_stream(stream)


def recorded_event(device: torch.device, *, blocking: bool = False) -> torch.Event:
    """Returns an event at the end of what the current stream was given; with `blocking`, a waiting thread sleeps."""
    event: torch.Event = api(device).Event(blocking=blocking)
    event.record(current_stream(device))
    return event


def timing_event(device: torch.device) -> torch.Event:
    """Returns an event that has a time once it is recorded."""
    event: torch.Event = api(device).Event(enable_timing=True)
    return event


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream is recorded as a graph instead of run."""
    capturing = getattr(api(device), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


# --------------------------------------------------------------------------------------------------------------- memory


def register_host_memory(memory: Tensor) -> Callable[[], object] | None:
    """Page-locks host memory for the accelerator; returns what ends that, or None if the system refuses.

    Torch page-locks only what it allocates itself. An accelerator without a function for it has pageable memory.
    """
    device = found()
    if device is None or not hasattr(api(device), "cudart"):
        return None
    runtime, address = api(device).cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)) == 0:
        return lambda: runtime.cudaHostUnregister(address)
    with suppress(RuntimeError):  # the error is pending: the next launch would raise it
        torch.zeros(1, device=device)
    return None


def expandable_by(device: torch.device) -> str | None:
    """Returns the environment variable by which segments of the device's memory become expandable.

    None if the allocator has no such option, or the variable speaks of it already.
    """
    name = "PYTORCH_CUDA_ALLOC_CONF"
    said = any("expandable_segments" in os.environ.get(key, "") for key in ("PYTORCH_ALLOC_CONF", name))
    return f"{name}=expandable_segments:True" if device.type == _CUDA and not said else None


def is_integrated(device: torch.device) -> bool:
    """Whether the accelerator has no memory of its own, but that of its host."""
    return is_accelerator(device) and bool(getattr(_properties(device), "is_integrated", False))


def total_bytes(device: torch.device) -> int:
    """Bytes of the accelerator's memory."""
    return int(_properties(device).total_memory)


def name_of(device: torch.device) -> str:
    """A name of this very accelerator, alike for all processes that use it."""
    return str(getattr(_properties(device), "uuid", device))


def capability(device: torch.device) -> str | None:
    """The compute capability of one of NVIDIA's GPUs, as "9.0", and of AMD's what torch says instead; else None."""
    found = _properties(device)
    return f"{found.major}.{found.minor}" if hasattr(found, "major") else None


def _properties(device: torch.device) -> Any:
    return api(device).get_device_properties(device)


# -------------------------------------------------------------------------------------------------------- random states


def _used() -> torch.device | None:
    """The kind of accelerator that this process has used; asking uses none."""
    device = kind()
    return device if device is not None and api(device).is_initialized() else None


def random_states() -> dict[str, Tensor]:
    """Returns the random state of the accelerator by the name of its kind, if this process has used one."""
    device = _used()
    return {} if device is None else {device.type: api(device).get_rng_state()}


def seeded_states(seed: int) -> dict[str, Tensor]:
    """Returns random states of the host, and of the accelerator if this process has used one, that begin at a seed."""
    device = _used()
    found = {"cpu": torch.Generator().manual_seed(seed).get_state()}
    if device is not None:
        found[device.type] = torch.Generator(current(device)).manual_seed(seed).get_state()
    return found


def exchange_states(states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sets random states as `seeded_states` returns them; returns those that were there."""
    found = {}
    for kind, state in states.items():
        module: Any = torch if kind == "cpu" else api(torch.device(kind))
        found[kind] = module.get_rng_state()
        module.set_rng_state(state)
    return found


def fork_random_states() -> AbstractContextManager[None]:
    """A context that restores the random states of the host, and of the current accelerator if one has been used."""
    device = _used()
    if device is None:
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[api(device).current_device()], device_type=device.type)


# ---------------------------------------------------------------------------------------------- collectives and kernels


def backends(device_type: str) -> str:
    """The backends of a process group for tensors of the host and of such a device, as "cpu:gloo,cuda:nccl".

    Raises:
        ConfigError: torch knows no backend for the device.
    """
    if device_type == "cpu":
        return "gloo"
    backend = dist.Backend.default_device_backend_map.get(device_type)
    if backend is None:
        raise ConfigError(f"device_type={device_type!r}: torch.distributed has no backend for it: give `backend`")
    return f"cpu:gloo,{device_type}:{backend}"


def runs_triton(device: torch.device) -> bool:
    """Whether the library's kernels in Triton are for this device."""
    return device.type == _CUDA


def has_grouped_kernel(device: torch.device) -> bool:
    """Whether a device is present for which `grouped_mm` has a fused kernel: CUDA capability 9 or 10."""
    here = device.type == _CUDA and torch.cuda.is_available()
    return here and torch.cuda.get_device_capability(device)[0] in (9, 10)


def has_wide_products(device: torch.device) -> bool:
    """Whether `torch.mm` returns products of 16-bit operands in fp32, which it only does on "cuda"."""
    return device.type == _CUDA


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 without emulation, which a T4 does not."""
    if device.type == "cpu":
        return True
    return bool(api(device).is_bf16_supported(including_emulation=False))
