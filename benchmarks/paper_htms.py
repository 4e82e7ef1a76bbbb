"""The layers of HTMS, Table 1, and what its text says of their bytes: part of ``make paper-table``.

A layer is our GPT's, traced for one of the eight GPUs that share it, with the batch that the text of Figure 6 gives.
Three facts are ours, because the paper does not print them: fp32, MLPs of four times the width, and attention that
keeps no matrix of scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elixir_moe.planner.trace import trace
from elixir_tools.fit.tasks import pretended_ranks
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import Block, Meshes

GPUS = 8
TOKENS = 512
"""Tokens of a sequence, by section 4.1."""
PRINTED_GB = 35
"""GPU memory that the batches of section 4.2 reserve, "approximately"."""
LEFT_GB = 40 - PRINTED_GB
"""The rest, which by section 4.2 is enough for the context of the next layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A row of Table 1, with its batch."""

    name: str
    hidden: int
    layers: int
    head: int
    """Width of a head, as the table prints it."""
    heads: int
    batch: int


TABLE = (
    Layer(name="Base", hidden=768, layers=12, head=96, heads=8, batch=2048),
    Layer(name="Large", hidden=1536, layers=24, head=96, heads=16, batch=1024),
    Layer(name="XLarge", hidden=4096, layers=32, head=128, heads=32, batch=378),
    Layer(name="XXLarge", hidden=8192, layers=32, head=128, heads=64, batch=128),
)


def compared() -> list[dict[str, Any]]:
    """By row: width of a head, bytes of the batch, and of the context of the next layer."""
    with pretended_ranks(GPUS, tp=GPUS) as mesh:
        return [_compared(layer, mesh) for layer in TABLE]


def _compared(layer: Layer, mesh: Any) -> dict[str, Any]:
    config = GPTConfig(d_model=layer.hidden, n_heads=layer.heads, n_layers=1, seq_len=TOKENS)
    with torch.device("meta"):
        block, whole = (Block(config, 0, Meshes(config, ranks)) for ranks in (mesh, None))
    x = torch.empty(layer.batch, TOKENS, layer.hidden, device="meta", requires_grad=True)
    profile = trace(block, _step, x, world=GPUS, tokens=layer.batch * TOKENS)
    own = sum(p.numel() * p.itemsize for p in block.parameters())
    return {
        "name": layer.name,
        "head": layer.head,
        "our_head": whole.attention.qkv.in_features // layer.heads,
        "parameters": layer.layers * sum(p.numel() for p in whole.parameters()),
        "gb": (profile.activation_bytes + own) / 1e9,
        "bytes_of_width": profile.activation_bytes / x.numel(),
        "printed_bytes_of_width": PRINTED_GB * 1e9 / x.numel(),
        "next_gb": (x.nbytes + own) / 1e9,
    }


def _step(block: nn.Module, x: Tensor) -> Tensor:
    """A scalar, so that the layer has a backward."""
    y: Tensor = block(x)[0]
    return y.sum()


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table; there are no arguments."""
    print(f"HTMS, Table 1 and section 4.2: a layer cut over {GPUS} GPUs, in fp32, in GB of a GPU")
    print(f"{'':8} {'Dhead':>6} {'ours':>6} {'parameters':>11} {'batch':>6} {'ours':>6} {'error':>7} {'next':>5}")
    for row in compared():
        print(
            f"{row['name']:8} {row['head']:6} {row['our_head']:6} {row['parameters'] / 1e9:10.2f}b {PRINTED_GB:6}"
            f" {row['gb']:6.1f} {row['gb'] / PRINTED_GB - 1:+7.1%} {row['next_gb']:5.1f}"
        )
    print(f"parameters: of all layers. next: the context of the next layer, for which the paper leaves {LEFT_GB} GB")
    print(
        "The text says neither dtype, width of the MLP, attention nor what backward keeps. Figures 7 to 9 are pictures"
    )


if __name__ == "__main__":
    main()
