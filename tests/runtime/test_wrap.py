"""What `wrap` refuses, what it says, and how it can be used beside a training step."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import elixir_moe as em
from elixir_moe.chunks.cache_policy import Verb, gradients_of
from elixir_moe.chunks.replay import StepOrder
from elixir_moe.chunks.units import choose_units
from elixir_moe.runtime.param_access import ShardedParameter
from elixir_moe.runtime.phase import CLOSED
from elixir_moe.runtime.units import find_parts, registered_forward
from tests.runtime.test_habits import D, ExpertLists, Frozen, Net, Tied, Unused, adamw, mean_square
from tests.support.cases import least_said
from tests.support.every import every, same_tensors
from tests.support.ranks import RankError, RankPool
from tests.support.simulation import simulate

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    em.init_mesh(device_type="cpu")


def rows() -> torch.Tensor:
    return torch.randn(8, D, generator=torch.Generator().manual_seed(0))


def small_plan(model: nn.Module, blocks: int | None) -> em.Plan:
    """In one process only what is offloaded goes through the rCache."""
    return em.Plan.offload(rcache_blocks=blocks, chunk_numel=600)


@pytest.mark.parametrize("kind", [Net, Frozen, Unused, Tied, ExpertLists])
def test_too_small_an_rcache_is_refused_before_training(kind: type[nn.Module]) -> None:
    """The fewest blocks predicted are the fewest the recorded step needs: one less is refused, as many do."""
    model = kind()
    wrapped, optimizer = em.wrap(model, adamw(model), plan=small_plan(model, None))
    mean_square(wrapped, rows()).backward()
    optimizer.step()
    assert em.inspect(model).schedule is not None
    least = em.inspect(model).schedule.least_blocks()
    optimizer.close()
    model = kind()
    with pytest.raises(em.PlanError, match=f"at least {least}"):
        em.wrap(model, adamw(model), plan=small_plan(model, least - 1))
    assert not any(p.isnan().any() for p in model.parameters()), "a refused model is untouched"
    wrapped, optimizer = em.wrap(model, adamw(model), plan=small_plan(model, least))
    mean_square(wrapped, rows()).backward()
    optimizer.close()


def test_a_checkpointed_region_too_large_names_the_module() -> None:
    from tests.runtime.test_habits import NonReentrant

    model, optimizer = em.wrap(model := NonReentrant(), adamw(model), plan=small_plan(model, 3))
    before = em.full_state_dict(model, all_ranks=True)
    with pytest.raises(em.PlanError, match=r"module 'layers\.\d.*rcache_blocks"):
        mean_square(model, rows()).backward()
    assert torch.equal(model.first.weight.detach(), before["first.weight"])
    optimizer.zero_grad()
    assert every(isinstance(p, ShardedParameter) for p in model.parameters()), "a failed backward leaves none open"
    optimizer.close()


def test_module_that_needs_several_chunks_is_named() -> None:
    """A step then holds as many blocks as the message says: the gradients of all five chunks come in any order."""
    model = ExpertLists()
    with pytest.raises(em.PlanError, match=r"module 'layers\.0' by itself 5") as refused:
        em.wrap(model, adamw(model), plan=em.Plan.offload(rcache_blocks=1, chunk_numel=300))
    least = least_said(refused.value)
    plan = em.Plan.offload(rcache_blocks=least, chunk_numel=300)
    wrapped, optimizer = em.wrap(model, adamw(model), plan=plan)
    mean_square(wrapped, rows()).backward()
    optimizer.step()
    assert em.inspect(model).schedule is not None and em.inspect(model).schedule.least_blocks() == least == 10
    assert em.inspect(model).statistics.blocks_replaced == 0
    optimizer.close()


def test_chunk_shorter_than_a_parameter_is_refused() -> None:
    model = Net()
    with pytest.raises(em.PlanError, match="chunk_numel to at least 512"):
        em.wrap(model, adamw(model), plan=em.Plan.zero2(chunk_numel=100))


def test_optimizers_that_do_not_fit() -> None:
    model = Net()
    optimizer = adamw(model)
    mean_square(model, rows()).backward()
    optimizer.step()
    with pytest.raises(em.ConfigError, match="before the first step"):
        em.wrap(model, optimizer, plan=em.Plan.zero2())
    with pytest.raises(em.ConfigError, match="not the model's"):
        em.wrap(model, adamw(Net()), plan=em.Plan.zero2())
    with pytest.raises(em.ConfigError, match=r"no param_group.*first\.weight"):
        em.wrap(model, adamw(model.last), plan=em.Plan.zero2())
    with pytest.raises(em.ConfigError, match="LBFGS"):
        em.wrap(model, torch.optim.LBFGS(model.parameters()), plan=em.Plan.zero2())
    with pytest.raises(em.ConfigError, match=r"torch\.optim\.Optimizer"):
        em.wrap(model, None, plan=em.Plan.zero2())  # type: ignore[arg-type]


def of_torch_distributed() -> list[str]:
    """(rank) What is said about optimizers that share the work of ranks themselves."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    model, said = Net(), []
    sharing = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    averaging = PostLocalSGDOptimizer(adamw(model), PeriodicModelAverager(period=1))
    for optimizer in (sharing, averaging):
        with pytest.raises(em.ConfigError) as error:
            em.wrap(model, optimizer, plan=em.Plan.zero2())
        said.append(str(error.value))
    return said


