"""`Muon`: torch's Muon, for stacks of matrices and for fused matrices too.

Owns the optimizer that a user builds, which trains a plain model as it trains a wrapped one (`muon_update`). Never
touches a shard.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from elixir_moe.errors import ConfigError
from elixir_moe.optim.whole_matrix import Rows, matrices
from elixir_moe.parallel.dtensor import local_of
from elixir_moe.torch_private import adjusted_rate, orthogonalized


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for parameters of two or more dims, whose last two are those of matrices.

    A stack of experts, (E, rows, columns), is E matrices, and each is orthogonalized by itself. So are the parts of a
    fused matrix if its group names them; by default there is one. All else is as in torch.
    """

    def __init__(self, params: Any, *, split_rows: Rows = 1, split_columns: int = 1, **options: Any) -> None:
        """Builds the optimizer, for a plain model or for `wrap`.

        Args:
            params: parameters or groups of them, as for `torch.optim.Muon`. A group may have `split_rows` and
                `split_columns` of its own.
            split_rows: the parts of which each matrix consists, one below the other: their number if they are equal, or
                the rows of each. ``split_rows=2`` for gate and up, ``(4096, 1024, 1024)`` for query, key and value.
            split_columns: the number of equal parts next to each other.
            options: those of `torch.optim.Muon`: `lr`, `weight_decay`, `momentum`, `nesterov`, `ns_coefficients`,
                `eps`, `ns_steps`, `adjust_lr_fn`.

        Raises:
            ConfigError: a parameter has less than two dims or is complex, or its parts do not make it up; also from
                `add_param_group`.
        """
        checked = torch.optim.Muon([nn.Parameter(torch.empty(1, 1, device="cpu"))], **options)
        defaults = checked.defaults | {"split_rows": split_rows, "split_columns": split_columns}
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
    for matrix in found:
        part, weight = (
            flat.as_strided(matrix.shape, (matrix.stride, 1), flat.storage_offset() + matrix.start)
            for flat in (update, weights)
        )
        scaled = adjusted_rate(rate, group["adjust_lr_fn"], matrix.shape)
        weight.add_(whole_update(part.float(), group), alpha=-scaled)
    if weights is not parameter:
        parameter.copy_(weights)


def whole_update(update: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Returns the orthogonalized `update` of a matrix; a bf16 `update` may be overwritten."""
    return orthogonalized(update.contiguous(), options["ns_coefficients"], options["ns_steps"], options["eps"])
