"""What comes back: answers and chunks as OpenAI clients read them, with a field `ddtree` more.

An answer's log-probabilities have one entry for each of its `completion_tokens`, the token that ended it
included, though its text is not shown.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field

from ddtree.config import Mode
from ddtree.engine.request import FinishReason, Generation, Request, TokenLogprobs
from ddtree.provenance import package_version
from ddtree.server.asked import Asked
from ddtree.server.engine_queue import Progress
from ddtree.server.token_texts import TokenTexts

# JSON has no minus infinity; other servers write this number too.
LOWEST_LOG_PROB = -9999.0
VERSION = package_version("sglang-ddtree") or "source"  # not installed: a source tree on the path
FINGERPRINT = f"ddtree-{VERSION}"


class Usage(BaseModel):
    """Tokens of a request; the one that ended the answer is counted."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Summary(BaseModel):
    """How the answer was made; times in seconds on the server."""

    mode: str
    budget: int | str | None
    seed: int
    rounds: int
    accept_length: float = Field(description="tokens committed a round; 0 without rounds")
    tokens_per_s: float = Field(description="new tokens over decode time, the first one not counted")
    queue_s: float
    prefill_s: float
    decode_s: float


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenEntry(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenEntry]
    refusal: None = None


class ChatAnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int = 0
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int = 0
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str


