"""The private names of torch that the library uses; no other file imports any.

Owns an alias or a short function for each, with its purpose, the closest public alternative, and why that does not
suffice. Holds no state. If the installed torch lacks one of them, the import fails with a `TorchVersionError` that
names it and the tested versions; a torch newer than those causes a warning.

Aliases are torch's own objects: a call through one costs no more than a call through torch. An attribute of a tensor,
module, optimizer or operator cannot be imported, and a function around it would cost a call: such attributes are read
where they are needed, and `ATTRIBUTES` lists them, including those of `nn.Module` that a subclass or a hook relies on.
"""

import ctypes
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import repeat, starmap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from elixir_moe.errors import TorchVersionError

OLDEST, NEWEST = "2.11", "2.15"
"""The versions of torch that the tests have run with."""


def untested() -> str | None:
    """Returns a warning if the installed torch is newer than the newest tested one, otherwise None."""
    if torch.__version__ < f"{NEWEST}.9999":
        return None
    return (
        f"torch {torch.__version__} is newer than {NEWEST}, the newest version that elixir_moe was tested with: if it "
        f'fails, pip install "torch=={NEWEST}.*"'
    )


def _missing(name: str) -> TorchVersionError:
    return TorchVersionError(
        f"torch {torch.__version__} has no {name}, which elixir_moe needs; it was tested with torch {OLDEST} to "
        f'{NEWEST}: pip install "torch>={OLDEST},<={NEWEST}.*"'
    )


def _torch(path: str) -> Any:
    """The object at a private path of torch, such as ``_C._len_torch_dispatch_stack``."""
    return _at(torch, "torch", path)


def _symbol(name: str) -> Any:
    """A function of torch's C++ library without arguments, by its mangled name."""
    try:
        function = ctypes.PyDLL(_torch("_C").__file__)[name]
    except AttributeError as error:
        raise _missing(name) from error
    function.argtypes, function.restype = (), None
    return function


def _at(owner: Any, owner_name: str, path: str) -> Any:
    for name in path.split("."):
        try:
            owner = getattr(owner, name)
        except AttributeError as error:
            raise _missing(f"{owner_name}.{path}") from error
    return owner


try:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._triton import has_triton as has_triton
except ImportError as error:
    raise _missing(f"name that an import needs ({error})") from error

IMPORTED = {
    "DeviceContext": "To recognize the function mode of a default device. No public class or function tells it.",
    "FakeTensor": "To recognize the tensors of a trace, which have no data; torch has no public test for them.",
    "FakeTensorMode": "A trace runs a model without memory. Tensors on meta do not suffice: they forget their device.",
    "TorchDispatchMode": "Sees every operator below autograd. `TorchFunctionMode`, which is public, sees no backward.",
    "tree_leaves": "Torch's traversal of nested arguments, with types that users register. No public module has it.",
    "tree_map": "Torch's traversal of nested arguments, like `tree_leaves`.",
    "has_triton": "Whether Triton is installed and supports the GPU; `torch.compile` asks this. No public name does.",
}
"""Why the classes and functions that this file imports by their own names are needed."""

# ------------------------------------------------------------------------------------------------ tensor subclasses

DisableTorchFunctionSubclass: Callable[[], AbstractContextManager[None]] = _torch("_C.DisableTorchFunctionSubclass")
"""A context in which a wrapped parameter is a plain tensor: nothing is gathered. Torch's notes on extending it name
this class for the purpose, and no public module has it. `as_subclass` makes another tensor."""
DisableTorchFunction: Callable[[], AbstractContextManager[None]] = _torch("_C.DisableTorchFunction")
"""A context without tensor subclasses and without modes such as `torch.device`, which would redirect a repeated
initialization. Public contexts cannot leave a mode that another context entered."""
disable_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _torch(
    "utils._python_dispatch._disable_current_modes"
)
"""A context without dispatch modes, to repeat operations while one is on. Publicly, only its own context can leave a
mode, and that may be the user's."""
dispatch_modes: Callable[[], list[Any]] = _torch("utils._python_dispatch._get_current_dispatch_mode_stack")
"""The active dispatch modes. No public function returns them, and a list of our own would miss modes that ended."""

