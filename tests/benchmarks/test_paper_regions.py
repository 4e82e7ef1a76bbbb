"""Tiles against the paper's rule for a checkpointed region that needs more than the blocks of the device."""

from pathlib import Path

import pytest
import torch

from benchmarks.paper_regions import compared, least_bytes, without_holds
from elixir_moe.chunks.plan import size_text
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.trace import trace
from elixir_moe.wrapping.tiling import tile
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, lm_loss

DOCUMENT = (Path(__file__).parents[2] / "docs" / "design" / "papers.md").read_text()


def small(*, tiled: bool) -> Profile:
    """A step of two checkpointed layers, whose four matrices have a chunk each, or eight."""
    config = GPTConfig(vocab_size=8, seq_len=16, n_layers=2, d_model=32, n_heads=2, checkpoint="non_reentrant")
    with torch.device("meta"):
        model = GPT(config)
    if tiled:
        tile(model, at_most=4 * max(p.numel() for p in model.parameters()) // 8)
    return trace(model, lm_loss, torch.zeros(1, 17, dtype=torch.int64), world=1, compute_dtype=torch.bfloat16)


def test_tiles_need_less_memory_than_the_papers_rule() -> None:
    whole = small(tiled=False)
    in_tiles, refetched = least_bytes(small(tiled=True)), least_bytes(without_holds(whole))
    assert in_tiles < refetched < least_bytes(whole)


@pytest.mark.slow
def test_the_document_has_the_figures_of_the_models() -> None:
    for row in compared():
        sizes = " | ".join(map(size_text, (row.whole_bytes, row.refetched_bytes, row.tiled_bytes)))
        steps = " | ".join(f"{tiles / rule - 1:+.1%}" for rule, tiles in (row.tightest, row.widest))
        assert f"| {row.model} | {sizes} | {steps} |" in DOCUMENT
