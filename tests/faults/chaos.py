"""`make chaos`: trainings whose ranks are killed at random points of step and save, and that must not notice.

    python -m tests.faults.chaos --points 200

A third of the trainings are of a mixture, a third of a frozen base whose chunks both ranks share in one piece of
memory, and a third of a mixture whose micro-batches pass each layer together. Each point kills one of two ranks with
SIGKILL at the n-th call of a function of the library, in the training thread, in the one that saves or in those of
micro-batches, n drawn from a seed. The other rank must end with an error of its own; what was committed must be
there; and the same command, given again, must end in the state of the unbroken run, bit for bit. Nothing else is left:
no process, no shared memory that one holds, and no file in /dev/shm.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elixir_moe import spans
from elixir_moe.memory.host_mapping import SharedFile
from elixir_tools import settings
from elixir_tools.cli import main as cli
from elixir_tools.models.gpt import GPT
from elixir_tools.train import trainer
from elixir_tools.train.trainer import Trainer
from tests.support.checkpoint_cases import assert_same
from tests.support.every import every
from tests.support.shared_memory import abandoned, holders, sessions_of
from tests.support.train_cases import last_state, settings_of, written

RANKS = 2
KINDS = ("mixture", "shared", "passes")
THREADS = {"MainThread": "training", "elixir-save": "saving", "micro-batch": "micro-batches"}
"""{how names of threads begin: what they are called here}."""
_TIMEOUT_SECONDS = 180
_SHARED = "shared.txt"
"""Inodes of the memory that ranks have shared."""
_LIBRARY = tuple(str(Path(module.__file__).parents[1]) for module in (cli, spans))


@dataclass(frozen=True, slots=True)
class Point:
    """Where a rank dies."""

    rank: int
    thread: str
    """A value of `THREADS`."""
    call: int
    """At this call of a function of the library in that thread, counted from the first step on."""


class Frozen(GPT):
    """A GPT of which only the output layers of attention are trained, as adapters are."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("attention.out" in name)


def config_of(out: Path, kind: str) -> Any:
    """Four steps, a checkpoint behind each; small enough for hundreds of them."""
    sections: dict[str, Any] = {
        "run": {"steps": 4, "eval_every": 4, "eval_batches": 1, "timeout_seconds": 100.0, "global_batch": 4},
        "data": {"paths": [str(out.parent / "text.txt")]},
        "save": {"every": 1, "keep": 2},
    }
    if kind == "mixture":
        return settings_of(out, model={"n_layers": 1, "experts": [4], "ep": [2], "seq_len": 8}, **sections)
    if kind == "passes":
        sections["run"] |= {"global_batch": 8, "accumulation": 2}
        sections["plan"] = {"kind": "offload", "rcache_blocks": 5, "chunk_numel": 3000, "batches_per_pass": 2}
        return settings_of(out, model={"n_layers": 4, "experts": [0, 0, 4, 0], "ep": [1, 1, 2, 1]}, **sections)
    sections["plan"] = {"kind": "offload", "rcache_blocks": 4, "shared_frozen": True}
    return settings_of(out, model={"n_layers": 1, "experts": [], "ep": [], "residual": False, "seq_len": 8}, **sections)


