"""Trainers of transformers under a plan: their mixin, their callbacks, and the names of their folders."""

from elixir_moe.hf.accelerate import CHECKPOINT_FOLDER
from elixir_moe.hf.steps import GoBack, StepCallback
from elixir_moe.hf.trainer import SET_ASIDE_FOLDER, ElixirMixin, why_incomplete
