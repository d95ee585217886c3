"""Replay of outputs under grammars, by xgrammar as SGLang has it installed."""

import json

import pytest

from compare_kit import write_outputs
from ddtree.errors import ConfigError
from ddtree.trace.choice import EXCLUDED
from ddtree.trace.files import ReplayOptions, replay_file
from ddtree.trace.grammar import grammar_masks
from ddtree.trace.outputs import Grammar, Output
from ddtree.trace.replay import Replayer
from ddtree.train.tiny_pair import tiny_tokenizer
from sglang_kit.prompts import prompt
from sglang_kit.reference import decode
from sglang_kit.sizes import EOS_TOKEN

pytestmark = pytest.mark.sglang

GREEDY = {"temperature": 0.0, "max_new_tokens": 24}
GRAMMARS = {
    "regex": {"regex": "[a-f]{4}( [0-9]{2,5}){1,3}"},
    "json_schema": {
        "json_schema": json.dumps({
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
            "additionalProperties": False,
        })
    },
}  # fmt: skip


def load(model):
    replayer = Replayer(model, (EOS_TOKEN,))
    replayer.make_masks = grammar_masks(tiny_tokenizer(), replayer.vocab_size, replayer.stop_tokens)
    return replayer


@pytest.mark.parametrize("kind", GRAMMARS)
def test_outputs_under_a_grammar_are_replayed(qwen3_pair, tmp_path, kind):
    sampling = GREEDY | GRAMMARS[kind]
    rows = []
    for seed in range(4):
        tokens = decode(qwen3_pair.target, prompt(seed, 12), sampling).tokens
        rows.append({"prompt_tokens": prompt(seed, 12), "tokens": tokens, "sampling": sampling, "model": "m",
                     "dtype": "float32"})  # fmt: skip
    path = write_outputs(tmp_path / "o", rows)
    report = replay_file(path, ReplayOptions(), lambda name, dtype: load(qwen3_pair.target))
    assert report.is_clean
    free = [row | {"tokens": decode(qwen3_pair.target, row["prompt_tokens"], GREEDY).tokens} for row in rows]
    wrong = replay_file(
        write_outputs(tmp_path / "w", free), ReplayOptions(), lambda name, dtype: load(qwen3_pair.target)
    )
    assert wrong.judged.max_gap == EXCLUDED
    assert [found.kind for found in wrong.findings] == ["ignored_parameter"]
    assert wrong.findings[0].text.startswith(f"{kind}: ")


def test_masks_of_ebnf_and_of_any_json_and_none_of_what_is_broken():
    tokenizer = tiny_tokenizer()
    masks = grammar_masks(tokenizer, 300, [EOS_TOKEN])
    text = tokenizer.encode("ab", add_special_tokens=False)
    only = masks(Grammar("ebnf", 'root ::= "ab"'), [*text, EOS_TOKEN])
    assert all(bool(row[token]) for row, token in zip(only, [*text, EOS_TOKEN], strict=True))
    assert not only[0, EOS_TOKEN]
    brackets = tokenizer.encode("[]", add_special_tokens=False)
    assert bool(masks(Grammar("json_schema", "$$ANY$$"), brackets)[0, brackets[0]])
    with pytest.raises(ConfigError, match=r"json_schema='\{' is nothing that xgrammar reads"):
        masks(Grammar("json_schema", "{"), brackets)


def test_a_forbidden_token_is_excluded(qwen3_pair):
    sampling = GREEDY | GRAMMARS["regex"]
    tokens = list(decode(qwen3_pair.target, prompt(0, 12), sampling).tokens)
    tokens[0] = tiny_tokenizer().encode("z", add_special_tokens=False)[0]
    verdict = load(qwen3_pair.target).judge(Output(prompt(0, 12), tokens, sampling), 1e-3)
    assert verdict.violations[0].index == 0
    assert verdict.max_gap == EXCLUDED
