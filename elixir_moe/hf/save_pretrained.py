"""Writes a wrapped model straight from shards to a folder in Hugging Face's format.

Owns the files, their names and their order. The folder keeps its former contents until all files are written. No rank
holds more of the full model at once than one chunk and the tensors that become one in the files. Never reads
(`pretrained` does).
"""

import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe.distributed.all_ranks import Deferred, raise_on_all_ranks
from elixir_moe.errors import CheckpointError, ConfigError, UsageError
from elixir_moe.hf.peft import base_of, has_own_adapters, is_peft_model
from elixir_moe.hf.pretrained import is_of_transformers
from elixir_moe.parallel.pattern import is_whole
from elixir_moe.parallel.rules import logical_shape
from elixir_moe.parallel.state_dict import computed, modules_with_extra_state, persistent_buffers
from elixir_moe.quantized.packed import packed_parameters
from elixir_moe.state.full import full_parameters
from elixir_moe.state.marked import MARK, PARTIAL_SUFFIX, StagingFolder, name_in_errors
from elixir_moe.state.safetensors_format import INDEX, SINGLE, files_of, head_of, index_of, name_of
from elixir_moe.state.wrapped import Wrapped, check_as_wrapped, require_wrapped
from elixir_moe.torch_private import DisableTorchFunctionSubclass

MAX_FILE_BYTES = 5 * 10**9
_GENERATION = "generation_config.json"
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
"""The name of one of several files with weights."""


@torch.no_grad()
def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Writes a wrapped model's full weights, and its config if it has one, for ``from_pretrained``.

    For a peft model, or a transformers model with `add_adapter`, it writes the adapters for
    ``PeftModel.from_pretrained`` and ``load_adapter``; a base that is a folder is named by its absolute path. Only
    chunks with tensors that peft saves are gathered; rank 0 holds all of these tensors at once.

    Tensors have the keys of ``model.state_dict()``. Collective; rank 0 writes. Trainable weights are read from their
    fp32 masters and written in their dtype before `wrap`. The previous contents of the folder stay until everything is
    written.

    Args:
        model: a wrapped model.
        folder: the target folder; created if missing.
        max_file_bytes: largest size of a file with several tensors.

    Raises:
        ConfigError: `max_file_bytes` is not a whole number of at least 1.
        UsageError: the model is not wrapped or is a pipeline stage; its parameters or buffers have changed since
            `wrap`; its state dict has extra state or tensors that a hook computes; its weights are quantized; or, on
            several ranks, peft would save values that it computes from the model (prompt learning).
        CheckpointError: rank 0 cannot write; raised on every rank.
    """
    wrapped = require_wrapped(model, "save_pretrained", "; a plain one has its own")
    folder = os.path.expanduser(folder)
    if not is_whole(max_file_bytes, least=1):
        raise ConfigError(f"max_file_bytes={max_file_bytes!r}: expected a whole number of at least 1")
    if wrapped.groups.has_stages:
        raise UsageError(
            f"this model is a pipeline stage of ranks {list(wrapped.spec.ranks)}, and a folder holds one whole model: "
            f"write em.full_state_dict(model) of each stage instead"
        )
    raise_on_all_ranks("looked at what to write", lambda: _check_writable(model, wrapped))
    if _saves_adapters(model):
        _save_adapters(model, wrapped, folder)
        return
    writers: list[FolderWriter] = []

    def begin() -> None:
        if dist.get_rank() == 0:
            meta = _meta_state(model, wrapped)
            like = {key: meta[key] for key in _keys_of_files(wrapped).values()}
            writers.append(FolderWriter(model, like, Path(folder), wrapped.weights))
            writers[0].begin(max_file_bytes)

    writing = Deferred("wrote the model's files", error=CheckpointError)
    try:
        raise_on_all_ranks("began the model's files", begin, error=CheckpointError)
        for name, tensor in _full_tensors(model, wrapped):
            for writer in writers:
                writing.run(partial(writer.add, name, tensor))
        for writer in writers:
            writing.run(writer.finish)
        writing.finish()
    finally:
        for writer in writers:
            writer.clean()


def _saves_adapters(model: nn.Module) -> bool:
    """Whether the model's own `save_pretrained` writes only its adapters."""
    return is_peft_model(model) or has_own_adapters(model)


