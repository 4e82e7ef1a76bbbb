"""Several optimizers as one: Muon for matrices, and an elementwise optimizer for all other parameters.

Owns `Joined`, which `wrap` makes of a sequence of optimizers, and the questions about its members. Steps a plain model;
never a wrapped one.
"""

from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from elixir_moe.errors import ConfigError
from elixir_moe.optim.muon import Muon


class Joined(torch.optim.Optimizer):
    """The groups, the state and the hooks of several optimizers; the groups stay those of the members."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        """Raises ConfigError if two members have a parameter in common, or only some know the parameters' names."""
        self.members = tuple(members)
        groups = [group for member in members for group in member.param_groups]
        if len({"param_names" in group for group in groups}) > 1:
            named = next(type(m).__name__ for m in members if "param_names" in m.param_groups[0])
            raise ConfigError(
                f"{named} was built from named parameters, and another of the optimizers {names_of_members(self)} was "
                f"not: give names to all of them, as in model.named_parameters(), or to none"
            )
        first, *others = (member.defaults for member in members)
        common = {name: value for name, value in first.items() if all(name in other for other in others)}
        try:
            super().__init__(groups, common)
        except ValueError as error:
            raise ConfigError(
                f"the optimizers {names_of_members(self)} of em.wrap share parameters ({error}): give each trainable "
                f"parameter to one of them"
            ) from error
        self.state.update({key: state for member in members for key, state in member.state.items()})
        before, after = (
            ChainMap({}, *(getattr(member, hooks) for member in reversed(members)))
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        )
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = before, after  # type: ignore[assignment]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Steps each member."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
            self.state.update(member.state)
        return loss


def join(given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Returns the optimizer that `wrap` was given, or a sequence of them as one.

    Raises:
        ConfigError: a sequence has anything but optimizers, or more than one elementwise or one whole-matrix optimizer;
            an optimizer is of a subclass of Muon.
    """
    members: list[Any] = list(given) if isinstance(given, (tuple, list)) else [given]
    for member in members:
        if isinstance(member, torch.optim.Muon) and whole_matrix(member) is None:
            raise ConfigError(
                f"{type(member).__name__} is a subclass of Muon, whose step may be another: use torch.optim.Muon or "
                f"em.Muon"
            )
    if not isinstance(given, (tuple, list)):
        return given  # type: ignore[return-value]  # a single optimizer, which other checks look at
    if not members or not all(isinstance(member, torch.optim.Optimizer) for member in members):
        raise ConfigError(
            f"wrap needs a torch.optim.Optimizer, or a sequence of them such as (muon, adamw), got a sequence of "
            f"{[type(member).__name__ for member in members]}"
        )
    for whole in (True, False):
        alike = [type(member).__name__ for member in members if (whole_matrix(member) is not None) is whole]
        if len(alike) > 1:
            kind = "optimizer of whole matrices" if whole else "elementwise optimizer"
            raise ConfigError(
                f"em.wrap takes at most one {kind}, got {alike}: use param_groups of one optimizer for other settings"
            )
    return members[0] if len(members) == 1 else Joined(members)


def members_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that were joined; the optimizer itself if none were."""
    return optimizer.members if isinstance(optimizer, Joined) else (optimizer,)


def names_of_members(optimizer: torch.optim.Optimizer) -> str:
    """The classes of the members, for messages."""
    return " and ".join(type(member).__name__ for member in members_of(optimizer))


def whole_matrix(optimizer: torch.optim.Optimizer) -> str | None:
    """The first name in `param_spec.WHOLE_MATRIX` of an optimizer that updates whole matrices; None for all others."""
    return "Muon" if type(optimizer) in (torch.optim.Muon, Muon) else None


def elementwise_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The elementwise member, if there is one."""
    return next((member for member in members_of(optimizer) if whole_matrix(member) is None), None)


def trained_whole(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, str]:
    """Returns {parameter: the whole-matrix optimizer that trains it}."""
    return {
        parameter: f"{name} in fp32" if group.get("ns_dtype") == "fp32" else name
        for member in members_of(optimizer)
        if (name := whole_matrix(member)) is not None
        for group in member.param_groups
        for parameter in group["params"]
    }
