"""What goes wrong with plain torch habits is said, by a typed error that tells what to do instead."""

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel

import elixir_moe as em
from elixir_moe.distributed.collectives import Work
from elixir_moe.runtime import phase
from elixir_moe.runtime.param_access import ParamAccess, ShardedParameter, Switch
from tests.runtime.test_habits import D, Net, adamw, mean_square
from tests.support.every import every, same_tensors

PLANS = {"zero2": em.Plan.zero2(chunk_numel=600), "offload": em.Plan.offload(rcache_blocks=4, chunk_numel=600)}
Pair = tuple[nn.Module, em.ShardedOptimizer]


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    em.init_mesh(device_type="cpu")


@pytest.fixture(params=PLANS)
def pair(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=PLANS[request.param])
    yield model, optimizer
    optimizer.close()


def rows() -> Tensor:
    return torch.randn(8, D, generator=torch.Generator().manual_seed(0))


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": 3}, r"nn\.Module, got int"),
    "optimizer": ({"optimizer": "adam"}, r"Optimizer, got str"),
    "plan": ({"plan": "zero2"}, r"em\.Plan"),
    "step": ({"step": 3, "sample": 1}, "step=3"),
    "dtype name": ({"compute_dtype": "bf16"}, "compute_dtype='bf16'"),
    "dtype": ({"compute_dtype": torch.int8}, r"compute_dtype=torch\.int8"),
    "device name": ({"device": "gpu"}, "device='gpu'"),
    "no such device": ({"device": "cuda:99"}, "cuda:99"),
    "meta device": ({"device": "meta"}, "meta"),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_arguments_of_wrap(case: str) -> None:
    changes, message = BAD_ARGUMENTS[case]
    model = Net()
    arguments: dict[str, Any] = {"model": model, "optimizer": adamw(model), "plan": em.Plan.zero2()} | changes
    with pytest.raises(em.ConfigError, match=message):
        em.wrap(arguments.pop("model"), arguments.pop("optimizer"), **arguments)


def backward(pair: Pair) -> None:
    mean_square(pair[0], rows()).backward()


