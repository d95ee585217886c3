"""Prompts that do not fit the context are named before anything is loaded."""

import pytest

from bench_kit import prompt_sets
from ddtree.bench import prompt_lengths
from ddtree.bench.datasets import Prompt, PromptSet
from ddtree.bench.prompt_lengths import check_lengths
from ddtree.bench_config import BenchConfig
from ddtree.errors import ContextLengthError
from server_kit import byte_tokenizer

AROUND = len(byte_tokenizer().encode("<s>user:\n<s>assistant:", add_special_tokens=False))


@pytest.fixture
def loaded(monkeypatch):
    """What tokenizers were loaded."""
    models = []
    monkeypatch.setattr(
        prompt_lengths, "load_tokenizer", lambda model: models.append(model) or byte_tokenizer()
    )
    return models


def set_of(*lengths):
    prompts = tuple(Prompt(f"p{n}", ("x" * length,)) for n, length in enumerate(lengths))
    return PromptSet("mine", prompts, "made up", "none", "aa")


def test_the_prompts_that_do_not_fit_are_named(loaded):
    config = BenchConfig(max_context_tokens=1000, max_tokens=100)
    room = 900 - AROUND
    check_lengths(config, [set_of(room)])
    with pytest.raises(ContextLengthError) as raised:
        check_lengths(config, [*prompt_sets("one").values(), set_of(3, room + 1, room, *[2000] * 3)])
    assert str(raised.value) == (
        "a context of 1000 tokens has no room for --max-tokens 100 behind the prompt 'p1' of mine "
        f"(901 tokens), 'p3' of mine ({2000 + AROUND} tokens), 'p4' of mine ({2000 + AROUND} tokens) "
        "and 1 more: raise "
        "--max-context, lower --max-tokens or take the prompt out"
    )
    assert loaded == [config.model] * 2


def test_no_tokenizer_is_loaded_for_prompts_that_surely_fit(loaded):
    check_lengths(BenchConfig(), [set_of(3, 3000)])
    assert loaded == []
