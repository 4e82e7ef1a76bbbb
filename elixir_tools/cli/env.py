"""The command `env`: versions and devices.

Owns what is worth knowing of them.
"""

import argparse
import json
import os
import platform
from importlib import metadata
from typing import Any

import torch

from elixir_moe.ext import accelerator
from elixir_moe.ext.measure import cpu_features
from elixir_moe.ext.torch_versions import NEWEST, OLDEST, untested


def run(known: argparse.Namespace) -> int:
    """Prints the facts; returns 0."""
    versions = {name: _version(name) for name in ("elixir-moe", "torch", "numpy", "safetensors", "megatron-core")}
    kind = accelerator.found()
    devices = [] if kind is None else [accelerator.api(kind).get_device_name(i) for i in range(accelerator.count())]
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "devices": devices,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu_adam": cpu_features(),
        "torch_tested": untested() or f"{OLDEST} to {NEWEST}",
        "backends": [b for b in ("gloo", "nccl", "mpi") if torch.distributed.is_backend_available(b)],
    }
    if known.json:
        print(json.dumps(facts))
        return 0
    for name, version in versions.items():
        facts[name] = version or "not installed"
    for name, fact in facts.items():
        if name != "versions":
            print(f"{name:14} {', '.join(fact) or 'none' if isinstance(fact, list) else fact or 'none'}")
    return 0


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
