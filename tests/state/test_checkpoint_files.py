"""What a file system sees of a checkpoint: geometry, values, hashes, hostile content, and death at any moment."""

import errno
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import elixir_moe as em
from elixir_moe.memory import direct_file
from elixir_moe.state import marked
from elixir_moe.state.checkpoint import storage, tensors
from elixir_moe.state.checkpoint.hashing import digest_of
from elixir_moe.state.checkpoint.manifest import (
    FileRecord,
    Manifest,
    ParameterRecord,
    ParamGroup,
    SavedPiece,
    dump,
    parse,
)
from elixir_moe.state.checkpoint.shard_ranges import Span, flaw, overlap
from elixir_moe.state.checkpoint.storage import (
    Draft,
    latest,
    next_save_time,
    read_manifest,
    remove,
    retain,
    verify,
)
from elixir_moe.state.checkpoint.tensors import FileImage, Item
from elixir_moe.state.checkpoint.values import decode, encode
from elixir_moe.state.checkpoint.whole import Whole
from elixir_moe.state.marked import MARK, MARK_BYTES, partial_of, remove_abandoned
from elixir_tools.cli.main import main

SHAPE = (6, 4, 5)


def spans(cell: tuple[int, ...], cuts: list[int]) -> list[Span]:
    """Every slice of that shape of a parameter of `SHAPE`, cut into runs at these elements."""
    numel = math.prod(cell)
    bounds = [0, *[cut for cut in cuts if 0 < cut < numel], numel]
    grid = [range(0, whole, n) for whole, n in zip(SHAPE, cell, strict=True)]
    offsets = [(i, j, k) for i in grid[0] for j in grid[1] for k in grid[2]]
    return [Span(offset=o, shape=cell, start=a, stop=b) for o in offsets for a, b in pairwise(bounds)]


def elements(span: Span) -> torch.Tensor:
    """The numbers a run holds, of a parameter that holds 0, 1, 2, ..."""
    whole = torch.arange(math.prod(SHAPE)).view(SHAPE)
    window = tuple(slice(o, o + n) for o, n in zip(span.offset, span.shape, strict=True))
    return whole[window].flatten()[span.start : span.stop]


def test_runs_of_any_two_cuts_meet_in_the_right_elements() -> None:
    generator = random.Random(0)
    cells = [(6, 4, 5), (3, 4, 5), (6, 2, 5), (2, 4, 1), (1, 2, 5)]
    for _ in range(40):
        cuts = [sorted(generator.sample(range(1, 120), generator.randrange(5))) for _ in range(2)]
        ours, theirs = (spans(generator.choice(cells), cut) for cut in cuts)
        assert flaw(SHAPE, ours) is None
        for target in ours:
            found = torch.full((target.numel,), -1)
            for source in theirs:
                for here, there in overlap(target, source):
                    here.of(found).copy_(there.of(elements(source)))
            assert torch.equal(found, elements(target))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: s[:-1], "not once"),
        (lambda s: [*s, s[0]], "not once"),
        (lambda s: s[2:], "slices of 6"),
        (lambda s: [replace(s[0], start=3), *s[1:]], "not once"),
        (lambda s: [replace(s[0], offset=(1, 0, 0)), *s[1:]], "a slice at (1, 0, 0)"),
        (lambda s: [replace(s[0], offset=(6, 0, 0)), *s[1:]], "a slice at (6, 0, 0)"),
        (lambda s: [replace(s[0], shape=(2, 4, 5)), *s[1:]], "2 shapes"),
        (lambda s: [replace(x, shape=(4, 4, 5)) for x in s], "do not tile"),
        (lambda s: [replace(x, shape=(0, 4, 5)) for x in s], "do not tile"),
        (lambda s: [], "0 shapes"),
    ],
)
def test_what_does_not_hold_each_element_once_is_told(spoil: Callable[[list[Span]], list[Span]], said: str) -> None:
    found = flaw(SHAPE, spoil(spans((2, 2, 5), [7])))
    assert found is not None and said in found


def test_scalars_and_empty_parameters_are_runs_too() -> None:
    scalar = Span(offset=(), shape=(), start=0, stop=1)
    assert flaw((), [scalar]) is None and flaw((0, 3), []) is None
    ((here, there),) = overlap(scalar, scalar)
    assert torch.equal(here.of(torch.tensor([3.0])), there.of(torch.tensor([3.0])))


