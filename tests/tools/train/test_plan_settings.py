"""An option of a plan is written in one file: its field, and the presets that take it; programs offer it."""

import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elixir_moe.chunks import plan, plan_options
from elixir_moe.chunks.plan_options import options
from elixir_moe.errors import ConfigError
from elixir_moe.ext import plans
from elixir_tools import settings
from elixir_tools.train import config
from elixir_tools.train.config import PlanConfig

SOURCE = Path(str(plan.__file__)).read_text()
FIELD = '    shared_frozen: bool = False\n    """'
ARGUMENT = "        shared_frozen: bool = False,\n"


def test_each_option_is_a_setting_with_its_words() -> None:
    assert [each.name for each in fields(PlanConfig)] == ["kind", *options()]
    words = settings.docstrings(PlanConfig)
    for name, option in options().items():
        assert words[name] == f"{option.meaning} For {', '.join(option.presets)}."
    arguments = pytest.importorskip("elixir_tools.finetune.arguments", exc_type=ImportError)  # it needs trl
    assert {f"plan_{name}" for name in options()} <= {each.name for each in fields(arguments.Added)}


@pytest.mark.parametrize(("text", "expected"), [("[1000, 2000]", (1000, 2000)), ("1000,2000", (1000, 2000)), ("7", 7)])
def test_a_search_is_given_a_range_of_chunk_lengths(text: str, expected: int | tuple[int, int]) -> None:
    found = settings.build(PlanConfig, {"kind": "auto"}, [("chunk_numel", text)]).plan(print, (), 1)
    assert isinstance(found, plans.AutoPlan) and found.chunk_numel == expected
    if isinstance(expected, tuple):
        with pytest.raises(ConfigError, match=r"chunk_numel=\(1000, 2000\): expected a whole number"):
            PlanConfig(kind="zero3", chunk_numel=expected)


def run_again(name: str, source: str, patch: pytest.MonkeyPatch) -> ModuleType:
    """A module of this source, in the place of the module of this name."""
    spec = spec_from_loader(name, None)
    assert spec is not None
    module = module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    exec(compile(source, name, "exec"), module.__dict__)
    return module


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The settings of a plan, where two lines of `chunks/plan.py` have made up an option."""
    assert SOURCE.count(FIELD) == 1 and SOURCE.count(ARGUMENT) == 1
    source = SOURCE.replace(FIELD, f'    made_up: bool = False\n    """What nobody needs."""\n{FIELD}')
    source = source.replace(ARGUMENT, f"        made_up: bool = False,\n{ARGUMENT}")
    monkeypatch.setattr(plan_options, "_source", lambda: source)
    options.cache_clear()
    again = run_again("elixir_moe.chunks.plan", source, monkeypatch)
    monkeypatch.setattr(plans, "Plan", again.Plan)
    settings_of_train = Path(str(config.__file__)).read_text()
    yield run_again("elixir_tools.train.config", settings_of_train, monkeypatch).PlanConfig
    options.cache_clear()


def test_a_new_option_is_offered_by_all_programs(made_up: Any) -> None:
    field = next(each for each in fields(made_up) if each.name == "made_up")
    assert field.metadata["help"] == "What nobody needs. For offload."
    assert made_up(kind="offload", made_up=True).plan(print, (), 1).made_up is True
    assert made_up(kind="offload").plan(print, (), 1).made_up is False
    with pytest.raises(config.ConfigError, match=r"plan.made_up has no effect for plan.kind=zero3"):
        made_up(kind="zero3", made_up=True)
