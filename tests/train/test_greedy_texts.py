"""Greedy texts of many prompts at once are those of one at a time."""

import pytest
import torch

from ddtree.errors import ConfigError
from ddtree.train.batch_decoder import BatchDecoder
from ddtree.train.greedy_texts import greedy_texts
from tiny_models import tiny_llama

PROMPTS = [range(3, 12), range(5, 30), [7], range(40, 60), range(100, 104)]
MAX_TOKENS = 21


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@torch.no_grad()
def greedy_answer(model, prompt) -> list[int]:
    """The likeliest token after each token, by the whole model again and again."""
    tokens = list(prompt)
    for _ in range(MAX_TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("slots", [2, 8])
def test_texts_are_those_of_one_prompt_at_a_time(model, slots):
    texts = greedy_texts(BatchDecoder(model, slots, 64), PROMPTS, MAX_TOKENS, frozenset())
    for text, prompt in zip(texts, PROMPTS, strict=True):
        assert text.answer_start == len(prompt)
        assert text.tokens.tolist() == [*prompt, *greedy_answer(model, prompt)]


def test_a_text_ends_with_its_first_end_token(model):
    answers = [greedy_answer(model, prompt) for prompt in PROMPTS]
    ends = {answers[0][3], answers[1][0], answers[3][-1]}
    texts = greedy_texts(BatchDecoder(model, 3, 64), PROMPTS, MAX_TOKENS, ends)
    for text, prompt, answer in zip(texts, PROMPTS, answers, strict=True):
        length = next((i + 1 for i, token in enumerate(answer) if token in ends), MAX_TOKENS)
        assert text.tokens.tolist() == [*prompt, *answer[:length]]
    assert len(texts[1].tokens) == len(PROMPTS[1]) + 1


class CountingDecoder(BatchDecoder):
    """Counts its steps."""

    step_ct = 0

    def step(self, tokens, positions):
        self.step_ct += 1
        return super().step(tokens, positions)


def test_decoding_stops_when_all_texts_have_ended(model):
    decoder = CountingDecoder(model, 2, 200)
    texts = greedy_texts(decoder, [range(3, 12)], 150, range(211))
    assert len(texts[0].tokens) == 10
    assert decoder.step_ct == 16


def test_a_prompt_without_room_is_refused(model):
    with pytest.raises(ConfigError, match=r"tokens of prompt 1=25 .* from 1 to 10"):
        greedy_texts(BatchDecoder(model, 2, 31), PROMPTS, MAX_TOKENS, ())
    with pytest.raises(ConfigError, match="tokens of prompt 0=0"):
        greedy_texts(BatchDecoder(model, 2, 31), [[]], MAX_TOKENS, ())
