"""Replays and compares files: from their names to reports, with what they leave open settled first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ddtree.config import is_number
from ddtree.errors import ConfigError, short_repr
from ddtree.models import resolve_target
from ddtree.trace.causes import causes
from ddtree.trace.choice import Noise
from ddtree.trace.compare import Comparison, compare_runs
from ddtree.trace.figures import SLACK_OF_EPS, FigureCheck
from ddtree.trace.findings import Finding, round_findings
from ddtree.trace.grammar import grammar_masks, needs_xgrammar
from ddtree.trace.judge import (
    CALIBRATION_MARGIN,
    Judged,
    calibrated_eps,
    judge_outputs,
    largest_plain_gap,
    measured_eps,
)
from ddtree.trace.outputs import Order, Output
from ddtree.trace.replay import Replayer
from ddtree.trace.run_file import Answer, Run, Tokenizer, read_run
from ddtree.trace.target import LazyTokenizer, load_replayer, load_tokenizer
from ddtree.trace_format import checkpoint_sha256

KEEPS_OVERRUN = ("0.5.17",)  # releases of SGLang that keep what a round has behind an end token
MAX_READINGS = 64  # of a text, each with one token as the target would have said it

Load = Callable[[str, str], Replayer]
"""From a target's name and a number format to its replayer."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the files leave open, and what stands above them where it is given.

    Attributes:
        model: the target.
        dtype: its number format in the engine.
        eps: the largest gap that is rounding, in logits.
        eps_from: a file of plain decoding's greedy outputs to measure it on.
        order: whose processing steps chose the tokens.
        device: where the target runs.
        noise: the noise of a draw.
    """

    model: str | None = None
    dtype: str | None = None
    eps: float | None = None
    eps_from: Path | None = None
    order: Order | None = None
    device: str = "auto"
    noise: Noise | None = None

    def __post_init__(self) -> None:
        if self.eps is not None and not (is_number(self.eps) and self.eps > 0):
            raise ConfigError(f"eps={short_repr(self.eps)} is not allowed: a number of logits above 0")
        if self.eps is not None and self.eps_from is not None:
            raise ConfigError("eps and eps_from are both given: give one of them")

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the target, where one is named."""
        return None if self.model is None else LazyTokenizer(self.model)

    def replayer(self, model: str, dtype: str) -> Replayer:
        """The replayer of a target in a number format."""
        return load_replayer(model, dtype, self.device, self.noise)


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A run and what its replay says."""

    run: Run
    model: str
    dtype: str
    eps_source: str
    judged: Judged
    findings: tuple[Finding, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether no token and no ending is wrong, and nothing else was found."""
        return self.judged.is_lossless and not self.findings

    def to_json(self) -> dict[str, Any]:
        """All of it, for a report."""
        return {
            "source": self.run.source,
            "model": self.model,
            "dtype": self.dtype,
            "processing_order": self.run.order,
            "eps_from": self.eps_source,
            "unfinished": self.run.num_unfinished,
            **self.judged.to_json(),
            "is_clean": self.is_clean,
            "findings": [found.to_json() for found in self.findings],
        }


