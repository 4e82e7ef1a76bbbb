"""What a mixture layer asks of its device: how many operators, none that adds in an order of its own, and few waits.

The products of the experts are counted as on a GPU with a fused kernel, by `grouped_mm`: the loop that replaces it on a
CPU has operators for each expert. A view is no operator here: it only makes a tensor object.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elixir_moe.moe import dispatch as dispatch_module
from elixir_moe.moe import experts as experts_module
from elixir_moe.moe.dispatch import permute
from elixir_moe.moe.layer import MoE
from elixir_moe.parallel.mesh import expert_mesh, init_mesh
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


class Operators(TorchDispatchMode):
    """The names of the operators that run and are no views; keeps no tensor, since autograd would copy what is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.adding: list[str] = []
        self.waiting: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, results = kwargs or {}, func._schema.returns
        name = func._schema.name.split("::")[1]
        aliases = [r.alias_info for r in results if r.alias_info is not None and not r.alias_info.is_write]
        if not results or len(aliases) < len(results):
            self.names.append(name)
        if adds_at_indices(name, args, kwargs):
            self.adding.append(str(func))
        if name in WAITING or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.waiting.append(str(func))
        return func(*args, **kwargs)


WAITING = {
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "unique_dim"),
    *("_unique", "_unique2", "unique_consecutive"),
}


def adds_at_indices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operator adds floating-point numbers at indices: on a GPU in any order."""
    if not any(isinstance(a, Tensor) and a.is_floating_point() for a in args):
        return False
    if "index_put" in name:
        return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))
    return any(word in name for word in ("index_add", "scatter_add", "reduce", "embedding_dense_backward", "put_"))


@contextmanager
def fused(yes: bool = True) -> Iterator[None]:
    """Chooses between the fused product and the loop."""
    before = experts_module.runs_fused
    experts_module.runs_fused = lambda rows, shape: yes
    yield
    experts_module.runs_fused = before


def build(ep: int, **options: Any) -> tuple[MoE, Tensor, Tensor]:
    """A layer on `ep` ranks, tokens and the gradient of the output."""
    torch.manual_seed(0)
    mesh = expert_mesh(init_mesh(1, device_type="cpu"), ep) if ep > 1 else None
    layer = MoE(d_model=16, d_hidden=32, num_experts=4, mesh=mesh, **options)
    return layer, torch.randn(2, 6, 16, requires_grad=True), torch.randn(2, 6, 16)


def operators(ep: int, **options: Any) -> tuple[Operators, Operators]:
    """(rank) The operators of forward and of backward."""
    layer, x, grad = build(ep, **options)
    grads = grad, torch.ones(())
    forward, backward = Operators(), Operators()
    with fused():
        with forward:
            results = layer(x)
        with backward:
            torch.autograd.backward(results, grads)
    return forward, backward


def run_count(ep: int, **options: Any) -> tuple[list[str], list[str]]:
    forward, backward = operators(ep, **options)
    return forward.names, backward.names


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_layer_has_few_operators(ranks: Ranks, top_k: int) -> None:
    for ep, most in ((1, (26, 36)), (2, (40, 45))):
        for forward, backward in ranks(ep).run(run_count, ep, top_k=top_k):
            assert "_grouped_mm" in forward and "_grouped_mm" in backward
            assert len(forward) <= most[0], (ep, len(forward), forward)
            assert len(backward) <= most[1], (ep, len(backward), backward)


@pytest.mark.parametrize("is_fused", [True, False])
def test_frozen_experts_get_no_gradient_of_weights(is_fused: bool) -> None:
    product = "_grouped_mm" if is_fused else "mm"
    counts, gradients = [], []
    for frozen in (False, True):
        layer, x, grad = build(1)
        layer.experts.requires_grad_(not frozen)
        with fused(is_fused):
            results, backward = layer(x), Operators()
            with backward:
                torch.autograd.backward(results, (grad, torch.ones(())))
        counts.append(sum(name == product for name in backward.names))
        gradients.append(x.grad)
    whole, half = counts
    layers_beside = 0 if is_fused else 2  # the router's products
    assert half - layers_beside == (whole - layers_beside) / 2
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def run_adding(ep: int) -> list[str]:
    found = []
    for top_k, capacity_factor, residual in product((1, 2), (None, 0.8), (False, True)):
        options = {"top_k": top_k, "capacity_factor": capacity_factor, "residual": residual, "z_coefficient": 0.1}
        found += [f"{options}: {name}" for part in operators(ep, **options) for name in part.adding]
    return found


@pytest.mark.parametrize("ep", [1, 2])
def test_nothing_is_added_at_indices(ranks: Ranks, ep: int) -> None:
    assert ranks(ep).run(run_adding, ep) == [[]] * ep


@pytest.mark.parametrize("kept", [12, 7])
def test_gradients_of_a_token_are_added_in_the_order_of_its_choices(kept: int) -> None:
    """The same bits for every order of the rows."""
    T, k, d = 4, 3, 5
    values = torch.randn(T * k, d) * torch.logspace(-4, 4, T * k).unsqueeze(1)
    dropped = torch.ones(T * k, 1, dtype=torch.bool)
    dropped[:kept] = False
    want = values.masked_fill(dropped, 0).view(T, k, d)
    want = want[:, 0] + want[:, 1] + want[:, 2]
    for _ in range(5):
        order = torch.randperm(kept)
        tokens = torch.randn(T, d, requires_grad=True)
        rows = permute(tokens, order, T * k)
        assert torch.equal(rows, tokens[order // k])
        rows.backward(values[order])
        assert torch.equal(tokens.grad, want)


READS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


class Reads(TorchFunctionMode):
    """Keeps the calls that read values of tensors on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            self.reads.append(func.__name__)
        return func(*args, **(kwargs or {}))


def run_waits(ep: int, kernel: bool, **options: Any) -> tuple[int, list[str], list[str]]:
    """(rank) How often a step reads numbers of the device where it may, all reads, and the operators that wait."""
    layer, x, grad = build(ep, **options)
    grads, begun = (grad, torch.ones(())), []
    modules = dispatch_module, experts_module
    begin = dispatch_module.copy_to_host_async
    for module in modules:
        module.copy_to_host_async = lambda numbers: begun.append(numbers) or begin(numbers)
    try:
        with fused(kernel), Reads() as reads, Operators() as ran:
            torch.autograd.backward(layer(x), grads)
    finally:
        for module in modules:
            module.copy_to_host_async = begin
    return len(begun), reads.reads, ran.waiting


@pytest.mark.parametrize(
    ("ep", "kernel", "capacity_factor", "waits"),
    [(1, True, None, 0), (1, False, None, 1), (1, True, 0.8, 1), (2, True, None, 1), (2, False, 0.8, 1)],
)
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_host_waits_for_the_device_at_most_once(
    ranks: Ranks, ep: int, kernel: bool, capacity_factor: float | None, waits: int, top_k: int
) -> None:
    options = {"top_k": top_k, "capacity_factor": capacity_factor, "z_coefficient": 0.1}
    for got in ranks(ep).run(run_waits, ep, kernel, **options):
        assert got == (waits, ["tolist"] * waits, [])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_on_a_gpu_waits_for_nothing() -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("needs a GPU with a fused product")
    layer, x, grad = build(1, top_k=2, z_coefficient=0.1)
    layer = nn.Sequential(layer).to("cuda", torch.bfloat16)
    x, grads = x.detach().to("cuda", torch.bfloat16), (grad.to("cuda", torch.bfloat16), torch.ones((), device="cuda"))
    torch.autograd.backward(layer(x), grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.backward(layer(x), grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
