"""What the page of a trace shows, as values that JSON has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

from ddtree.bench.trace_view_part import TracePart
from ddtree.bench.trace_view_text import Texts, growth
from ddtree.errors import short_repr
from ddtree.trace.read import TracedRequest
from ddtree.trace.rounds import round_problems
from ddtree.trace_format import TraceHeader, TraceRound

MAX_PROMPT_CHARS = 6000
MAX_PROBLEMS = 20  # shown of a request
SUMMARY_NOTE = (
    "This trace has no trees: it was recorded at detail summary. At detail full it has them: "
    "--trace-detail full of ddtree generate, trace_detail of the plugin for SGLang."
)


def page_data(part: TracePart, texts: Texts, title: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The data of a page: header, requests with their rounds, and the text of every token in them."""
    header, requests = part.trace.header, part.trace.requests
    return {
        "title": title,
        "source": source_fields(header),
        "notes": [*notes, *part_notes(part)],
        "requests": [
            request_fields(traced, texts, header, part.rounds_left.get(traced.request.id, 0))
            for traced in requests
        ],
        "texts": {str(token): texts.one(token) for token in sorted(tokens_of(requests))},
    }


def source_fields(header: TraceHeader) -> dict[str, Any]:
    """Who decoded, with what."""
    drafter = header.drafter
    return {
        "engine": header.engine,
        "target": str(header.target.get("name", "not named")),
        "drafter": None if drafter is None else str(drafter.get("name", "not named")),
        "device": header.device,
        "dtype": header.dtype,
        "time_utc": header.time_utc,
    }


def part_notes(part: TracePart) -> Iterator[str]:
    """What the reader must know of the trace as a whole."""
    trace, taken = part.trace, sum(len(traced.rounds) for traced in part.trace.requests)
    if part.num_rounds_left or part.requests_left:
        requests = len(trace.requests)
        yield (
            f"A part of the trace: the first {requests} of {requests + part.requests_left} requests, "
            f"{taken} of {taken + part.num_rounds_left} rounds."
        )
    if trace.is_cut:
        yield "The trace's last line broke off: what came after it is missing."
    if taken and not any(each.tokens for traced in trace.requests for each in traced.rounds):
        yield SUMMARY_NOTE


def tokens_of(requests: Sequence[TracedRequest]) -> set[int]:
    """All tokens that are shown one by one."""
    found: set[int] = set()
    for traced in requests:
        found.update(traced.tokens[:1])
        for each in traced.rounds:
            found.update((each.root,), each.accept_tokens, each.tokens)
    return found


def request_fields(
    traced: TracedRequest, texts: Texts, header: TraceHeader, rounds_left: int
) -> dict[str, Any]:
    """A request with its rounds and the growth of its text."""
    request, end, tokens = traced.request, traced.end, traced.tokens
    ends = [_num_before(traced), *(_num_emitted(traced, each) for each in traced.rounds)]
    grown = growth(texts, tokens, ends)
    problems = round_problems(
        request.prompt_tokens, tokens, traced.rounds,
        walks_whole=not header.settings.get("max_accept_tokens"), may_skip=header.engine == "sglang",
    )  # fmt: skip
    return {
        "id": request.id,
        "server_id": request.server_id,
        "mode": request.mode,
        "node_budget": request.node_budget,
        "sampling": shown_values(request.sampling),
        "prompt_tokens": len(request.prompt_tokens),
        "prompt": prompt_text(texts.joined(request.prompt_tokens)),
        "new_tokens": len(tokens),
        "finish_reason": None if end is None else end.finish_reason,
        "stats": {} if end is None else shown_values(end.stats),
        "first_token": tokens[0] if tokens else None,
        "first_target": finite(end.first_target[0]) if end and end.first_target else None,
        "text": grown.text,
        "steps": grown.steps,
        "rounds": [round_fields(each) for each in traced.rounds],
        "rounds_left": rounds_left,
        "problems": [problem.text for problem in islice(problems, MAX_PROBLEMS)],
    }


def _num_before(traced: TracedRequest) -> int:
    """New tokens before the first round, which prefill makes; all of a request without rounds."""
    if not traced.rounds:
        return len(traced.tokens)
    first = traced.rounds[0].position - len(traced.request.prompt_tokens) + 1
    return min(max(first, 0), len(traced.tokens))


def _num_emitted(traced: TracedRequest, entry: TraceRound) -> int:
    """New tokens after a round."""
    end = entry.position - len(traced.request.prompt_tokens) + 1 + len(entry.accept_tokens)
    return min(max(end, 0), len(traced.tokens))


def round_fields(entry: TraceRound) -> dict[str, Any]:
    """A round, with its tree if it has one that can be drawn, or `fault` that says why it cannot."""
    found = {
        "round": entry.round,
        "position": entry.position,
        "root": entry.root,
        "mode": entry.mode,
        "node_budget": entry.node_budget,
        "accept_tokens": entry.accept_tokens,
        "accept_indices": entry.accept_indices,
        "round_ms": finite(entry.round_ms),
        "target": finite(entry.target),
    }
    if entry.stages_ms:
        found["stages_ms"] = {str(name): value for name, value in entry.stages_ms.items() if is_time(value)}
    if entry.tokens:
        fault = tree_fault(entry)
        found |= {"fault": fault} if fault else {
            "tokens": entry.tokens, "parents": entry.parents, "log_probs": finite(entry.log_probs)
        }  # fmt: skip
    return found


def tree_fault(entry: TraceRound) -> str | None:
    """Why a round's tree cannot be drawn; None if it can."""
    if not len(entry.tokens) == len(entry.parents) == len(entry.log_probs):
        return "its lists have different lengths"
    for node, parent in enumerate(entry.parents):
        if not (parent == -1 if node == 0 else 0 <= parent < node):
            return f"node {node} has the parent {parent}"
    path = entry.accept_indices
    if path[:1] != (0,):
        return "its path does not begin at the root"
    if len(path) != len(entry.accept_tokens):
        return f"its path has {len(path)} nodes, and {len(entry.accept_tokens)} tokens were committed"
    for above, node in pairwise(path):
        if not 0 < node < len(entry.parents) or entry.parents[node] != above:
            return f"node {node} of its path is no child of node {above}"
    return None


def prompt_text(text: str) -> dict[str, Any]:
    """A prompt's beginning and end, and how many characters between them are left out."""
    left = len(text) - MAX_PROMPT_CHARS
    if left <= 0:
        return {"begin": text, "left": 0, "end": ""}
    return {"begin": text[: MAX_PROMPT_CHARS // 3], "left": left, "end": text[left + MAX_PROMPT_CHARS // 3 :]}


def is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def shown_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name; what holds others as text."""
    return {
        str(name): finite(value) if isinstance(value, int | float | str) else short_repr(value)
        for name, value in values.items()
        if value is not None and value != [] and value != {}
    }


def finite(value: Any) -> Any:
    """The value with None in place of numbers that are not finite, in lists of lists too."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return [finite(entry) for entry in value] if isinstance(value, list | tuple) else value
