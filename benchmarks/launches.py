"""Operators that a layer of quantized experts launches on an accelerator, counted on a CPU.

Owns this count and its rows: forward and backward of fused experts of transformers with a frozen base in nf4, as on a
GPU with a fused kernel for grouped products, against a decoding and a product for each expert. A view or an empty
tensor launches nothing; a decoding counts as one launch, as Triton's is.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from benchmarks.report import race_row, unmeasured_row
from benchmarks.workload import SEED, Workload
from elixir_moe.quantized import products
from elixir_moe.quantized.formats import Scheme

ROW = "launches of quantized experts"
EXPERTS = (8, 32, 128)
"""Experts of the layers that are counted."""
LIMIT = 14
"""The most launches of a layer and pass, sorting and combining its tokens included."""
_WIDTH, _TOKENS, _CHOICES, _RANK = 64, 256, 4, 8


class Launches(TorchDispatchMode):
    """Keeps the names of the operators that launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func._schema.returns
        views = sum(r.alias_info is not None and not r.alias_info.is_write for r in results)
        if (not results or views < len(results)) and "empty" not in func._schema.name:
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Counts a decoding as one launch, whatever decodes here."""
        decode = Scheme.decode

        def decoded(*args: Any, **kwargs: Any) -> Tensor:
            before = len(self.names)
            weight = decode(*args, **kwargs)
            self.names[before:] = ["decode"]
            return weight

        with self, mock.patch.object(Scheme, "decode", decoded):
            yield


@contextmanager
def accelerated(*, fused: bool = True, scratch_bytes: int = products.GROUPED_SCRATCH_BYTES) -> Iterator[None]:
    """Multiplies quantized and adapted experts on the CPU as on an accelerator, with a fused kernel or without."""

    def runs_fused(rows: Tensor, shape: Sequence[int]) -> bool:
        """Whether the CPU's grouped product accepts the rows and matrices, of any dtype."""
        return fused and len(rows) > 0 and all(n * rows.itemsize % 16 == 0 for n in shape[1:])

    with ExitStack() as stack:
        for module in ("elixir_moe.moe.experts", "elixir_moe.quantized.products"):
            stack.enter_context(mock.patch(f"{module}.runs_fused", runs_fused))
        stack.enter_context(mock.patch.object(products, "scratch_bytes", lambda device: scratch_bytes))
        yield


def experts(number: int, scheme: str = "nf4", *, adapters: bool = False) -> nn.Module:
    """Fused experts of Qwen3-MoE in bf16 with a frozen quantized base, with peft's adapters or without."""
    import peft
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import use_experts_implementation

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.act_fn = number, ACT2FN["silu"]
            self.gate_up_proj = nn.Parameter(torch.randn(number, 2 * _WIDTH, _WIDTH) / 8)
            self.down_proj = nn.Parameter(torch.randn(number, _WIDTH, _WIDTH) / 8)

    torch.manual_seed(SEED)
    made = use_experts_implementation(Experts)(SimpleNamespace(_experts_implementation="grouped_mm"))
    model: nn.Module = nn.ModuleDict({"experts": made}).to(torch.bfloat16).requires_grad_(False)
    em.quantize(model, scheme, targets="*")
    if adapters:
        names = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=_RANK, target_modules=[], target_parameters=names, init_lora_weights=False)
        model = em.group_experts(peft.get_peft_model(model, config).base_model.model).to(torch.bfloat16)
    found: nn.Module = model["experts"]  # type: ignore[index]
    return found


def count(layer: nn.Module, *, checkpointed: bool = False) -> tuple[list[str], list[str]]:
    """Returns the launches of forward and of backward, which recomputes the forward first if `checkpointed`."""
    number = layer.num_experts if hasattr(layer, "num_experts") else layer.get_base_layer().num_experts
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randn(_TOKENS, _WIDTH, generator=generator).bfloat16().requires_grad_()
    chosen = torch.rand(_TOKENS, number, generator=generator).topk(_CHOICES).indices
    weights = torch.rand(_TOKENS, _CHOICES, generator=generator).bfloat16().requires_grad_()
    layer.zero_grad()
    forward, backward = Launches(), Launches()
    with forward.decoding():
        inputs = tokens, chosen, weights
        out = checkpoint(layer, *inputs, use_reentrant=False) if checkpointed else layer(*inputs)
    grad = torch.ones_like(out)
    with backward.decoding():
        torch.autograd.backward(out, grad)
    return forward.names, backward.names


def rows(_: bool, __: Workload, ___: int) -> list[dict[str, Any]]:
    """The rows of forward and of backward for each number of experts."""
    found = []
    for number in EXPERTS:
        workload = f"{number} experts, nf4, {_TOKENS} tokens of {_CHOICES} choices"
        try:
            layer = experts(number)
        except ImportError as error:
            return [unmeasured_row({"name": ROW, "peer": None, "workload": "", "ranks": 1, "limit": None}, str(error))]
        with accelerated():
            ours = count(layer)
        with accelerated(fused=False, scratch_bytes=0):
            theirs = count(layer)
        for name, mine, each in zip(("forward", "backward"), ours, theirs, strict=True):
            what = {"name": f"{ROW}, {name}", "peer": "each expert by itself", "workload": workload, "ranks": 1}
            limit = round(LIMIT / len(each), 4)
            found.append(race_row(what | {"limit": limit}, [(len(mine), len(each))], "calls"))
    return found
