"""The sharded optimizer: the user's optimizer on the master shards.

Owns the methods that a user calls, and the order of a step: agree (`agreement`), drop weights that become stale, update
shard by shard (`shard_update`). Its state is read and replaced through `state`. Never requests a gather.

A parameter that got no gradient on any rank is not updated, as in torch where ``grad is None``. A gradient that only
some ranks have counts as zero on the others; where backward gathers weights again, only experts may have such gradients
(`runtime.peers`). `step` clears the gradients, so they do not accumulate if `zero_grad` is forgotten.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from elixir_moe.chunks.plan import Tier
from elixir_moe.distributed.all_ranks import ControlGroups
from elixir_moe.distributed.async_copy import copy_to_host_async
from elixir_moe.distributed.collectives import Communicator
from elixir_moe.distributed.waits import Wait
from elixir_moe.errors import ConfigError, ElixirError, UsageError
from elixir_moe.kernels import work_on
from elixir_moe.memory.disk import DiskFile
from elixir_moe.optim.accepted import MODES, REPLACED, changes, modes_of
from elixir_moe.optim.agreement import Chosen, Facts, LossScale, StepDecision
from elixir_moe.optim.early import EarlyUpdates
from elixir_moe.optim.joined import members_of
from elixir_moe.optim.shard_update import AdamUpdate, ElementwiseUpdate, TrainedPiece, trained_pieces
from elixir_moe.optim.state import LastStep, OptimizerState
from elixir_moe.optim.updates import Updates
from elixir_moe.parallel.megatron import Routers
from elixir_moe.runtime.chunk import Chunk
from elixir_moe.runtime.hooks import Hooks, gone_since_wrap, gradients_set_by_hand, moved_since_wrap
from elixir_moe.runtime.param_access import refuse_copy
from elixir_moe.runtime.phase import BROKEN, CLOSED, READY, REDUCED, STEPPABLE, WHOLE
from elixir_moe.runtime.scheduler import Scheduler
from elixir_moe.spans import in_span
from elixir_moe.torch_private import DisableTorchFunctionSubclass, mark_stepped, replace_methods


class _StateInShards(dict[Any, Any]):
    """An empty state that refuses every access; torch would otherwise initialize it with a step at rate 0."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UsageError(
            "a sharded optimizer's state is kept in shards, not in optimizer.state, where get_optimizer_state_dict and "
            "set_optimizer_state_dict of torch.distributed.checkpoint look for it: save model and optimizer with "
            "em.save, and load them with em.load; options are in optimizer.param_groups"
        )

    __bool__ = __missing__ = _refuse


