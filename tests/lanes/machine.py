"""A GPU's order of events on a CPU: the library runs as it is, and every use of memory is noted on its lane.

Owns the stand-ins for streams and events, the marks of device and host memory, the lanes of threads and collectives.
Decides nothing: `memory` says what is a race.

``cpu:0`` stands for the GPU and ``cpu`` for the host: torch takes both for the CPU and keeps the index in the arguments
of factories. While a machine runs, new tensors are on the GPU unless their factory names the host.

    lane              runs                                           is ordered
    a stream          operators on device memory, in issue order     behind the thread that issued, and by events
    a thread          operators and native calls on host memory      by results of futures and by events of threads
    a collective      what was issued with ``async_op``              behind the issuing lane; before who waits for it

In `late_compute` a machine runs compute as late as events allow, on real data, and all other streams at once. That is
what a GPU does: compute is the long queue, and the other streams have little to do.
"""

import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from elixir_moe import accelerator, kernels
from elixir_moe.memory import blocks
from elixir_moe.memory.disk import DiskFile, DiskStore
from elixir_moe.memory.disk_values import ValuesFile
from elixir_moe.memory.gate import Gate
from elixir_moe.runtime.hooks import Hooks
from elixir_moe.runtime.streams import Streams
from tests.lanes.late import LateEvent, LateStream, issue_in_order, step_by_numbers
from tests.lanes.memory import Clock, Lane, Memory, Span

GPU = torch.device("cpu", 0)
HOST = torch.device("cpu")
HOST_LANE = "host"
"""Name of the lane of the thread that trains."""
_FILE = 1 << 60
"""Where the bytes of files are taken to be."""
_WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero"}
"""Operators that bring something to the host."""
_METADATA = {"set_", "resize_"}
"""Operators that change what a tensor is a view of, which the host knows at once."""
_PLAIN = torch.Tensor.__torch_dispatch__
_COLLECTIVES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "all_gather_into_tensor": ((0,), (1,)),
    "all_gather_single": ((0,), (1,)),
    "reduce_scatter_tensor": ((0,), (1,)),
    "reduce_scatter_single": ((0,), (1,)),
    "all_to_all_single": ((0,), (1,)),
    "all_gather": ((0,), (1,)),
    "all_reduce": ((0,), ()),
    "broadcast": ((0,), ()),
}
"""Arguments that are written, and that are read."""


class Stream:
    """Stands for `torch.cuda.Stream`."""

    _numbers = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
        self.device = torch.device("cuda", 0)
        self.lane = Lane(name or f"stream {next(self._numbers)}")
        self.queue = LateStream(late=False)

    def record_event(self) -> "Event":
        """All that was issued so far."""
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Orders what is issued next behind the event; only the training thread knows what is issued next."""
        machine = Machine.running()
        if machine.thread.name != HOST_LANE:
            machine.memory.races.append(f"a thread beside training makes {self.lane.name} wait")
        self.lane.after(event.clock)
        self.queue.give(event.reach)

    def wait_stream(self, other: "Stream") -> None:
        """Orders what is issued next behind all that the other stream was given so far."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """The host waits."""
        Machine.running().wait(self.lane.now(), "Stream.synchronize")
        self.queue.synchronize()


class Event:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.clock: Clock = {}
        self._reached: LateEvent | None = None

    def record(self, stream: Stream) -> None:
        """All that was issued to the stream so far."""
        self.clock, self._reached = stream.lane.now(), stream.queue.record_event()

    def reach(self) -> None:
        """Runs all that the event stands for."""
        if self._reached is not None:
            self._reached.synchronize()

    def synchronize(self) -> None:
        """The host waits."""
        Machine.running().wait(self.clock, "Event.synchronize")
        self.reach()


class _Issued:
    """Stands for the work of a collective."""

    def __init__(self, work: Any, clock: Clock, *, host: bool) -> None:
        self._work, self._clock, self._host = work, clock, host

    def wait(self, *args: Any) -> Any:
        """Orders the current stream, or the host, behind the collective."""
        machine = Machine.running()
        (machine.thread if self._host else machine.stream.lane).after(self._clock)
        return self._work.wait(*args)


class _Depth(threading.local):
    """A context that a thread may enter several times, one inside the other."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1

    @property
    def entered(self) -> bool:
        """Whether the running thread is inside."""
        return self.depth > 0


