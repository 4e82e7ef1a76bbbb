"""Files of tensors: what their hash is, and that they hold what was put in, however the disk takes it."""

import errno
import hashlib
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir_moe import _native, kernels
from elixir_moe.checkpoint import hashing, tensors
from elixir_moe.checkpoint.hashing import segment_digest
from elixir_moe.checkpoint.manifest import FileRecord
from elixir_moe.checkpoint.tensors import FileImage, Item, hash_file, write_tensors

PAGE = 4096
ISAS = ["scalar", "avx2", "avx512"]
ISAS = ISAS[: ISAS.index(_native.cpu_features()) + 1]


def plain(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def pieces(data: bytes, length: int) -> list[bytes]:
    return [data[at : at + length] for at in range(0, len(data), length)]


def items_of(values: torch.Tensor, numels: tuple[int, ...] = (0, 3, 5000, 9000)) -> list[Item]:
    return [Item(key=str(n), dtype="F32", shape=(n,), tensor=lambda n=n: values[:n]) for n in numels]


@pytest.mark.parametrize("isa", [*ISAS, "none"])
def test_messages_side_by_side_have_the_hashes_of_hashlib(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(0).randbytes(13 * 4096)
    if isa == "none":
        monkeypatch.setattr(kernels, "_native", None)
    for length in (128, 384, 4096):
        for count in (0, 1, 3, 4, 7, 8, 13):
            messages = memoryview(data)[5 : 5 + count * length] if count * length < len(data) else memoryview(data)
            messages = messages[: count * length]
            wanted = b"".join(map(plain, pieces(bytes(messages), length)))
            if isa == "none" or not count:
                assert kernels.blake2b_each(messages, length) == wanted
            else:
                assert _native.blake2b(messages, length=length, isa=isa) == wanted


@pytest.mark.parametrize(("nbytes", "length"), [(100, 128), (256, 100), (0, 0)])
def test_messages_of_another_length_are_refused(nbytes: int, length: int) -> None:
    with pytest.raises(ValueError, match="a multiple of 128 that divides it"):
        _native.blake2b(bytes(nbytes), length=length)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1, 9 * PAGE + 77])
def test_the_hash_of_a_segment_is_that_of_its_leaves(nbytes: int) -> None:
    data = random.Random(1).randbytes(nbytes)
    assert segment_digest(memoryview(data)) == plain(b"".join(map(plain, pieces(data, hashing.LEAF_BYTES))))


@pytest.mark.parametrize("segment", [PAGE, 5 * PAGE, 1 << 22])
@pytest.mark.parametrize("way", ["around", "no way around", "larger pages"])
def test_the_hash_is_that_of_the_segments_of_the_file(
    segment: int, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the file system refuses to go around its cache, at once or for pages of this size."""
    monkeypatch.setattr(tensors, "SEGMENT_BYTES", segment)
    opened, write = os.open, os.pwrite
    around = set[int]()

    def open_(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT and way == "no way around":
            raise OSError(errno.EINVAL, "refused")
        descriptor = opened(path, flags, *mode)
        if flags & os.O_DIRECT:
            around.add(descriptor)
        return descriptor

    def pwrite(descriptor: int, data: memoryview, at: int) -> int:
        if descriptor in around and way == "larger pages":
            raise OSError(errno.EINVAL, "refused")
        return write(descriptor, data, at)

    monkeypatch.setattr(tensors.os, "open", open_)
    monkeypatch.setattr(tensors.os, "pwrite", pwrite)
    values = torch.arange(9000.0)
    record = write_tensors(tmp_path / "x.safetensors", items_of(values))
    data = (tmp_path / "x.safetensors").read_bytes()
    assert record == hash_file(tmp_path / "x.safetensors")
    segments = [plain(b"".join(map(plain, pieces(part, PAGE)))) for part in pieces(data, segment)]
    assert record == FileRecord(nbytes=len(data), digest=plain(b"".join(segments)).hex())
    from safetensors.torch import load_file

    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[str(n)], values[:n]) for n in (0, 3, 5000, 9000))


@pytest.mark.parametrize("first", [(), ("5000",), ("9000", "3"), ("0", "3", "5000", "9000")])
def test_what_was_taken_before_keeps_its_values(first: tuple[str, ...], tmp_path: Path) -> None:
    values = torch.arange(9000.0)
    image = FileImage(items_of(values), bounded=False)
    image.take(first)
    values.zero_()
    image.write(tmp_path / "x.safetensors")
    from safetensors.torch import load_file

    for name, tensor in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(tensor, torch.arange(9000.0)[: int(name)] if name in first else torch.zeros(int(name)))
