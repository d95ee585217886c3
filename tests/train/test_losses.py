"""The training loss against sums written out, and the fused kernels against the reference."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.errors import ConfigError
from ddtree.train import losses
from ddtree.train.losses import (
    draft_loss,
    draft_losses,
    draft_losses_reference,
    path_weights,
    position_weights,
)
from ddtree.train.packed_batch import NO_LABEL
from interpreter_kit import IS_INTERPRETER, run_interpreted

VOCAB, HIDDEN, DEPTH = 211, 16, 5
SHAPE = (2, 3, DEPTH)


class Case:
    """Random drafts, some without a label and some right."""

    def __init__(self, seed: int = 0, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.hidden = torch.randn(*SHAPE, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
        self.head = torch.randn(VOCAB, HIDDEN, generator=generator).to(device, dtype)
        self.teacher = torch.randn(*SHAPE, HIDDEN, generator=generator).to(device, dtype)
        self.labels = torch.randint(VOCAB, SHAPE, generator=generator).to(device)
        likeliest = (self.hidden.detach() @ self.head.T).argmax(-1)
        self.labels[:, :2] = likeliest[:, :2]
        self.labels[0, 0, 3:] = NO_LABEL
        self.labels[1, 2] = NO_LABEL
        self.weights = position_weights(DEPTH, decay=2.0).to(device)

    def flat(self, *, is_soft: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The arguments of `draft_losses`."""
        labels = self.labels.flatten()
        weights = self.weights.repeat(labels.shape[0] // DEPTH) * (labels != NO_LABEL)
        teacher = self.teacher.flatten(0, 2) if is_soft else None
        return self.hidden.flatten(0, 2), self.head, labels, weights, teacher


def test_position_weights_fall_by_e_every_decay_positions():
    assert position_weights(7, decay=3.0).tolist() == pytest.approx([math.exp(-k / 3) for k in range(7)])
    with pytest.raises(ConfigError, match="decay=0"):
        position_weights(7, decay=0)


def test_path_weights_multiply_the_probabilities_before():
    probabilities = torch.tensor([[0.5, 0.001, 0.8, 0.3]])
    expected = [1.0, 0.5, 0.5 * 0.05, 0.5 * 0.05 * 0.8]
    assert path_weights(probabilities.log(), floor=0.05)[0].tolist() == pytest.approx(expected)
    assert not path_weights(probabilities.log().requires_grad_()).requires_grad


@pytest.mark.parametrize("is_soft", [False, True])
def test_sums_are_those_of_every_single_draft(is_soft):
    case = Case()
    result = draft_loss(case.hidden, case.head, case.labels, case.weights, case.teacher if is_soft else None)
    loss_sum, weight_sum = 0.0, 0.0
    correct, counts = [0] * DEPTH, [0] * DEPTH
    for row, block, k in (case.labels != NO_LABEL).nonzero().tolist():
        label = case.labels[row, block, k]
        log_probs = (case.head @ case.hidden.detach()[row, block, k]).log_softmax(-1)
        wanted = F.one_hot(label, VOCAB).float()
        if is_soft:
            wanted = (case.head @ case.teacher[row, block, k]).softmax(-1)
        loss = -float((wanted * log_probs).sum())
        weight = math.exp(-k / 2)
        loss_sum, weight_sum = loss_sum + weight * loss, weight_sum + weight
        correct[k], counts[k] = correct[k] + int(log_probs.argmax() == label), counts[k] + 1
    assert float(result.loss_sum.detach()) == pytest.approx(loss_sum, rel=1e-5)
    assert float(result.weight_sum) == pytest.approx(weight_sum, rel=1e-5)
    assert result.position_correct.tolist() == correct
    assert result.position_counts.tolist() == counts
    assert 0 < sum(correct) < sum(counts)


def test_only_the_loss_sum_carries_a_gradient():
    case = Case()
    result = draft_loss(case.hidden, case.head, case.labels, case.weights)
    assert result.loss_sum.requires_grad
    rest = (result.weight_sum, result.position_correct, result.position_counts)
    assert not any(value.requires_grad for value in rest)
    (gradient,) = torch.autograd.grad(result.loss_sum, case.hidden)
    assert gradient[case.labels == NO_LABEL].eq(0).all()
    assert gradient[case.labels != NO_LABEL].ne(0).any(-1).all()


@pytest.mark.parametrize("is_soft", [False, True])
def test_chunks_change_nothing(monkeypatch, is_soft):
    case = Case()
    whole = draft_losses_reference(*case.flat(is_soft=is_soft))
    monkeypatch.setattr(losses, "CHUNK_ROWS", 7)
    parts = draft_losses_reference(*case.flat(is_soft=is_soft))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_does_not_reach_the_logits():
    case = Case()
    with torch.autocast("cpu", torch.bfloat16):
        low = draft_losses_reference(*case.flat(is_soft=False))
    assert torch.equal(low.losses, draft_losses_reference(*case.flat(is_soft=False)).losses)


def test_path_weighting_weighs_a_draft_by_the_labels_before_it():
    case = Case()
    plain = draft_losses_reference(*case.flat(is_soft=False)).losses.view(-1, DEPTH)
    result = draft_loss(case.hidden, case.head, case.labels, case.weights, weighting="path")
    weights = path_weights(-plain) * case.weights * (case.labels.view(-1, DEPTH) != NO_LABEL)
    assert float(result.weight_sum) == pytest.approx(float(weights.sum()), rel=1e-5)
    assert float(result.loss_sum.detach()) == pytest.approx(float((weights * plain).sum()), rel=1e-5)


def assert_fused_is_reference(case: Case, tolerance: float, *, is_soft: bool) -> None:
    from ddtree.train.triton_losses import FusedDraftLosses

    results = []
    for function in (draft_losses_reference, FusedDraftLosses.apply):
        total, each, correct = function(*case.flat(is_soft=is_soft))
        # A factor on the sum is how the mean is taken.
        (gradient,) = torch.autograd.grad(total / 8, case.hidden)
        results.append((total.detach(), each, correct, gradient.float()))
    expected, fused = results
    assert torch.equal(fused[2], expected[2])
    for a, b in zip(fused, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not IS_INTERPRETER, reason="runs in the interpreter's own process")
@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("tile", [64, 256])
def test_interpreted_kernel_is_the_reference(monkeypatch, tile, is_soft):
    from ddtree.train import triton_losses

    monkeypatch.setattr(triton_losses, "TILE_TOKENS", tile)
    monkeypatch.setattr(losses, "CHUNK_ROWS", 13)
    for seed in range(3):
        assert_fused_is_reference(Case(seed), tolerance=1e-5, is_soft=is_soft)


@pytest.mark.skipif(not IS_INTERPRETER, reason="runs in the interpreter's own process")
def test_interpreted_kernel_counts_the_first_of_equal_logits(monkeypatch):
    from ddtree.train import triton_losses
    from ddtree.train.triton_losses import FusedDraftLosses

    monkeypatch.setattr(triton_losses, "TILE_TOKENS", 64)
    head = torch.zeros(VOCAB, HIDDEN)
    head[[70, 80, 200]] = 1.0
    labels = torch.tensor([70, 80, 200, 0])
    with torch.no_grad():
        _, _, correct = FusedDraftLosses.apply(torch.ones(4, HIDDEN), head, labels, torch.ones(4), None)
    assert correct.tolist() == [True, False, False, False]


@pytest.mark.skipif(IS_INTERPRETER, reason="is the interpreter's own process")
def test_kernels_through_the_interpreter():
    pytest.importorskip("triton")
    assert run_interpreted(__file__) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_fused_loss_on_cuda_is_the_reference(monkeypatch, dtype, tolerance, is_soft):
    monkeypatch.setattr(losses, "CHUNK_ROWS", 13)
    for seed in range(3):
        case = Case(seed, "cuda", dtype)
        results = []
        for function in (draft_losses_reference, draft_losses):
            total, each, _ = function(*case.flat(is_soft=is_soft))
            (gradient,) = torch.autograd.grad(total, case.hidden)
            results.append((total.detach(), each, gradient.float()))
        for a, b in zip(*results, strict=True):
            assert (a - b).norm() / b.norm() < tolerance
