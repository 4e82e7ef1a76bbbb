"""Gradients as a user sees them: clipped by value, and their norms by parameter, as one plain process has them."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import elixir_moe as em
from elixir_tools.models.gpt import GPT, GPTConfig, gpt_patterns, lm_loss
from tests.support.every import every, same_tensors
from tests.support.parity import ROWS, TOLERANCE, make_optimizer, mesh_of_world, tokens
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
LIMIT = 2e-3
"""Many elements of the gradients are beyond it."""


def config(ep: int) -> GPTConfig:
    return GPTConfig(vocab_size=32, seq_len=8, n_layers=2, d_model=16, n_heads=2, experts=(0, 2), ep=(1, ep))


def steps(plan: em.Plan | None, by_value: float | None, by_norm: float | None, part: bool = False) -> dict[str, Any]:
    """(rank) Three steps: norms of every parameter's gradient before and after they are clipped, and the weights.

    `part`: only some parameters are clipped, and the norm of the others' gradients is asked for.
    """
    world, rank = (1, 0) if plan is None else (dist.get_world_size(), dist.get_rank())
    torch.manual_seed(5)
    mesh = None if plan is None else mesh_of_world()
    model = GPT(config(world), mesh)
    optimizer: Any = make_optimizer(model)
    if plan is not None:
        em.annotate(model, gpt_patterns(model))
        model, optimizer = em.wrap(model, optimizer, plan=plan)
    seen, norms = [], []
    few, rest = (list(model.parameters())[i::2] for i in range(2))
    for step in range(3):
        batch = tokens(step, 0, 8, 32)[rank * ROWS // world : (rank + 1) * ROWS // world]
        lm_loss(model, batch).backward()
        for clip, limit in (("value", by_value), ("norm", by_norm), ("", None)):
            seen.append(optimizer.grad_norms() if plan is not None else norms_of(model))
            if limit is not None and plan is None:
                getattr(nn.utils, f"clip_grad_{clip}_")(few if part else model.parameters(), limit)
            elif limit is not None:
                getattr(optimizer, f"clip_grad_{clip}_")(limit, few if part else None)
        if part:
            ask = nn.utils.clip_grad_norm_ if plan is None else lambda p, limit: optimizer.clip_grad_norm_(limit, p)
            norms.extend(ask(which, limit).item() for which in (few, rest, few + rest) for limit in (0.5, math.inf))
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if plan is None else em.full_state_dict(model, all_ranks=True)
    result = {"norms": seen, "asked": norms, "state": {name: value.clone() for name, value in state.items()}}
    if plan is not None:
        optimizer.close()
    return result


def norms_of(model: nn.Module) -> dict[str, float]:
    return {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


def check_like(wanted: dict[str, Any], found: dict[str, Any]) -> None:
    """Compares what `steps` returned."""
    assert found["asked"] == pytest.approx(wanted["asked"], rel=2e-4)
    for mine, expected in zip(found["norms"], wanted["norms"], strict=True):
        assert mine.keys() == expected.keys()
        for name, norm in expected.items():
            assert mine[name] == pytest.approx(norm, rel=2e-4, abs=1e-7), name
    for name, value in wanted["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=0, atol=TOLERANCE)


PLANS = {
    "ddp": em.Plan.ddp(),
    "zero3": em.Plan.zero3(rcache_blocks=3, chunk_numel=2048),
    "offload": em.Plan.offload(chunk_numel=2048),
}


@pytest.mark.parametrize("clips", [(LIMIT, None), (None, 0.05), (LIMIT, 0.05)], ids=["value", "norm", "both"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_as_in_one_plain_process(plan: str, world: int, clips: tuple[Any, Any], ranks: Ranks) -> None:
    wanted = steps(None, *clips)
    for found in ranks(world).run(steps, PLANS[plan], *clips):
        check_like(wanted, found)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", [*PLANS, "disk"])
def test_some_of_the_parameters_are_clipped(plan: str, world: int, ranks: Ranks, tmp_path: Path) -> None:
    disk = em.Plan.offload(chunk_numel=2048, disk=str(tmp_path), disk_chunks=2, values_on_disk=True)
    wanted = steps(None, LIMIT, 0.02, part=True)
    for found in ranks(world).run(steps, disk if plan == "disk" else PLANS[plan], LIMIT, 0.02, part=True):
        check_like(wanted, found)


@pytest.fixture
def pair() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero2())
    yield model, optimizer
    optimizer.close()


@pytest.mark.parametrize("limit", [-1, "a", None, float("nan"), 10**400])
def test_a_limit_that_is_none(pair: Any, limit: Any) -> None:
    with pytest.raises(em.ConfigError, match=r"clip_grad_value_\(clip_value=.*expected a number of at least 0"):
        pair[1].clip_grad_value_(limit)


def test_parameters_of_another_model_are_not_clipped(pair: Any) -> None:
    model, optimizer = pair
    model(torch.ones(2, 8)).sum().backward()
    both = [*model.parameters(), *nn.Linear(2, 2).parameters()]
    for clip in (optimizer.clip_grad_norm_, optimizer.clip_grad_value_):
        with pytest.raises(em.UsageError, match=r"clip_grad_\w+_.*2 of 6 parameters"):
            clip(1.0, both)
    optimizer.step()


def clip_by_rank() -> str:
    """(rank) The message of ranks that clip different parameters."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero2())
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(em.UsageError) as error:
        optimizer.clip_grad_norm_(1.0, model[dist.get_rank()].weight)
    optimizer.zero_grad()
    optimizer.close()
    return str(error.value)


