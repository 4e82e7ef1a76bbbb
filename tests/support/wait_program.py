"""One rank of a training loop of its own, without a trainer, which runs what it reads from standard input.

    RANK=0 WORLD_SIZE=2 ... tests/support/wait_program.py

It answers each line, when it is done, with a line of its name and what came of it.
"""

import hashlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_moe.distributed.watchdog import last_seen

D = 8


class Session:
    """A model that is wrapped and its verbs."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(D, D) for _ in range(3)))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.1)
        plan = em.Plan.zero3(rcache_blocks=2, chunk_numel=D * D + D)
        self.model, self.optimizer = em.wrap(layers, optimizer, plan=plan)

    def evaluate(self) -> str:
        """The output for a batch that is the same on all ranks."""
        with torch.no_grad():
            return str(self.model(torch.ones(2, D)).sum().item())

    def train(self) -> str:
        """A digest of all weights after one more step, each rank with a batch of its own."""
        self.model(torch.full((2, D), float(dist.get_rank()))).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        weights = em.full_state_dict(self.model, all_ranks=True)
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest()

    def clip(self) -> str:
        """The norm of no gradients."""
        return str(self.optimizer.clip_grad_norm_(1.0).item())

    def barrier(self) -> str:
        """A collective of torch's own, as a loop has it between its phases."""
        dist.barrier()
        return "passed"

    def until(self, rank: str, text: str) -> str:
        """Where `rank` has said it is, as soon as that has `text` in it."""
        while text not in (place := last_seen([int(rank)]).get(int(rank), "")):
            pass
        return place


def main() -> None:
    em.init_mesh(device_type="cpu", timeout=timedelta(seconds=60))
    session = Session()
    print("ready", os.getpid(), flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        if verb == "again":
            session.optimizer.close()
            session, answer = Session(), "ready"
        else:
            try:
                answer = getattr(session, verb)(*arguments)
            except em.ElixirError as error:
                answer = f"{type(error).__name__}: {error}"
                print(answer, file=sys.stderr, flush=True)
        print(verb, answer, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