dispatch_depth: Callable[[], int] = _torch("_C._len_torch_dispatch_stack")
"""The number of active dispatch modes, without making a list: needed for each gather and reduction."""
function_depth: Callable[[], int] = _torch("_C._len_torch_function_stack")
"""The number of active function modes, including `torch.device`; needed as often."""
function_modes: Callable[[], list[Any]] = _torch("overrides._get_current_function_mode_stack")
"""The active function modes, to find those other than a default device. No public function returns them."""
without_last_dispatch_mode: Callable[[], AbstractContextManager[Any]] = _torch(
    "utils._python_dispatch._pop_mode_temporarily"
)
"""A context without the innermost dispatch mode, for the library's own operators in a checkpointed region.
`disable_dispatch_modes` would also disable modes that the user has put around the model."""
SELECTIVE_CHECKPOINT_MODES: tuple[type, type] = (
    _torch("utils.checkpoint._CachedTorchDispatchMode"),
    _torch("utils.checkpoint._CachingTorchDispatchMode"),
)
"""The modes of ``create_selective_checkpoint_contexts``, which cache operators' results by their number in a region.
That function returns them only to the user's `context_fn`."""

# ----------------------------------------------------------------------------------------------------------- autograd

graph_task_id: Callable[[], int] = _torch("_C._current_graph_task_id")
"""The number of the backward that this thread runs, -1 outside of one. A forward that a checkpoint recomputes must know
that it runs inside a backward; public hooks only report that a node is reached."""
keeps_graph: Callable[[], bool] = _torch("_C._autograd._get_current_graph_task_keep_graph")
"""Whether the running backward has ``retain_graph=True``. The user calls `backward`, and no hook gets the argument."""
at_end_of_backward: Callable[[Callable[[], None]], None] = _torch("autograd.Variable._execution_engine.queue_callback")
"""Calls a function when the running backward ends. A hook on the last gradient does not suffice: which one is last
depends on the graph. FSDP uses the same call."""
will_execute: Callable[[Any], bool] = _torch("_C._will_engine_execute_node")
"""Whether the running backward will reach a node, to tell `backward` from `torch.autograd.grad`. Public hooks fire only
when the node is reached, which is too late to prefetch."""
accumulates_all: Callable[[], bool] = _torch("autograd._is_checkpoint_valid")
"""Whether the running backward accumulates all gradients that it comes to: it is neither `torch.autograd.grad` nor a
`backward` with inputs. Checkpoints with reentrant graphs ask the same."""
top_saved_tensors_hooks: Callable[[bool], Any] = _torch("_C._autograd._top_saved_tensors_default_hooks")
"""The active saved-tensor hooks, so that the user's run inside ours. `saved_tensors_hooks` pushes hooks onto a stack
that no public function reads."""
next_sequence_number: Callable[[], int] = _torch("_C._autograd._get_sequence_nr")
"""The number of the next node that autograd makes on this thread; it is the same for all inputs that a checkpointed
region saves. A pack hook gets only the tensor."""
_next_number: Callable[[], None] = _symbol("_ZN2at15sequence_number17get_and_incrementEv")
"""``at::sequence_number::get_and_increment()``, which takes a sequence number from this thread's. In Python only the
making of a node does, and takes twenty times as long."""


def advance_sequence_number(least: int) -> None:
    """Makes the nodes that autograd makes on this thread have at least this number from now on."""
    missing = least - next_sequence_number()
    if missing > 0:
        deque(starmap(_next_number, repeat((), missing)), maxlen=0)


current_node: Callable[[], Any] = _torch("_C._current_autograd_node")
"""The node that autograd runs; None outside of backward. Hooks of a node (`Node.register_prehook`) would need one on
every node of the graph."""
interpreter: Callable[[], Any] = _torch("_C._functorch.peek_interpreter_stack")
"""The innermost transform of `torch.func`, to refuse those that differentiate. No public function returns it."""
DIFFERENTIATING = (_torch("_C._functorch.TransformType.Grad"), _torch("_C._functorch.TransformType.Jvp"))
"""The transforms of `interpreter` that differentiate."""


