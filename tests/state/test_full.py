"""Full weights: on rank 0, or on all ranks; the model's own state dict, hooks and extra state included."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import elixir_moe as em
from elixir_moe.state.checkpoint.storage import read_manifest
from elixir_moe.state.checkpoint.whole import Whole, export_huggingface, export_torch
from tests.support.every import every, same_tensors
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]


def weights() -> tuple[list[str], bool]:
    """(rank) The names that one rank gets, and whether all ranks get the weights of the plain model if asked."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model, optimizer = em.wrap(plain, torch.optim.AdamW(plain.parameters()), plan=em.Plan.zero3())
    some, everywhere = em.full_state_dict(model), em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    assert (dist.get_rank() == 0) == bool(some)
    same = everywhere.keys() == expected.keys() and all(torch.equal(everywhere[n], v) for n, v in expected.items())
    return list(some), same


def test_rank_0_has_it_and_all_if_asked(ranks: Ranks) -> None:
    first, second = ranks(2).run(weights)
    names = list(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).state_dict())
    assert first == (names, True)
    assert second == ([], True)


def lost_on_the_way() -> str:
    """(rank) What a rank says when the others do not answer."""
    model = nn.Linear(8, 8)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero3())

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Timed out waiting 6000ms")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(em.ElixirError) as error:
        patch.setattr(dist, "all_gather", fail)
        em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return str(error.value)


def test_a_rank_that_does_not_answer_is_named(ranks: Ranks) -> None:
    for message in ranks(2).run(lost_on_the_way):
        assert message.startswith("the all-gather of whole parameters failed on rank")


class Renaming(nn.Module):
    """Hooks and an override that rename, leave out, add and compute; a buffer and a module with two names."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.inner = nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)), norm, nn.Linear(8, 8), norm)
        self.head, self.left_out = Counting(8, 2), nn.Linear(2, 2)
        self.inner[2]._register_state_dict_hook(split)
        self.register_buffer("graph", torch.eye(3).to_sparse())
        self.register_buffer("rows", torch.eye(3).to_sparse_csr())
        self.register_buffer("again", self.inner[1].running_mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left_out(self.head(self.inner(x)))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {f"model.{name}": value for name, value in state.items() if "left_out" not in name}


class Counting(nn.Linear):
    """Has extra state."""

    calls = 3

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "seen": (torch.arange(2), 1.5), "mean": self.weight.detach().mean()}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """One entry becomes two, and another one narrower."""
    state[f"{prefix}up"], state[f"{prefix}down"] = state.pop(f"{prefix}weight").chunk(2)
    state[f"{prefix}bias"] = module.bias.detach().half()


def same(one: Any, other: Any) -> bool:
    """Equal, with tensors equal to the bit."""
    if isinstance(one, torch.Tensor):
        return one.layout is other.layout and one.dtype is other.dtype and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def own_state_and_checkpoint(folder: str) -> list[str]:
    """What is not as it should be of the model's own state dict, and of a checkpoint of it, on this rank."""
    torch.manual_seed(0)
    expected = Renaming().state_dict()
    torch.manual_seed(0)
    plain = Renaming()
    model, optimizer = em.wrap(plain, torch.optim.AdamW(plain.parameters()), plan=em.Plan.zero3())
    found = []
    if not same(em.full_state_dict(model, all_ranks=True), expected):
        found.append("the state dict")
    em.save(folder, model, optimizer)
    with torch.no_grad():
        for tensor in (*model.parameters(), model.inner[1].running_mean):
            tensor.zero_()
        model.graph._values().zero_()
        model.rows.values().zero_()
    model.head.calls = 0
    em.load(folder, model, optimizer)
    if not same(em.full_state_dict(model, all_ranks=True), expected):
        found.append("the checkpoint")
    optimizer.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_it_is_the_models_own_state_dict(world: int, ranks: Ranks, tmp_path: Path) -> None:
    """Hooks, overrides and extra state included; a checkpoint keeps every parameter, buffer and extra state."""
    assert ranks(world).run(own_state_and_checkpoint, str(tmp_path / "checkpoint")) == [[]] * world


def what_a_hook_keeps() -> str:
    """(rank) The error of a hook that reads a parameter it has kept: on one rank it would wait for the others."""
    model = nn.Sequential(nn.Linear(4, 4))
    kept = model[0].weight
    model.register_state_dict_post_hook(lambda m, state, prefix, _: state.update(kept=kept.detach()))
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.offload())
    try:
        em.full_state_dict(model)
    except em.UsageError as error:
        return str(error)
    finally:
        optimizer.close()
    return ""


