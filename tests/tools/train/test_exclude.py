"""`--exclude` starts a run without the GPUs of some ranks, and events say which numbers those are."""

import os
from collections.abc import Sequence

import pytest

from elixir_moe import accelerator
from elixir_moe.errors import ConfigError
from elixir_tools.cli.arguments import parser_of
from elixir_tools.cli.ending import number_of_ranks
from elixir_tools.train.launch import place_here

GPUS = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four GPUs, and no ranks yet."""
    monkeypatch.setattr(accelerator, "count", lambda: 4)
    monkeypatch.setattr("elixir_moe.ext.accelerator.count", lambda: 4)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", GPUS, "ELIXIR_EXCLUDED", "ELIXIR_LAUNCHED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("before", "nproc", "excluded", "left"),
    [(None, 4, [2], "0,1,3"), (None, 3, [0, 2], "1,3"), ("5,4,7,6", 4, [1], "5,7,6"), ("a,b,c,d", 4, [0, 1, 2], "d")],
)
def test_ranks_start_on_the_other_gpus(
    before: str | None, nproc: int, excluded: Sequence[int], left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is not None:
        monkeypatch.setenv(GPUS, before)
    assert number_of_ranks(nproc, excluded) == nproc - len(excluded)
    assert os.environ[GPUS] == left
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(nproc - len(excluded)))
    monkeypatch.setenv("ELIXIR_LAUNCHED", "1")
    assert number_of_ranks(nproc, excluded) == nproc - len(excluded), "a rank that the launcher has started"
    assert os.environ[GPUS] == left


@pytest.mark.parametrize(
    ("rank", "excluded", "gpu", "next_time"), [(1, "", 1, "1"), (1, "1", 2, "1,2"), (0, "0,1", 2, "0,1,2")]
)
def test_a_place_has_the_number_for_the_next_start(
    rank: int, excluded: str, gpu: int, next_time: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "6"), ("LOCAL_RANK", str(rank)), ("ELIXIR_EXCLUDED", excluded)):
        monkeypatch.setenv(name, value)
    assert place_here("cuda").endswith(f", GPU {gpu}"), "torchrun has no such argument"
    monkeypatch.setenv("ELIXIR_LAUNCHED", "1")
    assert place_here("cuda").endswith(f", GPU {gpu}; --exclude {next_time} starts without it")
    assert place_here("cpu").endswith(", CPU")


@pytest.mark.parametrize(
    ("nproc", "excluded", "message"),
    [
        (2, [2], r"--exclude 2: expected some of the 2 ranks, from 0 to 1"),
        (2, [0, 1], r"--exclude 0,1: expected some of the 2 ranks, .* not all"),
        (None, [0], r"--exclude 0: expected some of the 1 ranks"),
        (8, [1], r"--exclude 1 leaves out the GPUs of ranks, and 8 ranks have 4 GPUs here: start fewer"),
    ],
)
def test_what_cannot_be_left_out_says_why(nproc: int | None, excluded: Sequence[int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        number_of_ranks(nproc, excluded)
    assert GPUS not in os.environ


def test_ranks_of_torchrun_are_started_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--exclude is for --nproc: hide the GPUs from torchrun"):
        number_of_ranks(None, [1])


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_the_argument_is_a_list(verb: str) -> None:
    known, _ = parser_of(None).parse_known_args([verb, "--nproc", "4", "--exclude", "3,1"])
    assert known.exclude == (1, 3)
