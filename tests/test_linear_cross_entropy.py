"""The loss of a head without its logits, beside `torch.nn.functional.cross_entropy` of the logits.

Tolerance. Losses and gradients are sums of the same products. A sum of n terms of size up to s differs by about
1e-7 * s * sqrt(n) in another order. Here s is below 4 and n at most 75, so 4e-6 covers sums; means are smaller.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.errors import ConfigError
from elixir_moe.quantized.formats import SCHEMES
from elixir_moe.torch_private import FakeTensorMode, TorchDispatchMode, tree_leaves
from tests.support.cases import with_further
from tests.support.parity import TOLERANCE, assert_alike, make_optimizer, trained
from tests.support.ranks import RankPool
from tests.wrapping.test_tiling import mine

Ranks = Callable[[int], RankPool]
D, V = 16, 75
PLANS = {
    "ddp": em.Plan.ddp(),
    "zero2": em.Plan.zero2(chunk_numel=1536),
    "zero3": em.Plan.zero3(rcache_blocks=6, chunk_numel=1536),
    "offload": em.Plan.offload(rcache_blocks=6, device_chunks=1, chunk_numel=1536),
    "disk": em.Plan(scatter=True, offloaded=True, rcache_blocks=6, chunk_numel=1536, disk_chunks=2),
}


def whole(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """The oracle."""
    cap, ignored = options.pop("softcap", None), options.pop("ignore_index", -100)
    logits = F.linear(hidden, weight, bias).float()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignored, **options)


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden (3, 7, D), weight (V, D), bias (V,) and labels (3, 7)."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 7, D), (V, D), (V,))
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return hidden, weight, bias, torch.randint(V, (3, 7), generator=generator)


def head_of(weight: Tensor, bias: Tensor | None, rows: int) -> nn.Module:
    """A head with these values, in tiles of so many rows."""
    model = nn.Sequential(nn.Linear(D, V, bias=bias is not None))
    with torch.no_grad():
        model[0].weight.copy_(weight)
        if bias is not None:
            model[0].bias.copy_(bias)
    return em.tile(model, at_most=rows * D * 4)[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1},
    "capped": {"softcap": 3.0},
    "all": {"softcap": 3.0, "label_smoothing": 0.2, "reduction": "sum"},
    "another label is ignored": {"ignore_index": 5},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", ["at once", "recomputed", "tiles"])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_are_those_of_the_whole_loss(name: str, way: str, biased: bool) -> None:
    options = dict(OPTIONS[name])
    hidden, weight, bias, labels = drawn()
    labels[0, :4] = options.get("ignore_index", -100)
    given = [hidden, weight, *([bias] if biased else [])]
    wanted = whole(hidden, weight, labels, bias if biased else None, **options)
    gradients = torch.autograd.grad(wanted, given)
    if way == "tiles":
        head = head_of(weight, bias if biased else None, 20)
        assert len(list(head.children())) == 5
        found = em.linear_cross_entropy(hidden, head, labels, chunk_bytes=4 * V * 3, **options)
        found.backward()
        brought = [hidden.grad, torch.cat([part.weight.grad for part in head.children()])]
        brought += [torch.cat([part.bias.grad for part in head.children()])] if biased else []
    else:
        options |= {"bias": bias if biased else None, "chunk_bytes": 4 * V * 3, "recompute": way == "recomputed"}
        found = em.linear_cross_entropy(hidden, weight, labels, **options)
        brought = list(torch.autograd.grad(found, given))
    assert found.dtype is torch.float32 and found.shape == ()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(brought, list(gradients), rtol=1e-6, atol=4e-6)


@pytest.mark.parametrize("way", ["at once", "recomputed", "tiles"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_heads_are_summed_in_fp32(dtype: torch.dtype, way: str) -> None:
    """Beside the loss of the same numbers in fp32: gradients are rounded once or twice, by half a unit each."""
    hidden, weight, _, labels = drawn(dtype)
    wide = [t.detach().float().requires_grad_() for t in (hidden, weight)]
    wanted = whole(*wide, labels)
    gradients = torch.autograd.grad(wanted, wide)
    tiles = way == "tiles"
    head: Any = head_of(weight.float(), None, 20).to(dtype) if tiles else weight
    found = em.linear_cross_entropy(hidden, head, labels, chunk_bytes=500, recompute=way == "recomputed")
    found.backward()
    of_weight = torch.cat([part.weight.grad for part in head.children()]) if tiles else weight.grad
    assert of_weight.dtype is dtype and found.dtype is torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    for gradient, wanted in zip((hidden.grad, of_weight), gradients, strict=True):
        torch.testing.assert_close(gradient.float(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=2e-7)


def test_a_single_token_may_come_without_a_dim_of_tokens() -> None:
    hidden, weight, _, labels = drawn()
    token, label = hidden.detach()[0, 0].requires_grad_(), labels[0, 0].clamp(min=0)
    found = em.linear_cross_entropy(token, weight, label)
    wanted = whole(token[None], weight, label[None])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(
        torch.autograd.grad(found, token), torch.autograd.grad(wanted, token), rtol=1e-6, atol=4e-6
    )


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_one() -> None:
    hidden, weight, _, labels = drawn()
    wanted = torch.autograd.grad(whole(hidden, weight, labels), hidden)[0]
    frozen = weight.detach()
    with Largest() as largest:
        em.linear_cross_entropy(hidden, frozen, labels, chunk_bytes=4 * V).backward()
    torch.testing.assert_close(hidden.grad, wanted, rtol=1e-6, atol=4e-6)
    assert largest.numel <= hidden.numel() < weight.numel()
    with torch.no_grad(), Largest() as largest:
        em.linear_cross_entropy(hidden, weight, labels, chunk_bytes=4 * V)
    assert largest.numel <= V, "no gradients without a backward"


def test_backward_may_be_run_again() -> None:
    hidden, weight, _, labels = drawn()
    loss = em.linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    first = weight.grad.clone()
    (loss * 3).backward()
    torch.testing.assert_close(weight.grad, 4 * first, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_gradients_are_refused(recompute: bool) -> None:
    hidden, weight, _, labels = drawn()
    loss = em.linear_cross_entropy(hidden, weight, labels, recompute=recompute)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + gradient.square().sum()).backward()


def test_without_a_label_the_mean_is_nan_and_gradients_are_zero_as_in_torch() -> None:
    for head in (lambda hidden, weight, labels: whole(hidden, weight, labels), em.linear_cross_entropy):
        hidden, weight, _, labels = drawn()
        loss = head(hidden, weight, labels.fill_(-100))
        loss.backward()
        assert loss.isnan() and not hidden.grad.any() and not weight.grad.any()
    assert em.linear_cross_entropy(hidden, weight, labels, reduction="sum").item() == 0


class Adapted(nn.Linear):
    """A head that is more than a product."""


WRONG: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "label": (
        lambda h, w, y: em.linear_cross_entropy(h, w, y.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(V))),
        rf"label {V} of token 9 \(1 such labels\): expected 0 to {V - 1}",
    ),
    "negative label": (lambda h, w, y: em.linear_cross_entropy(h, w, y - 2 * V), r"label -\d+ of token 0"),
    "labels' dtype": (lambda h, w, y: em.linear_cross_entropy(h, w, y.float()), "expected integers"),
    "labels' shape": (lambda h, w, y: em.linear_cross_entropy(h, w, y[0]), r"labels \(7,\)"),
    "weight": (lambda h, w, y: em.linear_cross_entropy(h, w.t(), y), rf"weight \({D}, {V}\): expected"),
    "bias": (lambda h, w, y: em.linear_cross_entropy(h, w, y, bias=w[0]), rf"bias \({D},\)"),
    "reduction": (lambda h, w, y: em.linear_cross_entropy(h, w, y, reduction="none"), "expected 'mean' or 'sum'"),
    "smoothing": (lambda h, w, y: em.linear_cross_entropy(h, w, y, label_smoothing=1.5), "expected 0 to 1"),
    "softcap": (lambda h, w, y: em.linear_cross_entropy(h, w, y, softcap=0.0), "above 0"),
    "chunk": (lambda h, w, y: em.linear_cross_entropy(h, w, y, chunk_bytes=0), "at least 1"),
    "codes": (lambda h, w, y: em.linear_cross_entropy(h, w.detach().byte(), y), "uint8.*pass the head itself"),
    "another head": (lambda h, w, y: em.linear_cross_entropy(h, Adapted(D, V), y), "Adapted"),
    "two biases": (lambda h, w, y: em.linear_cross_entropy(h, nn.Linear(D, V), y, bias=w[0]), "its own bias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_by_name(name: str) -> None:
    run, says = WRONG[name]
    hidden, weight, _, labels = drawn()
    with pytest.raises(ConfigError, match=says):
        run(hidden, weight, labels)


class Largest(TorchDispatchMode):
    """Notes the largest storage that is made inside it; of `but` elements, one is let through."""

    def __init__(self, but: int = 0) -> None:
        super().__init__()
        self.numel, self.nbytes, self.times = 0, 0, 0
        self._but, self._known = but, weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.add(tensor.untyped_storage())
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage() not in self._known:
                self._known.add(tensor.untyped_storage())
                nbytes = tensor.untyped_storage().nbytes()
                if nbytes == self._but * tensor.itemsize:
                    self.times += 1
                    continue
                self.nbytes = max(self.nbytes, nbytes)
                self.numel = max(self.numel, nbytes // tensor.itemsize)
        return out


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width"), with_further([(500, 4000, 16), (16384, 152_000, 64)], [(500, 4000, 16)])
)
def test_no_tensor_is_large_but_the_gradient_of_the_head(tokens: int, vocabulary: int, width: int) -> None:
    most = tokens * vocabulary * 4 // 150  # 64 MiB of the larger case
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    with Largest(but=weight.numel()) as largest:
        em.linear_cross_entropy(hidden, weight, labels, chunk_bytes=most).backward()
    assert largest.times == 1, "the gradient of the head"
    assert largest.nbytes <= most


@pytest.mark.parametrize("recompute", [False, True])
def test_calls_that_await_their_backward_keep_a_gradient_of_the_head_unless_they_recompute(recompute: bool) -> None:
    hidden, weight, _, labels = drawn()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        total = sum(em.linear_cross_entropy(hidden, weight, labels, recompute=recompute) for _ in range(3))
    found = [t for t in kept if t.shape == weight.shape and t.data_ptr() != weight.data_ptr()]
    assert len(found) == (0 if recompute else 3)
    wanted = torch.autograd.grad(3 * whole(hidden, weight, labels), [hidden, weight])
    torch.testing.assert_close(torch.autograd.grad(total, [hidden, weight]), wanted, rtol=1e-6, atol=4e-6)


class Operators(TorchDispatchMode):
    """Counts the operators that would launch a kernel on a GPU, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        on_host = ("prim.", "aten.promote_types", "aten.scalar_tensor", "aten.empty", "aten.new_empty")
        if not func.is_view and not name.startswith(on_host):
            self.launched[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tiles", [1, 2])
def test_an_accelerator_launches_few_kernels(weight: torch.dtype, tiles: int) -> None:
    """Fake tensors take its path: three products a chunk, of five chunks; a tile computes its logits twice."""
    tokens, vocabulary, width = 4096, 152_000, 4096
    with FakeTensorMode(), Operators() as seen, Largest(but=vocabulary * width // tiles) as largest:
        hidden = torch.empty(tokens, width, dtype=weight, requires_grad=True)
        model = nn.Sequential(nn.Linear(width, vocabulary, bias=False, dtype=weight))
        head = em.tile(model, at_most=vocabulary * width * weight.itemsize // tiles)[0]
        seen.launched.clear()
        largest.nbytes = 0
        em.linear_cross_entropy(hidden, head, torch.empty(tokens, dtype=torch.int64)).backward()
    products = sum(count for name, count in seen.launched.items() if "mm" in name)
    assert products == (15 if tiles == 1 else 2 * 4 * 3), seen.launched
    assert seen.launched.total() <= (140 if tiles == 1 else 205), seen.launched
    assert largest.nbytes <= 512 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "label_smoothing": 0.2}], ids=str)
