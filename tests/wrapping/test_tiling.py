"""Tiled layers beside the whole ones: training, state dicts, checkpoints, peak bytes, and what cannot be tiled.

Tolerances as in `tests.support.parity`: tiles change the order of sums in the gradient of a layer's input.
"""

import gc
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.wrapping.tiling import tile_to_fit
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.hf_cases import FAMILIES, ROWS
from tests.support.parity import TOLERANCE, assert_alike, make_optimizer, mesh_of_world, tokens, trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
STEPS = 3
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero3": em.Plan.zero3(rcache_blocks=10, chunk_numel=1024),
    "offload": em.Plan.offload(rcache_blocks=10, device_chunks=6, chunk_numel=1024),
    "disk": em.Plan(scatter=True, offloaded=True, rcache_blocks=10, chunk_numel=1024, disk_chunks=6),
}
CONFIG = GPTConfig(vocab_size=67, seq_len=8, n_layers=2, d_model=16, n_heads=2, experts=(0, 4), ep=(1, 1))
LARGEST = 1500
"""Bytes of the largest tile: the embedding (4288), MLPs (4096) and experts (16384) are larger."""


def mine(rows: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else rows


def gpt(config: GPTConfig, tiles: bool, reentrant: bool | None = None) -> tuple[nn.Module, Any]:
    """The model, tiled or whole, and its optimizer."""
    model = GPT(config, mesh_of_world() if tiles else None)
    if reentrant is not None:
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda *args, plain=plain: checkpoint(plain, *args, use_reentrant=reentrant)
    if tiles:
        em.annotate(model, gpt_patterns(model))
        em.tile(model, at_most=LARGEST * 4 if any(config.experts) else LARGEST)
    return model, make_optimizer(model)


def gpt_run(config: GPTConfig, plan: em.Plan | None, reentrant: bool | None = None, accumulation: int = 1) -> Any:
    """Some steps of the tiled model, or of the whole one in plain torch."""

    def backward(model: Any, step: int) -> None:
        for micro in range(accumulation):
            rows = tokens(step, micro, config.seq_len, config.vocab_size)
            (lm_loss(model, rows if plan is None else mine(rows)) / accumulation).backward()

    return trained(lambda: gpt(config, plan is not None, reentrant), backward, plan, STEPS)


@pytest.mark.parametrize("case", with_further(PLANS, ("zero3", "disk")))
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_tiled_gpt_trains_as_the_whole_one(case: str, world: int, ranks: Ranks) -> None:
    config = CONFIG if world == 1 else GPTConfig(**{**vars_of(CONFIG), "ep": (1, 2)})
    wanted = gpt_run(config, None, accumulation=2)
    for found in ranks(world).run(gpt_run, config, PLANS[case], None, 2):
        assert_alike(found, wanted, case, TOLERANCE, rel=1e-4)


def vars_of(config: GPTConfig) -> dict[str, Any]:
    """The fields of a configuration."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_under_activation_checkpointing(reentrant: bool, ranks: Ranks) -> None:
    wanted = gpt_run(CONFIG, None)
    plan = em.Plan.offload(rcache_blocks=10, chunk_numel=1024)
    for found in ranks(2).run(gpt_run, CONFIG, plan, reentrant):
        assert_alike(found, wanted, "checkpointed", TOLERANCE, rel=1e-4)


def family_run(name: str, plan: em.Plan | None, experts: str) -> Any:
    """Some steps of a Hugging Face mixture whose experts are tiled, or of the whole one."""
    family = FAMILIES[name]

    def build() -> tuple[nn.Module, Any]:
        model: Any = family.build()
        model.config._experts_implementation = experts
        if plan is not None:
            em.tile(model, at_most=20_000)
            assert sum(type(module).__name__ == "TiledFusedExperts" for module in model.modules()) > 0
        return model, make_optimizer(model)

    def backward(model: Any, step: int) -> None:
        batch = family.batch(step)
        assert next(iter(batch.values())).shape[0] == ROWS
        family.loss(model, {k: v if plan is None else mine(v) for k, v in batch.items()}).backward()

    return trained(build, backward, plan, STEPS)


@pytest.mark.parametrize("experts", with_further(("eager", "grouped_mm", "batched_mm"), ("eager",)))
@pytest.mark.parametrize("name", with_further(("qwen3-moe", "gpt-oss", "mixtral"), ("qwen3-moe",)))
def test_fused_experts_of_hugging_face(name: str, experts: str, ranks: Ranks) -> None:
    wanted = family_run(name, None, experts)
    (found,) = ranks(1).run(family_run, name, em.Plan.offload(rcache_blocks="all", chunk_numel=4096), experts)
    assert_alike(found, wanted, f"{name} {experts}", TOLERANCE, rel=1e-4)


def saved_and_loaded(folder: str) -> dict[str, Any]:
    """(rank) A tiled model saved and loaded whole, and the other way round; and its weights as a folder."""
    states, found = [], {}
    for tiles in (True, False):
        for path in (None, f"{folder}/{not tiles}"):
            torch.manual_seed(1 if path is None else 2)
            model = GPT(CONFIG, mesh_of_world())
            em.annotate(model, gpt_patterns(model))
            if tiles:
                em.tile(model, at_most=LARGEST * 4)
            model, optimizer = em.wrap(
                model, make_optimizer(model), plan=em.Plan.zero3(rcache_blocks=8, chunk_numel=4096)
            )
            if path is None:
                lm_loss(model, mine(tokens(0, 0, CONFIG.seq_len, CONFIG.vocab_size))).backward()
                optimizer.step()
                optimizer.zero_grad()
                em.save(f"{folder}/{tiles}", model, optimizer)
                em.save_pretrained(model, f"{folder}/weights {tiles}")
                states.append(em.full_state_dict(model, all_ranks=True))
            elif Path(path).exists():
                em.load(path, model, optimizer)
                found["loaded"] = em.full_state_dict(model, all_ranks=True)
            optimizer.close()
    with torch.device("meta"):
        model = GPT(CONFIG, mesh_of_world())
    em.annotate(model, gpt_patterns(model))
    em.tile(model, at_most=LARGEST * 4)
    model, optimizer = em.wrap(model, make_optimizer(model), plan=em.Plan.ddp(), weights=f"{folder}/weights False")
    found["read"] = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    gc.collect()
    return found | {"tiled": states[0], "whole": states[1]}


def test_names_and_checkpoints_are_those_of_the_whole_model(ranks: Ranks, tmp_path: Path) -> None:
    names = list(GPT(CONFIG).state_dict())
    for found in ranks(2).run(saved_and_loaded, str(tmp_path)):
        for state in found.values():
            assert list(state) == names
        for name, value in found["whole"].items():
            torch.testing.assert_close(found["tiled"][name], value, rtol=0, atol=TOLERANCE)
            assert torch.equal(found["loaded"][name], found["tiled"][name]), "the whole model loads the tiled one's"
            assert torch.equal(found["read"][name], value), "tiles are read from a folder"


@pytest.mark.parametrize("index", [-1, -64, 64, 1000])
@pytest.mark.parametrize("times", [1, 2])
def test_an_index_outside_of_a_tiled_embedding_is_refused_as_by_torch(index: int, times: int) -> None:
    whole = nn.Embedding(64, 4, padding_idx=3)
    model: Any = nn.Sequential(whole)
    for most in (512, 128)[:times]:
        em.tile(model, at_most=most)
    inside = torch.arange(64)
    assert torch.equal(model(inside), whole(inside))
    for layer in (whole, model):
        with pytest.raises(IndexError, match="index out of range"):
            layer(torch.tensor([5, index]))


def test_hooks_of_a_tiled_module_see_the_whole_of_it() -> None:
    """Hooks of every kind run once, with all that they get from the whole module, until their handles are removed."""
    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 64), nn.Linear(64, 4))
    seen: list[list[tuple[str, list[Tensor]]]] = []
    for model, tiles in ((deepcopy(whole), False), (whole, True)):
        calls: list[tuple[str, list[Tensor]]] = []
        layer = model.get_submodule("1")

        def note(name: str, to: list[Any] = calls) -> Callable[..., None]:
            return lambda _, *given: to.append(
                (name, [t.detach().clone() for one in given for t in ([one] if isinstance(one, Tensor) else one)])
            )

        handles = [
            layer.register_forward_pre_hook(note("before")),
            layer.register_forward_hook(note("after"), with_kwargs=True, always_call=True),
            layer.register_full_backward_hook(note("gradients")),
            layer.register_full_backward_pre_hook(note("gradient")),
        ]
        if tiles:
            em.tile(model, at_most=512)
        rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
        model(rows).square().sum().backward()
        for handle in handles:
            handle.remove()
        model(rows).square().sum().backward()
        seen.append(calls)
    assert (
        [name for name, _ in seen[1]] == [name for name, _ in seen[0]] == ["before", "after", "gradient", "gradients"]
    )
    for (_, found), (_, wanted) in zip(seen[1], seen[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)


def adapted_in_tiles(plan: em.Plan | None) -> Any:
    """(rank) Some steps of adapters on experts, which are tiled under a plan."""
    import peft

    family = FAMILIES["qwen3-moe"]

    def build() -> tuple[nn.Module, Any]:
        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=3, target_modules=[], target_parameters=targets, init_lora_weights=False)
        model = peft.get_peft_model(family.build(), config)
        if plan is not None:
            em.tile(model, at_most=20_000)
        return model, make_optimizer(model)

    def backward(model: Any, step: int) -> None:
        family.loss(model, {k: v if plan is None else mine(v) for k, v in family.batch(step).items()}).backward()

    return trained(build, backward, plan, STEPS)


def test_adapters_on_experts_in_tiles(ranks: Ranks) -> None:
    wanted = adapted_in_tiles(None)
    for found in ranks(2).run(adapted_in_tiles, em.Plan.zero3(rcache_blocks=10, chunk_numel=4096)):
        assert_alike(found, wanted, "adapted", TOLERANCE, rel=1e-4)


def test_adapters_of_other_parameters_are_named() -> None:
    import peft

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 64))
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["1.weight"])
    with pytest.raises(em.ConfigError, match=r"of module '.*base_layer' has adapters, which peft adds to the whole"):
        em.tile(peft.get_peft_model(model, config), at_most=512)


@pytest.mark.parametrize("kind", ["DoRA", "LOHA", "HRA", "BOFT"])
def test_adapters_that_read_the_whole_weight_are_named(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # BOFT compiles one, and waits for the lock of a dead run

    configs = {
        "DoRA": peft.LoraConfig(r=2, use_dora=True, target_modules=["1"]),
        "LOHA": peft.LoHaConfig(r=2, target_modules=["1"]),
        "HRA": peft.HRAConfig(r=2, target_modules=["1"]),
        "BOFT": peft.BOFTConfig(boft_block_size=4, target_modules=["1"]),
    }
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    said = f"has adapters {'with use_dora=True' if kind == 'DoRA' else f'of {kind}'}, which read the whole of it"
    with pytest.raises(em.ConfigError, match=said):
        em.tile(peft.get_peft_model(model, configs[kind]), at_most=512)


def test_tiles_take_the_names_of_their_parameters_in_the_optimizer() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 128), nn.Linear(2, 2))
    first = list(model[0].named_parameters(prefix="0"))
    optimizer = torch.optim.AdamW([{"params": first, "lr": 1.0}, {"params": list(model[1].named_parameters())}])
    tile_to_fit(model, optimizer, 4095, None)
    whole, tiles = optimizer.param_groups[1], optimizer.param_groups[0]
    assert (whole["params"], whole["param_names"]) == (list(model[1].parameters()), ["weight", "bias"])
    names = [name for name, _ in model[0].named_parameters(prefix="0")]
    assert sorted(tiles["param_names"]) == sorted(names) and len(names) > 2
    assert every(model.get_parameter(n) is p for n, p in zip(tiles["param_names"], tiles["params"], strict=True))


class Region(nn.Sequential):
    """Layers in a checkpointed region."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        """As its layers."""
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


def peak(width: int | None, region: bool | None = None) -> tuple[int, int]:
    """(rank) (Most bytes held, bytes of a block) of a small model, with a tiled layer of so many rows in the middle.

    `region`: the layer is inside a checkpointed region, which is reentrant or not.
    """
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(16, 16, bias=False) for _ in range(4)]
    if width is not None:
        between = [nn.Linear(16, width, bias=False), nn.Linear(width, 16, bias=False)]
        layers[2:2] = between if region is None else [Region(*between)]
        Region.reentrant = bool(region)
    model = em.tile(nn.Sequential(*layers), at_most=16 * 16 * 4)
    optimizer = torch.optim.AdamW(model.parameters())
    blocks = 2 if region is None else 3  # the tile whose backward has begun the recomputation stays gathered
    model, optimizer = em.wrap(
        model,
        optimizer,
        plan=em.Plan.offload(chunk_numel=256, rcache_blocks=blocks),
        step=lambda model, x: model(x).sum(),
        sample=torch.randn(4, 16),
    )
    for step in range(3):
        model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen = em.inspect(model)
    assert seen.statistics.blocks_replaced == seen.statistics.cache.off_schedule == 0
    held = seen.held_bytes["device"], seen.layout.block_bytes
    optimizer.close()
    return held


@pytest.mark.parametrize("region", [None, False, True])
def test_a_layer_of_sixteen_blocks_needs_no_more_blocks(region: bool | None, ranks: Ranks) -> None:
    (without, block), (held, same) = (ranks(1).run(peak, width, region)[0] for width in (None, 256))
    assert block == same
    assert held <= without + 2 * block


def planned(budget: str | None, tiles: tuple[int, ...] = ()) -> dict[str, Any]:
    """(rank) Some steps of a model with two layers of 5 MB, planned for a budget or in plain torch."""

    def build() -> tuple[nn.Module, Any]:
        model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 20_000), nn.Linear(20_000, 64))
        for at_most in tiles:
            em.tile(model, at_most=at_most)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return model(rows).square().mean()

    def backward(model: nn.Module, step: int) -> None:
        rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        loss(model, rows if budget is None else mine(rows)).backward()

    plan: Any = budget and em.Plan.auto(loss, torch.randn(4, 64), budget=budget, hardware="a100-80g-pcie-x4")
    return trained(build, backward, plan, STEPS)


@pytest.mark.parametrize("tiles", [(), pytest.param((2_000_000, 500_000), marks=pytest.mark.slow)])
def test_a_plan_for_a_small_budget_tiles_what_is_too_large(tiles: tuple[int, ...], ranks: Ranks) -> None:
    wanted = planned(None)
    for found in ranks(2).run(planned, "6 MiB", tiles):
        assert_alike(found, wanted, "tiled by the plan", TOLERANCE, rel=1e-4)


class Remembering(nn.Linear):
    """Has extra state, of which each tile would have one."""

    def get_extra_state(self) -> Any:
        return 1


class Doubled(nn.Linear):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice the product."""
        return 2 * super().forward(x)


def shared() -> nn.Module:
    """Two layers of one weight, of which one cannot be tiled."""
    model = nn.ModuleDict({"a": nn.Linear(4, 64), "b": Doubled(4, 64)})
    model["b"].weight = model["a"].weight
    return model


def hooked(register: Callable[[nn.Linear], object]) -> Callable[[], nn.Module]:
    """A model with a layer that is too large, and has something that the tiles would run or lose."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 64))
        layer = model[0]
        assert isinstance(layer, nn.Linear)
        register(layer)
        return model

    return build


def nothing(*_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize(
    ("model", "at_most", "said"),
    [
        (lambda: nn.Sequential(nn.Linear(64, 8)), 100, "a row of parameter '0.weight'.*256 bytes"),
        (lambda: nn.Sequential(nn.Conv1d(8, 64, 3)), 100, "module '0' is a Conv1d: expected Linear, Embedding"),
        (lambda: nn.Linear(64, 8), 512, r"the model itself \(Linear\) owns"),
        (lambda: nn.Sequential(Doubled(4, 64)), 512, "module '0' is a Doubled, which changes the forward"),
        (lambda: nn.Sequential(nn.Embedding(64, 4, sparse=True)), 512, "sparse"),
        (lambda: nn.Sequential(nn.Embedding(64, 4, max_norm=1.0)), 512, "max_norm"),
        (lambda: nn.Sequential(nn.Embedding(64, 4, scale_grad_by_freq=True)), 512, "scale_grad_by_freq"),
        (lambda: nn.Sequential(nn.EmbeddingBag(64, 4)), 512, "module '0' is a EmbeddingBag: expected Linear"),
        (hooked(lambda m: m.register_backward_hook(nothing)), 512, "module '0' has hooks of register_backward_hook"),
        (
            lambda: nn.Sequential(Remembering(4, 64)),
            512,
            "module '0' is a Remembering with a get_extra_state of its own",
        ),
        (hooked(lambda m: m.register_state_dict_post_hook(nothing)), 512, "module '0' has hooks of state dicts"),
        (hooked(lambda m: m.register_load_state_dict_pre_hook(nothing)), 512, "module '0' has hooks of state dicts"),
        (hooked(lambda m: setattr(m, "turned", m.weight.t())), 512, "module '0' keeps a tensor, 'turned'"),
        (hooked(lambda m: m.weight.register_hook(nothing)), 512, "parameter '0.weight' has hooks"),
        (hooked(lambda m: m.bias.register_hook(nothing)), 512, "parameter '0.bias' has hooks"),
        (
            hooked(lambda m: m.weight.register_post_accumulate_grad_hook(nothing)),
            512,
            "parameter '0.weight' has hooks",
        ),
        (hooked(lambda m: parametrize.register_parametrization(m, "weight", nn.Tanh())), 512, "ParametrizationList"),
        (hooked(lambda m: parametrize.register_parametrization(m, "bias", nn.Tanh())), 512, "'0' has modules inside"),
        (hooked(lambda m: m.register_buffer("mask", torch.ones(64, 4))), 512, "module '0' has buffers"),
        (hooked(lambda m: setattr(m, "forward", m.forward)), 512, "module '0' has a forward of its own"),
        (hooked(lambda m: m.weight.sum().backward()), 512, "parameter '0.weight' has a gradient"),
        (shared, 512, "shared by modules that cannot have the same tiles: 'a', 'b'"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), 0, "at least 1 byte"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "much", "at_most='much'"),
    ],
)
def test_what_cannot_be_tiled_is_named(model: Callable[[], nn.Module], at_most: Any, said: str) -> None:
    built = model()
    before = list(built.named_parameters())
    with pytest.raises(em.ElixirError, match=said):
        em.tile(built, at_most=at_most)
    assert list(built.named_parameters()) == before, "nothing has changed"


def test_transforms_of_a_tiled_model_are_those_of_the_whole_one() -> None:
    whole = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    tiled = em.tile(deepcopy(whole), at_most=256)
    rows = torch.randn(3, 8)
    for transform in (torch.func.vmap, torch.func.jacrev):
        torch.testing.assert_close(transform(tiled)(rows), transform(whole)(rows))


def test_a_wrapped_model_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 64))
    model._elixir = object()  # type: ignore[assignment]
    with pytest.raises(em.UsageError, match=r"before em\.wrap"):
        em.tile(model, at_most=512)
