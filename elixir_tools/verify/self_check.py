"""The self-check of a machine: what it is, whether training on it equals plain PyTorch, and how fast its links are.

Owns the stages, the small mixture that they train and the facts about the machine. `certificate` compares, and
`planner/measure` measures. Facts have no name of a user, a host or a folder, so that they can be sent to others.

Ranks train on all GPUs, or on the CPU where torch sees no GPU. The plain run is on the CPU in fp32, so a GPU is held
against arithmetic that is not its own.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elixir_moe.errors import ConfigError, ElixirError
from elixir_moe.ext import accelerator
from elixir_moe.ext.hardware import Hardware
from elixir_moe.ext.measure import (
    cpu_features,
    device_left,
    host_bytes_left,
    is_out_of_memory,
    measured_again,
    processor,
)
from elixir_moe.ext.plans import size_text
from elixir_moe.ext.ranks import gathered
from elixir_moe.ext.torch_versions import untested
from elixir_tools.models.config import GPTConfig
from elixir_tools.verify.cases import Named
from elixir_tools.verify.certificate import Check, certify
from elixir_tools.verify.plans import asked
from elixir_tools.verify.ranks import on_ranks
from elixir_tools.verify.training import Planned, Setup, run_on_ranks

PLANS = ("zero3", "offload", "disk")
_CPU_RANKS, _MOST_RANKS = 2, 8
_EXPERTS, _STEPS = (0, 4, 0, 8), 2
_MIXTURE = GPTConfig(seq_len=32, d_model=64, n_layers=len(_EXPERTS), experts=_EXPERTS, top_k=2, residual=True)
_NEEDED_BYTES = 1 << 30
"""Free memory of a GPU that the stages need, with what NCCL takes."""
_AT_MOST = 180.0
"""Seconds of one stage: a GPU that does not reach another one waits for ever."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The ranks of a self-check."""

    ranks: int
    gpus: bool
    """Whether each rank has a GPU."""

    @classmethod
    def here(cls) -> "Machine":
        """A rank for each GPU, at most 8, or two on the CPU."""
        gpus = accelerator.count()
        return cls(min(gpus, _MOST_RANKS) or _CPU_RANKS, gpus > 0)

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function on so many ranks; returns what rank 0 returned. Raises ElixirError."""
        return on_ranks(ranks, _named_errors, function, *arguments, gpus=self.gpus, at_most=_AT_MOST)

    def devices(self) -> list[dict[str, Any]]:
        """Each rank's GPU. Raises ConfigError if one cannot be used, or has too little free memory."""
        found: list[dict[str, Any]] = self.run(self.ranks, _look)
        return found

    def compare(self, plan: str, folder: Path, disk: Path) -> list[Check]:
        """Trains a small mixture under a plan on the ranks, and in plain PyTorch; `folder` takes what both write."""
        kind = accelerator.found() if self.gpus else None
        device = "cpu" if kind is None else kind.type
        spread = tuple(gcd(count, self.ranks) if count else 1 for count in _EXPERTS)
        config = replace(_MIXTURE, ep=spread)
        setup = Setup(
            source=Named(config=config, rows=2 * self.ranks, device=device),
            backend=Planned(asked(plan, disk)),
            ranks=self.ranks,
            resumed_ranks=self.ranks,
            steps=_STEPS,
            accumulation=1,
            compute_dtype=None,
            folder=folder,
            device=device,
        )
        run_on_ranks(setup, self.run)
        checks: list[Check] = on_ranks(1, certify, setup)
        return checks

    def speeds(self, disk: Path) -> tuple[Hardware, bool]:
        """The findings of `measured_again`."""
        found: tuple[Hardware, bool] = self.run(self.ranks, partial(measured_again, str(disk)))
        return found


def facts() -> dict[str, Any]:
    """Versions, processor and memory of this machine."""
    names = ("elixir-moe", "numpy", "transformers", "trl", "peft", "triton")
    versions = {name: d.version for name in names for d in metadata.distributions(name=name)}
    return {
        "versions": versions | {"python": platform.python_version(), "torch": torch.__version__},
        "cuda": torch.version.cuda or torch.version.hip,
        "driver": _from_nvidia_smi("driver_version"),
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_adam": cpu_features(),
        "free_host_bytes": host_bytes_left(),
        "torch_untested": untested(),
    }


def why_no_gpu() -> str:
    """Why torch sees no GPU, in a few words."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return "CUDA_VISIBLE_DEVICES hides all GPUs"
    listed = _from_nvidia_smi("name")
    if listed is None:
        return "no GPU found"
    if torch.version.cuda is None:
        return f"this torch is built without CUDA, though there is a {listed}: install torch for CUDA"
    driver = _from_nvidia_smi("driver_version")
    return (
        f"torch for CUDA {torch.version.cuda} cannot use the {listed} with its driver {driver}: install a newer "
        f"driver, or torch for an older CUDA"
    )


def _from_nvidia_smi(figure: str) -> str | None:
    """A figure of the first GPU; None without NVIDIA's command."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={figure}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.partition("\n")[0].strip() or None


def _named_errors(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function. Raises ElixirError with a sentence if the GPU's memory is exhausted."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ElixirError(f"memory is exhausted: {str(error).partition(chr(10))[0]}; {_END_OTHERS}") from error


_END_OTHERS = "end other programs that use this GPU, or choose another one with CUDA_VISIBLE_DEVICES"


def _look() -> list[dict[str, Any]]:
    """The devices of all ranks, on each of which a kernel has run. Collective."""
    kind = accelerator.found()
    return gathered({} if kind is None else _device(torch.device(kind.type, dist.get_rank())))


def _device(device: torch.device) -> dict[str, Any]:
    module, total = accelerator.api(device), accelerator.total_bytes(device)
    name, index = module.get_device_name(device), device.index
    said = f"GPU {index} ({name})"
    capability, built_for = accelerator.capability(device), getattr(module, "get_arch_list", list)
    reaches = getattr(module, "can_device_access_peer", lambda *_: False)
    try:
        torch.ones(8, device=device).add_(1).sum().item()
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{said} of compute capability {capability} runs no kernel of torch {torch.__version__}, built for "
            f"{', '.join(built_for())}: {str(error).partition(chr(10))[0]}; install a torch for this "
            f"GPU, or choose another one with CUDA_VISIBLE_DEVICES"
        ) from error
    free = device_left(device)[1]
    if free < _NEEDED_BYTES:
        raise ConfigError(
            f"{said}: {size_text(free)} of {size_text(total)} are free, and the check needs "
            f"{size_text(_NEEDED_BYTES)}: {_END_OTHERS}"
        )
    others = [other for other in range(accelerator.count()) if other != index]
    return {
        "name": name,
        "capability": capability,
        "bytes": total,
        "free_bytes": free,
        "bf16": accelerator.has_bf16(device),
        "reaches_other_gpus": all(reaches(index, other) for other in others),
    }
