"""What a wrapped model cannot do is refused before it can do harm; what looks alike works."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.errors import ConfigError, UsageError
from tests.support.every import same_tensors
from tests.support.ranks import RankError, RankPool

Ranks = Callable[[int], RankPool]
PLAN = em.Plan.zero2(chunk_numel=256)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    em.init_mesh(device_type="cpu")
    yield
    dist.destroy_process_group()


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's update by its norm."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * p.norm() / p.grad.norm(), alpha=-group["lr"])


class DecayOfMatrices(torch.optim.SGD):
    """Decays what has two dims."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim >= 2:
                    p.mul_(0.9)
        super().step(closure)


class Sums(torch.optim.Optimizer):
    """Elementwise, with a state that its constructor makes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].update(step=0, sum=torch.full_like(p, 0.5))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["sum"] += p.grad.square()
                    p.sub_(group["lr"] * p.grad / self.state[p]["sum"].sqrt())


class Momentum(torch.optim.Optimizer):
    """Descent along a momentum; subclasses say what they keep of it."""

    least = 4096
    """Elements from which the momentum is kept in another form, as 8-bit optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state, fresh = self.state[p], torch.zeros(p.shape)
                    momentum = 0.9 * (self.read(state) if state else fresh).view(p.shape) + p.grad
                    p.sub_(group["lr"] * momentum)
                    state.update(self.kept(momentum) if p.numel() >= self.least else {"momentum": momentum})

    def kept(self, momentum: Tensor) -> dict[str, Any]:
        return {"momentum": momentum.bfloat16(), "count": torch.tensor(1.0), "rounds": 1, "nothing": None}

    def read(self, state: dict[str, Any]) -> Tensor:
        return state["momentum"].float()


class InBlocks(Momentum):
    """Bytes, and a scale for each 256 of them."""

    def kept(self, momentum: Tensor) -> dict[str, Any]:
        blocks = momentum.view(-1, 256)
        scales = blocks.abs().amax(1) / 127
        return {"bytes": (blocks / scales[:, None]).round().to(torch.int8).view(-1), "scales": scales}

    def read(self, state: dict[str, Any]) -> Tensor:
        if "momentum" in state:
            return state["momentum"]
        return state["bytes"].view(-1, 256) * state["scales"][:, None]


class Narrow(Tensor):
    """fp32 to whoever looks, bf16 inside."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Narrow":
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.inner.float() if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


class InNarrow(Momentum):
    def kept(self, momentum: Tensor) -> dict[str, Any]:
        return {"momentum": Narrow(momentum.bfloat16())}

    def read(self, state: dict[str, Any]) -> Tensor:
        return state["momentum"] * 1


class OneOfTwo(Momentum):
    """Two of them in one tensor."""

    def kept(self, momentum: Tensor) -> dict[str, Any]:
        return {"both": torch.stack([momentum, momentum])}

    def read(self, state: dict[str, Any]) -> Tensor:
        return state["both"][0] if "both" in state else state["momentum"]


class Remembers(Momentum):
    def kept(self, momentum: Tensor) -> dict[str, Any]:
        return {"momentum": momentum, "history": [momentum.norm()]}


class Counts(Sums):
    """Its constructor makes a tensor of one element, and one dim, for each parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for state in self.state.values():
            state["count"] = torch.zeros(1)


class Compiled(Momentum):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.compile(super().step, backend=compiler)()


def compiler(*_: Any) -> Any:
    raise AssertionError("compiled")


class Raises(Sums):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no tensor is good enough")


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> dict[str, Tensor]:
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    if not isinstance(optimizer, em.ShardedOptimizer):
        return model.state_dict()
    state = em.full_state_dict(model, all_ranks=True)
    optimizer.close()
    gc.collect()
    return state


