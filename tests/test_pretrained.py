"""Folders of safetensors: full weights written from shards, and read into the shards of a model made on meta.

Reading and writing change no bit, so everything but training is compared bitwise; training as in `tests.parity`.
"""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import elixir_moe as em
from elixir_moe.errors import CheckpointError
from elixir_moe.huggingface import INDEX, save_pretrained
from elixir_moe.models.config import GPTConfig
from elixir_moe.models.gpt import GPT, gpt_patterns
from tests.hf_cases import FAMILIES
from tests.parity import make_optimizer, mesh_of_world
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
FILE_BYTES = 60_000
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
    state = em.full_state_dict(model)
    optimizer.close()
    gc.collect()
    return state


@pytest.mark.parametrize("name", FAMILIES)
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
    assert all((tmp_path / file).stat().st_size < FILE_BYTES + 20_000 for file in files)
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
    state = em.full_state_dict(model)
    optimizer.close()
    return state


def test_slices_of_all_ranks_are_joined(tmp_path: Path, ranks: Ranks) -> None:
    wanted = ranks(2).run(experts_saved, tmp_path)[0]
    found = in_folder(tmp_path)
    assert found.keys() <= wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert set(wanted) - set(found) <= {"head.weight"}, "only tied names are left out"


def dtensors_saved(folder: Path) -> dict[str, Tensor]:
    """A linear layer cut over two ranks."""
    torch.manual_seed(3)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6)), mesh, {"0": ColwiseParallel()})
    model, optimizer = wrap(model)
    save_pretrained(model, folder)
    state = em.full_state_dict(model)
    optimizer.close()
    return state


def test_dtensors_are_written_whole(tmp_path: Path, ranks: Ranks) -> None:
    wanted = ranks(2).run(dtensors_saved, tmp_path)[0]
    found = in_folder(tmp_path)
    assert found["0.weight"].shape == (6, 8)
    assert set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in found)


def save_to(folder: Path) -> str:
    model, optimizer = wrap(nn.Linear(4, 4))
    with pytest.raises(CheckpointError) as error:
        save_pretrained(model, folder)
    optimizer.close()
    return str(error.value)


def test_all_ranks_learn_that_one_cannot_write(tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "file").touch()
    assert all("rank 0" in message for message in ranks(2).run(save_to, tmp_path / "file"))
