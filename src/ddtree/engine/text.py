"""From committed tokens to text that can be shown: whole characters, nothing past a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns a growing list of tokens into a growing text, holding back what may still change.

    Text is held back while it ends inside a character or could be the beginning of a stop string.

    Args:
        tokenizer: a transformers tokenizer.
        stop: strings that end the text; the earliest match wins and is not shown.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._settled = 0  # tokens whose text can no longer change
        self._context = 0  # tokens before them that are decoded again, for joins between tokens
        self._text = ""  # text of the settled tokens
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        """All text handed out so far."""
        return self._text[: self._shown]

    def push(self, token: int) -> None:
        """Add one token; sets `stopped` when a stop string is complete."""
        self._tokens.append(token)
        if self._stop:  # otherwise decoding can wait for the round's other tokens
            self._settle(final=False)
            self._find_stop()

    def take(self) -> str:
        """New text that is safe to show."""
        if not self._stop:
            self._settle(final=False)
        return self._show(len(self._text) if self.stopped else len(self._text) - self._held())

    def finish(self) -> str:
        """The rest of the text, once no more tokens come."""
        if not self.stopped:
            self._settle(final=True)
            self._find_stop()
        return self._show(len(self._text))

    def _show(self, end: int) -> str:
        new = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _settle(self, *, final: bool) -> None:
        before = self._decode(self._tokens[self._context : self._settled])
        after = self._decode(self._tokens[self._context :])
        end = len(self._tokens)
        if after.endswith(REPLACEMENT) and not final:
            # Bytes of a character that is not complete yet, or a replacement character of the model's own.
            end = self._last_whole(after)
            if end == self._settled:
                return
            after = self._decode(self._tokens[self._context : end])
        self._text += after[len(before) :]
        self._context, self._settled = self._settled, end

    def _last_whole(self, text: str) -> int:
        """How many tokens are settled if the newest ones may still become a character.

        A character has at most four bytes, so what is open lies in the last three tokens; before
        them a cut is safe where both sides decoded apart give `text`: one inside a character does not.
        """
        for end in range(len(self._tokens) - 3, self._settled, -1):
            head, tail = self._decode(self._tokens[self._context : end]), self._decode(self._tokens[end:])
            if head + tail == text:
                return end
        return self._settled

    def _find_stop(self) -> None:
        found = [
            at for at in (self._text.find(stop, self._search_from(stop)) for stop in self._stop) if at >= 0
        ]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = True

    def _search_from(self, stop: str) -> int:
        return max(0, self._shown - len(stop) + 1)

    def _held(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text) - self._shown), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
