"""The plan: where a model's state is stored, and how its chunks move.

Owns `Plan` (frozen data), `AutoPlan` (the request to search for one), and the text form of sizes and times.
Pure: never counts bytes, which `ledger` does. Source: [S_FLAG, O_FLAG, C_SIZE], Elixir v1, VI-B.
"""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, Self, get_args

import torch
from torch import nn

from elixir_moe.chunks.cache_policy import LOOKAHEAD
from elixir_moe.chunks.packing import ChunkSpec, Layout, best_chunk_numel, build_layout
from elixir_moe.chunks.param_spec import ParamSpec, Precision
from elixir_moe.errors import ConfigError, PlanError
from elixir_moe.names import Master, Moments
from elixir_moe.parallel.pattern import is_whole, reduction_dtype


class Tier(StrEnum):
    """The memory that holds the long-lived state of a chunk: compute shard, master shard, moments."""

    DEVICE = "device"
    """Device memory: updates run on the device, and gathers need no transfer."""
    HOST = "host"
    """Host memory, pinned if there is a GPU: updates run on the CPU, and each gather first fetches the shard."""
    DISK = "disk"
    """Master shard and moments in a file, compute shard in host memory: gathers work as for `HOST`, and updates
    read and write the file. The compute shard of a frozen chunk is in a file too, and gathers read it from there. With
    `Plan.values_on_disk` this holds for every chunk, and the sum of its gradients is in the file as well: nothing stays
    in host memory."""

    @property
    def of_compute(self) -> "Tier":
        """The tier of a trainable chunk's compute shard and of accumulated gradients, without `values_on_disk`."""
        return Tier.HOST if self is Tier.DISK else self


def tier_at(index: int, on_disk: int, on_device: int) -> Tier:
    """Returns the tier of chunk `index`, given the first chunk on disk and the first chunk on the device."""
    if index >= on_device:
        return Tier.DEVICE
    return Tier.DISK if index >= on_disk else Tier.HOST


def reads_disk(chunk: ChunkSpec, tier: Tier, *, values_on_disk: bool) -> bool:
    """Whether gathers read a chunk of this tier from disk."""
    return tier is Tier.DISK and (values_on_disk or not chunk.key.trainable)


def keeps_values(chunk: ChunkSpec, tier: Tier, *, values_on_device: bool) -> bool:
    """Whether a chunk of this tier has a copy of its compute shard on the device, from which gathers read."""
    return values_on_device and tier is not Tier.DEVICE and chunk.key.trainable


def size_text(nbytes: float) -> str:
    """Formats a byte count in the largest binary unit that it fills: ``2.50 MiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def size_text_up(nbytes: int) -> str:
    """Formats a byte count like `size_text`, rounded up: that much memory is enough."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{math.ceil(100 * nbytes / size) / 100:.2f} {unit}"
    return f"{nbytes} B"


