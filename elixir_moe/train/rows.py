"""Rows of JSONL as training data: read, tokenized, labeled, and packed into rows of one length.

Owns the three forms of a line, the labels of its tokens, and the packing. A rank computes its rows from their number,
so the rows of a step do not depend on the number of ranks. Knows no model; the tokenizer is given.

    {"text": "..."}                                  all tokens are predicted
    {"prompt": "...", "completion": "..."}           the completion is predicted, and the end of the text
    {"messages": [{"role": ..., "content": ...}]}    what the assistant says is predicted, by the chat template

A line has one form; a form whose values are null does not count, and other keys are for the reader. Each label is
trained exactly once in an epoch: a long text goes on in a row that begins with the last token of the row before. A
line is tokenized as one text; a token across the border of what is predicted is predicted.

Packing is best fit, longest first: each text goes to the fullest row that has room for it. Positions begin at 0 where a
text begins, and the rest of a row is filled up by a text of its own without labels::

    tokens      a0 a1 a2 a3 b0 b1 b2 pad pad
    labels       .  . a2 a3  . b1 b2   .   .        prompt a0 a1; the first token of a text is never predicted
    positions    0  1  2  3  0  1  2   0   1
"""

import hashlib
import json
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elixir_moe.errors import ConfigError, meant
from elixir_moe.train.data import NO_LABEL, files_of

