"""Packed batches for the training tests: random conversations end to end, with padding after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddtree.train.packed_batch import NO_LABEL, PackedBatch


def random_conversations(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[Tensor]:
    """Random tokens [n] of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, vocab_size, (n,), generator=generator) for n in lengths]


def pack(
    rows: Sequence[Sequence[Tensor]], row_tokens: int, anchors: Sequence[Sequence[int]], draft_depth: int
) -> PackedBatch:
    """Rows of conversations as one batch, with blocks at the given anchors."""
    tokens = torch.zeros(len(rows), row_tokens, dtype=torch.int64)
    positions = torch.zeros_like(tokens)
    starts = torch.arange(row_tokens).repeat(len(rows), 1)
    ends = starts + 1
    for r, conversations in enumerate(rows):
        start = 0
        for conversation in conversations:
            end = start + len(conversation)
            tokens[r, start:end], positions[r, start:end] = conversation, torch.arange(end - start)
            starts[r, start:end], ends[r, start:end] = start, end
            start = end
    roots = torch.tensor(anchors)  # [rows, num_anchors]
    after = roots[:, :, None] + torch.arange(1, draft_depth + 1)  # [rows, num_anchors, draft_depth]
    row = torch.arange(len(rows))[:, None, None]
    labels = tokens[row, after.clamp(max=row_tokens - 1)]
    labels = labels.masked_fill(after >= ends.gather(1, roots)[:, :, None], NO_LABEL)
    return PackedBatch(tokens, positions, starts, roots, labels)
