"""What a round carries through SGLang: the draft input between rounds and the verify input within one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from torch import Tensor

from ddtree.sglang_plugin.verify_mask import TREE_TOPK


@dataclass
class DDTreeVerifyInput(EagleVerifyInput):
    """A draft tree under SGLang's tree verify; all trees of a batch have `draft_token_num` columns."""

    @property
    def max_tree_depth(self) -> int:
        """Longest path, the root included."""
        return int(self.spec_steps) + 1

    @property
    def tree_topk(self) -> int:
        """-1: nodes have any number of children."""
        return -1


class DDTreeDraftInput(DFlashDraftInputV2):
    """The drafter's input between two rounds: bonus tokens and committed lengths."""

    @classmethod
    def of(cls, bonus_tokens: Tensor, new_seq_lens: Tensor) -> DDTreeDraftInput:
        """The input of the next round; `bonus_tokens` and `new_seq_lens` are [bs]."""
        bs, device = int(new_seq_lens.numel()), bonus_tokens.device
        return cls(
            topk_p=torch.empty((bs, 0), device=device, dtype=torch.float32),
            topk_index=torch.empty((bs, 0), device=device, dtype=torch.int64),
            bonus_tokens=bonus_tokens.to(torch.int64),
            new_seq_lens=new_seq_lens.to(torch.int64),
            hidden_states=torch.empty((bs, 0), device=device, dtype=torch.float16),
        )

    def prepare_for_decode(self, batch: Any) -> None:
        """Reserve KV slots for the next round: the window, and what the round in flight may commit.

        DFLASH reserves twice `speculative_num_draft_tokens`, its block; for a tree that would be two windows,
        more than a row of the token table has behind the context limit.
        """
        spec = get_spec()
        reserve = spec.speculative_num_draft_tokens + spec.speculative_dflash_block_size
        with spec.override(speculative_num_draft_tokens=-(-reserve // 2)):
            super().prepare_for_decode(batch)


def make_capture_verify_input(
    custom_mask: Tensor | None, draft_depth: int, num_tokens_per_req: int
) -> DDTreeVerifyInput:
    """The verify input of a graph capture or warm-up pass, of which only shapes are read."""
    return DDTreeVerifyInput(
        draft_token=None,
        custom_mask=custom_mask,
        positions=None,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
        retrieve_cum_len=None,
        spec_steps=draft_depth,
        topk=TREE_TOPK,
        draft_token_num=num_tokens_per_req,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=None,
        seq_lens_cpu=None,
    )


def make_dummy_verify_input(
    custom_mask: Tensor | None, num_tokens_per_req: int, is_draft_worker: bool
) -> DDTreeVerifyInput | DFlashVerifyInput:
    """The verify input of SGLang's dummy passes: a block for the drafter, a tree for the target."""
    if is_draft_worker:
        return DFlashVerifyInput(
            draft_token=None,
            positions=None,
            draft_token_num=num_tokens_per_req,
            custom_mask=None,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
    draft_depth = get_spec().speculative_dflash_block_size - 1
    return make_capture_verify_input(custom_mask, draft_depth, num_tokens_per_req)
