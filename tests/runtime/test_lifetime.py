"""The lifetime of a wrapped model and of its forwards: what nobody holds any more is freed, without `close`."""

import gc
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em


def left_behind(plans: list[em.Plan]) -> None:
    """Models that nobody closes leave no thread, descriptor or process group; a later one trains."""

    def count() -> tuple[set[str], int, int]:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith(("elixir-disk", "elixir-update")):
                thread.join(30)
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("elixir-")}
        return names, len(os.listdir("/proc/self/fd")), len(dist.distributed_c10d._world.pg_map)

    def train(plan: em.Plan) -> None:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan)
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()

    before = None
    for plan in plans * 2:
        train(plan)
        dist.barrier()  # a peer may still be in a collective of the model
        found = count()
        dist.barrier()
        before = before or found
        assert found == before
    gc.collect()


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_that_nobody_holds_leaves_nothing_behind(world: int, ranks: Any, tmp_path: Any) -> None:
    disk = em.Plan.offload(rcache_blocks=6, disk_chunks=2, chunk_numel=600, disk=str(tmp_path))
    ranks(world).run(
        left_behind, [em.Plan.ddp(), em.Plan.zero3(), em.Plan.offload(rcache_blocks=6, chunk_numel=600), disk]
    )


def test_forwards_without_a_backward_are_merged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = em.Plan.offload(rcache_blocks=4, chunk_numel=20)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), plan=plan)
    wanted = em.full_state_dict(model)
    rows = torch.eye(4)
    first = model(rows)
    for _ in range(400):
        last = model(rows)
    assert len(model._elixir.hooks.machine.forwards) <= 256
    assert len(model._elixir.scheduler.gathers._record) <= 4, "requests of the last forward alone"
    (first.sum() + last.sum()).backward()
    optimizer.step()
    found = em.full_state_dict(model)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain.load_state_dict(wanted)
    (2 * plain(rows).sum()).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach() - parameter.grad)
    optimizer.close()
