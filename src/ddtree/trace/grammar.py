"""Masks of the tokens that a grammar allows, by xgrammar, as SGLang's default grammar backend makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ddtree.errors import ConfigError, MissingExtraError, first_line, short_repr
from ddtree.trace.outputs import ANY_JSON, Grammar

MakeMasks = Callable[[Grammar, Sequence[int]], Tensor]
"""From a grammar and an output [n] to the tokens allowed at each place, [n, V] bool."""


def needs_xgrammar() -> None:
    """Refuse to go on without xgrammar.

    Raises:
        MissingExtraError: it is not installed.
    """
    if find_spec("xgrammar") is None:
        raise MissingExtraError("xgrammar", "grammar")


def grammar_masks(tokenizer: Any, vocab_size: int, stop_tokens: Sequence[int]) -> MakeMasks:
    """Masks for outputs of a tokenizer's model; those of broken grammars raise `ConfigError`.

    Args:
        tokenizer: a transformers tokenizer.
        vocab_size: width of the target's logits.
        stop_tokens: tokens that end a text, which are allowed where a grammar may end.

    Raises:
        MissingExtraError: xgrammar is not installed.
    """
    needs_xgrammar()
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_tokens)
    )
    compiler = xgrammar.GrammarCompiler(info)

    def masks(grammar: Grammar, tokens: Sequence[int]) -> Tensor:
        matcher = xgrammar.GrammarMatcher(_compiled(compiler, grammar))
        words = xgrammar.allocate_token_bitmask(len(tokens), vocab_size)
        for place, token in enumerate(tokens):
            if matcher.is_terminated():
                words[place] = 0
                continue
            matcher.fill_next_token_bitmask(words, place)
            if not matcher.accept_token(token):
                words[place + 1 :] = 0
                break
        bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1
        allowed: Tensor = bits.flatten(1)[:, :vocab_size].bool()
        return allowed

    return masks


def _compiled(compiler: Any, grammar: Grammar) -> Any:
    try:
        if grammar.kind == "regex":
            return compiler.compile_regex(grammar.text)
        if grammar.kind == "ebnf":
            return compiler.compile_grammar(grammar.text)
        if grammar.text == ANY_JSON:
            return compiler.compile_builtin_json_grammar()
        return compiler.compile_json_schema(grammar.text)
    except Exception as error:  # xgrammar raises RuntimeError and its own
        raise ConfigError(
            f"{grammar.kind}={short_repr(grammar.text)} is nothing that xgrammar reads: {first_line(error)}"
        ) from error
