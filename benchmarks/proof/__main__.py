"""`python -m benchmarks.proof`: every step that has no good result yet, one after another, while there is time.

Owns the command line and the loop over the steps. Imports only the standard library: on a bare machine the first step
brings the rest.
"""

import argparse
import fcntl
import os
import signal
import socket
import sys
import time
from pathlib import Path

from benchmarks.proof.build import ROOT, path_of
from benchmarks.proof.plan import MODELS, build_step, steps, trace_name, trace_wanted
from benchmarks.proof.steps import FAILED, GOOD, LEFT_OUT, OVER_LIMIT, Journal, Step, run
from benchmarks.proof.table import page

HERE = ROOT / "build" / "gpu-proof"
LEAST_TIME = 1 / 4
"""Part of its limit: with less time left a step is not begun."""


def main(arguments: list[str] | None = None) -> int:
    """Runs what is missing; returns 0 if all is good or left out, 1 if a step failed, 3 if some had no time left."""
    options = _parse(arguments)
    end = time.monotonic() + options.seconds
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    with log.open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another call is at work in {out}: wait for its end, or give another --out", file=sys.stderr)
            return 2
        os.chdir(ROOT)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the step in progress is ended too
        if options.fresh:
            held.truncate(0)
            (out / "results.jsonl").unlink(missing_ok=True)
        return _run(options, log, end)


def _run(options: argparse.Namespace, log: Path, end: float) -> int:
    site = HERE.with_name("gpu-proof-site")
    build = build_step(site, options.wheels)
    built = run(build, log, min(build.seconds, options.seconds))
    machine = built["figures"]
    if built["outcome"] != GOOD or machine is None:
        print(built["tail"] or "the build told no figures", file=sys.stderr)
        return 1
    earlier = None if options.fresh else options.results
    journal = Journal(log.with_name("results.jsonl"), machine["device"], earlier)
    journal.add(built)
    print(f"{journal.device or 'no GPU: toys on the CPU'}; the library: {machine['library']}", flush=True)
    environment = (
        path_of(site if options.wheels else None)
        | _extensions(HERE.with_name("torch_extensions"), machine.get("capability"))
        | {"XDG_CACHE_HOME": str(HERE.with_name("gpu-proof-cache"))}  # the machine is measured once for all
        | _network()
    )
    every = steps(log.parent, machine, environment)
    here = list({step.name: step for text in options.only for step in every if text in step.name}.values())
    if every and not here:
        print(f"no step has one of {options.only} in its name: docs/gpu.md has them", file=sys.stderr)
        return 2
    postponed: list[str] = []
    for step in sorted(here, key=lambda step: _had_its_time(step, journal)):
        if journal.is_good(step.name) or _not_wanted(step, journal):
            continue
        left = end - time.monotonic()
        if step.left_out is None and left < LEAST_TIME * step.seconds:
            postponed.append(step.name)
            continue
        result = run(step, log, min(step.seconds, left))
        if result["outcome"] == OVER_LIMIT and left < step.seconds:
            postponed.append(step.name)
        journal.add(result)
        _say(result)
        _write(journal, log)  # whatever ends the next step
    print(_write(journal, log))
    if postponed:
        print(f"no time was left for {', '.join(postponed)}: call again", flush=True)
        return 3
    outcomes = [journal.results[step.name]["outcome"] for step in here if step.name in journal.results]
    return int(not set(outcomes) <= {GOOD, LEFT_OUT})


def _write(journal: Journal, log: Path) -> str:
    text = page(journal)
    log.with_name("proof.md").write_text(text)
    return text


def _extensions(folder: Path, capability: list[int] | None) -> dict[str, str]:
    """Where DeepSpeed compiles its kernels, and for which GPU: once for all steps, and without the locks that a killed
    step has left. It cannot read the names of architectures that end in a letter, which a machine may have set.
    """
    for lock in folder.glob("**/lock"):
        lock.unlink()
    found = {"TORCH_EXTENSIONS_DIR": str(folder)}
    return found | ({"TORCH_CUDA_ARCH_LIST": ".".join(map(str, capability))} if capability else {})


def _network() -> dict[str, str]:
    """Tells gloo to use the loopback on a host that cannot resolve its own name, where gloo would fail."""
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}
    return {}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proof", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT") or HERE, help="folder of the results")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="a results.jsonl to continue from in a new folder (that in build/gpu-proof)",
    )
    parser.add_argument("--fresh", action="store_true", help="forget the results of earlier calls")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        default=[""],
        help="only steps with one of these in their name, in this order",
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="the longest the call may take (540)")
    parser.add_argument(
        "--wheels", type=Path, help="use this Python as it is, with what is lacking from this folder, if there"
    )
    options = parser.parse_args(arguments)
    options.out = Path(options.out)
    if options.results and not options.results.is_file():
        parser.error(f"--results {options.results}: there is no such file")
    options.results = options.results.resolve() if options.results else HERE / "results.jsonl"
    options.wheels = options.wheels and options.wheels.resolve()
    return options


def _had_its_time(step: Step, journal: Journal) -> bool:
    """Whether an earlier call has run it in vain: such steps come behind the others."""
    result = journal.results.get(step.name, {"outcome": LEFT_OUT, "seconds": 0.0})
    return result["outcome"] == FAILED or (result["outcome"] == OVER_LIMIT and result["seconds"] >= step.seconds)


def _not_wanted(step: Step, journal: Journal) -> bool:
    """Whether it is a trace of a model on which ours reaches what it should."""
    return any(step.name == trace_name(model) and not trace_wanted(journal, model) for model in MODELS)


def _say(result: dict[str, object]) -> None:
    figures = result["figures"] if isinstance(result["figures"], dict) else {}
    why = figures.get("left_out") or (f"exit {result['exit']}" if result["outcome"] == FAILED else "")
    print(f"{result['step']}: {result['outcome']}, {result['seconds']} s {why}".rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
