"""Parametrisations of torch and peft's LoRA on fused experts: registered before `wrap`, after it, or around a forward.

Each case runs in one process under plain torch on all rows, and wrapped on one and two ranks, each on its part of the
rows, two micro-batches a step. Tolerances as in `tests.support.parity`: fp32 with a smooth optimizer.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import cached, register_parametrization, remove_parametrizations
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.errors import ElixirError, UsageError
from tests.support.cases import placed, with_further, worlds_in_turn
from tests.support.every import same_tensors
from tests.support.parity import assert_alike, trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS, MICRO, ROWS, E, D = 2, 2, 8, 3, 8


class Squared(nn.Module):
    """Has autograd save the weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight * weight


class Halved(nn.Module):
    """Gives the parameter another value when it is registered."""

    def forward(self, half: Tensor) -> Tensor:
        return 2 * half

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


class Product(nn.Module):
    """Makes two parameters of one."""

    def forward(self, size: Tensor, direction: Tensor) -> Tensor:
        return size * direction

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.norm().view(1), weight / weight.norm()


@contextlib.contextmanager
def parametrized(module: nn.Module, kind: type[nn.Module] = Squared) -> Iterator[None]:
    """While it is open, the weight of `module` is a function of it."""
    register_parametrization(module, "weight", kind())
    try:
        with cached():
            yield
    finally:
        registered: Any = module.parametrizations.weight
        if len(registered) > 1:
            del registered[-1]  # the others were there before
        else:
            remove_parametrizations(module, "weight", leave_parametrized=kind is Halved)


class Experts(nn.Module):
    """The weights of all experts in one parameter, of which the rows use all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(E, D, D))
        self.bias = nn.Parameter(torch.zeros(E, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("ni,eio->neo", x, self.weight) + self.bias).mean(1)


class Inside(Experts):
    """Parametrises its own weight, in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        with parametrized(self):
            return super().forward(x)


class Layer(nn.Module):
    """Experts beside others' modules."""

    experts: type[Experts] = Experts

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(D), self.experts()
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.mix(self.norm(x)))


class LayerInside(Layer):
    experts = Inside


class LayerAround(Layer):
    """Parametrises its experts before they run, as peft does."""

    kind: type[nn.Module] = Squared

    def forward(self, x: Tensor) -> Tensor:
        with parametrized(self.mix, self.kind):
            return super().forward(x)


class LayerInverted(LayerAround):
    """The weight gets new values, and in the end the old ones again."""

    kind = Halved


class LayerSame(LayerAround):
    """Nothing comes of it."""

    kind = nn.Identity


class Net(nn.Module):
    """A stack of layers, each in a checkpoint of its own where `reentrant` is not None."""

    def __init__(self, layer: type[Layer] = Layer, reentrant: bool | None = None, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.layers = nn.ModuleList(layer() for _ in range(5))
        self.reentrant = reentrant
        for module in self.layers if frozen else ():
            module.mix.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).requires_grad_()  # else a reentrant checkpoint behind frozen layers has no backward
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)


def mean_square(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows) - rows.flip(1)).pow(2).mean()


def around_the_model(model: Any, rows: Tensor) -> Tensor:
    """All weights are parametrised while nothing runs, and one of them is read there too."""
    with contextlib.ExitStack() as stack:
        for layer in model.layers:
            stack.enter_context(parametrized(layer.mix))
        return mean_square(model, rows) + 1e-2 * model.layers[1].mix.weight.square().sum()


def several_times(model: Any, rows: Tensor) -> Tensor:
    """A registration that nobody uses, an evaluation between, and a second forward before the backward."""
    with parametrized(model.layers[0].mix), torch.no_grad():
        model(rows)
    return mean_square(model, rows) + mean_square(model, rows.roll(1, 1))