def test_gradients_are_not_where_plain_torch_keeps_them(pair: Pair) -> None:
    model, optimizer = pair
    assert every(p.grad is None for p in model.parameters()), "none has come yet"
    backward(pair)
    with pytest.raises(em.UsageError, match=r"optimizer\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(em.UsageError, match=r"optimizer\.scale"):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(mean_square(model, rows())).backward()
        scaler.unscale_(optimizer)
    optimizer.step()
    assert every(p.grad is None for p in model.parameters())
    backward(pair)
    model.last.bias.grad = torch.ones(D)
    with pytest.raises(em.UsageError, match=r"set by hand.*last\.bias.*call zero_grad"):
        optimizer.step()
    optimizer.zero_grad()
    model.last.bias.grad = torch.ones(D)
    for run in (lambda: backward(pair), lambda: em.accumulate(model, mean_square, [rows(), rows()])):
        with pytest.raises(em.UsageError, match=r"set by hand.*last\.bias.*call zero_grad"):
            run()
    optimizer.zero_grad()
    backward(pair)
    optimizer.step()


def test_gradients_of_inputs_are_taken_where_a_gradient_was_set_by_hand(pair: Pair) -> None:
    model, optimizer = pair
    wanted = torch.autograd.grad(mean_square(model, x := rows().requires_grad_()), x)[0]
    model.last.bias.grad = torch.ones(D)
    (found,) = torch.autograd.grad(mean_square(model, x := rows().requires_grad_()), x)
    assert torch.equal(found, wanted) and found.any()
    mean_square(model, x := rows().requires_grad_()).backward(inputs=[x])
    assert x.grad is not None and torch.equal(x.grad, wanted)
    torch.autograd.grad(mean_square(model, rows()), model.last.bias)
    with pytest.raises(em.UsageError, match=r"set by hand.*last\.bias"):
        mean_square(model, rows()).backward(inputs=[model.last.bias])
    optimizer.zero_grad()
    model.last.bias.grad = torch.ones(D)
    with pytest.raises(em.UsageError, match=r"set by hand.*last\.bias"):
        optimizer.step()
    optimizer.zero_grad()
    backward(pair)
    optimizer.step()


def test_gradients_from_before_wrap_are_named_as_such() -> None:
    model = Net()
    mean_square(model, rows()).backward()
    optimizer = adamw(model)
    with pytest.raises(
        em.ConfigError, match=r"gradients of a backward before wrap: .*first\.bias.*zero_grad\(\) before"
    ):
        em.wrap(model, optimizer, plan=em.Plan.zero2())
    optimizer.zero_grad()
    model, wrapped = em.wrap(model, optimizer, plan=em.Plan.zero2())
    backward((model, wrapped))
    wrapped.step()
    wrapped.close()


class Saves(torch.autograd.Function):
    """Saves a weight without a look at it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


class SavesUnseen(nn.Module):
    """Hides from the guard that it gives another module's weight away."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        with torch._C.DisableTorchFunctionSubclass():
            return Saves.apply(h, self.two.weight)


def test_a_weight_that_is_saved_where_it_is_not_gathered_is_named() -> None:
    model = SavesUnseen()
    plan = em.Plan.offload(rcache_blocks=2, chunk_numel=72)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    with pytest.raises(em.PlanError, match=r"saves parameter 'two\.weight' of shape \(8, 8\).*read it in forward"):
        model(torch.ones(2, 8))
    optimizer.close()


def test_amsgrad_comes_too_late_after_wrap(pair: Pair) -> None:
    model, optimizer = pair
    before = em.full_state_dict(model, all_ranks=True)
    optimizer.param_groups[0]["amsgrad"] = True
    model(torch.ones(2, D)).sum().backward()
    with pytest.raises(em.UsageError, match="amsgrad was turned on after wrap"):
        optimizer.step()
    assert same_tensors(before, em.full_state_dict(model, all_ranks=True))


def test_the_models_own_zero_grad_forgets_gradients(pair: Pair) -> None:
    model, optimizer = pair
    backward(pair)
    norm = optimizer.clip_grad_norm_(math.inf)
    model.zero_grad()
    assert optimizer.clip_grad_norm_(math.inf) == 0.0
    backward(pair)
    assert optimizer.clip_grad_norm_(math.inf) == norm


@pytest.mark.parametrize("limit", [1e-3, 1e9])
def test_a_gradient_behind_the_clipping(pair: Pair, limit: float) -> None:
    """Refused whether the limit was reached or not: that is the batch's business."""
    model, optimizer = pair
    before = em.full_state_dict(model, all_ranks=True)
    backward(pair)
    optimizer.clip_grad_norm_(limit)
    backward(pair)
    for late in (optimizer.step, lambda: optimizer.clip_grad_norm_(limit)):
        with pytest.raises(em.UsageError, match="after clip_grad_norm_"):
            late()
    assert same_tensors(before, em.full_state_dict(model, all_ranks=True))
    optimizer.zero_grad()
    backward(pair)
    optimizer.clip_grad_norm_(limit)
    optimizer.step()
    backward(pair)
    optimizer.clip_grad_norm_(limit)


def test_the_norm_can_be_asked_for_between_backwards(pair: Pair) -> None:
    """A limit of infinity clips nothing."""
    norms = []
    for _ in range(3):
        backward(pair)
        norms.append(pair[1].clip_grad_norm_(math.inf).item())
    pair[1].step()
    assert norms == pytest.approx([norms[0], 2 * norms[0], 3 * norms[0]])


def test_fp16_without_a_scaled_loss() -> None:
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=em.Plan.zero2(), compute_dtype=torch.float16)
    model(rows().half()).float().pow(2).mean().backward()
    with pytest.raises(em.UsageError, match=r"optimizer\.scale\(loss\)"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.scale(model(rows().half()).float().pow(2).mean()).backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("clip", ["one", None, math.nan, -1.0])
def test_a_limit_that_is_none(pair: Pair, clip: Any) -> None:
    with pytest.raises(em.ConfigError, match="max_norm"):
        pair[1].clip_grad_norm_(clip)


def test_a_norm_of_another_degree_than_two(pair: Pair) -> None:
    model, optimizer = pair
    mean_square(model, rows()).backward()
    with pytest.raises(em.UsageError, match=r"norm_type=inf.*degree 2.*clip_grad_value_"):
        optimizer.clip_grad_norm_(1.0, norm_type=math.inf)
    assert optimizer.clip_grad_norm_(math.inf, norm_type=2.0) == optimizer.clip_grad_norm_(1.0)
    optimizer.step()


CHANGES: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "deepcopy": (copy.deepcopy, "copied nor pickled: copy it before wrap"),
    "pickle": (pickle.dumps, "copied nor pickled.*full_state_dict"),
    "average": (AveragedModel, r"copy it before wrap.*AveragedModel\(model\) there.*update_parameters"),
    "dtype": (lambda model: model.double(), "fixed in wrap"),
    "shape": (lambda model: setattr(model.last.bias, "data", torch.zeros(3)), "fixed in wrap"),
    "state dict": (lambda model: model.state_dict(), "full_state_dict"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_wrapped_model_stays_what_it_is(pair: Pair, change: str) -> None:
    act, message = CHANGES[change]
    before = em.full_state_dict(pair[0], all_ranks=True)
    with pytest.raises(em.UsageError, match=message):
        act(pair[0])
    after = em.full_state_dict(pair[0], all_ranks=True)
    assert same_tensors(before, after)


HABITS: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "optimizer's state": (lambda model, optimizer: get_optimizer_state_dict(model, optimizer), r"em\.save"),
    "model's state": (lambda model, _: get_model_state_dict(model), r"em\.full_state_dict"),
    "second optimizer": (lambda model, _: torch.optim.SGD(model.parameters()).step(), "gradients .* are sharded"),
    "another group": (lambda _, optimizer: optimizer.add_param_group({"params": []}), "before wrapping it"),
}


@pytest.mark.parametrize("habit", HABITS)
def test_habits_of_torchs_own_sharding_change_no_weight(pair: Pair, habit: str) -> None:
    use, message = HABITS[habit]
    model, _ = pair
    before = em.full_state_dict(model, all_ranks=True)
    backward(pair)
    with pytest.raises(em.UsageError, match=message):
        use(*pair)
    torch.testing.assert_close(em.full_state_dict(model, all_ranks=True), before, rtol=0, atol=0)


STATES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "get": get_optimizer_state_dict,
    "set": lambda model, optimizer: set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": [{}]}),
    "of a parameter": lambda model, optimizer: optimizer.state[model.first.weight]["exp_avg"],
}


