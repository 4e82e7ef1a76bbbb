"""Hugging Face Accelerate: an `Accelerator` whose `prepare` wraps model and optimizer.

Owns which of Accelerate's methods use this library: preparing model and optimizer, backward, clipping, saving and
loading. The rest stays Accelerate's: data loaders, schedulers, accumulation, gathering, logging. Needs the package
`accelerate`.
"""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.distributed.all_ranks import raise_on_all_ranks
from elixir_moe.errors import CheckpointError, ConfigError, UsageError
from elixir_moe.hf.fused_experts import is_spread
from elixir_moe.optim.joined import join
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.parallel.mesh import init_mesh
from elixir_moe.parallel.rules import ranks_of_a_batch
from elixir_moe.state.checkpoint.load import load
from elixir_moe.state.checkpoint.save import save
from elixir_moe.state.checkpoint.storage import remove
from elixir_moe.state.full import full_state_dict
from elixir_moe.state.wrapped import require_wrapped
from elixir_moe.wrap import wrap

CHECKPOINT_FOLDER = "elixir_moe"
"""Name of the folder with the checkpoint of model and optimizer, inside a checkpoint of Accelerate or the Trainer."""
_SERVED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_DTYPES = {"no": None, "bf16": torch.bfloat16}


def checkpoint_in(folder: str) -> str:
    """The path of the checkpoint in a folder, if there is one. Completes a replacement that a kill interrupted.

    A new checkpoint that had not begun to replace the old one is removed. Collective.
    """
    return _finish_replacement("looked for a checkpoint", folder)[0]


def save_over(
    folder: str, model: nn.Module, optimizer: ShardedOptimizer, frozen: Collection[str] = (), extra: Any = None
) -> None:
    """Saves a checkpoint in a folder; an existing one is replaced once the new one is complete. Collective.

    The base of a peft model is not saved, apart from the parameters named in `frozen`: it is read from its source when
    the checkpoint is loaded. `extra`: as in `em.save`.
    """
    target, there = _finish_replacement("looked for a checkpoint", folder)
    written = frozen if hasattr(model, "peft_config") else True
    save(f"{target}.new" if there else target, model, optimizer, frozen=written, extra=extra)
    if there:
        _finish_replacement("replaced a checkpoint", folder, before=lambda: os.rename(target, f"{target}.old"))


def _finish_replacement(what: str, folder: str, before: Callable[[], None] = lambda: None) -> tuple[str, bool]:
    """Returns (path of the checkpoint in a folder, whether it exists) after rank 0 has run `before`. Collective."""
    target = os.path.join(folder, CHECKPOINT_FOLDER)
    new, old = f"{target}.new", f"{target}.old"

    def finish() -> bool:
        if dist.get_rank() == 0:
            before()
            if not os.path.exists(target) and os.path.exists(new):
                os.rename(new, target)
            for left in (new, old):
                if os.path.lexists(left):
                    remove(Path(left))
        return os.path.exists(target)

    return target, raise_on_all_ranks(what, finish, error=CheckpointError)[0]


