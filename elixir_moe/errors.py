"""The errors a user can meet.

Owns the exception types and nothing else. Every message names the parameter, chunk or rank, what was expected, what
was found and what to change. An `assert` elsewhere in the package means a bug of ours, never a user's mistake.
"""


class ElixirError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(ElixirError):
    """A setting, file or command-line value is wrong."""


class LayoutError(ElixirError):
    """A mesh, pattern or rule does not fit the model or the ranks."""


class PlanError(ElixirError):
    """A plan cannot be carried out on this model, or was broken while it ran."""


class TierError(ElixirError):
    """A memory tier (device, host, disk) cannot hold what the plan puts there."""


class CheckpointError(ElixirError):
    """A checkpoint is missing, damaged, hostile or does not fit the model."""
