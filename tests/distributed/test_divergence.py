"""Ranks that run different modules, against plain torch that sees both ranks' rows; and what they may not do."""

import copy
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elixir_moe as em
from elixir_moe.distributed.all_ranks import ControlGroups
from elixir_moe.errors import LayoutError, OutOfStepError
from elixir_moe.runtime.gathers import Gathers
from elixir_moe.runtime.peers import Peers
from elixir_moe.runtime.phase import Phase
from tests.support.cases import placed
from tests.support.parity import assert_alike, trained
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
D, ROWS, STEPS = 16, 8, 3
WHOLE = {
    "ddp": em.Plan.ddp(),
    "ddp, small chunks": em.Plan(scatter=False, offloaded=False, rcache_blocks="all", chunk_numel=1100),
    "whole on the host": em.Plan(scatter=False, offloaded=True, rcache_blocks="all", chunk_numel=1100),
}
SCATTERED = {
    "zero2": em.Plan.zero2(chunk_numel=544),
    "zero3": em.Plan.zero3(rcache_blocks=8, chunk_numel=544),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Layers in an order that is another for each half of the batch; some are left out."""

    def __init__(self, orders: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.orders = orders

    def forward(self, x: Tensor, half: int) -> Tensor:
        x = self.first(x)
        for index in self.orders[half]:
            x = self.layers[index](x)
        return self.last(x)


class Mixture(nn.Module):
    """One layer of experts that skips those without a token; it stands in no list."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(D, D), nn.Linear(D, 4), nn.Linear(D, D)
        linear = (nn.Linear(D, D) for _ in range(4))
        self.experts = nn.ModuleList(e if i % kinds == 0 else nn.Sequential(e, nn.Tanh()) for i, e in enumerate(linear))

    def forward(self, x: Tensor, half: int) -> Tensor:
        x = self.first(x)
        weights, choice = self.router(x).softmax(dim=-1).max(dim=-1)
        choice = choice % 2 + 2 * half  # the halves never share an expert
        out = x
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, weights[rows, None] * expert(x[rows]))
        return self.last(out)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropped layers": lambda: Stack(((0, 1, 3), (0, 2, 3))),
    "a tower for one rank": lambda: Stack(((0, 1), (0, 1, 2, 3))),
    "another order": lambda: Stack(((0, 1, 2, 3), (0, 2, 1, 3))),
    "experts in no list": lambda: Mixture(1),
    "experts of two kinds": lambda: Mixture(2),
}


def train(name: str, plan: em.Plan | None) -> dict[str, Any]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = MODELS[name]()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def backward(model: nn.Module, step: int) -> None:
        rows = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(step)).chunk(2)
        for half in (0, 1):
            if plan is None or dist.get_rank() == half:
                loss = (model(rows[half], half) - rows[half].flip(1)).square().mean()
                (loss / 2 if plan is None else loss).backward()

    return trained(build, backward, plan, STEPS)


def train_all(name: str, plans: dict[str, em.Plan]) -> dict[str, dict[str, Any]]:
    return {key: train(name, plan) for key, plan in plans.items()}


@pytest.mark.parametrize("name", MODELS)
def test_ranks_may_run_other_modules_where_weights_are_whole(name: str, ranks: Ranks) -> None:
    """Adam's tolerance here: updates of 1e-2, eps so large that a sum in another order (1e-7) moves none by 1e-5."""
    wanted = train(name, None)
    plans = WHOLE | (SCATTERED if name.startswith("experts") else {})
    for found in ranks(2).run(train_all, name, plans):
        for plan, result in found.items():
            assert_alike(result, wanted, plan, 1e-5, rel=1e-5)


