"""The text, its samples and the bigram model: the same for every number of ranks, and right by counting."""

import math
from pathlib import Path

import pytest
import torch

from elixir_moe.errors import ConfigError
from elixir_tools.train.bigram import Bigram, pair_counts
from elixir_tools.train.data import batch_at, load_text, python_help_text, rows_of, validation_batches

TEXT = torch.arange(5000).mul(37).remainder(251).to(torch.uint8)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(accumulation: int) -> None:
    whole = batch_at(TEXT, seed=3, step=7, rows=24, seq_len=16)
    for ranks in (1, 2, 4):
        parts = [rows_of(part, rank, ranks) for part in whole.chunk(accumulation) for rank in range(ranks)]
        assert torch.equal(torch.cat(parts), whole)


def test_samples_depend_on_seed_and_step_and_on_nothing_else() -> None:
    first = batch_at(TEXT, seed=3, step=7, rows=8, seq_len=16)
    torch.manual_seed(99)
    assert torch.equal(batch_at(TEXT, seed=3, step=7, rows=8, seq_len=16), first)
    assert not torch.equal(batch_at(TEXT, seed=3, step=8, rows=8, seq_len=16), first)
    assert not torch.equal(batch_at(TEXT, seed=4, step=7, rows=8, seq_len=16), first)
    # seed and step are not simply added: (3, 7) and (4, 6) differ
    assert not torch.equal(batch_at(TEXT, seed=4, step=6, rows=8, seq_len=16), first)


def test_samples_are_windows_of_the_text_and_reach_both_ends() -> None:
    text = torch.arange(20, dtype=torch.uint8)
    batch = batch_at(text, seed=0, step=0, rows=200, seq_len=16)
    assert batch.dtype == torch.int64 and batch.shape == (200, 17)
    assert torch.equal(batch - batch[:, :1], torch.arange(17).expand(200, 17))
    assert set(batch[:, 0].tolist()) == {0, 1, 2, 3}


def test_the_split_is_the_tail_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 200)))
    for paths in ([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], [str(tmp_path / "*.txt")]):
        text = load_text(paths, 0.2, 8)
        assert text.train.tolist() == list(range(160)) and text.validation.tolist() == list(range(160, 200))


def test_validation_windows_predict_each_byte_once() -> None:
    tokens = torch.arange(100, dtype=torch.uint8)
    batches = validation_batches(tokens, batches=99, rows=2, seq_len=8)
    assert batches.shape == (6, 2, 9)  # 99 predictable bytes, 12 windows of 8, 6 whole batches of 2
    assert batches[..., 1:].flatten().tolist() == list(range(1, 97))
    assert torch.equal(validation_batches(tokens, batches=2, rows=2, seq_len=8), batches[:2])


def test_the_default_text_does_not_repeat_itself_in_the_validation_part() -> None:
    paragraphs = python_help_text().decode().split("\n\n")
    assert len(python_help_text()) > 200_000
    assert len({" ".join(p.split()) for p in paragraphs}) == len(paragraphs)


def test_text_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    empty, short = tmp_path / "empty.txt", tmp_path / "short.txt"
    empty.write_bytes(b"")
    short.write_bytes(b"x" * 100)
    for path, said in (
        (tmp_path / "none.txt", "none.txt.*No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "*.csv", r"matches no file"),
        (empty, "empty.txt.*is empty"),
        (short, "10 of 100 bytes are for validation, but one sample needs 17"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_text([str(path)], 0.1, 16)
    with pytest.raises(ConfigError, match="do not fill one batch of 8 samples"):
        validation_batches(TEXT[:100], batches=1, rows=8, seq_len=16)


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    for name, letter in (("a[1].txt", b"x"), ("a1.txt", b"y")):
        (tmp_path / name).write_bytes(letter * 100)
    assert bytes(load_text([str(tmp_path / "a[1].txt")], 0.5, 16).train.tolist()) == b"x" * 50
    assert bytes(load_text([str(tmp_path / "a[0-9].txt")], 0.5, 16).train.tolist()) == b"y" * 50


def test_pair_counts_equal_a_loop() -> None:
    counts = pair_counts(TEXT[:400])
    expected = torch.zeros(256, 256, dtype=torch.int64)
    for a, b in zip(TEXT[:399].tolist(), TEXT[1:400].tolist(), strict=True):
        expected[a, b] += 1
    assert torch.equal(counts, expected)


def test_bigram_loss_equals_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    train, validation = torch.randint(0, 9, (2, 700), generator=generator, dtype=torch.uint8)
    bigram = Bigram.fit(train)
    pairs = list(zip(train.tolist(), train[1:].tolist(), strict=False))
    total = 0.0
    for a, b in zip(validation.tolist(), validation[1:].tolist(), strict=False):
        row = sum(1 for x, _ in pairs if x == a)
        total -= math.log((pairs.count((a, b)) + bigram.k) / (row + 256 * bigram.k))
    # 699 terms added in another order: 699 * 2^-53 relative is far below 1e-12
    assert bigram.loss(validation) == pytest.approx(total / 699, rel=1e-12)


def test_bigram_probabilities_sum_to_one_even_after_a_byte_never_seen() -> None:
    probabilities = Bigram.fit(TEXT).log_probability.exp().sum(1)
    torch.testing.assert_close(probabilities, torch.ones(256, dtype=torch.float64))
