"""Arithmetic on one shard or weight, in host or device memory: the optimizer's, and the decoding of quantised weights.

Owns the choice between the native kernels (csrc/) and plain torch; never decides when a step is taken, and holds no
state. The compute shard is written in the same pass as the master shard, which keeps an offloaded parameter's traffic
at six bytes a step.
"""

import os
from collections.abc import Collection
from typing import TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.utils.dlpack import to_dlpack

try:
    from elixir_moe import _native
except ImportError:  # a source tree that was never built: all works, the step on the CPU is several times slower
    _native = None  # type: ignore[assignment]

NORM_ROW_NUMEL = 4096
"""Elements that are squared and summed in fp32 at a time."""
HOT_NUMEL = 1 << 17
"""Elements of each of two arrays that fit into a core's own cache together; a multiple of `NORM_ROW_NUMEL`."""
TORCH_SLICE_NUMEL = 1 << 23
"""Elements of a slice on the torch path. Its float32 temporaries, at most five, never exceed 5 x 32 MiB, whatever the
shard's length."""

NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""What the codes of NF4 stand for, in units of the block's largest magnitude (QLoRA, appendix E): fp32 numbers."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the codes of MXFP4 stand for (OCP Microscaling Formats, 5.3.3)."""
NF4_BLOCK, MXFP4_BLOCK, FP8_BLOCK = 64, 32, 128
"""Elements that share a scale; for FP8 in both dimensions of a matrix."""

_CORES_FOR_TWO = 8
"""Cores of a rank from which on two are left to launching: autograd launches on a thread of its own, and so does NCCL.
"""
_MASTER_DTYPES = (torch.float32,)
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COMPUTE_DTYPES = (torch.bfloat16, torch.float16)
_DECODED_DTYPES = (torch.bfloat16, torch.float32)


class _Settings(TypedDict):
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float | Tensor
    decoupled: bool
    maximize: bool


def cpu_features() -> str:
    """The code that updates shards in host memory: "avx512", "avx2" or "scalar" (native), "torch" if none was built."""
    return "torch" if _native is None else _native.cpu_features()


def spare_tiles() -> None:
    """Makes torch multiply without matrix tiles (AMX) on a CPU that announces but refuses them, as in some VMs.

    There its first bf16 product would end the process. Call it before any product (`em.init_mesh` and `em.wrap` do, and
    the command line): torch's library (oneDNN) reads the environment variable once. Processes started later inherit the
    variable. A value set by the user stays.
    """
    if _native is not None and _native.tiles_trap():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


def host_threads(device: torch.device) -> int:
    """The number of threads for shards in host memory, if forward runs on `device`.

    On a CPU it is torch's. With a GPU the cores are free, though torchrun lets torch use only one: each rank of this
    machine has the cores that its launcher has bound it to, or else an equal share of all. One or two of them are left
    to the threads that launch kernels. It is torch's number if that is larger, as far as cores are left.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu":
        return threads
    cores = len(_cores_of(0))
    ranks = 1 if _is_bound(cores) else int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or max(1, torch.cuda.device_count())
    return max(1, _without_launching(cores // ranks), min(threads, _without_launching(cores)))


def helpers(threads: int) -> int:
    """The number of helper threads that `threads` allow, since each computes with as many as torch uses."""
    return max(1, threads // torch.get_num_threads())


def work_on(device: torch.device) -> None:
    """Makes the calling thread work on `device`: by default it uses the first GPU, perhaps another rank's."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _without_launching(cores: int) -> int:
    return cores - (1 if cores < _CORES_FOR_TWO else 2)


def _is_bound(cores: int) -> bool:
    """Whether this rank's `cores` are its own: fewer than its launcher has, as numactl, Slurm and MPI bind them.

    torchrun is the parent of its ranks, and may itself be confined to a part of the machine, which they share. Others
    launch on a whole machine.
    """
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return cores < (len(_cores_of(os.getppid())) if under_torchrun else os.cpu_count() or 1)


