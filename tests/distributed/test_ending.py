"""A process that an error ends has its own exit code, whatever torch's threads do while Python finalizes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import with_further

ROOT = Path(__file__).parents[2]
OWN = 7
LATE_THREAD = f"""
import os, sys, threading
import torch.distributed as dist
import elixir_moe as em

em.init_mesh(device_type="cpu")
store, begun = dist.HashStore(), threading.Event()

def wait(begun=begun, store=store):
    begun.set()
    store.get("key")

class Late:
    "Freed while Python finalizes: wakes the thread, which then asks for Python's lock."

    def __del__(self, store=store, waits=os.sched_yield, write=os.write):
        store.set("key", "")
        for _ in range(100_000):
            waits()
        write(1, b"freed")

thread = threading.Thread(target=wait, daemon=True)
thread.start()
begun.wait()
sys.late = Late()
sys.exit({OWN})
"""
LATE_WORKER = f"""
import atexit, sys

def last():
    "Keeps Python's lock until it finalizes, while gloo's workers want it to free what they have gathered."
    for _ in range(4):
        group.allgather([[torch.empty(1 << 22)]], [torch.empty(1 << 22)])
    for _ in range(5_000_000):
        pass

atexit.register(last)
import torch, torch.distributed as dist
import elixir_moe as em

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
em.wrap(model, torch.optim.SGD(model.parameters()), plan=em.Plan.ddp(), device="cpu")
dist.barrier()
group = dist.group.WORLD
{{then}}
sys.setswitchinterval(1000)
sys.exit({OWN})
"""
"""The first to register is called last."""


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_thread_that_python_ends_does_not_end_the_process() -> None:
    found = ended("-c", LATE_THREAD)
    assert (found.returncode, found.stdout) == (OWN, "freed"), found.stderr


@pytest.mark.parametrize("then", ["", "dist.destroy_process_group()"], ids=["alive", "destroyed"])
def test_a_worker_of_gloo_that_python_ends_neither_aborts_nor_hangs_it(then: str) -> None:
    found = ended("-c", LATE_WORKER.format(then=then))
    assert found.returncode == OWN, found.stderr


@pytest.mark.parametrize("count", with_further([2, 4], [2]))
def test_errors_of_every_kind_end_with_their_own_exit_codes(count: int) -> None:
    """Some of those that `python -m tests.support.error_exits` counts; of each kind so many processes."""
    found = ended("-m", "tests.support.error_exits", "--count", str(count))
    assert found.returncode == 0, found.stdout + found.stderr
