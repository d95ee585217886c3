"""Reports of replays and comparisons as lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddtree.errors import counted
from ddtree.trace.compare import Acceptance, Comparison
from ddtree.trace.files import ReplayReport
from ddtree.trace.findings import MEANINGS, Finding, kinds_of
from ddtree.trace.run_file import Run

SHOWN = 20  # findings of one kind; the JSON report has them all


def replay_lines(report: ReplayReport) -> Iterator[str]:
    """What a replay says, the verdict last."""
    judged, run = report.judged, report.run
    yield f"{run.source}: {counted(judged.num_outputs, 'finished output')}, {judged.num_tokens} tokens"
    yield f"target {report.model} in {report.dtype}; tokens chosen in the order of {run.order}"
    yield f"allowed gap {judged.eps:.4g} logits ({report.eps_source}); largest gap {judged.max_gap:.4g}"
    yield f"{counted(judged.num_not_best, 'token')} not the replay's best"
    if judged.num_planted:
        yield (
            f"planted faults found: {judged.num_planted_found} of {judged.num_planted}, smallest gap "
            f"{judged.smallest_planted_gap:.4g}"
        )
    if run.num_unfinished:
        yield f"{counted(run.num_unfinished, 'request')} not finished, left out"
    for name, problem in judged.known_endings[:SHOWN]:
        yield f"known ending, {name}: {problem} (SGLang 0.5.17 keeps what a round has behind an end token)"
    for name, found in judged.rounded[:SHOWN]:
        yield (
            f"rounding of the replay, {name}: token {found.index} (position {found.position}) is "
            f"{found.emitted}, which the target chooses in float32; in {report.dtype} it says "
            f"{found.expected}, gap {found.gap:.4g}"
        )
    wrong = judged.first_violations()
    for name, found, number in wrong[:SHOWN]:
        more = f"; {number} wrong tokens in this output" if number > 1 else ""
        yield (
            f"WRONG, {name}: token {found.index} (position {found.position}) is {found.emitted}, the target "
            f"says {found.expected}, gap {found.gap:.4g}{more}"
        )
    for name, problem in judged.endings[:SHOWN]:
        yield f"WRONG ENDING, {name}: {problem}"
    hidden = max(len(wrong) - SHOWN, 0) + max(len(judged.endings) - SHOWN, 0)
    if hidden:
        yield f"and {hidden} more outputs, see --json"
    yield from _finding_lines(report.findings, "WRONG")
    if report.is_clean:
        yield "every token is the target's own choice"
    else:
        yield (
            f"{counted(len(wrong), 'output')} with wrong tokens, {len(judged.endings)} with a wrong ending, "
            f"{counted(len(report.findings), 'finding')}"
        )


def compare_lines(made: Comparison) -> Iterator[str]:
    """What a comparison says, the verdict last; the table of accept lengths is apart."""
    for name, run in (("A", made.a), ("B", made.b)):
        yield f"{name}: {run.source}: {_described(run)}"
    yield f"{counted(len(made.pairs), 'request')}; {made.num_equal} of {made.num_compared} texts are equal"
    ties = [found for found in made.divergences if found.verdict == "tie"]
    for tie in ties[:SHOWN]:
        yield f"tie, {tie.sentence()}"
    if len(ties) > SHOWN:
        yield f"and {len(ties) - SHOWN} more ties, see --json"
    if made.trees is not None:
        yield (
            f"{made.trees.compared} trees of the same text compared, sorted scores at most "
            f"{made.trees.max_score_difference:.3g} apart"
        )
    if made.draws is not None and made.draws.p_value is not None:
        yield (
            f"G-test of {made.draws.num_draws} draws in {made.draws.num_contexts} contexts: "
            f"p = {made.draws.p_value:.3g}"
        )
    for note in made.notes:
        yield f"note: {note}"
    yield from _finding_lines(made.findings, "DIFFERENT")
    yield verdict(made)


def _finding_lines(findings: Sequence[Finding], word: str) -> Iterator[str]:
    """Findings, and then what each kind of them usually means."""
    for found in findings[:SHOWN]:
        yield f"{'UNDECIDED' if found.kind == 'undecided' else word}, {found.kind}: {found.text}"
    if len(findings) > SHOWN:
        yield f"and {len(findings) - SHOWN} more findings, see --json"
    for kind in kinds_of(findings):
        yield f"{kind} usually means: {MEANINGS[kind].usually}"


def verdict(made: Comparison) -> str:
    """The last line of a comparison."""
    undecided = sum(found.kind == "undecided" for found in made.findings)
    real = len(made.findings) - undecided
    if real:
        more = f", {undecided} undecided" if undecided else ""
        return f"the runs differ: {counted(real, 'finding')}{more}"
    if undecided:
        return f"whether the runs differ is not decided in {counted(undecided, 'place')}"
    return "no difference that is more than rounding"


def accept_rows(made: Comparison) -> list[tuple[str, str, str]]:
    """Rows of the table of accept lengths: what, A, B; none where no rounds are known."""
    first, second = made.acceptance
    if first is None and second is None:
        return []
    sides = (first, second)
    rows = [
        ("rounds", *(_number(side, "rounds", "d") for side in sides)),
        ("accept length", *(_number(side, "accept_length", ".3f") for side in sides)),
    ]
    if made.accept_interval is not None:
        low, high = made.accept_interval
        rows.append(("B less A, 95 %", "", f"{low:+.3f} to {high:+.3f}"))
    deepest = max(len(side.by_depth) if side else 0 for side in (first, second))
    for depth in range(1, deepest + 1):
        rows.append((f"correct at depth {depth}", _at_depth(first, depth), _at_depth(second, depth)))
    lengths = sorted({length for side in (first, second) if side for length in side.histogram})
    for length in lengths:
        rows.append((f"rounds of {length}", _with_length(first, length), _with_length(second, length)))
    if any(side is not None and side.sibling_share is not None for side in (first, second)):
        rows.append(("not the likeliest child", *(
            "" if side is None or side.sibling_share is None else f"{side.sibling_share:.1%}"
            for side in (first, second)
        )))  # fmt: skip
    return [(row[0], row[1], row[2]) for row in rows]


def _number(side: Acceptance | None, name: str, style: str) -> str:
    return "" if side is None else format(getattr(side, name), style)


def _at_depth(side: Acceptance | None, depth: int) -> str:
    if side is None:
        return ""
    return f"{side.by_depth[depth - 1]:.1%}" if depth <= len(side.by_depth) else "0.0%"


def _with_length(side: Acceptance | None, length: int) -> str:
    return "" if side is None else str(side.histogram.get(length, 0))


def _described(run: Run) -> str:
    modes = sorted({answer.mode for answer in run.answers if answer.mode})
    target = run.target.get("name") if run.target else "target not named"
    return ", ".join([
        counted(len(run.answers), "finished output"), str(target), run.dtype or "number format not named",
        *(f"mode {mode}" for mode in modes),
    ])  # fmt: skip
