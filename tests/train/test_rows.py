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
    ({"messages": [SAYS[1], *SAYS]}, "<assistant>yo<end><user>hi<assistant>yo<end>", "_yo<end>____yo<end>"),
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


def test_an_evaluation_of_some_packed_rows_is_not_one_of_the_longest_texts(tmp_path: Path) -> None:
    texts = [{"text": "a" * (1 + i % 30)} for i in range(1200)]
    found = load_rows(str(write_rows(tmp_path / "a.jsonl", texts)), TOKENIZER, 32, 0.5, packed=True)
    batches = found.validation_batches(batches=4, rows=8)
    assert len(found.validation) > 256
    some, every = ((rows[:, 2] == 0).sum() / len(rows) for rows in (batches.flatten(0, 1), found.validation))
    assert some == pytest.approx(float(every), rel=0.25), "texts of a row"
    assert f"rows for validation: {len(found.validation)}, 32 of them used" in "".join(found.describe(batches))
    every_row = found.validation_batches(batches=99, rows=8)
    assert "of them used" not in "".join(found.describe(every_row))


def test_tools_are_told_in_each_form_of_messages(tmp_path: Path) -> None:
    told = tokenizer()
    told.chat_template = "{% for t in tools or [] %}{{ t['name'] }}{% endfor %}" + told.chat_template
    forms = [{"messages": SAYS}, {"prompt": SAYS[:1], "completion": SAYS[1:]}]
    path = write_rows(tmp_path / "a.jsonl", [form | {"tools": [{"name": "abc"}]} for form in forms])
    found = load_rows(str(path), told, 16, 0.5, packed=False)
    assert shown(found.train[0]) == shown(found.validation[0]) == ("abc<user>hi<assistant>yo<end>", "_" * 7 + "yo<end>")


def test_a_template_that_asks_for_a_thought_predicts_what_was_said(tmp_path: Path) -> None:
    """Its prompt ends with more than a message begins with."""
    thinks = tokenizer()
    thinks.chat_template = thinks.chat_template.replace("'<assistant>' }}{% endif %}", "'<assistant>ab' }}{% endif %}")
    assert thinks.chat_template != TOKENIZER.chat_template
    found = load_rows(str(write_rows(tmp_path / "a.jsonl", [{"messages": SAYS}] * 2)), thinks, 16, 0.5, packed=False)
    assert shown(found.train[0]) == ("<user>hi<assistant>yo<end>", "____yo<end>")


def test_a_template_that_prints_the_date_makes_the_same_rows_each_day(tmp_path: Path) -> None:
    dated = tokenizer()
    dated.chat_template = (
        "{% macro day() %}{{ strftime_now('%A %-d %B') | lower }}{% endmacro %}"
        "{{ day() }}{{ ' new' if strftime_now(format='%d %b %Y %H:%M') == '01 Jan 2026 00:00' }}" + dated.chat_template
    )
    found = load_rows(str(write_rows(tmp_path / "a.jsonl", [{"messages": SAYS}] * 2)), dated, 64, 0.5, packed=False)
    assert shown(found.train[0])[0] == "thursday <new> january new<user>hi<assistant>yo<end>"


def test_a_long_text_is_cut_into_rows_and_a_long_completion_loses_its_end(tmp_path: Path) -> None:
    lines = [
        {"text": "abcdefghij" * 2},
        {"prompt": "ab", "completion": "c" * 30},
        {"prompt": "a" * 30, "completion": "b"},
    ]
    found = rows_of(tmp_path / "a.jsonl", [*lines, {"text": "end"}], 8)
    assert [items_of(row[None]) for row in found.train] == [7, 7, 6, 6]
    assert (found.shortened, found.dropped) == (3, 1)
    assert "3 texts are longer than a row" in "".join(found.describe(found.validation_batches(batches=1, rows=1)))


