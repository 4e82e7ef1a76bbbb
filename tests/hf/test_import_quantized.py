"""Models whose layers another library has quantized: `wrap` takes them over with their bytes.

The oracle is the same model before `wrap`, in plain PyTorch with the other library's own layers on this CPU. The layers
of bitsandbytes decode as this library does, so that the first loss is equal to the bit.
"""

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.integrations import finegrained_fp8, mxfp4

import elixir_moe as em
from elixir_moe.hf.import_quantized import check_layers, import_quantized
from elixir_moe.quantized.packed import packed_parameters
from tests.support.cases import placed, with_further
from tests.support.every import every, same_tensors
from tests.support.parity import LOSS_TOLERANCE
from tests.support.quantized_cases import ADAPTER_TOLERANCE, PLANS, SIZES, base, optimizer_of, steps
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LOADED = {
    "nf4": FOUR,
    "nf4, scales quantized": FOUR | {"bnb_4bit_use_double_quant": True},
    "nf4, stored and computed in bf16": FOUR
    | {"bnb_4bit_quant_storage": torch.bfloat16, "bnb_4bit_compute_dtype": torch.bfloat16},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small Llama, for `from_pretrained` with bitsandbytes."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)).save_pretrained(path)
    return str(path)


def loaded(folder: str, kind: str) -> nn.Module:
    """The model as its users write it: loaded by transformers, with peft's LoRA, in training."""
    settings = hf.BitsAndBytesConfig(**LOADED[kind])
    dtype = torch.bfloat16 if "bf16" in kind else torch.float32  # to which bitsandbytes rounds weights in backward
    model = hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=dtype)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(8)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, settings).train()


def beside_plain(folder: str, kind: str) -> dict[str, Any]:
    """(rank) Losses and adapters of the model as it was loaded, and of the same under each plan."""
    plain = loaded(folder, kind)
    wanted = torch.stack(steps(plain, optimizer_of(plain))).double()
    torch.distributed.all_reduce(wanted)
    found: dict[str, Any] = {"plain": ((wanted / torch.distributed.get_world_size()).tolist(), adapters(plain))}
    for name, plan in PLANS.items():
        model = loaded(folder, kind)
        model, optimizer = em.wrap(model, optimizer_of(model), plan=placed(plan))
        losses = torch.stack(steps(model, optimizer)).double()
        torch.distributed.all_reduce(losses)
        state = {key: value for key, value in em.full_state_dict(model, all_ranks=True).items() if "lora" in key}
        held, size = em.inspect(model).held_bytes, em.inspect(model).footprint
        found[name] = (losses / torch.distributed.get_world_size()).tolist(), state, held["host"] == size.host_bytes
        optimizer.close()
    return found


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


CASES = [(kind, world) for kind in LOADED for world in (1, 2)]


@pytest.mark.parametrize(("kind", "world"), with_further(CASES, [("nf4, scales quantized", 2), ("int8", 1)]))
def test_layers_of_bitsandbytes_are_taken_over(kind: str, world: int, folder: str, ranks: Ranks) -> None:
    """On several ranks the oracle's ranks train apart from one another, so that the first loss alone compares."""
    for found in ranks(world).run(beside_plain, folder, kind):
        (wanted, trained), (losses, state, _) = found.pop("plain"), found["ddp"]
        assert losses[0] == pytest.approx(wanted[0], abs=0.0 if world == 1 else LOSS_TOLERANCE)
        if world == 1 and "bf16" not in kind:  # where updates meet weights of 16 bits, an ulp of them is another path
            assert losses == pytest.approx(wanted, abs=LOSS_TOLERANCE)
            assert every(
                torch.allclose(state[key], value, atol=3 * ADAPTER_TOLERANCE) for key, value in trained.items()
            )
        for name, (others, values, exact) in found.items():
            assert others == losses, name
            assert same_tensors(state, values), name
            assert exact, f"{name}: the plan's host bytes are not those held"


