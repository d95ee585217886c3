"""Any transformers causal LM as a target, on its own modules, with our static cache and explicit masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ddtree.draft.load import TargetInfo
from ddtree.engine.kv_cache import KVCache
from ddtree.engine.protocols import TargetOutput
from ddtree.errors import UnsupportedModelError
from ddtree.layers.window import Window

ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention")
LENGTH_DEPENDENT_ROPE_TYPES = ("dynamic", "longrope")
RECURRENT_FIELDS = ("linear_num_value_heads", "ssm_state_size", "state_size", "mamba_d_state", "conv_kernel")


def target_unsupported_reason(config: Any) -> str | None:
    """Why a transformers config cannot be verified with draft trees here, or None."""
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(kinds.difference(ATTENTION_LAYER_TYPES))
    if other:
        return f"it has {', '.join(other)} layers, whose state cannot branch into a tree here"
    recurrent = [name for name in RECURRENT_FIELDS if getattr(config, name, None) is not None]
    if recurrent:
        return f"it keeps recurrent state ({', '.join(recurrent)}), which cannot branch into a tree here"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; decoder-only models are supported"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "it has multi-head latent attention, whose cache this engine does not hold"
    sliding = getattr(config, "sliding_window", None)
    if sliding is not None and not kinds and getattr(config, "use_sliding_window", True):
        return f"every layer has a sliding window of {sliding} tokens without layer_types in its config"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "it has chunked attention"
    if getattr(config, "max_position_embeddings", None) is None:
        return "its config does not say how long a text may be (max_position_embeddings)"
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if rope_type in LENGTH_DEPENDENT_ROPE_TYPES:
        # A tree reaches further than plain decoding does, and would switch frequencies earlier.
        return f"its rotary frequencies depend on the length of the text (rope_type {rope_type})"
    return None


# transformers is not followed by mypy, so its class counts as Any there.
class _WindowCache(Cache):  # type: ignore[misc,unused-ignore]
    """Our static cache behind the transformers interface: a layer writes its window and reads everything."""

    def __init__(self, kv_cache: KVCache, window: Window) -> None:
        super().__init__(layers=[])
        self._kv_cache = kv_cache
        self._window = window

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [1, kv_heads, n, head_dim] at the window's slots; return all key slots of the layer."""
        kv = self._kv_cache.data[layer_idx]
        self._window.write(kv[0], key_states[0])
        self._window.write(kv[1], value_states[0])
        extent = self._window.kv_extent
        return kv[0:1, :, :extent], kv[1:2, :, :extent]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._window.kv_extent - self._window.num_tokens


class StockTarget:
    """A transformers model as it is; its layers are tapped with forward hooks.

    Args:
        model: a decoder-only causal LM in inference mode, on its device.
        dtype, device: where and how it runs.
    """

    kernels_per_layer: int | None = None
    supports_graphs = False

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = model.config
        self.model, self.dtype, self.device = model, dtype, device
        self.info = TargetInfo(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            model_type=config.model_type,
            max_positions=config.max_position_embeddings,
        )
        self._layers = _decoder_layers(model, self.info.num_layers)
        self._embedding, self._head = model.get_input_embeddings(), model.get_output_embeddings()
        if self._head is None:
            raise UnsupportedModelError(
                f"target {config.model_type} has no output head; a causal LM is needed"
            )
        self._tapped: dict[int, Tensor] = {}
        self._hooked: set[int] = set()
        self._kinds = sorted(set(getattr(config, "layer_types", None) or ()))

    def new_kv_cache(self, capacity_tokens: int) -> KVCache:
        """A cache for one sequence of that many tokens."""
        config = self.model.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return KVCache(self.info.num_layers, heads, capacity_tokens, head_dim, self.dtype, self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [n, hidden] of tokens [n]."""
        hidden: Tensor = self._embedding(tokens)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of normed hidden states [n, hidden], scaled and capped as the model does it."""
        config = self.model.config
        logits: Tensor = self._head(hidden)
        if getattr(config, "logit_scale", None) is not None:  # Cohere
            logits = logits * config.logit_scale
        if getattr(config, "logits_scaling", None) is not None:  # Granite
            logits = logits / config.logits_scaling
        cap = getattr(config, "final_logit_softcapping", None)  # Gemma
        return cap * torch.tanh(logits / cap) if cap is not None else logits

    def forward(
        self,
        tokens: Tensor,
        window: Window,
        kv_cache: KVCache,
        tap_layer_ids: Sequence[int],
        *,
        last_only: bool = False,
    ) -> TargetOutput:
        """Run tokens [n] as a window over the cache."""
        self._tap(tap_layer_ids)
        output = self.model(
            input_ids=tokens[None],
            attention_mask=self._attention_mask(window),
            # A tree at the end of the context reaches past it; those nodes are cut from the text.
            position_ids=window.positions.clamp(max=self.info.max_positions - 1)[None],
            past_key_values=_WindowCache(kv_cache, window),
            use_cache=True,
            logits_to_keep=1 if last_only else 0,
        )
        taps = [self._tapped[i][0] for i in tap_layer_ids]  # each [n, hidden]
        self._tapped.clear()
        return TargetOutput(output.logits[0], torch.cat(taps, -1) if taps else None)

    def _attention_mask(self, window: Window) -> Tensor | dict[str, Tensor]:
        """A 4D additive mask, which transformers takes as it is; one a layer type where types differ."""
        if not self._kinds:
            return window.additive_mask(self.dtype)[None, None]
        sizes = {
            "full_attention": None,
            "sliding_attention": getattr(self.model.config, "sliding_window", None),
        }
        masks = {kind: window.additive_mask(self.dtype, sizes[kind])[None, None] for kind in self._kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _tap(self, layer_ids: Sequence[int]) -> None:
        """Keep the outputs of these layers from now on."""
        for i in set(layer_ids) - self._hooked:
            self._layers[i].register_forward_hook(self._keep(i))
            self._hooked.add(i)

    def _keep(self, layer_id: int) -> Any:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            self._tapped[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook


def _decoder_layers(model: Any, num_layers: int) -> Any:
    """The list of decoder layers of a causal LM, wherever its family keeps it."""
    # Without the search in the decoder, vision towers and lists of experts come first in some families.
    for module in (model.get_decoder() or model).modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedModelError(
        f"target {model.config.model_type}: found no list of {num_layers} decoder layers to tap"
    )
