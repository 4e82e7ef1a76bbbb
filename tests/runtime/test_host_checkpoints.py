"""What checkpointed regions keep, in host memory: the same bits as on the device, and nothing left behind there."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.errors import PlanError, TierError
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, lm_loss
from tests.support.cases import with_further
from tests.support.every import every, same_tensors
from tests.support.parity import mesh_of_world, tokens
from tests.support.ranks import RankPool

LAYERS, WIDTH = 6, 16
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(),
    "zero3": em.Plan.zero3(),
    "offload": em.Plan.offload(),
}


class Blocks(nn.Module):
    """Checkpointed blocks, each of which gets what the block before it has computed, and one tensor they share."""

    def __init__(self, *, reentrant: bool, writes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.reentrant, self.writes = reentrant, writes
        self.seen: list[weakref.ref[torch.UntypedStorage]] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        shared = x * 0.5
        for index, block in enumerate(self.blocks):
            self.seen.append(weakref.ref(x.untyped_storage()))
            y = checkpoint(self._block, block, x, shared, use_reentrant=self.reentrant)
            if self.writes and index == 2:
                x.mul_(1)
            x = y
        return x

    @staticmethod
    def _block(block: nn.Module, x: Tensor, shared: Tensor) -> Tensor:
        return x + block(x + shared).tanh()


def train(kind: str, plan: str, away: Any, accumulation: int, dtype: torch.dtype | None) -> dict[str, Any]:
    """Losses and weights after three steps, and the bytes in host memory."""
    mesh, rank = mesh_of_world(), dist.get_rank() % 3
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=32, seq_len=8, d_model=WIDTH, n_layers=LAYERS, n_heads=2, checkpoint=kind, **_mixture(plan)
    )
    model = GPT(config, mesh)
    chosen = replace(PLANS[plan], host_checkpoints=away)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=chosen, compute_dtype=dtype)
    losses = []
    for step in range(3):
        for micro in range(accumulation):
            loss = lm_loss(model, tokens(step, micro, config.seq_len, config.vocab_size)[rank : rank + 2])
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    held = em.inspect(model).held_bytes["host"]
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return {"losses": losses, "state": state, "host": held}


def _mixture(plan: str) -> dict[str, Any]:
    return {"experts": (0, 4) * (LAYERS // 2)} if plan == "zero3" else {}


CASES = [
    (kind, plan, away, accumulation, dtype, world)
    for kind in ("reentrant", "non_reentrant")
    for plan in PLANS
    for away in ("all", 2)
    for accumulation, dtype, world in ((1, None, 1), (2, torch.bfloat16, 2), (3, None, 4))
]
QUICK = [CASES[0], CASES[7], CASES[19]]


@pytest.mark.parametrize(("kind", "plan", "away", "accumulation", "dtype", "world"), with_further(CASES, QUICK))
def test_no_bit_changes(
    ranks: Callable[[int], RankPool],
    kind: str,
    plan: str,
    away: Any,
    accumulation: int,
    dtype: torch.dtype | None,
    world: int,
) -> None:
    there = ranks(world).run(train, kind, plan, away, accumulation, dtype)
    here = ranks(world).run(train, kind, plan, 0, accumulation, dtype)
    for mine, theirs in zip(there, here, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert same_tensors(theirs["state"], mine["state"])
        inputs = 2 * 8 * WIDTH * (4 if dtype is None else 2)
        assert mine["host"] - theirs["host"] == (LAYERS if away == "all" else away) * inputs


@pytest.fixture
def world() -> None:
    em.init_mesh(device_type="cpu")


def wrapped(model: nn.Module, away: Any = "all", plan: em.Plan | None = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    plan = replace(em.Plan.zero3() if plan is None else plan, host_checkpoints=away)
    return em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)


IDS = torch.arange(8).view(2, 4)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("away", [0, 2, "all"])
def test_inputs_leave_the_device(reentrant: bool, away: Any) -> None:
    model, optimizer = wrapped(Blocks(reentrant=reentrant), away)
    for _ in range(2):
        model.seen.clear()
        loss = model(IDS).square().mean()
        gc.collect()
        alive = [index for index, seen in enumerate(model.seen) if seen() is not None]
        gone = {0: 0, 2: 2, "all": LAYERS - 1}[away]
        assert len(alive) == LAYERS - gone
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


class Headed(nn.Module):
    """`Blocks` and a head, which the loss may use by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Blocks(reentrant=False), nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(ids))
        return out


def loss_by_parts(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model.head(model.body(ids)).square().mean()  # type: ignore[operator]
    return loss


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("plan", "together"),
    [
        (em.Plan.offload(chunk_numel=32 * WIDTH), 1),
        (em.Plan.offload(chunk_numel=32 * WIDTH), 3),
        (em.Plan.offload(chunk_numel=4096), 1),  # one chunk, and so one unit
        (em.Plan.zero2(chunk_numel=4096), 1),
        (em.Plan.ddp(), 1),
    ],
)
def test_inputs_leave_the_device_in_a_step_that_calls_parts_of_the_model(plan: em.Plan, together: int) -> None:
    held = []
    for away in ("all", 0):
        model, optimizer = wrapped(Headed(), away, plan)
        if together == 1:
            loss_by_parts(model, IDS).backward()
        else:
            em.accumulate(model, loss_by_parts, [IDS] * together)
        optimizer.step()
        held.append(em.inspect(model).held_bytes["host"])
        optimizer.close()
    assert held[0] - held[1] == together * (LAYERS + 1) * IDS.numel() * WIDTH * 4


