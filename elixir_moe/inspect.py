"""`inspect`: the plan and chunks of a wrapped model, the bytes it holds, and the bytes it has moved.

Owns the answers; each is read from its source on access. Changes nothing, and is not collective.
"""

import os
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from elixir_moe.chunks.cache_policy import Schedule
from elixir_moe.chunks.ledger import HELD_HEAD, Footprint, held_line, held_rows, shard_bytes
from elixir_moe.chunks.packing import Layout
from elixir_moe.chunks.plan import Plan, Tier, size_text
from elixir_moe.chunks.statistics import Statistics
from elixir_moe.page import document
from elixir_moe.page import model as drawn
from elixir_moe.parallel.rules import logical_numel
from elixir_moe.planner import cost
from elixir_moe.planner.solve import gathered
from elixir_moe.state.wrapped import Wrapped, require_wrapped

if TYPE_CHECKING:
    from elixir_moe.planner.prediction import Prediction

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST_NAMES = 6


class Inspection:
    """A wrapped model as this rank sees it. Each property is read on access."""

    def __init__(self, wrapped: Wrapped, name: str) -> None:
        """`name`: the model's, for the title of a page."""
        self._wrapped, self._name = wrapped, name

    @property
    def plan(self) -> Plan:
        """The model's plan, in numbers; `plan.to_json()` repeats it, `plan.explain()` gives the reasons."""
        return self._wrapped.plan

    @property
    def layout(self) -> Layout:
        """The model's chunks, with the place of every parameter."""
        return self._wrapped.layout

    @property
    def footprint(self) -> Footprint:
        """The bytes that the plan predicts."""
        return self._wrapped.footprint

    @property
    def held_bytes(self) -> dict[str, int]:
        """The bytes that the library holds in a backward, by tier, with all gradients."""
        return self._wrapped.held_bytes()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The state on this rank: a row for each chunk group and tier, with rows of their own for resident chunks.

        `numel` counts the elements of the gathered parameters, `shard_bytes` the bytes of their state on this rank.
        """
        return held_rows(self.plan, self.layout, self._wrapped.moments)

    @property
    def numel(self) -> int:
        """Elements of all parameters, experts of all ranks included."""
        return sum(map(logical_numel, self._wrapped.spec.parameters))

    @property
    def trainable(self) -> dict[str, int]:
        """{name: elements} of the trainable parameters, largest first; layers are summed, with ``*`` for the number."""
        found: Counter[str] = Counter()
        for parameter in self._wrapped.spec.parameters:
            if parameter.requires_grad:
                found[_NUMBER.sub("*", self._wrapped.spec.names[parameter][0])] += logical_numel(parameter)
        return dict(found.most_common())

    @property
    def statistics(self) -> Statistics:
        """A snapshot of the counters of moved data; subtract two for an interval."""
        return self._wrapped.scheduler.statistics.copy()

    @property
    def schedule(self) -> Schedule | None:
        """The order of chunk uses in a step; None before the first step if none was given to `wrap`."""
        return self._wrapped.scheduler.cache.schedule

    @property
    def prediction(self) -> "Prediction | None":
        """The expected and the measured time of a step; None for a plan that was not searched for."""
        return self._wrapped.prediction

    def facts(self, backwards: int = 1) -> dict[str, Any]:
        """Where the model lives, as plain data: the chunks with their tiers and parameters, and the planned bytes.

        Args:
            backwards: backwards in a step; several need memory for sums of gradients.

        Returns:
            ``chunks``: for each chunk its number, chunk group, tier, the tier of its values, residence, shards, whether
            the ranks of this host share its memory, the bytes of its state on this rank and [name, elements] of each
            parameter.
            ``planned_bytes``: {tier: {kind: bytes}}.
        """
        plan, names, parameters = self.plan, self._wrapped.spec.names, self._wrapped.spec.parameters
        chunks = [
            {
                "chunk": chunk.index,
                "chunk_group": chunk.key.label,
                "tier": plan.tier_of(self.layout, chunk).value,
                "values": self._wrapped.scheduler.chunks[chunk.index].shard.values_tier.value,
                "residence": chunk.residence.value,
                "shards": chunk.shards,
                "shared": self._wrapped.scheduler.chunks[chunk.index].shard.whole is not None,
                "shard_bytes": shard_bytes(plan, self.layout, chunk, self._wrapped.moments),
                "parameters": [[names[parameters[slot.param]][0], slot.numel] for slot in chunk.slots],
            }
            for chunk in self.layout.chunks
        ]
        return {"chunks": chunks, "planned_bytes": planned_bytes(self.footprint, backwards)}

    def step_bytes(self, micro_batches: int = 1) -> dict[str, int]:
        """The bytes that this rank moves in a step whose micro-batches `em.accumulate` runs, by the plan.

        Returns:
            {``fetched``, ``offloaded``, ``gathered`` or ``reduced``: bytes}, counted as in `statistics`.
        """
        record, plan, layout = self._wrapped, self.plan, self.layout
        together = plan.batches_together(layout, micro_batches)
        passes = -(-micro_batches // together)
        loads = gathered(record.spec.step_order.schedule(layout, together), plan.blocks(layout), passes)
        over_gloo = any(chunk.communicator.over_gloo for chunk in record.scheduler.chunks)
        return cost.traffic(plan, layout, loads, record.moments, over_gloo=over_gloo, passes=passes).by_way

    def html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page about the model: bytes by tier, layers by tier and chunk, what was moved. Not collective.

        The page is one file, needs no network and runs no script.

        Args:
            path: the file to write, replaced if it exists.

        Raises:
            ConfigError: the file cannot be written.
        """
        name = f"{self._name}: where it lives"
        document.write(Path(path), document.page(name, [document.heading(name), self._parts()]))

    def _repr_html_(self) -> str:
        """Returns HTML for a notebook."""
        return document.fragment([self._parts()])

    def _parts(self) -> str:
        facts, moved = self.facts(), self.statistics.as_dict()
        counted = {name: n for name, n in moved.items() if isinstance(n, int)}
        for way in ("bytes_fetched", "bytes_offloaded"):
            counted |= {f"{way}, {tier}": n for tier, n in moved[way].items()}
        for group, collectives in moved["collective_bytes"].items():
            counted |= {f"{name} of {group}, bytes": n for name, n in collectives.items()}
        rows = [[name.replace("_", " "), f"{n:,}"] for name, n in counted.items()]
        cards = [
            document.card(drawn.TITLE, [drawn.layer_bars(facts["chunks"])]),
            document.card(
                "Planned bytes of this rank, by tier", [document.bars(*drawn.planned(facts["planned_bytes"]))]
            ),
            document.card("Chunks", [drawn.chunk_table(facts["chunks"])]),
            document.card("Planned and held in a backward", [drawn.bytes_table(facts, self.held_bytes)]),
            document.card("Plan", [document.text("\n".join(self._plan_lines()))]),
            document.card("Counted since wrap, on this rank", [document.table(["", "count"], rows)]),
        ]
        return document.cards(cards)

    def __str__(self) -> str:
        """Returns the plan, and a table of the state on this rank."""
        held = ", ".join(f"{tier}: {size_text(nbytes)}" for tier, nbytes in self.held_bytes.items())
        return "\n".join([*self._plan_lines(), held, HELD_HEAD, *map(held_line, self.rows)])

    def _plan_lines(self) -> list[str]:
        return [f"{self.plan}", *self._trainable_lines(), *self._sharing_lines()]

    def _sharing_lines(self) -> list[str]:
        """How many frozen chunks the ranks of this host share in its memory, if the plan shares any."""
        if not self.plan.shared_frozen:
            return []
        shared = sum(chunk["shared"] for chunk in self.facts()["chunks"])
        apart = [
            f"frozen chunks of ranks {', '.join(map(str, ranks))} are scattered, not shared: {why}"
            for ranks, why in self._wrapped.not_shared.items()
        ]
        return [f"frozen chunks once in this host's memory, gathered without a collective: {shared}", *apart]

    def _trainable_lines(self) -> list[str]:
        """The trainable parameters, if some are frozen; names without their common prefix."""
        by_name, numel = self.trainable, self.numel
        count = sum(by_name.values())
        if count == numel:
            return []
        first = os.path.commonprefix([*by_name]).rpartition(".")[0]  # noqa: RUF071 (cut at a dot)
        lines = [f"  {name.removeprefix(first).lstrip('.')}: {n:,}" for name, n in by_name.items()]
        more = [f"  and {len(lines) - _MOST_NAMES} more names"] if len(lines) > _MOST_NAMES else []
        return [f"trainable {count:,} of {numel:,} ({count / numel:.2%})", *lines[:_MOST_NAMES], *more]


