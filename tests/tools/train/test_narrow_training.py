"""Training with narrow state beside training with fp32 state: the losses on text that was held back."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

import elixir_moe as em
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, lm_loss
from elixir_tools.train.data import batch_at, load_text, validation_batches
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
SEEDS, STEPS, ROWS = range(5), 200, 8
CONFIG = GPTConfig(n_layers=2, d_model=64, n_heads=4, seq_len=64)
STATES = {"fp32": {}, "six bytes": {"master": "bf16", "moments": "int8"}, "bf16 moments": {"moments": "bf16"}}


def validation_loss(state: dict[str, Any], seed: int) -> float:
    """(rank) The loss after training."""
    text = load_text((), 0.1, CONFIG.seq_len)
    held_back = validation_batches(text.validation, batches=16, rows=ROWS, seq_len=CONFIG.seq_len)
    torch.manual_seed(seed)
    model: Any = GPT(CONFIG)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    plan = em.Plan.zero2(**state)
    model, optimizer = em.wrap(model, optimizer, plan=plan, compute_dtype=torch.bfloat16, device="cpu")
    for step in range(STEPS):
        lm_loss(model, batch_at(text.train, seed=seed, step=step, rows=ROWS, seq_len=CONFIG.seq_len)).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = statistics.fmean(lm_loss(model, batch).item() for batch in held_back)
    optimizer.close()
    return loss


@pytest.mark.slow
def test_losses_of_narrow_state_are_within_the_spread_of_fp32(ranks: Ranks) -> None:
    """Five seeds: the means differ by less than the standard deviation of fp32's losses."""
    found = {name: [ranks(1).run(validation_loss, state, seed)[0] for seed in SEEDS] for name, state in STATES.items()}
    for name, losses in found.items():
        print(f"{name:14}", *(f"{loss:.4f}" for loss in losses), f"mean {statistics.fmean(losses):.4f}")
    wide = found["fp32"]
    for losses in found.values():
        assert abs(statistics.fmean(losses) - statistics.fmean(wide)) < statistics.stdev(wide)
