"""Saves and restores the states of each rank's random generators."""

import random
from typing import Any

import numpy as np
import torch

from elixir_moe import accelerator
from elixir_moe.errors import CheckpointError
from elixir_moe.state.checkpoint.hashing import digest_of
from elixir_moe.state.checkpoint.values import decode, encode


def random_states() -> Any:
    """Returns the encoded states of this rank's random generators: torch on CPU and GPU, Python, numpy."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }
    states |= accelerator.random_states()
    return encode(states, "the random generators")


def read_random_states(encoded: Any, where: str) -> dict[str, Any]:
    """Decodes `random_states`, and tests the states on new generators. Raises CheckpointError for an invalid state."""
    states = decode(encoded, where)
    try:
        torch.Generator().set_state(states["torch"])
        random.Random().setstate(states["python"])
        np.random.RandomState().set_state(states["numpy"])
        if (device := accelerator.found()) is not None and device.type in states:
            torch.Generator(device).set_state(states[device.type])
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where}: invalid states of random generators: {error}") from error
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Sets this rank's generators to `states` from `read_random_states`."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if (device := accelerator.found()) is not None and device.type in states:
        accelerator.api(device).set_rng_state(states[device.type])


def seed_new_rank(rank: int, text: str) -> None:
    """Seeds the generators of a rank that has no states in the checkpoint, from its number and a common string."""
    seed = int(digest_of(f"{text} {rank}".encode())[:15], 16)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
