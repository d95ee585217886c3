"""From a request's fields to what the engine runs, with OpenAI's defaults."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ddtree.config import Mode, SamplingParams, ServerConfig, parse_mode
from ddtree.engine.request import Request
from ddtree.errors import first_line
from ddtree.server.api_errors import ApiError
from ddtree.server.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DDTreeOptions,
    Prompt,
    SharedFields,
    StreamOptions,
)

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine

# JavaScript's numbers hold such seeds exactly.
RANDOM_SEED_BITS = 53


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the engine runs it, and how its answer is to look.

    Attributes:
        is_chat: the answer is a chat message rather than a text.
        request: for the engine; its observer is set when it runs.
        is_stream: answer in server-sent events.
        has_usage: end the stream with a chunk that has usage.
        has_rounds: describe every round in the stream.
    """

    is_chat: bool
    request: Request
    is_stream: bool
    has_usage: bool
    has_rounds: bool


class RequestReader:
    """Knows the engine's limits and the server's defaults.

    Args:
        engine: its tokenizer, template and sizes are read, its models not touched.
        config: name of the model, mode and budget where a request names none.
    """

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._tokenizer: Any = engine.tokenizer
        self._max_context_tokens = engine.max_context_tokens
        self._vocab_size = engine.target.info.vocab_size
        self._has_drafter = engine.drafter is not None
        self._config = config

    def read(self, body: CompletionRequest | ChatRequest, model_name: str) -> Asked:
        """Tokenize and check; slow for long prompts, so not for the event loop.

        Raises:
            ApiError: the request cannot be run here.
        """
        if body.model is not None and body.model != model_name:
            raise ApiError(
                404, f"the model {body.model!r} is not here: this server has {model_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip
        is_chat = isinstance(body, ChatRequest)
        options = body.ddtree or DDTreeOptions()
        mode, node_budget = self._plan(options)
        is_stream, has_usage = _stream(body, options)
        top_logprobs = _top_logprobs(body)
        sampling = self._sampling(body)
        prompt = self._chat(body.messages) if isinstance(body, ChatRequest) else self._text(body.prompt)
        max_tokens = self._max_tokens(body, len(prompt), "messages" if is_chat else "prompt")
        request = Request(
            prompt, replace(sampling, max_tokens=max_tokens), mode, node_budget, top_logprobs=top_logprobs
        )
        return Asked(is_chat, request, is_stream, has_usage, bool(options.rounds))

    def _plan(self, options: DDTreeOptions) -> tuple[Mode, int | Literal["auto"]]:
        mode = parse_mode(options.mode or self._config.mode)
        if mode is not Mode.AR and not self._has_drafter:
            raise ApiError(
                400, f"ddtree.mode={str(mode)!r} is not allowed: this server has no drafter; use 'ar'",
                param="ddtree.mode",
            )  # fmt: skip
        if mode is not Mode.TREE:
            if options.budget not in (None, "auto"):
                raise ApiError(
                    400, f"ddtree.budget={options.budget} has no effect in mode {str(mode)!r}: leave it out",
                    param="ddtree.budget",
                )  # fmt: skip
            return mode, "auto"
        return mode, options.budget or self._config.node_budget

    def _sampling(self, body: SharedFields) -> SamplingParams:
        """Sampling settings; `max_tokens` waits for the length of the prompt."""
        biases = {int(token): bias for token, bias in (body.logit_bias or {}).items()}
        stop_tokens = tuple(body.stop_token_ids or ())
        self._check_tokens("logit_bias", tuple(biases))
        self._check_tokens("stop_token_ids", stop_tokens)
        seed = secrets.randbits(RANDOM_SEED_BITS) if body.seed is None else body.seed
        given = {
            name: value
            for name in (
                "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            )
            if (value := getattr(body, name)) is not None
        }  # fmt: skip
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            logit_bias=biases,
            seed=seed,
            stop=body.stop or (),
            stop_token_ids=stop_tokens,
            ignore_eos=bool(body.ignore_eos),
            **given,
        )

    def _text(self, prompt: Prompt) -> tuple[int, ...]:
        tokens = tuple(self._tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
        if not tokens:
            raise ApiError(400, "prompt has no tokens: give some text", param="prompt")
        self._check_tokens("prompt", tokens)
        return tokens

    def _chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        if not self._tokenizer.chat_template:
            raise ApiError(400, "the model has no chat template; use /v1/completions", param="messages")
        conversation = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            | ({"name": message.name} if message.name is not None else {})
            for message in messages
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # a template raises what it likes about roles and their order
            raise ApiError(
                400,
                f"the model's chat template refuses these messages: {first_line(error)}",
                param="messages",
            ) from error
        tokens = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if not tokens:
            raise ApiError(400, "messages make a prompt without tokens: give some text", param="messages")
        return tokens

    def _check_tokens(self, name: str, tokens: Sequence[int]) -> None:
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            wrong = next(token for token in tokens if not 0 <= token < self._vocab_size)
            raise ApiError(
                400, f"{name} has the token id {wrong}: ids from 0 to {self._vocab_size - 1} are allowed",
                param=name,
            )  # fmt: skip

    def _max_tokens(self, body: SharedFields, prompt_tokens: int, param: str) -> int:
        limit, room = self._max_context_tokens, self._max_context_tokens - prompt_tokens
        if None not in (body.max_tokens, body.max_completion_tokens) and (
            body.max_tokens != body.max_completion_tokens
        ):
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ: give one of them",
                param="max_completion_tokens",
            )  # fmt: skip
        wanted = body.max_completion_tokens or body.max_tokens
        if room < (wanted or 1):
            more = f" and {wanted} more are wanted" if wanted else ""
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens{more}: this server's context is {limit} tokens, "
                "prompt and answer together; shorten the prompt or ask for fewer tokens",
                param=param, code="context_length_exceeded",
            )  # fmt: skip
        if wanted is not None:
            return wanted
        return room if isinstance(body, ChatRequest) else min(room, DEFAULT_COMPLETION_TOKENS)


def _stream(body: SharedFields, options: DDTreeOptions) -> tuple[bool, bool]:
    is_stream = bool(body.stream)
    if body.stream_options is not None and not is_stream:
        raise ApiError(400, "stream_options is given without stream: true", param="stream_options")
    if options.rounds and not is_stream:
        raise ApiError(400, "ddtree.rounds is given without stream: true", param="ddtree.rounds")
    return is_stream, bool((body.stream_options or StreamOptions()).include_usage)


def _top_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    if isinstance(body, CompletionRequest):
        return body.logprobs
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs is given without logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None
