"""Quantized checkpoints in the layouts in which they are shipped: the bytes in the files are the bytes in the shards.

Folders are made here as their makers publish them: FP8 mixtures with one tensor per expert and factors in bfloat16,
gpt-oss's stacks with a dim for blocks. The oracle is plain PyTorch with the decoded weights.
"""

import gc
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.hf.shipped import patterns_of
from elixir_moe.parallel.regather import saves_no_weights
from elixir_moe.quantized.formats import SCHEMES
from elixir_moe.quantized.packed import SCALES
from tests.support.cases import placed, with_further
from tests.support.every import same_tensors
from tests.support.parity import LOSS_TOLERANCE
from tests.support.quantized_cases import ADAPTER_TOLERANCE, PLANS, batch, optimizer_of, steps
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "max_position_embeddings": 32}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "intermediate_size": 128}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def config_of(scheme: str, experts: int = 4) -> Any:
    if scheme == "fp8":
        made = hf.Qwen3MoeConfig(**SIZES, num_experts=experts, moe_intermediate_size=128)
    else:
        made = hf.GptOssConfig(**SIZES, num_local_experts=experts)
    made._experts_implementation = "grouped_mm"
    return made


def built(scheme: str, experts: int = 4) -> nn.Module:
    torch.manual_seed(3)
    kind = hf.Qwen3MoeForCausalLM if scheme == "fp8" else hf.GptOssForCausalLM
    return kind(config_of(scheme, experts)).requires_grad_(False)


