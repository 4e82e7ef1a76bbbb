"""Elixir v2, A.3: a checkpointed region that needs more blocks than device memory has: part of ``make paper-table``.

The paper then extends the rCache as far as it goes and keeps all chunks in host memory: a weight of the region that has
no block is fetched again. Tiles fetch their weights again, too, and their blocks are shorter. The planner compares
both in the memory that is too small for the region: from the least that the paper's rule needs to the least that the
whole region needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.paper_table import MACHINE, SEQ
from elixir_moe.chunks.plan import size_text
from elixir_moe.planner import cost
from elixir_moe.planner.hardware import Hardware
from elixir_moe.planner.profile import Profile
from elixir_moe.planner.solve import Packings, Task, device_bytes_for, solve
from elixir_moe.planner.trace import trace
from elixir_moe.wrapping.tiling import tile_for
from elixir_tools.fit.tasks import pretended_ranks
from elixir_tools.models.presets import named_model

MODELS = ("gpt2-4b", "opt-13b")
LAYERS = 2
"""Layers of each model: its regions are layers, all alike."""
TILES = 8
"""Tiles of the largest parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model: the least memory for state and blocks of each way, and steps in memory that is too small for one."""

    model: str
    whole_bytes: int
    """For the whole region at once."""
    refetched_bytes: int
    """By the paper's rule."""
    tiled_bytes: int
    tightest: tuple[float, float]
    """Seconds of a step by the paper's rule and in tiles, in the least memory that the rule needs."""
    widest: tuple[float, float]
    """Seconds in the most memory that is too small for the whole region."""


def compared(models: Sequence[str] = MODELS) -> Iterator[Row]:
    """Yields a row for each model."""
    for model in models:
        yield row_of(model, _profile(model, tiles=1), _profile(model, tiles=TILES))


def row_of(name: str, whole: Profile, tiled: Profile) -> Row:
    """Returns the row of a step, given its profile without and with tiles."""
    refetched = without_holds(whole)
    most, least = least_bytes(whole), least_bytes(refetched)
    tightest, widest = ((_seconds(refetched, n), _seconds(tiled, n)) for n in (least, most - 1))
    return Row(
        model=name,
        whole_bytes=most,
        refetched_bytes=least,
        tiled_bytes=least_bytes(tiled),
        tightest=tightest,
        widest=widest,
    )


def without_holds(profile: Profile) -> Profile:
    """Returns the step if no weight of a recomputed region stayed gathered: each product fetches its own again."""
    return replace(profile, parts=tuple(replace(part, saves_no_weights=True) for part in profile.parts))


def _profile(model: str, *, tiles: int) -> Profile:
    with pretended_ranks(1) as mesh:
        given = named_model(model, batch=1, seq=SEQ, mesh=mesh, layers=LAYERS)
        if tiles > 1:
            tile_for(given.model, max(p.numel() for p in given.model.parameters()) * 2 // tiles, 2)
        return trace(given.model, given.step, given.sample, world=1, compute_dtype=torch.bfloat16, tokens=SEQ)


def _task(profile: Profile, allowed_bytes: int) -> Task:
    """The problem with so much device memory for state and blocks."""
    hardware = Hardware.named(MACHINE)
    capacity = int((allowed_bytes + cost.F_ALLOC * cost.F_FRAG * profile.activation_bytes) / cost.F_ALLOC) + 2
    capacity += profile.buffer_bytes
    return Task(
        profile=profile,
        hardware=hardware,
        gpus=1,
        capacity_bytes=capacity,
        host_bytes=hardware.host_bytes_per_rank(1),
        overlaps_updates=False,  # as it was measured
    )


def least_bytes(profile: Profile) -> int:
    """Device memory of the smallest plan: `device_bytes_for` is a lower bound until there is one."""
    found, packings = 0, Packings(_task(profile, 0))
    while (bound := device_bytes_for(_task(profile, found), packings)) > found:
        found = bound
    return found


def _seconds(profile: Profile, allowed_bytes: int) -> float:
    return solve(_task(profile, allowed_bytes)).seconds.step


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the comparison; there are no arguments."""
    print(f"Elixir v2, A.3: device memory and seconds of {LAYERS} layers, {TILES} tiles of the largest parameter")
    print("least memory: whole, by the rule, in tiles; a step by the rule, and tiles: in its least memory, in the most")
    for row in compared():
        held = "".join(f"{size_text(n):>11}" for n in (row.whole_bytes, row.refetched_bytes, row.tiled_bytes))
        steps = "".join(f"  {rule:.3f} s {tiles / rule - 1:+.1%}" for rule, tiles in (row.tightest, row.widest))
        print(f"{row.model:12}{held}{steps}")


if __name__ == "__main__":
    main()
