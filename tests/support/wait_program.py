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
from torch.distributed.device_mesh import DeviceMesh

import elixir_moe as em

D = 8


class Session:
    """A model that is wrapped and its verbs."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
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

    def train_nothing(self) -> str:
        """A step with a loss that depends on no weight."""
        self.model(torch.ones(2, D))
        torch.ones((), requires_grad=True).backward()
        self.optimizer.step()
        return "done"

    def train_once(self) -> str:
        """A step with a loss that depends on the first of two runs of the model."""
        return self._train_runs(detached=True)

    def train_twice(self) -> str:
        """The same, with a loss that depends on both."""
        return self._train_runs(detached=False)

    def _train_runs(self, *, detached: bool) -> str:
        first, second = (self.model(torch.ones(2, D)) for _ in range(2))
        (first + (second.detach() if detached else second)).square().mean().backward()
        self.optimizer.step()
        return "done"

    def train_mixture(self, detached: str = "") -> str:
        """A step of a model whose loss depends on a mixture over both ranks, unless its output is detached."""
        mixture = em.MoE(d_model=D, d_hidden=D, num_experts=2, top_k=2, mesh=em.expert_mesh(self.mesh, ep=2))
        first = nn.Linear(D, D)
        model = nn.ModuleDict({"first": first, "mixture": mixture})
        _, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=em.Plan.ddp())
        out = first(torch.ones(2, D))
        mixed, _ = mixture(out)
        (out + (mixed.detach() if detached else mixed)).square().mean().backward()
        optimizer.step()
        return "done"

    def clip(self) -> str:
        """The norm of no gradients."""
        return str(self.optimizer.clip_grad_norm_(1.0).item())

    def barrier(self) -> str:
        """A collective of torch's own, as a loop has it between its phases."""
        dist.barrier()
        return "passed"


def main() -> None:
    mesh = em.init_mesh(device_type="cpu", timeout=timedelta(seconds=60))
    session = Session(mesh)
    print("ready", os.getpid(), flush=True)
    for line in sys.stdin:
        verb, *arguments = line.split()
        if verb == "again":
            session.optimizer.close()
            session, answer = Session(mesh), "ready"
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
