"""A LoRA step on the fused experts of a mixture: unmerged adapters against peft's, which are added to the weights.

Owns this measurement and its two rows: time of forward and backward, and the peak of memory over the bare model. Peaks
are measured in separate processes, since memory that one contender has freed would not be allocated again.
"""

import gc
import multiprocessing as mp
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elixir_moe as em
from benchmarks.measure import in_turn
from benchmarks.memory import peak_row, status_mib
from benchmarks.report import race_row, unmeasured_row
from benchmarks.workload import SEED, Workload

ROW = "LoRA step on fused experts"
TIME_LIMIT, PEAK_LIMIT = 0.6, 0.5
_FULL = {"num_hidden_layers": 8, "num_experts": 32, "num_experts_per_tok": 4, "hidden_size": 512}
_QUICK = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 32}
_BATCH, _LENGTH, _RANK = 2, 128, 8


def _model(quick: bool, grouped: bool) -> nn.Module:
    """A small Qwen3-MoE with peft's adapters on attention and experts."""
    import peft
    import transformers

    sizes = _QUICK if quick else _FULL
    width = sizes["hidden_size"]
    torch.manual_seed(SEED)
    config = transformers.Qwen3MoeConfig(
        **sizes,
        moe_intermediate_size=3 * width // 4,
        vocab_size=1000,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=width // 4,
        use_cache=False,
    )
    model = transformers.Qwen3MoeForCausalLM(config).requires_grad_(False)
    lora = peft.LoraConfig(
        r=_RANK,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    adapted: nn.Module = peft.get_peft_model(model, lora)
    return em.group_experts(adapted) if grouped else adapted


def _step(model: nn.Module, number: int) -> float:
    """Seconds of forward and backward."""
    tokens = torch.randint(1000, (_BATCH, _LENGTH), generator=torch.Generator().manual_seed(number))
    model.zero_grad()
    start = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return time.perf_counter() - start


def _peak(quick: bool, grouped: bool, threads: int, results: Any) -> None:
    torch.set_num_threads(threads)
    model = _model(quick, grouped)
    gc.collect()
    bare = status_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    for number in range(3):
        _step(model, number)
    results.put(status_mib("VmHWM") - bare)


def _peak_of(quick: bool, grouped: bool) -> float:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_peak, args=(quick, grouped, torch.get_num_threads(), results))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process that measures a peak ended with exit code {process.exitcode}")
    found: float = results.get()
    return found


def rows(quick: bool, _: Workload, rounds: int) -> list[dict[str, Any]]:
    """The rows of time and of memory."""
    what = {"name": ROW, "peer": "peft", "ranks": 1, "limit": TIME_LIMIT}
    try:
        models = {grouped: _model(quick, grouped) for grouped in (True, False)}
    except ImportError as error:
        return [unmeasured_row(what | {"workload": ""}, str(error))]
    sizes = _QUICK if quick else _FULL
    workload = f"{sizes}, {_BATCH} x {_LENGTH} tokens, r={_RANK}, fp32"
    ours, theirs = (partial(_step, models[grouped]) for grouped in (True, False))
    ours(0), theirs(0)
    time_row = race_row(what | {"workload": workload}, in_turn(ours, theirs, rounds))
    peak = {"name": ROW, "peer": "peft, peak over the bare model", "ranks": 1, "limit": PEAK_LIMIT}
    return [time_row, peak_row(peak | {"workload": workload}, _peak_of(quick, True), _peak_of(quick, False))]
