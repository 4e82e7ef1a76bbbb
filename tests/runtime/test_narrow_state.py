"""Master weights and moments narrower than fp32, under every plan and on any number of ranks.

The oracle takes the whole parameters through the plain step of `test_narrow_step`, in one process. Gradients of the
model are small whole numbers that any order of sums gives exactly, so that all bits must agree.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.chunks.param_spec import has_narrow_state
from elixir_moe.kernels import Rounding
from tests.optim.test_narrow_step import oracle
from tests.support.cases import placed, with_further
from tests.support.every import every, same_tensors
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
BF16, FP32, CODES = torch.bfloat16, torch.float32, torch.uint8
SAMPLES, SEED = 4, 5
SETTINGS: dict[str, Any] = {"lr": 2.0**-9, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0625}
PLANS: dict[str, Callable[..., em.Plan]] = {
    "ddp": em.Plan.ddp,
    "zero2": em.Plan.zero2,
    "zero3": em.Plan.zero3,
    "offload": em.Plan.offload,
    "some on the device": lambda **state: em.Plan.offload(device_chunks=2, chunk_numel=2000, **state),
    "short chunks": lambda **state: em.Plan.zero3(chunk_numel=1400, **state),
    "disk": lambda **state: em.Plan.offload(disk_chunks=99, **state),
    "wholly on disk": lambda **state: em.Plan.offload(disk_chunks=99, values_on_disk=True, **state),
}
SLICE = 512
"""Elements of a slice on disk: two blocks of codes, fewer than a matrix has."""
STATES = [("bf16", "int8"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "int8"), ("fp32", "bf16")]


class Layer(nn.Module):
    """A matrix and a bias that are multiplied by given numbers, which are their gradients."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 33) / 8)
        self.bias = nn.Parameter(torch.randn(33) / 8)

    def forward(self, x: Tensor) -> Tensor:
        numel = self.weight.numel()
        matrix, row = x[:, :numel], x[:, numel : numel + 33]
        return (self.weight.float().flatten() * matrix).sum(1) + (self.bias.float() * row).sum(1)


class Net(nn.Module):
    """Layers whose matrices have blocks of codes that are cut at their ends, and a matrix outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Layer(7)
        self.layers = nn.ModuleList(Layer(rows) for rows in (20, 40, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) + sum(layer(x) for layer in self.layers)


def made() -> Net:
    torch.manual_seed(1)
    return Net().to(BF16)


def batch(step: int, backward: int) -> Tensor:
    """Multiples of 4 below 64: the mean over the samples, and any part of it, is exact in bf16."""
    draw = torch.Generator().manual_seed(100 * step + backward)
    return 4.0 * torch.randint(-15, 16, (SAMPLES, 40 * 33 + 33), generator=draw)


def trained(
    plan: em.Plan,
    steps: int,
    backwards: int = 1,
    early: bool = False,
    loaded: Path | None = None,
    to: Path | None = None,
) -> dict[str, Any]:
    """(rank) The weights after some steps, and what was held for them."""
    with mock.patch("elixir_moe.chunks.ledger._SPILL_SLICE_NUMEL", SLICE):
        return _trained(placed(plan), steps, backwards, early, loaded, to)


def _trained(
    plan: em.Plan, steps: int, backwards: int, early: bool, loaded: Path | None, to: Path | None
) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * SAMPLES // world, (rank + 1) * SAMPLES // world)
    model: Any = made()
    plan = replace(plan, rounding_seed=SEED)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), **SETTINGS), plan=plan, device="cpu")
    begun = 0 if loaded is None else em.load(loaded, model, optimizer)
    for step in range(begun, begun + steps):
        for backward in range(backwards):
            if early and backward == backwards - 1:
                with optimizer.update_in_backward():
                    model(batch(step, backward)[mine]).mean().backward()
            else:
                model(batch(step, backward)[mine]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if to is not None:
        em.save(to, model, optimizer, extra=begun + steps)
    found = em.full_state_dict(model, all_ranks=True)
    seen = em.inspect(model)
    optimizer.close()
    return {"weights": found, "held": seen.held_bytes, "rows": seen.rows, "footprint": seen.footprint}


def by_hand(master: str, moments: str, steps: int, backwards: int = 1) -> dict[str, Tensor]:
    """The weights as plain steps give them: torch's AdamW in fp32, and the oracle where the state is narrow."""
    model = made()
    plain = {name: p.detach().float() for name, p in model.named_parameters()}
    narrow = {name for name in plain if name.startswith("layers") and name.endswith("weight")}
    kinds = {"fp32": FP32, "bf16": BF16, "int8": CODES}
    weights = {n: plain[n].to(BF16 if master == "bf16" else FP32) for n in narrow}
    state = {n: (torch.zeros_like(plain[n].flatten()), torch.zeros_like(plain[n].flatten())) for n in narrow}
    wide = {name: nn.Parameter(p) for name, p in plain.items() if name not in narrow}
    adam = torch.optim.AdamW(wide.values(), **SETTINGS)
    for step in range(steps):
        for p in model.parameters():
            p.grad = None
        total = {name: torch.zeros_like(p) for name, p in plain.items()}
        for backward in range(backwards):
            model(batch(step, backward)).mean().backward()
            for name, p in model.named_parameters():
                assert p.grad is not None
                total[name] += p.grad.float()
                p.grad = None
        for name, p in wide.items():
            p.grad = total[name]
        adam.step()
        beta1, beta2 = SETTINGS["betas"]
        given = {"lr": SETTINGS["lr"], "beta1": beta1, "beta2": beta2, "weight_decay": SETTINGS["weight_decay"]}
        for name in narrow:
            flat, rounding = weights[name].flatten(), Rounding.of(SEED, name, step + 1, 0)
            p, m, v = oracle(flat, *state[name], total[name].flatten(), rounding, step + 1, kinds[moments], **given)
            weights[name], state[name] = p.to(flat.dtype).view(plain[name].shape), (m, v)
    return {**{name: p.detach().to(BF16) for name, p in wide.items()}, **{n: w.to(BF16) for n, w in weights.items()}}


