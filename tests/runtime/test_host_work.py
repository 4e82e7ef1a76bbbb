"""What the host does for each parameter and unit; counted, not timed."""

from collections.abc import Callable
from unittest import mock

import torch
from torch import nn

import elixir_moe as em
from elixir_moe.chunks.cache_policy import ACQUIRE, RELEASE, CacheRequest, CacheState, Schedule
from tests.support.ranks import RankPool


def modes_entered() -> tuple[int, int]:
    """(rank) How often a step's forward and backward enter a context that turns autograd off."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    plan = em.Plan.offload(rcache_blocks="all", chunk_numel=16 * 16 + 16)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
    counts = []
    for _ in range(2):
        with (
            mock.patch.object(torch, "inference_mode", side_effect=torch.inference_mode) as inference,
            mock.patch.object(torch, "no_grad", side_effect=torch.no_grad) as without,
        ):
            loss = model(torch.ones(2, 16)).sum()
            forward = without.call_count
            loss.backward()
        counts.append((inference.call_count, without.call_count - forward))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return counts[-1]


def test_a_backward_turns_autograd_off_for_no_gradient(ranks: Callable[[int], RankPool]) -> None:
    """It is off already, and outside of inference mode nothing must leave that mode."""
    assert ranks(1).run(modes_entered) == [(0, 0)]


def test_a_decision_looks_up_the_next_use_of_each_chunk_once() -> None:
    chunks = 20
    requests = [CacheRequest(verb, (c,)) for c in range(chunks + 1) for verb in (ACQUIRE, RELEASE)]
    schedule = Schedule([*requests, *(CacheRequest(ACQUIRE, (c,)) for c in range(chunks))])
    state = CacheState(chunks, schedule, prefetch=0)
    for chunk in range(chunks):
        state.acquire((chunk,))
        state.release((chunk,))
    with mock.patch.object(Schedule, "next_use", autospec=True, side_effect=Schedule.next_use) as looked_up:
        (load,) = state.acquire((chunks,))
    assert load.evicted == chunks - 1
    assert looked_up.call_count <= chunks + 3
