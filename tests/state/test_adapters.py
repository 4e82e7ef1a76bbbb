"""Adapters end to end: what a save of them reads, what plain peft loads, and checkpoints that name a frozen base.

A tiny Qwen3-MoE with peft's LoRA on attention and on fused experts. Oracles: plain peft from the saved folder, a run
that is not interrupted, and the hash of a parameter in Python's whole numbers.
"""

import contextlib
import gc
import importlib
import io
import re
import runpy
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from peft.tuners.lora.config import KasaConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.chunks.plan import Tier
from elixir_moe.errors import CheckpointError, ConfigError, LayoutError, UsageError
from elixir_moe.hf.fused_loss import FusedLoss
from elixir_moe.state import full
from elixir_moe.state.checkpoint.frozen import frozen_records
from elixir_moe.state.checkpoint.storage import read_manifest
from elixir_moe.state.checkpoint.whole import Whole, export_torch, reshard
from elixir_moe.wrapping.deferred_init import record_of
from tests.support.cases import placed, with_further
from tests.support.every import same_tensors
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
VOCAB, ROWS = 32, 4
PLANS = {
    "zero3": em.Plan.zero3(rcache_blocks=8, chunk_numel=4096),
    "offload": em.Plan.offload(rcache_blocks=8, device_chunks=1, chunk_numel=5000),
    "disk": em.Plan.offload(rcache_blocks=8, disk_chunks=10**6, chunk_numel=4096),
    "host": em.Plan.offload(rcache_blocks=8, chunk_numel=2560),
    "unscattered": em.Plan(scatter=False, offloaded=True, rcache_blocks=8, chunk_numel=2560),
    "ddp": em.Plan.ddp(),
}
LORA: dict[str, Any] = {"r": 2, "init_lora_weights": False}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention and experts": {"target_modules": ["q_proj", "v_proj"], **EXPERTS},
    "and whole modules": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "DoRA": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
}


_NEEDED = importlib.import_module("transformers.integrations.peft").MIN_PEFT_VERSION
needs_add_adapter = pytest.mark.skipif(
    Version(peft.__version__) < Version(_NEEDED),
    reason=f"add_adapter of this transformers needs peft {_NEEDED}, and peft {peft.__version__} is installed",
)


def base() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,  # type: ignore[call-arg]
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    return Qwen3MoeForCausalLM(config).train()


def adapted(name: str, model: nn.Module | None = None) -> Any:
    torch.manual_seed(2)
    return peft.get_peft_model(model or base(), peft.LoraConfig(**LORA, **ADAPTERS[name]))  # type: ignore[arg-type]


def wrap(model: nn.Module, plan: str, **options: Any) -> tuple[Any, em.ShardedOptimizer]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return em.wrap(model, torch.optim.AdamW(trainable, lr=1e-2, eps=1e-4), plan=placed(PLANS[plan]), **options)


def step(model: Any, optimizer: Any, number: int, rank: int = 0, world: int = 1) -> None:
    tokens = torch.randint(VOCAB, (ROWS, 6), generator=torch.Generator().manual_seed(number)).chunk(world)[rank]
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def steps(model: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        step(model, optimizer, number, dist.get_rank(), dist.get_world_size())


def trainable_numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class Watched:
    """Elements whose reads are counted."""

    def __init__(self, elements: Any, read: Counter[str], kind: str) -> None:
        self._elements, self._read, self._kind = elements, read, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._elements, name)

    def __getitem__(self, part: slice) -> "Watched":
        return Watched(self._elements[part], self._read, self._kind)

    def read(self) -> Tensor:
        values: Tensor = self._elements.read()
        self._read[self._kind] += values.numel()
        return values