def planned_bytes(footprint: Footprint, backwards: int) -> dict[str, dict[str, int]]:
    """{tier: {kind: bytes}} of a footprint; sums of gradients only if a step has several backwards."""
    sums = footprint.accumulator_bytes if backwards > 1 else {}
    by_tier: dict[str, dict[str, int]] = {
        tier.value: {"shards": footprint.shard_bytes[tier], "sums": sums.get(tier, 0)} for tier in Tier
    }
    by_tier[Tier.DEVICE] = {
        "rcache": footprint.rcache_bytes,
        "resident": footprint.resident_bytes,
        "reductions": footprint.staging_bytes + footprint.gradient_bytes,
        **({"updates": footprint.workspace_bytes} if footprint.workspace_bytes else {}),
        **by_tier[Tier.DEVICE],
    }
    by_tier[Tier.HOST]["buffers"] = footprint.spill_buffer_bytes
    return by_tier


def inspect(model: nn.Module) -> Inspection:
    """Returns the plan and chunks of `model`, the bytes it holds on this rank, and those it has moved. Not collective.

    Args:
        model: a model that went through `wrap`.

    Raises:
        UsageError: the model is not wrapped.
    """
    return Inspection(
        require_wrapped(
            model,
            "inspect",
            ": call em.wrap first. An ElixirTrainer wraps its model in train(): call em.inspect after it, or in a "
            "callback's on_train_begin; ElixirAccelerator wraps in prepare(), and Fabric in setup()",
        ),
        type(model).__name__,
    )
