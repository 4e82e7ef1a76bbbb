"""Memory of plain strategies.

Owns bytes per parameter under PyTorch's own AMP, DDP and gradient accumulation. Pure arithmetic; plans of this library
are priced by `cost`. Source: "LLM finetuning: memory requirements" (Birch, 2023).
"""

from dataclasses import dataclass

_REUSED = 0.25
"""Fraction of the half-precision copies' memory that gradients reuse as backward frees it: the blog measures AMP at 1.1
to 1.6 bytes a parameter instead of 2."""
_FRAGMENTS = 0.5
"""Bytes per parameter of AMP beyond its copies when gradients of an earlier micro-batch are kept: the blog measures 2.1
to 2.6 instead of 2."""
_BUCKET_VIEW = 2.5
"""Bytes per parameter that ``gradient_as_bucket_view`` saves of DDP's 4, as the blog measures it."""


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

    def peak_bytes(self, *, trained: int, frozen: int = 0, frozen_bytes: float = 2.0) -> float:
        """Peak bytes of a model, without activations: frozen parameters cost `frozen_bytes` each and nothing else.

        They have no gradient, no bucket and no moments, and AMP copies none that is in 16 bits or quantized.
        """
        return self.bytes_per_parameter() * trained + frozen_bytes * frozen
