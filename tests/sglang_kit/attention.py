"""Test double of an attention backend: SGLang's own for the CPU, which has no tree mask, with that mask."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BACKEND_NAME = "ddtree_cpu"


class TreeMaskAttnBackend(TorchNativeAttnBackend):
    """Attention in plain torch whose verify pass reads all of the spec input's mask, the prefix too.

    `ignores_mask` makes it causal instead, for the control that must fail.
    """

    ignores_mask = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self.masks: list[Tensor] | None = None  # of each request, [num_queries, num_keys] bool
        mode, bs = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_target_verify():
            spec_info = forward_batch.spec_info
            width = int(spec_info.draft_token_num)
            prefix_lens = forward_batch.seq_lens.tolist()
            self.query_lens, self.kv_lens = [width] * bs, [n + width for n in prefix_lens]
            if spec_info.custom_mask is not None and not self.ignores_mask:
                self.masks = full_masks(spec_info.custom_mask, prefix_lens, width)
        elif mode.is_extend():
            self.query_lens = forward_batch.extend_seq_lens.tolist()
            self.kv_lens = forward_batch.seq_lens.tolist()

    def forward_extend(
        self,
        q: Tensor,  # [tokens, heads * head_dim]
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Tensor:
        if save_kv_cache and k is not None:
            slots = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        outputs, done = [], 0
        for i, (num_queries, num_keys) in enumerate(zip(self.query_lens, self.kv_lens, strict=True)):
            row = forward_batch.req_pool_indices[i]
            slots = self.req_to_token_pool.req_to_token[row, :num_keys].long()
            output = scaled_dot_product_attention(
                queries[done : done + num_queries].transpose(0, 1)[None],
                keys[slots].to(q.dtype).transpose(0, 1)[None],
                values[slots].to(q.dtype).transpose(0, 1)[None],
                attn_mask=self.visible(i, num_queries, num_keys, layer),
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            outputs.append(output[0].transpose(0, 1))
            done += num_queries
        return torch.cat(outputs).reshape(done, -1)

    def visible(self, i: int, num_queries: int, num_keys: int, layer: Any) -> Tensor:
        """What each query of request i sees, [num_queries, num_keys] bool."""
        if layer.attn_type == AttentionType.ENCODER_ONLY:
            return torch.ones(num_queries, num_keys, dtype=torch.bool)
        if self.masks is not None:
            return self.masks[i]
        return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def full_masks(custom_mask: Tensor, prefix_lens: list[int], width: int) -> list[Tensor]:
    """The [width, prefix + width] mask of each request, from SGLang's FULL_MASK layout, which is flat."""
    sizes = [width * (prefix_len + width) for prefix_len in prefix_lens]
    parts = custom_mask.view(-1)[: sum(sizes)].bool().split(sizes)
    return [part.view(width, -1) for part in parts]
