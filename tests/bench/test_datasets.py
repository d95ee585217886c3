"""Prompt sets that ship, files, and sets of the hub through a fake `datasets`."""

import hashlib
import json
import random
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.bench.datasets import (
    KNOWN_SETS,
    PROMPTS,
    SHIPPED_SETS,
    CodeTask,
    Prompt,
    load_prompt_set,
    read_prompts,
)
from ddtree.bench.hub_sets import HUB_SETS
from ddtree.errors import ConfigError, MissingExtraError

SUMS = {
    "gsm8k": "d20e9662cdbf2588dd40fe6a87fc822381049e9dfa9685e104abb016ad7448c4",
    "humaneval": "3a168c20ac245752fbb3233ef38f1f48c455c3ee33c09391cce60e410e9d5f89",
    "mt_bench": "3ef8abb6b016d25fe89f84d648d44e8c3e59d18212227b2aaf8e796c2bd0b383",
}
ROWS = {
    "aime24": {"id": 60, "problem": "P", "solution": "S", "answer": "204", "url": "U", "year": "2024"},
    "aime25": {"problem_idx": 1, "problem": "P", "answer": 70, "problem_type": ["N"]},
    "alpaca": {"instruction": "I", "input": "", "output": "O", "text": "T"},
    "livecodebench": {
        "question_id": "abc301_a",
        "question_content": "Q",
        "starter_code": "",
        "platform": "A",
    },
    "math_500": {"problem": "P", "solution": "S", "answer": "\\frac{1}{2}", "unique_id": "test/a/1.json"},
    "mbpp": {"task_id": 11, "prompt": "P", "code": "C", "test_list": ["assert True"], "test_imports": []},
    "swe_bench_lite": {"instance_id": "a__b-1", "problem_statement": "P", "repo": "a/b", "patch": "D"},
}


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` whose `load_dataset` yields rows of the set under test and notes how it was called."""
    calls, state = [], types.SimpleNamespace(rows=[], error=None, read=0)

    def rows():
        for row in state.rows:
            state.read += 1
            yield row

    def load_dataset(path, name=None, *, split, data_files=None, streaming=False):
        calls.append((path, name, split, data_files, streaming))
        if state.error:
            raise state.error
        return rows()

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    state.calls = calls
    return state


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("name", "rows"), [("gsm8k", 1319), ("humaneval", 164), ("mt_bench", 80)])
def test_shipped_sets_are_whole(name, rows):
    assert hashlib.sha256((PROMPTS / f"{name}.jsonl").read_bytes()).hexdigest() == SUMS[name]
    taken = load_prompt_set(name, 5000)
    assert len(taken.prompts) == rows
    assert taken.notice == f"{name} has {rows} prompts, fewer than the 5000 asked for: all are taken"
    assert len({prompt.id for prompt in taken.prompts}) == rows
    assert {len(prompt.turns) for prompt in taken.prompts} == {2 if name == "mt_bench" else 1}
    assert all((p.answer is not None) == (name == "gsm8k") for p in taken.prompts)
    assert all((p.code is not None) == (name == "humaneval") for p in taken.prompts)


def test_shipped_files_are_small_and_their_licences_are_told():
    assert sum(path.stat().st_size for path in PROMPTS.iterdir()) < 1_500_000
    text = (PROMPTS / "LICENCES").read_text(encoding="utf-8")
    assert all(f"{name}.jsonl" in text for name in SHIPPED_SETS)
    assert text.count("Copyright (c)") == 2
    assert "Permission is hereby granted" in text


def test_the_papers_sets_and_counts():
    counts = {name: entry.paper_count for name, entry in {**SHIPPED_SETS, **HUB_SETS}.items()}
    assert counts == {
        "aime24": 30, "aime25": 30, "alpaca": 128, "gsm8k": 128, "humaneval": 164, "livecodebench": 128,
        "math_500": 128, "mbpp": 128, "mt_bench": 80, "swe_bench_lite": 128,
    }  # fmt: skip
    assert set(KNOWN_SETS) == set(counts)
    assert len(load_prompt_set("gsm8k").prompts) == 128


def test_first_rows_without_a_seed_and_a_stable_shuffle_with_one():
    first = load_prompt_set("gsm8k", 3).prompts
    assert [prompt.id for prompt in first] == ["gsm8k-0", "gsm8k-1", "gsm8k-2"]
    few, more = load_prompt_set("gsm8k", 4, 7), load_prompt_set("gsm8k", 9, 7)
    assert more.prompts[:4] == few.prompts
    assert [prompt.id for prompt in few.prompts] == ["gsm8k-7", "gsm8k-443", "gsm8k-708", "gsm8k-1073"]
    assert load_prompt_set("gsm8k", 4, 8).prompts != few.prompts


def test_the_checksum_is_of_what_is_asked_and_its_order(tmp_path):
    a, b = {"prompt": "a", "answer": 1}, {"prompt": "b"}
    sums = [
        load_prompt_set(write(tmp_path / f"{number}.jsonl", *rows)).sha256
        for number, rows in enumerate([[a, b], [b, a], [a], [a | {"answer": 2}, b], [a | {"id": "x"}, b]])
    ]
    assert len(set(sums[:4])) == 4
    assert sums[4] == sums[0]
    assert sums[0] == hashlib.sha256(b'[["a"], "1", null]\n[["b"], null, null]\n').hexdigest()


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "p"}, Prompt("1", ("p",))),
        ({"question": "q", "answer": "#### 5"}, Prompt("1", ("q",), "#### 5")),
        ({"text": "t", "answer": 5}, Prompt("1", ("t",), "5")),
        ({"text": "t", "answer": None, "id": 7}, Prompt("7", ("t",))),
        ({"id": "x", "turns": ["a", "b"], "prompt": "no"}, Prompt("x", ("a", "b"))),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                          {"role": "user", "content": "c"}]},
            Prompt("1", ("a", "c")),
        ),
        (
            {"turns": ["a"], "prompt": "def f(): ", "entry_point": "f", "test": "T"},
            Prompt("1", ("a",), None, CodeTask("def f(): ", "f", "T")),
        ),
    ],
)  # fmt: skip
def test_rows_of_files(tmp_path, row, prompt):
    taken = load_prompt_set(write(tmp_path / "mine.jsonl", row))
    assert taken.prompts == (prompt,)
    assert taken.name == taken.source == str(tmp_path / "mine.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt; write one JSON object a line"),
        ("{", "line 1 is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"prompt": "a"}\n\n{"other": 1}', "line 3: {'other': 1} is not allowed; write \"turns\""),
        ('{"turns": []}', "is not allowed; write"),
        ('{"turns": "text"}', "is not allowed; write"),
        ('{"prompt": " "}', "is not allowed; write"),
        ('{"prompt": 5}', "is not allowed; write"),
        ('{"messages": {"role": "user"}}', "messages={'role': 'user'} is not allowed"),
        (
            '{"messages": [{"role": "system", "content": "s"}]}',
            "role='system' is not allowed: user or assistant",
        ),
        ('{"messages": [{"role": "assistant", "content": "s"}]}', "is not allowed; write"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "is not allowed; write"),
        ('{"prompt": "a", "answer": [1]}', "answer=[1] is not allowed: text or a finite number"),
        ('{"prompt": "a", "answer": NaN}', "answer=nan is not allowed: text or a finite number"),
        ('{"prompt": "a", "answer": -Infinity}', "answer=-inf is not allowed"),
        ('{"prompt": "a", "answer": true}', "answer=True is not allowed"),
        ('{"prompt": "a", "test": "t", "entry_point": "f()"}', "entry_point='f()' is not allowed"),
        ('{"prompt": "\\ud800"}', "half a surrogate pair"),
        ("[" * 100_000, "is not JSON"),
        ('{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "line 2: id 'x' is also that of line 1"),
    ],
)
def test_bad_files_are_told_in_one_line(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_prompt_set(str(path))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_prompt_set(str(binary))
    with pytest.raises(ConfigError, match="Is a directory"):
        load_prompt_set(str(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        load_prompt_set(str(tmp_path / "absent.jsonl"))
    for name in ("nope", "", "a\0b", "GSM8K"):
        with pytest.raises(ConfigError, match="one of gsm8k, humaneval, mt_bench, aime24"):
            load_prompt_set(name)


@pytest.mark.parametrize(("count", "seed"), [(0, None), (-1, None), (1.5, None), (True, None), (1, "7")])
def test_counts_and_seeds_are_checked(count, seed):
    with pytest.raises(ConfigError, match=r"(count|seed)="):
        load_prompt_set("gsm8k", count, seed)


@given(
    st.dictionaries(
        st.sampled_from(["turns", "prompt", "messages", "answer", "id", "test", "entry_point"]),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content"]), inner)
            ),
            max_leaves=5,
        ),
    )
)
def test_any_row_is_a_prompt_or_a_config_error(tmp_path_factory, row):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    write(path, row)
    try:
        prompts = read_prompts(path)
    except ConfigError:
        return
    assert all(turn.strip() for turn in prompts[0].turns)


@pytest.mark.parametrize("name", HUB_SETS)
def test_sets_of_the_hub(hub, name):
    entry = HUB_SETS[name]
    hub.rows = [ROWS[name]] * 200
    taken = load_prompt_set(name)
    assert len(taken.prompts) == entry.paper_count
    path, config, split, files, streaming = hub.calls[0]
    assert (path, config, split) == (entry.path, entry.config, entry.split)
    assert (files is not None) == streaming == (name == "livecodebench")
    assert hub.read <= entry.paper_count
    prompt = taken.prompts[0]
    answers = {"aime24": "204", "aime25": "70", "math_500": "\\frac{1}{2}"}
    assert prompt.answer == answers.get(name)
    asked = (
        ROWS[name].get("problem") or ROWS[name].get("problem_statement") or ROWS[name].get("question_content")
    )
    assert (asked or ROWS[name].get("prompt") or ROWS[name]["instruction"]) in prompt.turns[0]
    assert ("\\boxed{}" in prompt.turns[0]) == (name in answers)
    assert taken.licence == entry.licence
    assert taken.source.startswith("hf://datasets/")


def test_parts_of_rows_that_may_be_empty(hub):
    hub.rows = [ROWS["alpaca"] | {"input": "X"}]
    assert load_prompt_set("alpaca").prompts[0].turns == ("I\n\nX",)
    hub.rows = [ROWS["livecodebench"], ROWS["livecodebench"] | {"starter_code": "class Solution:"}]
    plain, started = (prompt.turns[0] for prompt in load_prompt_set("livecodebench").prompts)
    assert "standard input" in plain
    assert "standard input" not in started
    assert "```python\nclass Solution:\n```" in started


def test_a_seeded_set_of_the_hub_is_shuffled_whole(hub):
    hub.rows = [ROWS["mbpp"] | {"task_id": number} for number in range(200)]
    order = list(range(200))
    random.Random(3).shuffle(order)
    taken = load_prompt_set("mbpp", 10, 3)
    assert [prompt.id for prompt in taken.prompts] == [str(number) for number in order[:10]]


def test_a_hub_that_does_not_answer_is_told_in_one_line(hub):
    hub.error = ConnectionError("Couldn't reach 'tatsu-lab/alpaca' on the Hub\nmore lines")
    with pytest.raises(ConfigError) as caught:
        load_prompt_set("alpaca")
    assert str(caught.value) == (
        "cannot fetch prompt set 'alpaca' from hf://datasets/tatsu-lab/alpaca (train split): Couldn't reach "
        "'tatsu-lab/alpaca' on the Hub; check the network and HF_TOKEN, or use gsm8k, humaneval, mt_bench "
        "or a JSONL file"
    )


def test_a_set_that_changed_on_the_hub_is_told(hub):
    hub.rows = [{"question": "Q", "answer": "A"}]
    with pytest.raises(ConfigError, match=r"row 0 .*: no column 'problem', only answer, question"):
        load_prompt_set("math_500")
    hub.rows = []
    with pytest.raises(ConfigError, match="has no rows"):
        load_prompt_set("math_500")
    hub.rows = [ROWS["mbpp"] | {"prompt": None}]
    with pytest.raises(ConfigError, match="is not allowed"):
        load_prompt_set("mbpp")


def test_without_datasets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'sglang-ddtree\[bench\]'"):
        load_prompt_set("aime24")
