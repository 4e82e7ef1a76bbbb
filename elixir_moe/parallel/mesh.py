"""Device meshes: the ranks along named axes.

Owns the start of torch.distributed and the two mesh shapes that every model uses. Never places a parameter: `pattern`
describes that.

Ranks are laid out row-major, tensor-parallel ranks next to each other, then experts, as Megatron-core does::

    8 ranks, tp=2:                ("dp", "tp")        = [[0 1] [2 3] [4 5] [6 7]]
    the same ranks, ep=2:         ("edp", "ep", "tp") = [[[0 1] [2 3]] [[4 5] [6 7]]]
"""

import atexit
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe import accelerator
from elixir_moe.distributed.collectives import connect
from elixir_moe.distributed.exit_handling import keep_exit_codes
from elixir_moe.errors import ConfigError, ElixirError, LayoutError
from elixir_moe.kernels import spare_tiles
from elixir_moe.parallel.pattern import EXPERT_AXIS, is_whole

_POLL_SECONDS = 0.01
_EXPERT_MESHES = "elixir_expert_meshes"
"""Attribute of a ("dp", "tp") mesh with its expert meshes by (ep, etp), which live as long as the mesh."""


def prepare_process() -> None:
    """Makes this process exit with its own code in spite of gloo, and multiply in spite of matrix tiles that trap.

    Importing the library does not call it: `init_mesh` and `wrap` do, and the command line before it runs a verb.
    """
    keep_exit_codes()
    spare_tiles()