class Answer(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: str = FINGERPRINT
    usage: Usage
    ddtree: Summary


class ChatAnswer(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class TextAnswer(Answer):
    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]


class AnswerWriter(ABC):
    """Writes one answer, at once or in chunks.

    Args:
        asked: the request.
        model: name of the model in the API.
        answer_id: tells this answer from others.
        texts: the tokenizer's tokens as texts.
    """

    kind = ""

    def __init__(self, asked: Asked, model: str, answer_id: str, texts: TokenTexts) -> None:
        self._asked, self._texts = asked, texts
        self._head: dict[str, Any] = {"id": answer_id, "created": int(time.time()), "model": model}

    @abstractmethod
    def answer(self, generation: Generation, queue_s: float) -> Answer:
        """The whole answer."""

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any text."""
        return []

    def progress(self, event: Progress) -> list[dict[str, Any]]:
        """The chunk of newly committed text; none where there is nothing to tell."""
        text, logprobs = event.chunk.text, event.chunk.logprobs
        if not text and not logprobs and event.round is None:
            return []
        chunk = self._chunk([self._part(text, self._logprobs(logprobs) if logprobs else None, None)])
        return [chunk if event.round is None else chunk | {"ddtree": event.round}]

    def ending(self, generation: Generation, queue_s: float) -> list[dict[str, Any]]:
        """The chunk with the reason why it ended, and the one with usage where that is wanted."""
        chunks = [self._chunk([self._part("", None, finish_reason(generation))])]
        if self._asked.has_usage:
            usage = usage_of(generation).model_dump()
            chunks.append(self._chunk([]) | {"usage": usage})
        chunks[-1]["ddtree"] = summary_of(self._asked.request, generation, queue_s).model_dump()
        return chunks

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {
            "object": self.kind, "system_fingerprint": FINGERPRINT, "choices": choices
        }  # fmt: skip
        return chunk | {"usage": None} if self._asked.has_usage else chunk

    @abstractmethod
    def _part(self, text: str, logprobs: BaseModel | None, finish: str | None) -> dict[str, Any]:
        """The choice of a chunk."""

    @abstractmethod
    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> BaseModel:
        """Log-probabilities as the endpoint shows them."""


class ChatWriter(AnswerWriter):
    """Answers of /v1/chat/completions."""

    kind = "chat.completion.chunk"

    def answer(self, generation: Generation, queue_s: float) -> ChatAnswer:
        choice = ChatChoice(
            message=ChatAnswerMessage(content=generation.text),
            logprobs=self._logprobs(generation.logprobs) if self._has_logprobs else None,
            finish_reason=finish_reason(generation),
        )
        summary = summary_of(self._asked.request, generation, queue_s)
        return ChatAnswer(**self._head, choices=[choice], usage=usage_of(generation), ddtree=summary)

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk([self._choice({"role": "assistant", "content": ""}, None, None)])]

    @property
    def _has_logprobs(self) -> bool:
        return self._asked.request.top_logprobs is not None

    def _part(self, text: str, logprobs: BaseModel | None, finish: str | None) -> dict[str, Any]:
        return self._choice({"content": text} if finish is None else {}, logprobs, finish)

    def _choice(
        self, delta: dict[str, str], logprobs: BaseModel | None, finish: str | None
    ) -> dict[str, Any]:
        shown = logprobs.model_dump() if logprobs is not None else None
        return {"index": 0, "delta": delta, "logprobs": shown, "finish_reason": finish}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs(content=[self._entry(entry) for entry in entries])

    def _entry(self, entry: TokenLogprobs) -> TokenEntry:
        top = [TopLogprob(**self._token(token, log_prob)) for token, log_prob in entry.top]
        return TokenEntry(**self._token(entry.token, entry.log_prob), top_logprobs=top)

    def _token(self, token: int, log_prob: float) -> dict[str, Any]:
        text, raw, _ = self._texts[token]
        return {
            "token": text,
            "logprob": shown_log_prob(log_prob),
            "bytes": None if raw is None else list(raw),
        }


class TextWriter(AnswerWriter):
    """Answers of /v1/completions."""

    kind = "text_completion"

    def __init__(self, asked: Asked, model: str, answer_id: str, texts: TokenTexts) -> None:
        super().__init__(asked, model, answer_id, texts)
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def answer(self, generation: Generation, queue_s: float) -> TextAnswer:
        has_logprobs = self._asked.request.top_logprobs is not None
        choice = TextChoice(
            text=generation.text,
            logprobs=self._logprobs(generation.logprobs) if has_logprobs else None,
            finish_reason=finish_reason(generation),
        )
        summary = summary_of(self._asked.request, generation, queue_s)
        return TextAnswer(**self._head, choices=[choice], usage=usage_of(generation), ddtree=summary)

    def _part(self, text: str, logprobs: BaseModel | None, finish: str | None) -> dict[str, Any]:
        shown = logprobs.model_dump() if logprobs is not None else None
        return {"index": 0, "text": text, "logprobs": shown, "finish_reason": finish}

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> TextLogprobs:
        return TextLogprobs(
            tokens=[self._texts[entry.token].text for entry in entries],
            token_logprobs=[shown_log_prob(entry.log_prob) for entry in entries],
            top_logprobs=[self._top(entry) for entry in entries],
            text_offset=[self._move_past(entry.token) for entry in entries],
        )

    def _move_past(self, token: int) -> int:
        """Where a token begins in the text: in characters, a part of one counted from its begin."""
        text, raw, is_shown = self._texts[token]
        if not is_shown:
            return self._offset
        if raw is None:
            begin, self._offset = self._offset, self._offset + len(text)
            return begin
        if not 0x80 <= raw[0] < 0xC0:  # it goes on with no character, so one begun before stays broken
            self._offset += len(self._characters.decode(b"", final=True))
        begin, self._offset = self._offset, self._offset + len(self._characters.decode(raw))
        return begin

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens by text, and the chosen one; of two with one text the likelier counts."""
        found: dict[str, float] = {}
        for token, log_prob in (*entry.top, (entry.token, entry.log_prob)):
            found.setdefault(self._texts[token].text, shown_log_prob(log_prob))
        return found


def shown_log_prob(log_prob: float) -> float:
    return max(log_prob, LOWEST_LOG_PROB)


def finish_reason(generation: Generation) -> str:
    """OpenAI's word for why it ended; a cancelled request has no answer."""
    assert generation.finish_reason is not FinishReason.CANCEL
    return str(generation.finish_reason)


def usage_of(generation: Generation) -> Usage:
    stats = generation.stats
    return Usage(
        prompt_tokens=stats.prompt_tokens,
        completion_tokens=stats.new_tokens,
        total_tokens=stats.prompt_tokens + stats.new_tokens,
    )


def summary_of(request: Request, generation: Generation, queue_s: float) -> Summary:
    stats = generation.stats
    return Summary(
        mode=str(request.mode),
        budget=request.node_budget if request.mode is Mode.TREE else None,
        seed=request.sampling.seed,
        rounds=stats.verify_ct,
        accept_length=round(stats.accept_length, 4),
        tokens_per_s=round(stats.tokens_per_s, 3),
        queue_s=round(queue_s, 4),
        prefill_s=round(stats.prefill_s, 4),
        decode_s=round(stats.decode_s, 4),
    )
