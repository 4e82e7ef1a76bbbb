"""The layers of HTMS, Table 1: the program's figures, and the document has them."""

from pathlib import Path

import pytest

from benchmarks.paper_htms import LEFT_GB, PRINTED_GB, compared

DOCUMENT = (Path(__file__).parents[2] / "docs" / "paper_figures_more.md").read_text()


def test_the_layers_of_table_1() -> None:
    rows = compared()
    assert [row["our_head"] for row in rows] == [row["head"] for row in rows] == [96, 96, 128, 128]
    assert max(abs(row["gb"] / PRINTED_GB - 1) for row in rows) == pytest.approx(0.59, abs=0.005)
    assert max(row["next_gb"] for row in rows) < LEFT_GB
    for row in rows:
        error = row["gb"] / PRINTED_GB - 1
        figures = f"{row['parameters'] / 1e9:.2f} | {row['gb']:.1f} | {error:+.1%} | {row['next_gb']:.1f}"
        token = f"{row['printed_bytes_of_width']:.1f} | {row['bytes_of_width']:.1f}"
        assert f"| {row['name']} | {row['head']} | {row['our_head']} | {figures} | {token} |" in DOCUMENT, row


def test_parameters_are_those_of_the_formula() -> None:
    """Attention 4 h², an MLP of four times the width 8 h², and biases and norms of 13 h."""
    shapes = ((12, 768), (24, 1536), (32, 4096), (32, 8192))
    assert [row["parameters"] for row in compared()] == [n * (12 * h * h + 13 * h) for n, h in shapes]
