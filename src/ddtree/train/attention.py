"""Who sees whom in a packed row, and attention under such a rule.

A rule is one function of indices. `dense_mask` writes it out, which is readable and runs anywhere;
FlexAttention compiles it into its kernel, which skips what nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ddtree.train.packed_batch import PackedBatch

MaskKind = Literal["dense", "flex"]
Mask = Tensor | BlockMask
FLEX_MIN_QUERIES = 128
# (row, head, query, key) index tensors of one broadcast shape -> bool: whether the query sees the key.
MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def default_kind(device: torch.device) -> MaskKind:
    """FlexAttention on CUDA; dense elsewhere, where FlexAttention has no backward pass."""
    return "flex" if device.type == "cuda" else "dense"


def document_rule(document_starts: Tensor) -> MaskRule:
    """A token sees itself and what came before it in its own conversation.

    `document_starts` is [rows, row_tokens], see `PackedBatch`.
    """

    def rule(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= document_starts[row, query])

    return rule


def sliding_rule(document_starts: Tensor, window_tokens: int) -> MaskRule:
    """`document_rule` with at most `window_tokens` keys a query, the token itself included."""

    def rule(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_near = query - key < window_tokens
        return (key <= query) & (key >= document_starts[row, query]) & is_near

    return rule


def block_rule(anchors: Tensor, document_starts: Tensor, row_tokens: int, block_size: int) -> MaskRule:
    """A block sees its conversation before the root, and all of itself both ways (DFlash paper, training).

    The root is in the block but not in the context: at inference its hidden state is not known yet.
    Queries are the block slots; keys are the row's context tokens, then the block slots.

    Args:
        anchors: [rows, num_anchors] index in the row of each block's root.
        document_starts: [rows, row_tokens], see `PackedBatch`.
        row_tokens: context keys a row.
        block_size: slots a block, the root's included.
    """
    context_starts = document_starts.gather(1, anchors)  # [rows, num_anchors]

    def rule(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = query // block_size
        in_context = (key >= context_starts[row, block]) & (key < anchors[row, block])
        in_block = (key >= row_tokens) & ((key - row_tokens) // block_size == block)
        return in_context | in_block

    return rule


def dense_mask(rule: MaskRule, rows: int, num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """The rule written out, [rows, 1, num_queries, num_keys] bool, True where the query sees the key."""
    row = torch.arange(rows, device=device)[:, None, None, None]
    query = torch.arange(num_queries, device=device)[:, None]
    key = torch.arange(num_keys, device=device)
    mask = rule(row, torch.zeros_like(row), query, key)
    return mask.expand(rows, 1, num_queries, num_keys)


def make_mask(
    rule: MaskRule, rows: int, num_queries: int, num_keys: int, device: torch.device, kind: MaskKind
) -> Mask:
    """A rule as `attend` takes it: [rows, 1, num_queries, num_keys] bool, or FlexAttention's block mask."""
    if kind == "dense":
        return dense_mask(rule, rows, num_queries, num_keys, device)
    mask: BlockMask = _compiled_block_mask()(rule, rows, None, num_queries, num_keys, device)
    return mask


def target_mask(batch: PackedBatch, kind: MaskKind, sliding_window: int | None = None) -> Mask:
    """The target's mask, [rows, 1, row_tokens, row_tokens]: causal inside each conversation."""
    starts = batch.document_starts
    rule = document_rule(starts) if sliding_window is None else sliding_rule(starts, sliding_window)
    rows, row_tokens = starts.shape
    return make_mask(rule, rows, row_tokens, row_tokens, starts.device, kind)


def draft_mask(batch: PackedBatch, block_size: int, kind: MaskKind) -> Mask:
    """The drafter's mask, [rows, 1, num_anchors * block_size, row_tokens + num_anchors * block_size]."""
    rows, row_tokens = batch.tokens.shape
    num_queries = batch.anchors.shape[1] * block_size
    rule = block_rule(batch.anchors, batch.document_starts, row_tokens, block_size)
    return make_mask(rule, rows, num_queries, row_tokens + num_queries, batch.tokens.device, kind)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
    """Grouped-query attention under a mask of `make_mask`.

    Args:
        queries: [rows, num_heads, num_queries, head_dim].
        keys, values: [rows, num_kv_heads, num_keys, head_dim]; num_heads is a multiple of num_kv_heads.
        mask: dense, or a block mask (CUDA only, where gradients are wanted).
        scale: of the scores, 1 / sqrt(head_dim) where None.

    Returns:
        [rows, num_heads, num_queries, head_dim].
    """
    if isinstance(mask, BlockMask):
        # Inside a compiled layer the plain function is compiled along with it.
        is_compiling = torch.compiler.is_compiling()
        flex: Any = flex_attention if is_compiling else _compiled_flex_attention()
        # Below 128 queries torch would take its kernel for decoding, which is not held against dense here.
        options = {"FORCE_USE_FLEX_ATTENTION": True} if queries.shape[2] < FLEX_MIN_QUERIES else None
        output: Tensor = flex(
            queries, keys, values, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options
        )
        return output
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)


# One compiled function each: a rule made anew every step has the same code, so nothing is compiled again.
@cache
def _compiled_block_mask() -> Callable[..., Any]:
    return torch.compile(create_block_mask, dynamic=False)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
