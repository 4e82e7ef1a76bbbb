"""Whole trainings that are cut short and go on: what every rank of a pool runs.

A tiny mixture with dropout, so that all that a resume must bring back counts: samples, rates, moments, random numbers.
"""

import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elixir_moe.errors import ElixirError
from elixir_tools import settings
from elixir_tools.report.directory import CONTROL
from elixir_tools.train.config import TrainConfig
from elixir_tools.train.data import Text, load_text
from elixir_tools.train.directory import claim_directory
from elixir_tools.train.report import Console
from elixir_tools.train.trainer import Stopped, Trainer, train
from tests.support.checkpoint_cases import everything

SAME = ("step", "loss", "grad_norm", "lr", "val_loss", "tokens_per_expert")
"""What of a line of metrics.jsonl does not depend on the clock, nor on what has been gathered before."""


def settings_of(out: Path, **changes: Any) -> TrainConfig:
    """Settings of a tiny run; `changes` as ``run={"steps": 3}``."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"seq_len": 16, "n_layers": 2, "d_model": 16, "n_heads": 2, "experts": [0, 4], "ep": [1, 2]},
        "plan": {"kind": "offload", "rcache_blocks": 4, "chunk_numel": 6000},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2},
        "save": {"every": 2},
        "run": {"steps": 6, "global_batch": 8, "eval_every": 3, "eval_batches": 2, "sample_bytes": 0, "out": str(out)},
    }
    sections["model"] |= {"dropout": 0.1, "residual": True}
    for section, values in changes.items():
        sections.setdefault(section, {}).update(values)
    return settings.build(TrainConfig, sections)


def text_of(config: TrainConfig) -> Text:
    text = load_text((), config.data.validation, config.model.seq_len)
    return replace(text, train=text.train[:20_000], validation=text.validation[:2_000])


class Ending(Exception):  # noqa: N818
    """A run ends here, as if its process had."""


def run(config: TrainConfig, at: dict[int, str] | None = None, on: int = 0, whole_text: bool = False) -> dict[str, Any]:
    """Runs, or goes on with, a training; `at` names by step what happens behind its update, on rank `on`.

    What happens at 0 happens while the model is wrapped. Returns how it ended, what the last checkpoint holds, and what
    rank 0 wrote.
    """
    update, wrapping = Trainer.update, Trainer._wrap
    done: set[int] = set()

    def beginning(training: Trainer, model: Any) -> Any:
        if at and 0 in at:
            FAULTS[at[0]](training, dist.get_rank() == on)
        return wrapping(training, model)

    def updating(training: Trainer) -> None:
        update(training)
        step = training.progress.step
        if at and step in at and step not in done:
            done.add(step)
            what, _, text = at[step].partition(": ")
            if what == "control":
                if dist.get_rank() == 0:
                    Path(config.run.out, CONTROL).write_text(text)
            else:
                FAULTS[what](training, dist.get_rank() == on)

    Trainer.update, Trainer._wrap = updating, beginning  # type: ignore[method-assign]
    console, ended, claim = Console(file=io.StringIO()), "", None
    try:
        text = config.load_data() if whole_text else text_of(config)
        claim = claim_directory(config, text) if dist.get_rank() == 0 else None
        train(config, text, claim, console)
    except Stopped as stop:
        ended = f"{stop.exit_code} {stop}"
    except (ElixirError, Ending) as error:
        ended = f"{type(error).__name__} {error}"
    finally:
        Trainer.update, Trainer._wrap = update, wrapping  # type: ignore[method-assign]
        if claim is not None:
            claim.release()
    dist.barrier()
    return {"ended": ended, "said": console.file.getvalue(), **written(Path(config.run.out))}


def written(out: Path) -> dict[str, Any]:
    """What lies in a run directory."""
    lines = [json.loads(line) for line in _text(out / "metrics.jsonl").splitlines()]
    events = [json.loads(line) for line in _text(out / "events.jsonl").splitlines()]
    return {
        "metrics": [{name: line[name] for name in SAME} for line in lines],
        "events": [(event["kind"], event["text"]) for event in events],
        "status": json.loads(_text(out / "status.json") or "{}"),
        "checkpoints": sorted(path.name for path in (out / "checkpoints").glob("*")),
        "apart": sorted(path.name for path in (out / "apart").glob("*")),
    }


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _signal(number: int) -> Callable[[Trainer, bool], None]:
    def fault(training: Trainer, here: bool) -> None:
        if here:
            os.kill(os.getpid(), number)

    return fault


def _memory_budget(training: Trainer) -> Path:
    return Path(training.config.run.out) / "checkpoints"


def _twice(training: Trainer, here: bool) -> None:
    if here:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


def _end(training: Trainer, here: bool) -> None:
    training.optimizer.close()
    raise Ending


def _poison(training: Trainer, here: bool) -> None:
    """The next forward on one rank finds a NaN: in the sample table it uses."""
    if here:
        module = dict(training.model.named_modules())["blocks.0.mlp"]
        module.register_forward_hook(nan_once())


def nan_once() -> Callable[..., Any]:
    left = [1]

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        if left and torch.is_grad_enabled():
            left.pop()
            return output * float("nan")
        return None

    return hook


def burst(_module: Any, _args: Any, output: Any) -> Any:
    """A hook on the last norm after which losses are far too high, and finite."""
    return output * -50


def _burst(training: Trainer, _here: bool) -> None:
    """From now on losses are far too high, on all ranks."""
    dict(training.model.named_modules())["norm"].register_forward_hook(burst)


def _starve(training: Trainer, _here: bool) -> None:
    """From now on expert 2 gets no token of any rank."""
    router = dict(training.model.named_modules())["blocks.1.mlp.router"]
    router.register_forward_hook(
        lambda _module, _args, out: out._replace(experts=out.experts.masked_fill(out.experts == 2, 0))
    )


FAULTS: dict[str, Callable[[Trainer, bool], None]] = {
    "SIGINT": _signal(signal.SIGINT),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGUSR1": _signal(signal.SIGUSR1),
    "SIGTERM twice": _twice,
    "room taken": lambda training, _: _memory_budget(training).touch() if dist.get_rank() == 0 else None,
    "room free": lambda training, _: _memory_budget(training).unlink() if dist.get_rank() == 0 else None,
    "end": _end,
    "poison": _poison,
    "burst": _burst,
    "starve": _starve,
}


def last_state(out: Path) -> dict[str, torch.Tensor]:
    """Everything in the last checkpoint of a run."""
    return everything(max((out / "checkpoints").glob("step-*")))