@pytest.mark.usefixtures("world")
def test_an_input_of_several_regions_goes_once_and_masks_stay() -> None:
    model, optimizer = wrapped(Blocks(reentrant=False))
    model(IDS).square().mean().backward()
    one = IDS.numel() * WIDTH * 4
    assert em.inspect(model).held_bytes["host"] == (LAYERS + 1) * one
    optimizer.step()
    for _ in range(3):
        model(IDS).square().mean().backward()
        optimizer.step()
    assert em.inspect(model).held_bytes["host"] == (LAYERS + 1) * one, "buffers are used again"
    optimizer.close()


@pytest.mark.usefixtures("world")
def test_buffers_serve_batches_of_every_size() -> None:
    model, optimizer = wrapped(Blocks(reentrant=False))
    for rows in (3, 7, 1, 5, 8, 2, 6):
        model(torch.arange(rows)).square().mean().backward()
        optimizer.step()
    assert em.inspect(model).held_bytes["host"] == (LAYERS + 1) * 8 * WIDTH * 4, "those of the largest batch"
    optimizer.close()


@pytest.mark.usefixtures("world")
def test_two_forwards_wait_and_a_graph_is_gone_through_twice() -> None:
    def run(away: Any) -> list[Tensor]:
        model, optimizer = wrapped(Blocks(reentrant=False), away)
        first, second = model(IDS), model(IDS + 4)
        (first.square().mean() * 2).backward(retain_graph=True)
        second.square().mean().backward()
        first.sum().backward()
        with torch.no_grad():
            model(IDS)
        optimizer.step()
        state = em.full_state_dict(model)
        optimizer.close()
        return list(state.values())

    assert every(torch.equal(a, b) for a, b in zip(run("all"), run(0), strict=True))


class Dropped(Blocks):
    """Each region runs three times; nobody keeps what the first run computes, whose inputs the third has again."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        shared = x * 0.5
        for block in self.blocks:
            checkpoint(self._block, block, x, shared, use_reentrant=self.reentrant)
            between = checkpoint(self._block, block, 2 * x, 2 * shared, use_reentrant=self.reentrant)
            x = between + checkpoint(self._block, block, x, shared, use_reentrant=self.reentrant)
        return x


@pytest.mark.usefixtures("world")
def test_an_input_goes_again_if_the_region_that_had_it_is_gone() -> None:
    def run(away: Any) -> dict[str, Tensor]:
        model, optimizer = wrapped(Dropped(reentrant=False), away)
        model(IDS).square().mean().backward()
        optimizer.step()
        state = em.full_state_dict(model)
        optimizer.close()
        return state

    assert same_tensors(run("all"), run(0))


class Chain(Blocks):
    """Each region has one input."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Allocations(TorchDispatchMode):
    """Counts the tensors that are made for copies from host memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.empty_strided.default
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("world")
def test_an_input_comes_back_once() -> None:
    """With the region behind it, or when its own asks for it; that of the last region has not left yet."""
    model, optimizer = wrapped(Chain(reentrant=False))
    loss = model(IDS).square().mean()
    with Allocations() as made:
        loss.backward()
    assert made.count == LAYERS - 1
    optimizer.close()


@pytest.mark.usefixtures("world")
def test_an_input_that_was_written_is_refused_as_by_torch() -> None:
    for plan in (em.Plan.ddp(), em.Plan.zero3()):
        for away in (0, "all"):
            model, optimizer = wrapped(Blocks(reentrant=False, writes=True), away, plan)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                model(IDS).square().mean().backward()
            optimizer.close()


@pytest.mark.usefixtures("world")
def test_a_failed_backward_is_given_up_and_the_next_step_is_right() -> None:
    def run(away: Any, fails: bool) -> Tensor:
        model, optimizer = wrapped(Blocks(reentrant=False), away)
        if fails:
            out = model(IDS)
            out.register_hook(lambda _: None)
            handle = model.blocks[2].register_forward_pre_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                out.square().mean().backward()
            handle.remove()
            optimizer.zero_grad()
        model(IDS).square().mean().backward()
        optimizer.step()
        state = em.full_state_dict(model)
        optimizer.close()
        return torch.cat([value.flatten() for value in state.values()])

    assert torch.equal(run("all", True), run(0, False))


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.usefixtures("world")
def test_too_little_host_memory_is_told_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = wrapped(Blocks(reentrant=False))
    monkeypatch.setattr("elixir_moe.runtime.host_checkpoints.host_bytes_left", lambda: 100)
    with pytest.raises(TierError, match=r"512 B for an activation checkpoint, .*\(412 B short\): keep fewer there"):
        model(IDS)
    monkeypatch.undo()
    model(IDS).square().mean().backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("bad", [-1, 1.5, True, "most", None])
def test_a_number_that_means_nothing_is_refused(bad: Any) -> None:
    with pytest.raises(PlanError, match="host_checkpoints="):
        replace(em.Plan.zero3(), host_checkpoints=bad)
