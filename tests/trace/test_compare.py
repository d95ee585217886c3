"""Comparisons find planted differences and name them, pass what is equal, and refuse what is unlike."""

import random
from dataclasses import replace

import pytest

from compare_kit import edited, header, records, write_outputs, write_trace
from ddtree.errors import ConfigError
from ddtree.trace.compare import compare_runs
from ddtree.trace.files import ReplayOptions, compare_files
from ddtree.trace.pairing import pair_runs
from ddtree.trace.run_file import read_run
from ddtree.trace_format import TraceEnd, TraceRequest, TraceRound


@pytest.fixture
def made(tmp_path):
    """Compare two lists of trace lines."""

    def compare(first, second, **options):
        paths = write_trace(tmp_path / "a.jsonl", first), write_trace(tmp_path / "b.jsonl", second)
        return compare_files(*paths, ReplayOptions(**options))

    return compare


def kinds(made):
    return [found.kind for found in made.findings]


def is_round(line, number=3, name="r4"):
    return isinstance(line, TraceRound) and line.id == name and line.round == number


def test_equal_runs_do_not_differ(made):
    found = made(records(), records())
    assert (found.num_equal, found.findings) == (10, [])
    assert found.is_like_for_like
    assert found.trees.max_score_difference == 0
    assert found.accept_interval == (0.0, 0.0)
    assert not found.is_different


def test_rows_of_acceptance_are_counted(made):
    acceptance, _ = made(records(), records()).acceptance
    lengths = [len(line.accept_tokens) for line in records() if isinstance(line, TraceRound)]
    assert acceptance.rounds == len(lengths)
    assert acceptance.accept_length == pytest.approx(sum(lengths) / len(lengths))
    assert sum(acceptance.histogram.values()) == len(lengths)
    assert acceptance.by_depth[1] == sum(length > 2 for length in lengths) / len(lengths)
    assert 0.1 < acceptance.sibling_share < 0.9


def swap_token(lines, place=17, name="r2"):
    """Another token in the text, and in the rounds that say they committed it."""

    def edit(line):
        if isinstance(line, TraceEnd):
            tokens = list(line.tokens)
            tokens[place] = 1
            return replace(line, tokens=tuple(tokens))
        offset = 3 + place - line.position - 1
        if not 0 <= offset < len(line.accept_tokens):
            return replace(line, root=1) if line.position == 3 + place else line
        accept = list(line.accept_tokens)
        accept[offset] = 1
        tokens = list(line.tokens)
        if offset + 1 < len(line.accept_indices):
            tokens[line.accept_indices[offset + 1]] = 1
        return replace(line, accept_tokens=tuple(accept), tokens=tuple(tokens))

    return [edit(line) if getattr(line, "id", "") == name and not isinstance(line, TraceRequest) else line
            for line in lines]  # fmt: skip


def test_a_swapped_token_is_named_with_both_tokens_and_its_margin(made):
    found = made(records(), swap_token(records()))
    assert "text" in kinds(found)
    (parted,) = found.divergences
    own = next(line for line in records() if isinstance(line, TraceEnd) and line.id == "r2")
    assert (parted.request, parted.index, parted.position) == ("r2", 17, 20)
    assert (parted.token_a, parted.token_b) == (own.tokens[17], 1)
    assert (parted.verdict, parted.margin) == ("difference", 3.0)
    assert "margin there is 3, more than 0.001" in found.findings[0].text


def test_a_token_that_the_rounds_did_not_commit_is_named(made):
    lines = edited(
        records(), lambda line: isinstance(line, TraceEnd) and line.id == "r2",
        lambda line: replace(line, tokens=(*line.tokens[:17], 1, *line.tokens[18:])),
    )  # fmt: skip
    found = [entry.text for entry in made(records(), lines).findings if entry.kind == "round_commit"]
    assert len(found) == 1
    assert found[0].startswith("B, r2: round ")
    assert "the output has 1" in found[0]


def test_a_shifted_root_is_named(made):
    lines = edited(records(), is_round, lambda line: replace(line, root=line.root + 1))
    found = made(records(), lines)
    assert kinds(found) == ["round_root"]
    assert found.findings[0].text.startswith("B, r4: round 3 at position ")
    assert "has the root" in found.findings[0].text


def test_a_round_at_another_position_is_named(made):
    lines = edited(records(), is_round, lambda line: replace(line, position=line.position + 1))
    found = made(lines, records())
    assert kinds(found) == ["round_position"]


