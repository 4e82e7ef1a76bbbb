"""The command line: `elixir-moe VERB ...`, also `python -m elixir_moe VERB ...`.

Owns the arguments, the exit codes and the choice of output stream. Trains nothing itself. Exit codes:

    0    done
    1    failed while running
    2    a setting, file, command-line value or plan is wrong: the same command would fail again
    3    stopped by the supervisor, with the state saved apart
    75   stopped by a signal, with the state saved; to be started again
    130  interrupted

Modules that only training needs are imported when a training starts, so that `plan` answers in seconds.
"""

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from elixir_moe.cli import ckpt
from elixir_moe.cli.plan import add_estimate, add_plan, run_estimate, run_plan
from elixir_moe.cli.verify import add_verify, run_verify
from elixir_moe.errors import ConfigError, DiskError, ElixirError, LayoutError, PlanError, TierError, meant
from elixir_moe.kernels import cpu_features
from elixir_moe.parallel.mesh import prepare_process
from elixir_moe.train import launch

_ABOUT = "Trains mixture-of-experts models, and dense ones, that do not fit the GPUs at hand."
_SECONDS_FOR_RANK_0 = 10.0
_OF_SETTINGS = (ConfigError, LayoutError, PlanError, TierError)
"""Errors that recur until the user changes something."""
_TRAIN_EXTRA = {"matplotlib", "rich", "yaml"}
"""Modules that only the extra `train` installs."""


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError."""

    def options(self) -> list[str]:
        """The names of all options but help, which nobody misspells."""
        return [name for action in self._actions for name in action.option_strings if name not in ("-h", "--help")]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A rank of several that fails ends its process at once."""
    prepare_process()
    code = _main(arguments)
    if code and launch.under_torchrun() and _number_of_ranks(None) > 1:
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads and process groups would wait for ranks that are gone


def _end(reason: str) -> None:
    """Ends this rank although its main thread hangs."""
    _tell(ElixirError(reason), 1, traced=False)
    _leave(1)


