"""The accelerators of this machine, of any kind: which there are, and the module of torch that drives them."""

from elixir_moe.accelerator import (
    HIDDEN,
    api,
    backends,
    capability,
    count,
    expandable_by,
    found,
    has_bf16,
    is_accelerator,
    total_bytes,
    visible_without,
)
