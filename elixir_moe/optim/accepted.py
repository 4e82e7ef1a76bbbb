"""The optimizers that `wrap` accepts: elementwise ones whose state can be sharded.

Owns the trial of an optimizer on small tensors, the copy of an optimizer for other parameters, and the facts about
torch's own optimizers. Never updates a weight of the model.
"""

import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from copy import copy
from numbers import Real
from types import NoneType
from typing import Any

import torch
from torch import nn

from elixir_moe.errors import ConfigError
from elixir_moe.optim.joined import elementwise_of, members_of, whole_matrix
from elixir_moe.parallel.dtensor import local_of

_WHOLE_TENSOR = {"LBFGS", "Adafactor", "SparseAdam", "Muon"}
"""Optimizers of torch whose update of an element depends on other elements; `joined` has those that are accepted."""

_IN_BLOCKS = {"bitsandbytes", "torchao"}
"""Packages that have optimizers with 8-bit or 4-bit state."""
_INSTEAD = (
    "torch.optim.AdamW with moments='int8' in the plan, whose blocks do not depend on the ranks, and master='bf16' "
    "for 16-bit weights"
)

MODES = ("train", "eval")
"""Methods with which an optimizer switches between the weights it trains and others, as schedule-free optimizers do.

Accelerate and Hugging Face's Trainer call them if an optimizer has them.
"""

REPLACED = ("step", "zero_grad", *MODES)
"""Methods that `wrap` or an LR scheduler replaces on an optimizer itself."""

_TRIED_NUMEL = 2**17
"""Elements of the trial tensor for an optimizer's state; 8-bit optimizers use blocks from 4096 elements on."""


