"""Outputs files and traces as runs, and what of them is refused."""

import json
from dataclasses import replace

import pytest

from compare_kit import edited, records, write_outputs, write_trace
from ddtree.errors import ConfigError
from ddtree.trace.outputs import Sampling
from ddtree.trace.run_file import read_run
from ddtree.trace_format import TraceEnd, TraceRound, to_line

ROW = {"prompt_tokens": [5, 6], "tokens": [7, 8], "sampling": {"temperature": 0}}


class Bytes:
    """Token id = byte, behind a token 1 where special tokens are asked for."""

    def encode(self, text, *, add_special_tokens=True):
        return [1] * add_special_tokens + list(text.encode())

    def decode(self, tokens, *, skip_special_tokens=False):
        return bytes(tokens).decode()


def test_a_trace_is_read_with_its_rounds_and_margins(tmp_path):
    run = read_run(write_trace(tmp_path / "t.jsonl", records(2)))
    answer = run.answers[1]
    assert (run.order, run.dtype, run.target["name"]) == ("embedded", "float32", "tiny")
    assert run.num_unfinished == 0
    assert (answer.mode, answer.node_budget, answer.output.finish) == ("tree", 8, {"type": "length"})
    assert len(answer.margins) == len(answer.output.tokens) == 41
    assert sum(answer.accept_lengths) >= 40
    assert answer.rounds[0].root == answer.output.tokens[0]


def test_a_request_without_an_end_is_counted_and_left_out(tmp_path):
    lines = [line for line in records(3) if not (isinstance(line, TraceEnd) and line.id == "r1")]
    run = read_run(write_trace(tmp_path / "t.jsonl", lines))
    assert ([answer.output.name for answer in run.answers], run.num_unfinished) == (["r0", "r2"], 1)


def test_figures_stand_at_their_tokens_whatever_is_missing(tmp_path):
    lines = edited(records(1), lambda line: isinstance(line, TraceEnd),
                   lambda line: TraceEnd(line.id, line.tokens, "length", {}))  # fmt: skip
    second = next(line for line in lines if isinstance(line, TraceRound) and line.round == 2)
    lines = edited(lines, lambda line: line is second, lambda line: replace(line, target=()))
    margins = read_run(write_trace(tmp_path / "t.jsonl", lines)).answers[0].margins
    missing = {0, *(second.position - 2 + number for number in range(len(second.accept_tokens)))}
    assert {place for place, figure in enumerate(margins) if figure is None} == missing
    bare = [replace(line, target=()) if isinstance(line, TraceRound) else line for line in lines]
    assert read_run(write_trace(tmp_path / "t.jsonl", bare)).answers[0].margins == ()


def test_a_trace_that_breaks_off_is_read_up_to_there(tmp_path):
    content = b"".join(map(to_line, records(3)))
    path = tmp_path / "t.jsonl"
    path.write_bytes(content[:-30])
    assert [answer.output.name for answer in read_run(path).answers] == ["r0", "r1"]


def test_what_a_trace_of_sglang_says(tmp_path):
    changes = {"engine": "sglang", "versions": {"packages": {"sglang": "0.5.17"}},
               "settings": {"max_accept_tokens": 1, "context_length": 77}}  # fmt: skip
    run = read_run(write_trace(tmp_path / "t.jsonl", records(1, changes=changes)))
    assert (run.order, run.sglang, run.walks_whole, run.context_tokens) == ("sglang", "0.5.17", False, 77)


def test_an_outputs_file_needs_no_more_than_tokens_and_temperature(tmp_path):
    run = read_run(write_outputs(tmp_path / "o.jsonl", [ROW, ROW | {"finish_reason": "stop"}]))
    assert [answer.output.name for answer in run.answers] == ["line 1", "line 2"]
    assert [answer.output.finish for answer in run.answers] == [None, {"type": "stop"}]
    assert (run.target, run.dtype, run.order) == (None, None, "sglang")


def test_an_outputs_file_may_tell_more(tmp_path):
    facts = {"model": "m", "dtype": "bfloat16", "engine": "embedded", "mode": "tree", "node_budget": 4,
             "accept_lengths": [1]}  # fmt: skip
    run = read_run(write_outputs(tmp_path / "o.jsonl", [ROW | facts]))
    assert (run.target, run.dtype, run.order) == ({"name": "m"}, "bfloat16", "embedded")
    (answer,) = run.answers
    assert (answer.mode, answer.node_budget, answer.accept_lengths) == ("tree", 4, (1,))
    assert read_run(tmp_path / "o.jsonl", order="sglang").answers[0].output.order == "sglang"


def test_texts_are_read_by_the_tokenizer(tmp_path):
    row = {"prompt": "ab", "text": "cd", "sampling": {"temperature": 0}, "finish_reason": "stop"}
    answer = read_run(write_outputs(tmp_path / "o.jsonl", [row]), Bytes()).answers[0]
    assert (answer.output.prompt, answer.output.tokens) == ((1, 97, 98), (99, 100))
    assert (answer.text, answer.output.finish) == ("cd", None)  # the end token is not in a text
    with pytest.raises(ConfigError, match="line 1 has a prompt without prompt_tokens: name the model"):
        read_run(tmp_path / "o.jsonl")