def test_a_token_between_rounds_is_what_sglang_may_have(made):
    changes = {"engine": "sglang"}

    def without_round(lines):
        return [line for line in lines if not is_round(line)]

    found = made(records(changes=changes), without_round(records(changes=changes)))
    assert not any(kind.startswith("round") for kind in kinds(found))
    assert kinds(made(records(), without_round(records()))) == ["round_position"]
    shifted = edited(records(changes=changes), is_round, lambda line: replace(line, root=line.root + 1))
    assert kinds(made(records(changes=changes), shifted)) == ["round_root"]


def test_a_path_that_is_none_of_the_tree_is_named(made):
    lines = edited(
        records(), lambda line: isinstance(line, TraceRound) and len(line.accept_indices) > 2,
        lambda line: replace(line, accept_indices=(0, 2, *line.accept_indices[2:])
                             if line.accept_indices[1] != 2 else (0, 1, *line.accept_indices[2:])),
    )  # fmt: skip
    found = made(records(), lines)
    assert kinds(found) == ["round_path"]


def test_chain_only_acceptance_is_named_by_walks_lengths_and_siblings(made):
    found = made(records(), records(chain_only=True))
    assert set(kinds(found)) == {"round_walk", "accept_length"}
    assert "its walk stopped at node" in found.findings[0].text
    lengths = found.findings[-1].text
    assert "B never follows any but the likeliest child" in lengths
    low, high = found.accept_interval
    assert low <= high < 0


def test_without_trees_the_accept_length_still_tells(made):
    def summary(lines):
        return [replace(line, tokens=(), parents=(), log_probs=(), target=()) if isinstance(line, TraceRound)
                else line for line in lines]  # fmt: skip

    found = made(summary(records()), summary(records(chain_only=True)))
    assert kinds(found) == ["accept_length"]
    assert found.trees is None


def test_few_requests_give_a_note_and_no_verdict(made):
    found = made(records(3), records(3, chain_only=True))
    assert "accept_length" not in kinds(found)
    assert any("3 requests are too few" in note for note in found.notes)


def test_other_budgets_are_no_difference(made):
    lines = [replace(line, node_budget=4) if isinstance(line, TraceRequest | TraceRound) else line
             for line in records(chain_only=False)]  # fmt: skip
    found = made(records(), lines)
    assert found.findings == []
    assert not found.is_like_for_like
    assert found.trees is None


def test_a_shorter_tree_is_named(made):
    def cut(line):
        # A leaf that is no part of the path goes.
        leaves = set(range(1, len(line.tokens))) - set(line.parents) - set(line.accept_indices)
        keep = max(leaves)
        assert keep == len(line.tokens) - 1
        return replace(line, tokens=line.tokens[:-1], parents=line.parents[:-1],
                       log_probs=line.log_probs[:-1])  # fmt: skip

    def has_spare_leaf(line):
        return isinstance(line, TraceRound) and line.id == "r5" and len(line.tokens) > 2 and (
            len(line.tokens) - 1 not in line.accept_indices
        )  # fmt: skip

    found = made(records(), edited(records(), has_spare_leaf, cut))
    assert kinds(found) == ["tree_sizes"]
    assert found.findings[0].text.startswith("r5, position ")
    assert "nodes, B's" in found.findings[0].text


@pytest.mark.parametrize(("dtype", "expected"), [("float32", ["draft_context"]), ("bfloat16", [])])
def test_scores_must_agree_in_float32(made, dtype, expected):
    lines = edited(
        records(changes={"dtype": dtype}),
        is_round,
        lambda line: replace(line, log_probs=(0.0, *(p - 0.01 for p in line.log_probs[1:]))),
    )
    found = made(records(changes={"dtype": dtype}), lines)
    assert kinds(found) == expected
    assert found.trees.max_score_difference == pytest.approx(0.01)


def test_a_tie_is_no_difference_and_unknown_rounding_is_undecided(made):
    def narrow(lines, dtype):
        lines = [replace(line, dtype=dtype) if hasattr(line, "dtype") else line for line in lines]
        return [replace(line, target=tuple((-0.1, 0.02) for _ in line.target))
                if isinstance(line, TraceRound) else line for line in lines]  # fmt: skip

    first, second = narrow(records(), "bfloat16"), narrow(swap_token(records()), "bfloat16")
    tie = made(first, second, eps=0.05)
    assert [parted.verdict for parted in tie.divergences] == ["tie"]
    assert "text" not in kinds(tie)
    unknown = made(first, second)
    assert [parted.verdict for parted in unknown.divergences] == ["undecided"]
    assert "give --eps" in unknown.findings[0].text
    assert unknown.is_different