def test_optimizers_that_share_work_themselves_are_refused_by_name(ranks: Ranks) -> None:
    (said,) = ranks(1).run(of_torch_distributed)
    for kind, text in zip(("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"), said, strict=True):
        assert kind in text and "torch.optim.AdamW(model.parameters())" in text


def test_wrap_twice_and_meta_are_refused() -> None:
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=em.Plan.zero2())
    with pytest.raises(em.ConfigError, match="wrapped already"):
        em.wrap(model, adamw(model), plan=em.Plan.zero2())
    with pytest.raises(em.UsageError, match="add_param_group"):
        optimizer.add_param_group({"params": []})
    optimizer.close()
    with torch.device("meta"):
        model = Net()
    with pytest.raises(em.LayoutError, match=r"first\.weight.*meta"):
        em.wrap(model, adamw(model), plan=em.Plan.zero2())


def test_backward_through_an_old_forward_is_refused() -> None:
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=em.Plan.zero2())
    old = mean_square(model, rows())
    mean_square(model, rows()).backward()
    optimizer.step()
    with pytest.raises(em.PlanError, match=r"last optimizer\.step"):
        old.backward()
    optimizer.zero_grad()
    mean_square(model, rows()).backward()
    optimizer.step()
    optimizer.close()


def test_model_keeps_class_shapes_and_names() -> None:
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=small_plan(model, 4))
    assert type(model) is Net
    plain = Net()
    for (name, p), (plain_name, q) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (name, p.shape, p.dtype, p.device) == (plain_name, q.shape, q.dtype, q.device)
        with torch._C.DisableTorchFunctionSubclass():
            assert p.untyped_storage().nbytes() == p.element_size(), "a released parameter holds one element"
    rows_of_table = em.inspect(model).rows
    assert sum(row["numel"] for row in rows_of_table) == sum(p.numel() for p in plain.parameters())
    optimizer.close()


def test_same_seed_gives_the_same_bits() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        model, optimizer = em.wrap(model := Net(), adamw(model), plan=small_plan(model, 4))
        for _ in range(3):
            mean_square(model, rows()).backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        states.append(em.full_state_dict(model, all_ranks=True))
        optimizer.close()
    assert same_tensors(states[0], states[1])


class Reversed(nn.ModuleList):
    """Gives its modules in the reverse order; their names stay."""

    def __iter__(self) -> Any:
        return reversed([*self._modules.values()])


def test_training_lowers_the_loss_after_control_flow_has_changed() -> None:
    """A model that calls its layers in another order from some step on: served on demand, counted, learned anew."""
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=small_plan(model, 4))
    missed = []
    for step in range(12):
        if step == 4:
            model.layers.__class__ = Reversed
        before = em.inspect(model).statistics.cache.off_schedule
        mean_square(model, rows()).backward()
        optimizer.step()
        optimizer.zero_grad()
        missed.append(em.inspect(model).statistics.cache.off_schedule - before)
    assert not any(missed[:4]) and any(missed[4:7]) and not any(missed[8:])
    optimizer.close()


