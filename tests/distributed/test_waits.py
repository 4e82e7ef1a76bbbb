"""Ranks that wait for each other say so: who waits for what. No clock decides anything."""

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import elixir_moe as em
from elixir_moe.distributed.waits import RankWait, Series, Turn, Wait, Waits, deadlock_of
from elixir_moe.distributed.watchdog import others_in_words
from tests.faults.test_elastic import environment
from tests.support.every import every
from tests.support.programs import Program

PROGRAM = str(Path(__file__).parents[1] / "support" / "wait_program.py")
SECONDS = "0.4"


class Rank(Program):
    """A process of `tests.support.wait_program`."""

    def __init__(self, rank: int, port: int) -> None:
        where = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        super().__init__(PROGRAM, environment=environment(**where, ELIXIR_WAIT_SECONDS=SECONDS))

    def tell(self, line: str) -> None:
        """Begins a verb."""
        print(line, file=self.stdin, flush=True)

    def answer(self, verb: str) -> str:
        """What came of it."""
        name, _, text = self.stdout.readline().strip().partition(" ")
        assert name == verb, (name, text, self.ended and self.stderr.read())
        return text

    def warning(self, text: str) -> str:
        """The next one with `text` in it: on a busy machine the start takes long, too."""
        for line in self.stderr:
            assert "failed on rank" not in line, line
            if "has waited" in line and text in line:
                return line
        raise AssertionError("the process ended without a warning")


Pair = tuple[Rank, Rank]


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[[], Pair]]:
    """Two ranks in step, started anew if one has ended."""
    ranks: list[Rank] = []

    def end() -> None:
        for rank in ranks:
            rank.close()
        ranks.clear()

    def get() -> Pair:
        if not ranks or any(rank.ended for rank in ranks):
            end()
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            ranks.extend(Rank(rank, port) for rank in range(2))
            for rank in ranks:
                rank.answer("ready")
        return ranks[0], ranks[1]

    yield get
    end()


@pytest.fixture
def pair(start: Callable[[], Pair]) -> Pair:
    return start()


def both(pair: Pair, *verbs: str) -> list[str]:
    """What comes of each verb, the same on both."""
    found = []
    for verb in verbs:
        for rank in pair:
            rank.tell(verb)
        answers = [rank.answer(verb) for rank in pair]
        assert answers[0] == answers[1]
        found.append(answers[0])
    return found


def test_a_rank_that_runs_a_forward_alone_says_so_and_loses_nothing(pair: Pair) -> None:
    both(pair, "again", "train")
    pair[0].tell("evaluate")
    said = pair[0].warning("gather")
    assert f"rank 0 has waited for {SECONDS} s in gather " in said and "ranks 0, 1, that of chunk 0 (0.weight" in said
    assert "Reported by rank 1: no wait of the library. " in said
    pair[1].tell("evaluate")
    late = [rank.answer("evaluate") for rank in pair]
    found = both(pair, "train", "evaluate")
    both(pair, "again", "train")
    assert late == both(pair, "evaluate") * 2
    assert found == both(pair, "train", "evaluate")


def test_a_wait_for_a_rank_that_was_killed_fails_with_what_it_had_reported(pair: Pair) -> None:
    """And the other ends as ever."""
    both(pair, "again", "train", "train")  # another gather: Python shows a warning of equal words once
    pair[1].tell("barrier")
    pair[0].tell("evaluate")
    assert "Reported by rank 1: no wait of the library. " in pair[0].warning("gather")
    pair[1].kill()
    error = pair[0].answer("evaluate")
    assert error.startswith("ElixirError: gather ") and "over ranks 0, 1, that of chunk 0 (0.weight" in error
    assert "failed on rank 0" in error and "Reported by rank 1: no wait of the library. " in error
    pair[0].stdin.close()
    assert pair[0].wait(60) == 0, pair[0].stderr.read()


def test_a_late_rank_is_told_what_the_others_wait_in() -> None:
    mine = RankWait("gather 2", (0, 1, 2, 3), "gather", 2, {"gather": 2})
    standing = {0: mine, 1: RankWait("norm 1", (0, 1), "norm", 1, {}), 2: RankWait("norm 1", (2, 3), "norm", 1, {})}
    assert others_in_words(mine, 0, standing) == (
        "Reported by ranks 1, 2: in norm 1. Reported by rank 3: no wait of the library. "
    )


