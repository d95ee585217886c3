"""Single tokens as text and as bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """A token as text, its bytes where they are known, and whether answers show it: special ones not."""

    text: str
    bytes: bytes | None
    is_shown: bool


class TokenTexts:
    """Texts of a tokenizer's tokens, each looked up once.

    A token may hold part of a character. Its text then shows the bytes, as `bytes:\\xe4\\xbd`.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}

    def __getitem__(self, token: int) -> TokenText:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of tokens that stand together, end tokens and the like shown."""
        return self._decode(list(tokens), skips_special=False)

    def _decode(self, tokens: list[int], *, skips_special: bool) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=skips_special, clean_up_tokenization_spaces=False
        )
        return text

    def _look_up(self, token: int) -> TokenText:
        text = self._decode([token], skips_special=False)
        if REPLACEMENT not in text:
            return TokenText(text, text.encode(), self._decode([token], skips_special=True) != "")
        raw = token_bytes(str(self._tokenizer.convert_ids_to_tokens(token)))
        if raw is None:
            return TokenText(text, None, True)
        try:
            return TokenText(raw.decode(), raw, True)  # a replacement character of the model's own
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw, True)


def token_bytes(word: str) -> bytes | None:
    """The bytes of a vocabulary's word in the two usual spellings, `<0xE4>` and GPT-2's byte alphabet."""
    if byte := BYTE_TOKEN.fullmatch(word):
        return bytes.fromhex(byte[1])
    try:
        return bytes(BYTE_OF[character] for character in word)
    except KeyError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