def clip_what_is_foreign_to_one_rank() -> list[str]:
    """(rank) The messages of ranks of which one is given a parameter of another model."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero2())
    model(torch.ones(2, 8)).sum().backward()
    given = [nn.Parameter(torch.ones(3)) if dist.get_rank() else model[0].weight]
    said = []
    for clip in (optimizer.clip_grad_norm_, optimizer.clip_grad_value_):
        with pytest.raises(em.UsageError) as error:
            clip(1.0, given)
        said.append(str(error.value))
    optimizer.step()
    optimizer.close()
    return said


def test_a_parameter_that_is_foreign_to_one_rank_is_told_to_all(ranks: Ranks) -> None:
    for said in ranks(2).run(clip_what_is_foreign_to_one_rank):
        assert every("1 of 1 parameters" in text for text in said)


def test_ranks_that_clip_different_parameters(ranks: Ranks) -> None:
    for said in ranks(2).run(clip_by_rank):
        assert "clip_grad_norm_(1.0, ['0.weight']) on rank 0, clip_grad_norm_(1.0, ['1.weight']) on rank 1" in said


def clip_a_part_after_the_norm() -> str:
    """(rank) The message of ranks that know the norm already, and clip different parameters."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero2())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.clip_grad_norm_(torch.inf)
    with pytest.raises(em.UsageError) as error:
        optimizer.clip_grad_norm_(1.0, model[dist.get_rank()].weight)
    optimizer.zero_grad()
    optimizer.close()
    return str(error.value)


def test_ranks_that_clip_different_parameters_after_the_norm(ranks: Ranks) -> None:
    for said in ranks(2).run(clip_a_part_after_the_norm):
        assert "'0.weight' is among the parameters of 1 ranks of 2" in said


ODD: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "all and a part": (
        lambda optimizer, _: optimizer.clip_grad_norm_(1.0),
        lambda optimizer, model: optimizer.clip_grad_norm_(1.0, model[0].parameters()),
    ),
    "given and a part": (
        lambda optimizer, model: optimizer.clip_grad_norm_(1.0, model.parameters()),
        lambda optimizer, model: optimizer.clip_grad_norm_(1.0, [model[0].weight]),
    ),
    "limits": (
        lambda optimizer, _: optimizer.clip_grad_norm_(1.0),
        lambda optimizer, _: optimizer.clip_grad_norm_(2.0),
    ),
    "nothing": (lambda optimizer, _: optimizer.step(), lambda optimizer, _: optimizer.clip_grad_norm_(1.0)),
    "values": (
        lambda optimizer, _: optimizer.clip_grad_value_(1.0),
        lambda optimizer, model: optimizer.clip_grad_value_(1.0, model[1].weight),
    ),
    "norm and values": (
        lambda optimizer, _: optimizer.clip_grad_norm_(1.0),
        lambda optimizer, _: optimizer.clip_grad_value_(1.0),
    ),
    "foreign": (
        lambda optimizer, _: optimizer.clip_grad_norm_(1.0),
        lambda optimizer, model: optimizer.clip_grad_norm_(1.0, [*model.parameters(), nn.Parameter(torch.ones(1))]),
    ),
}


