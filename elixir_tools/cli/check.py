"""The command `check`: is training on this machine exact, how fast are its links, and what can it train?

Owns its output and the folder in which the disk is tried. Decides nothing: `verify/self_check` has the stages.
"""

import argparse
import json
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from elixir_moe.errors import ConfigError
from elixir_moe.ext.hardware import Hardware
from elixir_moe.ext.measure import cache_folder, disk_bytes_left, file_system
from elixir_moe.ext.plans import size_text
from elixir_tools.cli.arguments import add_plan
from elixir_tools.train import launch
from elixir_tools.train.waiting import Tell, Waits
from elixir_tools.verify.certificate import Check, as_dicts, first_failed
from elixir_tools.verify.self_check import PLANS, Machine, facts, why_no_gpu

_NEEDED_BYTES = 1 << 28
"""Free bytes of the disk that the check asks for."""
_TOKENS = 2048
"""Tokens of a GPU in the step whose largest models are named."""
_IN_MEMORY = ("tmpfs", "ramfs")


def run(known: argparse.Namespace) -> int:
    """Prints three lines, or the object; returns 0 if everything is exact, else 1. Raises ConfigError."""
    if launch.under_torchrun():
        raise ConfigError("check starts ranks of its own: call it without torchrun")
    waits = Waits(quiet=known.quiet, after_seconds=0)
    with _folder(known.disk) as folder, waits("looking at the machine") as tell:
        report, first = _checked(folder, tell)
    text = json.dumps(report)
    if known.json:
        print(text)
    else:
        print("\n".join(_lines(report, first)))
        _keep(text)
    return int(first is not None)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """A new folder in the given one, by default where temporary files go; it is removed. Raises ConfigError."""
    where = Path(tempfile.gettempdir()) if given is None else given
    try:
        made = tempfile.TemporaryDirectory(prefix="elixir-check-", dir=where)
    except OSError as error:
        raise ConfigError(
            f"--disk: nothing can be written to {str(where)!r}: {error.strerror}; name a folder of yours"
        ) from error
    with made as folder:
        left = disk_bytes_left(folder)
        if left < _NEEDED_BYTES:
            raise ConfigError(
                f"--disk: {size_text(left)} are left in {str(where)!r}, and the check needs "
                f"{size_text(_NEEDED_BYTES)}: make room there, or name another folder"
            )
        yield Path(folder)


def _checked(folder: Path, tell: Tell) -> tuple[dict[str, Any], Check | None]:
    """(all that was found, the first difference)."""
    machine = Machine.here()
    report = facts() | {"ranks": machine.ranks, "gpus": machine.devices() if machine.gpus else []}
    if not machine.gpus:
        report["no_gpu"] = why_no_gpu()
    checks: dict[str, list[Check]] = {}
    for plan in PLANS:
        tell(f"training a small mixture of experts under {plan}, and in plain PyTorch")
        own = folder / plan
        own.mkdir()
        checks[plan] = machine.compare(plan, own, folder)
    tell(f"measuring {'the link, ' if machine.gpus else ''}Adam and the disk")
    hardware, direct = machine.speeds(folder)
    firsts = [(plan, failed) for plan, found in checks.items() if (failed := first_failed(found)) is not None]
    report["exact"] = not firsts
    report["first_difference"] = f"under {firsts[0][0]}, {firsts[0][1].name}: {firsts[0][1].where}" if firsts else None
    tell("counting by formulas what this machine can fine-tune")
    report["trains"] = _trains(hardware, machine.ranks)
    report["speed"] = _speed(hardware, machine) | {"file_system": file_system(str(folder)), "disk_direct": direct}
    report["hardware"] = json.loads(hardware.to_json())
    report["checks"] = {plan: as_dicts(found) for plan, found in checks.items()}
    return report, firsts[0][1] if firsts else None


def _trains(hardware: Hardware, ranks: int) -> dict[str, str | None]:
    """{way to train: the largest model that fits}; empty where the packages that build models are missing."""
    if find_spec("transformers") is None or find_spec("peft") is None:
        return {}
    from elixir_tools.fit import reach  # transformers and peft take seconds to load

    plan = argparse.ArgumentParser()
    add_plan(plan)
    words = ["any", "--hardware", "here", "--gpus", str(ranks), "--batch", "1", "--seq", str(_TOKENS)]
    return reach.largest(plan.parse_args(words), hardware)


def _speed(hardware: Hardware, machine: Machine) -> dict[str, Any]:
    """The measured speeds, of all ranks together, by name and unit."""
    links = hardware.links(hardware.gpus_per_node)
    return {
        "to_gpu_gb_per_second": links.b_c2g if machine.gpus else None,
        "from_gpu_gb_per_second": links.b_g2c if machine.gpus else None,
        "host_adam_parameters_per_second": links.v_c * 1e9,
        "gpu_adam_parameters_per_second": links.v_g * 1e9 if machine.gpus else None,
        "disk_read_gb_per_second": hardware.disk_read,
        "disk_written_gb_per_second": hardware.disk_write,
        "tflops": hardware.peak_tflops,
    }


def _lines(report: dict[str, Any], first: Check | None) -> Iterator[str]:
    ranks, gpus, speed = report["ranks"], report["gpus"], report["speed"]
    where = f"{ranks} x {gpus[0]['name']}" if gpus else f"{ranks} CPU ranks ({report['no_gpu']})"
    if first is None:
        yield f"exact   {', '.join(report['checks'])} equal plain PyTorch: loss, gradient norm, weights; on {where}"
    else:
        yield f"DIFFERS {report['first_difference']}; on {where}"
    link = "no link to a GPU"
    if gpus:
        link = f"link {speed['to_gpu_gb_per_second']:.1f} GB/s to the GPU, {speed['from_gpu_gb_per_second']:.1f} back"
    disk = f"{speed['disk_read_gb_per_second']:.2f} GB/s read, {speed['disk_written_gb_per_second']:.2f} written"
    if speed["file_system"] in _IN_MEMORY:
        disk += f" ({speed['file_system']} is memory, not a disk: name a folder with --disk)"
    elif not speed["disk_direct"]:
        disk += f" (through the cache of {speed['file_system'] or 'the system'})"
    adam = f"{speed['host_adam_parameters_per_second'] / 1e9:.2f} G parameters/s"
    yield f"speed   {link}; Adam in RAM {adam}; disk {disk}"
    found = "; ".join(f"{way} {name or 'none'}" for way, name in report["trains"].items())
    if found:
        yield f"trains  by formulas, {_TOKENS} tokens a GPU: {found}; exact: elixir-moe plan MODEL --hardware here"
    else:
        yield "trains  by formulas, if there were transformers and peft: pip install transformers peft"
    if report["torch_untested"]:
        yield f"note    {report['torch_untested']}"


def _keep(text: str) -> None:
    """Leaves the object where figures of this machine are kept."""
    path = cache_folder() / "check.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        warnings.warn(f"the figures could not be kept in {str(path)!r}: {error}; --json prints them", stacklevel=2)
        return
    print(f"to send: {path} has these figures, without names of users or folders")
