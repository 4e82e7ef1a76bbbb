"""Rows of JSONL: labels by counting, packing beside brute force, and every wrong file told before any work."""

import json
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir_moe.errors import ConfigError
from elixir_moe.train.data import NO_LABEL, items_of
from elixir_moe.train.rows import Rows, load_rows, pack
from tests.support.hf_folders import some_rows, tokenizer, write_rows

transformers = pytest.importorskip("transformers")
TOKENIZER = tokenizer()


def rows_of(path: Path, rows: list[dict[str, Any]], length: int = 16, **options: Any) -> Rows:
    options = {"packed": False, **options}
    return load_rows(str(write_rows(path, rows)), TOKENIZER, length, 0.1, **options)


def shown(row: torch.Tensor) -> tuple[str, str]:
    """The text of a row without what fills it up, and the text of its labels, with _ for none."""
    words = [word or "" for word in TOKENIZER.convert_ids_to_tokens(row[0].tolist())]
    last = len(words) - int((row[2].flip(0) == 0).nonzero()[0]) - 1  # where the last text begins: that of the filling
    labels = ["_" if label == NO_LABEL else word for word, label in zip(words, row[1].tolist(), strict=True)]
    return "".join(words[:last]), "".join(labels[:last])


SAYS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
LABELS = [
    ({"text": "abc"}, "abc<end>", "_bc<end>"),
    ({"prompt": "ab", "completion": "cd"}, "abcd<end>", "__cd<end>"),
    ({"messages": SAYS}, "<user>hi<assistant>yo<end>", "____yo<end>"),
    ({"messages": SAYS * 2}, "<user>hi<assistant>yo<end>" * 2, "____yo<end>" * 2),
    ({"prompt": [*SAYS, SAYS[0]], "completion": SAYS[1:]}, "<user>hi<assistant>yo<end>" * 2, "_" * 11 + "yo<end>"),
]


@pytest.mark.parametrize(("row", "text", "labels"), LABELS, ids=lambda value: str(value)[:30])
def test_what_is_predicted(row: dict[str, Any], text: str, labels: str, tmp_path: Path) -> None:
    found = rows_of(tmp_path / "a.jsonl", [row, row])
    assert shown(found.train[0]) == (text, labels)
    whole = rows_of(tmp_path / "a.jsonl", [row, row], completion_only=False)
    every = [word or "" for word in TOKENIZER.convert_ids_to_tokens(whole.train[0, 0].tolist())]
    assert shown(whole.train[0])[1] == "_" + "".join(every[1:])[: len(text) - len(every[0])]