def seconds_text(seconds: float) -> str:
    """Formats a time in the largest of s, ms and µs that it fills: ``2.5 ms``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds * 1e6:.4g} µs"


_UNITS = {
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
}


def size_bytes(name: str, size: int | str | None, *, least: int = 0) -> int | None:
    """Converts a number of bytes, or a string such as ``20 GiB`` or ``1.5 GB``, to bytes.

    Raises:
        PlanError: not a size, a string without a unit, or between 0 and `least` bytes; the message names `name`.
    """
    if size is None or is_whole(size, least=least) or (is_whole(size, least=0) and not size):
        return size  # type: ignore[return-value]
    text = f"{size} B" if is_whole(size, least=0) else size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.ASCII | re.I) if isinstance(text, str) else None
    scale = None if match is None else _UNITS.get(match[2].lower() or "b")
    if match is None or scale is None or not float(match[1]) * scale < math.inf:
        raise PlanError(f"{name}={size!r}: expected bytes, or a string such as '20 GiB' or '512 MiB'")
    nbytes = int(match[1]) * scale if match[1].isdecimal() else int(float(match[1]) * scale)
    if float(match[1]) and (text is not size or not match[2]):
        raise PlanError(f"{name}={size!r} has no unit: write '{match[1]} GiB'")
    if 0 < nbytes < least:
        raise PlanError(f"{name}={size!r}: expected at least {size_text(least)}")
    return nbytes


def _folder(disk: Any) -> str | None:
    """The folder that `disk` names, with ``~`` expanded. Raises PlanError if it is not a usable path."""
    if disk is not None and (not isinstance(disk, str) or not disk or "\0" in disk):
        raise PlanError(f"disk={disk!r}: expected a folder, or None")
    return None if disk is None else os.path.expanduser(disk)


def _path(name: str, path: str | os.PathLike[str] | None) -> str | None:
    """Converts a path to a string; returns anything else unchanged. Raises ConfigError if ``__fspath__`` fails."""
    try:
        return os.fspath(path) if isinstance(path, os.PathLike) else path
    except Exception as error:
        raise ConfigError(f"{name}={path!r}: its __fspath__ failed: {error}; pass a string") from error


def _check_state(plan: "Plan | AutoPlan") -> None:
    """Checks `master`, `moments`, `verify` and `disk`, and expands the path of `disk`. Raises PlanError."""
    for name, known in (("master", get_args(Master)), ("moments", get_args(Moments))):
        if getattr(plan, name) not in known:
            raise PlanError(f"{name}={getattr(plan, name)!r}: expected one of {', '.join(map(repr, known))}")
    if not isinstance(plan.verify, bool):
        raise PlanError(f"verify={plan.verify!r}: expected True or False")
    object.__setattr__(plan, "disk", _folder(plan.disk))
    if plan.verify and plan.disk is None:
        raise PlanError("verify=True has no effect without disk=, the folder for chunks on disk")


def _names(name: str, given: Any) -> tuple[str, ...]:
    """Converts a list of names to a tuple. Raises PlanError for anything else."""
    if not isinstance(given, (tuple, list)) or not given or not all(isinstance(one, str) for one in given):
        raise PlanError(f"{name}={given!r}: expected names of parameters, such as ('layers.*.weight',), or None")
    return tuple(given)


def _length_or_range(given: Any) -> int | tuple[int, int] | None:
    """Returns a chunk length, or the range (shortest, longest) of some. Raises PlanError for anything else."""
    if given is None or is_whole(given, least=1):
        return given  # type: ignore[no-any-return]
    ends = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(ends) != 2 or not all(is_whole(end, least=1) for end in ends) or ends[0] > ends[1]:
        raise PlanError(
            f"chunk_numel={given!r}: expected a number of elements, a range (shortest, longest) of some, or None to "
            "search from the largest parameter on"
        )
    return ends


_SIZES = ("rcache", "device", "host", "budget")
"""Arguments of presets that are sizes; the field of each is in bytes."""


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a plan that the arguments of a preset give; each has its argument's name."""
    found = {name: value for name, value in given.items() if name != "cls" and name not in _SIZES}
    found |= {f"{name}_bytes": size_bytes(name, given[name]) for name in _SIZES if name in given}
    found |= {name: _path(name, given[name]) for name in ("disk", "hardware") if name in given}
    return found | {"reduce_dtype": reduction_dtype("reduce_dtype", given["reduce_dtype"])}


