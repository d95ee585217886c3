"""The page's data is the trace's: nothing is lost, nothing is made up, and broken trees are told."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings

from ddtree.bench.trace_view_data import MAX_PROMPT_CHARS, SUMMARY_NOTE, page_data, prompt_text, tree_fault
from ddtree.bench.trace_view_part import TracePart
from ddtree.bench.trace_view_text import IdTexts
from ddtree.trace.read import Trace
from trace_view_kit import HEADER, part_of, plain_request, requests

TREE = replace(
    plain_request().rounds[0],
    tokens=(0, 1, 5, 6),
    parents=(-1, 0, 0, 1),
    log_probs=(0.0, -0.25, -1.5, -0.75),
    target=((-0.5, 1.25), (-0.125, 0.0)),
)


def data_of(*traced, header=HEADER):
    """Page data as the page reads it."""
    return json.loads(json.dumps(page_data(part_of(*traced, header=header), IdTexts(), "t"), allow_nan=False))


@settings(max_examples=20, deadline=None)
@given(requests())
def test_every_round_is_the_traces(traced):
    (request,) = data_of(traced)["requests"]
    assert [request["id"], request["mode"], request["node_budget"]] == ["r0", "tree", 40]
    assert request["new_tokens"] == len(traced.tokens)
    assert request["problems"] == []
    for found, entry in zip(request["rounds"], traced.rounds, strict=True):
        for name in ("round", "position", "root", "mode", "node_budget", "round_ms"):
            assert found[name] == getattr(entry, name)
        names = ["accept_tokens", "accept_indices"]
        names += ["tokens", "parents", "log_probs"] if entry.tokens else []
        for name in names:
            assert found[name] == list(getattr(entry, name))
        assert found["target"] == [list(pair) for pair in entry.target]
        assert ("tokens" in found) == bool(entry.tokens)
        assert "fault" not in found


@settings(max_examples=20, deadline=None)
@given(requests())
def test_every_token_has_a_text_and_the_text_grows_by_the_rounds(traced):
    data = data_of(traced)
    (request,) = data["requests"]
    for entry in traced.rounds:
        assert {str(token) for token in (entry.root, *entry.accept_tokens, *entry.tokens)} <= set(
            data["texts"]
        )
    before = len(traced.request.prompt_tokens)
    ends = [entry.position - before + 1 + len(entry.accept_tokens) for entry in traced.rounds]
    emitted = [min(end, len(traced.tokens)) for end in [1, *ends]]
    texts = [" ".join(f"#{token}" for token in traced.tokens[:end]) for end in emitted]
    assert [request["text"][:length] + tail for length, tail in request["steps"]] == texts


def test_numbers_that_are_not_finite_are_not_known():
    entry = replace(TREE, round_ms=math.nan, log_probs=(0.0, -1.0, -math.inf, math.nan))
    entry = replace(entry, target=((math.nan, 0.5), (-1.0, math.inf)), stages_ms={"draft": math.nan, "a": 1})
    (found,) = data_of(plain_request(num_rounds=1)._replace(rounds=(entry,)))["requests"][0]["rounds"]
    assert (found["round_ms"], found["log_probs"]) == (None, [0.0, -1.0, None, None])
    assert found["target"] == [[None, 0.5], [-1.0, None]]
    assert found["stages_ms"] == {"a": 1}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, None),
        ({"parents": (-1, 0, 0)}, "different lengths"),
        ({"log_probs": (0.0,)}, "different lengths"),
        ({"parents": (-1, 0, 2, 1)}, "node 2 has the parent 2"),
        ({"parents": (0, 0, 0, 1)}, "node 0 has the parent 0"),
        ({"parents": (-1, 0, -1, 1)}, "node 2 has the parent -1"),
        ({"accept_indices": (1, 3)}, "does not begin at the root"),
        ({"accept_indices": ()}, "does not begin at the root"),
        ({"accept_indices": (0, 3)}, "node 3 of its path is no child of node 0"),
        ({"accept_indices": (0, 9)}, "node 9 of its path is no child of node 0"),
        ({"accept_indices": (0,)}, "1 nodes, and 2 tokens"),
    ],
)
def test_a_tree_that_cannot_be_drawn_says_why(change, told):
    entry = replace(TREE, **change)
    fault = tree_fault(entry)
    (found,) = data_of(plain_request(num_rounds=1)._replace(rounds=(entry,)))["requests"][0]["rounds"]
    assert found.get("fault") == fault
    assert ("tokens" in found) == (told is None)
    assert fault is None if told is None else told in fault


def test_rounds_that_do_not_fit_are_told():
    traced = plain_request()
    wrong = replace(traced.rounds[1], root=99)
    found = data_of(traced._replace(rounds=(traced.rounds[0], wrong, traced.rounds[2])))
    assert found["requests"][0]["problems"] == [
        "round 2 at position 5 has the root 99, but 2 was committed there"
    ]


def test_a_trace_without_trees_says_how_to_get_them():
    assert data_of(plain_request())["notes"] == [SUMMARY_NOTE]
    assert data_of(plain_request()._replace(rounds=(TREE,)))["notes"] == []
    assert data_of()["notes"] == []


def test_what_is_left_out_is_told():
    part = TracePart(Trace(HEADER, (plain_request("a"),), True), {"a": 5}, 3, 40)
    data = page_data(part, IdTexts(), "t", ["mine"])
    assert data["notes"] == [
        "mine",
        "A part of the trace: the first 1 of 4 requests, 3 of 48 rounds.",
        "The trace's last line broke off: what came after it is missing.",
        SUMMARY_NOTE,
    ]
    assert data["requests"][0]["rounds_left"] == 5


def test_values_that_hold_others_become_text():
    request = plain_request()
    sampling = {"temperature": 0.5, "logit_bias": {"3": 1.0}, "stop": [], "seed": None, "top_p": math.inf}
    request = request._replace(request=replace(request.request, sampling=sampling))
    assert data_of(request)["requests"][0]["sampling"] == {
        "temperature": 0.5, "logit_bias": "{'3': 1.0}", "top_p": None
    }  # fmt: skip


def test_a_long_prompt_is_cut_in_its_middle():
    text = "".join(chr(97 + index % 26) for index in range(MAX_PROMPT_CHARS + 10))
    assert prompt_text(text[10:]) == {"begin": text[10:], "left": 0, "end": ""}
    found = prompt_text(text)
    assert found["left"] == 10
    assert len(found["begin"] + found["end"]) == MAX_PROMPT_CHARS
    assert text.startswith(found["begin"])
    assert text.endswith(found["end"])
