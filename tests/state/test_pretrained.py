"""Folders of safetensors: full weights written from shards, and read into the shards of a model made on meta.

Reading and writing change no bit, so everything but training is compared bitwise; training is compared as in
`tests.support.parity`.
"""

import gc
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import elixir_moe as em
from elixir_moe.errors import CheckpointError
from elixir_moe.hf.save_pretrained import save_pretrained
from elixir_moe.state.safetensors_format import INDEX
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns
from tests.support.cases import with_further
from tests.support.every import every, same_tensors
from tests.support.hf_cases import FAMILIES
from tests.support.parity import TOLERANCE, make_optimizer, mesh_of_world
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
FILE_BYTES = 60_000
LLAMA = hf.LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
EXPERTS = GPTConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=2, seq_len=16, experts=(0, 4), ep=(1, 2))


def in_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of all files."""
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def wrap(model: nn.Module, **options: Any) -> tuple[nn.Module, em.ShardedOptimizer]:
    return em.wrap(model, make_optimizer(model), plan=em.Plan.zero3(rcache_blocks=12), **options)


def train(name: str, model: nn.Module, optimizer: Any, rank: int, world: int) -> None:
    """One step, so that nothing is as it was made."""
    rows = {key: value.chunk(world)[rank] for key, value in FAMILIES[name].batch(0).items()}
    FAMILIES[name].loss(model, rows).backward()
    optimizer.step()


def trained_and_saved(name: str, folder: Path) -> dict[str, Tensor]:
    model, optimizer = wrap(FAMILIES[name].build())
    train(name, model, optimizer, dist.get_rank(), dist.get_world_size())
    save_pretrained(model, folder, max_file_bytes=FILE_BYTES)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    gc.collect()
    return state


@pytest.mark.parametrize("name", with_further(FAMILIES, ("gpt2", "mixtral")))
def test_from_pretrained_reads_what_was_saved(name: str, tmp_path: Path, ranks: Ranks) -> None:
    """In the format `transformers` itself writes, over files that were there before."""
    model: Any = FAMILIES[name].build()
    model.save_pretrained(tmp_path, max_shard_size=FILE_BYTES // 4)
    before = in_folder(tmp_path)
    wanted = ranks(2).run(trained_and_saved, name, tmp_path)[0]
    after = in_folder(tmp_path)
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    index = tmp_path / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {path.name for path in tmp_path.glob("*.safetensors")} == files
    assert every((tmp_path / file).stat().st_size < FILE_BYTES + 20_000 for file in files)
    read = getattr(hf, FAMILIES[name].model).from_pretrained(tmp_path).state_dict()
    assert set(read) == set(wanted)
    assert [n for n in wanted if not torch.equal(read[n], wanted[n])] == []


def experts_saved(folder: Path) -> dict[str, Tensor]:
    """Experts of two ranks, each with its own two."""
    torch.manual_seed(3)
    model = GPT(EXPERTS, mesh_of_world())
    em.annotate(model, gpt_patterns(model))
    model, optimizer = wrap(model, compute_dtype=torch.bfloat16)
    save_pretrained(model, folder)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


def test_slices_of_all_ranks_are_joined(tmp_path: Path, ranks: Ranks) -> None:
    wanted = ranks(2).run(experts_saved, tmp_path)[0]
    found = in_folder(tmp_path)
    assert same_tensors(found, {name: wanted[name] for name in found})
    assert set(wanted) - set(found) <= {"head.weight"}, "only tied names are left out"


def dtensors_saved(folder: Path) -> dict[str, Tensor]:
    """A linear layer cut over two ranks."""
    torch.manual_seed(3)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)), mesh, {"0": ColwiseParallel()})
    model, optimizer = wrap(model)
    save_pretrained(model, folder)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


def test_dtensors_are_written_whole(tmp_path: Path, ranks: Ranks) -> None:
    wanted = ranks(2).run(dtensors_saved, tmp_path)[0]
    found = in_folder(tmp_path)
    assert found["0.weight"].shape == (6, 8)
    assert same_tensors(found, wanted)


def test_the_models_own_save_pretrained_names_ours(tmp_path: Path) -> None:
    model, optimizer = wrap(hf.LlamaForCausalLM(LLAMA))
    with pytest.raises(em.UsageError, match=r"em\.save_pretrained\(model, folder\).* trainer\.save_model\(folder\)"):
        model.save_pretrained(tmp_path)  # type: ignore[operator]
    optimizer.close()


def buffer_saved(dtype: torch.dtype, folder: Path) -> str:
    """The error, or nothing."""
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(6).to(dtype))
    model, optimizer = wrap(model)
    try:
        save_pretrained(model, folder)
    except CheckpointError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex64])
def test_a_buffer_of_any_dtype_that_files_hold(dtype: torch.dtype, tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2).run(buffer_saved, dtype, tmp_path) == ["", ""]
    assert torch.equal(in_folder(tmp_path)["table"], torch.arange(6).to(dtype))


def twice_named() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(6))
    model.register_buffer("same", model.table)
    return model


def test_a_buffer_of_two_names_stays_one(tmp_path: Path) -> None:
    model, optimizer = wrap(twice_named())
    save_pretrained(model, tmp_path)
    optimizer.close()
    with torch.device("meta"):
        empty = twice_named()
    model, optimizer = em.wrap(empty, torch.optim.AdamW(empty.parameters()), plan=em.Plan.zero2(), weights=tmp_path)
    optimizer.close()
    assert model.same is model.table and model.table.tolist() == list(range(6))


class Scaled(hf.LlamaForCausalLM):  # type: ignore[misc]
    """Computes a buffer in its constructor, which no file has."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scales", torch.arange(3.0) + torch.rand(3), persistent=False)


