"""Twelve faults of the field's trackers, each planted in its smallest form, and what `verify` says of each.

A fault is a context manager that changes a function of this library, of transformers or of the step for as long as it
is entered. Most are entered for the run under the plan alone, as they are faults of a trainer; one is in the model's
own code, so that the plain run has it too.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import elixir_moe as em
from elixir_moe.hf.fused_experts import Adapter, UnmergedAdapters
from elixir_moe.optim import accepted
from elixir_moe.parallel.pattern import Pattern
from elixir_moe.quantized import products
from elixir_tools.models.gpt import GPTConfig
from elixir_tools.verify import training
from elixir_tools.verify.cases import Function, Named, Source
from elixir_tools.verify.certificate import as_dicts, certify
from elixir_tools.verify.plans import asked
from tests.certificate.families import FAMILIES

RANKS, STEPS = 2, 2
MIXTURE = "tests.support.verify_cases"
GPT = GPTConfig(
    n_layers=2, d_model=16, n_heads=2, vocab_size=32, seq_len=8, experts=(0, 4), ep=(1, 2), checkpoint="none"
)


def small(name: str = "sound", **options: Any) -> Source:
    """A mixture of a few lines."""
    return Function(path=f"{MIXTURE}:{name}", rows=4, length=8, **options)


def of_family(name: str, *, lora: bool = False, quantized: str | None = None) -> Source:
    """A model of transformers."""
    return FAMILIES[name].source(lora=lora, quantized=quantized, checkpointing=False)


# ----------------------------------------------------------------------------------------------------------- the faults


@contextmanager
def permuted_columns() -> Iterator[None]:
    """`lora_B` is read as `lora_A` is, with the expert as its slowest dim; peft writes it as its fastest."""

    def adapter(self: Any, name: str) -> Adapter:
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        stacked_b = b.reshape(b.shape[0], self.num_experts, -1).permute(1, 0, 2)
        return Adapter(a=a.reshape(self.num_experts, -1, a.shape[1]), b=stacked_b, scale=self.scaling[name])

    with patch.object(UnmergedAdapters, "_adapter", adapter):
        yield


@contextmanager
def one_ranks_part() -> Iterator[None]:
    """The exported adapter has the first rank's rows, and zeros in the place of the others'."""
    save_pretrained = training.save_pretrained

    def broken(model: nn.Module, folder: Any) -> None:
        from safetensors.torch import load_file, save_file

        save_pretrained(model, folder)
        if dist.get_rank() == 0:
            file = Path(folder) / "adapter_model.safetensors"
            tensors = load_file(file)
            for value in tensors.values():
                value[-(-len(value) // dist.get_world_size()) :] = 0
            save_file(tensors, file, {"format": "pt"})

    with patch.object(training, "save_pretrained", broken):
        yield


@contextmanager
def averaged_experts() -> Iterator[None]:
    """The squares of the experts' gradients are averaged over the ranks in the norm to which gradients are clipped."""
    clip = em.ShardedOptimizer.clip_grad_norm_

    def broken(self: Any, max_norm: float) -> Tensor:
        norms = self.grad_norms()
        squares = [norm**2 / (dist.get_world_size() if "experts" in name else 1) for name, norm in norms.items()]
        found = sum(squares) ** 0.5
        clip(self, max_norm * sum(norm**2 for norm in norms.values()) ** 0.5 / found)
        return torch.tensor(found)

    with patch.object(em.ShardedOptimizer, "clip_grad_norm_", broken):
        yield


@contextmanager
def stale_moments() -> Iterator[None]:
    """The moments of experts stay as they were, while everything else of them is updated."""
    step = em.ShardedOptimizer.step

    def broken(self: Any, closure: Any = None) -> Any:
        experts = [p for chunk in self._kept._chunks for p in chunk.parameters if p.dim() == 3]
        kept = [
            (elements, elements.read().clone())
            for p in experts
            if self._kept.piece_of(p) is not None
            for name, elements in self._kept.of(p).items()
            if name.startswith("exp_avg")
        ]
        result = step(self, closure)
        for elements, before in kept:
            elements.write(before)
        return result

    with patch.object(em.ShardedOptimizer, "step", broken):
        yield


@contextmanager
def multiplied_loss() -> Iterator[None]:
    """The loss is multiplied by the ranks before the backward, and gradients are averaged over them."""
    step = training._step

    def broken(setup: Any, trainer: Any, *rest: Any) -> None:
        own = trainer.case.step
        scaled = replace(trainer.case, step=lambda model, rows: own(model, rows) * dist.get_world_size())
        step(setup, replace(trainer, case=scaled), *rest)

    with patch.object(training, "_step", broken):
        yield


