"""The frozen target in the training step: features of packed conversations that do not see each other."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface

from ddtree.config import check
from ddtree.draft.dflash_config import FULL, SLIDING
from ddtree.errors import UnsupportedModelError, first_line
from ddtree.train.attention import Mask, MaskKind, attend, target_mask
from ddtree.train.packed_batch import PackedBatch
from ddtree.train.transformers_seams import RECURRENT_FIELDS, attention_of, refuse_other_scores

ATTENTION_NAMES: dict[MaskKind, str] = {"dense": "sdpa", "flex": "ddtree_packed_flex"}
# Fields of a config that change the logits after the head, with the value that changes nothing.
HEAD_FIELDS = {"logit_scale": 1.0, "logits_scaling": 1.0, "final_logit_softcapping": None}


def attend_packed(
    module: nn.Module,
    query: Tensor,  # [rows, num_heads, row_tokens, head_dim]
    key: Tensor,  # [rows, kv_heads, row_tokens, head_dim]
    value: Tensor,
    attention_mask: BlockMask,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`attend` as transformers calls an attention function; out [rows, row_tokens, num_heads, head_dim]."""
    refuse_other_scores(module, softcap, s_aux)
    return attend(query, key, value, attention_mask, scaling).transpose(1, 2), None


AttentionInterface.register(ATTENTION_NAMES["flex"], attend_packed)


class TargetFeatures(NamedTuple):
    """What one pass of the whole target gives.

    taps [rows, row_tokens, num_taps * hidden]; hidden [rows, row_tokens, hidden] after the final norm.
    """

    taps: Tensor
    hidden: Tensor


def target_refusal(config: Any) -> str | None:
    """Why a drafter cannot be trained here for a target with that transformers config, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model; decoder-only models are supported"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING})
    if other:
        return f"it has {', '.join(other)} layers, in which packed conversations would see each other"
    recurrent = [name for name in RECURRENT_FIELDS if getattr(config, name, None) is not None]
    if recurrent:
        return f"it keeps recurrent state ({', '.join(recurrent)}), which runs on from one to the next"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "it has chunked attention, whose chunks are counted from the row's start"
    return None


def head_refusal(head: Any, config: Any) -> str | None:
    """Why `hidden @ head.weight.T` is not what the model's logits are, or None."""
    if not isinstance(head, nn.Linear):
        return f"its output head is {type(head).__name__}, not a linear map"
    if head.bias is not None:
        return "its output head has a bias"
    for name, neutral in HEAD_FIELDS.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            return f"{name}={value!r} changes the logits after the output head"
    return None


