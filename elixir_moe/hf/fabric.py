"""Lightning Fabric: a strategy whose `setup` wraps model and optimizer.

Owns which of Fabric's methods use this library: setting up model and optimizer, clipping, saving and loading. The rest
stays Fabric's: ranks, data loaders, `backward`, loggers. Needs the package `lightning-fabric`.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_fabric.plugins.precision import HalfPrecision, Precision
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import nn

from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.errors import CheckpointError, ConfigError, UsageError
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.parallel.rules import ranks_of_a_batch
from elixir_moe.state.checkpoint.load import load
from elixir_moe.state.checkpoint.save import save
from elixir_moe.state.full import full_state_dict
from elixir_moe.wrap import wrap

_Part = nn.Module | torch.optim.Optimizer


class _MastersInFp32(HalfPrecision):
    """Fabric's ``precision="bf16-true"`` for a model that `em.wrap` gathers in bf16; parameters are not converted."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def module_init_context(self) -> AbstractContextManager[None]:
        """Returns a context that changes nothing: parameters keep their dtype."""
        return nullcontext()


class ElixirStrategy(DDPStrategy):
    """Makes Fabric train one model with one optimizer under a plan: ``Fabric(strategy=ElixirStrategy(plan=...))``.

    Gradients are summed over ranks in each backward, and accumulate until the step; `no_backward_sync` changes nothing.
    ``Fabric(precision="bf16-true")`` gathers weights in bf16, as ``wrap={"compute_dtype": torch.bfloat16}`` does, and
    gives the model its inputs in bf16. Masters are kept in fp32.
    """

    def __init__(self, *, plan: Plan | AutoPlan | None = None, wrap: dict[str, Any] | None = None, **kwargs: Any):
        """`plan` as in `em.wrap`, `Plan.zero3()` by default; `wrap`: its other arguments; the rest goes to Fabric."""
        super().__init__(**kwargs)
        self._plan = Plan.zero3() if plan is None else plan
        self._options = wrap or {}
        self._backward_sync_control: Any = None
        self._same_rows, self._cuts_data = 1, False
        """How many ranks at a time need the same rows, and whether Fabric distributes the rows."""

    @property
    def precision(self) -> Precision:
        found: Precision = super().precision
        return found

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        bf16 = precision is not None and precision.precision == "bf16-true"
        self._precision = _MastersInFp32("bf16-true") if bf16 else precision

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Fabric's arguments for the sampler of a data loader. Raises ConfigError if ranks need the same rows."""
        self._cuts_data = True
        self._check_rows()
        found: dict[str, Any] = super().distributed_sampler_kwargs
        return found

    def _check_rows(self) -> None:
        if self._cuts_data and self._same_rows > 1:
            raise ConfigError(
                f"{self._same_rows} ranks at a time need the same rows, since weights are cut over them, and Fabric "
                f"gives each rank other ones: call fabric.setup_dataloaders(..., use_distributed_sampler=False), and "
                f"read the same rows on those ranks"
            )

    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing: `em.wrap` moves weights to the device as the plan says."""

    def setup_module(self, module: nn.Module) -> Any:
        """Raises UsageError: weights and optimizer state are sharded together."""
        raise UsageError("ElixirStrategy needs the model with its optimizer: call fabric.setup(model, optimizer)")

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Wraps the model and its optimizer; a scheduler stays as it is.

        Raises:
            UsageError: there is not one optimizer.
            ConfigError: Fabric was told to convert the model, or gives other rows to ranks that need the same ones.
        """
        if len(optimizers) != 1:
            raise UsageError(f"fabric.setup got {len(optimizers)} optimizers: give the model with one")
        options = dict(self._options)
        if isinstance(self.precision, _MastersInFp32):
            if options.setdefault("compute_dtype", torch.bfloat16) is not torch.bfloat16:
                raise ConfigError(
                    f"Fabric(precision='bf16-true') and compute_dtype={options['compute_dtype']}: leave one of them out"
                )
        elif self.precision.precision != "32-true":
            raise ConfigError(
                f"Fabric(precision={self.precision.precision!r}): write Fabric(precision='bf16-true'), which keeps "
                f"masters in fp32 here, or leave it out"
            )
        model, optimizer = wrap(module, optimizers[0], plan=self._plan, device=self.root_device, **options)
        self._same_rows = ranks_of_a_batch(model)
        try:
            self._check_rows()
        except ConfigError:
            optimizer.close()
            raise
        return model, [optimizer], scheduler

    # ------------------------------------------------------------------------------------------------------ gradients

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Calls `ShardedOptimizer.clip_grad_norm_`; `step` then refuses gradients that are not finite.

        Raises UsageError unless `norm_type` is 2.
        """
        norm: torch.Tensor = optimizer.clip_grad_norm_(max_norm, norm_type=norm_type)
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Calls `ShardedOptimizer.clip_grad_value_`."""
        optimizer.clip_grad_value_(clip_val)

    # ---------------------------------------------------------------------------------------------------------- state

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns `em.full_state_dict`, on rank 0 only. Collective."""
        return full_state_dict(module)

    def save_checkpoint(
        self, path: str | os.PathLike[str], state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Saves a checkpoint of `em.save`: model, optimizer and the rest of `state`, by `state_dict()` where it exists.

        Raises:
            UsageError: `state` lacks the model or the optimizer, or there is a filter.
        """
        if filter or storage_options is not None:
            raise UsageError("fabric.save: a checkpoint of elixir_moe takes no filter and no storage_options")
        model, optimizer = _both(state)
        rest = {name: value for name, value in state.items() if not isinstance(value, _Part)}
        extra = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in rest.items()}
        save(path, model, optimizer, extra=extra)

    def load_checkpoint(
        self, path: str | os.PathLike[str], state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads what `save_checkpoint` saved, on any number of ranks; returns the values that `state` does not name.

        Raises:
            UsageError: `state` lacks the model or the optimizer.
            CheckpointError: it is not a checkpoint of `em.save` for this model, or lacks a name of `state` (`strict`).
        """
        model, optimizer = _both(state)
        rest: dict[str, Any] = load(path, model, optimizer) or {}
        wanted = [name for name, value in state.items() if not isinstance(value, _Part)]
        if strict and (missing := [name for name in wanted if name not in rest]):
            raise CheckpointError(f"{os.fspath(path)} has no {missing}: expected {wanted}, found {list(rest)}")
        for name in wanted:
            if name in rest:
                found = rest.pop(name)
                if hasattr(state[name], "load_state_dict"):
                    state[name].load_state_dict(found)
                else:
                    state[name] = found
        return rest


def _both(state: Any) -> tuple[nn.Module, ShardedOptimizer]:
    """The model and the optimizer in `state`."""
    values = list(state.values()) if isinstance(state, dict) else []
    models = [value for value in values if isinstance(value, nn.Module)]
    optimizers = [value for value in values if isinstance(value, ShardedOptimizer)]
    if (len(models), len(optimizers)) != (1, 1):
        raise UsageError(
            f"a checkpoint has one model and its optimizer, got {len(models)} and {len(optimizers)}: give both, as in "
            f'{{"model": model, "optimizer": optimizer}}'
        )
    return models[0], optimizers[0]
