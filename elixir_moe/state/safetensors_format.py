"""The safetensors format: names of dtypes, the header of a file, and the division of a model into several files.

Owns the format (https://github.com/huggingface/safetensors): 8 bytes with the length of the header, the header in JSON,
and the tensors. A model in one file is ``model.safetensors``; a model in three files is
``model-00001-of-00003.safetensors`` and so on, with ``model.safetensors.index.json``.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from elixir_moe.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """The beginning of a file, and the positions that follow from it."""

    data: bytes
    """The bytes before the tensors."""
    places: Mapping[str, int]
    """Position of each tensor in the file, in bytes."""
    nbytes: int
    """Size of the whole file."""


def name_of(dtype: torch.dtype, tensor: str) -> str:
    """Returns the name of `dtype` in files. Raises CheckpointError, which names `tensor`, if there is none."""
    if dtype not in NAMES:
        raise CheckpointError(f"{tensor!r} is of {dtype}, which safetensors files cannot hold")
    return NAMES[dtype]


def head_of(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None) -> Head:
    """Returns the head of a file with these tensors, {name: (name of its dtype, shape)}, and this metadata."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    at = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -DTYPES[item[1][0]].itemsize):  # all aligned
        starts[name], at = at, at + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [starts[name], at]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = len(text).to_bytes(8, "little") + text
    return Head(data=data, places={name: len(data) + start for name, start in starts.items()}, nbytes=len(data) + at)


def files_of(sizes: Mapping[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """Returns {file: names of its tensors, in order}, given their bytes; a file has as many as fit, at least one."""
    parts = list(_parts(sizes, max_file_bytes))
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, 1)}


def _parts(sizes: Mapping[str, int], max_file_bytes: int) -> Iterator[list[str]]:
    part: list[str] = []
    taken = 0
    for name, nbytes in sizes.items():
        if part and taken + nbytes > max_file_bytes:
            yield part
            part, taken = [], 0
        part.append(name)
        taken += nbytes
    yield part


def index_of(files: Mapping[str, Sequence[str]], nbytes: int) -> str:
    """Returns the contents of the index of several files from `files_of`; `nbytes`: the size of all tensors."""
    file_of = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": nbytes}, "weight_map": file_of}, indent=2) + "\n"