@pytest.mark.parametrize("changes", [{"prompt": "a\ud800"}, {"text": "\udfffb"}])
def test_a_text_that_no_tokenizer_reads_is_refused(tmp_path, changes):
    row = {"prompt": "ab", "text": "cd", "sampling": {"temperature": 0}} | changes
    path = write_outputs(tmp_path / "o.jsonl", [row])
    with pytest.raises(ConfigError, match=r"line 1 has a (prompt|text) with half a surrogate pair"):
        read_run(path, Bytes())


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"tokens": [1], "sampling": {"temperature": 0}}, "neither prompt_tokens nor a prompt"),
        (ROW | {"tokens": []}, "tokens=\\[\\]"),
        (ROW | {"tokens": [1, -2]}, "tokens=\\[1, -2\\]"),
        (ROW | {"tokens": [True]}, "tokens=\\[True\\]"),
        (ROW | {"sampling": {}}, "no sampling with a temperature"),
        (ROW | {"sampling": {"temperature": 0, "typical_p": 0.4}}, "typical_p=0.4"),
        (ROW | {"sampling": {"temperature": "warm"}}, "temperature='warm'"),
        (ROW | {"sampling": {"temperature": -1}}, "temperature=-1"),
        (ROW | {"sampling": {"temperature": 1, "seed": 2**63}}, "seed=9223372036854775808"),
        (ROW | {"sampling": {"temperature": 0, "repetition_penalty": 0}}, "repetition_penalty=0"),
        (ROW | {"sampling": {"temperature": 1, "top_p": -2}}, "line 1: .*top_p=-2.0 .*: above 0, at most 1"),
        (ROW | {"sampling": {"temperature": 1, "min_p": 7}}, "line 1: .*min_p=7.0 .*: from 0 to 1"),
        (ROW | {"sampling": {"temperature": 1e308}}, "line 1: .*temperature=1e\\+308 .*: from 0 to 100"),
        (ROW | {"sampling": {"temperature": float("nan")}}, "line 1"),
        (ROW | {"sampling": {"temperature": 0, "presence_penalty": 3}}, "presence_penalty=3.0.*-2 to 2"),
        (ROW | {"engine": "vllm"}, "line 1 has engine='vllm': embedded and sglang are known"),
        (ROW | {"engine": None}, "line 1 has engine=None"),
        (ROW | {"mode": "beam"}, "line 1 has mode='beam': ar, chain, tree are known"),
        (ROW | {"mode": ["ar"]}, "line 1 has mode="),
        (ROW | {"finish_reason": "tired"}, "finish_reason"),
        (ROW | {"accept_lengths": [0]}, "accept_lengths"),
        (ROW | {"model": 3}, "model=3"),
    ],
)
def test_what_a_line_lacks_is_told(tmp_path, row, told):
    with pytest.raises(ConfigError, match=told):
        read_run(write_outputs(tmp_path / "o.jsonl", [row]))


def test_sampling_out_of_its_range_is_told_with_the_request_of_a_trace(tmp_path):
    with pytest.raises(ConfigError, match=r"t\.jsonl, r0: .*top_p=2\.0 is not allowed: above 0"):
        read_run(write_trace(tmp_path / "t.jsonl", records(temperature=1.0, seed=1, top_p=2.0)))


def test_a_file_is_one_run(tmp_path):
    with pytest.raises(ConfigError, match="line 2 has model='b'"):
        read_run(write_outputs(tmp_path / "o.jsonl", [ROW | {"model": "a"}, ROW | {"model": "b"}]))


@pytest.mark.parametrize(("content", "told"), [
    (b"", "no finished output"), (b"\n\n", "no finished output"), (b"hello\n", "line 1 is no JSON object"),
    (json.dumps(ROW).encode() + b"\n\xff\n", "line 2 is no JSON object"),
])  # fmt: skip
def test_other_files_are_refused(tmp_path, content, told):
    path = tmp_path / "o.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        read_run(path)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_run(tmp_path / "none")


def test_an_outputs_file_that_breaks_off_is_read_up_to_there(tmp_path):
    path = tmp_path / "o.jsonl"
    path.write_bytes((json.dumps(ROW) + "\n" + json.dumps(ROW))[:-4].encode())
    assert len(read_run(path).answers) == 1


def test_sampling_parameters_of_both_engines_are_the_same():
    same = {"temperature": 0.5, "logit_bias": {"7": 1}}
    ours = Sampling.of(same | {"seed": 3, "max_tokens": 9, "stop": ["x"], "top_k": 0})
    names = {"sampling_seed": 3, "max_new_tokens": 9, "stop": "x", "top_k": -1}
    theirs = Sampling.of(same | names | {"n": 1, "skip_special_tokens": True, "json_schema": None})
    assert ours == theirs
    assert Sampling.of({"top_k": 1 << 30}).top_k == 0
    assert Sampling.of({"stop": ["a"], "stop_regex": "b"}).stop == ("a", "b")


@pytest.mark.parametrize(("parameters", "order", "greedy"), [
    ({"temperature": 0}, "sglang", True), ({"temperature": 5e-6}, "embedded", True),
    ({"temperature": 5e-6}, "sglang", False), ({"top_k": 1}, "sglang", True), ({}, "sglang", False),
])  # fmt: skip
def test_what_is_greedy(parameters, order, greedy):
    assert Sampling.of(parameters).is_greedy(order) is greedy