def disagree(what: str) -> None:
    rank = torch.distributed.get_rank()
    model = Net()
    plan = em.Plan.zero3(rcache_blocks=4 + (rank if what == "plan" else 0), chunk_numel=600)
    if what == "model" and rank == 1:
        model.last = nn.Linear(D, D, bias=False)
    try:
        em.wrap(model, adamw(model), plan=plan)
    finally:
        gc.collect()


@pytest.mark.parametrize("what", ["plan", "model"])
@pytest.mark.fault(5, 30)
def test_ranks_that_disagree_are_told_the_first_difference(what: str, ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"the plan or the model: .* on rank 0, .* on rank 1: build") as error:
        ranks(2).run(disagree, what)
    assert set(error.value.types.values()) == {"LayoutError"} and len(error.value.types) == 2


def given_apart(what: str) -> str:
    """(rank) The error of a wrap in which rank 1 is given something else than rank 0."""
    other = torch.distributed.get_rank() == 1
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=other and what == "model"))
    make = torch.optim.SGD if other and what == "optimizer" else torch.optim.AdamW
    plan: Any = em.Plan.zero2(chunk_numel=80)
    if what in ("auto", "hardware", "model"):
        options: dict[str, Any] = {"hardware": "a100-40g-sxm-x4", "budget": "10 MB"}
        plan = em.Plan.auto(lambda m, x: m(x).sum(), torch.ones(2, 8), **options)
    match what, other:
        case "auto", True:
            plan = em.Plan.zero2(chunk_numel=80)
        case "hardware", True:
            plan = replace(plan, hardware=None)
        case "plan", True:
            plan = "zero7"
        case "disk", True:
            plan = em.Plan.offload(disk_chunks=1)
    with pytest.raises(em.ElixirError) as told:
        em.wrap(model, make(model.parameters(), lr=1e-2), plan=plan)
    return f"{type(told.value).__name__}: {told.value}"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "optimizer",
            "ConfigError: ranks disagree about the arguments of wrap: optimizer is AdamW on rank 0",
        ),
        ("auto", "ConfigError: ranks disagree about the arguments of wrap: plan is AutoPlan on rank 0, Plan on rank 1"),
        (
            "hardware",
            "ConfigError: ranks disagree about the arguments of wrap: hardware is str on rank 0",
        ),
        ("plan", "ConfigError: [rank 1] plan='zero7': expected an em.Plan"),
        ("disk", "ConfigError: [rank 1] the plan has disk_chunks=1: say in which folder their file goes"),
        ("model", "LayoutError: ranks disagree about the plan or the model: "),
    ],
)
@pytest.mark.fault(5)
def test_what_one_rank_is_given_apart_is_an_error_of_all(what: str, said: str, ranks: Ranks) -> None:
    for told in ranks(2).run(given_apart, what):
        assert told.startswith(said)


def test_a_folder_that_no_chunk_needs_today_is_checked_all_the_same() -> None:
    """By default all state is in host memory, if it has room; on another day the folder would be wanted."""
    model = nn.Linear(8, 8)
    with pytest.raises(em.TierError, match=r"the folder disk='/proc/none' does not exist on .*: make it, or name"):
        em.wrap(model, adamw(model), plan=em.Plan.offload(disk="/proc/none"))


def test_the_expected_schedule_sends_off_the_gradients_of_every_trainable_chunk() -> None:
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=small_plan(model, None))
    parts = find_parts(model)
    trainable = {index: p.numel() for index, p in enumerate(model.parameters())}
    schedule = StepOrder(parts.specs, registered_forward(parts), trainable).schedule(em.inspect(model).layout)
    sent = [item for entry in schedule.entries if entry.verb is Verb.RELEASE for item in entry.chunks if item < 0]
    assert sorted(sent) == sorted(gradients_of(chunk.index) for chunk in em.inspect(model).layout.cached)
    optimizer.close()


