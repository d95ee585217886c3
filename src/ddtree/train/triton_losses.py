# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""Cross-entropy of drafts on a GPU: each chunk of logits is turned into its own gradient where it lies.

What `losses.draft_losses_reference` computes, but for the dtype of the logits, which is the head's. Import
it only where Triton is installed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.train.losses import chunks
from ddtree.train.packed_batch import NO_LABEL

TILE_TOKENS = 4096
NUM_WARPS = 8
IGNORED = tl.constexpr(NO_LABEL)


@triton.jit
def _zero_row(row_logits, vocab, TILE: tl.constexpr):
    for start in range(0, vocab, TILE):
        columns = start + tl.arange(0, TILE)
        zeros = tl.zeros([TILE], row_logits.dtype.element_ty)
        tl.store(row_logits + columns, zeros, mask=columns < vocab)


@triton.jit
def _draft_statistics(row_logits, vocab, TILE: tl.constexpr):
    """Log-sum-exp of a row and the first of its largest logits' tokens, tile by tile."""
    largest, total, best = -float("inf"), 0.0, 0
    for start in range(0, vocab, TILE):
        columns = start + tl.arange(0, TILE)
        logits = tl.load(row_logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        tile_largest = tl.max(logits, 0)
        tile_best = start + tl.argmax(logits, 0)
        best = tl.where(tile_largest > largest, tile_best, best)
        new_largest = tl.maximum(largest, tile_largest)
        total = total * tl.exp(largest - new_largest) + tl.sum(tl.exp(logits - new_largest), 0)
        largest = new_largest
    return largest + tl.log(total), best


@triton.jit
def _teacher_statistics(row_teacher, row_logits, vocab, TILE: tl.constexpr):
    """Log-sum-exp of a row of teacher logits and the mean of the draft's logits under the teacher."""
    largest, total, mean = -float("inf"), 0.0, 0.0
    for start in range(0, vocab, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < vocab
        teacher = tl.load(row_teacher + columns, mask=inside, other=-float("inf")).to(tl.float32)
        logits = tl.load(row_logits + columns, mask=inside, other=0.0).to(tl.float32)
        new_largest = tl.maximum(largest, tl.max(teacher, 0))
        shrink = tl.exp(largest - new_largest)
        mass = tl.exp(teacher - new_largest)
        total = total * shrink + tl.sum(mass, 0)
        mean = mean * shrink + tl.sum(mass * logits, 0)
        largest = new_largest
    return largest + tl.log(total), mean / total


@triton.jit
def _draft_loss_kernel(
    logits, teacher_logits, labels, weights, losses, correct, vocab,
    HAS_TEACHER: tl.constexpr, NEEDS_GRADIENT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program a draft: loss and correctness out, logits overwritten with their gradient if wanted.

    logits, teacher_logits [n, vocab] (contiguous); labels [n] int64; weights, losses [n] float32;
    correct [n] bool.
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * vocab
    row_teacher = teacher_logits + row * vocab
    label = tl.load(labels + row)
    if label == IGNORED:
        tl.store(losses + row, 0.0)
        tl.store(correct + row, False)
        if NEEDS_GRADIENT:
            _zero_row(row_logits, vocab, TILE)
    else:
        log_total, best = _draft_statistics(row_logits, vocab, TILE)
        expected = tl.load(row_logits + label).to(tl.float32)
        teacher_log_total = 0.0
        if HAS_TEACHER:
            teacher_log_total, expected = _teacher_statistics(row_teacher, row_logits, vocab, TILE)
        tl.store(losses + row, log_total - expected)
        tl.store(correct + row, best == label)
        if NEEDS_GRADIENT:
            # All threads must have read the label's logit before it is overwritten.
            tl.debug_barrier()
            weight = tl.load(weights + row)
            for start in range(0, vocab, TILE):
                columns = start + tl.arange(0, TILE)
                inside = columns < vocab
                drafted = tl.load(row_logits + columns, mask=inside, other=0.0).to(tl.float32)
                gradient = tl.exp(drafted - log_total)
                if HAS_TEACHER:
                    teacher = tl.load(row_teacher + columns, mask=inside, other=0.0).to(tl.float32)
                    gradient -= tl.exp(teacher - teacher_log_total)
                else:
                    gradient -= tl.where(columns == label, 1.0, 0.0)
                gradient = (gradient * weight).to(logits.dtype.element_ty)
                tl.store(row_logits + columns, gradient, mask=inside)


class FusedDraftLosses(torch.autograd.Function):
    """`losses.draft_losses_reference` chunk by chunk, with the gradient made in the forward pass.

    hidden, teacher_hidden [n, hidden] and head_weight [vocab, hidden] of one dtype, labels [n] int64,
    weights [n] float32 -> weighted sum [] float32, losses [n] float32, correct [n] bool.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        teacher_hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_gradient = ctx.needs_input_grad[0]
        losses = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        correct = torch.empty(hidden.shape[0], dtype=torch.bool, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_gradient else hidden.new_empty(0)
        for rows in chunks(hidden.shape[0]):
            logits = hidden[rows] @ head_weight.T  # [chunk, vocab]
            teacher = logits if teacher_hidden is None else teacher_hidden[rows] @ head_weight.T
            with torch.cuda.device_of(logits):
                _draft_loss_kernel[(logits.shape[0],)](
                    logits, teacher, labels[rows], weights[rows], losses[rows], correct[rows],
                    head_weight.shape[0],
                    HAS_TEACHER=teacher_hidden is not None, NEEDS_GRADIENT=needs_gradient, TILE=TILE_TOKENS,
                    num_warps=NUM_WARPS,
                )  # fmt: skip
            if needs_gradient:
                torch.mm(logits, head_weight, out=grad_hidden[rows])  # logits hold their gradient by now
        ctx.save_for_backward(grad_hidden)
        ctx.mark_non_differentiable(losses, correct)
        return (losses * weights).sum(), losses, correct

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden * grads[0], None, None, None, None
