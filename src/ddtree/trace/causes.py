"""Why a replay finds wrong tokens: a parameter that was not applied, another rule of drawing, or a place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ddtree.errors import counted
from ddtree.trace.choice import EXCLUDED
from ddtree.trace.figures import FigureCheck
from ddtree.trace.findings import Finding
from ddtree.trace.judge import Judged
from ddtree.trace.locate import FirstWrong, located
from ddtree.trace.outputs import Sampling
from ddtree.trace.replay import Replayer, Violation
from ddtree.trace.run_file import Answer

MAX_REPLAYED = 16  # outputs with wrong tokens that are replayed again with a parameter left out
GRAMMARS = ("json_schema", "regex", "ebnf")
MOST = 0.9  # of them must be explained by a parameter that is to blame

Wrong = Mapping[int, Sequence[Violation]]
"""The wrong tokens of each output that has some, by its index."""


def causes(
    replayer: Replayer, answers: Sequence[Answer], judged: Judged, figures: FigureCheck
) -> list[Finding]:
    """What the wrong tokens and figures of a replay have in common.

    Args:
        answers: the run's, each of another name.
        judged: the verdicts of their outputs, of the tokens that `answers` have.
        figures: what has seen all of their logits.
    """
    indices = {answer.output.name: index for index, answer in enumerate(answers)}
    wrong: dict[int, list[Violation]] = {}
    for name, violation in judged.violations:
        wrong.setdefault(indices[name], []).append(violation)
    # Where the logits themselves are wrong, no parameter is to blame for the choice.
    chosen = {index: found for index, found in wrong.items() if not figures.off.get(index)}
    replayed = {index: chosen[index] for index in list(chosen)[:MAX_REPLAYED]}
    ignored = ignored_parameters(replayer, answers, replayed, judged.eps)
    explained = {index for indices in ignored.values() for index in indices}
    left = {
        index: found for index, found in (replayed if ignored else chosen).items() if index not in explained
    }
    return [
        *figures.findings(),
        *_ignored_findings(ignored, replayed),
        *_draw_rule(answers, left),
        *located([
            FirstWrong(answers[index], places[0] if places else None)
            for index, places in sorted(figures.off.items())
        ]),
    ]  # fmt: skip


def ignored_parameters(
    replayer: Replayer, answers: Sequence[Answer], wrong: Wrong, eps: float
) -> dict[str, list[int]]:
    """Parameters without which wrong tokens are the target's choice, with the outputs that they explain.

    All wrong tokens of an output must be, in most outputs that have the parameter: single tokens may be so
    by chance. Of several parameters that explain an output the one that explains most is named.
    """
    given: dict[str, set[int]] = {}
    explained: dict[str, set[int]] = {}
    indices = list(wrong)
    for number, logits in replayer.logits([answers[index].output for index in indices]):
        index = indices[number]
        output = answers[index].output
        places = [violation.index for violation in wrong[index]]
        for name, sampling in without_each(output.read_sampling()):
            given.setdefault(name, set()).add(index)
            gap, _ = replayer.gaps(output, eps, logits, sampling)
            if bool((gap[places] <= eps).all()):
                explained.setdefault(name, set()).add(index)
    often = {name: found for name, found in explained.items() if len(found) >= MOST * len(given[name])}
    named: dict[str, list[int]] = {}
    while often:
        name = max(often, key=lambda name: len(often[name]))
        named[name] = sorted(often[name])
        left = {other: found - often[name] for other, found in often.items()}
        often = {other: found for other, found in left.items() if found}
    return named


def without_each(sampling: Sampling) -> Iterator[tuple[str, Sampling]]:
    """The sampling parameters with each that has an effect left out, and with all penalties left out."""
    default = Sampling(seed=sampling.seed)
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    names = ("top_k", "top_p", "min_p", "logit_bias", "min_new_tokens", *GRAMMARS, *penalties)
    given = [name for name in names if getattr(sampling, name) != getattr(default, name)]
    for name in given:
        yield name, replace(sampling, **{name: getattr(default, name)})
    among = [name for name in penalties if name in given]
    if len(among) > 1:
        yield "penalties", replace(sampling, **{name: getattr(default, name) for name in among})
    if sampling.seed is not None and sampling.temperature not in (0.0, 1.0):
        yield "temperature", replace(sampling, temperature=1.0)
    if sampling.temperature > 0:
        yield "temperature (greedy instead)", replace(sampling, temperature=0.0)


def _ignored_findings(ignored: Mapping[str, Sequence[int]], wrong: Wrong) -> Iterator[Finding]:
    for name, indices in ignored.items():
        tokens = sum(len(wrong[index]) for index in indices)
        yield Finding(
            "ignored_parameter",
            f"{name}: without it all {counted(tokens, 'wrong token')} of {counted(len(indices), 'output')} "
            f"are the target's choice ({counted(len(wrong), 'output')} tried)",
        )


def _draw_rule(answers: Sequence[Answer], wrong: Wrong) -> Iterator[Finding]:
    found = [
        violation
        for index, violations in wrong.items()
        if not answers[index].output.read_sampling().is_greedy(answers[index].output.order)
        for violation in violations
    ]
    possible = sum(violation.gap < EXCLUDED for violation in found)
    if possible:
        yield Finding(
            "draw_rule",
            f"{possible} of {counted(len(found), 'wrong token')} of sampled outputs are possible ones, but "
            "not the draws of their seeds",
        )
