"""Muon on shards against `torch.optim.Muon` in one process.

Where nothing else is said, all ranks have the same rows, and the first all the weight, so that the mean of the
gradients is that of one process to the bit, in whatever order it is summed. SGD trains what Muon does not: it runs
torch's own code. Then every plan makes torch's operations on the same numbers, and weights must be equal to the bit.
Newton-Schulz in bf16 would multiply a difference of the last bit: so torch clips to the norm that the plan has found,
which is compared by itself.
"""

import re
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.chunks import ledger
from elixir_moe.chunks.ledger import footprint
from elixir_moe.chunks.packing import ChunkSpec, build_layout
from elixir_moe.chunks.param_spec import ChunkGroupKey, ParamSpec
from elixir_moe.errors import ConfigError, PlanError
from elixir_moe.memory.disk import DiskFile
from elixir_moe.optim.whole_matrix import Matrix, bands, in_chunk, matrices, owners
from elixir_moe.planner import cost
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.planner.test_auto import MACHINE
from tests.support.cases import placed, with_further
from tests.support.every import every, same_tensors
from tests.support.parity import mesh_of_world, tokens
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
WORDS, WIDTH, ROWS = 48, 16, 8
STEPS = 3
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(chunk_numel=2048),
    "zero3": em.Plan.zero3(chunk_numel=2048, rcache_blocks=4),
    "offload": em.Plan.offload(chunk_numel=2048, rcache_blocks=4),
    "partly on the device": em.Plan.offload(chunk_numel=2048, rcache_blocks=4, device_chunks=2),
}
DISK = em.Plan.offload(chunk_numel=2048, rcache_blocks=4, disk_chunks=4)
ALL_ON_DISK = replace(DISK, values_on_disk=True, chunk_numel=4608, disk_chunks=2)


class Layers(nn.Module):
    """Matrices that are square, wide and tall, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.square = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"wide": nn.Linear(40, WIDTH, bias=False), "tall": nn.Linear(WIDTH, 40)}) for _ in range(3)
        )
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.square(self.words(x))
        for layer in self.layers:
            h = h + layer["wide"](torch.tanh(layer["tall"](h)))  # type: ignore[index]
        return self.head(self.norm(h))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float().flatten(0, -2), x.flatten())


def rows(step: int, micro: int, first: int = 0, count: int = ROWS) -> Tensor:
    return torch.randint(WORDS, (ROWS, 5), generator=torch.Generator().manual_seed(100 * step + micro))[first:][:count]


def build(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return Layers()


def optimizers(model: nn.Module, elementwise: str = "SGD") -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon in two groups for the matrices of layers, and an elementwise optimizer for the rest."""
    matrices = {n: p for n, p in model.named_parameters() if p.ndim == 2 and n.split(".")[0] not in ("words", "head")}
    tall = [p for name, p in matrices.items() if "tall" in name]
    others = [p for name, p in matrices.items() if "tall" not in name]
    muon = torch.optim.Muon(
        [{"params": tall}, {"params": others, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}], lr=0.02
    )
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices.values())]
    kinds = {
        "SGD": lambda: torch.optim.SGD(rest, lr=0.1, momentum=0.9),
        "AdamW": lambda: torch.optim.AdamW(rest, lr=1e-2, eps=1e-4),
    }
    return muon, kinds[elementwise]()


