"""`ddtree generate --trace` and `demo --trace`: the same text, and a trace of how it came."""

import pytest

from ddtree.cli import loading
from ddtree.config import Mode, SamplingParams
from ddtree.trace.read import read_trace
from engine_kit import VOCAB_SIZE, scripted_engine, tiny_target
from tiny_models import tiny_llama

TEXT = "Why is the sky blue?"
FLAGS = ("generate", TEXT, "--raw", "--budget", "4", "--max-tokens", "24")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    target = tiny_target(tmp_path_factory.mktemp("target"), tiny_llama(vocab_size=VOCAB_SIZE))
    return scripted_engine(target, SamplingParams(max_tokens=24), tuple(TEXT.encode()))


@pytest.fixture
def loads(monkeypatch, tiny):
    """How often the engine was loaded."""
    configs = []
    monkeypatch.setattr(loading, "load_engine", lambda config: configs.append(config) or tiny)
    return configs


@pytest.mark.parametrize("detail", ["summary", "full"])
def test_the_text_is_the_same_and_the_trace_is_whole(command, loads, tmp_path, detail):
    path = tmp_path / "t.jsonl"
    plain = command(*FLAGS)
    code, out, err = command(*FLAGS, "--trace", str(path), "--trace-detail", detail)
    assert (code, out) == (0, plain[1])
    assert "warning" not in err.lower()
    (traced,) = read_trace(path).requests
    assert (traced.request.mode, traced.request.prompt_tokens) == (Mode.TREE, tuple(TEXT.encode()))
    assert len(traced.tokens) == 24
    assert all(bool(each.tokens) == (detail == "full") for each in traced.rounds)


def test_json_is_not_changed_by_a_full_trace(command, loads, tmp_path):
    code, out, _ = command(*FLAGS, "--json", "--trace", str(tmp_path / "t"), "--trace-detail", "full")
    assert code == 0
    assert '"logprobs"' not in out


@pytest.mark.parametrize("name", ["", "none/t.jsonl", "notes.txt"])
def test_a_file_that_cannot_be_used_is_refused_before_anything_is_loaded(refused, loads, tmp_path, name):
    (tmp_path / "notes.txt").write_text("mine\n")
    assert "name another" in refused(*FLAGS, "--trace", str(tmp_path / name))
    assert loads == []
    assert (tmp_path / "notes.txt").read_text() == "mine\n"


def test_a_detail_without_a_trace_is_told(command, loads):
    _, _, err = command(*FLAGS, "--trace-detail", "full")
    assert "--trace-detail full has no effect without --trace" in err


def test_an_unknown_detail_is_refused(refused, loads):
    assert "'trees'" in refused(*FLAGS, "--trace-detail", "trees")


def test_a_trace_of_the_demo_has_every_prompt_in_every_mode(command, loads, tmp_path):
    path = tmp_path / "t.jsonl"
    flags = ("demo", "--max-tokens", "6", "--budget", "4")
    code, out, _ = command(*flags, "--trace", str(path), "--trace-detail", "full")
    assert code == 0
    assert "3 of 3 texts identical" in out
    requests = read_trace(path).requests
    assert [traced.request.mode for traced in requests] == [*Mode] * 3
    assert len({traced.request.prompt_tokens for traced in requests}) == 3
    assert all(len(traced.tokens) == 6 for traced in requests)
    assert all(each.tokens for traced in requests for each in traced.rounds)


def test_a_trace_of_the_demo_is_refused_before_anything_is_loaded(refused, loads, tmp_path):
    assert "name another" in refused("demo", "--trace", str(tmp_path / "none" / "t.jsonl"))
    assert loads == []
