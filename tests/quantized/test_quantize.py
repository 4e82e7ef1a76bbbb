"""`quantize`: which weights become bytes, and that the model then computes what its decoded weights would."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.errors import ConfigError, UsageError
from elixir_moe.parallel.tiles import Tile, tile_of
from elixir_moe.quantized.formats import SCHEMES
from elixir_moe.quantized.modules import QuantizedLinear
from tests.support.every import every

NAMES = list(SCHEMES)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 192)
        self.down = nn.Linear(192, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A frozen base with a trained input and output layer and trained norms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(64, 8)
        for name in ("up", "down"):
            for block in self.blocks:
                getattr(block, name).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def model(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype)


def gradients(m: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in m.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("scheme", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_computes_what_its_decoded_weight_would(scheme: str, dtype: torch.dtype) -> None:
    """To the bit: both multiply the same numbers by the same products."""
    packed = em.quantize(model(dtype), scheme)
    plain = em.dequantize(copy.deepcopy(packed))
    assert type(packed.blocks[0].up) is QuantizedLinear and type(plain.blocks[0].up) is nn.Linear
    x = torch.randn(3, 5, 8, dtype=dtype)
    for m in (packed, plain):
        m(x).square().mean().backward()
    assert torch.equal(packed(x), plain(x))
    found, expected = gradients(packed), gradients(plain)
    assert found.keys() == expected.keys() and "blocks.0.norm.weight" in found
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_the_choice_by_default_is_frozen_weights_in_blocks() -> None:
    m = em.quantize(model(), "nf4")
    assert {name for name, p in m.named_parameters() if p.dtype == torch.uint8} == {
        f"blocks.{i}.{name}.weight{part}" for i in range(2) for name in ("up", "down") for part in ("", "_scales")
    }
    assert every(not p.requires_grad for p in m.parameters() if p.dtype == torch.uint8)
    assert m.blocks[0].up.bias.dtype == torch.float32


def qwen2_moe() -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, moe_intermediate_size=64, shared_expert_intermediate_size=64,
    )  # fmt: skip
    return Qwen2MoeForCausalLM(config)


def zaya() -> nn.Module:
    from transformers import ZayaConfig, ZayaForCausalLM

    config = ZayaConfig(
        vocab_size=32, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        moe_intermediate_size=64, num_experts=4, router_hidden_size=64, eos_token_id=1,
    )  # fmt: skip
    return ZayaForCausalLM(config)


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(("build", "stays"), [(qwen2_moe, "shared_expert_gate"), (zaya, "mlp.gate.down_proj")])
def test_gates_and_routers_stay(build: Callable[[], nn.Module], stays: str, adapted: bool) -> None:
    """Also where peft has put them inside a layer of its own, as ``base_layer``."""
    model: Any = build().requires_grad_(False)
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", stays]))
    em.quantize(model, "nf4")
    kept = [p.dtype for name, p in model.named_parameters() if f"{stays}." in name and "lora_" not in name]
    assert kept == [torch.float32] * len(kept) and kept
    assert any(p.dtype is torch.uint8 for name, p in model.named_parameters() if "q_proj" in name)


def test_a_convolution_is_no_stack_of_experts() -> None:
    model = nn.ModuleList([nn.Linear(64, 64), nn.Conv1d(64, 64, 3)]).requires_grad_(False)
    em.quantize(model, "nf4")
    assert [name for name, p in model.named_parameters() if p.dtype is torch.uint8] == ["0.weight", "0.weight_scales"]


def test_a_weight_that_a_mixer_reads_itself_stays() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(
        hidden_size=64, num_hidden_layers=1, vocab_size=16, state_size=4, time_step_rank=64, use_cache=False
    )
    model = transformers.MambaForCausalLM(config).requires_grad_(False)
    em.quantize(model, "nf4")
    assert model.backbone.layers[0].mixer.dt_proj.weight.is_floating_point()
    assert model.backbone.layers[0].mixer.in_proj.weight.dtype is torch.uint8
    assert model(input_ids=torch.ones(1, 5, dtype=torch.long)).logits.isfinite().all()


def test_bytes() -> None:
    m = em.quantize(model().requires_grad_(False), "nf4")
    packed = sum(p.nbytes for p in m.blocks.parameters() if p.dtype == torch.uint8)
    assert packed <= 0.57 * sum(block.up.in_features * block.up.out_features * 2 for block in m.blocks)


def test_targets_and_skip() -> None:
    m = em.quantize(model().requires_grad_(False), "int8", targets=["*.up", "lm_head.weight"], skip="blocks.1.*")
    assert [name for name, child in m.named_modules() if isinstance(child, QuantizedLinear)] == [
        "blocks.0.up",
        "lm_head",
    ]


def test_a_dtype_for_the_model_leaves_bytes_alone() -> None:
    m = em.quantize(model(), "fp8")
    before = m.blocks[0].up.weight_scales.clone()
    m.to(torch.bfloat16)
    assert torch.equal(m.blocks[0].up.weight_scales, before)
    assert m(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_under_autocast_the_weight_is_decoded_in_its_dtype() -> None:
    m = em.quantize(model(), "nf4")
    plain = em.dequantize(copy.deepcopy(m), torch.bfloat16)
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = m.blocks[0].up(x)
        assert found.dtype == torch.bfloat16 and torch.equal(found, plain.blocks[0].up(x))


def test_tiles_are_quantized_where_they_cut_no_block() -> None:
    whole, tiled = model(), em.tile(model(), at_most=25_000)
    assert type(tiled.blocks[0].up).__name__ == "TiledLinear"
    with pytest.raises(ConfigError, match="has rows 0 to 96 of 192, which cuts blocks of 128"):
        em.quantize(tiled, "fp8")
    em.quantize(tiled, "nf4")
    em.quantize(whole, "nf4")
    tiles = [tile_of(p) for p in (tiled.blocks[0].up.tile_1.weight, tiled.blocks[0].up.tile_1.weight_scales)]
    assert tiles == [Tile(start=96, stop=192, rows=192)] * 2
    assert torch.equal(tiled.blocks[0].up.tile_1.weight, whole.blocks[0].up.weight[96:])
    x = torch.randn(2, 8)
    torch.testing.assert_close(tiled(x), whole(x))
    assert tile_of(em.dequantize(tiled).blocks[0].up.tile_0.weight) == Tile(start=0, stop=96, rows=192)


def test_only_bytes_are_kept_for_backward() -> None:
    m = em.quantize(model(), "nf4")
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        m.blocks[0].up(torch.randn(4, 64, requires_grad=True))
    assert {t.dtype for t in kept} == {torch.uint8}
    assert {t.data_ptr() for t in kept} == {p.data_ptr() for p in (m.blocks[0].up.weight, m.blocks[0].up.weight_scales)}


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        (lambda m: None, {"scheme": "nf5"}, "did you mean 'nf4'"),
        (lambda m: None, {"targets": "*.dwon"}, "matches no weight.*did you mean 'down'"),
        (lambda m: None, {"skip": "*.gate"}, "'\\*.gate' matches no weight"),
        (lambda m: m.requires_grad_(True), {"targets": "*.up"}, r"'blocks\.0\.up\.weight' is trained"),
        (lambda m: m.requires_grad_(True), {}, "no frozen weight"),
        (lambda m: m.requires_grad_(False), {"targets": "embed"}, r"'embed\.weight' has 8 inputs.*multiple of 64"),
        (lambda m: m.blocks[1].up.weight.data.fill_(torch.nan), {}, r"'blocks\.1\.up\.weight'.*not finite"),
        (lambda m: m.blocks[1].register_parameter("tied", m.blocks[1].up.weight), {}, "is shared"),
        (lambda m: setattr(m.blocks[1], "stack", nn.Parameter(torch.ones(2, 64, 64), False)), {}, "'blocks.1.stack'"),
    ],
)
def test_bad_input_changes_nothing(change: Any, arguments: dict[str, Any], says: str) -> None:
    m = model()
    change(m)
    with pytest.raises(ConfigError, match=says):
        em.quantize(m, **({"scheme": "nf4"} | arguments))
    assert not any(p.dtype == torch.uint8 for p in m.parameters())


@pytest.mark.parametrize("scheme", ["int8", "nf4", None])
def test_encoder_layers_of_torch_call_their_linear_layers_in_evaluation(scheme: str | None) -> None:
    """Quantized, and in tiles: torch's fast path reads weights itself, in a layer and in a stack with padded rows."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True).requires_grad_(False)
    whole: nn.Module = nn.TransformerEncoder(layer, 2)
    changed = copy.deepcopy(whole)
    if scheme is None:
        em.tile(changed, at_most=192 * 64 * 4)
    else:
        em.quantize(changed, scheme)
        whole = em.dequantize(copy.deepcopy(changed))
    x, padding = torch.randn(2, 5, 64), torch.arange(5).expand(2, 5) >= torch.tensor([[3], [5]])
    for mask in (None, padding):
        there = torch.ones(2, 5, dtype=torch.bool) if mask is None else ~mask
        with torch.no_grad():
            found, wanted = (m.eval()(x, src_key_padding_mask=mask)[there] for m in (changed, whole))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_t5_is_quantized_without_what_it_casts_to() -> None:
    """Its feed-forward casts its input to the dtype of `wo`."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).requires_grad_(False).eval()
    tokens, whole = torch.arange(8).view(1, 8), em.dequantize(copy.deepcopy(em.quantize(t5, "int8")))
    assert isinstance(t5.encoder.block[0].layer[1].DenseReluDense.wi, QuantizedLinear)
    found, wanted = (model(input_ids=tokens, labels=tokens).loss for model in (t5, whole))
    torch.testing.assert_close(found, wanted)
    em.quantize(t5, "int8", targets="*.wo")
    with pytest.raises(UsageError, match="casts its input to the dtype of the weight"):
        t5(input_ids=tokens, labels=tokens)


def test_a_wrapped_model_is_refused() -> None:
    em.init_mesh(device_type="cpu")
    m = model()
    wrapped, _ = em.wrap(m, torch.optim.AdamW(p for p in m.parameters() if p.requires_grad), plan=em.Plan.ddp())
    for verb in (lambda: em.quantize(wrapped, "nf4"), lambda: em.dequantize(wrapped)):
        with pytest.raises(UsageError, match=r"before em\.wrap"):
            verb()


def test_dtypes_that_are_no_floating_ones_are_refused() -> None:
    """Weights decoded to integers would be zeros."""
    model = em.quantize(Model(), "nf4")
    with pytest.raises(UsageError, match="expected an input of a floating dtype"):
        model.blocks[0].up(torch.ones(2, 64, dtype=torch.long))
    with pytest.raises(ConfigError, match="expected a floating dtype"):
        em.dequantize(model, torch.int32)
    assert type(model.blocks[0].up) is QuantizedLinear


def test_autocast_leaves_fp64_alone() -> None:
    model = em.quantize(Model().double(), "nf4")
    x = torch.randn(2, 64, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = model.blocks[0].up(x), em.dequantize(model).blocks[0].up(x)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, wanted)


def test_an_indexer_is_quantized_without_what_it_casts_to() -> None:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV32Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        first_k_dense_replace=1, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=2,
        num_experts_per_tok=2, topk_group=2, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, n_shared_experts=1, index_head_dim=16, index_n_heads=2, index_topk=4,
    )  # fmt: skip
    model: Any = em.quantize(DeepseekV32ForCausalLM(config).requires_grad_(False).eval(), "int8")
    tokens, whole = torch.arange(8).view(1, 8), em.dequantize(copy.deepcopy(model))
    assert isinstance(model.model.layers[0].self_attn.indexer.wk, QuantizedLinear)
    torch.testing.assert_close(*(m(input_ids=tokens, labels=tokens).loss for m in (model, whole)))
