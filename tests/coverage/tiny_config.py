"""Make any transformers config tiny by the names of its fields, without a table of models.

Sizes are only ever reduced. Integers that stand for a position in the text (windows, chunks,
original context lengths) become so small that the sweep's prompts exceed them. Of per-layer lists,
one layer of each kind stays.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

VOCAB_SIZE = 320
MAX_POSITIONS = 512
WINDOW = 24
_HEADS, _KV_HEADS = 4, 2
_HIDDEN = 64
_LAYERS = "num_hidden_layers|num_layers|n_layers?|(en|de)coder_layers|num_(en|de)coder_layers"
_KV = "num_key_value_heads|num_kv_heads|num_query_groups|.*_key_value_heads|multi_query_group_num"

# The first that matches the whole name says how large the field may be.
_RULES: tuple[tuple[str, int], ...] = (
    (r"original_max_position_embeddings", 64),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len(gth)?|context_length", MAX_POSITIONS),
    (r"max_(source|target)_positions|model_max_length|seq_length", MAX_POSITIONS),
    (r".*window(_size)?|.*chunk(_size|_length|_len)?|floor_scale|local_attention", WINDOW),
    (r"block_size|index_(block_size|topk)|.*max_distance", WINDOW),
    (r"(mamba|linear|ssm)_.*n?_?heads|n_mamba_heads|mamba_n_heads", 8),
    (r"(mamba|ssm)_?n?_groups?|mamba_ngroups|n_groups", 1),
    (r"mamba_d_ssm", 2 * _HIDDEN),
    (r".*vocab(.*size.*)?", VOCAB_SIZE),
    (_KV, _KV_HEADS),
    (r".*rope_head_dim|rotary_dim|.*rotary.*_dim", 8),
    (r"qk_head_dim", 24),
    (r"v_head_dim", 12),
    (r".*(head_dim|d_head|dim_head|head_size|kv_channels|headdim)|d_kv|linear_.*_head_dim", 16),
    # With few heads many index scores are 0, and which of equal ones are taken follows the length
    # of the prompt.
    (r"index_n_heads", 16),
    (r"(.*_)?(n|num)_?(attention_)?heads?|.*attention_heads", _HEADS),
    (r"num_kv_shared_layers", 2),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"max_window_layers", 1),
    (r".*(per_tok(en)?|topk_method|moe_k|moe_topk|top_?k_experts|router_top_?k)", 2),
    (r"topk_group|n(um)?_shared_experts|moe_num_shared_experts", 1),
    (r"n_group|num_expert_groups?", 2),
    (r".*(experts|expert_num|num_experts)", 8),
    (r".*(intermediate|ffn|ff_dim|dim_ff|d_inner|dff|d_ff|feed_forward).*", 96),
    (r".*rank", 16),
    (r".*_offset", 1),
    (r"(mamba_|ssm_)?(d_)?state(_size)?|mamba_d_state|ssm_state_size", 16),
    (r".*(pattern|period|interval|every_n_layers|layer_step|sparse_step)", 2),
    (r".*(hidden_size|d_model|n_embd|dim_model|embed_proj_dim|embedding_size|lru_width)", _HIDDEN),
    (r"(d|emb|embedding|hidden|input_embedding|output_embedding)_?(dim|size)|dim", _HIDDEN),
    (r".*hidden_size_per_layer.*|.*embed.*_dim", 16),
)
# Flags without which the entry would not be what its name says.
_FLAGS = {"is_decoder": True, "use_sliding_window": True}
# What default configs leave open.
_UNSET = {
    "head_dim": 16,
    "attention_head_dim": 16,
    "num_key_value_heads": _KV_HEADS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The default config of an entry, made tiny. Raises what its class does."""
    config_class = CONFIG_MAPPING[model_type]
    before = config_class().to_dict()
    return config_class(**_changed(before, shrunk(before)))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a config needs. Some configs reject fields that they derive."""
    changed = {}
    for name, value in after.items():
        if value != before.get(name):
            is_config = isinstance(value, Mapping) and "_name_or_path" in value
            changed[name] = _changed(before[name], value) if is_config else value
    return changed


def shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config, or of one that is in it, made small."""
    # Names of classes are of no matter, and keyed by numbers.
    fields = {k: copy.deepcopy(v) for k, v in fields.items() if k not in ("id2label", "label2id")}
    names = [name for name in fields if re.fullmatch(_LAYERS, name) and _is_count(fields[name])]
    num_layers = max((fields[name] for name in names), default=0)
    sections = _sections(fields, num_layers)
    chosen = _layers_of_sections(fields, sections) or _layers_of(fields, num_layers)
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None and name in _UNSET:
            small[name] = _UNSET[name]
        elif name == "default_language" and value is None:
            small[name] = fields["languages"][0]
        elif name == "layer_types" and value is None:
            small[name] = ["full_attention"] * len(chosen)
        elif name in names:
            small[name] = min(value, len(chosen))
        elif name in sections:
            small[name] = len(set(sections[name]) & set(chosen))
        elif "window" in name and value == fields.get("max_position_embeddings"):
            small[name] = MAX_POSITIONS  # which hides nothing
        elif name in _FLAGS and isinstance(value, bool):
            small[name] = _FLAGS[name]
        elif "token_id" in name or name.endswith("_index"):
            small[name] = _token(name, value)
        else:
            small[name] = _small(name, value, chosen, fields)
    if "kv_n_heads" in fields:
        small |= {"rope_theta": 10_000.0, "clip_qkv": 8}  # the code counts on them
    if "expand" in fields and "num_heads" in fields:
        small["num_heads"] = small["expand"] * small["hidden_size"] // small["head_dim"]
    if {"attention_hidden_size", "num_attention_heads"} <= fields.keys():
        # Of both what a layer is given and the embeddings.
        factor = fields["attention_hidden_size"] // fields["hidden_size"]
        small["attention_hidden_size"] = factor * small["hidden_size"]
        small["attention_head_dim"] = small["attention_hidden_size"] // small["num_attention_heads"]
    small |= _both_kinds(fields)
    if "qk_rope_head_dim" in fields and "head_dim" in fields:
        small["head_dim"] = small["qk_rope_head_dim"]  # of the positions' part
    if "qk_nope_head_dim" in fields and "swa_head_dim" in fields:
        small["swa_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    if fields.get("rope_parameters") == {} and fields.get("layer_types"):
        rope = {"rope_type": "default", "rope_theta": 10_000.0}
        small["rope_parameters"] = {kind: dict(rope) for kind in fields["layer_types"]}
    heads = fields.get("num_attention_heads")
    if heads is not None and fields.get("num_key_value_heads") == heads:
        small["num_key_value_heads"] = small["num_attention_heads"]  # as many as before
    return small


def _both_kinds(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of hybrid models whose default config has one kind of layers alone: one of each."""
    kinds = set(fields.get("layer_types") or ())
    if "conv_L_cache" in fields:
        found = {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]}
    elif kinds == {"linear_attention"} and "num_attention_heads" in fields:
        found = {"layer_types": ["linear_attention", "full_attention"]}
    elif "attn_layer_indices" in fields:
        found = {"attn_layer_indices": [1]}
    else:
        return {}
    return {"num_hidden_layers": 2} | {k: v for k, v in found.items() if k in fields}


def _small(name: str, value: Any, chosen: list[int], fields: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        if all(str(key).isdecimal() for key in value):  # of single layers
            kept = {key: part for key, part in value.items() if int(key) in chosen}
            return {str(chosen.index(int(key))): shrunk(part) for key, part in kept.items()}
        return shrunk(value)
    if isinstance(value, (list, tuple)):
        return _small_list(name, list(value), chosen, fields)
    if _is_count(value):
        return _small_number(name, value)
    return value


def _small_number(name: str, value: int) -> int:
    for pattern, largest in _RULES:
        if re.fullmatch(pattern, name):
            return min(value, largest)
    return value


def _small_list(
    name: str, values: list[Any], chosen: list[int], fields: Mapping[str, Any]
) -> list[Any]:
    if _is_per_layer(values, fields):
        values = [values[i] for i in chosen]
    elif name.endswith(("layers", "layer_ids", "idxs")) and all(map(_is_count, values)):
        return [chosen.index(value) for value in values if value in chosen]
    return [
        _small_number(name, value)
        if _is_count(value)
        else [value[0], max(1, len(chosen) // len(value[0]))]  # kinds of layers, and how often
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], list)
        else value
        for value in values
    ]


def _layers_of(fields: Mapping[str, Any], num_layers: int) -> list[int]:
    """The first layer of each kind, twice over if some use the keys of others; two at least."""
    lists = [
        list(map(repr, value))
        for value in fields.values()
        if isinstance(value, (list, tuple)) and _is_per_layer(value, fields)
    ]
    kinds: dict[tuple[str, ...], list[int]] = {}
    for layer in range(num_layers):
        kinds.setdefault(tuple(values[layer] for values in lists), []).append(layer)
    # Lists of the numbers of those layers that are unlike the others.
    marked = {
        layer
        for name, value in fields.items()
        if name.endswith(("layers", "layer_ids", "idxs")) and isinstance(value, (list, tuple))
        for layer in value[:1]
        if not _is_per_layer(value, fields) and _is_count(layer) and layer < num_layers
    }
    each = 2 if fields.get("num_kv_shared_layers") or len(kinds) == 1 else 1
    first = {layer for layers in kinds.values() for layer in layers[:each]} | marked
    return sorted(first)[:8]


def _sections(fields: Mapping[str, Any], num_layers: int) -> dict[str, range]:
    """The layers of each section, by the field that says how many these are."""
    counts = {
        name: value
        for name, value in fields.items()
        if re.fullmatch(r"n(um)?_\w+_layers", name)
        and not re.fullmatch(_LAYERS, name)
        and _is_count(value)
    }
    if len(counts) < 2 or sum(counts.values()) != num_layers:
        return {}
    ends = accumulate(counts.values())
    return {name: range(end - counts[name], end) for name, end in zip(counts, ends, strict=True)}


def _layers_of_sections(fields: Mapping[str, Any], sections: Mapping[str, range]) -> list[int]:
    """The first layer of each kind in each section; if attention and MLP are layers of their own,
    each with the other."""
    kinds = fields.get("layer_types")
    size = 2 if kinds and set(kinds[1::2]) == {"mlp"} else 1
    first: dict[tuple[str, str], int] = {}
    for name, section in sections.items():
        for layer in section[::size]:
            first.setdefault((name, kinds[layer] if kinds else ""), layer)
    return sorted(layer + part for layer in first.values() for part in range(size))


def _is_per_layer(values: Any, fields: Mapping[str, Any]) -> bool:
    sizes = {v for name, v in fields.items() if re.fullmatch(_LAYERS, name)}
    return len(values) > 1 and len(values) in sizes


def _token(name: str, value: Any) -> Any:
    """No token ends a text; the others are in the vocabulary."""
    if isinstance(value, (list, tuple)):
        return None if name == "eos_token_id" else [_token(name, part) for part in value]
    if name == "eos_token_id" or not _is_count(value):
        return None
    return 0 if name == "pad_token_id" else min(value, VOCAB_SIZE - 1)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
