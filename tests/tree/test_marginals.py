import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.errors import ConfigError
from ddtree.tree import DraftMarginals


def full_log_probs(row: torch.Tensor) -> np.ndarray:
    """Float32 log-probabilities of one row of logits, one plain step at a time."""
    values = torch.where(row.float().isnan(), float("-inf"), row.float())
    log_probs = torch.log_softmax(values.double(), -1).numpy()
    return np.where(np.isnan(log_probs), -np.inf, log_probs)


def check_row(row: torch.Tensor, tokens: list[int], log_probs: list[float]) -> None:
    """The best tokens under (value descending, id ascending), against a sort of the whole row."""
    values = np.where(np.isnan(row.float().numpy()), -np.inf, row.float().numpy())
    order = np.lexsort((np.arange(len(values)), -values))[: len(tokens)]
    assert tokens == order.tolist()
    np.testing.assert_allclose(log_probs, np.minimum(full_log_probs(row)[order], 0), atol=2e-5)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.one_of(st.integers(1, 300), st.sampled_from([4096, 5000])),
    topk=st.integers(1, 80),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(["continuous", "ties", "neg_inf", "nan"]),
)
def test_keeps_the_best_tokens_in_order_at_the_cut_too(seed, vocab, topk, dtype, kind):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, vocab, generator=generator) * 4
    if kind == "ties":
        logits = logits.round()
    elif kind != "continuous":
        trouble = torch.rand(logits.shape, generator=generator) < 0.5
        trouble[..., 0] = False
        logits[trouble] = float("-inf") if kind == "neg_inf" else float("nan")
    logits = logits.to(dtype)
    marginals = DraftMarginals.from_logits(logits, topk)
    assert marginals.tokens.shape == marginals.log_probs.shape == (2, 3, min(topk, vocab))
    assert (marginals.tokens.dtype, marginals.log_probs.dtype) == (torch.int64, torch.float32)
    assert (marginals.log_probs <= 0).all()
    for b in range(2):
        for d in range(3):
            check_row(logits[b, d], marginals.tokens[b, d].tolist(), marginals.log_probs[b, d].tolist())


def test_all_logits_equal_keeps_the_lowest_ids():
    marginals = DraftMarginals.from_logits(torch.zeros(1, 2, 49152, dtype=torch.bfloat16), 70)
    assert marginals.tokens[0].tolist() == [list(range(70))] * 2


def test_values_that_only_differ_before_normalising_are_a_tie():
    logits = torch.full((1, 1, 200), -20.0)
    logits[0, 0, 3] = 30.0
    logits[0, 0, 150] = torch.nextafter(torch.tensor(-20.0), torch.tensor(0.0))
    logits[0, 0, 160] = 1e-7  # the best of the rest, so that ranks 2 and 3 are the near tie
    marginals = DraftMarginals.from_logits(logits, 3)
    assert marginals.log_probs[0, 0, 2] == torch.tensor(-50.0)
    assert marginals.tokens[0, 0].tolist() == [3, 160, 0]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf")])
def test_a_row_without_a_distribution_has_no_candidates(value):
    logits = torch.randn(1, 2, 130, generator=torch.Generator().manual_seed(0))
    logits[0, 0] = value
    marginals = DraftMarginals.from_logits(logits, 4)
    assert marginals.tokens[0, 0].tolist() == [0, 1, 2, 3]
    assert (marginals.log_probs[0, 0] == float("-inf")).all()
    assert marginals.log_probs[0, 1].isfinite().all()


def test_a_certain_token_has_log_prob_zero():
    logits = torch.full((1, 1, 64), -1e4)
    logits[0, 0, 9] = 1e4
    marginals = DraftMarginals.from_logits(logits, 2)
    assert marginals.tokens[0, 0].tolist() == [9, 0]
    assert marginals.log_probs[0, 0, 0] == 0


def test_leaves_the_logits_alone_and_takes_strided_ones():
    base = torch.randn(2, 9, 128, generator=torch.Generator().manual_seed(1))
    before = base.clone()
    strided = DraftMarginals.from_logits(base[:, 1::2], 5)
    dense = DraftMarginals.from_logits(base[:, 1::2].contiguous(), 5)
    assert torch.equal(strided.tokens, dense.tokens)
    assert torch.equal(strided.log_probs, dense.log_probs)
    assert torch.equal(base, before)


@pytest.mark.parametrize("topk", [0, -3, 1.5])
def test_refuses_a_topk_below_one(topk):
    with pytest.raises(ConfigError, match="candidate_topk"):
        DraftMarginals.from_logits(torch.zeros(1, 1, 8), topk)
