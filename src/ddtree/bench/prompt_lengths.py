"""Whether all prompts leave room for an answer, found out before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable

from ddtree.bench.chat_tokens import ChatTokens, load_tokenizer
from ddtree.bench.datasets import PromptSet
from ddtree.bench.measure import first_turn
from ddtree.bench_config import BenchConfig
from ddtree.errors import ContextLengthError, short_repr

TEMPLATE_TOKENS = 256  # more than chat templates put around a prompt
MAX_NAMED = 3


def check_lengths(config: BenchConfig, sets: Iterable[PromptSet]) -> None:
    """Refuse prompts that with their answers do not fit the embedded engine's context.

    All arms answer the same prompts, so none is left out. The tokenizer is loaded only if a prompt has so
    many bytes that it may not fit: a token has one at least.

    Raises:
        ContextLengthError: the prompts that do not fit are named.
        DDTreeError: there is such a prompt, and the tokenizer or its chat template cannot be used.
    """
    room = config.max_context_tokens - config.max_tokens
    long = [
        (found.name, prompt)
        for found in sets
        for prompt in found.prompts
        if len(prompt.turns[0].encode("utf-8", "surrogatepass")) + TEMPLATE_TOKENS > room
    ]
    if not long:
        return
    tokens_of = ChatTokens(load_tokenizer(config.model))
    lengths = [(name, prompt.id, len(tokens_of(first_turn(prompt.turns)))) for name, prompt in long]
    told = [f"{short_repr(number)} of {name} ({count} tokens)" for name, number, count in lengths
            if count > room]  # fmt: skip
    if told:
        more = f" and {len(told) - MAX_NAMED} more" if len(told) > MAX_NAMED else ""
        raise ContextLengthError(
            f"a context of {config.max_context_tokens} tokens has no room for --max-tokens "
            f"{config.max_tokens} behind the prompt {', '.join(told[:MAX_NAMED])}{more}: raise "
            "--max-context, lower --max-tokens or take the prompt out"
        )
