"""Hugging Face's fused experts with grouped products, beside transformers' own and peft's adapters.

Tolerance: products of fp32 numbers near 1, whose sums of at most a few hundred terms are taken in another order.
"""

import io
from collections.abc import Callable
from copy import deepcopy
from itertools import product
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

import elixir_moe as em
from elixir_moe.hf.fused_experts import FusedExperts, is_fused_experts
from elixir_moe.moe import experts as experts_module
from elixir_moe.quantized import products
from tests.support.every import every
from tests.support.hf_cases import FAMILIES, ids

E, D, H, T, K, R = 6, 64, 128, 40, 2, 4
TOLERANCE = 1e-5
LAYOUTS = {
    f"{'gate' if gate else 'up'}{' transposed' * transposed}{' bias' * bias}{' norm' * norm}": (
        {"has_gate": gate, "is_transposed": transposed, "has_bias": bias, "has_post_expert_norm": norm}
    )
    for gate, transposed, bias, norm in product((True, False), repeat=4)
}


def experts(layout: dict[str, bool]) -> nn.Module:
    """Fused experts as transformers' decorator makes them."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.act_fn = E, ACT2FN["silu"]
            first, width = ("gate_up_proj", 2 * H) if layout["has_gate"] else ("up_proj", H)
            for name, inputs, outputs in ((first, D, width), ("down_proj", H, D)):
                shape = (inputs, outputs) if layout["is_transposed"] else (outputs, inputs)
                setattr(self, name, nn.Parameter(torch.randn(E, *shape) / inputs**0.5))
                if layout["has_bias"]:
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, outputs)))
            if layout["has_post_expert_norm"]:
                self.post_expert_norm = nn.RMSNorm(D)

    torch.manual_seed(1)
    config = SimpleNamespace(_experts_implementation="grouped_mm")
    return use_experts_implementation(Experts, **layout)(config)


class Layer(nn.Module):
    """Fused experts under the name that peft's targets have."""

    def __init__(self, layout: dict[str, bool]) -> None:
        super().__init__()
        self.experts = experts(layout)

    def forward(self, *routed: Tensor) -> Tensor:
        return self.experts(*routed)


