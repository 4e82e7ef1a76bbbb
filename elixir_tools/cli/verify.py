"""The command `verify`: does this model, trained under this plan, do what plain PyTorch does?

Owns its output. Decides nothing: `verify/` trains and compares.
"""

import argparse
import json
import sys
import tempfile
from contextlib import redirect_stdout
from importlib import metadata
from math import gcd
from pathlib import Path
from typing import Any, TextIO

import torch

from elixir_moe.errors import ConfigError
from elixir_moe.ext.models import scheme_called
from elixir_tools.models.lora import Lora
from elixir_tools.train import launch
from elixir_tools.train.waiting import Waits
from elixir_tools.verify import subject
from elixir_tools.verify.certificate import Check, as_dicts, certify, first_failed
from elixir_tools.verify.peers import peer
from elixir_tools.verify.plans import asked
from elixir_tools.verify.ranks import on_ranks
from elixir_tools.verify.script import script_of
from elixir_tools.verify.training import ADAPTERS, HALF, OTHER_RANKS, QUANTIZED, Planned, Setup, Way, run_on_ranks

_MOST_RANKS = 64


def run(known: argparse.Namespace) -> int:
    """Prints the certificate; returns 0 if everything agrees, and 1 if not. Raises ConfigError and PlanError."""
    if not known.json:
        return _run(known, sys.stdout)
    out = sys.stdout
    with redirect_stdout(sys.stderr):  # the user's code may print
        return _run(known, out)


def _run(known: argparse.Namespace, out: TextIO) -> int:
    if launch.under_torchrun():
        raise ConfigError("verify starts ranks of its own: call it without torchrun")
    if known.suite or known.check is not None:
        if known.peer is not None:
            raise ConfigError("--with compares one model: give --hf or --module instead of --suite")
        from elixir_tools.cli import certificate

        return certificate.run(known, _versions(), out)
    _check_numbers(known)
    with tempfile.TemporaryDirectory() as folder:
        way = _way(known, Path(folder))
        source = _source(known)
        setup = Setup(
            source=source,
            way=way,
            ranks=known.ranks,
            resumed_ranks=_resumed(known),
            steps=known.steps,
            accumulation=known.accumulation,
            compute_dtype=None if known.compute_dtype == "fp32" else torch.bfloat16,
            folder=Path(folder),
        )
        if not known.json:
            _show_head(known, source.changed)
        waits = Waits(quiet=known.quiet)
        with waits(f"training {_under(known)}"):
            run_on_ranks(setup, on_ranks)
        with waits("comparing with plain PyTorch"):
            checks: list[Check] = on_ranks(1, certify, setup)
    failed = first_failed(checks)
    versions = _versions(*(["deepspeed"] if (known.peer or "").startswith("deepspeed") else []))
    script = script_of(setup, failed, versions) if known.script and failed else None
    if script is not None:
        known.script.write_text(script)
    if known.json:
        facts: dict[str, Any] = {"ok": failed is None, "first": failed.where if failed else None}
        facts |= {"checks": as_dicts(checks), "shrunk": source.changed, "ranks": known.ranks, "versions": versions}
        named = {"with": known.peer, "not_done": dict(way.not_done)} if known.peer else {"plan": known.plan}
        print(json.dumps(facts | named | ({"script": script and str(known.script)} if known.script else {})), file=out)
    else:
        _show(checks, failed, way, versions)
        if known.script and failed:
            told = "a step before the save is what a script can show" if script is None else str(known.script)
            print(f"script: {told}")
    return int(failed is not None)


