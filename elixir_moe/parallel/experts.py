"""The networks of a layer: a dense MLP, and many MLPs held in stacked parameters.

Owns their parameters, their initial values and their products. Knows nothing of ranks beyond which experts are here.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elixir_moe.parallel.dataless import has_data


class MLP(nn.Module):
    """Linear, GELU, linear: (..., d) -> (..., d)."""

    def __init__(self, *, d_model: int, d_hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.w_in = nn.Linear(d_model, d_hidden, bias=bias)
        self.w_out = nn.Linear(d_hidden, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        return self.w_out(gelu(self.w_in(x)))


class GroupedExperts(nn.Module):
    """Experts `first_expert` .. `first_expert + num_local` of a layer, each an MLP, in four stacked parameters.

    ``w_in`` (L, d, h), ``b_in`` (L, h), ``w_out`` (L, h, d), ``b_out`` (L, d): dim 0 is what expert parallelism cuts.
    An expert's initial values depend on the layer's seed and on its number in the layer, never on the layout.
    """

    def __init__(
        self, *, d_model: int, d_hidden: int, num_local: int, first_expert: int = 0, bias: bool = True
    ) -> None:
        super().__init__()
        self.first_expert = first_expert
        self.w_in = nn.Parameter(torch.empty(num_local, d_model, d_hidden))
        self.w_out = nn.Parameter(torch.empty(num_local, d_hidden, d_model))
        self.b_in = nn.Parameter(torch.empty(num_local, d_hidden)) if bias else None
        self.b_out = nn.Parameter(torch.empty(num_local, d_model)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, std_in: float | None = None, std_out: float | None = None) -> None:
        """Draws one seed from the global RNG, then every expert's weights from a generator of its own; biases are zero.

        Args:
            std_in: standard deviation of ``w_in``; by default ``1 / sqrt(d)``.
            std_out: standard deviation of ``w_out``; by default ``1 / sqrt(h)``.
        """
        for bias in (self.b_in, self.b_out):
            if bias is not None:
                nn.init.zeros_(bias)
        if not has_data(self.w_in):
            return
        seed = int(torch.randint(2**62, (), device="cpu").item())
        num_local, d, h = self.w_in.shape
        for i in range(num_local):
            generator = torch.Generator(self.w_in.device).manual_seed(_expert_seed(seed, self.first_expert + i))
            nn.init.normal_(self.w_in[i], std=std_in or 1 / math.sqrt(d), generator=generator)
            nn.init.normal_(self.w_out[i], std=std_out or 1 / math.sqrt(h), generator=generator)

    def forward(self, rows: Tensor, counts: Tensor, host_counts: list[int]) -> Tensor:
        """(n, d) rows, the first ``counts[0]`` of them for expert 0 and so on -> (n, d).

        An expert without rows gets a gradient of zeros. One fused kernel where `torch.nn.functional.grouped_mm` has one
        (bf16 on CUDA, rows of 16 bytes); else a loop, which on a CPU is no slower: grouped_mm loops there too.

        Args:
            rows: (n, d), sorted by expert.
            counts: (L,) int64 on the rows' device.
            host_counts: `counts` on the host, so that nothing waits for the device here.
        """
        if _has_grouped_kernel(rows, self.w_in):
            return self._forward_grouped(rows, counts)
        split = rows.split(host_counts)
        w_in, w_out = self.w_in.unbind(), self.w_out.unbind()
        b_in = [None] * len(split) if self.b_in is None else self.b_in.unbind()
        b_out = [None] * len(split) if self.b_out is None else self.b_out.unbind()
        hidden = [gelu(_affine(split[i], w_in[i], b_in[i])) for i in range(len(split))]
        return torch.cat([_affine(hidden[i], w_out[i], b_out[i]) for i in range(len(split))])

    def _forward_grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        ends, idle = counts.cumsum(0, dtype=torch.int32), counts == 0
        # A product with a one-hot matrix adds each row's bias exactly; its backward is a sum in fp32, without atomics.
        expert = torch.repeat_interleave(counts, output_size=len(rows))
        member = (expert.unsqueeze(1) == torch.arange(len(counts), device=rows.device)).to(rows.dtype)
        hidden = F.grouped_mm(rows, _NoGradientForIdle.apply(self.w_in, idle), offs=ends)
        if self.b_in is not None:
            hidden = hidden + member @ self.b_in
        out = F.grouped_mm(gelu(hidden), _NoGradientForIdle.apply(self.w_out, idle), offs=ends)
        return out if self.b_out is None else out + member @ self.b_out


class _NoGradientForIdle(torch.autograd.Function):
    """The weight itself; its gradient is zero for experts without rows, where grouped_mm may leave old memory."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, idle: Tensor) -> Tensor:
        ctx.save_for_backward(idle)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (idle,) = ctx.saved_tensors
        return grads[0].masked_fill(idle.view(-1, 1, 1), 0), None


def gelu(x: Tensor) -> Tensor:
    """GPT-2's GELU, by tanh."""
    return F.gelu(x, approximate="tanh")


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x @ weight if bias is None else torch.addmm(bias, x, weight)


def _expert_seed(seed: int, expert: int) -> int:
    """Distinct for the experts of a layer; the multiplier, 2^64 over the golden ratio, spreads neighbours."""
    return (seed + (expert + 1) * 0x9E3779B97F4A7C15) % 2**63


def _has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether `grouped_mm` has a fused kernel for these: bf16, CUDA of capability 8.0, rows aligned to 16 bytes."""
    if not (rows.is_cuda and torch.cuda.is_available() and len(rows)):
        return False
    if rows.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return False
    aligned = all(n % 8 == 0 for n in weight.shape[1:])
    return aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)
