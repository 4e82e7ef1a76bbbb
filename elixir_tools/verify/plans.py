"""The plan that is verified, as a user names it.

Owns what a name stands for, and where the chunks of `disk` go. Searches for nothing: `wrap` does that for `auto`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elixir_moe.errors import unknown_name
from elixir_moe.ext.plans import Plan
from elixir_tools.names import PLANS

_ALL_CHUNKS = 2**20
"""More chunks than any model has."""
_SEARCHED_FOR = "a100-80g-pcie-x4"
"""The machine that `auto` plans for: one whose rates ship with the package, since nothing is measured twice alike."""


@dataclass(frozen=True, slots=True)
class AskedPlan:
    """A plan, or the wish for the one that a search finds."""

    given: Plan | None
    """None: `Plan.auto`."""
    accumulation: int = 1
    """Backwards of a step, for the search."""

    def of(self, step: Callable[[Any, Any], Any], sample: Any, together: int) -> dict[str, Any]:
        """The arguments of `em.wrap` for a model with this step and batch; a search has the step already.

        `together`: micro-batches that pass each layer together.
        """
        if self.given is not None:
            plan = replace(self.given, batches_per_pass=together) if together > 1 else self.given
            return {"plan": plan, "step": step, "sample": sample}
        auto = Plan.auto(
            step=step,
            sample=sample,
            hardware=_SEARCHED_FOR,
            accumulation=self.accumulation,
            batches_per_pass=together,
        )
        return {"plan": auto}


def asked(text: str, folder: Path, *, accumulation: int = 1) -> AskedPlan:
    """The plan that `text` names, or holds, or whose file it is; chunks of `disk` go to `folder`.

    Raises ConfigError or PlanError if there is no such plan, or it is none.
    """
    presets = {
        "ddp": Plan.ddp,
        "zero2": Plan.zero2,
        "zero3": Plan.zero3,
        "offload": Plan.offload,
        "disk": lambda: Plan.offload(disk=folder, disk_chunks=_ALL_CHUNKS),
    }
    if text == "auto":
        return AskedPlan(None, accumulation)
    if text in presets:
        return AskedPlan(presets[text]())
    if text.lstrip().startswith("{"):
        return AskedPlan(Plan.from_json(text))
    if not Path(text).is_file():
        raise unknown_name("plan", text, PLANS)
    return AskedPlan(Plan.from_json(Path(text).read_text()))