VALUE = {
    "a": [1, 2.5, None, True, "text", -(2**70)],
    "b": (1, (2, [3])),
    "c": {1: "x", "y": 2, (3, 4): 5},
    "d": {"$tensor": 1},
    "e": [b"\x00\xff", bytearray(b"\x00\xff")],
    "f": [math.inf, -math.inf],
    "g": torch.arange(6, dtype=torch.int16).view(2, 3),
    "h": torch.tensor(1.5, dtype=torch.bfloat16),
    "i": torch.empty(0, 3),
    "j": np.arange(4.0),
    "k": torch.rand(3) < 0.5,
    "l": Counter({2: 1, 4: 2}),
    "m": OrderedDict({"b": OrderedDict({2: "x", "$y": 3}), "a": ()}),
    "n": torch.Size([2, 3]),
    "o": [np.float64(0.1), np.float32(-math.inf), np.int8(-1), np.bool_(True), np.dtype(">i4").type(5)],
    "p": {np.int64(3): np.array(2.5), torch.Size([]): True},
}


class Point(NamedTuple):
    x: int
    y: int


class Kind(IntEnum):
    ONE = 1


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def test_values_come_back_as_they_were() -> None:
    assert same(decode(json.loads(json.dumps(encode(VALUE, "extra"), allow_nan=False)), "extra"), VALUE)
    assert math.isnan(decode(encode(math.nan, ""), ""))
    assert same(decode(encode(random.getstate(), ""), ""), random.getstate())


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (object(), "state_dict()"),
        (Path("/tmp"), "state_dict()"),
        ({1, 2}, "state_dict()"),
        (Point(1, 2), "save tuple(...) of it"),
        (defaultdict(list, {"a": [1]}), "save dict(...) of it"),
        (Kind.ONE, "save its value, and restore it with Kind(...)"),
        (np.str_("x"), "save str(...) of it"),
        (np.ma.masked_array([1.0, 2.0], mask=[True, False]), "state_dict()"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_something_else_is_named(value: Any, instead: str) -> None:
    said = rf"extra\['a'\]\[1\] is a {type(value).__name__}: a checkpoint holds.*{re.escape(instead)}"
    with pytest.raises(em.CheckpointError, match=said):
        encode({"a": [1, value]}, "extra")


@pytest.mark.parametrize(
    "hostile",
    [
        {"$pickle": "x"},
        {"$tensor": ["F32", [2], "AAAA"]},
        {"$tensor": ["os", [2], "AAAAAAAA"]},
        {"$tensor": 3},
        {"$array": ["O", [1], "AAAAAAAA"]},
        {"$array": [["a", "O"], [1], "AAAAAAAA"]},
        {"$scalar": ["O", "AAAAAAAA"]},
        {"$scalar": ["<f4", "AAAAAAAAAAA="]},
        {"$size": ["a"]},
        {"$ordered": [[[1], 2]]},
        {"$bytes": "!"},
        {"$float": "1e9"},
        {"$dict": [[[1], 2]]},
        {"$ordered": [[1]]},
        {"$scalar": ["<f8", "AAAA"]},
        {"$tuple": [1], "x": 2},
    ],
)
def test_hostile_values_are_refused(hostile: Any) -> None:
    with pytest.raises(em.CheckpointError, match=f"extra: {re.escape(str(hostile)[:60])}"):
        decode({"a": [hostile]}, "extra")


# ------------------------------------------------------------------------------------------ a small checkpoint, by hand


def write_small(target: Path, saved_ns: int, fill: float = 0.0, keep: int | None = None) -> None:
    """Two parameters, one in two files, without ranks."""
    draft = Draft(target)
    entries: dict[str, ParameterRecord] = {}
    items: dict[str, list[Item]] = {"rank-00000.safetensors": [], "rank-00001.safetensors": []}
    for name, shape, files in (("w", (8, 64), tuple(items)), ("b", (7,), ("rank-00001.safetensors",))):
        numel, pieces = math.prod(shape), []
        for i, file in enumerate(files):
            start, stop = i * numel // len(files), (i + 1) * numel // len(files)
            span = Span(offset=(0,) * len(shape), shape=shape, start=start, stop=stop)
            pieces.append(SavedPiece(file=file, span=span, state={"weight": "F32"}, scalars={"updates": 3}))
            values = torch.arange(start, stop, dtype=torch.float32) + fill
            key = pieces[-1].key(name, "weight")
            items[file].append(Item(key=key, dtype="F32", shape=(stop - start,), tensor=lambda values=values: values))
        entries[name] = ParameterRecord(
            names=(name,), shape=shape, grid=shape, dtype="F32", trainable=True, pieces=tuple(pieces)
        )
    records = {file: FileImage(tensors).write(draft.path / file) for file, tensors in items.items()}
    draft.commit(dump(small_manifest(entries, records, saved_ns)))
    if keep is not None:
        retain(target.parent, keep)


def small_manifest(entries: dict[str, ParameterRecord], records: dict[str, FileRecord], saved_ns: int) -> Manifest:
    return Manifest(
        saved_ns=saved_ns,
        world=2,
        optimizer="AdamW, AdamUpdate",
        param_groups=(ParamGroup(params=("w", "b"), options={"lr": 0.1}),),
        loss_scale=None,
        keys={"w": "w", "b": "b"},
        parameters=entries,
        buffers={},
        files=records,
        rng=({}, {}),
        extra={"step": 3},
        extra_states=(),
        base=None,
    )


def left_by_the_dead(target: Path) -> Path:
    """What a process leaves that is killed while it saves `target`."""
    half = partial_of(target)
    half.mkdir(parents=True)
    (half / MARK).write_bytes(MARK_BYTES)
    (half / "rank-00000.safetensors").touch()
    return half


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_small_checkpoint_is_a_directory_of_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_small(tmp_path / "a", 1)
    assert names_in(tmp_path) == ["a"] and names_in(tmp_path / "a") == [
        "manifest.json",
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
    manifest = read_manifest(tmp_path / "a")
    verify(tmp_path / "a", manifest)
    whole = Whole(tmp_path / "a", manifest)
    assert torch.equal(whole.parameter("w"), torch.arange(512.0).view(8, 64))
    assert torch.equal(load_file(tmp_path / "a" / "rank-00001.safetensors")["b[0]+0/weight"], torch.arange(7.0))
    assert json.loads((tmp_path / "a" / "manifest.json").read_bytes())["version"] == 5, "plain JSON"


def test_an_existing_target_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes").write_text("mine")
    with pytest.raises(em.CheckpointError, match="a exists: save under another name"):
        write_small(tmp_path / "a", 1)
    assert names_in(tmp_path) == ["a"] and names_in(tmp_path / "a") == ["notes"]
    draft = Draft(tmp_path / "b")
    with pytest.raises(em.CheckpointError, match="another process is writing there"):
        Draft(tmp_path / "b")
    assert partial_of(tmp_path / "b").exists(), "what is being written is not collected"
    (tmp_path / "b").mkdir()
    with pytest.raises(em.CheckpointError, match="was created meanwhile"):
        draft.commit(b"")
    draft.abandon()
    assert names_in(tmp_path) == ["a", "b"]


def test_no_directory_is_removed_while_a_file_in_it_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS keeps a deleted file in its directory, under another name, until it is closed."""
    removed = []

    def rmdir(path: Path) -> None:
        opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        removed.append(path)
        assert not [name for name in opened if name.startswith(f"{path}/")]
        os.rmdir(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    Draft(tmp_path / "a").abandon()
    for name in ("b", "c"):
        write_small(tmp_path / name, 1)
    remove(tmp_path / "b")
    half = left_by_the_dead(tmp_path / "d")
    assert remove_abandoned(tmp_path) == [half]
    assert removed == [partial_of(tmp_path / "a"), partial_of(tmp_path / "b"), half]
    assert names_in(tmp_path) == ["c"]


def test_an_interrupt_right_behind_the_commit_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def interrupted(source: Any, target: Any) -> None:
        rename(source, target)
        raise KeyboardInterrupt

    model = torch.nn.Linear(4, 4)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.ddp())
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rename", interrupted)
        em.save(tmp_path / "a", model, optimizer)
    assert names_in(tmp_path) == ["a"]
    em.load(tmp_path / "a", model, optimizer)
    optimizer.close()


def spoilt(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrites the manifest as somebody would who can compute its hash."""
    fields = json.loads((path / "manifest.json").read_bytes())
    del fields["digest"]
    change(fields)
    rest = json.dumps(fields).removeprefix("{").encode()
    (path / "manifest.json").write_bytes(b'{"digest":"' + digest_of(rest).encode() + b'",\n' + rest)


def renamed(name: str) -> Callable[[dict[str, Any]], None]:
    def change(fields: dict[str, Any]) -> None:
        fields["files"][name] = fields["files"].pop("rank-00000.safetensors")
        fields["parameters"]["w"]["pieces"][0]["file"] = name

    return change


def absurd(fields: dict[str, Any]) -> None:
    """A parameter of 8 EiB, whole by its own account."""
    entry = fields["parameters"]["b"]
    entry.update(shape=[2**61], grid=[2**61])
    entry["pieces"][0]["span"].update(shape=[2**61], stop=2**61)


def hash_of_a_frozen(digest: str) -> dict[str, Any]:
    """The base of a manifest, with one parameter."""
    return {"source": "", "parameters": {"frozen": {"shape": [2], "dtype": "F32", "digest": digest}}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (renamed("../other.safetensors"), "expected the name of a file"),
        (renamed("/etc/other.safetensors"), "expected the name of a file"),
        (renamed("a\n.safetensors"), "expected the name of a file"),
        (renamed("other.pt"), "expected the name of a file"),
        (
            lambda f: f.update(version=1),
            "version '1' of the format, this elixir_moe reads 5: use the elixir_moe that",
        ),
        (lambda f: f.update(version=6), "version '?6'? of the format"),
        (lambda f: f.pop("base"), "base is missing"),
        (lambda f: f.update(base={"source": "", "parameters": {"a": {}}}), "shape is missing"),
        (lambda f: f.update(base=hash_of_a_frozen("12")), "digest: expected a hash of a parameter, got '12'"),
        (lambda f: f.update(keys=["w", "b"]), "keys: expected Mapping"),
        (lambda f: f.update(keys={"w": 1}), "keys.w: expected str . None, got 1"),
        (lambda f: f.update(extra_states=[["a"]]), r"extra_states\[0\]: expected Mapping"),
        (lambda f: f.update(format="other"), "not the manifest"),
        (lambda f: f.update(more=1), "unknown field 'more'"),
        (lambda f: f.pop("rng"), "rng is missing"),
        (lambda f: f.update(world="2"), "world: expected int, got '2'"),
        (lambda f: f.update(world=3), "2 states of random generators for 3 ranks"),
        (lambda f: f.update(saved_ns=-1), "saved_ns: expected a size, got "),
        (lambda f: f.update(saved_ns=10**30), "saved_ns: expected a size, got "),
        (lambda f: f["parameters"]["w"].update(grid=[2, 4, 65]), "cannot be seen as .2, 4, 65."),
        (lambda f: f["parameters"]["w"]["pieces"].pop(), "'w' of shape .8, 64. is not whole"),
        (lambda f: f["parameters"]["w"]["pieces"].append(f["parameters"]["w"]["pieces"][0]), "is not whole"),
        (lambda f: f["parameters"]["w"].update(shape=[8, 2**61], grid=[8, 2**61]), "is not whole"),
        (absurd, "files 'rank-00001.safetensors' has .* bytes, .* 9,[0-9,]* of tensors"),
        (
            lambda f: f.update(
                buffers={"b": {"shape": [2**59], "dtype": "F32", "file_of_rank": ["rank-00000.safetensors"] * 2}}
            ),
            "files 'rank-00000.safetensors' has .* bytes, .* 2,305,843,[0-9,]* of tensors",
        ),
        (lambda f: f["parameters"]["w"].update(shape=[8, True]), r"shape\[1\]: expected int, got True"),
        (
            lambda f: f["parameters"]["w"].update(dtype="F31"),
            "w.dtype: expected a dtype of .*got 'F31'",
        ),
        (lambda f: f["parameters"]["w"]["pieces"][0].update(file="x.safetensors"), "file is 'x.safetensors'"),
        (lambda f: f["parameters"]["w"]["pieces"][0]["state"].pop("weight"), "weight is missing"),
        (lambda f: f["parameters"].update(v=f["parameters"].pop("w")), "its names are"),
        (lambda f: f["files"]["rank-00000.safetensors"].update(digest="x"), "digest: expected a hash, got 'x'"),
    ],
)
@pytest.mark.fault(32)
def test_a_hostile_manifest_is_refused(change: Callable[[dict[str, Any]], Any], said: str, tmp_path: Path) -> None:
    """Fault 32 and its like."""
    write_small(tmp_path / "a", 1)
    spoilt(tmp_path / "a", change)
    with pytest.raises(em.CheckpointError, match=said) as error:
        read_manifest(tmp_path / "a")
    assert "manifest.json" in str(error.value)


@pytest.mark.parametrize(
    "rest",
    [b"", b"1}", b'"a":1,"a":2}', b'"a":NaN}', b'"a":' + b"[" * 100_000, b'"a":' + b"9" * 5000 + b"}", b"\xff}"],
)
def test_what_is_no_json_is_refused(rest: bytes) -> None:
    with pytest.raises(em.CheckpointError, match="manifest"):
        parse(b'{"digest":"' + digest_of(rest).encode() + b'",\n' + rest, "manifest.json")


@pytest.mark.fault(32)
def test_links_and_other_things_that_are_no_files_are_refused(tmp_path: Path) -> None:
    """Fault 32: even a link to the very bytes."""
    write_small(tmp_path / "a", 1)
    for name in ("rank-00000.safetensors", "manifest.json"):
        path = tmp_path / "a" / name
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(em.CheckpointError, match=f"{name} is a link"):
            verify(tmp_path / "a", read_manifest(tmp_path / "a"))
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(em.CheckpointError, match=f"{name} is not a regular file"):
            verify(tmp_path / "a", read_manifest(tmp_path / "a"))
        path.unlink()
        with pytest.raises(em.CheckpointError, match=f"{name} (cannot be read|does not exist)"):
            verify(tmp_path / "a", read_manifest(tmp_path / "a"))
        (tmp_path / "elsewhere").rename(path)
    verify(tmp_path / "a", read_manifest(tmp_path / "a"))


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


@pytest.mark.fault(31)
def test_a_pickle_is_refused_and_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 31: in the place of a file, with the right hash in the manifest."""
    monkeypatch.chdir(tmp_path)
    write_small(tmp_path / "a", 1)
    data = pickle.dumps({"w": Bomb()}).ljust(4096, b"\0")  # as long as the tensors are to be
    path = tmp_path / "a" / "rank-00000.safetensors"
    path.write_bytes(data)
    with pytest.raises(em.CheckpointError, match=r"rank-00000\.safetensors is damaged: "):
        verify(tmp_path / "a", read_manifest(tmp_path / "a"))
    record = asdict(tensors.hash_file(path))
    spoilt(tmp_path / "a", lambda f: f["files"].update({path.name: record}))
    manifest = read_manifest(tmp_path / "a")
    verify(tmp_path / "a", manifest)
    with pytest.raises(em.CheckpointError, match=r"rank-00000.safetensors: tensor 'w\[0,0\]\+0/weight' cannot be read"):
        Whole(tmp_path / "a", manifest).parameter("w")
    assert names_in(tmp_path) == ["a"]


@pytest.mark.parametrize("what", ["dtype", "shape", "key"])
@pytest.mark.fault(8)
def test_files_that_are_not_what_the_manifest_says_are_refused(what: str, tmp_path: Path) -> None:
    """Fault 8: two files swapped, hashes and all, or a tensor of another kind."""
    write_small(tmp_path / "a", 1)

    def change(fields: dict[str, Any]) -> None:
        if what == "dtype":
            fields["parameters"]["w"]["pieces"][0]["state"]["weight"] = "I32"
        elif what == "key":
            files = fields["files"]
            a, b = list(files)
            files[a], files[b] = files[b], files[a]
        else:
            fields["parameters"]["b"].update(shape=[8], grid=[8])
            fields["parameters"]["b"]["pieces"][0]["span"].update(shape=[8], stop=8)

    spoilt(tmp_path / "a", change)
    if what == "key":
        a, b = tmp_path / "a" / "rank-00000.safetensors", tmp_path / "a" / "rank-00001.safetensors"
        a.rename(tmp_path / "c"), b.rename(a), (tmp_path / "c").rename(b)
    manifest = read_manifest(tmp_path / "a")
    verify(tmp_path / "a", manifest)
    with pytest.raises(em.CheckpointError, match=r"cannot be read|but the manifest says"):
        for name in manifest.parameters:
            Whole(tmp_path / "a", manifest).parameter(name)


@pytest.mark.fault(8)
def test_truncated_and_swapped_files_are_named(tmp_path: Path) -> None:
    """Fault 8."""
    write_small(tmp_path / "a", 1)
    a, b = tmp_path / "a" / "rank-00000.safetensors", tmp_path / "a" / "rank-00001.safetensors"
    whole = a.read_bytes()
    a.write_bytes(whole[:-1])
    with pytest.raises(em.CheckpointError, match=rf"rank-00000.safetensors is damaged: {len(whole) - 1} bytes of"):
        verify(tmp_path / "a", read_manifest(tmp_path / "a"))
    a.write_bytes(b.read_bytes())
    with pytest.raises(em.CheckpointError, match=r"rank-00000\.safetensors is damaged"):
        verify(tmp_path / "a", read_manifest(tmp_path / "a"))


# -------------------------------------------------------------------------------------------------- many, and the dead


@pytest.mark.fault(8)
def test_the_latest_is_the_one_saved_last_and_falling_back_is_asked_for(tmp_path: Path) -> None:
    """Fault 8: a damaged checkpoint is passed over only where that was asked for, and said."""
    assert latest(tmp_path / "nowhere") is None and latest(tmp_path) is None
    for name, saved_ns in (("step-100", 1), ("step-90", 3), ("step-95", 2)):
        write_small(tmp_path / name, saved_ns)
    (tmp_path / "step-999").symlink_to(tmp_path / "step-100")
    (tmp_path / "metrics.jsonl").touch()
    assert latest(tmp_path) == tmp_path / "step-90"
    file = tmp_path / "step-90" / "rank-00001.safetensors"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    assert latest(tmp_path) == tmp_path / "step-90", "load will say what is wrong with it"
    with pytest.warns(UserWarning, match="step-90 is passed over: .*rank-00001.safetensors is damaged"):
        assert latest(tmp_path, fall_back=True) == tmp_path / "step-95"
    (tmp_path / "step-95" / "manifest.json").write_text("{}")
    with pytest.raises(em.CheckpointError, match=r"step-95/manifest\.json is damaged"):
        latest(tmp_path)
    with pytest.warns(UserWarning, match="passed over"):
        assert latest(tmp_path, fall_back=True) == tmp_path / "step-100"


def test_only_the_last_are_kept_and_what_is_no_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for step in range(4):
        write_small(tmp_path / f"step-{step}", step, keep=2)
    assert names_in(tmp_path) == ["notes", "step-2", "step-3"]


def test_a_link_to_a_checkpoint_elsewhere_counts_and_is_never_removed(tmp_path: Path) -> None:
    """As for one that was moved to another disk: a run that resumes would begin anew."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    write_small(elsewhere / "step-1", 1)
    run.mkdir()
    (run / "step-1").symlink_to(elsewhere / "step-1")
    assert latest(run) == run / "step-1"
    write_small(run / "step-2", 2, keep=1)
    write_small(run / "step-3", 3, keep=1)
    assert names_in(run) == ["step-1", "step-3"] and names_in(elsewhere) == ["step-1"]
    verify(run / "step-1", read_manifest(run / "step-1"))


def test_what_this_user_may_not_read_or_remove_does_not_stand_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of others, such as lost+found; and what a killed save has left in a folder that is for reading alone."""
    write_small(tmp_path / "step-1", 1)
    (tmp_path / "lost+found").mkdir()
    left_by_the_dead(tmp_path / "step-2")
    real, look = os.open, os.stat

    def guarded(file: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if flags & os.O_RDWR and "step-2.partial" in str(file):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))
        return real(file, flags, *args, **kwargs)

    def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
        if "lost+found/" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", guarded)
    monkeypatch.setattr(os, "stat", stat)
    assert latest(tmp_path) == tmp_path / "step-1"
    write_small(tmp_path / "step-3", 3, keep=1)
    assert names_in(tmp_path) == [".step-2.partial", "lost+found", "step-3"]


def test_what_is_saved_now_is_later_than_all_there_is(tmp_path: Path) -> None:
    """A clock that goes back must not make an old checkpoint the latest, or let a new one be removed."""
    assert next_save_time(tmp_path) > 10**18
    write_small(tmp_path / "a", 4 * 10**18)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "manifest.json").write_bytes(b"\x00")
    (tmp_path / "site" / "manifest.json").mkdir(parents=True)
    assert next_save_time(tmp_path) == 4 * 10**18 + 1


def lines_of_writing(act: Callable[[], None], die_at: int | None = None) -> int:
    """Runs `act` and counts the lines it executes in the files that write; the process dies at line `die_at`."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in {module.__file__ for module in (storage, marked, tensors, direct_file)}:
            return None
        if event == "line":
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)
    return count


