"""Texts of a trace's tokens: by the target's tokenizer where there is one, else their ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

from ddtree.errors import CheckpointError, DDTreeError, MissingExtraError, ModelNotFoundError, first_line
from ddtree.model_cache import is_complete, package_folder
from ddtree.models import KNOWN_MODELS, find_folder, resolve_target

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
CONTEXT_TOKENS = 8  # decoded before new tokens, since some tokenizers trim the first one's space


class Texts(Protocol):
    """Tokens as text, one by one and together."""

    def one(self, token: int) -> str:
        """A token by itself."""

    def joined(self, tokens: Sequence[int]) -> str:
        """Tokens that stand together."""


class IdTexts:
    """Token ids in place of texts."""

    def one(self, token: int) -> str:
        """`#` and the id."""
        return f"#{token}"

    def joined(self, tokens: Sequence[int]) -> str:
        """The ids with blanks between them."""
        return " ".join(map(self.one, tokens))


class TokenizerTexts:
    """Texts by a transformers tokenizer; what it does not know is shown by its id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def one(self, token: int) -> str:
        """A token's text; one that is no whole character as its bytes, such as `\\xe4\\xbd`."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def joined(self, tokens: Sequence[int]) -> str:
        """The text of the tokens, special ones shown."""
        try:
            return self._decode(tokens)
        except (OverflowError, IndexError, KeyError, TypeError):  # an id that no vocabulary has
            return "".join(map(self.one, tokens))

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _look_up(self, token: int) -> str:
        try:
            text = self._decode([token])
            word = self._tokenizer.convert_ids_to_tokens(token)
        except (OverflowError, IndexError, KeyError, TypeError):
            return f"#{token}"
        if word is None:
            return f"#{token}"
        return _bytes_shown(str(word), text) if REPLACEMENT in text else text


def _bytes_shown(word: str, text: str) -> str:
    """A vocabulary's word, in the spelling `<0xE4>` or in GPT-2's byte alphabet, as text or else bytes."""
    byte = BYTE_TOKEN.fullmatch(word)
    try:
        raw = bytes.fromhex(byte[1]) if byte else bytes(_byte_alphabet()[sign] for sign in word)
    except KeyError:
        return text
    try:
        return raw.decode()  # a replacement character of the model's own
    except UnicodeDecodeError:
        return "".join(f"\\x{each:02x}" for each in raw)


@cache
def _byte_alphabet() -> Mapping[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {sign: byte for byte, sign in bytes_to_unicode().items()}


class Growth(NamedTuple):
    """A text and how it grew: after step i it was `text` up to `steps[i][0]`, then `steps[i][1]`.

    Lengths are in UTF-16 units, as JavaScript counts them. The second part holds what later tokens changed,
    such as the half of a character.
    """

    text: str
    steps: tuple[tuple[int, str], ...]


def growth(texts: Texts, tokens: Sequence[int], ends: Sequence[int]) -> Growth:
    """The text of the first `end` tokens for each of `ends`, which rise."""
    text = texts.joined(tokens[: ends[-1]]) if ends else ""
    grown = list(_by_windows(texts, tokens, ends))
    if grown and grown[-1] != text:  # decoding depends on more than the tokens shortly before
        grown = [texts.joined(tokens[:end]) for end in ends]
    return Growth(text, tuple(_step(text, so_far) for so_far in grown))


def _by_windows(texts: Texts, tokens: Sequence[int], ends: Sequence[int]) -> Iterator[str]:
    """Texts of the first `end` tokens, of which only the new ones and some before are decoded each time."""
    settled, settled_text = 0, ""
    for end in ends:
        first = max(0, settled - CONTEXT_TOKENS)
        before, window = texts.joined(tokens[first:settled]), texts.joined(tokens[first:end])
        if window.startswith(before):
            so_far = settled_text + window[len(before) :]
        else:
            so_far = texts.joined(tokens[:end])
        if not so_far.endswith(REPLACEMENT):
            settled, settled_text = end, so_far
        yield so_far


def _step(text: str, so_far: str) -> tuple[int, str]:
    if text.startswith(so_far):
        return utf16_units(so_far), ""
    shared = next(index for index, sign in enumerate(so_far) if text[index : index + 1] != sign)
    return utf16_units(so_far[:shared]), so_far[shared:]


def utf16_units(text: str) -> int:
    """The length of a text in JavaScript."""
    return len(text.encode("utf-16-le", errors="surrogatepass")) // 2


# -- the tokenizer ---------------------------------------------------------------------------------


def find_texts(name: object, model: str | None) -> tuple[Texts, str | None]:
    """Texts for a trace of the target `name`, and why they are ids, if they are.

    Args:
        name: what the trace calls its target. Its tokenizer is used if it lies on this machine.
        model: the model whose tokenizer to use instead, downloaded where needed; None for the trace's.

    Raises:
        ModelError: `model` or its tokenizer cannot be found or read.
        MissingExtraError: `model` is given and transformers is not installed.
    """
    if model is not None:
        return TokenizerTexts(load_tokenizer(model)), None
    try:
        return TokenizerTexts(load_local_tokenizer(str(name))), None
    except DDTreeError as error:
        return IdTexts(), str(error)


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a known model, of a folder, or of the Hugging Face hub (no weights are fetched).

    Raises:
        ModelError: it cannot be found or read.
        MissingExtraError: transformers is not installed.
    """
    folder = resolve_target(model) if model in KNOWN_MODELS else find_folder(model)
    return _from_pretrained(str(folder or model), is_local=folder is not None)


def load_local_tokenizer(model: str) -> Any:
    """The same without the network.

    Raises:
        ModelError, MissingExtraError: as `load_tokenizer`.
    """
    if model in KNOWN_MODELS:
        folder = package_folder(KNOWN_MODELS[model].package)
        if not is_complete(folder):
            raise ModelNotFoundError(f"{model!r} is not on this machine yet")
        return _from_pretrained(str(folder), is_local=True)
    try:
        return _from_pretrained(str(find_folder(model) or model), is_local=True)
    except (OSError, RuntimeError, ValueError):  # of the path
        raise ModelNotFoundError(f"{model!r} is no folder of this machine") from None


def _from_pretrained(source: str, *, is_local: bool) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError("transformers", "engine") from None
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=is_local, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception; transformers ValueError, OSError, KeyError
        where = "on this machine " if is_local else ""
        raise CheckpointError(
            f"no tokenizer of {source!r} {where}can be used: {first_line(error)}"
        ) from error
