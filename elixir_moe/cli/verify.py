"""The command `verify`: does this model, trained under this plan, do what plain PyTorch does?

Owns its arguments and its output. Decides nothing: `verify/` trains and compares.
"""

import argparse
import json
import tempfile
from importlib import metadata
from math import gcd
from pathlib import Path
from typing import Any

import torch

from elixir_moe.errors import ConfigError
from elixir_moe.models import presets
from elixir_moe.models.adapters import Lora
from elixir_moe.quantized.formats import scheme_called
from elixir_moe.train import launch
from elixir_moe.train.waiting import Waits
from elixir_moe.verify import subject
from elixir_moe.verify.certificate import Check, as_dicts, certify, first_failed
from elixir_moe.verify.plans import PLANS, asked
from elixir_moe.verify.ranks import on_ranks
from elixir_moe.verify.training import Setup, run_under_the_plan

_DTYPES = {"fp32": None, "bf16": torch.bfloat16}
_MOST_RANKS = 64


def add_verify(verb: argparse.ArgumentParser) -> None:
    """Adds the arguments of `verify`."""
    model = verb.add_mutually_exclusive_group(required=True)
    model.add_argument("--hf", metavar="PATH", help="a Hugging Face config.json, or its directory; weights are random")
    model.add_argument("--model", metavar="NAME", help=f"one of {', '.join(presets.names())}")
    model.add_argument(
        "--module",
        metavar="PACKAGE.MODULE:FUNCTION",
        help="a function without arguments that returns a transformers model, or (module, step, sample)",
    )
    model.add_argument("--suite", action="store_true", help="the whole certificate: 12 families under every plan")
    model.add_argument("--check", type=Path, metavar="FILE", help="whether a certificate is as it was written")
    verb.add_argument(
        "--plan", default="zero3", metavar="PLAN", help=f"{', '.join(PLANS)}, or a plan in JSON or its file"
    )
    verb.add_argument("--ranks", type=int, default=2, metavar="N", help="processes on this machine's CPU")
    verb.add_argument("--resume-ranks", type=int, metavar="N", help="processes that load and go on; by default as many")
    verb.add_argument("--steps", type=int, default=3, metavar="N", help="before the save, and again after the load")
    verb.add_argument("--rows", type=int, default=4, metavar="N", help="rows of a micro-batch, all ranks together")
    verb.add_argument("--seq", type=int, default=16, metavar="N", help="tokens of a row")
    verb.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-batches of a step")
    verb.add_argument("--checkpointing", action="store_true", help="with activation checkpointing of every layer")
    verb.add_argument("--compute-dtype", choices=tuple(_DTYPES), default="fp32", help="dtype of forward and backward")
    verb.add_argument(
        "--lora", metavar="WORDS", help="adapters of peft: r=16,alpha=32,targets=q_proj,v_proj,experts,parameters=NAME"
    )
    verb.add_argument("--quantize", metavar="SCHEME", help="keep frozen weights in nf4, mxfp4, fp8 or int8")
    suite = verb.add_argument_group("of --suite")
    suite.add_argument("--only", metavar="PATTERN", help="run anew the rows whose names match it, or begin with it")
    suite.add_argument("--out", type=Path, default=Path("certificate.json"), metavar="FILE", help="a page lies beside")
    suite.add_argument("--jobs", type=int, metavar="N", help="rows at a time; by default as many as cores")
    suite.add_argument("--fresh", action="store_true", help="keep nothing of what FILE has")
    verb.add_argument("--no-shrink", action="store_true", help="take the model in its full size")


def run_verify(known: argparse.Namespace) -> int:
    """Prints the certificate; returns 0 if everything agrees, and 1 if not. Raises ConfigError and PlanError."""
    if launch.under_torchrun():
        raise ConfigError("verify starts ranks of its own: call it without torchrun")
    if known.suite or known.check is not None:
        from elixir_moe.cli import certificate

        return certificate.run(known, _versions())
    _check_numbers(known)
    with tempfile.TemporaryDirectory() as folder:
        plan = asked(known.plan, Path(folder), accumulation=known.accumulation)
        source = _source(known)
        setup = Setup(
            source=source,
            plan=plan,
            ranks=known.ranks,
            resumed_ranks=_resumed(known),
            steps=known.steps,
            accumulation=known.accumulation,
            compute_dtype=_DTYPES[known.compute_dtype],
            folder=Path(folder),
        )
        if not known.json:
            _show_head(known, source.changed)
        waits = Waits(quiet=known.quiet)
        with waits("training under the plan"):
            run_under_the_plan(setup, on_ranks)
        with waits("comparing with plain PyTorch"):
            checks: list[Check] = on_ranks(1, certify, setup)
    failed = first_failed(checks)
    if known.json:
        facts = {"ok": failed is None, "first": failed.where if failed else None, "checks": as_dicts(checks)}
        print(
            json.dumps(
                facts | {"shrunk": source.changed, "plan": known.plan, "ranks": known.ranks, "versions": _versions()}
            )
        )
    else:
        _show(checks, failed)
    return int(failed is not None)


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
            raise ConfigError("--quantize needs --hf, and --lora for something to train beside frozen weights")
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


def _versions() -> dict[str, str]:
    names = ("elixir-moe", "torch", "transformers", "peft")
    have = {d.metadata["Name"]: d.version for name in names for d in metadata.distributions(name=name)}
    return {name: have.get(name, "not installed") for name in names}


def _show_head(known: argparse.Namespace, changed: tuple[str, ...]) -> None:
    model = known.hf or known.model or known.module
    print(f"{model} under {known.plan} on {known.ranks} CPU ranks, {known.compute_dtype}")
    print(f"shrunk: {', '.join(changed)}" if changed else "not shrunk", flush=True)


def _show(checks: list[Check], failed: Check | None) -> None:
    width = max(len(check.name) for check in checks)
    print(f"{'check':{width}}  {'largest':>9}  {'allowed':>9}")
    for check in checks:
        allowed = f"{check.tolerance:.2g}" if check.tolerance else "bit exact"
        print(f"{check.name:{width}}  {check.difference:9.2g}  {allowed:>9}  {'ok' if check.ok else 'DIFFERS'}")
    print(", ".join(f"{name} {version}" for name, version in _versions().items()))
    print("everything agrees" if failed is None else f"first difference: {failed.name}: {failed.where}")