CASES = [(plan, state, world) for plan in PLANS for state in STATES for world in (1, 2, 4)]
QUICK = [
    ("ddp", STATES[0], 1),
    ("zero2", STATES[3], 1),
    ("offload", STATES[0], 2),
    ("zero3", STATES[1], 2),
    ("short chunks", STATES[0], 4),
    ("some on the device", STATES[2], 2),
    ("offload", STATES[4], 2),
    ("disk", STATES[0], 1),
    ("disk", STATES[3], 2),
    ("disk", STATES[1], 2),
    ("wholly on disk", STATES[0], 2),
    ("wholly on disk", STATES[4], 1),
]


@pytest.mark.parametrize("plan, state, world", with_further(CASES, QUICK), ids=str)
def test_every_layout_gives_the_oracles_bits(plan: str, state: tuple[str, str], world: int, ranks: Ranks) -> None:
    master, moments = state
    expected = by_hand(*state, 4)
    for found in ranks(world).run(trained, PLANS[plan](master=master, moments=moments), 4):
        for name, value in expected.items():
            assert torch.equal(found["weights"][name], value), name


@pytest.mark.parametrize("world, early", [(1, False), (2, True)])
def test_several_backwards_are_summed_in_fp32(world: int, early: bool, ranks: Ranks) -> None:
    """The sum of three gradients below 64 is exact in fp32, and the first one was bf16."""
    expected = by_hand("bf16", "int8", 3, 3)
    for plan in (em.Plan.offload, em.Plan.zero3, PLANS["disk"], PLANS["wholly on disk"]):
        for found in ranks(world).run(trained, plan(master="bf16", moments="int8"), 3, 3, early):
            for name, value in expected.items():
                assert torch.equal(found["weights"][name], value), name


