"""`python -m benchmarks.proof.case '{"model": ..., ...}'`: one contender on one model, in a process of its own.

Owns how each contender is built, and its clock. Before anything is built, what a peer is known to need is compared with
what is free; ours is left to say so itself. Without a GPU all of it runs on the CPU, with a toy in the model's place.

Peers get their best settings: torch's fused AdamW, a unit of FSDP2 for each layer, pinned memory, DeepSpeed's own Adam.
All train in bf16 with fp32 masters, but for adapters under FSDP2, whose masters are in bf16 as the base is.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import elixir_moe as em
from benchmarks.contenders import LEARNING_RATE
from benchmarks.proof.models import Model, build, fill
from benchmarks.proof.plan import MUON, ONE_PASS
from benchmarks.proof.rates import elapsed
from benchmarks.proof.steps import tell
from benchmarks.proof.trace import record, summary
from benchmarks.workload import SEED
from elixir_moe.ext.optimizers import matrices_of_layers
from elixir_moe.memory.slabs import host_bytes_left

GIB = 1 << 30
WARM_STEPS, STEPS = 2, 3
FEWER_STEPS = 1, 2
"""Where a step has many micro-batches, each of which is one more measurement."""
TOY_STEPS = 1, 1
"""The value without a GPU."""
MOST_OF_FEW = 4
OURS = ("ours", ONE_PASS, MUON)
FITS = 0.96
"""Part of the device's memory that a plan may use. The holes that the allocator leaves are in the plan's own sum."""
OVERHEAD = 1.1
"""The memory that a peer needs in all, as a multiple of its state."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One contender on one model."""

    contender: str
    model: str
    accumulation: int = 1
    """Micro-batches of a step."""
    limit_gib: int
    """Device memory the process may use."""


class LeftOutError(Exception):
    """The case cannot be run here; the text says what it needs and what is there."""


Step = Callable[[list[Tensor]], Tensor]
"""Takes the micro-batches of a step; returns their mean loss, ()."""
Built = tuple[Step, dict[str, float]]
"""The step, and the figures that were predicted for it."""