class Machine:
    """A host and a GPU, from `on` until its end."""

    _running: "Machine | None" = None

    def __init__(self) -> None:
        self.memory = Memory()
        self.waits: list[str] = []
        """What the host has waited for the device for."""
        self.issued: list[tuple[tuple[int, ...], str, int]] = []
        """(ranks, collective, elements or 0 if they differ) of all collectives on device memory, in order of issue."""
        self.compute, self.side = Stream(name="compute"), Stream(name="a second compute stream")
        self._threads: dict[int, Lane] = {}
        self._streams: dict[int, list[Stream]] = defaultdict(lambda: [self.compute])
        self.quiet = _Depth()
        """Inside, operators of the thread are not recorded: somebody has done so."""
        self.naming_host = _Depth()
        """Inside, new memory of the thread is the host's."""
        self._messages: list[Lane] = []
        self._events: dict[int, Clock] = {}
        self._finished: dict[int, Clock] = {}
        self._stream_of: dict[Any, Stream] = {}

    @classmethod
    def running(cls) -> "Machine":
        """The machine that is on."""
        assert cls._running is not None
        return cls._running

    @contextmanager
    def late_compute(self) -> Iterator[None]:
        """A context in which compute runs as late as events allow."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "storage_uses", lambda tensor: 0)  # operations that wait hold their tensors
            for stream in (self.compute, self.side):
                patch.setattr(stream.queue, "late", True)
            try:
                yield
            finally:
                for stream in (self.compute, self.side):
                    stream.queue.synchronize()

    # ------------------------------------------------------------------------------------------------------ lanes

    @property
    def thread(self) -> Lane:
        """The lane of the running thread."""
        ident = threading.get_ident()
        if ident not in self._threads:
            main = threading.main_thread().ident
            self._threads[ident] = Lane(HOST_LANE if ident == main else f"thread {len(self._threads)}")
        return self._threads[ident]

    @property
    def stream(self) -> Stream:
        """The current stream of the running thread."""
        return self._streams[threading.get_ident()][-1]

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        """Stands for `torch.cuda.stream`."""
        stack = self._streams[threading.get_ident()]
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    @contextmanager
    def beside(self, given: torch.Tensor, made: list[torch.Tensor]) -> Iterator[None]:
        """A context whose forward and backward run on a second compute stream, as in Megatron-core's shared experts.

        `given` goes in; what comes out is to be appended to `made`, and used after `join`. As in torch, the backward of
        an operator runs on the stream of its forward, and waits for the stream of the gradient it gets.
        """
        main, side = self.stream, self.side
        side.wait_stream(main)
        given.record_stream(side)  # type: ignore[arg-type]
        with self.on_stream(side):
            yield
        (out,) = made
        before = {given.grad_fn}
        todo, seen = [out.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in before or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):  # it accumulates a gradient, on the stream of the parameter's first use
                self._stream_of[id(node.variable)] = self.side
            following = [after for after, _ in node.next_functions]
            todo += following
            first, last = node is out.grad_fn, not before.isdisjoint(following)
            node.register_prehook(partial(self._enter_side, main, first))
            node.register_hook(partial(self._leave_side, main, last))

    @contextmanager
    def aside(self, given: torch.Tensor) -> Iterator[None]:
        """A context whose work goes to the second compute stream, behind what was issued; nobody waits for it."""
        self.side.wait_stream(self.stream)
        given.record_stream(self.side)  # type: ignore[arg-type]
        with self.on_stream(self.side):
            yield

    def join(self, made: torch.Tensor) -> torch.Tensor:
        """What the second compute stream has made, for use on the current one."""
        self.stream.wait_stream(self.side)
        made.record_stream(self.stream)  # type: ignore[arg-type]
        return made

    def _enter_side(self, main: Stream, first: bool, gradients: Any) -> None:
        if first:
            self.side.wait_stream(main)
            self._hand_over(gradients, self.side)
        self._streams[threading.get_ident()].append(self.side)

    def _leave_side(self, main: Stream, last: bool, gradients: Any, _: Any) -> None:
        self._streams[threading.get_ident()].pop()
        if last:
            main.wait_stream(self.side)
            self._hand_over(gradients, main)

    def _hand_over(self, gradients: Any, stream: Stream) -> None:
        for gradient in gradients:
            if gradient is not None:
                self.span_of(gradient).lent.append(stream.lane)

    def wait(self, clock: Clock, what: str) -> None:
        """The running thread waits for the device."""
        self.waits.append(what)
        self.thread.after(clock)

    def begin(self, *, host: bool) -> Lane:
        """Begins an operation of the running thread or, behind it, of its current stream; returns its lane."""
        thread = self.thread
        if host:
            thread.tick()
            return thread
        lane = self.stream.lane
        lane.after(thread.now())
        lane.tick()
        return lane

    # ----------------------------------------------------------------------------------------------------- memory

    def span_of(self, tensor: torch.Tensor) -> Span:
        """The allocation of a tensor, recorded now if it has not been seen before."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        span = self.memory.span_at(start)
        if span is None:
            host = self.naming_host.entered
            span = self._allocated(storage, host=host)
        return span

    def _allocated(self, storage: torch.UntypedStorage, *, host: bool) -> Span:
        owner = self.thread if host else self.stream.lane
        span = self.memory.allocate(storage.data_ptr(), storage.nbytes(), host=host, owner=owner)
        weakref.finalize(storage, self._dead, weakref.ref(self), span).atexit = False
        return span

    @staticmethod
    def _dead(machine: "weakref.ref[Machine]", span: Span) -> None:
        alive = machine()
        if alive is not None and Machine._running is alive:
            threads = {lane.name: lane for lane in (*alive._threads.values(), *alive._messages)}
            # What threads run has ended when it returns, and gloo keeps the memory of its messages.
            known = Lane("the host")  # the last holder may be any thread, and got the memory from the others
            for lane in threads.values() if span.host else (span.owner, *span.lent):
                known.after(lane.now())
            alive.memory.die(span, known.clock, threads)

    def may_be_in_use(self, span: Span) -> bool:
        """Whether memory is alive, or the running thread does not know that the last use of it has ended."""
        alive = self.memory.span_at(span.start) is span
        return alive or any(self.thread.clock.get(use.lane, 0) < use.tick for use in span.uses)

    def place_on_host(self, tensor: torch.Tensor) -> None:
        """Says that a tensor is in host memory."""
        self.span_of(tensor).host = True

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in host memory."""
        return tensor.untyped_storage().data_ptr() != 0 and self.span_of(tensor).host

    def use(self, lane: Lane, tensor: torch.Tensor, *, writes: bool, what: str) -> None:
        """Records that the operation `lane` has begun last uses a tensor."""
        if not tensor.numel():
            return
        self.span_of(tensor)
        start = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.memory.use(lane, start, start + (last + 1) * tensor.itemsize, writes=writes, what=what)

    def native(self, what: str, reads: Sequence[torch.Tensor | None], writes: Sequence[torch.Tensor | None]) -> None:
        """Records a call that torch does not see."""
        used = [(tensor, False) for tensor in reads] + [(tensor, True) for tensor in writes]
        host = [self.on_host(tensor) for tensor, _ in used if tensor is not None]
        if any(host) and not all(host):
            self.memory.races.append(f"{what} is given memory of the host and of the device")
        lane = self.begin(host=any(host))
        for tensor, written in used:
            if tensor is not None:
                self.use(lane, tensor, writes=written, what=what)

    # -------------------------------------------------------------------------------------------------- operators

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator and records what it uses."""
        reads, writes = _arguments(func, args, kwargs)
        if any(type(t).__torch_dispatch__ is not _PLAIN or t.is_meta for t in reads + writes):
            return func(*args, **kwargs)  # it comes again, with the tensors inside; or has no data
        known = [tensor for tensor in reads + writes if tensor.numel()]
        for tensor in known:
            self.span_of(tensor)
        name = func._schema.name.partition("::")[2]
        view = _is_view(func)
        if view and not writes:
            return func(*args, **kwargs)
        numbers = {id(t) for t in reads if not t.dim() and self.on_host(t)}  # kernels get them as arguments
        places = {self.span_of(tensor).host for tensor in known if id(tensor) not in numbers}
        if not places and known:
            places = {True}
        naming = self.naming_host.entered
        host = places == {True} or (not places and naming)
        reads_none = name.endswith("_like") or name.startswith("new_")
        at_once = host or view or reads_none or not known or name in _METADATA or not self.stream.queue.takes
        out = func(*args, **kwargs) if at_once else self._given(func, args, kwargs, name)
        fresh = [] if view else _fresh(out, reads + writes)
        if places == {True, False}:
            self._transfer(name, reads, writes, kwargs, args)
        else:
            lane = self.begin(host=host)
            for tensor in () if reads_none else reads:
                self.use(lane, tensor, writes=False, what=name)
            for tensor in writes:
                self.use(lane, tensor, writes=True, what=name)
            if name in _WAITING and not host and known:
                self.wait(lane.now(), name)
        for tensor in fresh:
            span = self._allocated(tensor.untyped_storage(), host=host)
            lane = self.thread if span.host else self.stream.lane
            if not name.startswith(("empty", "new_empty")):
                self.use(lane, tensor, writes=True, what=name)
        return out

    def give(self, operation: Callable[[], object]) -> None:
        """Gives the current stream something to do, which was recorded already."""

        def run() -> None:
            with self.quiet, torch._C._AutoDispatchBelowADInplaceOrView():  # versions were counted when it was issued
                operation()

        self.stream.queue.give(run)

    def _given(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
        """Gives an operator to the current stream, which is late; returns what it will have made.

        What it makes is made at once, from zeros, and filled later.
        """
        if name in _WAITING or name == "repeat_interleave":  # whose shape depends on values
            self.stream.queue.synchronize()
            return func(*args, **kwargs)
        # What a parameter is a view of may have changed when the operator runs.
        then, then_named = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        if written := _written(func, args, kwargs):
            self.give(lambda: func(*then, **then_named))
            outs = [value for value, returned in written if returned]
            return outs[0] if len(outs) == 1 else tuple(outs) or None
        zeros, zeros_named = tree_map_only(torch.Tensor, torch.zeros_like, (args, kwargs))
        made = func(*zeros, **zeros_named)
        if not _fresh(made, _tensors_in([zeros, zeros_named])):
            return func(*args, **kwargs)  # a view, which its schema does not say
        places = _tensors_in(made)

        def fill() -> None:
            for place, value in zip(places, _tensors_in(func(*then, **then_named)), strict=True):
                place.copy_(value)

        self.give(fill)
        return made

    def _transfer(self, name: str, reads: Any, writes: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> None:
        if name != "copy_":
            self.memory.races.append(f"{name} is given memory of the host and of the device")
        lane = self.begin(host=False)
        for tensor in reads:
            self.use(lane, tensor, writes=False, what=f"{name} between host and device")
        for tensor in writes:
            self.use(lane, tensor, writes=True, what=f"{name} between host and device")
        if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            self.wait(lane.now(), name)
            self.stream.queue.synchronize()

    def moved(self, tensor: torch.Tensor, to: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        """A copy of `tensor` on the other side."""
        with self.quiet, torch._C.DisableTorchFunctionSubclass():
            source, copy = tensor.detach(), torch.empty_like(tensor)
        self.give(lambda: copy.copy_(source))
        host = to.index is None
        lane = self.begin(host=False)
        self.use(lane, tensor, writes=False, what="a copy to the other side")
        if copy.numel():
            self._allocated(copy.untyped_storage(), host=host)
            self.use(lane, copy, writes=True, what="a copy to the other side")
        if not non_blocking:
            self.wait(lane.now(), "a copy to the other side")
            self.stream.queue.synchronize()
        return copy

    # ------------------------------------------------------------------------------------------------ collectives

    def collective(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function of torch.distributed that records what it uses."""
        written, read = _COLLECTIVES[name]

        def issue(*args: Any, **kwargs: Any) -> Any:
            outs = [t for i in written if i < len(args) for t in _tensors(args[i])]
            ins = [t for i in read if i < len(args) for t in _tensors(args[i])]
            host = self.on_host(outs[0])
            group = kwargs.get("group") or dist.group.WORLD
            if not host:
                ranks = tuple(dist.get_process_group_ranks(group))
                elements = 0 if name == "all_to_all_single" else sum(t.numel() for t in outs)
                self.issued.append((ranks, name, elements))
            lane = self.begin(host=host)
            asynchronous = kwargs.get("async_op", False)
            if asynchronous:
                own = Lane(f"{name} over {group.group_name} {lane.clock[lane.name]} of {lane.name}")
                own.after(lane.now())
                own.tick()
                if host:
                    self._messages.append(own)
                lane = own
            for tensor in ins:
                self.use(lane, tensor, writes=False, what=name)
            for tensor in outs:
                self.use(lane, tensor, writes=True, what=name)
            if host or asynchronous:
                if not host:
                    self.stream.queue.synchronize()
                with self.quiet:
                    work = run(*args, **kwargs)
            else:
                work = self.give(lambda: run(*args, **kwargs))
            return _Issued(work, lane.now(), host=host) if asynchronous else work

        return issue

    # ---------------------------------------------------------------------------------------------------- threads

    def submit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`ThreadPoolExecutor.submit` that orders the thread behind its giver, and whoever asks for the result."""

        def submit(pool: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            before, box = self.thread.now(), {}

            def run() -> Any:
                self.thread.after(before)
                try:
                    with self.modes():
                        return fn(*args, **kwargs)
                finally:
                    box["ended"] = self.thread.now()

            future = original(pool, run)
            future.lane_box = box
            return future

        return submit

    def asked(self, future: Any) -> None:
        """The running thread knows that a future is done."""
        box = getattr(future, "lane_box", None)
        if box:
            self.thread.after(box["ended"])

    @contextmanager
    def modes(self) -> Iterator[None]:
        """A context whose operators are seen."""
        with _Operators(self):
            yield

    # ------------------------------------------------------------------------------------------------------- on

    @contextmanager
    def on(self) -> Iterator["Machine"]:
        """A context in which the library takes ``device="cpu:0"`` for a GPU, with NCCL's rules for collectives."""
        with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
            patch.setattr(Machine, "_running", self)
            self._patch(patch)
            stack.enter_context(self.modes())
            yield self

    def _patch(self, patch: pytest.MonkeyPatch) -> None:
        set_to = patch.setattr
        set_to(accelerator, "api", lambda device: torch.cuda)  # what is called a GPU here is the CPU
        set_to(torch.cuda, "Stream", Stream)
        set_to(torch.cuda, "Event", Event)
        set_to(torch.cuda, "stream", self.on_stream)
        set_to(torch.cuda, "current_stream", lambda device=None: self.stream)
        set_to("elixir_moe.wrapping.allocate.Streams", lambda device: Streams(torch.device("cuda", 0)))
        set_to(import_module("elixir_moe.wrapping.resolve_plan"), "adds_async", lambda device: True)
        set_to(torch.Tensor, "record_stream", lambda tensor, stream: self.span_of(tensor).lent.append(stream.lane))
        for name in _COLLECTIVES:
            if hasattr(dist, name):
                set_to(dist, name, self.collective(name, getattr(dist, name)))
        for name in ("all_gather_object", "broadcast_object_list", "gather_object"):
            set_to(dist, name, self._hushed(getattr(dist, name)))  # they are the host's alone
        self._patch_places(set_to)
        self._patch_threads(set_to)
        self._patch_native(set_to)
        self._patch_disk(set_to)
        self._patch_hooks(set_to)
        issue_in_order(patch)

    def _hushed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def hushed(*args: Any, **kwargs: Any) -> Any:
            with self.quiet:
                return run(*args, **kwargs)

        return hushed

    def _patch_hooks(self, set_to: Callable[..., None]) -> None:
        """A hook in backward runs on the stream of its unit's forward; what ends a backward waits for all of them."""
        enter, reach, accumulated, end = Hooks._enter, Hooks.reach, Hooks.accumulated, Hooks._end_backward

        def entered(hooks: Hooks, unit: Any, module: Any, args: Any) -> None:
            if unit is not None and not torch._C._current_graph_task_id() >= 0:
                self._stream_of[unit] = self.stream
            enter(hooks, unit, module, args)

        def reached(hooks: Hooks, unit: Any, *numbers: int) -> None:
            with self.on_stream(self._stream_of.get(unit, self.stream)):
                reach(hooks, unit, *numbers)

        def has_accumulated(hooks: Hooks, slot: Any) -> None:
            parameter = hooks._scheduler.chunks[slot[0]].parameters[slot[1]]
            with self.on_stream(self._stream_of.get(id(parameter), self.stream)):
                accumulated(hooks, slot)

        def ended(hooks: Hooks) -> None:
            self.compute.wait_stream(self.side)
            end(hooks)

        seen = {"_enter": entered, "reach": reached, "accumulated": has_accumulated, "_end_backward": ended}
        for name, run in seen.items():
            set_to(Hooks, name, run)

    def _patch_places(self, set_to: Callable[..., None]) -> None:
        """New memory is the device's unless the host is named; a tensor says which of them it is in."""
        for make in _device_constructors():
            if getattr(torch, make.__name__, None) is make:
                set_to(torch, make.__name__, self._made_where_named(make))
        get_device, to, tolist, numpy = (getattr(torch._C.TensorBase, n) for n in ("device", "to", "tolist", "numpy"))

        def device(tensor: torch.Tensor) -> torch.device:
            found = get_device.__get__(tensor)
            seen = found.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter) and not self.quiet.entered
            return found if not seen else HOST if self.on_host(tensor) else GPU

        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if self.quiet.entered:
                return to(tensor, *args, **kwargs)
            rest = list(args)
            place = next((i for i, arg in enumerate(rest) if isinstance(arg, (str, torch.device))), None)
            target = kwargs.pop("device", None) if place is None else rest.pop(place)
            if target is not None and self.on_host(tensor) != (torch.device(target).index is None):
                tensor = self.moved(tensor, torch.device(target), non_blocking=kwargs.get("non_blocking", False))
            return to(tensor, *rest, **kwargs) if rest or kwargs.keys() - {"non_blocking"} else tensor

        def read(run: Callable[..., Any]) -> Callable[..., Any]:
            def by_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                self._read_by_host(tensor, run.__name__)
                return run(tensor, *args, **kwargs)

            return by_host

        set_to(torch.Tensor, "device", property(device))
        set_to(torch.Tensor, "to", moved)
        set_to(torch.Tensor, "cpu", lambda tensor: moved(tensor, HOST))
        set_to(torch.Tensor, "tolist", read(tolist))
        set_to(torch.Tensor, "numpy", read(numpy))

    def _made_where_named(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            named = kwargs.get("device")
            with self.naming_host if named is not None and torch.device(named) == HOST else nullcontext():
                return make(*args, **kwargs)

        return made

    def _read_by_host(self, tensor: torch.Tensor, what: str) -> None:
        if tensor.numel() and not self.quiet.entered:
            host = self.on_host(tensor)
            lane = self.begin(host=host)
            self.use(lane, tensor, writes=False, what=what)
            if not host:
                self.wait(lane.now(), what)
                self.stream.queue.synchronize()

    def _patch_threads(self, set_to: Callable[..., None]) -> None:
        set_to(ThreadPoolExecutor, "submit", self.submit(ThreadPoolExecutor.submit))
        result, exception, done = Future.result, Future.exception, Future.done
        is_set, set_, wait = threading.Event.is_set, threading.Event.set, threading.Event.wait

        def asked_for(run: Callable[..., Any]) -> Callable[..., Any]:
            def ask(future: Any, *args: Any) -> Any:
                try:
                    return run(future, *args)
                finally:
                    if done(future):
                        self.asked(future)

            return ask

        finish, wait_for_update = Gate.finish_update, Gate.wait_for_update

        def finished(gate: Gate) -> None:
            finish(gate)
            self._finished[id(gate)] = self.thread.now()

        def waited(gate: Gate) -> None:
            wait_for_update(gate)
            self.thread.after(self._finished.get(id(gate), {}))  # `_update` is None: the thread that said so has waited

        set_to(Gate, "finish_update", finished)
        set_to(Gate, "wait_for_update", waited)

        def ended(run: Callable[..., Any]) -> Callable[..., Any]:
            def end(future: Any, *args: Any) -> None:
                if not hasattr(future, "lane_box"):  # `submit` has not made it
                    future.lane_box = {"ended": self.thread.now()}
                run(future, *args)

            return end

        set_to(Future, "set_result", ended(Future.set_result))
        set_to(Future, "set_exception", ended(Future.set_exception))
        set_to(Future, "result", asked_for(result))
        set_to(Future, "exception", asked_for(exception))
        set_to(Future, "done", asked_for(done))

        def tell(event: threading.Event) -> None:
            self._events[id(event)] = self.thread.now()
            set_(event)

        def hear(run: Callable[..., bool]) -> Callable[..., bool]:
            def ask(event: threading.Event, *args: Any) -> bool:
                found = run(event, *args)
                if found:
                    self.thread.after(self._events.get(id(event), {}))
                return found

            return ask

        set_to(threading.Event, "set", tell)
        set_to(threading.Event, "is_set", hear(is_set))
        set_to(threading.Event, "wait", hear(wait))

    def _patch_native(self, set_to: Callable[..., None]) -> None:
        squares = kernels.sum_of_squares

        def sum_of_squares(gradient: torch.Tensor, *, threads: int | None = None) -> Any:
            self.native("sum_of_squares", [gradient], [])
            if self.on_host(gradient):
                with self.quiet:
                    return squares(gradient, threads=threads)
            found = torch.zeros((), dtype=torch.float64, device=GPU)
            self.give(lambda: found.fill_(squares(gradient, threads=threads)))
            return found

        def adam_step(
            master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, compute: Any, *, skip: Any, **settings: Any
        ) -> None:
            numbers = [number for number in (settings["grad_scale"], skip) if isinstance(number, torch.Tensor)]
            self.native("adam_step", [grad, *numbers], [master, exp_avg, exp_avg_sq, compute])

            def step() -> None:
                step_by_numbers(master, exp_avg, exp_avg_sq, grad, compute, skip=skip, **settings)

            if self.on_host(grad):
                with self.quiet:
                    step()
            else:
                self.give(step)

        def copy_to_host_async(numbers: torch.Tensor) -> Callable[[], Any]:
            lane = self.begin(host=False)
            self.use(lane, numbers, writes=False, what="a copy of numbers to the host")
            clock, copied = lane.now(), self.stream.queue.record_event()

            def end() -> Any:
                self.wait(clock, "numbers")
                copied.synchronize()
                with self.quiet:
                    return numbers.tolist()

            return end

        for room in ("memory.shard_state", "memory.disk_values"):
            set_to(import_module(f"elixir_moe.{room}"), "sum_of_squares", sum_of_squares)
        set_to(import_module("elixir_moe.optim.shard_update"), "adam_step", adam_step)
        set_to(  # it asks where the weights are, and here all memory is a CPU's
            import_module("elixir_moe.optim.shard_update"),
            "_zeros",
            lambda chunk, array: chunk.shard.storage.new_zeros(array.numel(chunk.spec.shard_numel), dtype=array.dtype),
        )
        for room in ("optim.optimizer", "optim.early", "moe.dispatch", "moe.experts"):
            set_to(import_module(f"elixir_moe.{room}"), "copy_to_host_async", copy_to_host_async)

    def _patch_disk(self, set_to: Callable[..., None]) -> None:
        move, make, make_values = DiskFile.move, DiskStore.__init__, ValuesFile.__init__

        def made(spill: Any, *args: Any, **kwargs: Any) -> None:
            (make if isinstance(spill, DiskStore) else make_values)(spill, *args, **kwargs)
            self.place_on_host(spill._memory)
            if isinstance(spill, DiskStore):
                spill.records = [replace(record, lock=_Lock(self)) for record in spill.records]
            spill.file_start = _FILE + (id(spill) << 40)
            if isinstance(spill, ValuesFile):
                spill.lock = _Lock(self)  # type: ignore[assignment]

        def moved(spill: DiskFile, offset: int, memory: torch.Tensor, *, write: bool) -> None:
            start = spill.file_start + offset  # type: ignore[attr-defined]
            if self.memory.span_at(start) is None:
                self.memory.allocate(spill.file_start, spill.nbytes, host=True, owner=self.thread)  # type: ignore[attr-defined]
            lane, verb = self.begin(host=True), "written to" if write else "read from"
            self.use(lane, memory, writes=not write, what=f"memory {verb} disk")
            self.memory.use(lane, start, start + memory.nbytes, writes=write, what=f"a file {verb}")
            move(spill, offset, memory, write=write)

        set_to(DiskStore, "__init__", made)
        set_to(ValuesFile, "__init__", made)
        set_to(DiskFile, "move", moved)


class _Lock:
    """A lock that orders whoever holds it behind the last holder."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._lock = machine, threading.Lock()
        self._released: dict[int, int] = {}

    def __enter__(self) -> None:
        self._lock.acquire()
        self._machine.thread.after(self._released)

    def __exit__(self, *_: object) -> None:
        self._released = self._machine.thread.now()
        self._lock.release()


class _Operators(TorchDispatchMode):
    """Shows every operator to a machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch asks for it."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._machine.quiet.entered or func.namespace != "aten":
                return func(*args, **(kwargs or {}))
            return self._machine.operator(func, args, kwargs or {})


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for t in value if isinstance(t, torch.Tensor)] if isinstance(value, (list, tuple)) else []


def _arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors an operator is given to read, and those to write, by its schema."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        alias = argument.alias_info
        (writes if alias is not None and alias.is_write else reads).extend(_tensors(value))
    return reads, writes


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[tuple[Any, bool]]:
    """The arguments that an operator writes, and whether it returns them."""
    found = []
    returned = [alias.before_set for out in func._schema.returns if (alias := out.alias_info) is not None]
    for index, argument in enumerate(func._schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            value = args[index] if index < len(args) else kwargs[argument.name]
            found.append((value, alias.before_set in returned))
    return found


def _is_view(func: Any) -> bool:
    outs = func._schema.returns
    return func.is_view or (
        len(outs) > 0 and all(out.alias_info is not None and not out.alias_info.is_write for out in outs)
    )


def _fresh(out: Any, known: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that an operator has made."""
    old = {tensor.untyped_storage()._cdata for tensor in known}
    made = [out] if isinstance(out, torch.Tensor) else _tensors(out)
    return [t for t in made if t.numel() and t.untyped_storage()._cdata not in old]
