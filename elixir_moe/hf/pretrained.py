"""Reads a folder of safetensors in Hugging Face's format straight into shards.

Owns the mapping from tensors in files to tensors of the model. A rank holds at most the sources of one tensor at a
time. Names and shapes in files are the model's own, or those that `transformers` registers for its class: mixtures have
one tensor per expert in files, and one per layer in memory. Weights that are quantized in the files stay so
(`shipped`); a model that `em.quantize` has changed on meta is quantized weight by weight. Never writes
(`save_pretrained` does).
"""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elixir_moe.distributed.all_ranks import Deferred, raise_on_all_ranks
from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.hf.peft import base_of
from elixir_moe.hf.shipped import Halves, halves_in, scheme_of_folder
from elixir_moe.parallel.dtensor import is_dtensor, local_of
from elixir_moe.parallel.rules import UNCUT, attach, logical_box, logical_shape, named_tensors, names_of, pattern_of
from elixir_moe.parallel.state_dict import keys_of
from elixir_moe.parallel.tiles import mark, tile_of, whole_shape
from elixir_moe.quantized.formats import Scheme, scheme_named
from elixir_moe.quantized.modules import become_plain, become_quantized, weights_of
from elixir_moe.quantized.packed import SCALES, Packed, as_bytes, cut_alike, packed_parameters, tile_problem
from elixir_moe.state.safetensors_format import INDEX, SINGLE
from elixir_moe.torch_private import has_compatible_type, swap_tensors

_WRAPPED = re.compile(r"\.base_layer(?=\.)|\.original_module(?=\.)|\.modules_to_save\.[^.]+(?=\.)")
"""Parts that peft adds to the names of modules it wraps or copies."""
_IN_BF16 = "take a checkpoint in bf16, and em.quantize the model"


@dataclass(frozen=True, slots=True)
class _Source:
    """The tensors in files that make one tensor of the model."""

    keys: list[tuple[str, str]]
    """(name in the files, pattern of the converter it matches), in the order the converter expects."""
    converter: Any = None
    """A `transformers` WeightConverter; None if the tensor is in the files unconverted."""
    first: str = ""
    """The converter's name for its first result."""


_Places = dict[Tensor, tuple[nn.Module, str]]
"""{weight: its module, its name there}."""


@dataclass(frozen=True, slots=True)
class _Half:
    """Describes a parameter of bytes: the codes or the scales of a quantized weight."""

    packed: Packed
    codes: nn.Parameter
    is_scales: bool