def _cores_of(process: int) -> Collection[int]:
    """The cores on which a process may run, 0 being this one; all of them where the system does not bind any."""
    return os.sched_getaffinity(process) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def sum_of_squares(gradient: Tensor, *, threads: int | None = None) -> float | Tensor:
    """The sum of squares of a flat gradient shard, of any floating dtype; as exact as fp64 to about 1e-6.

    A float for a shard in host memory; for a shard on a GPU an fp64 scalar there, without a wait.

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


def add_and_square(total: Tensor, term: Tensor) -> float | None:
    """Adds `term` to `total`, both flat; returns `sum_of_squares` of the result, or None on a GPU, where it takes time.

    Works slice by slice, so that sums are squared before they leave the cache: the norm costs no pass over memory.
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
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float | Tensor = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
    threads: int | None = None,
    skip: Tensor | None = None,
) -> None:
    """Takes one Adam (or, `decoupled`, AdamW) step on a shard, in place, and writes the compute shard.

    The arithmetic is that of `torch.optim.Adam` and `AdamW` in float32, on the gradient `grad.float() * grad_scale`.
    In host memory the order of operations is that of their one-tensor form: from equal gradients the moments equal
    torch's to the bit (where torch runs on AVX2 or better), and so does the weight but for torch's square root, which
    may be an ulp off the IEEE one. On a GPU it is torch's own fused kernel.

    Args:
        master: The shard's weight, float32, shape (numel,), contiguous, on any device. Updated in place.
        exp_avg: The first moment, like `master`. Updated in place.
        exp_avg_sq: The second moment, like `master`. Updated in place.
        grad: The gradient shard, float32, bfloat16 or float16, same shape and device. Only read.
        compute: Where the new weight goes, bfloat16 or float16, same shape and device, rounded to nearest even as
            `Tensor.to` does; None where the master shard is itself the compute shard. May be the very memory of `grad`
            if that is of a 16-bit dtype too.
        lr: Learning rate of this step.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the denominator.
        weight_decay: Decoupled from the gradient (AdamW) or added to it (Adam), as `decoupled` says.
        step: Number of this step, counted from 1; the bias corrections depend on it.
        grad_scale: Factor on the gradient: one over the loss scale, the clipping coefficient, or their product. On a
            GPU it may be a scalar there.
        decoupled: AdamW's weight decay rather than Adam's.
        maximize: Ascend rather than descend.
        threads: Threads of the native kernel; by default as many as torch uses on this thread.
        skip: On a GPU, an fp32 scalar there: if it is 1, weight and moments stay, and `compute` gets the weight again.

    Raises:
        ValueError: The arrays do not match as described above, or `step` is below 1.
    """
    if step < 1:
        raise ValueError(f"step is {step}; the first step is 1")
    settings: _Settings = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "step": step,
        "grad_scale": grad_scale,
        "decoupled": decoupled,
        "maximize": maximize,
    }
    master, exp_avg, exp_avg_sq, grad = master.detach(), exp_avg.detach(), exp_avg_sq.detach(), grad.detach()
    compute = None if compute is None else compute.detach()
    _check("master", master, master, _MASTER_DTYPES)
    _check("exp_avg", exp_avg, master, _MASTER_DTYPES)
    _check("exp_avg_sq", exp_avg_sq, master, _MASTER_DTYPES)
    _check("grad", grad, master, _GRAD_DTYPES)
    if compute is not None:
        _check("compute", compute, master, _COMPUTE_DTYPES)
    if _native is None or master.device.type != "cpu":
        _torch_step(master, exp_avg, exp_avg_sq, grad, compute, skip, **settings)
    else:
        assert skip is None and not isinstance(grad_scale, Tensor), "the host knows both numbers of a step of its own"
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


@torch.no_grad()
def _torch_step(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    compute: Tensor | None,
    skip: Tensor | None,
    **settings: Unpack[_Settings],
) -> None:
    """The same step with torch's own functional Adam: any device, no native code."""
    for start in range(0, master.numel(), TORCH_SLICE_NUMEL):
        part = slice(start, start + TORCH_SLICE_NUMEL)
        scaled = grad[part].float()
        scale = settings["grad_scale"]
        if isinstance(scale, Tensor) or scale != 1.0:
            scaled = scaled * scale  # not in place: `float()` of a float32 gradient is no copy
        torch_adam(
            [master[part]],
            [scaled],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            # torch increments the step itself; it is on the master's device, so that no kernel waits for a copy.
            [torch.full((), settings["step"] - 1, dtype=torch.float32, device=master.device)],
            foreach=False,
            fused=master.device.type == "cuda",
            found_inf=skip,
            decoupled_weight_decay=settings["decoupled"],
            amsgrad=False,
            beta1=settings["beta1"],
            beta2=settings["beta2"],
            lr=settings["lr"],
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            maximize=settings["maximize"],
        )
        if compute is not None:
            compute[part].copy_(master[part])