def _main(arguments: Sequence[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    traced = "--traceback" in arguments or os.environ.get("ELIXIR_TRACEBACK") == "1"
    try:
        return _run(arguments)
    except launch.RanksFailed as error:
        print(f"elixir-moe: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if not launch.has_launcher():
            print("elixir-moe: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name not in _TRAIN_EXTRA:
            raise
        _tell(ConfigError(f"{error.name} is missing, which training needs: pip install 'elixir-moe[train]'"), 2, traced)
        return 2
    except Exception as error:
        code = 2 if isinstance(error, _OF_SETTINGS) and not isinstance(error, DiskError) else 1
        _tell(error, code, traced or not isinstance(error, ElixirError))
        return code


def _run(arguments: Sequence[str]) -> int:
    helped = "train" in arguments and not {"-h", "--help"}.isdisjoint(arguments)
    parser = _parser(_settings_help() if helped else None)
    known, rest = parser.parse_known_args(arguments)
    if rest and known.verb not in ("train", "bench"):
        words = [word.partition("=")[0] for word in rest if word.startswith("-")]
        hint = meant(words[0], known.parser.options()) if words else ""
        known.parser.error(f"unknown arguments {' '.join(rest)}{hint and f'; {hint}'}")
    with _telling_decisions(known.verbose):
        return _run_verb(known, rest, arguments)


@contextmanager
def _telling_decisions(verbose: bool) -> Iterator[None]:
    """With --verbose, the library's log is shown on stderr: what it decides. No other place configures logging."""
    log, before = logging.getLogger("elixir_moe"), logging.getLogger("elixir_moe").level
    handler = logging.StreamHandler()
    rank = f"[rank {_rank()}] " if launch.under_torchrun() else ""
    handler.setFormatter(logging.Formatter(f"%(asctime)s {rank}%(name)s: %(message)s", "%H:%M:%S"))
    if verbose:
        log.addHandler(handler)
        log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _run_verb(known: argparse.Namespace, rest: list[str], arguments: Sequence[str]) -> int:
    if known.verb == "train":
        return _train(known, _overrides(rest), arguments)
    if known.verb == "bench":
        return _bench(known, rest)
    verbs = {
        "env": _env,
        "ckpt": ckpt.run,
        "plan": run_plan,
        "estimate": run_estimate,
        "verify": run_verify,
        "report": _report,
        "export": _export,
        "clean": _clean,
    }
    return verbs[known.verb](known)


def _parser(settings_help: str | None) -> _Parser:
    parser = _Parser(prog="elixir-moe", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"elixir-moe {_version('elixir-moe')}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
    train_parser = verbs.add_parser(
        "train",
        help="train a model",
        description="Trains a GPT of dense and mixture-of-experts layers, a Hugging Face model or any torch module.",
        epilog=settings_help,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train_parser.add_argument("--config", metavar="FILE", help="settings, as YAML")
    train_parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    env_parser = verbs.add_parser("env", help="show versions and devices", allow_abbrev=False)
    plan_parser = verbs.add_parser("plan", help="find the best plan for a model on a machine", allow_abbrev=False)
    add_plan(plan_parser)
    estimate_parser = verbs.add_parser("estimate", help="memory of plain strategies", allow_abbrev=False)
    add_estimate(estimate_parser)
    verify_parser = verbs.add_parser(
        "verify", help="compare a model under a plan, or with another library, with plain PyTorch", allow_abbrev=False
    )
    add_verify(verify_parser)
    report_parser = verbs.add_parser("report", help="show what runs were, or are", allow_abbrev=False)
    report_parser.add_argument("directory", type=Path, nargs="+", help="of a run; several are shown side by side")
    report_parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses of a single run, as PNG")
    report_parser.add_argument("--html", type=Path, metavar="FILE", help="write a page about the runs, as one file")
    bench_parser = verbs.add_parser(
        "bench", help="step times beside the peers', in a checkout of the project", allow_abbrev=False, add_help=False
    )
    export_parser = verbs.add_parser(
        "export",
        help="write a run's model for other libraries",
        description="Writes the model of a run's latest checkpoint, reads it back and compares logits, or losses "
        "of a module with a loss of its own.",
        allow_abbrev=False,
    )
    export_parser.add_argument("directory", type=Path, metavar="RUN", help="the directory of a run")
    export_parser.add_argument("--out", type=Path, metavar="FOLDER", help="a new folder; by default RUN/export/WHAT")
    export_parser.add_argument(
        "--what",
        choices=("adapter", "merged", "full"),
        help="adapter: for peft; merged: the base with the adapters in its weights; full: a model without adapters. By "
        "default adapter of a run with adapters, else full",
    )
    clean_parser = verbs.add_parser("clean", help="remove what dead runs have left", allow_abbrev=False)
    clean_parser.add_argument("directory", type=Path, help="this one and all below it")
    others = (
        env_parser,
        plan_parser,
        estimate_parser,
        verify_parser,
        report_parser,
        bench_parser,
        export_parser,
        clean_parser,
    )
    for verb in (train_parser, *others, *ckpt.add_parser(verbs)):
        verb.set_defaults(parser=verb)
        verb.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
        verb.add_argument("-v", "--verbose", action="store_true", help="tell on stderr what the library decides")
        verb.add_argument("-q", "--quiet", action="store_true", help="print results and errors, and nothing on the way")
        verb.add_argument(
            "--traceback", action="store_true", help="show where an error comes from (or ELIXIR_TRACEBACK=1)"
        )
    return parser


def _train(known: argparse.Namespace, overrides: list[tuple[str, str]], arguments: Sequence[str]) -> int:
    from elixir_moe.train.control import leaving

    with leaving(_requeue):  # until the run or the launcher sets its own handlers
        return _start(known, overrides, arguments)


def _requeue(number: int) -> NoReturn:
    """Ends this process on a signal before there is anything to save."""
    from elixir_moe.train import control

    text = launch.ended_early(number)
    if not launch.leave_error(text, control.REQUEUE):
        print(f"elixir-moe: {text}", file=sys.stderr)
    _leave(control.REQUEUE)


def _start(known: argparse.Namespace, overrides: list[tuple[str, str]], arguments: Sequence[str]) -> int:
    from elixir_moe.train import config as configs
    from elixir_moe.train.directory import check_directory, claim_directory
    from elixir_moe.train.loop import Stopped, train
    from elixir_moe.train.report import Console
    from elixir_moe.train.waiting import Waits

    config = configs.load(known.config, overrides)
    ranks = _number_of_ranks(known.nproc)
    shown = _rank() == 0 and not launch.has_launcher() and not known.quiet
    with Waits(quiet=not shown)("reading the data and the model's config"):
        config.check_ranks(ranks)
        data = config.load_data()
    if ranks > 1 and not launch.under_torchrun():
        check_directory(config, data)
        launch.launch(ranks, arguments, config.run.threads)
        return 0
    claim = claim_directory(config, data) if _rank() == 0 else None
    try:
        summary = train(config, data, claim, Console(stderr=known.json, quiet=known.quiet), _end)
    except Stopped as stop:
        if not (stop.exit_code and launch.leave_error(str(stop), stop.exit_code)) and _rank() == 0:
            print(f"elixir-moe: {stop}", file=sys.stderr)
        return stop.exit_code
    if summary is not None and known.json:
        print(json.dumps(summary.as_dict()))
    dist.destroy_process_group()
    return 0


def _report(known: argparse.Namespace) -> int:
    from rich.console import Console

    from elixir_moe.train import history, page

    if known.picture is not None and len(known.directory) > 1:
        raise ConfigError(f"--picture draws one run, got {len(known.directory)}: name one directory")
    try:
        accounts = [history.account(directory) for directory in known.directory]
        if known.picture is not None:
            history.draw(known.picture, known.directory[0], accounts[0])
        if known.html is not None:
            page.write(known.html, [history.story(directory) for directory in known.directory])
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename!r}: {error.strerror}: ask its owner for it") from error
    if known.json:
        print(json.dumps({"runs": accounts}, allow_nan=False))
    else:
        history.show(Console(), accounts)
    return 0


def _export(known: argparse.Namespace) -> int:
    from elixir_moe.train.export import export
    from elixir_moe.train.waiting import Waits

    with Waits(quiet=known.quiet)("writing the model, and reading it back"):
        found = export(known.directory, known.out, known.what)
    if known.json:
        print(json.dumps(found.as_dict()))
        return 0
    alike = f"differ by at most {found.difference:.2g}, which is rounding" if found.difference else "are equal"
    print(
        f"{found.what} of {found.checkpoint} in {found.out}\n"
        f"Check passed, without this library: exported and trained {found.compared} {alike} "
        f"(largest {found.largest:.3g})."
    )
    if found.change is not None:
        print(f"The adapters change {found.compared} by up to {found.change:.3g}.")
    return 0


def _bench(known: argparse.Namespace, rest: Sequence[str]) -> int:
    """Runs the benchmarks, which are not part of the package because they need its peers."""
    root = Path(__file__).parents[2]
    if not (root / "benchmarks/run.py").is_file():
        raise ConfigError("the benchmarks are part of the source tree: use `make bench` or this in a checkout of it")
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.run", *rest, *["--json"] * known.json]
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode


def _clean(known: argparse.Namespace) -> int:
    from elixir_moe.train.directory import leftovers

    if not known.directory.is_dir():
        raise ConfigError(f"{str(known.directory)!r} is not a directory: name one that holds runs")
    removed = [str(path) for path in leftovers(known.directory)]
    if known.json:
        print(json.dumps({"removed": removed}))
    else:
        print("\n".join(f"removed {path}" for path in removed) or "nothing is left of dead runs")
    return 0


def _env(known: argparse.Namespace) -> int:
    versions = {name: _version(name) for name in ("elixir-moe", "torch", "numpy", "safetensors", "megatron-core")}
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "devices": devices,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_adam": cpu_features(),
        "backends": [b for b in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(b)],
    }
    if known.json:
        print(json.dumps(facts))
        return 0
    for name, version in versions.items():
        facts[name] = version or "not installed"
    for name, fact in facts.items():
        if name != "versions":
            print(f"{name:14} {', '.join(fact) or 'none' if isinstance(fact, list) else fact or 'none'}")
    return 0


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _number_of_ranks(nproc: int | None) -> int:
    """Number of ranks of this run, whether they are started yet or not."""
    if not launch.under_torchrun():
        if nproc is not None and nproc < 1:
            raise ConfigError(f"--nproc: expected at least 1, got {nproc}")
        return nproc or 1
    world = int(os.environ["WORLD_SIZE"])
    if nproc not in (None, world):
        raise ConfigError(f"--nproc {nproc}, but torchrun has already started {world} ranks: leave --nproc out")
    return world


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _overrides(rest: Sequence[str]) -> list[tuple[str, str]]:
    """``--a.b value`` and ``--a.b=value`` as pairs."""
    pairs, words = [], list(rest)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}: settings are given as --section.key value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"--{key}: a value must follow")
            value = words.pop(0)
        pairs.append((key, value))
    return pairs


def _settings_help() -> str:
    from elixir_moe.train import settings
    from elixir_moe.train.config import TrainConfig

    return settings.help_of(TrainConfig, {"run.out": "required without model.hf"})


def _tell(error: Exception, exit_code: int, traced: bool) -> None:
    """Prints an error, only once if several ranks have the same one."""
    text = "".join(traceback.format_exception(error)) if traced else f"{type(error).__name__}: {error}"
    if launch.leave_error(text, exit_code):
        return
    rank = _rank()
    if rank and exit_code == 2:
        # All ranks read the same settings. Rank 0 prints their error, and torchrun then ends the others. A rank that
        # is not ended has an error of its own.
        threading.Event().wait(_SECONDS_FOR_RANK_0)
    print(f"elixir-moe: {f'[rank {rank}] ' if rank else ''}{text}", file=sys.stderr)
