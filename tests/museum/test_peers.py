"""Peers under `verify`: torch's own are equal, a fault planted in one is named, and its script shows it alone."""

import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn import parallel

from elixir_tools.verify import training
from elixir_tools.verify.cases import HuggingFace, Source
from elixir_tools.verify.certificate import as_dicts, certify, first_failed
from tests.certificate.families import FAMILIES
from tests.certificate.peers import peer
from tests.certificate.script import script_of
from tests.museum.cases import small

VERSIONS = {"torch": torch.__version__}


@contextmanager
def ignored_experts() -> Iterator[None]:
    """DDP leaves the experts out: each rank keeps the gradient of its own rows."""
    wrapped = parallel.DistributedDataParallel

    def broken(model: nn.Module, **options: Any) -> nn.Module:
        wrapped._set_params_and_buffers_to_ignore_for_model(model, ["experts.weight"])
        return wrapped(model, **options)

    with patch.object(parallel, "DistributedDataParallel", broken):
        yield


@contextmanager
def summed_gradients() -> Iterator[None]:
    """FSDP2 sums gradients over the ranks and does not divide them."""
    shard = fsdp.fully_shard

    def broken(model: Any, **options: Any) -> Any:
        sharded: Any = shard(model, **options)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        return sharded

    with patch.object(fsdp, "fully_shard", broken):
        yield


FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[None]], str]] = {
    "ignored-experts": ("ddp", ignored_experts, "module experts, weight, gradient norm"),
    "summed-gradients": ("fsdp2", summed_gradients, "module first, weight, gradient norm"),
}


def setup_of(name: str, source: Source, folder: str, **options: Any) -> training.Setup:
    given = {"ranks": 2, "resumed_ranks": 2, "steps": 2, "accumulation": 1, "compute_dtype": None} | options
    return training.Setup(source=source, backend=peer(name), folder=Path(folder), **given)


def checked(name: str, folder: str, fault: str | None = None, accumulation: int = 1) -> tuple[list[Any], str | None]:
    """On each rank: the checks, on rank 0, and the script of the first difference."""
    setup = setup_of(name, small(), folder, accumulation=accumulation)
    with FAULTS[fault][1]() if fault else nullcontext():
        training.on_these_ranks(setup)
    if dist.get_rank():
        return [], None
    checks = certify(setup)
    failed = first_failed(checks)
    return as_dicts(checks), failed and script_of(setup, failed, VERSIONS)


def said_by(script: str, fault: str | None) -> str:
    """What a script ends with, in the ranks that are there."""
    with FAULTS[fault][1]() if fault else nullcontext(), patch.object(dist, "init_process_group"):
        try:
            runpy.run_path(script)
        except SystemExit as end:
            return str(end)
    return "nothing differs"


@pytest.mark.parametrize(("name", "accumulation"), [("ddp", 1), ("fsdp2", 2)])
def test_a_peer_of_torch_is_equal(ranks: Any, tmp_path: Path, name: str, accumulation: int) -> None:
    checks, script = ranks(2).run(checked, name, str(tmp_path), None, accumulation)[0]
    assert [check for check in checks if not check["ok"]] == []
    assert script is None
    names = {check["name"] for check in checks}
    assert {"moments when saved", "weights after the load", "weights of step 4 after the load"} < names
    assert {"gradients of step 1", "exported weights", "outputs after the export"} < names
    assert "weights read from a folder" not in names


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_peer_is_found_and_its_script_shows_it_alone(ranks: Any, tmp_path: Path, fault: str) -> None:
    name, _, says = FAULTS[fault]
    checks, script = ranks(2).run(checked, name, str(tmp_path), fault)[0]
    first = next(check for check in checks if not check["ok"])
    assert first["name"] == "gradients of step 1"
    assert says in first["where"]
    assert "elixir_moe" not in script
    assert f"{name} differs from plain PyTorch: gradients of step 1: {says}" in script
    file = tmp_path / "differs.py"
    file.write_text(script)
    parameter = ".".join(says.removeprefix("module ").split(", ")[:2])
    assert f"step 1: norm of the gradient of {parameter} differs" in ranks(2).run(said_by, str(file), fault)[0]
    assert ranks(2).run(said_by, str(file), None) == ["nothing differs"] * 2


FAMILY = "qwen3-moe"


def hugging_face() -> HuggingFace:
    """The mixture with transformers' own weights, as a user's config is."""
    family = FAMILIES[FAMILY]
    return HuggingFace(settings=family.settings, architecture=family.architecture, rows=4, length=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "hf-ep", "deepspeed", "deepspeed-2", "deepspeed-1"])
def test_a_mixture_of_transformers(tmp_path: Path, name: str) -> None:
    """By the command's own ranks, since peers leave variables and groups behind; then by the script, in its own."""
    if name.startswith("deepspeed"):
        pytest.importorskip("deepspeed", reason="no peer of ours is installed by default: pip install deepspeed")
    from elixir_tools.verify.ranks import on_ranks

    setup = setup_of(name, hugging_face(), str(tmp_path))
    training.run_on_ranks(setup, on_ranks)
    checks = on_ranks(1, certify, setup)
    assert [check for check in checks if not check.ok] == []
    assert any(check.name == "weights after the load" for check in checks) == (name != "hf-ep")
    last = next(check for check in checks if check.name == "weights of step 2")
    script = script_of(setup, last, VERSIONS)
    assert script is not None
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "script.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.count("nothing differs") == 2
