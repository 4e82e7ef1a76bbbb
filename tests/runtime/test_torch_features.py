"""The rest of torch: features and libraries with ways of their own with modules and parameters, used as anyone does.

Each case is a model, its loss, and what is done to the model before and after `wrap`. It runs under plain torch on all
rows, and wrapped on one and two ranks, each on its part of the rows, with few blocks and offloaded. fp32 with a smooth
optimizer, tolerances as in `tests.support.parity`; under autocast both sides round gradients of weights to bf16 (2^-9
of at most 1), each rank its own part, and steps of SGD with lr 1e-2 carry that to 4 * 1e-2 * 2^-9 = 8e-5.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from tests.runtime.test_habits import D, Layer, Net, adamw, by_parts, mean_square, rows_of, sgd
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.parity import assert_alike, trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS = 4


class Shapes(Net):
    """A transposed weight, a scalar, parameters without elements, one that is not dense in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter((0.2 * torch.randn(2 * D, D)).t())
        self.strided = nn.Parameter(torch.ones(2 * D)[::2])
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none, self.no_rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, D))

    def forward(self, x: Tensor) -> Tensor:
        h = (super().forward(x) * self.strided) @ self.turned
        rows = torch.cat([self.scale * h[:, :D], self.no_rows])
        return rows + self.none.sum()


class Dtypes(Net):
    """Frozen weights of every dtype beside trainable fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse = nn.Linear(D, D).bfloat16().requires_grad_(False)
        self.fine = nn.Linear(D, D).double().requires_grad_(False)
        self.codes = nn.Parameter(torch.arange(D * D, dtype=torch.int8).view(D, D) % 7, requires_grad=False)
        self.phase = nn.Parameter(torch.polar(torch.ones(D), torch.arange(D).float()), requires_grad=False)
        self.wide = nn.Parameter(torch.ones(D, dtype=torch.complex128), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fine(super().forward(x).double()).float()
        h = h @ (self.codes.float() / 7 - 0.5) * self.phase.real
        return x + self.coarse(h.bfloat16()).float() * self.wide.real.float()


class Elements(torch.autograd.Function):
    """A linear layer that saves its weight as torch asks to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class KeptByName(Elements):
    """One that keeps it as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.weight, grad.t() @ ctx.x


class KeptAsView(KeptByName):
    """One that keeps a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight.t().t()
        return x @ weight.t()


class Custom(Layer):
    function: type[Elements] = Elements

    def forward(self, x: Tensor) -> Tensor:
        h = self.function.apply(self.norm(x), self.up.weight)
        return x + self.gain * self.function.apply(F.gelu(h + self.up.bias), self.down.weight)


class CustomLinear(nn.Linear):
    function: type[Elements] = Elements

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight) + self.bias


def custom(function: type[Elements]) -> Callable[[], nn.Module]:
    """Nets whose layers use `function` on weights of their own and on their children's."""

    def build() -> nn.Module:
        model = Net()
        for i in (0, 1):
            model.layers[i] = Custom()
            model.layers[i].function = function
        for i in (2, 3):
            model.layers[i].up, model.layers[i].down = CustomLinear(D, 2 * D), CustomLinear(2 * D, D)
            model.layers[i].up.function = model.layers[i].down.function = function
        return model

    return build


def at_address(tensor: Tensor) -> Tensor:
    """The values at a tensor's address, as a kernel that is given the address alone reads them."""
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.float32).view(tensor.shape).clone()


