"""Tensors that share a parameter's memory are named before `wrap`; tensors that only look like it are left alone."""

import re
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.wrapping.shared_memory import check_sharing
from tests.support.hf_cases import FAMILIES


@pytest.fixture(scope="module", autouse=True)
def world() -> None:
    em.init_mesh(device_type="cpu")


class Pair(nn.Module):
    """Two linear layers, with whatever is changed about them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def tied_by_data(pair: Pair) -> None:
    pair.b.weight.data = pair.a.weight.data


def slice_as_parameter(pair: Pair) -> None:
    pair.b.bias = nn.Parameter(pair.a.weight.data[1])


def overlapping_columns(pair: Pair) -> None:
    matrix = torch.randn(4, 7)
    pair.a.weight, pair.b.weight = nn.Parameter(matrix[:, :4]), nn.Parameter(matrix[:, 3:])


def buffer_of_a_parameter(pair: Pair) -> None:
    pair.b.register_buffer("rows", pair.a.weight.detach()[2:])


def kept_view(pair: Pair) -> None:
    pair.b.turned = pair.a.weight.t()


def kept_in_a_list(pair: Pair) -> None:
    pair.b.kept = [{"rows": pair.a.weight.data}]


def kept_in_a_record(pair: Pair) -> None:
    pair.b.kept = SimpleNamespace(rows=deque([partial(torch.matmul, other=pair.a.weight.data)]))


def memory_of_numpy(pair: Pair) -> None:
    values = torch.zeros(4, 4).numpy()
    pair.a.weight.data = torch.from_numpy(values)
    pair.b.register_buffer("values", torch.from_numpy(values))


SHARING: dict[Callable[[Pair], None], str] = {
    tied_by_data: r"parameter 'b\.weight' shares memory with parameter 'a\.weight'.*b\.weight = a\.weight",
    slice_as_parameter: r"parameter 'b\.bias' shares memory with parameter 'a\.weight'.*take its parts in forward",
    overlapping_columns: r"parameter 'b\.weight' shares memory with parameter 'a\.weight'.*take its parts in forward",
    buffer_of_a_parameter: r"'b\.rows' shares memory with parameter 'a\.weight'.*compute it from the parameter",
    kept_view: r"'b\.turned' shares memory with parameter 'a\.weight'.*compute it from the parameter",
    kept_in_a_list: r"\"b\.kept\[0\]\['rows'\]\" shares memory with parameter 'a\.weight'",
    kept_in_a_record: r"\"b\.kept\['rows'\]\[0\]\['other'\]\" shares memory with parameter 'a\.weight'",
    memory_of_numpy: r"'b\.values' shares memory with parameter 'a\.weight'",
}


@pytest.mark.parametrize("change", SHARING)
def test_what_wrap_would_tear_apart_is_named(change: Callable[[Pair], None]) -> None:
    pair = Pair()
    change(pair)
    before = {name: p.data_ptr() for name, p in pair.named_parameters()}
    with pytest.raises(em.ConfigError, match=SHARING[change]):
        em.wrap(pair, torch.optim.AdamW(pair.parameters()), plan=em.Plan.zero3())
    assert {name: p.data_ptr() for name, p in pair.named_parameters()} == before, "a refused model is untouched"


@pytest.mark.parametrize("change", [tied_by_data, slice_as_parameter, overlapping_columns, kept_view, kept_in_a_list])
def test_without_data_too(change: Callable[[Pair], None]) -> None:
    with em.sharded_init():
        change(pair := Pair())
    with pytest.raises(em.ConfigError, match=SHARING[change]):
        em.wrap(pair, torch.optim.AdamW(pair.parameters()), plan=em.Plan.zero3())


def flattened(module: nn.Module) -> nn.Module:
    """As cuDNN has the parameters of recurrent modules: one after another in one storage."""
    memory, taken = torch.empty(sum(p.numel() for p in module.parameters())), 0
    for p in module.parameters():
        p.data = memory[taken : taken + p.numel()].view(p.shape).copy_(p)
        taken += p.numel()
    return module


def columns() -> nn.Module:
    matrix = torch.randn(4, 8)
    return nn.ParameterList([nn.Parameter(matrix[:, :4]), nn.Parameter(matrix[:, 4:])])


def tied_as_one() -> nn.Module:
    pair = Pair()
    pair.b.weight = pair.a.weight
    pair.kept = [pair.a.weight]
    pair.kept.append(pair.kept)  # type: ignore[arg-type]
    return pair


def buffers_of_one_storage() -> nn.Module:
    pair = Pair()
    pair.register_buffer("table", torch.arange(8))
    pair.register_buffer("odd", pair.table[1::2])
    pair.same = pair.table
    pair.register_buffer("sparse", torch.eye(3).to_sparse())
    return pair


APART: dict[str, Callable[[], nn.Module]] = {
    "flattened": lambda: flattened(nn.LSTM(4, 4, 2)),
    "columns": columns,
    "tied as one": tied_as_one,
    "buffers": buffers_of_one_storage,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "empty": lambda: nn.ParameterList([nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 4))]),
    **{name: family.build for name, family in FAMILIES.items()},
}


@pytest.mark.parametrize("name", APART)
def test_what_has_memory_of_its_own_is_left_alone(name: str) -> None:
    check_sharing(APART[name]())


def test_flattened_parameters_train_as_before() -> None:
    torch.manual_seed(0)
    rows, models = torch.randn(3, 2, 4), [nn.LSTM(4, 4, 2), nn.LSTM(4, 4, 2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, optimizer = models[0], torch.optim.SGD(models[0].parameters(), lr=0.1)
    model = flattened(models[1])
    model, sharded = em.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=em.Plan.offload())
    for net, steps in ((plain, optimizer), (model, sharded)):
        net(rows)[0].square().sum().backward()
        steps.step()
    state = em.full_state_dict(model)
    sharded.close()
    assert [n for n, p in plain.state_dict().items() if not torch.equal(p, state[n])] == []


def test_the_message_counts_the_other_pairs() -> None:
    pair = Pair()
    tied_by_data(pair)
    pair.b.bias.data = pair.a.bias.data
    with pytest.raises(em.ConfigError, match=re.escape("(1 more pairs share memory)")):
        check_sharing(pair)
