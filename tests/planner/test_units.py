"""A layer is a unit: which modules of large models gather something, under the presets and under the plan searched for.

The models are without data, by their published configurations; the units are named one by one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import Plan
from elixir_moe.chunks.units import chosen_units, moving_chunks, units_moved
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import Task, solve
from elixir_moe.planner.trace import trace
from elixir_moe.quantized.convert import quantize
from elixir_moe.runtime.units import Parts, find_parts
from elixir_tools.models.adapters import adapted
from elixir_tools.models.config import Checkpoint, GPTConfig
from elixir_tools.models.gpt import GPT, lm_loss
from elixir_tools.models.lora import Lora
from tests.support.cases import with_further

PRESETS = {"zero3": Plan.zero3(), "offload": Plan.offload()}
MACHINE = "a100-80g-pcie-x4"
RANKS = 4


@dataclass(frozen=True)
class Case:
    """A traced model, and the names of the modules that should be its units."""

    profile: Profile
    parts: Parts
    expected: frozenset[str]

    def units(self, layout: Layout) -> set[str]:
        """The units that gather anything."""
        moving = moving_chunks(layout)
        chosen = [unit for unit in chosen_units(self.profile.parts, layout) if unit is not None]
        return {self.parts.names[unit.module] for unit in chosen if any(p in moving for p in unit.params)}


def traced(model: nn.Module, step: Callable[[nn.Module, Any], Tensor], sample: Tensor, expected: Iterable[str]) -> Case:
    profile = trace(model, step, sample, world=RANKS, compute_dtype=torch.bfloat16)
    return Case(profile, find_parts(model), frozenset(expected))


def huggingface(
    kind: str, *, prepared: Callable[[nn.Module], nn.Module] = lambda model: model, **sizes: Any
) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(use_cache=False, **sizes)
    name = "AutoModelForSeq2SeqLM" if kind == "T5" else "AutoModelForCausalLM"
    with torch.device("meta"):
        model = prepared(getattr(transformers, name).from_config(config).train())
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    found: Tensor = model(input_ids=ids, labels=ids).loss
    return found


IDS = torch.empty(1, 256, dtype=torch.int64, device="meta")


def decoder(layers: int, base: str = "", *, head: bool = True) -> list[str]:
    names = [*(f"model.layers.{i}" for i in range(layers)), "model.norm"]
    return [base + name for name in [*names, *["model.embed_tokens", "lm_head"] * head]]


def llama() -> Case:
    """LLaMA-7B."""
    return traced(huggingface("Llama"), loss, IDS, decoder(32))


def qwen3_moe(**changes: Any) -> dict[str, Any]:
    """Qwen3-30B-A3B."""
    return {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    } | changes


def qwen() -> Case:
    return traced(huggingface("Qwen3Moe", **qwen3_moe()), loss, IDS, decoder(48))


def gpt2(checkpoint: Checkpoint = "non_reentrant") -> Case:
    """gpt2-5.5b: layers of three chunks, and an embedding that is tied to the head and thus no unit's."""
    config = GPTConfig(vocab_size=50257, seq_len=1024, d_model=4096, n_layers=26, n_heads=32, checkpoint=checkpoint)
    with torch.device("meta"):
        model = GPT(config)
    sample = torch.empty(1, 257, dtype=torch.int64, device="meta")
    return traced(model, lm_loss, sample, ["positions", *(f"blocks.{i}" for i in range(26)), "norm"])


def sized() -> Case:
    """Layers of different size: two of them have no experts."""
    sizes = {"mlp_only_layers": [0, 3], "num_hidden_layers": 6, "vocab_size": 4096}
    return traced(huggingface("Qwen3Moe", **qwen3_moe(**sizes)), loss, IDS, decoder(6))


def t5() -> Case:
    model = huggingface(
        "T5",
        d_model=256,
        d_ff=1024,
        num_layers=4,
        vocab_size=1024,
        decoder_start_token_id=0,
    )
    layers = [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(4)]
    return traced(model, loss, IDS, [*layers, "encoder.final_layer_norm", "decoder.final_layer_norm"])


def adapters() -> Case:
    """Adapters of a rank so high that their chunks move: another chunk group, in a layer's unit."""
    pytest.importorskip("peft")
    model = huggingface(
        "Llama", num_hidden_layers=6, prepared=lambda m: adapted(m, Lora.parse("r=256,targets=all-linear"))
    )
    return traced(model, loss, IDS, decoder(6, "base_model.model."))


def quantized() -> Case:
    """Codes, scales and adapters."""
    pytest.importorskip("peft")

    def prepared(model: nn.Module) -> nn.Module:
        quantize(model.requires_grad_(False), "nf4")
        return adapted(model, Lora.parse("r=256,targets=all-linear"))

    return traced(
        huggingface("Llama", num_hidden_layers=6, prepared=prepared), loss, IDS, decoder(6, "base_model.model.")
    )


CASES = {case.__name__: cache(case) for case in (llama, qwen, gpt2, sized, t5, adapters, quantized)}
"""Each is traced once."""


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_a_unit(name: str) -> None:
    case = CASES[name]()
    for preset, plan in PRESETS.items():
        layout = plan.layout(case.profile.params)
        assert case.units(layout) == case.expected, preset
        filled = replace(plan, whole_layers=False).layout(case.profile.params)
        assert case.units(filled) != case.expected, "there is something to win"
        least, before = (case.profile.schedule(each).least_blocks() for each in (layout, filled))
        assert (layout.chunk_numel, least) <= (filled.chunk_numel, before), "and it costs no memory"


def test_layers_longer_than_a_chunk_are_no_more_units_where_nothing_is_recomputed() -> None:
    case = gpt2(checkpoint="none")
    for preset, plan in PRESETS.items():
        whole, filled = (replace(plan, whole_layers=w).layout(case.profile.params) for w in (True, False))
        moved = units_moved(chosen_units(case.profile.parts, whole), whole)
        assert len(case.units(whole)) == len(case.units(filled)) == moved, preset


SEARCHES = list(product(["llama", "qwen", "gpt2"], [24, 80]))
"""(model, GiB of a GPU)."""


@pytest.mark.parametrize(("name", "memory"), with_further(SEARCHES, [*SEARCHES[:2], ("qwen", 80), ("gpt2", 24)]))
def test_a_layer_is_a_unit_under_the_plan_that_is_found(name: str, memory: int) -> None:
    case = CASES[name]()
    task = Task(
        profile=case.profile,
        hardware=Hardware.named(MACHINE),
        gpus=RANKS,
        capacity_bytes=memory * 2**30,
        host_bytes=400 * 2**30,
    )
    assert case.units(solve(task).layout) == case.expected
