"""The bytes in the page of optimizers are those of a plan."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_moe as em

PAGE = Path(__file__).parents[2] / "docs/optimizers.md"
ROWS = re.findall(r"^\| `(\w+)(?:\((\w+)=(\S+)\))?`.* \| (\d+) \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)


def test_the_page_has_every_optimizer_whose_moments_are_known() -> None:
    assert len(ROWS) == 9
    assert {name for name, *_ in ROWS} == {"SGD", "Muon", "Adagrad", "RMSprop", "Adam", "AdamW"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}".strip())
def test_bytes_of_a_parameter_are_those_of_the_page(row: tuple[str, ...], dtype: torch.dtype) -> None:
    name, option, value, moments, *nbytes = row
    options: dict[str, Any] = {option: {"True": True, "0.9": 0.9}[value]} if option else {}
    em.init_mesh(device_type="cpu")
    model: Any = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
    model, optimizer = em.wrap(model, optimizer, plan=em.Plan.zero3(), compute_dtype=dtype)
    (chunk,) = em.inspect(model).facts(1)["chunks"]
    optimizer.close()
    assert chunk["shard_bytes"] == 64 * 64 * int(nbytes[dtype is torch.float32])
    assert int(nbytes[0]) == 6 + 4 * int(moments)