def decode_nf4(codes: Tensor, scales: Tensor, out: Tensor, *, threads: int | None = None) -> None:
    """Writes ``NF4_VALUES[code] * scale`` to `out`, the fp32 product rounded to nearest even.

    Blocks of `NF4_BLOCK` elements in the order of memory share a scale, as in bitsandbytes, whose `absmax` it is. The
    last block may be short.

    Args:
        codes: uint8, half as many elements as `out`, rounded up; the first of two codes is in the high four bits.
        scales: fp32, one for each block.
        out: bfloat16 or fp32, of any shape.
        threads: Threads of the native kernel; by default as many as torch uses on this thread.

    All are contiguous and on one device. On a CPU the decoder is native; elsewhere, and on fake tensors, it is torch's
    operators. Both give the same values, and NaN where a scale is NaN.

    Raises:
        ValueError: The arrays do not match as described above.
    """
    _check_packed(codes, scales, out, torch.uint8, torch.float32)
    _check_numel("codes", codes, -(-out.numel() // 2))
    _check_numel("scales", scales, -(-out.numel() // NF4_BLOCK))
    _decode_nibbles(codes, scales, out, NF4_VALUES, NF4_BLOCK, high_first=True, threads=threads)


def decode_mxfp4(codes: Tensor, scales: Tensor, out: Tensor, *, threads: int | None = None) -> None:
    """Writes ``E2M1_VALUES[code] * 2 ** (scale - 127)`` to `out`, the fp32 product rounded to nearest even.

    Blocks of `MXFP4_BLOCK` elements of a row share a scale, as in gpt-oss. A scale of 255 is NaN.

    Args:
        codes: uint8, half as many elements as `out`; the first of two codes is in the low four bits.
        scales: uint8, one for each block.
        out: bfloat16 or fp32; its last dimension is a multiple of a block.
        threads: As for `decode_nf4`, whose last remarks hold here, too.

    Raises:
        ValueError: The arrays do not match as described above.
    """
    _check_packed(codes, scales, out, torch.uint8, torch.uint8)
    if out.ndim < 1 or out.shape[-1] % MXFP4_BLOCK:
        raise ValueError(f"out has shape {tuple(out.shape)}; its last dimension must be a multiple of {MXFP4_BLOCK}")
    _check_numel("codes", codes, out.numel() // 2)
    _check_numel("scales", scales, out.numel() // MXFP4_BLOCK)
    _decode_nibbles(codes, scales, out, E2M1_VALUES, MXFP4_BLOCK, high_first=False, threads=threads)


def decode_fp8(codes: Tensor, scales: Tensor, out: Tensor, *, threads: int | None = None) -> None:
    """Writes ``code * scale`` to `out`, the fp32 product rounded to nearest even.

    Blocks of `FP8_BLOCK` x `FP8_BLOCK` elements of a matrix share a scale, as in DeepSeek-V3, which calls it
    `weight_scale_inv`. Blocks at the border may be smaller.

    Args:
        codes: float8_e4m3fn, of the shape of `out`.
        scales: fp32, (..., ceil(rows / FP8_BLOCK), ceil(cols / FP8_BLOCK)).
        out: bfloat16 or fp32, (..., rows, cols): one matrix or several.
        threads: As for `decode_nf4`, whose last remarks hold here, too.

    Raises:
        ValueError: The arrays do not match as described above.
    """
    _check_packed(codes, scales, out, torch.float8_e4m3fn, torch.float32)
    if out.ndim < 2:
        raise ValueError(f"out has shape {tuple(out.shape)}; FP8 has blocks of matrices, at least two dimensions")
    _check_shape("codes", codes, tuple(out.shape))
    blocks = tuple(-(-size // FP8_BLOCK) for size in out.shape[-2:])
    _check_shape("scales", scales, (*out.shape[:-2], *blocks))
    _decode_octets(codes, scales, out, (FP8_BLOCK, FP8_BLOCK), threads)


def decode_int8(codes: Tensor, scales: Tensor, out: Tensor, *, threads: int | None = None) -> None:
    """Writes ``code * scale`` to `out`, the fp32 product rounded to nearest even. Each row has a scale.

    Args:
        codes: int8, of the shape of `out`.
        scales: fp32, of the shape of `out` without its last dimension.
        out: bfloat16 or fp32, (..., cols).
        threads: As for `decode_nf4`, whose last remarks hold here, too.

    Raises:
        ValueError: The arrays do not match as described above.
    """
    _check_packed(codes, scales, out, torch.int8, torch.float32)
    if out.ndim < 1:
        raise ValueError("out has no dimension; int8 has a scale for each row")
    _check_shape("codes", codes, tuple(out.shape))
    _check_shape("scales", scales, tuple(out.shape[:-1]))
    _decode_octets(codes, scales.unsqueeze(-1), out, (1, out.shape[-1]), threads)


def _check_packed(codes: Tensor, scales: Tensor, out: Tensor, code: torch.dtype, scale: torch.dtype) -> None:
    for name, array, dtypes in (("codes", codes, (code,)), ("scales", scales, (scale,)), ("out", out, _DECODED_DTYPES)):
        if array.dtype not in dtypes:
            raise ValueError(f"{name} is {array.dtype}, expected {' or '.join(map(str, dtypes))}")
        if not array.is_contiguous():
            raise ValueError(f"{name} must be contiguous, found shape {tuple(array.shape)}, strides {array.stride()}")
        if array.device != out.device:
            raise ValueError(f"{name} is on {array.device}, out on {out.device}; they must agree")


def _check_numel(name: str, array: Tensor, numel: int) -> None:
    if array.numel() != numel:
        raise ValueError(f"{name} has {array.numel()} elements, expected {numel} for this out")


def _check_shape(name: str, array: Tensor, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {shape} for this out")


def _in_host_memory(out: Tensor) -> bool:
    """Whether the native decoders can write to it: a fake tensor says that it is on a CPU, and has no memory."""
    return _native is not None and out.device.type == "cpu" and type(out) is Tensor


@torch.no_grad()
def _decode_nibbles(
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    values: tuple[float, ...],
    block: int,
    *,
    high_first: bool,
    threads: int | None,
) -> None:
    codes, scales, out = codes.detach().view(-1), scales.detach().view(-1), out.detach().view(-1)
    table = torch.tensor(values, dtype=torch.float32, device=out.device)
    if _in_host_memory(out):
        _native.decode_nibbles(
            to_dlpack(codes),
            to_dlpack(scales),
            to_dlpack(table),
            to_dlpack(out),
            block=block,
            high_first=high_first,
            threads=torch.get_num_threads() if threads is None else threads,
        )
        return
    for start in range(0, out.numel(), TORCH_SLICE_NUMEL):
        stop = min(start + TORCH_SLICE_NUMEL, out.numel())
        pairs = codes[start // 2 : -(-stop // 2)]
        halves = (pairs >> 4, pairs & 15) if high_first else (pairs & 15, pairs >> 4)
        wide = table[torch.stack(halves, -1).view(-1).int()][: stop - start]
        part = scales[start // block : -(-stop // block)]
        part = part if part.dtype == torch.float32 else part.view(torch.float8_e8m0fnu).float()
        out[start:stop] = wide.mul_(part.repeat_interleave(block, output_size=len(part) * block)[: stop - start])


@torch.no_grad()
def _decode_octets(codes: Tensor, scales: Tensor, out: Tensor, block: tuple[int, int], threads: int | None) -> None:
    """Decodes matrices; `scales` has the dimensions of `out`."""
    if not out.numel():
        return
    rows, cols = out.shape[-2:] if out.ndim > 1 else (1, out.numel())
    codes, scales, out = codes.detach(), scales.detach(), out.detach().view(-1, rows, cols)
    if _in_host_memory(out):
        _native.decode_octets(
            to_dlpack(codes.view(torch.uint8).view(-1)),
            to_dlpack(scales.view(-1)),
            to_dlpack(out.view(-1)),
            e4m3fn=codes.dtype == torch.float8_e4m3fn,
            rows=rows,
            cols=cols,
            block_rows=block[0],
            block_cols=block[1],
            threads=torch.get_num_threads() if threads is None else threads,
        )
        return
    codes = codes.view(out.shape)
    scales = scales.reshape(len(out), -(-rows // block[0]), -(-cols // block[1]))
    step = max(1, TORCH_SLICE_NUMEL // cols // block[0]) * block[0]
    for matrix in range(len(out)):
        for start in range(0, rows, step):
            part = scales[matrix, start // block[0] : -(-min(start + step, rows) // block[0])]
            part = part.repeat_interleave(block[0], 0)[: rows - start].repeat_interleave(block[1], 1)[:, :cols]
            out[matrix, start : start + step] = codes[matrix, start : start + step].float() * part
