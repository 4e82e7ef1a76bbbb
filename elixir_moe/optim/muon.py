"""`Muon`: torch's Muon, for stacks of matrices and for fused matrices too.

Owns the optimizer that a user builds, which trains a plain model as it trains a wrapped one (`muon_update`). Never
touches a shard.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elixir_moe.errors import ConfigError
from elixir_moe.optim.whole_matrix import Matrix, Rows, at_once, matrices
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.torch_private import adjusted_rate, orthogonalized


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for parameters of two or more dims, whose last two are those of matrices.

    A stack of experts, (E, rows, columns), is E matrices, and each is orthogonalized by itself. So are the parts of a
    fused matrix if its group names them; by default there is one. All else is as in torch.
    """

    def __init__(
        self, params: Any, *, split_rows: Rows = 1, split_columns: int = 1, ns_dtype: str = "bf16", **options: Any
    ) -> None:
        """Builds the optimizer, for a plain model or for `wrap`.

        Args:
            params: parameters or groups of them, as for `torch.optim.Muon`. A group may have `split_rows`,
                `split_columns` and `ns_dtype` of its own.
            split_rows: the parts of which each matrix consists, one below the other: their number if they are equal, or
                the rows of each. ``split_rows=2`` for gate and up, ``(4096, 1024, 1024)`` for query, key and value.
            split_columns: the number of equal parts next to each other.
            ns_dtype: the dtype of the Newton-Schulz iteration: "bf16", as in torch, or "fp32".
            options: those of `torch.optim.Muon`: `lr`, `weight_decay`, `momentum`, `nesterov`, `ns_coefficients`,
                `eps`, `ns_steps`, `adjust_lr_fn`.

        Raises:
            ConfigError: a parameter has less than two dims or is complex, or its parts do not make it up; also from
                `add_param_group`.
        """
        checked = torch.optim.Muon([nn.Parameter(torch.empty(1, 1, device="cpu"))], **options)
        defaults = checked.defaults | {
            "split_rows": split_rows,
            "split_columns": split_columns,
            "ns_dtype": ns_dtype,
        }
        torch.optim.Optimizer.__init__(self, params, defaults)  # torch's Muon refuses other than two dims

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch. Raises ConfigError, and adds nothing, if its parameters have no matrices."""
        super().add_param_group(param_group)
        try:
            check_matrices(self.param_groups[-1])
        except ConfigError:
            del self.param_groups[-1]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates the parameters, as `torch.optim.Muon` does for each matrix."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                _update(parameter, self.state[parameter], group)
        return loss


def check_matrices(group: Mapping[str, Any]) -> None:
    """Raises ConfigError for a parameter of the group that does not consist of the matrices that its options name."""
    if (ns_dtype := group.get("ns_dtype", "bf16")) not in ("bf16", "fp32"):
        raise ConfigError(f"ns_dtype={ns_dtype!r}: expected 'bf16', as in torch, or 'fp32'")
    for parameter in map(local_of, group["params"]):
        list(matrices(parameter.shape, group))
        if parameter.is_complex():
            raise ConfigError(
                f"Muon updates real matrices, and a parameter of shape {tuple(parameter.shape)} is complex: give it to "
                f"AdamW"
            )


def _update(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
    gradient, rate, found = parameter.grad, float(group["lr"]), list(matrices(parameter.shape, group))
    assert gradient is not None
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    kept = state["momentum_buffer"]
    kept.lerp_(gradient, 1 - group["momentum"])
    update = (gradient.lerp(kept, group["momentum"]) if group["nesterov"] else kept).contiguous()
    weights = parameter.contiguous()  # the parameter itself, unless it is stored in another order
    weights.mul_(1 - rate * group["weight_decay"])
    for together in at_once(found, group):
        whole = orthogonalize([part_of(update, matrix).float() for matrix in together], group)
        for matrix, change in zip(together, whole, strict=True):
            scaled = adjusted_rate(rate, group["adjust_lr_fn"], matrix.shape)
            part_of(weights, matrix).add_(change, alpha=-scaled)
    if weights is not parameter:
        parameter.copy_(weights)


def part_of(flat: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """The view of a matrix, (rows, columns), in the contiguous memory that `Matrix.start` counts from."""
    return flat.as_strided(matrix.shape, (matrix.stride, 1), flat.storage_offset() + matrix.start)


def orthogonalize(updates: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Sequence[torch.Tensor]:
    """Returns the orthogonalized `updates` of matrices of one shape, by torch's iteration; may overwrite those in bf16.

    In fp32 it is the same iteration, of all of them at once.
    """
    coefficients, steps, eps = options["ns_coefficients"], options["ns_steps"], options["eps"]
    if options.get("ns_dtype") != "fp32":
        return [orthogonalized(update.contiguous(), coefficients, steps, eps) for update in updates]
    a, b, c = coefficients
    whole = torch.stack([update.float() for update in updates])
    tall = whole.shape[-2] > whole.shape[-1]
    if tall:
        whole = whole.mT
    whole = whole / torch.linalg.vector_norm(whole, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = whole @ whole.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        whole = torch.baddbmm(whole, gram, whole, beta=a)
    return (whole.mT if tall else whole).unbind()
