"""Endings: which outputs should have ended elsewhere."""

import pytest

from ddtree.trace.endings import early_end, ending_problem, is_overrun
from ddtree.trace.outputs import Output

PROMPT = [5, 17, 91, 33, 8]
STOP = (2,)


@pytest.mark.parametrize(
    ("tokens", "sampling", "finish", "problem"),
    [
        ([5, 6], {"max_new_tokens": 2}, {"type": "length"}, None),
        ([5], {"max_new_tokens": 2}, {"type": "length"}, "after 1 tokens"),
        ([5] * 94, {"max_new_tokens": None}, {"type": "length"}, None),
        ([5] * 90, {"max_new_tokens": None}, {"type": "length"}, "after 90"),
        ([5, 2], {"max_new_tokens": 9}, {"type": "stop", "matched": 2}, None),
        ([5, 6], {"max_new_tokens": 9}, {"type": "stop", "matched": 2}, "last one is 6"),
        ([5, 6], {"max_new_tokens": 9}, {"type": "stop", "matched": 6}, "ended by token 6"),
        ([5, 6], {"max_new_tokens": 9, "stop_token_ids": [6]}, {"type": "stop", "matched": 6}, None),
        ([5, 2, 6], {"max_new_tokens": 3}, {"type": "length"}, "place 1"),
        ([5, 2, 6], {"max_new_tokens": 3, "ignore_eos": True}, {"type": "length"}, None),
        ([5, 6], {"max_new_tokens": 9}, {"type": "stop", "matched": "text"}, None),
        ([5, 6], {"max_new_tokens": 9}, {"type": "abort"}, "abort"),
        ([5, 6], {"max_new_tokens": 9}, {"type": "cancel"}, None),
        ([5, 2], {"max_new_tokens": 9}, {"type": "stop"}, None),
        ([5, 6], {"max_new_tokens": 9}, {"type": "stop"}, "6 is no end token"),
        ([5, 6], {"max_new_tokens": 9, "stop": ["x"]}, {"type": "stop"}, None),
        ([5, 6], {}, None, None),
        ([2, 6], {}, None, "place 0"),
    ],
)
def test_endings(tokens, sampling, finish, problem):
    found = ending_problem(Output(PROMPT, tokens, sampling, finish=finish), STOP, context_tokens=101)
    assert (problem is None) if found is None else (problem is not None and problem in found)


@pytest.mark.parametrize(
    ("tokens", "changes", "ended_by", "known"),
    [
        ([5, 2, 6, 7], {}, "length", True),
        ([5, 6, 2, 7, 8, 9], {}, "length", True),  # a round of four from the end token to the limit
        ([5, 2, 6, 7, 8, 9], {}, "length", False),  # one of four cannot have both
        ([2, 6, 7, 8], {}, "length", False),  # prefill's token came alone
        ([5, 6, 7, 2], {}, "length", False),
        ([5, 2, 6, 7], {"ignore_eos": True}, "length", False),
        ([5, 2, 6, 7], {"max_new_tokens": 5}, "length", False),
        ([5, 2, 6, 7], {}, "stop", False),
    ],
)
def test_overruns_are_told_from_missed_end_tokens(tokens, changes, ended_by, known):
    sampling = {"max_new_tokens": len(tokens)} | changes
    output = Output(PROMPT, tokens, sampling, finish={"type": ended_by})
    assert is_overrun(output, STOP, round_tokens=4) is known
    assert not is_overrun(output, STOP, round_tokens=0)


def test_ignored_end_tokens_leave_the_requests_own_in_the_embedded_engine():
    sampling = {"ignore_eos": True, "stop_token_ids": [6]}
    for tokens, order, place in (
        ([5, 6, 7], "embedded", 1), ([5, 6, 7], "sglang", None), ([5, 2, 7], "embedded", None)
    ):  # fmt: skip
        assert early_end(Output(PROMPT, tokens, sampling, order=order), STOP) == place


def test_a_context_that_is_not_known_is_no_problem():
    output = Output(PROMPT, [5, 6], {"max_tokens": 9}, finish={"type": "length"})
    assert ending_problem(output, STOP, None) is None
    assert ending_problem(output, STOP, 100) is not None
