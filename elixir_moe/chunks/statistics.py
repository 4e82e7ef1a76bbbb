"""Counters of data movement.

Owns the counters of a run; never moves data. Collectives count the bytes of the full chunk, as in the papers: an
all-gather or a reduce-scatter of M parameters counts M times the bytes of an element as sent, an all-reduce twice that.
"""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar

from elixir_moe.chunks.cache_policy import CacheCounts

_K = TypeVar("_K")


@dataclass(kw_only=True, slots=True)
class Statistics:
    """Counters of this rank since `wrap`. The difference of two snapshots counts what happened between them."""

    cache: CacheCounts = field(default_factory=CacheCounts)
    """Hits, misses, evictions and prefetches of the rCache."""
    bytes_fetched: Counter[str] = field(default_factory=Counter)
    """{tier of the compute shard: bytes of shards copied to blocks}; trainable chunks on disk count as `host`."""
    bytes_offloaded: Counter[str] = field(default_factory=Counter)
    """{tier of the compute shard: bytes of gradient shards copied there}."""
    collective_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """{(chunk group's label, collective): bytes}. A process group's bytes are the sum over its chunk groups."""
    blocks_replaced: int = 0
    """Blocks allocated to replace one that a reader still held, and extra memory for gradients without a block.
    Expected to be 0."""

    def copy(self) -> Self:
        """A snapshot."""
        return self - type(self)()

    def __sub__(self, earlier: "Statistics") -> Self:
        mine, theirs = asdict(self.cache), asdict(earlier.cache)
        return type(self)(
            cache=CacheCounts(**{name: mine[name] - theirs[name] for name in mine}),
            bytes_fetched=_minus(self.bytes_fetched, earlier.bytes_fetched),
            bytes_offloaded=_minus(self.bytes_offloaded, earlier.bytes_offloaded),
            collective_bytes=_minus(self.collective_bytes, earlier.collective_bytes),
            blocks_replaced=self.blocks_replaced - earlier.blocks_replaced,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON, with collectives as {chunk group's label: {collective: bytes}}."""
        by_label: dict[str, dict[str, int]] = {}
        for (label, collective), count in self.collective_bytes.items():
            by_label.setdefault(label, {})[collective] = count
        return {
            **asdict(self.cache),
            "bytes_fetched": dict(self.bytes_fetched),
            "bytes_offloaded": dict(self.bytes_offloaded),
            "collective_bytes": by_label,
            "blocks_replaced": self.blocks_replaced,
        }


def _minus(a: Counter[_K], b: Counter[_K]) -> Counter[_K]:
    return Counter({key: n - b[key] for key, n in a.items()})
