"""The optimizer's arithmetic on one shard, in host or device memory.

Owns the choice between the native kernels (csrc/), those in Triton, torch's fused ones and plain torch; never decides
when to step, and holds no state. The compute shard is written in the same pass as the master shard, which keeps an
offloaded parameter's traffic at six bytes per step.
"""

import hashlib
import math
import os
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from types import ModuleType
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.utils.dlpack import to_dlpack

from elixir_moe.accelerator import api, count, is_accelerator, runs_triton
from elixir_moe.native import native as _native
from elixir_moe.torch_private import fused_adam, fused_adamw, has_triton

NORM_ROW_NUMEL = 4096
"""Number of elements whose squares are summed in fp32 at a time."""
HOT_NUMEL = 1 << 17
"""Number of elements of which two arrays fit into a core's own cache; a multiple of `NORM_ROW_NUMEL`."""
TORCH_SLICE_NUMEL = 1 << 23
"""Elements of a slice on the torch path. Its float32 temporaries, at most five, never exceed 5 x 32 MiB, for any length
of the shard."""
FUSED_NUMEL = 1 << 30
"""Elements of a slice of torch's fused kernel where it needs no temporaries; it counts elements in 32 bits."""

CODE_BLOCK = 256
"""Number of int8 codes that share an exponent."""

_CORES_FOR_TWO = 8
"""A rank with at least this many cores leaves two for launching kernels: autograd and NCCL launch on their own threads.
"""
_MASTER_DTYPES = (torch.float32,)
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMPUTE_DTYPES = (torch.bfloat16, torch.float16)


