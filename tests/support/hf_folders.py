"""A tokenizer of single characters, and files of rows."""

import json
from pathlib import Path
from typing import Any

WORDS = ["<pad>", "<end>", "<new>", "<user>", "<assistant>", *"abcdefghijklmnopqrstuvwxyz .?!"]
CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def tokenizer() -> Any:
    """One token for each character, and special ones; with a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<new>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z]+>|."), "isolated")
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<new>")
    found.chat_template = CHAT
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
