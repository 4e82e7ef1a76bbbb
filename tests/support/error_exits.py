"""Processes that an error ends: each must end with its own exit code, and say the error.

    python -m tests.support.error_exits --kind load|save|wrap|train|plan|all --count 200

Each exit is that of a whole interpreter: torch is imported once, each rank is forked before a thread is started, and
leaves through the end of the main module. A forked process finalizes as a fresh one does, but for what threads of the
import would do; so every tenth case is started afresh.
"""

import argparse
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step imports it, which takes longer than all else
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_tools import settings
from elixir_tools.cli import main as cli
from elixir_tools.train.trainer import Trainer
from tests.support.train_cases import settings_of

UNCAUGHT, OWN = 1, 41
"""What Python makes of an error that nobody catches, and what every other program makes of it here."""
COMMANDS: dict[str, dict[str, tuple[str, set[int]]]] = {
    "train": {
        "an unknown setting": ("train --run.out {out} --run.stpes 3", {2}),
        "a rate that is no number": ("train --run.out {out} --optimizer.lr nan", {2}),
        "no text": ("train --run.out {out} --data.paths {out}/none.txt", {2}),
        "a step that fails on rank 1": ("train --config {run}", {1}),
        "a step that fails on rank 0": ("train --config {run}", {1}),
        "a step that fails alone": ("train --config {run}", {1}),
        "a loss that is not finite": ("train --config {run}", {3}),
    },
    "plan": {
        "a plan that does not fit": (
            "plan gpt2-10b --hardware a100-80g-pcie-x4 --gpus 1 --batch 1 --seq 1024 --budget 0.001GiB",
            {2},
        ),
        "no such machine": ("plan gpt2-10b --hardware none --gpus 1 --batch 1 --seq 1024", {2}),
    },
}
"""By kind and fault: the command, and the exit codes that it documents."""
ALONE = {"an unknown setting", "a rate that is no number", "no text", "a step that fails alone", *COMMANDS["plan"]}
"""One process; all else runs on two ranks."""
FRESH_EVERY = 10
PATIENCE_SECONDS = 200
D = 16

Pair = tuple[nn.Module, em.ShardedOptimizer]


def net(width: int = D) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, D))


def wrapped(plan: Any = None, **options: Any) -> Pair:
    model = options.pop("model", None) or net()
    plan = plan or em.Plan.offload(rcache_blocks=2, chunk_numel=300)
    return em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan, **options)


def stepped() -> Pair:
    model, optimizer = wrapped()
    model(torch.ones(2, D)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


# ---------------------------------------------------------------------------------------------------------------- load


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def swap(path: Path) -> None:
    one, other = (path / f"rank-0000{rank}.safetensors" for rank in range(2))
    content = one.read_bytes()
    one.write_bytes(other.read_bytes() + b"x")
    other.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a flipped bit in the file of rank 1": lambda path: flip(path / "rank-00001.safetensors"),
    "a flipped bit in the file of rank 0": lambda path: flip(path / "rank-00000.safetensors"),
    "a file cut short": lambda path: os.truncate(path / "rank-00001.safetensors", 100),
    "a missing file": lambda path: (path / "rank-00000.safetensors").unlink(),
    "a link": lambda path: link(path / "rank-00001.safetensors"),
    "swapped files": swap,
    "a manifest that is none": lambda path: (path / "manifest.json").write_text("{"),
    "no checkpoint": lambda path: path.rename(path.with_name("elsewhere")),
}


def load(fault: str, rank: int, out: Path) -> None:
    pair = stepped()
    em.save(out / "saved", *pair)
    if rank == 0:
        DAMAGES[fault](out / "saved")
    dist.barrier()
    em.load(out / "saved", *pair)


# ---------------------------------------------------------------------------------------------------------------- save


