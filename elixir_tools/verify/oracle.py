"""The plain side's own mathematics, written again from the definitions.

Owns a mixture layer as a loop over experts, the loss of next tokens, and what a weight is after each format of 4 or 8
bits. Never calls what it is compared with: of this library's layers it knows the parameters, and no function.
"""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elixir_moe import MoE


class LoopedMoE(MoE):
    """A mixture in one process: each expert takes its tokens in turn."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(..., d) -> (..., d), and the auxiliary loss."""
        tokens, count, chosen_each = x.reshape(-1, x.shape[-1]), self.num_experts, self.router.top_k
        logits = F.linear(tokens.float(), self.router.weight.float())
        probabilities = logits.softmax(-1)
        weights, chosen = probabilities.topk(chosen_each, dim=-1)
        if self.router.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        capacity = chosen.numel()
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * chosen.numel() / count)
        out = torch.zeros_like(tokens, dtype=torch.float32)
        for expert in range(count):
            choice, token = (chosen.t() == expert).nonzero(as_tuple=True)  # first choices first, then in order
            choice, token = choice[:capacity], token[:capacity]
            made = self._expert(expert, tokens[token]).float() * weights[token, choice, None]
            out = out.index_add(0, token, made)
        result = out.to(x.dtype).view_as(x)
        if self.mlp is not None and self.coefficient is not None:
            share = (x @ self.coefficient.weight.t() + self.coefficient.bias).float().softmax(-1).to(x.dtype)
            first, second = self.mlp.w_in, self.mlp.w_out
            dense = F.linear(_gelu(F.linear(x, first.weight, first.bias)), second.weight, second.bias)
            result = share[..., :1] * result + share[..., 1:] * dense
        fractions = torch.stack([(chosen == expert).sum() for expert in range(count)]) / chosen.numel()
        balance = count * (fractions * probabilities.mean(0)).sum()
        square = logits.logsumexp(-1).square().mean()
        return result, self.aux_coefficient * balance + self.z_coefficient * square

    def _expert(self, number: int, rows: Tensor) -> Tensor:
        own = self.experts
        hidden = rows @ own.w_in[number]
        hidden = _gelu(hidden if own.b_in is None else hidden + own.b_in[number])
        out = hidden @ own.w_out[number]
        return out if own.b_out is None else out + own.b_out[number]


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def plain_mixtures(model: nn.Module) -> nn.Module:
    """The model, whose `MoE` layers have become loops over experts, in place."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.__class__ = LoopedMoE
    return model


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """(B, S + 1) tokens -> the mean of -log p of each next token, and the auxiliary loss of the model."""
    logits, auxiliary = model(batch[:, :-1])[:2]
    log_probabilities = logits.float().log_softmax(-1)
    told = [log_probabilities[:, at].gather(1, batch[:, at + 1 : at + 2]) for at in range(logits.shape[1])]
    loss: Tensor = auxiliary - torch.cat(told).mean()
    return loss


# ------------------------------------------------------------------------------------- weights in 4 or 8 bits

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""QLoRA, appendix E."""
_E2M1 = (0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0)
"""OCP Microscaling Formats, 5.3.3: even codes first, since ties go to them."""


def _nf4(weight: Tensor) -> Tensor:
    """The nearest of 16 values times the largest magnitude of 64 inputs."""
    blocks, values = weight.unflatten(-1, (-1, 64)), torch.tensor(_NF4)
    scale = blocks.abs().amax(-1, keepdim=True)
    parts = blocks * (1 / scale.clamp(min=1e-38))
    codes = torch.zeros_like(parts, dtype=torch.int64)
    for lower, upper in pairwise(values):
        codes += parts > (lower + upper) / 2
    return (values[codes] * scale).flatten(-2)


def _mxfp4(weight: Tensor) -> Tensor:
    """The nearest of 8 magnitudes times the least power of 2 that clips none of 32 inputs."""
    blocks, values = weight.double().unflatten(-1, (-1, 32)), torch.tensor(_E2M1, dtype=torch.float64)
    scale = 2 ** (blocks.abs().amax(-1, keepdim=True) / 6).log2().ceil().clamp(-127, 127)
    nearest = ((blocks / scale).abs().unsqueeze(-1) - values).abs().argmin(-1)
    return (values[nearest] * scale * blocks.sign()).flatten(-2).float()


def _fp8(weight: Tensor) -> Tensor:
    """E4M3, times 1/448 of the largest magnitude of 128 x 128 weights."""
    out = torch.empty_like(weight)
    for row in range(0, weight.shape[-2], 128):
        for column in range(0, weight.shape[-1], 128):
            part = (..., slice(row, row + 128), slice(column, column + 128))
            scale = weight[part].abs().amax((-2, -1), keepdim=True) / 448
            scale[scale == 0] = 1
            out[part] = (weight[part] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return out


def _int8(weight: Tensor) -> Tensor:
    """Whole numbers, times 1/127 of the largest magnitude of an output."""
    scale = weight.abs().amax(-1, keepdim=True) / 127
    scale[scale == 0] = 1
    return (weight / scale).round().clamp(-127, 127) * scale


_FORMATS: Mapping[str, Callable[[Tensor], Tensor]] = {"nf4": _nf4, "mxfp4": _mxfp4, "fp8": _fp8, "int8": _int8}


def quantized_values(weight: Tensor, scheme: str) -> Tensor:
    """Returns a weight (..., out, in) as it is once it has been encoded in `scheme` and decoded, in its dtype."""
    return _FORMATS[scheme](weight.detach().float()).to(weight.dtype)