@pytest.mark.fault(2)
def test_death_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    """Fault 2: SIGKILL at 24 seeded lines of a save that removes the checkpoint before it."""
    write_small(tmp_path / "count" / "step-1", 1, fill=1.0)
    lines = lines_of_writing(lambda: write_small(tmp_path / "count" / "step-2", 2, fill=2.0, keep=1))
    outcomes = set()
    for i, die_at in enumerate([*sorted(random.Random(0).sample(range(1, lines), 24)), lines + 1]):
        directory = tmp_path / str(i)
        write_small(directory / "step-1", 1, fill=1.0)
        child = os.fork()
        if child == 0:
            lines_of_writing(lambda at=directory: write_small(at / "step-2", 2, fill=2.0, keep=1), die_at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) == (die_at <= lines)
        found = latest(directory, fall_back=True)
        assert found is not None, f"line {die_at}: nothing is left"
        fill = float(found.name[-1])
        assert torch.equal(Whole(found, read_manifest(found)).parameter("b"), torch.arange(7.0) + fill)
        left = [name for name in names_in(directory) if not name.startswith(".")]
        assert left in (["step-1"], ["step-2"], ["step-1", "step-2"]), f"line {die_at}: {left}"
        outcomes.add(tuple(left))
        if "step-2" not in left:  # a run that resumes saves it under the same name
            write_small(directory / "step-2", 2, fill=2.0, keep=1)
        write_small(directory / "step-3", 3, keep=1)
        for name in set(names_in(directory)) - {"step-3"}:  # died before there was a mark, or behind its removal
            sizes = {path.name: path.stat().st_size for path in (directory / name).iterdir()}
            assert sizes in ({}, {MARK: 0}), f"line {die_at}: {sizes}"
    assert len(outcomes) == 3, "some died before the commit, some between it and the removal, some later"