def full(rank: int, path: Path, pair: Pair, **options: Any) -> None:
    """On rank 1 no file can grow beyond 500 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500 if rank else before[0], before[1]))
    try:
        em.save(path, *pair, **options).result()
    finally:  # the error is written to a file, too
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def with_gradients(_: int, path: Path, pair: Pair) -> None:
    pair[0](torch.ones(2, D)).mean().backward()
    em.save(path, *pair)


def twice(_: int, path: Path, pair: Pair) -> None:
    for _ in range(2):
        em.save(path, *pair)


def below_a_file(rank: int, path: Path, pair: Pair) -> None:
    if rank == 0:
        path.touch()
    dist.barrier()
    em.save(path / "saved", *pair)


SAVES: dict[str, Callable[[int, Path, Pair], object]] = {
    "a full disk": full,
    "a full disk beside training": lambda rank, path, pair: full(rank, path, pair, asynchronous=True),
    "gradients that wait": with_gradients,
    "a checkpoint that is there": twice,
    "a file for a directory": below_a_file,
    "other paths": lambda rank, path, pair: em.save(path.with_name(f"saved-{rank}"), *pair),
    "an object": lambda rank, path, pair: em.save(path, *pair, extra=object() if rank else None),
    "none to keep": lambda _, path, pair: em.save(path, *pair, keep=0),
}


def save(fault: str, rank: int, out: Path) -> None:
    SAVES[fault](rank, out / "saved", stepped())


# ------------------------------------------------------------------------------------------------------- wrap and plan

WRAPS: dict[str, Callable[[int], object]] = {
    "another model on rank 1": lambda rank: wrapped(model=net(D + rank)),
    "another plan on rank 1": lambda rank: wrapped([em.Plan.ddp(), em.Plan.zero2()][rank]),
    "a plan that is none": lambda _: wrapped("zero2"),
    "a plan that is none on rank 1": lambda rank: wrapped("zero2" if rank else None),
    "a rule that matches nothing": lambda _: em.annotate(
        net(), {"none": em.Pattern(em.init_mesh(), replicate=("dp",))}
    ),
    "a dtype that is none": lambda _: wrapped(compute_dtype=torch.int8),
    "no such folder for the disk": lambda _: wrapped(
        em.Plan.offload(rcache_blocks=2, disk_chunks=1, disk="/dev/null/none")
    ),
}
PLANS: dict[str, Callable[[int], object]] = {
    "no block": lambda _: em.Plan.zero3(rcache_blocks=0),
    "too few blocks": lambda _: wrapped(em.Plan.zero3(rcache_blocks=1, chunk_numel=D * D + D), model=Both()),
    "chunks on disk and no disk": lambda _: wrapped(em.Plan.offload(rcache_blocks=2, disk_chunks=1)),
    "chunks below a parameter": lambda _: wrapped(em.Plan.zero3(rcache_blocks=2, chunk_numel=7)),
    "no room for any plan": lambda _: wrapped(
        em.Plan.auto(lambda model, x: model(x).mean(), torch.ones(2, D), budget=10)
    ),
}


class Both(nn.Module):
    """Needs two chunks at once."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.ones(D, D)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.one @ self.other


# ------------------------------------------------------------------------------------------------------------ commands


def command(kind: str, fault: str, rank: int, out: Path) -> int:
    """Runs it in this process; returns the exit code."""
    if rank == 0:
        out.parent.joinpath("text.txt").write_text("a text. " * 500)
        changes = {
            "model": {"n_layers": 1, "experts": [4], "ep": [1 if fault in ALONE else 2], "seq_len": 8},
            "run": {"steps": 3, "eval_every": 3, "eval_batches": 1, "timeout_seconds": 60.0, "global_batch": 4},
            "data": {"paths": [str(out.parent / "text.txt")]},
            "save": {"every": 1},
        }
        out.parent.joinpath("ready").write_text(settings.to_yaml(settings_of(out, **changes)))
        out.parent.joinpath("ready").rename(out.parent / "run.yaml")
    while not (out.parent / "run.yaml").exists():  # the ranks have no other way to meet yet
        os.sched_yield()
    forward_backward = Trainer.forward_backward

    def failing(training: Trainer, *, early: bool = False) -> float:
        loss = forward_backward(training, early=early)
        if training.progress.step == 2 and "step" in fault and rank == int("rank 1" in fault):
            raise RuntimeError("the fault")
        return float("nan") if "finite" in fault else loss

    Trainer.forward_backward = failing  # type: ignore[method-assign]
    line = COMMANDS[kind][fault][0].format(out=out, run=out.parent / "run.yaml")
    return cli.main(line.split())


# --------------------------------------------------------------------------------------------------------------- cases


def faults_of(kind: str) -> list[str]:
    library = {"load": DAMAGES, "save": SAVES, "wrap": WRAPS, "plan": PLANS}.get(kind, {})
    return [*library, *COMMANDS.get(kind, {})]


