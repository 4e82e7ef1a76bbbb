"""A training whose rank meets a fault of the system: what torchrun starts in the tests of faults.

    torchrun ... tests/support/fault_program.py OUT RANK STEP=FAULT[,STEP=FAULT ...] [section.key=value ...]

Rank RANK meets each FAULT in its STEP, once in the life of the run: a file beside OUT remembers it.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from elixir_tools.cli import main as cli
from elixir_tools.train.trainer import Trainer


def main() -> int:
    out, rank, told, *options = sys.argv[1:]
    faults = {int(step): fault for step, _, fault in (text.partition("=") for text in told.split(","))}
    forward_backward = Trainer.forward_backward

    def meeting(training: Trainer, *, early: bool = False) -> float:
        fault = faults.get(training.progress.step + 1)
        mark = Path(f"{out}.{fault}")
        if fault and dist.get_rank() == int(rank) and not mark.exists():
            mark.touch()
            layers = next(m for m in training.model.modules() if isinstance(m, torch.nn.ModuleList))
            handle = layers[1].register_forward_hook(lambda *_: meet(fault))
            try:
                return forward_backward(training, early=early)
            finally:
                handle.remove()
        return forward_backward(training, early=early)

    Trainer.forward_backward = meeting  # type: ignore[method-assign]
    arguments = ["train", "--config", f"{out}.yaml", "--run.out", out]
    for option in options:
        key, _, value = option.partition("=")
        arguments += [f"--{key}", value]
    return cli.main(arguments)


def meet(fault: str) -> None:
    if fault == "memory":
        raise torch.OutOfMemoryError("out of memory, so the test says")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault])


if __name__ == "__main__":
    sys.exit(main())