class OneNorm(torch.optim.Optimizer):
    """Divides by the largest norm so far of all gradients together, which it keeps as an option (Prodigy, D-Adapt)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"largest": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            there = [p for p in group["params"] if p.grad is not None]
            norm = sum(float(p.grad.square().sum()) for p in there) ** 0.5
            group["largest"] = max(group["largest"], norm)
            for p in there:
                p.sub_(p.grad, alpha=0.1 / (group["largest"] + 1e-9))


class OneNumber(OneNorm):
    """Keeps such a number and does not use it yet, as Prodigy in its first steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["largest"] += sum(float(p.grad.sum()) for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("kind", [Lamb, DecayOfMatrices, OneNorm, OneNumber])
def test_optimizers_of_more_than_elements_are_found_out(kind: type[torch.optim.Optimizer]) -> None:
    model = model_of()
    with pytest.raises(ConfigError, match=f"{kind.__name__} looks at whole tensors .* or at all parameters together"):
        em.wrap(model, kind(model.parameters()), plan=PLAN)


class CountsApart(Sums):
    """Keeps a number for all parameters together, as torch's state dict would."""

    def step(self, closure: Any = None) -> None:
        self.state["all"] = {"steps": self.state["all"].get("steps", 0) + 1}


def test_state_of_no_parameter_is_refused() -> None:
    """A checkpoint would lose it."""
    model = model_of()
    with pytest.raises(ConfigError, match=r"CountsApart keeps state\['all'\], which belongs to no parameter"):
        em.wrap(model, CountsApart(model.parameters()), plan=PLAN)


KEPT = {
    InBlocks: r"'scales', a torch\.float32 tensor of shape \(\d+,\), for \d+ elements",
    InNarrow: "'momentum', a Narrow, for",
    OneOfTwo: r"'both', a torch\.float32 tensor of shape \(2, \d+\), for",
    Remembers: "'history', a list, for",
    Counts: r"'count', a torch\.float32 tensor of shape \(1,\), for",
}


@pytest.mark.parametrize("kind", KEPT)
def test_optimizers_whose_state_cannot_be_cut_are_named(kind: type[torch.optim.Optimizer]) -> None:
    """Also where the model is too small for the blocks: whether an optimizer is served does not depend on it."""
    model = model_of()
    said = rf"{kind.__name__} keeps {KEPT[kind]}.*torch\.optim\.AdamW .*moments='int8'.*em\.Plan\.offload"
    with pytest.raises(ConfigError, match=said):
        em.wrap(model, kind(model.parameters()), plan=PLAN)


@pytest.mark.parametrize(
    "package, name",
    [
        ("bitsandbytes.optim.adamw", "PagedAdamW8bit"),
        ("torchao.optim.adam", "AdamW4bit"),
        ("torchao.optim", "AdamWFp8"),
    ],
)
def test_optimizers_in_fewer_bits_are_refused_by_name(package: str, name: str) -> None:
    """Neither package is there: their classes are told by where they come from, before they are tried."""
    model = model_of()
    kind = type(name, (torch.optim.AdamW,), {"__module__": package})
    with pytest.raises(
        ConfigError, match=rf"{name} of {package.partition('.')[0]} .*torch\.optim\.AdamW .*moments='int8'"
    ):
        em.wrap(model, kind(model.parameters()), plan=PLAN)


def test_optimizers_whose_state_can_be_cut_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Whatever the dtype of their tensors; and with values for a whole parameter."""

    def wrapped(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(64, 80)
        return em.wrap(model, Momentum(model.parameters()), plan=em.Plan.zero2())

    def step(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        return em.full_state_dict(model, all_ranks=True)

    one, other = wrapped(0), wrapped(1)
    step(*one)
    em.save(tmp_path / "a", *one)
    em.load(tmp_path / "a", *other)
    wanted, found = step(*one), step(*other)
    assert same_tensors(found, wanted)
    for _, optimizer in (one, other):
        optimizer.close()


def test_a_state_that_was_not_foreseen_is_named_when_it_is_saved(tmp_path: Path) -> None:
    """Blocks that begin at more elements than `wrap` tries."""
    model = nn.Linear(1024, 512)
    optimizer: Any = InBlocks(model.parameters())
    optimizer.least = 2**19
    model, optimizer = em.wrap(model, optimizer, plan=em.Plan.zero2())
    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()
    with pytest.raises(em.CheckpointError, match=r"InBlocks keeps 'scales', a torch.float32 tensor of shape \(2048,\)"):
        em.save(tmp_path / "a", model, optimizer)
    optimizer.close()


def test_trying_an_optimizer_compiles_nothing() -> None:
    model, optimizer = em.wrap(model := model_of(), Compiled(model.parameters()), plan=PLAN)
    optimizer.close()


def test_an_optimizer_that_cannot_be_tried_says_so() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match=r"Raises\.\w+\(\).* no tensor is good enough"):
        em.wrap(model, Raises(model.parameters()), plan=PLAN)


@pytest.mark.parametrize("kind", [Sums, torch.optim.SGD, torch.optim.RMSprop])
def test_a_scheduler_may_be_built_before_wrap(kind: Any, recwarn: pytest.WarningsRecorder) -> None:
    def run(plan: em.Plan | None) -> dict[str, Tensor]:
        model = model_of()
        optimizer = kind(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] = 0.05
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if plan is not None:
            model, optimizer = em.wrap(model, optimizer, plan=plan)
        return train(model, optimizer, scheduler)

    wanted, found = run(None), run(PLAN)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_modules_that_came_after_wrap_are_named() -> None:
    model, optimizer = em.wrap(model := model_of(), torch.optim.SGD(model.parameters(), lr=0.1), plan=PLAN)
    model.append(nn.Linear(8, 2))
    with pytest.raises(UsageError, match=r"the model has \['3.weight', '3.bias'\], which were not there in wrap"):
        em.full_state_dict(model, all_ranks=True)
    optimizer.close()


def test_scripted_modules_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))
    with pytest.raises(ConfigError, match=r"'1' is of torch\.jit.*wrap the plain module"):
        em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=PLAN)


def wrap_with_max_norm() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 4))
    em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=PLAN)


def test_an_embedding_that_writes_to_itself_is_refused_on_several_ranks(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"'0' writes to its weight in forward \(max_norm\).*after optimizer\.step"):
        ranks(2).run(wrap_with_max_norm)


def test_adapters_are_saved_as_peft_reads_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )

    def build() -> Any:
        torch.manual_seed(1)
        return LlamaForCausalLM(config)

    model = peft.get_peft_model(build(), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    plan = em.Plan.zero2(chunk_numel=4096)
    model, optimizer = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
    tokens = torch.arange(12).view(2, 6)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    em.save_pretrained(model, tmp_path)
    with torch.no_grad():
        wanted = model(tokens).logits
        found = peft.PeftModel.from_pretrained(build(), tmp_path)(tokens).logits
    torch.testing.assert_close(found, wanted)
    optimizer.close()
