"""Memory of plain strategies, and the papers' back-of-the-envelope formulas.

Owns bytes per parameter under PyTorch's own AMP, DDP and gradient accumulation, and ZeRO-Infinity's sections 3 and 4.
Pure arithmetic; plans of this library are priced by `cost`.
Sources: "LLM finetuning: memory requirements" (Birch, 2023); ZeRO-Infinity, equations 1 to 4 and Figure 2.
"""

from dataclasses import dataclass

BLOG_MODELS = {
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "openllama-3b": 3_426_473_600,
    "llama-2-7b": 6_738_415_616,
}
"""Parameters of the models the blog measures."""
_REUSED = 0.25
"""Fraction of the half-precision copies' memory that gradients reuse as backward frees it: the blog measures AMP at 1.1
to 1.6 bytes a parameter instead of 2."""
_FRAGMENTS = 0.5
"""Bytes per parameter of AMP beyond its copies when gradients of an earlier micro-batch are kept: the blog measures 2.1
to 2.6 instead of 2."""
_BUCKET_VIEW = 2.5
"""Bytes per parameter that ``gradient_as_bucket_view`` saves of DDP's 4, as the blog measures it."""
_KIBI, _TEBI, _GIBI = 2**10, 2**40, 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainStrategy:
    """A training loop of plain PyTorch, weights in fp32."""

    amp: bool = False
    """Automatic mixed precision."""
    ddp: bool = False
    """DistributedDataParallel."""
    accumulate: bool = False
    """Several backwards a step."""
    bucket_view: bool = False
    """DDP's ``gradient_as_bucket_view``."""
    adamw: bool = False
    """AdamW instead of the stateless SGD the blog measures with."""

    def bytes_per_parameter(self) -> float:
        """Peak bytes per parameter, without activations.

        4 for the parameter, 4 for its gradient and, with DDP, 4 for the buckets. AMP's copies take 2; without
        accumulation, gradients reuse some of this memory, and DDP's buckets, idle until gradients are reduced, hold the
        rest. AdamW's moments take 8.
        """
        copies = 0.0
        if self.amp:
            copies = 2 + _FRAGMENTS if self.accumulate else 0 if self.ddp else 2 * (1 - _REUSED)
        buckets = 4 - _BUCKET_VIEW * self.bucket_view if self.ddp else 0
        return 8 + copies + buckets + 8 * self.adamw


@dataclass(frozen=True, kw_only=True, slots=True)
class Transformer:
    """A GPT-3-like model as ZeRO-Infinity counts it."""

    layers: int
    hidden: int
    heads: int
    checkpoint_interval: int = 1
    """ci: Transformer blocks between two activation checkpoints."""

    @property
    def parameters(self) -> int:
        """12 · nl · hd²."""
        return 12 * self.layers * self.hidden**2

    @property
    def model_state_bytes(self) -> int:
        """Mixed-precision Adam, 20 bytes a parameter."""
        return 20 * self.parameters

    def activation_bytes(self, batch: int, seq: int) -> int:
        """All activations of all blocks: `working_activation_bytes` counts one per element, this 2 bytes."""
        return 2 * self.layers * self.working_activation_bytes(batch, seq) // self.checkpoint_interval

    def checkpoint_bytes(self, batch: int, seq: int) -> int:
        """Equation 1: 2 · bsz · seq · hd · nl / ci."""
        return 2 * batch * seq * self.hidden * self.layers // self.checkpoint_interval

    def working_state_bytes(self) -> int:
        """Parameter and gradient of the largest operator, from hd to 4 hd: 4 · hd · 4 hd."""
        return 4 * self.hidden * 4 * self.hidden

    def working_activation_bytes(self, batch: int, seq: int) -> int:
        """Activations between two checkpoints: bsz · seq · ci · (16 · hd + 2 · heads · seq)."""
        return batch * seq * self.checkpoint_interval * (16 * self.hidden + 2 * self.heads * seq)


FIGURE_2 = (
    Transformer(layers=80, hidden=10 * _KIBI, heads=128),
    Transformer(layers=100, hidden=20 * _KIBI, heads=160),
    Transformer(layers=128, hidden=25 * _KIBI, heads=256),
    Transformer(layers=195, hidden=64 * _KIBI, heads=512),
    Transformer(layers=315, hidden=160 * _KIBI, heads=1024),
)
"""The models of ZeRO-Infinity, Figure 2a."""


def figure_2_row(model: Transformer) -> dict[str, float]:
    """The columns of Figure 2a: batch 32 per node, 4 per GPU, sequences of 1024 tokens; TB and GB are binary units."""
    node, gpu, seq = 32, 4, 1024
    return {
        "parameters_trillion": model.parameters / 1e12,
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "model_states_tb": model.model_state_bytes / _TEBI,
        "activations_tb": model.activation_bytes(node, seq) / _TEBI,
        "checkpoints_tb": model.checkpoint_bytes(node, seq) / _TEBI,
        "working_state_gb": model.working_state_bytes() / _GIBI,
        "working_activations_gb": model.working_activation_bytes(gpu, seq) / _GIBI,
    }


def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """Equation 2: ait · bw / (ait · bw + peak), in operations per byte, bytes per second and operations per second."""
    return ait * bandwidth / (ait * bandwidth + peak)
