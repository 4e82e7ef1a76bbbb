"""`Plan.auto` on Megatron-core's own models: traced, mixtures with an even routing, and trained exactly."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from elixir_moe.parallel import megatron
from elixir_moe.planner.events import Recorder, peak_of
from elixir_moe.planner.profile import Sent
from elixir_moe.planner.trace import trace
from elixir_moe.runtime.units import find_parts
from tests.support.cases import with_further
from tests.support.megatron_cases import HIDDEN, SEQ, VOCAB, Case, build, lm_loss, model_parallel, plain, shims, wrapped
from tests.support.parity import compare, tokens
from tests.support.ranks import RankPool

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallelism_is_planned_and_exact(ranks: Ranks, sequence_parallel: bool) -> None:
    """Sequence parallelism gathers into a buffer that outlives the trace; so does what rotary embeddings memoise."""
    case = Case(tp=2, sequence_parallel=sequence_parallel, rope=sequence_parallel)
    (wanted,) = ranks(1).run(plain, case, 1, 0.5)
    for found in ranks(2).run(wrapped, case, "auto", 1, 0.5, wanted["start"]):
        compare(found, wanted, "tp 2")
        assert found["statistics"]["off_schedule"] == 0


MIXTURES = {
    "allgather": Case(ep=2, experts=4),
    "alltoall": Case(ep=2, experts=4, dispatcher="alltoall", aux=0.05),
    "one rank's": Case(experts=4, dispatcher="alltoall", tie=True),
    "experts cut too": Case(tp=2, sequence_parallel=True, etp=2, experts=4, bias=False, gated=True, shared_expert=True),
    "recomputed": Case(ep=2, experts=4, recompute=True),
    "balanced": Case(ep=2, experts=4, aux=0.05, global_aux=True, expert_bias=True),
    "recomputed in parts": Case(
        ep=2,
        experts=4,
        bias=False,
        gated=True,
        shared_expert=True,
        recompute_modules=("mlp", "layernorm", "shared_experts"),
    ),
    "recomputed experts and attention": Case(ep=2, experts=4, bias=False, recompute_modules=("moe", "core_attn")),
}


@pytest.mark.parametrize("name", with_further(MIXTURES, ["alltoall", "experts cut too", "recomputed in parts"]))
def test_mixtures_are_planned_and_exact(name: str, ranks: Ranks) -> None:
    case = MIXTURES[name]
    one = replace(case, aux=case.aux / 2) if case.global_aux else case  # the mean over two ranks of parts of a sum
    (wanted,) = ranks(1).run(plain, one, 1, 0.5, 2 if case.aux and not case.global_aux else 1)
    for found in ranks(2).run(wrapped, case, "auto", 1, 0.5, wanted["start"]):
        compare(found, wanted, name)
        assert found["statistics"]["off_schedule"] == 0


ROWS, WIDTH, BYTES = 2, HIDDEN, 4
TOKENS = ROWS * SEQ * WIDTH * BYTES
"""What one activation of a micro-batch takes."""


def profiled(case: Case) -> dict[str, Any]:
    """(rank) What a trace tells of a model, and, in one process, what a real step holds."""
    with shims(), model_parallel(case):
        model = build(case)
        megatron.annotate(model)
        sample = tokens(0, 0, SEQ, VOCAB)[:ROWS]
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        profile = trace(model, lm_loss, sample, world=world, rank=rank)
        held = None
        if world == 1:
            with Recorder(model, find_parts(model), []) as recorder:
                lm_loss(model, sample).backward()
            held = peak_of(recorder.events)
        return {"sent": profile.sent, "expected": profile.activation_bytes, "held": held}


def test_what_a_model_sends_itself_is_seen(ranks: Ranks) -> None:
    """Two layers: each reduces behind attention and MLP, and its gradients before them; the embedding reduces, and so
    does the gradient of the output layer; cross-entropy reduces three numbers a token. Reductions count twice.
    """
    two = (0, 1)
    for found in ranks(2).run(profiled, Case(tp=2)):
        reductions = 2 * TOKENS * (2 * 4 + 1 + 1) + 2 * 3 * TOKENS // WIDTH
        assert found["sent"] == (Sent(ranks=two, nbytes=reductions, times=13),)
    routed = 2 * ROWS * SEQ  # each token to two experts
    for found in ranks(2).run(profiled, Case(ep=2, experts=4, dispatcher="alltoall")):
        there_and_back = 4 * routed * WIDTH * BYTES + 2 * routed * BYTES  # rows four times, their weights twice
        assert found["sent"] == (Sent(ranks=two, nbytes=there_and_back, times=6),)
    for found in ranks(2).run(profiled, Case(ep=2, experts=4)):
        gathered = 4 * 2 * TOKENS + 2 * 2 * ROWS * SEQ * 4 * BYTES  # weights of four experts
        assert found["sent"] == (Sent(ranks=two, nbytes=gathered, times=6),)


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_the_activation_peak_of_a_mixture_is_what_a_real_step_holds(dispatcher: str, ranks: Ranks) -> None:
    case = Case(experts=4, dispatcher=dispatcher, gated=True, bias=False)
    (found,) = ranks(1).run(profiled, case)
    assert found["expected"] == pytest.approx(found["held"], rel=0.05)
