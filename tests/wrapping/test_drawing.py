"""`sharded_init`: the model of a plain start, bit for bit, built without memory for its weights.

The oracle is the same construction from the same seed without the context. Drawing changes no bit, so everything is
compared bitwise, and so is the state of the random generator after the construction.
"""

import copy
import gc
import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.errors import ConfigError, ElixirError, LayoutError
from elixir_moe.wrapping.deferred_init import _Followed, drawn, record_of
from elixir_tools.models.config import GPTConfig
from elixir_tools.models.gpt import GPT, gpt_patterns, lm_loss
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.hf_cases import FAMILIES
from tests.support.parity import make_optimizer, mesh_of_world
from tests.support.ranks import RankPool

Ranks = Callable[[int], RankPool]
SEED = 11
SHAPE: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, "seq_len": 16}
DENSE = GPTConfig(**SHAPE, tie_embeddings=True)
EXPERTS = GPTConfig(**SHAPE, experts=(2, 4), ep=(1, 2), residual=True)


class Initialized(nn.Module):
    """One parameter for each way in which modules draw their values."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(20, 30)))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(20, 30)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(10, 10), 0.3))
        self.eye = nn.Parameter(nn.init.eye_(torch.empty(4, 4)))
        self.transposed = nn.Parameter(nn.init.normal_(torch.empty(4, 40).t()))
        self.arithmetic = nn.Parameter(torch.randn(7, 5) / math.sqrt(3))
        self.old = nn.Parameter(torch.Tensor(3, 5).uniform_(-1, 1))
        self.by_numpy = nn.Parameter(torch.empty(3, 4))
        self.singular = nn.Parameter(torch.linalg.svd(torch.randn(4, 3)).U)
        self.chosen = nn.Parameter(torch.multinomial(torch.ones(40), 20).float())
        self.around = nn.Parameter(torch.normal(torch.zeros(30), torch.ones(30)))
        self.linear = nn.Linear(17, 33)
        nn.init.xavier_uniform_(self.linear.weight)
        self.copied = copy.deepcopy(self.linear)
        self.padded = nn.Embedding(10, 6, padding_idx=2)
        self.recurrent = nn.LSTM(5, 7, 2)
        self.last = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
        self.half = nn.Linear(5, 6).to(torch.bfloat16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
        self.statistics = nn.BatchNorm1d(5)
        self.two_kinds = nn.Parameter(torch.empty(9))
        with torch.no_grad():
            self.by_numpy.copy_(torch.from_numpy(np.random.default_rng(0).standard_normal((3, 4))))
            self.two_kinds[:3].normal_()
            self.two_kinds[3:] = 2
            self.two_kinds.mul_(self.arithmetic.sum())
            self.linear.bias.copy_(torch.tensor([float(i) for i in range(33)]))
        self.generated = nn.Parameter(torch.empty(5).normal_(generator=torch.Generator().manual_seed(4)))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool())
        self.positions = torch.arange(6)
        turned = torch.randn(3, 4, dtype=torch.complex64)
        self.conjugated = nn.Parameter((turned.conj() @ turned.T).real.clone())
        self.register_buffer("backwards", turned.mH.contiguous())
        self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)] + torch.rand(2).tolist()
        self.rates += list(torch.rand(2, device="cpu").numpy())
        self.looks = self.linear.weight.is_meta, self.linear.weight.device.type, len(torch.nonzero(self.mask))
        self.register_buffer("after", torch.rand(3, device=self.linear.weight.device))


def plain_gpt(config: GPTConfig) -> GPT:
    return GPT(config)


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "initialized": Initialized,
    "transformer": lambda: nn.Transformer(16, 2, 2, 2, 32),
    "dense": lambda: plain_gpt(DENSE),
    "experts": lambda: plain_gpt(EXPERTS),
    **{name: family.build for name, family in FAMILIES.items()},
}


def both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The model of a plain start and of a sharded one, which leave the generator in one state."""
    torch.manual_seed(SEED)
    plain = build()
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    with em.sharded_init():
        model = build()
    assert torch.equal(torch.get_rng_state(), state)
    return plain, model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