class AdamSettings(TypedDict):
    """The numbers of one step of Adam or AdamW, for `adam_step` and `narrow_step`."""

    lr: float
    """Learning rate of this step."""
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Added to the denominator."""
    weight_decay: float
    """Decoupled from the gradient (AdamW) or added to it (Adam), depending on `decoupled`."""
    step: int
    """Number of this step, counted from 1; the bias corrections depend on it."""
    grad_scale: NotRequired[float | Tensor]
    """Factor on the gradient: one over the loss scale, the clipping coefficient, or their product. On a GPU it may be a
    scalar tensor. By default 1."""
    decoupled: NotRequired[bool]
    """AdamW's weight decay rather than Adam's; by default True."""
    maximize: NotRequired[bool]
    """Ascend rather than descend; by default False."""


def _complete(settings: AdamSettings) -> AdamSettings:
    """Returns all settings, with defaults. Raises ValueError for a step below 1."""
    if settings["step"] < 1:
        raise ValueError(f"step is {settings['step']}; the first step is 1")
    return {"grad_scale": 1.0, "decoupled": True, "maximize": False, **settings}


def cpu_features() -> str:
    """Returns the code that updates shards in host memory: "avx512", "avx2", "neon" or "scalar" (native), or "torch" if
    no native code was built.
    """
    return "torch" if _native is None else _native.cpu_features()


def spare_tiles() -> None:
    """Makes torch multiply without matrix tiles (AMX) on a CPU that announces but refuses them, as in some VMs.

    On such a CPU the first bf16 product would end the process. Call this before any product (`em.init_mesh`, `em.wrap`
    and the command line do): torch's library (oneDNN) reads the environment variable once. Processes started later
    inherit the variable. A value set by the user stays.
    """
    if _native is not None and _native.tiles_trap():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def host_threads(device: torch.device) -> int:
    """Returns the number of threads for shards in host memory, if forward runs on `device`.

    On a CPU it is torch's number. With a GPU the cores are free, though torchrun lets torch use only one: each rank of
    this machine has the cores that its launcher has bound it to, or an equal share of all. One or two of them are left
    for the threads that launch kernels. If torch's number is larger, it is used as far as there are cores.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu":
        return threads
    cores = len(_cores_of(0))
    ranks = 1 if _is_bound(cores) else int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, count())
    return max(1, _without_launching(cores // ranks), min(threads, _without_launching(cores)))


def helpers(threads: int) -> int:
    """Returns the number of helper threads that `threads` allow; each computes with as many threads as torch uses."""
    return max(1, threads // torch.get_num_threads())


def work_on(device: torch.device) -> None:
    """Makes `device` the current one of the calling thread, whose default is the first GPU, maybe another rank's."""
    if is_accelerator(device):
        api(device).set_device(device)


def _without_launching(cores: int) -> int:
    return cores - (1 if cores < _CORES_FOR_TWO else 2)


def _is_bound(cores: int) -> bool:
    """Whether this rank's `cores` are its own: fewer than its launcher has, as bound by numactl, Slurm or MPI.

    torchrun is the parent of its ranks, and may itself be confined to a part of the machine, which they share. Other
    launchers use a whole machine.
    """
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return cores < (len(_cores_of(os.getppid())) if under_torchrun else os.cpu_count() or 1)


def _cores_of(process: int) -> Collection[int]:
    """Returns the cores on which a process may run (0: this process); all of them if the system cannot bind any."""
    return os.sched_getaffinity(process) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def sum_of_squares(gradient: Tensor, *, threads: int | None = None) -> float | Tensor:
    """Sums the squares of a flat gradient shard of any floating dtype; agrees with an fp64 sum to about 1e-6.

    Returns a float for a shard in host memory; for a shard on a GPU an fp64 scalar on it, without a wait.

    Rows of `NORM_ROW_NUMEL` are summed in fp32 and the rows in fp64: one fp32 sum over tens of millions of elements is
    off by 1e-4, and fp64 throughout takes ten times as long on a CPU. The native kernel runs on `threads`, by default
    as many as torch uses.
    """
    if _native is not None and gradient.device.type == "cpu" and gradient.dtype in _GRAD_DTYPES:
        return _native.sum_of_squares(to_dlpack(gradient.detach()), threads=threads or torch.get_num_threads())
    whole = gradient.numel() // NORM_ROW_NUMEL
    norms = torch.empty(-(-gradient.numel() // NORM_ROW_NUMEL), dtype=torch.float32, device=gradient.device)
    rows, rest = gradient[: whole * NORM_ROW_NUMEL].view(-1, NORM_ROW_NUMEL), gradient[whole * NORM_ROW_NUMEL :]
    if whole:
        torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32, out=norms[:whole])
    if len(rest):
        torch.linalg.vector_norm(rest, dim=0, dtype=torch.float32, out=norms[whole])
    wide = norms.double()
    squares = wide.dot(wide)
    return squares.item() if squares.device.type == "cpu" else squares


def add_to(total: Tensor, term: Tensor, *, threads: int) -> None:
    """Adds `term`, of any floating dtype, to `total`, both flat in host memory, on at most `threads` threads.

    torch's ``add_`` makes a copy of a `term` of 16 bits first, which takes four times as long.
    """
    if _native is not None and total.dtype is torch.float32 and term.dtype in _GRAD_DTYPES:
        _native.add_to(to_dlpack(total.detach()), to_dlpack(term.detach()), threads=threads)
        return
    for start in range(0, total.numel(), HOT_NUMEL):  # a copy of a slice stays in the cache
        total[start : start + HOT_NUMEL].add_(term[start : start + HOT_NUMEL])


def add_and_square(total: Tensor, term: Tensor) -> float | None:
    """Adds `term` to `total`, both flat; returns `sum_of_squares` of the result, or None on a GPU.

    Works slice by slice, so that sums are squared before they leave the cache: the norm costs no pass over memory. On a
    GPU it would cost one.
    """
    if total.device.type != "cpu":
        total.add_(term)
        return None
    squares = 0.0
    for start in range(0, total.numel(), HOT_NUMEL):
        part = total[start : start + HOT_NUMEL].add_(term[start : start + HOT_NUMEL])
        squares += float(sum_of_squares(part))
    return squares


def adam_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    compute: Tensor | None,
    *,
    threads: int | None = None,
    skip: Tensor | None = None,
    count: Tensor | None = None,
    divisor: Tensor | None = None,
    **settings: Unpack[AdamSettings],
) -> None:
    """Takes one Adam (or, `decoupled`, AdamW) step on a shard, in place, and writes the compute shard.

    The arithmetic is that of `torch.optim.Adam` and `AdamW` in float32, on the gradient `grad.float() * grad_scale`.
    In host memory the order of operations is that of their one-tensor form: from equal gradients the moments equal
    torch's to the bit (where torch runs on AVX2 or better), and so does the weight except for torch's square root,
    which may be an ulp off the IEEE one. On a GPU a kernel in Triton gives the bits of the native one, also in one
    pass. Where Triton does not work, torch's own fused kernel is used, with a cast before it unless the gradient is in
    float32, and a cast after it if there is a compute shard.

    Args:
        master: The shard's weight, float32, shape (numel,), contiguous, on any device. Updated in place.
        exp_avg: The first moment, like `master`. Updated in place.
        exp_avg_sq: The second moment, like `master`. Updated in place.
        grad: The gradient shard, float32, bfloat16 or float16, same shape and device. Read only, except by torch's
            fused kernel, which scales a gradient in float32.
        compute: Gets the new weight, bfloat16 or float16, same shape and device, rounded to nearest even like
            `Tensor.to`; None if the master shard is itself the compute shard. May share the memory of `grad` if that
            has a 16-bit dtype too.
        threads: Threads of the native kernel; by default as many as torch uses on this thread.
        skip: On a GPU, an fp32 scalar on it: if it is 1, weight and moments stay, and `compute` gets the weight again.
        count, divisor: On a device that `fuses`, `step` and `divisor_of` the gradient's scale as fp32 scalars on it, if
            the caller has them: steps that share them launch no kernels for them.
        settings: `AdamSettings` by name.

    Raises:
        ValueError: The arrays do not match as described above, or `step` is below 1.
    """
    settings = _complete(settings)
    master, exp_avg, exp_avg_sq, grad = master.detach(), exp_avg.detach(), exp_avg_sq.detach(), grad.detach()
    compute = None if compute is None else compute.detach()
    _check("master", master, master, _MASTER_DTYPES)
    _check("exp_avg", exp_avg, master, _MASTER_DTYPES)
    _check("exp_avg_sq", exp_avg_sq, master, _MASTER_DTYPES)
    _check("grad", grad, master, _GRAD_DTYPES)
    if compute is not None:
        _check("compute", compute, master, _COMPUTE_DTYPES)
    if (triton := _adam_in_triton(master.device)) is not None:
        triton.adam_step(master, exp_avg, exp_avg_sq, grad, compute, skip=skip, **settings)
    elif fuses(master.device):
        count = torch.full((), settings["step"], dtype=torch.float32, device=master.device) if count is None else count
        divisor = divisor_of(settings["grad_scale"], master.device) if divisor is None else divisor
        _fused_step(master, exp_avg, exp_avg_sq, grad, compute, skip, count, divisor, **settings)
    elif _native is None or master.device.type != "cpu":
        assert skip is None, "on the CPU, the host decides whether to step"
        _torch_step(master, exp_avg, exp_avg_sq, grad, compute, **settings)
    else:
        assert skip is None and not isinstance(settings["grad_scale"], Tensor), "on the CPU, the host knows both"
        _native.adam_step(  # capsules: the arrays' own `__dlpack__` would cost more than a short shard's step
            to_dlpack(master),
            to_dlpack(exp_avg),
            to_dlpack(exp_avg_sq),
            to_dlpack(grad),
            None if compute is None else to_dlpack(compute),
            **settings,  # type: ignore[arg-type]  # a number, as asserted
            threads=torch.get_num_threads() if threads is None else threads,
        )


def _check(name: str, array: Tensor, master: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises ValueError, with the name of the array, for an array that neither path supports."""
    if array.ndim != 1 or not array.is_contiguous():
        found = f"shape {tuple(array.shape)}, strides {array.stride()}"
        raise ValueError(f"{name} must be one-dimensional and contiguous, found {found}")
    if array.shape != master.shape or array.device != master.device:
        found = f"{array.numel()} elements on {array.device}"
        raise ValueError(f"{name} has {found}, master has {master.numel()} on {master.device}; they must agree")
    if array.dtype not in dtypes:
        raise ValueError(f"{name} is {array.dtype}, expected {' or '.join(map(str, dtypes))}")


@dataclass(frozen=True, slots=True)
class Rounding:
    """The place of a run of elements among all random bits of stochastic rounding.

    The bits depend only on this and on the element's index, so they are the same however a parameter is cut.
    """

    key: tuple[int, int]
    """Two words of 32 bits, a hash of the seed, the parameter and the step."""
    first: int = 0
    """The index of the first element, modulo 2^32."""

    @classmethod
    def of(cls, seed: int, parameter: str, step: int, first: int) -> "Rounding":
        """Returns the rounding of a parameter's elements from number `first` on, within one of its `windows`."""
        window, low = divmod(first, _WINDOW)
        digest = hashlib.blake2b(f"{seed}/{step}/{window}/{parameter}".encode(), digest_size=8).digest()
        return cls((int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")), low)

    def behind(self, numel: int) -> "Rounding":
        """Returns the rounding of the run without its first `numel` elements."""
        return Rounding(self.key, (self.first + numel) % _WINDOW)

    def words(self, start: int, numel: int, device: torch.device) -> Tensor:
        """Returns the random words of `numel` elements from element `start` of the run on: int64 below 2^32.

        The same words as in csrc/narrow.hpp.

        Source: the 32-bit finalizer "lowbias32" of C. Wellons.
        """
        x = torch.arange(self.first + start, self.first + start + numel, device=device) % _WINDOW ^ self.key[0]
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % _WINDOW ^ self.key[1]
        x = ((x ^ (x >> 15)) * 0x846CA68B) % _WINDOW
        return x ^ (x >> 16)


_WINDOW = 1 << 32


def windows(first: int, numel: int, *, coded: bool) -> list[tuple[int, int]]:
    """Returns (start, stop) of the parts of a run from element `first` of a parameter on, each with its own `Rounding`.

    A part ends at a multiple of 2^32; with `coded`, after the block of codes around it.
    """
    step = CODE_BLOCK if coded else 1
    cuts = range((first // _WINDOW + 1) * _WINDOW - first, numel, _WINDOW)
    ends = [0, *(-(-cut // step) * step for cut in cuts), numel]
    return [(start, stop) for start, stop in pairwise(ends) if start < stop]


def _one_nan(x: Tensor) -> Tensor:
    """Replaces all NaNs by the same one: adding random bits to CUDA's NaN would overflow to zero."""
    return torch.where(x.isnan(), torch.nan, x)


def _to_bfloat16(x: Tensor, random: Tensor | None, *, above_zero: bool = False) -> Tensor:
    """Rounds fp32 values to bf16, with 16 `random` bits each or to the nearest. With `above_zero`, only 0 becomes 0."""
    if random is None:
        found = x.to(torch.bfloat16)
    else:
        found = ((_one_nan(x).view(torch.int32) + random.int()) >> 16).to(torch.int16).view(torch.bfloat16)
    if above_zero:
        least = torch.ones((), dtype=torch.int16, device=x.device).view(torch.bfloat16)
        found = torch.where((x != 0) & (found == 0), least, found)
    return found


@dataclass(frozen=True, slots=True)
class _Coding:
    """The constants of a moment's int8 coding, with the names of csrc/narrow.hpp."""

    shift: int
    half: int
    least: int
    first: int

    def bases(self, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns, as (blocks, 1), the bases of fine and coarse steps and the least code above zero for each block."""
        fine = ((exponents.int() + 1) << (23 - self.shift)).unsqueeze(1) - self.half
        coarse = fine // 4 - self.half
        return fine - self.half, coarse, (self.first - coarse).clamp(min=1)


_AVG = _Coding(shift=20, half=64, least=39, first=0)
_SQ = _Coding(shift=18, half=128, least=99, first=96 << 3)


def _in_blocks(values: Tensor) -> Tensor:
    """Reshapes flat values to (blocks, `CODE_BLOCK`), padded with zeros."""
    rest = -values.numel() % CODE_BLOCK
    padded = torch.cat((values, values.new_zeros(rest))) if rest else values
    return padded.view(-1, CODE_BLOCK)


def encode(values: Tensor, codes: Tensor, exponents: Tensor, *, signed: bool, random: Tensor | None = None) -> None:
    """Encodes flat values as 8-bit `codes` and an exponent for each block; csrc/narrow.hpp has the format.

    Args:
        values: floats; second moments (not `signed`) are at least 0.
        codes: uint8, as many as `values`.
        exponents: uint8, one per `CODE_BLOCK` elements; the last block may be shorter.
        signed: whether these are first moments.
        random: the random word of each element, int64; None rounds to the nearest.
    """
    coding = _AVG if signed else _SQ
    bits = _one_nan(values.float() if signed else values.float().sqrt().sqrt()).view(torch.int32)
    if random is None:
        low, two = torch.tensor(1 << (coding.shift - 1), device=bits.device), torch.tensor(2, device=bits.device)
    else:
        low = random & 0xFFFFF if signed else random >> 14
        drawn = _in_blocks(random)[:, :1] >> (20 if signed else 0)
        two = (drawn + torch.arange(CODE_BLOCK, device=bits.device) & 3).int()
    q = _in_blocks(((bits & 0x7FFFFFFF) + low.int()) >> coding.shift)
    top = (q.amax(dim=1) >> (23 - coding.shift)).clamp_(min=coding.least)
    fine, coarse, least = coding.bases(top)
    size = torch.maximum((q + two >> 2) - coarse, q - fine).clamp_(min=0)
    if not signed:
        size = torch.where(q == 0, 0, torch.maximum(size, least))
    size = size.view(-1)[: values.numel()]
    codes.copy_(torch.where(size == 0, 0, size | ((bits >> 24) & 128)))
    exponents.copy_(top)


def decode(codes: Tensor, exponents: Tensor, *, signed: bool, first: int = 0) -> Tensor:
    """Decodes codes exactly: to bf16 for first moments, to fp32 for second moments.

    `first` is the first code's place in its block.
    """
    coding = _AVG if signed else _SQ
    place = torch.arange(first, first + codes.numel(), device=codes.device) // CODE_BLOCK
    fine, coarse, _ = (base[place, 0] for base in coding.bases(exponents))
    size = (codes & (127 if signed else 255)).int()
    steps = torch.where(size == 0, 0, torch.minimum(size + fine, (size + coarse) << 2)) << (coding.shift - 16)
    if signed:
        steps |= (codes & 128).int() << 8
    found = steps.to(torch.int16).view(torch.bfloat16)
    if signed:
        return found
    squares = found.float().square()
    return squares * squares


Moment = Tensor | tuple[Tensor, Tensor]
"""A moment of a shard: fp32 or bf16 values, or codes and their exponents, both uint8."""


def narrow_step(
    weight: Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    grad: Tensor,
    compute: Tensor | None,
    rounding: Rounding,
    *,
    threads: int | None = None,
    skip: Tensor | None = None,
    **settings: Unpack[AdamSettings],
) -> None:
    """Takes an Adam step on a shard whose weight or moments have fewer bytes than fp32, rounded stochastically.

    csrc/narrow.hpp defines the arithmetic, in fp32, and the format of each array: the same bits on every device. On the
    CPU the native kernel does it in one pass; elsewhere torch's operators do it on slices in fp32.

    Args:
        weight: The shard's weight, fp32 or bf16, shape (numel,), contiguous. Updated in place.
        exp_avg: The first moment. Updated in place.
        exp_avg_sq: The second moment, of the same kind. Updated in place.
        grad: The gradient shard, float32, bfloat16 or float16. Read only.
        compute: Gets the new fp32 weight, rounded to the nearest, as in `adam_step`; None for a weight in bf16, which
            is itself the compute shard.
        rounding: The random bits of this run.
        threads, skip, settings: As in `adam_step`.
    """
    settings = _complete(settings)
    if _native is None or weight.device.type != "cpu":
        _torch_narrow(weight, exp_avg, exp_avg_sq, grad, compute, rounding, skip, settings)
        return
    assert skip is None and not isinstance(settings["grad_scale"], Tensor), "on the CPU, the host knows both"
    avg, avg_exponents = exp_avg if isinstance(exp_avg, tuple) else (exp_avg, None)
    sq, sq_exponents = exp_avg_sq if isinstance(exp_avg_sq, tuple) else (exp_avg_sq, None)

    def given(array: Tensor | None) -> object:
        return None if array is None else to_dlpack(array.detach())

    _native.narrow_step(
        *map(given, (weight, avg, sq, avg_exponents, sq_exponents, grad, compute)),  # type: ignore[arg-type]
        key0=rounding.key[0],
        key1=rounding.key[1],
        first=rounding.first,
        **settings,  # type: ignore[arg-type]  # a number, as asserted
        threads=torch.get_num_threads() if threads is None else threads,
    )


@torch.no_grad()
def _torch_narrow(
    weight: Tensor,
    exp_avg: Moment,
    exp_avg_sq: Moment,
    grad: Tensor,
    compute: Tensor | None,
    rounding: Rounding,
    skip: Tensor | None,
    settings: AdamSettings,
) -> None:
    """Takes the step of `narrow_step` with torch's operators, on any device, in the order of csrc/narrow.hpp."""
    for start in range(0, weight.numel(), TORCH_SLICE_NUMEL):
        part = slice(start, min(start + TORCH_SLICE_NUMEL, weight.numel()))
        before = weight[part].float(), _widened(exp_avg, part, signed=True), _widened(exp_avg_sq, part, signed=False)
        p, m, v = _updated(*before, grad[part].float(), settings)
        if skip is not None:  # old values are exactly representable, so rounding keeps them
            p, m, v = (torch.where(skip == 1, old, new) for old, new in zip(before, (p, m, v), strict=True))
        words = rounding.words(start, part.stop - start, weight.device)
        weight[part] = _to_bfloat16(p, words & 0xFFFF) if weight.dtype == torch.bfloat16 else p
        if compute is not None:
            compute[part] = p.to(compute.dtype)
        coded = isinstance(exp_avg, tuple)
        _write_moment(exp_avg, part, m, words if coded else words >> 8 & 0xFFFF, signed=True)
        _write_moment(exp_avg_sq, part, v, words if coded else words >> 16, signed=False)


def _updated(p: Tensor, m: Tensor, v: Tensor, g: Tensor, s: AdamSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weight and moments after the step in fp32; each operation is rounded separately, and scalars once."""

    def once(x: float) -> float:
        return torch.tensor(x, dtype=torch.float32, device="cpu").item()

    g = g * s["grad_scale"] if isinstance(s["grad_scale"], Tensor) else g * once(s["grad_scale"])
    g = -g if s["maximize"] else g
    if s["weight_decay"] and not s["decoupled"]:
        g = g + p * once(s["weight_decay"])
    if s["decoupled"]:
        p = p * once(1.0 - s["lr"] * s["weight_decay"])
    weight = once(1.0 - s["beta1"])
    m = m + (g - m) * weight if abs(weight) < 0.5 else g + (g - m) * once(weight - 1.0)
    v = v * once(s["beta2"]) + (g * once(1.0 - s["beta2"])) * g
    denominator = v.sqrt() * once(1.0 / (1.0 - s["beta2"] ** s["step"]) ** 0.5) + once(s["eps"])
    return p + m * once(-(s["lr"] / (1.0 - s["beta1"] ** s["step"]))) / denominator, m, v


def _blocks(part: slice) -> slice:
    """Returns the exponents' slice for elements that begin at a block."""
    return slice(part.start // CODE_BLOCK, -(-part.stop // CODE_BLOCK))


def _widened(moment: Moment, part: slice, *, signed: bool) -> Tensor:
    """Returns a copy of a part of a moment in fp32."""
    if isinstance(moment, tuple):
        return decode(moment[0][part], moment[1][_blocks(part)], signed=signed).float()
    return moment[part].to(torch.float32, copy=True)


def _write_moment(moment: Moment, part: slice, values: Tensor, random: Tensor, *, signed: bool) -> None:
    """Writes a part of a moment, rounded to its dtype."""
    if isinstance(moment, tuple):
        encode(values, moment[0][part], moment[1][_blocks(part)], signed=signed, random=random)
    elif moment.dtype == torch.bfloat16:
        moment[part] = _to_bfloat16(values, random, above_zero=not signed)
    else:
        moment[part] = values


def _torch_names(settings: AdamSettings) -> dict[str, Any]:
    """Selects the settings that torch's functional Adams accept."""
    names = ("lr", "beta1", "beta2", "weight_decay", "eps", "maximize")
    return {"amsgrad": False, **{name: value for name, value in settings.items() if name in names}}


@torch.no_grad()
def _torch_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    compute: Tensor | None,
    **settings: Unpack[AdamSettings],
) -> None:
    """Takes the step of `adam_step` with torch's own functional Adam: any device, no native code."""
    for start in range(0, master.numel(), TORCH_SLICE_NUMEL):
        part = slice(start, start + TORCH_SLICE_NUMEL)
        scaled = grad[part].float()
        scale = settings["grad_scale"]
        if isinstance(scale, Tensor) or scale != 1.0:
            scaled = scaled * scale  # not in place: `float()` does not copy a float32 gradient
        torch_adam(
            [master[part]],
            [scaled],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            # torch increments the step itself; it is on the master's device, so that no kernel waits for a copy.
            [torch.full((), settings["step"] - 1, dtype=torch.float32, device=master.device)],
            foreach=False,
            fused=False,
            decoupled_weight_decay=settings["decoupled"],
            **_torch_names(settings),
        )
        if compute is not None:
            compute[part].copy_(master[part])


def triton_on(device: torch.device, trial: Callable[[ModuleType], object], instead: str) -> ModuleType | None:
    """Returns the kernels in Triton if they are for `device` and `trial` of one runs there.

    On its first use, Triton needs a C compiler. If the trial fails, warns that `instead` happens.
    """
    if not (runs_triton(device) and has_triton()):
        return None
    try:
        from elixir_moe import triton_kernels

        trial(triton_kernels)
    except Exception as error:  # any error of Triton's compilers and driver
        warnings.warn(
            f"Triton cannot run a kernel on {device}, so {instead}: {type(error).__name__}: {error}", stacklevel=3
        )
        return None
    return triton_kernels


@cache
def _adam_in_triton(device: torch.device) -> ModuleType | None:
    """Returns the kernels in Triton if a step in bf16, the most frequent one, runs on `device`."""

    def step(triton: ModuleType) -> None:
        arrays = [torch.zeros(16, device=device) for _ in range(3)]
        grad = torch.zeros(16, device=device, dtype=torch.bfloat16)
        settings = _complete({"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "step": 1})
        triton.adam_step(*arrays, grad, grad, skip=None, **settings)

    return triton_on(device, step, "torch's fused kernel updates weights there, with casts before and after it")


def fuses(device: torch.device) -> bool:
    """Whether shards on this device use torch's fused kernel."""
    return is_accelerator(device) and _adam_in_triton(device) is None


def divisor_of(scale: float | Tensor, device: torch.device) -> Tensor | None:
    """Returns the scalar by which the fused kernel divides a gradient to multiply it with `scale`; None for 1."""
    if isinstance(scale, Tensor):
        return scale.reciprocal().float()
    value = 1 / scale if scale else math.inf
    return None if scale == 1.0 else torch.full((), value, dtype=torch.float32, device=device)


def _fused_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    compute: Tensor | None,
    skip: Tensor | None,
    count: Tensor,
    divisor: Tensor | None,
    **settings: Unpack[AdamSettings],
) -> None:
    """Takes the step of `adam_step` with torch's fused kernel, which accepts only float32."""
    step = fused_adamw if settings["decoupled"] else fused_adam
    numel = FUSED_NUMEL if grad.dtype == torch.float32 else TORCH_SLICE_NUMEL
    for start in range(0, master.numel(), numel):
        part = slice(start, start + numel)
        step(
            [master[part]],
            [grad[part].float()],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            [count],
            **_torch_names(settings),
            grad_scale=divisor,
            found_inf=skip,
        )
        if compute is not None:
            compute[part].copy_(master[part])
