"""Any transformers causal LM decoding one token in each of many slots at a time, over one static cache.

The model runs on its own modules. Two seams of transformers are used: a `Cache` that writes each
slot's keys and values at the slot's own position, and an attention function that reads them there.
The positions reach it as the attention mask, which transformers passes on as it is when it has four
dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from ddtree.config import check
from ddtree.errors import UnsupportedModelError
from ddtree.train.transformers_seams import RECURRENT_FIELDS, attention_of, refuse_other_scores
from ddtree.tree.triton_choice import prefers_triton

ATTENTION = "ddtree_batch_decode"
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


class BatchDecoder:
    """One decode step for all slots at a time.

    Args:
        model: a decoder-only causal LM in inference mode, on its device.
        slots: rows that decode side by side.
        max_tokens: longest sequence of a slot.

    Raises:
        UnsupportedModelError: the model's layers cannot decode here.
        ConfigError: `max_tokens` is beyond the model's positions.
    """

    def __init__(self, model: Any, slots: int, max_tokens: int) -> None:
        config = model.config
        reason = decode_unsupported_reason(config)
        if reason is None and not model._supports_attention_backend:
            reason = "transformers does not let its attention be replaced"
        if reason is not None:
            raise UnsupportedModelError(
                f"target {config.model_type} cannot generate a corpus here: {reason}; "
                "docs/training.md names other trainers"
            )
        check(
            1 <= max_tokens <= config.max_position_embeddings, "max_tokens", max_tokens,
            f"from 1 to the model's {config.max_position_embeddings} positions",
            "shorten max_prompt_tokens or max_answer_tokens",
        )  # fmt: skip
        self.model, self.slots, self.max_tokens = model, slots, max_tokens
        self.device, self.vocab_size = model.device, config.vocab_size
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, slots, heads, max_tokens, head_dim)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=self.device)
        self._rows = torch.arange(slots, device=self.device)  # [slots]

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits [slots, vocab] after `tokens` [slots] int64 at `positions` [slots] int64.

        A row's keys and values are written at its position, and it attends to positions 0 to its own.
        Nothing is read back from the device.
        """
        cache = _SlotCache(self.cache, self._rows, positions)
        with attention_of(self.model.config, ATTENTION):
            output = self.model(
                input_ids=tokens[:, None],
                attention_mask=positions[:, None, None, None],
                position_ids=positions[:, None],
                past_key_values=cache,
                use_cache=True,
            )
        logits: Tensor = output.logits[:, -1]
        return logits


def decode_unsupported_reason(config: Any) -> str | None:
    """Why a transformers config cannot be decoded in slots here, or None."""
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other:
        return f"it has {', '.join(other)} layers; models with full attention in every layer are supported"
    recurrent = [name for name in RECURRENT_FIELDS if getattr(config, name, None) is not None]
    if recurrent:
        return f"it keeps recurrent state ({', '.join(recurrent)})"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; decoder-only models are supported"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "it has multi-head latent attention, whose cache is not held here"
    sliding = getattr(config, "sliding_window", None)
    if sliding is not None and getattr(config, "use_sliding_window", True):
        return f"its layers have a sliding window of {sliding} tokens"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "it has chunked attention"
    if getattr(config, "max_position_embeddings", None) is None:
        return "its config does not say how long a text may be (max_position_embeddings)"
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope_type in LENGTH_DEPENDENT_ROPE_TYPES:
        return f"its rotary frequencies depend on the length of the text (rope_type {rope_type})"
    return None


def graph_unsupported_reason(config: Any) -> str | None:
    """Why a step of the model cannot be captured in a CUDA graph, or None."""
    experts = [name for name in EXPERT_FIELDS if (getattr(config, name, None) or 0) > 1]
    return f"it routes tokens to experts ({experts[0]}) with the host's help" if experts else None


def decode_attention(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Attention of one token a slot over its own past.

    Args:
        query: [slots, num_heads, head_dim].
        key, value: [slots, kv_heads, max_tokens, head_dim].
        positions: [slots] int64; slot b attends to keys 0..positions[b].
        scale: of the scores.

    Returns:
        [slots, num_heads, head_dim].
    """
    if prefers_triton(query):
        from ddtree.train.triton_decode_attention import HEAD_DIMS, triton_decode_attention

        if query.shape[-1] in HEAD_DIMS:
            return triton_decode_attention(query, key, value, positions, scale)
    return decode_attention_torch(query, key, value, positions, scale)


def decode_attention_torch(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float
) -> Tensor:
    """`decode_attention` over all keys with a mask."""
    slots, num_heads, head_dim = query.shape
    kv_heads, max_tokens = key.shape[1:3]
    visible = torch.arange(max_tokens, device=key.device) <= positions[:, None]  # [slots, max_tokens]
    # The query heads of a group read the same keys, so they take the place of query tokens.
    grouped = query.reshape(slots, kv_heads, num_heads // kv_heads, head_dim)
    out = scaled_dot_product_attention(grouped, key, value, visible[:, None, None], scale=scale)
    return out.reshape(slots, num_heads, head_dim)


# transformers is not followed by mypy, so its class counts as Any there.
class _SlotCache(Cache):  # type: ignore[misc,unused-ignore]
    """Our static cache behind the transformers interface: each slot writes at its own position."""

    def __init__(self, data: Tensor, rows: Tensor, positions: Tensor) -> None:
        super().__init__(layers=[])
        self._data, self._rows, self._positions = data, rows, positions

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [slots, kv_heads, 1, head_dim] at the slots' positions; return the layer's whole cache."""
        key, value = self._data[layer_idx]  # each [slots, kv_heads, max_tokens, head_dim]
        key[self._rows, :, self._positions] = key_states[:, :, 0]
        value[self._rows, :, self._positions] = value_states[:, :, 0]
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._data.shape[4]) - 1


def attend_slots(
    module: Any,
    query: Tensor,  # [slots, num_heads, 1, head_dim]
    key: Tensor,  # [slots, kv_heads, max_tokens, head_dim]
    value: Tensor,
    attention_mask: Tensor,  # [slots, 1, 1, 1] int64: the positions
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`decode_attention` as transformers calls an attention function; out [slots, 1, num_heads, head_dim]."""
    refuse_other_scores(module, softcap, s_aux)
    positions = attention_mask[:, 0, 0, 0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_attention(query[:, :, 0], key, value, positions, scale)[:, None], None


AttentionInterface.register(ATTENTION, attend_slots)