def test_a_hook_that_keeps_a_parameter_is_refused_on_all_ranks(ranks: Ranks) -> None:
    assert every("has kept a parameter" in text and "'0.weight'" in text for text in ranks(2).run(what_a_hook_keeps))


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one in this process."""
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


def wrapped(model: Any, **options: Any) -> tuple[Any, Any]:
    return em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero3(), **options)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_exports_what_the_models_state_dict_has(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(8)
    model = nn.ModuleDict({"first": norm, "head": Counting(8, 8), "again": norm, "kept": checkpoint_wrapper(norm)})
    expected = copy.deepcopy(model.state_dict())
    model, optimizer = wrapped(model)
    em.save(tmp_path / "a", model, optimizer)
    whole = Whole(tmp_path / "a", read_manifest(tmp_path / "a"))
    export_torch(whole, tmp_path / "a.pt")
    assert same(torch.load(tmp_path / "a.pt", weights_only=True), dict(expected))
    with pytest.raises(em.CheckpointError, match=r"'head\._extra_state' is extra state.*--format torch"):
        export_huggingface(whole, tmp_path / "folder")
    with pytest.raises(em.UsageError, match=r"'head\._extra_state'.*save_pretrained writes.*em\.full_state_dict"):
        em.save_pretrained(model, tmp_path / "folder")
    optimizer.close()
    model, optimizer = wrapped(Renaming())
    em.save(tmp_path / "b", model, optimizer)
    with pytest.raises(
        em.CheckpointError, match=r"'model\.graph' is computed by the model's own state_dict.*or sparse"
    ):
        export_torch(Whole(tmp_path / "b", read_manifest(tmp_path / "b")), tmp_path / "b.pt")
    optimizer.close()


@pytest.mark.usefixtures("alone")
def test_folders_have_the_keys_of_the_state_dict(tmp_path: Path) -> None:
    """Written and read: peers' wrappers of activation checkpointing take their own names out of the keys."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)), nn.BatchNorm1d(8))
    expected = copy.deepcopy(model.state_dict())
    model, optimizer = wrapped(model)
    em.save_pretrained(model, tmp_path / "folder")
    optimizer.close()
    assert same(
        dict(sorted(load_file(tmp_path / "folder" / "model.safetensors").items())), dict(sorted(expected.items()))
    )
    with torch.device("meta"):
        model = nn.Sequential(checkpoint_wrapper(nn.Linear(8, 8)), nn.BatchNorm1d(8))
    model, optimizer = wrapped(model, weights=tmp_path / "folder")
    assert same(em.full_state_dict(model), expected)
    optimizer.close()


