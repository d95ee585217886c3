"""Texts of tokens, and how a text grows with them."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ddtree.bench import trace_view_text
from ddtree.bench.trace_view_text import (
    IdTexts,
    TokenizerTexts,
    _byte_alphabet,
    find_texts,
    growth,
    utf16_units,
)
from ddtree.errors import DDTreeError, MissingExtraError, ModelError

SIGN_OF = {byte: sign for sign, byte in _byte_alphabet().items()}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token id = byte, as byte-level tokenizers have it, and 256 an end token."""
    vocabulary = {SIGN_OF[byte]: byte for byte in range(256)} | {"<|end|>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TEXTS = TokenizerTexts(byte_tokenizer())


class Reversing:
    """Writes the last token first: no text is the beginning of a later one."""

    def one(self, token):
        return chr(97 + token % 26)

    def joined(self, tokens):
        return "".join(map(self.one, reversed(tokens)))


def test_tokens_one_by_one():
    assert [TEXTS.one(token) for token in (65, 32, 10, 256)] == ["A", " ", "\n", "<|end|>"]
    assert [TEXTS.one(token) for token in (0xE4, 0x80)] == ["\\xe4", "\\x80"]
    assert [TEXTS.one(token) for token in (999, -1, 2**70)] == ["#999", "#-1", f"#{2**70}"]


def test_words_that_are_no_whole_characters():
    shown = trace_view_text._bytes_shown
    assert shown("<0xE4>", "?") == "\\xe4"
    assert shown("".join(SIGN_OF[byte] for byte in "\ufffd".encode()), "?") == "\ufffd"
    assert shown("한", "?") == "?"


def test_tokens_together():
    assert TEXTS.joined(list("Grüße 你 <b>".encode())) == "Grüße 你 <b>"
    assert TEXTS.joined([65, 256]) == "A<|end|>"
    assert TEXTS.joined([65, -1]) == "A#-1"
    assert IdTexts().joined([3, 14]) == "#3 #14"
    assert TEXTS.joined([]) == IdTexts().joined([]) == ""


def in_javascript(text: str, units: int) -> str:
    """`text.slice(0, units)`."""
    return text.encode("utf-16-le", "surrogatepass")[: 2 * units].decode("utf-16-le", "surrogatepass")


@pytest.mark.parametrize("texts", [TEXTS, IdTexts(), Reversing()], ids=lambda texts: type(texts).__name__)
@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=30), cuts=st.sets(st.integers(0, 120)))
def test_every_step_is_the_text_of_the_tokens_before_it(texts, text, cuts):
    tokens = list(text.encode(errors="replace"))
    ends = sorted({min(cut, len(tokens)) for cut in cuts})
    grown = growth(texts, tokens, ends)
    assert grown.text == (texts.joined(tokens[: ends[-1]]) if ends else "")
    for end, (units, tail) in zip(ends, grown.steps, strict=True):
        assert in_javascript(grown.text, units) + tail == texts.joined(tokens[:end])


def test_half_a_character_is_replaced_by_the_whole():
    tokens = list("a🌲b".encode())
    assert growth(TEXTS, tokens, [1, 3, 5, 6]) == ("a🌲b", ((1, ""), (1, "\ufffd"), (3, ""), (4, "")))
    assert utf16_units("a🌲b") == 4


def test_ends_that_do_not_rise_are_no_harm():
    tokens = list(b"some words")
    grown = growth(TEXTS, tokens, [9, 2, 5])
    assert [grown.text[:units] + tail for units, tail in grown.steps] == ["some word", "so", "some "]


def test_a_text_is_decoded_once_not_once_a_round(monkeypatch):
    decoded, decode = [], TEXTS.joined
    monkeypatch.setattr(TEXTS, "joined", lambda tokens: decoded.append(len(tokens)) or decode(tokens))
    tokens = list(("word 你" * 100).encode())
    growth(TEXTS, tokens, range(1, len(tokens) + 1))
    assert sum(decoded) < 30 * len(tokens)  # all beginnings together have 400 times as many


def test_the_traces_own_target_is_used_if_it_is_here(tmp_path):
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for texts, problem in (find_texts(str(tmp_path), None), find_texts("elsewhere", str(tmp_path))):
        assert problem is None
        assert texts.joined([72, 105]) == "Hi"


@pytest.mark.parametrize(
    "name", [None, "", "/models/none", "nobody/nothing", "a\0b", "~nobody/x", "x" * 9000]
)
def test_without_a_tokenizer_ids_are_shown_and_the_reason_is_given(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts, problem = find_texts(name, None)
    assert isinstance(texts, IdTexts)
    assert problem


def test_a_known_model_is_not_downloaded_for_its_tokenizer(monkeypatch, tmp_path):
    monkeypatch.setenv("DDTREE_CACHE", str(tmp_path))
    texts, problem = find_texts("smollm2-135m", None)
    assert isinstance(texts, IdTexts)
    assert "not on this machine" in problem
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_named_must_be_there(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        find_texts("x", "/models/none")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no tokenizer"):
        find_texts("x", str(tmp_path))


def test_transformers_is_asked_for_where_it_is_needed(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"sglang-ddtree\[engine\]"):
        find_texts("x", str(tmp_path))
    texts, problem = find_texts(str(tmp_path), None)
    assert isinstance(texts, IdTexts)
    assert "transformers is not installed" in problem
    assert issubclass(MissingExtraError, DDTreeError)
