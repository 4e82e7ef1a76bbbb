"""The options of plans, as settings of programs know them, are those of the presets."""

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

from elixir_moe.chunks.plan import AutoPlan, Plan
from elixir_moe.chunks.plan_options import PRESETS, options

GIVEN: dict[str, Any] = {
    "disk": "/tmp",
    "hardware": "a100-40g-sxm-x4",
    "reduce_dtype": torch.float32,
    "master": "bf16",
    "moments": "bf16",
}
"""Values of options that are neither numbers, sizes nor true."""


def made(preset: str, **given: Any) -> Plan | AutoPlan:
    if preset == "auto":
        return Plan.auto(print, (), **given)
    plan: Plan = getattr(Plan, preset)(**given)
    return plan


def test_each_argument_of_a_preset_is_an_option_of_its_type() -> None:
    found = options()
    for preset in PRESETS:
        arguments = inspect.signature(getattr(Plan, preset)).parameters
        expected = [name for name in arguments if name not in ("step", "sample", "accumulation")]
        assert sorted(expected) == sorted(name for name, option in found.items() if preset in option.presets)
    assert found["shared_frozen"].type == bool | None and found["reduce_dtype"].type == str | None
    assert {name for name, option in found.items() if option.is_size} == {"rcache", "device", "host", "budget"}


def test_each_option_says_what_it_means() -> None:
    for option in options().values():
        assert option.meaning[0].isupper() and option.meaning.endswith(".") and len(option.meaning) > 30, option
    assert options()["disk"].meaning.startswith("Folder in which each rank creates the file")
    assert options()["master"].meaning.startswith("Dtype of the master weights")


@pytest.mark.parametrize(
    ("preset", "name"), [(preset, option.name) for option in options().values() for preset in option.presets]
)
def test_each_option_of_a_preset_sets_the_field_of_its_name(preset: str, name: str) -> None:
    option = options()[name]
    value = True if option.type == bool | None else GIVEN.get(name, 4096 if option.is_size else 7)
    needs = {"disk": "/tmp"} if name in ("verify", "values_on_disk", "disk_chunks", "host") else {}
    plan = made(preset, **needs, **{name: value})
    field = f"{name}_bytes" if option.is_size else name
    assert getattr(plan, field) == value
    assert field in {each.name for each in fields(plan)}
