"""Reads the finished outputs of a run: a trace, or an outputs file of any engine (docs/compare.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddtree.config import Mode, is_int
from ddtree.errors import ConfigError, short_repr
from ddtree.trace.outputs import ORDERS, Order, Output, Sampling
from ddtree.trace.read import TracedRequest, read_trace
from ddtree.trace_format import TraceHeader, TraceRound, is_trace, parse_line

MAX_HEADER_BYTES = 1 << 24
FINISHES = ("stop", "length", "cancel", "abort")
Margin = tuple[float, float] | None  # a token's log-probability, and the best's less the second best's


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished output and what is known of how it was made.

    Attributes:
        mode, node_budget: as asked for; None where not known.
        accept_lengths: tokens that each round committed; None where not known.
        rounds: the rounds of a trace.
        margins: figures of the target at each token, () where not known.
        text: where the tokens are those of a text, that text.
    """

    output: Output
    mode: str | None = None
    node_budget: int | str | None = None
    accept_lengths: tuple[int, ...] | None = None
    rounds: tuple[TraceRound, ...] = ()
    margins: tuple[Margin, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The finished outputs of one file; facts that it does not tell are None.

    Attributes:
        source: the file, as it was named.
        target, drafter: what the header says of the models, `name` at least.
        num_unfinished: requests without an end, as in a trace that broke off.
        context_tokens: where the engine's context ends.
        walks_whole, may_skip: what its rounds do, see `round_problems`.
        sglang: the release of SGLang that made it.
    """

    source: str
    answers: tuple[Answer, ...]
    order: Order
    target: Mapping[str, Any] | None = None
    drafter: Mapping[str, Any] | None = None
    dtype: str | None = None
    num_unfinished: int = 0
    context_tokens: int | None = None
    walks_whole: bool = True
    may_skip: bool = False
    sglang: str | None = None

    @property
    def outputs(self) -> list[Output]:
        return [answer.output for answer in self.answers]


def read_run(path: Path, tokenizer: Tokenizer | None = None, order: Order | None = None) -> Run:
    """The finished outputs of a trace or an outputs file.

    Args:
        tokenizer: the target's, for prompts and outputs that are texts.
        order: whose processing steps chose the tokens; None for what the file says, SGLang's without.

    Raises:
        ConfigError: the file cannot be read, a line is not what it should be, or no output is finished.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            is_traced = is_trace(file.readline(MAX_HEADER_BYTES))
        run = _of_trace(path, order) if is_traced else _of_outputs(path, tokenizer, order)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{short_repr(name)} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    if not run.answers:
        raise ConfigError(f"{short_repr(name)} has no finished output")
    return run


def _of_trace(path: Path, order: Order | None) -> Run:
    trace = read_trace(path)
    header = trace.header
    own: Order = "embedded" if header.engine == "embedded" else "sglang"
    finished = [each for each in trace.requests if each.end is not None and each.end.tokens]
    settings, packages = header.settings, header.versions.get("packages")
    context = settings.get("max_context_tokens", settings.get("context_length"))
    sglang = packages.get("sglang") if isinstance(packages, dict) and own == "sglang" else None
    return Run(
        source=str(path),
        answers=tuple(_traced_answer(each, order or own, str(path)) for each in finished),
        order=order or own,
        target=header.target,
        drafter=header.drafter,
        dtype=header.dtype,
        num_unfinished=len(trace.requests) - len(finished),
        context_tokens=context if is_int(context) else None,
        walks_whole=not _is_cut(header),
        may_skip=own == "sglang",
        sglang=sglang,
    )


def _is_cut(header: TraceHeader) -> bool:
    """Whether rounds were told to commit less than their path."""
    return bool(header.settings.get("max_accept_tokens"))


def _traced_answer(traced: TracedRequest, order: Order, where: str) -> Answer:
    request, end = traced.request, traced.end
    assert end is not None
    output = Output(
        request.prompt_tokens, end.tokens, request.sampling, request.id, {"type": end.finish_reason}, order
    )
    _check_sampling(output, f"{where}, {request.id}")
    return Answer(
        output=output,
        mode=request.mode,
        node_budget=request.node_budget,
        accept_lengths=tuple(len(entry.accept_tokens) for entry in traced.rounds),
        rounds=traced.rounds,
        margins=_margins(traced, end.tokens),
    )


def _margins(traced: TracedRequest, tokens: Sequence[int]) -> tuple[Margin, ...]:
    """The target's figures at each token, None where a trace has none of it; () where it has none at all."""
    found: list[Margin] = [None] * len(tokens)
    assert traced.end is not None
    found[:1] = traced.end.first_target[:1] or [None]
    for entry in traced.rounds:
        start = entry.position - len(traced.request.prompt_tokens) + 1
        for place, figure in enumerate(entry.target, start):
            if 0 <= place < len(found):
                found[place] = figure
    return tuple(found) if any(figure is not None for figure in found) else ()


# -- outputs files ---------------------------------------------------------------------------------


def _of_outputs(path: Path, tokenizer: Tokenizer | None, order: Order | None) -> Run:
    answers: list[Answer] = []
    facts: dict[str, str] = {}
    for number, values in _objects(path):
        where = f"{path} line {number}"
        answers.append(_answer(values, where, f"line {number}", tokenizer, order))
        for name in ("model", "dtype", "engine"):
            if name in values:
                value = values[name]
                _ensure(isinstance(value, str), where, f"{name}={short_repr(value)}, which is no text")
                _ensure(
                    facts.setdefault(name, value) == value,
                    where, f"{name}={value!r}, while lines before it have {facts[name]!r}: a file is one run",
                )  # fmt: skip
    return Run(
        source=str(path),
        answers=tuple(answers),
        order=answers[0].output.order if answers else "sglang",
        target={"name": facts["model"]} if "model" in facts else None,
        dtype=facts.get("dtype"),
    )


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, parse_line(line)
            except (json.JSONDecodeError, UnicodeDecodeError, ValueError) as error:
                if not line.endswith(b"\n") and number > 1:
                    return  # broke off, as after a crash
                raise ConfigError(f"{path} line {number} is no JSON object: {error}") from None


def _answer(
    values: Mapping[str, Any], where: str, name: str, tokenizer: Tokenizer | None, order: Order | None
) -> Answer:
    prompt, _ = _tokens_of(values, "prompt_tokens", "prompt", where, tokenizer, add_special_tokens=True)
    tokens, text = _tokens_of(values, "tokens", "text", where, tokenizer, add_special_tokens=False)
    sampling = values.get("sampling")
    _ensure(
        isinstance(sampling, dict) and sampling.get("temperature") is not None,
        where, "no sampling with a temperature: give 0 for greedy outputs",
    )  # fmt: skip
    assert isinstance(sampling, dict)
    own, mode = values.get("engine", "sglang"), values.get("mode")
    _ensure(own in ORDERS, where, f"engine={short_repr(own)}: {' and '.join(ORDERS)} are known; leave it out "
            "for another engine, whose outputs are judged as SGLang's")  # fmt: skip
    _ensure(
        mode is None or mode in list(Mode), where, f"mode={short_repr(mode)}: {', '.join(Mode)} are known"
    )
    finish = values.get("finish_reason")
    if isinstance(finish, str):
        finish = {"type": finish}
    _ensure(
        finish is None or (isinstance(finish, dict) and finish.get("type") in FINISHES),
        where, f"finish_reason={short_repr(finish)}: {', '.join(FINISHES)} are known",
    )  # fmt: skip
    if text is not None and isinstance(finish, dict):
        # Which token ended a text is not in the text.
        finish = None if finish["type"] == "stop" else finish
    output = Output(prompt, tokens, sampling, name, finish, order or own)
    _check_sampling(output, where)
    lengths = values.get("accept_lengths")
    _ensure(lengths is None or _are_ints(lengths, 1), where, f"accept_lengths={short_repr(lengths)}")
    budget = values.get("node_budget")
    return Answer(
        output=output,
        mode=mode,
        node_budget=budget if budget is None or is_int(budget) else str(budget),
        accept_lengths=None if lengths is None else tuple(lengths),
        text=text,
    )


def _check_sampling(output: Output, where: str) -> None:
    """Refuse parameters that cannot be, here, where their place in the file is known."""
    try:
        output.read_sampling()
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _tokens_of(
    values: Mapping[str, Any], tokens_name: str, text_name: str, where: str, tokenizer: Tokenizer | None,
    *, add_special_tokens: bool,
) -> tuple[tuple[int, ...], str | None]:  # fmt: skip
    """Token ids and, where they are made from a text, the text."""
    tokens, text = values.get(tokens_name), values.get(text_name)
    if tokens is not None:
        _ensure(_are_ints(tokens, 0) and tokens != [], where, f"{tokens_name}={short_repr(tokens)}, which is "
                "not allowed: a list of token ids, one at least")  # fmt: skip
        return tuple(tokens), None
    _ensure(isinstance(text, str) and text != "", where, f"neither {tokens_name} nor a {text_name}")
    if tokenizer is None:
        raise ConfigError(f"{where} has a {text_name} without {tokens_name}: name the model that reads it")
    is_whole = not any("\ud800" <= sign <= "\udfff" for sign in str(text))
    _ensure(is_whole, where, f"a {text_name} with half a surrogate pair, which no tokenizer reads")
    found = tokenizer.encode(str(text), add_special_tokens=add_special_tokens)
    _ensure(bool(found), where, f"a {text_name} that gives no token")
    return tuple(found), str(text)


def _are_ints(values: Any, least: int) -> bool:
    return isinstance(values, list) and all(is_int(value) and value >= least for value in values)


def _ensure(condition: bool, where: str, told: str) -> None:
    if not condition:
        raise ConfigError(f"{where} has {told}")


def sampling_of(answer: Answer) -> Sampling:
    """The sampling parameters of an answer, without what makes no difference to it."""
    return answer.output.read_sampling().normal(answer.output.order)