def running_node() -> int | None:
    """The number of the node that autograd runs; None outside of backward. See `current_node`."""
    node = current_node()
    return None if node is None else int(node._sequence_nr())


# ------------------------------------------------------------------------------------------------- memory of tensors

swap_tensors: Callable[[Tensor, Tensor], None] = _torch("_C._swap_tensor_impl")
"""Swaps two tensors in place. `torch.utils.swap_tensors`, which is public, refuses tensors with weak references, which
recurrent modules hold."""
has_compatible_type: Callable[[Tensor, Tensor], bool] = _torch("_has_compatible_shallow_copy_type")
"""Whether ``a.data = b`` is accepted: not from meta, nor between the CPU and the device of a backend outside of torch.
The public way is to assign, and to read the error."""
foreach_copy_: Callable[..., None] = _torch("_foreach_copy_")
"""Copies many tensors in one call. The public way is one `Tensor.copy_`, and so one kernel, per gradient."""


_storage_uses = _torch("_C._storage_Use_Count")
"""The count of `storage_uses`, by the address of a storage. No public function returns it."""


def storage_uses(tensor: Tensor) -> int:
    """How many tensors, views included, use the storage of `tensor`. Python's counts do not see tensors of C++."""
    uses: int = _storage_uses(tensor.untyped_storage()._cdata)
    return uses


def storage_id(storage: torch.UntypedStorage) -> int:
    """Identifies a storage, even one without memory. `data_ptr()` is 0 for all on meta, and refused for fake ones."""
    return storage._cdata


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor. The public `indices()` and `values()` refuse one that is not coalesced."""
    return tensor._indices(), tensor._values()


# ------------------------------------------------------------------------------------------------------------ operators

softmax_backward: Callable[..., Tensor] = _torch("_softmax_backward_data")
"""The gradient of a softmax from its output. `torch.autograd.grad` would compute the softmax again."""
cpu_has_avx512_bf16: Callable[[], bool] = _torch("cpu._is_avx512_bf16_supported")
"""Whether the CPU has an instruction for products in bf16. The public `get_cpu_capability` does not include it."""
cpu_has_amx: Callable[[], bool] = _torch("cpu._is_amx_tile_supported")
"""Whether the CPU has AMX, which has products in bf16. The public `get_cpu_capability` does not include it."""
cpu_has_amx_fp16: Callable[[], bool] = _torch("cpu._is_amx_fp16_supported")
"""Whether the CPU has an instruction for products in fp16. The public `get_cpu_capability` does not include it."""
GROUPED_MM = _torch("ops.aten._grouped_mm")
"""The operator of `torch.nn.functional.grouped_mm`, which a dispatch mode sees under this name."""
FLASH_ON_CPU = _torch("ops.aten._scaled_dot_product_flash_attention_for_cpu")
"""The operator of `scaled_dot_product_attention` on a CPU; torch's counter of operations has no entry for it."""
FLASH_ON_CPU_BACKWARD = _torch("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")
"""The operator of the backward of `FLASH_ON_CPU`; torch's counter of operations has no entry for it."""
COLLECTIVES = ("c10d", "_c10d_functional")
"""The namespaces of the operators of `torch.distributed`, as a dispatch mode sees them."""

# ------------------------------------------------------------------------------------------------------- process groups

group_of_name: Callable[[str], dist.ProcessGroup] = _torch("distributed.distributed_c10d._resolve_process_group")
"""The process group with a name, which operators of `COLLECTIVES` get. The public functions take groups only."""
default_store: Callable[[], dist.Store] = _torch("distributed.distributed_c10d._get_default_store")
"""The store of the default process group. A public one would need a second connection, at an agreed address."""


def process_groups() -> Collection[dist.ProcessGroup]:
    """The existing process groups. The public functions take a group, and raise if it has been destroyed."""
    return dist.distributed_c10d._world.pg_map


