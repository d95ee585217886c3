"""Decode graphs of the target, captured with a tree verify input."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_spec

from ddtree.sglang_plugin.info import DDTreeVerifyInput, make_capture_verify_input


class DDTreeDecodeCudaGraphRunner(DecodeCudaGraphRunner):
    """Captures one verify pass of `captured_req_width` columns a request for every batch size."""

    def get_spec_info(self, num_tokens: int) -> DDTreeVerifyInput:
        """The verify input of the capture; its mask makes the backend capture its masked kernels."""
        verify_mask = self.model_runner.attn_backend.verify_mask
        mask = self.buffers.custom_mask if verify_mask is None else verify_mask.buffer
        draft_depth = get_spec().speculative_dflash_block_size - 1
        return make_capture_verify_input(mask, draft_depth, self.captured_req_width)

    def can_run_graph(self, forward_batch: Any) -> bool:
        """Whether a captured graph fits: only tree verify passes were captured."""
        return isinstance(forward_batch.spec_info, DDTreeVerifyInput) and bool(
            super().can_run_graph(forward_batch)
        )
