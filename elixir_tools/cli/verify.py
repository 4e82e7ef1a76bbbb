"""The command `verify`: does this model, trained under this plan, do what plain PyTorch does?

Owns its output. Decides nothing: `verify/` trains and compares.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import metadata
from math import gcd
from pathlib import Path
from typing import Any

import torch

from elixir_moe.errors import ConfigError
from elixir_moe.ext.models import scheme_named
from elixir_tools.models.lora import Lora
from elixir_tools.train import launch
from elixir_tools.train.waiting import Waits
from elixir_tools.verify import cases
from elixir_tools.verify.certificate import Check, as_dicts, certify, first_failed
from elixir_tools.verify.plans import asked
from elixir_tools.verify.ranks import on_ranks
from elixir_tools.verify.training import Planned, Setup, run_on_ranks

_MOST_RANKS = 64


def run(known: argparse.Namespace) -> int:
    """Prints the checks; returns 0 if everything agrees, and 1 if not. Raises ConfigError and PlanError."""
    if launch.under_torchrun():
        raise ConfigError("verify starts ranks of its own: call it without torchrun")
    out = sys.stdout
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr if known.json else out):
        check_numbers(known)  # the user's code may print from here on
        backend = Planned(asked(known.plan, Path(folder), accumulation=known.accumulation))
        _, checks, facts = compare(known, backend, Path(folder), f"under {known.plan}")
    if known.json:
        print(json.dumps(facts | {"plan": known.plan}), file=out)
    else:
        show(checks, facts["versions"])
    return int(not facts["ok"])


def compare(
    known: argparse.Namespace, backend: Planned, folder: Path, under: str, *packages: str
) -> tuple[Setup, list[Check], dict[str, Any]]:
    """Trains in both ways and compares: (what was trained, the checks, what `--json` prints of them).

    `packages`: whose versions are named too.
    """
    source = _source(known)
    setup = Setup(
        source=source,
        backend=backend,
        ranks=known.ranks,
        resumed_ranks=resumed_ranks(known),
        steps=known.steps,
        accumulation=known.accumulation,
        together=known.batches_per_pass,
        compute_dtype=None if known.compute_dtype == "fp32" else torch.bfloat16,
        folder=folder,
    )
    if not known.json:
        model = known.hf or known.model or known.module
        print(f"{model} {under} on {known.ranks} CPU ranks, {known.compute_dtype}")
        print(f"shrunk: {', '.join(source.changed)}" if source.changed else "not shrunk", flush=True)
    waits = Waits(quiet=known.quiet)
    with waits(f"training {under}"):
        run_on_ranks(setup, on_ranks)
    with waits("comparing with plain PyTorch"):
        checks: list[Check] = on_ranks(1, certify, setup)
    failed = first_failed(checks)
    facts = {"ok": failed is None, "first": failed.where if failed else None, "checks": as_dicts(checks)}
    return setup, checks, facts | {"shrunk": source.changed, "ranks": known.ranks, "versions": versions_of(*packages)}


def check_numbers(known: argparse.Namespace) -> None:
    """Raises ConfigError for counts that no run can have."""
    for name in ("ranks", "steps", "rows", "seq", "accumulation", "batches_per_pass"):
        if getattr(known, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(known, name)}")
    if known.ranks > _MOST_RANKS:
        raise ConfigError(f"--ranks {known.ranks}: expected at most {_MOST_RANKS} processes on one machine")
    for name, ranks in (("ranks", known.ranks), ("resume-ranks", resumed_ranks(known))):
        if ranks < 1 or known.rows % ranks:
            raise ConfigError(
                f"--rows {known.rows} for --{name} {ranks}: expected a multiple, so that each rank gets equally many"
            )


def resumed_ranks(known: argparse.Namespace) -> int:
    """How many ranks load the checkpoint."""
    ranks: int = known.ranks if known.resume_ranks is None else known.resume_ranks
    return ranks


def _source(known: argparse.Namespace) -> Any:
    lora = None if known.lora is None else Lora.parse(known.lora)
    if known.quantize is not None:
        scheme_named(known.quantize)
        if known.hf is None or lora is None:
            raise ConfigError("--quantize needs --hf, and --lora since the frozen weights need adapters to train")
    if known.model is not None:
        if lora is not None:
            raise ConfigError("--lora needs --hf or --module: models by name are not for peft")
        return cases.named(
            known.model,
            shrink=not known.no_shrink,
            ranks=gcd(known.ranks, resumed_ranks(known)),
            rows=known.rows,
            length=known.seq,
            checkpointing=known.checkpointing,
        )
    options = {"rows": known.rows, "length": known.seq, "lora": lora, "checkpointing": known.checkpointing}
    options["quantized"] = known.quantize
    if known.module is not None:
        return cases.function(known.module, **options)
    return cases.huggingface(known.hf, shrink=not known.no_shrink, **options)


def versions_of(*packages: str) -> dict[str, str]:
    """The versions of this library, of what it trains with, and of other packages."""
    names = ("elixir-moe", "torch", "transformers", "peft", *packages)
    have = {d.metadata["Name"]: d.version for name in names for d in metadata.distributions(name=name)}
    return {name: have.get(name, "not installed") for name in names}


def show(checks: Sequence[Check], versions: dict[str, str], notes: Sequence[str] = ()) -> None:
    """Prints a line for each check, some notes, versions, and the first difference."""
    width = max(len(check.name) for check in checks)
    print(f"{'check':{width}}  {'largest':>9}  {'allowed':>9}")
    for check in checks:
        allowed = f"{check.tolerance:.2g}" if check.tolerance else "bit exact"
        print(f"{check.name:{width}}  {check.difference:9.2g}  {allowed:>9}  {'ok' if check.ok else 'DIFFERS'}")
    for note in notes:
        print(note)
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    failed = first_failed(list(checks))
    print("everything agrees" if failed is None else f"first difference: {failed.name}: {failed.where}")