@pytest.mark.parametrize("tokens", range(2, 34))
def test_each_label_of_a_long_text_is_trained_exactly_once(tokens: int, tmp_path: Path) -> None:
    """Counted one by one: behind which tokens of the row it is predicted, and how often."""
    letters = "abcdefghijklmnopqrstuvwxyz .?!"
    text = [letters[i % 30] for i in range(tokens - 1)]
    row = {"text": "".join(text)}
    for length in (2, 3, 8):
        found = rows_of(tmp_path / "a.jsonl", [row, row], length)
        counts = [0] * tokens
        for one in found.train:
            words, labels = TOKENIZER.convert_ids_to_tokens(one[0].tolist()), one[1].tolist()
            for place, label in enumerate(labels):
                if label == NO_LABEL:
                    continue
                seen = words[:place]
                fits = [
                    i
                    for i, word in enumerate([*text, "<end>"])
                    if i >= place and word == words[place] and text[i - place : i] == seen and not counts[i]
                ]
                counts[fits[0]] += 1
        assert counts == [0] + [1] * (tokens - 1), length


def test_a_file_of_another_system_reads_as_the_same(tmp_path: Path) -> None:
    """A byte order mark, CRLF, blank lines, both halves of a pair as escapes, keys for the reader, and null values."""
    path = tmp_path / "a.jsonl"
    lines = [
        '{"text": "ab", "id": 1}',
        "",
        '{"prompt": "a", "completion": "b", "text": null}',
        r'{"text": "\ud83d\ude00"}',
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n \r\n")
    found = load_rows(str(path), TOKENIZER, 16, 0.1, packed=False)
    assert [shown(row)[0] for row in (*found.train, *found.validation)] == ["ab<end>", "ab<end>", "<new><end>"]


def test_a_tokenizer_without_ends_reads_an_empty_prompt(tmp_path: Path) -> None:
    bare = tokenizer()
    bare.eos_token = bare.pad_token = None
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "", "completion": "abc"}] * 2)
    found = load_rows(str(path), bare, 8, 0.1, packed=True)
    assert shown(found.train[0]) == ("abc", "_bc")


def test_a_token_across_the_border_of_a_message_is_predicted(tmp_path: Path) -> None:
    """As a tokenizer joins the end of the template's words and the beginning of the answer."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({"x": 0, ":": 1, ":y": 2, "y": 3, "<end>": 4}, unk_token="x"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("<end>|:y|."), "isolated")
    joining = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    joining.chat_template = (
        "{% for m in messages %}x:{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}x:{% endif %}"
    )
    messages = [{"role": "user", "content": "y"}, {"role": "assistant", "content": "yy"}]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages}] * 2)
    found = load_rows(str(path), joining, 8, 0.1, packed=False)
    assert joining.convert_ids_to_tokens(found.train[0, 0, :6].tolist()) == ["x", ":y", "x", ":y", "y", "<end>"]
    assert found.train[0, 1, :6].tolist() == [NO_LABEL] * 3 + [2, 3, 4]


def starting_with_a_space(*, ends: bool) -> Any:
    """A tokenizer that puts a start and a space before each text, as Llama 2's does, and perhaps an end behind."""
    from tokenizers import Tokenizer, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<start>", "<end>", "x", "_", *"24+="])}
    made = Tokenizer(models.BPE({**words, "=4": 8}, [("=", "4")], unk_token="x"))
    made.normalizer = normalizers.Prepend("_")
    single = "<start> $A <end>" if ends else "<start> $A"
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<start>", 0), ("<end>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<start>", eos_token="<end>", unk_token="x")


PROMPTS = [
    ("2+", "4", "<start> _ 2 +", "4 <end>"),
    ("2=", "4", "<start> _ 2", "=4 <end>"),
    ("2<end>", "4", "<start> _ 2 <end>", "_ 4 <end>"),
    ("2<end>", "", "<start> _ 2 <end>", "<end>"),
    ("2", "", "<start> _ 2", "<end>"),
    ("2", "<end>", "<start> _ 2", "<end>"),
    ("2", "4<end>", "<start> _ 2", "4 <end>"),
    ("", "4", "<start>", "_ 4 <end>"),
]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("prompt", "completion", "given", "predicted"), PROMPTS)
def test_a_prompt_and_its_completion_are_one_text(
    prompt: str, completion: str, given: str, predicted: str, ends: bool, tmp_path: Path
) -> None:
    made = starting_with_a_space(ends=ends)
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": completion}] * 2)
    tokens, labels, _ = load_rows(str(path), made, 8, 0.1, packed=False).train[0].tolist()
    words = f"{given} {predicted}".split()
    assert made.convert_ids_to_tokens(tokens[: len(words)]) == words
    expected = [NO_LABEL] * len(given.split()) + made.convert_tokens_to_ids(predicted.split())
    assert labels == expected + [NO_LABEL] * (8 - len(expected))


