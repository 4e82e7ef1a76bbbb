"""Steps traced on tensors without data: against the same on real ones, and against what the runtime asks for."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import elixir_moe as em
from elixir_moe.chunks.packing import build_layout
from elixir_moe.chunks.plan import Plan
from elixir_moe.errors import ConfigError
from elixir_moe.linear_cross_entropy import linear_cross_entropy
from elixir_moe.moe.experts import GroupedExperts, Groups
from elixir_moe.planner.events import Recorder, peak_of
from elixir_moe.planner.repeat import cuts_of
from elixir_moe.planner.trace import trace
from elixir_moe.runtime.units import find_parts
from elixir_moe.torch_private import FLASH_ON_CPU
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.support.cases import rounds_asked, with_further
from tests.support.every import every
from tests.support.hf_cases import LLAMA, Family
from tests.support.parity import mesh_of_world
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
MIXED = {"experts": (0, 4, 0, 4), "residual": True, "top_k": 2}


def gpt(**shape: Any) -> GPT:
    return GPT(GPTConfig(**{"vocab_size": 512, "seq_len": 32, "n_layers": 4, "d_model": 64, "n_heads": 4, **shape}))


def batch(rows: int = 2) -> Tensor:
    return torch.randint(0, 512, (rows, 33))


def mlp_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Dropout()
    )


def hugging_face(model: str, config: str, **shape: Any) -> nn.Module:
    """With attention that builds its mask on tensors with and without data alike, which that on SDPA does not."""
    wider = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 512,
        "use_cache": False,
        "attn_implementation": "eager",
    }
    return Family(model, config, {**LLAMA, **wider, **shape}).build()


def mixtral() -> nn.Module:
    return hugging_face(
        "MixtralForCausalLM", "MixtralConfig", num_hidden_layers=4, num_local_experts=4, num_experts_per_tok=2
    )


def ids_loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor], Any]] = {
    "dense": (gpt, lm_loss, batch()),
    "dense, checkpointed": (lambda: gpt(checkpoint="non_reentrant"), lm_loss, batch()),
    "mixture": (lambda: gpt(**MIXED), lm_loss, batch()),
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), mlp_loss, torch.randn(16, 8)),
    "llama": (lambda: hugging_face("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=6), ids_loss, batch()),
    "mixtral": (mixtral, ids_loss, batch()),
    "convolutions": (convolutions, mlp_loss, torch.randn(4, 3, 12, 12)),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_activation_peak_is_what_a_real_step_holds(name: str) -> None:
    """On real tensors every allocation and every release is heard; routing is what differs from an even share."""
    make, step, sample = MODELS[name]
    torch.manual_seed(0)
    model = make()
    expected = trace(model, step, sample).activation_bytes
    with Recorder(model, find_parts(model), []) as recorder:
        step(model, sample).backward()
    assert expected == pytest.approx(peak_of(recorder.events), rel=0.05)


@pytest.mark.parametrize("name", ["dense", "dense, checkpointed", "mlp"])
def test_operations_are_those_torch_counts(name: str) -> None:
    make, step, sample = MODELS[name]
    model = make()
    with FlopCounterMode(display=False) as counter:
        step(model, sample).backward()
    attention = 0
    if name != "mlp" and FLASH_ON_CPU not in flop_registry:  # as before torch 2.15: 2 causal products, 5 in backward
        forwards = 2 if "checkpointed" in name else 1
        attention = int(4 * 2 * 32 * 32 * 64 / 2 * (forwards + 2.5)) * 4
    assert trace(model, step, sample).flops == counter.get_total_flops() + attention


def test_grouped_products_count_each_row_once() -> None:
    """Forward and both gradients: three products of all rows with one expert's matrix each, whatever the dtype."""
    rows, inner, outer = 24, 8, 16
    weights = nn.Parameter(torch.randn(3, inner, outer))
    model = nn.ParameterList([weights])
    offsets = torch.tensor([8, 16, 24], dtype=torch.int32)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = torch._grouped_mm(x, model[0], offs=offsets.to(x.device))  # type: ignore[index]
        return out.square().sum()

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(rows, inner, dtype=dtype, requires_grad=True)
        assert trace(model, step, x, compute_dtype=dtype).flops == 3 * 2 * rows * inner * outer