def init_mesh(
    tp: int = 1, *, device_type: str | None = None, backend: str | None = None, timeout: timedelta | None = None
) -> DeviceMesh:
    """Returns the world as a mesh ("dp", "tp").

    Starts torch.distributed if it is not running: from torchrun's environment, or as a world of one without it. From
    then on the process exits with its own code, even if gloo's threads still run, and torch avoids matrix tiles (AMX)
    on a CPU that refuses them.

    Args:
        tp: tensor-parallel degree; must divide the world size.
        device_type: "cpu", or the kind of this machine's accelerator, such as "cuda"; by default the accelerator.
        backend: as for `init_process_group`; by default gloo for CPU and NCCL for CUDA tensors.
        timeout: how long a rank waits for the others in a collective; by default torch's own timeout.

    Raises:
        LayoutError: `tp` is not a whole number that divides the world size.
        ConfigError: this machine has no such device.
    """
    prepare_process()
    kind = accelerator.found()
    devices = ["cpu"] if kind is None else [kind.type, "cpu"]
    device_type = devices[0] if device_type is None else device_type
    if device_type not in devices:
        raise ConfigError(f"device_type={device_type!r}: expected one of {devices}, which this machine has, or None")
    if kind is not None and device_type != "cpu" and "LOCAL_RANK" in os.environ:  # first: NCCL uses the current device
        accelerator.api(kind).set_device(int(os.environ["LOCAL_RANK"]) % accelerator.count())
    if not dist.is_initialized():
        # Without device_id: with it, torch makes every group by splitting the world's communicator. A gloo group of
        # some ranks then hangs, and gloo's split of a restarted world crashes the process.
        backend = backend or accelerator.backends(device_type)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, rank, ranks = next(dist.rendezvous("env://", timeout=timeout or default_pg_timeout))
            fresh = dist.PrefixStore(_start_name(store, rank, ranks), store)
            dist.init_process_group(backend, store=fresh, rank=rank, world_size=ranks, timeout=timeout)
        elif "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs forget to export it
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
            atexit.register(_end_world)  # nobody else can be waiting for it
    world = dist.get_world_size()
    _check_degree("tp", tp, world, "the ranks of the world")
    ranks = torch.arange(world, device="cpu").view(world // tp, tp)
    return _connected(DeviceMesh(device_type, ranks, mesh_dim_names=("dp", "tp")), "tp")


def expert_mesh(mesh: DeviceMesh, ep: int, *, etp: int | None = None) -> DeviceMesh:
    """Returns the ranks of `mesh` ("dp", "tp") as a mesh ("edp", "ep", "tp"): `ep` ranks share the experts of a layer.

    Collective: every rank of `mesh` must call it, in the same order. Another call with the same degrees returns the
    same mesh, since every process group costs threads or device memory for the lifetime of the process.

    Args:
        mesh: a mesh from `init_mesh`.
        ep: expert-parallel degree; with `etp` it must divide the number of ranks.
        etp: tensor-parallel degree inside the experts; by default that of `mesh`.

    Raises:
        LayoutError: `mesh` is not a mesh ("dp", "tp"), or the degrees are not whole numbers that divide the ranks.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names != ("dp", "tp"):
        raise LayoutError(f"expert_mesh needs a mesh with axes ('dp', 'tp'), got {mesh!r}: use em.init_mesh()")
    ranks = mesh.mesh
    etp = int(ranks.shape[1]) if etp is None else etp
    world = ranks.numel()
    _check_degree("etp", etp, world, "the ranks of the mesh")
    _check_degree("ep", ep, world // etp, f"{world} ranks of the mesh / etp={etp}")
    made: dict[tuple[int, int], DeviceMesh] = mesh.__dict__.setdefault(_EXPERT_MESHES, {})
    if (ep, etp) not in made:
        table = ranks.reshape(world // (ep * etp), ep, etp)
        expert = DeviceMesh(mesh.device_type, table, mesh_dim_names=("edp", EXPERT_AXIS, "tp"))
        made[ep, etp] = _connected(expert, EXPERT_AXIS)
    return made[ep, etp]


def _connected(mesh: DeviceMesh, axis: str) -> DeviceMesh:
    """Creates the NCCL communicator of `axis`, since a plan counts only memory that is allocated before it.

    The other axes have none until they are used: chunks have separate process groups. Returns `mesh`.
    """
    if mesh.device_type != "cpu" and mesh.get_group(axis).size() > 1:
        connect(mesh.get_group(axis), accelerator.current(torch.device(mesh.device_type)))
    return mesh


def _end_world() -> None:
    """Ends a world of one with its process, as NCCL asks for."""
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


def _start_name(store: Any, rank: int, ranks: int) -> str:
    """Returns a unique name for this start of the ranks, which all of them get from rank 0.

    After a restart, torchrun gives the ranks the same store as before, with the addresses of dead processes, and
    without a restart number on which all nodes agree. So each rank writes a hello with a unique name, rank 0 answers to
    that name, and rank 0 returns when every rank has acknowledged the answer.
    """
    name = uuid.uuid4().hex
    if rank:
        store.set(f"hello {rank}", name)
        answer: bytes = store.get(f"answer {rank} {name}")
        store.set(f"thanks {rank} {answer.decode()}", "")
        return answer.decode()
    waiting = set(range(1, ranks))
    deadline = time.monotonic() + store.timeout.total_seconds()
    while waiting:
        if time.monotonic() > deadline:
            raise ElixirError(f"ranks {sorted(waiting)[:8]} did not join the start of torch.distributed in time")
        for other in list(waiting):
            if store.check([f"hello {other}"]):
                store.set(f"answer {other} {store.get(f'hello {other}').decode()}", name)
            if store.check([f"thanks {other} {name}"]):
                waiting.remove(other)
        time.sleep(_POLL_SECONDS)
    return name


def _check_degree(name: str, degree: int, whole: int, what: str) -> None:
    if not is_whole(degree, least=1) or whole % degree:
        divisors = [d for d in range(1, whole + 1) if whole % d == 0]
        raise LayoutError(
            f"{name}={degree!r}: expected a whole number that divides {whole} ({what}): choose one of {divisors}"
        )


def start(device: torch.device | str | None) -> torch.device:
    """Returns the device of forward; starts torch.distributed if it is not running.

    The start makes this rank's GPU the current one, so the device is looked up after it; a GPU given by its index
    becomes the current one instead.
    """
    _device(device)  # raises for a missing device before anything is started
    if not dist.is_initialized():
        init_mesh()
    return _device(device)


def _device(device: torch.device | str | None) -> torch.device:
    kind, count = accelerator.kind(), accelerator.count()
    try:
        chosen = torch.device(device or (kind if kind is not None and count else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r}: {error}") from error
    available = {"cpu": 1} if kind is None else {"cpu": 1, kind.type: count}
    if (chosen.index or 0) >= available.get(chosen.type, 0):
        accelerator.check_supported(chosen)
        raise ConfigError(f"device={device!r}: this machine has {count} GPUs, and the CPU")
    if chosen.type == "cpu":
        return chosen
    if chosen.index is not None:
        accelerator.api(chosen).set_device(chosen)  # streams, NCCL and DLPack use the current device
    return accelerator.current(chosen)
