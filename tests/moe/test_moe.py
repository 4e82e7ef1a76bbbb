"""The mixture-of-experts layer against a loop over experts, and every layout of it against one process.

Tolerances. One process against the loop: the same sums in another order, fp32, magnitudes about 1: 1e-5. A layout
against one process: rows of a product differ in the last bits when the number of rows does: 1e-5 too.
"""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from elixir_moe.errors import LayoutError
from elixir_moe.moe import experts as experts_module
from elixir_moe.moe.dispatch import begin_all_to_all, end_all_to_all
from elixir_moe.moe.experts import GroupedExperts, Groups
from elixir_moe.moe.layer import MoE
from elixir_moe.parallel.mesh import expert_mesh, init_mesh
from tests.support.every import every
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
D, H, E, B, S = 16, 32, 4, 4, 6
CLOSE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}


def world_mesh(tp: int = 1) -> DeviceMesh:
    """The mesh of all ranks."""
    return init_mesh(tp, device_type="cpu")


def build(mesh: Any = None, seed: int = 0, **options: Any) -> MoE:
    """The layer as every test builds it; biases and the router are drawn too, so that nothing is hidden by zeros."""
    torch.manual_seed(seed)
    layer = MoE(d_model=D, d_hidden=H, num_experts=E, mesh=mesh, aux_coefficient=0.1, z_coefficient=0.05, **options)
    with torch.no_grad():
        layer.router.weight.normal_(std=0.5)
        for bias, width in ((layer.experts.b_in, H), (layer.experts.b_out, D)):
            if bias is not None:
                local = len(bias)
                first = layer.experts.first_expert
                bias.copy_(torch.randn(E, width)[first : first + local])
    return layer


def inputs(batch: int = B) -> tuple[Tensor, Tensor]:
    """Tokens and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, S, D, generator=generator), torch.randn(batch, S, D, generator=generator)


def oracle(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, auxiliary loss and counts of one process's `layer`, written with nothing but loops over tokens."""
    tokens, k = x.flatten(0, -2), layer.router.top_k
    logits = tokens @ layer.router.weight.T
    probabilities = logits.softmax(-1)
    weights, choices = probabilities.topk(k, dim=-1)
    if layer.router.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    capacity = math.inf if layer.capacity_factor is None else math.ceil(layer.capacity_factor * k * len(tokens) / E)
    out = [torch.zeros(D) for _ in tokens]
    load, asked = [0] * E, [0] * E
    w = layer.experts
    for c, t in itertools.product(range(k), range(len(tokens))):
        e = int(choices[t, c])
        asked[e] += 1
        if load[e] < capacity:
            load[e] += 1
            h = F.gelu(tokens[t] @ w.w_in[e] + w.b_in[e], approximate="tanh")
            out[t] = out[t] + weights[t, c] * (h @ w.w_out[e] + w.b_out[e])
    y = torch.stack(out).view_as(x)
    if layer.mlp is not None:
        share = layer.coefficient(x).softmax(-1)
        dense = F.linear(x, layer.mlp.w_in.weight, layer.mlp.w_in.bias)
        dense = F.linear(F.gelu(dense, approximate="tanh"), layer.mlp.w_out.weight, layer.mlp.w_out.bias)
        y = share[..., :1] * y + share[..., 1:] * dense
    fraction = torch.tensor(asked) / (k * len(tokens))
    aux = 0.1 * E * (fraction * probabilities.mean(0)).sum() + 0.05 * logits.logsumexp(-1).square().mean()
    return y, aux, torch.tensor(asked)


def gradients(layer: MoE) -> dict[str, Tensor]:
    return {name: p.grad for name, p in layer.named_parameters()}


