"""Quantized checkpoints as published: which weights of a folder are quantized, and where codes and scales are.

Owns the `quantization_config` of such folders and the names in their files. Reads no weights.

    quant_method   codes                                 scales
    fp8            X, float8_e4m3fn (out, in)            X_scale_inv, fp32 or bf16, (out / 128, in / 128), rounded up
    mxfp4          X_blocks, uint8 (E, out, in/32, 16)   X_scales, uint8 (E, out, in / 32)

DeepSeek and Qwen publish the first format, gpt-oss uses the second.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.quantized.formats import SCHEMES
from elixir_moe.quantized.modules import weights_of

_SUFFIXES: Mapping[str, tuple[str, str]] = {"fp8": ("", "_scale_inv"), "mxfp4": ("_blocks", "_scales")}
"""Suffixes of a weight's name in files, for its codes and for its scales."""
_FP8_SETTINGS: Mapping[str, Any] = {
    "weight_block_size": list(SCHEMES["fp8"].block),
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
}


class Halves(NamedTuple):
    """The names of one quantized weight in files."""

    codes: str
    scales: str


def scheme_of(config: Mapping[str, Any], where: object) -> str | None:
    """The scheme that a ``config.json`` names for its weights; None if they are not quantized.

    Raises ConfigError if the format of the weights is not supported.
    """
    found = _quantization(config)
    if not found:
        return None
    method = found.get("quant_method")
    if method not in _SUFFIXES:
        raise ConfigError(
            f"{where}: quantization_config has quant_method={method!r}; weights are read as shipped in the formats "
            f"{', '.join(_SUFFIXES)}: take a checkpoint in one of them, or one in bf16 and em.quantize"
        )
    for name, expected in _FP8_SETTINGS.items() if method == "fp8" else ():
        if found.get(name, expected) != expected:
            raise ConfigError(
                f"{where}: quantization_config has {name}={found[name]!r}, expected {name}={expected!r} for {method}: "
                f"take a checkpoint with it, or one in bf16 and em.quantize"
            )
    return str(method)


def patterns_of(config: Mapping[str, Any], scheme: str, model: nn.Module) -> dict[str, list[str]]:
    """Returns the arguments of `em.quantize` that select the weights a checkpoint with this config has quantized."""
    if scheme == "mxfp4":
        return {"targets": ["*.experts"]}
    listed = _quantization(config).get("modules_to_not_convert") or ()
    names = [name for name, module in model.named_modules() if weights_of(module)]
    return {"skip": [name for name in names if any(_excludes(left, name) for left in listed)]}


def shipped_patterns(path: Path, scheme: str, model: nn.Module) -> dict[str, list[str]]:
    """Returns `patterns_of` for the ``config.json`` at `path` if its weights have that scheme; else {}."""
    config = config_in(path)
    return patterns_of(config, scheme, model) if scheme_of(config, path) == scheme else {}


def _excludes(left: str, name: str) -> bool:
    """Whether an entry of ``modules_to_not_convert`` excludes a module: as a suffix, or as a pattern of its start."""
    return name.endswith(left) or re.match(rf"(?:{left})(?:(?<=\.)|(?=\.|$))", name) is not None


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    texts = config.get("text_config")
    found = config.get("quantization_config") or (texts.get("quantization_config") if isinstance(texts, dict) else None)
    return found or {}


def scheme_of_folder(folder: Path) -> str | None:
    """Returns `scheme_of` for the folder's ``config.json``; None without one. Raises as `scheme_of` and `config_in`."""
    path = folder / "config.json"
    return scheme_of(config_in(path), path) if path.exists() else None


def config_in(path: Path) -> dict[str, Any]:
    """Reads a ``config.json``. Raises CheckpointError if the file is not a JSON object."""
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; expected the config.json of a model") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def halves_in(keys: Iterable[str], scheme: str) -> dict[str, Halves]:
    """Returns {weight: its names in files} for all weights that are quantized there."""
    known = set(keys)
    codes, scales = _SUFFIXES[scheme]
    stems = {key.removesuffix(scales) for key in known if key.endswith(scales)}
    return {stem: Halves(stem + codes, stem + scales) for stem in sorted(stems) if stem + codes in known}