def routed(seed: int = 0, experts: int = E) -> list[Tensor]:
    """Tokens, of which none chooses the last expert; choices; weights."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(T, D, generator=generator).requires_grad_()
    chosen = torch.rand(T, experts - 1, generator=generator).topk(K).indices
    return [tokens, chosen, torch.rand(T, K, generator=generator).requires_grad_()]


def gradients(model: nn.Module, checkpointed: bool = False) -> dict[str, Tensor]:
    """The output, and the gradients of all that is trained, of tokens and of weights."""
    inputs = routed()
    out = checkpoint(model, *inputs, use_reentrant=False) if checkpointed else model(*inputs)
    out.square().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert every(grad is not None for grad in found.values())
    return {**found, "out": out.detach(), "tokens": inputs[0].grad, "weights": inputs[2].grad}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Equal but for the order of sums."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE * value.abs().max().item())


def adapted(model: nn.Module, targets: tuple[str, ...], r: int = R, adapters: int = 1) -> nn.Module:
    """The model with peft's adapters, no factor zero; all of them are active."""
    torch.manual_seed(2)
    names = [name for name, p in model.named_parameters() if p.dim() == 3 and name.endswith(targets)]
    config = peft.LoraConfig(r=r, target_modules=[], target_parameters=names, init_lora_weights=False)
    found = peft.get_peft_model(model, config)
    for number in range(1, adapters):
        found.add_adapter(f"other {number}", config)
    found.base_model.set_adapter(list(found.peft_config))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_are_those_of_transformers(layout: str) -> None:
    model = Layer(LAYOUTS[layout])
    wanted = gradients(deepcopy(model))
    em.group_experts(model)
    assert isinstance(model.experts, FusedExperts)
    assert_same(gradients(model), wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("r", [R, E])
def test_adapters_beside_are_those_of_peft(layout: str, r: int) -> None:
    model = adapted(Layer(LAYOUTS[layout]), ("gate_up_proj", "up_proj", "down_proj"), r)
    names = list(peft.get_peft_model_state_dict(model))
    wanted = gradients(deepcopy(model))
    em.group_experts(model)
    assert_same(gradients(model), wanted)
    assert list(peft.get_peft_model_state_dict(model)) == names
    with model.disable_adapter():
        torch.testing.assert_close(model(*routed()), Layer(LAYOUTS[layout])(*routed()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.merge_and_unload()(*routed()), wanted["out"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["gate", "up transposed bias"])
def test_adapters_under_the_fused_product(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused product accepts only matrices with contiguous rows or columns, also in peft's layout of the factors."""
    model = adapted(Layer(LAYOUTS[layout]), ("gate_up_proj", "up_proj", "down_proj"))
    em.group_experts(model)
    wanted = gradients(model)
    model.zero_grad()
    monkeypatch.setattr(experts_module, "runs_fused", lambda rows, shape: True)
    assert_same(gradients(model), wanted)


@pytest.mark.parametrize("way", ["two adapters", "one stack", "checkpointed", "tiles", "bf16", "all trained"])
def test_ways_of_adapting(way: str) -> None:
    stacks = ("down_proj",) if way == "one stack" else ("gate_up_proj", "down_proj")
    model = adapted(Layer(LAYOUTS["gate"]), stacks, adapters=1 + (way == "two adapters"))
    if way == "bf16":
        model.to(torch.bfloat16)
    if way == "all trained":
        model.requires_grad_(True)
    inputs = deepcopy(model)
    wanted = gradients(inputs) if way != "bf16" else {"out": inputs(*cast(torch.bfloat16)).detach()}
    em.tile(model, at_most=2 * 2 * D * H * 4) if way == "tiles" else em.group_experts(model)
    assert ("tile_1" in str(model)) == (way == "tiles")
    if way == "bf16":  # half a unit of the last place for each of few roundings
        out = model(*cast(torch.bfloat16))
        assert out.dtype is torch.bfloat16
        torch.testing.assert_close(out, wanted["out"], rtol=0.05, atol=0.05 * wanted["out"].abs().max().item())
    else:
        assert_same(gradients(model, way == "checkpointed"), wanted)


def cast(dtype: torch.dtype) -> list[Tensor]:
    """`routed` in another dtype."""
    tokens, chosen, weights = routed()
    return [tokens.detach().to(dtype), chosen, weights.detach().to(dtype)]


@pytest.mark.parametrize("order", ["quantized first", "adapted first", "tiled first"])
@pytest.mark.parametrize("layout", ["gate", "up", "gate transposed bias"])
def test_adapters_beside_bytes(order: str, layout: str) -> None:
    stacks = ("gate_up_proj", "up_proj", "down_proj")
    base = Layer(LAYOUTS[layout]).requires_grad_(False)
    decoded = em.dequantize(em.quantize(deepcopy(base), "nf4", targets="*"))
    wanted = gradients(adapted(decoded, stacks))
    if order == "quantized first":
        model = em.group_experts(adapted(em.quantize(base, "nf4", targets="*"), stacks))
    else:
        model = adapted(base, stacks)
        if order == "tiled first":
            em.tile(model, at_most=2 * 2 * D * H * 4)
        model = em.quantize(model, "nf4", targets="*_proj*", skip="*lora*")
    assert_same(gradients(model), wanted)
    with pytest.raises(em.ConfigError, match=r"merge: the weight '(down|up|gate_up)_proj' is (quantized|in tiles)"):
        model.merge_adapter()


def test_bytes_that_peft_would_add_to_are_named() -> None:
    model = em.quantize(Layer(LAYOUTS["gate"]).requires_grad_(False), "int8", targets="*")
    with pytest.raises(em.UsageError, match=r"adapters to 'gate_up_proj', which is quantized: call em.wrap or em.gro"):
        adapted(model, ("gate_up_proj", "down_proj"))(*routed())


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator makes."""

    numel = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        for made in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, made.numel())
        return found


@pytest.mark.parametrize("bytes_", [False, True])
def test_no_tensor_is_as_large_as_the_stack(bytes_: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = E * D * H  # the smaller of the two
    monkeypatch.setattr(products, "CPU_SCRATCH_BYTES", 2 * stack)  # of fp32: half of the stack
    model = adapted(Layer(LAYOUTS["gate"]), ("gate_up_proj", "down_proj"))
    largest = {}
    for name in ("peft", "ours"):
        if name == "ours":
            em.quantize(model, "nf4", targets="*_proj*", skip="*lora*") if bytes_ else em.group_experts(model)
        with Largest() as seen:
            gradients(model)
        largest[name] = seen.numel
    assert largest["ours"] < stack <= largest["peft"], largest


@pytest.mark.parametrize("way", ["grouped", "quantized", "tiled and quantized"])
def test_copies_and_pickles(way: str) -> None:
    model: Any = adapted(FAMILIES["qwen3-moe"].build().requires_grad_(False), ("gate_up_proj", "down_proj"))
    if way.startswith("tiled"):
        em.tile(model, at_most=20_000)
    em.group_experts(model) if way == "grouped" else em.quantize(model, "int8")
    wanted = model(ids(1)).logits
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (deepcopy(model), torch.load(stored, weights_only=False)):
        assert torch.equal(other(ids(1)).logits, wanted)
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]


def test_adapters_may_follow() -> None:
    """peft knows its wrappers by the names of their classes."""
    model = em.group_experts(adapted(Layer(LAYOUTS["gate"]), ("gate_up_proj", "down_proj")))
    model.add_adapter("other", model.peft_config["default"])
    assert model(*routed()).isfinite().all()


def test_models_without_fused_experts_are_named() -> None:
    with pytest.raises(em.ConfigError, match="Linear has no fused experts of transformers"):
        em.group_experts(nn.Linear(2, 2))


MIXTURES = ("mixtral", "qwen3-moe", "gpt-oss", "qwen2-moe", "deepseek-v3")


@pytest.mark.parametrize("name", MIXTURES)
def test_families_of_transformers(name: str) -> None:
    def run(change: Callable[[nn.Module], object]) -> dict[str, Tensor]:
        model: Any = FAMILIES[name].build()
        assert any(is_fused_experts(module) for module in model.modules())
        change(model)
        loss = FAMILIES[name].loss(model, FAMILIES[name].batch(1))
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {**found, "loss": loss.detach()}

    assert_same(run(em.group_experts), run(lambda model: None))