def _way(known: argparse.Namespace, folder: Path) -> Way:
    """What is verified. Raises ConfigError if a peer does not do what is asked, PlanError if there is no such plan."""
    if known.peer is None:
        if known.script is not None:
            raise ConfigError("--script needs --with PEER: it writes a script that shows what that library does")
        return Planned(asked(known.plan, folder, accumulation=known.accumulation))
    if known.script is not None and not known.script.absolute().parent.is_dir():
        raise ConfigError(f"--script: there is no folder {str(known.script.parent)!r}: make it, or name another file")
    found = peer(known.peer)
    if known.model is not None:
        raise ConfigError("--with needs --hf or --module: other libraries have no model of this name")
    parts = {
        "--quantize": (QUANTIZED, known.quantize is not None),
        "--lora": (ADAPTERS, known.lora is not None),
        "--compute-dtype bf16": (HALF, known.compute_dtype != "fp32"),
        "--resume-ranks": (OTHER_RANKS, _resumed(known) != known.ranks),
    }
    for option, (part, wanted) in parts.items():
        if wanted and part in found.not_done:
            raise ConfigError(f"{option}: not done by {known.peer}: {found.not_done[part]}; leave it out")
        if wanted and known.script is not None:
            raise ConfigError(f"{option}: a script trains in plain fp32, without a resume; leave this or --script out")
    return found


def _under(known: argparse.Namespace) -> str:
    return f"with {known.peer}" if known.peer else f"under {known.plan}"


def _check_numbers(known: argparse.Namespace) -> None:
    for name in ("ranks", "steps", "rows", "seq", "accumulation"):
        if getattr(known, name) < 1:
            raise ConfigError(f"--{name}: expected at least 1, got {getattr(known, name)}")
    if known.ranks > _MOST_RANKS:
        raise ConfigError(f"--ranks {known.ranks}: expected at most {_MOST_RANKS} processes on one machine")
    for name, ranks in (("ranks", known.ranks), ("resume-ranks", _resumed(known))):
        if ranks < 1 or known.rows % ranks:
            raise ConfigError(
                f"--rows {known.rows} for --{name} {ranks}: expected a multiple, so that each rank gets equally many"
            )


def _resumed(known: argparse.Namespace) -> int:
    ranks: int = known.ranks if known.resume_ranks is None else known.resume_ranks
    return ranks


def _source(known: argparse.Namespace) -> Any:
    lora = None if known.lora is None else Lora.parse(known.lora)
    if known.quantize is not None:
        scheme_called(known.quantize)
        if known.hf is None or lora is None:
            raise ConfigError("--quantize needs --hf, and --lora since the frozen weights need adapters to train")
    if known.model is not None:
        if lora is not None:
            raise ConfigError("--lora needs --hf or --module: models by name are not for peft")
        return subject.named(
            known.model,
            shrink=not known.no_shrink,
            ranks=gcd(known.ranks, _resumed(known)),
            rows=known.rows,
            length=known.seq,
            checkpointing=known.checkpointing,
        )
    options = {"rows": known.rows, "length": known.seq, "lora": lora, "checkpointing": known.checkpointing}
    options["quantized"] = known.quantize
    if known.module is not None:
        return subject.function(known.module, **options)
    return subject.huggingface(known.hf, shrink=not known.no_shrink, **options)


def _versions(*beside: str) -> dict[str, str]:
    names = ("elixir-moe", "torch", "transformers", "peft", *beside)
    have = {d.metadata["Name"]: d.version for name in names for d in metadata.distributions(name=name)}
    return {name: have.get(name, "not installed") for name in names}


def _show_head(known: argparse.Namespace, changed: tuple[str, ...]) -> None:
    model = known.hf or known.model or known.module
    print(f"{model} {_under(known)} on {known.ranks} CPU ranks, {known.compute_dtype}")
    print(f"shrunk: {', '.join(changed)}" if changed else "not shrunk", flush=True)


def _show(checks: list[Check], failed: Check | None, way: Way, versions: dict[str, str]) -> None:
    width = max(len(check.name) for check in checks)
    print(f"{'check':{width}}  {'largest':>9}  {'allowed':>9}")
    for check in checks:
        allowed = f"{check.tolerance:.2g}" if check.tolerance else "bit exact"
        print(f"{check.name:{width}}  {check.difference:9.2g}  {allowed:>9}  {'ok' if check.ok else 'DIFFERS'}")
    for part, reason in way.not_done.items():
        print(f"not done by the peer: {part}: {reason}")
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print("everything agrees" if failed is None else f"first difference: {failed.name}: {failed.where}")
