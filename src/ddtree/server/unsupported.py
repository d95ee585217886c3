"""Fields of OpenAI's API that this server refuses by name, unless they ask for what happens anyway."""

from __future__ import annotations

from typing import Any, NamedTuple

from ddtree.errors import short_repr
from ddtree.server.api_errors import ApiError


class Unsupported(NamedTuple):
    """Why a field is refused, and the values besides null that change nothing."""

    why: str
    neutral: tuple[object, ...] = ()


NO_TOOLS = "tools and functions are not supported"
FIELDS = {
    "n": Unsupported("one answer a request; send it again for another", (1,)),
    "best_of": Unsupported("one answer a request; send it again for another", (1,)),
    "echo": Unsupported("the prompt is not repeated; put it before the answer yourself", (False,)),
    "suffix": Unsupported("text is only continued, not filled in", ("",)),
    "response_format": Unsupported(
        'answers are plain text, {"type": "text"}; ask for JSON in the prompt and check it',
        ({"type": "text"},),
    ),
    "tools": Unsupported(NO_TOOLS, ([],)),
    "tool_choice": Unsupported(NO_TOOLS, ("none", "auto")),
    "parallel_tool_calls": Unsupported(NO_TOOLS, (True, False)),
    "functions": Unsupported(NO_TOOLS, ([],)),
    "function_call": Unsupported(NO_TOOLS, ("none", "auto")),
    "modalities": Unsupported("answers are text", (["text"],)),
    "audio": Unsupported("answers are text"),
    "prediction": Unsupported("a predicted output is not used"),
    "reasoning_effort": Unsupported("how long a model thinks is up to its prompt", ("none",)),
    "verbosity": Unsupported("how much a model says is up to its prompt"),
    "web_search_options": Unsupported("the web is not searched"),
    "moderation": Unsupported("nothing is moderated"),
    "store": Unsupported("nothing is stored", (False,)),
    "service_tier": Unsupported("there is one tier", ("auto", "default")),
}
MESSAGE_FIELDS = {
    "tool_calls": Unsupported(NO_TOOLS, ([],)),
    "tool_call_id": Unsupported(NO_TOOLS),
    "function_call": Unsupported(NO_TOOLS),
    "refusal": Unsupported("refusals are not distinguished; give the text as content"),
    "annotations": Unsupported("annotations are not read", ([],)),
    "audio": Unsupported("messages are text"),
}


def drop_unsupported(
    document: dict[str, Any], fields: dict[str, Unsupported], where: str = ""
) -> dict[str, Any]:
    """The object without the fields of the table.

    Raises:
        ApiError: one of them asks for what this server does not do.
    """
    for name, field in fields.items():
        value = document.get(name)
        if value is not None and not any(_is_same(value, neutral) for neutral in field.neutral):
            allowed = " or ".join(repr(neutral) for neutral in field.neutral)
            raise ApiError(
                400,
                f"{where}{name}={short_repr(value)} is not supported: {field.why}; leave it out"
                + (f" or give {allowed}" if allowed else ""),
                param=f"{where}{name}", code="unsupported_parameter",
            )  # fmt: skip
    return {name: value for name, value in document.items() if name not in fields}


def _is_same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral  # 1 is not true
