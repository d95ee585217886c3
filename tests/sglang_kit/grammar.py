"""Structured output of the reference: xgrammar asked directly, one token at a time."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from torch import Tensor

from ddtree.train.tiny_pair import tiny_tokenizer
from sglang_kit.sizes import EOS_TOKEN, VOCAB_SIZE


@cache
def compiler() -> Any:
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(
        tiny_tokenizer(), vocab_size=VOCAB_SIZE, stop_token_ids=[EOS_TOKEN]
    )
    return xgrammar.GrammarCompiler(info)


class GrammarReference:
    """The state of one request's grammar."""

    def __init__(self, grammar: Any) -> None:
        import xgrammar

        self.matcher = xgrammar.GrammarMatcher(grammar)
        self.bitmask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)

    @staticmethod
    def of(params: dict[str, Any]) -> GrammarReference | None:
        """The grammar that SGLang's sampling parameters `params` ask for, if any."""
        if "regex" in params:
            return GrammarReference(compiler().compile_regex(params["regex"]))
        if "json_schema" in params:
            return GrammarReference(compiler().compile_json_schema(json.loads(params["json_schema"])))
        return None

    def mask(self, logits: Tensor) -> None:
        """Put -inf where `logits` [V] has a token that may not come next."""
        import xgrammar

        self.matcher.fill_next_token_bitmask(self.bitmask)
        xgrammar.apply_token_bitmask_inplace(logits.unsqueeze(0), self.bitmask)

    def accept(self, token: int) -> None:
        assert self.matcher.accept_token(token)