def _check_writable(model: nn.Module, wrapped: Wrapped) -> None:
    """Raises UsageError unless a folder can hold the whole model, or all that peft saves of it."""
    check_as_wrapped(model, wrapped)
    _refuse_more_than_tensors(model, wrapped)
    if _saves_adapters(model):
        return
    for name, _, _, packed in packed_parameters(model):
        raise UsageError(
            f"{name!r} is packed as {packed.scheme}, in a form that from_pretrained does not read: em.save keeps the "
            f"bytes, and save_pretrained of a peft model writes only the adapters"
        )
    _refuse_undeclared_ties(model, wrapped)


def _save_adapters(model: Any, wrapped: Wrapped, folder: str) -> None:
    """Lets peft write, on rank 0, a state dict that has values where peft saves them, and meta tensors elsewhere."""
    like = _meta_state(model, wrapped)
    mine = dist.get_rank() == 0
    chosen = raise_on_all_ranks("chose the adapters' weights", lambda: _of_adapters(model, like) if mine else None)[0]
    keys_of_name: dict[str | None, list[str]] = {}
    for key, name in wrapped.spec.keys.items():
        keys_of_name.setdefault(name, []).append(key)
    keys = {p: keys_of_name.get(names[0], []) for p, names in wrapped.spec.names.items()}
    wanted = {p for p, those in keys.items() if chosen is None or not chosen.isdisjoint(those)}
    state = dict(like)
    for buffer, names in persistent_buffers(model).items():
        state |= dict.fromkeys(keys_of_name.get(names[0], []), buffer.cpu())
    for parameter, value in full_parameters(wrapped, wanted):
        if mine:
            state |= dict.fromkeys(keys[parameter], value)

    def save() -> None:
        if mine:
            _locate_base(model)
            with _without_gathers():
                model.save_pretrained(folder, state_dict=state)

    raise_on_all_ranks("saved the adapters", save, error=CheckpointError)


def _locate_base(model: Any) -> None:
    """Stores a base that is a folder by its absolute path, so that adapters open from any working directory."""
    for config in model.peft_config.values():
        name = config.base_model_name_or_path or getattr(base_of(model), "name_or_path", None)
        if name is not None and os.path.isdir(name):
            config.base_model_name_or_path = os.path.abspath(name)


def refuse_merges(model: Any) -> None:
    """Makes peft's methods that merge or drop adapters raise UsageError: they would write to ungathered weights."""

    def refuse(*_: object, **__: object) -> None:
        raise UsageError(
            "adapters of a wrapped model cannot be merged or removed: em.save_pretrained(model, folder) writes them. "
            "Then `elixir-moe export folder --what merged` merges them into their base in full precision; or, with "
            "the base in memory, PeftModel.from_pretrained(base, folder).merge_and_unload(). Quantizing the merged "
            "weights again may lose more than was learned"
        )

    tuner = getattr(model, "base_model", None)
    for name in ("merge_and_unload", "merge_adapter", "unload"):
        if hasattr(tuner, name):
            setattr(tuner, name, refuse)


def _without_gathers() -> AbstractContextManager[object]:
    """A context in which rank 0 reads the model's parameters without a gather, which would wait for other ranks."""
    return DisableTorchFunctionSubclass() if dist.get_world_size() > 1 else nullcontext()


def _meta_state(model: nn.Module, wrapped: Wrapped) -> dict[str, Tensor]:
    """The state dict of the model before `wrap`, on meta. Each name has a tensor of its own."""
    dtypes = {
        p: dtype for c in wrapped.scheduler.chunks for p, dtype in zip(c.parameters, c.original_dtypes, strict=True)
    }
    tensors: dict[str, Tensor] = {names[0]: buffer for buffer, names in persistent_buffers(model).items()}
    tensors |= {names[0]: p for p, names in wrapped.spec.names.items()}
    return {
        key: torch.empty(
            logical_shape(tensors[name]),
            dtype=dtypes.get(tensors[name], tensors[name].dtype),  # type: ignore[call-overload]
            device="meta",
        )
        for key, name in wrapped.spec.keys.items()
        if name is not None
    }


