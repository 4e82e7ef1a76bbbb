"""`make gpu-proof` on a GPU that is lent for fifteen minutes: all of its steps in their order, by a simulated clock.

The steps, their limits, the loop, the journal and the page are the real ones. Each step is charged a time and reports
figures: those of benchmarks/results/nvidia-h200 where it ran there, else those of its like.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.proof import __main__ as proof
from benchmarks.proof.plan import build_step, compared, steps
from benchmarks.proof.steps import FAILED, GOOD, LEFT_OUT, OVER_LIMIT, Journal, Step
from tests.support.every import every

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "nvidia-h200"
LINES = [json.loads(line) for path in sorted(RESULTS.glob("*.jsonl")) for line in path.read_text().splitlines()]
MEASURED = {line["step"]: line for line in LINES if line["outcome"] == GOOD}
LEASE, STARTED, CARRIED = 900.0, 100.0, 60.0
"""Seconds of the lease, of the start of the machine, and of carrying results away at its end."""
FIRST_CALL = 400.0
"""Seconds of the first command, as docs/gpu.md gives them; a second takes what is left."""
OTHERS = 30.0
"""Seconds of a step that has not been measured."""
FOREVER = float("inf")
OURS, PEER = "bench gpt2-5.5b ours x1", "bench gpt2-5.5b fsdp2-offload x1"
FIRST = "build", "first parity", OURS, PEER


@dataclass
class Lease:
    """A lent GPU and its clock."""

    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    """{step: what it takes, in place of what was measured}."""
    dies: set[str] = field(default_factory=set)
    lacks: tuple[str, ...] = ()
    now: float = STARTED
    ran: dict[str, tuple[float, float]] = field(default_factory=dict)
    """{step: when its last run began and ended}, in order."""

    def call(self, seconds: float) -> int:
        """One command of at most so many seconds."""
        code = proof.main(["--out", str(self.folder), "--seconds", str(seconds)])
        self.check_disk()
        return code

    def both_calls(self) -> tuple[int, int]:
        """The two commands that fit in the lease."""
        return self.call(FIRST_CALL), self.call(LEASE - CARRIED - self.now)

    def run(self, step: Step, log: Path, limit: float) -> dict[str, Any]:
        """Takes the place of `steps.run`."""
        if step.name != "build":
            self.check_disk()
        if step.left_out is not None:
            return self._result(step, LEFT_OUT, {"left_out": step.left_out})
        takes = self.seconds.get(step.name, MEASURED.get(step.name, {"seconds": OTHERS})["seconds"])
        begin, self.now = self.now, self.now + min(takes, limit)
        self.ran[step.name] = begin, self.now
        outcome = OVER_LIMIT if takes > limit else FAILED if step.name in self.dies else GOOD
        figures = self._figures(step.name) if outcome == GOOD else None
        return self._result(step, outcome, figures, self.now - begin)

    def check_disk(self) -> None:
        """The results of all steps that have ended are on disk, and on the page once one of them came behind it."""
        found, page = self.journal.results, (self.folder / "proof.md")
        assert found.keys() >= self.ran.keys()
        if len(self.ran) > 1:
            assert every(f"| {name} | {result['outcome']} |" in page.read_text() for name, result in found.items())

    @property
    def journal(self) -> Journal:
        """The results that are on disk."""
        return Journal(self.folder / "results.jsonl", MEASURED["build"]["device"])

    def of_ours(self) -> float | None:
        """The first ratio that the results on disk give."""
        row = compared(self.journal, "gpt2-5.5b", "fsdp2-offload", 1)
        return None if row is None else row.get("of_ours")

    def _result(self, step: Step, outcome: str, figures: dict[str, Any] | None, seconds: float = 0.0) -> dict[str, Any]:
        found = {"step": step.name, "outcome": outcome, "seconds": seconds, "figures": figures, "tail": ""}
        return found | {"exit": {GOOD: 0, FAILED: 1}.get(outcome)}

    def _figures(self, name: str) -> dict[str, Any]:
        like = next((known for known in (name, OURS if " ours " in name else PEER) if known in MEASURED), name)
        if name.endswith(" x8"):
            like = "bench gpt2-5.5b-24g ours x8"
        if name.startswith("plain"):
            like = "plain gpt2-5.5b"
        if name.startswith("trace"):
            return {"trace": f"{name}.json.gz", "summary": ["kernels run for 1 ms"]}
        figures: dict[str, Any] = MEASURED[like]["figures"] or {}
        return figures | ({"lacks": list(self.lacks)} if name == "build" else {})


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Lease]:
    """A lent GPU that has just started."""
    directory, found = Path.cwd(), Lease(tmp_path / "out")
    monkeypatch.setattr(proof, "time", SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(proof, "run", lambda step, log, limit: found.run(step, log, limit))
    monkeypatch.setattr(proof, "HERE", tmp_path / "here")
    monkeypatch.delenv("OUT", raising=False)
    yield found
    os.chdir(directory)


def planned(lease: Lease) -> dict[str, Step]:
    """All steps but the build, in order."""
    machine = MEASURED["build"]["figures"] | {"lacks": list(lease.lacks)}
    return {step.name: step for step in steps(lease.folder, machine, {})}


def test_a_ratio_exists_before_six_minutes_and_all_is_in_order(
    lease: Lease, capsys: pytest.CaptureFixture[str]
) -> None:
    lease.call(FIRST_CALL)
    order = list(lease.ran)
    assert tuple(order[: len(FIRST)]) == FIRST
    assert order[1:] == [name for name in planned(lease) if name in lease.ran], "in the order of their worth"
    assert lease.ran[PEER][1] < 360 and 0 < (lease.of_ours() or 0) < 1
    left_out = capsys.readouterr().out.rpartition("no time was left for ")[2].partition(": call again")[0].split(", ")
    assert left_out == [name for name in planned(lease) if name in left_out]
    untold = planned(lease).keys() - lease.ran.keys() - {*left_out}
    assert every(name.startswith("trace ") for name in untold), "which are wanted where ours is too slow"
    lease.call(LEASE - CARRIED - lease.now)
    assert lease.now <= LEASE - CARRIED
    assert list(lease.ran).count("first parity") == 1 and lease.ran["first parity"][1] < FIRST_CALL, "not run again"
    assert {"rates", "tests", "sanitizer", "decoding", "bench qwen3-30b-a3b-lora fsdp2-offload x1"} <= {*lease.ran}


@pytest.mark.parametrize("name", ["first parity", OURS, PEER, "rates", "tests", "sanitizer"])
@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_a_step_that_hangs_or_dies_costs_no_more_than_its_limit(name: str, how: str, lease: Lease) -> None:
    lease.seconds |= {name: FOREVER} if how == "hangs" else {}
    lease.dies |= {name} if how == "dies" else set()
    lease.both_calls()
    begin, end = lease.ran[name]
    assert round(end - begin, 6) <= planned(lease)[name].seconds
    assert lease.journal.results[name]["outcome"] in ({OVER_LIMIT} if how == "hangs" else {FAILED, OVER_LIMIT})
    assert lease.now <= LEASE - CARRIED
    others = {"first parity", OURS, PEER, "rates", "tests"} - {name}
    assert every(lease.journal.is_good(other) for other in others)
    if name != OURS and name != PEER:
        assert lease.of_ours()


def test_a_ratio_comes_in_time_where_correctness_cannot_be_shown(lease: Lease) -> None:
    lease.seconds["first parity"] = FOREVER
    lease.call(FIRST_CALL)
    assert lease.ran[PEER][1] < 360 and lease.of_ours()


def test_every_step_may_hang(lease: Lease) -> None:
    """Each costs its limit, and the calls end when they must."""
    lease.seconds = dict.fromkeys(planned(lease), FOREVER)
    assert lease.both_calls() == (3, 3)
    assert lease.now <= LEASE - CARRIED
    limits = {name: step.seconds for name, step in planned(lease).items()}
    assert every(round(end - begin, 6) <= limits.get(name, 180) for name, (begin, end) in lease.ran.items())


def test_a_build_that_hangs_costs_its_limit(lease: Lease, capsys: pytest.CaptureFixture[str]) -> None:
    lease.seconds["build"] = FOREVER
    assert proof.main(["--out", str(lease.folder), "--seconds", str(FIRST_CALL)]) == 1
    assert lease.now - STARTED == build_step(lease.folder, None).seconds < FIRST_CALL
    assert "the build told no figures" in capsys.readouterr().err


def test_what_lacks_a_package_is_left_out_by_name_and_costs_nothing(lease: Lease) -> None:
    lease.lacks = ("deepspeed", "transformers")
    lease.both_calls()
    left_out = {name for name, result in lease.journal.results.items() if result["outcome"] == LEFT_OUT}
    assert left_out == {name for name in planned(lease) if "deepspeed" in name or "qwen3" in name} - {
        "trace qwen3-30b-a3b-lora"
    }
    assert not left_out & lease.ran.keys()


def test_a_step_is_not_begun_with_less_than_a_quarter_of_its_limit(
    lease: Lease, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a limit of 150 s, 37 are left for ours and for FSDP2; a shorter step is begun."""
    lease.seconds |= {"build": 10.0, "first parity": 80.0}
    assert lease.call(10.0 + 80.0 + 37.0) == 3
    assert list(lease.ran) == ["build", "first parity", "rates"]
    said = capsys.readouterr().out
    assert f"no time was left for {OURS}, {PEER}, rates, " in said, "rates were begun, and cut off"
