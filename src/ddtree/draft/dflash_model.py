"""The DFlash drafter (arXiv 2602.06036): context features in, draft logits of a whole block out.

A DFlash layer is a decoder layer over a KV cache. The cached prefix holds keys and values made from
the target's hidden states, and the block's own keys and values go to the slots after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.draft.context import DraftContext
from ddtree.draft.dflash_config import DFlashConfig, RopeConfig
from ddtree.layers.decoder import DecoderLayer, DecoderSpec, DecoderStack, Stack, StackFactory, rms_norm
from ddtree.layers.linear import GateUp, Linear
from ddtree.layers.rotary import RotaryTable
from ddtree.layers.window import Window

HAS_TRITON = find_spec("triton") is not None


class StackSegment(NamedTuple):
    """A run of neighbouring layers with the same mask inside the block."""

    stack: Stack
    layers: slice
    is_causal: bool


class DFlashDrafter:
    """Drafts the tokens after a root for one sequence.

    Args:
        weights: checkpoint tensors by z-lab name, shapes as `weight_shapes` says.
        config: shape of the drafter.
        dtype: dtype of weights, context and logits; that of the target's hidden states.
        device: where everything lives.
        max_positions: rotary positions 0 .. max_positions - 1 can be used, the block's included.
        embed: the target's embedding, tokens [n] int64 -> [n, hidden].
        head: the target's output head, hidden [n, hidden] -> logits [n, vocab].
        stack_factory: makes what runs the layers.

    Attributes:
        block_size: tokens of one pass, the root included.
        draft_depth: positions drafted a pass, block_size - 1.
        target_layer_ids: target layers whose outputs `append` takes, in this order.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: DFlashConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        embed: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        stack_factory: StackFactory = DecoderStack,
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        self.draft_depth = config.draft_depth
        self.target_layer_ids = config.target_layer_ids
        self.dtype = dtype
        self.device = device
        self.embed = embed
        self.head = head
        weights = {name: weight.to(device=device, dtype=dtype) for name, weight in weights.items()}
        self.rotary = rotary_table(config, max_positions, dtype, device)
        self.segments = tuple(build_segments(weights, config, self.rotary, stack_factory))
        self.fc = Linear(weights["fc.weight"])
        self.hidden_norm = weights["hidden_norm.weight"]
        self.norm = weights["norm.weight"]
        self.context_kv = stacked_kv(weights, config)
        k_norms = [weights[f"layers.{i}.self_attn.k_norm.weight"] for i in range(config.num_layers)]
        self.k_norms = torch.stack(k_norms).unsqueeze(1)  # [num_layers, 1, head_dim]
        mask_tokens = [config.mask_token_id] * config.draft_depth
        self.mask_tokens = torch.tensor(mask_tokens, device=device)  # [draft_depth]
        self.block_mask = torch.ones(config.block_size, config.block_size, dtype=torch.bool, device=device)

    def new_context(self, capacity: int) -> DraftContext:
        """An empty context with room for `capacity` tokens, the block included."""
        config = self.config
        return DraftContext(
            config.num_layers, config.num_kv_heads, capacity, config.head_dim, self.dtype, self.device
        )

    def draft_window(self, prefix_len: int) -> Window:
        """The block's window after `prefix_len` committed tokens with known hidden states."""
        positions = torch.arange(prefix_len, prefix_len + self.block_size, device=self.device)
        return Window.at(prefix_len, positions, self.block_mask)

    def append(self, context: DraftContext, taps: Tensor, window: Window) -> None:
        """Add committed tokens to the context (DFlash paper, KV injection).

        Args:
            context: written at the window's slots; rows past the committed ones are covered later.
            taps: [n, num_taps * hidden] outputs of the target's `target_layer_ids`, in that order.
            window: positions and slots of the n tokens; its mask is not used.
        """
        config, n = self.config, taps.shape[0]
        features = rms_norm(self.fc(taps), self.hidden_norm, config.rms_norm_eps)  # [n, hidden]
        kv = self.context_kv(features).view(n, config.num_layers, 2, config.num_kv_heads, config.head_dim)
        if kv.is_cuda and HAS_TRITON:
            from ddtree.layers.triton_commit import write_context

            write_context(
                kv, self.k_norms, self.rotary.cos, self.rotary.signed_sin, config.rms_norm_eps,
                window.positions, window.prefix_len, context.kv_data,
            )  # fmt: skip
            return
        keys = F.rms_norm(kv[:, :, 0], (config.head_dim,), eps=config.rms_norm_eps) * self.k_norms
        keys = self.rotary.rotate(keys.flatten(1, 2), *self.rotary.at(window.positions))
        rows = torch.stack((keys.view(kv[:, :, 1].shape), kv[:, :, 1]), 2)
        rows = rows.permute(1, 2, 3, 0, 4)  # [num_layers, 2, num_kv_heads, n, head_dim]
        window.write(context.kv_data, rows)

    def draft_logits(self, root_token: Tensor, context: DraftContext, window: Window) -> Tensor:
        """Logits of the positions after the root, [draft_depth, vocab], from one pass over the whole block.

        Args:
            root_token: [1] int64, the last committed token, whose hidden state is not known yet.
            context: committed tokens; the window's slots are overwritten.
            window: the block's positions and slots, its `tree_mask` all ones (see `draft_window`).
        """
        hidden = self.embed(torch.cat((root_token, self.mask_tokens)))  # [block_size, hidden]
        for stack, layers, is_causal in self.segments:
            seen = replace(window, tree_mask=None) if is_causal else window
            hidden, _ = stack.forward(hidden, seen, context.kv_data[layers])
        return self.head(rms_norm(hidden[1:], self.norm, self.config.rms_norm_eps))


