"""Checkpoint folders: what is in them, other forms of them, random states, and folders that may be removed."""

from elixir_moe.state.checkpoint.manifest import Manifest
from elixir_moe.state.checkpoint.rng import random_states, read_random_states, set_random_states
from elixir_moe.state.checkpoint.storage import (
    CHECKPOINTS,
    MANIFEST,
    check_target,
    checkpoints,
    checkpoints_folder,
    is_checkpoint,
    read_manifest,
    remove,
    verify,
)
from elixir_moe.state.checkpoint.values import decode
from elixir_moe.state.checkpoint.whole import Whole, export_huggingface, export_torch, reshard
from elixir_moe.state.marked import (
    MARK_BYTES,
    StagingFolder,
    is_marked,
    lock,
    partial_folders,
    partial_of,
    remove_abandoned,
)