class Counter:
    """Counts calls of the library's functions by thread, and ends the process at one of them."""

    def __init__(self, point: Point | None) -> None:
        self._point = point
        self.calls = dict.fromkeys(THREADS.values(), 0)

    def start(self) -> None:
        sys.setprofile(self._note)
        threading.setprofile(self._note)

    def _note(self, frame: Any, event: str, _argument: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(_LIBRARY):
            return
        name = threading.current_thread().name
        kind = next((kind for begins, kind in THREADS.items() if name.startswith(begins)), None)
        if kind is not None:
            self.calls[kind] += 1
            point = self._point
            if point is not None and point.thread == kind and self.calls[kind] == point.call:
                os.kill(os.getpid(), signal.SIGKILL)


def rank_main(out: Path, rank: int, port: int, point: Point | None, counts: Any) -> None:
    """One rank of a run, in a process of its own."""
    os.setsid()
    multiprocessing.current_process()._config["semprefix"] = "/chaos"  # type: ignore[attr-defined]
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(os.open(out.parent / f"said-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    counter = Counter(point if point is not None and point.rank == rank else None)
    step = Trainer.step

    def counting(of: Trainer) -> None:
        Trainer.step = step  # type: ignore[method-assign]
        counter.start()
        step(of)

    Trainer.step = counting  # type: ignore[method-assign]
    make = SharedFile.__init__

    def noting(file: SharedFile, nbytes: int) -> None:
        make(file, nbytes)
        with (out.parent / _SHARED).open("a") as notes:
            notes.write(f"{os.fstat(file.descriptor).st_ino}\n")

    SharedFile.__init__ = noting  # type: ignore[method-assign]
    if "shared_frozen: true" in (out.parent / "run.yaml").read_text():
        trainer.GPT = Frozen  # type: ignore[misc]
    faulthandler.dump_traceback_later(_TIMEOUT_SECONDS / 2)
    code = cli.main(["train", "--config", str(out.parent / "run.yaml"), "--run.out", str(out)])
    if counts is not None:
        counts.put((rank, counter.calls))
        counts.close()
        counts.join_thread()
    os._exit(code)


def start(out: Path, point: Point | None = None, counts: Any = None) -> list[int]:
    """Runs all ranks to their ends; their exit codes, by rank."""
    context = multiprocessing.get_context("forkserver")
    helpers = [f"tests.support.{name}" for name in ("checkpoint_cases", "train_cases")]
    context.set_forkserver_preload(["elixir_tools.train.trainer", *helpers])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=rank_main, args=(out, rank, port, point, counts)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_TIMEOUT_SECONDS)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    assert None not in codes, f"{point}: a rank has not ended within {_TIMEOUT_SECONDS} s: {codes}"
    left = sessions_of(process.pid for process in ranks)
    assert not left, f"{point}: processes {left} have outlived the ranks that started them"
    return codes  # type: ignore[return-value]


class Sweep:
    """An unbroken run, and broken ones to be compared with it."""

    def __init__(self, directory: Path, kind: str) -> None:
        directory.mkdir(exist_ok=True)
        self._directory, self._named = directory, os.listdir("/dev/shm")
        (directory / "text.txt").write_text("".join(chr(97 + (i * i) % 23) for i in range(4000)))
        (directory / "run.yaml").write_text(settings.to_yaml(config_of(directory / "whole", kind)))
        counts = multiprocessing.get_context("forkserver").Queue()
        assert start(directory / "whole", None, counts) == [0, 0], (directory / "said-0.txt").read_text()
        self.calls = dict(counts.get() for _ in range(RANKS))
        assert (directory / _SHARED).exists() == (kind == "shared")
        assert every((calls["micro-batches"] > 0) == (kind == "passes") for calls in self.calls.values())
        self._nothing_left("the unbroken run")
        self._state, self._metrics = last_state(directory / "whole"), written(directory / "whole")["metrics"]

    def _said(self) -> str:
        return "".join((self._directory / f"said-{rank}.txt").read_text() for rank in range(RANKS))

    def _nothing_left(self, where: str) -> None:
        """Memory that ranks shared ends with them, and nothing is in /dev/shm."""
        notes = self._directory / _SHARED
        if notes.exists():
            held = holders(map(int, notes.read_text().split()))
            assert not held, f"{where}: processes {held} still have shared chunks"
            notes.unlink()
        assert not (files := abandoned(self._named)), f"{where}: {files} are left in /dev/shm"

    def points(self, number: int, seed: int) -> Iterator[Point]:
        """As many in each kind of thread."""
        generator = random.Random(seed)
        threads = [thread for thread, calls in self.calls[0].items() if calls]
        for i in range(number):
            rank, thread = generator.randrange(RANKS), threads[i % len(threads)]
            yield Point(rank, thread, generator.randint(1, self.calls[rank][thread]))

    def check(self, number: int, point: Point) -> str:
        """Kills at `point`, goes on, and compares; says from which step the run went on."""
        out = self._directory / f"broken-{number}"
        codes = start(out, point)
        self._nothing_left(str(point))
        other = 1 - point.rank
        if codes[point.rank] == 0:  # the order of threads was another, and the point did not come
            assert codes == [0, 0]
            how = "not reached"
        else:
            assert codes[point.rank] == -signal.SIGKILL and codes[other] in (0, 1), f"{point}: {codes}"
            said = (self._directory / f"said-{other}.txt").read_text()
            assert codes[other] == 0 or "Error: " in said, f"{point}: {said}"
            status = written(out)["status"]
            committed = int(status["checkpoint"][-8:]) if status.get("checkpoint") else 0
            how = "done already"
            if status.get("state") != "done":
                assert start(out) == [0, 0], f"{point}: {self._said()}"
                self._nothing_left(f"{point}, after going on")
                resumed = [text for kind, text in written(out)["events"] if kind == "resumed"]
                step = int(resumed[-1].rpartition(" ")[2]) if resumed else 0
                assert step >= committed, f"{point}: step {committed} was committed, the run went on from {step}"
                how = f"went on from step {step}"
        assert written(out)["metrics"] == self._metrics, f"{point}: the losses are others"
        assert_same(last_state(out), self._state, str(point))
        left = [path.name for path in (out / "checkpoints").iterdir()]
        assert not [name for name in left if name.startswith(".")], f"{point}: {left}"
        return how


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Sweeps; 0 if nothing was lost."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description="SIGKILL anywhere in training.")
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this point alone")
    parser.add_argument("--kind", choices=KINDS, help="of training; by default as many points of each")
    options = parser.parse_args(arguments)
    outcomes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as directory:
        kinds = KINDS if options.kind is None else (options.kind,)
        number = 0
        for kind in kinds:
            sweep = Sweep(Path(directory) / kind, kind)
            say(f"{kind}: calls by rank and thread: {json.dumps(sweep.calls)}")
            for point in sweep.points(options.points // len(kinds), options.seed):
                if options.only in (None, number):
                    how = sweep.check(number, point)
                    outcomes[how] = outcomes.get(how, 0) + 1
                    say(f"{number:4} {kind}, rank {point.rank}, {point.thread} call {point.call}: {how}")
                number += 1
    say(
        f"{sum(outcomes.values())} points, every run equal to the unbroken one, and nothing left behind: "
        f"{json.dumps(outcomes)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
