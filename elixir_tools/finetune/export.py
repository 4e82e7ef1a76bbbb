"""From a folder that a fine-tuning has written to one that other libraries read, which is read back and compared.

Owns `elixir-moe export` beyond its arguments: adapters as peft stores them, and their base with the adapters in its
weights. Runs in one process, on the CPU, by transformers and peft themselves. Weights of the base stay on disk: a part
of the model has its own in memory, in fp32, while it runs or is merged. The new folder appears when the comparison has
passed.
"""

import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from accelerate.hooks import remove_hook_from_submodules
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from safetensors import safe_open
from torch import Tensor, nn
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import cached_file, logging

from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.ext.checkpoints import StagingFolder, Whole, partial_of, read_manifest, verify
from elixir_moe.ext.hf import FolderWriter
from elixir_moe.ext.trainer import CHECKPOINT_FOLDER
from elixir_tools.models.presets import reason_of

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ROUNDING = 1e-4
"""Difference of logits, in parts of the largest one, that fp32 sums in another order may make."""
_LEAST = 1e-5
"""The bound where adapters change less than that."""
_SHARE, _NARROW_SHARE = 0.02, 0.1
"""Difference of logits, in parts of what the adapters change, above which the adapters are not those of the folder; the
second where merged weights are rounded to 16 bits."""
_ROWS, _TOKENS = 2, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The files that were written, and the result of the comparison."""

    out: str
    """The folder."""
    what: str
    """adapter or merged."""
    source: str
    """The folder with the adapters."""
    base: str
    """The base of the adapters: a folder, or a name on the hub."""
    largest: float
    """The largest absolute value of a logit of base and adapters."""
    difference: float
    """The largest difference between these logits and those of what was written."""
    change: float
    """The largest change of a logit by the adapters."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def export(folder: Path, out: Path | None = None, what: str = "adapter") -> Exported:
    """Writes `what` of a fine-tuning to a new folder: its ``adapter``, as peft stores it, or its base ``merged`` with
    it.

    `folder` is an ``--output_dir`` or one of its checkpoints. Of an output_dir without adapters, since its run was
    stopped, the last checkpoint is taken. `out` is ``export/WHAT`` in `folder` unless given.

    Raises:
        ConfigError: `folder` has no adapters, their base is not found or cannot be merged with, or `out` exists.
        CheckpointError: the written model, read back, has other logits than base and adapters; nothing is left of it.
    """
    source = _source_of(folder)
    out = folder / "export" / what if out is None else out
    if os.path.lexists(out):
        raise ConfigError(f"--out: {str(out)!r} exists: name another folder, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with _in_silence(), StagingFolder(partial_of(out), without_locks=True) as new:
        with tempfile.TemporaryDirectory(dir=new.path) as scratch:
            adapters = _whole_adapters(source, Path(scratch))
            base = _named_base(adapters)
            one = _OnDisk(base, scratch)
            model = _adapted(one.model, adapters)
            rows = _rows(one.model)
            wanted = one.logits(model, rows)
            with model.disable_adapter():
                change = float((wanted - one.logits(model, rows)).abs().max())
            if what == "adapter":
                model.save_pretrained(str(new.path))
                again = _OnDisk(base, scratch)
                found = again.logits(_adapted(again.model, new.path), rows)
            else:
                _write_merged(model, one, base, new.path)
                again = _OnDisk(str(new.path), scratch)
                found = again.logits(again.model, rows)
            difference, scale = float((found - wanted).abs().max()), float(wanted.abs().max())
            _check(difference, scale, change, one.dtype if what == "merged" else torch.float32, out.name)
            _copy_tokenizer([adapters, source, folder, Path(base)], new.path)
        new.move_to(out)
    return Exported(
        out=str(out), what=what, source=str(source), base=base, largest=scale, difference=difference, change=change
    )


def _source_of(folder: Path) -> Path:
    """The folder with adapters. Raises ConfigError."""
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    for one in (folder, *([Path(last)] if last is not None else [])):
        if (one / _WEIGHTS).is_file() or (one / CHECKPOINT_FOLDER).is_dir():
            if _config_of(one) is not None:
                return one
            raise ConfigError(
                f"{str(one)!r} has no {_CONFIG}, so it holds a whole model: from_pretrained reads its files, and "
                f"`elixir-moe ckpt export {one / CHECKPOINT_FOLDER} OUT` writes those of a checkpoint"
            )
    raise ConfigError(
        f"{str(folder)!r} has neither {_WEIGHTS} nor a checkpoint: name the --output_dir of `elixir-moe sft` or its "
        f"like, or one of its checkpoints"
    )


def _config_of(folder: Path) -> Path | None:
    """The settings of the adapters in a folder; those of a checkpoint may be next to it."""
    return next((path for path in (folder / _CONFIG, folder.parent / _CONFIG) if path.is_file()), None)


def _whole_adapters(source: Path, scratch: Path) -> Path:
    """A folder with adapters in peft's form: `source`, or one made of its sharded state."""
    if (source / _WEIGHTS).is_file():
        return source
    config = _config_of(source)
    assert config is not None, "_source_of has found it"
    made = scratch / "adapters"
    made.mkdir()
    settings = json.loads(config.read_text(encoding="utf-8"))
    (made / _CONFIG).write_text(json.dumps(settings))
    directory = source / CHECKPOINT_FOLDER
    manifest = read_manifest(directory)
    verify(directory, manifest)
    whole = Whole(directory, manifest)
    with torch.device("meta"):
        shell: Any = peft.get_peft_model(_described(_named_base(made)), peft.PeftConfig.from_pretrained(str(made)))
    _refuse_lost(shell, manifest.parameters, source)
    state = {name: tensor for name, tensor in shell.state_dict().items() if name in manifest.parameters}
    state = {name: whole.parameter(name) for name in state}
    shell.save_pretrained(str(made), state_dict={**shell.state_dict(), **state})
    return made


def _named_base(adapters: Path) -> str:
    """The base that adapters name: a folder, or a name on the hub. Raises ConfigError."""
    name = json.loads((adapters / _CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not name:
        raise ConfigError(
            f"{str(adapters / _CONFIG)!r} names no base: write its folder or name as base_model_name_or_path"
        )
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().is_dir() else str(name)


def _described(base: str) -> Any:
    """The base's model without weights, inside ``torch.device("meta")``. Raises ConfigError."""
    try:
        config = transformers.AutoConfig.from_pretrained(base, trust_remote_code=False)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(
                f"the base {base} is stored in fewer bits, which nothing can be merged into: give its checkpoint in "
                f"bf16 as base_model_name_or_path in {_CONFIG}"
            )
        return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except ConfigError:
        raise
    except Exception as error:  # transformers has several types for it
        why = reason_of(error, base, "merge such a model by plain peft")
        raise ConfigError(f"the base of the adapters, {base}, is not a causal language model here: {why}") from error


def _adapted(model: nn.Module, folder: Path) -> Any:
    """The model with the adapters of a folder, by plain peft. Raises ConfigError."""
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(folder), torch_device="cpu").eval()  # type: ignore[arg-type]
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"peft cannot add the adapters in {str(folder)!r} to their base: {error}") from error
    with safe_open(folder / _WEIGHTS, "pt") as file:
        _refuse_lost(adapted, file.keys(), folder)
    return adapted


def _refuse_lost(adapted: Any, written: Iterable[str], folder: Path) -> None:
    """Raises ConfigError if the adapters were written with a module that their base lacks here, as a reward's head."""
    names, here = list(written), [name for name, _ in adapted.named_modules()]
    for module in adapted.peft_config[adapted.active_adapter].modules_to_save or ():
        if any(f".{module}." in name for name in names) and not any(name.endswith(f".{module}") for name in here):
            raise ConfigError(
                f"the adapters in {str(folder)!r} have weights of {module!r}, which a causal language model lacks: "
                f"merge them with plain peft into a model of their own class, as in "
                f"AutoPeftModelForSequenceClassification.from_pretrained({str(folder)!r}, num_labels=1)"
                f".merge_and_unload().save_pretrained('merged')"
            )


class _OnDisk:
    """A causal language model whose weights are read when a part of it runs.

    Until then a weight is one NaN expanded to its shape.
    """

    def __init__(self, folder: str, scratch: str) -> None:
        with torch.device("meta"):
            _described(folder)  # for its errors
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto",
            device_map={"": "disk"},
            offload_folder=tempfile.mkdtemp(dir=scratch),
            trust_remote_code=False,
        ).eval()
        hooks: list[Any] = [getattr(module, "_hf_hook", None) for module in self.model.modules()]
        self._weights = next(hook.weights_map.dataset for hook in hooks if getattr(hook, "offload", False))
        remove_hook_from_submodules(self.model)
        del self.model.hf_device_map
        self.dtype: torch.dtype = self.model.dtype
        self.names: dict[nn.Parameter, str] = {}
        """{placeholder: the name of its weight}."""
        placeholders: dict[Tensor, nn.Parameter] = {}
        known = set(self._weights)
        for name, meta in list(self.model.named_parameters(remove_duplicate=False)):
            if meta not in placeholders:
                value = torch.full((), torch.nan, dtype=meta.dtype).expand(meta.shape)
                placeholders[meta] = nn.Parameter(value, requires_grad=False)
            path, _, own = name.rpartition(".")
            self.model.get_submodule(path)._parameters[own] = placeholders[meta]
            if name in known:
                self.names.setdefault(placeholders[meta], name)

    def read(self, placeholder: nn.Parameter) -> Tensor:
        """A weight, in its own dtype."""
        found: Tensor = self._weights[self.names[placeholder]].to(placeholder.dtype)
        return found

    @contextmanager
    def in_memory(self, module: nn.Module, *, inside: bool) -> Iterator[list[tuple[nn.Module, str, nn.Parameter]]]:
        """While open, a module has its weights in fp32, and with `inside` all modules in it; yields (module, name
        there, placeholder) of each."""
        here = [
            (part, own, parameter)
            for part in (module.modules() if inside else [module])
            for own, parameter in part._parameters.items()
            if parameter in self.names
        ]
        for part, own, parameter in here:
            part._parameters[own] = nn.Parameter(self.read(parameter).float(), requires_grad=False)  # type: ignore[arg-type]
        try:
            yield here  # type: ignore[misc]
        finally:
            for part, own, parameter in here:
                part._parameters[own] = parameter

    @torch.no_grad()
    def logits(self, model: nn.Module, rows: Tensor) -> Tensor:
        """(B, S, V) in fp32, of the model or of peft's around it."""
        handles: list[Any] = []
        open_ones: list[AbstractContextManager[Any]] = []

        def enter(inside: bool, module: nn.Module, _args: object) -> None:
            open_ones.append(self.in_memory(module, inside=inside))
            open_ones[-1].__enter__()

        def leave(*_: object) -> None:
            open_ones.pop().__exit__(None, None, None)

        for module, inside in _parts(model):
            handles.append(module.register_forward_pre_hook(partial(enter, inside)))
            handles.append(module.register_forward_hook(leave))
        try:
            found: Tensor = model(input_ids=rows, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
            while open_ones:
                open_ones.pop().__exit__(None, None, None)
        return found.float()


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """(module, whether what is in it is meant too): those that peft has put around others, and those with weights."""
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        yield module, True
        return
    if module._parameters:
        yield module, False
    for child in module.children():
        yield from _parts(child)


@torch.no_grad()
def _merged(model: nn.Module, base: _OnDisk) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yields (placeholder, weight with its adapters) of each weight of the base; adapters are added in fp32."""
    done: set[nn.Parameter] = set()
    for module, inside in _parts(model):
        if not inside:
            continue
        with base.in_memory(module, inside=True) as here:
            for layer in [*module.modules()][::-1]:
                if isinstance(layer, BaseTunerLayer):
                    layer.merge(safe_merge=True)
            trained = {}
            if isinstance(module, ModulesToSaveWrapper):
                (adapter,) = module.active_adapters
                originals = dict(module.original_module.named_parameters())
                copies = dict(module.modules_to_save[adapter].named_parameters())
                trained = {id(originals[name]): copy for name, copy in copies.items()}
            for part, own, placeholder in here:
                value = part._parameters[own]
                assert value is not None
                done.add(placeholder)
                yield placeholder, trained.get(id(value), value).to(placeholder.dtype)
    for placeholder in base.names:
        if placeholder not in done:
            yield placeholder, base.read(placeholder)


def _write_merged(model: Any, base: _OnDisk, name: str, folder: Path) -> None:
    """Writes the base with the adapters in its weights, in the dtype of the base."""
    plain = base.model
    own_folder = Path(str(cached_file(name, "config.json"))).parent
    # The writer keeps the file in the base's folder in the place of settings that are made of the config.
    plain.generation_config = transformers.GenerationConfig.from_model_config(plain.config)
    tensors = {name: placeholder.detach() for placeholder, name in base.names.items()}
    kept = plain.state_dict().keys()
    persistent = {key: buffer for key, buffer in plain.named_buffers() if key in kept}
    like = {key: torch.empty_like(value, device="meta") for key, value in (tensors | persistent).items()}
    writer = FolderWriter(plain, like, folder, own_folder)
    try:
        writer.begin()
        for placeholder, value in _merged(model, base):
            writer.add(base.names[placeholder], value)
        for key, value in persistent.items():
            writer.add(key, value)
        writer.finish()
    finally:
        writer.clean()


def _rows(model: Any) -> Tensor:
    """Rows of tokens to compare on."""
    text = model.config.get_text_config()
    length = min(_TOKENS, getattr(text, "max_position_embeddings", None) or _TOKENS)
    return torch.randint(text.vocab_size, (_ROWS, length), generator=torch.Generator().manual_seed(0))


def _check(difference: float, scale: float, change: float, dtype: torch.dtype, what: str) -> None:
    """Raises CheckpointError if logits differ by more than rounding to `dtype`.

    Adapters that have learned little must not pass for those of another model.
    """
    is_narrow = dtype.itemsize < 4
    rounding = max(_ROUNDING, torch.finfo(dtype).eps)
    share = _NARROW_SHARE if is_narrow else _SHARE
    allowed = max(min(rounding * scale, change / 2), _LEAST * scale, share * change)
    if difference <= allowed:
        return
    narrow = f"Weights in {str(dtype).removeprefix('torch.')} may round away what the adapters learned; " * is_narrow
    raise CheckpointError(
        f"what was written for {what!r} has other logits than base and adapters: they differ by up to "
        f"{difference:.3g}, where rounding allows {allowed:.3g} (the adapters change them by {change:.3g}); nothing "
        f"was kept. {narrow}adapters on a weight that is used twice, such as a tied lm_head, cannot be merged: keep "
        f"the adapter then"
    )


def _copy_tokenizer(folders: list[Path], out: Path) -> None:
    """Puts the tokenizer of the first folder that has one next to the weights."""
    for folder in folders:
        if (folder / "tokenizer_config.json").is_file():
            transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(out)
            return


@contextmanager
def _in_silence() -> Iterator[None]:
    """While open, transformers and peft neither warn of what they are meant to do here, nor draw bars of their own."""
    drawn, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    offloading = getLogger("accelerate.big_modeling")
    before = offloading.level
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    offloading.setLevel(ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        offloading.setLevel(before)
        if drawn:
            logging.enable_progress_bar()