QUICK = ("initialized", "transformer", "dense", "experts", "gpt2", "llama", "mixtral")


@pytest.mark.parametrize("name", with_further(BUILDERS, QUICK))
def test_every_tensor_is_that_of_a_plain_start(name: str) -> None:
    plain, model = both(BUILDERS[name])
    state, found = torch.get_rng_state(), tensors_of(model)
    assert [n for n, p in model.named_parameters() if record_of(p) is None and p.dim()] == []
    assert found.keys() == tensors_of(plain).keys()
    for key, wanted in reversed(tensors_of(plain).items()):
        value = drawn(found[key])
        assert torch.equal(value, wanted) and value.dtype == wanted.dtype and value.stride() == wanted.stride(), key
    assert torch.equal(torch.get_rng_state(), state)


def test_python_code_sees_the_values_of_a_plain_start() -> None:
    plain, model = both(Initialized)
    assert model.rates == plain.rates
    assert model.looks == plain.looks == (False, "cpu", 15)


def test_what_is_drawn_again_is_dropped() -> None:
    with em.sharded_init():
        layer = nn.Linear(3, 4)
        for _ in range(5):
            layer.reset_parameters()
    record = record_of(layer.weight)
    assert record is not None and len(record.operations) == 1


# ---------------------------------------------------------------------------------------------------- after the context


class Changed(nn.Module):
    """Parameters, a buffer, and tensors that modules keep in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)
        self.recurrent, self.norm = nn.LSTM(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(6.0))
        self.register_buffer("odd", self.table[1::2])
        self.kept = [{"rates": torch.rand(3)}, (torch.zeros(2), self.table)]


def initialize(module: nn.Module) -> None:
    """As many models do, through `data`."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(std=0.02)
        module.weight.data[0] = 3


def by_init(model: Any) -> None:
    nn.init.orthogonal_(model.first.weight)
    nn.init.trunc_normal_(model.second.weight)


def by_apply(model: Any) -> None:
    model.apply(initialize)


def by_state_dict(model: Any) -> None:
    model.load_state_dict(
        {name: torch.randn_like(value, dtype=torch.float32) for name, value in Changed().state_dict().items()}
    )


def by_operators(model: Any) -> None:
    with torch.no_grad():
        model.first.bias.copy_(torch.linspace(0, 1, 4))
        model.second.weight[1:].fill_(2)
        model.second.weight.mul_(model.first.weight.sum())
        model.first.weight.sub_(torch.randn(4, 3, device=model.first.weight.device))
        model.odd.add_(1)
        model.kept[0]["rates"].mul_(2)


def by_data(model: Any) -> None:
    model.first.weight.data = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 4), np.float32)).t()
    model.second.weight.data = model.first.weight.data[:, :1].repeat(1, 4)
    model.recurrent.weight_hh_l0.data.zero_()


def by_conversion(model: Any) -> None:
    model.to(torch.bfloat16)
    model.first.bias.data += torch.rand(4)


def by_copies(model: Any) -> None:
    model.second = copy.deepcopy(model.second)
    nn.init.ones_(model.second.weight)
    model.first.weight = nn.Parameter(model.first.weight.detach() * 2)


def by_itself(model: Any) -> None:
    """Conversions that change nothing give the tensor itself."""
    with torch.no_grad():
        model.first.weight.copy_(model.first.weight.float())
        model.second.weight.data.copy_(model.second.weight.data.contiguous())
        model.table.copy_(model.table)


def by_parametrisations(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.first)
    nn.utils.parametrizations.orthogonal(model.second)
    nn.utils.parametrizations.spectral_norm(model.recurrent, "weight_ih_l0")


def by_parameters(model: Any) -> None:
    model.first.bias = nn.Parameter(model.first.bias)
    model.first.weight = nn.Parameter(model.first.weight, requires_grad=False)
    norm = copy.deepcopy(model.norm)
    norm.running_mean.add_(torch.rand(4))
    model.norm = norm