class ShardedOptimizer(torch.optim.Optimizer):
    """The optimizer that `wrap` returns in place of the user's; shares its `param_groups`."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        scheduler: Scheduler,
        hooks: Hooks,
        groups: ControlGroups,
        files: Sequence[DiskFile],
        routers: Routers,
        on_device: Communicator | None,
        *,
        seed: int,
    ) -> None:
        """`on_device` sums the norm over all ranks of the model on the device; given only if the norm is the one thing
        for which the host would wait. `seed` is that of stochastic rounding.
        """
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.state = _StateInShards()  # type: ignore[assignment]
        self._inner = inner
        self._scheduler = scheduler
        self._phase = scheduler.phase
        self._hooks = hooks
        self._groups = groups
        self._files = files
        self._routers = routers
        self._chunks = [chunk for chunk in scheduler.chunks if chunk.spec.key.trainable]
        self._parameters = [p for chunk in self._chunks for p in chunk.parameters]
        self._frozen = [p for chunk in scheduler.chunks if not chunk.spec.key.trainable for p in chunk.parameters]
        pieces = trained_pieces(self._chunks, self.param_groups, hooks.name_of)
        self._pieces = {chunk.spec.index: mine for chunk, mine in zip(self._chunks, pieces, strict=True)}
        self._updates = Updates(inner, self._chunks, pieces, self.param_groups, scheduler.whole_updates, seed)
        elementwise = self._updates.elementwise
        there = bool(self._chunks) and all(chunk.shard.tier is Tier.DEVICE for chunk in self._chunks)
        skips = there and isinstance(elementwise, AdamUpdate) and self._updates.whole is None
        if not skips or (on_device is not None and on_device.over_gloo):
            on_device = None
        self._update_thread = None
        """The thread that runs updates of chunks in host memory and starts those on disk."""
        self._early: EarlyUpdates | None = None
        if isinstance(elementwise, AdamUpdate) and any(c.shard.tier is not Tier.DEVICE for c in self._chunks):
            self._update_thread = ThreadPoolExecutor(1, "elixir-update", work_on, (self._chunks[0].device,))
            self._early = EarlyUpdates(scheduler, elementwise, self._pieces, self.param_groups, self._update_thread)
        self._decision = StepDecision(inner, self._chunks, scheduler, hooks, groups, routers, on_device, self._early)
        self._kept = OptimizerState(
            inner, self._updates, self._chunks, self._pieces, self._decision, scheduler, hooks, groups
        )
        self._grouping = [[id(p) for p in group["params"]] for group in self.param_groups]
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks

    # -------------------------------------------------------------------------------------------------- user's verbs

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of fp16 parameters; None if there are none."""
        return self._decision.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: LossScale | None) -> None:
        self._decision.loss_scale = scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiplies `loss` by the loss scale; needed before `backward` with fp16 parameters, else the identity."""
        return self._decision.scale(loss)

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        parameters: Iterable[torch.Tensor] | torch.Tensor | None = None,
        norm_type: float = 2.0,
    ) -> torch.Tensor:
        """Scales the gradients so that their global norm is at most `max_norm`; returns the norm before, a scalar.

        The norm is that of the logical model: shards, experts and replicas of all ranks, each element once. The scaling
        happens in `step`; a backward in between is an error, whether the limit was reached or not. An infinite limit
        clips nothing and only returns the norm, at any time. If all state of Adam is on the GPU, so is the norm, and
        the host does not wait for it. Collective.

        Args:
            max_norm: the limit.
            parameters: clip only these parameters of the model, by their own norm. The host waits for that norm, and
                gradients are scaled immediately, in their dtype.
            norm_type: 2. One sum over all ranks has no norm of another degree.

        Raises:
            UsageError: a parameter is not the model's, ranks pass different parameters or limits, or `norm_type` is not
                2.
        """
        if norm_type != 2:
            raise UsageError(
                f"norm_type={norm_type}: gradients are clipped by the norm of degree 2; leave norm_type out, or clip "
                f"each element with clip_grad_value_"
            )
        limit = _limit("clip_grad_norm_(max_norm", max_norm)
        self._kept.check_last_step()
        chosen = self._chosen("clip_grad_norm_", parameters)
        norm = self._decision.clip(limit) if chosen.whole else self._decision.clip_part(limit, chosen)
        return norm.float() if isinstance(norm, torch.Tensor) else torch.tensor(norm, device="cpu")

    @torch.no_grad()
    def clip_grad_value_(
        self, clip_value: float, parameters: Iterable[torch.Tensor] | torch.Tensor | None = None
    ) -> None:
        """Clamps every element of the gradients to at most `clip_value` away from 0, in the gradients' dtype.

        A backward afterwards is an error, as after `clip_grad_norm_`. Collective.

        Args:
            clip_value: the limit.
            parameters: clip only the gradients of these parameters of the model.

        Raises:
            UsageError: a parameter is not the model's, or ranks pass different parameters or limits.
        """
        self._kept.check_last_step()
        chosen = self._chosen("clip_grad_value_", parameters)
        self._decision.clip_values(_limit("clip_grad_value_(clip_value", clip_value), chosen)

    @torch.no_grad()
    def grad_norms(self) -> dict[str, float]:
        """Returns {name: norm of the logical parameter's gradient over all ranks}.

        Parameters without a gradient are left out. Call it where `step` could be called; earlier clipping is included.
        Collective.
        """
        self._kept.check_last_step()
        return self._decision.norms()

    @contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """Starts updates in the last backward of a step that clips no gradient; a context around that backward.

        An update of Adam in host memory or on disk begins when all gradients of its chunk are in its shard, but not in
        the very first backward and the first one of each 64th step after it, which look for writes to weights. `step`
        must follow; it updates the rest. The result is the same to the bit. If all state is on the device, or the
        optimizer is not Adam, the context does nothing.

        Until `step`, another backward, clipping, `grad_norms`, a change of `param_groups`, `zero_grad`, `em.save`, a
        write to an updated chunk and its gather are errors. If the backward fails, or the norm is not finite after
        updates have begun, the run must continue from a checkpoint (`em.load`). Collective, as backward and `step` are.

        Raises:
            UsageError: fp16 with a loss scale; gradients were clipped or lost; or the cases of `step`.
        """
        if self.loss_scale is not None:
            raise UsageError(
                "optimizer.update_in_backward() with a loss scale: an overflow must be detected before any update. "
                "Train in bf16, or leave the context out"
            )
        self._kept.check_last_step()
        self._phase.require((READY, REDUCED), "optimizer.update_in_backward()")
        self._check_parameters()
        with nullcontext() if self._early is None else self._early.open(self._decision.gradient_scale):
            yield

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters and clears the gradients. Collective.

        Adam's updates of chunks in host memory or on disk may still run when it returns, in the order in which the next
        forward needs the chunks; every access to a chunk waits for its update. The result equals that of sequential
        updates to the bit.

        With fp16 parameters the update is skipped on all ranks if any gradient overflowed.

        If all state of Adam is on GPUs, the host does not wait: the GPUs skip an update whose norm is not finite, and
        the next call of the optimizer, a save or a load raises the error.

        Raises:
            UsageError: a parameter that was frozen in `wrap` is trainable now, a trainable one was added since, or one
                was replaced, tied, or moved in the model, for example by `apply_activation_checkpointing`;
                ``parameter.grad`` was set by hand; gradients came after clipping, or some were lost.
            ElixirError: a gradient is not finite; on all ranks, naming the parameters. No weight has changed, unless
                updates have begun in backward.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._kept.check_last_step()
        self._phase.require(STEPPABLE, "optimizer.step()")
        self._check_parameters()
        if self._early is not None:
            self._early.check_options()
        if isinstance(self._updates.elementwise, ElementwiseUpdate):
            self._updates.elementwise.check_mode()
        facts = self._decision.facts()
        norm = facts.norm
        skip = (~norm.isfinite()).float() if isinstance(norm, torch.Tensor) else None
        overflow = skip is None and not math.isfinite(norm)
        if overflow and self.loss_scale is None:
            raise ElixirError(self._decision.blame(facts))
        self._phase.write("optimizer.step()")
        self._decision.note_options()
        if not overflow:
            self._scheduler.gathers.drop()  # what backward left gathered would be stale
            self._scheduler.reductions.drain()  # gathers after the clipping may still read the shards
            changed = [p for chunk in self._in_order_of_use() for p in self._update_chunk(chunk, facts, skip)]
            for update in self._updates:
                update.finish()
            if isinstance(norm, torch.Tensor):
                self._kept.last_step = LastStep(copy_to_host_async(norm), changed)
        if self.loss_scale is not None:
            self.loss_scale.update(overflow)
        self._routers.end_step()
        self._decision.forget_gradients()
        self._hooks.updated()
        self._phase.written(self._phase.place[0] + 1)
        for member in members_of(self._inner):
            mark_stepped(member)  # for LR schedulers built before `wrap`
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients; parameters that get no new one are not updated, for either value of `set_to_none`."""
        self._phase.require((*WHOLE, BROKEN, CLOSED), "optimizer.zero_grad()")
        self._kept.give_up_gradients()

    if not TYPE_CHECKING:  # else every attribute would pass the type check

        def __getattr__(self, name: str) -> Any:
            """Returns a method that only the user's optimizer has; calling one that is not in `MODES` is refused."""
            inner = self.__dict__.get("_inner")
            if name.startswith("_") or not callable(getattr(type(inner), name, None)):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return partial(self._switch if name in MODES else self._refuse_method, name)

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        """Calls `train` or `eval` of the user's optimizer on its pieces if that changes anything. Collective.

        Raises UsageError if there are gradients that `step` has not used.
        """
        if not changes(self._inner, mode):
            return
        update = self._updates.elementwise
        assert isinstance(update, ElementwiseUpdate), "torch's Adam has no modes"
        what = f"optimizer.{mode}()"
        self._phase.require((READY,), what)
        with Wait(f"the call of {what} by all ranks"):
            self._phase.agree(self._groups.peers_group)
        self._scheduler.writes.keep_all()
        self._phase.write(what)
        self._scheduler.gathers.drop()
        self._scheduler.reductions.drain()
        for chunk in self._chunks:
            chunk.shard.open_for_writing()
        update.switch(mode, self._chunks)
        update.finish(mode)
        for chunk in self._chunks:
            chunk.shard.updated()
        self._hooks.updated()
        self._phase.written(self._phase.place[0])

    def _refuse_method(self, name: str, *_: Any, **__: Any) -> NoReturn:
        kind = type(self._inner).__name__
        raise UsageError(
            f"optimizer.{name}() of {kind} after wrap: a rank holds only pieces of weights and state, on which "
            f"em.wrap supports {kind}'s step(), train() and eval(): call {name}() before wrap, or set options in "
            f"optimizer.param_groups"
        )

    def close(self) -> None:
        """Destroys the process groups `wrap` made; model and optimizer are unusable afterwards. Collective.

        Raises the error of a failed save, update or collective after everything is closed.
        """
        if self._phase.now is CLOSED:
            return
        with ExitStack() as ends:  # the last one is called first, and each is called even if others fail
            ends.callback(self._kept.check_last_step)
            for chunk in self._chunks:
                ends.callback(chunk.shard.finish_update)
            for communicator in self._scheduler.communicators:
                ends.callback(communicator.close)
            ends.callback(self._groups.close)
            for file in reversed(self._files):  # closing the first waits for its threads, which write the second
                ends.callback(file.close)
            if self._scheduler.reductions.sums is not None:
                ends.callback(self._scheduler.reductions.sums.close)
            if self._update_thread is not None:
                ends.callback(self._update_thread.shutdown)
            ends.callback(self._phase.move, CLOSED)
            ends.callback(self._scheduler.reductions.drain)
            ends.callback(self._hooks.forget_calls)
            if self._kept.pending is not None:
                ends.callback(self._kept.pending.result)

    def state_dict(self) -> dict[str, Any]:
        """Raises UsageError: a rank holds only its shards, and the plan decides how they are cut."""
        raise UsageError(
            "a sharded optimizer has no state_dict(): save model and optimizer with em.save; its options are in "
            "optimizer.param_groups"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises UsageError, as `state_dict` does; `wrap` also refuses an optimizer that has loaded one."""
        raise UsageError("a sharded optimizer has no load_state_dict(): save with em.save, and resume with em.load")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError once the optimizer is built: chunks are packed in `wrap`."""
        if hasattr(self, "_scheduler"):
            raise UsageError("add_param_group after wrap: add the group to the optimizer before wrapping it")
        super().add_param_group(param_group)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses copies and pickles, as the model does."""
        refuse_copy()

    # ------------------------------------------------------------------------------------------------------- helpers

    def _chosen(self, method: str, given: Iterable[torch.Tensor] | torch.Tensor | None) -> Chosen:
        """Returns the trainable parameters among those passed to a clipping; None selects all."""
        mine = set(self._parameters)
        if given is None:
            return Chosen(parameters=mine, whole=True)
        all_given = {given} if isinstance(given, torch.Tensor) else set(given)
        foreign, error = all_given - mine - set(self._frozen), None
        if foreign:
            error = UsageError(
                f"optimizer.{method}(): {len(foreign)} of {len(all_given)} parameters do not belong to the wrapped "
                f"model; clip them separately, with torch.nn.utils"
            )
        return Chosen(parameters=mine & all_given, whole=not foreign and all_given >= mine, error=error)

    def _check_parameters(self) -> None:
        """Raises UsageError for parameters that have changed since `wrap`, or whose ``grad`` was set by hand."""
        self._scheduler.writes.keep_all()
        with DisableTorchFunctionSubclass():
            thawed = [self._hooks.name_of(p) for p in self._frozen if p.requires_grad]
            own = [self._hooks.name_of(p) for p in self._parameters if p.grad is not None]
        if (name := self._scheduler.gathers.moved()) is not None:
            raise UsageError(
                f"a forward has replaced the memory of parameter {name!r} (parameter.data = …): copy the values into "
                f"the parameter itself under torch.no_grad(), as in self.weight.copy_(values)"
            )
        new, moved, replaced = self._hooks.changed_parameters()
        if new:
            raise UsageError(
                f"the model has trainable parameters that were not there in wrap: {new}; add and replace modules "
                f"and parametrizations before wrap"
            )
        if moved:
            raise UsageError(moved_since_wrap(moved))
        if replaced:
            raise UsageError(gone_since_wrap(replaced))
        if thawed:
            raise UsageError(
                f"parameters were frozen when wrapped and are trainable now: {thawed}; unfreeze before wrap"
            )
        if [[id(p) for p in group["params"]] for group in self.param_groups] != self._grouping:
            raise UsageError("the parameters of param_groups were changed after wrap: only options may change")
        for member in members_of(self._inner):
            if not {id(group) for group in member.param_groups} <= {id(group) for group in self.param_groups}:
                raise UsageError(
                    f"{type(member).__name__} got other param_groups after wrap, by add_param_group or "
                    f"load_state_dict: add groups before wrap, load with em.load, and set options in "
                    f"optimizer.param_groups"
                )
        if self._updates.whole is not None:
            self._updates.whole.check_fixed()
        if isinstance(self._updates.elementwise, AdamUpdate) and any(
            group.get("amsgrad") for group in self.param_groups
        ):
            raise UsageError("amsgrad was turned on after wrap, which allocated no memory for it: turn it on before")
        if own:
            raise UsageError(gradients_set_by_hand(own))

    def _update_chunk(self, chunk: Chunk, facts: Facts, skip: torch.Tensor | None) -> list[TrainedPiece]:
        """Updates a chunk, or begins to; returns the pieces whose steps were counted."""
        shard, pieces = chunk.shard, self._pieces[chunk.spec.index]
        if not shard.has_gradient:
            return []
        if self._early is not None and chunk in self._early:
            shard.updated()
        else:
            self._begin_update(chunk, facts, skip)
        changed = [piece for piece in pieces if piece.parameter in facts.used]
        for piece in changed:
            piece.steps += 1
        return changed

    def _begin_update(self, chunk: Chunk, facts: Facts, skip: torch.Tensor | None) -> None:
        shard, pieces = chunk.shard, self._pieces[chunk.spec.index]
        shard.open_for_writing()
        scale = self._decision.gradient_scale(chunk)
        work = self._updates.of(chunk).prepare(chunk, pieces, facts.used, scale, skip)
        update = partial(in_span, "update", chunk.label, work)
        if self._update_thread is not None and shard.tier is not Tier.DEVICE and not chunk.spec.key.optimizer:
            shard.update_async(self._update_thread.submit(update))
        else:
            update()
            shard.updated()

    def _in_order_of_use(self) -> list[Chunk]:
        """Lists chunks in the order in which the next forward requests them; chunks without requests come first.

        Chunks of whole matrices are updated together by several ranks, and come last, in one order on all ranks.
        """
        first: dict[int, int] = {}
        if (schedule := self._scheduler.cache.schedule) is not None:
            for entry in schedule.entries:
                for index in entry.chunks:
                    first.setdefault(index, len(first))

        def place(chunk: Chunk) -> tuple[bool, int, int]:
            index, together = chunk.spec.index, bool(chunk.spec.key.optimizer)
            return together, 0 if together else first.get(index, -1), index

        return sorted(self._chunks, key=place)


def refuse_given(given: torch.optim.Optimizer) -> None:
    """Makes the optimizers that `wrap` was given refuse to step: they find no gradients, and would change nothing."""
    for member in members_of(given):
        kind = type(member).__name__
        names = [name for name in REPLACED if name not in MODES or name in modes_of(member)]
        replace_methods(member, {name: partial(_refuse_given, kind, name) for name in names})


def _refuse_given(kind: str, name: str, *_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        f"{name}() of the {kind} that em.wrap was given: its gradients, weights and state are in shards now. Call "
        f"{name}() of the optimizer that em.wrap returned, as in model, optimizer = em.wrap(...); optimizer.{name}()"
    )


def _limit(argument: str, given: Any) -> float:
    """Converts the limit of a clipping to a float. Raises ConfigError if that fails."""
    try:
        limit = float(given)
    except (TypeError, ValueError, OverflowError):
        limit = math.nan
    if not limit >= 0:
        raise ConfigError(f"{argument}={given!r}): expected a number of at least 0")
    return limit
