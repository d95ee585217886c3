"""Figures from answers, against hand-made ones."""

import hashlib
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench_kit import FakeEngine
from ddtree.bench.measure import (
    Answer,
    CellExtras,
    Observed,
    between_tokens_ms,
    figures,
    output_sha256,
    percentiles,
)
from ddtree.bench.run_format import Arm, CellKey
from ddtree.config import Mode

KEY = CellKey("embedded tree:4", "one", 1, 0.0, 0)
VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


def answer(**changes):
    fields = {
        "tokens": (5, 6, 7, 8), "text": "abcd", "prompt_tokens": 9, "new_tokens": 4, "finish_reason": "stop",
        "begin_s": 10.0, "first_s": 10.25, "end_s": 11.0, "rounds": 2,
        "chunk_times": ((10.25, 1), (10.75, 1), (11.0, 2)), "accept_histogram": {1: 1, 2: 1},
    }  # fmt: skip
    return Answer(**fields | changes)


def test_the_figures_of_a_request():
    (request,) = figures(KEY, 1.0, [answer()]).requests
    assert (request.prompt, request.prompt_tokens, request.new_tokens) == (0, 9, 4)
    assert (request.total_s, request.first_token_s, request.decode_s) == (1.0, 0.25, 0.75)
    assert (request.rounds, request.finish_reason, request.is_correct) == (2, "stop", None)


def test_decode_time_is_the_engines_own_where_it_has_one():
    assert figures(KEY, 1.0, [answer(decode_s=0.5)]).requests[0].decode_s == 0.5


def test_without_a_first_token_the_whole_request_is_decoding():
    (request,) = figures(KEY, 1.0, [answer(first_s=None, chunk_times=())]).requests
    assert (request.first_token_s, request.decode_s) == (None, 1.0)


def test_a_chunks_tokens_share_its_gap():
    # Gaps: 500 ms for one token, 250 ms for two, so that the tokens waited 500, 125 and 125 ms.
    gaps = between_tokens_ms([answer()])
    assert gaps["50"] == pytest.approx(125)
    assert gaps["90"] == pytest.approx(125 + 375 * 0.8)
    assert gaps["99"] == pytest.approx(125 + 375 * 0.98)


def test_no_gap_is_known_of_answers_with_one_chunk_or_none():
    assert between_tokens_ms([answer(chunk_times=()), answer(chunk_times=((1.0, 3),))]) is None


@settings(max_examples=30)
@given(VALUES)
def test_percentiles_lie_within_the_values_and_rise(values):
    found = percentiles(values, (0, 50, 90, 99, 100))
    assert found == sorted(found)
    assert (found[0], found[-1]) == (min(values), max(values))
    assert math.isclose(found[1], statistics.median(values), rel_tol=1e-9, abs_tol=1e-9)


@settings(max_examples=30)
@given(VALUES, st.integers(0, 100))
def test_at_most_a_share_of_the_values_is_below_its_percentile(values, percent):
    (found,) = percentiles(values, (percent,))
    below = sum(value < found for value in values)
    assert below <= math.ceil(percent / 100 * (len(values) - 1))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.floats(0.001, 10))
def test_the_mean_wait_is_decode_time_over_tokens(counts, gap_s):
    times = [(0.0, 1)] + [((n + 1) * gap_s, count) for n, count in enumerate(counts)]
    gaps = between_tokens_ms([answer(chunk_times=tuple(times))])
    waits = [gap_s * 1e3 / count for count in counts for _ in range(count)]
    assert sum(waits) == pytest.approx(len(counts) * gap_s * 1e3)
    assert gaps["50"] == pytest.approx(statistics.median(waits))


def test_histograms_are_summed_and_agree_with_the_requests():
    engine = FakeEngine(Arm("embedded", Mode.TREE, 4), [])
    chats = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
    wall_s, answers = engine.run(chats, max_tokens=8, temperature=0.0, seeds=(0, 0, 0), concurrency=1)
    cell = figures(KEY, wall_s, answers)
    # After the first token a round commits 4 and the last one 3.
    assert cell.accept_histogram == {"3": 3, "4": 3}
    assert sum(cell.accept_histogram.values()) == sum(request.rounds for request in cell.requests)
    tokens = sum(int(n) * count for n, count in cell.accept_histogram.items())
    assert tokens == sum(request.new_tokens - 1 for request in cell.requests)
    assert cell.accept_length == 3.5
    # Half a second to the first token and two rounds of two seconds, three times.
    assert cell.wall_s == 13.5
    assert cell.tokens_per_s == pytest.approx(24 / 13.5)
    assert cell.decode_tokens_per_s == pytest.approx(21 / 12)


def test_one_unknown_histogram_leaves_the_sum_unknown():
    cell = figures(KEY, 1.0, [answer(), answer(accept_histogram=None)])
    assert cell.accept_histogram is None
    assert cell.accept_length == pytest.approx(6 / 4)  # by rounds


def test_what_is_known_beside_the_answers():
    extras = CellExtras([True, None], Observed({1: 2, 0: 7}, {"draft": 0.5}), 123, 4.5)
    cell = figures(KEY, 1.0, [answer(), answer()], extras)
    assert [request.is_correct for request in cell.requests] == [True, None]
    assert (cell.rank_histogram, cell.stages_ms) == ({"0": 7, "1": 2}, {"draft": 0.5})
    assert (cell.peak_memory_bytes, cell.energy_j) == (123, 4.5)


def test_stage_times_of_answers_are_weighted_by_their_rounds():
    answers = [
        answer(stages_ms={"draft": 1.0}, rounds=3),
        answer(stages_ms={"draft": 5.0}, rounds=1),
        answer(),
    ]
    assert figures(KEY, 1.0, answers).stages_ms == {"draft": 2.0}


def test_the_checksum_is_of_the_tokens_or_of_the_text():
    assert output_sha256(answer(tokens=(1, 23))) != output_sha256(answer(tokens=(12, 3)))
    assert output_sha256(answer(text="other")) == output_sha256(answer())
    plain = answer(tokens=None, text="Grüße \ud800")
    expected = hashlib.sha256("Grüße \ud800".encode("utf-8", "surrogatepass")).hexdigest()[:16]
    assert output_sha256(plain) == f"text:{expected}"  # never that of tokens


def test_an_answer_without_tokens_does_not_lower_the_speed_of_others():
    empty = answer(tokens=(), new_tokens=0, chunk_times=(), first_s=None)
    assert figures(KEY, 1.0, [answer(), empty]).decode_tokens_per_s == pytest.approx(3 / 1.75)