# ----------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    write_small(tmp_path / "run" / "step-1", 1)
    write_small(tmp_path / "run" / "step-2", 2, fill=2.0)
    yield tmp_path / "run"


def test_the_command_lists_and_verifies(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "ls", str(small), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in found["checkpoints"]] == [str(small / "step-1"), str(small / "step-2")]
    assert found["checkpoints"][0]["parameters"] == 519 and found["partial"] == []
    assert main(["ckpt", "verify", str(small / "step-1")]) == 0
    assert "every hash is right" in capsys.readouterr().out
    file = small / "step-1" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (small / "step-2" / "manifest.json").write_text("")
    left_by_the_dead(small / "step-3")
    assert main(["ckpt", "verify", str(small / "step-1")]) == 1
    assert "rank-00000.safetensors is damaged" in capsys.readouterr().err
    assert main(["ckpt", "ls", str(small)]) == 0
    out = capsys.readouterr().out
    assert "step-2  damaged" in out and ".step-3.partial  partial" in out
    assert main(["ckpt", "ls", str(small / "nowhere")]) == 2


def test_the_command_finds_the_checkpoints_of_a_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (9, 10):
        write_small(tmp_path / f"checkpoint-{step}" / "elixir_moe", step)
    assert main(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["path"] for row in rows] == [str(tmp_path / f"checkpoint-{n}" / "elixir_moe") for n in (9, 10)]
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    assert "checkpoint-10" in capsys.readouterr().out
    assert main(["ckpt", "verify", str(tmp_path / "checkpoint-9")]) == 0