@contextmanager
def drawn_anew() -> Iterator[None]:
    """Experts are drawn anew after they have been loaded."""
    load = training.load

    def broken(path: Any, model: Any, optimizer: Any) -> Any:
        extra = load(path, model, optimizer)
        with torch.no_grad():
            model.experts.weight.normal_(std=0.3)
        return extra

    with patch.object(training, "load", broken):
        yield


@contextmanager
def divided_by_replicas() -> Iterator[None]:
    """A gradient is divided by the ranks it is summed over: experts' by edp, although dp ranks sent their tokens."""
    replicas = property(lambda self: len(self.replicate_ranks))
    with patch.object(Pattern, "gradient_divisor", replicas):
        yield


@contextmanager
def no_gradient_to_the_input() -> Iterator[None]:
    """A quantized product has a forward alone: what comes before it gets no gradient through it."""

    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * 6

    with patch.object(products._Linear, "backward", staticmethod(backward)):
        yield


@contextmanager
def plain_momentum() -> Iterator[None]:
    """An optimizer that orthogonalises matrices gets flat pieces of them, and nobody looks whether that matters."""
    with patch.object(accepted, "_is_elementwise", lambda *_: True):
        yield


@contextmanager
def frozen_router() -> Iterator[None]:
    """The weights of the chosen experts are cast by way of a constant."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    forward = Qwen3MoeTopKRouter.forward

    def broken(self: Any, hidden: Tensor) -> Any:
        logits, weights, chosen = forward(self, hidden)
        return logits, weights.new_tensor(weights.tolist()), chosen

    with patch.object(Qwen3MoeTopKRouter, "forward", broken):
        yield


@contextmanager
def lost_label() -> Iterator[None]:
    """Each half of a sequence shifts its own labels, so that the last token of the first half has none."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    def broken(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        shifted = [F.pad(half[:, 1:], (0, 1), value=-100) for half in labels.chunk(2, dim=1)]
        return F.cross_entropy(logits.view(-1, vocab_size), torch.cat(shifted, 1).view(-1), ignore_index=-100)

    with patch.dict(LOSS_MAPPING, {"ForCausalLM": broken}):
        yield


@contextmanager
def decayed_though_frozen() -> Iterator[None]:
    """Weight decay reaches frozen weights, by less in a step than a trained weight may differ."""
    wrap = training.wrap

    def broken(model: Any, *arguments: Any, **options: Any) -> Any:
        model, optimizer = wrap(model, *arguments, **options)
        step = optimizer.step

        def decaying(_: Any) -> None:
            step()
            with em.unsharded(model.first, write=True), torch.no_grad():
                model.first.weight.mul_(1 - 1e-6)

        optimizer.step = MethodType(decaying, optimizer)
        return model, optimizer

    with patch.object(training, "wrap", broken):
        yield


# ------------------------------------------------------------------------------------------------------------ the cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, where it was seen, and what `verify` says of it."""

    fault: str
    """In words."""
    seen: tuple[str, ...] = ()
    """Threads, as repository#number."""
    plant: Callable[[], Any]
    """Enters it."""
    source: Callable[[], Source]
    """The model."""
    check: str
    """The first check that fails."""
    says: str
    """Part of what it says."""
    in_both: bool = False
    """Whether the plain run has the fault too."""
    plan: str = "zero3"
    """Under which it is found."""


