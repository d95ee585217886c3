"""Holds two runs of the same requests against each other: texts, acceptance, trees, draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ddtree.trace.divergence import Divergence, divergences
from ddtree.trace.findings import Finding, Kind, round_findings
from ddtree.trace.pairing import Pair, pair_runs
from ddtree.trace.replay import Replayer
from ddtree.trace.rounds import sibling_share
from ddtree.trace.run_file import Answer, Run
from ddtree.trace.statistics import GTest, compare_draws, paired_interval
from ddtree.trace.trees import TreeComparison, compare_trees

SIGNIFICANCE = 1e-4  # of the G-test: how rarely equal distributions may look different
ENOUGH_REQUESTS = 8  # for the interval of the accept lengths to be a verdict
WIDE = 0.03  # of the accept length, each way: what a comparison of engines should stay below


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How many tokens the rounds of one run committed; means are tokens over rounds of all requests.

    Attributes:
        histogram: number of rounds by accept length.
        by_depth: share of rounds with a correct draft at depth 1, 2, ...
        sibling_share: share of correct drafts that were not their parent's likeliest child.
    """

    rounds: int
    accept_length: float
    histogram: dict[int, int]
    by_depth: tuple[float, ...]
    sibling_share: float | None


@dataclass(slots=True)
class Comparison:
    """What was found; `findings` is what makes the runs different."""

    a: Run
    b: Run
    pairs: list[Pair]
    eps: float | None
    num_equal: int = 0
    num_compared: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    acceptance: tuple[Acceptance | None, Acceptance | None] = (None, None)
    accept_interval: tuple[float, float] | None = None  # of B's mean less A's
    is_like_for_like: bool = False  # same drafter, mode and node budget
    trees: TreeComparison | None = None
    draws: GTest | None = None
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_different(self) -> bool:
        return bool(self.findings)

    def to_json(self) -> dict[str, Any]:
        """All of it, for a report."""
        return {
            "is_different": self.is_different,
            "findings": [found.to_json() for found in self.findings],
            "notes": self.notes,
            "a": _facts(self.a),
            "b": _facts(self.b),
            "requests": len(self.pairs),
            "compared_by_text": self.num_compared,
            "equal_texts": self.num_equal,
            "eps": self.eps,
            "divergences": [asdict(found) for found in self.divergences],
            "acceptance": {
                name: None if side is None else asdict(side)
                for name, side in zip("ab", self.acceptance, strict=True)
            },
            "accept_length_difference_95": self.accept_interval,
            "like_for_like": self.is_like_for_like,
            "trees": None if self.trees is None else asdict(self.trees),
            "draws": None if self.draws is None else self.draws._asdict(),
        }


def _facts(run: Run) -> dict[str, Any]:
    modes = sorted({f"{answer.mode} {answer.node_budget}" for answer in run.answers if answer.mode})
    return {
        "source": run.source, "target": run.target, "drafter": run.drafter, "dtype": run.dtype,
        "processing_order": run.order, "sglang": run.sglang, "outputs": len(run.answers),
        "unfinished": run.num_unfinished, "modes": modes,
    }  # fmt: skip


def compare_runs(a: Run, b: Run, eps: float | None = None, replayer: Replayer | None = None) -> Comparison:
    """Compare two runs of the same requests.

    Args:
        eps: the largest gap that is rounding, in logits; None where it is not known.
        replayer: the target, by which the places where texts part are judged; without it the margins of
            traces are, where they have some.

    Raises:
        ConfigError: the runs are not of the same target, prompts and sampling parameters.
    """
    made = Comparison(a, b, pair_runs(a, b), eps)
    _note_unfinished(made)
    _compare_texts(made, replayer)
    made.findings += [*round_findings(a, "A, "), *round_findings(b, "B, ")]
    _compare_acceptance(made)
    _compare_trees(made)
    _compare_draws(made)
    return made


def _note_unfinished(made: Comparison) -> None:
    for name, run in (("A", made.a), ("B", made.b)):
        if run.num_unfinished:
            made.notes.append(f"{run.num_unfinished} requests of {name} are not finished and left out")
    if not all(run.target and run.target.get("name") for run in (made.a, made.b)):
        made.notes.append("not both files name their target: that it is the same was not checked")
    if made.a.dtype != made.b.dtype and made.a.dtype and made.b.dtype:
        made.notes.append(f"A is in {made.a.dtype}, B in {made.b.dtype}: texts part at near ties")


def _compare_texts(made: Comparison, replayer: Replayer | None) -> None:
    same_draws = [pair for pair in made.pairs if pair.same_draw]
    made.num_compared = len(same_draws)
    made.divergences = divergences(same_draws, made.eps, replayer)
    made.num_equal = made.num_compared - len(made.divergences)
    for found in made.divergences:
        if found.verdict != "tie":
            kind: Kind = "text" if found.verdict == "difference" else "undecided"
            made.findings.append(Finding(kind, found.sentence()))


