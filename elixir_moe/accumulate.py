"""`accumulate`: forward and backward of several micro-batches that pass each layer together.

Owns the arguments, the passes that `Plan.batches_per_pass` divides them into, and the surroundings of each micro-batch
(torch's modes of a thread, its random state). `runtime.hooks` runs the forwards of a pass in turns.

All micro-batches pass a layer before the weights of the next are gathered, and one backward of all losses goes back in
the same way, since autograd takes the nodes made last first. So each weight is gathered once in forward and once in
backward, and each gradient is reduced once.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from numbers import Real
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from elixir_moe.accelerator import exchange_states, on_same_stream, seeded_states
from elixir_moe.chunks.cache_policy import Schedule
from elixir_moe.distributed.all_ranks import agree
from elixir_moe.errors import UsageError
from elixir_moe.state.wrapped import Wrapped, require_wrapped
from elixir_moe.torch_private import (
    DeviceContext,
    DisableTorchFunctionSubclass,
    dispatch_depth,
    function_modes,
    top_saved_tensors_hooks,
)


def accumulate(
    model: nn.Module,
    step: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Any],
    *,
    weights: Iterable[float | Tensor] | None = None,
) -> list[Tensor]:
    """Does what ``(step(model, batch) * weight).backward()`` does for each batch, and moves each weight only once.

    All batches pass a layer before the weights of the next layer are gathered: a step gathers, fetches and reduces as
    much as a step of one batch. The price is memory: what autograd keeps of all batches is there at once, and gradients
    of 16 bits are summed in fp32 in device memory while backward is in their layer. `Plan.batches_per_pass` lets fewer
    batches pass together. With one batch, or under a plan that keeps all weights gathered, this is the plain loop.

    It may be called several times before ``optimizer.step()``. Collective: all ranks pass equally many batches.

    Each batch has random states of its own, for the host and the device, drawn from torch's generator of the host: so
    dropout does not depend on the plan. One batch uses the present states.

    `step` runs on a thread of its own for each batch, one at a time. It must keep nothing on modules, or in a list that
    a forward hook fills, from one layer to a later one; what it changes for all batches, such as `model.eval()`, peft's
    `disable_adapter()` or `torch.backends`, belongs around this call. A lock that `step` holds while a layer runs must
    not be one that other batches wait for: they would wait forever.

    Args:
        model: a wrapped model.
        step: the loss of a batch, a scalar; it must not call backward or the optimizer.
        batches: the micro-batches of this rank, of any shapes.
        weights: the factor of each loss, for example its share of all tokens; by default 1 / number of batches. With
            fp16, multiply them by the loss scale: ``optimizer.scale(weight)``.

    Returns:
        The losses without their weights, detached.

    Raises:
        UsageError: the model is not wrapped; there are no batches, or not as many weights, or one is not finite; `step`
            returns anything but a scalar with a graph; ranks have different numbers of batches; `step` starts threads,
            calls backward, the optimizer, `em.save` or `em.load`; or the first call with this step finds that one batch
            changes what another then reads: a tensor that a module keeps, ``training``, or ``requires_grad``.
    """
    wrapped = require_wrapped(model, "accumulate", ": without wrap, call backward for each batch")
    if isinstance(batches, Mapping):
        raise UsageError(
            f"accumulate got one {type(batches).__name__} as batches: pass a list of batches, [batch] if it is one"
        )
    given = list(batches)
    factors = [1 / len(given) for _ in given] if weights is None else list(weights)
    together = wrapped.plan.batches_together(wrapped.layout, len(given)) if _can_take_turns() else 1
    if len(wrapped.spec.ranks) > 1:
        agree(
            "em.accumulate",
            {
                "number of batches": len(given),
                "number of weights": len(factors),
                "number of weights that are finite": sum(map(_is_weight, factors)),
                "number of batches that pass each layer together": together,
            },
            wrapped.groups.peers_group,
            remedy="pass equally many on every rank, an empty one with weight 0 where there are fewer",
        )
    if not given:
        raise UsageError("accumulate got no batches: expected at least one")
    if len(factors) != len(given):
        raise UsageError(f"accumulate got {len(given)} batches and {len(factors)} weights: expected a weight for each")
    for factor in factors:
        if not _is_weight(factor):
            raise UsageError(
                f"accumulate got the weight {factor!r}: expected a finite number, or a tensor with one element"
            )
    if len(given) == 1:
        return _backward([_loss(step, model, given[0])], factors)
    states = [seeded_states(seed) for seed in torch.randint(2**62, (len(given),)).tolist()]
    losses = []
    for first in range(0, len(given), together):
        these, is_last = slice(first, first + together), first + together >= len(given)
        with nullcontext() if is_last else wrapped.scheduler.reductions.before_others():
            losses += _backward(_losses(wrapped, step, model, given[these], states[these]), factors[these])
    return losses


def _is_weight(factor: object) -> bool:
    """Whether a number, or a tensor with one element, is finite; the host does not wait for a device."""
    if isinstance(factor, Tensor):
        return factor.numel() == 1 and (factor.device.type != "cpu" or bool(factor.isfinite()))
    return isinstance(factor, Real) and math.isfinite(factor)


def _losses(
    wrapped: Wrapped,
    step: Callable[[nn.Module, Any], Tensor],
    model: nn.Module,
    batches: Sequence[Any],
    states: list[dict[str, Tensor]],
) -> list[Tensor]:
    """The losses of micro-batches that pass each layer together."""
    if len(batches) == 1:
        outside = exchange_states(states[0])
        try:
            return [_loss(step, model, batches[0])]
        finally:
            exchange_states(outside)
    around = _surroundings(wrapped.scheduler.chunks[0].device)
    outside = {}
    kind = _kind_of(step)
    watch = None if kind in wrapped.passed_together else _Watch(model)

    def forward(batch: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            with around():
                return _loss(step, model, batch)

        return run

    def resume(number: int) -> None:
        if watch is not None:
            watch.resume(number)
        torch.clear_autocast_cache()  # all threads share it, and so would the gradients of cast weights
        outside.update(exchange_states(states[number]))

    def suspend(number: int) -> None:
        states[number] = exchange_states(outside)
        outside.clear()
        if watch is not None:
            watch.suspend(number)

    def predict() -> Schedule | None:
        order = wrapped.spec.step_order
        return order.schedule(wrapped.layout, len(batches)) if order.observed else None

    try:
        losses = wrapped.hooks.run_in_turns([forward(batch) for batch in batches], predict, resume, suspend)
    finally:
        exchange_states(outside)
    wrapped.passed_together.add(kind)
    return losses


def _kind_of(step: Callable[..., Any]) -> Hashable:
    """The code of a step with the functions and switches that it was made with, or else the callable itself."""
    if isinstance(step, partial):
        return _kind_of(step.func), *map(_kind_of_bound, (*step.args, *step.keywords.values()))
    code = getattr(step, "__code__", None)
    if code is None:
        return step if isinstance(step, Hashable) else type(step)
    return code, *(_kind_of_bound(cell.cell_contents) for cell in getattr(step, "__closure__", None) or ())


def _kind_of_bound(value: object) -> Hashable:
    if isinstance(value, (bool, str)):
        return value
    kind: Hashable = getattr(value, "__code__", None) or type(value).__qualname__
    return kind


def _can_take_turns() -> bool:
    """Whether another thread can have the modes of this one: a default device and saved-tensor hooks, but no others."""
    modes = function_modes()
    return not (
        dispatch_depth()
        or torch.is_inference_mode_enabled()
        or len(modes) > 1
        or any(not isinstance(mode, DeviceContext) for mode in modes)
    )


def _surroundings(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Returns what makes, on another thread, a context with the modes of this one."""
    with_grad, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    kinds = [kind for kind in {"cpu", device.type} if torch.amp.is_autocast_available(kind)]
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)]
    default_device = torch.get_default_device() if function_modes() else None
    saved, stream = top_saved_tensors_hooks(True), on_same_stream(device)

    @contextmanager
    def around() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(with_grad))
            stack.enter_context(stream())
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cache))
            if default_device is not None:
                stack.enter_context(default_device)
            if saved is not None:
                stack.enter_context(saved_tensors_hooks(*saved))
            yield

    return around


