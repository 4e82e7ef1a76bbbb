"""Save and load of wrapped models: exact under every layout, exact over a resume, all ranks failing together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_moe as em
from elixir_moe.state.checkpoint.storage import latest, read_manifest
from elixir_tools.cli.main import main
from tests.support.checkpoint_cases import (
    SHAPES,
    assert_same,
    beside_training,
    buffers,
    dying,
    everything,
    held_back,
    load_and_save,
    refused,
    sliced,
    train_and_save,
    unbroken_and_resumed,
    unlike_buffers,
    updates_under_way,
)
from tests.support.every import every
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
LAYOUTS = [
    (2, 2, "ddp"),
    (3, 1, "zero3"),
    (1, 1, "offload"),
    (2, 1, "zero2"),
    (4, 2, "zero3"),
    (4, 1, "offload"),
    (2, 2, "disk"),
]
"""(ranks, ep, plan), each loading what the one before has saved; 4 -> 2 -> 3 -> 1 ranks, ep 4 -> 2 -> 1 -> 2 -> 1."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, ranks: Ranks) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("checkpoints") / "start"
    return path, ranks(4).run(train_and_save, path, 4, "zero3", 3)[0]


@pytest.mark.fault(10, 11, 12)
def test_any_layout_loads_what_any_other_saved(trained: tuple[Path, dict[str, Any]], ranks: Ranks) -> None:
    """Fault 10, 11, 12: parameters, moments and numbers of updates are the same to the bit after every move."""
    path, state = trained
    first = everything(path)
    for name, value in state.items():
        if name != "head.weight":
            assert_same({name: first[f"{name} weight"]}, {name: value}, "weights")
    losses = None
    for world, ep, plan in LAYOUTS:
        target = path.parent / f"{world}-{ep}-{plan}"
        found = ranks(world).run(load_and_save, path, target, ep, plan, 1 if world != 3 else 0)[0]
        assert_same(everything(target), first, target.name)
        if found:
            losses = losses or found
            assert found == pytest.approx(losses, rel=1e-6), target.name  # fp32 sums of the loss in another order
        path = target