@contextlib.contextmanager
def counted(model: Any) -> Iterator[Counter[str]]:
    """Elements of frozen and of trainable chunks that are read at home, and bytes of the parts that are gathered."""
    read: Counter[str] = Counter()
    chunks = model._elixir.scheduler.chunks
    kind_of = {id(chunk.shard): "trainable" if chunk.spec.key.trainable else "frozen" for chunk in chunks}
    gather = full._all

    def gathering(tensor: Tensor, group: Any) -> list[Tensor]:
        read["gathered"] += tensor.nbytes
        return gather(tensor, group)

    def watching(original: Any) -> Any:
        return lambda shard: Watched(original(shard), read, kind_of[id(shard)])

    with contextlib.ExitStack() as stack:
        for kind in {type(chunk.shard) for chunk in chunks}:
            stack.enter_context(mock.patch.object(kind, "weights", watching(kind.weights)))
        stack.enter_context(mock.patch.object(full, "_all", gathering))
        yield read


def numel_here(model: Any, *, trainable: bool) -> int:
    """Elements of this rank's shards."""
    chunks = model._elixir.scheduler.chunks
    return sum(chunk.spec.shard_numel for chunk in chunks if chunk.spec.key.trainable == trainable)


# ------------------------------------------------------------------------------------------------------------- adapters


TOKENS = torch.arange(12).view(2, 6)


def adapters_saved(name: str, plan: str, folder: Path) -> tuple[Tensor, Counter[str], int]:
    """Logits after two steps, what the save has read, and the trainable elements of this rank."""
    model, optimizer = wrap(adapted(name), plan)
    steps(model, optimizer, range(2))
    with counted(model) as read:
        em.save_pretrained(model, folder)
    with torch.no_grad():
        logits = model(TOKENS).logits
    trainable = numel_here(model, trainable=True)
    optimizer.close()
    gc.collect()
    return logits, read, trainable