def moments_of(optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of fp32 values that the elementwise optimizer keeps per element; 2 for an unknown one."""
    elementwise = elementwise_of(optimizer)

    def any_group(option: str) -> bool:
        return elementwise is not None and any(group.get(option) for group in elementwise.param_groups)

    match type(elementwise).__name__:
        case "SGD":
            return int(any_group("momentum"))
        case "Adagrad":
            return 1
        case "RMSprop":
            return 1 + any_group("momentum") + any_group("centered")
        case _:
            return 2 + any_group("amsgrad")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError for an optimizer that has stepped, shards, has unshardable state, or is neither elementwise
    nor one of `param_spec.WHOLE_MATRIX`."""
    for member in members_of(optimizer):
        _check_member(member)


def _check_member(optimizer: torch.optim.Optimizer) -> None:
    _check_keys(optimizer)
    if any(state and state.get("step", 1) != 0 for state in optimizer.state.values()):
        raise ConfigError(
            "the optimizer has been stepped, or has loaded a state: wrap it before the first step; to continue a "
            "training, save with em.save and load with em.load"
        )
    kind = type(optimizer)
    if kind.__module__.startswith("torch.distributed."):
        raise ConfigError(
            f"{kind.__name__} of torch.distributed shards or averages over ranks itself, which the plan does here: "
            f"wrap a plain optimizer, such as torch.optim.AdamW(model.parameters())"
        )
    if inner := [name for name, value in vars(optimizer).items() if isinstance(value, torch.optim.Optimizer)]:
        raise ConfigError(
            f"{kind.__name__} has another optimizer in its attribute {inner[0]!r}, which updates whole "
            f"parameters, but a rank holds only pieces of them: pass em.wrap an optimizer that makes its own updates"
        )
    package = kind.__module__.partition(".")[0]
    if package in _IN_BLOCKS and re.search(r"\dbit|Fp8", kind.__name__):
        raise ConfigError(
            f"{kind.__name__} of {package} keeps its state in blocks of its tensors, but a rank holds only pieces of "
            f"them, so that the blocks would depend on the number of ranks: use {_INSTEAD}"
        )
    if whole_matrix(optimizer) is not None:
        return
    whole = [base.__name__ for base in kind.__mro__ if base.__name__ in _WHOLE_TENSOR]
    ours = kind.__module__.startswith("torch.optim")
    if not whole and not ours:
        for parameter, state in optimizer.state.items():
            check_kept(optimizer, state, local_of(parameter))
    if whole or not (ours or all(_is_elementwise(optimizer, group) for group in optimizer.param_groups)):
        raise ConfigError(
            f"{[*whole, kind.__name__][0]} looks at whole tensors (their norm, their shape) or at all parameters "
            f"together, but a rank holds only flat pieces: use an elementwise optimizer, such as AdamW, and "
            f"param_groups for parameters with other settings"
        )
    for group in () if ours else optimizer.param_groups:
        piece = nn.Parameter(torch.ones(_TRIED_NUMEL, device="cpu"))
        tried = _tried(optimizer, group, piece, [torch.ones_like(piece)])
        _check_keys(tried)
        check_kept(optimizer, tried.state[piece], piece)


def _check_keys(optimizer: torch.optim.Optimizer) -> None:
    """Raises ConfigError if the optimizer keeps state that belongs to no parameter."""
    if others := [key for key in optimizer.state if not isinstance(key, torch.Tensor)]:
        raise ConfigError(
            f"{type(optimizer).__name__} keeps state[{others[0]!r}], which belongs to no parameter: each piece of a "
            f"shard has its own optimizer, and checkpoints hold only the state of parameters. Keep it in param_groups"
        )


def check_kept(optimizer: torch.optim.Optimizer, state: dict[str, Any], piece: torch.Tensor) -> None:
    """Raises ConfigError unless each entry of `state` has the shape of `piece`, or is a single value."""
    for name, value in state.items():
        found = local_of(value) if isinstance(value, torch.Tensor) else value
        plain = type(found) in (torch.Tensor, nn.Parameter) and found.layout is torch.strided
        if isinstance(found, (Real, str, NoneType)) or (plain and found.shape in (piece.shape, ())):
            continue
        form = f"a {found.dtype} tensor of shape {tuple(found.shape)}" if plain else f"a {type(found).__name__}"
        raise ConfigError(
            f"{type(optimizer).__name__} keeps {name!r}, {form}, for {piece.numel()} elements of a parameter: only "
            f"plain tensors with a value for each element can be sharded and saved. Use {_INSTEAD}; or "
            f"em.Plan.offload, which keeps fp32 moments in host memory or, with disk_chunks, on disk"
        )


def _is_elementwise(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether two optimizers on the flattened halves of a small matrix do the same as one on the whole matrix.

    Their options must agree too: a number computed from all parameters, such as Prodigy's `d`, would differ. Raises
    ConfigError if the steps are elementwise and one of the optimizer's `MODES` is not.
    """
    draw = torch.Generator().manual_seed(0)
    start, gradients = (torch.randn(*shape, generator=draw, device="cpu") for shape in ((4, 6), (3, 4, 6)))
    whole = nn.Parameter(start.clone())
    halves = [nn.Parameter(half.clone()) for half in start.flatten().chunk(2)]
    one = _tried(optimizer, group, whole, gradients)
    two = [_tried(optimizer, group, *both) for both in zip(halves, gradients.flatten(1).chunk(2, 1), strict=True)]

    def alike() -> bool:
        updated = torch.cat([half.detach() for half in halves]).view_as(whole)
        same_options = all(_options(twin) == _options(one) for twin in two)
        return same_options and torch.allclose(whole, updated, rtol=1e-5, atol=1e-7)

    if not alike():
        return False
    for mode in reversed(modes_of(optimizer)):  # the copies are in training mode
        before = dict(vars(one))
        for twin in (one, *two):
            _call(twin, mode)
        if changed := [name for name, value in vars(one).items() if before.get(name) is not value]:
            raise ConfigError(
                f"{type(optimizer).__name__}.{mode}() changes the optimizer's attributes {changed}, which "
                f"checkpoints do not hold: keep its mode in param_groups"
            )
        if not alike():
            raise ConfigError(
                f"{type(optimizer).__name__}.{mode}() looks at whole tensors or at all parameters together, but a rank "
                f"holds only flat pieces: change each element by itself, or use another optimizer, such as AdamW"
            )
    return True


def modes_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Lists the `MODES` that the optimizer has."""
    return [mode for mode in MODES if callable(getattr(type(optimizer), mode, None))]


def changes(optimizer: torch.optim.Optimizer, mode: str) -> bool:
    """Whether calling `mode`, one of the `MODES`, would change anything now; tried on a small tensor per group.

    A Trainer calls `train` before each micro-batch, mostly without effect.
    """

    def seen(twin: torch.optim.Optimizer, piece: nn.Parameter) -> str:
        state = {n: v.tolist() if isinstance(v, torch.Tensor) else v for n, v in twin.state[piece].items()}
        return f"{_options(twin)} {piece.tolist()} {state}"

    for group in optimizer.param_groups:
        piece = nn.Parameter(torch.ones(1, device="cpu"))
        twin = _tried(optimizer, group, piece, [torch.ones_like(piece)])
        twin.param_groups[0].update({name: value for name, value in group.items() if name != "params"})
        before = seen(twin, piece)
        _call(twin, mode)
        if seen(twin, piece) != before:
            return True
    return False


def _options(optimizer: torch.optim.Optimizer) -> str:
    """Formats the options of the first group."""
    return repr({name: value for name, value in optimizer.param_groups[0].items() if name != "params"})


def _tried(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], piece: nn.Parameter, gradients: Iterable[torch.Tensor]
) -> torch.optim.Optimizer:
    """Returns a copy of the optimizer in training mode that has updated `piece` with each of `gradients`."""
    twin = like(optimizer, [(piece, _state_alike(optimizer, group, piece))], group)
    if "train" in modes_of(optimizer):
        _call(twin, "train")
    for gradient in gradients:
        piece.grad = gradient.clone()
        _call(twin, "step")
    return twin


def _call(twin: torch.optim.Optimizer, method: str) -> None:
    """Calls a method of a copy, without torch.compile. Raises ConfigError if that fails."""
    try:
        with torch.compiler.set_stance("force_eager"):
            getattr(twin, method)()
    except Exception as error:
        raise ConfigError(
            f"{type(twin).__name__}.{method}() failed on a small tensor, on which em.wrap checks that it treats each "
            f"element by itself: {type(error).__name__}: {error}; use an optimizer of torch.optim, such as AdamW"
        ) from error


def _state_alike(optimizer: torch.optim.Optimizer, group: dict[str, Any], piece: nn.Parameter) -> dict[str, Any]:
    """Returns the state that the constructor gave the group's first non-empty parameter, in the shape of `piece`."""
    first = next((p for p in group["params"] if p.numel()), piece)
    return {
        name: torch.full_like(piece, value.flatten()[0].item()) if is_cut(name, value, first.shape) else copy(value)
        for name, value in optimizer.state.get(first, {}).items()
    }


def is_cut(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether a value that an optimizer keeps for a parameter of `shape` has one element per element of the parameter.

    A 0-dim value of a 0-dim parameter counts, except for the number of steps, which torch keeps as a 0-dim tensor.
    """
    return isinstance(value, torch.Tensor) and value.shape == shape and (value.dim() > 0 or name != "step")


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `AdamUpdate` computes the same as this optimizer, or as its elementwise member."""
    elementwise = elementwise_of(optimizer)
    plain = type(elementwise) in (torch.optim.Adam, torch.optim.AdamW)
    return plain and elementwise is not None and not any(group["amsgrad"] for group in elementwise.param_groups)


def updates_on_disk(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can update chunks on disk: Adam and Muon can."""
    return elementwise_of(optimizer) is None or is_adam(optimizer)


def like(
    inner: torch.optim.Optimizer, pieces: list[tuple[nn.Parameter, dict[str, Any]]], group: dict[str, Any]
) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class and settings on other parameters, without calling its constructor."""
    twin = object.__new__(type(inner))
    twin.__dict__.update({name: value for name, value in inner.__dict__.items() if name not in REPLACED})
    twin.param_groups = [{**group, "params": [piece for piece, _ in pieces]}]
    twin.state = defaultdict(dict, {piece: state for piece, state in pieces if state})
    twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return twin