class Pair(nn.Module):
    """Two layers and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).relu()) * self.scale


def test_a_unit_is_the_largest_module_in_one_chunk_that_moves() -> None:
    model = nn.Sequential(Pair(), nn.Sequential(Pair(), nn.ModuleList([nn.Linear(8, 8)])), nn.Linear(8, 8))
    parts = find_parts(model)
    names = [name for name, _ in model.named_parameters()]

    def units_of(moves: Callable[[int], bool]) -> dict[str, set[str]]:
        chunk_of = {i: int(name[0]) for i, name in enumerate(names) if moves(int(name[0]))}
        units = [unit for unit in choose_units(parts.specs, chunk_of) if unit is not None]
        return {parts.names[unit.module]: {names[i] for i in unit.params} for unit in units}

    beneath = {module: {name for name in names if name.startswith(module)} for module in ("", "0", "1", "2")}
    whole = beneath.pop("")
    assert units_of(lambda chunk: True) == beneath, "neither the whole, of three chunks, nor a layer inside one"
    assert units_of(lambda chunk: chunk == 1) == {"": whole}, "what always stays is no reason to part"


class HasGuest(nn.Module):
    """Two layers of its own, and a module that is none of its parts."""

    def __init__(self, guest: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.guests = nn.Linear(16, 16), nn.Linear(16, 16), [guest]


class Host(HasGuest):
    """Calls its guest between its layers and at its end, and reads a weight of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.two(self.guests[0](self.one(x)))
        return self.guests[0](h + nn.functional.linear(x, self.guests[0].weight))


@pytest.mark.parametrize("blocks", [2, 3])
def test_a_guest_inside_a_unit_has_a_block_of_its_own(blocks: int) -> None:
    """Its weights and the unit's; gradients, which nobody foresees, stay what autograd has made until there is one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model.append(Host(model[0]))
    plain = copy.deepcopy(model)
    plan = em.Plan.offload(rcache_blocks=blocks, chunk_numel=576)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    rows = torch.randn(4, 16)
    with torch.no_grad():
        assert torch.equal(model(rows), plain(rows))
    model(rows).square().mean().backward()
    assert em.inspect(model).statistics.blocks_replaced == 0
    optimizer.step()
    plain(rows).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for name, value in em.full_state_dict(model, all_ranks=True).items():
        # gradients of at most 1 in another order of sums: 1e-6, times the rate
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=0, atol=1e-7)
    optimizer.close()


class Backwards(Net):
    """Registers its layers in the reverse of their use, and has a buffer and a random number in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in reversed(self.layers):
            x = layer(x)
        return x + 0 * torch.rand(())


def test_a_sample_gives_the_order_of_first_use() -> None:
    model = Backwards()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model, optimizer = em.wrap(model, adamw(model), plan=small_plan(model, 3), sample=rows(), step=mean_square)
    assert torch.equal(state, torch.get_rng_state()) and model.calls == 0
    names = {p: name for name, p in model.named_parameters()}
    packed = [names[p] for chunk in model._elixir.scheduler.chunks for p in chunk.parameters]
    firsts = [packed.index(f"layers.{i}.up.weight") for i in (3, 2, 1, 0)]
    assert firsts == sorted(firsts) and packed[0] == "first.weight" and packed[-1] == "last.bias"
    mean_square(model, rows()).backward()
    optimizer.step()
    assert em.inspect(model).schedule is not None and em.inspect(model).schedule.least_blocks() == 3
    optimizer.close()
    with pytest.raises(em.ConfigError, match="go together"):
        em.wrap(model := Net(), adamw(model), plan=em.Plan.zero2(), sample=rows())


def test_a_gradient_that_is_not_finite_stops_the_step_and_is_named() -> None:
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=small_plan(model, 4))
    before = em.full_state_dict(model, all_ranks=True)
    bad = rows()
    bad[0, 0] = float("inf")
    mean_square(model, bad).backward()
    with pytest.raises(em.ElixirError, match=r"first\.weight"):
        optimizer.step()
    assert same_tensors(before, em.full_state_dict(model, all_ranks=True))
    optimizer.zero_grad()
    mean_square(model, rows()).backward()
    optimizer.step()
    optimizer.close()


def test_the_watch_of_the_first_step_leaves_other_modes_alone() -> None:
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=small_plan(model, 4))
    for _ in range(2):
        with torch.device("cpu"):
            loss = mean_square(model, rows())
        assert torch._C._len_torch_function_stack() == 0
        loss.backward()
        optimizer.step()
    for _ in range(2):
        mean_square(model, rows()).backward()
        optimizer.step()
    assert torch._C._len_torch_function_stack() == 0
    optimizer.close()


