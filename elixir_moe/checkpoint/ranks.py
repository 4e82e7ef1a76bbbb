"""What all ranks do as one: fail, and draw random numbers.

Owns the rule that an error of one rank is an error of all, and the states of the random generators, of which each rank
has its own.
"""

import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from elixir_moe.checkpoint.hashing import digest_of
from elixir_moe.checkpoint.values import decode, encode
from elixir_moe.chunks.collectives import naming_failures
from elixir_moe.errors import CheckpointError, ElixirError

T = TypeVar("T")


def together(process_group: dist.ProcessGroup, what: str, work: Callable[[], T]) -> list[T]:
    """Runs `work` on every rank; returns all their results, which must be small, by rank. Collective.

    Raises:
        CheckpointError: on all ranks, if it failed on any; says which and why. A failure that is neither the library's
            nor the system's (a bug) is raised as it is where it happened.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    everyone: list[Any] = [None] * dist.get_world_size(process_group)
    with naming_failures(f"the agreement of all ranks after they {what}"):
        dist.all_gather_object(everyone, (None if error is None else _text(error), result), group=process_group)
    failures = [(rank, text) for rank, (text, _) in enumerate(everyone) if text is not None]
    if not failures:
        return [result for _, result in everyone]
    if error is not None and not isinstance(error, (ElixirError, OSError)):
        raise error
    rank, text = failures[0]
    others = f" ({len(failures)} ranks failed)" if len(failures) > 1 else ""
    raise CheckpointError(f"[rank {rank}]{others} {text}") from error


def random_states() -> Any:
    """The states of this rank's random generators (torch on CPU and GPU, Python, numpy), encoded."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return encode(states, "the random generators")


def read_random_states(encoded: Any, where: str) -> dict[str, Any]:
    """The inverse of `random_states`, tried on generators of its own: no generator of this process changes.

    Raises:
        CheckpointError: a state is of another form.
    """
    states = decode(encoded, where)
    try:
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        if "cuda" in states and torch.cuda.is_available():
            torch.Generator("cuda").set_state(states["cuda"])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where}: no states of random generators: {error}") from error
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Makes this rank's generators go on from `states`, as `read_random_states` gives them."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def seed_new_rank(rank: int, text: str) -> None:
    """Seeds the generators of a rank that a checkpoint has no states for, from its number and a text all ranks know."""
    seed = int(digest_of(f"{text} {rank}".encode())[:15], 16)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        return f"{name}{error.strerror or error}"
    return str(error) if isinstance(error, ElixirError) else f"{type(error).__name__}: {error}"