def shared(model: Any) -> tuple[bool, bool]:
    view = model.odd.untyped_storage().data_ptr() == model.table.untyped_storage().data_ptr()
    return view, model.kept[1][1] is model.table


CHANGES: list[Callable[[Any], None]] = [
    by_init,
    by_apply,
    by_state_dict,
    by_operators,
    by_data,
    by_conversion,
    by_copies,
    by_itself,
    by_parametrisations,
    by_parameters,
]


def tensors_and_kept(model: Any) -> dict[str, Tensor]:
    return tensors_of(model) | {"rates": model.kept[0]["rates"], "zeros": model.kept[1][0]}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("inside", [True, False])
def test_what_is_written_is_what_a_plain_start_writes(change: Callable[[Any], None], inside: bool) -> None:
    torch.manual_seed(SEED)
    plain = Changed()
    change(plain)
    state = torch.get_rng_state()
    torch.manual_seed(SEED)
    with em.sharded_init():
        model = Changed()
        if inside:
            change(model)
    if not inside:
        change(model)
    assert torch.equal(torch.get_rng_state(), state)
    wanted, found = tensors_and_kept(plain), tensors_and_kept(model)
    for name, value in found.items():
        assert torch.equal(drawn(value), wanted[name]) and value.dtype == wanted[name].dtype, name
    assert torch.equal(torch.get_rng_state(), state)
    trained = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=em.Plan.zero3())
    first = em.full_state_dict(model)
    trained[1].close()
    assert [name for name, value in plain.state_dict().items() if not torch.equal(first[name], value)] == []
    assert torch.equal(model.kept[0]["rates"], wanted["rates"])
    assert shared(model) == shared(plain), "what was one tensor, or in one memory, still is"
    assert not any(isinstance(p, _Followed) for p in model.parameters()), "wrapped like a plain model"


def adapted(context: Callable[[], Any], kind: str) -> Any:
    import peft

    torch.manual_seed(SEED)
    with context():
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    with context():
        return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=kind))


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_adapters_computed_from_the_model_are_created_in_another_context(kind: str) -> None:
    wanted, found = tensors_of(adapted(nullcontext, kind)), tensors_of(adapted(em.sharded_init, kind))
    assert wanted.keys() == found.keys()
    assert [name for name, value in wanted.items() if not torch.equal(drawn(found[name]), value)] == []


def test_a_refused_model_can_be_changed_and_wrapped_again() -> None:
    with em.sharded_init():
        model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(em.PlanError):
        em.wrap(model, optimizer, plan=em.Plan.offload(rcache_blocks=1, chunk_numel=4))
    nn.init.ones_(model.weight)
    model, sharded = em.wrap(model, optimizer, plan=em.Plan.zero3())
    state = em.full_state_dict(model)
    sharded.close()
    assert torch.equal(state["weight"], torch.ones(3, 3))


def test_a_parameter_is_one_after_the_context() -> None:
    torch.manual_seed(SEED)
    with em.sharded_init():
        layer = nn.BatchNorm1d(3)
    copied = copy.deepcopy(layer)
    for model in (layer, copied):
        assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
        assert isinstance(model.weight, nn.Parameter) and not isinstance(model.running_mean, nn.Parameter)
        assert not isinstance(model.weight * 1, nn.Parameter)
        assert repr(model.weight).startswith("Parameter")


@pytest.mark.parametrize("kind", ["hook", "after"])
def test_hooks_of_parameters_survive(kind: str) -> None:
    with em.sharded_init():
        model = nn.Linear(3, 3)
    seen: list[int] = []
    if kind == "hook":
        model.weight.register_hook(lambda gradient: seen.append(1))
    else:
        handle = model.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(2))
        model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(1))
        handle.remove()
    model, sharded = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=em.Plan.zero3())
    model(torch.ones(2, 3)).sum().backward()
    sharded.close()
    assert seen == [1]