class Pretrained:
    """The weights in a folder for the parameters and buffers that a model has on meta.

    For a peft model the folder contains the base, under the base's own names. Adapters are initialized elsewhere.

    Collective: every rank creates one for the same model, and an error on one rank is raised on all.

    Raises:
        CheckpointError: the folder cannot be read, lacks a weight, or has it in another shape.
        ConfigError: its weights are quantized in a format that is not supported.
    """

    def __init__(self, model: nn.Module, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(os.path.expanduser(folder))
        self._given = model
        self._model: Any = base_of(model)
        self._files: dict[str, Any] = {}
        self._sources: dict[str, _Source] = {}
        self._shipped: dict[str, Halves] = {}
        self._scheme: str | None
        self._packed_here: list[tuple[nn.Module, str, nn.Parameter, Tensor]] = []
        self._encoded: tuple[nn.Parameter, tuple[Tensor, Tensor]] | None = None
        self._kept_fp32: list[tuple[Tensor, Tensor]] = []
        self._look_at_model()
        self._reading = Deferred("read their weights", error=CheckpointError)
        (self._scheme, *_) = raise_on_all_ranks("read the folder's config", lambda: scheme_of_folder(self._folder))
        raise_on_all_ranks("opened a folder of weights", self._open, error=CheckpointError)

    def _look_at_model(self) -> None:
        model = self._given
        self._names = names_in_base(model)
        if self._model is model:
            keys = keys_of(model)
            for names in self._names.values():  # hooks of the state dict may give a tensor other names
                names += [key for key, name in keys.items() if name == names[0] and key not in names]
        self._halves: dict[Tensor, _Half] = {}
        for _, module, own, packed in packed_parameters(model):
            codes, scales = getattr(module, own), getattr(module, own + SCALES)
            self._halves |= {codes: _Half(packed, codes, False), scales: _Half(packed, codes, True)}

    def pack(self) -> None:
        """Converts weights on meta that are quantized in the folder to frozen parameters of bytes, in place.

        Tensors that transformers keeps in fp32 become fp32. Raises ConfigError, with nothing changed, that names all
        weights that are trained, shared, cut inside a block, or in a module that cannot multiply bytes.
        """
        self._keep_fp32()
        if self._scheme is None:
            return
        form = scheme_named(self._scheme)
        places: _Places = {p: (m, name) for m in self._model.modules() for name, p in weights_of(m).items()}
        chosen = [t for t in self._names if t.is_meta and t not in self._halves and self._is_shipped(t)]
        problems = [f"{self._names[t][0]!r} {why}" for t in chosen if (why := self._problem(t, places)) is not None]
        problems += [
            f"{self._names[t][0]!r} is {half.packed.scheme} in the model: leave em.quantize out for it"
            for t, half in self._halves.items()
            if t.is_meta and not half.is_scales and self._is_shipped(t) and half.packed.scheme != self._scheme
        ]
        if problems:
            raise ConfigError(f"{self._folder}: its weights are {self._scheme}: " + "\n  ".join(problems))
        for tensor in chosen:
            assert isinstance(tensor, nn.Parameter), "weights_of returns parameters only"
            module, own = places[tensor]
            former = torch.empty_like(tensor)
            packed = _packed_like(module, tensor, form.name)
            shapes = (
                (form.codes_shape(packed.shape), form.codes_dtype),
                (form.scales_shape(packed.shape), form.scales_dtype),
            )
            codes, scales = (as_bytes(torch.empty(shape, dtype=dtype, device="meta")) for shape, dtype in shapes)
            scale = nn.Parameter(scales, requires_grad=False)
            cut_alike(tensor, form, tensor, scale)
            self._packed_here.append((module, own, tensor, former))
            replace_data(tensor, codes)
            del module._parameters[own]  # so that both come last, next to each other
            module.register_parameter(own, tensor)
            module.register_parameter(own + SCALES, scale)
            become_quantized(module, own, packed)
        self._look_at_model()

    def _keep_fp32(self) -> None:
        """Makes 16-bit tensors on meta fp32 if `from_pretrained` keeps them in fp32, as it does biases of routers."""
        strict = getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()
        half = (*strict, *(getattr(self._model, "_keep_in_fp32_modules", None) or ()))
        patterns = {torch.bfloat16: strict, torch.float16: half}  # transformers' patterns: * matches any string
        for tensor, names in self._names.items():
            wanted = patterns.get(tensor.dtype, ())
            if tensor.is_meta and any(re.search(kept.replace("*", ".*"), name) for kept in wanted for name in names):
                self._kept_fp32.append((tensor, torch.empty_like(tensor)))
                replace_data(tensor, torch.empty_like(tensor, dtype=torch.float32))

    def unpack(self) -> None:
        """Undoes `pack`: the weights are on meta again, without data."""
        while self._kept_fp32:
            replace_data(*self._kept_fp32.pop())
        while self._packed_here:
            module, own, parameter, former = self._packed_here.pop()
            delattr(module, own + SCALES)
            replace_data(parameter, former)
            if "packed" in vars(module):
                become_plain(module)

    def _problem(self, tensor: Tensor, places: _Places) -> str | None:
        """Why a weight cannot stay quantized as it is in the folder; None if it can."""
        if tensor not in places:
            return "is not the weight of a linear layer or of fused experts: nothing else multiplies bytes"
        if tensor.requires_grad:
            return "is trained, and bytes have no gradient: freeze it with requires_grad_(False) before the optimizer"
        if len([name for name, p in self._given.named_parameters(remove_duplicate=False) if p is tensor]) > 1:
            return f"is shared by modules, which bytes cannot be: {_IN_BF16}"
        source = self._source(tensor)
        assert source is not None and self._scheme is not None
        missing = [key for key, _ in source.keys if key not in self._shipped]
        if missing:
            return f"is made of quantized tensors and of {missing[0]!r}, which is not quantized: {_IN_BF16}"
        form, packed = scheme_named(self._scheme), _packed_like(places[tensor][0], tensor, self._scheme)
        for why in (tile_problem(tensor, form), _slice_problem(tensor, form, packed), form.problem(packed.shape)):
            if why is not None:
                return why
        if len({pattern for _, pattern in source.keys}) > 1:  # concatenated, as gate and up projections are
            codes = [self._shipped[key].codes for key, _ in source.keys]
            rows = {self._files[key].get_slice(key).get_shape()[0] for key in codes}
            if any(number % form.block[0] for number in rows):
                return f"is made of tensors of {sorted(rows)} rows, which cut blocks of {form.block[0]}: {_IN_BF16}"
        return None

    def _is_shipped(self, tensor: Tensor) -> bool:
        """Whether the tensor is quantized in the folder."""
        source = self._source(tensor)
        return source is not None and any(key in self._shipped for key, _ in source.keys)

    def has(self, tensor: Tensor) -> bool:
        """Whether `tensor` comes from the folder; if not, it belongs to an adapter."""
        return tensor in self._names

    def read(self, tensor: Tensor, copy: Callable[[Tensor], object]) -> None:
        """Calls `copy` with this rank's part of a parameter that was on meta. `finish` raises failures."""
        self._reading.run(lambda: copy(self._read(tensor)))

    def finish(self) -> None:
        """Raises CheckpointError on all ranks if a `read` failed on any. Collective."""
        self._reading.finish()

    def _read(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or buffer that was on meta."""
        if tensor in self._halves:
            return self._bytes(tensor)
        name = self._found(tensor)
        assert name is not None, f"{self._names[tensor]} was found when the folder was opened"
        source, part = self._sources[name], logical_box(tensor)
        if source.converter is None:
            key = source.keys[0][0]
            value: Tensor = self._files[key].get_slice(key)[part or ...]
            return value
        whole = self._made(name, self._stored)
        if whole.shape != logical_shape(tensor):
            raise CheckpointError(_unlike(name, tuple(whole.shape), logical_shape(tensor)))
        return whole[part]

    def _stored(self, key: str) -> Tensor:
        value: Tensor = self._files[key].get_tensor(key)
        return value

    def _made(self, name: str, load: Callable[[str], Tensor]) -> Tensor:
        """Returns the whole tensor called `name`; `load` reads a tensor of the files."""
        source = self._sources[name]
        if source.converter is None:
            return load(source.keys[0][0])
        converter = deepcopy(source.converter)
        for key, matched in source.keys:
            converter.add_tensor(source.first, key, matched, partial(load, key))
        made = converter.convert(source.first, model=self._model, config=self._model.config)[name]
        whole: Tensor = made[0] if isinstance(made, list) else made
        return whole

    def _bytes(self, tensor: Tensor) -> Tensor:
        """Returns this rank's part of a parameter of bytes: read as it is, or quantized from the folder's weight."""
        half = self._halves[tensor]
        packed, name = half.packed, self._found(half.codes)
        assert name is not None, f"{self._names[half.codes]} was found when the folder was opened"
        form = scheme_named(packed.scheme)
        if not self._is_shipped(half.codes):
            if self._encoded is None or self._encoded[0] is not half.codes:
                weight, before = self._made(name, self._stored), _before(half)
                if weight.shape != (wanted := logical_shape(before)):
                    raise CheckpointError(_unlike(name, tuple(weight.shape), wanted))
                weight = weight[logical_box(before)]  # cuts no block
                weight = weight.transpose(-1, -2).contiguous() if packed.transposed else weight
                self._encoded = half.codes, form.encode(weight, name=name)
            return as_bytes(self._encoded[1][half.is_scales])
        if half.is_scales:
            value = self._made(name, lambda key: self._stored(self._shipped[key].scales).to(form.scales_dtype))
        else:
            value = self._made(name, lambda key: as_bytes(self._stored(self._shipped[key].codes)))
        # gpt-oss's codes have a dim for blocks; bfloat16 scales of FP8 have become fp32
        made, shape = as_bytes(value.contiguous()), logical_shape(tensor)
        if made.shape[: len(shape) - 1] != shape[:-1] or made.numel() != math.prod(shape):
            raise CheckpointError(
                _unlike(f"the {'scales' if half.is_scales else 'codes'} of {name}", tuple(made.shape), shape)
            )
        return made.view(shape)[logical_box(tensor)]  # a view of the file if the tensor is in one piece

    def fill_buffers(self, is_drawn: Callable[[Tensor], bool]) -> None:
        """Takes buffers off meta: reads them from the folder if it has them, else lets the model compute them.

        Buffers that the folder lacks and `is_drawn` accepts stay on meta. Collective.
        """
        raise_on_all_ranks("read their buffers", lambda: self._fill_buffers(is_drawn), error=CheckpointError)

    def _fill_buffers(self, is_drawn: Callable[[Tensor], bool]) -> None:
        made = []
        filled: dict[Tensor, Tensor] = {}
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                if buffer in filled:
                    module._buffers[name] = filled[buffer]
                elif buffer is not None and buffer.is_meta and self.has(buffer):
                    if not self._found(buffer) and is_drawn(buffer):
                        continue
                    value = filled[buffer] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                    if self._found(buffer):
                        value.copy_(self._read(buffer))
                    else:
                        made.append(value)
                    module._buffers[name] = value
        if made:
            _make(self._model, made)

    def _open(self) -> None:
        """Opens the files. Raises CheckpointError with all problems that are visible before a weight is read."""
        from safetensors import SafetensorError, safe_open

        if not self._folder.is_dir():
            raise CheckpointError(f"weights: the folder {str(self._folder)!r} does not exist: name one of safetensors")
        index = self._folder / INDEX
        several = index.exists() and not (self._folder / SINGLE).exists()  # `from_pretrained` prefers the single one
        try:
            files = json.loads(index.read_text())["weight_map"].values() if several else [SINGLE]
            for file_name in sorted(set(files)):
                if Path(file_name).name != file_name:
                    raise ValueError(f"the name {file_name!r} leads out of the folder")
                file = safe_open(str(self._folder / file_name), framework="pt")
                self._files |= dict.fromkeys(file.keys(), file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise CheckpointError(f"{self._folder}: no readable {INDEX} or {SINGLE} with its parts: {error}") from error
        named = {name: tensor for tensor, names in self._names.items() for name in names}
        self._shipped = {} if self._scheme is None else halves_in(self._files, self._scheme)
        keys = self._files.keys() - {key for halves in self._shipped.values() for key in halves} | self._shipped.keys()
        self._sources = _sources(self._model, keys, named)
        problems = []
        for tensor, names in self._names.items():
            source = self._source(tensor)
            made = not isinstance(tensor, nn.Parameter) and is_of_transformers(self._model)
            if tensor.is_meta and is_dtensor(tensor):
                problems.append(f"{names[0]!r} is a DTensor on meta: read the weights before it is parallelized")
            elif tensor.is_meta and source is not None and (pattern_of(tensor) or UNCUT).view is not None:
                problems.append(f"{names[0]!r} has a pattern with a view: read the weights before the model is cut")
            elif tensor.is_meta and source is None and not made:
                problems.append(f"{names[0]!r} is on meta and not in the folder: make it on the CPU")
            elif tensor.is_meta and source is not None and source.converter is None and not self._is_shipped(tensor):
                key = source.keys[0][0]
                stored = self._files[key].get_slice(key)
                shape = tuple(stored.get_shape())
                half = self._halves.get(tensor)
                wanted = logical_shape(tensor if half is None else _before(half))
                if shape != wanted:
                    problems.append(_unlike(names[0], shape, wanted))
                elif stored.get_dtype().startswith("F8"):
                    problems.append(f"{names[0]!r} is {stored.get_dtype()} in the folder, which has no scales for it")
                elif (other := self._other_values(tensor, key)) is not None:
                    problems.append(
                        f"{key!r} and {other!r} differ in the folder and are one tensor in the model: set "
                        f"tie_word_embeddings to false in its config"
                    )
        if problems:
            raise CheckpointError(f"{self._folder}: " + "\n  ".join(problems))
        given = [tensor for tensor in self._names if self._source(tensor) is not None]
        if given and not any(tensor.is_meta for tensor in given):
            raise CheckpointError(
                f"weights={str(self._folder)!r}: the model has its weights already, and the folder's would not be "
                f"read. Build it under em.sharded_init() or torch.device('meta'), or leave weights= out"
            )
        # The model's class declares which tensors a folder may have in addition.
        no_loss = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        left = [n for n in self._sources if n not in named and not any(re.search(known, n) for known in no_loss)]
        if left and dist.get_rank() == 0:
            warnings.warn(
                f"{self._folder} has {len(left)} tensors that the model lacks, such as {left[0]!r}: they are not read",
                stacklevel=2,
            )

    def _other_values(self, tensor: Tensor, key: str) -> str | None:
        """A name under which the folder has other values of the tensor than under `key`; only rank 0 compares."""
        others = (name for name in self._names[tensor] if name in self._sources and dist.get_rank() == 0)
        keys = (self._sources[name].keys[0][0] for name in others if self._sources[name].converter is None)
        return next((k for k in keys if k != key and not torch.equal(self._stored(k), self._stored(key))), None)

    def _found(self, tensor: Tensor) -> str | None:
        """The name of `tensor`, or of the weight whose bytes it is, in the folder; None if it is not there."""
        tensor = self._halves[tensor].codes if tensor in self._halves else tensor
        return next((name for name in self._names[tensor] if name in self._sources), None)

    def _source(self, tensor: Tensor) -> _Source | None:
        name = self._found(tensor)
        return None if name is None else self._sources[name]


def _unlike(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return f"{name!r} is {found} in the folder and {wanted} in the model"


def _before(half: _Half) -> Tensor:
    """Returns this rank's part of a weight on meta, as it was before it was quantized."""
    *experts, rows, columns = half.packed.shape
    shape = (*experts, columns, rows) if half.packed.transposed else half.packed.shape
    weight = torch.empty(shape, dtype=half.packed.dtype, device="meta")
    if (tile := tile_of(half.codes)) is not None:
        mark(weight, tile)
    if (pattern := pattern_of(half.codes)) is not None:
        attach(weight, pattern)
    return weight


def _slice_problem(weight: Tensor, form: Scheme, packed: Packed) -> str | None:
    """Why this rank's slice of a weight cannot be quantized; None if it can, as for experts spread over ranks."""
    pattern, shape = pattern_of(weight) or UNCUT, whole_shape(weight)
    blocks = (*(1 for _ in shape[2:]), *form.block)
    for axis, dim in pattern.shard:
        inside = shape[dim] % blocks[dim] or (packed.transposed and dim >= len(shape) - 2)
        if inside and pattern.mesh.size(axis) > 1:
            return (
                f"is cut over {axis!r} into slices of {shape[dim]} on dim {dim}, inside blocks of {form.block}: cut it "
                f"between blocks, or leave its pattern out"
            )
    return None


def _packed_like(module: nn.Module, weight: Tensor, scheme: str) -> Packed:
    """Describes a weight of a module once it is quantized."""
    transposed = bool(getattr(module, "is_transposed", False))
    shape = tuple(weight.shape)
    shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    return Packed(scheme=scheme, shape=shape, dtype=weight.dtype, transposed=transposed)


def become_assignable(parameter: nn.Parameter, device: torch.device) -> None:
    """Makes torch accept ``parameter.data = tensor`` for tensors on `device`, which it does not from everywhere.

    From meta, and to the device of a backend outside of torch, the parameter becomes one expanded zero in place;
    attributes, hooks and references to it stay.
    """
    local = local_of(parameter)
    zero = torch.zeros((), dtype=local.dtype, device="cpu")
    if not has_compatible_type(zero, torch.empty(0, device=device)):
        zero = zero.to(device)
    if not has_compatible_type(local, zero):
        replace_data(local, zero.expand(local.shape))


def replace_data(tensor: Tensor, data: Tensor) -> None:
    """Does ``tensor.data = data``, between meta and other devices too."""
    hooks, after = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    # torch.utils.swap_tensors refuses tensors with weak references, which recurrent modules hold
    swap_tensors(tensor, data.detach().requires_grad_(tensor.requires_grad))
    if hooks is not None:
        tensor._backward_hooks = hooks
    if after is not None:
        tensor._post_accumulate_grad_hooks = after


def names_in_base(model: nn.Module) -> dict[Tensor, list[str]]:
    """Returns `names_of`; for a model with peft's adapters, the names before peft, without tensors that peft added.

    peft's copy of a tied weight has all names of that weight, its own first.
    """
    found, configs = names_of(base_of(model)), getattr(model, "peft_config", None)
    if not configs:
        return found
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    added = {PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type] for config in configs.values()}  # as in lora_A
    plain: dict[Tensor, list[str]] = {}
    for tensor, names in found.items():
        for name in names:
            if not any(f".{prefix}" in f".{name}" for prefix in added):
                plain.setdefault(tensor, []).append(_WRAPPED.sub("", name))
    tied = [names for names in plain.values() if len(names) > 1]
    return {t: list(dict.fromkeys(chain(names, *(n for n in tied if names[0] in n)))) for t, names in plain.items()}


def _sources(model: nn.Module, keys: Iterable[str], known: dict[str, Tensor]) -> dict[str, _Source]:
    """Returns {name in the model: source} for every tensor in the files, called `keys` there; `known`: the model's."""
    if not is_of_transformers(model):
        return {key: _Source([(key, "")]) for key in keys}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    transforms: Any = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources: dict[str, _Source] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, str(model.base_model_prefix), known)
        if name not in known and key in known:
            name, pattern = key, None  # in the model's own format
        if pattern is None:
            sources[name] = _Source([(key, "")])
            continue
        converter = by_pattern[pattern]
        source = sources.setdefault(name, _Source([], converter, name))
        source.keys.append((key, pattern))
        sources |= {name.replace(converter.target_patterns[0], t): source for t in converter.target_patterns}
    model._weight_conversions = [t for t in transforms if t.was_used()]  # type: ignore[assignment]
    return sources


def _make(model: Any, buffers: list[Tensor]) -> None:
    """Lets `transformers` initialize `buffers` only.

    It skips marked tensors, and cannot change tensors on meta. Bytes on meta, which it cannot fill, are marked too.
    """
    new = {id(buffer) for buffer in buffers}
    tensors = [tensor for _, tensor in named_tensors(model) if id(tensor) not in new]
    done: list[Any] = [t for t in tensors if not (t.is_meta and t.is_floating_point())]
    for tensor in done:
        tensor._is_hf_initialized = True
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
    with torch.random.fork_rng(devices=[]):
        model.initialize_weights()
    for tensor in done:
        tensor.__dict__.pop("_is_hf_initialized", None)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is one of `transformers`, which knows how its tensors lie in files."""
    return any(kind.__module__ == "transformers.modeling_utils" for kind in type(model).__mro__)