@pytest.mark.parametrize(
    ("name", "plan"), [("attention and experts", "zero3"), ("and whole modules", "offload"), ("DoRA", "disk")]
)
def test_plain_peft_loads_what_was_saved_and_no_frozen_chunk_was_read(
    name: str, plan: str, tmp_path: Path, ranks: Ranks
) -> None:
    """Training agrees with plain peft's, too: fp32, a smooth optimizer."""
    plain = adapted(name)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    for number in range(2):
        step(plain, optimizer, number)
    for logits, read, trainable in ranks(2).run(adapters_saved, name, plan, tmp_path):
        loaded = peft.PeftModel.from_pretrained(base(), tmp_path)
        with torch.no_grad():
            torch.testing.assert_close(loaded(TOKENS).logits, logits, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(plain(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
        assert read == {"trainable": trainable, "gathered": 4 * trainable}


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one in this process."""
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_every_adapter_is_saved(tmp_path: Path) -> None:
    """One of them frozen, and so in chunks of the base; a chunk without any is not read."""
    model = adapted("attention and experts")
    model.add_adapter("other", peft.LoraConfig(**LORA, target_modules=["o_proj"], layers_to_transform=[0]))
    model, optimizer = wrap(model, "disk")
    with counted(model) as read:
        em.save_pretrained(model, tmp_path)
    assert 0 < read["frozen"] < numel_here(model, trainable=False)
    state = em.full_state_dict(model)
    optimizer.close()
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path)
    loaded.load_adapter(tmp_path / "other", "other")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.usefixtures("alone")
def test_what_peft_makes_of_weights_is_saved_from_all_of_them(tmp_path: Path) -> None:
    """Prompts: peft computes them. No tensor of the state dict is what it saves."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, optimizer = wrap(peft.get_peft_model(base(), config), "offload")  # type: ignore[arg-type]
    em.save_pretrained(model, tmp_path)
    wanted = em.full_state_dict(model)["prompt_encoder.default.embedding.weight"]
    optimizer.close()
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path).state_dict()
    assert torch.equal(loaded["prompt_encoder.default.embedding.weight"], wanted)


def prompts_refused(folder: Path) -> str:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, optimizer = wrap(peft.get_peft_model(base(), config), "zero3")  # type: ignore[arg-type]
    with pytest.raises(UsageError) as error:
        em.save_pretrained(model, folder)
    optimizer.close()
    return str(error.value)


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=needs_add_adapter)], ids=["peft's", "transformers'"])
def test_adapters_open_from_another_folder(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    from transformers import AutoModelForCausalLM

    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    base().save_pretrained("base")  # type: ignore[operator]
    model: Any = AutoModelForCausalLM.from_pretrained("base")
    config = peft.LoraConfig(**LORA, target_modules=["q_proj"])
    if own:
        model.add_adapter(config)
    else:
        model = peft.get_peft_model(model, config)
    model, optimizer = wrap(model, "zero3")
    em.save_pretrained(model, "adapter")
    tokens = torch.arange(6)[None]
    wanted = model(tokens).logits
    optimizer.close()
    monkeypatch.chdir(tmp_path / "there")
    opened: Any = AutoModelForCausalLM.from_pretrained("../here/adapter")
    torch.testing.assert_close(opened(tokens).logits, wanted)


def test_prompts_are_refused_on_several_ranks(tmp_path: Path, ranks: Ranks) -> None:
    for message in ranks(2).run(prompts_refused, tmp_path):
        assert "em.full_state_dict(model)" in message
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("alone")
def test_a_merge_says_the_whole_way_and_changes_nothing() -> None:
    """docs/wrapped.md goes that way."""
    model, optimizer = wrap(adapted("attention and experts"), "offload")
    before = em.full_state_dict(model)
    for merge in (model.merge_and_unload, model.base_model.merge_and_unload, model.merge_adapter, model.unload):
        with pytest.raises(UsageError, match=r"em\.save_pretrained.*PeftModel\.from_pretrained.*merge_and_unload"):
            merge()
    after = em.full_state_dict(model)
    optimizer.close()
    assert list(after) == list(before) and same_tensors(after, before)


@pytest.mark.usefixtures("alone")
def test_what_is_trainable_is_counted_by_name() -> None:
    plain = adapted("attention and experts")
    numel, trainable = sum(p.numel() for p in plain.parameters()), trainable_numel(plain)
    model, optimizer = wrap(plain, "offload")
    found = em.inspect(model)
    optimizer.close()
    assert found.numel == numel and sum(found.trainable.values()) == trainable
    assert found.trainable["base_model.model.model.layers.*.mlp.experts.base_layer.lora_B.default.weight"] == 2 * 32 * 8
    lines = str(found).splitlines()
    assert lines[1] == f"trainable {trainable:,} of {numel:,} ({trainable / numel:.2%})"
    assert lines[2:4] == [
        "  mlp.experts.base_layer.lora_B.default.weight: 512",
        "  mlp.experts.base_layer.lora_A.default.weight: 256",
    ]
    model, optimizer = wrap(nn.Linear(2, 2), "offload")
    assert "trainable" not in str(em.inspect(model))
    optimizer.close()


def test_the_example_runs(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(run_example, ["--steps", "4", "--disk", str(tmp_path)])
    assert "rank 1 step 3: loss" in second and "trainable" in first
    losses = [float(line.split()[-1]) for line in first.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] - 0.1
    difference = re.search(r"plain peft: logits differ by (\S+) at most", first)
    assert difference is not None and float(difference[1]) < 1e-5
    assert not any(tmp_path.iterdir())


def run_example(arguments: list[str]) -> str:
    """What the example prints on this rank."""
    path = Path(__file__).parents[2] / "examples" / "lora_moe.py"
    with mock.patch("sys.argv", [str(path), *arguments]), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path))
    gc.collect()
    return printed.getvalue()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_target_that_peft_does_not_find_is_named() -> None:
    """peft warns of it, if at all, and trains the rest."""
    targets = ["experts.gate_up_proj", "experts.up_proj"]
    settings = {"target_modules": ["q_proj"], "target_parameters": targets}
    with pytest.raises(ConfigError, match=r"adapter 'default' has 'experts.up_proj', which is not in the model"):
        wrap(drawn_adapters(base(), settings), "zero3")


def test_magnitudes_of_fused_experts_are_refused_by_peft() -> None:
    with pytest.raises(ValueError, match="does not work with use_dora=True"):
        drawn_adapters(base(), {**EXPERTS, "use_dora": True})