def step_after(refused: Callable[[Any, nn.Module], None], *, clip: bool) -> tuple[str, bool]:
    """(rank) What is said of `refused`, and whether a step afterwards is that of ranks that did nothing of the kind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    other = copy.deepcopy(model)
    found = []
    said = ""
    for odd, plain in ((True, model), (False, other)):
        groups = [
            {"params": layer.parameters(), "lr": 1e-3 * (i + 1), "count": 0, "kind": "own", "inner": {}, "extra": None}
            for i, layer in enumerate(plain)
        ]
        model, optimizer = em.wrap(plain, torch.optim.AdamW(groups), plan=em.Plan.zero2())
        model(torch.ones(2, 8)).sum().backward()
        if odd:
            before = dict(optimizer.param_groups[1])
            with pytest.raises(em.UsageError) as error:
                refused(optimizer, model)
            said = str(error.value)
            optimizer.param_groups[1].update(before)
        if clip:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        found.append(em.full_state_dict(model, all_ranks=True))
        optimizer.close()
    return said, all(torch.equal(found[0][name], value) for name, value in found[1].items())


def clip_oddly(name: str) -> tuple[str, bool]:
    """(rank) As `step_after`, of ranks that clip differently."""
    return step_after(ODD[name][dist.get_rank()], clip=True)


@pytest.mark.parametrize("name", ODD)
def test_ranks_that_clip_differently_fail_together(name: str, ranks: Ranks) -> None:
    for said, same in ranks(2).run(clip_oddly, name):
        assert "ranks disagree about clipping: it is " in said and " on rank 1" in said
        assert same


PARTED = {
    "lr": lambda group: group.update(lr=0.1),
    "lr as a tensor": lambda group: group.update(lr=torch.tensor(0.1)),
    "betas": lambda group: group.update(betas=(0.8, 0.999)),
    "weight_decay": lambda group: group.update(weight_decay=0.0),
    "count": lambda group: group.update(count=3),  # no default of the optimizer's
    "kind": lambda group: group.update(kind="other"),
    "inner": lambda group: group.update(inner={"kind": "other"}),
    "extra": lambda group: group.update(extra="a string on one rank"),
}


def step_at_other_options(name: str, clip: bool) -> tuple[str, bool]:
    """(rank) As `step_after`, if rank 1 has other options than rank 0."""

    def update(optimizer: Any, _: nn.Module) -> None:
        if dist.get_rank() == 1:
            PARTED[name](optimizer.param_groups[1])
        optimizer.clip_grad_norm_(0.5) if clip else optimizer.step()

    return step_after(update, clip=clip)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("name", PARTED)
def test_ranks_whose_options_have_parted_fail_together(name: str, clip: bool, ranks: Ranks) -> None:
    for said, same in ranks(2).run(step_at_other_options, name, clip):
        assert f"ranks disagree about the options of the step: param_groups[1][{name.split()[0]!r}]" in said
        assert " on rank 0, " in said and " on rank 1: " in said
        assert same


def step_apart_after_clipping(folder: str, then: str) -> str:
    """(rank) What the next clipping or save says if rank 1 has another rate for one step, set when all had clipped."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), plan=em.Plan.ddp())
    em.save(folder, model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + dist.get_rank())
        with pytest.raises(em.UsageError) as error:
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e-3
            if then == "save":
                em.save(f"{folder} too", model, optimizer)
            if then == "export":
                em.full_state_dict(model, all_ranks=True)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.clip_grad_norm_(0.5)
        assert not Path(f"{folder} too").exists()
        with pytest.raises(em.UsageError, match=r"em\.load a checkpoint"):
            optimizer.step()
        em.load(folder, model, optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.clip_grad_norm_(0.5)
    optimizer.step()
    optimizer.close()
    return str(error.value)


@pytest.mark.parametrize("then", ["clip", "save", "export"])
def test_a_step_whose_options_parted_after_clipping_is_found(then: str, ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks(2).run(step_apart_after_clipping, str(tmp_path / "saved"), then):
        assert "the options of the last step: param_groups[0]['lr'] is 0.1 on rank 0, 0.2 on rank 1" in said
        assert "from a checkpoint (em.load)" in said


def step_of_stages() -> str:
    """(rank) The message if ranks of the first of two pipeline stages have parted; all can then take the step."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = nn.Linear(4, 4)
    em.annotate(stage, {"*": em.Pattern(mesh["dp"], replicate=("dp",))})
    stage, optimizer = em.wrap(stage, torch.optim.AdamW(stage.parameters(), lr=1e-3), plan=em.Plan.ddp())
    stage(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(em.UsageError) as error:
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    for _ in range(2):
        optimizer.step()
    optimizer.close()
    return str(error.value)


def test_no_stage_steps_if_ranks_of_another_have_parted(ranks: Ranks) -> None:
    *first, third, fourth = ranks(4).run(step_of_stages)
    assert every("[0]['lr'] is 0.001 on rank 0, 0.1 on rank 1" in said for said in first)
    assert third == fourth and "another pipeline stage" in third


class Counts(torch.optim.Optimizer):
    """Signs of gradients at a rate that falls with the steps that each group has counted."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] / group["steps"] * p.grad.sign())


def count_steps(wrapped: bool) -> tuple[list[int], dict[str, torch.Tensor]]:
    """(rank) Counts and weights after three steps; the first has no gradient of the last layer."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    *others, bias = model.parameters()
    optimizer: Any = Counts([{"params": others}, {"params": [bias]}])
    if wrapped:
        model, optimizer = em.wrap(model, optimizer, plan=em.Plan.zero2())
    for used in (model[0], model, model):
        optimizer.zero_grad()
        used(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    counts = [group["steps"] for group in optimizer.param_groups]
    if not wrapped:
        return counts, model.state_dict()
    weights = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return counts, weights


def test_every_rank_counts_the_steps_of_a_group_that_one_rank_holds(ranks: Ranks) -> None:
    wanted, plain = count_steps(wrapped=False)
    for counts, weights in ranks(2).run(count_steps, wrapped=True):
        assert counts == wanted == [3, 3]
        for name, value in plain.items():
            torch.testing.assert_close(weights[name], value)


def test_a_backward_after_clipping_by_value_is_refused(pair: Any) -> None:
    model, optimizer = pair
    model(torch.ones(2, 8)).sum().backward()
    optimizer.clip_grad_value_(0.1)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(em.UsageError, match="backward ran after"):
        optimizer.step()
    optimizer.zero_grad()


def test_what_is_not_finite_is_not_hidden_by_clipping(pair: Any) -> None:
    model, optimizer = pair
    before = em.full_state_dict(model)
    (model(torch.ones(2, 8)).sum() * torch.inf).backward()
    optimizer.clip_grad_value_(0.1)
    with pytest.raises(em.ElixirError, match="global gradient norm is"):
        optimizer.step()
    optimizer.zero_grad()
    assert same_tensors(before, em.full_state_dict(model))


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest new tensor."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, found.nbytes)
        return found


def test_norms_of_parameters_need_no_copy_of_a_gradient() -> None:
    model, optimizer = em.wrap(*of(nn.Linear(64, 64)), plan=em.Plan.offload(rcache_blocks=2))
    model(torch.ones(4, 64)).sum().backward()
    with Largest() as seen:
        norms = optimizer.grad_norms()
    assert norms == {"weight": 4.0 * 64, "bias": 4.0 * 8}
    assert seen.nbytes < 64 * 64
    optimizer.close()


def of(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("limit", [1.0, 1e30])
def test_a_limit_that_no_fp16_gradient_reaches_clips_nothing(limit: float) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    model, optimizer = em.wrap(
        model, torch.optim.SGD(model.parameters()), plan=em.Plan.zero2(), compute_dtype=torch.float16
    )
    optimizer.scale(model(torch.ones(4, 8, dtype=torch.float16)).float().sum() * 0.2).backward()
    before = optimizer.grad_norms()
    optimizer.clip_grad_value_(limit)
    assert optimizer.grad_norms() == before
    optimizer.close()


def test_clipping_by_value_after_a_norm_of_nothing(pair: Any) -> None:
    model, optimizer = pair
    model(torch.ones(2, 8)).sum().backward()
    optimizer.clip_grad_norm_(0.0)
    optimizer.clip_grad_value_(0.1)
    assert set(optimizer.grad_norms().values()) == {0.0}
    optimizer.zero_grad()


def test_an_infinite_limit_clips_nothing_at_any_time(pair: Any) -> None:
    model, optimizer = pair
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        before = optimizer.grad_norms()
        optimizer.clip_grad_value_(float("inf"))
        assert optimizer.grad_norms() == before and every(norm > 0 for norm in before.values())
    optimizer.step()


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied(pair: Any, act: Callable[[Any], Any]) -> None:
    with pytest.raises(em.UsageError, match="neither be copied nor pickled"):
        act(pair[1])


def test_a_parameter_without_a_gradient_has_no_norm(pair: Any) -> None:
    model, optimizer = pair
    model[1](torch.ones(2, 8)).sum().backward()
    assert set(optimizer.grad_norms()) == {"1.weight", "1.bias"}
    optimizer.zero_grad()
    assert optimizer.grad_norms() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_unscaled_first(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = em.wrap(model, optimizer, plan=em.Plan.zero2(), compute_dtype=dtype)
    before = em.full_state_dict(model)
    optimizer.scale(model(torch.ones(4, 8, dtype=dtype)).float().sum() * 0.2).backward()
    optimizer.clip_grad_value_(0.5)
    norms = optimizer.grad_norms()
    assert norms == pytest.approx({"weight": 4.0, "bias": 0.5 * 8**0.5}, rel=1e-2)
    optimizer.step()
    for name, value in em.full_state_dict(model).items():
        torch.testing.assert_close(value, before[name] - 0.5, rtol=0, atol=4e-3)
    optimizer.close()
