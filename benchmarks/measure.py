"""Step times of two contenders in turn, and the host's time for one request to the cache.

Owns the clock. Runs inside a rank; every rank runs the same calls in the same order. A round is some steps of the one
and then as many of the other; the next round begins with the other, so that a machine that slows down favors neither.
Each step trains on new random tokens: on zeros arithmetic can be faster than in practice.
"""

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import elixir_moe as em
from benchmarks.contenders import Contender, ours
from benchmarks.workload import SEED, Workload
from elixir_moe.chunks.cache_policy import Verb
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_tools.models.gpt import lm_loss

FIRST_LOSS_TOLERANCE = {False: 1e-5, True: 1e-2}
"""Relative, in fp32 and in bf16. Weights and arithmetic are equal to the bit, but for a matmul on memory that is
aligned otherwise; in bf16 (8 bits) the loss is a mean of many tokens, and layers may round at other places."""
FALL_TOLERANCE = 0.05
"""Relative, of the loss's fall on one batch. Adam's first update is its learning rate times the sign of each gradient,
and sums of another order can turn the sign where a gradient is all but zero. A wrong update changes most of it."""
AGREEMENT_STEPS = 3


class DisagreementError(AssertionError):
    """Two contenders do not train the same model on the same data."""


def batches(workload: Workload, *, stream: int) -> Iterator[Tensor]:
    """Random tokens, (batch, seq_len + 1) each, without end: other ones for each rank and `stream`."""
    generator = torch.Generator().manual_seed(SEED + 1000 * stream + dist.get_rank())
    shape = (workload.batch, workload.model.seq_len + 1)
    while True:
        yield torch.randint(workload.model.vocab_size, shape, generator=generator)


def check_agreement(contenders: dict[str, Contender], workload: Workload) -> None:
    """Takes the first steps of all on the same batch; raises DisagreementError if they do not train the same model.

    The first loss of each rank tells that weights, data and forward are equal, and its fall over the next steps, among
    contenders whose ranks share gradients, that the updates are. Exactness is the tests' to prove; this is against
    comparing unequal work.
    """
    batch = next(batches(workload, stream=0))
    one_rank = dist.get_world_size() == 1
    first: dict[str, float] = {}
    fall: dict[str, float] = {}
    for name, contender in contenders.items():
        if not contender.same_work:
            continue
        losses = [contender.step(batch).item() for _ in range(AGREEMENT_STEPS)]
        first[name] = losses[0]
        if contender.shares_gradients or one_rank:
            fall[name] = losses[0] - losses[-1]
    _compare("first loss", first, FIRST_LOSS_TOLERANCE[workload.bf16])
    _compare("fall of the loss", fall, FALL_TOLERANCE)


def _compare(what: str, found: dict[str, float], tolerance: float) -> None:
    """Raises unless all values equal the first."""
    for name, value in found.items():
        reference, expected = next(iter(found.items()))
        if not abs(value - expected) <= tolerance * abs(expected):
            raise DisagreementError(
                f"the {what} of {name} is {value}, that of {reference} {expected}: they do not do the same work, and "
                f"a ratio of their times would not be meaningful"
            )


def race(mine: Contender, peer: Contender, workload: Workload, *, rounds: int, steps: int) -> list[tuple[float, float]]:
    """Seconds a step (ours, theirs) in each round, of the slower rank; before them one round that does not count."""

    def seconds_of(contender: Contender) -> Callable[[int], float]:
        return lambda turn: _time_steps(contender, workload, steps, stream=1 + turn)

    return in_turn(seconds_of(mine), seconds_of(peer), rounds)


def in_turn(mine: Callable[[int], float], theirs: Callable[[int], float], rounds: int) -> list[tuple[float, float]]:
    """Seconds (mine, theirs) that each tells of its round; which begins alternates, and the first does not count."""
    times = []
    for turn in range(rounds + 1):
        seconds = {}
        pair = {"ours": mine, "theirs": theirs}
        for name in list(pair)[:: 1 if turn % 2 else -1]:
            seconds[name] = pair[name](turn)
        times.append((seconds["ours"], seconds["theirs"]))
    return times[1:]


def _time_steps(contender: Contender, workload: Workload, steps: int, *, stream: int) -> float:
    data = batches(workload, stream=stream)
    drawn = [next(data) for _ in range(steps)]
    dist.barrier()
    start = time.perf_counter()
    for batch in drawn:
        contender.step(batch)
    return slowest((time.perf_counter() - start) / steps)


def slowest(seconds: float) -> float:
    """The most that any rank says. Collective."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.item()


def host_microseconds(workload: Workload, *, rounds: int) -> list[float]:
    """Host time of one unshard and its release while the chunk is in its block, in each round: the mean over a forward.

    A forward gathers everything and is left without a backward; then the requests of its modules are made again, by the
    recorded schedule.
    """
    contender = ours(workload, em.Plan.offload(rcache_blocks="all"))  # in one process all else is used in place
    optimizer, data = contender.optimizer, batches(workload, stream=0)
    assert isinstance(optimizer, ShardedOptimizer)
    for _ in range(2):
        contender.step(next(data))
    lm_loss(contender.model, next(data))
    times = [_replay_forward(optimizer) for _ in range(rounds)]
    contender.close()
    return times


def _replay_forward(optimizer: ShardedOptimizer) -> float:
    scheduler = optimizer._scheduler
    assert scheduler.cache.schedule is not None
    entries = scheduler.cache.schedule.entries
    forward = entries[: next(i for i, entry in enumerate(entries) if entry.chunks[0] < 0)]  # the first gradient's
    requests = sum(entry.verb is Verb.ACQUIRE for entry in forward)
    scheduler.rewind()
    start = time.perf_counter()
    for entry in forward:
        if entry.verb is Verb.ACQUIRE:
            scheduler.gathers.unshard(entry.chunks, tracked=True, who="the benchmark")
        else:
            scheduler.release(entry.chunks, tracked=True)
    return (time.perf_counter() - start) / requests * 1e6