class Masked(nn.Module):
    """A model of which a loss may leave out what the layer `one` gives."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.checkpointed = kind == "checkpointed"
        self.first, self.one, self.last = nn.Linear(D, D), Layer(), nn.Sequential(Layer(), Layer())
        if kind == "experts":
            mesh = em.expert_mesh(em.init_mesh(device_type="cpu"), ep=2) if dist.is_initialized() else None
            self.first = em.MoE(d_model=D, d_hidden=D, num_experts=4, top_k=2, mesh=mesh)

    def forward(self, x: Tensor, wants: bool) -> Tensor:
        x = self.first(x)
        x = x[0] if isinstance(x, tuple) else x
        one = checkpoint(self.one, x, use_reentrant=False) if self.checkpointed else self.one(x)
        return self.last(x) + (one if wants else one.detach())


def train_masked(kind: str, plan: em.Plan | None, differs: bool) -> dict[str, Any]:
    """Steps of two micro-batches. If it `differs`, the loss of the second half leaves out a layer in some of them.

    In the first micro-batches both losses leave it out: a schedule learned from them lets its weights go after forward.
    """

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Masked(kind)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def backward(model: nn.Module, step: int) -> None:
        for micro in range(2):
            rows = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(2 * step + micro)).chunk(2)
            for half in (0, 1):
                if plan is None or dist.get_rank() == half:
                    wants = not differs or (micro == 1 and (half == 0 or step == 2))
                    loss = (model(rows[half], wants) - rows[half].flip(1)).square().mean()
                    (loss / 2 if plan is None else loss).backward()

    return trained(build, backward, plan, STEPS)


def train_masked_all(plans: dict[str, em.Plan]) -> dict[str, dict[str, Any]]:
    return {key: train_masked("plain", plan, differs=True) for key, plan in plans.items()}


def test_losses_may_depend_on_other_parameters_where_weights_stay_gathered(ranks: Ranks) -> None:
    """The tolerance as above."""
    wanted = train_masked("plain", None, differs=True)
    for found in ranks(2).run(train_masked_all, WHOLE | {"zero2": em.Plan.zero2(chunk_numel=544)}):
        for plan, result in found.items():
            assert_alike(result, wanted, plan, 1e-5, rel=1e-5)


def masked_steps(kind: str, plan: em.Plan, at: tuple[int, int] | None) -> tuple[str, dict[str, Tensor]]:
    """What is said of a micro-batch in which only rank 0's loss depends on a layer; the weights after all steps.

    The step of this micro-batch begins again.
    """
    torch.manual_seed(1)
    model = Masked(kind)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4), plan=placed(plan))
    said = ""

    def micro_batch(step: int, micro: int, *, wants: bool = True) -> None:
        rows = torch.randn(ROWS, D, generator=torch.Generator().manual_seed(2 * step + micro)).chunk(2)
        model(rows[dist.get_rank()], wants).square().mean().backward()

    for step in range(STEPS):
        for micro in range(2):
            if (step, micro) == at:
                with pytest.raises(LayoutError) as found:
                    micro_batch(step, micro, wants=dist.get_rank() == 0)
                said = str(found.value)
                optimizer.zero_grad()
                for before in range(micro):
                    micro_batch(step, before)
            micro_batch(step, micro)
        optimizer.step()
        optimizer.zero_grad()
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return said, state


REFUSED = {
    "zero3": ("plain", em.Plan.zero3(rcache_blocks=4, chunk_numel=544)),
    "offload": ("plain", em.Plan.offload(rcache_blocks=4, chunk_numel=544)),
    "checkpointed": ("checkpointed", em.Plan.zero3(rcache_blocks=6, chunk_numel=544)),
    "experts": ("experts", em.Plan.zero3(rcache_blocks=5, chunk_numel=1100)),
}


def masked_at(at: tuple[int, int]) -> dict[str, tuple[str, float]]:
    """By case: what is said, and how far the weights are from those of a run without this micro-batch."""
    found = {}
    for case, (kind, plan) in REFUSED.items():
        said, state = masked_steps(kind, plan, at)
        wanted = masked_steps(kind, plan, None)[1]
        found[case] = said, max((state[name] - value).abs().max().item() for name, value in wanted.items())
    return found


@pytest.mark.parametrize("at", [(0, 0), (2, 1)])
def test_losses_that_depend_on_other_parameters_are_refused_where_weights_are_gathered_again(
    at: tuple[int, int], ranks: Ranks
) -> None:
    """All ranks say the same before they gather anything, so the step can begin again."""
    first, second = ranks(2).run(masked_at, at)
    assert first == second
    for case, (said, distance) in first.items():
        name = re.match(r"the loss of rank 0 depends on parameter '(.*)', and that of rank 1 does not: ", said)
        assert name is not None and name[1].startswith("one."), (case, said)
        assert distance == 0.0, case


def agree(
    used: list[list[int]], gathered: list[list[int]], issued: tuple[list[int], ...] = ([], [])
) -> tuple[list[int], bool] | str:
    spec = [SimpleNamespace(shards=shards, index=i) for i, shards in enumerate((1, 1, 2, 2))]
    one = SimpleNamespace(issued=issued[dist.get_rank()])
    chunks: Any = [
        SimpleNamespace(spec=s, label=f"chunk {s.index} (weight {s.index})", communicator=one, names=()) for s in spec
    ]
    groups = ControlGroups((0, 1), ())
    try:
        return Peers(groups, chunks, stays=False)(used[dist.get_rank()], (), gathered[dist.get_rank()], Phase())()
    except (LayoutError, OutOfStepError) as error:
        return str(error)
    finally:
        groups.close()


def test_ranks_come_to_one_order(ranks: Ranks) -> None:
    found = ranks(2).run(agree, [[3, 0], [3, 1]], [[2, 3], [2, 3]])
    assert found == [([3, 0, 1], False, True)] * 2
    assert ranks(2).run(agree, [[3, 0], [3, 0]], [[2, 3], [2, 3]]) == [([3, 0], True, True)] * 2


@pytest.mark.parametrize(
    ("used", "gathered", "message"),
    [
        ([[3], [3]], [[2, 3], [3, 2]], r"gathered .*: item 0 is chunk 2 \(weight 2\) on rank 0, chunk 3"),
        ([[3], [3]], [[2, 3], [2]], r"gathered .*: item 1 is chunk 3 \(weight 3\) on rank 0, nothing on rank 1"),
        ([[3], [3, 2]], [[2, 3], [2, 3]], r"used .*: item 0 is chunk 3 \(weight 3\) on rank 0, chunk 2"),
    ],
)
def test_ranks_that_part_learn_it_before_they_mix_gradients(
    used: list[list[int]], gathered: list[list[int]], message: str, ranks: Ranks
) -> None:
    for text in ranks(2).run(agree, used, gathered):
        with pytest.raises(LayoutError, match=message):
            raise LayoutError(text)


def test_ranks_that_are_out_of_step_learn_where_they_parted(ranks: Ranks) -> None:
    for text in ranks(2).run(agree, [[3], [3]], [[2, 3], [2]], ([5, 1], [4, 1])):
        assert text.startswith("some ranks have issued more gathers or reductions than others")
        assert "item 1 is chunk 3 (weight 3) on rank 0, nothing on rank 1" in text
        assert text.endswith("start all ranks again, from the latest checkpoint")


def step_apart() -> str:
    """What `step` says where rank 0 has gathered one chunk more in backward.

    NCCL matches gathers by their order alone: this rank's would have met another one.
    """
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), plan=em.Plan.zero3(chunk_numel=72))
    model(torch.randn(4, 8)).square().mean().backward()
    if dist.get_rank() == 0:
        optimizer._scheduler.gathers.gathered.append(1)
    with pytest.raises(OutOfStepError) as found:
        optimizer.step()
    with pytest.raises(OutOfStepError):
        model(torch.randn(4, 8))
    optimizer.close()
    return str(found.value)


def test_ranks_that_have_gathered_other_weights_in_backward_take_no_step(ranks: Ranks) -> None:
    for said in ranks(2).run(step_apart):
        assert re.match(
            r"ranks disagree about the chunks gathered .*: item \d is chunk \d \(.*\) on rank 0, .* on rank 1, so ",
            said,
        )


def taken_again(plan: em.Plan) -> dict[str, Any]:
    """Steps of which the third fails on both ranks in backward, when rank 1 has begun fewer gathers than rank 0."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(6)))
    plain = copy.deepcopy(model)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan=plan)
    plainly = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    found: dict[str, Any] = {"behind": 0}
    with pytest.MonkeyPatch.context() as patch:
        ahead = dist.get_rank() == 0  # as where updates end earlier, and reductions
        patch.setattr(Gathers, "_may_begin", lambda *_, **__: ahead)
        for step in range(4):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            if step == 2:
                failing = model[2].register_full_backward_pre_hook(lambda *_: 1 // 0)
                loss = model(rows).square().mean()
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                failing.remove()
                found["behind"] = len(optimizer._scheduler.gathers._queue)
                optimizer.zero_grad()
            for each, updates in ((model, optimizer), (plain, plainly)):
                each(rows).square().mean().backward()
                updates.step()
                updates.zero_grad()
    full = em.full_state_dict(model, all_ranks=True)
    found["worst"] = max((full[name] - value).abs().max().item() for name, value in plain.state_dict().items())
    optimizer.close()
    return found


def test_a_step_that_failed_is_taken_again_though_one_rank_was_behind(ranks: Ranks) -> None:
    """Ranks decide alike what to gather; when each gather begins is theirs, and a failure may come in between."""
    ahead, behind = ranks(2).run(taken_again, em.Plan.zero3(rcache_blocks=4, chunk_numel=72))
    assert (ahead["behind"], behind["behind"] > 0) == (0, True)
    assert max(ahead["worst"], behind["worst"]) < 1e-6  # one batch on both ranks: their mean is exact
