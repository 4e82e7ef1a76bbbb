"""The text that is trained on, and the samples of each step.

Owns reading, splitting and sampling. Starts no communication: a rank computes its samples from its index, so the
samples of a step do not depend on the number of ranks.

Each byte of the text is a token. Its last part is kept for validation::

    |<------------------ train ------------------>|<-- validation -->|
    0                                            cut              length

    step t:  `rows` windows of S + 1 tokens, their starts drawn only from (seed, t)
    rank r of R:  rows  r * rows / R  ...  (r + 1) * rows / R  of them, in this order
"""

import glob
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from elixir_moe.errors import ConfigError
from elixir_tools.train.bigram import VOCABULARY, Bigram


def decode_bytes(tokens: list[int]) -> str:
    """The text of bytes; a token that is not a byte, which a larger vocabulary may have, is a replacement character."""
    return b"".join(bytes([t]) if t < VOCABULARY else "\ufffd".encode() for t in tokens).decode(errors="replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A running text in two parts, both in host memory on each rank."""

    train: torch.Tensor
    """uint8, 1-D: the text that samples are drawn from."""
    validation: torch.Tensor
    """uint8, 1-D: the end of the text, never trained on."""
    seq_len: int
    """S: tokens that are predicted in a row, which has one more."""

    def batch(self, *, seed: int, step: int, rows: int) -> Tensor:
        """The rows of a step, int64 (rows, S + 1): windows that begin anywhere in the text."""
        return batch_at(self.train, seed=seed, step=step, rows=rows, seq_len=self.seq_len)

    def validation_batches(self, *, batches: int, rows: int) -> Tensor:
        """At most `batches` batches of the validation part, (batches, rows, S + 1). Raises ConfigError without any."""
        return validation_batches(self.validation, batches=batches, rows=rows, seq_len=self.seq_len)

    def baseline(self, validation: Tensor) -> float:
        """The loss of a bigram model on the rows of `validation_batches`."""
        return Bigram.fit(self.train).loss(self._used(validation))

    def digest(self) -> str:
        """A hash of all that is trained on."""
        return hashlib.sha256(self.train.numpy().tobytes()).hexdigest()

    def description(self, validation: Tensor) -> str:
        """A line about the text, given the rows of `validation_batches`."""
        batches, rows = validation.shape[:2]
        return (
            f"text        {len(self.train):,} bytes to train on, {len(self.validation):,} for validation "
            f"({len(self._used(validation)) - 1:,} of them used: {batches} batches of {rows})"
        )

    def _used(self, validation: Tensor) -> Tensor:
        """The bytes of an evaluation; each but the first is predicted once."""
        batches, rows = validation.shape[:2]
        return self.validation[: batches * rows * self.seq_len + 1]


def load_text(paths: Sequence[str], validation_fraction: float, seq_len: int) -> Text:
    """Reads and splits the text; with no `paths`, the English text of Python's own help topics.

    Files and glob patterns are joined in order, and within a pattern by name. Validation has a fraction of the bytes,
    from the end. Each part must hold at least one window of S + 1 bytes.

    Raises ConfigError: a file is missing, empty or unreadable; a glob matches nothing; the text is too short.
    """
    text = b"".join(_read(file) for path in paths for file in _files(path)) if paths else python_help_text()
    tokens, length = torch.frombuffer(bytearray(text), dtype=torch.uint8), len(text)
    cut = length - round(length * validation_fraction)
    split = Text(train=tokens[:cut], validation=tokens[cut:], seq_len=seq_len)
    for name, part in (("training", split.train), ("validation", split.validation)):
        if part.numel() <= seq_len:
            raise ConfigError(
                f"data.paths: {part.numel()} of {length} bytes are for {name}, but one sample needs {seq_len + 1}: "
                f"give more text, a smaller model.seq_len or another data.validation"
            )
    return split


def python_help_text() -> bytes:
    """The English text in Python's `pydoc_data.topics`, by topic name.

    Topics quote each other at length. Only the first occurrence of each paragraph is kept, so that the end of the text,
    which is the validation part, does not repeat the training part.
    """
    paragraphs: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            paragraphs.setdefault(" ".join(paragraph.split()), paragraph.strip("\n"))
    return "\n\n".join(p for p in paragraphs.values() if p).encode()


def batch_at(tokens: torch.Tensor, *, seed: int, step: int, rows: int, seq_len: int) -> torch.Tensor:
    """The samples of one step, int64 (rows, seq_len + 1), determined only by the arguments."""
    # torch's CPU generator keeps 32 bits of a seed; numpy's uses all bits of both numbers.
    starts = np.random.default_rng((seed, step)).integers(0, tokens.numel() - seq_len, size=rows)
    return torch.stack([tokens[start : start + seq_len + 1] for start in starts.tolist()]).long()


def validation_batches(tokens: torch.Tensor, *, batches: int, rows: int, seq_len: int) -> torch.Tensor:
    """The first windows of the validation part, int64 (batches, rows, seq_len + 1); neighbors share one token.

    Window i holds tokens i * S ... (i + 1) * S, so each token but the first is predicted once. Returns fewer than
    `batches` batches if the text has fewer complete ones; raises ConfigError if it has none.
    """
    available = (tokens.numel() - 1) // seq_len // rows
    if not available:
        raise ConfigError(
            f"data.validation: the {tokens.numel()} validation tokens do not fill one batch of {rows} samples of "
            f"{seq_len}: give more text, a larger data.validation, or a smaller run.global_batch"
        )
    windows = min(batches, available) * rows
    return tokens[: windows * seq_len + 1].unfold(0, seq_len + 1, seq_len).reshape(-1, rows, seq_len + 1).long()


def rows_of(batch: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows of a global batch for one of `ranks` ranks: contiguous, in rank order."""
    share = batch.shape[0] // ranks
    assert share * ranks == batch.shape[0], "the settings were checked before: ranks divide the batch"
    return batch[rank * share : (rank + 1) * share]


def _files(path: str) -> list[str]:
    """The files that a path or else a glob pattern names, by name. Raises ConfigError if it matches none."""
    if not glob.has_magic(path) or os.path.isfile(path):
        return [path]
    found = sorted(file for file in glob.glob(path, recursive=True) if Path(file).is_file())
    if not found:
        raise ConfigError(f"data.paths: {path!r} matches no file: correct the pattern or name the files")
    return found


def _read(path: str) -> bytes:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"data.paths: cannot read {path!r}: {reason}; name a file that exists") from error
    if not text:
        raise ConfigError(f"data.paths: {path!r} is empty: remove it from the list or name another file")
    return text
