"""The device memory of micro-batches that pass each layer together: what a trace of one predicts, on a device."""

import gc
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import pytest
import torch

import elixir_moe as em
from elixir_moe.planner.trace import trace
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, lm_loss, lm_loss_without_logits
from tests.accelerator.runner import on_device
from tests.support.cases import with_further

DEEP = {"vocab_size": 512, "seq_len": 64, "n_layers": 6, "d_model": 64, "n_heads": 4}
"""Most memory is kept for backward, or is the loss's."""
WIDE = {"vocab_size": 64, "seq_len": 8, "n_layers": 4, "d_model": 256, "n_heads": 4}
"""Most memory is the sum of a layer's gradients."""
TALL = {"vocab_size": 2048, "seq_len": 8, "n_layers": 8, "d_model": 64, "n_heads": 4, "tie_embeddings": False}
"""Most memory is the head's gradient, which forward makes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A pass."""

    shape: Any
    checkpoint: Literal["none", "reentrant", "non_reentrant"]
    dtype: torch.dtype
    host_checkpoints: Literal[0, "all"] = 0
    recompute: bool = False

    @property
    def step(self) -> Any:
        """The loss of a batch."""
        return partial(lm_loss_without_logits, recompute=self.recompute) if self.shape == TALL else lm_loss


def peaks(case: Case, together: int) -> tuple[int, int]:
    """(predicted, recorded) bytes that a pass needs besides those of the library."""
    torch.manual_seed(0)
    config = GPTConfig(**case.shape, checkpoint=case.checkpoint)
    model = GPT(config)
    batches = [torch.randint(0, config.vocab_size, (4, config.seq_len + 1)) for _ in range(together)]
    profile = trace(model, case.step, batches[0], compute_dtype=case.dtype)
    predicted = profile.peak_bytes(len(profile.kept) if case.host_checkpoints else 0, together)
    largest = max(12 * config.d_model, config.vocab_size) * config.d_model
    plan = em.Plan.offload(chunk_numel=largest, host_checkpoints=case.host_checkpoints)
    options: dict[str, Any] = {"step": case.step, "sample": batches[0], "compute_dtype": case.dtype}
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan, device="threads", **options)
    batches = [batch.to("threads") for batch in batches]
    found = 0
    for _ in range(2):
        gc.collect()  # what other models have left would be freed during the step
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        em.accumulate(model, case.step, batches)
        torch.accelerator.synchronize()
        found = torch.accelerator.max_memory_allocated() - before
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return predicted, found


CASES = [
    Case(shape=shape, checkpoint=checkpoint, dtype=dtype, host_checkpoints=away)
    for shape in (DEEP, WIDE)
    for checkpoint, away in (("none", 0), ("reentrant", 0), ("non_reentrant", 0), ("non_reentrant", "all"))
    for dtype in (torch.float32, torch.bfloat16)
    if shape is WIDE or checkpoint != "none"
]
CASES += [
    Case(shape=TALL, checkpoint="non_reentrant", dtype=dtype, recompute=recompute)
    for dtype in (torch.float32, torch.bfloat16)
    for recompute in (False, True)
]
QUICK = [case for case in CASES if case.dtype is torch.bfloat16 and case.checkpoint == "non_reentrant"]


@pytest.mark.parametrize("case", with_further(CASES, QUICK), ids=str)
@on_device()
def test_the_peak_of_a_pass_is_predicted(case: Case) -> None:
    """Attention without checkpoints holds other tensors than on a CPU; the first gradient may itself become the sum."""
    for together in (2, 3, 8):
        predicted, found = peaks(case, together)
        assert 0.85 * found < predicted < 1.3 * found, (together, predicted, found)
