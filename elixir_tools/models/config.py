"""The configuration of a GPT: checked settings.

Owns `GPTConfig`. Builds nothing. Source of the pyramid of experts: PR-MoE, DeepSpeed-MoE, section 4.1.
"""

from dataclasses import dataclass
from typing import Literal

from elixir_moe.errors import ConfigError, LayoutError

Checkpoint = Literal["none", "reentrant", "non_reentrant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """A decoder-only transformer; every layer is dense, or a mixture of experts of its own size and degree."""

    vocab_size: int = 256
    """Distinct tokens; 256 for bytes as tokens."""
    seq_len: int = 128
    """Longest sequence, in tokens: the number of learned positions."""
    n_layers: int = 4
    """Transformer blocks."""
    d_model: int = 128
    """Width of a token; a multiple of `n_heads`."""
    n_heads: int = 4
    """Attention heads."""
    mlp_ratio: int = 4
    """Inner width of MLPs and experts, in multiples of `d_model`."""
    experts: tuple[int, ...] = ()
    """Experts of each layer, 0 for a dense MLP; one number a layer, or empty: all dense."""
    ep: tuple[int, ...] = ()
    """Expert-parallel degree of each layer, 1 where dense; one number a layer, or empty: 1 everywhere."""
    top_k: int = 1
    """Experts a token is sent to."""
    residual: bool = False
    """PR-MoE: a dense MLP in addition to the experts of each mixture layer."""
    capacity_factor: float | None = None
    """An expert's share of the global batch, in multiples of the even share; None drops no token."""
    aux_coefficient: float = 0.01
    """Weight of the load-balancing loss of each mixture layer."""
    z_coefficient: float = 0.0
    """Weight of the router's z-loss of each mixture layer."""
    dropout: float = 0.0
    """Probability with which embeddings and residual branches are dropped, elementwise."""
    tie_embeddings: bool = True
    """The output projection is the token embedding."""
    checkpoint: Checkpoint = "none"
    """Activation checkpointing of each block."""

    def __post_init__(self) -> None:
        for name in ("experts", "ep"):
            value = tuple(getattr(self, name)) or (0 if name == "experts" else 1,) * self.n_layers
            object.__setattr__(self, name, value)
        problems = [*self._problems_of_sizes(), *self._problems_of_experts()]
        if problems:
            raise ConfigError("GPTConfig: " + "; ".join(problems))

    def _problems_of_sizes(self) -> list[str]:
        sizes = ("vocab_size", "seq_len", "n_layers", "d_model", "n_heads", "mlp_ratio")
        problems = [f"{name}={getattr(self, name)} must be at least 1" for name in sizes if getattr(self, name) < 1]
        if self.n_heads > 0 and self.d_model % self.n_heads:
            problems.append(f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}")
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout={self.dropout} must be in [0, 1)")
        if self.checkpoint not in ("none", "reentrant", "non_reentrant"):
            problems.append(f"checkpoint={self.checkpoint!r} must be 'none', 'reentrant' or 'non_reentrant'")
        return problems

    def _problems_of_experts(self) -> list[str]:
        problems = [
            f"{name}={value} has {len(value)} numbers for {self.n_layers} layers: give one a layer, or none"
            for name, value in (("experts", self.experts), ("ep", self.ep))
            if len(value) != self.n_layers
        ]
        for layer, (experts, ep) in enumerate(zip(self.experts, self.ep, strict=False)):
            if experts < 0 or ep < 1:
                problems.append(f"layer {layer}: experts={experts} must be at least 0 and ep={ep} at least 1")
            elif experts == 0 and ep != 1:
                problems.append(f"layer {layer} is dense: ep={ep} has nothing to share, make it 1")
            elif experts % ep:
                degrees = [n for n in range(1, experts + 1) if experts % n == 0]
                problems.append(f"layer {layer}: ep={ep} does not divide {experts} experts, choose among {degrees}")
            if 0 < experts < self.top_k:
                problems.append(f"layer {layer}: top_k={self.top_k} of {experts} experts")
        if self.top_k < 1:
            problems.append(f"top_k={self.top_k} must be at least 1")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            problems.append(f"capacity_factor={self.capacity_factor} must be above 0, or null to drop no token")
        if not any(self.experts):
            unset = {"top_k": 1, "residual": False, "capacity_factor": None}
            problems += [
                f"{name}={getattr(self, name)} is set, but no layer has experts"
                for name, value in unset.items()
                if getattr(self, name) != value
            ]
        return problems

    def check_tp(self, tp: int) -> None:
        """Raises LayoutError if the model cannot be cut over `tp` tensor-parallel ranks."""
        if self.n_heads % tp:
            degrees = [n for n in range(1, self.n_heads + 1) if self.n_heads % n == 0]
            raise LayoutError(f"tp={tp} does not divide n_heads={self.n_heads}: choose tp among {degrees}")
        if tp > 1 and self.dropout:
            raise LayoutError(
                f"dropout={self.dropout} with tp={tp}: the ranks of tp would drop different elements of activations "
                f"they share; set dropout=0, or tp=1"
            )