def of_torch(model: Any) -> Any:
    """torch's own, each with weights or buffers of its own."""
    parametrizations.weight_norm(model.first)
    parametrizations.orthogonal(model.last)
    parametrizations.spectral_norm(model.layers[1].out)
    register_parametrization(model.layers[0].mix, "weight", Squared())
    return model


def registered(model: Any) -> Any:
    """One that takes the weight as it is, and one that gives it new values."""
    register_parametrization(model.layers[0].mix, "weight", Squared())
    register_parametrization(model.layers[1].mix, "weight", Halved())
    return model


def removed(model: Any) -> Any:
    """What was registered before, with and without its last values."""
    remove_parametrizations(model.layers[0].mix, "weight", leave_parametrized=False)
    remove_parametrizations(model.layers[1].mix, "weight", leave_parametrized=True)
    return model


def unchanged(model: Any) -> Any:
    return model


def adapters(model: nn.Module) -> nn.Module:
    """peft's LoRA on the experts' parameters, two of them of one module; everything else is frozen."""
    import peft

    targets = ["mix.weight"] if isinstance(model, Net) else ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config)


VOCAB = 16


def language_model(family: str, reentrant: bool | None = None) -> nn.Module:
    """A tiny one with fused experts."""
    import transformers

    shape = {"hidden_size": D, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    own = {
        "Mixtral": {"num_local_experts": E},
        "Qwen3Moe": {"num_experts": E, "moe_intermediate_size": 8, "head_dim": 4},
    }
    config = getattr(transformers, f"{family}Config")(**shape, **heads, **own[family], use_cache=False)
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


def next_tokens(model: nn.Module, rows: Tensor) -> Tensor:
    tokens = (rows * 3).long().remainder(VOCAB)
    return model(tokens, labels=tokens).loss


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    before: Callable[[Any], Any] = unchanged
    after: Callable[[Any], Any] = unchanged
    loss: Callable[[nn.Module, Tensor], Tensor] = mean_square
    blocks: int = 4
    """Of the rCache, where a plan does not have one for every chunk; fewer than chunks and gradients would take."""


def layers_of(layer: type[Layer], reentrant: bool | None = None, frozen: bool = False) -> Callable[[], nn.Module]:
    return lambda: Net(layer, reentrant, frozen)


CHECKPOINTS = {"": None, ", reentrant": True, ", non-reentrant": False}
FAMILIES = ("Mixtral", "Qwen3Moe")
CASES = {
    "around the model": Case(Net, loss=around_the_model),
    "several times": Case(layers_of(LayerAround, frozen=True), loss=several_times),
    "before wrap": Case(Net, before=of_torch),
    "before wrap and around": Case(layers_of(LayerAround), before=registered),
    "after wrap": Case(Net, after=registered),
    "after wrap, non-reentrant": Case(layers_of(Layer, False), after=registered),
    "removed after wrap": Case(Net, before=registered, after=removed),
}
for suffix, reentrant in CHECKPOINTS.items():
    for name, layer in {"inside": LayerInside, "around": LayerAround, "inverted": LayerInverted}.items():
        CASES[f"{name}{suffix}"] = Case(layers_of(layer, reentrant))
        blocks = 4 if reentrant is None else 5  # a region's three chunks, and the two gradients of the layer behind it
        CASES[f"{name}, frozen{suffix}"] = Case(layers_of(layer, reentrant, True), blocks=blocks)
    CASES[f"plain{suffix}"] = Case(layers_of(Layer, reentrant))
    CASES[f"same{suffix}"] = Case(layers_of(LayerSame, reentrant))
    CASES[f"peft{suffix}"] = Case(layers_of(Layer, reentrant), before=adapters, blocks=4)
    for family in FAMILIES:
        CASES[f"{family}{suffix}"] = Case(
            partial(language_model, family, reentrant), before=adapters, loss=next_tokens, blocks=7
        )
QUICK = {
    "around the model",
    "several times",
    "before wrap and around",
    "after wrap",
    "removed after wrap",
    "inside, reentrant",
    "around",
    "around, reentrant",
    "inverted",
    "peft",
    "Mixtral, reentrant",
    "Qwen3Moe, non-reentrant",
}
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(chunk_numel=400),
    "zero3": em.Plan.zero3(rcache_blocks=4, chunk_numel=400),
    "offload": em.Plan.offload(rcache_blocks=4, device_chunks=1, chunk_numel=400),
    "layers": em.Plan.offload(rcache_blocks=4, chunk_numel=1300),  # each in one chunk
    "disk": em.Plan.offload(rcache_blocks=4, disk_chunks=2, chunk_numel=400),
}


