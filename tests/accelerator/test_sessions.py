"""What happens around steps, on the accelerator of threads: saves, reads, writes, interrupts, generation, programs."""

import contextlib
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elixir_moe as em
from elixir_moe.memory.out_of_memory import is_out_of_memory
from elixir_tools.cli.main import main
from elixir_tools.models.gpt import lm_loss
from tests.accelerator.device import BACKENDS, NAME, host_limited, native, start
from tests.accelerator.test_training import LATE, late_in, plain, seeds, with_each_delay
from tests.optim.test_early import compare as early_and_late
from tests.runtime.test_interrupts import interrupt_anywhere, remove_hooks
from tests.support import gpu_cases
from tests.support.cases import with_further
from tests.support.every import every
from tests.support.gpu_cases import DISK, PLANS, STEPS
from tests.support.ranks import RankPool

FP32, BF16 = torch.float32, torch.bfloat16


def saves_while_it_trains(plan: str, folder: str) -> None:
    """(rank) The checkpoint of a save in the background is the state at the call, whatever the later steps write."""
    config = gpu_cases.config_of("mixture", BF16)
    model, optimizer = gpu_cases.wrap(config, PLANS[plan](), BF16, NAME)
    gpu_cases.train(model, optimizer, range(1), 1, NAME)
    wanted = em.full_state_dict(model, all_ranks=True)
    saving = em.save(folder, model, optimizer, asynchronous=True)
    later = gpu_cases.train(model, optimizer, range(1, STEPS), 1, NAME)
    last = em.full_state_dict(model, all_ranks=True)
    saving.result()
    em.load(folder, model, optimizer)
    loaded = em.full_state_dict(model, all_ranks=True)
    for name, value in wanted.items():
        assert torch.equal(loaded[name].cpu(), value.cpu()), name
    assert gpu_cases.train(model, optimizer, range(1, STEPS), 1, NAME) == later, "moments are those of the call, too"
    again = em.full_state_dict(model, all_ranks=True)
    assert every(torch.equal(again[name].cpu(), value.cpu()) for name, value in last.items())
    gpu_cases.close(optimizer)


SAVED = ["zero3", "offload", "offload, some on the device", DISK, "offload, values on disk"]


@pytest.mark.parametrize(("plan", "late"), with_further(with_each_delay((p,) for p in SAVED), [(SAVED[2], "others")]))
def test_a_save_in_the_background_has_the_state_at_the_call(threads: Any, plan: str, late: str, tmp_path: Path) -> None:
    for seed in seeds(len(SAVED) * len(LATE)):
        threads(1).run(late_in, late, seed, saves_while_it_trains, plan, str(tmp_path / f"saved-{seed}"))


def change(model: nn.Module, step: int, *, wrapped: bool) -> list[float]:
    """Writes to weights between two steps, reads some and evaluates; returns what was read."""
    first, last = (model.blocks[i] for i in (0, -1))
    weight, other = next(first.parameters()), next(last.parameters())
    with torch.no_grad():
        weight.mul_(0.9)
    with em.unsharded(last, write=True) if wrapped else contextlib.nullcontext():
        other.data.add_(0.01)
    read = [p.norm().item() for p in (weight, other)]
    with torch.no_grad():
        read.append(lm_loss(model, gpu_cases.tokens(step, 7, str(weight.device))).item())
    return read


def reads_and_writes(plan: str) -> None:
    """(rank) What plain torch reads between steps, and its losses after writes."""
    config = gpu_cases.config_of("dense", FP32)
    torch.manual_seed(5)
    wanted = gpu_cases.build(config)
    reference = gpu_cases.optimizer_of(wanted, FP32)
    model, optimizer = gpu_cases.wrap(config, PLANS[plan](), FP32, NAME)
    tolerance = gpu_cases.TOLERANCE[FP32]
    for step in range(STEPS):
        for m, o, device in ((model, optimizer, NAME), (wanted, reference, "cpu")):
            lm_loss(m, gpu_cases.tokens(step, 0, device)).backward()
            o.step()
            o.zero_grad()
        found = change(model, step, wrapped=True)
        assert found == pytest.approx(change(wanted, step, wrapped=False), abs=10 * tolerance), step
    state = em.full_state_dict(model, all_ranks=True)
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(state[name].cpu(), value, rtol=0, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}")
    gpu_cases.close(optimizer)


CHANGED = ["zero3", "offload", DISK, "offload, values on disk"]


@pytest.mark.parametrize(("plan", "late"), with_further(with_each_delay((p,) for p in CHANGED), [(DISK, "random")]))
def test_reads_and_writes_between_steps_are_those_of_plain_torch(threads: Any, plan: str, late: str) -> None:
    for seed in seeds(len(CHANGED) * len(LATE)):
        threads(1).run(late_in, late, seed, reads_and_writes, plan)


def interrupts(plan: str, dtype: torch.dtype, points: int, folder: str, seed: int) -> None:
    """(rank) Interrupts at random places."""
    em.init_mesh(device_type=NAME)
    try:
        interrupt_anywhere(plan, dtype, points, Path(folder), NAME, seed)
    finally:
        remove_hooks()


INTERRUPTED = [("zero3", BF16), ("offload", FP32), ("offload", BF16), ("disk", FP32), ("values on disk", BF16)]


@pytest.mark.parametrize(("plan", "dtype"), with_further(INTERRUPTED, [("offload", BF16)]))
def test_an_interrupt_anywhere_loses_nothing(threads: Any, plan: str, dtype: torch.dtype, tmp_path: Path) -> None:
    for seed in seeds(len(INTERRUPTED)):
        folder = tmp_path / str(seed)
        threads(1).run(late_in, "random", seed, interrupts, plan, dtype, 6, str(folder), seed)


