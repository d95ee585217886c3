"""The two seams of the engine: what it needs of a target and of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ddtree.draft.context import DraftContext
from ddtree.draft.load import TargetInfo
from ddtree.engine.kv_cache import KVCache
from ddtree.layers.window import Window


class TargetOutput(NamedTuple):
    """One target pass: logits [rows, vocab] and the tapped layers' outputs [n, num_taps * hidden] or None."""

    logits: Tensor
    taps: Tensor | None


class TargetModel(Protocol):
    """The model being sped up."""

    info: TargetInfo
    kernels_per_layer: int | None
    supports_graphs: bool

    def new_kv_cache(self, capacity_tokens: int) -> KVCache:
        """A cache for one sequence of that many tokens."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [n, hidden] of tokens [n]; the drafter borrows them."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of normed hidden states [n, hidden]; the drafter borrows them."""

    def forward(
        self,
        tokens: Tensor,
        window: Window,
        kv_cache: KVCache,
        tap_layer_ids: Sequence[int],
        *,
        last_only: bool = False,
    ) -> TargetOutput:
        """Run tokens [n] as a window over the cache; logits of all rows, or of the last one."""


class Drafter(Protocol):
    """A block drafter whose positions are independent given the context."""

    block_size: int
    target_layer_ids: tuple[int, ...]

    def new_context(self, capacity: int) -> DraftContext:
        """Room for the features of that many committed tokens and one block."""

    def append(self, context: DraftContext, taps: Tensor, window: Window) -> None:
        """Add committed tokens' features from taps [n, num_taps * hidden]."""

    def draft_logits(self, root_token: Tensor, context: DraftContext, window: Window) -> Tensor:
        """Logits [block_size - 1, vocab] of the positions after root_token [1]."""