def devices_of(group: dist.ProcessGroup) -> list[torch.device]:
    """The kinds of devices that a process group serves. `get_backend_config` returns a string to parse."""
    return group._device_types


def backend_on(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of `group` for tensors on `device`. `get_backend` returns only a name."""
    return group._get_backend(device)


def issued_on(group: dist.ProcessGroup, device: torch.device) -> int:
    """How many collectives this rank has issued on a group, by any library. No public function counts them."""
    return int(backend_on(group, device)._get_sequence_number_for_group())


def timeout_on(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout of a group's collectives. `new_group` takes it, and no public function returns it."""
    timeout: timedelta = backend_on(group, device).options._timeout
    return timeout


def abort_together(backends: list[Any]) -> None:
    """Aborts NCCL's `backends` together: one by one, each might wait for the kernels of the others.

    The public `destroy_process_group` may wait for running collectives.
    """
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` was sliced from. Patterns use the axes of the root, which a slice does not know."""
    return mesh._get_root_mesh()


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns one axis over all of `mesh`, the same for every caller. `new_group` makes a new group in each call."""
    return mesh._flatten(name)


def fake_store() -> dist.Store:
    """A store for the backend "fake", whose ranks send nothing. No public module registers that backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend; slow to import

    return FakeStore()  # type: ignore[no-any-return, no-untyped-call]


# ----------------------------------------------------------------------------------------- modules, optimizers, start

Dropout: type[Any] = _torch("nn.modules.dropout._DropoutNd")
"""The base of all dropouts. A list of the public ones would miss the next."""
IMPORTED_LATE = "torch._dynamo"
"""The module that fake tensors and checkpoints import at their first use. Importing it earlier moves that time to a
better moment. No public module imports it."""


fused_adam: Callable[..., None] = _torch("_fused_adam_")
"""Adam in one kernel. `torch.optim.adam.adam`, which is public, launches further kernels to count steps."""
fused_adamw: Callable[..., None] = _torch("_fused_adamw_")
"""AdamW in one kernel, like `fused_adam`."""


orthogonalized: Callable[[Tensor, tuple[float, float, float], int, float], Tensor] = _torch(
    "optim._muon._zeropower_via_newtonschulz"
)
"""``(matrix, coefficients, steps, eps)``: Muon's Newton-Schulz iteration, in bf16; may overwrite a bf16 `matrix`. The
public `torch.optim.Muon` would update a weight, too."""

adjusted_rate: Callable[[float, str | None, tuple[int, ...]], float] = _torch("optim._muon._adjust_lr")
"""``(rate, kind, shape)``: Muon's rate for a matrix of this shape."""


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells LR schedulers that `optimizer` has stepped: they wrap its `step`, which a sharded one does not call."""
    setattr(optimizer, "_opt_called", True)  # noqa: B010


def replace_methods(optimizer: torch.optim.Optimizer, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Sets `methods` of `optimizer`. LR schedulers take another `step` for one that they have wrapped."""
    for name, method in methods.items():
        setattr(method, "_wrapped_by_lr_sched", True)  # noqa: B010
        setattr(optimizer, name, method)


def never_twice(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd function whose results must not be differentiated.

    ``once_differentiable`` refuses that only where an incoming gradient has a graph. The gradient of a loss itself has
    none, and what its gradients depend on besides would be taken for constant.
    """
    once = once_differentiable(backward)

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            grads = tuple(None if grad is None else grad.detach().requires_grad_() for grad in grads)
        return once(ctx, *grads)

    return run


def profiler_runs() -> bool:
    """Whether a torch.profiler runs in this process. No public function tells, and `record_function` costs an operator
    even without one."""
    return torch.autograd.profiler._is_profiler_enabled


def on_all_threads() -> Any:
    """The option that makes torch.profiler record threads started before it, as the optimizer's; none is public."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


ATTRIBUTES = {
    "Tensor._version": "How often a tensor was written in place. No public function reads it for a single tensor.",
    "Tensor._base": "The tensor of a view, to name a parameter in an error. No public function returns it.",
    "Tensor._backward_hooks": "The hooks on a parameter, to find and copy them. `register_hook` can only add one.",
    "Tensor._post_accumulate_grad_hooks": "Like `_backward_hooks`.",
    "Tensor._typed_storage": "A function that reads a parameter; a tensor subclass gets its name.",
    "torch._has_compatible_shallow_copy_type": "Like `_typed_storage`, for a function that reads no values.",
    "Parameter._is_param": "Makes a tensor of another class a parameter. No public call sets it.",
    "DTensor._local_tensor": "The tensor of this rank itself. `to_local`, which is public, makes a view with autograd.",
    "DTensor._spec": "Mesh, shape and placements as one object, to rebuild a DTensor without a check by all ranks.",
    "Module._parameters": "A module's own parameters by name; documented for subclasses. `setattr` checks and moves.",
    "Module._buffers": "Like `_parameters`, for buffers.",
    "Module._modules": "Like `_parameters`, for modules.",
    "Module._non_persistent_buffers_set": "The buffers that torch does not save; publicly only by making a state dict.",
    "Module._forward_hooks": "Hooks that move from a module to its tiled one. Public functions can only add hooks.",
    "Module._forward_hooks_with_kwargs": "Like `_forward_hooks`.",
    "Module._forward_hooks_always_called": "Like `_forward_hooks`.",
    "Module._forward_pre_hooks": "Like `_forward_hooks`; also to find spectral norms, which are hooks.",
    "Module._forward_pre_hooks_with_kwargs": "Like `_forward_hooks`.",
    "Module._backward_hooks": "Like `_forward_hooks`.",
    "Module._backward_pre_hooks": "Like `_forward_hooks`.",
    "Module._is_full_backward_hook": "Like `_forward_hooks`.",
    "Module._state_dict_hooks": "Hooks that a tiled module could not run, so that it is refused.",
    "Module._state_dict_pre_hooks": "Like `_state_dict_hooks`.",
    "Module._load_state_dict_pre_hooks": "Like `_state_dict_hooks`.",
    "Module._load_state_dict_post_hooks": "Like `_state_dict_hooks`.",
    "Module._save_to_state_dict": "Documented for subclasses; to see whether one overrides it.",
    "Module._load_from_state_dict": "Like `_save_to_state_dict`.",
    "Module._compiled_call_impl": "Whether `module.compile()` was called. No public function tells.",
    "OptimizedModule._orig_mod": "Whether a module was made by `torch.compile`; its class is private too.",
    "Optimizer._optimizer_step_pre_hooks": "The hooks of the optimizer that a sharded one replaces.",
    "Optimizer._optimizer_step_post_hooks": "Like `_optimizer_step_pre_hooks`.",
    "OpOverload._schema": "Which arguments an operator writes, in a dispatch mode. No public name has it.",
    "OpOverload._overloadpacket": "The operator of an overload: the key of torch's public `flop_registry`.",
}
"""The private attributes that other files read or set in place, each with its reason."""
_INSIDE = (
    "torch.autograd.graph.Node._sequence_nr",
    "torch.UntypedStorage._cdata",
    "torch.Tensor._indices",
    "torch.Tensor._values",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.ProcessGroup._device_types",
    "torch.distributed.ProcessGroup._get_backend",
    "torch._C._distributed_c10d.Backend._get_sequence_number_for_group",
    "torch._C._distributed_c10d.Backend.Options._timeout",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    "torch.distributed.device_mesh.DeviceMesh._flatten",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch._C._profiler._ExperimentalConfig",
)
"""The private names that the functions above use."""
_OWNERS = {"torch": torch, "Tensor": Tensor, "Module": nn.Module(), "OpOverload": torch.ops.aten.add.Tensor}
"""The owners of `ATTRIBUTES` that are cheap to make; tests check the others."""


def _check(paths: Iterable[str]) -> None:
    for path in paths:
        owner, _, rest = path.partition(".")
        if owner in _OWNERS:
            _at(_OWNERS[owner], owner, rest)


_check([*_INSIDE, *ATTRIBUTES])
if (_sentence := untested()) is not None:
    warnings.warn(_sentence, stacklevel=2)
