"""The planning problem that the arguments of `plan` describe.

Owns the construction of the model without data, on ranks that do not exist, and its trace. Searches for nothing.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe import init_mesh, quantize
from elixir_moe.errors import ConfigError
from elixir_moe.ext.hardware import Hardware
from elixir_moe.ext.hf import config_in, scheme_of, shipped_patterns
from elixir_moe.ext.optimizers import matrices_of_layers
from elixir_moe.ext.planner import Profile, Task, check_adapted_bytes, trace
from elixir_moe.ext.plans import Precision, size_bytes, size_text
from elixir_moe.ext.ranks import fake_store
from elixir_tools import names
from elixir_tools.finetune.defaults import FROZEN_IN
from elixir_tools.models import presets, shapes
from elixir_tools.models.adapters import freeze
from elixir_tools.models.known import Known, find
from elixir_tools.models.lora import Lora
from elixir_tools.models.presets import Planned
from elixir_tools.names import OPTIMIZERS, UNQUANTIZED


def named(known: argparse.Namespace) -> Known:
    """The model that the arguments name; it is looked up once."""
    if not isinstance(known.model, Known):
        known.model = find(known.model)
    return known.model


def choose_way(known: argparse.Namespace) -> None:
    """Says --full and --qlora in the words of --lora and --quantize."""
    if known.qlora is not None:
        path = _config_file(known)
        shipped = None if path is None else scheme_of(config_in(path), path)
        known.lora, known.quantize = known.qlora, known.quantize or (shipped if shipped == "mxfp4" else FROZEN_IN)
    elif known.full and known.quantize is None:
        known.quantize = UNQUANTIZED


def ranks_of(known: argparse.Namespace) -> int:
    """Ranks over which the model's experts are spread; 1 without experts."""
    return known.gpus if shapes.is_mixture(named(known).name) else 1


@contextmanager
def pretended_ranks(ranks: int, *, tp: int = 1) -> Iterator[DeviceMesh | None]:
    """A mesh of fake ranks, which send nothing, so that the model is cut as on the real ones; None for one rank."""
    if ranks == 1:
        yield None
        return
    if dist.is_initialized():
        raise ConfigError("plan runs in one process, which stands for all ranks: call it without torchrun")
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=ranks)
    try:
        yield init_mesh(tp, device_type="cpu")
    finally:
        dist.destroy_process_group()


DTYPES: dict[str, torch.dtype] = {short: getattr(torch, name) for short, name in names.DTYPES.items()}
_RESERVE, _RESERVE_RANK = 6 * 2**30, 3 * 2**30
"""Host memory that is not planned for, by default: for the system, and for Python, torch and the driver of each rank.
Assumed, and at most a quarter of the memory."""


_LEAST_BYTES = 2**20
"""Bytes below which nobody means a machine's memory, disk or rate: the unit is missing."""


def machine_bytes(name: str, text: str | None) -> int | None:
    """Bytes of a machine from the text of an argument. Raises PlanError if there is no unit, or a wrong one."""
    return size_bytes(name, text, least=_LEAST_BYTES)