_LOG = logging.getLogger(__name__)
_FORMS = {"text": "text", "prompt": "prompt", "completion": "prompt", "messages": "messages"}
"""{key: its form}."""
_SAYS = ("content", "tool_calls", "function_call", "thinking", "reasoning_content")
"""Keys of a message, one of which has a value."""
_EXPECTED = 'expected {"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}'
_TODAY = datetime(2026, 1, 1)
"""The day of all rows, so that a run that goes on another day has the same."""
_CODES = "aAbBcdDeFhHIjmMpRSTuUVwWxXyYZ"
"""Letters of ``strftime``."""
_STRFTIME_NOW = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f" | replace('%{c}', '{_TODAY:%{c}}') | replace('%-{c}', '{_TODAY:%-{c}}')" for c in _CODES)
    + " }}{% endmacro %}\n"
)
"""The beginning of a chat template: the function by which templates ask for the date tells `_TODAY`. A macro, since
transformers hands no function on to a template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One text in tokens."""

    tokens: list[int]
    labels: list[int]
    """Of each token, itself or `NO_LABEL`; the first is never predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Texts in rows of one length, in host memory on each rank."""

    train: Tensor
    """int32 (rows, 3, L), as `Data` says."""
    validation: Tensor
    """int32 (rows, 3, L): the last lines of the file, never trained on."""
    restarts: bool
    """Whether a row may have several texts."""
    tokens_per_row: float
    """Tokens of a training row, on the average, without those that fill it up."""
    texts: int
    """Number of texts in `train`."""
    shortened: int
    """Number of texts that were longer than a row."""
    dropped: int
    """Number of texts that had nothing to predict once they were shortened."""
    decode: Callable[[list[int]], str]
    """From tokens to text."""

    @property
    def most(self) -> int:
        """As `Data` says."""
        return max(int(self.train[:, 0].max()), int(self.validation[:, 0].max()))

    def batch(self, *, seed: int, step: int, rows: int) -> Tensor:
        """As `Data` says: all rows come once in an order drawn from the seed, then once in another order, and so on."""
        total, first = len(self.train), (step - 1) * rows
        chosen = [int(_order(total, seed, i // total)[i % total]) for i in range(first, first + rows)]
        return self.train[chosen].long()

    def validation_batches(self, *, batches: int, rows: int) -> Tensor:
        """As `Data` says; the last batch is filled up by rows without labels."""
        length = self.validation.shape[-1]
        used = self.validation[: batches * rows]
        missing = -len(used) % rows
        empty = _filled([], length, int(self.validation[0, 0, 0])).expand(missing, 3, length)
        return torch.cat([used, empty]).view(-1, rows, 3, length).long()

    def prompt(self, tokens: int) -> Tensor:
        """As `Data` says: of the first text."""
        first, _, positions = self.validation[0]
        ends = (positions[1:] == 0).nonzero().flatten().tolist()
        return first[: min(tokens, *(end + 1 for end in ends[:1]), len(first))].long()

    def baseline(self, validation: Tensor) -> None:
        """As `Data` says: there is none."""

    def digest(self) -> str:
        """As `Data` says."""
        return hashlib.sha256(self.train.numpy().tobytes()).hexdigest()

    def describe(self, validation: Tensor) -> Iterator[str]:
        """As `Data` says."""
        length, (batches, rows) = self.train.shape[-1], validation.shape[:2]
        used = min(len(self.validation), batches * rows)
        yield (
            f"rows        {self.texts:,} texts in {len(self.train):,} rows of {length:,} tokens, "
            f"{self.tokens_per_row / length:.0%} full; rows for validation: {len(self.validation):,}"
            + f", {used:,} of them used"
            * (used < len(self.validation))
        )
        if self.shortened:
            yield (
                f"rows        {self.shortened:,} texts are longer than a row and were cut there"
                + f"; {self.dropped:,} of them have nothing to predict in it and were left out" * bool(self.dropped)
            )


@lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The order of all rows in an epoch; a step is in one epoch, or at the border of two."""
    return np.random.default_rng((seed, epoch)).permutation(rows)


def load_rows(
    path: str, tokenizer: Any, length: int, validation_fraction: float, *, packed: bool, completion_only: bool = True
) -> Rows:
    """Reads, tokenizes and packs a file.

    Args:
        path: a JSONL file, or a glob pattern of several.
        tokenizer: a tokenizer of `transformers`.
        length: L, the tokens of a row. A longer text is cut into rows if all of it is predicted; else its end is lost.
        validation_fraction: fraction of the lines, from the end, kept for validation; at least one.
        packed: whether several texts share a row.
        completion_only: whether only completions and the assistant's messages are predicted.

    Raises:
        ConfigError: a file cannot be read, or is empty; a line is not a JSON object, or not of one of the three forms;
            nothing is predicted; or a chat template is missing, or changes what it has said before.
    """
    lines = [line for file in files_of(path, "data.file") for line in _lines(file)]
    if len(lines) < 2:
        found = "is empty" if not lines else "has one line"
        raise ConfigError(f"data.file: {path!r} {found}: give at least two, one to train on and one for validation")
    kept = min(max(1, round(len(lines) * validation_fraction)), len(lines) - 1)
    encoder = _Encoder(tokenizer, completion_only)
    parts, shortened, dropped = [], 0, 0
    for part in (lines[:-kept], lines[-kept:]):
        examples: list[Example] = []
        for where, row in part:
            whole = encoder.example(where, row)
            cut = list(_cut(whole, length))
            useful = [piece for piece in cut if _predicts(piece)]
            shortened += len(whole.tokens) > length
            dropped += not useful
            examples += useful
        if not examples:
            raise ConfigError(
                f"data.file: no label is left in {path!r}: its {len(part)} lines begin with more than {length} tokens "
                f"that are not predicted; give a larger data.seq_len, or data.completion_only=false"
            )
        parts.append(examples)
    fill = encoder.pad
    train, validation = (_stacked(part, length, fill, packed=packed) for part in parts)
    if packed:  # rows of long texts come first, and an evaluation may use the first rows alone
        validation = validation[torch.from_numpy(_order(len(validation), 0, 0))]
    _LOG.debug("%d texts are in %d rows of %d tokens (packing: %s)", len(parts[0]), len(train), length, packed)
    return Rows(
        train=train,
        validation=validation,
        restarts=packed,
        tokens_per_row=sum(len(example.tokens) for example in parts[0]) / len(train),
        texts=len(parts[0]),
        shortened=shortened,
        dropped=dropped,
        decode=tokenizer.decode,
    )


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Numbers of texts by row: best fit, longest first. No length is above `room`."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # {room left: rows}
    rooms: list[int] = []  # those of which there is a row, in order
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(rooms, lengths[number])
        if place < len(rooms):
            left = rooms[place]
            row = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[place]
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(number)
        left -= lengths[number]
        if left and left not in with_room:
            insort(rooms, left)
        if left:
            with_room.setdefault(left, []).append(row)
    return rows


def _stacked(examples: list[Example], length: int, fill: int, *, packed: bool) -> Tensor:
    """int32 (rows, 3, L)."""
    lengths = [len(example.tokens) for example in examples]
    rows = pack(lengths, length) if packed else [[i] for i in range(len(examples))]
    return torch.stack([_filled([examples[i] for i in row], length, fill) for row in rows])


def _filled(examples: Iterable[Example], length: int, fill: int) -> Tensor:
    """One row, int32 (3, L): texts one behind the other, and a text without labels up to its end."""
    made = torch.full((3, length), fill, dtype=torch.int32)
    made[1], start = NO_LABEL, 0
    for example in examples:
        stop = start + len(example.tokens)
        made[0, start:stop], made[1, start:stop] = torch.tensor(example.tokens), torch.tensor(example.labels)
        made[2, start:stop] = torch.arange(stop - start)
        start = stop
    made[2, start:] = torch.arange(length - start)
    return made


def _cut(example: Example, length: int) -> Iterator[Example]:
    """The text in rows if all of it is predicted, neighbors sharing a token that the first predicts; else its start."""
    all_predicted = NO_LABEL not in example.labels[1:]
    for start in range(0, len(example.tokens) - 1 if all_predicted else 1, length - 1):
        labels = [NO_LABEL, *example.labels[start + 1 : start + length]]
        yield Example(tokens=example.tokens[start : start + length], labels=labels)


def _predicts(example: Example) -> bool:
    return any(label != NO_LABEL for label in example.labels)


def _lines(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each line that is not blank."""
    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"data.file: line {number} of {file!r} is not UTF-8: {error}; convert the file") from error
    except OSError as error:
        raise ConfigError(
            f"data.file: cannot read {file!r}: {error.strerror}; name a file of JSON lines in UTF-8"
        ) from error
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number} of {file!r}"
        try:
            row = json.loads(line, object_pairs_hook=_once)
            if "\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"data.file: {where} has {error.object[error.start]!a}, half of a surrogate pair, which no "
                f"tokenizer reads: write both halves, or \\ufffd instead"
            ) from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"data.file: {where} is not valid JSON: {error}; give one object a line, or "
                f"a running text by data.paths"
            ) from error
        if not isinstance(row, dict):
            raise ConfigError(f"data.file: {where} is not an object but {str(row)[:40]!r}; {_EXPECTED}")
        yield where, row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these keys and values. Raises ValueError for a key that stands twice, since one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {max(keys, key=keys.count)!r} stands twice in an object")
    return found


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of items with which both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class _Encoder:
    """From a line to tokens with labels."""

    def __init__(self, tokenizer: Any, completion_only: bool) -> None:
        self._tokenizer, self._completion_only = tokenizer, completion_only
        end = tokenizer.eos_token_id
        self._end: list[int] = [] if end is None else [end]
        self.pad: int = next((t for t in (end, tokenizer.pad_token_id) if t is not None), 0)
        """The token that fills rows up; it is never predicted."""

    def example(self, where: str, row: dict[str, Any]) -> Example:
        """The line in tokens. Raises ConfigError."""
        given = [key for key in _FORMS if row.get(key) is not None]
        if len({_FORMS[key] for key in given}) > 1:
            raise ConfigError(
                f"data.file: {where} has {' and '.join(given)}, which are keys of different forms; {_EXPECTED}: keep "
                f"one form, and rename or remove the other keys"
            )
        if given == ["messages"]:
            tokens, prompts = self._of_messages(where, row["messages"], row.get("tools"))
        elif given == ["prompt", "completion"]:
            tokens, prompts = self._of_prompt(where, row["prompt"], row["completion"], row.get("tools"))
        elif given == ["text"]:
            tokens, prompts = self._ended(self._encoded(self._string(where, "text", row["text"]))), []
        else:
            hints = [hint for key in islice(row, 8) if key not in _FORMS and (hint := meant(str(key), _FORMS))]
            near = f"; {hints[0]}" if hints else ""
            empty = "; null counts as missing" if any(row.get(key, 0) is None for key in _FORMS) else ""
            raise ConfigError(f"data.file: {where} has the keys {', '.join(islice(row, 8))}; {_EXPECTED}{near}{empty}")
        labels = list(tokens)
        labels[:1] = [NO_LABEL] * len(labels[:1])
        for start, stop in prompts if self._completion_only else ():
            labels[start:stop] = [NO_LABEL] * (stop - start)
        if all(label == NO_LABEL for label in labels):
            raise ConfigError(
                f"data.file: {where} has nothing to predict: {len(tokens)} tokens, none of them of a completion, of an "
                f"assistant's message, or behind the first of a text; correct the line or leave it out"
            )
        return Example(tokens=tokens, labels=labels)

    @staticmethod
    def _string(where: str, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ConfigError(f"data.file: {where}: {key!r} must be a text, got {str(value)[:40]!r}")
        return value

    def _encoded(self, text: str, *, special: bool = True) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return found

    @cached_property
    def _start(self) -> list[int]:
        """What the tokenizer puts before each text, found with one letter."""
        letter = self._encoded("a", special=False)
        return list(takewhile(lambda token: token not in letter, self._encoded("a")))

    def _ended(self, tokens: list[int]) -> list[int]:
        return tokens if tokens[-1:] == self._end else tokens + self._end

    def _of_prompt(
        self, where: str, prompt: Any, completion: Any, tools: Any
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """As `_of_messages` says. A tokenizer that ends each text does not end the prompt."""
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._of_messages(where, prompt + completion, tools, first=len(prompt))
        before, after = self._string(where, "prompt", prompt), self._string(where, "completion", completion)
        prompted, whole = (self._start + self._encoded(text, special=False) for text in (before, before + after))
        stop = _shared(prompted, whole)
        return whole[:stop] + self._ended(whole[stop:]), [(0, stop)]

    def _of_messages(
        self, where: str, messages: Any, tools: Any, *, first: int = 0
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokens, and the places that are not predicted: all but the assistant's messages, from number `first` on."""
        if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise ConfigError(f'data.file: {where}: messages must be a list of {{"role": ..., "content": ...}}')
        for number, message in enumerate(messages, 1):
            if all(message.get(key) is None for key in _SAYS):
                raise ConfigError(
                    f"data.file: {where}: message {number} has the keys {', '.join(islice(message, 8))} and no "
                    f"content; give it a text, or leave the message out"
                )
        text = self._rendered(where, messages, tools)
        whole = self._encoded(text, special=False)
        if not self._completion_only:
            return whole, []
        prompts, done = [], 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            start = self._begins(where, text, whole, messages[:number], tools, ask=True) if number else 0
            stop = self._begins(where, text, whole, messages[: number + 1], tools, ask=False)
            prompts.append((done, start))
            done = stop
        return whole, [*prompts, (done, len(whole))]

    def _begins(self, where: str, text: str, whole: list[int], messages: Any, tools: Any, *, ask: bool) -> int:
        """Number of the tokens `whole` of `text` that these messages make, with which `text` must begin.

        A token that goes beyond the end of the messages is not counted.
        """
        found = self._rendered(where, messages, tools, ask=ask)
        if ask and not text.startswith(found):  # it asks for more than a message has, as for the beginning of a thought
            shared = found[: _shared(found, text)]
            found = shared if shared.startswith(self._rendered(where, messages, tools)) else found
        if not text.startswith(found):
            raise ConfigError(
                f"data.file: {where}: the chat template writes message {len(messages)} otherwise when another follows, "
                f"so what the assistant said cannot be told; split the line, or give data.completion_only=false"
            )
        return _shared(self._encoded(found, special=False), whole)

    def _rendered(self, where: str, messages: Any, tools: Any, *, ask: bool = False) -> str:
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"data.file: {where} has messages, but the tokenizer has no chat template: take that of a chat model "
                f"with data.tokenizer, or give prompt and completion"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=_STRFTIME_NOW + self._tokenizer.get_chat_template(tools=tools),
                tokenize=False,
                add_generation_prompt=ask,
            )
        except Exception as error:  # of Jinja, and what templates raise
            raise ConfigError(f"data.file: {where}: the chat template refuses the messages: {error}") from error
        return text
