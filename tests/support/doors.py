"""The two doors to a supervised run, `train` and `sft`, with faults at given steps, and what each leaves behind."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from elixir_moe.errors import ElixirError
from elixir_tools.report.directory import CONTROL
from elixir_tools.watch.control import Signals, exit_code_of
from elixir_tools.watch.supervisor import DIVERGED
from tests.hf.test_trainer import launched
from tests.support.ranks import RankPool
from tests.support.train_cases import burst, nan_once, run, settings_of
from tests.tools.finetune.test_finetune import folder_of

LR = 3e-3
STEPS = 6


@dataclass(frozen=True)
class Found:
    """What a run has left, in the words of both doors."""

    exit_code: int
    reason: str
    metrics: list[dict[str, Any]]
    events: list[tuple[str, str]]
    status: dict[str, Any]
    checkpoints: list[int]
    apart: list[int]
    changes: dict[str, Any] | None = None
    """The arguments of a smaller step."""


def by_train(
    ranks: RankPool, path: Path, at: dict[int, str], on: int, every: int, watch: dict[str, Any], *_: str
) -> Found:
    """`elixir-moe train`."""
    config = settings_of(path / "out", watch=watch, save={"every": every}, optimizer={"lr": LR, "warmup_steps": 0})
    found = ranks.run(run, config, at, on)[0]
    code, _, reason = found["ended"].partition(" ")
    return Found(
        int(code or 0),
        reason,
        found["metrics"],
        found["events"],
        found["status"],
        *([int(name.split("-")[1]) for name in found[room]] for room in ("checkpoints", "apart")),
    )


def by_sft(
    ranks: RankPool, path: Path, at: dict[int, str], on: int, every: int, watch: dict[str, Any], *more: str,
    model: str = "Llama",
) -> Found:  # fmt: skip
    """`elixir-moe sft`, with `more` words."""
    names = path / "model", path / "data"
    words = [f"--{name}={value}" for name, value in zip(("model_name_or_path", "dataset_name"), names, strict=True)]
    if not names[0].exists():
        folder_of(path, "sft", model)
    words += [f"--supervise_{name}={value}" for name, value in watch.items()]
    settings = {
        "max_steps": STEPS, "learning_rate": LR, "logging_steps": 1, "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "gradient_checkpointing": False, "save_steps": every, "plan": "offload",
        "per_device_train_batch_size": 4 // ranks.world, "output_dir": path / "out", "lr_scheduler_type": "linear",
    }  # fmt: skip
    words += [f"--{name}={value}" for name, value in settings.items()]
    return ranks.run(fine_tune, [*words, *more], at, on)[0]


DOORS: dict[str, Callable[..., Found]] = {"train": by_train, "sft": by_sft}


def fine_tune(words: list[str], at: dict[int, str], on: int) -> Found:
    """(rank) Does what `elixir-moe sft` does on a rank; `at` as in `train_cases.run`."""
    from transformers import TrainerCallback

    from elixir_tools.finetune.arguments import parse
    from elixir_tools.finetune.callbacks import DivergedError, stopped_by
    from elixir_tools.finetune.run import OutOfMemory, callbacks_of, finetune

    done, out = set[int](), Path(next(word.partition("=")[2] for word in words if "output_dir" in word))

    class At(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            step = state.global_step
            if step not in at or step in done:
                return
            done.add(step)
            what, _, text = at[step].partition(": ")
            if what == "control":
                if dist.get_rank() == 0:
                    (out / CONTROL).write_text(text)
            elif what == "burst":
                dict(model.named_modules())["model.norm"].register_forward_hook(burst)
            elif dist.get_rank() == on:
                if what == "poison":
                    dict(model.named_modules())["model.layers.1.mlp"].register_forward_hook(nan_once())
                elif what == "hunger":
                    dict(model.named_modules())["model.layers.1.mlp"].register_forward_hook(_hungry)
                else:
                    os.kill(os.getpid(), getattr(signal, what))

    code, reason, callbacks, changes = 0, "", [], None
    try:
        with launched(), Signals(lambda: None, tells=False) as signals:
            given = parse("sft", words)
            callbacks = callbacks_of(given, signals)
            trainer = finetune(given, [*callbacks, At()])
            trainer.model._elixir.optimizer.close()
            stopped = stopped_by(callbacks)
            code, reason = exit_code_of(stopped) if stopped else 0, "" if stopped is None else "stopped"
    except DivergedError as error:
        code, reason = DIVERGED, str(error)
        _close(callbacks)
    except OutOfMemory as error:
        code, reason, changes = 1, str(error), error.changes
        _close(callbacks)
    except ElixirError as error:
        code, reason = 1, str(error)
    dist.barrier()

    def steps(room: Path) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in room.glob("checkpoint-*"))

    lines = [json.loads(line) for line in _text(out / "metrics.jsonl").splitlines()]
    events = [json.loads(line) for line in _text(out / "events.jsonl").splitlines()]
    return Found(
        code,
        reason,
        lines,
        [(event["kind"], event["text"]) for event in events],
        json.loads(_text(out / "status.json") or "{}"),
        steps(out),
        steps(out / "apart"),
        changes,
    )


def _hungry(_module: Any, args: Any, _output: Any) -> None:
    """Memory is enough for two rows, not for four."""
    if len(args[0]) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def _close(callbacks: list[Any]) -> None:
    trainer = callbacks[0].trainer
    trainer.model._elixir.optimizer.close()


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
