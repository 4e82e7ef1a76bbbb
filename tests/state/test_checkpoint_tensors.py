"""Files of tensors: what their hash is, and that they hold what was put in, however the disk takes it."""

import errno
import fcntl
import os
import threading
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blake3 import blake3

from elixir_moe.memory import direct_file
from elixir_moe.state.checkpoint import tensors
from elixir_moe.state.checkpoint.manifest import FileRecord
from elixir_moe.state.checkpoint.tensors import FileImage, Item, hash_file
from tests.support.every import every

PAGE = 4096


def pieces(data: bytes, length: int) -> list[bytes]:
    return [data[at : at + length] for at in range(0, len(data), length)]


NUMELS = (0, 3, 5000, 9000)


def items_of(values: torch.Tensor, staying: tuple[int, ...] = ()) -> list[Item]:
    return [
        Item(key=str(n), dtype="F32", shape=(n,), tensor=lambda n=n: values[:n], stays=n in staying) for n in NUMELS
    ]


@pytest.mark.parametrize("staying", [(), (5000,), NUMELS], ids=str)
@pytest.mark.parametrize("segment", [PAGE, 5 * PAGE, 1 << 22])
@pytest.mark.parametrize("way", ["around", "no way around", "larger pages"])
def test_the_hash_is_that_of_the_segments_of_the_file(
    segment: int, way: str, staying: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file system refuses to go around its cache, at once or for pages of this size."""
    monkeypatch.setattr(tensors, "SEGMENT_BYTES", segment)
    write, control, direct = os.pwritev, fcntl.fcntl, os.O_DIRECT

    def fcntl_(file: Any, command: int, flags: int = 0) -> int:
        if flags & direct and way == "no way around":
            raise OSError(errno.EINVAL, "refused")
        return control(file, command, flags)

    def pwritev(descriptor: int, data: list[memoryview], at: int) -> int:
        if control(descriptor, fcntl.F_GETFL) & direct and way == "larger pages":
            raise OSError(errno.EINVAL, "refused")
        return write(descriptor, data, at)

    monkeypatch.setattr(direct_file.fcntl, "fcntl", fcntl_)
    monkeypatch.setattr(direct_file.os, "pwritev", pwritev)
    values = torch.arange(9000.0)
    record = FileImage(items_of(values, staying)).write(tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    assert record == hash_file(tmp_path / "x.safetensors")
    segments = [blake3(part).digest() for part in pieces(data, segment)]
    assert record == FileRecord(nbytes=len(data), digest=blake3(b"".join(segments)).hexdigest())
    from safetensors.torch import load_file

    found = load_file(tmp_path / "x.safetensors")
    assert every(torch.equal(found[str(n)], values[:n]) for n in NUMELS)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("staying", [(), (3, 9000)], ids=str)
@pytest.mark.parametrize("first", [(), ("5000",), ("9000", "3"), ("0", "3", "5000", "9000")])
def test_what_was_taken_before_keeps_its_values(
    first: tuple[str, ...], staying: tuple[int, ...], bounded: bool, tmp_path: Path
) -> None:
    values = torch.arange(9000.0)
    image = FileImage(items_of(values, staying), bounded=bounded)
    image.take(first)
    values.zero_()
    image.write(tmp_path / "x.safetensors")
    from safetensors.torch import load_file

    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(tensor, torch.arange(9000.0)[: int(name)] if name in first else torch.zeros(int(name)))


def test_all_is_copied_when_the_write_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the writers copy, however late they are."""
    monkeypatch.setattr(tensors, "SEGMENT_BYTES", PAGE)
    monkeypatch.setattr(tensors, "_SEGMENTS_AHEAD", 100)
    values, bring, all_read = torch.arange(9000.0), FileImage._bring, threading.Event()
    monkeypatch.setattr(FileImage, "_bring", lambda *given: (all_read.wait(), bring(*given))[1])
    monkeypatch.setattr(tensors, "wait", lambda futures: (all_read.set(), wait(futures)))
    image = FileImage(items_of(values, staying=(3, 5000, 9000)))
    image.write(tmp_path / "x.safetensors", lambda: (values.zero_(), all_read.set())[1])
    from safetensors.torch import load_file

    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(tensor, torch.arange(9000.0)[: int(name)])


class Awaited(Future[bytes]):
    """The hash of a segment, which is written when somebody waits for it."""

    def __init__(self, bring: Any) -> None:
        super().__init__()
        self._bring = bring

    def result(self, timeout: float | None = None) -> bytes:
        if not self.done():
            self.set_result(self._bring())
        return super().result(timeout)


def test_no_more_is_copied_ahead_of_the_writes_than_memory_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def submit(bring: Any, file: Any, index: int) -> Awaited:
        copied.append(len(image._segments))
        return Awaited(partial(bring, file, index))

    monkeypatch.setattr(tensors, "SEGMENT_BYTES", PAGE)
    monkeypatch.setattr(tensors, "ThreadPoolExecutor", lambda _: nullcontext(SimpleNamespace(submit=submit)))
    monkeypatch.setattr(tensors, "wait", lambda futures: [future.result() for future in futures])
    image = FileImage(items_of(torch.arange(9000.0)))
    image.write(tmp_path / "x.safetensors")
    assert len(copied) > 2 * tensors._SEGMENTS_AHEAD
    assert max(copied) <= tensors._SEGMENTS_AHEAD + 1
