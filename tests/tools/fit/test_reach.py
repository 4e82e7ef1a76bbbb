"""The largest known models by formulas: answers follow the memory."""

import argparse
from dataclasses import replace

import pytest

from elixir_tools.cli.arguments import add_plan
from elixir_tools.fit import gpus, reach
from elixir_tools.fit.ways import WAYS
from tests.support.every import every

BILLIONS = {
    "Qwen/Qwen3-1.7B": 1.7, "Qwen/Qwen3-4B": 4.0, "Qwen/Qwen3-8B": 8.2, "openai/gpt-oss-20b": 20.9,
    "Qwen/Qwen3-32B": 32.8, "mistralai/Mixtral-8x7B-v0.1": 46.7, "meta-llama/Llama-3.3-70B-Instruct": 70.6,
}  # fmt: skip
"""Models to choose from, and their parameters."""


@pytest.fixture
def question(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(reach.known, "names", lambda: [*BILLIONS])
    parser = argparse.ArgumentParser()
    add_plan(parser)
    return parser.parse_args(["any", "--hardware", "here", "--batch", "1", "--seq", "2048"])


def test_the_largest_that_fits_grows_with_memory_and_shrinks_with_what_is_trained(question: argparse.Namespace) -> None:
    before = dict.fromkeys(WAYS, 0.0)
    for ram in (32, 128, 512):
        found = reach.largest(question, gpus.with_host(gpus.machine("rtx-4090", 1), ram * 2**30))
        each = {way: BILLIONS.get(name or "", 0.0) for way, name in found.items()}
        assert each["full"] <= each["LoRA"] <= each["QLoRA"]
        assert every(each[way] >= before[way] for way in WAYS)
        before = each
        if ram == 128:  # 14 bytes of each of 8 billion weights are 107 GiB
            assert found["full"] == "Qwen/Qwen3-8B"
    assert before["full"] > 8.2


def test_a_machine_that_fits_nothing(question: argparse.Namespace) -> None:
    tiny = replace(gpus.machine("t4", 1), gpu_bytes=2**28, cpu_bytes=2**28)
    assert reach.largest(question, tiny) == dict.fromkeys(WAYS)
