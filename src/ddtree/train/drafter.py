"""The DFlash drafter (arXiv 2602.06036) as a trainable module: many blocks of packed rows in one pass.

Parameters carry the names of the z-lab checkpoint. What it computes for one block is what
`draft.dflash_model.DFlashDrafter` computes at inference from the same conversation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree.draft.dflash_config import FULL, DFlashConfig
from ddtree.draft.dflash_model import rotary_table
from ddtree.errors import UnsupportedModelError
from ddtree.train.attention import Mask, attend
from ddtree.train.packed_batch import PackedBatch

INIT_STD = 0.02


class Rotation(NamedTuple):
    """Cosines and signed sines of the keys' positions, each [rows, num_keys, 1, head_dim] float32."""

    cos: Tensor
    signed_sin: Tensor

    def last(self, n: int) -> Rotation:
        """Those of the last n positions: the block slots."""
        return Rotation(self.cos[:, -n:], self.signed_sin[:, -n:])

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate heads x [rows, n, heads, head_dim]; float32 inside."""
        rolled = x.roll(x.shape[-1] // 2, -1)
        return (x * self.cos + rolled * self.signed_sin).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32 inside and the input's dtype outside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)
        return normed.to(x.dtype)


class Attention(nn.Module):
    """Block slots attend to context features and block slots, both projected by the same weights."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        query, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, query, bias=bias)
        self.k_proj = nn.Linear(hidden, kv, bias=bias)
        self.v_proj = nn.Linear(hidden, kv, bias=bias)
        self.o_proj = nn.Linear(query, hidden, bias=bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)

    def forward(self, block: Tensor, features: Tensor, rotation: Rotation, mask: Mask) -> Tensor:
        """Block [rows, block_tokens, hidden] and features [rows, row_tokens, hidden] -> like block."""
        block_rotation = rotation.last(block.shape[1])
        queries = block_rotation.rotate(self.q_norm(self._heads(self.q_proj(block))))
        keys = torch.cat((self.k_proj(features), self.k_proj(block)), 1)  # [rows, num_keys, kv]
        values = torch.cat((self.v_proj(features), self.v_proj(block)), 1)
        keys = rotation.rotate(self.k_norm(self._heads(keys)))
        output = attend(_heads_first(queries), _heads_first(keys), _heads_first(self._heads(values)), mask)
        projected: Tensor = self.o_proj(output.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, x: Tensor) -> Tensor:
        """[rows, n, heads * head_dim] -> [rows, n, heads, head_dim]."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads


def _heads_first(x: Tensor) -> Tensor:
    """[rows, n, heads, head_dim] -> [rows, heads, n, head_dim], contiguous."""
    return x.transpose(1, 2).contiguous()


class GatedMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DrafterLayer(nn.Module):
    """Pre-norm decoder layer over the block slots, with the context features as further keys."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def forward(self, hidden: Tensor, features: Tensor, rotation: Rotation, mask: Mask) -> Tensor:
        """Hidden [rows, block_tokens, hidden] and features [rows, row_tokens, hidden] -> like hidden."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), features, rotation, mask)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def training_refusal(config: DFlashConfig) -> str | None:
    """Why a drafter of this shape cannot be trained here, or None."""
    other = sorted({kind for kind in config.layer_types if kind != FULL})
    if other:
        return f"the drafter's layer_types have {', '.join(other)}: only {FULL} layers can be trained"
    if any(config.causal_layers):
        return "the drafter's is_causal=true cannot be trained: a block must see itself both ways"
    return None


class TrainableDrafter(nn.Module):
    """A DFlash drafter with float32 weights, run under autocast where bfloat16 is wanted.

    Args:
        config: shape of the drafter; full attention that is not causal inside the block.
        max_positions: positions 0 .. max_positions - 1 can be used, the blocks' included.

    Raises:
        UnsupportedModelError: sliding or causal layers.
    """

    def __init__(self, config: DFlashConfig, max_positions: int) -> None:
        super().__init__()
        reason = training_refusal(config)
        if reason:
            raise UnsupportedModelError(f"{reason}; use a config with {FULL} layers and without is_causal")
        self.config = config
        self.fc = nn.Linear(config.num_taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        table = rotary_table(config, max_positions, torch.float32, torch.device("cpu"))
        # No buffers: DistributedDataParallel would send them to all processes at every step.
        self._tables: tuple[Tensor, ...] = (table.cos, table.signed_sin)  # each [max_positions, head_dim]

    def forward(
        self, batch: PackedBatch, taps: Tensor, root_embeds: Tensor, mask_embed: Tensor, mask: Mask
    ) -> Tensor:
        """Hidden states whose product with the target's head gives the draft logits.

        Args:
            batch: anchors and positions are read.
            taps: [rows, row_tokens, num_taps * hidden] the target's features of every token.
            root_embeds: [rows, num_anchors, hidden] the target's embeddings of the roots.
            mask_embed: [hidden] the target's embedding of the mask token.
            mask: of `draft_mask`.

        Returns:
            [rows, num_anchors, draft_depth, hidden] after the final norm; k predicts labels[k].
        """
        rows, num_anchors, hidden_size = root_embeds.shape
        depth = self.config.draft_depth
        features = self.hidden_norm(self.fc(taps))  # [rows, row_tokens, hidden]
        rotation = self._rotation(batch)
        slots = mask_embed.expand(rows, num_anchors, depth, hidden_size)
        hidden = torch.cat((root_embeds.unsqueeze(2), slots), 2).flatten(1, 2)  # [rows, block_tokens, hidden]
        if torch.is_grad_enabled():
            hidden.requires_grad_()  # so that one compiled graph serves the first layer and the others
        for layer in self.layers:
            hidden = layer(hidden, features, rotation, mask)
        drafts = hidden.unflatten(1, (num_anchors, self.config.block_size))[:, :, 1:]
        normed: Tensor = self.norm(drafts)
        return normed

    def compile_layers(self) -> None:
        """Compile each layer, attention included, at its first use."""
        for layer in self.layers:
            layer.compile(dynamic=False)

    def init_weights(self, seed: int, head_weight: Tensor) -> None:
        """Random weights from a seed, the same on every device.

        Matrices are normal with deviation 0.02; those that write to the residual stream (`o_proj`,
        `down_proj`) are smaller by sqrt(2 * num_layers), so that its size does not grow with depth, as in
        GPT-2. Norms are 1 and biases 0, but for the final norm: it makes the first logits of deviation 1,
        so that the loss starts near the logarithm of the vocabulary, whatever the size of the target's head.

        Args:
            seed: of the random numbers.
            head_weight: [vocab, hidden] the target's output head.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_layers)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() == 1:
                    weight.fill_(0.0 if name.endswith("bias") else 1.0)
                    continue
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = residual_std if is_residual else INIT_STD
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            self.norm.weight.fill_(1.0 / head_weight.float().norm(dim=1).mean().item())

    def _rotation(self, batch: PackedBatch) -> Rotation:
        """Rotary values of the context's positions, then of the block slots' (the root's and onwards)."""
        offsets = torch.arange(self.config.block_size, device=batch.positions.device)
        roots = batch.positions.gather(1, batch.anchors)  # [rows, num_anchors]
        slots = (roots.unsqueeze(2) + offsets).flatten(1)  # [rows, block_tokens]
        positions = torch.cat((batch.positions, slots), 1)  # [rows, num_keys]
        if self._tables[0].device != positions.device:
            self._tables = tuple(table.to(positions.device) for table in self._tables)
        cos, signed_sin = (table[positions].unsqueeze(2) for table in self._tables)
        return Rotation(cos, signed_sin)
