"""`python -m benchmarks.run`: measures every row against its peer in one run, prints the table and writes it.

Owns the command line and the order of a run. Rows of as many ranks share their processes and their contenders: each
contender is built once, checked once to train the same model as the others, and kept.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.contenders import Build, fresh_model, start_rank
from benchmarks.measure import check_agreement, host_microseconds, race
from benchmarks.report import describe, host_row, machine, markdown, step_row, write
from benchmarks.rows import FULL, QUICK, ROWS, Row, Workload

THREADS = 1
HOST_ROW = "unshard + release of a gathered chunk"
HOST_LIMIT_MICROSECONDS = 10.0


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmarks; returns the exit code."""
    options = _parse(arguments)
    workload = QUICK if options.quick else FULL
    rounds, steps = options.rounds or (2 if options.quick else 9), options.steps or 1
    wanted = [row for row in ROWS if options.only is None or options.only in (row.name, row.peer)]
    if not wanted and options.only != HOST_ROW:
        names = sorted({row.name for row in ROWS} | {row.peer for row in ROWS} | {HOST_ROW})
        print(f"no row is called {options.only!r}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for ranks in sorted({row.ranks for row in wanted} | ({1} if options.only in (None, HOST_ROW) else set())):
        those = [row for row in wanted if row.ranks == ranks]
        with_host = ranks == 1 and options.only in (None, HOST_ROW)
        rows += _spawn(ranks, those, with_host, workload, rounds, steps)
    parameters = sum(p.numel() for p in fresh_model(workload.model).parameters())
    result = {"machine": machine(THREADS), "workload": describe(workload, parameters, rounds, steps), "rows": rows}
    write(result, Path(options.out))
    print(markdown(result), end="")
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Step times against the peers, as ratios."
    )
    parser.add_argument("--out", default="build/bench.json", help="the JSON; the table goes beside it as .md")
    parser.add_argument("--rounds", type=int, help="rounds of each row (9)")
    parser.add_argument("--steps", type=int, help="steps of each contender in a round (1)")
    parser.add_argument("--only", metavar="NAME", help="only the rows with this name or this peer")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few rounds: to see that all works")
    return parser.parse_args(arguments)


def _spawn(
    ranks: int, rows: list[Row], with_host: bool, workload: Workload, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Starts the ranks, which measure `rows`; returns what rank 0 found. A rank that fails ends all."""
    os.environ["OMP_NUM_THREADS"] = str(THREADS)
    with tempfile.TemporaryDirectory() as directory:
        results = mp.get_context("spawn").SimpleQueue()
        arguments = (ranks, f"{directory}/rendezvous", results, rows, with_host, workload, rounds, steps)
        mp.spawn(_rank, arguments, nprocs=ranks)
        found: list[dict[str, Any]] = results.get()
        return found


def _rank(
    rank: int,
    ranks: int,
    rendezvous: str,
    results: Any,
    rows: list[Row],
    with_host: bool,
    workload: Workload,
    rounds: int,
    steps: int,
) -> None:
    start_rank(rank, ranks, rendezvous, THREADS)
    builds: dict[str, Build] = dict(side for row in rows for side in (row.theirs, row.ours))
    contenders = {key: build(workload.model) for key, build in builds.items()}
    check_agreement(contenders, workload)
    found = []
    for row in rows:
        times = race(contenders[row.ours[0]], contenders[row.theirs[0]], workload, rounds=rounds, steps=steps)
        found.append(step_row(row.name, row.peer, ranks, row.limit, times))
        if rank == 0:
            print(f"{row.name} / {row.peer}: {found[-1]['ratio']}", file=sys.stderr, flush=True)
    for contender in contenders.values():
        contender.close()
    if with_host:
        found.append(host_row(HOST_ROW, HOST_LIMIT_MICROSECONDS, host_microseconds(workload, rounds=50)))
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