def train(name: str, plan: em.Plan | None, **options: Any) -> dict[str, Any]:
    """Weights by their names without parametrisations, and gradient norms and losses as `parity.trained` has norms."""
    case, losses = CASES[name], []
    if plan is not None and plan.rcache_blocks != "all":
        plan = replace(plan, rcache_blocks=case.blocks)
    dtype = options.get("compute_dtype", torch.float32)
    rank, world = (dist.get_rank(), dist.get_world_size()) if plan else (0, 1)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = case.before(case.model())
        trainable = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(trainable, lr=1e-2, eps=1e-4, weight_decay=0.1)

    def backward(model: nn.Module, step: int) -> None:
        for micro in range(MICRO):
            rows = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(MICRO * step + micro)).chunk(world)
            loss = case.loss(model, rows[rank].to(dtype)) / MICRO
            loss.backward()
            losses.append(loss.detach() / world)

    result = trained(build, backward, plan, STEPS, after=case.after, **options)
    summed = torch.stack(losses)
    if world > 1:
        dist.all_reduce(summed)
    result["norms"] += summed.tolist()
    result["state"] = {re.sub(r"parametrizations\.(\w+)\.original$", r"\1", k): v for k, v in result["state"].items()}
    return result


def train_all(name: str, plans: Iterable[str], **options: Any) -> dict[str, dict[str, Any]]:
    return {plan: train(name, PLANS[plan], **options) for plan in plans}


@pytest.mark.parametrize(("name", "world", "every"), worlds_in_turn(CASES, QUICK))
def test_case(name: str, world: int, every: bool, ranks: Ranks) -> None:
    """On one rank the plans differ in blocks and tiers alone."""
    wanted = train(name, None)
    several = [*PLANS] if every else ["zero3", "layers"]
    for found in ranks(world).run(train_all, name, several if world > 1 else ["offload", "disk"]):
        for plan, result in found.items():
            assert_alike(result, wanted, plan, 2e-5, rel=1e-5, abs=1e-5)


PRECISE = (", reentrant", ("zero3", "disk"))