def test_packing_is_best_fit_decreasing() -> None:
    """Beside the rule itself, looked up by going through all rows."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 17, (40,), generator=generator).tolist()
        expected: list[list[int]] = []
        for number in sorted(range(40), key=lambda i: -lengths[i]):
            left = [16 - sum(lengths[i] for i in row) for row in expected]
            fits = [room for room in left if room >= lengths[number]]
            if not fits:
                expected.append([])
                left.append(16)
            place = left.index(min(fits, default=16))
            expected[place].append(number)
        found = pack(lengths, 16)
        assert sorted(sum(lengths[i] for i in row) for row in found) == sorted(
            sum(lengths[i] for i in row) for row in expected
        )
        assert sorted(i for row in found for i in row) == list(range(40))


def test_packing_needs_no_more_rows_than_it_must() -> None:
    """Every order of a few texts, each put where it fits first: none needs fewer rows here."""
    lengths = [9, 7, 6, 5, 3, 2]

    def first_fit(order: tuple[int, ...]) -> int:
        rooms: list[int] = []
        for length in order:
            place = next((i for i, room in enumerate(rooms) if room >= length), None)
            if place is None:
                rooms.append(16 - length)
            else:
                rooms[place] -= length
        return len(rooms)

    assert len(pack(lengths, 16)) == min(map(first_fit, permutations(lengths)))


def test_packed_rows_have_the_texts_and_labels_of_single_ones(tmp_path: Path) -> None:
    single = rows_of(tmp_path / "a.jsonl", some_rows(), 40)
    packed = rows_of(tmp_path / "a.jsonl", some_rows(), 40, packed=True)
    assert len(packed.train) < len(single.train) and packed.restarts and not single.restarts
    pieces = []
    for row in packed.train:
        starts = [*(row[2] == 0).nonzero().flatten().tolist(), row.shape[1]]
        for start, stop in pairwise(starts):
            assert row[2, start:stop].tolist() == list(range(stop - start)) and row[1, start] == NO_LABEL
            if (row[1, start:stop] != NO_LABEL).any():
                pieces.append((row[0, start:stop].tolist(), row[1, start:stop].tolist()))
    expected = []
    for row in single.train:
        stop = [*(row[2] == 0).nonzero().flatten().tolist(), row.shape[1]][1]
        expected.append((row[0, :stop].tolist(), row[1, :stop].tolist()))
    assert sorted(pieces) == sorted(expected)
    assert items_of(packed.train) == items_of(single.train) == sum(len([x for x in p[1] if x >= 0]) for p in pieces)


def test_each_row_comes_once_in_an_epoch_whatever_the_ranks(tmp_path: Path) -> None:
    found = rows_of(tmp_path / "a.jsonl", [{"text": letter * 3} for letter in "abcdefghijkl"])
    total = len(found.train)
    drawn = torch.cat([found.batch(seed=3, step=step, rows=4) for step in range(1, total + 1)])
    texts = [tuple(row[0].tolist()) for row in drawn]
    for epoch in range(4):
        assert len(set(texts[epoch * total : (epoch + 1) * total])) == total
    assert texts[:total] != texts[total : 2 * total]
    assert torch.equal(found.batch(seed=3, step=2, rows=4), drawn[4:8])


def test_validation_is_the_tail_and_the_last_batch_is_filled_up(tmp_path: Path) -> None:
    found = load_rows(
        str(write_rows(tmp_path / "a.jsonl", [{"text": c * 3} for c in "abcdefgh"])), TOKENIZER, 16, 0.4, packed=False
    )
    assert [shown(row)[0][0] for row in found.validation] == ["f", "g", "h"]
    batches = found.validation_batches(batches=9, rows=2)
    assert batches.shape == (2, 2, 3, 16) and items_of(batches) == 9 and items_of(batches[1, 1:]) == 0
    assert found.validation_batches(batches=1, rows=2).shape == (1, 2, 3, 16)


def test_a_long_text_is_cut_into_rows_and_a_long_completion_loses_its_end(tmp_path: Path) -> None:
    lines = [
        {"text": "abcdefghij" * 2},
        {"prompt": "ab", "completion": "c" * 30},
        {"prompt": "a" * 30, "completion": "b"},
    ]
    found = rows_of(tmp_path / "a.jsonl", [*lines, {"text": "end"}], 8)
    assert [items_of(row[None]) for row in found.train] == [7, 7, 4, 6]
    assert (found.shortened, found.dropped) == (3, 1)
    assert "3 texts are longer than a row" in "".join(found.describe(found.validation_batches(batches=1, rows=1)))


WRONG = [
    ("", "is empty"),
    ("\n\n", "is empty"),
    ('{"text": "a b"}', "has one line"),
    ('{"text": "ab"}\nnonsense', "line 2 of .* is no JSON"),
    ('{"text": "ab"}\n[1]', "line 2 of .* is no object"),
    ('{"text": "ab"}\n{"txt": "a"}', "line 2 of .* has the keys txt; expected .*; did you mean 'text'?"),
    ('{"text": "ab"}\n{"prompt": "a"}', "has the keys prompt; expected"),
    ('{"text": 3}\n{"text": "a"}', "line 1 of .*'text' must be a text, got '3'"),
    ('{"text": ""}\n{"text": "ab"}', "line 1 of .* has nothing to predict: 1 tokens"),
    ('{"messages": "hi"}\n{"text": "ab"}', "messages must be a list"),
    ('{"messages": [{"role": "user", "content": "hi"}]}\n{"text": "ab"}', "line 1 of .* has nothing to predict"),
    (json.dumps({"prompt": "a" * 40, "completion": "b"}) + '\n{"text": "ab"}', "no label is left in .*data.seq_len"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_a_wrong_file_is_told(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_rows(str(path), TOKENIZER, 16, 0.1, packed=True)


def test_a_missing_file_and_a_missing_template_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read '.*none\.jsonl'"):
        load_rows(str(tmp_path / "none.jsonl"), TOKENIZER, 16, 0.1, packed=True)
    with pytest.raises(ConfigError, match="matches no file"):
        load_rows(str(tmp_path / "*.jsonl"), TOKENIZER, 16, 0.1, packed=True)
    plain = tokenizer()
    plain.chat_template = None
    path = write_rows(tmp_path / "a.jsonl", [{"messages": SAYS}] * 2)
    with pytest.raises(ConfigError, match="has messages, but the tokenizer has no chat template"):
        load_rows(str(path), plain, 16, 0.1, packed=True)
    plain.chat_template = "{{ 'ab' if messages | length == 1 else 'cd' }}"
    with pytest.raises(ConfigError, match="writes message 1 otherwise when another follows"):
        load_rows(str(path), plain, 16, 0.1, packed=True)