def test_frozen_chunks_stay_over_the_update_and_the_simulator_knows() -> None:
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8)))
    for layer in list(model)[::2]:
        layer.requires_grad_(False)
    model, optimizer = em.wrap(model, adamw(model), plan=em.Plan.offload(rcache_blocks=4, chunk_numel=1024))
    for _ in range(6):
        before = em.inspect(model).statistics
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        found = (em.inspect(model).statistics - before).cache
    assert em.inspect(model).schedule is not None
    wanted, _ = simulate(em.inspect(model).schedule, 4)
    assert (found.misses, found.evictions, found.hits) == (wanted.misses, wanted.evictions, wanted.hits)
    optimizer.close()


def test_float64_training_is_refused() -> None:
    model = nn.Linear(4, 4).double()
    with pytest.raises(em.LayoutError, match=r"weight.*float64"):
        em.wrap(model, adamw(model), plan=em.Plan.zero2())


def test_plain_state_dicts_of_a_wrapped_model_are_refused() -> None:
    """A released parameter is NaN: saving it would lose the weights without a word."""
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=em.Plan.zero2())
    with pytest.raises(em.UsageError, match="full_state_dict"):
        model.state_dict()
    with pytest.raises(em.UsageError, match="before wrap"):
        model.load_state_dict(Net().state_dict())
    with pytest.raises(em.UsageError, match=r"state_dict.*em\.save"):
        optimizer.state_dict()
    stepped = adamw(other := Net())
    other(torch.ones(2, D)).sum().backward()
    stepped.step()
    with pytest.raises(em.UsageError, match=r"load_state_dict.*em\.load"):
        optimizer.load_state_dict(stepped.state_dict())
    loaded = adamw(again := Net())
    loaded.load_state_dict(stepped.state_dict())
    with pytest.raises(em.ConfigError, match=r"loaded a state.*em\.load"):
        em.wrap(again, loaded, plan=em.Plan.zero2())
    assert list(em.full_state_dict(model, all_ranks=True)) == list(Net().state_dict())
    optimizer.close()