def expected(kind: str, fault: str, number: int) -> set[int]:
    if fault in COMMANDS.get(kind, {}):
        return COMMANDS[kind][fault][1]
    return {(UNCAUGHT, OWN)[(number + number // len(faults_of(kind))) % 2]}  # each fault ends in both ways


def run_rank(kind: str, fault: str, number: int, rank: int, port: int, out: Path) -> int:
    """One rank of a case: what its program does. Returns an exit code, or raises."""
    signal.alarm(PATIENCE_SECONDS)
    torch.set_num_threads(1)
    if fault not in ALONE:
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
    if fault in COMMANDS.get(kind, {}):
        return command(kind, fault, rank, out)
    em.init_mesh(device_type="cpu", timeout=timedelta(seconds=60))
    try:
        if kind in ("load", "save"):
            {"load": load, "save": save}[kind](fault, rank, out)
        else:
            {**WRAPS, **PLANS}[fault](rank)
    except em.ElixirError as error:
        if expected(kind, fault, number) == {UNCAUGHT}:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return OWN
    return 0


def redirect(file: Path) -> None:
    said = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(said, 1)
    os.dup2(said, 2)


class Sweep:
    """Counts how processes end."""

    def __init__(self) -> None:
        self.ends: dict[str, Counter[str]] = {}
        self.wrong: list[str] = []

    def case(self, kind: str, number: int) -> Callable[[], int] | None:
        """Runs a case to its end. In each forked rank it returns what the process is to do, in the others None."""
        faults = faults_of(kind)
        fault = faults[number % len(faults)]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        directory = Path(tempfile.mkdtemp())  # no context: a forked rank would leave it, too
        pids, files = [], [directory / f"said-{rank}" for rank in range(1 if fault in ALONE else 2)]
        for rank, file in enumerate(files):
            place = (fault, number, rank, port, directory / "out")
            if number % FRESH_EVERY == FRESH_EVERY - 1:
                fresh = [sys.executable, "-m", "tests.support.error_exits", "--rank", str(file), kind, *map(str, place)]
                pids.append(os.posix_spawn(sys.executable, fresh, os.environ))
                continue
            sys.stdout.flush()
            pids.append(os.fork())
            if not pids[rank]:
                return _forked(file, kind, *place)
        for rank, pid in enumerate(pids):
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._count(kind, fault, number, rank, code, files[rank].read_text())
        shutil.rmtree(directory)
        return None

    def _count(self, kind: str, fault: str, number: int, rank: int, code: int, said: str) -> None:
        right = code in expected(kind, fault, number)
        told = "Error" in said or "elixir-moe: " in said or fault in COMMANDS.get(kind, {})
        self.ends.setdefault(kind, Counter())[f"exit code {code}" if code >= 0 else signal.Signals(-code).name] += 1
        if not (right and told):
            self.wrong.append(f"{kind} {number}, {fault}, rank {rank}: exit code {code}: ...{said[-800:]}")


def _forked(file: Path, *case: Any) -> Callable[[], int]:
    redirect(file)
    return lambda: run_rank(*case)


def main(arguments: list[str]) -> Callable[[], int]:
    """What this process is to do with the interpreter's own stack: in each forked rank, that rank's part."""
    if arguments[:1] == ["--rank"]:
        file, kind, fault, number, rank, port, out = arguments[1:]
        return _forked(Path(file), kind, fault, int(number), int(rank), int(port), Path(out))
    kinds = ["load", "save", "wrap", "train", "plan"]
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.error_exits", description="Exit codes of failing processes."
    )
    parser.add_argument("--kind", choices=[*kinds, "all"], default="all")
    parser.add_argument("--count", type=int, default=200, help="processes of each kind")
    options = parser.parse_args(arguments)
    sweep = Sweep()
    for kind in kinds if options.kind == "all" else [options.kind]:
        number = 0
        while sum(sweep.ends.get(kind, {}).values()) < options.count:
            mine = sweep.case(kind, number)
            if mine is not None:
                return mine
            number += 1
        print(f"{kind:6} {dict(sweep.ends[kind])}", flush=True)
    for text in sweep.wrong:
        print(text)
    print(f"{len(sweep.wrong)} processes ended otherwise than with their own exit code and an error")
    return lambda: int(bool(sweep.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:])())