def main() -> int:
    """Runs a case and tells its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proof.case", description=main.__doc__)
    parser.add_argument("case", help="a `Case` as JSON")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="trace one more step into this file (.json.gz)")
    options = parser.parse_args()
    case = Case(**json.loads(options.case))
    try:
        tell(_run(case, options.trace))
    except LeftOutError as why:
        tell({"left_out": str(why)})
    except torch.OutOfMemoryError as error:
        if case.contender in OURS:
            raise
        tell({"left_out": f"it ran out of device memory: {str(error)[:120]}"})
    return 0


def _run(case: Case, trace: Path | None) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    device_bytes = _device_bytes(case)
    if not cuda:
        torch.set_num_threads(1)  # a toy gains nothing from more
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, device_bytes / total))
    model = build(case.model, toy=not cuda, layers=_layers(case))
    _check_room(case, model.counts())
    em.init_mesh(device_type="cuda" if cuda else "cpu")
    counts = model.counts()
    start = time.perf_counter()
    step, predicted = BUILD[case.contender](model, case, device_bytes)
    ready = time.perf_counter() - start
    print(f"built in {ready:.1f} s", flush=True)
    generator = torch.Generator().manual_seed(SEED)
    shape = (model.batch, model.seq_len + 1)

    def draw() -> list[Tensor]:
        drawn = [torch.randint(model.vocab_size, shape, generator=generator) for _ in range(case.accumulation)]
        return [batch.cuda() for batch in drawn] if cuda else drawn

    steps = FEWER_STEPS if case.accumulation > MOST_OF_FEW else (WARM_STEPS, STEPS)
    warm, counted = steps if cuda else TOY_STEPS
    seconds: list[float] = []
    losses: list[Tensor] = []
    for number in range(warm + counted):
        batches = draw()
        seconds.append(elapsed(lambda batches=batches: losses.append(step(batches))))
        print(f"step {number}: {seconds[-1]:.3f} s, loss {losses[-1].item():.4f}", flush=True)
    traced: dict[str, Any] = {}
    if trace is not None:
        batches = draw()
        record(lambda: step(batches), trace)
        traced = {"trace": trace.name, "summary": summary(trace)}
    seconds = seconds[warm:]
    tokens = case.accumulation * model.batch * model.seq_len
    return (
        counts
        | predicted
        | traced
        | {
            "batch": model.batch,
            "micro_batches": case.accumulation,
            "passes": 1 if case.contender == ONE_PASS else case.accumulation,
            "tokens": tokens,
            "recomputes": 1,
            "seconds": median(seconds),
            "spread": [min(seconds), max(seconds)],
            "tokens_per_second": tokens / median(seconds),
            "losses": [loss.item() for loss in losses],
            "build_seconds": ready,
            "device_bytes": device_bytes,
            "allocation_retries": torch.cuda.memory_stats()["num_alloc_retries"] if cuda else None,
            "device_peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "host_peak_bytes": _host_peak(),
        }
    )


def _device_bytes(case: Case) -> int:
    """The device memory that the case may use; a card of "80 GB" has a little less than 80 GiB, and uses all of it."""
    if not torch.cuda.is_available():
        return GIB
    total = torch.cuda.get_device_properties(0).total_memory
    return min(total, case.limit_gib * GIB)


def _layers(case: Case) -> int | None:
    """The layers of a frozen model that fit in host memory; None: all. `em.wrap` frees it while its chunks are filled.

    Free memory is rounded down, so that all contenders of a machine get the same number.
    """
    if "-lora" not in case.model:
        return None
    whole = build(case.model, toy=not torch.cuda.is_available()).counts()
    of_layer = 2 * whole["parameters"] / whole["layers"]
    free = host_bytes_left() // (8 * GIB) * 8 * GIB
    return max(1, min(whole["layers"], int(free / OVERHEAD / of_layer)))


def _check_room(case: Case, counts: dict[str, int]) -> None:
    """Raises LeftOutError if there is less host memory than the contender is known to need."""
    frozen = counts["parameters"] - counts["trained"]
    a_trained = 23 if case.contender.startswith("deepspeed") else 16  # with its buffers for what passes
    state = a_trained * counts["trained"] + 2 * frozen
    needs = 2 * counts["parameters"] if case.contender in OURS else int(OVERHEAD * state)  # ours: where it is made
    if needs > (there := host_bytes_left()):
        raise LeftOutError(f"needs {needs / GIB:.1f} GiB of host memory, {there / GIB:.1f} GiB are free")


def _host_peak() -> int:
    """The most memory this process has had resident; the model as it was made is in it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def _plain_step(
    model: nn.Module,
    loss: Any,
    optimizer: torch.optim.Optimizer,
    around: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext(),
) -> Step:
    """A step without clipping; each backward runs inside `around`, which is told whether it is the last."""

    def step(batches: list[Tensor]) -> Tensor:
        losses = []
        for number, batch in enumerate(batches, 1):
            found = loss(model, batch) / len(batches)
            with around(number == len(batches)):
                found.backward()
            losses.append(found.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    return step


def _pass_step(model: nn.Module, loss: Any, optimizer: Any) -> Step:
    """A step without clipping, whose micro-batches pass each layer together."""

    def step(batches: list[Tensor]) -> Tensor:
        with optimizer.update_in_backward():
            losses = em.accumulate(model, loss, batches)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return step


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def _ours(model: Model, case: Case, device_bytes: int) -> Built:
    fill(model.module)
    model.ties(model.module)
    sample = torch.zeros(model.batch, model.seq_len + 1, dtype=torch.int64)
    one_pass = case.contender == ONE_PASS
    loss = (model.loss_without_logits if case.accumulation > MOST_OF_FEW else None) or model.loss
    plan = em.Plan.auto(
        loss,
        sample,
        budget=int(FITS * device_bytes),
        accumulation=case.accumulation,
        batches_per_pass=case.accumulation if one_pass else 1,
        update_in_backward=True,
    )
    module, optimizer = em.wrap(model.module, _optimizers(model, muon=case.contender == MUON), plan=plan)
    found = em.inspect(module)
    print(found.plan, found.plan.explain(), sep="\n", flush=True)
    assert found.prediction is not None
    step = (
        _pass_step(module, loss, optimizer)
        if one_pass
        else _plain_step(
            module, loss, optimizer, lambda last: optimizer.update_in_backward() if last else nullcontext()
        )
    )
    forecast = found.prediction.forecast
    return step, {"predicted_seconds": forecast.seconds.step, "activation_bytes": forecast.activation_bytes}


def _optimizers(model: Model, *, muon: bool) -> list[torch.optim.Optimizer]:
    matrices = dict.fromkeys(matrices_of_layers(model.module).values() if muon else ())
    adamw = torch.optim.AdamW([p for p in _trained(model.module) if p not in matrices], lr=LEARNING_RATE)
    return [torch.optim.Muon(matrices, lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw"), adamw] if muon else [adamw]


def _fsdp2(model: Model, case: Case, device_bytes: int) -> Built:
    """A layer is made and sharded before the next is: the whole model is never there twice."""
    cuda = torch.cuda.is_available()
    frozen = any(not p.requires_grad for p in model.module.parameters())
    options: dict[str, Any] = {
        "mesh": em.init_mesh(device_type="cuda" if cuda else "cpu")["dp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=cuda),
    }
    for part in [*model.blocks, model.module]:
        fill(part, torch.bfloat16 if frozen else torch.float32)
        if part is model.module:
            model.ties(part)
        fully_shard(part, **options)
    optimizer = torch.optim.AdamW(_trained(model.module), lr=LEARNING_RATE, fused=True)

    def around(last: bool) -> AbstractContextManager[object]:
        model.module.set_requires_gradient_sync(last)  # it sums gradients on the device, and brings them down once
        return nullcontext()

    return _plain_step(model.module, model.loss, optimizer, around), {}


def _deepspeed(model: Model, case: Case, device_bytes: int) -> Built:
    os.environ.setdefault("LOCAL_RANK", "0")
    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    offload = {"device": "cpu", "pin_memory": cuda}
    settings = {
        "train_micro_batch_size_per_gpu": model.batch,
        "gradient_accumulation_steps": case.accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload, "overlap_comm": True},
        "zero_force_ds_cpu_optimizer": cuda,
        "steps_per_print": 10**9,
    }
    fill(model.module)
    model.ties(model.module)
    if cuda:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer: Any = DeepSpeedCPUAdam(_trained(model.module), lr=LEARNING_RATE)
    else:  # its kernel is compiled at its first use, which takes longer than the toy
        optimizer = torch.optim.AdamW(_trained(model.module), lr=LEARNING_RATE, fused=True)
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", dist_init_required=False)
    engine, *_ = deepspeed.initialize(model=model.module, optimizer=optimizer, config=settings)

    def step(batches: list[Tensor]) -> Tensor:
        losses = []
        for batch in batches:
            loss = model.loss(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return step, {}


BUILD = {
    "ours": _ours,
    ONE_PASS: _ours,
    MUON: _ours,
    "fsdp2-offload": _fsdp2,
    "deepspeed-zero3-offload": _deepspeed,
}


if __name__ == "__main__":
    sys.exit(main())