def test_six_bytes_a_parameter(ranks: Ranks) -> None:
    """Weight, gradient and two moments, and a byte for each block of each moment."""
    (found,) = ranks(1).run(trained, em.Plan.offload(master="bf16", moments="int8"), 1)
    (row,) = (row for row in found["rows"] if row["chunk_group"].endswith("bf16+int8"))
    blocks = sum(-(-rows * 33 // 256) for rows in (20, 40, 3))
    assert row["shard_bytes"] == 6 * 256 * blocks + 2 * blocks
    wide = 2 * (7 * 33 + 4 * 33)
    assert row["numel"] == 63 * 33 and found["held"]["host"] >= row["shard_bytes"] + 7 * wide


@pytest.mark.parametrize(("plan", "arrays", "values"), [("disk", 5, 2 * 2560), ("wholly on disk", 6, 2 * 4096)])
def test_on_disk_the_state_is_as_narrow(plan: str, arrays: int, values: int, ranks: Ranks) -> None:
    """A record of a slice is a page for each array: weight, codes and exponents of two moments, and with the values on
    disk a sum of gradients. What is held is what was planned."""
    slices = 2560 // SLICE
    (found,) = ranks(1).run(trained, PLANS[plan](master="bf16", moments="int8"), 1)
    (row,) = (row for row in found["rows"] if row["chunk_group"].endswith("bf16+int8"))
    assert row["shard_bytes"] == slices * arrays * 4096 + values
    size = found["footprint"]
    assert found["held"]["disk"] == size.disk_bytes > 0
    assert found["held"]["host"] == size.host_bytes


def test_a_checkpoint_goes_on_under_another_layout(ranks: Ranks, tmp_path: Path) -> None:
    state: Any = {"master": "bf16", "moments": "int8"}
    expected = by_hand("bf16", "int8", 5)
    ranks(2).run(trained, em.Plan.zero3(**state), 2, to=tmp_path / "two")
    for world, plan in ((4, PLANS["short chunks"]), (1, em.Plan.offload), (2, em.Plan.ddp), (1, PLANS["disk"])):
        for found in ranks(world).run(trained, plan(**state), 3, loaded=tmp_path / "two"):
            for name, value in expected.items():
                assert torch.equal(found["weights"][name], value), (world, name)
    ranks(2).run(trained, PLANS["disk"](**state), 2, to=tmp_path / "disk")
    for found in ranks(1).run(trained, em.Plan.offload(**state), 3, loaded=tmp_path / "disk"):
        for name, value in expected.items():
            assert torch.equal(found["weights"][name], value), name


def error_of(load: Path, plan: em.Plan) -> str:
    """(rank) What a load under another precision says, and that it can be told to convert."""
    with pytest.raises(em.CheckpointError) as caught:
        trained(plan, 0, loaded=load)
    return str(caught.value)


def converted(load: Path, plan: em.Plan) -> dict[str, Any]:
    """(rank) The weights, masters and moments after a conversion."""
    model: Any = made()
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), **SETTINGS), plan=plan, device="cpu")
    em.load(load, model, optimizer, convert_state=True)
    kept = optimizer._kept
    found = {
        name: {
            "weight": kept._place_of[p][0].shard.weights()[kept.piece_of(p).piece.here].read().clone(),
            **{key: value.read().clone() for key, value in kept.of(p).items()},
        }
        for name, p in model.named_parameters()
    }
    optimizer.close()
    return found


def test_a_checkpoint_of_another_precision_is_converted_on_request_only(ranks: Ranks, tmp_path: Path) -> None:
    narrow: Any = {"master": "bf16", "moments": "int8"}
    ranks(1).run(trained, em.Plan.zero2(), 3, to=tmp_path / "wide")
    (error,) = ranks(1).run(error_of, tmp_path / "wide", em.Plan.offload(**narrow))
    for words in ("'layers.0.weight'", "master='fp32'", "moments='int8'", "em.load(..., convert_state=True)"):
        assert words in error
    (wide,) = ranks(1).run(converted, tmp_path / "wide", em.Plan.zero2())
    (found,) = ranks(1).run(converted, tmp_path / "wide", em.Plan.offload(**narrow))
    (on_disk,) = ranks(1).run(converted, tmp_path / "wide", placed(PLANS["disk"](**narrow)))
    for name, kept in found.items():
        assert same_tensors(on_disk[name], kept)
        if name.startswith("head") or name.endswith("bias"):
            assert same_tensors(kept, wide[name])
            continue
        assert torch.equal(kept["weight"], wide[name]["weight"].to(BF16))
        assert torch.equal(kept["exp_avg_sq"] > 0, wide[name]["exp_avg_sq"] > 0)
        # Half a step: 3 bits of mantissa, or 5 of the fourth root, and coarser from 2^-8 of the largest gradient down.
        torch.testing.assert_close(kept["exp_avg"].float(), wide[name]["exp_avg"], rtol=1 / 16, atol=64 * 2.0**-9)
        torch.testing.assert_close(kept["exp_avg_sq"], wide[name]["exp_avg_sq"], rtol=1 / 15, atol=64**2 * 2.0**-17)
    ranks(1).run(trained, em.Plan.offload(**narrow), 3, to=tmp_path / "narrow")
    (kept,) = ranks(1).run(converted, tmp_path / "narrow", em.Plan.zero3(**narrow))
    (back,) = ranks(1).run(converted, tmp_path / "narrow", em.Plan.zero3())
    for name, values in kept.items():
        assert every(torch.equal(back[name][key], value.float()) for key, value in values.items())


def earlier_coding(load: Path, convert: bool) -> str:
    """(rank) What the load of a save with another coding says."""
    model: Any = made()
    plan = em.Plan.offload(master="bf16", moments="int8")
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters(), **SETTINGS), plan=plan, device="cpu")
    with (
        mock.patch("elixir_moe.state.checkpoint.load.CODING", 3),
        pytest.raises(em.CheckpointError) as caught,
    ):
        em.load(load, model, optimizer, convert_state=convert)
    optimizer.close()
    return str(caught.value)