def replay_file(path: Path, options: ReplayOptions, load: Load | None = None) -> ReplayReport:
    """Replay every token of every finished output of a file.

    Args:
        load: in place of `ReplayOptions.replayer`.

    Raises:
        ConfigError: the file, or an output of it, cannot be replayed, or how much is rounding is not known.
        ModelError: the target cannot be found or used.
    """
    run = read_run(path, options.tokenizer(), options.order)
    model = options.model or (str(run.target["name"]) if run.target and run.target.get("name") else None)
    dtype = options.dtype or run.dtype
    if model is None:
        raise ConfigError(f"{path} does not name its target: name it with --model")
    if dtype is None:
        raise ConfigError(f"{path} does not say its number format: give --dtype float32, bfloat16 or float16")
    check_target(run, model)
    for answer in run.answers:
        _check_replayable(answer.output, path)
    replayer = (load or options.replayer)(model, dtype)
    check_tokens(run, replayer)
    _prepare_masks(replayer, [run], model)
    eps, source = settle_eps(dtype, options, replayer, (run,))
    if eps is None:
        raise ConfigError(
            f"how much is rounding in {dtype} is not known: give --eps-from with greedy outputs of plain "
            "decoding by the same engine, or --eps"
        )
    tokenizer = options.tokenizer()
    fitted = [_fitted(answer, replayer, tokenizer, eps) for answer in run.answers]
    figures = FigureCheck(fitted, SLACK_OF_EPS * eps)
    context = min((n for n in (run.context_tokens, replayer.context_tokens) if n is not None), default=None)
    judged = judge_outputs(
        replayer, [answer.output for answer in fitted], eps,
        context if run.context_tokens is not None else None, plant=True,
        overrun_tokens=_overrun_tokens(run), watch=figures.add,
        exact=None if dtype == "float32" else partial(_exact, load or options.replayer, model, replayer),
    )  # fmt: skip
    findings = (*round_findings(run), *causes(replayer, fitted, judged, figures))
    return ReplayReport(run, model, dtype, source, judged, findings)


def compare_files(first: Path, second: Path, options: ReplayOptions, load: Load | None = None) -> Comparison:
    """Compare two files of the same requests; arguments and errors as of `replay_file` and `compare_runs`.

    The target is loaded only where one is named.
    """
    runs = [read_run(path, options.tokenizer(), options.order) for path in (first, second)]
    dtypes = {run.dtype for run in runs}
    dtype = options.dtype or ("float32" if len(dtypes) > 1 else dtypes.pop())
    replayer = None
    if options.model is not None:
        for run in runs:
            check_target(run, options.model)
        replayer = (load or options.replayer)(options.model, dtype or "float32")
        for run in runs:
            check_tokens(run, replayer)
        _prepare_masks(replayer, runs, options.model)
    elif options.eps_from is not None:
        raise ConfigError("--eps-from is measured by replay: name the target with --model")
    exact = all(run.dtype == "float32" for run in runs)
    eps, _ = settle_eps("float32" if exact else _coarsest(runs, options), options, replayer, runs)
    return compare_runs(runs[0], runs[1], eps, replayer)


def check_target(run: Run, model: str) -> None:
    """Refuse a target of other files than those the run had.

    Raises:
        ConfigError: their checksums differ.
    """
    told = run.target.get("folder_sha256") if run.target else None
    if told is None:
        return
    folder = resolve_target(model)
    own = checkpoint_sha256(folder)
    if own is not None and own != told:
        raise ConfigError(
            f"{run.source} is of a target with the checksum {str(told)[:12]}, and {model} in {folder} has "
            f"{own[:12]}: name the target that it is of"
        )


def check_tokens(run: Run, replayer: Replayer) -> None:
    """Refuse token ids that the target does not have.

    Raises:
        ConfigError: there is one.
    """
    for output in run.outputs:
        for token in (*output.prompt, *output.tokens, *output.read_sampling().logit_bias):
            if not 0 <= token < replayer.vocab_size:
                raise ConfigError(
                    f"{run.source}, {output.name}: the token {token} is not the target's, whose ids go "
                    f"from 0 to {replayer.vocab_size - 1}"
                )


def _exact(load: Load, model: str, replayer: Replayer) -> Replayer | None:
    """The target in float32 beside `replayer`, None where the device has no room for it."""
    try:
        exact = load(model, "float32")
    except torch.OutOfMemoryError:
        return None
    exact.make_masks = replayer.make_masks
    return exact


def _check_replayable(output: Output, path: Path) -> None:
    sampling = output.read_sampling()
    if sampling.grammar is not None and output.order == "embedded":
        raise ConfigError(
            f"{path}, {output.name} has {sampling.grammar.kind}, which the embedded engine does not know: "
            "leave it out, or say whose output it is with --engine sglang"
        )
    if sampling.grammar is not None:
        needs_xgrammar()
    if not sampling.is_greedy(output.order) and sampling.seed is None:
        raise ConfigError(
            f"{path}, {output.name} was sampled without a seed: only draws with noise keyed by a seed can be "
            "replayed; compare many such outputs with ddtree compare"
        )


