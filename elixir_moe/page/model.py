"""Where a wrapped model lives: its layers by tier and chunk, and the bytes of each tier.

Owns the charts and tables of the facts that `em.inspect` gives as plain data, for one model and for the model of a run.
Reads no model.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from elixir_moe.chunks.plan import Tier, size_text
from elixir_moe.page import charts, document

_LAYER = re.compile(r"(.*?\.)?(\d+)(?:\.|$)")
_MOST_ROWS = 48
"""Layers drawn one a row; of more, the last ones are counted."""
_KINDS = {
    "rcache": ("k0", "rCache"),
    "resident": ("k1", "gathered, resident"),
    "reductions": ("k2", "reductions and gradients"),
    "sums": ("k3", "sums of gradients"),
    "shards": ("k4", "shards, masters, moments"),
    "buffers": ("k5", "buffers of the disk"),
}
"""{kind of bytes: (color, meaning)}, as in `Inspection.facts`."""


def layers(chunks: Sequence[Mapping[str, Any]]) -> str:
    """The layers, one a row: elements by tier, with the number of each chunk. Empty without a chunk.

    Args:
        chunks: as `Inspection.facts` gives them. Consecutive layers that are alike share a row.
    """
    found: dict[str, dict[tuple[int, str], int]] = {}
    for chunk in chunks:
        for name, numel in chunk["parameters"]:
            row = found.setdefault(layer_of(name), {})
            place = (chunk["chunk"], chunk["tier"])
            row[place] = row.get(place, 0) + numel
    rows: list[tuple[list[str], dict[tuple[int, str], int]]] = []
    for name, places in found.items():
        if rows and _alike(rows[-1][1], places) and _follows(rows[-1][0][-1], name):
            rows[-1][0].append(name)
        else:
            rows.append(([name], places))
    shown = [
        (
            names[0] if len(names) == 1 else f"{names[0]} … {layer_number(names[-1])}",
            [
                charts.Part(
                    label=f"chunk {index}, {tier}: {numel:,} elements",
                    size=numel,
                    color=tier,
                    text=str(index) if len(names) == 1 else "",
                )
                for (index, tier), numel in places.items()
            ],
            f"{sum(places.values()):,}" if len(names) == 1 else f"{len(names)} × {sum(places.values()):,}",
        )
        for names, places in rows[:_MOST_ROWS]
    ]
    left = sum(len(names) for names, _ in rows[_MOST_ROWS:])
    title = f"Layers: elements on this rank by tier, cut where a chunk ends{f'; {left} more' if left else ''}"
    there = {chunk["tier"] for chunk in chunks}
    return charts.bars(title, shown, [(tier.value, tier.value) for tier in Tier if tier.value in there])


def layer_of(name: str) -> str:
    """``model.layers.3.mlp.up.weight`` -> ``model.layers.3``; ``model.embed.weight`` -> ``model.embed``."""
    numbered = _LAYER.match(name)
    return f"{numbered[1] or ''}{numbered[2]}" if numbered else name.rpartition(".")[0] or name


def layer_number(layer: str) -> str:
    """The last part of a layer's name."""
    return layer.rpartition(".")[2]


def _alike(one: Mapping[tuple[int, str], int], other: Mapping[tuple[int, str], int]) -> bool:
    """Whether two layers have the same elements in the same tiers; the numbers of chunks differ."""
    return [(tier, numel) for (_, tier), numel in one.items()] == [(t, n) for (_, t), n in other.items()]


def _follows(one: str, other: str) -> bool:
    """Whether `other` is the layer behind `one`."""
    first, second = layer_number(one), layer_number(other)
    together = one.rpartition(".")[0] == other.rpartition(".")[0]
    return together and first.isdigit() and second.isdigit() and int(second) == int(first) + 1


def planned(facts: Mapping[str, Any]) -> str:
    """The bytes that the plan foresees, by tier and kind; as a chart with a row for each tier that has any."""
    rows = []
    for tier, kinds in facts["planned_bytes"].items():
        parts = [
            charts.Part(label=f"{_KINDS[kind][1]}: {size_text(nbytes)}", size=nbytes, color=_KINDS[kind][0])
            for kind, nbytes in kinds.items()
            if nbytes
        ]
        if parts:
            rows.append((tier, parts, size_text(sum(part.size for part in parts))))
    seen = {kind for kinds in facts["planned_bytes"].values() for kind, nbytes in kinds.items() if nbytes}
    keys = [(color, meaning) for kind, (color, meaning) in _KINDS.items() if kind in seen]
    return charts.bars("Planned bytes of this rank, by tier", rows, keys)


def bytes_table(facts: Mapping[str, Any], held: Mapping[str, int]) -> str:
    """Planned beside held bytes of each tier."""
    tiers = {tier: sum(kinds.values()) for tier, kinds in facts["planned_bytes"].items()}
    rows = [[tier, size_text(nbytes), size_text(held.get(tier, 0))] for tier, nbytes in tiers.items()]
    return document.table(["tier", "planned", "held"], rows)


def chunk_table(chunks: Sequence[Mapping[str, Any]]) -> str:
    """A row for each chunk group and tier."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    for chunk in chunks:
        row = rows.setdefault((chunk["chunk_group"], chunk["tier"], chunk["residence"]), [0, 0, 0])
        row[0] += 1
        row[1] += sum(numel for _, numel in chunk["parameters"])
        row[2] += chunk["shard_bytes"]
    cells = [[*key, f"{n:,}", f"{numel:,}", size_text(nbytes)] for key, (n, numel, nbytes) in rows.items()]
    return document.table(["chunk group", "tier", "gathered weights", "chunks", "elements", "bytes here"], cells)
