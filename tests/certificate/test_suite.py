"""The certificate: what its rows cover, how it goes on where it stopped, how a changed file is noticed."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from elixir_moe.errors import ConfigError
from elixir_tools.names import PLANS
from elixir_tools.verify.training import SEED
from tests.certificate import suite
from tests.certificate.__main__ import main
from tests.certificate.families import FAMILIES, hashes
from tests.support.every import every

DOCS = Path(__file__).parents[2] / "docs"
FACTS = {"versions": {"torch": "2"}, "packages": {}, "commit": "abc"}


def test_the_rows_cover_what_they_say() -> None:
    rows = suite.rows()
    axes: dict[str, Any] = {"family": FAMILIES, "plan": PLANS, "mode": suite.MODES}
    assert len(rows) == len({row.name for row in rows}) == 12 * 6 * 3
    first = rows[: len(rows) // 3]
    for one, other in (("family", "plan"), ("family", "mode"), ("plan", "mode")):
        pairs = {(getattr(row, one), getattr(row, other)) for row in first}
        assert len(pairs) == len(axes[one]) * len(axes[other])
    ways = {(row.checkpointing, row.accumulation, row.ranks) for row in rows}
    assert len(ways) == 2 * 2 * 3
    for axis, values in axes.items():
        met = {(getattr(row, axis), row.checkpointing, row.accumulation, row.ranks) for row in rows}
        assert len(met) == len(values) * len(ways)


def run(file: Path, rows: list[suite.Row], **options: Any) -> tuple[dict[str, Any], list[str]]:
    ran: list[str] = []
    content = suite.run_suite(rows, file, options.pop("facts", FACTS), 1, lambda a: ran.append(a["row"]), **options)
    return content, ran


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, rows, fails = tmp_path / "certificate.json", suite.rows()[:4], [suite.rows()[1].name]

    def answer(row: suite.Row) -> dict[str, Any]:
        if row == rows[3] and fails:
            raise KeyboardInterrupt
        return {"row": row.name, "ok": row.name not in fails, "first": "somewhere", "checks": {}, "seconds": 1.0}

    monkeypatch.setattr(suite, "run_row", answer)
    with pytest.raises(KeyboardInterrupt):
        run(file, rows)
    assert [one["row"] for one in suite.read(file)["rows"]] == [row.name for row in rows[:3]]
    fails.clear()
    content, ran = run(file, rows)
    assert ran == [rows[1].name, rows[3].name]
    assert every(one["ok"] and one["commit"] == "abc" for one in content["rows"])
    assert len(content["not run"]) == len(suite.rows()) - 4
    assert run(file, rows)[1] == []
    assert run(file, rows[:1], again=True)[1] == [rows[0].name]
    assert len(run(file, rows, facts=FACTS | {"versions": {"torch": "3"}})[1]) == 4
    assert len(run(file, rows[:1], facts=FACTS | {"versions": {"torch": "3"}}, fresh=True)[0]["rows"]) == 1


def test_a_changed_file_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "certificate.json"
    content = json.loads((DOCS / "certificate.json").read_text())
    suite.write(file, content)
    assert suite.read(file)["digest"] == content["digest"]
    assert main(["--check", str(file)]) == int(any(not row["ok"] for row in content["rows"]))
    content["rows"][0]["checks"]["loss"][0] += 1e-9
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="has been changed since it was written"):
        suite.read(file)
    assert main(["--check", str(file)]) == 2
    assert "has been changed" in capsys.readouterr().err
    assert main(["--check", str(tmp_path / "nothing")]) == 2
    assert "cannot be read as a certificate" in capsys.readouterr().err


def test_a_name_that_no_row_has_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "gwen*"]) == 2
    assert "matches no row" in capsys.readouterr().err


def test_the_page_is_made_from_the_file() -> None:
    content = suite.read(DOCS / "certificate.json")
    made = suite.page(content, "certificate.json")
    assert (DOCS / "certificate.md").read_text() == made, "run: make certificate"


def test_inputs_are_those_of_the_file() -> None:
    """Whatever the machine that wrote it."""
    answers = {one["row"]: one["inputs"] for one in suite.read(DOCS / "certificate.json")["rows"] if "inputs" in one}
    row = next(row for row in suite.rows() if row.name in answers)
    assert asdict(hashes(row.source(), SEED)) == answers[row.name]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 30, 60])
def test_a_row_is_equal(tmp_path: Path, number: int) -> None:
    name = suite.rows()[number].name
    out = tmp_path / "certificate.json"
    assert main(["--quiet", "--only", name, "--jobs", "1", "--out", str(out)]) == 0
    answer = suite.read(out)["rows"][0]
    assert answer["row"] == name
    assert {"loss", "gradients", "exported weights", "outputs after the export"} <= set(answer["checks"])
    assert name in out.with_suffix(".md").read_text()