class FrozenTarget:
    """A frozen transformers causal LM in its own dtype, whose layers are tapped with forward hooks.

    Args:
        model: a decoder-only causal LM on its device; its attention implementation is set for `kind`.
        tap_layer_ids: strictly increasing layers whose outputs are the drafter's features.
        kind: "dense" or "flex".

    Attributes:
        kind: how attention and the document mask run.
        head_weight: [vocab, hidden] the output head; hidden @ head_weight.T are logits.

    Raises:
        ConfigError: tap_layer_ids that the model does not have.
        UnsupportedModelError: a family whose packed conversations, head or layers cannot be handled.
    """

    def __init__(self, model: Any, tap_layer_ids: Sequence[int], kind: MaskKind) -> None:
        config = model.config
        _refuse(config, target_refusal(config) or head_refusal(model.get_output_embeddings(), config))
        self._model = model.requires_grad_(False).eval()
        self._set_attention(kind)
        self.kind = kind
        self._decoder = model.get_decoder()
        name, layers = _layer_list(self._decoder, config)
        _check_layer_ids(tap_layer_ids, len(layers))
        self._tap_layer_ids = tuple(tap_layer_ids)
        self._layers = layers
        self._shortened = _shortened(self._decoder, name, layers[: tap_layer_ids[-1] + 1])
        self._embedding = model.get_input_embeddings()
        self.head_weight: Tensor = model.get_output_embeddings().weight.detach()

    def with_kind(self, kind: MaskKind) -> FrozenTarget:
        """The same model with the other kind of attention."""
        other = copy.copy(self)
        other.kind = kind
        return other

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., hidden] of tokens [...], as the model's own embedding module makes them."""
        hidden: Tensor = self._embedding(tokens)
        return hidden

    def taps(self, batch: PackedBatch) -> Tensor:
        """Features [rows, row_tokens, num_taps * hidden]; layers after the last tapped one do not run."""
        return self._run(self._shortened, batch).taps

    def taps_and_hidden(self, batch: PackedBatch) -> TargetFeatures:
        """Features, and the final hidden states whose product with the head gives the target's logits."""
        return self._run(self._decoder, batch)

    def compile_layers(self) -> None:
        """Compile each decoder layer at its first use.

        Only its forward, so that the hooks, which are other ones in every layer and at every call, stay
        outside of the compiled code.
        """
        for layer in self._layers:
            layer.forward = torch.compile(layer.forward, dynamic=False)

    @torch.no_grad()
    def _run(self, decoder: Any, batch: PackedBatch) -> TargetFeatures:
        with (
            _tapped(self._layers, self._tap_layer_ids) as tapped,
            _no_autocast(batch.tokens.device),
            attention_of(self._model.config, ATTENTION_NAMES[self.kind]),
        ):
            output = decoder(
                input_ids=batch.tokens,
                attention_mask=self._mask(batch),
                position_ids=batch.positions,
                use_cache=False,
            )
        taps = torch.cat([tapped[i] for i in self._tap_layer_ids], -1)
        return TargetFeatures(taps, output.last_hidden_state)

    def _mask(self, batch: PackedBatch) -> Mask | dict[str, Mask]:
        """A 4-D mask, which transformers takes as it is; one a layer type where types differ."""
        config = self._model.config
        window = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            window = None
        types = sorted(set(getattr(config, "layer_types", None) or (FULL if window is None else SLIDING,)))
        masks = {name: target_mask(batch, self.kind, window if name == SLIDING else None) for name in types}
        return masks if len(masks) > 1 else masks[types[0]]

    def _set_attention(self, kind: MaskKind) -> None:
        try:
            self._model.set_attn_implementation(ATTENTION_NAMES[kind])
        except ValueError as error:
            _refuse(self._model.config, f"it cannot run with {ATTENTION_NAMES[kind]} ({first_line(error)})")


def _refuse(config: Any, reason: str | None) -> None:
    if reason:
        raise UnsupportedModelError(
            f"target {config.model_type} cannot be trained for here: {reason}; "
            "docs/training.md names other trainers"
        )


def _check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> None:
    is_known = all(0 <= i < num_layers for i in layer_ids)
    check(
        len(layer_ids) > 0 and is_known and list(layer_ids) == sorted(set(layer_ids)),
        "target_layer_ids", list(layer_ids), f"strictly increasing layers from 0 to {num_layers - 1}",
    )  # fmt: skip


def _layer_list(decoder: Any, config: Any) -> tuple[str, nn.ModuleList]:
    """Name and value of the decoder's list of layers."""
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == config.num_hidden_layers:
            return name, child
    raise UnsupportedModelError(
        f"target {config.model_type}: found no list of {config.num_hidden_layers} decoder layers to tap"
    )


def _shortened(decoder: nn.Module, name: str, layers: nn.ModuleList) -> nn.Module:
    """The decoder with another list of layers; all modules are shared with it."""
    short = copy.copy(decoder)
    # A shallow copy shares the table of submodules, in which the list is exchanged.
    short._modules = decoder._modules | {name: layers}
    return short


@contextmanager
def _tapped(layers: nn.ModuleList, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collects the outputs of these layers, each [rows, row_tokens, hidden], while it is open."""
    tapped: dict[int, Tensor] = {}

    def keep(layer_id: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            tapped[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[i].register_forward_hook(keep(i)) for i in layer_ids]
    try:
        yield tapped
    finally:
        for handle in handles:
            handle.remove()


def _no_autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, enabled=False)
