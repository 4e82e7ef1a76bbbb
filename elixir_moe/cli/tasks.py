"""The planning problem that the arguments of `plan` describe.

Owns the construction of the model without data, on ranks that do not exist, and its trace. Searches for nothing.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe.chunks.plan import size_bytes
from elixir_moe.errors import ConfigError
from elixir_moe.models import presets
from elixir_moe.parallel.mesh import init_mesh
from elixir_moe.search.hardware import Hardware
from elixir_moe.search.solve import Task
from elixir_moe.search.trace import trace


def ranks_of(known: argparse.Namespace) -> int:
    """Ranks over which the model's experts are spread; 1 without experts."""
    return known.gpus if known.model is not None and presets.is_mixture(known.model) else 1


@contextmanager
def pretended_ranks(ranks: int) -> Iterator[DeviceMesh | None]:
    """A mesh of fake ranks, which send nothing, so that experts are distributed as on the real ones; None for one."""
    if ranks == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("plan pretends to be a cluster and cannot run inside one: call it without torchrun")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)  # type: ignore[no-untyped-call]
    try:
        yield init_mesh(device_type="cpu")
    finally:
        dist.destroy_process_group()


def task_of(
    known: argparse.Namespace,
    hardware: Hardware,
    mesh: DeviceMesh | None,
    *,
    batch: int | None = None,
    seq: int | None = None,
    layers: int | None = None,
) -> tuple[Task, str]:
    """(planning problem of the traced model on the machine, name of the model).

    Args:
        known: the arguments of the command.
        hardware: the machine.
        mesh: as `pretended_ranks` gives it.
        batch: sequences of one rank instead of the arguments'.
        seq: tokens of a sequence instead of the arguments'; the model then gets the positions it lacks.
        layers: layers instead of the model's own number.
    """
    stretch = seq is not None
    batch, seq = batch or known.batch, seq or known.seq
    assert batch is not None and seq is not None, "the command has checked its arguments"
    if known.model is not None:
        given = presets.named_model(known.model, batch=batch, seq=seq, mesh=mesh, layers=layers, stretch=stretch)
    else:
        given = presets.huggingface_model(known.config, batch=batch, seq=seq, layers=layers, stretch=stretch)
    profile = trace(
        given.model,
        given.step,
        given.sample,
        world=known.gpus,
        compute_dtype=torch.bfloat16,
        tokens=batch * seq,
    )
    task = Task(
        profile=profile,
        hardware=hardware,
        gpus=known.gpus,
        capacity_bytes=size_bytes("--budget", known.budget) or hardware.gpu_bytes,
        host_bytes=hardware.host_bytes_per_rank(known.gpus),
        disk_bytes=hardware.disk_bytes_per_rank(known.gpus),
        imbalance=known.imbalance,
    )
    return task, given.name
