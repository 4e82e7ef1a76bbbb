"""`python -m benchmarks.run`: measures every row against its peer in one run, prints the table and writes it.

Owns the command line and the order of a run. Rows of as many ranks and one workload share their processes and their
contenders: each contender is built once, checked once to train the same model as the others, and kept.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import adam, adapters, checkpoint, decode, disk, hooks, launches, loss, memory, muon, one_pass
from benchmarks.contenders import Build, start_rank
from benchmarks.measure import check_agreement, host_microseconds, race
from benchmarks.report import describe, host_row, machine, markdown, race_row, unmeasured_row, without_limit, write
from benchmarks.rows import BEYOND_COMPUTE, FULL, PEAKS, QUICK, ROWS, Row
from benchmarks.workload import Workload
from elixir_moe.kernels import cpu_features

THREADS = 1
HOST_ROW = "unshard + release of a gathered chunk"
HOST_LIMIT_MICROSECONDS = 10.0
ADAM_ROW = "CPU Adam, bf16 in, bf16 out"
NARROW_LIMITS = {"bf16": {"avx512": 0.75, "avx2": 0.9}, "int8": {"avx512": 1.3, "avx2": 1.6}}
"""By moments, then by the instructions of the processor: arithmetic bounds the step on one thread, and not memory."""
ADAM_PEERS = {"DeepSpeedCPUAdam and its casts": 0.75, "an in-place stream of the same bytes": 1.15}
"""{peer of the Adam row: the ratio to stay at or below}."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit code."""
    options = _parse(arguments)
    workloads = QUICK if options.quick else FULL
    rounds, steps = options.rounds or (2 if options.quick else 9), options.steps or 1
    everything = [*ROWS, *BEYOND_COMPUTE, *PEAKS]
    wanted = [row for row in everything if options.only is None or options.only in (row.name, row.peer)]
    peaks = [row for row in wanted if row in PEAKS]
    races = [row for row in wanted if row not in PEAKS]
    parts = {HOST_ROW: (1, _host_rows), ADAM_ROW: (1, _adam_rows)}
    parts |= {name: (2, partial(checkpoint.rows, name)) for name in checkpoint.ROWS}
    parts |= {disk.ROW: (1, disk.rows), decode.ROW: (1, decode.rows), loss.ROW: (1, loss.rows)}
    parts |= {adapters.ROW: (1, adapters.rows), launches.ROW: (1, launches.rows), one_pass.ROW: (1, one_pass.rows)}
    parts |= {name: (2, partial(hooks.rows, name)) for name in hooks.ROWS}
    parts |= {name: (2, partial(muon.rows, name)) for name in muon.STEP_ROWS}
    names = {name for row in everything for name in (row.name, row.peer)} | set(parts)
    parts = {name: part for name, part in parts.items() if options.only in (None, name)}
    if not wanted and not parts:
        print(f"no row is called {options.only!r}; there are: {', '.join(map(repr, sorted(names)))}", file=sys.stderr)
        return 2
    _own_extensions(Path(options.out).resolve().parent / "torch_extensions")
    rows: list[dict[str, Any]] = []
    for ranks, key in dict.fromkeys((row.ranks, row.workload) for row in races):
        those = [row for row in races if (row.ranks, row.workload) == (ranks, key)]
        rows += _spawn(ranks, _step_rows, those, workloads[key], rounds, steps)
    rows += _peak_rows(peaks, workloads)
    for ranks, measure in parts.values():
        rows += _spawn(ranks, measure, options.quick, workloads["gpt"], rounds)
    described = {key: describe(workloads[key]) for key in dict.fromkeys(row.workload for row in wanted)}
    result = {"machine": machine(THREADS), "rounds": rounds, "steps": steps, "workloads": described, "rows": rows}
    write(result, Path(options.out))
    print(json.dumps(result) + "\n" if options.json else markdown(result), end="")
    return 0


