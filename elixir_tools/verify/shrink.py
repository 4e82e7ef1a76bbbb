"""A Hugging Face config of the same kind, with small numbers.

Owns which settings are sizes, and what must stay as it is when they shrink: the pattern of layers, ratios of heads and
widths, and that fewer experts are chosen than there are. Knows settings by name only; builds no model.
"""

from collections.abc import Callable, Iterator
from typing import Any

Config = dict[str, Any]

_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"}
_LAYERS |= {"encoder_layers", "decoder_layers"}
_PERIODS = {"decoder_sparse_step", "interleave_moe_layer_step", "full_attention_interval", "moe_layer_freq"}
_PERIODS |= {"sliding_window_pattern", "_sliding_window_pattern", "attn_layer_period", "expert_layer_period"}
_PERIODS |= {"no_rope_layer_interval"}
_HEADS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("n_head", "n_head_kv"),
    ("num_heads", "num_kv_heads"),
    ("encoder_attention_heads", ""),
    ("decoder_attention_heads", ""),
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("index_n_heads", ""),
)
"""(heads, heads that several of those share)."""
_HEAD_DIMS = ("head_dim", "d_kv")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_INNER = (
    "ffn_dim",
    "n_inner",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "ffn_hidden_size",
    "intermediate_size_mlp",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_WIDTHS_AT_MOST = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "index_head_dim": 16, "hidden_size_per_layer_input": 8},
}
_AT_MOST = {
    **{"sliding_window": 8, "attention_chunk_size": 8, "index_topk": 8, "vocab_size": 128},
    **{"vocab_size_per_layer_input": 128, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}
UNIT = 8
"""Each width is a multiple of this, and a head this wide."""
_MOST_HEADS, _MOST_SHARED, _MOST_RATIO, _MOST_EXPERTS, _MOST_POSITIONS, _FEWEST = 4, 2, 8, 8, 64, 2
_RANDOM = ("dropout", "pdrop", "jitter", "layerdrop")


def without_noise(config: Config) -> Config:
    """The config without dropout and jitter: ranks cannot draw the numbers that one process draws."""

    def still(name: str, value: Any) -> Any:
        drawn = isinstance(value, float) and any(word in name for word in _RANDOM)
        return 0.0 if drawn else value

    return _mapped(config, still)


def shrunk(config: Config, unit: int = UNIT) -> Config:
    """The config with few layers, at most 8 experts, a small vocabulary and widths that are small multiples of `unit`;
    nested configs too."""
    new = {name: shrunk(value, unit) if _is_config(value) else value for name, value in config.items()}
    new |= _fewer_layers(new)
    new |= _narrower(new, unit)
    new |= _fewer_experts(new)
    return new | _smaller(new)


def changes(before: Config, after: Config, prefix: str = "") -> Iterator[str]:
    """One text for each setting that differs: ``num_hidden_layers 48 -> 2``."""
    for name, value in after.items():
        old = before.get(name)
        if _is_config(value) and isinstance(old, dict):
            yield from changes(old, value, f"{prefix}{name}.")
        elif old != value:
            both = [f"{len(v)} entries" if isinstance(v, list) else str(v) for v in (old, value)]
            yield f"{prefix}{name} {' -> '.join(both)}"


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _mapped(config: Config, change: Callable[[str, Any], Any]) -> Config:
    return {n: _mapped(v, change) if _is_config(v) else change(n, v) for n, v in config.items()}


def _number(config: Config, name: str) -> int:
    """A whole number above 0, or 0 where the config has none of that name."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _fewer_layers(config: Config) -> Config:
    """Returns the fewest layers that show every kind of layer once."""
    depth = max((_number(config, name) for name in _LAYERS), default=0)
    if not depth:
        return {}
    lists = {n: v for n, v in config.items() if isinstance(v, list) and v}
    indices = {n: v for n, v in lists.items() if _are_indices(n, v)}
    each = {n: v for n, v in lists.items() if n not in indices and len(v) == depth}
    needed = [_FEWEST, _number(config, "first_k_dense_replace") + 1, *(_number(config, name) for name in _PERIODS)]
    needed += [max(values.index(kind) for kind in values) + 1 for values in each.values()]
    layers = min(depth, max(needed))
    new: Config = {name: min(config[name], layers) for name in _LAYERS if _number(config, name)}
    new |= {name: values[:layers] for name, values in each.items()}
    return new | {name: [i for i in values if i < layers] for name, values in indices.items()}


def _are_indices(name: str, values: list[Any]) -> bool:
    """Whether a list has numbers of layers, rather than an entry for each layer."""
    numbers = all(isinstance(i, int) and not isinstance(i, bool) for i in values)
    return numbers and any(word in name for word in ("layers", "idx", "indices")) and values == sorted(set(values))


def _narrower(config: Config, unit: int) -> Config:
    """Few heads, with as many sharing one as before, widths in the ratio they had, and low ranks of attention."""
    new: Config = {n: min(config[n], most * unit // UNIT) for n, most in _WIDTHS_AT_MOST.items() if _number(config, n)}
    if "qk_head_dim" in config:
        new["qk_head_dim"] = new.get("qk_rope_head_dim", 0) + new.get("qk_nope_head_dim", 0)
    for heads, shared in _HEADS:
        if count := _number(config, heads):
            of = _number(config, shared) or count
            kept = min(of, _MOST_HEADS if of == count else _MOST_SHARED)
            new[heads] = kept * min(_MOST_RATIO, count // of)
            new |= {shared: kept} if _number(config, shared) else {}
    name = next((n for n, _ in (*_HEADS[:3], *_HEADS) if n in new), None)
    width = max((_number(config, n) for n in _WIDTHS), default=0)
    if name is None or not width:
        return new
    explicit = next((n for n in _HEAD_DIMS if _number(config, n)), None)
    ratio = width / (config[name] * config[explicit]) if explicit and not _number(config, "kv_lora_rank") else 1.0
    size = new[name] * min(unit, config[explicit] if explicit else width // config[name])
    narrow = min(width, _in_units(size * ratio, unit) if ratio != 1.0 else size)
    new |= {n: narrow for n in _WIDTHS if _number(config, n)}
    new |= {n: min(config[n], unit) for n in _HEAD_DIMS if _number(config, n)}
    inner = (n for n in config if (n in _INNER or n.endswith("intermediate_size")) and _number(config, n))
    return new | {n: min(config[n], _in_units(config[n] * narrow / width, unit)) for n in inner}


def _in_units(size: float, unit: int) -> int:
    return max(unit, round(size / unit) * unit)


def _fewer_experts(config: Config) -> Config:
    """Four to eight experts, of which a token still chooses some and not all."""
    found = [(n, _number(config, n)) for n in _EXPERTS if _number(config, n)]
    chosen = max((_number(config, n) for n in _CHOSEN), default=0)
    if not found or found[0][1] <= _MOST_EXPERTS:
        return {}
    groups = min(2, _number(config, "n_group") or 1)
    used = min(_number(config, "topk_group") or 1, max(1, groups - 1))
    experts = min(_MOST_EXPERTS, max(4, 2 * chosen))
    new: Config = {n: experts for n, _ in found}
    new |= {n: min(config[n], experts // 2, used * experts // groups) for n in _CHOSEN if _number(config, n)}
    return new | {n: v for n, v in (("n_group", groups), ("topk_group", used)) if _number(config, n)}


def _smaller(config: Config) -> Config:
    """A small vocabulary with its special tokens, and few learned positions."""
    new: Config = {n: min(config[n], most) for n, most in _AT_MOST.items() if _number(config, n)}
    if not any(name.startswith("rope_") for name in config):
        new |= {n: min(config[n], _MOST_POSITIONS) for n in _POSITIONS if _number(config, n)}
    words = new.get("vocab_size", 0)
    named = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    for i, name in enumerate(n for n in config if n.endswith("_token_id")):
        ids = config[name] if isinstance(config[name], list) else [config[name]]
        if words and any(isinstance(one, int) and one >= words for one in ids):
            new[name] = named.get(name, words - 1 - i)
    return new
