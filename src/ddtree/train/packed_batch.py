"""What one training step reads: rows of packed conversations, anchors and labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NO_LABEL = -100


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Conversations packed into rows of one length, and the blocks to train on; all int64.

    Attributes:
        tokens: [rows, row_tokens] conversations end to end, 0 in the rest.
        positions: [rows, row_tokens] from 0 in each conversation.
        document_starts: [rows, row_tokens] where in the row the token's conversation begins; a padding
            token's own index.
        anchors: [rows, num_anchors] ascending; index in the row of each block's root.
        labels: [rows, num_anchors, draft_depth] tokens after the root in the same conversation, `NO_LABEL`
            where it has none.
    """

    tokens: Tensor
    positions: Tensor
    document_starts: Tensor
    anchors: Tensor
    labels: Tensor

    @property
    def root_tokens(self) -> Tensor:
        """[rows, num_anchors] the token at each anchor."""
        return self.tokens.gather(1, self.anchors)

    def pinned(self) -> PackedBatch:
        """The batch in pinned memory, from which `to` copies without blocking."""
        return PackedBatch(
            tokens=self.tokens.pin_memory(),
            positions=self.positions.pin_memory(),
            document_starts=self.document_starts.pin_memory(),
            anchors=self.anchors.pin_memory(),
            labels=self.labels.pin_memory(),
        )

    def to(self, device: torch.device) -> PackedBatch:
        """The batch on a device; copies from pinned memory do not block."""
        return PackedBatch(
            tokens=self.tokens.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            document_starts=self.document_starts.to(device, non_blocking=True),
            anchors=self.anchors.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
        )