def _own_extensions(folder: Path) -> None:
    """Where DeepSpeed compiles its kernels: a folder of ours, without the locks that a run that was killed has left."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(folder))
    for lock in folder.glob("**/lock"):
        lock.unlink()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Step times against the peers, as ratios."
    )
    parser.add_argument("--out", default="build/bench.json", help="the JSON; the table goes next to it as .md")
    parser.add_argument("--rounds", type=_at_least_1, help="rounds of each row (9)")
    parser.add_argument("--steps", type=_at_least_1, help="steps of each contender in a round (1)")
    parser.add_argument("--only", metavar="NAME", help="only the rows with this name or this peer")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds: to see that all works")
    parser.add_argument("group", nargs="?", choices=["disk"], help="only the rows of reads from disk")
    options = parser.parse_args(arguments)
    if options.group == "disk":
        options.only = disk.ROW
    try:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}; name a file that can be written")
    if Path(options.out).is_dir():
        parser.error(f"--out {options.out}: it is a directory; name a file")
    return options


def _at_least_1(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return number


def _spawn(ranks: int, measure: Any, *arguments: Any) -> list[dict[str, Any]]:
    """Starts the ranks, which call ``measure(*arguments)``; returns what rank 0 found. A rank that fails ends all."""
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (ranks, f"{directory}/rendezvous", results, measure, arguments), nprocs=ranks)
        found: list[dict[str, Any]] = results.get()
        return found


def _rank(rank: int, ranks: int, rendezvous: str, results: Any, measure: Any, arguments: tuple[Any, ...]) -> None:
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # peers print to stdout, which is for the table
    start_rank(rank, ranks, rendezvous, THREADS)
    found = measure(*arguments)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def _step_rows(rows: list[Row], workload: Workload, rounds: int, steps: int) -> list[dict[str, Any]]:
    rank = dist.get_rank()
    there = [row for row in rows if _has(row.needs)]
    builds: dict[str, Build] = dict(side for row in there for side in (row.theirs, row.ours))
    contenders = {key: build(workload) for key, build in builds.items()}
    check_agreement(contenders, workload)
    found = []
    for row in rows:
        what = _what(row)
        if row not in there:
            found.append(unmeasured_row(what, f"{row.needs} is not installed: pip install '.[bench]'"))
            continue
        times = race(contenders[row.ours[0]], contenders[row.theirs[0]], workload, rounds=rounds, steps=steps)
        found.append(race_row(what, times))
        if rank == 0:
            print(f"{row.name} / {row.peer}: {found[-1]['ratio']}", file=sys.stderr, flush=True)
    for contender in contenders.values():
        contender.close()
    return found


def _peak_rows(rows: list[Row], workloads: dict[str, Workload]) -> list[dict[str, Any]]:
    found: dict[str, float] = {}
    peaks = []
    for row in rows:
        if not _has(row.needs):
            peaks.append(unmeasured_row(_what(row), f"{row.needs} is not installed: pip install '.[bench]'"))
            continue
        for key, build in (row.ours, row.theirs):
            if key not in found:
                (found[key],) = _spawn(row.ranks, memory.peak_mib, build, workloads[row.workload])
        peaks.append(memory.peak_row(_what(row), found[row.ours[0]], found[row.theirs[0]]))
    return peaks


def _what(row: Row) -> dict[str, Any]:
    return {"name": row.name, "peer": row.peer, "workload": row.workload, "ranks": row.ranks, "limit": row.limit}


def _host_rows(_: bool, workload: Workload, rounds: int) -> list[dict[str, Any]]:
    return [host_row(HOST_ROW, HOST_LIMIT_MICROSECONDS, host_microseconds(workload, rounds=6 * rounds))]


def _adam_rows(quick: bool, _: Workload, rounds: int) -> list[dict[str, Any]]:
    numel = 100_000 if quick else 50_000_000
    rows = []
    for peer, limit in ADAM_PEERS.items():
        what = {"name": ADAM_ROW, "peer": peer, "workload": f"{numel} parameters", "ranks": 1, "limit": limit}
        against_deepspeed = peer.startswith("DeepSpeed")
        if against_deepspeed and not _has("deepspeed"):
            rows.append(unmeasured_row(what, "deepspeed is not installed: pip install '.[bench]'"))
            continue
        if against_deepspeed:
            adam.agree(10_000)
        shard = adam.Shard(numel)
        other = adam.deepspeed(adam.Shard(numel)) if against_deepspeed else adam.stream(numel)
        rows.append(race_row(what, adam.race(adam.ours(shard), other, 3 * rounds)))
    state = adam.Shard(numel)
    for moments, limits in NARROW_LIMITS.items():
        limit = limits.get(cpu_features(), limits["avx512"])
        name = f"CPU Adam, bf16 master and {moments} moments"
        what = {"name": name, "peer": ADAM_ROW, "workload": f"{numel} parameters", "ranks": 1, "limit": limit}
        row = race_row(what, adam.race(adam.narrow(state, moments), adam.ours(state), 3 * rounds))
        known = cpu_features() in limits
        rows.append(row if known else without_limit(row, f"AVX-512: here it is the {cpu_features()} kernel"))
    return rows


def _has(package: str | None) -> bool:
    return package is None or importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    sys.exit(main())