def test_a_failed_backward_leaves_nothing_behind() -> None:
    """An error in the middle of backward, zero_grad, and training goes on with the fewest blocks there are."""
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=small_plan(model, 3))

    def fail(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    for _ in range(3):
        hidden = model.first(rows())
        hidden.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model.last(model.body(hidden)).sum().backward()
        optimizer.zero_grad()
        mean_square(model, rows()).backward()
    norm = optimizer.clip_grad_norm_(math.inf)
    mean_square(model, rows()).backward()
    assert optimizer.clip_grad_norm_(math.inf) > norm, "the norm of what has come since"
    optimizer.step()
    optimizer.close()


def test_unfreezing_after_wrap_is_refused() -> None:
    model = Net()
    model.first.requires_grad_(False)
    model, optimizer = em.wrap(model, adamw(model), plan=em.Plan.zero2())
    model.first.requires_grad_(True)
    mean_square(model, rows()).backward()
    with pytest.raises(em.UsageError, match=r"first\.weight"):
        optimizer.step()
    optimizer.close()


def test_freezing_after_wrap_leaves_the_weights_alone() -> None:
    model, optimizer = em.wrap(model := Net(), adamw(model), plan=small_plan(model, 4))
    model.last.requires_grad_(False)
    before = em.full_state_dict(model, all_ranks=True)
    mean_square(model, rows()).backward()
    optimizer.step()
    after = em.full_state_dict(model, all_ranks=True)
    assert torch.equal(before["last.weight"], after["last.weight"])
    assert not torch.equal(before["first.weight"], after["first.weight"])
    optimizer.close()


def test_a_plan_that_is_none_is_refused() -> None:
    model = Net()
    with pytest.raises(em.ConfigError, match=r"em\.Plan"):
        em.wrap(model, adamw(model), plan=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan", [em.Plan.zero2(chunk_numel=600), em.Plan.offload(rcache_blocks="all", chunk_numel=600)]
)
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("remembers", [True, False])
def test_nothing_outlives_the_model(plan: em.Plan, closed: bool, remembers: bool) -> None:
    """Model, optimizer and shards go with their last reference, though hooks and parameters point at each other.

    Nor does it matter that a module remembers what it has computed, as routers do, with its graph.
    """
    model, optimizer = em.wrap(net := Net(), adamw(net), plan=plan)
    if remembers:
        model.apply(
            lambda part: part.register_forward_hook(lambda module, _, output: setattr(module, "remembered", output))
        )
    model(torch.randn(2, D)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = [weakref.ref(o) for o in (model, optimizer, optimizer._scheduler, optimizer._hooks)]
    kept += [weakref.ref(chunk.shard) for chunk in optimizer._scheduler.chunks]
    if closed:
        optimizer.close()
    del model, optimizer, net
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []


def threads_of_groups() -> int:
    """Threads of gloo process groups in this process."""
    return sum(path.read_text().startswith("gloo") for path in Path("/proc/self/task").glob("*/comm"))


def open_and_close() -> list[int]:
    """(rank) The threads before `wrap`, behind it, and behind `close`."""
    found = [threads_of_groups()]
    for plan in (em.Plan.ddp(), em.Plan.zero3(chunk_numel=600)):
        model, optimizer = em.wrap(net := Net(), adamw(net), plan=plan)
        mean_square(model, rows()).backward()
        optimizer.step()
        found.append(threads_of_groups())
        optimizer.close()
        found.append(threads_of_groups())
        assert model._elixir.phase.now is CLOSED, "the model is still there"
    return found


def test_no_thread_of_a_process_group_outlives_the_end(ranks: Ranks) -> None:
    """Each wakes up a hundred times a second."""
    for before, *found in ranks(2).run(open_and_close):
        if not before:
            pytest.skip("this torch gives no name to the threads of gloo")
        assert found[1] == found[3] == before < min(found[0], found[2]), (before, found)


class Stops(nn.Module):
    """Interrupted while `now`."""

    now = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.now:
            raise KeyboardInterrupt
        return x


def test_a_model_closed_after_an_interrupt_leaves_nothing_to_the_next() -> None:
    """torch runs no hooks of calls that an interrupt has ended, so those of saved tensors were still in place."""
    plan = em.Plan.offload(rcache_blocks=3, chunk_numel=D * D)
    kept, replaced = [], []
    for stops in (True, False):
        net = nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(8)), stop := Stops())
        model, optimizer = em.wrap(net, adamw(net), plan=plan)
        stop.now = stops
        with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
            for _ in range(3):
                mean_square(model, rows()).backward()
                optimizer.step()
        replaced.append(em.inspect(model).statistics.blocks_replaced)
        kept.append(weakref.ref(optimizer._scheduler))
        optimizer.close()
        del model, optimizer, net
        gc.collect()
    assert [ref() for ref in kept] == [None, None] and replaced == [0, 0]


def test_close_closes_everything_though_a_part_of_it_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net = Net()
    model, optimizer = em.wrap(net, adamw(net), plan=em.Plan.offload(chunk_numel=600, disk=tmp_path, disk_chunks=1))
    mean_square(model, rows()).backward()
    optimizer.step()
    with monkeypatch.context() as patch:
        for place, name in ((dist, "barrier"), (optimizer._scheduler.reductions, "drain")):
            patch.setattr(place, name, Mock(side_effect=RuntimeError(f"{name}: connection closed by peer")))
        with pytest.raises(em.ElixirError, match="barrier: connection closed"):
            optimizer.close()
    groups, (file,) = model._elixir.groups, model._elixir.files
    assert not groups._of_all and not groups.by_ranks and file._nameless.closed
    assert model._elixir.phase.now is CLOSED
    optimizer.close()


def test_an_export_after_close_is_refused(tmp_path: Path) -> None:
    net = Net()
    model, optimizer = em.wrap(net, adamw(net), plan=em.Plan.offload())
    optimizer.close()
    with pytest.raises(em.UsageError, match=r"optimizer\.close\(\) was called"):
        em.save_pretrained(model, tmp_path)


def test_a_measured_model_goes_though_its_scheduler_stays() -> None:
    """The scheduler of the user's has the user's optimizer, whose hooks measure the first steps."""
    net = Net()
    inner = adamw(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
    model, optimizer = em.wrap(net, inner, plan=em.Plan.auto(step=mean_square, sample=rows()))
    mean_square(model, rows()).backward()
    optimizer.step()
    scheduler.step()
    assert em.inspect(model).prediction.held_bytes, "the step was observed"
    kept = weakref.ref(optimizer._scheduler)
    optimizer.close()
    del model, optimizer, net
    gc.collect()
    assert kept() is None and scheduler.optimizer is inner