class AtAddress(Elements):
    """One whose kernels read the weight at its address."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ at_address(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ at_address(weight), grad.t() @ x


class AtAddressByName(KeptByName):
    """One that keeps the weight as an attribute, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ at_address(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ at_address(ctx.weight), grad.t() @ ctx.x


class Lends(Layer):
    """Hands its children's weights to a kernel: the first one as it is, and a copy of the second."""

    def forward(self, x: Tensor) -> Tensor:
        h = AtAddress.apply(self.norm(x), self.up.weight)
        return x + self.gain * AtAddress.apply(F.gelu(h + self.up.bias), self.down.weight.clone())


class Addresses(Net):
    """Kernels that read weights of their own module, in two layers, and of others, in the rest and in the loss."""

    checkpoints: bool | None = None
    """None: no layer is checkpointed. Else whether checkpoints are reentrant."""

    def __init__(self) -> None:
        super().__init__()
        for i, function in enumerate((AtAddress, AtAddressByName)):
            self.layers[i].up, self.layers[i].down = CustomLinear(D, 2 * D), CustomLinear(2 * D, D)
            self.layers[i].up.function = self.layers[i].down.function = function
        self.layers[2], self.layers[3] = Lends(), Lends()

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.checkpoints is None else checkpoint(layer, x, use_reentrant=self.checkpoints)
        return x


class AddressesCheckpointed(Addresses):
    checkpoints = False


class AddressesReentrant(Addresses):
    checkpoints = True


def with_kernel(model: Any, rows: Tensor) -> Tensor:
    """A loss that hands the last weight to a kernel, too."""
    out = AtAddressByName.apply(AtAddress.apply(model(rows), model.last.weight), model.last.weight)
    return (out - rows.flip(1)).pow(2).mean()


class Table(nn.Module):
    """Returns views of its weight, and the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(2 * D, D))

    def forward(self, rows: int | None = None) -> Tensor:
        return self.weight if rows is None else self.weight[:rows]


class Views(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: Tensor) -> Tensor:
        view, whole = self.table(D), self.table()
        h = self.body(self.first(x) @ view)
        return self.last(F.linear(h, whole)[:, :D] @ view.t())


class Borrowed(Net):
    """A layer's parameters used by modules that do not own them, one of them in a list of a module without any."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self.layers[3], "gain", self.layers[1].gain)
        del self.layers[3]._parameters["gain"]
        self.act = nn.Identity()
        self.act.kept = [self.layers[0].up.weight]
        self.act.forward = lambda x: x @ self.act.kept[0][:D]

    def body(self, x: Tensor) -> Tensor:
        return self.act(super().body(x))


class Recurrent(Net):
    """torch's LSTM keeps a list of its weights beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(D, D // 2, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.body(self.first(x))[:, None])[0][:, 0].repeat(1, 2))


class Parametrized(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.layers[0].up)
        parametrizations.orthogonal(self.last)
        parametrizations.spectral_norm(self.layers[1].down)
        parametrize.register_parametrization(self.first, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return super().forward(x) + self.first(x)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class OldWeightNorm(Net):
    """The first weight norm computes the weight in a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(self.layers[0].up)


def unchanged(model: nn.Module) -> nn.Module:
    return model


def compile_blocks(model: Any) -> nn.Module:
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return model


def replace_by_compiled(model: Any) -> nn.Module:
    for i, layer in enumerate(model.layers):
        model.layers[i] = torch.compile(layer, backend="aot_eager")
    return model


def hook_modules(model: Any) -> nn.Module:
    """Hooks that change inputs, outputs and gradients."""
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, args: (args[0] * 1.1,))
        layer.up.register_forward_hook(lambda m, args, output: output * 0.9)
        layer.down.register_full_backward_pre_hook(lambda m, grads: (grads[0] * 1.2,))
        layer.up.register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * 0.8,))
    return model


def hook_parameters(model: nn.Module) -> nn.Module:
    """Hooks that change gradients of parameters."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: 0.5 * grad)
    return model


def low_rank(model: nn.Module) -> nn.Module:
    """peft's LoRA: everything else is frozen."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["up", "down"], modules_to_save=["last"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def autocast(model: nn.Module, rows: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(rows)
    return (out.float() - rows.flip(1)).pow(2).mean()


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module] = Net
    before: Callable[[nn.Module], nn.Module] = unchanged
    after: Callable[[nn.Module], nn.Module] = unchanged
    loss: Callable[[nn.Module, Tensor], Tensor] = mean_square
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    tolerance: float = 2e-5
    plans: tuple[str, ...] = ("small", "offload")
    tiled: bool = False
    """The wrapped model is cut into tiles first."""


CASES = {
    "shapes": Case(Shapes),
    "dtypes": Case(Dtypes),
    "custom-function": Case(custom(Elements)),
    "custom-function-by-name": Case(custom(KeptByName)),
    "custom-function-by-view": Case(custom(KeptAsView)),
    "addresses": Case(Addresses, loss=with_kernel, plans=("zero3", "offload")),
    "addresses-checkpointed": Case(AddressesCheckpointed, loss=with_kernel, plans=("zero3", "offload")),
    "addresses-reentrant": Case(AddressesReentrant, loss=with_kernel, plans=("zero3", "offload")),
    "views": Case(Views),
    "borrowed": Case(Borrowed),
    "recurrent": Case(Recurrent),
    "parametrized": Case(Parametrized),
    "old-weight-norm": Case(OldWeightNorm),
    "compiled-before": Case(before=compile_blocks, plans=("small",)),
    "compiled-and-called-by-parts": Case(before=compile_blocks, loss=by_parts, plans=("one-chunk", "ddp")),
    "compiled-wrappers": Case(before=replace_by_compiled, plans=("small",)),
    "compiled-tiles": Case(before=compile_blocks, plans=("small",), tiled=True),
    "autocast-tiles": Case(loss=autocast, optimizer=sgd, tolerance=1e-4, tiled=True),
    "module-hooks-before": Case(before=hook_modules),
    "module-hooks-after": Case(after=hook_modules),
    "parameter-hooks-before": Case(before=hook_parameters),
    "parameter-hooks-after": Case(after=hook_parameters),
    "low-rank": Case(before=low_rank),
    "autocast": Case(loss=autocast, optimizer=sgd, tolerance=1e-4),
}
PLANS = {
    "small": em.Plan.offload(rcache_blocks=6, chunk_numel=600),
    "offload": em.Plan.offload(rcache_blocks=7, device_chunks=2, chunk_numel=700),
    "zero3": em.Plan.zero3(chunk_numel=600),
    "one-chunk": em.Plan.offload(chunk_numel=10_000),
    "ddp": em.Plan.ddp(),
}


