"""The bigram model of bytes: a baseline. A model with a lower loss has learned more than pairs of bytes.

Owns its fit and its loss. Knows nothing of networks or ranks.
"""

from typing import Self

import torch

VOCABULARY = 256
"""Values of a byte."""
_SMOOTHINGS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_HELD_OUT = 0.1


class Bigram:
    """``p(b | a) = (count(a, b) + k) / (count(a) + 256 k)``, counted on the training part."""

    def __init__(self, counts: torch.Tensor, k: float) -> None:
        """`counts`: (256, 256), row a, column b; `k` is added to each count."""
        smooth = counts.double() + k
        self.k = k
        self.log_probability = (smooth / smooth.sum(1, keepdim=True)).log()
        """float64 (256, 256): row a, column b."""

    @classmethod
    def fit(cls, train: torch.Tensor) -> Self:
        """Counts all of `train` (uint8, 1-D); k is the one with which the rest best predicts the last tenth."""
        cut = train.numel() - max(2, round(train.numel() * _HELD_OUT))
        first = pair_counts(train[:cut])
        best = min(_SMOOTHINGS, key=lambda k: cls(first, k).loss(train[cut:]))
        return cls(pair_counts(train), best)

    def loss(self, tokens: torch.Tensor) -> float:
        """Mean negative log-probability of each byte but the first, given the byte before it; nats per byte."""
        pairs = pair_counts(tokens)
        return -(pairs * self.log_probability).sum().item() / pairs.sum().item()


def pair_counts(tokens: torch.Tensor) -> torch.Tensor:
    """Number of times byte b follows byte a: int64 (256, 256), row a, column b."""
    codes = tokens[:-1].long() * VOCABULARY + tokens[1:].long()
    return torch.bincount(codes, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY)