@pytest.mark.parametrize("use", STATES.values(), ids=STATES)
def test_the_optimizers_state_is_saved_by_the_library(pair: Pair, use: Callable[..., Any], tmp_path: Path) -> None:
    model, optimizer = pair
    rate, before = optimizer.param_groups[0]["lr"], em.full_state_dict(model, all_ranks=True)
    with pytest.raises(em.UsageError, match=r"kept in shards.*em\.save.*em\.load.*param_groups"):
        use(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == rate, "torch sets it to 0 for a step that initializes the state"
    em.save(tmp_path / "saved", model, optimizer)
    backward(pair)
    optimizer.step()
    em.load(tmp_path / "saved", model, optimizer)
    torch.testing.assert_close(em.full_state_dict(model, all_ranks=True), before, rtol=0, atol=0)


def recompute(model: Any) -> Callable[[], Any]:
    apply_activation_checkpointing(model, check_fn=lambda module: module is model.last)
    return lambda: setattr(model, "last", model.last._checkpoint_wrapped_module)


def swap(model: Any) -> Callable[[], Any]:
    def back_and_forth() -> None:
        first, second = model.layers[0].up, model.layers[1].up
        model.layers[0].up, model.layers[1].up = second, first

    back_and_forth()
    return back_and_forth


def tie(model: Any) -> Callable[[], Any]:
    own, model.layers[1].up.weight = model.layers[1].up.weight, model.layers[0].up.weight
    return lambda: setattr(model.layers[1].up, "weight", own)


@pytest.mark.parametrize("change", [recompute, swap, tie])
def test_modules_are_wrapped_for_recomputation_and_moved_before_wrap(pair: Pair, change: Callable[..., Any]) -> None:
    model, optimizer = pair
    before = em.full_state_dict(model)
    undo = change(model)
    message = r"is at '.*(_checkpoint_wrapped_module|up)\.weight' now.*apply_activation_checkpointing.*before wrap"
    backward(pair)
    with pytest.raises(em.UsageError, match=message):
        optimizer.step()
    with pytest.raises(em.UsageError, match=message):
        em.full_state_dict(model)
    undo()
    torch.testing.assert_close(em.full_state_dict(model), before, rtol=0, atol=0)
    optimizer.step()


def test_moving_a_model_to_where_it_is_changes_nothing(pair: Pair) -> None:
    before = em.full_state_dict(pair[0], all_ranks=True)
    pair[0].to("cpu", torch.float32)
    after = em.full_state_dict(pair[0], all_ranks=True)
    assert same_tensors(before, after)


def test_a_parameter_says_what_it_is_without_a_gather(pair: Pair) -> None:
    before = em.inspect(pair[0]).statistics
    p = pair[0].first.weight
    assert "(16, 16)" in repr(p) and "sharded" in repr(p)
    assert isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf and p.shape == (D, D) and len(p) == D
    assert p.is_contiguous() and p.stride() == (D, 1) and p.stride(0) == D
    assert (em.inspect(pair[0]).statistics - before).cache.misses == 0


def test_parameters_of_two_wrapped_models_compare(pair: Pair) -> None:
    torch.manual_seed(0)
    other, optimizer = em.wrap(other := Net(), adamw(other), plan=em.Plan.zero3())
    torch.testing.assert_close(pair[0].first.weight, other.first.weight, rtol=0, atol=0)
    with torch.no_grad():
        other.first.weight.add_(1)
    with pytest.raises(AssertionError, match="not equal"):
        torch.testing.assert_close(pair[0].first.weight, other.first.weight, rtol=0, atol=0)
    optimizer.close()


def test_a_part_of_a_model_wrapped_before() -> None:
    part, optimizer = em.wrap(part := Net(), adamw(part), plan=em.Plan.zero2())
    whole = nn.Sequential(part, nn.Linear(D, D))
    with pytest.raises(em.ConfigError, match="on the whole"):
        em.wrap(whole, torch.optim.AdamW(whole[1].parameters()), plan=em.Plan.zero2())
    optimizer.close()


def test_a_host_too_small_for_the_plan_is_refused_before_anything_is_allocated() -> None:
    model = Net()
    with (
        mock.patch("elixir_moe.wrapping.agreement.host_bytes_left", return_value=1000),
        mock.patch("elixir_moe.wrapping.allocate.build_shards", side_effect=AssertionError("allocated")),
        pytest.raises(em.TierError, match=r"needs [\d.]+ KiB for 1 ranks on .*, 1000 B are left \([\d.]+ KiB short\)"),
    ):
        em.wrap(model, adamw(model), plan=em.Plan.offload(rcache_blocks="all"))
    assert not any(p.isnan().any() for p in model.parameters()), "a refused model is untouched"


def test_a_model_that_something_else_has_wrapped() -> None:
    model = torch.nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(em.ConfigError, match="DistributedDataParallel holds"):
        em.wrap(model, torch.optim.SGD(model.parameters()), plan=em.Plan.zero2())


def test_a_hook_that_changes_gradients_is_heard(pair: Pair) -> None:
    """Registered behind wrap, and before the gradient is taken away."""
    backward(pair)
    norm = pair[1].clip_grad_norm_(1e9)
    pair[1].zero_grad()

    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    for parameter in pair[0].parameters():
        parameter.register_post_accumulate_grad_hook(double)
    backward(pair)
    assert pair[1].clip_grad_norm_(1e9) == 2 * norm


def test_two_models_that_share_a_part() -> None:
    part = nn.Linear(D, D)
    first, second = nn.Sequential(part, nn.Linear(D, D)), nn.Sequential(part, nn.Linear(D, D))
    first, optimizer = em.wrap(first, adamw(first), plan=em.Plan.zero2())
    with pytest.raises(em.ConfigError, match="wrapped already"):
        em.wrap(second, adamw(second), plan=em.Plan.zero2())
    optimizer.close()


def test_lazy_modules() -> None:
    model = nn.LazyLinear(3)
    with pytest.raises(em.ConfigError, match="run a forward before wrap"):
        em.wrap(model, torch.optim.SGD(model.parameters()), plan=em.Plan.zero2())


def test_a_part_that_is_replaced_by_one_without_training_is_told_in_the_next_step(pair: Pair) -> None:
    """Not at the end of the run, where nothing could be saved."""
    model, optimizer = pair
    last, model.last = model.last, nn.Linear(D, D).requires_grad_(False)
    backward(pair)
    with pytest.raises(em.UsageError, match=r"had \['last\.weight', 'last\.bias'\] in wrap .*before wrap"):
        optimizer.step()
    model.last = last
    optimizer.step()


def test_parameters_that_were_renamed_or_regrouped(pair: Pair) -> None:
    pair[0].final = pair[0].last
    del pair[0].last
    with pytest.raises(em.UsageError, match=r"last\.weight.*before wrap"):
        em.full_state_dict(pair[0], all_ranks=True)
    pair[0].last = pair[0].final
    del pair[0].final
    pair[1].param_groups[0]["params"].pop()
    with pytest.raises(em.UsageError, match="param_groups were changed"):
        pair[1].step()


def test_a_failed_backward_and_no_zero_grad(pair: Pair) -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    hidden = pair[0].first(rows())
    handle = hidden.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        pair[0].last(pair[0].body(hidden)).sum().backward()
    handle.remove()
    assert not pair[0](rows()).isnan().any()
    with pytest.raises(em.UsageError, match=r"zero_grad\(\) and run it again"):
        pair[1].step()
    pair[1].zero_grad()
    backward(pair)
    pair[1].step()


def test_a_gradient_that_a_hook_has_held_up_is_forgotten(pair: Pair) -> None:
    """It fails when the gradient has come, and before it is taken away."""

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    backward(pair)
    norm = pair[1].clip_grad_norm_(1e9)
    pair[1].zero_grad()
    handle = pair[0].first.weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        backward(pair)
    handle.remove()
    pair[1].zero_grad()
    assert pair[0].first.weight.grad is None
    backward(pair)
    assert pair[1].clip_grad_norm_(1e9) == norm
    pair[1].step()


def test_an_interrupted_entry_leaves_no_parameter_unguarded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = ParamAccess.open

    def interrupted(access: ParamAccess, switches: Iterable[Switch]) -> None:
        opened(access, list(switches)[:1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ParamAccess, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair[0](rows())
    pair[1].zero_grad()
    assert every(isinstance(parameter, ShardedParameter) for parameter in pair[0].parameters())


def test_an_interrupted_forward_leaves_nothing_on_any_stack(pair: Pair) -> None:
    class Interrupt(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    last, pair[0].last = pair[0].last, Interrupt()
    with pytest.raises(KeyboardInterrupt):
        pair[0](rows())
    pair[0].last = last
    pair[1].zero_grad()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    backward(pair)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    pair[1].step()


def test_a_write_between_clipping_and_step_is_kept(pair: Pair) -> None:
    backward(pair)
    pair[1].clip_grad_norm_(1e9)
    with torch.no_grad():
        pair[0].last.bias.fill_(3.0)
    for group in pair[1].param_groups:
        group["lr"] = 0.0
    pair[1].step()
    assert em.full_state_dict(pair[0], all_ranks=True)["last.bias"].tolist() == [3.0] * D


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda copy: copy.mul_(2),
    "operator": lambda copy: copy.__iadd__(1),
    "item": lambda copy: copy.__setitem__(0, 1.0),
    "view": lambda copy: copy[2:].view(-1).fill_(1.0),
    "out": lambda copy: torch.add(copy, 1, out=copy),
    "init": lambda copy: nn.init.zeros_(copy),
    "data": lambda copy: setattr(copy, "data", torch.ones(D)),
    "several": lambda copy: torch._foreach_add_([copy], 1.0),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("take", [lambda p: p.data, lambda p: p.detach()], ids=["data", "detach"])
def test_a_copy_of_a_weight_is_read_and_not_written(pair: Pair, take: Callable[[Tensor], Tensor], write: str) -> None:
    bias = pair[0].last.bias
    before = em.full_state_dict(pair[0], all_ranks=True)["last.bias"]
    copy = take(bias)
    with pytest.raises(em.UsageError, match=r"em\.unsharded\(parameter, write=True\)"):
        WRITES[write](copy)
    assert torch.equal(copy, before) and torch.equal(copy.clone().mul_(2), before * 2)
    assert not copy.numpy().flags.writeable
    backward(pair)
    pair[1].step()
    assert torch.equal(copy, before), "it is of then"
    assert not torch.equal(bias.detach(), before)


@pytest.mark.parametrize("leave", [lambda copy: copy.clamp_(-9, 9), lambda copy: copy.mul_(1.0)], ids=["clamp", "mul"])
def test_a_write_that_changes_no_copy_is_let_through(pair: Pair, leave: Callable[[Tensor], Tensor]) -> None:
    """Gemma 3n clamps a weight through ``.data`` in each forward, to limits that it does not reach."""
    bias = pair[0].last.bias
    copy = bias.data
    assert leave(copy) is copy and torch.equal(copy, bias)
    with pytest.raises(em.UsageError, match="would be lost"):
        copy.clamp_(9, 10)
    assert torch.equal(copy, bias)


ADDRESSES: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda p: p.numpy(),
    "data_ptr": lambda p: p.data_ptr(),
    "dlpack": lambda p: p.__dlpack__(),
    "from_dlpack": lambda p: torch.from_dlpack(p),
    "untyped_storage": lambda p: p.untyped_storage(),
    "address of a copy": lambda p: p.data.data_ptr(),
}


@pytest.mark.parametrize("ask", ADDRESSES)
def test_a_weight_has_no_address(pair: Pair, ask: str) -> None:
    what = "a copy of a wrapped parameter" if ask == "address of a copy" else r"'last\.bias'"
    with pytest.raises(em.UsageError, match=what + r".*em\.unsharded\(parameter, write=True\)"):
        ADDRESSES[ask](pair[0].last.bias)


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_unsharded_can_be_written_in_any_way(pair: Pair, grad: bool) -> None:
    bias, weight = pair[0].last.bias, pair[0].first.weight
    before = em.full_state_dict(pair[0], all_ranks=True)
    with torch.set_grad_enabled(grad), em.unsharded(pair[0].last, write=True):
        bias.data.numpy()[:] = 3.0
    with em.unsharded([weight], write=True):
        torch.from_dlpack(weight.detach()).mul_(2)
    after = em.full_state_dict(pair[0], all_ranks=True)
    assert after["last.bias"].tolist() == [3.0] * D and torch.equal(after["first.weight"], before["first.weight"] * 2)
    with pytest.raises(ZeroDivisionError), em.unsharded(bias, write=True):
        bias.data.fill_(4.0)
        raise ZeroDivisionError
    assert em.full_state_dict(pair[0], all_ranks=True)["last.bias"].tolist() == [4.0] * D, "as plain torch would"
    with em.unsharded(bias), torch.no_grad():
        bias.add_(1.0)
    assert em.full_state_dict(pair[0], all_ranks=True)["last.bias"].tolist() == [5.0] * D, (
        "an operator on the parameter itself"
    )
    with pytest.raises(em.UsageError, match="no wrapped model"), em.unsharded(nn.Linear(2, 2)):
        pass
    in_shard = [chunk.spec.residence.in_shard for chunk in pair[0]._elixir.scheduler.chunks]
    if not any(in_shard):  # where there it is at home
        with pytest.raises(em.UsageError, match=r"last\.bias.*pass write=True"), em.unsharded(bias):
            bias.data.fill_(6.0)
    assert every(isinstance(parameter, ShardedParameter) for parameter in pair[0].parameters())
    backward(pair)
    pair[1].step()


RUNS: dict[str, Callable[[Pair], Any]] = {
    "forward": lambda pair: pair[0](rows()),
    "backward": lambda pair: mean_square(pair[0], rows()).backward(),
    "clip_grad_norm_": lambda pair: pair[1].clip_grad_norm_(1.0),
    "step": lambda pair: pair[1].step(),
    "zero_grad": lambda pair: pair[1].zero_grad(),
    "full_state_dict": lambda pair: em.full_state_dict(pair[0], all_ranks=True),
}


@pytest.mark.parametrize("run", RUNS)
def test_nothing_runs_while_parameters_are_unsharded(pair: Pair, run: str) -> None:
    """What user code has an address of stays where it is; other weights can be read, and the block goes on."""
    bias = pair[0].last.bias
    with em.unsharded(pair[0].last, write=True):
        bias.data.fill_(2.0)
        with pytest.raises(em.UsageError, match=r"inside `with em\.unsharded\(\.\.\.\)` of 'last\.weight'"):
            RUNS[run](pair)
        assert torch.equal(pair[0].first.weight.sum(), pair[0].first.weight.detach().sum())
        with em.unsharded(pair[0].first, write=True):
            pair[0].first.bias.data.fill_(3.0)
        bias.data += 1.0
    state = em.full_state_dict(pair[0], all_ranks=True)
    assert state["last.bias"].tolist() == state["first.bias"].tolist() == [3.0] * D
    backward(pair)
    pair[1].step()


def test_a_forward_may_ask_for_an_address(pair: Pair) -> None:
    """A kernel of the user's own reads a weight of another module by its address."""
    seen = []

    def forward(x: Tensor) -> Tensor:
        with em.unsharded(pair[0].last.weight):
            seen.append(torch.from_dlpack(pair[0].last.weight.detach()).clone())
        return x

    handle = pair[0].first.register_forward_pre_hook(lambda module, args: (forward(*args),))
    wanted = em.full_state_dict(pair[0], all_ranks=True)["last.weight"]
    backward(pair)
    pair[1].step()
    handle.remove()
    assert torch.equal(seen[0], wanted)


def test_a_view_kept_from_where_it_was_unsharded(pair: Pair) -> None:
    """What is used where it is at home stays there; a view of what has moved tells of itself."""
    bias = pair[0].last.bias
    with em.unsharded(bias, write=True):
        view = bias.detach()
    backward(pair)
    pair[1].step()
    wanted = em.full_state_dict(pair[0], all_ranks=True)["last.bias"] * 2
    view.mul_(2)
    if any(chunk.spec.residence.in_shard for chunk in pair[0]._elixir.scheduler.chunks):
        assert torch.equal(em.full_state_dict(pair[0], all_ranks=True)["last.bias"], wanted)
        return
    with pytest.raises(em.ElixirError, match=r"last\.bias.*em\.unsharded\(parameter, write=True\)"):
        pair[0](rows())


class WritesData(nn.Linear):
    """Sets its bias in its first forward, where nothing tells of it."""

    written = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.written:
            self.bias.data.fill_(0.5)
            self.written = True
        return super().forward(x)


class ReplacesData(WritesData):
    def forward(self, x: Tensor) -> Tensor:
        if not self.written:
            self.bias.data = torch.full((D,), 0.5)
            self.written = True
        return nn.Linear.forward(self, x)


@pytest.mark.parametrize("kind", [WritesData, ReplacesData])
@pytest.mark.parametrize("plan", PLANS)
def test_data_that_a_first_forward_writes(kind: type[nn.Module], plan: str) -> None:
    """Kept where the parameter is at home as it is, refused where what was written would be lost."""
    model = Net()
    model.last = kind(D, D)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), plan=PLANS[plan])
    mean_square(model, rows()).backward()
    if plan == "zero2" and kind is WritesData:
        optimizer.step()
        assert em.full_state_dict(model, all_ranks=True)["last.bias"].tolist() == [0.5] * D
    else:
        with pytest.raises(em.UsageError, match=r"last\.bias.*self\.weight\.copy_"):
            optimizer.step()
    optimizer.close()


@pytest.mark.parametrize(("kind", "first"), [(WritesData, 4), (WritesData, 5), (ReplacesData, 4)])
@pytest.mark.parametrize("plan", PLANS)
def test_data_that_later_forwards_write(
    kind: type[WritesData], first: int, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the `first` step on, each forward writes: the next watched step says so; writes that are kept are none."""
    monkeypatch.setattr(phase, "_WATCHED_EVERY", 4)
    model = Net()
    last = model.last = kind(D, D)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.0), plan=PLANS[plan])
    watched = 4 * math.ceil(first / 4)
    for step in range(watched + 1):
        last.written = step < first
        with torch.no_grad():
            last.weight.mul_(1.5)
        mean_square(model, rows()).backward()
        if step < watched or (plan == "zero2" and kind is WritesData):
            optimizer.step()
    if plan == "zero2" and kind is WritesData:
        assert em.full_state_dict(model, all_ranks=True)["last.bias"].tolist() == [0.5] * D
    else:
        with pytest.raises(em.UsageError, match=r"last\.bias.*self\.weight\.copy_"):
            optimizer.step()
    optimizer.close()


def test_data_that_a_step_writes_which_is_begun_again(pair: Pair) -> None:
    """After a first backward whose gradients are dropped, the step that takes its place is watched, too."""
    model, optimizer = pair
    in_shard = [chunk.spec.residence.in_shard for chunk in model._elixir.scheduler.chunks]
    backward(pair)
    optimizer.zero_grad()

    def write(module: nn.Module, _: Any) -> None:
        module.bias.data.fill_(0.5)

    handle = model.last.register_forward_pre_hook(write)
    backward(pair)
    handle.remove()
    if any(in_shard):
        optimizer.step()
        return
    with pytest.raises(em.UsageError, match=r"last\.bias.*self\.weight\.copy_"):
        optimizer.step()
    optimizer.zero_grad()
    backward(pair)
    optimizer.step()


def test_data_of_a_frozen_weight_that_stays_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase, "_WATCHED_EVERY", 4)
    model = Net()
    last = model.last = WritesData(D, D)
    last.requires_grad_(False).written = True
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = em.wrap(model, torch.optim.SGD(trained, lr=0.1), plan=em.Plan.offload(rcache_blocks=99))
    for step in range(4):
        last.written = step != 2
        if step == 1:
            with torch.no_grad():
                last.weight.mul_(1.5)  # a write that is kept
        mean_square(model, rows()).backward()
        optimizer.step()
    mean_square(model, rows()).backward()
    with pytest.raises(em.UsageError, match=r"last\.bias.*self\.weight\.copy_"):
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("read", ["function", "block", "write"])
@pytest.mark.parametrize("write", [lambda b: b.data.fill_(2.0), lambda b: setattr(b, "data", torch.full((D,), 2.0))])
def test_a_neighbour_is_read_between_writes_that_are_allowed(pair: Pair, read: str, write: Any) -> None:
    """The look at weights in the first step does not take what ``write=True`` allows for a write that is lost."""
    model, optimizer = pair
    with em.unsharded(model.last.bias, write=True):
        write(model.last.bias)
        if read == "function":
            model.last.weight.sum()
        elif read == "write":
            with torch.no_grad():
                model.last.weight.mul_(2.0)
        else:
            with em.unsharded(model.last.weight):
                pass
    assert em.full_state_dict(model, all_ranks=True)["last.bias"].tolist() == [2.0] * D
    backward(pair)
    optimizer.step()


def test_graphs_that_are_thrown_away_are_freed() -> None:
    """An output that is saved for backward (tanh's) must not keep its own graph alive."""
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh())
    model, optimizer = em.wrap(model, adamw(model), plan=em.Plan.zero2())
    out = model(rows())
    assert out.grad_fn is not None
    mark = Broken()
    out.grad_fn.register_hook(lambda *_, mark=mark: None)
    alive = weakref.ref(mark)
    del out, mark
    gc.collect()
    assert alive() is None
    optimizer.close()


def test_closing_is_final_and_can_be_said_twice() -> None:
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=em.Plan.zero2())
    optimizer.close()
    optimizer.close()
    for use in (lambda: model(rows()), optimizer.step, lambda: em.full_state_dict(model, all_ranks=True)):
        with pytest.raises(em.UsageError, match="wrap a new one"):
            use()


class Broken:
    def wait(self) -> None:
        raise RuntimeError("Timed out waiting 60000ms for recv operation to complete")


def test_a_collective_that_fails_is_named() -> None:
    with pytest.raises(em.ElixirError, match=r"the gather of chunk 3 failed on rank 0: Timed out.*same order"):
        Work([Broken()], what="the gather of chunk 3").wait()


def test_packed_weights_of_bitsandbytes_in_unknown_layers_are_refused_by_name() -> None:
    kind = type("Params4bit", (nn.Parameter,), {})
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = kind(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(em.ConfigError, match=r"'0.weight' is a Params4bit.*load the model in bf16.*em[.]quantize"):
        em.wrap(model, torch.optim.AdamW([model[0].bias]), plan=em.Plan.ddp())


def test_the_tensors_of_parameters_are_not_swapped(pair: Pair) -> None:
    model, _ = pair
    first, second = [p for p in model.parameters() if p.dim() == 2][:2]
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(first, second)