def test_a_buffer_that_no_file_has_is_that_of_a_plain_start(tmp_path: Path) -> None:
    Scaled(LLAMA).save_pretrained(tmp_path)
    torch.manual_seed(3)
    wanted = Scaled(LLAMA).scales
    torch.manual_seed(3)
    with em.sharded_init():
        model: Any = Scaled(LLAMA)
    model, optimizer = wrap(model, weights=tmp_path)
    optimizer.close()
    assert torch.equal(model.scales, wanted)


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), em.sharded_init], ids=["meta", "sharded_init"])
def test_what_transformers_keeps_in_fp32_is_kept(context: Any, tmp_path: Path) -> None:
    """The biases of routers, by declaration: in bf16 they would choose other experts."""
    family = FAMILIES["deepseek-v3"]
    whole: Any = family.build()
    for buffer in whole.buffers():
        buffer.add_(torch.rand_like(buffer) * 8)
    whole.save_pretrained(tmp_path)
    plain = type(whole).from_pretrained(tmp_path, dtype=torch.bfloat16)
    with context():
        model = hf.AutoModelForCausalLM.from_config(plain.config, dtype=torch.bfloat16)
    model, optimizer = wrap(model, weights=tmp_path)
    found = em.full_state_dict(model)
    optimizer.close()
    assert {value.dtype for value in found.values()} == {torch.bfloat16, torch.float32}
    for name, value in plain.state_dict().items():
        assert found[name].dtype is value.dtype and torch.equal(found[name], value), name


@pytest.mark.parametrize("differ", [True, False])
def test_one_tensor_of_two_values_is_refused(differ: bool, tmp_path: Path) -> None:
    """A head that was trained apart, in a folder whose config says that it is the embedding."""
    whole: Any = hf.LlamaForCausalLM(LLAMA)
    if not differ:
        whole.lm_head.weight.data = whole.model.embed_tokens.weight.detach().clone()
    whole.save_pretrained(tmp_path)
    config = hf.LlamaConfig.from_pretrained(tmp_path, tie_word_embeddings=True)
    with torch.device("meta"):
        model: Any = hf.LlamaForCausalLM(config)
    match = r"'\S+' and '\S+' differ in the folder and are one tensor in the model: set tie_word_embeddings to false"
    with pytest.raises(CheckpointError, match=match) if differ else nullcontext():
        wrap(model, weights=tmp_path)[1].close()


def test_tensors_that_the_model_has_not_are_said(tmp_path: Path) -> None:
    """As transformers says: biases of which the config knows nothing."""
    hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA.to_dict() | {"attention_bias": True})).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(LLAMA)
    with pytest.warns(UserWarning, match=r" 8 tensors .*'\S+_proj\.bias'"):
        wrap(model, weights=tmp_path)[1].close()


