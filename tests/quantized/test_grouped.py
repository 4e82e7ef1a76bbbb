"""Products of stacked quantized experts as on an accelerator: many decoded at once, multiplied by one fused kernel.

The oracle decodes and multiplies each expert by itself. Products of the same rows and matrices are equal
to the bit; a fused kernel may sum in another order.
"""

import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.launches import LIMIT, accelerated, count, experts
from elixir_moe.moe.experts import Groups
from elixir_moe.planner.trace import trace
from elixir_moe.quantized import products
from elixir_moe.quantized.formats import SCHEMES
from elixir_moe.quantized.packed import Packed, as_bytes

E, OUT, IN = 5, 96, 128
COUNTS = {
    "some idle": [0, 5, 0, 7, 0],
    "all in the last": [0, 0, 0, 0, 33],
    "all in the first": [9, 0, 0, 0, 0],
    "each": [1, 2, 3, 4, 5],
    "fewer rows than experts": [0, 2, 0, 0, 1],
    "none": [0] * E,
}
AT_ONCE = {"all": E, "two": 2, "one": 1}


@cache
def stack(scheme: str) -> tuple[Tensor, Tensor, Packed]:
    weight = torch.randn(E, OUT, IN, generator=torch.Generator().manual_seed(1)) / IN**0.5
    codes, scales = SCHEMES[scheme].encode(weight)
    return as_bytes(codes), as_bytes(scales), Packed(scheme=scheme, shape=(E, OUT, IN), dtype=torch.float32)


@cache
def of_each_expert(scheme: str, counts: str, dtype: torch.dtype) -> list[Tensor]:
    """The oracle: the product and the gradient of the rows."""
    with accelerated(fused=False, scratch_bytes=0):
        return product(scheme, COUNTS[counts], dtype)[1]


def product(scheme: str, counts: list[int], dtype: torch.dtype) -> tuple[Groups, list[Tensor]]:
    """The groups of the rows; the product and the gradient of the rows."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(sum(counts), IN, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(sum(counts), OUT, generator=generator).to(dtype)
    bounds = torch.tensor([0, *counts]).cumsum(0).int()
    groups = Groups(experts=torch.arange(E).repeat_interleave(torch.tensor(counts)), bounds=bounds)
    codes, scales, packed = stack(scheme)
    out = products.grouped_linear(rows, codes, scales, groups, packed)
    out.backward(grad)
    return groups, [out.detach(), rows.grad]


def scratch_of(experts: int, dtype: torch.dtype) -> int:
    return experts * OUT * IN * dtype.itemsize


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_products_are_those_of_each_expert(
    scheme: str, dtype: torch.dtype, fused: bool, at_once: str, counts: str
) -> None:
    wanted = of_each_expert(scheme, counts, dtype)
    with accelerated(fused=fused, scratch_bytes=scratch_of(AT_ONCE[at_once], dtype)):
        groups, found = product(scheme, COUNTS[counts], dtype)
    for mine, its in zip(found, wanted, strict=True):
        if fused:
            tolerance = 1e-5 if dtype is torch.float32 else 2**-6
            torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(mine, its)
    waits_for_nothing = fused and at_once == "all" and sum(COUNTS[counts]) >= E
    assert (groups.counts is None) == waits_for_nothing, "whether the host has read the rows of each expert"


class Decoded(TorchDispatchMode):
    """Counts the memory for weights of a stack: its experts at each decoding, and decodings whose memory is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.experts: list[int] = []
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most_alive = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in func._schema.name and out.shape[1:] == (OUT, IN):
            self.experts.append(len(out))
            self.alive.add(out.untyped_storage())
            self.most_alive = max(self.most_alive, len(self.alive))
        return out


@pytest.mark.parametrize("fused", [True, False])
def test_no_more_is_decoded_than_the_scratch_holds(fused: bool) -> None:
    """Batches without rows are left out, and with fewer rows than experts each expert without rows."""
    found = {}
    for name, counts in COUNTS.items():
        with accelerated(fused=fused, scratch_bytes=scratch_of(2, torch.bfloat16) + 1), Decoded() as decoded:
            product("nf4", counts, torch.bfloat16)
        assert decoded.most_alive == (1 if any(counts) else 0)
        found[name] = decoded.experts
    each_batch = [2, 2, 1]
    assert found == {
        "some idle": [2, 2] * 2,
        "all in the last": [1] * 2,
        "all in the first": [2] * 2,
        "each": each_batch * 2,
        "fewer rows than experts": [1, 1] * 2,
        "none": [],
    }


@pytest.mark.parametrize("adapters", [False, True])
def test_a_layer_launches_the_same_for_any_number_of_experts(adapters: bool) -> None:
    counts = {number: layer_counts(number, adapters) for number in (8, 32, 128)}
    forward, backward, again = counts[8]
    assert counts == dict.fromkeys(counts, counts[8])
    assert again <= forward + backward
    if adapters:  # two thin products of each stack, with the gradients of both factors
        assert (forward, backward) == (24, 40)
    else:  # decodings, products and what is between them are 6 and 8; the rest sorts and combines tokens
        assert (forward, backward) == (LIMIT, LIMIT)


def layer_counts(number: int, adapters: bool) -> tuple[int, int, int]:
    """Launches of forward, backward, and of a backward that recomputes the forward."""
    layer = experts(number, adapters=adapters)
    with accelerated():
        forward, backward = count(layer)
        _, again = count(layer, checkpointed=True)
    return len(forward), len(backward), len(again)


def test_a_trace_counts_what_the_planned_device_decodes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator the peak grows by the other experts' weights that are decoded at the same time."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(IN))
            self.bytes = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in stack("nf4")[:2])

        def forward(self, rows: Tensor) -> Tensor:
            bounds = torch.zeros(E + 1, dtype=torch.int32)
            groups = Groups(experts=torch.zeros(len(rows), dtype=torch.long), bounds=bounds)
            return products.grouped_linear(rows * self.scale, *self.bytes, groups, stack("nf4")[2])

    def peak(device: torch.device | None, number: int = E, *, fused: bool = True) -> int:
        where: dict[str, Any] = {"device": device, "grouped_kernel": fused}
        return trace(Model(), lambda m, x: m(x).sum(), torch.randn(number, IN), **where).activation_bytes

    cpu, matrix = torch.device("cpu"), scratch_of(1, torch.float32)
    monkeypatch.setattr(products, "CPU_SCRATCH_BYTES", matrix)
    assert peak(None) - peak(cpu) == (E - 1) * matrix
    monkeypatch.setattr(products, "GROUPED_SCRATCH_BYTES", 3 * matrix + 1)
    assert peak(None) - peak(cpu) == 2 * matrix
    assert peak(None, 3) == peak(cpu, 3), "fewer rows than experts"
    monkeypatch.setattr(products, "LOOP_SCRATCH_BYTES", 2 * matrix + 1)
    assert peak(None, fused=False) - peak(cpu) == matrix, "no kernel multiplies all experts at once"
