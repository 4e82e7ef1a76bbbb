"""The training text: its two splits, and the samples of each step.

Owns reading, splitting and sampling. Starts no communication: a rank computes its samples from its index, so the
samples of a step do not depend on the number of ranks.

The text is a sequence of bytes; the vocabulary has 256 tokens. The last part of the text is kept for validation::

    |<------------------ train ------------------>|<-- validation -->|
    0                                            cut              length

    step t:  `rows` windows of S + 1 bytes, their starts drawn from (seed, t) alone
    rank r of R:  rows  r * rows / R  ...  (r + 1) * rows / R  of them, in this order
"""

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch

from elixir_moe.errors import ConfigError

VOCABULARY = 256
"""One token per value of a byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteText:
    """A text in two parts, both in host memory on each rank, one byte per token."""

    train: torch.Tensor
    """uint8, 1-D: the text that samples are drawn from."""
    validation: torch.Tensor
    """uint8, 1-D: the end of the text, never trained on."""


def load_text(paths: Sequence[str], validation_fraction: float, seq_len: int) -> ByteText:
    """Reads and splits the text.

    Args:
        paths: files or glob patterns, joined in order, and within a pattern by name; if empty, the English text of
            Python's own help topics.
        validation_fraction: fraction of the bytes, from the end, kept for validation.
        seq_len: S; each part must hold at least one window of S + 1 bytes.

    Raises:
        ConfigError: a file is missing, empty or unreadable; a glob matches nothing; the text is too short.
    """
    text = b"".join(_read(file) for path in paths for file in _files(path)) if paths else python_help_text()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(text) - round(len(text) * validation_fraction)
    split = ByteText(train=tokens[:cut], validation=tokens[cut:])
    for name, part in (("training", split.train), ("validation", split.validation)):
        if part.numel() <= seq_len:
            raise ConfigError(
                f"data.paths: {part.numel()} of {len(text)} bytes are for {name}, but one sample needs {seq_len + 1}: "
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
    """The samples of one step, int64 (rows, seq_len + 1), determined by the arguments alone."""
    # torch's CPU generator keeps 32 bits of a seed; numpy's uses all bits of both numbers.
    starts = np.random.default_rng((seed, step)).integers(0, tokens.numel() - seq_len, size=rows)
    return torch.stack([tokens[start : start + seq_len + 1] for start in starts.tolist()]).long()


def validation_batches(tokens: torch.Tensor, *, batches: int, rows: int, seq_len: int) -> torch.Tensor:
    """The first windows of the validation part, int64 (batches, rows, seq_len + 1); neighbours share one byte.

    Window i holds bytes i * S ... (i + 1) * S, so each byte but the first is predicted once. Returns fewer than
    `batches` batches if the text has fewer complete ones.

    Raises:
        ConfigError: there is no complete batch.
    """
    available = (tokens.numel() - 1) // seq_len // rows
    if not available:
        raise ConfigError(
            f"data.validation: the {tokens.numel()} validation bytes do not fill one batch of {rows} samples of "
            f"{seq_len} bytes: give more text, a larger data.validation, or a smaller run.global_batch"
        )
    windows = min(batches, available) * rows
    return tokens[: windows * seq_len + 1].unfold(0, seq_len + 1, seq_len).reshape(-1, rows, seq_len + 1).long()


def rows_of(batch: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The rows of a global batch for one of `ranks` ranks: contiguous, in rank order."""
    share = batch.shape[0] // ranks
    assert share * ranks == batch.shape[0], "the settings were checked before: ranks divide the batch"
    return batch[rank * share : (rank + 1) * share]


def _files(path: str) -> list[str]:
    if not glob.has_magic(path):
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
