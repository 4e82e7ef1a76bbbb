"""Plain data becomes records, or every mistake in it is named."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from elixir_moe.errors import CheckpointError, ConfigError
from elixir_moe.records import ABOVE_0, Check, Size, at_least, build, check


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    length: Size
    of: Mapping[Annotated[str, Check("a short name", lambda name: len(name) < 3)], int | None] = field(
        default_factory=dict
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    rate: Annotated[float | None, ABOVE_0] = 1.0
    betas: Annotated[tuple[float, float], Check("below 1", lambda beta: beta < 1)] = (0.0, 0.5)
    kind: Literal["a", "b", 3] = "a"
    steps: Annotated[int, at_least(1, "step")] = 1

    def __post_init__(self) -> None:
        check(self, "section")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    section: Section
    name: str
    parts: Mapping[int, Part] = field(default_factory=dict)
    rows: tuple[Part, ...] = ()
    size: int | str | None = None
    flag: bool = False
    rest: Any = None


def test_data_becomes_records_inside_records() -> None:
    data = {"name": "x", "parts": {"2": {"length": 3, "of": {"a": None}}}, "rows": [{"length": 0}], "rest": [{"y": 1}]}
    expected = Record(
        section=Section(), name="x", parts={2: Part(length=3, of={"a": None})}, rows=(Part(length=0),), rest=[{"y": 1}]
    )
    assert build(Record, data) == expected
    assert build(Record, {key: data[key] for key in data if key != "name"}, name="x") == expected


def test_texts_stand_for_values_only_where_they_may() -> None:
    data = {"name": "3", "flag": "True", "size": "4 GiB", "section": {"rate": "1e-3", "betas": "[0, .5]", "steps": "7"}}
    found = build(Record, data, texts=True)
    assert (found.name, found.flag, found.size) == ("3", True, "4 GiB")
    assert found.section == Section(rate=1e-3, betas=(0.0, 0.5), steps=7)
    with pytest.raises(ConfigError) as error:
        build(Record, data)
    assert [said.partition(":")[0] for said in str(error.value).split("; ")] == [
        "section.rate",
        "section.betas",
        "section.steps",
        "flag",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nam_e": 1}, "unknown setting 'nam_e'; did you mean 'name'?"),
        ({"steps": 1}, "unknown setting 'steps'; did you mean 'section.steps'?"),
        ({"section": {"rat": 1}}, "unknown setting 'section.rat'; did you mean 'section.rate'?"),
        ({"section": 3}, "section: expected a section with keys, got 3"),
        ({"section": {"rate": float("nan")}}, "section.rate: expected a finite number, got nan"),
        ({"section": {"rate": 10**400}}, "section.rate: expected float | None, got 1000"),
        ({"section": {"rate": 0}}, "section.rate: expected a finite number above 0, got 0.0"),
        ({"section": {"betas": [0, 1]}}, "section.betas[1]: expected below 1, got 1.0"),
        ({"section": {"betas": [0]}}, "section.betas: expected tuple[float, float], got [0]"),
        ({"section": {"kind": True}}, "section.kind: expected 'a' | 'b' | 3, got True"),
        ({"section": {"steps": True}}, "section.steps: expected int, got True"),
        ({"section": {"steps": 1.0}}, "section.steps: expected int, got 1.0"),
        ({"section": {"steps": 0}}, "section.steps: expected at least 1 step, got 0"),
        ({"name": None}, "name: expected str, got None"),
        ({"parts": {"x": {"length": 1}}}, "parts.x: expected int, got 'x'"),
        ({"parts": {"1": {}}}, "parts.1.length is missing: give int"),
        ({"parts": {"1": {"length": -1}}}, "parts.1.length: expected a size, got -1"),
        ({"parts": {"1": {"length": 1, "of": {"abc": 1}}}}, "parts.1.of.abc: expected a short name, got 'abc'"),
        ({"parts": {"1": {"length": 1, "of": {"a": "1"}}}}, "parts.1.of.a: expected int | None, got '1'"),
        ({"rows": [{"length": 1}, 2]}, "rows[1]: expected a section with keys, got 2"),
        ({"parts": []}, "parts: expected Mapping[int, Part], got []"),
        ({"parts": {"1": {"length": 1, "of": 2}}}, "parts.1.of: expected Mapping[str, int | None], got 2"),
        ({"rows": "x"}, "rows: expected tuple[Part, ...], got 'x'"),
        ({"size": 1.5}, "size: expected int | str | None, got 1.5"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_what_was_found(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(Record, {"name": "x", **change})
    assert str(error.value).startswith(said), str(error.value)


def test_all_mistakes_are_named_and_none_fills_the_screen() -> None:
    data = {"a" * 1000: 1, "rows": [{"length": "y" * 10_000}] * 20}
    with pytest.raises(CheckpointError) as error:
        build(Record, data, noun="field", error=lambda text: CheckpointError(f"m.json: {text}"))
    said = str(error.value)
    assert said.startswith("m.json: unknown field 'aaa") and "name is missing: give str" in said
    assert said.endswith("; and 14 more") and len(said) < 2000


def test_a_record_that_is_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"section.betas\[0\]: expected below 1, got 2.0"):
        Section(betas=(2.0, 0.0))
