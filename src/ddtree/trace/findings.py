"""What comparisons and replays find, and what each finding usually means (docs/compare.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ddtree.trace.rounds import round_problems
from ddtree.trace.run_file import Run

Kind = Literal[
    "text", "undecided", "accept_length", "tree_sizes", "draft_input", "draft_context", "draws",
    "round_position", "round_root", "round_commit", "round_path", "round_walk", "round_tree",
    "figures", "ignored_parameter", "draw_rule", "verify_mask", "verify_positions", "verify_window",
    "commit_kv", "foreign_kv", "first_token",
]  # fmt: skip


class Meaning(NamedTuple):
    """Who tells a kind of finding, what was seen, and what it usually means."""

    told_by: str
    seen: str
    usually: str


MEANINGS: Mapping[Kind, Meaning] = {
    "text": Meaning(
        "compare",
        "where two texts part the margin is more than rounding, or one ended and the other went on; both "
        "tokens and the margin are shown",
        "the target saw another context: its KV cache, mask or positions; or its logits were processed "
        "otherwise. `ddtree replay` of both says which run is wrong, and where",
    ),
    "undecided": Meaning(
        "compare",
        "two texts part and nothing says how close the two tokens are, or how much is rounding",
        "nothing yet: name `--model`, give `--eps` or `--eps-from`",
    ),
    "accept_length": Meaning(
        "compare",
        "with one drafter, mode and node budget, the 95 % interval of the difference does not hold 0",
        "worse drafts (see `draft_input`, `draft_context`), a walk that stops early (`round_walk`), or "
        "acceptance by another rule (`draws`)",
    ),
    "tree_sizes": Meaning(
        "compare",
        "trees behind the same text have different numbers of nodes",
        "another node budget, candidate count or block size than the header says, or a tree that was cut",
    ),
    "draft_input": Meaning(
        "compare",
        "trees behind the same text differ in float32 by more than 0.0001 in a sorted score, those of first "
        "rounds too (or no first rounds could be compared)",
        "the drafter's block or weights: another root token or embedding at slot 0, shifted positions, "
        "prompt features of other layers, another checkpoint",
    ),
    "draft_context": Meaning(
        "compare",
        "as `draft_input`, but the trees of first rounds agree",
        "what the commit gives the drafter: hidden states of other nodes than the accept path's, at other "
        "positions, or of a target whose KV is wrong (then replay finds it, too)",
    ),
    "draws": Meaning(
        "compare",
        "draws of different seeds are not of one distribution, p < 0.0001 by a G-test",
        "acceptance that is not sample-and-match, such as drafts taken with probability min(1, p/q) of "
        "drafts that were not drawn from q; or another temperature, filter or penalty",
    ),
    "round_position": Meaning(
        "both", "a round does not stand where the one before ended",
        "lengths that were advanced by another number of tokens than were committed",
    ),
    "round_root": Meaning(
        "both", "a round stands on another token than the committed one",
        "a root that is shifted by one, or of another request",
    ),
    "round_commit": Meaning(
        "both", "a round committed what the output does not have",
        "tokens that were lost, doubled or changed between the engine and its answer",
    ),
    "round_path": Meaning(
        "both", "a round's path is none of its tree", "wrong links or parents, or columns that are shifted",
    ),
    "round_walk": Meaning(
        "both", "the walk stopped though a child carries the next token",
        "a walk that follows first children only, as on a chain, or links that leave children out",
    ),
    "round_tree": Meaning(
        "both", "a tree's parents or scores are impossible", "a broken tree builder",
    ),
    "figures": Meaning(
        "replay",
        "in a trace at detail `full` the engine's own log-probabilities of emitted tokens are more than ten "
        "times the allowed gap off the target's, whether or not a choice changed",
        "the verify pass computed with another context: see the finding that says where they begin",
    ),
    "ignored_parameter": Meaning(
        "replay",
        "all wrong tokens of an output are the target's choice without one of its sampling parameters",
        "that parameter is not applied in the verify pass",
    ),
    "draw_rule": Meaning(
        "replay",
        "wrong tokens of sampled outputs are possible ones, but not the draws of their seeds, while the "
        "engine's log-probabilities, where known, are the target's",
        "acceptance that is not sample-and-match (min(1, p/q)), or noise that is not keyed by seed, position "
        "and token; stock SGLang and other servers draw so. Compare many seeds with plain decoding (`draws`)",
    ),
    "verify_mask": Meaning(
        "replay",
        "requests are first wrong at nodes whose path has a node behind a sibling, while other nodes away "
        "from their depth's column are right",
        "siblings are visible in the tree mask",
    ),
    "verify_positions": Meaning(
        "replay",
        "requests are first wrong at nodes whose column is not their depth, also where no node of their path "
        "stands behind a sibling",
        "positions that follow the column instead of the depth, or a mask that shows other branches",
    ),
    "verify_window": Meaning(
        "replay",
        "requests are first wrong within a round, and what is right does not tell mask from positions",
        "the mask or the positions of the verify pass",
    ),
    "commit_kv": Meaning(
        "replay",
        "requests are first wrong after a round whose path did not stand at the front of the window, and "
        "never before one",
        "the path's KV was not moved to the front, or not on every layer, or in a racing order",
    ),
    "foreign_kv": Meaning(
        "replay",
        "requests are first wrong after rounds that had nothing to move",
        "the KV of committed tokens was overwritten: by the window of a neighbour, by a move that writes "
        "beside its window, or by a slot that was given out twice",
    ),
    "first_token": Meaning(
        "replay",
        "requests are wrong at their first token or at the first round's root",
        "the prefill, or another target or number format than was named",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference that is no rounding, or one of which nothing can be said (`undecided`)."""

    kind: Kind
    text: str

    @property
    def usually(self) -> str:
        """What a finding of its kind usually means."""
        return MEANINGS[self.kind].usually

    def to_json(self) -> dict[str, Any]:
        """It with its meaning, for a report."""
        return {"kind": self.kind, "text": self.text, "usually": self.usually}


ROUND_KINDS: Mapping[str, Kind] = {
    "position": "round_position", "root": "round_root", "commit": "round_commit", "path": "round_path",
    "walk": "round_walk", "tree": "round_tree",
}  # fmt: skip


def round_findings(run: Run, prefix: str = "") -> Iterator[Finding]:
    """Rounds of a run that do not fit their own text; of each request the first of each kind."""
    for answer in run.answers:
        problems = list(round_problems(
            answer.output.prompt, answer.output.tokens, answer.rounds,
            walks_whole=run.walks_whole, may_skip=run.may_skip,
        ))  # fmt: skip
        kinds = [problem.kind for problem in problems]
        for number, problem in enumerate(problems):
            if problem.kind in kinds[:number]:
                continue
            more = f" ({kinds.count(problem.kind)} such rounds)" if kinds.count(problem.kind) > 1 else ""
            yield Finding(ROUND_KINDS[problem.kind], f"{prefix}{answer.output.name}: {problem.text}{more}")


def kinds_of(findings: Sequence[Finding]) -> list[Kind]:
    """The kinds of findings, each once, in order."""
    return list(dict.fromkeys(found.kind for found in findings))