class Lazy(nn.Module):
    """Modules that learn their shapes from a forward in the constructor, which also moves a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d()
        self.norm(self.layer(torch.randn(2, 5, 4)))


def test_lazy_modules_that_run_in_the_context() -> None:
    plain, model = both(Lazy)
    found = tensors_of(model)
    assert [n for n, value in tensors_of(plain).items() if not torch.equal(drawn(found[n]), value)] == []


@pytest.mark.parametrize("lazy", [nn.LazyLinear(3), nn.LazyInstanceNorm1d(affine=False, track_running_stats=True)])
def test_lazy_modules_that_never_run_are_named(lazy: nn.Module) -> None:
    with em.sharded_init():
        model = nn.Sequential(nn.Linear(3, 3), type(lazy)(3) if isinstance(lazy, nn.LazyLinear) else lazy)
    with pytest.raises(ConfigError, match=r"lazy modules, '1' with '1\..*': run a forward"):
        em.wrap(model, torch.optim.SGD(model[0].parameters(), lr=0.1), plan=em.Plan.zero3())


def test_tensors_of_meta_have_no_values_to_compute_with() -> None:
    other = torch.empty(3, device="meta")
    with pytest.raises(ConfigError, match="has not made"), em.sharded_init():
        nn.Parameter(torch.zeros(3)).data.copy_(other)


# ------------------------------------------------------------------------------------------------------------ wrapping


def plans() -> dict[str, em.Plan]:
    disk = tempfile.gettempdir()
    return {
        "ddp": em.Plan.ddp(),
        "zero3": em.Plan.zero3(rcache_blocks=12),
        "offload": em.Plan.offload(rcache_blocks=12),
        "disk": em.Plan.offload(rcache_blocks=12, disk_chunks=3, disk=disk),
    }


def started(build: Callable[[], nn.Module], plan: em.Plan, *, sharded: bool, mine: int = 0) -> dict[str, Any]:
    """The weights after `wrap` and after a step, and the generator; with `mine`, other ranks have another seed."""
    torch.manual_seed(SEED + mine * dist.get_rank())
    if sharded:
        with em.sharded_init():
            model = build()
    else:
        model = build()
    if isinstance(model, GPT):
        em.annotate(model, gpt_patterns(model))
    assert every((record_of(p) is not None) == sharded for p in model.parameters())
    model, optimizer = em.wrap(model, make_optimizer(model), plan=plan)
    generator, first = torch.get_rng_state(), em.full_state_dict(model, all_ranks=True)
    rows = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(dist.get_rank()))
    loss = lm_loss(model, rows) if isinstance(model, GPT) else model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    result = {"first": first, "generator": generator, "trained": em.full_state_dict(model, all_ranks=True)}
    optimizer.close()
    gc.collect()
    return result


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    wrong = [] if torch.equal(found["generator"], wanted["generator"]) else ["generator"]
    for key in ("first", "trained"):
        assert found[key].keys() == wanted[key].keys()
        wrong += [f"{key} {n}" for n, value in wanted[key].items() if not torch.equal(found[key][n], value)]
    return wrong


def starts_differ(names: tuple[str, ...], which: tuple[str, ...], mine: int) -> list[str]:
    """What differs between sharded and plain starts, on this rank; of GPTs also from a start of one process."""
    builders: dict[str, Callable[[], nn.Module]] = {
        "dense": lambda: GPT(DENSE, mesh_of_world()),
        "experts": lambda: GPT(replace(EXPERTS, ep=(1, min(2, dist.get_world_size()))), mesh_of_world()),
    }
    wrong = []
    for name in names:
        build = builders.get(name, BUILDERS[name])
        for kind in which:
            wanted = started(build, plans()[kind], sharded=False, mine=mine)
            found = started(build, plans()[kind], sharded=True, mine=mine)
            wrong += [f"{name} {kind} {what}" for what in differences(found, wanted)]
            if isinstance(config := {"dense": DENSE, "experts": EXPERTS}.get(name), GPTConfig):
                torch.manual_seed(SEED)
                alone = plain_gpt(config).state_dict()
                assert alone.keys() == found["first"].keys()
                wrong += [f"{name} {kind} alone {n}" for n in alone if not torch.equal(alone[n], found["first"][n])]
    return wrong


EVERY = ("ddp", "zero3", "offload", "disk")
CASES = [
    (1, ("experts", "gpt2"), ("offload",), 0),
    (2, ("dense", "experts"), EVERY, 0),
    (2, ("llama", "mixtral"), ("zero3",), 1),
    (1, ("dense", "experts", "gpt2", "llama", "mixtral"), EVERY, 0),
    (2, ("gpt2", "llama", "mixtral"), EVERY, 1),
    (4, ("dense", "experts", "gpt2", "mixtral"), EVERY, 0),
]


@pytest.mark.parametrize(("world", "names", "which", "mine"), with_further(CASES, CASES[:1] + CASES[2:3]))
def test_weights_and_a_step_are_those_of_a_plain_start(
    world: int, names: tuple[str, ...], which: tuple[str, ...], mine: int, ranks: Ranks
) -> None:
    assert ranks(world).run(starts_differ, names, which, mine) == [[]] * world


class Wide(nn.Module):
    """Many layers of one width, and each weight drawn twice."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.02)


