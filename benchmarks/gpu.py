"""`python -m benchmarks.gpu`: models that do not fit on one GPU, ours beside the peers that offload to host memory.

Owns the GPU rows: their order, the memory each contender may use, and the ceilings that its step is held against. Every
contender runs in a process of its own, so that one that runs out of memory costs its row alone. Without a GPU each row
says that it was not measured.

The bound of a row is the longer of two times: the step's matrix products (8 M D flops with recomputation, for M
parameters that a token meets and D tokens; Elixir v2, section 6) at the rate a large product reaches here, and the
bytes of parameters that cannot be at home on the device (2 B up and 2 B down each; docs/planning.md) at the rate at
which both directions copy at once.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import elixir_moe as em
from benchmarks.contenders import LEARNING_RATE
from benchmarks.workload import SEED
from elixir_moe.models.config import GPTConfig, gpt_config
from elixir_moe.models.gpt import GPT, gpt_patterns, lm_loss

GIB = 1 << 30
WARM_STEPS, STEPS = 2, 5
_FIGURES = "figures: "
"""How the line begins in which a case tells its figures; libraries print too."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One contender on one model."""

    contender: str
    model: str
    batch: int
    limit_gib: int
    """Device memory the contender's process may use."""


def models() -> dict[str, GPTConfig]:
    """By name; recomputation in every block."""
    pr_moe = gpt_config(
        "gpt2-4b",
        d_model=2048,
        n_heads=16,
        n_layers=24,
        experts=tuple(12 * (1 + layer // 12) if layer % 2 else 0 for layer in range(24)),
        ep=(),
        residual=True,
        capacity_factor=1.25,
        checkpoint="non_reentrant",
    )
    return {
        "gpt2-4b": gpt_config("gpt2-4b", checkpoint="non_reentrant"),
        "gpt2-10b": gpt_config("gpt2-10b", checkpoint="non_reentrant"),
        "pr-moe": pr_moe,
    }


CONTENDERS = ("ours", "fsdp2-offload", "deepspeed-zero3-offload")
CASES = [
    Case(contender=contender, model=model, batch=batch, limit_gib=limit)
    for limit in (40, 80)
    for model, batches in (("gpt2-4b", (4, 16)), ("gpt2-10b", (4, 16)), ("pr-moe", (4,)))
    for batch in batches
    for contender in CONTENDERS
]


def main(arguments: list[str] | None = None) -> int:
    """Measures every case; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=main.__doc__)
    parser.add_argument("--out", default="build/bench-gpu.json")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cases whose description contains this")
    parser.add_argument("--seconds", type=float, default=600.0, help="the longest a contender may take")
    parser.add_argument("--trace", action="store_true", help="also write a profiler trace of ours beside the JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case is not None:
        print(_FIGURES + json.dumps(_measure(Case(**json.loads(options.case)), options.trace and Path(options.out))))
        return 0
    ceilings = _ceilings() if torch.cuda.is_available() else None
    if ceilings:
        torch.cuda.empty_cache()  # the contenders need it all
    rows: list[dict[str, Any]] = []
    result = {"machine": _machine(), "ceilings": ceilings, "rows": rows}
    path = Path(options.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if options.only in json.dumps(asdict(case)):
            rows.append(asdict(case) | _in_process(case, ceilings, options))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            path.write_text(json.dumps(result, indent=2) + "\n")  # whatever ends the next case
            path.with_suffix(".md").write_text(markdown(result))
    print(markdown(result), end="")
    return 0


def markdown(result: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"{result['machine']['gpu'] or 'no GPU'}, torch {result['machine']['torch']}; ceilings: {result['ceilings']}",
        "",
        "| model | batch | GiB | contender | ms/step | of the bound | note |",
        "|---|---:|---:|---|---:|---:|---|",
    ]
    for row in result["rows"]:
        milliseconds = "" if row["seconds"] is None else f"{row['seconds'] * 1e3:.0f}"
        share = "" if row["bound_fraction"] is None else f"{row['bound_fraction']:.0%}"
        cells = [row["model"], row["batch"], row["limit_gib"], row["contender"], milliseconds, share, row["note"] or ""]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _in_process(case: Case, ceilings: dict[str, float] | None, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one case in a process of its own; what it found, or why there is nothing."""
    nothing = {"seconds": None, "predicted_seconds": None, "parameters": None, "bound_fraction": None}
    if ceilings is None:
        return nothing | {"note": "not measured: this machine has no GPU"}
    there = torch.cuda.get_device_properties(0).total_memory
    if case.limit_gib * GIB > 1.02 * there:  # a card of "80 GB" has a little less than 80 GiB
        return nothing | {"note": f"not measured: this GPU has {there / GIB:.0f} GiB"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--case", json.dumps(asdict(case)), "--out", options.out]
    command += ["--trace"] if options.trace and case.contender == "ours" else []
    with tempfile.TemporaryDirectory() as cache:  # what one case learns of the machine is no other's
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=options.seconds, check=False, env=environment
            )
        except subprocess.TimeoutExpired:
            return nothing | {"note": f"no end within {options.seconds:.0f} s"}
    if run.returncode:
        reason = next((line for line in reversed(run.stderr.splitlines()) if "Error" in line), f"exit {run.returncode}")
        return nothing | {"note": f"does not start: {reason[:160]}"}
    figures = [line for line in run.stdout.splitlines() if line.startswith(_FIGURES)]
    if not figures:
        return nothing | {"note": "it ended without figures"}
    found = json.loads(figures[-1].removeprefix(_FIGURES))
    tokens = case.batch * models()[case.model].seq_len
    compute = 8 * found["active_parameters"] * tokens / ceilings["matmul_flops"]
    away = max(0, 16 * found["parameters"] - case.limit_gib * GIB) / 16  # parameters that cannot be at home here
    copied = 2 * away / ceilings["copy_bytes_per_second"]
    return found | {"bound_fraction": max(compute, copied) / found["seconds"], "note": None}


def _measure(case: Case, trace: Path | None) -> dict[str, Any]:
    """In the process of a contender: builds it and takes the median of some steps."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, case.limit_gib * GIB / total))
    config = models()[case.model]
    parameters, active = _count(config)
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1
        )
        step, predicted = _BUILD[case.contender](config, case)
        generator = torch.Generator().manual_seed(SEED)
        shape = (case.batch, config.seq_len + 1)
        seconds = []
        for number in range(WARM_STEPS + STEPS):
            batch = torch.randint(config.vocab_size, shape, generator=generator).cuda()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(batch)
            end.record()
            torch.cuda.synchronize()
            if number >= WARM_STEPS:
                seconds.append(begin.elapsed_time(end) / 1e3)
        if trace:
            _trace(step, batch, trace.with_name(f"trace-{case.model}-{case.batch}-{case.limit_gib}.json.gz"))
    return {
        "seconds": median(seconds),
        "predicted_seconds": predicted,
        "parameters": parameters,
        "active_parameters": active,
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
    }


def _trace(step: Callable[[Tensor], None], batch: Tensor, path: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step(batch)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def _count(config: GPTConfig) -> tuple[int, int]:
    """All parameters, and those that a token meets."""
    with torch.device("meta"):
        model = GPT(config)
    whole = sum(p.numel() for p in model.parameters())
    experts = [(block.mlp.num_experts, block.mlp.experts) for block in model.blocks if hasattr(block.mlp, "experts")]
    idle = sum(sum(p.numel() for p in e.parameters()) * (n - config.top_k) // n for n, e in experts)
    return whole, whole - idle


def _model(config: GPTConfig, mesh: Any = None) -> GPT:
    """On the host in bf16, with weights that repeat one random draw: drawing billions takes minutes."""
    with torch.device("meta"):
        model = GPT(config, mesh).bfloat16()
    model.to_empty(device="cpu")
    model.head.weight = model.tokens.weight  # what leaves "meta" is tied no more
    draw = 0.02 * torch.randn(1 << 20, generator=torch.Generator().manual_seed(SEED)).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            flat = parameter.view(-1)
            if parameter.ndim == 1:
                flat.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            for part in flat.split(len(draw)) if parameter.ndim > 1 else ():
                part.copy_(draw[: len(part)])
    return model


Step = Callable[[Tensor], None]


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Tensor) -> None:
        lm_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _ours(config: GPTConfig, case: Case) -> tuple[Step, float | None]:
    mesh = em.init_mesh(device_type="cuda")
    model = _model(config, mesh)
    em.annotate(model, gpt_patterns(model))
    sample = torch.zeros(case.batch, config.seq_len + 1, dtype=torch.int64)
    model, optimizer = em.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        plan=em.Plan.auto(lm_loss, sample, budget=int(0.92 * case.limit_gib * GIB)),  # holes of the allocator
    )
    expected = em.inspect(model).prediction
    assert expected is not None
    return _plain_step(model, optimizer), expected.step_seconds


def _fsdp2(config: GPTConfig, case: Case) -> tuple[Step, float | None]:
    model = _model(config).float()
    options: dict[str, Any] = {
        "mesh": em.init_mesh(device_type="cuda")["dp"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return _plain_step(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)), None


def _deepspeed(config: GPTConfig, case: Case) -> tuple[Step, float | None]:
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    offload = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": case.batch,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload, "overlap_comm": True},
        "steps_per_print": 10**9,
    }
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = _model(config)
    adam = DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)

    def step(batch: Tensor) -> None:
        engine.backward(lm_loss(engine, batch))
        engine.step()

    return step, None


_BUILD = {"ours": _ours, "fsdp2-offload": _fsdp2, "deepspeed-zero3-offload": _deepspeed}


def _ceilings() -> dict[str, float]:
    """What this GPU reaches: flops of a large bf16 product, and bytes a second each way while both directions copy."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = _seconds(lambda: torch.mm(a, b))
    on_host = [torch.empty(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    on_device = [torch.randint(255, (GIB,), dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    ways = list(zip(streams, (on_device[0], on_host[1]), (on_host[0], on_device[1]), strict=True))

    def copy() -> None:
        for stream, target, source in ways:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return {"matmul_flops": 2 * 8192**3 / product, "copy_bytes_per_second": GIB / _seconds(copy)}


def _seconds(work: Callable[[], Any], repeats: int = 10) -> float:
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def _machine() -> dict[str, Any]:
    there = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name(0) if there else None,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