def test_a_folder_that_would_not_be_read_is_refused(tmp_path: Path) -> None:
    hf.LlamaForCausalLM(LLAMA).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="the model has its weights already, and the folder's would not be read"):
        wrap(hf.LlamaForCausalLM(LLAMA), weights=tmp_path)


def test_ties_that_a_model_does_not_declare_are_no_folder(tmp_path: Path) -> None:
    """As transformers' own: what is read from the folder would be drawn in part."""
    model: Any = hf.LlamaForCausalLM(LLAMA)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(RuntimeError):
        model.save_pretrained(tmp_path / "plain")
    model, optimizer = wrap(model)
    with pytest.raises(em.UsageError, match=r"layers\.0\.mlp\.\S+ and '\S+layers\.1\.mlp\.\S+ are one tensor"):
        save_pretrained(model, tmp_path / "ours")
    optimizer.close()
    assert not (tmp_path / "ours").exists()


def test_a_buffer_that_no_file_holds_is_named(tmp_path: Path, ranks: Ranks) -> None:
    for message in ranks(2).run(buffer_saved, torch.complex128, tmp_path):
        assert message.startswith("[rank 0] 'table' is of torch.complex128")
    assert not list(tmp_path.iterdir())


def save_to(folder: Path) -> str:
    model, optimizer = wrap(nn.Linear(4, 4))
    with pytest.raises(CheckpointError) as error:
        save_pretrained(model, folder)
    optimizer.close()
    return str(error.value)


def test_all_ranks_learn_that_one_cannot_write(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "file").touch()
    assert every("rank 0" in message for message in ranks(2).run(save_to, tmp_path / "file"))


class Sometimes(nn.Linear):
    """Has extra state on one rank alone."""

    def get_extra_state(self) -> Any:
        return dist.get_rank() or None

    def set_extra_state(self, state: Any) -> None:
        pass


def save_state_of_one_rank(folder: Path) -> str:
    model, optimizer = wrap(Sometimes(4, 4))
    with pytest.raises(em.UsageError) as error:
        save_pretrained(model, folder)
    optimizer.close()
    return str(error.value)


def test_all_ranks_learn_what_one_cannot_write(tmp_path: Path, ranks: Ranks) -> None:
    for said in ranks(2).run(save_state_of_one_rank, tmp_path):
        assert said.startswith("[rank 1] the model's state_dict() has '_extra_state'")


def test_other_files_of_the_folder_stay(tmp_path: Path) -> None:
    """Weights of before go, and nothing else that is called by a model."""
    others = {"model_ema.safetensors", "model-best.safetensors", "model.safetensors.bak"}
    for name in (*others, "model.safetensors", "model-00001-of-00002.safetensors", INDEX):
        (tmp_path / name).write_text("before")
    em.init_mesh(device_type="cpu")
    model, optimizer = wrap(nn.Linear(4, 4))
    save_pretrained(model, tmp_path)
    with pytest.raises(em.ConfigError, match="max_file_bytes='5GB': expected a whole number"):
        save_pretrained(model, tmp_path, max_file_bytes="5GB")  # type: ignore[arg-type]
    optimizer.close()
    assert {path.name for path in tmp_path.iterdir()} == others | {"model.safetensors"}


@pytest.mark.parametrize("own", [False, True])
def test_a_folder_keeps_what_the_one_it_was_read_from_says_of_generation(own: bool, tmp_path: Path) -> None:
    hf.LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "a")
    said = {"eos_token_id": [1, 3], "do_sample": False, "temperature": 0.3}
    (tmp_path / "a" / "generation_config.json").write_text(json.dumps(said))
    em.init_mesh(device_type="cpu")
    with torch.device("meta"):
        model: Any = hf.LlamaForCausalLM(LLAMA)
    if own:
        model.generation_config = hf.GenerationConfig(eos_token_id=2)
    model, optimizer = wrap(model, weights=tmp_path / "a")
    save_pretrained(model, tmp_path / "b")
    optimizer.close()
    found = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert found["eos_token_id"] == 2 if own else found == said


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "HERE/elsewhere.safetensors", "sub/../x.safetensors", 5])
def test_an_index_that_leads_out_of_its_folder_is_refused(name: Any, tmp_path: Path) -> None:
    em.init_mesh(device_type="cpu")
    (tmp_path / "model").mkdir()
    save_file({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, tmp_path / "elsewhere.safetensors")
    file = name.replace("HERE", str(tmp_path)) if isinstance(name, str) else name
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(("weight", "bias"), file)}))
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    said = "leads out of the folder" if isinstance(name, str) else "no readable"
    with pytest.raises(em.CheckpointError, match=said):
        wrap(model, weights=tmp_path / "model")