@pytest.mark.parametrize("shape", [{"n_layers": 6}, {"n_layers": 8, "experts": (0, 4) * 4}], ids=str)
@pytest.mark.parametrize("checkpoint", with_further(["none", "non_reentrant", "reentrant"], ["non_reentrant"]))
def test_layers_traced_once_count_as_often_as_they_run(shape: dict[str, Any], checkpoint: Any) -> None:
    model = gpt(**shape, n_heads=4, checkpoint=checkpoint)
    assert cuts_of(model)
    assert trace(model, lm_loss, batch()) == trace(model, lm_loss, batch(), whole=True)


@pytest.mark.parametrize("weight", ["bfloat16", "float32"])
def test_turns_of_a_loop_left_out_count_as_often_as_they_would_run(weight: str, monkeypatch: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = GroupedExperts(d_model=32, d_hidden=16, num_local=7)
            self.head = nn.Linear(32, 500)

    def loss(model: Any, rows: Tensor) -> Tensor:
        bounds = torch.linspace(0, len(rows), 8).int()
        labels = torch.zeros(len(rows), dtype=torch.int64)
        out = model.experts(rows.to(model.head.weight.dtype), Groups(experts=labels, bounds=bounds))
        return linear_cross_entropy(out, model.head, labels, chunk_bytes=10_000)  # 13 chunks, blocks of the weight too

    model = Mixed().to(getattr(torch, weight))

    def found() -> Any:
        return trace(model, loss, torch.randn(64, 32), tokens=64)

    shortened = found()
    turns = list[int]()

    def every(lengths: Sequence[int], on: Tensor) -> Iterator[tuple[int, slice]]:
        turns.append(len(lengths))
        for number, stop in enumerate(accumulate(lengths)):
            yield number, slice(stop - lengths[number], stop)

    for module in ("linear_cross_entropy", "moe.experts"):
        monkeypatch.setattr(sys.modules[f"elixir_moe.{module}"], "pieces", every)
    assert found() == shortened
    assert max(turns) > 3


def test_all_three_products_of_a_loss_without_logits_are_counted() -> None:
    """Logits, the gradient of the rows, and that of the weight, which is summed in place."""
    head = nn.Sequential(nn.Linear(32, 500, bias=False))

    def loss(model: Any, rows: Tensor) -> Tensor:
        return linear_cross_entropy(rows.requires_grad_(), model[0], torch.zeros(64, dtype=torch.int64))

    assert trace(head, loss, torch.randn(64, 32), tokens=64).flops == 3 * 2 * 64 * 32 * 500


def test_a_trace_serves_any_number_of_ranks() -> None:
    alone, three = (trace(gpt(), lm_loss, batch(), world=world) for world in (1, 3))
    assert alone != three
    assert alone.over(3) == three


def test_only_layers_that_agree_in_everything_are_cut() -> None:
    model = gpt(n_layers=6)
    model.blocks[5].dropout.p = 0.5
    (cut,) = cuts_of(model)
    assert (cut.start, cut.period, cut.periods) == (0, 1, 5)
    model.blocks[2].attention.n_heads = 2
    assert not cuts_of(model)


def test_the_model_is_given_back_as_it_was() -> None:
    model = gpt(n_layers=6, checkpoint="non_reentrant", experts=(0, 4) * 3)
    before = {name: p for name, p in model.named_parameters()}
    values = {name: p.clone() for name, p in before.items()}
    counts = [m.tokens_per_expert for m in model.modules() if hasattr(m, "tokens_per_expert")]
    sample, state = batch(), torch.get_rng_state()
    trace(model, lm_loss, sample, compute_dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    assert every(model.get_parameter(name) is p and torch.equal(p, values[name]) for name, p in before.items())
    assert every(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    mixtures = [m for m in model.modules() if hasattr(m, "tokens_per_expert")]
    assert every(m.tokens_per_expert is c for m, c in zip(mixtures, counts, strict=True))


class HearsItself(nn.Module):
    """Puts a hook on its layer in its first forward, as transformers does to keep hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.heard = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "listens"):
            self.listens = self.layer.register_forward_hook(self._hear)
        return self.layer(x)

    def _hear(self, *_: object) -> None:
        self.heard += 1


def test_hooks_of_a_first_forward_are_added_once() -> None:
    model = HearsItself()
    trace(model, lambda model, x: model(x).sum(), torch.ones(2, 4))
    model(torch.ones(2, 4))
    assert model.heard == 1


def test_a_step_that_reads_values_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot run on tensors without data"):
        trace(nn.Linear(2, 2), lambda m, x: m(x).sum() * x.sum().item(), torch.ones(1, 2))
    with pytest.raises(ConfigError, match="expected the loss, a tensor of one element"):
        trace(nn.Linear(2, 2), lambda m, x: m(x), torch.ones(1, 2))


def counting(minlength: int) -> Any:
    """A step whose loss counts the largest features, as losses that balance experts do."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return (torch.bincount(out.argmax(1), minlength=minlength) * out.mean(0)).sum()

    return step


def test_counts_have_a_shape_if_the_least_length_is_given() -> None:
    assert trace(nn.Linear(2, 3), counting(3), torch.ones(4, 2)).events
    with pytest.raises(ConfigError, match="bincount without minlength"):
        trace(nn.Linear(2, 3), counting(0), torch.ones(4, 2))


class Caching(nn.Linear):
    """Keeps a table in an attribute, and another in a forward that is memoised, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._table: torch.Tensor | None = None
        self.memo = Memo()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._table is None:
            self._table = torch.ones(2)
        return super().forward(x) * self._table * self.memo(2)


class Memo(nn.Module):
    @lru_cache  # noqa: B019  what Megatron's rotary embedding does
    def forward(self, n: int) -> torch.Tensor:
        return torch.ones(n)


def test_sparse_buffers_count_with_their_parts() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    found = trace(model, lambda m, x: m(x).sum(), torch.ones(1, 2))
    assert found.buffer_bytes == 3 * (2 * 8 + 4)


def test_nothing_without_data_outlives_the_trace() -> None:
    model = Caching()
    trace(model, lambda m, x: m(x).sum(), torch.ones(1, 2))
    assert model._table is None
    assert torch.equal(model(torch.ones(1, 2)), nn.functional.linear(torch.ones(1, 2), model.weight, model.bias))
    kept: list[torch.Tensor] = []

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kept.append(model(x))
        return kept[-1].sum()

    with pytest.raises(ConfigError, match="tensors outside the model"):
        trace(nn.Linear(2, 2), step, torch.ones(1, 2))


def run_recorded(checkpoint: Any, shape: dict[str, Any]) -> dict[str, Any]:
    """What `wrap` packs and the first step asks of the cache, and what the planner expects of both."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, seq_len=16, n_layers=4, d_model=16, n_heads=2, checkpoint=checkpoint, **shape)
    model = GPT(config, mesh_of_world())
    em.annotate(model, gpt_patterns(model))
    sample = torch.randint(0, 64, (2, 17))
    ranks = torch.distributed.get_world_size()
    profile = trace(model, lm_loss, sample, world=ranks, rank=torch.distributed.get_rank())
    plan = Plan.zero3(rcache_blocks=64, chunk_numel=2500)
    model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=plan, sample=sample, step=lm_loss)
    with rounds_asked() as rounds:
        lm_loss(model, sample).backward()
    layout = profile.step_order.counted(build_layout(profile.params, 2500))
    found = {
        "layouts": (layout, em.inspect(model).layout),
        "requests": ([profile.schedule(layout).entries], rounds),
    }
    optimizer.close()
    return found


@pytest.mark.parametrize("checkpoint", ["none", "non_reentrant", "reentrant"])
@pytest.mark.parametrize("shape", [{}, {"experts": (0, 2, 0, 2)}], ids=str)
def test_the_planner_expects_what_the_runtime_does(checkpoint: Any, shape: dict[str, Any], ranks: Ranks) -> None:
    for found in ranks(2).run(run_recorded, checkpoint, shape):
        planned, real = found["layouts"]
        assert planned == real
        planned, real = found["requests"]
        assert planned == real


ROWS = 8 * 4 * 4
"""Bytes of x, (8, 4), in the test below."""


@pytest.mark.parametrize(
    ("compute", "nbytes"),
    [
        (lambda x: x * x, 3 * ROWS),
        (lambda x: x * 3.0, 2 * ROWS),
        (lambda x: x.t() * x.t(), 3 * ROWS),
        (lambda x: x * x[:, :1], 2 * (2 * ROWS + ROWS // 4)),
        (lambda x: x[:, :2] * x[:, 2:], 2 * (3 * ROWS // 2)),
        (lambda x: x.t() * x.view(4, 8), 2 * 3 * ROWS),
    ],
    ids=["alike", "a scalar", "both transposed", "a column", "halves", "one transposed"],
)
def test_pointwise_operators_of_tensors_laid_out_differently_count_twice(compute: Any, nbytes: int) -> None:
    def traffic(computed: Any) -> int:
        def step(model: nn.Module, x: Tensor) -> Tensor:
            with torch.no_grad():
                computed(x.clone())
            return model(x).sum()

        return trace(nn.Linear(4, 1), step, torch.ones(8, 4)).traffic_bytes

    assert traffic(compute) - traffic(lambda x: x) == nbytes