def shipped(scheme: str, folder: Path, experts: int = 4) -> nn.Module:
    """Writes the folder of a small model; returns the model with the decoded weights."""
    model, form, tensors = built(scheme, experts), SCHEMES[scheme], dict[str, Tensor]()
    for name, weight in model.state_dict().items():
        if scheme == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            codes, scales = form.encode(weight.transpose(1, 2).contiguous())
            tensors |= {f"{name}_blocks": codes.unflatten(-1, (-1, 16)), f"{name}_scales": scales}
            weight.copy_(form.decode(codes, scales, (*codes.shape[:2], weight.shape[1]), weight.dtype).transpose(1, 2))
        elif scheme == "fp8" and ".experts." in name:
            for expert, stack in enumerate(weight):
                parts = stack.chunk(2) if "gate_up" in name else [stack]
                for which, part in zip(("gate", "up") if len(parts) == 2 else ("down",), parts, strict=True):
                    key = f"{name.rpartition('.')[0]}.{expert}.{which}_proj.weight"
                    part.copy_(_fp8(tensors, key, part))
        elif scheme == "fp8" and name.endswith("_proj.weight"):
            weight.copy_(_fp8(tensors, name, weight))
        else:
            tensors[name] = weight.clone()
    save_file(tensors, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": FP8 if scheme == "fp8" else MXFP4}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def _fp8(tensors: dict[str, Tensor], key: str, weight: Tensor) -> Tensor:
    """Adds codes and factors, which are rounded to bfloat16, to the files; returns the decoded weight."""
    factors = SCHEMES["fp8"].encode(weight)[1].bfloat16()
    wide = factors.float().repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
    codes = (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors |= {key: codes, f"{key}_scale_inv": factors}
    return codes.float() * wide


def empty(scheme: str) -> nn.Module:
    """The model without data, frozen, with adapters that `wrap` draws."""
    with em.sharded_init():
        model = built(scheme)
        return with_adapters(model)


def with_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(8)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config)


def wrapped(scheme: str, folder: Path, plan: em.Plan) -> tuple[nn.Module, Any]:
    model = empty(scheme)
    return em.wrap(model, optimizer_of(model), plan=placed(plan), weights=folder)


def trained(scheme: str, folder: Path, plan: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(rank) The mean losses, what was trained, and the bytes in the shards after it."""
    return followed(*wrapped(scheme, folder, PLANS[plan]))


def followed(model: nn.Module, optimizer: Any) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """(rank) As `trained`, of a wrapped model."""
    losses = torch.stack([loss.double() for loss in steps(model, optimizer)])
    dist.all_reduce(losses)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    del model, optimizer
    gc.collect()
    found = {name: value for name, value in state.items() if "lora" in name}
    packed = {name: value for name, value in state.items() if value.dtype == torch.uint8}
    return (losses / dist.get_world_size()).tolist(), found, packed


@pytest.mark.parametrize(("world", "plan"), [(1, "zero3"), (1, "offload"), (2, "zero3"), (2, "disk")])
@pytest.mark.parametrize("scheme", ["fp8", "mxfp4"])
def test_shipped_bytes_are_trained_on_as_they_are(
    scheme: str, world: int, plan: str, ranks: Ranks, tmp_path: Path
) -> None:
    oracle = with_adapters(shipped(scheme, tmp_path))
    found = ranks(world).run(trained, scheme, tmp_path, plan)
    losses = [loss.item() for loss in steps(oracle, optimizer_of(oracle))]
    wanted = {name: p.detach() for name, p in oracle.named_parameters() if p.requires_grad}
    weights = dict(oracle.named_parameters())
    for mean, adapters, packed in found:
        assert mean == pytest.approx(losses, rel=LOSS_TOLERANCE)
        assert adapters.keys() == wanted.keys()
        for name, value in adapters.items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=len(losses) * ADAPTER_TOLERANCE)
        assert_decoded(scheme, packed, weights)


def assert_decoded(scheme: str, packed: dict[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """The bytes of all weights are those of the weights."""
    form = SCHEMES[scheme]
    assert len(packed) == 2 * (2 * 4 + 2 * 2 if scheme == "fp8" else 2 * 2)
    for name in [name for name in packed if not name.endswith(SCALES)]:
        weight = weights[name].detach()
        weight = weight if scheme == "fp8" else weight.transpose(1, 2)
        codes, scales = (packed[name + end] for end in ("", SCALES))
        decoded = form.decode(
            codes.view(form.codes_dtype), scales.view(form.scales_dtype), tuple(weight.shape), weight.dtype
        )
        assert torch.equal(decoded, weight), name


AT_MOST = 70_000
"""An expert of the small models; their other weights are smaller."""


def trained_cut(scheme: str, folder: Path, plan: str, ep: int | None, tiled: bool) -> tuple[list[float], Any, Any]:
    """(rank) As `trained`, of a model whose experts are spread, in tiles, or both."""
    with em.sharded_init():
        model = with_adapters(built(scheme))
        if ep is not None:
            em.spread_experts(model, em.expert_mesh(em.init_mesh(device_type="cpu"), ep))
        if tiled:
            assert "tile_1" in str(em.tile(model, at_most=AT_MOST))
    return followed(*em.wrap(model, optimizer_of(model), plan=placed(PLANS[plan]), weights=folder))


CUT = [(1, None, True), (2, 2, False), (2, 2, True), (4, 2, True), (4, 4, False)]
QUICK_CUT = {
    "fp8": [(1, None, True), (2, 2, False), (2, 2, True)],  # tiles, spread experts, tiles of spread experts
    "mxfp4": [(1, None, True), (2, 2, True), (4, 4, False)],
}


@pytest.mark.parametrize(
    ("scheme", "world", "ep", "tiled"),
    with_further(
        [(scheme, *case) for scheme in QUICK_CUT for case in CUT],
        [(scheme, *case) for scheme, cases in QUICK_CUT.items() for case in cases],
    ),
)
def test_experts_that_are_spread_or_in_tiles_keep_the_bytes_of_the_files(
    scheme: str, world: int, ep: int | None, tiled: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """Each rank and tile reads its own experts; losses are equal to the bit among plans."""
    oracle = with_adapters(shipped(scheme, tmp_path))
    losses = [loss.item() for loss in steps(oracle, optimizer_of(oracle))]
    wanted = {name: p.detach() for name, p in oracle.named_parameters()}
    first: list[float] = []
    for plan in ("zero3", "disk"):
        for mean, adapters, packed in ranks(world).run(trained_cut, scheme, tmp_path, plan, ep, tiled):
            first = first or mean
            assert mean == first, plan
            for name, value in adapters.items():
                torch.testing.assert_close(value, wanted[name], rtol=0, atol=len(losses) * ADAPTER_TOLERANCE)
            assert_decoded(scheme, packed, wanted)
    assert first == pytest.approx(losses, rel=LOSS_TOLERANCE)


MANY = 64
"""Experts whose stacks are larger than the budget of a plan, and of which a 16th of it has some."""


def planned(scheme: str | None, folder: Path, budget: str | None) -> dict[str, Any]:
    """(rank) As `trained`, under a plan that is searched for a budget; a folder of no scheme has the full weights."""

    def loss(model: Any, rows: Tensor) -> Tensor:
        found: Tensor = model(input_ids=rows, labels=rows).loss
        return found

    with em.sharded_init():
        model = with_adapters(built(scheme or "fp8", MANY))
    plan: Any = em.Plan.auto(loss, batch(0), budget=budget, hardware="a100-80g-pcie-x4")
    model, optimizer = em.wrap(model, optimizer_of(model), plan=plan, weights=folder)
    prediction, tiled = em.inspect(model).prediction, "tile_1" in str(model)
    assert prediction is not None
    losses, adapters, packed = followed(model, optimizer)
    predicted = {"device": prediction.device_bytes, "host": prediction.host_bytes, "disk": prediction.disk_bytes}
    return {
        "losses": losses,
        "adapters": adapters,
        "packed": packed,
        "tiled": tiled,
        "predicted": predicted,
        "held": prediction.held_bytes,
    }


@pytest.mark.parametrize(("scheme", "world"), [("mxfp4", 1), (None, 1), pytest.param("fp8", 2, marks=pytest.mark.slow)])
def test_a_plan_for_a_small_budget_tiles_what_a_folder_has(
    scheme: str | None, world: int, ranks: Ranks, tmp_path: Path
) -> None:
    """Tiles are read from the folder, as bytes where it has bytes; losses equal the untiled model's to the bit."""
    if scheme is None:
        oracle = built("fp8", MANY)
        for weight in oracle.parameters():  # others than those that would be drawn
            weight.mul_(1.25)
        oracle.save_pretrained(tmp_path)  # type: ignore[operator]
    else:
        oracle = shipped(scheme, tmp_path, MANY)
    whole = ranks(world).run(planned, scheme, tmp_path, None)
    oracle = with_adapters(oracle)
    weights = {name: p.detach() for name, p in oracle.named_parameters()}
    assert whole[0]["losses"] == pytest.approx(
        [loss.item() for loss in steps(oracle, optimizer_of(oracle))], rel=LOSS_TOLERANCE
    )
    for one, found in zip(whole, ranks(world).run(planned, scheme, tmp_path, "2 MiB"), strict=True):
        assert (one["tiled"], found["tiled"]) == (False, True)
        assert found["held"] == found["predicted"]
        assert found["losses"] == one["losses"]
        assert same_tensors(one["adapters"], found["adapters"])
        if scheme is not None:
            assert_decoded(scheme, found["packed"], weights)


class Layers(nn.Module):
    """Two linear layers without a bias; of each, a rank has a slice of the hidden dim."""

    def __init__(self, hidden: int, out: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, hidden, bias=False), nn.Linear(hidden, out, bias=False)
        self.requires_grad_(False)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.down(self.up(x))


def layers_shipped(folder: Path, hidden: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Writes a folder in FP8; returns the output with the decoded weights, and the bytes by their names there."""
    torch.manual_seed(4)
    model, tensors = Layers(hidden), dict[str, Tensor](factor=torch.ones(()))
    for name in ("up", "down"):
        weight = getattr(model, name).weight
        weight.copy_(_fp8(tensors, f"{name}.weight", weight))
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    wanted = {f"{name}.weight": tensors[f"{name}.weight"] for name in ("up", "down")}
    wanted |= {f"{name}{SCALES}": tensors[f"{name}_scale_inv"].float() for name in list(wanted)}
    return model(inputs()).detach(), {name: value.view(torch.uint8) for name, value in wanted.items()}


def inputs() -> Tensor:
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(5))


def layers_read(folder: Path, hidden: int, way: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(rank) The output, and the bytes in the shards."""
    mesh = em.init_mesh(tp=dist.get_world_size(), device_type="cpu")
    with torch.device("meta"):
        model: Any = Layers(hidden // dist.get_world_size(), 64 if way == "small tiles" else 16)
    model.factor = nn.Parameter(torch.ones(()))
    if "tiles" in way:
        em.tile(model, at_most=40_000)
    else:
        em.annotate(
            model,
            {
                "up.*": em.Pattern(mesh, replicate=("dp",), shard={"tp": 0}),
                "down.*": em.Pattern(mesh, replicate=("dp",), shard={"tp": 1}),
                "*": em.Pattern(mesh, replicate=("dp", "tp")),
            },
        )
    model, optimizer = em.wrap(model, torch.optim.AdamW([model.factor]), plan=em.Plan.zero3(), weights=folder)
    output = model(inputs()).detach()
    dist.all_reduce(output)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return output, {name: value for name, value in state.items() if value.dtype == torch.uint8}


@pytest.mark.parametrize(("world", "hidden", "way"), [(1, 320, "tiles"), (2, 256, "slices")])
def test_linear_layers_in_tiles_and_slices_of_whole_blocks_keep_the_bytes_of_the_files(
    world: int, hidden: int, way: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Tiles of frozen weights begin where blocks do, and the last may end inside one."""
    output, packed = layers_shipped(tmp_path, hidden)
    for found, bytes_found in ranks(world).run(layers_read, tmp_path, hidden, way):
        torch.testing.assert_close(found, output)
        assert bytes_found.keys() == packed.keys()
        assert same_tensors(packed, bytes_found)


@pytest.mark.parametrize(
    ("world", "hidden", "way", "message"),
    [
        (1, 320, "small tiles", "'down.weight' has rows 0 to 21 of 64, which cuts blocks of 128 rows"),
        (2, 320, "slices", "'up.weight' is cut over 'tp' into slices of 160 on dim 0, inside blocks of (128, 128)"),
    ],
)
def test_cuts_inside_blocks_are_refused_by_name(
    world: int, hidden: int, way: str, message: str, ranks: Ranks, tmp_path: Path
) -> None:
    layers_shipped(tmp_path, hidden)
    with pytest.raises(RankError, match=re.escape(message)):
        ranks(world).run(layers_read, tmp_path, hidden, way)


def without_data(scheme: str) -> nn.Module:
    with torch.device("meta"):
        return built(scheme)


def refused(scheme: str, folder: Path, change: str) -> tuple[str, str, bool]:
    """(rank) The error, and whether the model is as it was."""
    model = without_data(scheme)
    if change == "trained":
        model.model.layers[1].self_attn.q_proj.requires_grad_(True)
    if change == "quantized otherwise":
        em.quantize(model, "int8", targets="*.0.self_attn.q_proj")
    if "tiles" in change:
        em.tile(model, at_most=AT_MOST)
    model.lm_head.requires_grad_(True)
    before = {name: (id(p), tuple(p.shape), p.dtype, type(p)) for name, p in model.named_parameters()}
    kinds = [(type(module), saves_no_weights(module)) for module in model.modules()]
    plan = em.Plan.zero3(chunk_numel=1) if "later" in change else em.Plan.zero3()
    try:
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        em.wrap(model, optimizer, plan=plan, weights=folder)
    except em.ElixirError as error:
        after = {name: (id(p), tuple(p.shape), p.dtype, type(p)) for name, p in model.named_parameters()}
        kinds_after = [(type(module), saves_no_weights(module)) for module in model.modules()]
        return type(error).__name__, str(error), (before, kinds) == (after, kinds_after)
    raise AssertionError("not refused")


def edited(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ("trained", "ConfigError", "'model.layers.1.self_attn.q_proj.weight' is trained, and bytes have no gradient"),
        ("quantized otherwise", "ConfigError", "'model.layers.0.self_attn.q_proj.weight' is int8 in the model"),
        ("later", "PlanError", "chunk"),
        ("later, in tiles", "PlanError", "chunk"),
    ],
)
def test_what_bytes_cannot_be_is_refused_and_nothing_is_changed(
    change: str, kind: str, message: str, ranks: Ranks, tmp_path: Path
) -> None:
    """Also where a later step of `wrap` fails."""
    shipped("fp8", tmp_path)
    (found,) = ranks(1).run(refused, "fp8", tmp_path, change)
    assert (found[0], found[2]) == (kind, True), found
    assert message in found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awq"}, "quant_method='awq'; weights are read as shipped in the formats fp8, mxfp4"),
        ({"weight_block_size": [1, 32]}, "weight_block_size=[1, 32], expected weight_block_size=[128, 128]"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
    ],
)
def test_formats_that_are_not_known_are_named(
    changes: dict[str, Any], message: str, ranks: Ranks, tmp_path: Path
) -> None:
    shipped("fp8", tmp_path)
    edited(tmp_path, **changes)
    (found,) = ranks(1).run(refused, "fp8", tmp_path, "")
    assert found[0] == "ConfigError" and message in found[1] and found[2], found


def test_what_a_checkpoint_has_left_unquantized_is_left() -> None:
    """An entry is the end of a name, or its beginning up to a dot, or a pattern of that."""
    with torch.device("meta"):
        model = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"up": nn.Linear(4, 4)}) for _ in range(12))})
        model["head"] = nn.Linear(4, 4)
    kinds = {"layers.1": ["layers.1.up"], "head": ["head"], r"layers\.(2|3)": ["layers.2.up", "layers.3.up"], "x": []}
    for entry, left in kinds.items():
        config = {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [entry]}}
        assert patterns_of(config, "fp8", model) == {"skip": left}, entry


def test_codes_without_scales_are_no_weights(ranks: Ranks, tmp_path: Path) -> None:
    shipped("fp8", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    (found,) = ranks(1).run(refused, "fp8", tmp_path, "")
    assert found[0] == "CheckpointError" and "q_proj.weight' is F8_E4M3 in the folder" in found[1], found


def quantized_while_read(folder: Path, drawn: bool, tiled: bool) -> dict[str, Tensor]:
    """(rank) The bytes of a model that is quantized on meta, or under `sharded_init`, and read from full weights."""
    with em.sharded_init() if drawn else torch.device("meta"):
        model = built("mxfp4")
        em.quantize(em.tile(model, at_most=AT_MOST) if tiled else model, "nf4")
    model.lm_head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.lm_head.parameters())
    model, optimizer = em.wrap(model, optimizer, plan=em.Plan.offload(), weights=folder)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return {name: value for name, value in state.items() if value.dtype == torch.uint8}


@pytest.mark.parametrize(("drawn", "tiled"), [(False, False), (True, False), (False, True)])
def test_full_weights_become_bytes_while_they_are_read(drawn: bool, tiled: bool, ranks: Ranks, tmp_path: Path) -> None:
    """Those that `em.quantize` makes of the same weights in memory; stacks of gpt-oss are transposed."""
    model = built("mxfp4")
    save_file({name: weight.clone() for name, weight in model.state_dict().items()}, tmp_path / "model.safetensors")
    wanted = dict(em.quantize(model, "nf4").named_parameters())
    for found in ranks(2).run(quantized_while_read, tmp_path, drawn, tiled):
        assert len(found) == 2 * 2 * (4 + 2)
        for name, value in found.items():
            assert torch.equal(value, wanted[name]), name
