"""What the replay of SGLang's outputs (`ddtree.trace.replay`) needs beside the package: masks of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree.trace.replay import MakeMasks


def regex_masks(tokenizer: Any, vocab_size: int, stop_tokens: Sequence[int]) -> MakeMasks:
    """Masks of regular expressions by xgrammar, as SGLang's grammar backend makes them."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_tokens)
    )
    compiler = xgrammar.GrammarCompiler(info)

    def masks(regex: str, tokens: Sequence[int]) -> Tensor:
        matcher = xgrammar.GrammarMatcher(compiler.compile_regex(regex))
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
        return bits.flatten(1)[:, :vocab_size].bool()

    return masks