def frozen_bytes(plan: str) -> tuple[int, int]:
    """Bytes of this rank's frozen shards in host memory, and of the frozen parameters."""
    plain = adapted("attention and experts")
    base_bytes = sum(p.nbytes for p in plain.parameters() if not p.requires_grad)
    model, optimizer = wrap(plain, plan)
    chunks = [chunk for chunk in model._elixir.scheduler.chunks if not chunk.spec.key.trainable]
    steps(model, optimizer, range(1))
    found = sum(chunk.shard.held_bytes().get(Tier.HOST, 0) for chunk in chunks)
    optimizer.close()
    gc.collect()
    return found, base_bytes


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_ranks_of_a_host_hold_one_base_between_them(world: int, ranks: Ranks) -> None:
    """A fifth more at most: what chunks leave empty. A plan that does not scatter has a copy for each rank."""
    for plan, copies in (("host", 1), ("unscattered", world)):
        found = ranks(world).run(frozen_bytes, plan)
        (base_bytes,) = {nbytes for _, nbytes in found}
        assert copies <= sum(held for held, _ in found) / base_bytes < 1.2 * copies, plan


# --------------------------------------------------------------------------------------- a base that a folder has

FROM_FOLDER = {
    "attention and experts": ADAPTERS["attention and experts"],
    "and whole modules": ADAPTERS["and whole modules"],
    "all linear": {"target_modules": "all-linear", "init_lora_weights": "gaussian"},
}


def other_base() -> nn.Module:
    """Other weights than those that `base` draws."""
    model = base()
    torch.manual_seed(7)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def drawn_adapters(model: nn.Module, settings: dict[str, Any]) -> Any:
    """As peft draws them: B is zero."""
    torch.manual_seed(2)
    return peft.get_peft_model(model, peft.LoraConfig(**{"r": 2, **settings}))  # type: ignore[arg-type]


