"""Faults that `verify` has once not seen, each planted in this library: now it says what differs, and where."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import elixir_moe as em
from elixir_moe.hf.fused_experts import Adapter, UnmergedAdapters
from elixir_moe.moe.experts import GroupedExperts
from elixir_moe.quantized import decoders, formats
from elixir_tools.models.gpt import GPT, GPTConfig
from elixir_tools.models.lora import Lora
from elixir_tools.verify import cases, training
from elixir_tools.verify.cases import Named, Source
from elixir_tools.verify.oracle import next_token_loss, plain_mixtures, quantized_values
from tests.museum.cases import Case, judged, of_family, small

MIXTURE = GPTConfig(n_layers=1, d_model=16, n_heads=2, vocab_size=32, seq_len=8, experts=(4,), checkpoint="none")


@contextmanager
def next_expert() -> Iterator[None]:
    """Rows of each expert go to the next one."""
    forward = GroupedExperts.forward

    def broken(self: GroupedExperts, rows: Tensor, groups: Any) -> Tensor:
        counts = groups.on_host()
        turned = torch.cat([*rows.split(counts)[1:], rows.split(counts)[0]])
        out = forward(
            self, turned, type(groups)(experts=groups.experts, bounds=groups.bounds, counts=counts[1:] + counts[:1])
        )
        parts = out.split(counts[1:] + counts[:1])
        return torch.cat([parts[-1], *parts[:-1]])

    with patch.object(GroupedExperts, "forward", broken):
        yield


@contextmanager
def labels_of_the_input() -> Iterator[None]:
    """Each token is told itself."""

    def broken(model: nn.Module, batch: Tensor) -> Tensor:
        logits, auxiliary = model(batch[:, :-1])[:2]
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), batch[:, :-1].flatten()) + auxiliary
        return loss

    with patch.object(cases, "lm_loss", broken):
        yield


@contextmanager
def last_scale() -> Iterator[None]:
    """The last block of a weight gets the scale of the one before."""
    encode = formats.SCHEMES["nf4"].encode_rows

    def broken(weight: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = encode(weight)
        scales.view(-1)[-1] = scales.view(-1)[-2]
        return codes, scales

    with changed_scheme(encode_rows=broken):
        yield


@contextmanager
def wrong_entry() -> Iterator[None]:
    """An entry of the table that both encoding and decoding read is wrong."""
    values = (*decoders.NF4_VALUES[:3], -0.39, *decoders.NF4_VALUES[4:])

    def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
        pairs = torch.stack((codes >> 4, codes & 15), -1).flatten(-2).int()
        table = torch.tensor(values)[pairs]
        out.copy_((table.unflatten(-1, (-1, 64)) * scales.unsqueeze(-1)).flatten(-2))

    with changed_scheme(decode_into=decode), patch.object(formats, "NF4_VALUES", values):
        yield


def changed_scheme(**fields: Any) -> AbstractContextManager[Any]:
    return patch.dict(formats.SCHEMES, {"nf4": replace(formats.SCHEMES["nf4"], **fields)})  # type: ignore[arg-type]


@contextmanager
def decay_of_the_first_group() -> Iterator[None]:
    """All parameters are decayed as those of the first param_group are."""
    step = em.ShardedOptimizer.step

    def broken(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["weight_decay"] = self.param_groups[0]["weight_decay"]
        return step(self, closure)

    with patch.object(em.ShardedOptimizer, "step", broken):
        yield


@contextmanager
def dropped_micro_batch() -> Iterator[None]:
    """The last micro-batch adds nothing to the gradients."""
    backward = training.Wrapped.backward

    def broken(self: training.Wrapped, loss: Tensor, *, last: bool) -> None:
        backward(self, loss * (not last), last=last)

    with patch.object(training.Wrapped, "backward", broken):
        yield


Mend = Callable[[Any, Any, Any], None]


def not_restored(take: Callable[[nn.Module, Any], Any], put: Mend) -> AbstractContextManager[Any]:
    """A load that leaves what `take` takes as it was: `put` puts it back."""
    load = training.load

    def broken(path: Any, model: nn.Module, optimizer: Any) -> Any:
        before = deepcopy(take(model, optimizer))
        extra = load(path, model, optimizer)
        put(before, model, optimizer)
        return extra

    return patch.object(training, "load", broken)


def options_not_restored() -> AbstractContextManager[Any]:
    def put(before: Any, _: nn.Module, optimizer: Any) -> None:
        for group, options in zip(optimizer.param_groups, before, strict=True):
            group.update(options)

    return not_restored(
        lambda _, optimizer: [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        put,
    )


def buffers_not_restored() -> AbstractContextManager[Any]:
    def put(before: Any, model: nn.Module, _: Any) -> None:
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)

    return not_restored(lambda model, _: list(model.buffers()), put)


def random_not_restored() -> AbstractContextManager[Any]:
    return not_restored(lambda *_: torch.get_rng_state(), lambda before, *_: torch.set_rng_state(before))


@contextmanager
def schedule_not_restored() -> Iterator[None]:
    """The schedule begins again."""
    load = training.load

    def broken(*arguments: Any) -> Any:
        extra = load(*arguments)
        extra["schedule"]["last_epoch"] = 0
        return extra

    with patch.object(training, "load", broken):
        yield


@contextmanager
def alpha_missing() -> Iterator[None]:
    """Adapters of experts are not scaled."""
    adapter = UnmergedAdapters._adapter

    def broken(self: Any, name: str) -> Adapter:
        return replace(adapter(self, name), scale=1.0)

    with patch.object(UnmergedAdapters, "_adapter", broken):
        yield


@contextmanager
def stale_until_read() -> Iterator[None]:
    """The third step leaves the values of a chunk as they were, until somebody reads whole weights."""
    step, full, updates = em.ShardedOptimizer.step, training.full_state_dict, Counter[int]()
    late: list[tuple[Any, Tensor]] = []

    def broken(self: Any, closure: Any = None) -> Any:
        elements = self._kept._chunks[0].shard.weights()
        before = elements.read().clone()
        result = step(self, closure)
        updates[id(self)] += 1
        if updates[id(self)] == 3:
            late.append((elements, elements.read().clone()))
            elements.write(before)
        return result

    def mending(*arguments: Any, **options: Any) -> Any:
        while late:
            elements, values = late.pop()
            elements.write(values)
        return full(*arguments, **options)

    with (
        patch.object(em.ShardedOptimizer, "step", broken),
        patch.object(training, "full_state_dict", mending),
    ):
        yield


QUANTIZED = partial(of_family, "llama", lora=True, quantized="nf4")


def adapted_with_a_scale_of_one() -> Source:
    lora = Lora.parse("r=4,alpha=4,targets=q_proj,experts")
    return replace(of_family("qwen3-moe", lora=True), lora=lora)  # type: ignore[type-var]


CASES = {
    "next-expert": Case(
        fault="one expert off by one",
        plant=next_expert,
        source=lambda: Named(config=MIXTURE, rows=4),
        check="outputs of modules in step 1",
        says="module blocks.0.mlp with router.weight, experts.w_in",
        in_both=True,
    ),
    "labels-of-the-input": Case(
        fault="labels are not shifted",
        plant=labels_of_the_input,
        source=lambda: Named(config=MIXTURE, rows=4),
        check="loss of step 1",
        says="here",
        in_both=True,
    ),
    "last-scale": Case(
        fault="the last block of NF4 has another scale",
        plant=last_scale,
        source=QUANTIZED,
        check="weights after wrap",
        says="layers.0.self_attn.q_proj.base_layer, weight: differs by",
        in_both=True,
    ),
    "wrong-entry": Case(
        fault="an entry of NF4's table is wrong",
        plant=wrong_entry,
        source=QUANTIZED,
        check="weights after wrap",
        says="layers.0.self_attn.q_proj.base_layer, weight: differs by",
        in_both=True,
    ),
    "decay-of-the-first-group": Case(
        fault="weight decay of param_group 0 for all",
        plant=decay_of_the_first_group,
        source=small,
        check="weights of step 1",
        says="module first, bias: differs by",
    ),
    "dropped-micro-batch": Case(
        fault="the second micro-batch is dropped",
        plant=dropped_micro_batch,
        source=small,
        check="gradients of step 1",
        says="module first, weight, gradient norm",
    ),
    "dropped-micro-batch-where-bounds-are-wide": Case(
        fault="the second micro-batch is dropped, and a batch normalization makes more of errors of rounding",
        plant=dropped_micro_batch,
        source=partial(small, "normalized"),
        check="gradients of step 1",
        says="module first, weight, gradient norm",
    ),
    "options-not-restored": Case(
        fault="a load leaves the options of param_groups as they were",
        plant=options_not_restored,
        source=small,
        check="state after the load",
        says="param_group 0, lr of rank 0: differs by",
    ),
    "buffers-not-restored": Case(
        fault="a load leaves buffers as they were",
        plant=buffers_not_restored,
        source=partial(small, "normalized"),
        check="state after the load",
        says="buffer norm.running_mean of rank 0: differs by",
    ),
    "random-not-restored": Case(
        fault="a load leaves random generators as they were",
        plant=random_not_restored,
        source=small,
        check="state after the load",
        says="random generator of torch of rank 0: differs by",
    ),
    "schedule-not-restored": Case(
        fault="the schedule begins again after a load",
        plant=schedule_not_restored,
        source=small,
        check="state after the load",
        says="schedule, last_epoch of rank 0: differs by",
    ),
    "alpha-missing": Case(
        fault="adapters of experts are not scaled by alpha / r",
        plant=alpha_missing,
        source=adapted_with_a_scale_of_one,
        check="outputs of modules in step 1",
        says="base_layer.lora_A.default.weight",
    ),
    "stale-until-read": Case(
        fault="values are stale after the third step",
        plant=stale_until_read,
        source=small,
        check="outputs of modules after step 3",
        says="module first with weight, bias, output of norm",
    ),
}
"""By name."""


def found(name: str, folder: str) -> list[dict[str, Any]]:
    return judged(CASES[name], folder, steps=3 if name == "stale-until-read" else 1, accumulation=2)


@pytest.mark.parametrize(
    "changes",
    [{}, {"top_k": 2, "capacity_factor": 0.7, "z_coefficient": 0.1}, {"residual": True, "capacity_factor": 1.25}],
    ids=str,
)
def test_a_loop_over_experts_is_the_layer(changes: dict[str, Any]) -> None:
    """Loss to 1e-6 and gradients to 1e-5 of their largest element: sums of at most 64 numbers in another order."""
    torch.manual_seed(0)
    model = GPT(replace(MIXTURE, **changes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    plain, batch = plain_mixtures(deepcopy(model)), torch.randint(MIXTURE.vocab_size, (4, 9))
    losses = cases.lm_loss(model, batch), next_token_loss(plain, batch)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and wanted.grad is not None
        assert (mine.grad - wanted.grad).abs().max() <= 1e-5 * wanted.grad.abs().max()


@pytest.mark.parametrize("scheme", formats.SCHEMES)
@pytest.mark.parametrize("drawn", [torch.randn, lambda *shape: torch.randint(-128, 128, shape) / 2048, torch.zeros])
def test_formats_have_the_values_of_their_definition(scheme: str, drawn: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    form = formats.SCHEMES[scheme]
    for weight in (drawn(3, 64, 128), drawn(200, 320).bfloat16()):
        decoded = form.decode(*form.encode(weight), tuple(weight.shape), weight.dtype)
        assert torch.equal(decoded, quantized_values(weight, scheme))


@pytest.mark.parametrize("name", CASES)
def test_it_is_seen_and_named(ranks: Any, tmp_path: Path, name: str) -> None:
    checks = ranks(2).run(found, name, str(tmp_path))[0]
    first = next((check for check in checks if not check["ok"]), None)
    assert first is not None, "nothing differs"
    assert first["name"] == CASES[name].check, first
    assert CASES[name].says in first["where"]
