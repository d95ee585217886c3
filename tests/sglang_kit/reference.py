"""What a request must say: decoding one token a pass with transformers, written down as plainly as it goes.

Logits are processed as SGLang's plain decoding does without overlap: additive penalties, repetition penalty,
grammar, logit bias, temperature, then top-k and top-p on one sorted distribution, then min-p. Noise is the
engine's keyed noise, whose position is that of the token drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ddtree.tree.noise import draw
from sglang_kit.grammar import GrammarReference
from sglang_kit.sizes import EOS_TOKEN

GREEDY_BELOW = 1e-6


@dataclass(frozen=True, slots=True)
class Reference:
    """One request's reference: tokens and, as SGLang reports them, their log-probabilities before any cut."""

    tokens: list[int]
    log_probs: list[float]


def decode(
    target: PreTrainedModel, prompt: Sequence[int], params: dict[str, Any], max_total: int | None = None
) -> Reference:
    """The tokens of `prompt` under SGLang's sampling parameters `params`, with their log-probabilities.

    The end token ends the text and belongs to it; `max_total` is the most tokens of prompt and text.
    """
    cache, feed = DynamicCache(), list(prompt)
    grammar = GrammarReference.of(params)
    most = params.get("max_new_tokens", 16)
    if max_total is not None:
        most = min(most, max_total - len(prompt))
    tokens: list[int] = []
    log_probs: list[float] = []
    ends = set() if params.get("ignore_eos") else {EOS_TOKEN, *params.get("stop_token_ids", ())}
    while len(tokens) < most and not (tokens and tokens[-1] in ends):
        with torch.no_grad():
            logits = target(torch.tensor([feed]), past_key_values=cache, use_cache=True).logits[0, -1].float()
        processed = process(logits, params, tokens, grammar)
        token = choose(processed, params, len(prompt) + len(tokens))
        tokens.append(token)
        log_probs.append(float(processed.log_softmax(-1)[token]))
        feed = [token]
        if grammar is not None:
            grammar.accept(token)
    return Reference(tokens, log_probs)


def process(
    logits: Tensor,  # [V] float32
    params: dict[str, Any],
    output: Sequence[int],
    grammar: GrammarReference | None,
) -> Tensor:
    """The logits after `output` [V], penalised, masked, biased and divided by the temperature."""
    logits = penalise(logits.clone(), params, output)
    if grammar is not None:
        grammar.mask(logits)
    for token, bias in params.get("logit_bias", {}).items():
        logits[int(token)] += bias
    return logits if is_greedy(params) else logits / params["temperature"]


def is_greedy(params: dict[str, Any]) -> bool:
    return bool(params["temperature"] < GREEDY_BELOW)


def choose(logits: Tensor, params: dict[str, Any], position: int) -> int:
    """The token for `position` from processed `logits` [V]."""
    if is_greedy(params):
        return int(logits.argmax())
    seed, at = torch.tensor(params["sampling_seed"]), torch.tensor(position)
    return int(draw(cut(logits.softmax(-1), params).log(), seed, at))


def penalise(logits: Tensor, params: dict[str, Any], output: Sequence[int]) -> Tensor:
    for token, count in Counter(output).items():
        logits[token] -= count * params.get("frequency_penalty", 0.0) + params.get("presence_penalty", 0.0)
    if len(output) < params.get("min_new_tokens", 0):
        for token in (EOS_TOKEN, *params.get("stop_token_ids", ())):
            logits[token] = -torch.inf
    factor = params.get("repetition_penalty", 1.0)
    for token in set(output):
        logits[token] *= factor if logits[token] < 0 else 1 / factor
    return logits


def cut(probs: Tensor, params: dict[str, Any]) -> Tensor:
    """`probs` [V] with 0 for what top-k, top-p and min-p leave out."""
    values, tokens = probs.sort(descending=True, stable=True)
    top_k = params.get("top_k", -1)
    kept = torch.arange(len(values)) < (top_k if top_k > 0 else len(values))
    kept &= values.cumsum(-1) - values <= params.get("top_p", 1.0)
    kept &= values >= values[0] * params.get("min_p", 0.0)
    return torch.zeros_like(probs).scatter(0, tokens[kept], values[kept])