def test_of_one_file_and_an_index_the_file_is_read(tmp_path: Path) -> None:
    """As `from_pretrained` does."""
    em.init_mesh(device_type="cpu")
    save_file({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(("weight", "bias"), "model-00001-of-00001.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(index))
    save_file({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    model, optimizer = wrap(model, weights=tmp_path)
    assert em.full_state_dict(model)["weight"].eq(1).all()
    optimizer.close()


def stage_saved(folder: Path) -> str:
    stages = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    model = nn.Sequential()
    model.add_module(str(dist.get_rank()), nn.Linear(4, 4))
    em.annotate(model, {"*": em.Pattern(stages["dp"], replicate=("dp",))})
    model, optimizer = wrap(model)
    with pytest.raises(em.UsageError) as error:
        save_pretrained(model, folder)
    optimizer.close()
    return str(error.value)


def test_a_pipeline_stage_is_no_folder(tmp_path: Path, ranks: Ranks) -> None:
    """Rank 0 would write its stage alone."""
    for rank, message in enumerate(ranks(2).run(stage_saved, tmp_path)):
        assert message.startswith(f"this model is a pipeline stage of ranks [{rank}]")
    assert not list(tmp_path.iterdir())


class Unwritable:
    """A config that its own checks refuse, as those of `transformers` do."""

    def save_pretrained(self, folder: Path) -> None:
        raise ValueError("temperature is set and do_sample is not")


def saved_with(config: Any, folder: Path) -> str:
    model, optimizer = wrap(nn.Linear(4, 4))
    model.config = config
    with pytest.raises(CheckpointError) as error:
        save_pretrained(model, folder)
    optimizer.close()
    return str(error.value)


def test_whatever_goes_wrong_in_writing_is_learnt_by_all_and_leaves_what_was_there(
    tmp_path: Path, ranks: Ranks
) -> None:
    (tmp_path / "model.safetensors").write_text("before")
    for message in ranks(2).run(saved_with, Unwritable(), tmp_path):
        assert message == "[rank 0] ValueError: temperature is set and do_sample is not"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def read_into_meta(name: str, folder: Path) -> dict[str, Any]:
    with torch.device("meta"):
        model = FAMILIES[name].build()
    model, optimizer = wrap(model, weights=folder)
    state = em.full_state_dict(model, all_ranks=True)
    train(name, model, optimizer, dist.get_rank(), dist.get_world_size())
    result = {"read": state, "trained": em.full_state_dict(model, all_ranks=True)}
    optimizer.close()
    gc.collect()
    return result


@pytest.mark.parametrize("name", with_further(FAMILIES, ("gpt2", "mixtral")))
def test_a_model_on_meta_takes_its_weights_from_a_folder(name: str, tmp_path: Path, ranks: Ranks) -> None:
    """Buffers that no folder has (positions, rotary frequencies) are what they would have been: training agrees."""
    plain: Any = FAMILIES[name].build()
    plain.save_pretrained(tmp_path, max_shard_size=FILE_BYTES)
    wanted = {key: value.clone() for key, value in plain.state_dict().items()}
    optimizer = make_optimizer(plain)
    train(name, plain, optimizer, 0, 1)
    for found in ranks(2).run(read_into_meta, name, tmp_path):
        assert set(found["read"]) == set(wanted)
        assert [key for key in wanted if not torch.equal(found["read"][key], wanted[key])] == []
        for key, value in plain.state_dict().items():
            torch.testing.assert_close(found["trained"][key], value, rtol=0, atol=TOLERANCE, msg=f"{name} {key}")


def experts_read(folder: Path, ep: int) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = GPT(replace(EXPERTS, ep=(1, ep)), mesh_of_world())
    em.annotate(model, gpt_patterns(model))
    model, optimizer = wrap(model, weights=folder)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


@pytest.mark.parametrize("ep", [1, 2])
def test_every_rank_reads_its_own_slices(ep: int, tmp_path: Path, ranks: Ranks) -> None:
    wanted = ranks(2).run(experts_saved, tmp_path)[0]
    for found in ranks(2).run(experts_read, tmp_path, ep):
        assert set(found) == set(wanted)
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def base_read(folder: Path) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = FAMILIES["gpt2"].build()
    model, optimizer = wrap(model, weights=folder)
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return state


def test_names_of_a_base_model_are_understood(tmp_path: Path, ranks: Ranks) -> None:
    """As on the hub, where GPT-2 is without the head that is tied to its embedding."""
    model: Any = FAMILIES["gpt2"].build()
    model.transformer.save_pretrained(tmp_path)
    for found in ranks(2).run(base_read, tmp_path):
        assert same_tensors(found, model.state_dict())


def refused(folder: Path | None, change: Callable[[nn.Module], None], family: str = "llama") -> tuple[str, str]:
    with torch.device("meta"):
        model = FAMILIES[family].build()
        change(model)
    with pytest.raises(em.ElixirError) as error:
        wrap(model, weights=folder)
    return type(error.value).__name__, str(error.value)


def unchanged(model: Any) -> None:
    pass


def wider(model: Any) -> None:
    model.lm_head = nn.Linear(32, 100, bias=False)


def deeper(model: Any) -> None:
    model.extra = nn.Linear(3, 3)
    model.register_buffer("kept", torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "says"), [(wider, "lm_head.weight.*96, 32.*100, 32"), (deeper, "extra.weight.*not in the folder")]
)
def test_what_the_folder_has_not_is_named(change: Any, says: str, tmp_path: Path, ranks: Ranks) -> None:
    model: Any = FAMILIES["llama"].build()
    model.save_pretrained(tmp_path)
    for kind, text in ranks(2).run(refused, tmp_path, change):
        assert kind == "CheckpointError"
        assert re.search(says, text), text


def test_what_is_only_found_when_a_weight_is_made_fails_all_ranks(tmp_path: Path, ranks: Ranks) -> None:
    """Experts of a layer are joined while the first rank of a chunk reads them; the others wait for the chunk."""
    model: Any = FAMILIES["mixtral"].build()
    model.save_pretrained(tmp_path)
    tensors = in_folder(tmp_path)
    changed = {name: value[:, 1:].contiguous() if ".w2." in name else value for name, value in tensors.items()}
    assert any(changed[name] is not value for name, value in tensors.items())
    save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    for kind, text in ranks(2).run(refused, tmp_path, unchanged, "mixtral"):
        assert kind == "CheckpointError"
        assert re.search(r"\[rank 0\] .*down_proj' is \(4, 32, 63\) in the folder and \(4, 32, 64\)", text), text


def gate_and_up_read(folder: Path) -> str:
    """A weight that is cut as two halves, which no folder can be read into."""
    with torch.device("meta"):
        model = nn.Linear(4, 6, bias=False)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    em.annotate(model, {"*": em.Pattern(mesh, replicate=("dp",), shard={"tp": 1}, view=(2, 3, 4))})
    with pytest.raises(CheckpointError) as error:
        wrap(model, weights=folder)
    return str(error.value)


def test_a_pattern_with_a_view_is_told_before_anything_is_read(tmp_path: Path, ranks: Ranks) -> None:
    save_file({"weight": torch.zeros(12, 4)}, tmp_path / "model.safetensors")
    for text in ranks(2).run(gate_and_up_read, tmp_path):
        assert "'weight' has a pattern with a view" in text


def test_no_folder_and_no_weights_are_said(tmp_path: Path, ranks: Ranks) -> None:
    for kind, text in ranks(2).run(refused, tmp_path / "nowhere", unchanged):
        assert (kind, f"the folder '{tmp_path}/nowhere' does not exist" in text) == ("CheckpointError", True)
    (tmp_path / "empty").mkdir()
    for kind, text in ranks(2).run(refused, tmp_path / "empty", unchanged):
        assert (kind, "no readable" in text) == ("CheckpointError", True)
    for kind, text in ranks(2).run(refused, None, unchanged):
        assert (kind, "pass weights=" in text) == ("LayoutError", True)
