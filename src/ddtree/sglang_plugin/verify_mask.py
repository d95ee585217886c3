"""The tree mask of a verify pass in SGLang's FULL_MASK layout.

A request's part is [num_verify_tokens, prefix + num_verify_tokens] cells, row-major, requests one behind the
other. Triton and FA3 read the last num_verify_tokens columns of a row only; flashinfer reads the prefix too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree.triton_choice import power_of_two, prefers_triton

# Above 1, SGLang's backends take a verify pass for a tree; how many children a node has is read by nobody.
TREE_TOPK = 2


def mask_numel(bs: int, num_verify_tokens: int, prefix_lens_sum: int) -> int:
    """Cells of a batch's mask; `prefix_lens_sum` counts the committed tokens of all its requests."""
    return num_verify_tokens * (prefix_lens_sum + bs * num_verify_tokens)


def write_verify_mask(mask: Tensor, ancestor_mask: Tensor, prefix_lens: Tensor, *, fill_prefix: bool) -> None:
    """Write the tree cells of all requests, and the prefix cells (all true) if `fill_prefix`.

    `mask` is flat, bool or uint8, and holds at least `mask_numel` cells; `ancestor_mask` is [bs, W, W] bool
    and contiguous, `prefix_lens` [bs] int64. No device wait on CUDA: one launch.
    """
    if prefers_triton(ancestor_mask):
        _write_triton(mask, ancestor_mask, prefix_lens, fill_prefix)
    else:
        write_verify_mask_torch(mask, ancestor_mask, prefix_lens, fill_prefix=fill_prefix)


def write_verify_mask_torch(
    mask: Tensor, ancestor_mask: Tensor, prefix_lens: Tensor, *, fill_prefix: bool
) -> None:
    """`write_verify_mask` in torch, request by request, which reads the lengths on the host."""
    width, start = ancestor_mask.shape[1], 0
    for tree_cells, prefix_len in zip(ancestor_mask, prefix_lens.tolist(), strict=True):
        cells = mask[start : start + width * (prefix_len + width)].view(width, prefix_len + width)
        if fill_prefix:
            cells[:, :prefix_len] = 1
        cells[:, prefix_len:] = tree_cells.to(mask.dtype)
        start += cells.numel()


def _write_triton(mask: Tensor, ancestor_mask: Tensor, prefix_lens: Tensor, fill_prefix: bool) -> None:
    from ddtree.sglang_plugin.triton_verify_mask import verify_mask_kernel

    bs, width, _ = ancestor_mask.shape
    with torch.cuda.device_of(mask):
        verify_mask_kernel[(bs, width)](
            mask.view(torch.uint8), ancestor_mask.view(torch.uint8), prefix_lens, bs,
            W=width, W_PAD=power_of_two(width), BS_PAD=power_of_two(bs, at_least=32),
            FILL_PREFIX=fill_prefix, BLOCK=1024, num_warps=1,
        )  # fmt: skip