def _of_adapters(model: Any, like: dict[str, Tensor]) -> set[str] | None:
    """The names of the tensors in `like` that peft saves; None if it computes new tensors from them."""
    from peft import get_peft_model_state_dict

    one_rank = dist.get_world_size() == 1
    computed = (
        "peft saves values that it computes from the model on one rank, which cannot gather weights: take the weights "
        "with em.full_state_dict(model) instead"
    )
    if not one_rank and any(config.is_prompt_learning for config in model.peft_config.values()):
        raise UsageError(f"for learned prompts, {computed}")
    name_of_each = {id(tensor): name for name, tensor in like.items()}
    picked: list[Any] = []
    with warnings.catch_warnings(action="ignore"), _without_gathers():  # peft repeats its warnings when it saves
        for adapter in model.peft_config:
            picked += get_peft_model_state_dict(model, dict(like), adapter_name=adapter).values()
    if not one_rank and any(isinstance(value, Tensor) and not value.is_meta for value in picked):
        raise UsageError(f"for these adapters, {computed}")
    names = {name_of_each.get(id(value)) for value in picked}
    return None if None in names else {name for name in names if name is not None}


def _refuse_more_than_tensors(model: nn.Module, wrapped: Wrapped) -> None:
    """Raises UsageError if the model's state dict has more than its parameters and buffers under keys of its own."""
    more = computed(wrapped.spec.keys)
    more += [key for key, module in modules_with_extra_state(model).items() if module.get_extra_state() is not None]
    if more:
        raise UsageError(
            f"the model's state_dict() has {more[0]!r}, which is neither a parameter nor a buffer: save_pretrained "
            f"writes only those. Take the weights with em.full_state_dict(model) and write them yourself, or keep them "
            f"with em.save"
        )


def _refuse_undeclared_ties(model: Any, wrapped: Wrapped) -> None:
    """Raises UsageError for a tensor with two names that a model of transformers does not declare as tied.

    A folder has each tensor once, and `from_pretrained` initializes tensors that are missing.
    """
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    first = _keys_of_files(wrapped)
    for key, name in wrapped.spec.keys.items() if is_of_transformers(model) else ():
        if name is not None and key != first[name] and not {key, first[name]} & tied.keys():
            raise UsageError(
                f"{first[name]!r} and {key!r} are one tensor, and the model does not declare it in _tied_weights_keys: "
                f"from_pretrained would initialize the second. Declare it there, or use em.full_state_dict"
            )


def _keys_of_files(wrapped: Wrapped) -> dict[str, str]:
    """{first name of a parameter or buffer: its first key in the model's own state dict}."""
    found: dict[str, str] = {}
    for key, name in wrapped.spec.keys.items():
        if name is not None:
            found.setdefault(name, key)
    return found


def _full_tensors(model: nn.Module, wrapped: Wrapped) -> Iterator[tuple[str, Tensor]]:
    """Yields (key, full tensor) for the model's state dict, on every rank, one chunk at a time."""
    keys = _keys_of_files(wrapped)
    for parameter, tensor in full_parameters(wrapped):
        if (key := keys.get(wrapped.spec.names[parameter][0])) is not None:
            yield key, tensor
    for buffer, names in persistent_buffers(model).items():
        if names[0] in keys:
            yield keys[names[0]], buffer.cpu()


