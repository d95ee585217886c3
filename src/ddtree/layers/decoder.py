"""A stack of Llama-shaped decoder layers over a static KV cache, in plain torch operations.

Target (Llama, Qwen2, Qwen3) and DFlash drafter are the same stack: pre-norm, grouped-query
attention with optional norms on query and key heads, SwiGLU. Only the mask of the window differs.
This is the CPU path and the reference of the Triton path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.layers.linear import GateUp, Linear
from ddtree.layers.rotary import RotaryTable
from ddtree.layers.window import Window


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape of a stack; `sliding_windows` holds one entry a layer, None for full attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    sliding_windows: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer.

    Attributes:
        input_norm, post_norm: [hidden].
        qkv: hidden -> (num_heads + 2 * num_kv_heads) * head_dim, query heads first.
        q_norm, k_norm: [head_dim], or None where the family has no head norms.
        out: num_heads * head_dim -> hidden.
        gate_up: hidden -> 2 * intermediate, gate first.
        down: intermediate -> hidden.
    """

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: GateUp
    down: Linear


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return F.rms_norm(x, weight.shape, weight, eps)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention of grouped query heads, a group folded into the rows of its key head.

    Args:
        query: [n, num_heads, head_dim].
        key, value: [num_kv_heads, kv_extent, head_dim].
        mask: [group * n, kv_extent] additive, the window's mask repeated for each head of a group.

    Returns: [n, num_heads * head_dim].
    """
    n, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[0]
    group = num_heads // num_kv_heads
    folded = query.view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    folded = folded.reshape(1, num_kv_heads, group * n, head_dim)
    out = F.scaled_dot_product_attention(folded, key[None], value[None], attn_mask=mask[None, None])
    out = out.view(num_kv_heads, group, n, head_dim).permute(2, 0, 1, 3)
    return out.reshape(n, num_heads * head_dim)


class Stack(Protocol):
    """What runs layers; `DecoderStack` in plain torch is the reference."""

    @property
    def kernels_per_layer(self) -> int | None: ...

    def forward(
        self, hidden: Tensor, window: Window, kv_data: Tensor, tap_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]: ...


StackFactory = Callable[[DecoderSpec, Sequence[DecoderLayer], RotaryTable], Stack]


class DecoderStack:
    """Runs the layers over a window; keys and values are written to the cache on the way.

    Args:
        spec: shape of the stack.
        layers: weights, first layer first.
        rotary: tables up to the longest position used.
    """

    def __init__(self, spec: DecoderSpec, layers: Sequence[DecoderLayer], rotary: RotaryTable) -> None:
        self.spec = spec
        self.layers = tuple(layers)
        self.rotary = rotary

    @property
    def kernels_per_layer(self) -> int | None:
        """Kernels that a layer launches; None where a library decides."""
        return None

    def forward(
        self, hidden: Tensor, window: Window, kv_data: Tensor, tap_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run the stack.

        Args:
            hidden: [n, hidden] embeddings of the window's tokens.
            window: their positions, slots and mask.
            kv_data: [num_layers, 2, num_kv_heads, capacity, head_dim], written at the window's slots.
            tap_layer_ids: layers whose outputs are wanted (layer id i = output of layer i).

        Returns: hidden [n, hidden] before the final norm, and the taps [n, num_taps * hidden] or None.
        """
        cos, signed_sin = self.rotary.at(window.positions)  # [n, 1, head_dim]
        masks = self._masks(window, hidden.dtype)
        taps: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            mask = masks[self.spec.sliding_windows[i]]
            attended = self._attend(layer, hidden, window, kv_data[i], mask, (cos, signed_sin))
            hidden = layer.out.add(attended, hidden)
            normed = rms_norm(hidden, layer.post_norm, self.spec.rms_norm_eps)
            hidden = layer.down.add(layer.gate_up.swiglu(normed), hidden)
            if i in tap_layer_ids:
                taps.append(hidden)
        return hidden, torch.cat(taps, -1) if taps else None

    def _masks(self, window: Window, dtype: torch.dtype) -> dict[int | None, Tensor]:
        group = self.spec.num_heads // self.spec.num_kv_heads
        kinds = set(self.spec.sliding_windows)
        return {kind: window.additive_mask(dtype, kind).repeat(group, 1) for kind in kinds}

    def _attend(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        window: Window,
        kv: Tensor,
        mask: Tensor,
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        spec = self.spec
        n, num_qk = hidden.shape[0], spec.num_heads + spec.num_kv_heads
        qkv = layer.qkv(rms_norm(hidden, layer.input_norm, spec.rms_norm_eps))
        heads = qkv.view(n, num_qk + spec.num_kv_heads, spec.head_dim)
        query_key = heads[:, :num_qk]
        if layer.q_norm is not None and layer.k_norm is not None:
            query = rms_norm(heads[:, : spec.num_heads], layer.q_norm, spec.rms_norm_eps)
            key = rms_norm(heads[:, spec.num_heads : num_qk], layer.k_norm, spec.rms_norm_eps)
            query_key = torch.cat((query, key), 1)
        query_key = self.rotary.rotate(query_key, *rotation)  # [n, num_heads + num_kv_heads, head_dim]
        window.write(kv[0], query_key[:, spec.num_heads :].transpose(0, 1))
        window.write(kv[1], heads[:, num_qk:].transpose(0, 1))
        key, value = kv.narrow(2, 0, window.kv_extent).unbind(0)  # [num_kv_heads, kv_extent, head_dim]
        return grouped_attention(query_key[:, : spec.num_heads], key, value, mask)