OPTIONS = {
    "top1": {},
    "top2": {"top_k": 2},
    "top2-normalized": {"top_k": 2, "normalize": True},
    "top4": {"top_k": 4},
    "tight": {"capacity_factor": 0.6},
    "tight-top2": {"capacity_factor": 0.8, "top_k": 2},
    "roomy": {"capacity_factor": 100.0},
    "residual": {"residual": True},
    "residual-tight-top2": {"residual": True, "capacity_factor": 0.7, "top_k": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_one_process_equals_the_loop(name: str) -> None:
    layer = build(**OPTIONS[name])
    reference = copy.deepcopy(layer)
    x, grad = inputs()
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, aux = layer(x1)
    y2, aux2, asked = oracle(reference, x2)
    ((y * grad).mean() + aux).backward()
    ((y2 * grad).mean() + aux2).backward()
    torch.testing.assert_close(y, y2, **CLOSE)
    torch.testing.assert_close(aux, aux2, **CLOSE)
    torch.testing.assert_close(x1.grad, x2.grad, **CLOSE)
    torch.testing.assert_close(gradients(layer), gradients(reference), **CLOSE)
    assert torch.equal(layer.tokens_per_expert, asked) and not layer.tokens_per_expert.requires_grad
    if "tight" in name:
        assert asked.max() > math.ceil(layer.capacity_factor * layer.router.top_k * B * S / E), "nothing was dropped"


def bias_towards(layer: MoE, x: Tensor, chosen: Callable[[int], list[int]]) -> Tensor:
    """Makes the first dims of each token pick its experts: token t of the global batch goes to ``chosen(t)``."""
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, :E] = torch.eye(E)
    flat = x.clone().flatten(0, 1)
    flat[:, :E] = -5.0
    for t in range(len(flat)):
        for i, e in enumerate(chosen(t)):
            flat[t, e] = 5.0 - i
    return flat.view_as(x)


def starve(case: str, k: int) -> Callable[[int], list[int]]:
    """Which experts the tokens choose: expert 2 gets none of the first half's tokens, or none at all; or 0 gets all."""
    others = [0, 1, 3]
    if case == "somewhere":
        return lambda t: [others[(t + i) % 3] if t < B * S // 2 else (t + i) % E for i in range(k)]
    if case == "everywhere":
        return lambda t: [others[(t + i) % 3] for i in range(k)]
    return lambda t: [(i) % E for i in range(k)]


def one_step(layer: MoE, x: Tensor, grad: Tensor, kind: str = "none") -> dict[str, Any]:
    """Forward and backward of a mean-type loss on one rank's slice."""
    x = x.clone().requires_grad_()
    y, aux = layer(x) if kind == "none" else checkpoint(layer, x, use_reentrant=kind == "reentrant")
    ((y.float() * grad).mean() + aux).backward()
    missing = [name for name, p in layer.named_parameters() if p.grad is None]
    assert not missing, missing
    asked = layer.tokens_per_expert
    return {"y": y.detach(), "aux": aux.detach(), "x": x.grad, "asked": asked, "grads": gradients(layer)}


def cases(world: int) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """(name, options, starving, checkpointing)."""
    for name, options in OPTIONS.items():
        yield name, options, "", "none"
    for case, k in itertools.product(("somewhere", "everywhere", "all on one"), (1, 2)):
        yield f"{case} k={k}", {"top_k": k}, case, "none"
        yield f"{case} k={k} tight", {"top_k": k, "capacity_factor": 0.5}, case, "none"
    for kind in ("reentrant", "non_reentrant"):
        yield kind, {"top_k": 2, "residual": True, "capacity_factor": 0.8}, "", kind
        yield f"{kind} starving", {}, "everywhere", kind


def prepare(mesh: Any, options: dict[str, Any], starving: str) -> tuple[MoE, Tensor, Tensor]:
    layer = build(mesh, **options)
    x, grad = inputs()
    if starving:
        x = bias_towards(layer, x, starve(starving, layer.router.top_k))
    return layer, x, grad


def run_layouts() -> list[tuple[int, str, dict[str, Any]]]:
    """On every rank: each ep degree, each case."""
    mesh = world_mesh()
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for ep in [n for n in (1, 2, 4) if world % n == 0]:
        expert = expert_mesh(mesh, ep)
        for name, options, starving, kind in cases(world):
            layer, x, grad = prepare(expert, options, starving)
            mine = slice(rank * B // world, (rank + 1) * B // world)
            results.append((ep, name, one_step(layer, x[mine], grad[mine], kind)))
    return results


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_equals_one_process(ranks: Ranks, world: int) -> None:
    by_rank = ranks(world).run(run_layouts)
    expected = {}
    for name, options, starving, kind in cases(world):
        layer, x, grad = prepare(None, options, starving)
        expected[name] = one_step(layer, x, grad, kind)
    for per_rank in zip(*by_rank, strict=True):
        ep, name, _ = per_rank[0]
        got = [result for _, _, result in per_rank]
        want = expected[name]

        def same(what: str, a: Tensor, b: Tensor, ep: int = ep, name: str = name) -> None:
            torch.testing.assert_close(a, b, **CLOSE, msg=lambda m: f"world {world} ep {ep} {name}: {what}: {m}")

        same("output", torch.cat([g["y"] for g in got]), want["y"])
        same("input gradient", torch.cat([g["x"] for g in got]) / world, want["x"])
        for g in got:
            same("aux loss", g["aux"], want["aux"])
            assert torch.equal(g["asked"], want["asked"]), (ep, name)
        for parameter, reference in want["grads"].items():
            parts = [g["grads"][parameter] for g in got]
            if parameter.startswith("experts."):  # sum over edp of each ep slice, divided by all ranks of the batch
                parts = [torch.stack(parts[i::ep]).sum(0) for i in range(ep)]
                same(parameter, torch.cat(parts) / world, reference)
            else:
                same(parameter, torch.stack(parts).mean(0), reference)
        if name.startswith("everywhere"):
            assert want["grads"]["experts.w_in"][2].abs().max() == 0


def run_initial_values() -> list[dict[str, Tensor]]:
    mesh = world_mesh()
    results = []
    for ep in (1, 2, 4):
        torch.manual_seed(7)
        layer = MoE(d_model=D, d_hidden=H, num_experts=8, mesh=expert_mesh(mesh, ep), residual=True)
        results.append({**layer.state_dict(), "next": torch.rand(3)})
    return results


def test_initial_values_do_not_depend_on_the_layout(ranks: Ranks) -> None:
    torch.manual_seed(7)
    layer = MoE(d_model=D, d_hidden=H, num_experts=8, residual=True)
    want = {**layer.state_dict(), "next": torch.rand(3)}
    by_rank = ranks(4).run(run_initial_values)
    for i, ep in enumerate((1, 2, 4)):
        for name, reference in want.items():
            parts = [by_rank[rank][i][name] for rank in range(4)]
            full = torch.cat(parts[:ep]) if name.startswith("experts.") else parts[0]
            assert torch.equal(full, reference), (ep, name)
    w = want["experts.w_in"]
    assert len({float(e[0, 0]) for e in w}) == 8 and abs(float(w.std()) * math.sqrt(D) - 1) < 0.1


def run_bf16() -> list[dict[str, Any]]:
    mesh = world_mesh()
    rank = dist.get_rank()
    results = []
    for options, starving in (({"top_k": 2, "residual": True}, ""), ({}, "all on one")):
        layer, x, grad = prepare(expert_mesh(mesh, 2), options, starving)
        layer = layer.bfloat16()
        results.append(one_step(layer, x[rank * 2 : rank * 2 + 2].bfloat16(), grad[rank * 2 : rank * 2 + 2]))
    return results


def test_bf16(ranks: Ranks) -> None:
    by_rank = ranks(2).run(run_bf16)
    for i, (options, starving) in enumerate((({"top_k": 2, "residual": True}, ""), ({}, "all on one"))):
        layer, x, grad = prepare(None, options, starving)
        layer = layer.bfloat16()
        want = one_step(layer, x.bfloat16(), grad)
        y = torch.cat([r[i]["y"] for r in by_rank])
        assert y.dtype == torch.bfloat16 and by_rank[0][i]["aux"].dtype == torch.float32
        # The router is fp32 in both, so routing is equal; products of bf16 rows round to 2^-8 of values of about 4.
        torch.testing.assert_close(y, want["y"], rtol=2**-7, atol=2**-6)
        torch.testing.assert_close(by_rank[0][i]["aux"], want["aux"], **CLOSE)
        for name, reference in want["grads"].items():
            parts = [r[i]["grads"][name] for r in by_rank]
            full = torch.cat(parts) / 2 if name.startswith("experts.") else torch.stack(parts).float().mean(0)
            torch.testing.assert_close(full.float(), reference.float(), rtol=0.05, atol=2e-3)


def run_unequal() -> dict[str, Any]:
    """Ranks with 1 and 3 of the 4 sequences, and one rank with none."""
    mesh = expert_mesh(world_mesh(), 2)
    rank, results = dist.get_rank(), {}
    for cut in (1, 0):
        layer, x, _ = prepare(mesh, {"capacity_factor": 0.8, "top_k": 2}, "")
        x = (x[:cut], x[cut:])[rank].clone().requires_grad_()
        y, aux = layer(x)
        aux.backward()
        results[cut] = {"y": y.detach(), "aux": aux.detach(), "router": layer.router.weight.grad}
    return results


def test_ranks_with_unequal_numbers_of_tokens(ranks: Ranks) -> None:
    layer, x, _ = prepare(None, {"capacity_factor": 0.8, "top_k": 2}, "")
    y, aux = layer(x)
    aux.backward()
    by_rank = ranks(2).run(run_unequal)
    for cut in (1, 0):
        got = [r[cut] for r in by_rank]
        torch.testing.assert_close(torch.cat([g["y"] for g in got]), y.detach(), **CLOSE)
        torch.testing.assert_close(got[0]["aux"], aux.detach(), **CLOSE)
        router = torch.stack([g["router"] for g in got]).mean(0)
        torch.testing.assert_close(router, layer.router.weight.grad, **CLOSE)


def count_collectives(layer: MoE, x: Tensor) -> list[str]:
    from torch.profiler import profile

    with profile() as profiled:
        one_step(layer, x, torch.zeros_like(x))
    names = [e.name for e in profiled.events() if e.name.startswith("c10d::")]
    return sorted("a gather" if "gather" in name else name for name in names)  # torch has renamed that one


def run_count() -> list[list[str]]:
    mesh = expert_mesh(world_mesh(), 2)
    counts = []
    for starving in ("", "somewhere", "everywhere", "all on one"):
        layer, x, _ = prepare(mesh, {}, starving)
        half = x[dist.get_rank() * 2 : dist.get_rank() * 2 + 2]
        counts.append(count_collectives(layer, half))
    return counts


def test_collectives_do_not_depend_on_routing(ranks: Ranks) -> None:
    want = ["a gather"] + ["c10d::alltoall_base_"] * 4
    assert ranks(2).run(run_count) == [[want] * 4] * 2


def compare_grouped(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(d_model=D, d_hidden=H, num_local=5)
    torch.nn.init.normal_(experts.b_in), torch.nn.init.normal_(experts.b_out)
    experts = experts.to(device, dtype)
    for host_counts in ([0, 5, 0, 7, 0], [1, 2, 3, 4, 5], [0, 0, 0, 0, 33]):
        rows = torch.randn(sum(host_counts), D, device=device, dtype=dtype, requires_grad=True)
        grad = torch.randn_like(rows)
        counts = torch.tensor(host_counts, device=device)
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        groups = Groups(experts=torch.arange(5, device=device).repeat_interleave(counts), bounds=bounds)
        leaves = [rows, *experts.parameters()]
        monkeypatch.setattr(experts_module, "runs_fused", lambda rows, shape: True)
        out = experts(rows, groups)
        got = torch.autograd.grad(out, leaves, grad)
        loop = torch.cat([_loop(experts, e, part) for e, part in enumerate(rows.split(host_counts))])
        want = torch.autograd.grad(loop, leaves, grad)
        torch.testing.assert_close(out, loop, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got, want, rtol=tolerance, atol=4 * tolerance)
        for weight in got[1:3]:
            assert (weight[counts == 0] == 0).all(), "an idle expert's gradient is exactly zero"


def _loop(experts: GroupedExperts, e: int, rows: Tensor) -> Tensor:
    hidden = F.gelu(rows @ experts.w_in[e] + experts.b_in[e], approximate="tanh")
    return hidden @ experts.w_out[e] + experts.b_out[e]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-5)])
def test_grouped_products_equal_the_loop(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tolerance: float) -> None:
    compare_grouped(monkeypatch, "cpu", dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_grouped_products_equal_the_loop_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):  # later rounds get memory that is no longer zero
        compare_grouped(monkeypatch, "cuda", torch.bfloat16, 2**-5)
    torch.manual_seed(0)
    layer = MoE(d_model=D, d_hidden=H, num_experts=E, top_k=2, residual=True, capacity_factor=0.8).to("cuda")
    x = inputs()[0].to("cuda")
    y, aux = layer(x)
    y2, aux2 = copy.deepcopy(layer).cpu()(x.cpu())
    torch.testing.assert_close((y.cpu(), aux.cpu()), (y2, aux2), rtol=1e-4, atol=1e-4)


def test_the_reports_of_a_uniform_router() -> None:
    layer = build(top_k=2)
    with torch.no_grad():
        layer.router.weight.zero_()
    _, aux = layer(inputs()[0])
    assert aux.item() == pytest.approx(0.1 * 1.0 + 0.05 * math.log(E) ** 2, rel=1e-5)


def test_parameters_of_the_experts_are_those_the_glob_finds() -> None:
    layer = torch.nn.Sequential(build(residual=True))
    sharded = {name.split(".")[-1] for name, _ in layer.named_parameters() if ".experts." in name}
    assert sharded == {"w_in", "b_in", "w_out", "b_out"}
    assert every(p.shape[0] == E for name, p in layer.named_parameters() if ".experts." in name)


def test_a_token_may_come_alone() -> None:
    layer, (x, _) = build(top_k=2), inputs()
    token = x[0, 0].clone().requires_grad_()
    out, aux = layer(token)
    batch, same = layer(token[None])
    assert out.shape == token.shape and torch.equal(out, batch[0]) and torch.equal(aux, same)
    (out.sum() + aux).backward()
    assert token.grad is not None and token.grad.shape == token.shape


def test_without_bias() -> None:
    torch.manual_seed(0)
    layer = MoE(d_model=D, d_hidden=H, num_experts=E, residual=True, bias=False)
    assert {n for n, _ in layer.experts.named_parameters()} == {"w_in", "w_out"} and layer.mlp.w_in.bias is None
    y, _ = layer(inputs()[0])
    e = layer.tokens_per_expert
    assert y.shape == (B, S, D) and e.sum() == B * S


def test_planned_without_data() -> None:
    """Meta and fake tensors run forward and backward; nothing is sent and routing is even."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        layer = build(top_k=2, capacity_factor=1.0)
        y, aux = layer(torch.empty(B, S, D))
        (y.mean() + aux).backward()
        assert y.shape == (B, S, D) and layer.experts.w_in.grad.shape == (E, D, H)
    with FakeTensorMode():
        layer = MoE(d_model=D, d_hidden=H, num_experts=E)
        y, aux = layer(torch.empty(B, S, D))
        (y.mean() + aux).backward()
        assert y.shape == (B, S, D) and layer.experts.w_in.grad.shape == (E, D, H)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k=5 of 4 experts"),
        ({"top_k": 0}, "top_k=0"),
        ({"normalize": True}, "top_k=1"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0"),
        ({"capacity_factor": -1.0}, "capacity_factor=-1.0"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        MoE(d_model=D, d_hidden=H, num_experts=E, **options)


def run_errors() -> list[str]:
    messages = []
    expert = expert_mesh(world_mesh(), 2)
    for mesh, experts in ((expert, 3), (world_mesh(), 4)):
        try:
            MoE(d_model=D, d_hidden=H, num_experts=experts, mesh=mesh)
        except LayoutError as error:
            messages.append(str(error))
    return messages


@pytest.mark.fault(30)
def test_errors_of_meshes(ranks: Ranks) -> None:
    for messages in ranks(2).run(run_errors):
        degree, axes = messages
        assert "3 experts" in degree and "ep=2" in degree and "[1, 3]" in degree
        assert "('dp', 'tp')" in axes and "expert_mesh" in axes


def second_derivative() -> str:
    """(rank) What a gradient of a gradient through an exchange of rows says."""
    x = torch.tensor([[1.0], [2.0]], requires_grad=True)
    rows, exchange = begin_all_to_all(x.square(), [2], [2], dist.group.WORLD)
    loss = end_all_to_all(rows, exchange).square().sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    assert torch.equal(first, 4 * x**3)
    with pytest.raises(RuntimeError) as refused:
        first.sum().backward()
    return str(refused.value)


def test_a_gradient_of_a_gradient_through_an_exchange_is_refused(ranks: Callable[[int], RankPool]) -> None:
    assert "once_differentiable" in ranks(1).run(second_derivative)[0]
