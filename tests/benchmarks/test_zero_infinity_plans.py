"""ZeRO-Infinity's Figures 6c to 6e by the planner, against the factors of the text."""

from pathlib import Path

import pytest

from benchmarks import paper_zero_infinity_plans as plans
from benchmarks.paper_zero_infinity_plans import Figure
from elixir_moe.planner import cost
from elixir_moe.planner.cost import Seconds
from tests.support.every import every

DOCUMENT = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
SECONDS = Seconds(
    compute=4.0, fetch=1.0, offload=0.5, collectives=2.0, exposed=0.4, device_update=0.1, host_update=0.2,
    disk_update=0.3,
)  # fmt: skip


def test_without_overlap_everything_follows_everything() -> None:
    assert plans.without_overlap(SECONDS) == pytest.approx(4.0 + 1.0 + 0.5 + 2.0 + 0.1 + 0.2 + 0.3)
    assert SECONDS.step == pytest.approx(4.0 + 0.4 + 0.1 + 0.2 + 0.3)


def line(one: Figure) -> str:
    return f"| {one.says} | {one.paper} | {one.planner:.2f} | {one.perfect:.2f} |"


@pytest.mark.slow
def test_the_document_has_each_figure_with_the_papers() -> None:
    found = {name: list(figures()) for name, figures in plans.FIGURES.items()}
    for figures in found.values():
        for one in figures:
            assert one.paper == "-" or line(one) in DOCUMENT, line(one)
    links, overlap, checkpoints = ([one.planner for one in found[name]] for name in ("6c", "6d", "6e"))
    assert links == sorted(links) and 1.7 < links[-1] < 2, "nearly 2 at 64 GPUs"
    assert overlap == sorted(overlap, reverse=True) and 1.15 < overlap[0] < 1.3, "up to 1.3, at the smallest batch"
    assert checkpoints == sorted(checkpoints, reverse=True) and checkpoints[0] < 1.21 and checkpoints[-1] < 1.03


@pytest.mark.slow
def test_a_trillion_dense_parameters_fit_on_one_dgx_2_and_scale_super_linearly() -> None:
    found = [plans.trillion(16 * nodes) for nodes in plans.NODES]
    assert every(plans.fits(one) for one in found) and found[0].task.profile.parameters > 1e12
    reached = [cost.tflops_per_gpu(one.task.profile, one.seconds.step) for one in found]
    assert reached == sorted(reached), "each GPU is the faster, the more there are"
    assert f"| TFLOPS of a GPU | {' | '.join(f'{each:.1f}' for each in reached)} |" in DOCUMENT
    assert f"{found[0].size.disk_bytes * 16 / 1e12:.1f} TB of its 28 TB" in DOCUMENT
