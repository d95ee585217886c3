"""Shapes for the cost model from the `config.json` of a target and of its DFlash drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ddtree.config import check, is_int
from ddtree.errors import ConfigError, short_repr
from ddtree.tree.cost_catalogue import (
    GPUS,
    PAIRS,
    dense_model,
    dflash,
    gated_mlp_weights,
    gqa_weights,
)
from ddtree.tree.cost_model import DraftPair, ExpertShape, GpuSpec, ModelShape

MAX_SIZE = 1 << 40
# What marks a model whose passes cost otherwise than those of dense layers and routed experts.
OTHER_KINDS = (
    "kv_lora_rank", "linear_num_value_heads", "mamba_d_state", "mamba_num_heads", "hybrid_override_pattern",
    "linear_attn_config", "quantization_config", "text_config", "n_shared_experts", "first_k_dense_replace",
    "shared_expert_intermediate_size",
)  # fmt: skip


def known_pair(name: str) -> DraftPair | None:
    """The catalogue's pair whose target is so called, whatever the case, folder or `-Instruct` after it."""
    bare = _bare(name).removesuffix("-instruct")
    return next((pair for target, pair in PAIRS.items() if _bare(target) == bare), None)


def known_gpu(name: str) -> GpuSpec | None:
    """The catalogue's GPU that a driver's or a user's name means, such as `NVIDIA H200`."""
    words = _bare(name)
    found = [gpu for gpu in GPUS.values() if all(word in words for word in _bare(gpu.name).split("-"))]
    return found[0] if len(found) == 1 else None


def _bare(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower().replace(" ", "-")


def pair_of_configs(name: str, target: Mapping[str, Any], drafter: Mapping[str, Any]) -> DraftPair:
    """The pair by its two configs.

    Raises:
        ConfigError: a size that is missing or no number, or a kind of layer that is not known here.
    """
    shape = model_of_config(name, target)
    taps = drafter.get("dflash_config", {}).get("target_layer_ids", ())
    check(isinstance(taps, list | tuple) and len(taps) > 0, "target_layer_ids", taps, "layers of the target")
    heads = _size(drafter, "num_attention_heads")
    head_dim = _size(drafter, "head_dim", max(1, _size(drafter, "hidden_size") // heads))
    layers = dflash(
        shape, _size(drafter, "num_hidden_layers"), heads, _size(drafter, "num_key_value_heads", heads),
        head_dim, _size(drafter, "intermediate_size"), taps=len(taps),
    )  # fmt: skip
    return DraftPair(shape, layers, _size(drafter, "block_size"))


def model_of_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """A target with grouped-query attention in all layers, dense or with routed experts, in 16 bits.

    Raises:
        ConfigError: as `pair_of_configs`.
    """
    layer_types = set(config.get("layer_types") or ())
    other = next((kind for kind in OTHER_KINDS if config.get(kind)), None)
    other = other or next(iter(sorted(layer_types - {"full_attention"})), None)
    if other is not None:
        raise ConfigError(
            f"{short_repr(name)} has {other}, of which the cost model cannot read the sizes: name a pair it "
            f"knows ({', '.join(PAIRS)}), or measure there with ddtree bench"
        )
    layers, hidden = _size(config, "num_hidden_layers"), _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    kv_heads, head_dim = (
        _size(config, "num_key_value_heads", heads),
        _size(config, "head_dim", hidden // heads),
    )
    dense = dense_model(
        name, layers, hidden, heads, kv_heads, head_dim, _size(config, "intermediate_size"),
        _size(config, "vocab_size"), ties_embedding=config.get("tie_word_embeddings") is True,
    )  # fmt: skip
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    if not num_experts:
        return dense
    width = _size(config, "moe_intermediate_size", _size(config, "intermediate_size"))
    experts = ExpertShape(
        layers, int(num_experts), _size(config, "num_experts_per_tok"), gated_mlp_weights(hidden, width), 2
    )
    attention = gqa_weights(hidden, heads, kv_heads, head_dim)
    return replace(dense, dense_weights=layers * (attention + hidden * int(num_experts)), experts=experts)


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    allowed = is_int(value) and 1 <= int(value or 0) <= MAX_SIZE
    check(allowed, f"config.json has {name}", value, "a whole number from 1")
    return int(value or 0)
