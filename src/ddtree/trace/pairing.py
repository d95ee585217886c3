"""Which request of one run belongs to which of another, and why two runs cannot be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddtree.errors import ConfigError, short_repr
from ddtree.trace.outputs import Sampling
from ddtree.trace.run_file import Answer, Run, sampling_of


@dataclass(frozen=True, slots=True)
class Pair:
    """The same request in both runs; `same_draw` is false for draws of different seeds."""

    a: Answer
    b: Answer
    same_draw: bool

    @property
    def name(self) -> str:
        names = (self.a.output.name, self.b.output.name)
        return names[0] if names[0] == names[1] else f"{names[0]} / {names[1]}"

    @property
    def parameters(self) -> str:
        """The sampling parameters of both, seeds apart, as a text that is the same for the same ones."""
        return _key(self.a)[1]


def pair_runs(a: Run, b: Run) -> list[Pair]:
    """The pairs of two runs, in the order of the first.

    Raises:
        ConfigError: the runs are not of the same target, prompts and sampling parameters.
    """
    for reason_of in (
        _other_target,
        _other_prompts,
        _other_sampling,
        _other_order,
    ):  # each relies on the last
        reason = reason_of(a, b)
        if reason is not None:
            raise ConfigError(f"{a.source} and {b.source} cannot be compared: {reason}")
    left, right = _grouped(a.answers), _grouped(b.answers)
    found: dict[int, Pair] = {}
    for key, firsts in left.items():
        by_seed = (sorted(firsts, key=_seed), sorted(right[key], key=_seed))
        same = [_seed(answer) for answer in by_seed[0]] == [_seed(answer) for answer in by_seed[1]]
        greedy = sampling_of(firsts[0]).is_greedy(firsts[0].output.order)
        has_seeds = all(sampling_of(answer).seed is not None for answer in (*firsts, *right[key]))
        sides = by_seed if same and not greedy else (firsts, right[key])
        for one, other in zip(*sides, strict=True):
            found[id(one)] = Pair(one, other, greedy or (same and has_seeds))
    return [found[id(answer)] for answer in a.answers]


def _seed(answer: Answer) -> int:
    return sampling_of(answer).seed or 0


def _prompt(answer: Answer) -> tuple[int, ...]:
    return tuple(answer.output.prompt)


def _key(answer: Answer) -> tuple[tuple[int, ...], str]:
    """What two requests must have in common but for the seed."""
    return _prompt(answer), repr(sorted(_compared(sampling_of(answer)).items()))


def _compared(sampling: Sampling) -> Mapping[str, Any]:
    fields = asdict(replace(sampling, seed=None))
    return fields | {"logit_bias": sorted(fields["logit_bias"].items()), "stop": sorted(fields["stop"]),
                     "stop_token_ids": sorted(fields["stop_token_ids"])}  # fmt: skip


def _grouped(answers: Sequence[Answer]) -> dict[Any, list[Answer]]:
    groups: dict[Any, list[Answer]] = defaultdict(list)
    for answer in answers:
        groups[_key(answer)].append(answer)
    return groups


def _other_target(a: Run, b: Run) -> str | None:
    if a.target is None or b.target is None:
        return None
    checksums = [run.target.get("folder_sha256") for run in (a, b) if run.target is not None]
    names = [run.target.get("name") for run in (a, b) if run.target is not None]
    if all(checksums):
        if checksums[0] == checksums[1]:
            return None
        shown = [
            f"{name} (checksum {str(checksum)[:12]})" for name, checksum in zip(names, checksums, strict=True)
        ]
        return f"their targets are {shown[0]} and {shown[1]}"
    if None in names or names[0] == names[1]:
        return None
    return f"their targets are {names[0]} and {names[1]}"


def _other_prompts(a: Run, b: Run) -> str | None:
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    for answer in b.answers:
        counts[_prompt(answer)] += 1
    for answer in a.answers:
        counts[_prompt(answer)] -= 1
        if counts[_prompt(answer)] < 0:
            return (
                f"the prompt of {answer.output.name} of the first ({_shown(answer)}) is missing in the second"
            )
    for answer in b.answers:
        if counts[_prompt(answer)] > 0:
            return (
                f"the prompt of {answer.output.name} of the second ({_shown(answer)}) is missing in the first"
            )
    return None


def _shown(answer: Answer) -> str:
    prompt = answer.output.prompt
    return f"{len(prompt)} tokens, {', '.join(map(str, prompt[:8]))}{', ...' if len(prompt) > 8 else ''}"


def _other_sampling(a: Run, b: Run) -> str | None:
    left, right = _grouped(a.answers), _grouped(b.answers)
    for key, answers in left.items():
        if len(right.get(key, ())) == len(answers):
            continue
        one = answers[0]
        same_prompt = [other for other in b.answers if _prompt(other) == key[0]]
        other = next((each for each in same_prompt if len(left.get(_key(each), ())) == 0), same_prompt[0])
        mine, theirs = _compared(sampling_of(one)), _compared(sampling_of(other))
        for name, value in mine.items():
            if value != theirs[name]:
                return (
                    f"{name} is {short_repr(value)} in {one.output.name} of the first and "
                    f"{short_repr(theirs[name])} in {other.output.name} of the second"
                )
        return f"the sampling parameters of {one.output.name} are not asked for equally often in both"
    return None


def _other_order(a: Run, b: Run) -> str | None:
    if a.order == b.order:
        return None
    for answer in a.answers:
        if sampling_of(answer).depends_on_order:
            return (
                f"one is of the embedded engine and one of SGLang, which process the sampling parameters of "
                f"{answer.output.name} in different orders (docs/compare.md)"
            )
    return None
