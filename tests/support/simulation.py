"""A step played on the cache that the runtime uses, without memory: what the search's counts are compared with."""

from elixir_moe.chunks.cache_policy import LOOKAHEAD, CacheCounts, CacheState, Load, Schedule, Verb

_WARM_UP_STEPS = 3
"""Steps after which the kept chunks in the cache no longer change."""


def simulate(
    schedule: Schedule, blocks: int, *, prefetch: int = LOOKAHEAD, backwards: int = 1
) -> tuple[CacheCounts, list[Load]]:
    """Plays one step with `backwards` backwards on a cache of `blocks` blocks; returns the counts and all decisions.

    The cache starts empty, except for the kept chunks that earlier steps leave in it. Weights stay from one backward to
    the next forward, until the update.
    """
    state = CacheState(blocks, schedule, prefetch=prefetch)
    for _ in range(_WARM_UP_STEPS if schedule.kept else 0):
        _play(schedule, state)
        state.drop(chunk for chunk in state.chunks if chunk not in schedule.kept)
        state.rewind()
    state.counts = CacheCounts()
    decisions = _play(schedule, state)
    for _ in range(backwards - 1):
        state.rewind()
        decisions += _play(schedule, state)
    return state.counts, decisions


def _play(schedule: Schedule, state: CacheState) -> list[Load]:
    decisions: list[Load] = []
    for entry in schedule.entries:
        if entry.verb is Verb.ACQUIRE:
            decisions += state.acquire(entry.chunks)
        else:
            decisions += state.release(entry.chunks)
    return decisions