class FolderWriter:
    """Writes a folder of files of known size, from tensors in any order; on one rank."""

    def __init__(
        self, model: nn.Module, like: Mapping[str, Tensor], folder: Path, source: str | os.PathLike[str] | None
    ) -> None:
        """Prepares to write a model to `folder`; `like` has its tensors on meta, by their keys in its state dict.

        `source` is the folder that the weights were read from; its generation config is kept.
        """
        self._model, self._like, self._source = model, like, source
        self._folder, self._partial = folder, folder / PARTIAL_SUFFIX
        self._work: StagingFolder | None = None
        self._files: dict[str, Any] = {}
        self._places: dict[str, tuple[str, int]] = {}
        self._group_of: dict[str, tuple[str, ...]] = {}
        self._waiting: dict[str, Tensor] = {}

    def begin(self, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """Creates all files in full size, with their headers."""
        model, tensors = self._model, self._like
        self._dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
        out: dict[str, Tensor] = {}
        for names in _converted_together(model, tensors):
            self._group_of |= dict.fromkeys(names, names)
            out |= _to_files(model, {name: tensors[name] for name in names})
        self._folder.mkdir(parents=True, exist_ok=True)
        self._work = StagingFolder(self._partial, without_locks=True)
        sizes = {key: tensor.nbytes for key, tensor in out.items()}
        files = files_of(sizes, max_file_bytes)
        if len(files) > 1:
            (self._partial / INDEX).write_text(index_of(files, sum(sizes.values())))
        for file_name, keys in files.items():
            head = head_of({key: (name_of(out[key].dtype, key), out[key].shape) for key in keys}, {"format": "pt"})
            file = self._files[file_name] = open(self._partial / file_name, "wb")  # noqa: SIM115 (closed by `clean`)
            file.write(head.data)
            with name_in_errors(self._partial / file_name):
                file.flush()
                os.posix_fallocate(file.fileno(), 0, head.nbytes)  # so that a full disk is noticed now
            self._places |= {key: (file_name, place) for key, place in head.places.items()}

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a full tensor of the model; writes the tensors of files that are now complete."""
        names = self._group_of.get(name)
        if names is None:
            return
        self._waiting[name] = tensor
        if all(other in self._waiting for other in names):
            for key, value in _to_files(self._model, {other: self._waiting.pop(other) for other in names}).items():
                file_name, offset = self._places[key]
                with name_in_errors(self._partial / file_name):
                    self._files[file_name].seek(offset)
                    self._files[file_name].write(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Moves the files to their final place once they are on disk; until then the former ones stay."""
        for name, file in self._files.items():
            with name_in_errors(self._partial / name):
                file.flush()
                os.fsync(file.fileno())
                file.close()
        self._configure()
        for old in self._folder.iterdir():
            if old.name in (SINGLE, INDEX) or _PART.fullmatch(old.name):
                old.unlink()
        for new in sorted(self._partial.iterdir(), key=lambda path: path.name == INDEX):
            if new.name != MARK:
                new.replace(self._folder / new.name)

    def clean(self) -> None:
        """Removes files that have not reached their final place."""
        for file in self._files.values():
            with suppress(OSError):  # a full disk, already reported
                file.close()
        if self._work is not None:
            self._work.remove()

    def _configure(self) -> None:
        config: Any = getattr(self._model, "config", None)
        generation: Any = getattr(self._model, "generation_config", None)
        if hasattr(config, "save_pretrained"):
            config = deepcopy(config)
            config.architectures = [type(self._model).__name__]
            config.dtype = str(self._dtype).removeprefix("torch.")
            config.save_pretrained(self._partial)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(self._partial)
        own = Path(self._source or "", _GENERATION)
        if getattr(generation, "_from_model_config", False) and self._source is not None and own.is_file():
            shutil.copyfile(own, self._partial / _GENERATION)


def _converted_together(model: nn.Module, names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups the names in the model that are converted to tensors of files together."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    names = [name for name in names if name not in ignored]
    if not is_of_transformers(model):
        return [(name,) for name in names]
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    transforms: Any = getattr(model, "_weight_conversions", None)
    if transforms is None:
        transforms = get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
    converters: Any = [t.reverse_transform() for t in transforms[::-1] if isinstance(t, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(rename_source_key(name, [], converters)[0], []).append(name)
    return [tuple(group) for group in groups.values()]


def _to_files(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts tensors of the model to tensors of files."""
    if not is_of_transformers(model):
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)  # type: ignore[arg-type]