def reserve_of(known: argparse.Namespace, hardware: Hardware) -> int:
    """Bytes of a node's host memory that are not planned for; by default none where free memory is measured."""
    given = machine_bytes("--ram-reserve", known.ram_reserve)
    if given is None and known.hardware == "here":
        return 0
    ranks = min(known.gpus, hardware.gpus_per_node)
    usual = min(_RESERVE + ranks * _RESERVE_RANK, hardware.cpu_bytes // 4)
    reserve = usual if given is None else given
    if hardware.cpu_bytes == 0:
        raise ConfigError("--ram: expected more than 0 B of host memory")
    if reserve >= hardware.cpu_bytes:
        there = f"{size_text(hardware.cpu_bytes)} of host memory"
        raise ConfigError(f"--ram-reserve: {size_text(reserve)} leave nothing of {there}; give a smaller one")
    return reserve


def model_of(
    known: argparse.Namespace,
    mesh: DeviceMesh | None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    layers: int | None = None,
) -> Planned:
    """The model without data that the arguments name.

    Batch, tokens of a sequence and layers replace the arguments' and the model's own. If `seq` does, the model gets the
    positions it lacks.
    """
    sizes: dict[str, Any] = {"batch": batch or known.batch, "seq": seq or known.seq, "layers": layers}
    sizes |= {"stretch": seq is not None, "checkpointing": known.checkpointing == "layers"}
    sizes |= {"loss": known.loss, "recompute": may_pass_together(known)}
    asked = named(known)
    if asked.config is not None:
        lora = None if known.lora is None else Lora.parse(known.lora)
        given = presets.huggingface_model(asked.config, **sizes, lora=lora, quantize=partial(_quantize, known))
        given = replace(given, name=asked.name)
        check_adapted_bytes(given.model)
    elif known.quantize not in (None, UNQUANTIZED):
        raise ConfigError(f"--quantize packs frozen weights under --lora, and {asked.name} trains all of its own")
    elif known.lora is not None:
        raise ConfigError(f"--lora: peft adapts Hugging Face models, and {asked.name} is not one")
    else:
        given = presets.named_model(asked.name, **sizes, mesh=mesh)
    freeze(given.model, known.freeze.split(",") if known.freeze else [])
    return given


def may_pass_together(known: argparse.Namespace) -> bool:
    """Whether several micro-batches may pass each layer together in the plan that is searched."""
    return known.accumulation > 1 and known.batches_per_pass != 1


def quantized_as(known: argparse.Namespace) -> str | None:
    """The scheme of the frozen weights: the one that is asked for, or the one in which the checkpoint is shipped.

    Raises ConfigError if the checkpoint's format is not known.
    """
    if known.quantize is not None:
        return None if known.quantize == UNQUANTIZED else str(known.quantize)
    path = _config_file(known)
    return None if path is None else scheme_of(config_in(path), path)


def _quantize(known: argparse.Namespace, model: nn.Module) -> None:
    """Makes bytes of the weights that are to be. Raises ConfigError if nothing is frozen."""
    scheme = quantized_as(known)
    if scheme is None:
        return
    if known.lora is None:
        said = f"--quantize {scheme}" if known.quantize else f"{named(known).name} has weights in {scheme}"
        raise ConfigError(
            f"{said}: quantized weights are frozen, so nothing is left to train: add --lora, or --quantize "
            f"{UNQUANTIZED} for weights in full"
        )
    path = _config_file(known)
    shipped = {} if path is None else shipped_patterns(path, scheme, model)
    quantize(model.requires_grad_(False), scheme, **shipped)


def _config_file(known: argparse.Namespace) -> Path | None:
    """The config that is given; None for a paper's model."""
    config = named(known).config
    return None if config is None else Path(config)


def task_of(known: argparse.Namespace, hardware: Hardware, given: Planned, batch: int, seq: int) -> Task:
    """The planning problem of a step of the model on `batch` sequences of `seq` tokens on the machine."""
    given = given.resampled(batch, seq)
    precision = Precision(master=known.master, moments=known.moments)
    if precision.is_narrow and known.optimizer not in ("adam", "adamw"):
        raise ConfigError(f"--master and --moments are for adam and adamw, not for --optimizer {known.optimizer}")
    profile = trace(
        given.model,
        given.step,
        given.sample,
        world=known.gpus,
        compute_dtype=DTYPES[known.dtype],
        reduce_dtype=None if known.reduce_dtype == "fp32" else DTYPES[known.reduce_dtype],
        precision=precision,
        trained_whole=_by_muon(given.model) if known.optimizer == "muon" else None,
        tokens=batch * seq,
        grouped_kernel=hardware.grouped_kernel,
    )
    return machine_task(known, hardware, profile)


def _by_muon(model: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters that Muon trains. Raises ConfigError if there are none."""
    found = matrices_of_layers(model)
    if not found:
        raise ConfigError(
            "--optimizer muon: none of the trained parameters is a matrix of a layer or an expert (adapters are "
            "adamw's): leave it out"
        )
    return dict.fromkeys(found.values(), "Muon")


def machine_task(known: argparse.Namespace, hardware: Hardware, profile: Profile) -> Task:
    """The planning problem of a step with this profile on the machine."""
    adam = known.optimizer in ("adam", "adamw")
    reserved = reserve_of(known, hardware) // min(known.gpus, hardware.gpus_per_node)
    host_bytes = hardware.host_bytes_per_rank(known.gpus) - reserved
    capacity_bytes = machine_bytes("--budget", known.budget) or hardware.gpu_bytes
    if capacity_bytes > hardware.gpu_bytes:
        raise ConfigError(
            f"--budget {known.budget}: a GPU of {hardware.name} has {size_text(hardware.gpu_bytes)}; choose at most "
            f"that, or describe another machine (--hardware)"
        )
    if hardware.one_memory:
        capacity_bytes, host_bytes = min(capacity_bytes, host_bytes), 0
    task = Task(
        profile=profile,
        hardware=hardware,
        gpus=known.gpus,
        capacity_bytes=capacity_bytes,
        host_bytes=host_bytes,
        disk_bytes=hardware.disk_bytes_per_rank(known.gpus) if adam or known.optimizer == "muon" else None,
        moments=OPTIMIZERS[known.optimizer],
        overlaps_updates=adam,
        updates_in_backward=known.update_in_backward,
        imbalance=known.imbalance,
        accumulation=known.accumulation,
        chunk_numel=None if known.chunk_numel is None else (known.chunk_numel[0], known.chunk_numel[-1]),
    )
    return task.passing(known.batches_per_pass)