class WithValueHead(nn.Module):
    """Puts another model's keys beside those of its head, as TRL's models with a value head do."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrained = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
        self.pretrained[1].weight = self.pretrained[0].weight
        self.v_head = nn.Linear(16, 1)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = self.pretrained.state_dict(*args, **kwargs)
        return state | {f"v_head.{name}": value for name, value in self.v_head.state_dict(*args, **kwargs).items()}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tiled", [False, True])
def test_a_value_head_beside_a_model_has_its_own_keys(tiled: bool, tmp_path: Path) -> None:
    """An override that asks parts of the model for theirs, the fp32 masters of a bf16 model, and tiles."""
    model = WithValueHead()
    expected = copy.deepcopy(model.state_dict())
    assert list(expected) == ["0.weight", "1.weight", "v_head.weight", "v_head.bias"]
    model, optimizer = wrapped(em.tile(model, at_most=300) if tiled else model, compute_dtype=torch.bfloat16)
    assert same(em.full_state_dict(model), expected)
    with pytest.raises(em.UsageError, match=r"em\.full_state_dict"):
        model.state_dict()
    em.save_pretrained(model, tmp_path / "folder")
    optimizer.close()
    files = load_file(tmp_path / "folder" / "model.safetensors")
    assert same_tensors(files, {name: value for name, value in expected.items() if name != "1.weight"})


class Odd(Counting):
    """Its extra state is no plain value."""

    def get_extra_state(self) -> Any:
        return {"handle": object()}


@pytest.mark.usefixtures("alone")
def test_extra_state_is_of_plain_values_and_of_the_same_modules(tmp_path: Path) -> None:
    model, optimizer = wrapped(nn.Sequential(Odd(4, 4)))
    with pytest.raises(em.CheckpointError, match=r"extra state '0\._extra_state'\['handle'\] is a object"):
        em.save(tmp_path / "a", model, optimizer)
    optimizer.close()
    model, optimizer = wrapped(nn.Sequential(Counting(4, 4)))
    em.save(tmp_path / "b", model, optimizer)
    optimizer.close()
    model, optimizer = wrapped(nn.Sequential(nn.Linear(4, 4)))
    em.save(tmp_path / "c", model, optimizer)
    with pytest.raises(em.CheckpointError, match=r"'0\._extra_state' of the checkpoint has no module with set_extra"):
        em.load(tmp_path / "b", model, optimizer)
    optimizer.close()
    model, optimizer = wrapped(nn.Sequential(Counting(4, 4)))
    with pytest.raises(
        em.CheckpointError, match=r"extra state '0\._extra_state' of the model is not in the checkpoint"
    ):
        em.load(tmp_path / "c", model, optimizer)
    optimizer.close()


def tied(model: Any) -> None:
    model[1].weight = model[0].weight


def swapped(model: Any) -> None:
    model[0].weight, model[1].weight = model[1].weight, model[0].weight


def exchanged(model: Any) -> None:
    model[0], model[1] = model[1], model[0]


def moved(model: Any) -> None:
    weight = model[0].weight
    del model[0].weight
    model[1].register_parameter("other", weight)


def named_again(model: Any) -> None:
    model.again = model[0]


def tied_by_a_tile(model: Any) -> None:
    model[2].tile_1.weight = model[2].tile_0.weight


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (tied, "parameter '0.weight' of wrap is at '1.weight' now"),
        (swapped, "parameter '1.weight' of wrap is at '0.weight' now; 2 are tied, swapped or moved"),
        (exchanged, "parameter '1.weight' of wrap is at '0.weight' now; 4 are tied"),
        (moved, "parameter '0.weight' of wrap is at '1.other' now; 1 are tied"),
        (named_again, "parameter '0.weight' of wrap is at 'again.weight' now"),
        (tied_by_a_tile, r"the model had \['2.weight'\] in wrap and has not now"),
    ],
)
def test_a_model_whose_parameters_have_changed_places_is_refused(
    change: Callable[[Any], None], said: str, tmp_path: Path
) -> None:
    """Forward follows such a change. What is saved would not."""
    model = em.tile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 64)), at_most=600)
    model, optimizer = wrapped(model)
    change(model)
    for refused in (
        lambda: em.full_state_dict(model),
        lambda: em.save(tmp_path / "a", model, optimizer),
        lambda: em.save_pretrained(model, tmp_path / "folder"),
    ):
        with pytest.raises(em.UsageError, match=said):
            refused()
    optimizer.close()


def loaded_into_a_submodule() -> list[str]:
    """(rank) The plans under which a state of fp32, loaded into a part of a bf16 model, has lost bits."""
    plans = {
        "zero3": em.Plan.zero3(),
        "offload": em.Plan.offload(),
        "ddp": em.Plan.ddp(),
        "disk": em.Plan.offload(disk_chunks=1, disk="/tmp"),
    }
    lost = []
    torch.manual_seed(0)
    for name, plan in plans.items():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model, optimizer = em.wrap(
            model, torch.optim.AdamW(model.parameters()), plan=plan, compute_dtype=torch.bfloat16
        )
        given = {"weight": torch.randn(4, 4, dtype=torch.float64).float(), "bias": torch.randn(4)}
        model[1].load_state_dict(given)
        found = em.full_state_dict(model, all_ranks=True)
        seen = model[1].weight.detach()
        if not all(torch.equal(found[f"1.{key}"], value) for key, value in given.items()):
            lost.append(name)
        if not torch.equal(torch.as_tensor(seen.tolist()), given["weight"].bfloat16().float()):
            lost.append(f"{name}, in forward")
        optimizer.close()
    return lost


@pytest.mark.parametrize("world", [1, 2])
def test_a_state_loaded_into_a_submodule_keeps_its_bits(world: int, ranks: Ranks) -> None:
    assert ranks(world).run(loaded_into_a_submodule) == [[]] * world
