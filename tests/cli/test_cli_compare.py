"""`ddtree replay`, `compare` and `baseline`: what they print, and how they end."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from compare_kit import SAMPLING, edited, records, text_of, write_outputs, write_trace
from ddtree.trace_format import TraceEnd
from tiny_models import tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A checkpoint folder with tokens 0 to 96."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(vocab_size=97).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(97)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)
    return folder


@pytest.fixture
def same(tmp_path):
    paths = [write_trace(tmp_path / name, records()) for name in ("a.jsonl", "b.jsonl")]
    return [str(path) for path in paths]


@pytest.fixture
def other(tmp_path):
    lines = edited(
        records(),
        lambda line: isinstance(line, TraceEnd) and line.id == "r2",
        lambda line: TraceEnd("r2", (*line.tokens[:-1], 1), "length", {}, line.first_target),
    )
    return str(write_trace(tmp_path / "c.jsonl", lines))


def test_equal_runs_end_with_0(command, same):
    code, out, err = command("compare", *same)
    assert (code, err) == (0, "")
    assert "10 of 10 texts are equal" in out
    assert "correct at depth 1" in out
    assert out.endswith("no difference that is more than rounding\n")


def test_different_runs_end_with_1_and_name_it(command, same, other):
    code, out, _ = command("compare", same[0], other)
    assert code == 1
    assert "DIFFERENT, text: r2: texts part at token 40 (position 43): A " in out
    assert "DIFFERENT, round_commit: B, r2: round " in out


def test_the_json_report_has_all_of_it(command, same, other):
    code, out, _ = command("compare", same[0], other, "--json")
    report = json.loads(out)
    assert (code, report["is_different"], report["requests"], report["equal_texts"]) == (1, True, 10, 9)
    assert report["divergences"][0]["index"] == 40
    assert {found["kind"] for found in report["findings"]} == {"text", "round_commit"}
    assert report["acceptance"]["a"]["accept_length"] > 1


def test_unlike_runs_are_refused_in_one_line(refused, same, tmp_path):
    few = write_trace(tmp_path / "few.jsonl", records(2))
    assert "missing in the second" in refused("compare", same[0], str(few))


@pytest.mark.parametrize(("arguments", "told"), [
    (("replay", "none.jsonl"), "none.jsonl"), (("compare", "none.jsonl", "none.jsonl"), "none.jsonl"),
    (("replay", "x", "--engine", "vllm"), "--engine"), (("replay", "x", "--eps", "0"), "eps=0"),
    (("compare", "x", "y", "--eps", "1", "--eps-from", "z"), "both given"),
    (("baseline", "--output", "o"), "give either PROMPTS or --from-pt"),
    (("baseline", "p", "--output", "o", "--dtype", "auto"), "--dtype"),
    (("baseline", "p", "--output", "o", "--count", "0"), "--count"),
    (("baseline", "p", "--output", "o", "--budget", "0"), "--budget"),
    (("baseline", "p", "--output", "o", "--drafter", "none"), "drafter"),
    (("baseline", "none.jsonl", "--output", "o"), "none.jsonl"),
    (("baseline", "--from-pt", "none.pt", "--output", "o"), "none.pt"),
])  # fmt: skip
def test_mistakes_are_told_in_one_line(refused, arguments, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert told in refused(*arguments)


def test_a_mistake_is_json_too_where_that_is_asked_for(command, tmp_path):
    code, out, err = command("replay", str(tmp_path / "none.jsonl"), "--json")
    assert code == 2
    assert "No such file" in json.loads(out)["error"]
    assert err.startswith("Error: ")


def test_replay_of_a_wrong_output_ends_with_1(command, target, tmp_path):
    rows = [{"prompt_tokens": [5, 6], "tokens": text_of(1), "sampling": SAMPLING, "dtype": "float32"}]
    path = str(write_outputs(tmp_path / "o.jsonl", rows))
    code, out, _ = command("replay", path, "--model", str(target), "--device", "cpu")
    assert code == 1
    assert "WRONG, line 1: token 0 (position 2) is" in out
    code, out, _ = command("replay", path, "--model", str(target), "--device", "cpu", "--json")
    report = json.loads(out)
    assert (code, report["is_lossless"], report["outputs"], report["eps"]) == (1, False, 1, 1e-3)
    expected = report["violations"][0]["expected"]
    right = [rows[0] | {"tokens": [expected], "sampling": {"temperature": 0, "max_tokens": 1}}]
    path = str(write_outputs(tmp_path / "right.jsonl", right))
    code, out, _ = command("replay", path, "--model", str(target), "--device", "cpu")
    assert (code, out.splitlines()[-1]) == (0, "every token is the target's own choice")


def test_baselines_are_written_and_told(command, engine, tmp_path, monkeypatch):
    from ddtree.trace import baseline

    seen = {}

    def make(plan, prompts, folder, load, on_prompt):
        load(plan.engine)
        on_prompt(plan.dtypes[0], plan.modes[0], 1)
        seen.update(plan=plan, prompts=prompts, folder=folder)
        return {"out/ar-float32.jsonl": {"mode": "ar", "requests": 1}}

    monkeypatch.setattr(baseline, "make_baselines", make)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    arguments = (
        "baseline", str(prompts), "--output", "out", "--mode", "ar", "--dtype", "float32", "--count", "1",
        "--raw", "--max-tokens", "9", "--budget", "5",
    )  # fmt: skip
    code, out, err = command(*arguments)
    assert (code, out) == (0, "out/ar-float32.jsonl: mode ar, requests 1\n")
    assert err.endswith("float32, ar: prompt 1 of 1\n")
    assert "loading smollm2-135m\n" in err
    assert command(*arguments, "--quiet") == (0, out, "")
    plan = seen["plan"]
    assert (plan.modes, plan.dtypes, plan.chat, plan.node_budget) == (("ar",), ("float32",), False, 5)
    assert (plan.sampling.max_tokens, seen["prompts"], str(seen["folder"])) == (9, ["a"], "out")


def test_official_results_are_written(command, tmp_path):
    from types import SimpleNamespace

    import torch

    answer = SimpleNamespace(output_ids=torch.tensor([[1, 2, 3]]), num_input_tokens=1, acceptance_lengths=[1])
    torch.save({"responses": [{"baseline": answer}], "args": {}}, tmp_path / "r.pt")
    code, out, _ = command("baseline", "--from-pt", str(tmp_path / "r.pt"), "--output", str(tmp_path / "o"))
    assert (code, out) == (0, f"{tmp_path / 'o' / 'baseline.jsonl'}: outputs 1\n")