def test_an_output_that_goes_on_is_a_difference_unless_the_other_was_cancelled(made):
    def cut(reason):
        return edited(records(), lambda line: isinstance(line, TraceEnd) and line.id == "r1",
                      lambda line: replace(line, tokens=line.tokens[:20], finish_reason=reason))  # fmt: skip

    found = made(cut("stop"), records())
    assert kinds(found)[0] == "text"
    assert "A ended there and B went on" in found.findings[0].text
    assert made(cut("cancel"), records()).findings == []


# -- unlike runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "told"),
    [
        (records(changes={"target": {"name": "other", "folder_sha256": "cc"}}), "targets are tiny"),
        (records(9), "the prompt of r9 of the first .*missing in the second"),
        (records(11), "the prompt of r10 of the second .*missing in the first"),
        (records(temperature=0.5, seed=1), "temperature is 0.0 in r0 of the first and 0.5"),
        (records(max_tokens=50), "max_tokens is 40"),
        (records(stop_token_ids=[9]), "stop_token_ids"),
    ],
)
def test_unlike_runs_are_refused_by_what_differs(made, second, told):
    with pytest.raises(ConfigError, match=told):
        made(records(), second)


def test_engines_that_process_differently_are_refused(made):
    changes = {"engine": "sglang"}
    assert made(records(), records(changes=changes)).findings == []
    with pytest.raises(ConfigError, match="different orders"):
        made(records(repetition_penalty=1.1), records(changes=changes, repetition_penalty=1.1))


def test_requests_are_paired_by_prompt_and_seed(made, tmp_path):
    lines = records(3, temperature=1.0, seed=4)
    by_name = [line for name in ("r2", "r0", "r1") for line in lines if getattr(line, "id", "") == name]
    turned = [lines[0], *by_name]
    found = made(lines, turned)
    assert [pair.a.output.name for pair in found.pairs] == [pair.b.output.name for pair in found.pairs]
    assert found.num_equal == 3
    rows = [{"prompt_tokens": [5], "tokens": [seed], "sampling": {"temperature": 1.0, "seed": seed}}
            for seed in (3, 1, 2)]  # fmt: skip
    a = read_run(write_outputs(tmp_path / "x", rows))
    b = read_run(write_outputs(tmp_path / "y", rows[::-1]))
    assert all(pair.same_draw for pair in pair_runs(a, b))
    assert compare_runs(a, b, 1e-3).num_equal == 3


# -- draws -----------------------------------------------------------------------------------------


def draws(path, seeds, weights, prompts=(5, 6)):
    """Outputs of three tokens whose second depends on the first."""
    rows = []
    for prompt in prompts:
        for seed in seeds:
            generator = random.Random(seed * 1000 + prompt)
            first = generator.choices(range(4), weights)[0]
            second = generator.choices(range(4), [first + 1, 2, 3, 4])[0]
            third = generator.choices(range(4), weights)[0]
            rows.append({"prompt_tokens": [prompt], "tokens": [first, second, third],
                         "sampling": {"temperature": 1.0, "seed": seed}})  # fmt: skip
    return read_run(write_outputs(path, rows))


def test_draws_of_other_seeds_are_tested_by_their_counts(tmp_path):
    a = draws(tmp_path / "a", range(400), [4, 3, 2, 1])
    same = draws(tmp_path / "b", range(400, 800), [4, 3, 2, 1])
    biased = draws(tmp_path / "c", range(400, 800), [3, 3, 2, 2])
    alike = compare_runs(a, same)
    assert alike.num_compared == 0
    assert alike.draws.num_contexts > 20
    assert alike.draws.p_value > 0.01
    assert alike.findings == []
    assert kinds(compare_runs(a, biased)) == ["draws"]


def test_a_wrong_token_deep_in_the_draws_is_found(tmp_path):
    a, b = (draws(tmp_path / name, seeds, [1, 1, 1, 1]) for name, seeds in
            (("a", range(600)), ("b", range(600, 1200))))  # fmt: skip
    wrong = [replace(answer, output=replace(answer.output, tokens=(*answer.output.tokens[:2], 0)))
             if answer.output.tokens[:2] == (1, 3) else answer for answer in b.answers]  # fmt: skip
    assert kinds(compare_runs(a, replace(b, answers=tuple(wrong)))) == ["draws"]


def test_few_draws_say_nothing(tmp_path):
    found = compare_runs(
        draws(tmp_path / "a", range(3), [1, 1, 1, 1]), draws(tmp_path / "b", range(3, 6), [1, 1, 1, 1])
    )
    assert found.draws.p_value is None
    assert any("too few draws" in note for note in found.notes)


def test_the_header_is_not_all_that_may_be_missing(made):
    found = made([header(target={}), *records()[1:]], records())
    assert found.findings == []
    assert any("that it is the same was not checked" in note for note in found.notes)
