"""From the checkpoint of a run to a folder that other libraries read, which is read back and compared.

Owns `elixir-moe export` beyond its arguments. Runs in one process, on the CPU, with the model in host memory. The
folder appears when all is written and the comparison has passed.
"""

import importlib.util
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe.chunks.plan import Plan
from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.models.config import GPTConfig
from elixir_moe.optim.optimizer import ShardedOptimizer
from elixir_moe.parallel.mesh import init_mesh
from elixir_moe.quantized.convert import dequantize, quantize
from elixir_moe.report.directory import is_run
from elixir_moe.setup.drawing import sharded_init
from elixir_moe.state.checkpoint.load import load
from elixir_moe.state.checkpoint.storage import CHECKPOINTS, latest
from elixir_moe.state.marked import MarkedFolder, partial_of
from elixir_moe.state.save_pretrained import copy_generation_config, save_pretrained
from elixir_moe.train import config as configs
from elixir_moe.train.config import HuggingFaceModel, TrainConfig
from elixir_moe.train.data import labeled
from elixir_moe.train.huggingface import tokenizer_of
from elixir_moe.train.recipe import Recipe
from elixir_moe.train.training import adamw
from elixir_moe.wrap import wrap

_FLOOR = 1e-4
"""Difference of logits, in parts of the largest one, that fp32 sums in another order may make."""
_ROUNDING = 1e-5
"""The same, in parts of the largest one, where adapters change less than that."""
_SHARE = 0.02
"""Difference of logits, in parts of what the adapters change, above which the adapters are not those of the run."""
_ROWS, _TOKENS = 2, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written, and how the comparison came out."""

    out: str
    """The folder."""
    what: str
    """adapter, merged or full."""
    checkpoint: str
    """The checkpoint that it was made of."""
    compared: str
    """logits; or losses, of a module that has a loss of its own."""
    largest: float
    """The largest absolute value of them, by the run's model."""
    difference: float
    """Their largest difference between the run's model and the folder's."""
    change: float | None
    """The largest change of one by the adapters; None without adapters."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def export(run: Path, out: Path | None = None, what: str | None = None) -> Exported:
    """Writes the model of the latest checkpoint of a run.

    Args:
        run: the directory of the run.
        out: the new folder; by default ``export/WHAT`` in the run's.
        what: ``adapter``, in peft's form; ``merged``, the base with the adapters added to its weights; or ``full``, all
            weights of a model without adapters. By default ``adapter`` of a run with adapters, else ``full``.

    Raises:
        ConfigError: `run` is no run, has no checkpoint, or has not what is asked for; or `out` exists.
        CheckpointError: the folder, read back, has other logits or losses than the run's model; nothing is left of it.
    """
    if not is_run(run):
        raise ConfigError(
            f"{str(run)!r} is not the directory of a run (it has no config.yaml): name one that `train` has written"
        )
    config = _on_one_rank(configs.load(run / "config.yaml"))
    what = what or ("full" if config.lora is None else "adapter")
    if (what == "full") != (config.lora is None):
        has, fits = ("no adapters", "full") if config.lora is None else ("adapters alone", "adapter or merged")
        raise ConfigError(f"--what {what}: the run in {str(run)!r} has trained {has}; give {fits}")
    out = run / "export" / what if out is None else out
    if os.path.lexists(out):
        raise ConfigError(f"--out: {str(out)!r} exists: name another folder, or remove it")
    checkpoint = latest(run / CHECKPOINTS)
    if checkpoint is None:
        raise ConfigError(f"{str(run)!r} has no checkpoint yet: let it save one (save: true in its control.yaml)")
    out.parent.mkdir(parents=True, exist_ok=True)
    with MarkedFolder(partial_of(out), without_locks=True) as folder:
        found = _written(config, checkpoint, folder.path, what)
        folder.move_to(out)
    return Exported(out=str(out), what=what, checkpoint=str(checkpoint), compared=config.recipe().compares, **found)


def _on_one_rank(config: TrainConfig) -> TrainConfig:
    """The settings with all experts in one process."""
    if isinstance(config.model, GPTConfig):
        return replace(config, model=replace(config.model, ep=(1,) * len(config.model.ep)))
    return replace(config, model=replace(config.model, ep=1)) if isinstance(config.model, HuggingFaceModel) else config


def _written(config: TrainConfig, checkpoint: Path, folder: Path, what: str) -> dict[str, Any]:
    """Writes the folder and compares it; returns the figures of the comparison."""
    recipe = config.recipe()
    rows = _rows(config, recipe)
    adapter = folder / "adapter" if what == "merged" else folder
    with _in_silence():
        model, optimizer = _restored(config, recipe, checkpoint)
        try:
            wanted = _compared(recipe, model, rows)
            save_pretrained(model, adapter)
        finally:
            optimizer.close()
            dist.destroy_process_group()
        del model, optimizer
        base = None
        if config.lora is not None:
            base = _compared(recipe, _base(config, recipe, as_trained=what == "adapter"), rows)
        if what == "merged":
            plain = _with_adapters(_base(config, recipe, as_trained=False), adapter)
            if config.quantize is not None or config.run.dtype != "fp32":
                wanted = _compared(recipe, plain, rows)  # the run's base was rounded, and the merged one is not
            merged: Any = plain.merge_and_unload()
            _save_plain(merged, folder)
            shutil.rmtree(adapter)
            del plain, merged
        if what == "adapter":
            read = _with_adapters(_base(config, recipe, as_trained=True), adapter)
        else:
            read = recipe.plain(str(folder))
        found = _compared(recipe, read, rows)
    if config.data.tokenizer is not None or recipe.tokenizer is not None:
        tokenizer_of(config.data.tokenizer or str(recipe.tokenizer)).save_pretrained(folder)
    if what != "adapter" and recipe.tokenizer is not None:
        copy_generation_config(Path(recipe.tokenizer), folder)
    return _figures(found, wanted, base, folder, recipe.compares)


@contextmanager
def _in_silence() -> Iterator[None]:
    """While open, transformers and peft neither warn of what they are meant to do here, nor draw bars of their own."""
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _figures(found: Tensor, wanted: Tensor, base: Tensor | None, folder: Path, compares: str) -> dict[str, Any]:
    """The figures. Raises CheckpointError if logits or losses differ by more than rounding."""
    scale, difference = float(wanted.abs().max()), float((found - wanted).abs().max())
    change = None if base is None else float((wanted - base).abs().max())
    allowed = _FLOOR * scale
    if change is not None:  # adapters that have learned little must not pass for those of another model
        allowed = max(min(allowed, change / 2), _ROUNDING * scale, _SHARE * change)
    if not difference <= allowed:
        raise CheckpointError(
            f"what was written for {folder.name!r} has other {compares} than the run's model: they differ by up to "
            f"{difference:.3g}, where rounding allows {allowed:.3g} (the largest is {scale:.3g}); nothing was kept. "
            f"Other versions of transformers and peft than those of the run may be the reason; or, of merged, adapters "
            f"on a weight that is used twice, such as a tied lm_head: export the adapter then"
        )
    return {"largest": scale, "difference": difference, "change": change}


def _restored(config: TrainConfig, recipe: Recipe, checkpoint: Path) -> tuple[nn.Module, ShardedOptimizer]:
    """The model of a checkpoint, wrapped in this process."""
    if dist.is_initialized():
        raise ConfigError("export runs in one process: call it without torchrun")
    mesh = init_mesh(device_type="cpu")
    torch.manual_seed(config.run.seed)
    with sharded_init():
        model = recipe.build(mesh)
    plan = Plan.offload(**config.plan.precision)
    model, optimizer = wrap(model, adamw(model, config.optimizer), plan=plan, device="cpu", weights=recipe.weights)
    load(checkpoint, model, optimizer)
    return model.eval(), optimizer


def _base(config: TrainConfig, recipe: Recipe, *, as_trained: bool) -> nn.Module:
    """The base of the adapters as plain libraries have it; `as_trained`: with its weights rounded as in the run."""
    torch.manual_seed(config.run.seed)  # for a base that is drawn
    model = recipe.plain(None).requires_grad_(False)
    if not as_trained:
        return model
    if config.quantize is not None:
        model = dequantize(quantize(model, config.quantize))
    dtype = config.run.compute_dtype
    if dtype is not None:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def _with_adapters(model: nn.Module, folder: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(model, folder)  # type: ignore[arg-type]


def _save_plain(model: Any, folder: Path) -> None:
    """Writes a model without peft: by its own way if it has one."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        from safetensors.torch import save_model

        save_model(model, str(folder / "model.safetensors"))


@torch.no_grad()
def _compared(recipe: Recipe, model: nn.Module, rows: Tensor) -> Tensor:
    return recipe.compared(model.eval(), rows).float().cpu()


def _rows(config: TrainConfig, recipe: Recipe) -> Tensor:
    """Rows to compare on: drawn, or those of the run's data where nobody knows how many tokens there are."""
    length = min(_TOKENS, recipe.length - 1)
    if recipe.vocabulary is None:
        rows = config.load_data().batch(seed=config.run.seed, step=1, rows=_ROWS)
        return rows if recipe.compares == "losses" else rows[..., :length]
    return labeled(torch.randint(recipe.vocabulary, (_ROWS, length), generator=torch.Generator().manual_seed(0)))
