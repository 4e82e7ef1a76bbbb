"""Hugging Face Accelerate: an `Accelerator` whose `prepare` wraps model and optimizer.

Owns which of Accelerate's verbs go to this library: preparing model and optimizer, clipping, saving and loading. All
others are Accelerate's own: data loaders, schedulers, accumulation, gathering, logging. Needs the package `accelerate`.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.distributed.all_ranks import raise_on_all_ranks
from elixir_moe.errors import CheckpointError, ConfigError, UsageError
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.parallel.mesh import init_mesh
from elixir_moe.state.checkpoint.load import load
from elixir_moe.state.checkpoint.save import save
from elixir_moe.state.full import full_state_dict
from elixir_moe.state.wrapped import require_wrapped
from elixir_moe.wrap import wrap

CHECKPOINT = "elixir_moe"
"""The folder, in one of Accelerate's or the Trainer's, with the checkpoint of model and optimizer."""
_SERVED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_DTYPES = {"no": None, "bf16": torch.bfloat16}


def save_over(folder: str, model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """Saves a checkpoint in a folder; one that is there already is replaced once the new one is whole. Collective."""
    target = os.path.join(folder, CHECKPOINT)
    there = raise_on_all_ranks("looked for a checkpoint", lambda: os.path.exists(target))[0]
    adapters = hasattr(model, "peft_config")  # the base of a peft model is read again from where it came from
    save(f"{target}.new" if there else target, model, optimizer, frozen=not adapters)

    def replace() -> None:
        if there and dist.get_rank() == 0:
            shutil.rmtree(target)
            os.rename(f"{target}.new", target)

    raise_on_all_ranks("replaced a checkpoint", replace, error=CheckpointError)


class ElixirAccelerator(Accelerator):
    """Accelerate's `Accelerator`; `prepare` calls `em.wrap` on the model and optimizer that it is given.

    ``mixed_precision="bf16"`` becomes `compute_dtype`: weights are gathered in bf16, and fp32 masters are updated.
    """

    def __init__(
        self, *args: Any, plan: Plan | AutoPlan | None = None, wrap: dict[str, Any] | None = None, **kwargs: Any
    ):
        """`plan`: as in `em.wrap`, by default `Plan.zero3()`. `wrap`: its further arguments. The rest is Accelerate's.

        Raises:
            ConfigError: other settings want to shard or to convert the model too.
        """
        super().__init__(*args, **kwargs)
        self._adopt(plan, wrap)

    @classmethod
    def adopt(cls, accelerator: Accelerator, plan: Plan | AutoPlan | None, wrap: dict[str, Any] | None) -> Self:
        """Makes an accelerator that others have built one of this class. Raises ConfigError, as the constructor."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._adopt(plan, wrap)
        return accelerator

    def _adopt(self, plan: Plan | AutoPlan | None, options: dict[str, Any] | None) -> None:
        if self.distributed_type not in _SERVED:
            raise ConfigError(
                f"accelerate is configured for {self.distributed_type.value}, which shards the model as well: leave it "
                f"out of its configuration, and start ranks with torchrun"
            )
        if self.mixed_precision not in _DTYPES:
            raise ConfigError(
                f"mixed_precision={self.mixed_precision!r}: expected 'bf16' or 'no'; write mixed_precision='bf16', "
                f"which keeps masters in fp32 and needs no loss scale"
            )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise ConfigError("a wrapped model cannot be compiled as a whole: leave torch_compile out")
        self._plan = Plan.zero3() if plan is None else plan
        self._options = {"compute_dtype": _DTYPES[self.mixed_precision], **(options or {})}
        self._prepared: tuple[Any, ...] = ()
        """The wrapped model, its optimizer, and Accelerate's around that."""

    # ------------------------------------------------------------------------------------------------------- prepare

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As Accelerate's, for a model together with its optimizer, data loaders and schedulers.

        The model stays the same object; the optimizer is an `AcceleratedOptimizer` around the sharded one. What was
        prepared before is returned as it is.

        Raises:
            UsageError: a model comes without its optimizer, or a second model.
        """
        made: dict[int, Any] = {id(item): item for item in args if self._is_prepared(item)}
        fresh = [item for item in args if id(item) not in made]
        models = [item for item in fresh if isinstance(item, nn.Module)]
        optimizers = [item for item in fresh if isinstance(item, torch.optim.Optimizer)]
        if models or optimizers:
            if (len(models), len(optimizers)) != (1, 1) or self._prepared:
                raise UsageError(
                    f"prepare got {len(models)} models and {len(optimizers)} optimizers"
                    f"{', after others' * bool(self._prepared)}: give one model with its optimizer, once"
                )
            if hasattr(models[0], "_elixir"):
                raise UsageError(
                    "another trainer or Accelerator has wrapped this model: go on with that one, or save the model "
                    "and read it into a new one"
                )
            if not dist.is_initialized():
                init_mesh(device_type=self.device.type)
            self.unwrap_model(models[0], keep_fp32_wrapper=False)  # from the autocast of an evaluation before
            model, optimizer = wrap(models[0], optimizers[0], plan=self._plan, device=self.device, **self._options)
            if require_wrapped(model, "prepare").plan.scatter and dist.get_world_size() > 1:
                # Each forward gathers. Hugging Face reads this mark where ranks must run equally many of them: in
                # generate(), and where layers are dropped at random.
                for module in model.modules():
                    setattr(module, "_is_fsdp_managed_module", True)  # noqa: B010
            # With a device to place it on, Accelerate would take the optimizer's state dict and load it again.
            self._prepared = (model, optimizer, self.prepare_optimizer(optimizer, device_placement=False))
            made |= {id(models[0]): model, id(optimizers[0]): self._prepared[-1]}
        rest = [item for item in args if id(item) not in made]
        prepared = super().prepare(*rest) if rest else ()
        others = iter(prepared if len(rest) > 1 else (prepared,))
        found = tuple(made[id(item)] if id(item) in made else next(others) for item in args)
        return found if len(found) > 1 else found[0]

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model itself if it is wrapped, else as Accelerate's: to evaluate a model that is not trained."""
        if self._is_prepared(model):
            return model
        found: nn.Module = super().prepare_model(model, *args, **kwargs)
        return found

    def release(self) -> None:
        """Closes the wrapped model; `prepare` takes the next model with its optimizer. Collective."""
        self._both()[1].close()
        self._prepared = ()

    def _is_prepared(self, item: Any) -> bool:
        return any(each is item for each in self._prepared)

    def _both(self) -> tuple[nn.Module, ShardedOptimizer]:
        if not self._prepared:
            raise UsageError("this needs model and optimizer: call prepare with both first")
        return self._prepared[0], self._prepared[1]

    # ------------------------------------------------------------------------------------------------------ gradients

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """As `ShardedOptimizer.clip_grad_norm_`, over all parameters. Raises UsageError for other norms."""
        if norm_type != 2:
            raise UsageError(f"norm_type={norm_type}: gradients are clipped by the norm of degree 2")
        return self._both()[1].clip_grad_norm_(max_norm)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As `ShardedOptimizer.clip_grad_value_`, over all parameters of the model."""
        self._both()[1].clip_grad_value_(clip_value)

    # ---------------------------------------------------------------------------------------------------------- state

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """As `em.full_state_dict`: on rank 0 alone. Collective."""
        return full_state_dict(model)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """As Accelerate's, with a checkpoint of `em.save` for model and optimizer. Collective."""
        model, optimizer = self._both()
        with self._without_optimizers():
            folder: str = super().save_state(output_dir, *args, **kwargs)
        save_over(folder, model, optimizer)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """The inverse of `save_state`, on any number of ranks. Collective.

        Without a folder: the newest that was named automatically. Raises UsageError if there is none.
        """
        model, optimizer = self._both()
        if input_dir is None:
            input_dir = self._newest()
        load(os.path.join(input_dir, CHECKPOINT), model, optimizer)
        with self._without_optimizers():
            super().load_state(input_dir, *args, **kwargs)

    def _newest(self) -> str:
        named: list[Path] = []
        if self.project_configuration.automatic_checkpoint_naming:
            named = list(Path(self.project_dir, "checkpoints").glob("checkpoint_*"))
        if not named:
            raise UsageError("load_state needs the folder that save_state returned: none has an automatic name")
        return str(max(named, key=lambda folder: int(folder.name.rpartition("_")[2])))

    @contextmanager
    def _without_optimizers(self) -> Iterator[None]:
        optimizers = self._optimizers  # type: ignore[has-type]
        self._optimizers = []
        try:
            yield
        finally:
            self._optimizers = optimizers
