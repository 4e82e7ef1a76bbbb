"""The micro-batches of a trainer's step in passes of several, by `accumulate`.

Owns the micro-batches that wait for their pass, and the list of what keeps a trainer from it. Whatever a trainer does
with a micro-batch, it does in its own order: it prepares inputs, scales the loss and runs callbacks. Only its
`compute_loss` is called later, in the pass. Needs the package `transformers`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from elixir_moe.accumulate import accumulate
from elixir_moe.hf.peft import has_own_adapters, is_peft_model

_KNOWN = ("transformers.", "trl.trainer.")
"""Packages whose `training_step` reads neither the loss that it returns nor gradients."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A micro-batch that waits for its pass."""

    inputs: dict[str, Any]
    options: dict[str, Any]
    """Further arguments of `compute_loss`."""
    stand_in: Tensor
    """Zero in the place of the loss. The trainer's backward leaves the factor of the loss in its gradient."""

    @property
    def factor(self) -> Tensor:
        """The factor by which the trainer has multiplied the loss."""
        assert self.stand_in.grad is not None, "the trainer's backward has run"
        return self.stand_in.grad


@dataclass(slots=True)
class OnePass:
    """The micro-batches of a step that wait for their pass."""

    trainer: Any
    _compute: Callable[..., Tensor] = field(init=False)
    _waiting: list[_Waiting] = field(default_factory=list)
    _found: list[Tensor] = field(default_factory=list)
    """The scaled losses of the micro-batches that have had their pass in this training step."""

    def forget(self) -> None:
        """Forgets the micro-batches of a step that is given up."""
        self._waiting.clear()
        self._found.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context around the trainer's `training_step`: its loss waits for the pass."""
        self._compute, attributes = self.trainer.compute_loss, vars(self.trainer)
        before = {name: value for name, value in attributes.items() if name == "compute_loss"}
        attributes["compute_loss"] = self._wait  # before the method, whichever class has it
        try:
            yield
        finally:
            del attributes["compute_loss"]
            attributes.update(before)

    def _wait(self, model: nn.Module, inputs: dict[str, Any], **options: Any) -> Tensor:
        stand_in = torch.zeros((), device=self.trainer.args.device, requires_grad=True)
        self._waiting.append(_Waiting(inputs, options, stand_in))
        return stand_in

    def run(self) -> None:
        """Runs forward and backward of the micro-batches that wait. Collective."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            factors = [each.factor for each in waiting]
            losses = accumulate(self.trainer.model, self._loss, waiting, weights=factors)
            self._found += [loss * factor for loss, factor in zip(losses, factors, strict=True)]

    def _loss(self, model: nn.Module, each: _Waiting) -> Tensor:
        with self.trainer.compute_loss_context_manager():
            return self._compute(model, each.inputs, **each.options)

    def losses(self) -> Tensor | float:
        """The sum of the scaled losses of the passes that have run since the last call."""
        found, self._found = self._found, []
        return sum(found, 0.0)


def why_not(trainer: Any, mixin: type) -> str:
    """Says why a trainer's micro-batches cannot pass each layer together; empty if they can.

    `mixin` is the class whose `training_step` calls the others'.
    """
    steps = (kind for kind in type(trainer).__mro__ if "training_step" in vars(kind) and kind is not mixin)
    own = next((kind.__name__ for kind in steps if not kind.__module__.startswith(_KNOWN)), None)
    if own is not None:
        return f"{own}.training_step may read the loss or gradients of each micro-batch"
    if getattr(trainer.args, "activation_offloading", False):
        return "activation_offloading=True follows one forward and its backward; Plan.host_checkpoints does as much"
    if (
        getattr(trainer, "ref_model", trainer) is None
        and not getattr(trainer, "precompute_ref_logps", True)
        and (is_peft_model(trainer.model) or has_own_adapters(trainer.model))
    ):
        return "the loss switches adapters off for its reference; precompute_ref_log_probs=True computes it before"
    if getattr(trainer, "use_adaptive_entropy", False):
        return "use_adaptive_entropy=True changes its coefficient in the loss of the last micro-batch"
    return ""