def train(name: str, plan: em.Plan | None) -> dict[str, Any]:
    case = CASES[name]

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.compiler.reset()
        model = case.model()
        if case.tiled and plan is not None:
            em.tile(model, at_most=D * D * 2)
        model = case.before(model)
        return model, case.optimizer(model)

    def backward(model: nn.Module, step: int) -> None:
        case.loss(model, rows_of(step, plan)).backward()

    return trained(build, backward, plan, STEPS, after=case.after)


def train_all(name: str, plans: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {plan: train(name, PLANS[plan]) for plan in plans}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A world of one in this process."""
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


FURTHER = {
    "addresses-reentrant",
    "custom-function-by-view",
    "recurrent",
    "old-weight-norm",
    "compiled-wrappers",
    "compiled-tiles",
    "autocast-tiles",
    "module-hooks-before",
    "parameter-hooks-before",
}
"""Much like others that run every time."""


QUICK = [(name, False) for name in CASES if name not in FURTHER]


@pytest.mark.parametrize(("name", "every"), with_further(product(CASES, (False, True)), QUICK))
def test_case(name: str, every: bool, ranks: Ranks, alone: None) -> None:
    """Under every plan on one rank and on two, or under one on each."""
    case, wanted = CASES[name], train(name, None)
    here, apart = (case.plans, case.plans) if every else (case.plans[-1:], case.plans[:1])
    for found in (train_all(name, here), *ranks(2).run(train_all, name, apart)):
        for plan, result in found.items():
            assert_alike(result, wanted, plan, case.tolerance, rel=max(1e-5, case.tolerance * 10))


def decay_of_each_group(wrapped: bool) -> dict[str, torch.Tensor]:
    """Two steps of Adam whose second group, and no other, has the decoupled weight decay of AdamW."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    groups = [
        {"params": [*model[0].parameters()]},
        {"params": [*model[1].parameters()], "decoupled_weight_decay": True},
    ]
    optimizer: Any = torch.optim.Adam(groups, lr=1e-2, weight_decay=0.3)
    if wrapped:
        model, optimizer = em.wrap(model, optimizer, plan=em.Plan.offload(rcache_blocks=2))
    for step in range(2):
        model(torch.randn(3, D, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not wrapped:
        return model.state_dict()
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


@pytest.mark.usefixtures("alone")
def test_weight_decay_is_of_each_groups_own_kind() -> None:
    wanted, found = decay_of_each_group(False), decay_of_each_group(True)
    assert every(torch.allclose(found[name], value, rtol=0, atol=1e-6) for name, value in wanted.items())


class Graph(nn.Module):
    """A product with a sparse adjacency, which autograd saves."""

    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.adjacency = adjacency

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sparse.mm(self.adjacency, torch.tanh(self.first(x))))


def consume(parameter: Tensor) -> None:
    parameter.grad = None


def steps_alone(
    plan: em.Plan | None, build: Callable[[], nn.Module], after: Callable[[nn.Module], object] = lambda model: None
) -> dict[str, Tensor]:
    """The weights after three steps on one rank."""
    torch.manual_seed(0)
    model = build()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if plan is not None:
        em.wrap(model, optimizer, plan=plan)
        optimizer = model._elixir.optimizer
    after(model)
    for step in range(3):
        model(torch.randn(6, D, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = model.state_dict() if plan is None else em.full_state_dict(model, all_ranks=True)
    if plan is not None:
        optimizer.close()
    return {name: value.clone() for name, value in weights.items()}


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_autograd_may_save_sparse_tensors(layout: torch.layout) -> None:
    adjacency = torch.eye(6).roll(1, 0).to_sparse(layout=layout)
    wanted = steps_alone(None, lambda: Graph(adjacency))
    to_host = em.Plan.offload(rcache_blocks=7, chunk_numel=700, host_checkpoints="all")
    for plan in (PLANS["small"], PLANS["offload"], to_host):
        found = steps_alone(plan, lambda: Graph(adjacency))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("plan", [PLANS["small"], PLANS["offload"], em.Plan.ddp()])
def test_a_gradient_that_a_hook_has_used_up_is_none(plan: em.Plan) -> None:
    def use_up(model: nn.Module) -> None:
        model[1].weight.register_post_accumulate_grad_hook(consume)  # type: ignore[index, union-attr]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D))

    wanted, found = steps_alone(None, build, use_up), steps_alone(plan, build, use_up)
    assert torch.equal(found["1.weight"], wanted["1.weight"])
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
