"""The bodies of requests: OpenAI's fields, a few more, and what each may hold.

A null is the same as a field left out. Fields of OpenAI's API that are not here are refused by name
(`unsupported`), unknown ones too; those in `IgnoredFields` change nothing here and are read over.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictStr,
    ValidationError,
    WithJsonSchema,
)

from ddtree.config import MAX_NODE_BUDGET, MAX_STOP_STRINGS, is_int
from ddtree.errors import short_repr
from ddtree.server.api_errors import ApiError
from ddtree.server.unsupported import FIELDS, MESSAGE_FIELDS, drop_unsupported

MAX_TOKENS = 1 << 20
MAX_STOP_CHARACTERS = 1024
MAX_BIASES = 1024
MAX_PATH_CHARACTERS = 200
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat goes on to its end or the context's

Prompt = str | tuple[int, ...]


def read_prompt(value: object) -> Prompt:
    """A text, token ids, or a list of just one of these."""
    if isinstance(value, list) and value and not is_int(value[0]):
        if len(value) > 1:
            raise ValueError(f"{len(value)} prompts in one request; send one request for each")
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise ValueError("it is empty; give some text")
        return value
    if isinstance(value, list) and value and all(map(is_int, value)):
        return tuple(value)
    raise ValueError("it is neither a text nor a list of token ids with at least one of them")


def read_content(value: object) -> str:
    """A message's text: a string, or parts of type text, of which each begins a new line."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("it is neither a text nor a list of text parts")
    return "\n".join(_text_of(part) for part in value)


def _text_of(part: object) -> str:
    if not isinstance(part, dict) or "type" not in part:
        raise ValueError('it has a part that is not {"type": "text", "text": ...}')
    if part["type"] != "text":
        raise ValueError(f"it has a part of type {short_repr(part['type'])}; only text is supported")
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise ValueError('it has a text part that is not {"type": "text", "text": ...}')
    return str(part["text"])


def read_message(value: object) -> object:
    """A message without fields that change nothing."""
    if not isinstance(value, dict):
        return value
    if value.get("role") in ("tool", "function"):
        raise ValueError("role is 'tool' or 'function': tools and functions are not supported")
    try:
        return drop_unsupported(value, MESSAGE_FIELDS)
    except ApiError as error:
        raise ValueError(error.message) from None


def read_stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > MAX_STOP_STRINGS:
        raise ValueError(f"it is neither a text nor a list of at most {MAX_STOP_STRINGS} texts")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise ValueError(f"stop texts have from 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(texts)


def read_budget(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and is_int(value) and 1 <= value <= MAX_NODE_BUDGET:
        return value
    raise ValueError(f'it is neither a whole number from 1 to {MAX_NODE_BUDGET} nor "auto"')


TOKEN_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        TOKEN_IDS,
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1},
        {"type": "array", "items": TOKEN_IDS, "minItems": 1, "maxItems": 1},
    ]
}
TEXT_PART: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": TEXT_PART, "minItems": 1}]
}
STOP_TEXT: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
STOP_SCHEMA: dict[str, Any] = {
    "anyOf": [STOP_TEXT, {"type": "array", "items": STOP_TEXT, "maxItems": MAX_STOP_STRINGS}]
}
BUDGET_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_NODE_BUDGET}, {"const": "auto"}]
}

PromptField = Annotated[Prompt, PlainValidator(read_prompt), WithJsonSchema(PROMPT_SCHEMA)]
ContentField = Annotated[str, PlainValidator(read_content), WithJsonSchema(CONTENT_SCHEMA)]
StopField = Annotated[tuple[str, ...], PlainValidator(read_stop), WithJsonSchema(STOP_SCHEMA)]
BudgetField = Annotated[int | Literal["auto"], PlainValidator(read_budget), WithJsonSchema(BUDGET_SCHEMA)]
ModeField = Annotated[Literal["ar", "chain", "tree"], Field(description="how tokens are made")]
TokenIdText = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
BiasField = Annotated[
    dict[TokenIdText, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)
]
StopTokensField = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)
]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63, description="left out, a new one, which the answer names")]
Temperature = Annotated[float, Field(ge=0, le=100, description="default 1, as OpenAI's; 0 is greedy")]
ModelName = Annotated[str, Field(description="a name from /v1/models; left out, the server's own")]
IncludeUsage = Annotated[bool, Field(description="end the stream with a chunk that has usage")]


class Strict(BaseModel):
    """A JSON object in which nothing is converted and nothing unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class DDTreeOptions(Strict):
    """Field `ddtree` of a request (`extra_body={"ddtree": {...}}` in the openai client)."""

    mode: ModeField | None = None
    budget: BudgetField | None = None
    rounds: Annotated[bool, Field(description="describe every round in the stream")] | None = None


class StreamOptions(Strict):
    """Field `stream_options` of a request."""

    include_usage: IncludeUsage | None = None
    include_obfuscation: Annotated[Literal[False], Field(description="chunks are not padded")] | None = None


class IgnoredFields(Strict):
    """Fields that name a request's user or purpose; they change nothing here."""

    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None


class SharedFields(IgnoredFields):
    """What both endpoints take."""

    model: ModelName | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKENS, description="0 keeps all tokens")] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: BiasField | None = None
    seed: Seed | None = None
    stop: StopField | None = None
    stop_token_ids: StopTokensField | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ddtree: DDTreeOptions | None = None


class CompletionRequest(SharedFields):
    """Body of /v1/completions."""

    prompt: PromptField
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class ChatMessage(Strict):
    """One message; a developer's is a system message to the model's template."""

    role: Literal["system", "developer", "user", "assistant"]
    content: ContentField
    name: StrictStr | None = None


class ChatRequest(SharedFields):
    """Body of /v1/chat/completions."""

    messages: Annotated[
        list[Annotated[ChatMessage, BeforeValidator(read_message)]], Field(fail_fast=True, min_length=1)
    ]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


BodyKind = type[CompletionRequest] | type[ChatRequest]


def read_request(kind: BodyKind, document: dict[str, Any]) -> CompletionRequest | ChatRequest:
    """A request from its JSON object.

    Raises:
        ApiError: a field is unknown, unsupported or has a value that is not allowed.
    """
    document = drop_unsupported(document, FIELDS)
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise _refused_field(first["type"], first["loc"], first["msg"], first["input"]) from None


def _refused_field(kind: str, where: tuple[int | str, ...], message: str, value: object) -> ApiError:
    path = ".".join(str(part) for part in where if part != "[key]")  # pydantic's word for a key, no field
    path = path[:MAX_PATH_CHARACTERS]  # the client's own words, which may be long
    if kind == "extra_forbidden":
        return ApiError(
            400, f"unknown field {short_repr(path)}: leave it out", param=path, code="unknown_parameter"
        )
    if kind == "missing":
        return ApiError(400, f"{path} is missing: give it", param=path, code="missing_required_parameter")
    message = message.removeprefix("Value error, ")
    return ApiError(
        400, f"{path}={short_repr(value)} is not allowed: {message[:1].lower()}{message[1:]}", param=path
    )
