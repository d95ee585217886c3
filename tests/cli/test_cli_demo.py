"""`ddtree demo` on a fake engine: the comparison, its verdict and exit code, the drawn tree."""

import json
from dataclasses import replace

import pytest

from ddtree.cli.comparison import EXAMPLES, compare, total_speedup
from ddtree.config import Dtype, Mode, SamplingParams


def test_demo_compares_three_prompts_and_agrees(command, engine):
    code, out, err = command("demo")
    assert code == 0
    assert "loading smollm2-135m" in err
    assert all(example.prompt[:40] in out for example in EXAMPLES)
    assert out.count("The answer is 42.") == 3
    # 16 tokens after the first: 16 plain rounds, 8 of the chain, 6 of the tree, 0.1 s each.
    assert out.splitlines()[-1] == "3 of 3 texts identical; tree 2.67 times plain (chain 2.00 times)"
    assert "\x1b" not in out


def test_demo_runs_in_float32_with_one_budget_and_warms_up_first(command, engine):
    command("demo", "--max-tokens", "12")
    assert engine.config.dtype is Dtype.FLOAT32
    assert {request.node_budget for request in engine.requests} == {16}
    lengths = [request.sampling.max_tokens for request in engine.requests]
    assert lengths == [8] * 3 + [12] * 10
    assert [request.mode for request in engine.requests][3:] == [*Mode] * 3 + [Mode.TREE]
    assert [request.observer is None for request in engine.requests] == [True] * 12 + [False]


@pytest.mark.parametrize(
    ("flags", "expected"), [([], 1), (["--dtype", "bfloat16"], 0)], ids=["float32", "bfloat16"]
)
def test_a_text_that_differs_fails_the_demo_only_where_it_must_not(command, engine, flags, expected):
    engine.texts = {Mode.TREE: "The answer is 43."}
    code, out, _ = command("demo", *flags)
    assert code == expected
    assert "0 of 3 texts identical" in out
    assert "tree differs from ar at new token 16: '3', not '2'" in out
    assert "chain differs" not in out


def test_a_text_that_is_cut_short_differs_at_its_end(command, engine):
    engine.texts = {Mode.CHAIN: "The answer"}
    code, out, _ = command("demo")
    assert code == 1
    assert "chain differs from ar at new token 11: its end, not ' '" in out


def test_demo_json(command, engine):
    engine.texts = {Mode.CHAIN: "The answer is 43."}
    code, out, _ = command("demo", "--json", "--budget", "auto", "--temperature", "1", "--seed", "5")
    document = json.loads(out)
    assert code == 1
    assert (document["num_identical"], document["num_prompts"]) == (0, 3)
    assert (document["budget"], document["dtype"]) == ("auto", "float32")
    assert document["speedup"] == {"ar": 1.0, "chain": 2.0, "tree": pytest.approx(2.6667)}
    runs = document["prompts"][1]["runs"]
    assert (runs["chain"]["first_difference"], runs["tree"]["first_difference"]) == (15, None)
    assert (runs["tree"]["rounds"], runs["tree"]["new_tokens"]) == (6, 17)
    assert document["tree"]["accept_indices"] == [0, 1, 3]
    assert "packages" in document["provenance"]
    assert {(r.sampling.temperature, r.sampling.seed) for r in engine.requests} == {(1.0, 5)}


@pytest.mark.parametrize(
    "flags", [["--budget", "0"], ["--max-tokens", "0"], ["--dtype", "int3"], ["--top-k", "1"]]
)
def test_demo_refuses_in_one_line(refused, engine, flags):
    refused("demo", *flags)
    assert engine.config is None


def test_demo_shows_model_text_as_text(command, engine):
    engine.text = "[bold]not markup[/bold] \x1b[31m"
    _, out, _ = command("demo")
    assert "[bold]not markup[/bold] \\x1b[31m" in out


def test_demo_without_a_tree_round_says_so(command, engine):
    engine.tree_round = replace(engine.tree_round, mode="ar", draft_tokens=(1,))
    code, out, _ = command("demo")
    assert code == 0
    assert "No round drafted a tree." in out


def test_speed_is_the_ratio_of_all_tokens_to_all_seconds(engine):
    sampling = SamplingParams(max_tokens=7)
    comparisons = list(compare(engine, EXAMPLES[:2], sampling, 16))
    comparisons[1].runs[Mode.TREE].stats.decode_s = 0.0001  # one fast prompt must not stand for all
    assert comparisons[1].speedup(Mode.TREE) > 1000
    assert total_speedup(comparisons, Mode.TREE) == pytest.approx(1.2 / 0.2001)


def test_the_token_that_prefill_makes_is_not_counted_as_decoded(engine):
    engine.texts = {Mode.TREE: "The"}
    comparisons = list(compare(engine, EXAMPLES, SamplingParams(max_tokens=7), 16))
    # 6 tokens in 0.6 s plainly, 2 in 0.1 s as a tree.
    assert total_speedup(comparisons, Mode.TREE) == pytest.approx(2.0)
