"""The training loss: cross-entropy of the drafts, weighted by position (DFlash, arXiv 2602.06036).

The logits of a step are too large to keep (24,576 drafts x 49,152 tokens), so they are made chunk by chunk.
`draft_losses_reference` leaves the gradient to autograd; on CUDA `triton_losses.FusedDraftLosses` makes it
in the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.config import check
from ddtree.train.packed_batch import NO_LABEL
from ddtree.train.recipe import Weighting

HAS_TRITON = find_spec("triton") is not None
CHUNK_ROWS = 8192
PATH_FLOOR = 0.05


class FlatLosses(NamedTuple):
    """Losses of n drafts.

    Attributes:
        weighted_sum: [] float32, differentiable in the hidden states.
        losses: [n] float32, detached and not weighted, 0 without a label.
        correct: [n] bool, whether the likeliest token is the label.
    """

    weighted_sum: Tensor
    losses: Tensor
    correct: Tensor


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """Loss of a step; divide `loss_sum` by `weight_sum`, summed over all devices, for the mean.

    Attributes:
        loss_sum: [] float32, weighted; differentiable in the hidden states, the rest is detached.
        weight_sum: [] float32, weights of the drafts that have a label.
        position_correct, position_counts: [draft_depth] float32, drafts that are right, and with a label.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    position_correct: Tensor
    position_counts: Tensor


def position_weights(draft_depth: int, decay: float) -> Tensor:
    """exp(-(k - 1) / decay) for the k-th draft from 1, [draft_depth] float32 (DFlash paper, loss weights)."""
    check(decay > 0, "decay", decay, "a number above 0", "use a large one for equal weights")
    return torch.exp(-torch.arange(draft_depth, dtype=torch.float32) / decay)


def path_weights(label_log_probs: Tensor, floor: float = PATH_FLOOR) -> Tensor:
    """How likely the drafter finds all labels before each draft of a block.

    Args:
        label_log_probs: [..., draft_depth] the drafter's log-probability of each label.
        floor: least probability that a draft contributes, so that late drafts keep some weight.

    Returns:
        [..., draft_depth], detached; 1 at the first draft.
    """
    log_probs = label_log_probs.detach().float().clamp(min=math.log(floor))
    before = log_probs.cumsum(-1) - log_probs
    return before.exp()


def draft_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    teacher_hidden: Tensor | None = None,
    weighting: Weighting = "position",
) -> DraftLoss:
    """Weighted cross-entropy of all drafts, fused on CUDA.

    Args:
        hidden: [rows, num_anchors, draft_depth, hidden] the drafter's output.
        head_weight: [vocab, hidden] the target's frozen output head; logits are made in its dtype.
        labels: [rows, num_anchors, draft_depth] int64, `NO_LABEL` for none.
        weights: [draft_depth] float32, see `position_weights`.
        teacher_hidden: like `hidden`, the target's final hidden state where it predicts the label; the
            loss is then the cross-entropy to the target's own distribution.
        weighting: "path" multiplies the weights by `path_weights`, at the cost of another pass.
    """
    depth, hidden_size = hidden.shape[-2:]
    flat_hidden, flat_labels = hidden.reshape(-1, hidden_size), labels.reshape(-1)  # [n, hidden], [n]
    has_label = flat_labels != NO_LABEL
    flat_weights = weights.to(labels.device).expand(labels.shape).reshape(-1) * has_label  # [n] float32
    teacher = None if teacher_hidden is None else teacher_hidden.reshape(-1, hidden_size)
    if weighting == "path":
        with torch.no_grad():
            # Detached, or the fused loss would make a gradient that nobody reads.
            first = draft_losses(flat_hidden.detach(), head_weight, flat_labels, flat_weights, None)
        flat_weights = flat_weights * path_weights(-first.losses.view(-1, depth)).reshape(-1)
    result = draft_losses(flat_hidden, head_weight, flat_labels, flat_weights, teacher)
    return DraftLoss(
        loss_sum=result.weighted_sum,
        weight_sum=flat_weights.sum(),
        position_correct=result.correct.view(-1, depth).sum(0, dtype=torch.float32),
        position_counts=has_label.view(-1, depth).sum(0, dtype=torch.float32),
    )


def draft_losses(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, teacher_hidden: Tensor | None
) -> FlatLosses:
    """Losses of n drafts: fused with Triton on CUDA, `draft_losses_reference` elsewhere.

    `hidden` and `teacher_hidden` are [n, hidden], `labels` [n] int64, `weights` [n] float32 and 0 where
    there is no label.
    """
    if not (hidden.is_cuda and HAS_TRITON):
        return draft_losses_reference(hidden, head_weight, labels, weights, teacher_hidden)
    from ddtree.train.triton_losses import FusedDraftLosses

    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = FusedDraftLosses.apply
    dtype = head_weight.dtype
    teacher = None if teacher_hidden is None else teacher_hidden.to(dtype)
    return FlatLosses(*apply(hidden.to(dtype), head_weight, labels, weights, teacher))


def draft_losses_reference(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, teacher_hidden: Tensor | None
) -> FlatLosses:
    """What `draft_losses` gives, with float32 logits and autograd's gradient; arguments as there."""
    losses, correct = [], []
    for rows in chunks(hidden.shape[0]):
        logits = _logits(hidden[rows], head_weight)  # [chunk, vocab]
        if teacher_hidden is None:
            chunk = F.cross_entropy(logits, labels[rows], ignore_index=NO_LABEL, reduction="none")
        else:
            soft_labels = _logits(teacher_hidden[rows], head_weight).softmax(-1)
            chunk = F.cross_entropy(logits, soft_labels, reduction="none")
            chunk = chunk.masked_fill(labels[rows] == NO_LABEL, 0.0)
        losses.append(chunk)
        correct.append(logits.argmax(-1) == labels[rows])
    each = torch.cat(losses)  # [n]
    return FlatLosses((each * weights).sum(), each.detach(), torch.cat(correct))


def chunks(num_rows: int) -> Iterator[slice]:
    """Slices of at most `CHUNK_ROWS` rows that cover all."""
    for start in range(0, num_rows, CHUNK_ROWS):
        yield slice(start, min(start + CHUNK_ROWS, num_rows))


def _logits(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """Float32 logits [n, vocab], also under autocast."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.float(), head_weight.float())
