"""Outputs under a grammar: how it is read, and what is said without xgrammar."""

import json
import sys

import pytest

from compare_kit import write_outputs
from ddtree.errors import MissingExtraError
from ddtree.trace.files import ReplayOptions, replay_file
from ddtree.trace.outputs import Grammar, Sampling

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({}, None),
        ({"regex": None, "json_schema": None}, None),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"')),
        ({"json_schema": json.dumps(SCHEMA)}, Grammar("json_schema", json.dumps(SCHEMA))),
        ({"json_schema": SCHEMA}, Grammar("json_schema", json.dumps(SCHEMA))),
    ],
)
def test_a_grammar_is_read_from_the_sampling_parameters(given, grammar):
    sampling = Sampling.of({"temperature": 0, **given})
    assert sampling.grammar == grammar
    assert sampling.changes_logits == (grammar is not None)


@pytest.mark.parametrize("given", [{"regex": "a"}, {"json_schema": SCHEMA}, {"ebnf": "x"}])
def test_without_xgrammar_the_install_is_named_before_anything_is_loaded(tmp_path, monkeypatch, given):
    monkeypatch.setattr("ddtree.trace.grammar.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    row = {"prompt_tokens": [5], "tokens": [7], "sampling": {"temperature": 0, **given}, "model": "m",
           "dtype": "float32"}  # fmt: skip
    path = write_outputs(tmp_path / "o", [row])
    with pytest.raises(MissingExtraError, match=r"xgrammar is not .* pip install 'sglang-ddtree\[grammar\]'"):
        replay_file(path, ReplayOptions(), lambda name, dtype: pytest.fail("the target was loaded"))
