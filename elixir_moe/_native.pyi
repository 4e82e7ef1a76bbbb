"""Kernels on host memory (csrc/). Arrays are taken through DLPack and never converted or copied."""

from torch import Tensor

def cpu_features() -> str:
    """The instruction set the kernels use on this CPU: "avx512", "avx2" or "scalar"."""

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
    grad_scale: float,
    decoupled: bool,
    maximize: bool,
    threads: int,
    isa: str = "",
) -> None:
    """One Adam or AdamW step on a shard in host memory, in place and in one pass; see `elixir_moe.kernels.adam_step`.

    Arrays are one-dimensional, contiguous, equally long and require no gradient. At most `threads` threads work, the
    caller's among them. `isa` forces an instruction set no better than the CPU's; the result is the same to the bit.

    Raises:
        TypeError: `master` or a moment is not float32, or an array is not one-dimensional and contiguous.
        ValueError: Lengths differ, an array is not in host memory, `grad` or `compute` has another dtype, or `step`,
            `threads` or `isa` is out of range.
    """
