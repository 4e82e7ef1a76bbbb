"""Plain values as JSON and back, exactly: the content of a checkpoint besides parameters.

Owns the encoding. Decoding never executes anything: it produces only numbers, strings, bytes, lists, tuples, dicts,
counters, tensors and arrays. A value is restored with the same class or refused: subclasses of these are refused,
except those with a tag below. A subclass of Tensor is restored as a plain tensor.

    unchanged      None, bool, int, finite float, str, list, dict with str keys
    tagged         {"$tuple": [...]}  {"$size": [...]}  {"$float": "nan"}  {"$bytes": base64}  {"$bytearray": base64}
                   {"$dict": [[key, value], ...]}  {"$ordered": [[key, value], ...]}  {"$counter": [[key, count], ...]}
                   {"$tensor": [dtype, shape, base64]}  {"$array": [dtype, shape, base64]}  {"$scalar": [dtype, base64]}
"""

import base64
import math
from collections import Counter, OrderedDict
from enum import Enum
from typing import Any

import numpy as np
import torch

from elixir_moe.errors import CheckpointError
from elixir_moe.state.safetensors_format import DTYPES, NAMES

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_ARRAY_KINDS = "biuf"
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_KINDS = {tag: kind for kind, tag in _MAPPINGS.items()}


def encode(value: Any, where: str) -> Any:
    """Encodes `value` for JSON. Raises CheckpointError, which names the place `where`, for any other type."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind in (bytes, bytearray):
        return {f"${kind.__name__}": _text(value)}
    if kind is torch.Size:
        return {"$size": list(value)}
    if kind in (list, tuple):
        items = [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    if kind in _MAPPINGS:
        pairs = [[encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {_MAPPINGS[kind]: pairs}
    if isinstance(value, torch.Tensor) and value.dtype in NAMES and value.layout == torch.strided:
        flat = value.detach().cpu().contiguous().reshape(-1)
        return {"$tensor": [NAMES[value.dtype], list(value.shape), _text(flat.view(torch.uint8).numpy().tobytes())]}
    if isinstance(value, np.generic) and value.dtype.kind in _ARRAY_KINDS:
        return {"$scalar": [value.dtype.str, _text(value.tobytes())]}
    if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
        return {"$array": [value.dtype.str, list(value.shape), _text(np.ascontiguousarray(value).tobytes())]}
    raise CheckpointError(
        f"{where} is a {kind.__name__}: a checkpoint holds None, numbers, strings, bytes, lists, tuples, dicts, "
        f"tensors and arrays; {_instead(value)}"
    )


_PLAIN = (int, float, str, bytes, list, tuple, dict)


def _instead(value: Any) -> str:
    """Says what to save instead of a value of another class, which a checkpoint would lose."""
    if isinstance(value, Enum):
        return f"save its value, and restore it with {type(value).__name__}(...)"
    for plain in _PLAIN:
        if isinstance(value, plain):
            return f"save {plain.__name__}(...) of it"
    return "save the state_dict() of an object"


def decode(value: Any, where: str) -> Any:
    """Decodes what `encode` returned. Raises CheckpointError for an invalid encoding."""
    if isinstance(value, list):
        return [decode(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith("$") for key in value):
        return {key: decode(item, where) for key, item in value.items()}
    try:
        ((tag, content),) = value.items()
        return _tagged(tag, content, where)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{where}: {str(value)[:100]} is not a value of a checkpoint: {error}") from error


def _tagged(tag: str, content: Any, where: str) -> Any:
    match tag:
        case "$tuple":
            return tuple(decode(item, where) for item in content)
        case "$size":
            return torch.Size(content)
        case "$dict" | "$ordered" | "$counter":
            return _KINDS[tag]({decode(key, where): decode(item, where) for key, item in content})
        case "$float":
            return _FLOATS[content]
        case "$bytes":
            return _bytes(content)
        case "$bytearray":
            return bytearray(_bytes(content))
        case "$tensor":
            name, shape, text = content
            data = (
                torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
                if text
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            return data.view(DTYPES[name]).reshape(shape)
        case "$array":
            name, shape, text = content
            return np.frombuffer(_bytes(text), dtype=_numbers(name)).reshape(shape).copy()
        case "$scalar":
            name, text = content
            (scalar,) = np.frombuffer(_bytes(text), dtype=_numbers(name))
            return scalar
    raise KeyError(tag)


def _numbers(name: Any) -> "np.dtype[Any]":
    """Returns NumPy's dtype of that name. Raises ValueError unless it is numeric."""
    dtype = np.dtype(name)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"arrays of {dtype} are not read")
    return dtype


def _text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