CASES = {
    "permuted-columns": Case(
        fault="experts' columns of `lora_B` permuted: read with the expert as the slowest dim",
        seen=("unslothai/unsloth-zoo#1269", "unslothai/unsloth#6930"),
        plant=permuted_columns,
        source=partial(of_family, "qwen3-moe", lora=True),
        check="outputs of modules in step 1",
        says="with base_layer.lora_A.default.weight, base_layer.lora_B.default.weight",
    ),
    "one-ranks-part": Case(
        fault="the exported adapter is one rank's part, the rest is zero",
        seen=("axolotl-ai-cloud/axolotl#3772", "huggingface/accelerate#4206"),
        plant=one_ranks_part,
        source=partial(of_family, "llama", lora=True),
        check="exported weights",
        says="self_attn.q_proj.lora_A.default, weight: differs by",
    ),
    "averaged-experts": Case(
        fault="the clip norm averages the experts' squares over ranks",
        seen=("deepspeedai/DeepSpeed#8475", "NVIDIA/Megatron-LM#5916", "NVIDIA-NeMo/Automodel#3816"),
        plant=averaged_experts,
        source=small,
        check="gradient norm of step 1",
        says="as if the squares of module experts, weight and all of 'experts' were averaged over 2 ranks",
        plan="offload",
    ),
    "stale-moments": Case(
        fault="the experts' moments stay as they were",
        seen=("deepspeedai/DeepSpeed#8147",),
        plant=stale_moments,
        source=small,
        check="weights of step 2",
        says="module experts, weight: differs by",
        plan="offload",
    ),
    "multiplied-loss": Case(
        fault="the loss is multiplied by ranks that do not share it",
        seen=("huggingface/transformers#45994", "huggingface/transformers#35078"),
        plant=multiplied_loss,
        source=small,
        check="loss of step 1",
        says="as if multiplied by the 2 ranks",
    ),
    "drawn-anew": Case(
        fault="experts are not what was loaded, but as they were drawn",
        seen=("sgl-project/sglang#29659",),
        plant=drawn_anew,
        source=small,
        check="weights after the load",
        says="module experts, weight: differs by",
        plan="offload",
    ),
    "divided-by-replicas": Case(
        fault="an expert's gradient is divided by edp, not by dp",
        seen=("deepspeedai/DeepSpeed#6546", "pytorch/pytorch#160285", "NVIDIA/Megatron-LM#5956"),
        plant=divided_by_replicas,
        source=lambda: Named(config=GPT, rows=4),
        check="gradients of step 1",
        says="experts",
    ),
    "no-gradient-to-the-input": Case(
        fault="an FP8 layer passes no gradient to its input",
        seen=("huggingface/transformers#46736",),
        plant=no_gradient_to_the_input,
        source=partial(of_family, "llama", lora=True, quantized="fp8"),
        check="gradients of step 1",
        says="lora_",
    ),
    "plain-momentum": Case(
        fault="Muon orthogonalises nothing, as on flat shards, and is plain momentum",
        seen=("deepspeedai/DeepSpeed#8441",),
        plant=plain_momentum,
        source=partial(small, "with_muon"),
        check="weights of step 1",
        says="module first, weight: differs by",
    ),
    "frozen-router": Case(
        fault="the router gets no gradient: its weights pass a cast, or are normalized to a constant",
        seen=("jingyaogong/minimind#858", "deepspeedai/DeepSpeed#8377"),
        plant=frozen_router,
        source=partial(of_family, "qwen3-moe"),
        check="gradients of routers in step 1",
        says="layers.0.mlp.gate, weight, which is trained and has no gradient in either run",
        in_both=True,
    ),
    "lost-label": Case(
        fault="labels are shifted after a sequence is cut: one is lost at each cut",
        seen=("huggingface/transformers#36607", "NVIDIA-BioNeMo/bionemo-recipes#1449"),
        plant=lost_label,
        source=partial(of_family, "llama"),
        check="labels of step 1",
        says="logits of position 6 of 12: the loss of 0 rows here, 4 plain",
    ),
    "decayed-though-frozen": Case(
        fault="frozen weights move",
        seen=("pytorch/torchtitan#4282",),
        plant=decayed_though_frozen,
        source=partial(small, "frozen_first"),
        check="frozen weights of step 1",
        says="module first, weight: differs by",
    ),
}
"""By name."""


def found(name: str | None, folder: str, like: str | None = None) -> list[dict[str, Any]]:
    """The checks of a case, on rank 0 of the ranks that all call it; without a name, of the case `like` unharmed."""
    return judged(CASES[name or like or ""], folder, harmed=name is not None)


def judged(
    case: Case, folder: str, *, harmed: bool = True, steps: int = STEPS, accumulation: int = 1
) -> list[dict[str, Any]]:
    """The checks of a case with its fault, or unharmed, on rank 0 of the ranks that all call it."""
    setup = training.Setup(
        source=case.source(),
        backend=training.Planned(asked(case.plan, Path(folder))),
        ranks=RANKS,
        resumed_ranks=RANKS,
        steps=steps,
        accumulation=accumulation,
        compute_dtype=None,
        folder=Path(folder),
    )
    with ExitStack() as both:
        with ExitStack() as one:
            if harmed:
                (both if case.in_both else one).enter_context(case.plant())
            training.on_these_ranks(setup)
        return as_dicts(certify(setup)) if dist.get_rank() == 0 else []


def page() -> str:
    """docs/museum.md."""
    lines = [
        "# A museum of faults",
        "",
        "Made by `python -m tests.museum`; do not edit. These faults trained wrong models without a word, and were",
        "reported to trackers of other projects. Each is planted again in its smallest form in",
        "`tests/museum/cases.py`, and `elixir-moe verify` finds it. A test of each case compares what",
        "it says with this table.",
        "",
        "| fault | seen in | check that fails first | what it says |",
        "|---|---|---|---|",
    ]
    for case in CASES.values():
        threads = ", ".join(f"[{thread}]({address(thread)})" for thread in case.seen)
        lines.append(f"| {case.fault} | {threads} | {case.check} | …{case.says}… |")
    return "\n".join(lines) + "\n"


def address(thread: str) -> str:
    """Of a thread; GitHub sends the reader of a pull request's number on."""
    repository, _, number = thread.partition("#")
    return f"https://github.com/{repository}/issues/{number}"
