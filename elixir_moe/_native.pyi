"""Kernels on host memory (csrc/). Arrays are taken through DLPack and never converted or copied."""

from torch import Tensor

def cpu_features() -> str:
    """The instruction set the kernels use on this CPU: "avx512", "avx2", "neon" or "scalar"."""

def tiles_trap() -> bool:
    """Whether this CPU announces matrix tiles (AMX) and does not describe them: using one is fatal."""

def begin_exit(kept: object) -> None:
    """Never frees `kept`; a thread that Python ends from now on stands still and does not end the process.

    To be called when the process exits, by the thread that does.
    """

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

def narrow_step(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exponents_avg: Tensor | None,
    exponents_sq: Tensor | None,
    grad: Tensor,
    compute: Tensor | None,
    *,
    key0: int,
    key1: int,
    first: int,
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
    """One Adam or AdamW step on a shard whose state has fewer bytes than float; see `elixir_moe.kernels.narrow_step`.

    Moments are float32, bfloat16, or uint8 with exponents. The rest is as for `adam_step`.
    """

def sum_of_squares(grad: Tensor, *, threads: int, isa: str = "") -> float: ...
def add_to(total: Tensor, term: Tensor, *, threads: int, isa: str = "") -> None: ...
def decode_nibbles(
    codes: Tensor,
    scales: Tensor,
    values: Tensor,
    out: Tensor,
    *,
    block: int,
    high_first: bool,
    threads: int,
    isa: str = "",
) -> None:
    """Codes of four bits in host memory, times the scale of their block; see `elixir_moe.kernels.decode_nf4`.

    Arrays are one-dimensional and contiguous. `codes` is uint8, half as long as `out`, rounded up. `scales` has one
    element for each `block`, a multiple of 32, of `out`: float32, or uint8 for E8M0. `values` has what the 16 codes
    stand for. `out` is float32 or bfloat16. The first of two elements is in the high or the low half of their byte.

    Raises:
        TypeError: an array is not one-dimensional and contiguous, or `codes` or `values` has another dtype.
        ValueError: a length, another dtype, `block`, `threads` or `isa` is not as described.
    """

def decode_octets(
    codes: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    e4m3fn: bool,
    rows: int,
    cols: int,
    block_rows: int,
    block_cols: int,
    threads: int,
    isa: str = "",
) -> None:
    """Codes of eight bits in host memory, E4M3 or int8, times the scale of their block of a matrix.

    Arrays are one-dimensional and contiguous: those of matrices of `rows` x `cols` elements one after another. `codes`
    is uint8, `scales` float32, one for each block of `block_rows` x `block_cols`, and `out` float32 or bfloat16.

    Raises:
        TypeError: an array is not one-dimensional and contiguous, or `codes` or `scales` has another dtype.
        ValueError: a length, another dtype, a size, `threads` or `isa` is not as described.
    """

def node_of(memory: Tensor) -> int:
    """The NUMA node that the first page of `memory`, uint8, lies on; -1 where there is one node, or nobody tells."""