def weight_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a DFlash checkpoint, by its z-lab name."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.num_taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    if config.attention_bias:
        projections = [f"self_attn.{kind}_proj" for kind in "qkvo"]
        layer |= {f"{name}.bias": layer[f"{name}.weight"][:1] for name in projections}
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def fused(weights: Mapping[str, Tensor], names: Sequence[str]) -> Linear:
    """One linear map from several that read the same input; biases where the checkpoint has them."""
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    weight = torch.cat([weights[f"{name}.weight"] for name in names])
    return Linear(weight, torch.cat(biases) if biases else None)


def stacked_kv(weights: Mapping[str, Tensor], config: DFlashConfig) -> Linear:
    """Keys and values of all layers from the context features in one map."""
    layers = range(config.num_layers)
    return fused(weights, [f"layers.{i}.self_attn.{kind}_proj" for i in layers for kind in "kv"])


def build_layer(weights: Mapping[str, Tensor], i: int) -> DecoderLayer:
    attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
    return DecoderLayer(
        input_norm=weights[f"layers.{i}.input_layernorm.weight"],
        qkv=fused(weights, [f"{attention}.{kind}_proj" for kind in "qkv"]),
        q_norm=weights[f"{attention}.q_norm.weight"],
        k_norm=weights[f"{attention}.k_norm.weight"],
        out=fused(weights, [f"{attention}.o_proj"]),
        post_norm=weights[f"layers.{i}.post_attention_layernorm.weight"],
        gate_up=GateUp(torch.cat([weights[f"{mlp}.{kind}_proj.weight"] for kind in ("gate", "up")])),
        down=fused(weights, [f"{mlp}.down_proj"]),
    )


def build_segments(
    weights: Mapping[str, Tensor], config: DFlashConfig, rotary: RotaryTable, stack_factory: StackFactory
) -> Iterator[StackSegment]:
    for is_causal, group in groupby(range(config.num_layers), lambda i: config.causal_layers[i]):
        ids = list(group)
        layers = slice(ids[0], ids[-1] + 1)
        spec = DecoderSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            sliding_windows=config.sliding_windows[layers],
        )
        stack = stack_factory(spec, [build_layer(weights, i) for i in ids], rotary)
        yield StackSegment(stack, layers, is_causal)


def rotary_table(
    config: DFlashConfig, max_positions: int, dtype: torch.dtype, device: torch.device
) -> RotaryTable:
    """Rotary tables with the config's scaling rule applied by transformers' own functions."""
    inv_freq, scaling = inverse_frequencies(config, config.rope)
    return RotaryTable(inv_freq.to(device), max_positions, dtype, scaling)


def inverse_frequencies(config: DFlashConfig, rope: RopeConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32 and the factor on cosine and sine."""
    if rope.rope_type == "default":
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return rope.theta**-exponents, 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf_config = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": rope.rope_type, "rope_theta": rope.theta, **dict(rope.scaling)},
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope.rope_type](hf_config, torch.device("cpu"))
    return inv_freq.float(), float(scaling)
