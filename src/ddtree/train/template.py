"""A chat template as tokens: what stands before a user's turn, and what between it and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.errors import UnsupportedModelError, first_line

# Two user turns with nothing in common: what their renderings share is the template's.
SENTINELS = ("qx", "Jz")


@dataclass(frozen=True, slots=True)
class TemplatePieces:
    """The tokens around a user's turn: all before it, and all from its end to the answer."""

    prefix: tuple[int, ...]
    bridge: tuple[int, ...]

    @property
    def end_of_turn(self) -> int:
        """The token that ends the user's turn, first of the bridge."""
        return self.bridge[0]


def template_pieces(tokenizer: Any) -> TemplatePieces:
    """The pieces of a tokenizer's chat template, with its default system prompt if it has one.

    Raises:
        UnsupportedModelError: there is no chat template, or the end of a user's turn is not a special token.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise UnsupportedModelError(
            "the target's tokenizer has no chat template, so it writes no user turns; use an instruct model"
        )
    first, second = (render(tokenizer, sentinel) for sentinel in SENTINELS)
    prefix = common_start(first, second)
    bridge = common_start(first[::-1], second[::-1])[::-1]
    if not prefix or not bridge:
        raise UnsupportedModelError("the target's chat template has no text before or after a user's turn")
    if bridge[0] not in special_tokens(tokenizer):
        token = tokenizer.convert_ids_to_tokens(bridge[0])
        raise UnsupportedModelError(
            f"the target's chat template ends a user's turn with {token!r}, which is ordinary text; "
            "models whose template ends it with a special token are supported"
        )
    return TemplatePieces(tuple(prefix), tuple(bridge))


def encode_turn(tokenizer: Any, pieces: TemplatePieces, text: str) -> tuple[int, ...] | None:
    """The tokens of a user's turn as they stand in the template.

    None where they melt into the template's own, or hold a special token, which could end the turn.
    """
    tokens = render(tokenizer, text)
    start, end = len(pieces.prefix), len(tokens) - len(pieces.bridge)
    if end <= start or tuple(tokens[:start]) != pieces.prefix or tuple(tokens[end:]) != pieces.bridge:
        return None
    turn = tuple(tokens[start:end])
    return None if special_tokens(tokenizer) & set(turn) else turn


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of the tokens that are no text."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(tokenizer.all_special_ids) | {i for i, token in added if token.special}


def end_tokens(model: Any, tokenizer: Any, pieces: TemplatePieces) -> frozenset[int]:
    """The tokens that end an answer: the template's, the tokenizer's and the model's own."""
    tokens = {pieces.end_of_turn}
    for source in (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id):
        tokens.update([source] if isinstance(source, int) else source or ())
    return frozenset(tokens)


def render(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a conversation up to the answer, for one user message."""
    message = [{"role": "user", "content": text}]
    try:
        rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # of jinja2, or what the template raises
        raise UnsupportedModelError(
            f"the target's chat template cannot be used ({first_line(error)}); use an instruct model"
        ) from error
    tokens: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return tokens


def common_start(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The longest beginning that both share."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return list(first[:count])
