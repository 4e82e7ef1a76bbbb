"""The bytes that decoding quantized weights moves in a step.

Owns the count of decodings among the events of a trace, and the bytes of each. A trace never runs a decoder: that would
be many small operators for each expert of each layer. `cost` converts the bytes to seconds.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from elixir_moe.chunks.events import ENTER, REACH, StepEvent
from elixir_moe.memory.slabs import bytes_of
from elixir_moe.quantized.decoders import FP8_BLOCK
from elixir_moe.quantized.formats import scheme_named
from elixir_moe.quantized.packed import packed_parameters
from elixir_moe.runtime.autograd import tensors_in
from elixir_moe.torch_private import TorchDispatchMode

_SAMPLE = (4 * FP8_BLOCK, 4 * FP8_BLOCK)
"""Outputs and inputs of the weight whose decoding is counted."""


def decoding_bytes(
    model: nn.Module,
    modules: Sequence[str],
    events: Iterable[StepEvent],
    compute_dtype: torch.dtype | None,
    *,
    native: bool,
) -> int:
    """Returns the bytes read and written by all decodings of a step, whose `events` number `modules` by name.

    A module's forward, recomputation and backward decode each of its weights once; every expert is assumed to get rows.
    `native`: a kernel decodes in one pass, instead of torch's operators.
    """
    times: Mapping[str, int] = Counter(modules[event.module] for event in events if event.kind in (ENTER, REACH))
    total = 0.0
    for name, _, own, packed in packed_parameters(model):
        dtype = packed.computed_in or compute_dtype or packed.dtype
        runs = times[name.removesuffix(own).removesuffix(".")]
        total += runs * math.prod(packed.shape) * bytes_a_weight(packed.scheme, dtype, native=native)
    return int(total)


@cache
def bytes_a_weight(scheme: str, dtype: torch.dtype, *, native: bool) -> float:
    """Returns the bytes read and written to decode one element of a weight."""
    form, numel = scheme_named(scheme), math.prod(_SAMPLE)
    if native:
        return form.nbytes(_SAMPLE) / numel + dtype.itemsize
    codes = torch.empty(form.codes_shape(_SAMPLE), dtype=form.codes_dtype, device="meta")
    scales = torch.empty(form.scales_shape(_SAMPLE), dtype=form.scales_dtype, device="meta")
    written = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    with Moved() as moved:
        form.decode_into(codes, scales, torch.empty(_SAMPLE, dtype=written, device="meta"))
    return moved.nbytes / numel


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write; views and new empty tensors move none."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._known = WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = [*tensors_in((args, kwargs or {}))], [*tensors_in(out)]
        self._known.update(tensor.untyped_storage() for tensor in given)
        new = any(tensor.untyped_storage() not in self._known for tensor in made)
        if (new or func._schema.is_mutable) and "empty" not in func._overloadpacket.__name__:
            self.nbytes += sum(map(bytes_of, (*given, *made)))
        return out
