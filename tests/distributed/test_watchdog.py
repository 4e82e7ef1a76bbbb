"""One thread watches the waits of a rank, and in a run its peers too."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from elixir_moe.distributed import watchdog
from elixir_moe.distributed.waits import RankWait, Wait, deadlock_of
from elixir_moe.distributed.watchdog import Watchdog


def test_the_thread_that_looks_after_a_run_warns_of_its_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    said, thread = threading.Event(), []

    def warn(text: str, **_: Any) -> None:
        thread.append((text, threading.current_thread().name))
        said.set()

    monkeypatch.setattr(watchdog._THREAD, "seconds", 0.001)
    monkeypatch.setattr(watchdog, "_RUN_LOOK_SECONDS", 0.001)
    monkeypatch.setattr("warnings.warn", warn)
    with Watchdog(dist.HashStore(), 0, 2, 60.0, pytest.fail), Wait("a gather", [0, 1]):
        assert said.wait(60)
        names = {t.name for t in threading.enumerate() if t.name.startswith("elixir-")}
    assert names == {"elixir-waits", "elixir-waits-store"}
    text, name = thread[0]
    assert "rank 0 has waited for 0.001 s in a gather" in text and "Last seen: rank 1 nowhere yet" in text
    assert name == "elixir-waits"


def test_a_rank_that_stands_in_one_step_for_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_RUN_LOOK_SECONDS", 0.001)
    monkeypatch.setattr(watchdog, "_GRACE_SECONDS", 0.0)
    ended, reasons, store = threading.Event(), list[str](), dist.HashStore()
    with Watchdog(store, 0, 2, 0.0, lambda reason: (reasons.append(reason), ended.set())[1]) as dog:
        dog.at("step 3")
        assert ended.wait(60)
    assert reasons[0].startswith("step 3 has taken 0 s, at ")
    assert "rank 1 is stopped or dead; it was last seen in" in reasons[0]
    assert store.get("run 1 failed").decode().startswith("rank 0 has failed: step 3 has taken 0 s")


def test_a_rank_hears_of_a_deadlock_of_ranks_that_are_in_no_collective_with_it() -> None:
    """Rank 2 waits for rank 0, which waits for rank 1, and that for rank 0."""
    store = dist.HashStore()
    places = [
        RankWait("gather 2", (0, 1), "gather", 2, {"gather": 2, "norm": 0, "exchange": 0}),
        RankWait("norm 1", (0, 1), "norm", 1, {"gather": 1, "norm": 1}),
        RankWait("exchange 1", (0, 2), "exchange", 1, {"exchange": 1}),
    ]
    lines = [watchdog._Line(store, "a name", rank, 3) for rank in range(3)]
    heard = [line.stand(place) for line, place in zip(lines, places, strict=True)]
    assert deadlock_of(0, heard[0]) == "", "the others had said nothing yet"
    assert "(3 ranks wait for each other)" in deadlock_of(2, heard[2])
    lines[1].move_on()
    assert deadlock_of(2, lines[2].stand(places[2])) == ""
    for line in lines:
        line.close()


class Stopped(dist.HashStore):  # type: ignore[misc]  # torch's stubs forget it
    """A store whose host stands still: it answers once the test is over."""

    over = threading.Event()

    def clone(self) -> "Stopped":
        return self

    def check(self, keys: list[str]) -> bool:
        return self.over.wait(60) and super().check(keys)


def test_a_run_whose_store_never_answers_ends_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_RUN_LOOK_SECONDS", 0.001), ("_GRACE_SECONDS", 0.0), ("_ANSWER_SECONDS", 0.001)):
        monkeypatch.setattr(watchdog, name, seconds)
    ended, reasons, store = threading.Event(), list[str](), Stopped()
    with Watchdog(store, 1, 2, 0.0, lambda reason: (reasons.append(reason), ended.set())[1]) as dog:
        dog.at("step 2")
        assert ended.wait(60)
        assert "does not answer: no answer within" in dog.explain()
        with pytest.raises(TimeoutError):
            dog.ask(lambda its: its.check(["x"]))
    assert reasons[0].startswith("step 2 has taken 0 s, ") and "does not answer" in reasons[0]
    store.over.set()
