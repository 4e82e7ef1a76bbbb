"""Folders as Hugging Face keeps models: tiny ones of random weights, with a tokenizer, made from their configs."""

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ["<pad>", "<end>", "<new>", "<user>", "<assistant>", *"abcdefghijklmnopqrstuvwxyz .?!"]
CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ '<end>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
TINY = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {},
    # experts, rank of adapters and both sizes differ, so that no two dims can be taken for each other
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True},
}


def tokenizer() -> Any:
    """One token for each character, and special ones; with a chat template."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<new>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("<[a-z]+>|."), "isolated")
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>", unk_token="<new>")
    found.chat_template = CHAT
    return found


def model_folder(folder: Path, kind: str, **changes: Any) -> Path:
    """The folder of a tiny model of that kind."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**TINY | CONFIGS.get(kind, {}) | changes)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def some_rows() -> list[dict[str, Any]]:
    """Prompts and completions of many lengths, conversations and texts."""
    found: list[dict[str, Any]] = []
    for number in range(8):
        name = "abcdefgh"[number] * (1 + number % 3)
        found.append({"prompt": f"say {name}?", "completion": f" {name}{' and again' * (number % 2)}."})
        asked = [{"role": "user", "content": f"who is {name}?"}, {"role": "assistant", "content": name}]
        found.append({"messages": asked * (1 + number % 2)})
        found.append({"text": f"the word is {name}."})
    return found
