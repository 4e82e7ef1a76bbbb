"""`elixir-moe ckpt`: lists, verifies, exports and rewrites checkpoints, without a model and on one process.

Owns its output.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.ext.checkpoints import (
    MANIFEST,
    Manifest,
    Whole,
    check_target,
    checkpoints,
    checkpoints_folder,
    export_huggingface,
    export_torch,
    partial_folders,
    read_manifest,
    reshard,
    verify,
)
from elixir_tools.names import DTYPES


def run(known: argparse.Namespace) -> int:
    """Runs the action. Raises ConfigError for wrong arguments, CheckpointError for unusable checkpoints."""
    if known.action == "ls":
        return _ls(known.directory, known.json)
    if known.action != "verify":
        _check_settings(known)
    path = _chosen(known.checkpoint)
    manifest = read_manifest(path)
    verify(path, manifest)
    whole = Whole(path, manifest)
    try:
        written = _written(known, whole)
    except OSError as error:
        raise CheckpointError(f"{error.filename or known.out} cannot be written: {error.strerror or error}") from error
    if known.json:
        print(json.dumps({**_facts(path, manifest), "verified": True, "written": list(map(str, written))}))
    else:
        print(f"{path}: {len(manifest.files)} files, {manifest.nbytes:,} bytes, every hash is right")
        for file in written:
            print(f"wrote {file}")
    return 0


def _written(known: argparse.Namespace, whole: Whole) -> list[Path]:
    """Carries out the action; returns the files that it has written."""
    if known.action == "export":
        dtype = None if known.dtype is None else getattr(torch, DTYPES[known.dtype])
        if known.format == "torch":
            return export_torch(whole, known.out, dtype=dtype)
        return export_huggingface(whole, known.out, dtype=dtype, shard_bytes=int(known.shard_gb * 1e9))
    if known.action == "reshard":
        return [known.out / name for name in reshard(whole, known.out, known.files).files]
    return []


def _check_settings(known: argparse.Namespace) -> None:
    """Raises ConfigError if the output cannot be written, before the checkpoint is hashed."""
    if known.action == "export":
        if not 0 < known.shard_gb < math.inf:
            raise ConfigError(f"--shard-gb {known.shard_gb}: expected a finite number above 0")
        if os.path.lexists(known.out):
            raise ConfigError(f"{known.out} exists: name another {'folder' if known.format == 'hf' else 'file'}")
    if known.action == "reshard":
        if known.files < 1:
            raise ConfigError(f"--files {known.files}: expected at least 1")
        try:
            check_target(known.out)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
    above = next(path for path in known.out.absolute().parents if os.path.lexists(path))
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(f"{known.out} cannot be made: nothing can be written in {above}; name another place")


def _chosen(path: Path) -> Path:
    """The checkpoint at `path`, or the latest in that directory.

    Raises ConfigError if there is none, and CheckpointError if a damaged manifest leaves open which is the latest.
    """
    if os.path.lexists(path / MANIFEST):
        return path
    found = _found(_folders(path)) if path.is_dir() else []
    for _, manifest in found:
        if isinstance(manifest, CheckpointError):
            raise manifest
    if not found:
        raise ConfigError(
            f"{path} is not a checkpoint and holds none: name one, or the directory of a run that saved some"
        )
    return found[-1][0]


def _folders(directory: Path) -> list[Path]:
    """The folders that may hold the checkpoints of a run: that of `train`, and each ``checkpoint-N`` of a trainer."""
    return [checkpoints_folder(directory), *filter(Path.is_dir, sorted(directory.glob("checkpoint-*")))]


def _found(folders: Sequence[Path]) -> list[tuple[Path, Manifest | CheckpointError]]:
    """(path, manifest) of all checkpoints in folders, the latest last; damaged ones first, with their error."""
    found = [each for folder in folders for each in checkpoints(folder)]
    return sorted(found, key=lambda each: each[1].saved_ns if isinstance(each[1], Manifest) else -1)


def _ls(directory: Path, as_json: bool) -> int:
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: name a run's, or one that holds checkpoints")
    folders = _folders(directory)
    rows = [_facts(path, found) for path, found in _found(folders)]
    unfinished = [str(path) for folder in folders for path in partial_folders(folder)]
    if as_json:
        print(json.dumps({"checkpoints": rows, "partial": unfinished}))
        return 0
    for row in rows:
        if "damaged" in row:
            print(f"{row['path']}  damaged: {row['damaged']}")
        else:
            print(
                f"{row['path']}  {row['saved']}  ranks: {row['ranks']}  parameters: {row['parameters']:,}  "
                f"files: {row['files']}  bytes: {row['bytes']:,}"
            )
    for path in unfinished:
        print(f"{path}  partial: a running save, or one whose process died; the next save removes that")
    if not rows and not unfinished:
        print(f"{folders[0]} holds no checkpoint")
    return 0


def _facts(path: Path, found: Manifest | CheckpointError) -> dict[str, Any]:
    if isinstance(found, CheckpointError):
        return {"path": str(path), "damaged": str(found)}
    saved = datetime.fromtimestamp(found.saved_ns / 1e9, UTC).isoformat(timespec="seconds")
    return {
        "path": str(path),
        "saved": saved,
        "ranks": found.world,
        "optimizer": found.optimizer,
        "parameters": found.numel,
        "files": len(found.files),
        "bytes": found.nbytes,
    }