def read_and_trained(name: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """Weights after `wrap`, and a step later; whether the model was on meta before."""
    with em.sharded_init():
        model = drawn_adapters(base(), FROM_FOLDER[name])
    on_meta = all(record_of(p) is not None for p in model.parameters())
    model, optimizer = wrap(model, "offload", weights=folder)
    read = em.full_state_dict(model, all_ranks=True)
    steps(model, optimizer, range(1))
    after = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    gc.collect()
    return read, after, on_meta


@pytest.mark.parametrize("name", with_further(FROM_FOLDER, ("attention and experts",)))
def test_a_peft_model_without_memory_reads_its_base_and_draws_its_adapters(
    name: str, tmp_path: Path, ranks: Ranks
) -> None:
    """Files have a tensor for each expert, and no name of peft's."""
    source: Any = other_base()
    source.save_pretrained(tmp_path)
    plain = drawn_adapters(other_base(), FROM_FOLDER[name])
    wanted = {key: value.clone() for key, value in plain.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)
    step(plain, optimizer, 0)
    for read, after, on_meta in ranks(2).run(read_and_trained, name, tmp_path):
        assert on_meta and read.keys() == wanted.keys()
        assert [key for key, value in wanted.items() if not torch.equal(read[key], value)] == []
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("settings", "dtype", "message"),
    [
        ({"use_dora": True}, torch.float32, "lora_magnitude_vector.default.weight' is computed from"),
        ({"init_lora_weights": "olora"}, torch.float32, "default.weight' is computed from weights of"),
        ({"init_lora_weights": "olora"}, torch.bfloat16, "default.weight' is computed from weights of"),
        ({"init_lora_weights": "pissa"}, torch.float32, "default.weight' is computed from weights of"),
        ({"init_lora_weights": "pissa"}, torch.bfloat16, "default.weight' is computed from weights of"),
        ({"kasa_config": KasaConfig()}, torch.float32, "q_proj.lora_diag.default' belongs to KaSA"),
    ],
    ids=["DoRA", "OLoRA", "OLoRA in bf16", "PiSSA", "PiSSA in bf16", "KaSA"],
)
def test_adapters_that_are_computed_from_a_base_not_yet_read_are_refused(
    settings: dict[str, Any], dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    other_base().save_pretrained(tmp_path)  # type: ignore[operator]
    with em.sharded_init():
        model = drawn_adapters(base().to(dtype), {"target_modules": ["q_proj"], **settings})
    with pytest.raises(ConfigError, match=message):
        wrap(model, "offload", weights=tmp_path)


@pytest.mark.usefixtures("alone")
def test_copies_of_a_tied_weight_are_read_by_the_name_that_the_folder_has(tmp_path: Path) -> None:
    """A head and an embedding that are trained apart: files have the weight once, as the embedding."""
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
    plain: Any = base()
    plain.config.tie_word_embeddings = True
    plain = type(plain)(plain.config)
    plain.save_pretrained(tmp_path)
    with em.sharded_init():
        model = drawn_adapters(type(plain)(plain.config), settings)
    model, optimizer = wrap(model, "offload", weights=tmp_path)
    read = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    copies = [name for name in read if ".modules_to_save." in name]
    assert len(copies) == 2
    assert [name for name in copies if not torch.equal(read[name], plain.lm_head.weight)] == []


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"bias": "all"}, {}])
def test_what_an_adapter_has_of_the_base_is_not_read_from_the_base_again(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """An adapter that is gone on with; its own matrices are no part of a base."""
    config = peft.LoraConfig(target_modules=["q_proj"], **LORA, **options)
    plain = base()
    plain.config.attention_bias = bool(options.get("bias"))
    plain = type(plain)(plain.config)
    plain.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    peft.get_peft_model(plain, config).save_pretrained(tmp_path / "adapter")  # type: ignore[arg-type]
    with em.sharded_init():
        model = peft.PeftModel.from_pretrained(type(plain)(plain.config), tmp_path / "adapter", is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(ConfigError, match="has been loaded with an adapter") if options else contextlib.nullcontext():
        em.wrap(model, torch.optim.AdamW(trained), plan=em.Plan.zero3(), weights=tmp_path / "base")[1].close()


def test_a_folder_without_the_base_and_adapters_that_nobody_draws_are_named(tmp_path: Path) -> None:
    settings = FROM_FOLDER["attention and experts"]
    state = {f"base_model.model.{name}": value for name, value in base().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with em.sharded_init():
        model = drawn_adapters(base(), settings)
    with pytest.raises(CheckpointError, match=r"'model.embed_tokens.weight' is on meta and not in the folder"):
        wrap(model, "offload", weights=tmp_path)
    with torch.device("meta"):
        model = drawn_adapters(base(), settings)
    with pytest.raises(LayoutError, match=r"belongs to an adapter and is on the meta device"):
        wrap(model, "offload", weights=tmp_path)


# ---------------------------------------------------------------------------------------- adapters of transformers' own


OWN: dict[str, Any] = {"init_lora_weights": False, "r": 2, "target_modules": ["q_proj"], **EXPERTS}


def with_own_adapters(model: nn.Module) -> Any:
    torch.manual_seed(2)
    model.add_adapter(peft.LoraConfig(**OWN))  # type: ignore[operator]
    return model


def own_adapters_trained(folder: Path) -> dict[str, Tensor]:
    """Weights a step after the base was read from a folder; the adapters are saved beside it."""
    with em.sharded_init():
        model = with_own_adapters(base())
    model, optimizer = wrap(model, "offload", weights=folder / "base")
    with FusedLoss(model)():
        steps(model, optimizer, range(1))
    em.save_pretrained(model, folder / "adapters")
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    gc.collect()
    return state


@needs_add_adapter
def test_adapters_of_transformers_own_train_as_in_torch_and_are_saved_as_it_saves_them(
    tmp_path: Path, ranks: Ranks
) -> None:
    """With a base from a folder, experts adapted, and a loss without logits."""
    source: Any = other_base()
    source.save_pretrained(tmp_path / "base")
    plain = with_own_adapters(other_base())
    step(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2, eps=1e-4), 0)
    wanted = plain.state_dict()
    trained = ranks(2).run(own_adapters_trained, tmp_path)[0]
    assert trained.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(trained[key], value, rtol=1e-4, atol=1e-4, msg=key)
    assert sorted(path.name for path in (tmp_path / "adapters").glob("*.safetensors")) == ["adapter_model.safetensors"]
    source.load_adapter(tmp_path / "adapters")
    for key, value in source.state_dict().items():
        assert torch.equal(value, trained[key]), key


@needs_add_adapter
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_target_that_peft_does_not_find_in_a_model_itself_is_named() -> None:
    model: Any = base()
    model.add_adapter(peft.LoraConfig(target_modules=["q_proj"], target_parameters=["experts.gate_up"]))
    with pytest.raises(ConfigError, match=r"has 'experts\.gate_up', which is not in the model"):
        wrap(model, "zero3")


@pytest.mark.usefixtures("alone")
def test_a_model_of_any_class_into_which_peft_has_put_adapters_is_saved_whole(tmp_path: Path) -> None:
    plain: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0"]), plain)
    wanted = {key: value.clone() for key, value in model.state_dict().items()}
    model, optimizer = wrap(model, "zero3")
    em.save_pretrained(model, tmp_path)
    optimizer.close()
    read = load_file(tmp_path / "model.safetensors")
    assert same_tensors(read, wanted)


# --------------------------------------------------------------------------------------------- a base that is not saved


def saved_and_continued(plan: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Counter[str]]]:
    """Weights at the second save and two steps later; what each save has read."""
    model, optimizer = wrap(adapted("attention and experts"), plan)
    reads = []
    for number in range(2):
        steps(model, optimizer, range(number, number + 1))
        with counted(model) as read:
            em.save(folder / str(number), model, optimizer, frozen=False)
        reads.append(read)
    at_save = em.full_state_dict(model, all_ranks=True)
    steps(model, optimizer, range(2, 4))
    after = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    gc.collect()
    return at_save, after, reads


def loaded_and_continued(plan: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights as they were loaded, and two steps later."""
    model = adapted("attention and experts")
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)
    model, optimizer = wrap(model, plan)
    em.load(folder, model, optimizer)
    loaded = em.full_state_dict(model, all_ranks=True)
    steps(model, optimizer, range(2, 4))
    after = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    gc.collect()
    return loaded, after


@pytest.mark.parametrize("others", [[(2, "disk")], pytest.param([(1, "ddp"), (4, "offload")], marks=pytest.mark.slow)])
def test_a_checkpoint_without_its_base_is_small_and_goes_on_under_any_layout(
    others: list[tuple[int, str]], tmp_path: Path, ranks: Ranks
) -> None:
    results = ranks(2).run(saved_and_continued, "zero3", tmp_path)
    numel = {kind: 0 for kind in (False, True)}
    for parameter in adapted("attention and experts").parameters():
        numel[parameter.requires_grad] += parameter.numel()
    trainable = numel[True]
    for number, hashed in enumerate((numel[False], 0)):
        assert [sum(reads[number][kind] for _, _, reads in results) for kind in ("frozen", "gathered")] == [hashed, 0]
    wanted, after, _ = results[0]
    size = sum(path.stat().st_size for path in (tmp_path / "1").iterdir())
    assert size < 1.1 * (4 + 8) * trainable + 2**20
    manifest = read_manifest(tmp_path / "1")
    assert manifest.numel == trainable and manifest.base is not None
    assert set(manifest.base.parameters) | set(manifest.parameters) == set(wanted)
    for world, plan in others:
        for loaded, continued in ranks(world).run(loaded_and_continued, plan, tmp_path / "1"):
            assert loaded.keys() == wanted.keys()
            for name, value in wanted.items():
                assert torch.equal(loaded[name], value), f"{plan} {name}"
                torch.testing.assert_close(continued[name], after[name], rtol=0, atol=2e-5, msg=f"{plan} {name}")


def test_frozen_parameters_that_are_named_are_in_the_checkpoint(alone: None, tmp_path: Path) -> None:
    embeddings = "base_model.model.model.embed_tokens.weight"
    model, optimizer = wrap(adapted("DoRA"), "offload")
    wanted = em.full_state_dict(model)
    with pytest.raises(CheckpointError, match=r"frozen: 'embed_tokens\.weight' is not a frozen parameter of the model"):
        em.save(tmp_path / "saved", model, optimizer, frozen={"embed_tokens.weight"})
    em.save(tmp_path / "saved", model, optimizer, frozen={embeddings})
    optimizer.close()
    manifest = read_manifest(tmp_path / "saved")
    assert manifest.base is not None and embeddings not in manifest.base.parameters
    other = adapted("DoRA")
    with torch.no_grad():
        other.get_parameter(embeddings).normal_()
    model, optimizer = wrap(other, "disk")
    em.load(tmp_path / "saved", model, optimizer)
    found = em.full_state_dict(model)
    optimizer.close()
    assert same_tensors(found, wanted)


def frozen_hashes(plan: str) -> dict[str, str]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3).requires_grad_(True))
    model[0].to(torch.bfloat16).requires_grad_(False)
    model[1].requires_grad_(False)
    model.register_parameter("scalar", nn.Parameter(torch.tensor(3.0), requires_grad=False))
    model, optimizer = wrap(model, plan)
    records = frozen_records(model._elixir, model._elixir.groups.control)
    optimizer.close()
    return {name: record.digest for name, record in records.items()}


def hash_of(values: Tensor) -> str:
    """In Python's whole numbers."""
    total, low = 0, 2**64 - 1
    for place, bits in enumerate(values.reshape(-1).view({2: torch.int16, 4: torch.int32}[values.itemsize]).tolist()):
        odd = place
        for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9):
            odd = odd * factor & low
            odd ^= (odd >> 32) | (0xFFFFFFFF00000000 if odd >> 63 else 0)  # the shift keeps the sign
        total += (odd | 1) * bits
    return f"{total & low:016x}"


@pytest.mark.parametrize("world", with_further([1, 2, 3], [2]))
def test_the_hash_of_a_parameter_is_the_same_in_every_layout(world: int, ranks: Ranks) -> None:
    torch.manual_seed(4)
    first, second = nn.Linear(5, 7).to(torch.bfloat16), nn.Linear(7, 3)
    wanted = {f"0.{name}": hash_of(value) for name, value in first.state_dict().items()}
    wanted |= {f"1.{name}": hash_of(value) for name, value in second.state_dict().items()}
    wanted |= {"scalar": hash_of(torch.tensor(3.0))}
    for plan in ("zero3", "ddp"):
        assert ranks(world).run(frozen_hashes, plan) == [wanted] * world


@pytest.fixture
def saved(alone: None, tmp_path: Path) -> Path:
    """A checkpoint without its base."""
    model, optimizer = wrap(adapted("DoRA"), "offload")
    em.save(tmp_path / "saved", model, optimizer, frozen=False)
    optimizer.close()
    return tmp_path / "saved"


def test_another_base_is_refused_and_nothing_has_changed(saved: Path) -> None:
    model = adapted("DoRA")
    with torch.no_grad():
        model.get_base_model().model.norm.weight[3] += 1e-7
        model.get_base_model().model.layers[0].self_attn.q_proj.lora_A.default.weight.zero_()
    model, optimizer = wrap(model, "zero3")
    before = em.full_state_dict(model)
    with pytest.raises(
        CheckpointError, match=r"1 of \d+ frozen .*'base_model\.model\.model\.norm\.weight' has the hash"
    ):
        em.load(saved, model, optimizer)
    assert same_tensors(before, em.full_state_dict(model))
    optimizer.close()


def test_what_else_does_not_fit_is_named_before_anything_is_hashed(saved: Path) -> None:
    for change, options, said in (
        (lambda model: model.get_base_model().model.norm.requires_grad_(True), {}, "norm.weight' is trainable now"),
        (lambda model: None, {"compute_dtype": torch.bfloat16}, "torch.float32 in the save.*same compute_dtype"),
    ):
        model = adapted("DoRA")
        change(model)
        model, optimizer = wrap(model, "offload", **options)
        with counted(model) as read, pytest.raises(CheckpointError, match=said):
            em.load(saved, model, optimizer)
        assert not read["frozen"]
        optimizer.close()
    model, optimizer = wrap(adapted("and whole modules"), "offload")
    with pytest.raises(
        CheckpointError, match=r"(?s)does not fit the model: .*modules_to_save.*is not in the checkpoint"
    ):
        em.load(saved, model, optimizer)
    optimizer.close()


@pytest.mark.parametrize("plan", ["offload", "ddp", "disk"])
@pytest.mark.usefixtures("alone")
def test_a_frozen_weight_that_is_written_gets_another_hash(plan: str, tmp_path: Path) -> None:
    model, optimizer = wrap(adapted("DoRA"), plan)
    name = "base_model.model.model.norm.weight"
    digests = []
    for number in range(3):
        em.save(tmp_path / str(number), model, optimizer, frozen=False)
        found = read_manifest(tmp_path / str(number)).base
        assert found is not None
        digests.append(found.parameters[name].digest)
        if number == 0:
            with torch.no_grad():
                model.get_base_model().model.norm.weight[3] += 1
    em.save(tmp_path / "whole", model, optimizer)
    assert read_manifest(tmp_path / "whole").base is None
    with torch.no_grad():
        model.get_base_model().model.norm.weight[3] += 1
    with pytest.raises(CheckpointError, match=r"norm\.weight' has the hash"):
        em.load(tmp_path / "1", model, optimizer)
    em.load(tmp_path / "whole", model, optimizer)
    em.load(tmp_path / "1", model, optimizer)
    assert len(set(digests[:2])) == 2 and digests[1] == digests[2] == hash_of(em.full_state_dict(model)[name])
    optimizer.close()


def test_a_checkpoint_without_its_base_is_resharded_and_not_exported(saved: Path, tmp_path: Path) -> None:
    whole = Whole(saved, read_manifest(saved))
    with pytest.raises(CheckpointError, match=r"frozen=False.*em\.save_pretrained"):
        export_torch(whole, tmp_path / "out.pt")
    reshard(whole, tmp_path / "again", 2)
    model, optimizer = wrap(adapted("DoRA"), "offload")
    em.load(tmp_path / "again", model, optimizer)
    optimizer.close()


@pytest.mark.usefixtures("alone")
def test_the_folder_of_the_base_is_named(tmp_path: Path) -> None:
    def wrapped() -> tuple[Any, em.ShardedOptimizer]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
        return wrap(model, "offload", weights=tmp_path)

    weights = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    save_file(weights, tmp_path / "model.safetensors")
    model, optimizer = wrapped()
    em.save(tmp_path / "saved", model, optimizer, frozen=False)
    optimizer.close()
    save_file(weights | {"0.weight": weights["0.weight"] + 1}, tmp_path / "model.safetensors")
    model, optimizer = wrapped()
    with pytest.raises(CheckpointError, match=rf"came from '{tmp_path}'\. 1 of 2 frozen"):
        em.load(tmp_path / "saved", model, optimizer)
    optimizer.close()


def saved_otherwise(folder: Path) -> str:
    model, optimizer = wrap(nn.Linear(2, 2), "zero3")
    with pytest.raises(CheckpointError) as error:
        em.save(folder, model, optimizer, frozen=dist.get_rank() == 0)
    optimizer.close()
    return str(error.value)


def test_ranks_agree_on_what_is_saved(tmp_path: Path, ranks: Ranks) -> None:
    message = "ranks disagree about frozen: it is True on rank 0, False on rank 1: pass one value"
    assert ranks(2).run(saved_otherwise, tmp_path / "saved") == [message] * 2


@pytest.mark.usefixtures("alone")
def test_adapters_that_choose_ranks_by_gradients() -> None:
    model: Any = peft.get_peft_model(
        nn.Sequential(nn.Linear(32, 32)), peft.AdaLoraConfig(target_modules=["0"], total_step=999)
    )
    with pytest.raises(ConfigError, match=r"adapter 'default' is of ADALORA, which chooses ranks by parameter\.grad"):
        em.wrap(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad]), plan=em.Plan.zero3())


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(16, 2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        attended, _ = self.attention(x, x, x)
        y: Tensor = self.head(attended)
        return y


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("trainable", [True, False], ids=["trainable alone", "all parameters"])
def test_adapters_that_replace_parameters(trainable: bool) -> None:
    model: Any = peft.get_peft_model(Attending(), peft.LoraConfig(target_modules=["attention", "head"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad or not trainable])
    said = r"'base_model\.model\.attention' \(peft.*MultiheadAttention\) puts new parameters .* out of target_modules"
    with pytest.raises(ConfigError, match=said):
        em.wrap(model, optimizer, plan=em.Plan.zero3())
