"""DeepSpeed's bytes in the blog, and its conclusion: each figure is met, and the document has it."""

from pathlib import Path

import pytest

from benchmarks.paper_blog import compared

DOCUMENT = (Path(__file__).parents[2] / "docs" / "paper_figures.md").read_text()


def test_the_blogs_figures_are_met() -> None:
    rows = list(compared())
    assert len(rows) == 5
    assert max(abs(ours / printed - 1) for _, printed, ours in rows) == pytest.approx(0.033, abs=0.0005)
    for what, printed, ours in rows:
        assert f"| {what} | {printed} | {ours:.4g} | {ours / printed - 1:+.1%} |" in DOCUMENT