@pytest.mark.parametrize(
    ("verbs", "said"),
    [
        (
            ("evaluate", "clip"),
            r"rank 0 waits in gather \d+ over ranks 0, 1, that of chunk 0 \(0\.weight, 0\.bias\), which rank 1 has not "
            r"begun: it waits in the all-reduce of the gradient norm over all ranks\. ",
        ),
        (
            ("train", "train_nothing"),
            r"rank 0 waits in the agreement on a backward, which rank 1 has not begun: it waits in the all-reduce of "
            r"the gradient norm over all ranks\. ",
        ),
        (
            ("train_twice", "train_once"),
            r"rank 0 waits in gather \d+ over ranks 0, 1, that of chunk 0 \(0\.weight, 0\.bias\), which rank 1 has not "
            r"begun: it waits in .*\. ",
        ),
        (
            ("train_mixture", "train_mixture detached"),
            r"rank 0 waits in an exchange of tokens with the experts, which rank 1 has not begun: it waits in .*\. ",
        ),
    ],
)
def test_ranks_that_wait_for_each_other_end_at_once_and_say_the_same(
    verbs: tuple[str, str], said: str, pair: Pair
) -> None:
    """Long before the process groups' timeout of a minute: a gather against an exchange, and losses that depend on
    nothing on one rank, on fewer runs of a module, or not on a mixture."""
    both(pair, "again", "train")
    for rank, verb in zip(pair, verbs, strict=True):
        rank.tell(verb)
    found = [rank.answer(verb.split()[0]) for rank, verb in zip(pair, verbs, strict=True)]
    assert found[0] == found[1]
    assert re.match(f"OutOfStepError: {said}Every rank must call the same modules", found[0]), found
    for rank in pair:
        rank.close()


def test_only_ranks_that_wait_for_each_other_are_in_a_deadlock() -> None:
    def at(series: str, number: int, **issued: int) -> RankWait:
        return RankWait(f"{series} {number}", (0, 1, 2), series, number, issued)

    crossed = {0: at("gather", 2, gather=2, norm=0), 1: at("norm", 1, gather=1, norm=1)}
    for mine in (0, 1):
        assert deadlock_of(mine, crossed).startswith(
            "rank 0 waits in gather 2, which rank 1 has not begun: it waits in norm 1"
        )
    # A third rank that waits for one of them cannot go on either; one that only comes late may.
    assert "3 ranks wait for each other" in deadlock_of(2, crossed | {2: at("gather", 3, gather=3, norm=1)})
    assert deadlock_of(2, crossed | {2: at("gather", 1, gather=1, norm=1)}) == ""
    # Both have issued what the other waits for: a third rank is late.
    assert deadlock_of(0, {0: at("gather", 2, gather=2, norm=1), 1: at("norm", 1, gather=2, norm=1)}) == ""
    # A circle of three.
    circle = {0: at("a", 1, a=1, b=1, c=0), 1: at("b", 1, a=0, b=1, c=1), 2: at("c", 1, a=1, b=0, c=1)}
    assert every("3 ranks" in deadlock_of(mine, circle) for mine in circle)
    assert deadlock_of(0, {0: circle[0], 1: circle[1]}) == ""
    # A series that the other does not know may be one that it has not made yet.
    assert deadlock_of(0, {0: at("gather", 2, gather=2, norm=0), 1: at("norm", 1, norm=1)}) == ""


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan"])
def test_a_period_that_is_none_is_refused(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELIXIR_WAIT_SECONDS", seconds)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(em.ConfigError, match=rf"ELIXIR_WAIT_SECONDS='{seconds}'.*inf for never"):
        em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.ddp())


def test_a_rank_whose_models_train_on_threads_of_their_own_is_in_no_deadlock() -> None:
    """A wait of one thread does not keep another one from what the other ranks wait for."""
    waits = Waits()
    turn = Turn(Series("gathers", (0, 1), lambda: None), 1)
    waits.callers = {1}
    assert waits.rank_wait(Wait("gather 1", (0, 1), turn), 2) is not None
    plain = waits.rank_wait(Wait("a comparison", (0, 1)), 2)
    assert plain is not None and not deadlock_of(0, {0: plain})
    waits.callers = {1, 2}
    assert waits.rank_wait(Wait("gather 1", (0, 1), turn), 2) is None