def acceptance_of(answers: Sequence[Answer]) -> Acceptance | None:
    """The accept lengths of a run's rounds; None where none are known."""
    histogram = Counter(length for answer in answers for length in answer.accept_lengths or ())
    total = sum(histogram.values())
    if not total:
        return None
    deepest = max(histogram)
    return Acceptance(
        rounds=total,
        accept_length=sum(length * count for length, count in histogram.items()) / total,
        histogram=dict(sorted(histogram.items())),
        by_depth=tuple(
            sum(count for length, count in histogram.items() if length > depth) / total
            for depth in range(1, deepest)
        ),
        sibling_share=sibling_share([entry for answer in answers for entry in answer.rounds]),
    )


def _compare_acceptance(made: Comparison) -> None:
    answers = [*made.a.answers, *made.b.answers]
    if all(answer.mode == "ar" and set(answer.accept_lengths or ()) <= {1} for answer in answers):
        return  # nothing was drafted
    made.acceptance = (acceptance_of(made.a.answers), acceptance_of(made.b.answers))
    pairs = [pair for pair in made.pairs if pair.a.accept_lengths and pair.b.accept_lengths]
    made.is_like_for_like = _is_like_for_like(made, pairs)
    first, second = made.acceptance
    if first is None or second is None or len(pairs) < 2:
        return
    lengths = [(pair.b.accept_lengths or (), pair.a.accept_lengths or ()) for pair in pairs]
    low, high = made.accept_interval = paired_interval(
        [sum(b) for b, _ in lengths], [sum(a) for _, a in lengths], [(len(b), len(a)) for b, a in lengths]
    )
    if not made.is_like_for_like:
        return
    if (high - low) / 2 > WIDE * first.accept_length:
        made.notes.append(
            f"the interval of the accept length is wider than {WIDE:.0%} each way: more prompts narrow it"
        )
    if low <= 0 <= high:
        return
    text = (
        f"accept length: A commits {first.accept_length:.3f} tokens a round, B {second.accept_length:.3f}; "
        f"B less A is from {low:+.3f} to {high:+.3f} (95 %), with one drafter, mode and node budget"
    )
    if first.sibling_share and second.sibling_share == 0:
        text += "; B never follows any but the likeliest child, as a walk on a chain does"
    if len(pairs) < ENOUGH_REQUESTS:
        made.notes.append(f"{text}; {len(pairs)} requests are too few for a verdict ({ENOUGH_REQUESTS})")
    else:
        made.findings.append(Finding("accept_length", text))


def _is_like_for_like(made: Comparison, pairs: Sequence[Pair]) -> bool:
    """Whether both runs should accept alike: one drafter, and for each request one mode and node budget."""
    drafters = [_identity(run.drafter) for run in (made.a, made.b)]
    if drafters[0] != drafters[1] or drafters[0] is None or not pairs:
        return False
    return all((pair.a.mode, pair.a.node_budget) == (pair.b.mode, pair.b.node_budget) for pair in pairs)


def _identity(model: Any) -> Any:
    return None if model is None else model.get("folder_sha256") or model.get("name")


def _compare_trees(made: Comparison) -> None:
    if not made.is_like_for_like:
        return
    is_exact = made.a.dtype == made.b.dtype == "float32"
    made.trees = compare_trees([pair for pair in made.pairs if pair.same_draw], is_exact=is_exact)
    if made.trees is not None:
        made.findings += made.trees.problems


def _compare_draws(made: Comparison) -> None:
    """Draws of different seeds: do they come from one distribution?"""
    drawn = [pair for pair in made.pairs if not pair.same_draw]
    if not drawn:
        return
    # Requests of one prompt with other sampling parameters are other distributions.
    kinds = {parameters: -1 - number for number, parameters in enumerate(pair.parameters for pair in drawn)}
    prompts = [(*pair.a.output.prompt, kinds[pair.parameters]) for pair in drawn]
    made.draws = compare_draws(
        list(zip(prompts, [pair.a.output.tokens for pair in drawn], strict=True)),
        list(zip(prompts, [pair.b.output.tokens for pair in drawn], strict=True)),
    )
    found = made.draws
    if found.p_value is None:
        made.notes.append(
            f"{len(drawn)} sampled requests have different seeds and too few draws for a G-test: "
            "give many seeds a prompt"
        )
    elif found.p_value < SIGNIFICANCE:
        made.findings.append(Finding(
            "draws",
            f"G-test of {found.num_draws} draws in {found.num_contexts} contexts: statistic "
            f"{found.statistic:.1f}, {found.degrees_of_freedom} degrees of freedom, p = {found.p_value:.1e}",
        ))  # fmt: skip