def test_more_rows_in_a_step_than_in_the_file(tmp_path: Path) -> None:
    found = rows_of(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "cd"}, {"text": "ef"}])
    step = found.batch(seed=0, step=1, rows=8)
    assert len({tuple(row[0].tolist()) for row in step}) == 2 and items_of(step) == 16


WRONG = [
    ("", "is empty"),
    ("\n\n", "is empty"),
    ('{"text": "a b"}', "has one line"),
    ('{"text": "ab"}\nnonsense', "line 2 of .* is not valid JSON"),
    ('{"text": "ab"}\n[1]', "line 2 of .* is not an object"),
    ('{"text": "ab"}\n{"txt": "a"}', "line 2 of .* has the keys txt; expected .*; did you mean 'text'?"),
    ('{"text": "ab"}\n{"prompt": "a"}', "has the keys prompt; expected"),
    ('{"text": 3}\n{"text": "a"}', "line 1 of .*'text' must be a text, got '3'"),
    ('{"text": ""}\n{"text": "ab"}', "line 1 of .* has nothing to predict: 1 tokens"),
    ('{"messages": "hi"}\n{"text": "ab"}', "messages must be a list"),
    ('{"messages": [{"role": "user", "content": "hi"}]}\n{"text": "ab"}', "line 1 of .* has nothing to predict"),
    (
        '{"text": "ab"}\n{"text": "a", "prompt": "b"}',
        "line 2 of .* has text and prompt, which are keys of different forms",
    ),
    ('{"text": "ab"}\n{"messages": [], "completion": "b"}', "line 2 of .* has completion and messages, which are"),
    ('{"text": "ab"}\n{"text": null}', "line 2 of .* has the keys text; expected .*; null counts as missing"),
    ('{"text": "ab"}\n{"text": "a", "text": "b"}', "line 2 of .* is not valid JSON: the key 'text' stands twice"),
    ('{"text": "ab"}\n{"text": "a\\ud83d"}', r"line 2 of .* has '\\ud83d', half of a surrogate pair"),
    ('{"messages": [{"role": "user", "content": "\\ude00"}]}\n{"text": "ab"}', r"line 1 of .* has '\\ude00', half"),
    ('{"text": "ab"}\n' + "[" * 100_000, "line 2 of .* is not valid JSON: maximum recursion depth"),
    ('{"text": "ab"}\n{"text": ' + "1" * 5000 + "}", "line 2 of .* is not valid JSON: Exceeds the limit"),
    ('{"text": "ab"}\n{"text": ' + "1" * 4000 + "}", "line 2 of .*'text' must be a text, got '1111"),
    ('{"messages": []}\n{"text": "ab"}', "line 1 of .*: the chat template refuses the messages: .*empty"),
    ('{"messages": [{"role": "user"}]}\n{"text": "ab"}', "line 1 of .*: message 1 has the keys role and no content"),
    (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}\n{"text": "ab"}',
        "line 1 of .*: message 2 has the keys role, content and no content; give it a text",
    ),
    (
        '{"messages": [{"role": "user", "content": 3}]}\n{"text": "ab"}',
        "line 1 of .*: the chat template refuses the messages",
    ),
    (json.dumps({"prompt": "a" * 40, "completion": "b"}) + '\n{"text": "ab"}', "no label is left in .*data.seq_len"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_a_wrong_file_is_told(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_rows(str(path), TOKENIZER, 16, 0.1, packed=True)


def test_bytes_that_are_not_utf8_are_told_with_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ab"}\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"line 2 of '.*' is not UTF-8: .*convert the file"):
        load_rows(str(tmp_path / "a.jsonl"), TOKENIZER, 16, 0.1, packed=True)


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
