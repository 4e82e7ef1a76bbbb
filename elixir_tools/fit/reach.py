"""The largest known models that a machine can fine-tune: from shapes alone, in formulas, without a trace or a search.

Owns the formulas; `elixir-moe plan` has the exact answer. They know a transformer by its config.json and need nothing
but this package. A model fits if its state fits in GPU and host memory together, and the two largest layers, the inputs
of all layers and what one layer computes fit on a GPU.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elixir_moe.ext.hardware import Hardware
from elixir_tools.models import known

WAYS = ("full", "LoRA", "QLoRA")
TOKENS = 2048
"""Tokens of a GPU in a step."""
_STATE, _WEIGHT, _PACKED = 14, 2, 0.5625
"""Bytes of a trained element (a bf16 weight, an fp32 master and moments), of a frozen one in bf16, and in nf4."""
_RANK = 16
"""Of the adapters."""
_BLOCKS = 2
"""Layers that are gathered at once: one in use, one on its way."""
_TILED = 0.25
"""The most of a GPU that they take, since larger layers are cut into tiles."""
_LAYER_BYTES, _LOSS_BYTES = 14, 8
"""Bytes held for each token and element of a layer's width and inner width, and for each element of the width in the
loss."""
_USABLE = 0.9
"""Part of a GPU's memory, since the allocator leaves holes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A transformer."""

    width: int
    layers: int
    vocabulary: int
    tied: bool
    projections: tuple[tuple[int, int], ...]
    """(in, out) of the products of a layer that every token passes."""
    experts: int
    """Parameters of all experts of a layer."""
    inner: int
    """Inner width of what a token passes."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Shape | None":
        """The shape in a config.json; None if its attention is of another kind."""
        if config.get("kv_lora_rank"):
            return None
        width, heads = config["hidden_size"], config["num_attention_heads"]
        head = config.get("head_dim") or width // heads
        queries, keys = heads * head, config.get("num_key_value_heads", heads) * head
        attention = ((width, queries), (width, keys), (width, keys), (queries, width))
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        inner = (config.get("moe_intermediate_size") if experts else None) or config["intermediate_size"]
        dense = ((width, experts),) if experts else ((width, inner), (width, inner), (inner, width))
        return cls(
            width=width,
            layers=config["num_hidden_layers"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
            projections=attention + dense,
            experts=3 * width * inner * experts,
            inner=inner * (config.get("num_experts_per_tok", 1) if experts else 1),
        )

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return sum(a * b for a, b in self.projections) + self.experts

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding, and of the head if it is another one."""
        return self.width * self.vocabulary * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All of them, without norms and biases."""
        return self.layers * self.layer + self.embeddings

    def fits(self, way: str, hardware: Hardware, gpus: int) -> bool:
        """Whether it can be fine-tuned on so many GPUs, which share the host's memory."""
        each = int(_USABLE * hardware.gpu_bytes)
        whole = gpus * each + (0 if hardware.one_memory else hardware.cpu_bytes)
        adapters = 0 if way == "full" else self.layers * _RANK * sum(a + b for a, b in self.projections)
        if way == "full":
            state, layer = float(_STATE * self.parameters), float(_WEIGHT * self.layer)
        else:
            packed = _PACKED if way == "QLoRA" else _WEIGHT
            state = packed * self.layers * self.layer + _WEIGHT * self.embeddings + _STATE * adapters
            layer = packed * self.layer
        blocks = min(_BLOCKS * max(layer, _WEIGHT * self.width * self.vocabulary), _TILED * each)
        held = TOKENS * max(_LAYER_BYTES * (self.width + self.inner), _LOSS_BYTES * self.width)
        inputs = _WEIGHT * TOKENS * self.layers * self.width
        return state + gpus * (held + inputs + blocks) <= whole and held + inputs + blocks <= each


def largest(hardware: Hardware, gpus: int) -> dict[str, str | None]:
    """{way: the largest model that ships by name and fits; None if none does}."""
    shapes = sorted(_shapes(), key=lambda pair: -pair[1].parameters)
    return {way: next((n for n, shape in shapes if shape.fits(way, hardware, gpus)), None) for way in WAYS}


def _shapes() -> Iterator[tuple[str, Shape]]:
    for name in known.names():
        path = known.find(name).config
        shape = None if path is None else Shape.of(json.loads(Path(path).read_text(encoding="utf-8")))
        if shape is not None:
            yield name, shape
