"""The largest known models by formulas: sizes are those of the models, and answers follow the memory."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from elixir_tools.fit import gpus, reach
from elixir_tools.fit.reach import Shape
from elixir_tools.models import known
from tests.support.every import every

BILLIONS = {"Llama-3.1-8B": 8.03, "Qwen3-30B-A3B": 30.5, "gpt-oss-20b": 20.9, "Mixtral-8x7B-v0.1": 46.7}
"""Parameters that their makers state."""


@pytest.mark.parametrize("name", BILLIONS)
def test_a_shape_has_as_many_parameters_as_its_model(name: str) -> None:
    config = known.find(name).config
    assert config is not None
    shape = Shape.of(json.loads(Path(config).read_text()))
    assert shape is not None and shape.parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


def test_the_largest_that_fits_grows_with_memory_and_shrinks_with_what_is_trained() -> None:
    sizes = {name: shape.parameters for name, shape in reach._shapes()}
    before = dict.fromkeys(reach.WAYS, 0)
    for ram in (32, 64, 128, 512):
        found = reach.largest(gpus.with_host(gpus.machine("rtx-4090", 1), ram * 2**30), 1)
        each = {way: sizes[name] for way, name in found.items() if name is not None}
        assert each["full"] <= each["LoRA"] <= each["QLoRA"]
        assert every(each[way] >= before[way] for way in reach.WAYS)
        before = each
    # 14 bytes of each of 8 billion weights are 105 GiB, of each of 4 billion 53 GiB
    found = reach.largest(gpus.with_host(gpus.machine("rtx-4090", 1), 64 * 2**30), 1)
    assert found["full"] == "Qwen/Qwen3-4B"


def test_a_machine_that_fits_nothing() -> None:
    tiny = replace(gpus.machine("t4", 1), gpu_bytes=2**28, cpu_bytes=2**28)
    assert reach.largest(tiny, 1) == dict.fromkeys(reach.WAYS)