def updates_early(plan: str, half: bool, accumulation: int) -> None:
    """(rank) Updates in backward give the bits of updates in `step`."""
    assert early_and_late(plan, half, accumulation, NAME) == []


EARLY = [(plan, half, 2) for plan in ("offload", "disk", "values on disk") for half in (False, True)]


@pytest.mark.parametrize(("plan", "half", "accumulation"), with_further(EARLY, [("offload", True, 2)]))
def test_updates_in_backward_have_the_bits_of_updates_in_step(
    threads: Any, plan: str, half: bool, accumulation: int
) -> None:
    for seed in seeds(len(EARLY)):
        threads(1).run(late_in, [*LATE][seed % len(LATE)], seed, updates_early, plan, half, accumulation)


def generates(family: str, plan: str) -> None:
    """(rank) Greedy tokens of a wrapped model before a step are those of the model on the CPU."""
    from tests.support.hf_cases import FAMILIES, ids

    em.init_mesh(device_type=NAME)
    torch.manual_seed(0)
    model: Any = FAMILIES[family].build().eval()
    model.set_experts_implementation("eager")  # others count integers by histc, which a CPU cannot
    wanted = model.generate(ids(8, 6), max_new_tokens=6, do_sample=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = replace(PLANS[plan](), chunk_numel=max(p.numel() for p in model.parameters()))
    model, optimizer = em.wrap(model, optimizer, plan=whole, device=NAME)
    prompt = ids(8, 6).to(NAME)
    for _ in range(2):
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False).cpu(), wanted)
        loss: Tensor = model(input_ids=prompt, labels=prompt).loss
        loss.backward()
        assert loss.isfinite().item()
        optimizer.zero_grad()
    optimizer.step()
    gpu_cases.close(optimizer)


@pytest.mark.parametrize(
    ("family", "plan"),
    with_further([("gpt2", "offload"), ("llama", "zero3"), ("mixtral", "offload")], [("gpt2", "offload")]),
)
def test_a_model_generates(threads: Any, family: str, plan: str) -> None:
    pytest.importorskip("transformers", reason="the models are its own")
    for seed in seeds(3):
        threads(1).run(late_in, [*LATE][seed % len(LATE)], seed, generates, family, plan)


def trains_with_pageable_memory(plan: str) -> None:
    """(rank) What the host cannot page-lock is warned of and works."""
    config = gpu_cases.config_of("dense", FP32)
    with host_limited(0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = gpu_cases.wrap(config, PLANS[plan](), FP32, NAME)
    assert [str(warning.message) for warning in caught if "could not be page-locked" in str(warning.message)]
    result = gpu_cases.train(model, optimizer, range(STEPS), 1, NAME)
    result["state"] = em.full_state_dict(model, all_ranks=True)
    gpu_cases.close(optimizer)
    gpu_cases.compare(result, plain(config, FP32, 1), FP32, plan)


def trains_on_when_the_host_has_memory_again(plan: str) -> None:
    """(rank) A step that cannot page-lock a buffer raises, and changes nothing."""
    config = gpu_cases.config_of("mixture", FP32)
    model, optimizer = gpu_cases.wrap(config, PLANS[plan](), FP32, NAME)
    result = gpu_cases.train(model, optimizer, range(1), 1, NAME)
    with host_limited(0), pytest.raises((RuntimeError, em.ElixirError)) as raised:
        lm_loss(model, gpu_cases.tokens(1, 0, NAME)).backward()
        optimizer.clip_grad_norm_(gpu_cases.CLIP)
    assert is_out_of_memory(raised.value), raised.value
    optimizer.zero_grad()
    rest = gpu_cases.train(model, optimizer, range(1, STEPS), 1, NAME)
    result = {name: [*values, *rest[name]] for name, values in result.items()}
    result["state"] = em.full_state_dict(model, all_ranks=True)
    gpu_cases.close(optimizer)
    gpu_cases.compare(result, plain(config, FP32, 1), FP32, plan)


@pytest.mark.parametrize("body", [trains_with_pageable_memory, trains_on_when_the_host_has_memory_again])
@pytest.mark.parametrize("plan", with_further(["offload", DISK], ["offload"]))
def test_the_host_is_out_of_memory(threads: Any, body: Callable[[str], None], plan: str) -> None:
    threads(1).run(late_in, "random", 0, body, plan)


def command(arguments: list[str]) -> tuple[int, str, int]:
    """(rank) Runs `elixir-moe`; returns its exit code, what it printed, and the number of operators on the device."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(arguments)
    return code, out.getvalue(), native().counts()[0]


def test_the_command_trains(threads: Any, tmp_path: Path) -> None:
    """The pool is of this test: the command ends its world."""
    settings = ["--model.n_layers", "2", "--model.d_model", "16", "--model.n_heads", "2", "--model.seq_len", "16"]
    settings += ["--model.experts", "[0, 4]", "--model.ep", "[1, 1]", "--plan.kind", "offload"]
    settings += ["--run.steps", "4", "--run.global_batch", "4", "--run.eval_every", "2", "--run.eval_batches", "1"]
    settings += ["--run.out", str(tmp_path / "run"), "--save.every", "2", "--json", "--quiet"]
    threads(1)  # compiles the device, or skips the test
    pool = RankPool(1, backend=BACKENDS, prepare=start)
    try:
        ((code, printed, operators),) = pool.run(command, ["train", *settings])
    finally:
        pool.close()
    assert code == 0
    assert json.loads(printed)["steps"] == 4
    assert operators > 1000