def test_a_checkpoint_of_another_coding_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(trained, em.Plan.offload(master="bf16", moments="int8"), 1, to=tmp_path / "earlier")
    for convert in (False, True):
        (error,) = ranks(1).run(earlier_coding, tmp_path / "earlier", convert)
        for words in ("'layers.0.weight'", "moments='int8'", "8-bit coding", "the release that saved it"):
            assert words in error


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master": "fp16"}, "master='fp16': expected one of 'fp32', 'bf16'"),
        ({"moments": 8}, "moments=8: expected one of 'fp32', 'bf16', 'int8'"),
        ({"narrow_state": ("*",)}, "narrow_state .*master='fp32' .*moments='fp32'"),
        ({"moments": "int8", "narrow_state": "*"}, r"narrow_state='\*': expected names of parameters"),
        ({"rounding_seed": -1}, "rounding_seed=-1"),
    ],
)
def test_wrong_precisions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(em.PlanError, match=message):
        replace(em.Plan.zero2(), **change)
    if set(change) <= {"master", "moments"}:
        with pytest.raises(em.PlanError, match=message):
            em.Plan.auto(lambda *_: None, (), **change)


def test_a_plan_keeps_its_precision() -> None:
    plan = replace(em.Plan.zero3(master="bf16", moments="int8"), narrow_state=("layers.*",), rounding_seed=3)
    assert em.Plan.from_json(plan.to_json()) == plan


def refusals() -> list[str]:
    """(rank) The messages for models and optimizers that the plan's precision does not fit."""
    found = []

    def refused(plan: em.Plan, inner: type[torch.optim.Optimizer] = torch.optim.AdamW, **given: Any) -> None:
        model = Net()
        with pytest.raises(em.ConfigError) as caught:
            em.wrap(model, inner(model.parameters(), lr=1e-3), plan=plan, device="cpu", **given)
        found.append(str(caught.value))

    refused(em.Plan.zero2(moments="int8"), torch.optim.SGD)
    refused(em.Plan.zero2(master="bf16"))
    refused(replace(em.Plan.zero2(moments="int8"), narrow_state=("blocks.*",)))
    return found


def test_what_cannot_be_narrow_is_refused_by_name(ranks: Ranks) -> None:
    sgd, fp32, nothing = ranks(1).run(refusals)[0]
    assert "are for Adam and AdamW of torch" in sgd and "SGD" in sgd
    assert "'layers.0.weight' is computed in torch.float32" in fp32 and "compute_dtype=torch.bfloat16" in fp32
    assert "('blocks.*',)" in nothing and "narrow_state" in nothing


def test_matrices_of_blocks_are_narrow_unless_others_are_chosen() -> None:
    shapes = {
        "model.embed_tokens.weight": (10, 4),
        "model.layers.0.self_attn.q_proj.weight": (4, 4),
        "model.layers.0.mlp.gate_proj.weight": (4, 4),
        "model.layers.0.mlp.gate.weight": (8, 4),
        "layers.1.router.weight": (8, 4),
        "model.layers.0.input_layernorm.weight": (4,),
        "lm_head.weight": (10, 4),
    }
    found = [name for name, shape in shapes.items() if has_narrow_state(name, shape, None)]
    assert found == ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight"]
    assert [name for name, shape in shapes.items() if has_narrow_state(name, shape, ("lm_*",))] == ["lm_head.weight"]


# ------------------------------------------------------------------------------------------------------ cut parameters