@pytest.mark.parametrize("kind", LOADED)
def test_the_bytes_and_what_they_decode_to_are_those_of_bitsandbytes(kind: str, folder: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    model = loaded(folder, kind)
    layers = {n: m for n, m in model.named_modules() if type(m).__module__.startswith("bitsandbytes")}
    wanted = {}
    for name, layer in layers.items():
        data = layer.weight.data.clone().view(torch.uint8).flatten()
        if kind == "int8":
            wanted[name] = data, layer.weight.data * (layer.weight.SCB * (1 / 127)).unsqueeze(1)
        else:
            state = copy.copy(layer.weight.quant_state)
            state.dtype = torch.float32
            decoded = functional.dequantize_4bit(layer.weight.data, state)
            wanted[name] = data, decoded
    import_quantized(model, optimizer_of(model))
    found = {name.removesuffix(".weight"): (m, packed) for name, m, _, packed in packed_parameters(model)}
    assert found.keys() == wanted.keys()
    for name, (data, decoded) in wanted.items():
        layer, packed = found[name]
        assert torch.equal(layer.weight.flatten(), data)
        assert torch.equal(packed.decode(layer.weight, layer.weight_scales, torch.float32), decoded), name
        assert not any(isinstance(value, Tensor) for value in vars(layer).values())


def test_layers_that_a_cpu_has_evaluated_are_refused(folder: str) -> None:
    """bitsandbytes rounds their scales to bf16 then, on CPUs with bf16 of their own; here that is said by hand."""
    model = loaded(folder, "nf4")
    model.base_model.model.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(em.ConfigError, match=r"'.*up_proj\.weight' \(Linear4bit\) .*before its first evaluation"):
        check_layers(model)


def test_frozen_weights_leave_the_optimizer(folder: str) -> None:
    model = loaded(folder, "nf4")
    optimizer = torch.optim.AdamW(model.parameters())
    import_quantized(model, optimizer)
    left = set(optimizer.param_groups[0]["params"])
    assert left <= set(model.parameters())
    assert {p for p in model.parameters() if p.requires_grad} <= left


REFUSED = {
    "fp4": ({"load_in_4bit": True}, r"is of fp4: load it with .*bnb_4bit_quant_type='nf4'"),
    "outliers": ({"load_in_8bit": True}, r"inputs above 6\.0.*llm_int8_threshold=0\.0"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_equal_is_refused_by_name(kind: str, folder: str) -> None:
    options, says = REFUSED[kind]
    model = hf.AutoModelForCausalLM.from_pretrained(folder, quantization_config=hf.BitsAndBytesConfig(**options))
    before = [type(module) for module in model.modules()]
    with pytest.raises(em.ConfigError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight' \(Linear.*" + says):
        check_layers(model)
    assert [type(module) for module in model.modules()] == before


def test_layers_that_were_never_quantized_or_have_other_blocks_are_refused() -> None:
    nn4 = pytest.importorskip("bitsandbytes.nn")
    layer = nn4.Linear4bit(128, 64, quant_type="nf4")
    with pytest.raises(em.ConfigError, match=r"'0\.weight' \(Linear4bit\) has not been quantized yet.*model\.to"):
        check_layers(nn.Sequential(layer))
    layer.weight.blocksize = 128
    with pytest.raises(em.ConfigError, match=r"blocks of 128 weights"):
        check_layers(nn.Sequential(layer.to("cpu")))
    with pytest.raises(em.ConfigError, match=r"has 96 inputs.*cross rows"):
        check_layers(nn.Sequential(nn4.Linear4bit(96, 64, quant_type="nf4").to("cpu")))
    with pytest.raises(em.ConfigError, match=r"'0\.weight' is a Params4bit.*layer that is not known"):
        check_layers(nn.Sequential(nn4.EmbeddingNF4(64, 64).to("cpu")))


# ------------------------------------------------------------------------------------- transformers' own layers


def test_fp8_layers_and_experts_of_transformers_are_taken_over(ranks: Ranks) -> None:
    """Their kernels need a GPU: the oracle is the model with the weights that the bytes stand for."""
    wanted, *found = ranks(1).run(fp8_beside_plain)[0]
    for losses in found:
        assert losses[0] == wanted[0]
        assert losses == pytest.approx(wanted, abs=LOSS_TOLERANCE)


def fp8_beside_plain() -> list[list[float]]:
    """(rank) Losses of the model with decoded weights, and of the one with transformers' layers under two plans."""
    found = []
    for plan in (None, PLANS["zero3"], PLANS["disk"]):
        model = em.quantize(base(), "fp8")
        model = em.dequantize(model) if plan is None else with_layers_of_transformers(model)
        torch.manual_seed(8)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):  # peft rounds the first ones to FP8
            nn.init.normal_(parameter, std=0.1)
        optimizer: Any = optimizer_of(model)
        if plan is not None:
            model, optimizer = em.wrap(model, optimizer, plan=placed(plan))
        found.append([loss.item() for loss in steps(model, optimizer)])
        if plan is not None:
            optimizer.close()
    return found


def with_layers_of_transformers(model: Any) -> nn.Module:
    """The model as `from_pretrained` of an FP8 checkpoint gives it on a GPU, with the bytes of `model`."""
    settings = hf.FineGrainedFP8Config()
    with torch.device("meta"):
        other = type(model)(model.config)
    finegrained_fp8.replace_with_fp8_linear(other, ["lm_head", "gate"], settings)
    state = {}
    for name, parameter in model.state_dict().items():
        if name.endswith("_scales"):
            state[f"{name.removesuffix('_scales')}_scale_inv"] = parameter.view(torch.float32)
        else:
            state[name] = parameter.view(torch.float8_e4m3fn) if parameter.dtype == torch.uint8 else parameter
    other.load_state_dict(state, assign=True)
    other.requires_grad_(False)
    other.model.rotary_emb = model.model.rotary_emb
    assert any(type(module).__name__ == "FP8Experts" for module in other.modules())
    return other


def test_fp8_layers_of_other_blocks_or_trained_are_refused() -> None:
    layer = finegrained_fp8.FP8Linear(256, 128, block_size=(64, 64))
    layer.requires_grad_(False)
    with pytest.raises(em.ConfigError, match=r"'0\.weight' \(FP8Linear\) has scales of shape \(2, 4\).*\[128, 128\]"):
        check_layers(nn.Sequential(layer))
    with pytest.raises(em.ConfigError, match=r"is trained.*requires_grad_\(False\)"):
        check_layers(nn.Sequential(finegrained_fp8.FP8Linear(256, 128, block_size=(128, 128))))
    static = finegrained_fp8.FP8Linear(256, 128, block_size=(128, 128), activation_scheme="static")
    with pytest.raises(em.ConfigError, match="with static inputs"):
        check_layers(nn.Sequential(static.requires_grad_(False)))


def test_mxfp4_experts_of_transformers_are_refused_by_name() -> None:
    config = hf.GptOssConfig(hidden_size=64, intermediate_size=64, num_local_experts=2)
    with pytest.raises(em.ConfigError, match=r"'0' is a Mxfp4GptOssExperts.*weights=folder.*dequantize=True"):
        check_layers(nn.Sequential(mxfp4.Mxfp4GptOssExperts(config)))
