"""The errors a user can meet.

Owns the exception types and the suggestion of the nearest known name. Every message names the parameter, chunk or rank,
what was expected, what was found and what to change. An `assert` elsewhere in the package means a bug in the library,
never a user's mistake.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ElixirError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(ElixirError):
    """A setting, file or command-line value is wrong."""


class TorchVersionError(ConfigError, ImportError):
    """The installed torch lacks a private name that the library needs."""


class UsageError(ElixirError):
    """A wrapped model or its optimizer was used in a way that cannot work."""


class LayoutError(ElixirError):
    """A mesh, pattern or rule does not fit the model or the ranks."""


class PlanError(ElixirError):
    """A plan cannot be carried out on this model, or was broken while it ran."""


class TierError(ElixirError):
    """A memory tier (device, host, disk) cannot hold what the plan puts there."""


class DiskError(TierError):
    """The disk tier failed while it was used: the state on it is lost, though the plan fits."""


class CheckpointError(ElixirError):
    """A checkpoint is missing, damaged, hostile or does not fit the model."""


class OutOfStepError(ElixirError):
    """The collectives or steps of this rank no longer match those of other ranks."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for an unknown `name` of a `what` ("model"), with the nearest known name and all others."""
    known = list(known)
    hint = did_you_mean(name, known)
    return ConfigError(f"no {what} is called {name!r}{f'; {hint}' if hint else '.'} There are: {', '.join(known)}")


def did_you_mean(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """Returns ``did you mean 'x'?``, or "" if no known name has a similarity of at least `least`."""
    near = get_close_matches(name, list(known), n=1, cutoff=least)
    return f"did you mean {near[0]!r}?" if near else ""
