"""Chats as token ids, the same as the embedded engine makes of them."""

from __future__ import annotations

from typing import Any

from ddtree.bench.measure import Chat
from ddtree.errors import ConfigError, MissingExtraError, ModelError, first_line
from ddtree.models import resolve_target


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a target.

    Raises:
        ModelError: the model cannot be found, or its tokenizer cannot be loaded.
        MissingExtraError: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise MissingExtraError("transformers", "bench") from None
    folder = resolve_target(model)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {model!r} cannot be loaded: {first_line(error)}") from error


class ChatTokens:
    """Turns chats into token ids by the model's chat template, each chat once.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[tuple[str, str], ...], tuple[int, ...]] = {}

    def __call__(self, chat: Chat) -> tuple[int, ...]:
        """Token ids of a chat, up to where the answer begins.

        Raises:
            ConfigError: the model has no chat template, or the template refuses the chat.
        """
        key = tuple((message["role"], message["content"]) for message in chat)
        if key not in self._known:
            self._known[key] = self._encode(chat)
        return self._known[key]

    def _encode(self, chat: Chat) -> tuple[int, ...]:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in chat], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError) as error:
            raise ConfigError(f"the model's chat template refuses a prompt: {first_line(error)}") from error
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