@pytest.mark.parametrize(
    ("suffix", "plans"), with_further([PRECISE, *((suffix, tuple(PLANS)) for suffix in CHECKPOINTS)], [PRECISE])
)
def test_what_changes_nothing_costs_no_precision(suffix: str, plans: tuple[str, ...], ranks: Ranks) -> None:
    """torch sets the parameter to itself. In bf16 that would be a write of less than the fp32 master has."""
    wanted, found = (
        ranks(2).run(train_all, name + suffix, plans, compute_dtype=torch.bfloat16) for name in ("plain", "same")
    )
    for with_none, with_one in zip(wanted, found, strict=True):
        for plan, result in with_none.items():
            assert with_one[plan]["norms"] == result["norms"], plan
            assert same_tensors(with_one[plan]["state"], result["state"]), plan


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one in this process."""
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


def wrapped(model: nn.Module, plan: str = "offload") -> tuple[Any, Any]:
    given = PLANS[plan]
    return em.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        plan=placed(given),
    )


@pytest.mark.usefixtures("alone")
def test_files_have_the_names_of_wrap(tmp_path: Path) -> None:
    """A parametrisation that is registered later changes no name, and what it saves others can load."""
    model, optimizer = wrapped(Net())
    names = [*em.full_state_dict(model, all_ranks=True)]
    registered(model)
    mean_square(model, torch.ones(2, D)).backward()
    optimizer.step()
    state = em.full_state_dict(model, all_ranks=True)
    em.save(tmp_path / "checkpoint", model, optimizer)
    em.save_pretrained(model, tmp_path / "folder")
    optimizer.close()
    assert [*state] == names
    other, optimizer = wrapped(Net(), "layers")
    em.load(tmp_path / "checkpoint", other, optimizer)
    found = em.full_state_dict(other, all_ranks=True)
    optimizer.close()
    assert same_tensors(found, state)
    plain = load_file(tmp_path / "folder" / "model.safetensors")
    assert same_tensors(plain, state)


@pytest.mark.usefixtures("alone")
def test_parameters_that_come_after_wrap_are_refused(tmp_path: Path) -> None:
    """No plan has a place for them, and torch asks to add them to the optimizer."""
    model, optimizer = wrapped(Net())
    register_parametrization(model.layers[1].mix, "weight", Product())
    mean_square(model, torch.ones(2, D)).backward()
    new = r"layers\.1\.mix\.parametrizations\.weight\.original0.*before wrap"
    for refused in (
        optimizer.step,
        lambda: em.full_state_dict(model, all_ranks=True),
        lambda: em.save_pretrained(model, tmp_path / "folder"),
    ):
        with pytest.raises(UsageError, match=new):
            refused()
    optimizer.zero_grad()
    with pytest.raises(UsageError, match=new):
        em.save(tmp_path / "checkpoint", model, optimizer)
    optimizer.close()


@pytest.mark.usefixtures("alone")
def test_a_buffer_that_comes_after_wrap_is_not_lost_without_a_word() -> None:
    model, optimizer = wrapped(Net())
    parametrizations.spectral_norm(model.last)
    with pytest.raises(UsageError, match=r"last\.parametrizations\.weight\.0\._u.*before wrap"):
        em.full_state_dict(model, all_ranks=True)
    optimizer.close()


class Shortened(Squared):
    """Keeps a part of the parameter."""

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight[:1]


@pytest.mark.usefixtures("alone")
def test_a_parameter_keeps_its_shape_and_is_set_to_tensors_alone() -> None:
    model, optimizer = wrapped(Net())
    before = em.full_state_dict(model, all_ranks=True)
    weight = model.first.weight
    with pytest.raises(UsageError, match=r"'layers\.0\.mix\.weight' of .*cannot become"):
        register_parametrization(model.layers[0].mix, "weight", Shortened(), unsafe=True)
    with torch.no_grad(), pytest.raises(UsageError, match=r"set_.*copy_"):
        weight.set_()
    with torch.no_grad(), pytest.raises(UsageError, match=r"set_.*copy_"):
        weight.set_(torch.zeros(D * D).untyped_storage(), 0, (D, D))
    assert same_tensors(before, em.full_state_dict(model, all_ranks=True))
    with torch.no_grad():
        assert weight.set_(weight) is weight and weight.set_(torch.ones(D, D)) is weight
    assert torch.equal(em.full_state_dict(model, all_ranks=True)["first.weight"], torch.ones(D, D))
    optimizer.close()


class Keeping(Experts):
    """Leaves a view of its weight behind."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.weight[0]
        return super().forward(x)


class LayerKeeping(Layer):
    experts = Keeping


@pytest.mark.usefixtures("alone")
def test_a_write_through_an_old_view_is_an_error() -> None:
    """The weight is elsewhere when it is written; nobody would see it."""
    model, optimizer = wrapped(Net(LayerKeeping), "disk")  # fewer blocks than chunks: the layer's has left its block
    with torch.no_grad():
        model(torch.ones(2, D))
        model.layers[1].mix.kept.zero_()
        with pytest.raises(ElixirError, match=r"'layers\.1\.mix\.weight' was written through a view that was taken"):
            model(torch.ones(2, D))
    optimizer.close()
