"""Made-up traces for tests of the trace view: any trees, any path through them, any texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from ddtree.bench.trace_view_part import TracePart
from ddtree.trace.read import Trace, TracedRequest
from ddtree.trace_format import TraceEnd, TraceHeader, TraceRequest, TraceRound, to_line

HEADER = TraceHeader(
    engine="embedded",
    target={"name": "/models/tiny"},
    drafter=None,
    versions={},
    device="cpu",
    dtype="float32",
    settings={},
    time_utc="2026-01-01T00:00:00+00:00",
)
TOKENS = st.integers(0, 300)


@st.composite
def rounds(draw: Any, position: int, root: int, number: int = 1, id: str = "r0") -> TraceRound:
    """A round at that position: a tree of up to 40 nodes or none, and a path through it."""
    count = draw(st.integers(1, 40))
    parents = [-1, *(draw(st.integers(max(0, node - 9), node - 1)) for node in range(1, count))]
    steps = [draw(st.floats(0, 5)) for _ in range(count)]
    log_probs = [0.0]
    for node in range(1, count):
        log_probs.append(round(log_probs[parents[node]] - steps[node], 6))
    tokens = [root, *draw(st.lists(TOKENS, min_size=count - 1, max_size=count - 1))]
    path = [0]
    while (children := [node for node in range(count) if parents[node] == path[-1]]) and draw(st.booleans()):
        path.append(draw(st.sampled_from(children)))
    carried = {tokens[node] for node in range(count) if parents[node] == path[-1]}
    bonus = draw(TOKENS.filter(lambda token: token not in carried))  # else the walk would have gone on
    accept = (*(tokens[node] for node in path[1:]), bonus)
    is_full = draw(st.booleans())
    return TraceRound(
        id=id,
        round=number,
        position=position,
        root=root,
        mode="tree",
        node_budget=40,
        accept_tokens=accept,
        accept_indices=tuple(path),
        round_ms=draw(st.floats(0, 1e4)),
        tokens=tuple(tokens) if is_full else (),
        parents=tuple(parents) if is_full else (),
        log_probs=tuple(log_probs) if is_full else (),
        target=tuple((-1.0, 0.5) for _ in accept) if is_full else (),
    )


@st.composite
def requests(draw: Any, id: str = "r0") -> TracedRequest:
    """A request of up to 5 rounds, whose last tokens may not have been emitted; some did not end."""
    prompt = tuple(draw(st.lists(TOKENS, min_size=1, max_size=5)))
    tokens, made = [draw(TOKENS)], []
    for number in range(1, draw(st.integers(0, 5)) + 1):
        made.append(draw(rounds(len(prompt) + len(tokens) - 1, tokens[-1], number, id)))
        tokens.extend(made[-1].accept_tokens)
    emitted = len(tokens) - draw(st.integers(0, len(made[-1].accept_tokens) - 1 if made else 0))
    has_end = not made or draw(st.booleans())
    return TracedRequest(
        TraceRequest(id, prompt, {"temperature": 0.0}, "tree", 40),
        tuple(made),
        TraceEnd(id, tuple(tokens[:emitted]), "length", {}) if has_end else None,
    )


def part_of(*traced: TracedRequest, header: TraceHeader = HEADER) -> TracePart:
    """A whole trace of those requests."""
    return TracePart(Trace(header, traced, False), {})


def write_trace(path: Path, *traced: TracedRequest, header: TraceHeader = HEADER) -> Path:
    """The trace file of those requests, one after the other."""
    lines = [header]
    for each in traced:
        lines += [each.request, *each.rounds, *([each.end] if each.end else [])]
    path.write_bytes(b"".join(map(to_line, lines)))
    return path


def plain_request(id: str = "r0", num_rounds: int = 3, num_accept: int = 2) -> TracedRequest:
    """A request at detail summary: prompt 7 8 9, new tokens 0, 1, 2, ..."""
    number = num_rounds * num_accept + 1
    made = tuple(
        TraceRound(
            id=id,
            round=index + 1,
            position=3 + index * num_accept,
            root=index * num_accept,
            mode="tree",
            node_budget=8,
            accept_tokens=tuple(range(index * num_accept + 1, (index + 1) * num_accept + 1)),
            accept_indices=tuple(range(num_accept)),
            round_ms=2.5,
        )
        for index in range(num_rounds)
    )
    return TracedRequest(
        TraceRequest(id, (7, 8, 9), {}, "tree", 8),
        made,
        TraceEnd(id, tuple(range(number)), "length", {"rounds": num_rounds}),
    )
