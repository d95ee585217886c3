"""Tokens as texts and bytes, parts of characters too."""

import pytest

from ddtree.server.token_texts import TokenText, TokenTexts, token_bytes
from server_kit import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_every_token_has_its_bytes(tokenizer):
    texts = TokenTexts(tokenizer)
    for byte in range(256):
        [token] = tokenizer.backend_tokenizer.encode("x").ids if byte == ord("x") else [4 + order(byte)]
        assert texts[token].bytes == bytes([byte])


def order(byte):
    """Where a byte stands in the tokenizer's vocabulary, which is sorted by its words."""
    from ddtree.server.token_texts import BYTE_OF

    return sorted(BYTE_OF, key=str).index(next(word for word, value in BYTE_OF.items() if value == byte))


def test_a_part_of_a_character_shows_its_bytes(tokenizer):
    texts = TokenTexts(tokenizer)
    tokens = tokenizer.encode("ü")
    assert [texts[token] for token in tokens] == [
        TokenText("bytes:\\xc3", b"\xc3", True), TokenText("bytes:\\xbc", b"\xbc", True),
    ]  # fmt: skip
    assert texts.text_of(tokens) == "ü"


def test_special_tokens_are_named_and_not_shown(tokenizer):
    assert TokenTexts(tokenizer)[2] == TokenText("</s>", b"</s>", False)


@pytest.mark.parametrize(
    ("word", "raw"),
    [("<0xE4>", b"\xe4"), ("Ġthe", b" the"), ("ä½", b"\xe4\xbd"), ("▁the", None), ("", b"")],
)
def test_both_spellings_of_bytes(word, raw):
    assert token_bytes(word) == raw


def test_a_replacement_character_of_the_models_own():
    class Tokenizer:
        def decode(self, tokens, **options):
            return "\N{REPLACEMENT CHARACTER}"

        def convert_ids_to_tokens(self, token):
            return ("ï¿½", "▁")[token]

    texts = TokenTexts(Tokenizer())
    assert texts[0] == TokenText("\N{REPLACEMENT CHARACTER}", b"\xef\xbf\xbd", True)
    assert texts[1] == TokenText("\N{REPLACEMENT CHARACTER}", None, True)
