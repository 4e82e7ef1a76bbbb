"""What others do on CPU ranks over gloo, as ways to train beside this library's plans.

Owns how each peer is set up, as its users set it up, and what it does not do here. A peer is imported where one is
built. Judges nothing: `certificate` compares what it leaves with plain PyTorch, as it does for a plan.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import parallel

from elixir_moe.errors import ConfigError, unknown_name
from elixir_tools.verify.cases import TestCase
from elixir_tools.verify.training import (
    ADAPTERS,
    CLIP,
    FOLDER,
    HALF,
    OTHER_RANKS,
    OWN_STATE,
    QUANTIZED,
    RESUME,
    SEED,
    Setup,
    Weights,
    Wrapped,
    counts_over_ranks,
    optimizer_of,
)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another library. See `Planned`."""

    name: str

    @property
    def not_done(self) -> Mapping[str, str]:
        """See `Planned.not_done`."""
        return _KINDS[self.name].not_done

    def begin(self, setup: Setup, seed: int) -> Wrapped:
        """See `Planned.begin`. Raises ConfigError if the peer cannot train this model."""
        torch.manual_seed(seed)
        case = setup.source.build()
        if counts_over_ranks(case.model):
            raise ConfigError(
                f"{self.name}: the model has em.MoE, whose loss of routing counts over ranks of this library "
                f"alone; give a model of transformers or of plain torch"
            )
        return _KINDS[self.name].begin(setup, case)

    def started(self, setup: Setup) -> Weights:
        """See `Planned.started`."""
        if FOLDER in self.not_done:
            return {}
        trainer = self.begin(setup, SEED)
        weights = trainer.weights()
        trainer.close()
        return weights


def peer(name: str) -> Peer:
    """The peer of that name. Raises ConfigError if there is none, or it is not installed."""
    if name not in _KINDS:
        raise unknown_name("peer", name, PEERS)
    kind = _KINDS[name]
    for module, install in kind.needs.items():
        if find_spec(module) is None:
            raise ConfigError(f"{name} needs {module}: {install}")
    return Peer(name)


# ------------------------------------------------------------------------------------------------- of torch's optimizer