def test_an_accelerator_multiplies_operands_of_one_dtype(
    dtype: torch.dtype, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With products that a CPU lacks replaced. The gradient of the logits, at most 1, is rounded once more, by half of
    `eps`; it meets 21 tokens below 4, or 75 weights below 4.
    """
    module = sys.modules["elixir_moe.linear_cross_entropy"]

    def multiply(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
        assert left.dtype == right.dtype == dtype and out.dtype is torch.float32
        out.copy_(left.float() @ right.float() + (out if add else 0.0))

    monkeypatch.setattr(module, "_on_accelerator", lambda tensor: True)
    monkeypatch.setattr(module, "_multiply", multiply)
    hidden, weight, bias, labels = drawn(dtype)
    wide = [t.detach().float().requires_grad_() for t in (hidden, weight, bias)]
    wanted = whole(wide[0], wide[1], labels, wide[2], reduction="sum", **options)
    found = em.linear_cross_entropy(
        hidden, weight, labels, bias=bias, reduction="sum", chunk_bytes=4 * V * 5, **options
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=4e-6)
    gradients, eps = torch.autograd.grad(wanted, wide), torch.finfo(dtype).eps
    for gradient, exact in zip(torch.autograd.grad(found, [hidden, weight, bias]), gradients, strict=True):
        torch.testing.assert_close(gradient.float(), exact, rtol=eps, atol=4 * eps)


def test_a_cpu_widens_as_much_of_a_16_bit_head_as_its_cache_holds() -> None:
    weight = torch.randn(3000, 512, dtype=torch.bfloat16)
    hidden, labels = torch.randn(4, 512, dtype=torch.bfloat16, requires_grad=True), torch.randint(3000, (4,))
    with Largest() as largest:
        em.linear_cross_entropy(hidden, weight, labels).backward()
    assert largest.nbytes <= 4 << 20 < weight.numel() * 4


# ---------------------------------------------------------------------------------------------------- a head of bytes

WIDE, ROWS = 128, 384
"""Of which all schemes have blocks."""


def heads_of_bytes(scheme: str, *, tiles: bool = False) -> list[nn.Module]:
    """A quantized head, and the same with the weights that it decodes to."""
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDE, ROWS)).requires_grad_(False)
        if tiles:
            em.tile(model, at_most=128 * WIDE * 4)
        found.append(em.quantize(model, scheme, targets="0*"))
    return [found[0][0], em.dequantize(found[1])[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_head_of_bytes_gives_the_loss_of_its_decoded_weight_to_the_bit(
    scheme: str, tiles: bool, dtype: torch.dtype
) -> None:
    """Where rows are decoded all at once. In smaller parts, products in fp32 are smaller and may sum otherwise."""
    head, decoded = heads_of_bytes(scheme, tiles=tiles)
    head, decoded = head.to(dtype), decoded.to(dtype)
    labels = torch.randint(ROWS, (2, 9))
    hidden = torch.randn(2, 9, WIDE).to(dtype)
    for chunk_bytes, exact in ((1 << 20, True), (WIDE * 4 * 70, False)):
        found = []
        for given in (head, decoded):
            rows = hidden.clone().requires_grad_()
            loss = em.linear_cross_entropy(rows, given, labels, label_smoothing=0.1, chunk_bytes=chunk_bytes)
            loss.backward()
            found.append((loss, rows.grad))
        for one, other in zip(*found, strict=True):
            assert one.dtype == other.dtype
            wide = 1e-6 if dtype is torch.float32 else 2**-8  # an ulp of gradients in bf16
            assert torch.equal(one, other) if exact else torch.allclose(one, other, rtol=wide, atol=1e-6)


def test_a_head_of_bytes_is_decoded_some_rows_at_a_time() -> None:
    head, _ = heads_of_bytes("nf4")
    hidden, labels = torch.randn(4, WIDE, requires_grad=True), torch.randint(ROWS, (4,))
    with Largest() as largest:
        em.linear_cross_entropy(hidden, head, labels, chunk_bytes=32 * WIDE * 4).backward()
    assert largest.nbytes <= 32 * WIDE * 4 < ROWS * WIDE * 4


def head_of_bytes_under(plan: em.Plan | None, tiles: bool) -> dict[str, Any]:
    """Three steps with a head of bytes; under plain torch with its decoded weight if `plan` is None."""

    def build() -> tuple[nn.Module, Any]:
        if plan is not None:
            em.init_mesh(device_type="cpu")
        torch.manual_seed(2)
        head = heads_of_bytes("nf4", tiles=tiles and plan is not None)[plan is None]
        model = nn.Sequential(nn.Embedding(ROWS, WIDE), nn.Linear(WIDE, WIDE), nn.Tanh(), head)
        return model, make_optimizer(model)

    def backward(model: Any, step: int) -> None:
        tokens = torch.randint(ROWS, (4, 6), generator=torch.Generator().manual_seed(step))
        labels = tokens.roll(-1, 1)
        if plan is not None:
            tokens, labels = mine(tokens), mine(labels)
        em.linear_cross_entropy(model[2](model[1](model[0](tokens))), model[3], labels).backward()

    found = trained(build, backward, plan, 3)
    found["state"] = {name: value for name, value in found["state"].items() if not name.startswith("3.")}
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_sharded_head_of_bytes_trains_as_its_decoded_weight_does(world: int, ranks: Ranks) -> None:
    wanted = head_of_bytes_under(None, False)
    for plan in ("zero3", "offload"):
        for tiles in (False, True):
            for found in ranks(world).run(head_of_bytes_under, replace(PLANS[plan], chunk_numel=None), tiles):
                assert_alike(found, wanted, f"{plan}, {tiles=}", TOLERANCE, rel=1e-4)


# -------------------------------------------------------------------------------------------------- under every plan


class Tied(nn.Module):
    """Its head is its embedding, used by the loss inside its forward or behind it."""

    def __init__(self, *, tied: bool, inside: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.head = nn.Linear(D, V, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.inside = inside

    def forward(self, tokens: Tensor, labels: Tensor, loss: Callable[..., Tensor]) -> Any:
        hidden = self.layers(self.embedding(tokens))
        return loss(self, hidden, labels) if self.inside else hidden


def fused(model: Any, hidden: Tensor, labels: Tensor, *, recompute: bool = False) -> Tensor:
    return em.linear_cross_entropy(hidden, model.head, labels, chunk_bytes=4 * V * 5, softcap=4.0, recompute=recompute)


def plainly(model: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    return whole(hidden, model.head.weight, labels, model.head.bias, softcap=4.0)


def run(case: str, plan: em.Plan | None) -> dict[str, Any]:
    """Three steps of two micro-batches; under plain torch with the whole loss if `plan` is None."""
    tied, inside, tiled = "tied" in case, "inside" in case, "tiled" in case
    loss = plainly if plan is None else partial(fused, recompute="recomputed" in case)

    def build() -> tuple[nn.Module, Any]:
        if plan is not None:
            em.init_mesh(device_type="cpu")
        model: nn.Module = Tied(tied=tied, inside=inside)
        if plan is not None and tiled:
            em.tile(model, at_most=D * 30 * 4)
        return model, make_optimizer(model)

    def backward(model: Any, step: int) -> None:
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            tokens = torch.randint(V, (4, 6), generator=generator)
            labels = tokens.roll(-1, 1)
            labels[:, -1] = -100
            if plan is not None:
                tokens, labels = mine(tokens), mine(labels)
            found = model(tokens, labels, loss)
            ((found if inside else loss(model, found, labels)) / 2).backward()

    return trained(build, backward, plan, 3)


CASES = [
    f"{head} {place}"
    for head in ("own", "tied", "recomputed", "tied recomputed", "tied tiled")
    for place in ("inside", "behind")
]


@pytest.mark.parametrize("plan", with_further(PLANS, ("zero3", "offload")))
@pytest.mark.parametrize("world", [1, 2])
def test_a_sharded_head_trains_as_the_whole_loss_does(plan: str, world: int, ranks: Ranks) -> None:
    for case in CASES:
        wanted = run(case, None)
        for found in ranks(world).run(run, case, PLANS[plan]):
            assert_alike(found, wanted, f"{case}, {plan}", TOLERANCE, rel=1e-4)