def test_a_directory_stands_for_the_latest_checkpoint_in_it(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that holds checkpoints, or a run's, which has them in a folder of their own."""
    run = tmp_path / "run-of-train"
    shutil.copytree(small, run / "checkpoints")
    (run / "config.yaml").touch()
    for directory, home in ((small, small), (run, run / "checkpoints")):
        left_by_the_dead(home / "step-3")
        assert main(["ckpt", "ls", str(directory), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [row["path"] for row in found["checkpoints"]] == [str(home / "step-1"), str(home / "step-2")]
        assert found["partial"] == [str(partial_of(home / "step-3"))]
        for arguments in (["verify"], ["export", str(directory) + "-out"], ["reshard", str(directory) + "-again"]):
            action, *out = arguments
            assert main(["ckpt", action, str(directory), *out, "--json"]) == 0
            told = json.loads(capsys.readouterr().out)
            assert told["path"] == str(home / "step-2") and bool(told["written"]) == bool(out)
        assert partial_of(home / "step-3").is_dir(), "looking changes nothing"
        (home / "step-1" / "manifest.json").write_text("")  # which of them was saved last can no longer be told
        assert main(["ckpt", "verify", str(directory)]) == 1
        assert "step-1/manifest.json is damaged" in capsys.readouterr().err
        assert main(["ckpt", "verify", str(home / "step-2")]) == 0
        capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "HERE/nowhere"], "nowhere is not a checkpoint and holds none"),
        (["verify", "HERE/empty"], "empty is not a checkpoint and holds none"),
        (["verify", "HERE/file"], "file is not a checkpoint and holds none"),
        (["verify", "HERE/file/below"], "below is not a checkpoint and holds none"),
        (["verify", "HERE/run/step-1/manifest.json"], "manifest.json is not a checkpoint and holds none"),
        (["export", "HERE/nowhere", "HERE/out"], "nowhere is not a checkpoint and holds none"),
        (["export", "HERE/run", "HERE/empty"], "empty exists"),
        (["export", "HERE/run", "HERE/file", "--format", "torch"], "file exists"),
        (["export", "HERE/run", "HERE/file/out"], "out cannot be made: "),
        (["export", "HERE/run", "HERE/file/out.pt", "--format", "torch"], "out.pt cannot be made: "),
        (["export", "HERE/run", "HERE/out", "--shard-gb", "0"], "--shard-gb 0.0: expected a finite number above 0"),
        (["reshard", "HERE/nowhere", "HERE/out"], "nowhere is not a checkpoint and holds none"),
        (["reshard", "HERE/run", "HERE/empty"], "empty exists"),
        (["reshard", "HERE/run", "HERE/file/out"], "out cannot be made: "),
        (["reshard", "HERE/run", "HERE/out.partial"], "out.partial: names that end in .partial"),
        (["reshard", "HERE/run", "HERE/out", "--files", "0"], "--files 0: expected at least 1"),
        (["ls", "HERE/file"], "file is not a directory"),
    ],
    ids=lambda value: " ".join(value).replace("HERE/", "") if isinstance(value, list) else "",
)
def test_a_wrong_path_or_setting_is_told_before_a_file_is_hashed(
    arguments: list[str], said: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is damaged, which nobody finds."""
    here = small.parent
    (small / "step-2" / "rank-00000.safetensors").write_bytes(b"")
    (here / "empty").mkdir()
    (here / "file").touch()
    before = sorted(here.rglob("*"))
    assert main(["ckpt", *(argument.replace("HERE", str(here)) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out
    assert sorted(here.rglob("*")) == before


def test_the_command_exports(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    wanted = {"w": torch.arange(512.0).view(8, 64) + 2, "b": torch.arange(7.0) + 2}
    source, hf, sharded, plain = str(small / "step-2"), tmp_path / "hf", tmp_path / "sharded", tmp_path / "plain.pt"
    assert main(["ckpt", "export", source, str(hf)]) == 0
    assert same(dict(sorted(load_file(hf / "model.safetensors").items())), dict(sorted(wanted.items())))
    assert main(["ckpt", "export", source, str(sharded), "--shard-gb", "1e-6", "--dtype", "bf16"]) == 0
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * 519 and len(set(index["weight_map"].values())) == 2
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(sharded / file)[name], wanted[name].bfloat16())
    assert main(["ckpt", "export", source, str(plain), "--format", "torch"]) == 0
    assert same(torch.load(plain, weights_only=True), wanted)
    for out, options in ((hf, ["--format", "hf"]), (plain, ["--format", "torch"])):
        assert main(["ckpt", "export", source, str(out), *options]) == 2
        assert f"{out} exists" in capsys.readouterr().err


def test_the_command_names_the_file_that_it_cannot_write(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(torch, "save", full)
    for out, options in (("out", ["export"]), ("out.pt", ["export", "--format", "torch"]), ("one", ["reshard"])):
        action, *rest = options
        assert main(["ckpt", action, str(small / "step-1"), str(small / out), *rest]) == 1
        said = capsys.readouterr().err
        assert re.search(rf"/{re.escape(out)}|\.{re.escape(out)}\.partial", said) and "No space left" in said, said
        assert "Traceback" not in said and names_in(small) == ["step-1", "step-2"]


def test_the_command_reshards(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for files in (1, 3, 10**12):
        target = small.parent / f"other-{files}"
        assert main(["ckpt", "reshard", str(small / "step-1"), str(target), "--files", str(files), "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["written"]) == min(files, 2)
        manifest = read_manifest(target)
        verify(target, manifest)
        for name in ("w", "b"):
            before = Whole(small / "step-1", read_manifest(small / "step-1")).parameter(name)
            assert torch.equal(Whole(target, manifest).parameter(name), before)
        assert manifest.extra == {"step": 3} and latest(small.parent) is not None