@dataclass(kw_only=True, slots=True)
class OfTorch:
    """A model whose gradients are tensors or DTensors, and an optimizer of torch over them. See `Wrapped`."""

    case: TestCase
    runs: nn.Module
    optimizer: torch.optim.Optimizer
    accumulation: int

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Wrapped.backward`; gradients are reduced after each, and added."""
        (loss / self.accumulation).backward()

    def norms(self) -> dict[str, float]:
        """See `Wrapped.norms`."""
        named = self.case.model.named_parameters()
        return {name: float(_whole(p.grad).norm()) for name, p in named if p.grad is not None}

    def clip(self) -> Tensor:
        """Clips gradients as the peer's users do; returns the norm that was."""
        return nn.utils.clip_grad_norm_(self.case.model.parameters(), CLIP)

    def update(self) -> float:
        """See `Wrapped.update`."""
        norm = float(_whole(self.clip()))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def weights(self) -> Weights:
        """See `Wrapped.weights`."""
        return {name: _whole(p).float().clone() for name, p in self.case.model.named_parameters()}

    def moments(self) -> dict[str, Weights]:
        """See `Wrapped.moments`."""
        found: dict[str, Weights] = {}
        for module in self.case.model.modules():
            if isinstance(module, FSDPModule):  # without a backward, the root stays gathered, in other parameters
                module.reshard()
        for name, p in self.case.model.named_parameters():
            state = self.optimizer.state.get(p, {})
            if {"exp_avg", "exp_avg_sq"} <= set(state):
                first, second = (_whole(state[kind]).float().clone() for kind in ("exp_avg", "exp_avg_sq"))
                found[name] = {"exp_avg": first, "exp_avg_sq": second.sqrt()}
        return found

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Writes a checkpoint of `torch.distributed.checkpoint`, and `extra` as users do: next to it."""
        from torch.distributed import checkpoint

        checkpoint.save(self._state(), checkpoint_id=folder)
        if dist.get_rank() == 0:
            torch.save(extra, folder / "extra.pt")

    def load(self, folder: Path) -> dict[str, Any]:
        """Reads one."""
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        checkpoint.load(state, checkpoint_id=folder)
        set_state_dict(self.runs, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        extra: dict[str, Any] = torch.load(folder / "extra.pt")
        return extra

    def export(self, folder: Path) -> None:
        """Gathers the weights and writes them on rank 0."""
        whole = {name: _whole(value) for name, value in self.case.model.state_dict().items()}
        if dist.get_rank() == 0:
            _write(self.case.model, whole, folder)
        dist.barrier()

    def close(self) -> None:
        """Holds nothing."""

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.runs, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def _whole(value: Tensor) -> Tensor:
    """A tensor or a DTensor with the elements of all ranks. Collective."""
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _write(model: Any, whole: Weights, folder: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, state_dict=whole)
        return
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({name: value.contiguous() for name, value in whole.items()}, folder / "model.safetensors")


def _trained(case: TestCase) -> torch.optim.Optimizer:
    return optimizer_of(case, (p for p in case.model.parameters() if p.requires_grad))


def _ddp(setup: Setup, case: TestCase) -> Wrapped:
    """`DistributedDataParallel`, as mixtures need it: a step may leave parameters out."""
    runs = parallel.DistributedDataParallel(case.model, find_unused_parameters=True)
    return OfTorch(case=case, runs=runs, optimizer=_trained(case), accumulation=setup.accumulation)


def _fsdp2(setup: Setup, case: TestCase) -> Wrapped:
    """`fully_shard` of each block and of the root. A block is what an outermost `nn.ModuleList` lists."""
    from torch.distributed import fsdp

    half = setup.compute_dtype is not None
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=setup.compute_dtype, reduce_dtype=torch.float32 if half else None, cast_forward_inputs=not half
    )
    lists = [name for name, module in case.model.named_modules() if isinstance(module, nn.ModuleList)]
    for name in lists:
        if not any(name.startswith(f"{other}.") for other in lists):
            for block in case.model.get_submodule(name).children():
                fsdp.fully_shard(block, mp_policy=policy)
    fsdp.fully_shard(case.model, mp_policy=policy)
    return OfTorch(case=case, runs=case.model, optimizer=_trained(case), accumulation=setup.accumulation)


# ------------------------------------------------------------------------------------------------------ of transformers


class OfTransformers(OfTorch):
    """A mixture whose experts transformers has spread over the ranks, beside FSDP2 of the rest."""

    __slots__ = ()

    def clip(self) -> Tensor:
        """As `Trainer` does for gradients on several meshes."""
        from transformers import Trainer

        norm: Tensor = Trainer._mixed_mesh_grad_norm(None, self.case.model, CLIP)  # type: ignore[arg-type]
        return norm

    def export(self, folder: Path) -> None:
        """Lets transformers gather and write."""
        self.case.model.save_pretrained(folder)  # type: ignore[operator]
        dist.barrier()


def _hf_ep(setup: Setup, case: TestCase) -> Wrapped:
    """``from_pretrained(distributed_config=...)``: each rank its own rows and experts."""
    from transformers import DistributedConfig

    drawn: Any = case.model
    if not getattr(drawn, "ep_plan", None):
        raise ConfigError(
            f"hf-ep: transformers spreads the experts of models that have an ep_plan, and "
            f"{type(drawn).__name__} has none: give a mixture of transformers"
        )
    ranks = dist.get_world_size()
    counts = [m.num_experts for m in drawn.modules() if isinstance(getattr(m, "num_experts", None), int)]
    folder = setup.folder / "hf-ep"
    if dist.get_rank() == 0:
        drawn.save_pretrained(folder)
    dist.barrier()
    model = type(drawn).from_pretrained(
        folder,
        dtype=torch.float32,
        distributed_config=DistributedConfig(
            fsdp_size=ranks, ep_size=gcd(ranks, *counts), fsdp_mixed_precision=setup.compute_dtype is not None
        ),
    )
    dist.barrier()
    model.config.use_cache = False
    if drawn.is_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    spread = TestCase(model=model.train(), step=case.step, sample=case.sample)
    return OfTransformers(case=spread, runs=model, optimizer=_trained(spread), accumulation=setup.accumulation)


# --------------------------------------------------------------------------------------------------------- of DeepSpeed


@dataclass(kw_only=True, slots=True)
class OfDeepSpeed:
    """A model in DeepSpeed's engine. See `Wrapped`."""

    case: TestCase
    runs: Any
    optimizer: torch.optim.Optimizer

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """See `Wrapped.backward`; the engine divides by the micro-batches, and wants each to end in `step`."""
        self.runs.backward(loss)
        if not last:
            self.runs.step()

    def norms(self) -> dict[str, float]:
        """See `Wrapped.norms`."""
        from deepspeed.utils import safe_get_full_grad

        named = [(name, p) for name, p in self.case.model.named_parameters() if p.requires_grad]
        found = ((name, safe_get_full_grad(p)) for name, p in named)
        return {name: float(gradient.float().norm()) for name, gradient in found if gradient is not None}

    def update(self) -> float:
        """See `Wrapped.update`."""
        self.runs.step()
        return float(self.runs.get_global_grad_norm())

    def weights(self) -> Weights:
        """See `Wrapped.weights`; frozen ones have no master."""
        from deepspeed import zero
        from deepspeed.utils import safe_get_full_fp32_param

        found: Weights = {}
        for name, p in self.case.model.named_parameters():
            value = safe_get_full_fp32_param(p) if p.requires_grad else None
            if value is None:
                with zero.GatheredParameters([p]):
                    value = p.detach().clone()
            found[name] = value.detach().float().clone()
        return found

    def moments(self) -> dict[str, Weights]:
        """See `Wrapped.moments`."""
        from deepspeed.utils import safe_get_full_optimizer_state

        found: dict[str, Weights] = {}
        for name, p in self.case.model.named_parameters():
            if p.requires_grad:
                both = [safe_get_full_optimizer_state(p, kind) for kind in ("exp_avg", "exp_avg_sq")]
                found[name] = {"exp_avg": both[0].clone(), "exp_avg_sq": both[1].sqrt()}
        return found

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """See `Wrapped.save`."""
        self.runs.save_checkpoint(str(folder), client_state=extra)

    def load(self, folder: Path) -> dict[str, Any]:
        """See `Wrapped.load`."""
        extra: dict[str, Any] = self.runs.load_checkpoint(str(folder))[1]
        return extra

    def export(self, folder: Path) -> None:
        """By way of a checkpoint, as its ``zero_to_fp32.py`` does."""
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        saved = folder.with_name(f"{folder.name}-from")
        self.save(saved, {})
        dist.barrier()
        if dist.get_rank() == 0:
            _write(self.case.model, get_fp32_state_dict_from_zero_checkpoint(str(saved)), folder)
        dist.barrier()

    def close(self) -> None:
        """See `Wrapped.close`."""
        self.runs.destroy()


def stage_of(name: str) -> int:
    """The stage of ZeRO that a peer's name says, 3 where it says none."""
    return int(name.partition("-")[2] or 3)


def _zero(stage: int) -> Callable[[Setup, TestCase], Wrapped]:
    """The engine with ZeRO of that stage."""

    def begin(setup: Setup, case: TestCase) -> Wrapped:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo, and no compiler at the first use
        deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,  # for its measures of speed; a step takes the rows it is given
            "gradient_accumulation_steps": setup.accumulation,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": setup.compute_dtype is not None},
            "steps_per_print": 10**9,
        }
        optimizer = _trained(case)
        engine, *_ = deepspeed.initialize(model=case.model, optimizer=optimizer, config=config)
        return OfDeepSpeed(case=case, runs=engine, optimizer=optimizer)

    return begin


# ------------------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    begin: Callable[[Setup, TestCase], Wrapped]
    not_done: Mapping[str, str]
    needs: Mapping[str, str]
    """{a module: what installs it}."""


_PLAIN = {
    QUANTIZED: "it has no weights in 4 or 8 bits of its own",
    FOLDER: "it wraps a model that is there",
    OWN_STATE: "each rank has its own, and its checkpoint has those of one rank or none",
}
_DEEPSPEED = _PLAIN | {OTHER_RANKS: "as many ranks load as have saved, unless ds_to_universal.py converts between"}
_TRANSFORMERS = {
    QUANTIZED: "its quantizers that train need a GPU",
    ADAPTERS: "transformers does not say that peft's adapters of experts are spread with them",
    RESUME: "its Trainer refuses it: the optimizer of a model that was sharded at load cannot be saved",
    OTHER_RANKS: "it does not resume",
}
_KINDS: dict[str, _Kind] = {
    "ddp": _Kind(begin=_ddp, not_done=_PLAIN | {HALF: "weights, gradients and masters have one dtype in it"}, needs={}),
    "fsdp2": _Kind(begin=_fsdp2, not_done=_PLAIN, needs={}),
    **{
        name: _Kind(
            begin=_zero(stage_of(name)),
            not_done=_DEEPSPEED,
            needs={"deepspeed": "DS_BUILD_OPS=0 pip install deepspeed"},
        )
        for name in ("deepspeed", "deepspeed-2", "deepspeed-1")
    },
    "hf-ep": _Kind(
        begin=_hf_ep,
        not_done=_TRANSFORMERS,
        needs={"transformers": "pip install 'transformers>=5.21'", "accelerate": "pip install accelerate"},
    ),
}
PEERS = tuple(_KINDS)
"""Their names."""