def plain(
    dtype: torch.dtype,
    accumulation: int,
    clip: float | None,
    elementwise: str = "SGD",
    *,
    norms: list[float] | None = None,
    ranks: int = 1,
) -> list[dict[str, Tensor]]:
    """The weights after each step: fp32 masters, forward and backward in `dtype`, gradients summed in fp32.

    `norms` are those that gradients are clipped by, if not by torch's. `ranks` parts of the rows have a backward each.
    """
    model = build()
    computed = deepcopy(model).to(dtype)
    both = optimizers(model, elementwise)
    scheduler = torch.optim.lr_scheduler.LambdaLR(both[0], lambda step: 1 / (1 + step))
    found = []
    for step in range(STEPS):
        for micro in range(accumulation):
            for part in rows(step, micro).chunk(ranks):
                (loss_of(computed, part) / accumulation).backward()
                for master, parameter in zip(model.parameters(), computed.parameters(), strict=True):
                    if parameter.grad is not None:
                        gradient = parameter.grad.float() / ranks
                        master.grad = gradient if master.grad is None else master.grad + gradient
                    parameter.grad = None
        if clip is not None:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(gradients).item()
            if norms is not None:
                assert norms[step] == pytest.approx(norm, rel=1e-6)
                norm = norms[step]
            for gradient in gradients:
                gradient *= min(1.0, clip / (norm + 1e-6))
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        with torch.no_grad():
            for master, parameter in zip(model.parameters(), computed.parameters(), strict=True):
                parameter.copy_(master)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def trained(
    model: nn.Module,
    optimizer: Any,
    steps: range,
    accumulation: int = 1,
    clip: float | None = None,
    *,
    first: int = 0,
    count: int = ROWS,
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """(rank) The weights after each step of a wrapped model, and the norms of the gradients."""
    found, norms = [], []
    weight = 1 if count < ROWS else dist.get_world_size() * (dist.get_rank() == 0)
    for step in steps:
        for micro in range(accumulation):
            loss = weight * loss_of(model, rows(step, micro, first, count)) / accumulation
            optimizer.scale(loss).backward()
        if clip is not None:
            norms.append(optimizer._decision.clip(clip))  # not rounded
        optimizer.step()
        optimizer.zero_grad()
        found.append(em.full_state_dict(model, all_ranks=True))
    return found, norms


def wrapped(
    plan: em.Plan,
    dtype: torch.dtype,
    accumulation: int,
    clip: float | None,
    elementwise: str = "SGD",
    *,
    apart: bool = False,
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """(rank) The same as `plain` under a plan, and the norms; `apart`, each rank has rows of its own."""
    mesh_of_world()
    count = ROWS // dist.get_world_size() if apart else ROWS
    first = count * dist.get_rank() if apart else 0
    model = build()
    both = optimizers(model, elementwise)
    scheduler = torch.optim.lr_scheduler.LambdaLR(both[0], lambda step: 1 / (1 + step))
    model, optimizer = em.wrap(model, both, plan=placed(plan), compute_dtype=dtype)
    found, norms = [], []
    for step in range(STEPS):
        once = range(step, step + 1)
        weights, clipped = trained(model, optimizer, once, accumulation, clip, first=first, count=count)
        scheduler.step()
        found += weights
        norms += clipped
    optimizer.close()
    return found, norms


def every_plan(*given: Any) -> dict[str, tuple[list[dict[str, Tensor]], list[float]]]:
    """(rank) The weights and norms under each plan."""
    return {name: wrapped(plan, *given) for name, plan in PLANS.items()}


CASES = list(product((1, 2, 4), (torch.float32, torch.bfloat16), (1, 4), (None, 0.5)))
QUICK = [CASES[0], CASES[7], CASES[9], CASES[14], CASES[19], CASES[20]]


@pytest.mark.parametrize(("world", "dtype", "accumulation", "clip"), with_further(CASES, QUICK))
def test_weights_are_those_of_torch_to_the_bit_under_every_plan(
    world: int, dtype: torch.dtype, accumulation: int, clip: float | None, ranks: Ranks
) -> None:
    everywhere = ranks(world).run(every_plan, dtype, accumulation, clip)
    for plan in PLANS:
        wanted = plain(dtype, accumulation, clip, norms=everywhere[0][plan][1] if clip else None)
        for found in (of_rank[plan][0] for of_rank in everywhere):
            for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
                assert same_tensors(mine, theirs), f"{plan}, step {step}"


@pytest.mark.parametrize(
    "plan", [PLANS["zero3"], PLANS["offload"], DISK, ALL_ON_DISK], ids=["zero3", "offload", "disk", "all on disk"]
)
def test_rows_of_their_own_and_adamw_give_the_same_weights(plan: em.Plan, ranks: Ranks) -> None:
    """The order of sums differs by a rounding, of which Newton-Schulz makes at most some rounded bf16 elements."""
    wanted = plain(torch.float32, 2, 0.5, "AdamW", ranks=2)
    for found, norms in ranks(2).run(wrapped, plan, torch.float32, 2, 0.5, "AdamW", apart=True):
        assert min(norms) > 0.5, "a step was not clipped"
        for mine, theirs in zip(found, wanted, strict=True):
            for name, weight in theirs.items():
                assert (mine[name] - weight).norm() <= 1e-5 * weight.norm(), name


def on_disk(dtype: torch.dtype, plan: em.Plan) -> list[dict[str, Tensor]]:
    """(rank) The weights of a model of which Muon trains all that is trained, in slices on disk, one for each step."""
    mesh_of_world()
    model = build()
    muon, rest = optimizers(model)
    for parameter in rest.param_groups[0]["params"]:
        parameter.requires_grad_(False)
    with pytest.MonkeyPatch.context() as patch:
        # values are written a slice at a time, in whole pages
        patch.setattr(ledger, "_SPILL_SLICE_NUMEL", 4096 // dtype.itemsize if plan.values_on_disk else 192)
        model, optimizer = em.wrap(model, muon, plan=replace(placed(plan), verify=True), compute_dtype=dtype)
        found, _ = trained(model, optimizer, range(STEPS), 2)
        sliced = [c for c in model._elixir.scheduler.chunks if c.shard.on_disk]
        assert any(c.shard.spec.shard_numel > ledger.spill_slice_numel() for c in sliced)
        assert every(c.shard.gradient_comes_along == plan.values_on_disk for c in sliced)
    optimizer.close()
    return found


@pytest.mark.parametrize("plan", [DISK, ALL_ON_DISK], ids=["disk", "all on disk"])
@pytest.mark.parametrize(("world", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_chunks_on_disk_are_updated_slice_by_slice(world: int, dtype: torch.dtype, plan: em.Plan, ranks: Ranks) -> None:
    """Muon is the only optimizer: nothing else is trained."""
    model = build()
    computed = deepcopy(model).to(dtype)
    muon, rest = optimizers(model)
    for found in ranks(world).run(on_disk, dtype, plan):
        assert len(found) == STEPS
    for step in range(STEPS):
        for micro in range(2):
            (loss_of(computed, rows(step, micro)) / 2).backward()
            for master, parameter in zip(model.parameters(), computed.parameters(), strict=True):
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    master.grad = gradient if master.grad is None else master.grad + gradient
                parameter.grad = None
        muon.step()
        muon.zero_grad()
        rest.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(model.parameters(), computed.parameters(), strict=True):
                parameter.copy_(master)
        trained_by_muon = {p for group in muon.param_groups for p in group["params"]}
        names = [name for name, p in model.named_parameters() if p in trained_by_muon]
        assert same_tensors({n: found[step][n] for n in names}, {n: model.state_dict()[n] for n in names}), step


def resumed(folder: Path, before: str, after: str, world: int) -> list[dict[str, Tensor]]:
    """(rank) Two steps under a plan, saved, or three more of which the second plan has loaded the two."""
    mesh_of_world()
    model = build(seed=3 if before else 9)
    model, optimizer = em.wrap(model, optimizers(model), plan=PLANS[before or after])
    if after:
        em.load(folder, model, optimizer)
    found, _ = trained(model, optimizer, range(2, 4) if after else range(2))
    if before:
        em.save(folder, model, optimizer)
    optimizer.close()
    return found


@pytest.mark.parametrize(("before", "after", "worlds"), [("zero3", "offload", (2, 1)), ("ddp", "zero2", (1, 2))])
def test_a_checkpoint_loads_under_another_plan_and_number_of_ranks(
    before: str, after: str, worlds: tuple[int, int], ranks: Ranks, tmp_path: Path
) -> None:
    first = ranks(worlds[0]).run(resumed, tmp_path / "save", before, "", worlds[0])[0]
    then = ranks(worlds[1]).run(resumed, tmp_path / "save", "", after, worlds[1])[0]
    model = build()
    both = optimizers(model)
    for step, found in enumerate([*first, *then]):
        loss_of(model, rows(step, 0)).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        assert same_tensors(found, model.state_dict()), step


def held(plan: em.Plan, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """(rank) {tier: bytes of state held after a step}, and those that the plan allows."""
    mesh_of_world()
    model = build()
    model, optimizer = em.wrap(model, optimizers(model, "AdamW"), plan=placed(plan), compute_dtype=dtype)
    trained(model, optimizer, range(1))
    inspection, kept = em.inspect(model), model._elixir.kept
    device, host = inspection.footprint.memory_bytes(1)
    assert model._elixir.held_bytes() == {"device": device, "host": host, "disk": inspection.footprint.disk_bytes}
    counted: dict[str, int] = {}
    for chunk in model._elixir.scheduler.chunks:
        for tier, nbytes in chunk.shard.held_bytes().items():
            counted[tier] = counted.get(tier, 0) + nbytes
        counted[chunk.shard.tier] = counted.get(chunk.shard.tier, 0) + kept.bytes_of(chunk)
    allowed = {tier: nbytes for tier, nbytes in inspection.footprint.shard_bytes.items() if nbytes}
    optimizer.close()
    return counted, allowed


@pytest.mark.parametrize("plan", [*PLANS.values(), DISK, ALL_ON_DISK], ids=[*PLANS, "disk", "all on disk"])
def test_the_ledger_counts_one_moment_of_each_matrix(plan: em.Plan, ranks: Ranks) -> None:
    for counted, allowed in ranks(2).run(held, plan, torch.bfloat16):
        assert counted == allowed


def test_a_matrix_takes_four_bytes_of_state_beside_the_master() -> None:
    layout = build_layout([spec_of("w", (64, 64), "Muon", (0, 1))])
    needed = footprint(em.Plan.zero3(rcache_blocks=2), layout, over_gloo=True)
    assert needed.shard_bytes["device"] == 64 * 64 * (2 + 4 + 4) // 2


def test_an_update_in_fp32_has_room_for_several_small_matrices() -> None:
    sizes = {"Muon": 2 * 32 * 32, "Muon in fp32": 4 * 24 * 32 * 32}
    for optimizer, nbytes in sizes.items():
        spec = replace(spec_of("w", (24, 32, 32), optimizer, (0, 1)), matrix=(32, 32))
        needed = footprint(em.Plan.zero3(rcache_blocks=2), build_layout([spec]), over_gloo=True)
        assert needed.workspace_bytes == 6 * nbytes


def spec_of(name: str, shape: tuple[int, ...], optimizer: str, group: tuple[int, ...]) -> ParamSpec:
    key = ChunkGroupKey(ranks=group, dtype=torch.bfloat16, trainable=True, divisor=len(group), optimizer=optimizer)
    return ParamSpec(name=name, shape=shape, key=key)


def of_chunk(chunk: ChunkSpec, shapes: list[tuple[int, ...]]) -> tuple[Matrix, ...]:
    return in_chunk(chunk, [list(matrices(shapes[slot.param], {})) for slot in chunk.slots])


def test_owners_share_the_work_of_a_chunk_and_of_all() -> None:
    everyone = (0, 1, 2, 3)
    shapes = [(64, 64), (64, 64), (128, 64), (64, 128), (64, 64), (64, 64), (8, 8)]
    specs = [spec_of(f"w{i}", shape, "Muon", everyone) for i, shape in enumerate(shapes)]
    (chunk,) = build_layout(specs, 1 << 16).chunks
    (found,) = owners([(chunk, of_chunk(chunk, shapes))])
    assert found == (2, 3, 0, 1, 2, 3, 0), "the two costliest have a rank each, the four others share two"
    square = [(64, 64)] * 8
    single = build_layout([spec_of(f"w{i}", (64, 64), "Muon", everyone) for i in range(8)], 64 * 64).chunks
    assert [owner for (owner,) in owners([(one, of_chunk(one, square)) for one in single])] == [0, 1, 2, 3] * 2


def test_process_groups_with_slices_of_the_same_matrices_choose_alike() -> None:
    """A group of all ranks in between, which only one of the others' members sees busy, changes nothing."""
    shapes = [(8, 8)] * 5
    found = []
    for ranks in ((0, 2), (1, 3)):
        specs = [spec_of(f"w{i}", (8, 8), "Muon", ranks if i != 1 else (0, 1, 2, 3)) for i in range(5)]
        chunks = build_layout(specs, 64).chunks
        chosen = owners([(chunk, of_chunk(chunk, shapes)) for chunk in chunks])
        found.append([chunk.key.ranks.index(one) for chunk, (one,) in zip(chunks, chosen, strict=True)])
    assert found[0] == found[1] == [0, 0, 1, 0, 1]


def test_a_stack_and_a_fused_matrix_have_their_parts() -> None:
    stack = list(matrices((3, 4, 6), {}))
    assert [(one.start, one.shape, one.stride) for one in stack] == [(0, (4, 6), 6), (24, (4, 6), 6), (48, (4, 6), 6)]
    fused = list(matrices((2, 6, 4), {"split_rows": (3, 2, 1), "split_columns": 2}))
    assert [(one.start, one.shape) for one in fused[:4]] == [(0, (3, 2)), (2, (3, 2)), (12, (2, 2)), (14, (2, 2))]
    assert sum(one.shape[0] * one.shape[1] for one in fused) == 48
    assert bands(fused, 4) == [
        (0, 12, (3, 2)),
        (12, 20, (2, 2)),
        (20, 24, (1, 2)),
        (24, 36, (3, 2)),
        (36, 44, (2, 2)),
        (44, 48, (1, 2)),
    ]
    assert bands(stack, 6) == [(0, 72, (4, 6))]


def test_a_chunk_has_matrices_alone() -> None:
    specs = [spec_of("a", (4, 4), "Muon", (0,)), spec_of("b", (4, 4), "", (0,)), spec_of("c", (4, 4), "Muon", (0,))]
    assert [[slot.param for slot in chunk.slots] for chunk in build_layout(specs, 1 << 10).chunks] == [[0, 2], [1]]


class Mine(torch.optim.Muon):
    """An optimizer that may do anything."""


def refusals() -> dict[str, tuple[Callable[[nn.Module], Any], Any, str]]:
    zero3 = em.Plan.zero3()
    muon, sgd = (lambda model: optimizers(model)[0]), (lambda model: optimizers(model)[1])
    return {
        "missing": (muon, zero3, "trainable parameters are in no param_group"),
        "twice": (
            lambda m: (muon(m), torch.optim.SGD(m.parameters())),
            zero3,
            "Muon and SGD of em.wrap share parameters",
        ),
        "two elementwise": (
            lambda m: (muon(m), sgd(m), sgd(m)),
            zero3,
            r"at most one elementwise optimizer, got .*'SGD', 'SGD'",
        ),
        "two of matrices": (lambda m: (muon(m), muon(m)), zero3, "at most one optimizer of whole matrices"),
        "no optimizer": (lambda m: (muon(m), 3), zero3, "a sequence of them such as .* 'int'"),
        "nothing": (lambda m: (), zero3, "a sequence of them such as"),
        "a class of its own": (lambda m: Mine(optimizers(m)[0].param_groups), zero3, "Mine is a subclass of Muon"),
        "narrow": (lambda m: optimizers(m), em.Plan.zero3(moments="bf16"), "Muon keeps fp32"),
    }


@pytest.mark.parametrize("case", refusals())
def test_what_muon_cannot_do_is_refused_with_what_to_do_instead(case: str) -> None:
    make, plan, message = refusals()[case]
    model = build()
    with pytest.raises(ConfigError, match=message):
        em.wrap(model, make(model), plan=plan)


class Fused(nn.Module):
    """A stack of experts of which every token takes part of each, fused attention, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.gate_up = nn.Parameter(torch.randn(4, 2 * 16, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, WIDTH, 16) / 4)
        self.across = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        q, k, v = self.qkv(h).split((WIDTH, 8, 8), -1)
        h = h + q.tanh() * torch.cat((k, v), -1)
        gate, up = torch.einsum("...d,efd->...ef", h, self.gate_up).chunk(2, -1)
        h = h + torch.einsum("...ef,edf->...d", gate.sigmoid() * up, self.down)
        left, right = (h @ self.across).chunk(2, -1)
        return (left + right.tanh()) @ self.words.weight.T


def fused_optimizers(model: Any) -> tuple[em.Muon, torch.optim.Optimizer]:
    groups = [
        {"params": [model.qkv.weight], "split_rows": (WIDTH, 8, 8)},
        {"params": [model.gate_up], "split_rows": 2},
        {"params": [model.across], "split_columns": 2, "nesterov": False},
        {"params": [model.down], "adjust_lr_fn": "match_rms_adamw"},
    ]
    return em.Muon(groups, lr=0.02), torch.optim.SGD([model.words.weight], lr=0.1)


def by_torch(model: nn.Module, steps: int) -> list[dict[str, Tensor]]:
    """The weights of a `Fused` of which torch's own Muon trains each matrix as a parameter of its own."""
    parts: dict[str, list[Tensor]] = {
        "qkv.weight": list(model.qkv.weight.detach().split((WIDTH, 8, 8))),  # type: ignore[union-attr, operator]
        "gate_up": [part for expert in model.gate_up.detach() for part in expert.chunk(2)],  # type: ignore[union-attr]
        "across": list(model.across.detach().chunk(2, 1)),  # type: ignore[union-attr, operator]
        "down": list(model.down.detach()),  # type: ignore[union-attr, call-overload]
    }
    single = {name: [nn.Parameter(part.clone()) for part in those] for name, those in parts.items()}
    muon = torch.optim.Muon(
        [
            {"params": [*single["qkv.weight"], *single["gate_up"]]},
            {"params": single["across"], "nesterov": False},
            {"params": single["down"], "adjust_lr_fn": "match_rms_adamw"},
        ],
        lr=0.02,
    )
    rest = torch.optim.SGD([model.words.weight], lr=0.1)  # type: ignore[union-attr, list-item]
    found = []
    for step in range(steps):
        loss_of(model, rows(step, 0)).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        cut = {
            "qkv.weight": gradients["qkv.weight"].split((WIDTH, 8, 8)),
            "gate_up": [part for expert in gradients["gate_up"] for part in expert.chunk(2)],
            "across": gradients["across"].chunk(2, 1),
            "down": gradients["down"],
        }
        for name, those in cut.items():
            for part, gradient in zip(single[name], those, strict=True):
                part.grad = gradient.contiguous()
        muon.step()
        rest.step()
        model.zero_grad()
        with torch.no_grad():
            for name, those in single.items():
                for view, part in zip(parts[name], those, strict=True):
                    view.copy_(part)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


def fused(plan: str) -> list[dict[str, Tensor]]:
    """(rank) The weights of a `Fused` behind each step; in plain PyTorch without a plan."""
    mesh_of_world()
    torch.manual_seed(2)
    model = Fused()
    blocks = "all" if PLANS[plan].scatter else PLANS[plan].rcache_blocks
    model, optimizer = em.wrap(model, fused_optimizers(model), plan=replace(PLANS[plan], rcache_blocks=blocks))
    found, _ = trained(model, optimizer, range(STEPS))
    optimizer.close()
    return found


def test_a_plain_model_is_trained_as_if_each_matrix_were_a_parameter_of_torchs_muon() -> None:
    torch.manual_seed(2)
    wanted = by_torch(Fused(), STEPS)
    torch.manual_seed(2)
    model = Fused()
    both = fused_optimizers(model)
    for step, theirs in enumerate(wanted):
        loss_of(model, rows(step, 0)).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        assert same_tensors(model.state_dict(), theirs), step


@pytest.mark.parametrize(("world", "plan"), [(1, "offload"), (2, "zero3"), (2, "ddp"), (4, "zero2")])
def test_each_expert_and_each_part_of_a_fused_matrix_is_orthogonalized_by_itself(
    world: int, plan: str, ranks: Ranks
) -> None:
    torch.manual_seed(2)
    wanted = by_torch(Fused(), STEPS)
    for found in ranks(world).run(fused, plan):
        for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert same_tensors(mine, theirs), step


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4,), {}, "updates matrices, and a parameter has the shape"),
        ((4, 6), {"split_rows": 3}, "split_rows=3 does not make up the 4"),
        ((4, 6), {"split_rows": (1, 2)}, "does not make up the 4"),
        ((4, 6), {"split_columns": (2, 4)}, "expected the number of equal parts"),
    ],
)
def test_parts_that_do_not_make_up_a_matrix_are_refused(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        em.Muon([nn.Parameter(torch.zeros(shape))], **options)


MIXTURE = GPTConfig(
    vocab_size=64, seq_len=8, n_layers=2, d_model=16, n_heads=2, experts=(0, 4), ep=(1, 2), aux_coefficient=0.0
)


def of_matrices(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon in fp32 for the matrices of blocks, those of experts too, and AdamW for the rest, biases of experts too.

    In bf16 the iteration would multiply a difference of the last bit, which the order of sums makes.
    """
    named = {
        name: p
        for name, p in model.named_parameters()
        if name.startswith("blocks") and p.ndim >= 2 and "router" not in name and not re.search(r"\.b_\w+$", name)
    }
    assert any(p.ndim == 3 for p in named.values())
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in named.values())]
    return em.Muon(named.values(), lr=0.02, ns_dtype="fp32"), torch.optim.AdamW(rest, lr=1e-2, eps=1e-4)


def mixture(plan: em.Plan | None, tp: int = 1) -> tuple[dict[str, Tensor], list[str]]:
    """(rank) The weights of a mixture that iterates in fp32, and its chunk groups; in plain PyTorch without a plan."""
    mesh = None if plan is None else mesh_of_world(tp)
    torch.manual_seed(5)
    model = GPT(MIXTURE, mesh)
    weight, groups = 1, list[str]()
    both: Any = of_matrices(model)
    if plan is not None:
        assert mesh is not None
        em.annotate(model, gpt_patterns(model))
        model, optimizer = em.wrap(model, both, plan=plan)
        weight = mesh.size(0) * (mesh.get_local_rank("dp") == 0)
        groups = [chunk.key.label for chunk in em.inspect(model).layout.chunks]
        both = (optimizer,)
    for step in range(STEPS):
        batch = tokens(step, 0, MIXTURE.seq_len, MIXTURE.vocab_size)
        (weight * lm_loss(model, batch)).backward()
        for one in both:
            one.step()
            one.zero_grad()
    if plan is None:
        return model.state_dict(), groups
    found = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return found, groups


@pytest.mark.parametrize(("world", "plan"), [(2, "zero3"), (4, "offload")])
def test_expert_parallel_stacks_are_updated_where_they_are(world: int, plan: str, ranks: Ranks) -> None:
    """Experts of ep=2: on two ranks each is one rank's, on four two ranks share a chunk of them."""
    wanted, _ = mixture(None)
    for found, groups in ranks(world).run(mixture, replace(PLANS[plan], chunk_numel=4096)):
        assert any(re.match(r"ranks \d /.* Muon in fp32$", group) for group in groups) is (world == 2)
        for name, weight in wanted.items():
            assert (found[name] - weight).norm() <= 1e-5 * weight.norm(), name


def mixture_of_own_rows(plan: em.Plan | None, seed: int) -> dict[str, Tensor]:
    """(rank) The weights of a mixture that iterates in fp32, each rank with its own rows; plain without a plan."""
    mesh = None if plan is None else mesh_of_world()
    torch.manual_seed(seed)
    model = GPT(MIXTURE, mesh)
    both: Any = of_matrices(model)
    ranks, rank = 1, 0
    if mesh is not None and plan is not None:
        ranks, rank = mesh.size(0), mesh.get_local_rank("dp")
        em.annotate(model, gpt_patterns(model))
        model, optimizer = em.wrap(model, both, plan=plan)
        both = (optimizer,)
    for step in range(STEPS):
        lm_loss(model, tokens(step, 0, MIXTURE.seq_len, MIXTURE.vocab_size).chunk(ranks)[rank]).backward()
        for one in both:
            one.step()
            one.zero_grad()
    if plan is None:
        return model.state_dict()
    found = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return found


@pytest.mark.parametrize("plan", ["zero3", "offload"])
@pytest.mark.parametrize("seed", [5, 6])
def test_a_mixture_differs_by_the_order_of_sums_only(plan: str, seed: int, ranks: Ranks) -> None:
    """In bf16, plain PyTorch differs a thousand times as much between a batch and its halves."""
    wanted = mixture_of_own_rows(None, seed)
    given = replace(PLANS[plan], chunk_numel=4096, rcache_blocks=8)
    for found in ranks(2).run(mixture_of_own_rows, given, seed):
        for name, weight in wanted.items():
            assert (found[name] - weight).norm() <= 1e-5 * weight.norm(), name


def moved(plan: em.Plan, ns_dtype: str) -> tuple[dict[str, int], dict[str, int]]:
    """(rank) The bytes that a step moves, counted and predicted."""
    mesh_of_world()
    model = build()
    both = optimizers(model)
    for group in both[0].param_groups:
        group["ns_dtype"] = ns_dtype
    model, optimizer = em.wrap(model, both, plan=plan, sample=rows(0, 0), step=loss_of)
    trained(model, optimizer, range(2))
    found = []
    for step in range(2, 4):
        before = Counter(em.inspect(model).statistics.collective_bytes)
        loss_of(model, rows(step, 0)).backward()
        optimizer.step()
        found.append(Counter(em.inspect(model).statistics.collective_bytes) - before)
    assert found[0] == found[1], found
    ways = {"all_gather": "gathered", "reduce_scatter": "reduced", "all_reduce": "reduced"}
    counted = Counter[str]()
    for (_, kind), nbytes in found[0].items():
        counted[ways[kind]] += nbytes
    predicted = em.inspect(model).step_bytes()
    optimizer.close()
    return counted, {way: predicted[way] for way in counted}


@pytest.mark.parametrize(
    ("world", "plan", "ns_dtype"),
    [(2, "zero3", "bf16"), (2, "zero3", "fp32"), (2, "ddp", "bf16"), (4, "offload", "bf16")],
)
def test_a_step_sends_what_the_planner_counts(world: int, plan: str, ns_dtype: str, ranks: Ranks) -> None:
    given = PLANS[plan] if plan == "ddp" else replace(PLANS[plan], rcache_blocks=8)
    for counted, predicted in ranks(world).run(moved, given, ns_dtype):
        assert counted == predicted
        assert set(counted) == ({"reduced"} if plan == "ddp" else {"gathered", "reduced"})


def test_a_searched_plan_counts_bytes_and_seconds_of_muon_and_trains_alike() -> None:
    found = {}
    for name in ("Muon", "AdamW"):
        model = build()
        both: Any = optimizers(model) if name == "Muon" else torch.optim.AdamW(model.parameters())
        plan = em.Plan.auto(loss_of, rows(0, 0), hardware=MACHINE)
        model, optimizer = em.wrap(model, both, plan=plan)
        if name == "Muon":
            weights, _ = trained(model, optimizer, range(STEPS))
        prediction = model._elixir.prediction
        found[name] = em.inspect(model).footprint, prediction.forecast.seconds
        optimizer.close()
    (muon, seconds), (adamw, others) = found["Muon"], found["AdamW"]
    assert sum(muon.shard_bytes.values()) < sum(adamw.shard_bytes.values())
    assert muon.workspace_bytes == 12 * 40 * WIDTH
    assert not adamw.workspace_bytes
    assert seconds.device_update > others.device_update
    model = build()
    both = optimizers(model)
    for step, mine in enumerate(weights):
        loss_of(model, rows(step, 0)).backward()
        for one in both:
            one.step()
            one.zero_grad()
        assert same_tensors(mine, model.state_dict()), step


def searched(folder: Path, host_bytes: int) -> tuple[em.Plan, list[dict[str, Tensor]]]:
    """(rank) The plan found where host memory is too small, with a disk beside it, and the weights behind each step."""
    mesh_of_world()
    model, muon = deep()
    wanted = em.Plan.auto(lm_loss, tokens(0, 0, 8, 32), hardware=MACHINE, budget=1_500_000)
    with mock.patch("elixir_moe.planner.auto.host_bytes_left", return_value=1_500_000 + host_bytes):
        with pytest.raises(PlanError, match=r"or [\d.]+ [KMG]iB more on a disk"):
            em.wrap(model, muon, plan=wanted)
        model, optimizer = em.wrap(model, muon, plan=replace(wanted, disk=str(folder)))
    found = stepped(model, optimizer)
    shown, forecast = em.inspect(model), model._elixir.prediction.forecast
    predicted = {"device": forecast.device_bytes, "host": forecast.host_bytes, "disk": forecast.disk_bytes}
    assert shown.held_bytes == predicted
    optimizer.close()
    return shown.plan, found


def deep() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT of which only the matrices of blocks are trained, by Muon."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=32, seq_len=8, n_layers=4, d_model=64, n_heads=2, tie_embeddings=False))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.ndim == 2 and "blocks" in name)
    return model, torch.optim.Muon([p for p in model.parameters() if p.requires_grad], lr=0.02)


def stepped(model: Any, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    found = []
    for step in range(STEPS):
        lm_loss(model, tokens(step, 0, 8, 32)).backward()
        optimizer.step()
        optimizer.zero_grad()
        values = em.full_state_dict(model) if hasattr(model, "_elixir") else model.state_dict()
        found.append({name: value.clone() for name, value in values.items()})
    return found


@pytest.mark.parametrize(("host_bytes", "whole"), [(1_600_000, False), (1_200_000, True)])
def test_the_search_puts_on_disk_what_host_memory_cannot_take(
    host_bytes: int, whole: bool, ranks: Ranks, tmp_path: Path
) -> None:
    ((plan, found),) = ranks(1).run(searched, tmp_path, host_bytes)
    assert plan.disk_chunks and plan.values_on_disk == whole
    for step, (mine, theirs) in enumerate(zip(found, stepped(*deep()), strict=True)):
        assert same_tensors(mine, theirs), step


@pytest.mark.parametrize("plan", [DISK, ALL_ON_DISK], ids=["disk", "all on disk"])
def test_an_update_reads_and_writes_on_disk_what_the_planner_counts(plan: em.Plan) -> None:
    model = build()
    muon, rest = optimizers(model)
    for parameter in rest.param_groups[0]["params"]:
        parameter.requires_grad_(False)
    model, optimizer = em.wrap(model, muon, plan=placed(plan))
    loss_of(model, rows(0, 0)).backward()
    moved, move = Counter[bool](), DiskFile.move

    def count(file: DiskFile, offset: int, memory: Tensor, *, write: bool) -> None:
        moved[write] += memory.nbytes
        move(file, offset, memory, write=write)

    with mock.patch.object(DiskFile, "move", count):
        optimizer.step()
    shown = em.inspect(model)
    predicted = cost.traffic(shown.plan, shown.layout, [], 1)
    optimizer.close()
    assert (moved[False], moved[True]) == (predicted.disk_read_bytes, predicted.disk_written_bytes)


def in_fp32(plan: em.Plan | None) -> list[dict[str, Tensor]]:
    """(rank) The weights of a `Fused` that iterates in fp32, each rank with its own rows; plain without a plan."""
    torch.manual_seed(2)
    model: Any = Fused()
    both: Any = fused_optimizers(model)
    count, first = ROWS, 0
    for group in both[0].param_groups:
        group["ns_dtype"] = "fp32"
    if plan is not None:
        mesh_of_world()
        count = ROWS // dist.get_world_size()
        first = count * dist.get_rank()
        model, optimizer = em.wrap(model, both, plan=plan)
        both = (optimizer,)
    found = []
    for step in range(STEPS):
        loss_of(model, rows(step, 0, first, count)).backward()
        for one in both:
            one.step()
            one.zero_grad()
        found.append({name: value.clone() for name, value in (model.state_dict() if plan is None else {}).items()})
        if plan is not None:
            found[-1] = em.full_state_dict(model, all_ranks=True)
    if plan is None:
        return found
    assert any("Muon in fp32" in chunk.key.label for chunk in em.inspect(model).layout.chunks)
    optimizer.close()
    return found


@pytest.mark.parametrize(("world", "plan"), [(1, "offload"), (2, "zero3"), (2, "ddp"), (4, "zero2")])
def test_an_iteration_in_fp32_keeps_differences_of_the_order_of_sums_small(world: int, plan: str, ranks: Ranks) -> None:
    wanted = in_fp32(None)
    given = replace(PLANS[plan], rcache_blocks="all" if PLANS[plan].scatter else PLANS[plan].rcache_blocks)
    for found in ranks(world).run(in_fp32, given):
        for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            for name, weight in theirs.items():
                assert (mine[name] - weight).norm() <= 1e-5 * weight.norm(), (step, name)


CUTS = {"columns": 1, "rows": 0, "stack": 1, "stack_of_columns": 2}
"""{matrix that tensor parallelism cuts: the dim}."""
SHAPES = {"columns": (16, 24), "rows": (24, 16), "stack": (3, 12, 8), "stack_of_columns": (3, 8, 12), "uncut": (16, 8)}


GIVEN = {
    name: plan if name == "ddp" else replace(plan, chunk_numel=1024, rcache_blocks="all")
    for name, plan in {**PLANS, "disk": DISK, "all on disk": ALL_ON_DISK}.items()
}
"""The plans of a `Given`."""


class Given(nn.Module):
    """Matrices whose gradients are given: they depend on no order of sums, however the matrices are cut."""

    def __init__(self, place: int, ranks: int) -> None:
        super().__init__()
        self.place, self.ranks = place, ranks
        for number, (name, shape) in enumerate(SHAPES.items()):
            drawn = torch.randn(shape, generator=torch.Generator().manual_seed(number))
            setattr(self, name, nn.Parameter(self.cut(name, drawn)))
        self.shift = nn.Parameter(torch.zeros(4))

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return whole.chunk(self.ranks, CUTS[name])[self.place].contiguous() if name in CUTS else whole

    def forward(self, step: int) -> Tensor:
        total = self.shift.sum()
        for name in SHAPES:
            weight = getattr(self, name)
            total = total + (weight * self.cut(name, gradient_of(name, step)).to(weight)).sum()
        return total


def gradient_of(name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def given_optimizers(model: Any) -> tuple[em.Muon, torch.optim.Optimizer]:
    matrices = [p for name, p in model.named_parameters() if name != "shift"]
    return em.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw"), torch.optim.SGD([model.shift], lr=0.1)


def cut_over_tp(plan: em.Plan) -> list[dict[str, Tensor]]:
    """(rank) The weights of a `Given` behind each step, cut over two tensor-parallel ranks."""
    mesh = mesh_of_world(2)
    model = Given(mesh.get_local_rank("tp"), 2)
    rules = {name: em.Pattern(mesh, replicate=("dp",), shard={"tp": dim}) for name, dim in CUTS.items()}
    em.annotate(model, rules | {"*": em.Pattern(mesh, replicate=("dp", "tp"), partial=("tp",), divisor=mesh.size())})
    model, optimizer = em.wrap(model, given_optimizers(model), plan=plan)
    found = []
    for step in range(STEPS):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(em.full_state_dict(model, all_ranks=True))
    optimizer.close()
    return found


@pytest.mark.parametrize(("world", "plan"), [(2, "zero3"), (4, "zero2"), (4, "offload")])
def test_matrices_cut_over_ranks_are_joined_before_they_are_orthogonalized(world: int, plan: str, ranks: Ranks) -> None:
    model = Given(0, 1)
    both = given_optimizers(model)
    wanted = []
    for step in range(STEPS):
        model(step).backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        wanted.append({name: value.clone() for name, value in model.state_dict().items()})
    for found in ranks(world).run(cut_over_tp, replace(PLANS[plan], chunk_numel=1024, rcache_blocks="all")):
        for step, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
            assert same_tensors(mine, theirs), step


def refused_cut(case: str) -> str:
    """(rank) The error of `wrap` for a matrix that cannot be joined."""
    mesh = mesh_of_world(2)
    model = nn.Linear(8, 16, bias=False)
    view = (2, 8, 8) if case == "view" else None
    cut = em.Pattern(mesh, replicate=("dp",), shard={"tp": 1 if view else 0}, view=view)
    em.annotate(model, {"*": cut})
    muon = em.Muon(model.parameters(), split_rows=2 if case == "fused" else 1)
    with pytest.raises(ConfigError) as refused:
        em.wrap(model, muon, plan=em.Plan.zero3())
    assert not model.weight.is_meta
    return str(refused.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("view", r"'weight' is cut over the axes \['tp'\] in several groups of rows"),
        ("fused", r"cut over ranks \(0, 1\), and its group has split_rows=2"),
    ],
)
def test_matrices_that_cannot_be_joined_are_refused_before_weights_move(case: str, message: str, ranks: Ranks) -> None:
    for said in ranks(2).run(refused_cut, case):
        assert re.search(message, said)


def test_tiles_of_a_matrix_are_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    em.tile(model, at_most=4096)
    said = r"is a tile of a matrix, and Muon updates whole matrices: train it with .*, or .* at_most of 16384 bytes"
    with pytest.raises(ConfigError, match=said):
        em.wrap(model, torch.optim.Muon(model.parameters()), plan=em.Plan.zero3())


def test_the_search_tiles_what_muon_does_not_train() -> None:
    """The embedding is too large for the budget; the matrices are larger than its tiles."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Embedding(4096, 32), nn.Linear(32, 512, bias=False), nn.Linear(512, 32, bias=False))
    twin = deepcopy(model)
    samples = [torch.randint(4096, (4, 8)) for _ in range(STEPS)]

    def both(model: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        muon = torch.optim.Muon([model[1].weight, model[2].weight], lr=0.02)
        return muon, torch.optim.SGD(model[0].parameters(), lr=0.1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    plan = em.Plan.auto(loss, samples[0], hardware=MACHINE, budget=700_000)
    model, optimizer = em.wrap(model, both(model), plan=plan)
    assert len(list(model[0].children())) > 1 and type(model[1]) is nn.Linear
    for x in samples:
        loss(model, x).backward()
        optimizer.step()
    plainly = both(twin)
    for x in samples:
        loss(twin, x).backward()
        for one in plainly:
            one.step()
            one.zero_grad()
    assert same_tensors(em.full_state_dict(model), twin.state_dict())
    optimizer.close()


@pytest.mark.parametrize("plan", ["ddp", "zero3", "offload"])
def test_an_overflow_of_fp16_gradients_changes_nothing_and_small_updates_survive(plan: str) -> None:
    """An update in bf16 takes the place of an fp16 gradient: it is too small for fp16 here, and would be zero."""
    given = PLANS[plan] if plan == "ddp" else replace(PLANS[plan], rcache_blocks=8)
    model = build()
    model, optimizer = em.wrap(model, optimizers(model), plan=given, compute_dtype=torch.float16)
    before = em.full_state_dict(model)
    optimizer.scale(loss_of(model, rows(0, 0)) * float("inf")).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert same_tensors(em.full_state_dict(model), before)
    found, _ = trained(model, optimizer, range(STEPS), clip=1e-6)
    optimizer.close()
    wanted = plain(torch.float32, 1, 1e-6)
    names = [name for name in before if "layers" in name and name.endswith("weight")]
    for name in names:
        moved = wanted[0][name] - before[name]
        assert (found[0][name] - wanted[0][name]).norm() < 0.2 * moved.norm(), name


class Frozen(nn.Module):
    """Frozen layers, which stay gathered from one step to the next, between trained ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.trained = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for frozen, layer in zip(self.frozen, self.trained, strict=True):
            x = torch.tanh(layer(torch.tanh(frozen(x))))
        return x


@pytest.mark.parametrize("blocks", [3, 5, "all"])
def test_an_update_takes_the_block_of_a_frozen_chunk(blocks: Any) -> None:
    given = torch.ones(4, 32)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    single, model = Frozen(), Frozen()
    theirs, mine = (torch.optim.Muon(list(one.trained.parameters()), lr=0.02) for one in (single, model))
    plan = em.Plan.offload(chunk_numel=1024, rcache_blocks=blocks)
    model, optimizer = em.wrap(model, mine, plan=plan, sample=given, step=loss)
    for number in range(STEPS):
        loss(single, given + number).backward()
        theirs.step()
        theirs.zero_grad()
        loss(model, given + number).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert same_tensors(em.full_state_dict(model), single.state_dict()), number
    optimizer.close()