def _loss(step: Callable[[nn.Module, Any], Tensor], model: nn.Module, batch: Any) -> Tensor:
    loss = step(model, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UsageError(f"the step of accumulate returned {what}: expected the loss, a scalar with a graph")
    return loss


def _backward(losses: Sequence[Tensor], factors: Sequence[float | Tensor]) -> list[Tensor]:
    """Runs one backward of all losses, times their factors; returns the losses without their graphs."""
    ones = [
        torch.as_tensor(factor, dtype=loss.dtype, device=loss.device).detach().reshape(loss.shape)
        for loss, factor in zip(losses, factors, strict=True)
    ]
    torch.autograd.backward(losses, ones)
    return [loss.detach() for loss in losses]


_HOOKS = {key for key, value in vars(nn.Module()).items() if isinstance(value, dict)} - {"_parameters"}
"""Where modules keep hooks and each other, but no tensors, and buffers, which are looked at by themselves."""
_WATCHED = 2
"""Batches that `_Watch` looks at. A look takes milliseconds where there are thousands of modules."""


class _Watch:
    """Refuses a batch that continues with modules that another batch has changed meanwhile.

    It looks at modules before and after the turns of two batches, between which all others have theirs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._places = list(_places_of(self._modules))
        self._left: dict[int, dict[tuple[str, object], object]] = {}
        """By batch: the state of the modules when its turn ended."""

    def suspend(self, number: int) -> None:
        """Notes the state that a batch leaves."""
        if number < _WATCHED:
            self._left[number] = dict(self._state())

    def resume(self, number: int) -> None:
        """Raises UsageError if a batch, unless it is new, finds another state."""
        left = self._left.get(number)
        if left is None:
            return
        found = dict(self._state())
        for name, key in left | found:
            if left.get((name, key)) is not found.get((name, key)):
                raise UsageError(
                    f"the step changes {key!r} of module {name!r} while another batch is in a later layer, which then "
                    f"reads it: return the tensor instead of keeping it, and call train(), eval() or another switch "
                    f"outside of the step; or call backward for each batch"
                )

    def _state(self) -> Iterator[tuple[tuple[str, object], object]]:
        """Yields what these places keep, whether modules are in training and what is trainable.

        They keep tensors, and the generator of a layer that torch's composable `checkpoint` recomputes. Tensors of
        integers are taken for counts, which no layer reads.
        """
        with DisableTorchFunctionSubclass():  # wrapped parameters take 20 us for each question otherwise
            for name, place in self._places:
                for key, value in list(place.items()) if isinstance(place, dict) else enumerate(place):
                    kept = isinstance(value, Tensor) and (value.is_floating_point() or value.dtype is torch.bool)
                    if kept or isinstance(value, GeneratorType):
                        yield (name, key), value
            for name, module in self._modules:
                yield (name, "training"), module.training
                for key, p in module._parameters.items():
                    if p is not None:
                        yield (name, f"{key}.requires_grad"), p.requires_grad


def _places_of(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, dict[Any, Any] | list[Any]]]:
    """(name, place) wherever modules may keep tensors: attributes, buffers, lists, dicts and objects on them.

    Objects in dicts are looked at too.
    """
    seen = set()
    for name, module in modules:
        yield name, vars(module)
        yield name, module._buffers
        for key, value in vars(module).items():
            if key in _HOOKS:
                continue
            objects = value.values() if isinstance(value, dict) else ()
            for at in (value, *(at for at in objects if hasattr(at, "__dict__"))):
                place = at if isinstance(at, (dict, list)) else getattr(at, "__dict__", None)
                if place is not None and not isinstance(at, (Tensor, nn.Module, type)) and id(place) not in seen:
                    seen.add(id(place))
                    yield f"{name}.{key}".lstrip("."), place