class Experts(nn.Module):
    """A stack of matrices, of which each rank has a part."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].weight = nn.Parameter((torch.randn(4, 8, 32) / 8).to(BF16)[part].clone())

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.layers[0].weight.float() * gradient).sum()


def of_experts(ep: int, state: dict[str, str]) -> Tensor:
    """(rank) This rank's part of the weight after three steps, in each of which its gradient is `batch`'s."""
    mesh = em.init_mesh(device_type="cpu")
    place, world = dist.get_rank() % ep, dist.get_world_size()
    part = slice(4 // ep * place, 4 // ep * (place + 1))
    model: Any = Experts(part)
    em.annotate(model, {"*": em.Pattern(em.expert_mesh(mesh, ep=ep), replicate=("edp",), shard={"ep": 0})})
    model, optimizer = em.wrap(
        model, torch.optim.AdamW(model.parameters(), **SETTINGS), plan=em.Plan.zero3(**state), device="cpu"
    )
    for step in range(3):
        gradient = batch(step, 0)[0, :1024].view(4, 8, 32)[part]
        model(gradient * (ep if world > 1 else 1)).backward()  # each expert's ranks sum, and all ranks' number divides
        optimizer.step()
        optimizer.zero_grad()
    with em.unsharded(model):
        found = model.layers[0].weight.detach().clone()
    optimizer.close()
    return found


@pytest.mark.parametrize("state", STATES[:2], ids=str)
def test_experts_have_the_bits_of_their_place_in_the_stack(state: tuple[str, str], ranks: Ranks) -> None:
    """A part of the stack is a whole number of blocks of codes; its random bits are numbered within the stack."""
    given = dict(zip(("master", "moments"), state, strict=True))
    (whole,) = ranks(1).run(of_experts, 1, given)
    found = ranks(2).run(of_experts, 2, given)
    assert torch.equal(torch.cat(found), whole)
    assert not torch.equal(whole, Experts(slice(None)).layers[0].weight)


# --------------------------------------------------------------------------------------------------- tiled parameters


class Product(nn.Module):
    """Linear layers side by side whose outputs are multiplied by given numbers, so that gradients are exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(32, 48, bias=False), nn.Linear(96, 24, bias=False)])

    def forward(self, x: Tensor, factors: Tensor) -> Tensor:
        first, second = self.layers
        return (first(x[:, :32]) * factors).float().sum() + (second(x) * factors[:, :24]).float().sum()


def of_product(
    at_most: int | None, state: dict[str, str], steps: int = 4, loaded: Path | None = None, to: Path | None = None
) -> dict[str, Tensor]:
    """(rank) The weights of the model, tiled or whole, after so many steps with the same gradient on each rank."""
    model: Any = Product().to(BF16)
    if at_most is not None:
        em.tile(model, at_most=at_most)
        assert len(list(model.parameters())) > 4
    model, optimizer = em.wrap(
        model, torch.optim.AdamW(model.parameters(), **SETTINGS), plan=em.Plan.zero3(**state), device="cpu"
    )
    begun = 0 if loaded is None else em.load(loaded, model, optimizer)
    for step in range(begun, steps):
        draw = torch.Generator().manual_seed(step)
        x, factors = (torch.randint(-3, 4, (1, n), generator=draw).to(BF16) for n in (96, 48))
        model(x, factors).backward()
        optimizer.step()
        optimizer.zero_grad()
    if to is not None:
        em.save(to, model, optimizer, extra=steps)
    found = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    return found


AT_MOST = 2 * 1024
"""Bytes of a tile: 32 and 10 rows, of which 32 and 8 are whole blocks of codes."""


@pytest.mark.parametrize("state", STATES, ids=str)
def test_tiles_have_the_bits_of_the_whole_parameter(state: tuple[str, str], ranks: Ranks) -> None:
    given = dict(zip(("master", "moments"), state, strict=True))
    (whole,) = ranks(1).run(of_product, None, given)
    for world in (1, 2):
        for found in ranks(world).run(of_product, AT_MOST, given):
            for name, value in whole.items():
                assert torch.equal(found[name], value), (world, name)


def test_a_checkpoint_of_tiles_continues_as_the_whole_model_and_back(ranks: Ranks, tmp_path: Path) -> None:
    given = {"master": "bf16", "moments": "int8"}
    (whole,) = ranks(1).run(of_product, None, given)
    for kept, then in ((AT_MOST, None), (None, AT_MOST)):
        folder = tmp_path / f"{kept}"
        ranks(2).run(of_product, kept, given, 2, to=folder)
        (found,) = ranks(1).run(of_product, then, given, loaded=folder)
        for name, value in whole.items():
            assert torch.equal(found[name], value), (kept, name)


def refused_tiles() -> str:
    """(rank) The message for tiles of 3 rows of 32 elements, which cut blocks of 256."""
    with pytest.raises(em.ConfigError) as caught:
        of_product(2 * 3 * 96, {"master": "bf16", "moments": "int8"})
    return str(caught.value)


def test_a_tile_inside_a_block_is_refused_by_name(ranks: Ranks) -> None:
    (error,) = ranks(1).run(refused_tiles)
    for words in ("layers.1.weight[3:6]", "begins at element 288", "block of 256", "larger at_most", "moments='bf16'"):
        assert words in error
    (whole,) = ranks(1).run(of_product, None, {"master": "bf16", "moments": "bf16"})
    (found,) = ranks(1).run(of_product, 2 * 3 * 96, {"master": "bf16", "moments": "bf16"})
    assert same_tensors(found, whole)