class ElixirAccelerator(Accelerator):
    """Accelerate's `Accelerator` whose `prepare` calls `em.wrap` on the given model and optimizer.

    ``mixed_precision="bf16"`` becomes `compute_dtype`: weights are gathered in bf16, and fp32 masters are updated.
    """

    update_in_backward: bool = False
    """Whether `backward` of the last micro-batch of a step runs in `ShardedOptimizer.update_in_backward`."""
    after_last_backward: Callable[[], None] | None = None
    """Called at the end of `backward` of a step's last micro-batch, while updates may begin."""

    def __init__(
        self,
        *args: Any,
        plan: Plan | AutoPlan | None = None,
        wrap: dict[str, Any] | None = None,
        update_in_backward: bool = False,
        **kwargs: Any,
    ):
        """Takes Accelerate's arguments and those of a plan.

        Args:
            args, kwargs: Accelerate's.
            plan: as in `em.wrap`, by default `Plan.zero3()`.
            wrap: further arguments of `em.wrap`.
            update_in_backward: for loops that clip nothing, with one backward in the last micro-batch of a step: it
                runs in `ShardedOptimizer.update_in_backward`.

        Raises:
            ConfigError: other settings would shard or convert the model as well.
        """
        super().__init__(*args, **kwargs)
        self.update_in_backward = update_in_backward
        self._adopt(plan, wrap)

    @classmethod
    def adopt(cls, accelerator: Accelerator, plan: Plan | AutoPlan | None, wrap: dict[str, Any] | None) -> None:
        """Converts an existing accelerator to this class. Raises ConfigError like the constructor."""
        accelerator.__class__ = cls
        assert isinstance(accelerator, cls)
        accelerator._adopt(plan, wrap)

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
        self.plan: Plan | AutoPlan = Plan.zero3() if plan is None else plan
        self._models: list[nn.Module]
        self._optimizers: list[torch.optim.Optimizer]
        self._options = {"compute_dtype": _DTYPES[self.mixed_precision], **(options or {})}

    # ------------------------------------------------------------------------------------------------------- prepare

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepares a model together with its optimizer, and data loaders and schedulers as Accelerate does.

        Two optimizers are one argument, as in `em.wrap`: ``prepare(model, (muon, adamw), loader)``.

        The model stays the same object; the optimizer becomes an `AcceleratedOptimizer` around the sharded one. Objects
        that are already prepared are returned unchanged. A model without trainable parameters is prepared for
        evaluation.

        Raises:
            UsageError: a trainable model comes without its optimizer, or the other way round, or after another one.
            ConfigError: ranks that need the same rows would be given different ones; or two optimizers cannot be one.
        """
        args = tuple(join(item) if _are_optimizers(item) else item for item in args)
        placement = [None] * len(args) if device_placement is None else list(device_placement)
        if len(placement) != len(args):
            raise UsageError(f"prepare got {len(args)} objects and a device_placement for {len(placement)}")
        models = [item for item in args if isinstance(item, nn.Module) and not _is_wrapped(item) and _trainable(item)]
        optimizers = [item for item in args if isinstance(item, torch.optim.Optimizer) and not _is_wrapped(item)]
        made: dict[int, Any] = {}
        if models or optimizers:
            if any(isinstance(item, nn.Module) and _is_wrapped(item) for item in args):
                raise UsageError(
                    "another trainer or Accelerator has wrapped this model: continue with that one, or save the model "
                    "and read it into a new one"
                )
            if (len(models), len(optimizers)) != (1, 1) or self._wrapped is not None:
                raise UsageError(
                    f"prepare got {len(models)} trainable models and {len(optimizers)} optimizers"
                    f"{', after others' * (self._wrapped is not None)}: give one model with its optimizer, once; a "
                    f"model that is only evaluated goes to prepare_model(model, evaluation_mode=True)"
                )
            made = self._wrap(models[0], optimizers[0])
        for item, place in zip(args, placement, strict=True):
            if isinstance(item, nn.Module):
                made.setdefault(id(item), self.prepare_model(item, device_placement=place, evaluation_mode=True))
            elif _is_wrapped(item):
                made[id(item)] = self._adopted(item)
        rest = [(item, place) for item, place in zip(args, placement, strict=True) if id(item) not in made]
        places = None if device_placement is None else [place for _, place in rest]
        prepared = super().prepare(*(item for item, _ in rest), device_placement=places) if rest else ()
        others = iter(prepared if len(rest) > 1 else (prepared,))
        self._check_rows()
        found = tuple(made[id(item)] if id(item) in made else next(others) for item in args)
        return found if len(found) > 1 else found[0]

    def _wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, Any]:
        """Wraps a model with its optimizer; returns {id of the given object: the prepared one}."""
        if not dist.is_initialized():
            init_mesh(device_type=self.device.type)
        self.unwrap_model(model, keep_fp32_wrapper=False)  # from the autocast of an evaluation before
        if model in self._models:
            self._models.remove(model)  # from that evaluation too
        wrapped, sharded = wrap(model, optimizer, plan=self.plan, device=self.device, **self._options)
        talks = require_wrapped(wrapped, "prepare").plan.scatter or any(map(is_spread, wrapped.modules()))
        if talks and dist.get_world_size() > 1:
            # Each forward gathers, or sends tokens to experts. Hugging Face reads this attribute where all ranks must
            # run the same number of forwards: in generate(), and where layers are dropped at random.
            for module in wrapped.modules():
                setattr(module, "_is_fsdp_managed_module", True)  # noqa: B010
        return {id(model): wrapped, id(optimizer): self._adopted(sharded)}

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Prepares a data loader. Raises ConfigError if ranks that need the same rows would get different ones."""
        found = super().prepare_data_loader(*args, **kwargs)
        self._check_rows()
        return found

    def _check_rows(self) -> None:
        model, config = self._wrapped, self.parallelism_config
        if model is None or not self._dataloaders:
            return
        wanted, given = ranks_of_a_batch(model), 1 if config is None else config.tp_size
        if wanted > given:
            raise ConfigError(
                f"{wanted} ranks at a time need the same rows, since weights are cut over them, and Accelerate gives "
                f"{'each rank' if given == 1 else f'{given} ranks at a time'} other ones: on GPUs, pass "
                f"parallelism_config=ParallelismConfig(tp_size={wanted}) of accelerate; elsewhere leave Trainer, keep "
                f"data loaders out of prepare, and read the same rows on those ranks"
            )

    def _adopted(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        # With a device to place it on, Accelerate would take the optimizer's state dict and load it again.
        found: torch.optim.Optimizer = self.prepare_optimizer(optimizer, device_placement=False)
        found._is_accelerate_prepared = True  # type: ignore[attr-defined]
        return found

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns a wrapped model itself; prepares any other for evaluation, as Accelerate does."""
        if not _is_wrapped(model):
            found: nn.Module = super().prepare_model(model, *args, **kwargs)
            return found
        if model not in self._models:
            self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    def release(self) -> None:
        """Closes the wrapped model; `prepare` takes the next model with its optimizer. Collective."""
        self._both()[1].close()
        self._models = [model for model in self._models if not _is_wrapped(model)]
        self._optimizers = [optimizer for optimizer in self._optimizers if not _is_wrapped(optimizer)]

    @property
    def _wrapped(self) -> nn.Module | None:
        return next((model for model in self._models if _is_wrapped(model)), None)

    def _both(self) -> tuple[nn.Module, ShardedOptimizer]:
        if self._wrapped is None:
            raise UsageError("this needs model and optimizer: call prepare with both first")
        return self._wrapped, self._wrapped._elixir.optimizer  # type: ignore[union-attr, return-value]

    # ------------------------------------------------------------------------------------------------------ gradients

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Runs backward; with `update_in_backward`, updates begin in that of the last micro-batch."""
        early = self.update_in_backward and self.sync_gradients
        with self._both()[1].update_in_backward() if early else nullcontext():
            super().backward(loss, **kwargs)
            if self.after_last_backward is not None and self.sync_gradients:
                self.after_last_backward()

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Calls `ShardedOptimizer.clip_grad_norm_` for these parameters. Raises UsageError unless `norm_type` is 2."""
        return self._both()[1].clip_grad_norm_(max_norm, parameters, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Calls `ShardedOptimizer.clip_grad_value_` for these parameters."""
        self._both()[1].clip_grad_value_(clip_value, parameters)

    # ---------------------------------------------------------------------------------------------------------- state

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Returns `em.full_state_dict` of a wrapped model, on rank 0 only; Accelerate's of any other. Collective."""
        if _is_wrapped(model):
            return full_state_dict(model)
        state: dict[str, torch.Tensor] = super().get_state_dict(model, unwrap)
        return state

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """Saves Accelerate's state, and model and optimizer as a checkpoint of `em.save`. Collective.

        Hooks get the weights of `get_state_dict`. Weights are saved even if a hook removes them from its list.
        """
        model, optimizer = self._both()
        hooks, models = list(self._save_model_state_pre_hook.values()), list(self._models)

        def save_wrapped(_: list[nn.Module], weights: list[dict[str, torch.Tensor]], folder: str) -> None:
            if hooks:
                mine = full_state_dict(model)
                weights.insert(models.index(model), mine)
                for hook in hooks:
                    hook(models, weights, folder)
                weights[:] = [each for each in weights if each is not mine]
            save_over(folder, model, optimizer)

        with self._without_wrapped(_save_model_state_pre_hook={0: save_wrapped}):
            location: str = super().save_state(output_dir, *args, **kwargs)
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Loads what `save_state` saved, on any number of ranks. Collective.

        Without a folder, it takes the newest one that was named automatically.

        Raises:
            UsageError: there is no such folder, or a hook has removed the model from its list.
            CheckpointError: the folder has no checkpoint of `em.save` for this model.
        """
        model, optimizer = self._both()
        hooks, position = list(self._load_model_state_pre_hook.values()), self._models.index(model)

        def load_wrapped(models: list[nn.Module], folder: str) -> None:
            models.insert(position, model)
            for hook in hooks:
                hook(models, folder)
            if model not in models:
                raise UsageError(
                    "a hook of load_state has removed the wrapped model from its list: leave it there, since weights "
                    "and optimizer state are loaded together, after the hooks"
                )
            models.remove(model)
            load(checkpoint_in(folder), model, optimizer)

        with self._without_wrapped(_load_model_state_pre_hook={0: load_wrapped}):
            super().load_state(self._newest() if input_dir is None else input_dir, *args, **kwargs)

    def _newest(self) -> str:
        named: list[Path] = []
        if self.project_configuration.automatic_checkpoint_naming:
            named = list(Path(self.project_dir, "checkpoints").glob("checkpoint_*"))
        if not named:
            raise UsageError("load_state needs the folder that save_state returned: none has an automatic name")
        return str(max(named, key=lambda folder: int(folder.name.rpartition("_")[2])))

    @contextmanager
    def _without_wrapped(self, **hooks: dict[int, Any]) -> Iterator[None]:
        """A context in which Accelerate sees these hooks only, and neither the wrapped model nor its optimizer."""
        own = {"_models": [each for each in self._models if not _is_wrapped(each)], "_optimizers": [], **hooks}
        before = {name: getattr(self, name) for name in own}
        self.__dict__.update(own)
        try:
            yield
        finally:
            self.__dict__.update(before)


def _is_wrapped(item: Any) -> bool:
    """Whether this is a wrapped model, or its optimizer, possibly inside Accelerate's."""
    if isinstance(item, torch.optim.Optimizer):
        return isinstance(getattr(item, "optimizer", item), ShardedOptimizer)
    return isinstance(item, nn.Module) and hasattr(item, "_elixir")


def _are_optimizers(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and any(isinstance(each, torch.optim.Optimizer) for each in item)


def _trainable(model: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())
