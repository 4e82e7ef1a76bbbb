"""Where a wrapped model lives: its layers by tier and chunk, and the bytes of each tier.

Owns the bars and tables for the plain data of `em.inspect`, of a model or of the model of a run. Reads no model.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from elixir_moe.chunks.plan import size_text
from elixir_moe.page import document
from elixir_moe.page.document import Bar

_LAYER = re.compile(r"(.*?\.)?(\d+)(?:\.|$)")
_KINDS = {
    "rcache": ("device", "rCache"),
    "resident": ("device2", "gathered, resident"),
    "reductions": ("device3", "reductions and gradients"),
    "updates": ("device3", "updates of whole matrices"),
    "sums": ("purple", "sums of gradients"),
    "shards": ("host", "shards, masters, moments"),
    "buffers": ("host2", "buffers of the disk"),
}
"""{kind of bytes: (color, meaning)}, as in `Inspection.facts`."""
TIERS = {"device": "VRAM", "host": "RAM", "disk": "Disk"}
"""The users' names of the tiers."""
TITLE = "Layers: elements on this rank by tier, cut where a chunk ends"


def layers(chunks: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """The layers in the `chunks` of `Inspection.facts`: elements by tier, with the number of each chunk.

    Consecutive equal layers share a row.
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
    return [
        Bar(
            name=names[0] if len(names) == 1 else f"{names[0]} … {layer_number(names[-1])}",
            end=f"{sum(places.values()):,}" if len(names) == 1 else f"{len(names)} × {sum(places.values()):,}",
            parts=[
                (numel, tier, str(index) if len(names) == 1 else "", f"chunk {index}, {tier}: {numel:,} elements")
                for (index, tier), numel in places.items()
            ],
        )
        for names, places in rows
    ]


def layer_bars(chunks: Sequence[Mapping[str, Any]]) -> str:
    """The bars of the layers, with a legend."""
    there = {chunk["tier"] for chunk in chunks}
    return document.bars(layers(chunks), [(tier, name) for tier, name in TIERS.items() if tier in there])


def layer_of(name: str) -> str:
    """``model.layers.3.mlp.up.weight`` -> ``model.layers.3``; ``model.embed.weight`` -> ``model.embed``."""
    numbered = _LAYER.match(name)
    return f"{numbered[1] or ''}{numbered[2]}" if numbered else name.rpartition(".")[0] or name


def layer_number(layer: str) -> str:
    """The last part of a layer's name."""
    return layer.rpartition(".")[2]


def _alike(one: Mapping[tuple[int, str], int], other: Mapping[tuple[int, str], int]) -> bool:
    """Whether two layers have the same elements in the same tiers, whatever their chunks."""
    return [(tier, numel) for (_, tier), numel in one.items()] == [(t, n) for (_, t), n in other.items()]


def _follows(one: str, other: str) -> bool:
    """Whether `other` is the layer after `one`."""
    first, second = layer_number(one), layer_number(other)
    together = one.rpartition(".")[0] == other.rpartition(".")[0]
    return together and first.isdigit() and second.isdigit() and int(second) == int(first) + 1


def planned(planned_bytes: Mapping[str, Mapping[str, int]]) -> tuple[list[Bar], list[tuple[str, str]]]:
    """A bar by kind for each tier on which the plan has bytes, and the meaning of the colors."""
    rows, seen = [], dict[str, str]()
    for tier, kinds in planned_bytes.items():
        there = [(kind, *_KINDS.get(kind, ("gray", kind)), nbytes) for kind, nbytes in kinds.items() if nbytes]
        parts = [(nbytes, color, "", f"{meaning}: {size_text(nbytes)}") for _, color, meaning, nbytes in there]
        seen |= {color: meaning for _, color, meaning, _ in there}
        if parts:
            rows.append(Bar(name=TIERS.get(tier, tier), end=size_text(sum(kinds.values())), parts=parts))
    return rows, list(seen.items())


def bytes_table(facts: Mapping[str, Any], held: Mapping[str, int]) -> str:
    """The planned and the held bytes of each tier."""
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
    cells = [
        [group, f"{tier}, {residence}", f"{n:,}", f"{numel:,}", size_text(nbytes)]
        for (group, tier, residence), (n, numel, nbytes) in rows.items()
    ]
    return document.table(["chunk group", "tier, gathered", "chunks", "elements", "bytes here"], cells)