def _whole(default: object, least: int, *others: object) -> Any:
    """A field of a plan for whole numbers from `least` on, or one of `others`."""
    return field(default=default, metadata={"least": least, "others": others})


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How `wrap` stores and moves a model. Build one with a preset, or field by field.

    A plan gives the number of chunks in each tier. If it gives bytes instead, or leaves a number open, `wrap` computes
    the numbers for the model (`resolve_counts`); `em.inspect(model).plan` shows them.
    """

    scatter: bool
    """S_FLAG: shard every chunk over its process group; False keeps every chunk whole on every rank."""
    offloaded: bool
    """O_FLAG: chunks live in host memory."""
    rcache_blocks: int | Literal["all"] | None = _whole(None, 1, "all", None)
    """C_SIZE: blocks of the rCache, for weights and gradients; "all" keeps all weights gathered. None uses as many as
    fit in `rcache_bytes`; without `rcache_bytes`, the fewest that a step needs plus `prefetch`."""
    rcache_bytes: int | None = _whole(None, 0, None)
    """Device memory for blocks, in bytes; an alternative to `rcache_blocks`."""
    device_chunks: int = _whole(0, 0)
    """With `offloaded`: number of chunks that live on the device, the last ones in order of first use."""
    device_bytes: int | None = _whole(None, 0, None)
    """Device memory for the state of such chunks, in bytes; an alternative to `device_chunks`: as many as fit."""
    disk_chunks: int | None = _whole(0, 0, None)
    """With `offloaded`: number of chunks whose master shards and moments are on disk, the last ones before those on the
    device: the later a chunk is used, the more of its update overlaps with compute. None puts on disk the chunks that
    do not fit in `host_bytes`; without `host_bytes`, in free host memory."""
    host_bytes: int | None = _whole(None, 0, None)
    """Host memory for state, in bytes; an alternative to `disk_chunks`."""
    values_on_disk: bool = False
    """The compute shards of chunks on disk, and an fp32 sum of their gradients, are on disk too: in host memory these
    chunks need only buffers that all of them share. Gathers read from disk, and gradients are written to it."""
    values_on_device: bool = False
    """The compute shards of trainable chunks outside the device are on the device too: gathers read them there, and
    only the first one after an update copies them from host memory."""
    disk: str | None = None
    """Folder in which each rank creates the file for its chunks on disk; nothing remains in it afterwards."""
    verify: bool = False
    """Keep checksums of everything written to disk, and compare them on every read."""
    shared_frozen: bool = False
    """Frozen chunks in host memory are stored once, in memory that all ranks of a host map, and gathered by a copy from
    there instead of a collective. Applies to chunks whose ranks are all on one host; others are sharded as usual
    (`em.inspect` lists both). After `wrap`, only `em.load` can write these weights."""
    chunk_numel: int | None = _whole(None, 1, None)
    """Chunk length C in elements; None uses `best_chunk_numel`, the smallest length with little waste."""
    whole_layers: bool = True
    """Gather a layer as a whole: chunks begin where repeated modules begin, where that wastes little, and a region that
    backward recomputes is one unit. False fills chunks one after the other and gathers as little at once as their
    borders allow: a step may need one block less, and the host has several times as much work."""
    prefetch: int = _whole(LOOKAHEAD, 0)
    """Number of chunks gathered ahead of their use in the schedule, if blocks are free."""
    reduce_dtype: torch.dtype | None = None
    """Dtype, or its name, in which gradients of 16-bit parameters are summed over the ranks. None is fp32: each sum is
    rounded once. Over NCCL gradients then need twice the bytes on the wire, and a staging buffer of four bytes per
    element of the largest chunk. ``torch.bfloat16`` saves both for parameters in bf16, but rounds after each rank's
    addition. Over gloo, sharded chunks are always sent in 16 bits and summed in fp32."""
    host_checkpoints: int | Literal["all"] = _whole(0, 0, "all")
    """Number of checkpointed regions, counted from the start of forward, whose inputs are kept in host memory, or
    "all". Inputs that autograd has computed are copied there during forward, and back during backward; others stay."""
    batches_per_pass: int | None = _whole(None, 1, None)
    """Number of micro-batches of `em.accumulate` that pass each layer together; None lets all of a call. Weights and
    gradients move once in each such pass, which keeps the activations of all of its micro-batches; 1 is the plain loop.
    Random states do not depend on it."""
    master: Master = "fp32"
    """Dtype of the master weights of the parameters with narrow state. With bf16 the compute shard is the master, and
    is rounded stochastically; these parameters must be computed in bf16."""
    moments: Moments = "fp32"
    """Dtype of Adam's moments of the same parameters: fp32, bf16, or int8 (codes of 8 bits, and one byte per 256
    elements). bf16 and int8 are rounded stochastically."""
    narrow_state: tuple[str, ...] | None = None
    """Names of the parameters to which `master` and `moments` apply, with ``*`` as in `em.annotate`; all others keep
    fp32 state. None selects the matrices of repeated blocks except routers (`has_narrow_state`)."""
    rounding_seed: int = _whole(0, 0)
    """Seed of stochastic rounding. The random bits depend only on the seed, the parameter's name, its number of updates
    and the element: equal seeds give equal weights under every plan and on any number of ranks."""
    explanation: str = field(default="", compare=False, repr=False)
    """Why a search chose this plan; ignored in comparisons and left out of the JSON."""

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.type is bool):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name}={getattr(self, name)!r}: expected True or False")
        for name, rule in ((each.name, each.metadata) for each in fields(self) if "least" in each.metadata):
            value = getattr(self, name)
            if not is_whole(value, least=rule["least"]) and value not in rule["others"]:
                also = "".join(f" or {other}" for other in rule["others"])
                raise PlanError(f"{name}={value!r}: expected a whole number of at least {rule['least']}{also}")
        object.__setattr__(self, "reduce_dtype", reduction_dtype("reduce_dtype", self.reduce_dtype))
        _check_state(self)
        if self.narrow_state is not None:
            object.__setattr__(self, "narrow_state", _names("narrow_state", self.narrow_state))
        if self.narrow_state is not None and not self.precision.is_narrow:
            raise PlanError("narrow_state has no effect with master='fp32' and moments='fp32': leave it out")
        for name in ("device_chunks", "device_bytes", "disk_chunks", "host_bytes", "values_on_device", "disk"):
            if getattr(self, name) not in (0, None) and not self.offloaded:
                raise PlanError(
                    f"{name}={getattr(self, name)} needs offloaded=True: without it, all chunks are on the device"
                )
        if self.shared_frozen and not (self.offloaded and self.scatter):
            raise PlanError(
                "shared_frozen=True needs offloaded=True and scatter=True: it applies to frozen chunks that are in "
                "host memory and sharded over the ranks"
            )
        for size, count in (("rcache", "rcache_blocks"), ("device", "device_chunks"), ("host", "disk_chunks")):
            nbytes = getattr(self, f"{size}_bytes")
            if nbytes is not None and getattr(self, count) not in (0, None):
                raise PlanError(f"{size}={size_text(nbytes)} and {count}={getattr(self, count)}: give one of them")
        if self.disk is None and (self.host_bytes is not None or self.disk_chunks is None):
            raise PlanError("chunks that do not fit in host memory go to disk: name a folder for them with disk=")
        if self.values_on_device and self.values_on_disk:
            raise PlanError("values_on_device=True and values_on_disk=True: give one of them")
        if self.values_on_disk and self.disk_chunks == 0 and self.host_bytes is None:
            raise PlanError("values_on_disk=True has no effect with disk_chunks=0: leave it out")
        if self.disk is not None and self.disk_chunks == 0 and self.host_bytes is None:
            raise PlanError(f"disk={self.disk!r} has no effect with disk_chunks=0: leave one of them out")

    @classmethod
    def ddp(
        cls, *, reduce_dtype: torch.dtype | str | None = None, master: Master = "fp32", moments: Moments = "fp32"
    ) -> Self:
        """Parameters and optimizer state replicated, gradients all-reduced: [False, False, inf]."""
        return cls(scatter=False, offloaded=False, rcache_blocks="all", **_fields(locals()))

    @classmethod
    def zero2(
        cls,
        *,
        chunk_numel: int | None = None,
        reduce_dtype: torch.dtype | str | None = None,
        host_checkpoints: int | Literal["all"] = 0,
        master: Master = "fp32",
        moments: Moments = "fp32",
    ) -> Self:
        """Chunks scattered, gathered once a step and kept until the update: [True, False, inf]."""
        return cls(scatter=True, offloaded=False, rcache_blocks="all", **_fields(locals()))

    @classmethod
    def zero3(
        cls,
        *,
        rcache: int | str | None = None,
        rcache_blocks: int | Literal["all"] | None = None,
        chunk_numel: int | None = None,
        reduce_dtype: torch.dtype | str | None = None,
        host_checkpoints: int | Literal["all"] = 0,
        batches_per_pass: int | None = None,
        master: Master = "fp32",
        moments: Moments = "fp32",
    ) -> Self:
        """Chunks scattered, gathered through the rCache: [True, False, C].

        Args:
            rcache: device memory for gathered chunks, in bytes or as a string such as ``"4 GiB"``; by default the least
                that a step needs, plus blocks to gather ahead.
            rcache_blocks: number of blocks for gathered chunks, or "all"; instead of `rcache`.
            chunk_numel, reduce_dtype, host_checkpoints, batches_per_pass, master, moments: the fields of these names.
        """
        return cls(scatter=True, offloaded=False, **_fields(locals()))

    @classmethod
    def offload(
        cls,
        *,
        device: int | str | None = None,
        host: int | str | None = None,
        disk: str | os.PathLike[str] | None = None,
        values_on_disk: bool = False,
        values_on_device: bool = False,
        verify: bool = False,
        shared_frozen: bool = False,
        rcache: int | str | None = None,
        rcache_blocks: int | Literal["all"] | None = None,
        device_chunks: int = 0,
        disk_chunks: int | None = None,
        chunk_numel: int | None = None,
        reduce_dtype: torch.dtype | str | None = None,
        host_checkpoints: int | Literal["all"] = 0,
        batches_per_pass: int | None = None,
        master: Master = "fp32",
        moments: Moments = "fp32",
    ) -> Self:
        """Like `zero3`, with the state of chunks in host memory: [True, True, C].

        Sizes are per rank, in bytes or as strings such as ``"20 GiB"``.

        Args:
            device: device memory for state that stays on the device; by default none stays.
            host: host memory for state; the rest goes to `disk`. By default all state is in host memory, or, with a
                `disk`, as much as fits in free host memory.
            disk: folder in which each rank creates the file for its chunks on disk, best on a fast local disk of each
                host. Nothing remains in it afterwards.
            values_on_disk: put the weights that gathers read, and sums of gradients, on disk too: chunks on disk then
                keep nothing in host memory. Use it when the 16-bit weights by themselves exceed host memory.
            values_on_device: keep the weights that gathers read on the device, sharded, and only the optimizer's state
                in host memory or on disk: they cross the host link once a step, however often they are gathered. For
                several ranks: on one, a larger `rcache` does the same with less memory.
            verify: keep checksums of everything written to disk, and compare them on every read.
            shared_frozen: store frozen weights once for all ranks of a host, and gather them without a collective: for
                adapters on GPUs that cannot read each other's memory.
            rcache: device memory for gathered chunks, as in `zero3`.
            device_chunks: number of chunks whose state stays on the device; instead of `device`.
            disk_chunks: number of chunks whose master weights and moments are on disk; instead of `host`.
            rcache_blocks, chunk_numel, reduce_dtype, host_checkpoints, batches_per_pass, master, moments: as in
                `zero3`.
        """
        if disk_chunks is None and disk is None:
            disk_chunks = 0
        return cls(scatter=True, offloaded=True, **_fields(locals()))

    @staticmethod
    def auto(
        step: Callable[[nn.Module, Any], Any],
        sample: Any,
        *,
        hardware: str | os.PathLike[str] | None = None,
        budget: int | str | None = None,
        accumulation: int = 1,
        batches_per_pass: int | None = 1,
        chunk_numel: int | tuple[int, int] | None = None,
        disk: str | os.PathLike[str] | None = None,
        verify: bool = False,
        reduce_dtype: torch.dtype | str | None = None,
        master: Master = "fp32",
        moments: Moments = "fp32",
        update_in_backward: bool = False,
    ) -> "AutoPlan":
        """Lets `wrap` search for the fastest plan that fits, by tracing one step without data (docs/which_plan.md).

        Args:
            step: the forward of a training step, as in ``step(model, sample).backward()``.
            sample: a batch of this rank.
            hardware: the machine to plan for: the name of one that ships with the package, or a file; None measures
                this machine and remembers the result.
            budget: device memory of each rank for the library, activations and buffers, in bytes or as a string such as
                ``"40 GiB"``; None uses all free memory. On CPUs, the rest of the rank's equal share of memory is the
                host tier.
            accumulation: micro-batches of a step. Several passes need fp32 sums of narrower gradients.
            batches_per_pass: the field of this name, for steps by `em.accumulate`: 1 for the plain loop, or None to
                choose the fastest of 1, 2, 4, ... and all. The plan found has it.
            chunk_numel: chunk length C in elements, in a search also the range (shortest, longest) of the lengths to
                try; by default a length with little waste.
            disk: folder for chunks on disk, used if host memory is too small; None keeps all chunks off the disk. The
                compute shards of trainable chunks go there (`values_on_disk`) only if host memory is too small for them
                too.
            verify: as in `offload`.
            reduce_dtype, master, moments: the fields of these names; the search counts their bytes.
            update_in_backward: whether the last backward of each step runs inside the optimizer's `update_in_backward`,
                so that the search hides updates in host memory behind it.
        """
        return AutoPlan(**_fields(locals()))

    def __str__(self) -> str:
        """Lists the fields that differ from their defaults."""
        shown = [(field.name, getattr(self, field.name)) for field in fields(self) if field.repr]
        default = {field.name: field.default for field in fields(self)}
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in shown if value != default[name])})"

    def to_json(self) -> str:
        """The plan as one JSON object, without its explanation."""
        data = {name: value for name, value in asdict(self).items() if name != "explanation"}
        if self.reduce_dtype is not None:
            data["reduce_dtype"] = str(self.reduce_dtype).removeprefix("torch.")
        return json.dumps(data)

    def explain(self) -> str:
        """Explains what each choice of the search saves; for a plan without a search, shows the plan itself."""
        return self.explanation or f"given, not searched for: {self}"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads a plan that `to_json` wrote. Raises PlanError for anything else, and for invalid fields."""
        if not isinstance(text, str):
            raise PlanError(f"not a plan: text is a {type(text).__name__}, expected the str that to_json returns")
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: no JSON, or more digits than Python converts
            raise PlanError(f"not a plan in JSON: {error}") from error
        known = {field.name for field in fields(cls)} - {"explanation"}
        if not isinstance(data, dict) or set(data) - known or {"scatter", "offloaded", "rcache_blocks"} - set(data):
            raise PlanError(f"not a plan: expected an object with the keys {sorted(known)}, got {text[:200]}")
        return cls(**data)

    def layout(self, params: Sequence[ParamSpec]) -> Layout:
        """The layout of parameters, in order of first use. Raises PlanError if one is longer than `chunk_numel`."""
        length = best_chunk_numel(params, stay=not self.offloaded) if self.chunk_numel is None else self.chunk_numel
        return self.place(build_layout(params, length, scatter=self.scatter, whole_layers=self.whole_layers))

    def place(self, layout: Layout) -> Layout:
        """Returns a copy of `layout` in which each chunk has the residence that its tier implies."""
        return layout.with_residence({c.index for c in layout.chunks if self.tier_of(layout, c) is Tier.DEVICE})

    @property
    def most_host_checkpoints(self) -> float:
        """`host_checkpoints` as a number."""
        return math.inf if self.host_checkpoints == "all" else self.host_checkpoints

    def blocks(self, layout: Layout) -> int:
        """Number of rCache blocks for this layout, at most what a step can fill."""
        if self.rcache_blocks == "all":
            return layout.most_blocks
        assert self.rcache_blocks is not None, "the plan is resolved"
        return min(self.rcache_blocks, layout.most_blocks)

    def gathers_again(self, layout: Layout) -> bool:
        """Whether weights leave the device in a step, so that a pass of several micro-batches gathers less."""
        return bool(layout.cached) and self.blocks(layout) < layout.most_blocks

    def batches_together(self, layout: Layout, count: int) -> int:
        """How many of `count` micro-batches `em.accumulate` lets pass each layer together."""
        return min(self.batches_per_pass or count, count) if self.gathers_again(layout) else 1

    def bounds(self, layout: Layout) -> tuple[int, int]:
        """(first chunk on disk, first chunk on the device), in order of first use; earlier ones are in host memory."""
        on_device = max(0, len(layout.chunks) - self.device_chunks) if self.offloaded else 0
        return max(0, on_device - (self.disk_chunks or 0)), on_device

    def shares(self, chunk: ChunkSpec, tier: Tier) -> bool:
        """Whether the ranks of a chunk in `tier` share its memory, if they are on one host."""
        return self.shared_frozen and tier is Tier.HOST and not chunk.key.trainable and chunk.shards > 1

    @property
    def precision(self) -> Precision:
        """`master` and `moments` together."""
        return Precision(master=self.master, moments=self.moments)

    def tier_of(self, layout: Layout, chunk: ChunkSpec) -> Tier:
        """The tier of a chunk's long-lived state."""
        return tier_at(chunk.index, *self.bounds(layout))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AutoPlan:
    """A request to search for a plan; made by `Plan.auto`, which documents the fields."""

    step: Callable[[nn.Module, Any], Any]
    sample: Any
    hardware: str | None
    budget_bytes: int | None
    accumulation: int
    batches_per_pass: int | None
    disk: str | None
    verify: bool
    chunk_numel: int | tuple[int, int] | None = None
    reduce_dtype: torch.dtype | None = None
    master: Master = "fp32"
    moments: Moments = "fp32"
    update_in_backward: bool = False

    @property
    def precision(self) -> Precision:
        """`master` and `moments` together."""
        return Precision(master=self.master, moments=self.moments)

    @property
    def chunk_range(self) -> tuple[int, int] | None:
        """The shortest and the longest chunk to try; None leaves both to the search."""
        return (self.chunk_numel, self.chunk_numel) if isinstance(self.chunk_numel, int) else self.chunk_numel

    def __post_init__(self) -> None:
        _check_state(self)
        object.__setattr__(self, "chunk_numel", _length_or_range(self.chunk_numel))
        if not callable(self.step):
            raise PlanError(f"step={self.step!r}: expected a function of model and batch")
        if self.sample is None:
            raise PlanError("Plan.auto needs a sample: a batch for step(model, sample)")
        if self.hardware is not None and not isinstance(self.hardware, str):
            raise PlanError(
                f"hardware={self.hardware!r}: expected a machine's name, a file, or None to measure this one"
            )
        if self.budget_bytes == 0:
            raise PlanError("budget=0: expected at least 1 byte, or None for all free memory")
        if not is_whole(self.accumulation, least=1):
            raise PlanError(
                f"accumulation={self.accumulation!r}: expected the number of micro-batches in a step, at least 1"
            )
        if self.batches_per_pass is not None and not is_whole(self.batches_per_pass, least=1):
            raise PlanError(
                f"batches_per_pass={self.batches_per_pass!r}: expected a number of micro-batches, at least 1, or None "
                "to search for it"
            )
        if not isinstance(self.update_in_backward, bool):
            raise PlanError(f"update_in_backward={self.update_in_backward!r}: expected True or False")