def _prepare_masks(replayer: Replayer, runs: Sequence[Run], model: str) -> None:
    """Give the replayer what masks tokens by grammar, where an output has one."""
    has_grammar = any(output.read_sampling().grammar for run in runs for output in run.outputs)
    if has_grammar and replayer.make_masks is None:
        needs_xgrammar()
        replayer.make_masks = grammar_masks(load_tokenizer(model), replayer.vocab_size, replayer.stop_tokens)


def settle_eps(
    dtype: str, options: ReplayOptions, replayer: Replayer | None, runs: Sequence[Run]
) -> tuple[float | None, str]:
    """The largest gap that is rounding, None where it is not known, and where it comes from.

    In a 16-bit format it is twice the largest gap of plain decoding's greedy outputs, those of `eps_from`
    or the ones that a run holds itself, and no less than the floor of the format (`EPS_FLOORS`).
    """
    if options.eps is not None:
        return options.eps, "--eps"
    if options.eps_from is not None and replayer is not None:
        plain = read_run(options.eps_from, options.tokenizer(), options.order)
        check_tokens(plain, replayer)
        answers = [answer for answer in plain.answers if answer.mode in (None, "ar")]
        source = str(options.eps_from)
    elif dtype == "float32" or replayer is None:
        return calibrated_eps(dtype, ()), "float32"
    else:
        answers = [answer for run in runs for answer in run.answers if answer.mode == "ar"]
        source = "the plain outputs compared"
        if not any(_is_greedy(answer) for answer in answers):
            return None, ""
    outputs = [answer.output for answer in answers]
    gap = largest_plain_gap(replayer, outputs, source)
    eps = measured_eps(dtype, gap)
    if eps > CALIBRATION_MARGIN * gap:
        return eps, f"the least in {dtype}, since the largest gap of {source} is {gap:.4g}"
    return eps, f"twice the largest gap of {source}, {gap:.4g}"


def _coarsest(runs: Sequence[Run], options: ReplayOptions) -> str:
    """The 16-bit format that rounds most of those that the runs may be in."""
    formats = {run.dtype or options.dtype for run in runs}
    return "float16" if formats <= {"float16", "float32"} else "bfloat16"


def _is_greedy(answer: Answer) -> bool:
    return answer.output.read_sampling().is_greedy(answer.output.order)


def _overrun_tokens(run: Run) -> int:
    """The longest round of a run in a release of SGLang that keeps overruns, else 0."""
    if run.sglang not in KEEPS_OVERRUN:
        return 0
    return max((length for answer in run.answers for length in answer.accept_lengths or ()), default=0)


def _fitted(answer: Answer, replayer: Replayer, tokenizer: Tokenizer | None, eps: float) -> Answer:
    """The answer with tokens, where it is a text, that the target itself would have written it in.

    A text can be cut into tokens in many ways, and an engine need not have emitted the tokenizer's. Where a
    token is not the target's choice, but the choice goes on with the same text, the choice is taken.
    """
    output = answer.output
    if answer.text is None or tokenizer is None:
        return answer
    for _ in range(MAX_READINGS):
        wrong = replayer.judge(output, eps).first_violation
        if wrong is None:
            break
        begun = (*output.tokens[: wrong.index], wrong.expected)
        text = tokenizer.decode(begun, skip_special_tokens=False)
        if not answer.text.startswith(text):
            break
        rest = tokenizer.encode(answer.text[len(text) :], add_special_tokens=False)
        if tokenizer.decode((*begun, *rest), skip_special_tokens=False) != answer.text:
            break
        output = replace(output, tokens=(*begun, *rest))
    return replace(answer, output=output)
