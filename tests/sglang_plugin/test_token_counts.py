from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.errors import ConfigError
from ddtree.sglang_plugin.token_counts import TokenCounts

VOCAB = 7
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=9)


def check(counts: TokenCounts, expected: dict[int, list[int]]) -> None:
    for slot in range(counts.num_slots):
        output = Counter(expected.get(slot, []))
        assert counts.counts[slot].tolist() == [output[token] for token in range(VOCAB)]
        assert counts.output_lens[slot] == output.total()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counts_follow_rounds_and_new_requests(data):
    """A few steps of a server: requests come into slots that others had, rounds accept some of a row."""
    counts = TokenCounts(5, VOCAB, "cpu")
    expected: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 5))):
        slots = data.draw(st.lists(st.integers(0, 4), max_size=4, unique=True))
        if data.draw(st.booleans()):
            outputs = [data.draw(TOKENS) for _ in slots]
            counts.reset(slots, outputs)
            expected.update(zip(slots, outputs, strict=True))
        elif slots:
            width = data.draw(st.integers(1, 4))
            rows = [
                data.draw(st.lists(st.integers(-1, VOCAB + 3), min_size=width, max_size=width)) for _ in slots
            ]
            num_tokens = [data.draw(st.integers(0, width)) for _ in slots]
            rows = [
                [t % VOCAB if i < n else t for i, t in enumerate(row)]
                for row, n in zip(rows, num_tokens, strict=True)
            ]
            counts.add(torch.tensor(slots), torch.tensor(rows), torch.tensor(num_tokens, dtype=torch.int32))
            for slot, row, n in zip(slots, rows, num_tokens, strict=True):
                expected[slot] = expected.get(slot, []) + row[:n]
        check(counts, expected)


def test_nothing_is_allocated_before_the_first_use():
    counts = TokenCounts(1 << 40, 1 << 20, "cpu")
    counts.reset([], [])
    assert counts._counts is None


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ConfigError, match=rf"output token={token} is not allowed: 0 to {VOCAB - 1}"):
        TokenCounts(2, VOCAB, "cpu").reset([1], [[0, token]])


@pytest.mark.gpu
def test_counts_on_cuda_do_not_wait():
    counts = TokenCounts(4, VOCAB, "cuda")
    slots, tokens = torch.tensor([2, 0], device="cuda"), torch.tensor([[3, 3, 1], [6, -1, -1]], device="cuda")
    num_tokens = torch.tensor([2, 1], device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        counts.reset([2, 3], [[3, 5], []])
        counts.add(slots, tokens, num_tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(counts, {2: [3, 5, 3, 3], 0: [6]})