def most_bytes(layers: int, width: int) -> tuple[int, int]:
    """(most bytes of tensors at once from the construction to the end of `wrap`, bytes that the library then holds)."""
    with torch.profiler.profile(profile_memory=True) as profile:
        with em.sharded_init():
            model = Wide(layers, width)
        model, optimizer = em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero3())
    held = sum(em.inspect(model).held_bytes.values())
    optimizer.close()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(changes)), held


def test_no_rank_holds_more_than_its_shards_and_one_parameter(ranks: Ranks) -> None:
    """The tenth is for the states of the generator, 5 KB each. A plain start holds the whole model besides."""
    layers, width = 8, 512
    for most, held in ranks(1).run(most_bytes, layers, width):  # gloo's threads let go of a broadcast when they please
        assert most < held + 1.1 * 4 * width * width


# -------------------------------------------------------------------------------------------------------------- errors


class Factored(nn.Linear):
    """Writes with an operator that torch does not run on meta."""

    def reset_parameters(self) -> None:
        torch.geqrf(torch.rand_like(self.weight), out=(self.weight.data, self.bias.data))


def test_the_module_that_cannot_be_recorded_is_named() -> None:
    message = r"Factored\.reset_parameters calls aten\.geqrf\.a, which em\.sharded_init cannot record"
    with pytest.raises(ConfigError, match=message), em.sharded_init():
        Factored(4, 4)


def test_meta_is_no_default_device_for_it() -> None:
    with pytest.raises(ConfigError, match=r"leave torch\.device"), torch.device("meta"), em.sharded_init():
        pass


def on_meta() -> str:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(LayoutError) as error:
        em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero3())
    return str(error.value)


def test_a_model_on_meta_without_the_context_is_refused(ranks: Ranks) -> None:
    for message in ranks(1).run(on_meta):
        assert message.startswith("'weight' and 1 more are on the meta device: build the model inside")


def failing() -> str:
    with em.sharded_init():
        model = nn.Linear(4, 4)
    record = record_of(model.weight)
    assert record is not None

    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("no memory")

    record.operations[-1].function = broken
    with pytest.raises(ElixirError) as error:
        em.wrap(model, torch.optim.AdamW(model.parameters()), plan=em.Plan.zero3())
    return str(error.value)


def test_all_ranks_learn_that_a_drawing_failed(ranks: Ranks) -> None:
    for message in ranks(2).run(failing):
        assert message == "[rank 0] MemoryError: no memory"


@pytest.mark.parametrize("inside", [True, False])
def test_values_go_to_numpy_for_reading_alone(inside: bool) -> None:
    """A write there would be lost."""
    with em.sharded_init():
        layer = nn.Linear(2, 2)
        if inside:
            assert not layer.weight.data.numpy().flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        layer.weight.data.numpy()[:] = 5
