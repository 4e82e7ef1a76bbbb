"""The net for a change that must change nothing: run it before and after, then compare the folders with `diff -r`.

    python -m tests.support.golden FOLDER

Writes what the library does on this machine, as text: the public names with their signatures, the templates of all
error messages, and for each family of the certificate and each plan the losses, norms, weights and moments of three
steps as bits, with the cache's requests, the collectives, and the bytes planned, held and moved. Runs of the same code
are equal to the byte. Other processors and torches have other bits, so nothing here is committed.
"""

import argparse
import ast
import hashlib
import inspect
import json
import tempfile
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import elixir_moe as em
import elixir_tools
from elixir_moe import public
from elixir_tools.verify.plans import asked
from tests.certificate.families import FAMILIES
from tests.support.ranks import RankPool

PLANS = ("ddp", "zero2", "zero3", "offload", "disk")
MODES = ("full", "lora", "nf4")
STEPS, MICRO_BATCHES, RANKS = 3, 2, 2
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "irecv", "isend", "reduce_scatter_tensor"),
)


def main() -> None:
    """Writes all files."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.golden", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--only", default="", help="cases whose name contains this; by default all, and the texts")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    if not given.only:
        (given.folder / "public.txt").write_text("\n".join(_public()) + "\n")
        (given.folder / "errors.txt").write_text("\n".join(_errors()) + "\n")
    pool = RankPool(RANKS)
    for number, (family, plan, mode) in enumerate(product(FAMILIES, PLANS, MODES)):
        name = f"{family}.{plan}.{mode}"
        chosen = mode == "full" or number % 7 == 0  # adapters under one plan or two of each family
        if chosen and given.only in name:
            with tempfile.TemporaryDirectory() as scratch:
                found = pool.run(run, family, plan, mode, number % 2 == 0, Path(scratch))
            for rank, lines in enumerate(found):
                (given.folder / f"{name}.rank{rank}.txt").write_text("\n".join(lines) + "\n")
    pool.close()


def run(family: str, plan: str, mode: str, checkpointing: bool, folder: Path) -> list[str]:
    """The lines of a case on this rank. Collective."""
    quantized = "nf4" if mode == "nf4" else None
    source = FAMILIES[family].source(lora=mode != "full", quantized=quantized, checkpointing=checkpointing)
    torch.manual_seed(0)
    model = source.adapted(source.base())
    if quantized:
        em.quantize(model, quantized)
    lines: list[str] = []
    with _recorded(lines):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, optimizer = em.wrap(model, torch.optim.AdamW(trained, lr=1e-2, eps=1e-4), plan=asked(plan, folder).given)
        for step in range(STEPS):
            lines.append(f"step {step}")
            for micro_batch in range(MICRO_BATCHES):
                torch.manual_seed(100 * step + 10 * micro_batch + dist.get_rank())
                batch = source.sample()
                loss = model(**batch).loss
                lines.append(f"loss {loss.item().hex()}")
                (loss / MICRO_BATCHES).backward()
            lines.append(f"norm {float(optimizer.clip_grad_norm_(1.0)).hex()}")
            optimizer.step()
            optimizer.zero_grad()
        seen = em.inspect(model)
        lines += [
            f"held {json.dumps(seen.held_bytes)}",
            f"planned {seen.footprint}",
            f"requests {seen.schedule and [*seen.schedule.entries]}",
        ]
        lines += [f"moved {json.dumps(seen.statistics.as_dict(), sort_keys=True)}", *map(str, seen.rows)]
        lines.append(f"weights {_hash(em.full_state_dict(model) or {})}")
        em.save(folder / "saved", model, optimizer)
        shards = sorted((folder / "saved").rglob("*.safetensors"))
        lines += [f"{shard.name} {hashlib.sha256(shard.read_bytes()).hexdigest()}" for shard in shards]
        optimizer.close()
    return [f"{line} x {len(same)}" for line, group in groupby(lines) if (same := list(group))]


class _recorded:  # noqa: N801
    """While it is entered, each collective adds a line."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._real = {name: getattr(dist, name) for name in COLLECTIVES if hasattr(dist, name)}

    def __enter__(self) -> None:
        for name, real in self._real.items():
            setattr(dist, name, self._recording(name, real))

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(dist, name, real)

    def _recording(self, name: str, real: Any) -> Any:
        def recording(*args: Any, **kwargs: Any) -> Any:
            tensors = [f"{one.dtype}{list(one.shape)}" for one in args if isinstance(one, Tensor)]
            tag = f" tag {kwargs['tag']}" if "tag" in kwargs else ""
            self._lines.append(f"{name} {' '.join(tensors)}{tag}")
            return real(*args, **kwargs)

        return recording


def _hash(value: Any) -> str:
    """SHA-256 of everything in it."""
    digest = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, dict):
            for key in sorted(one, key=str):
                digest.update(str(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for item in one:
                add(item)
        elif isinstance(one, Tensor):
            digest.update(f"{one.dtype}{list(one.shape)}".encode())
            digest.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(one).encode())

    add(value)
    return digest.hexdigest()


def _public() -> Iterator[str]:
    for name in public.__all__:
        value = getattr(public, name)
        if not callable(value):
            yield name
            continue
        yield f"{name}{_signature(value)}"
        if inspect.isclass(value):
            for member, one in sorted(vars(value).items()):
                if not member.startswith("_"):
                    one = getattr(one, "__func__", one)
                    yield f"  {name}.{member}{_signature(one) if callable(one) else ''}"


def _signature(value: Any) -> str:
    try:
        return str(inspect.signature(value))
    except ValueError:  # of a class in C
        return "(...)"


def _errors() -> list[str]:
    """The message of each `raise` of the package, with its expressions left out."""
    found = []
    files = [file for package in (em, elixir_tools) for file in Path(str(package.__file__)).parent.rglob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = [one.value for one in ast.walk(node.exc) if isinstance(one, ast.Constant)]
                found.append(f"{ast.unparse(node.exc.func)}: {' … '.join(str(text) for text in texts)}")
    return sorted(found)


if __name__ == "__main__":
    from tests.support import golden  # ranks find `run` by this name

    golden.main()