@pytest.mark.parametrize(
    ("world", "first", "second"),
    [
        (2, {"ep": 2, "plan": "zero3", "dropout": 0.1, "clip": 0.5}, {}),
        (2, {"ep": 1, "plan": "zero2", "dropout": 0.1}, {"ep": 1, "plan": "offload", "dropout": 0.1}),
        (1, {"ep": 1, "plan": "zero3", "dropout": 0.1}, {"ep": 1, "plan": "ddp", "dropout": 0.1}),
    ],
    ids=["same plan, clipped", "another plan", "another plan, one rank"],
)
@pytest.mark.fault(12, 38, 39)
def test_a_resumed_run_is_the_unbroken_one(
    world: int, first: dict[str, Any], second: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    """Faults 38, 39, 12: bit for bit, dropout, LR schedule and all. (The norm of clipping is a sum over shards, whose
    rounding a plan may change: so there is no clipping where the plan changes.)
    """
    for found in ranks(world).run(unbroken_and_resumed, tmp_path, first, second or first):
        assert found["resumed"] == found["unbroken"]
    assert_same(everything(tmp_path / "resumed"), everything(tmp_path / "unbroken"), "the last step")


@pytest.mark.fault(11, 27)
def test_slices_along_any_dim_are_one_parameter(ranks: Ranks, tmp_path: Path) -> None:
    """Fault 11: tp 1 <-> 2, inside experts too, a dim that two axes cut, and parameters of no dim and no element."""
    ranks(4).run(sliced, None, tmp_path / "0", 2, 2, "zero3")
    first = everything(tmp_path / "0")
    assert every(first[f"{name} updates"] == 2 for name, shape in SHAPES.items() if 0 not in shape)
    assert first["both exp_avg"].shape == (4, 4, 2) and first["one weight"].shape == ()
    for i, (world, ep, tp, plan) in enumerate(
        [(2, 1, 2, "ddp"), (4, 4, 1, "zero2"), (1, 1, 1, "zero3"), (2, 2, 1, "zero3")]
    ):
        ranks(world).run(sliced, tmp_path / str(i), tmp_path / str(i + 1), ep, tp, plan)
        assert_same(everything(tmp_path / str(i + 1)), first, f"{world} ranks, ep {ep}, tp {tp}, {plan}")


@pytest.mark.fault(11)
def test_experts_with_different_numbers_of_updates_keep_their_degree(ranks: Ranks, tmp_path: Path) -> None:
    """Fault 11: what one optimizer state cannot serve is refused before loading."""
    ranks(2).run(sliced, None, tmp_path / "0", 2, 1, "zero3", uneven=True)
    ranks(2).run(sliced, tmp_path / "0", tmp_path / "1", 2, 1, "ddp", uneven=True)
    before, after = (read_manifest(tmp_path / name).parameters["twice"].pieces for name in "01")
    assert [p.scalars for p in before] == [p.scalars for p in after] == [{"updates": 2}, {"updates": 3}]
    for text in ranks(2).run(sliced, tmp_path / "0", tmp_path / "2", 1, 1, "ddp", uneven=True):
        assert "'twice' have had different numbers of updates" in text and "degree of expert parallelism" in text


def test_replicated_weights_are_written_once_and_by_all(trained: tuple[Path, dict[str, Any]]) -> None:
    for path in (trained[0], trained[0].parent / "2-2-ddp"):
        if path.exists():
            manifest = read_manifest(path)
            sizes = [record.nbytes for record in manifest.files.values()]
            kept = sum(entry.numel * (12 if entry.trainable else 4) for entry in manifest.parameters.values())
            assert kept < sum(sizes) < kept + 40_000, "and the headers"
            assert max(sizes) < 1.3 * min(sizes)


@pytest.mark.fault(3, 7)
def test_a_save_beside_the_training_holds_the_moment_it_began(ranks: Ranks, tmp_path: Path) -> None:
    """Faults 3 and 7: a writer that fails is an error of all ranks at the next poll, and the next save works."""
    for found in ranks(2).run(beside_training, tmp_path):
        for error in (found["error"], found["synchronous"]):
            assert "[rank 1]" in error and "File too large" in error
        assert found["left"] == ["at-once", "beside"]
    assert [path.name for path in tmp_path.iterdir()] == ["next"]
    assert latest(tmp_path) == tmp_path / "next"


@pytest.mark.parametrize(("ep", "plan"), [(2, "zero3"), (1, "ddp")])
def test_what_comes_after_a_save_has_begun_is_not_in_it(ep: int, plan: str, ranks: Ranks, tmp_path: Path) -> None:
    """Updates and writes of users, of chunks that are gathered and of those used in place, before the copying began."""
    ranks(2).run(held_back, tmp_path, ep, plan)


@pytest.mark.parametrize("copies_late", [False, True])
@pytest.mark.parametrize("disk_chunks", [0, 2])
def test_a_save_beside_the_training_waits_for_no_update(
    disk_chunks: int, copies_late: bool, ranks: Ranks, tmp_path: Path
) -> None:
    """It returns while they are under way; the checkpoint has them, and nothing of what came after the call."""
    plan = em.Plan.offload(rcache_blocks="all", disk_chunks=disk_chunks, chunk_numel=32)
    ranks(2).run(updates_under_way, tmp_path, plan, copies_late)


@pytest.mark.fault(7, 8, 30)
def test_what_is_refused_is_refused_on_all_ranks_and_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Faults 7, 8 and 30."""
    said = {
        "exists": "good exists: save under another name",
        "paths": "ranks disagree about the directory of the checkpoint: ",
        "extra": "ranks disagree about extra, by its hash: ",
        "one rank's extra": "[rank 1] extra is a type",
        "missing": "none: no such checkpoint",
        "asynchronous": "asynchronous: it is False on rank 0, True on rank 1",
        "gradients": "gradients wait for a step",
        "damaged": "good/rank-00001.safetensors is damaged",
    }
    results = ranks(2).run(refused, tmp_path)
    assert results[0] == results[1]
    for what, text in said.items():
        assert text in results[0][what], what
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def test_a_buffer_of_another_shape_on_each_rank_is_refused_by_the_save(ranks: Ranks, tmp_path: Path) -> None:
    """No load could read it."""
    for message in ranks(2).run(unlike_buffers, tmp_path):
        assert message.startswith("ranks disagree about the buffers: queue is torch.float32 of shape (2,) on rank 0")
    assert not list(tmp_path.iterdir())


def test_each_rank_gets_its_own_buffers_and_random_numbers_back(
    ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, loaded = ranks(2).run(buffers, tmp_path, True), ranks(2).run(buffers, tmp_path, False)
    for (mean, drawn), (mean_again, drawn_again) in zip(saved, loaded, strict=True):
        assert torch.equal(mean, mean_again) and torch.equal(drawn, drawn_again)
    assert not torch.equal(saved[0][0], saved[1][0]) and not torch.equal(saved[0][1], saved[1][1])
    (mean, drawn), *others = ranks(4).run(buffers, tmp_path, False)
    assert torch.equal(mean, saved[0][0]) and torch.equal(others[1][0], mean), "a new rank has the first one's buffers"
    assert torch.equal(drawn, saved[0][1]) and not torch.equal(others[1][1], others[2][1]), "and numbers of its own"
    reshard = ["ckpt", "reshard", str(tmp_path / "norms"), str(tmp_path / "other"), "--files"]
    assert main([*reshard, "1"]) == 2 and "has 2 versions; give at least as many" in capsys.readouterr().err
    assert main([*reshard, "2"]) == 0


@pytest.mark.fault(1, 2)
def test_a_rank_that_dies_in_a_save_is_an_error_and_leaves_the_last_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """Faults 1 and 2."""
    with pytest.raises(RankError) as error:
        ranks(3).run(dying, tmp_path)
    assert error.value.types == {0: "ElixirError", 1: "Died", 2: "ElixirError"}
    assert latest(tmp_path, fall_back=True) == tmp_path / "good"
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
