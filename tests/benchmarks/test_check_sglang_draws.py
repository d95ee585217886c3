"""check_sglang_draws passes fair draws and finds unfair ones: reference, statistics, faults and verdict."""

import math
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import check_sglang_draws
import ddtree
from check_sglang_draws import Cell, cells_of, judge, parse_arguments, plain_case, requests_of, walks
from ddtree.draft.load import TargetInfo, load_drafter
from ddtree.layers.window import Window
from ddtree.sglang_plugin.batch_sampling import BatchSampling, RequestSampling
from ddtree.tree import DraftMarginals, DraftTree, build_draft_trees
from sglang_common import Results
from sglang_draws import (
    CASES,
    EVERYTHING,
    KINDS,
    LAGS,
    STOPS,
    Repeats,
    Tally,
    Uniforms,
    chi_squared_tail,
    cut,
    distributions,
    draw_places,
    even,
    g_test,
    last_places,
    repeat_test,
    repeats,
    tally,
    transform,
    uniforms,
)
from sglang_draws_pair import (
    BLOCK_SIZE,
    EOS_TOKEN,
    HIDDEN,
    MAX_POSITIONS,
    NUM_LAYERS,
    VOCAB,
    target_logits,
    target_weights,
    write_pair,
)
from sglang_draws_probe import (
    FAULT_FILE,
    FAULTS,
    LOGITS_FILE,
    PROBE_FILE,
    Probe,
    cut_short_,
    plant,
    with_drafts,
)

LOGITS = target_logits()


# --- the planted pair ---


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("draws"))


def test_the_target_says_its_vector_after_any_text(pair):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)
    text = torch.randint(VOCAB, (3, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(text).logits.double().numpy()
    assert abs(logits - LOGITS).max() < 1e-5
    assert AutoTokenizer.from_pretrained(pair.target).eos_token_id == EOS_TOKEN


def test_its_logits_differ_clearly_and_are_exact_in_bfloat16():
    values = torch.from_numpy(LOGITS)
    assert torch.equal(values.bfloat16().double(), values)
    assert np.diff(np.sort(LOGITS)).min() > 0.03


def test_drafts_change_with_the_text_and_are_sometimes_right(pair):
    weights = target_weights()
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    info = TargetInfo(
        hidden_size=HIDDEN, num_layers=NUM_LAYERS, vocab_size=VOCAB, model_type="qwen3",
        max_positions=MAX_POSITIONS,
    )  # fmt: skip
    drafter = load_drafter(
        pair.drafter, info, embed=lambda tokens: embedding[tokens], head=lambda hidden: hidden @ head.T,
        dtype=torch.float32, device=torch.device("cpu"), max_positions=MAX_POSITIONS,
    )  # fmt: skip
    probs = np.exp(LOGITS) / np.exp(LOGITS).sum()
    shapes, lengths, depth = set(), [], 0
    for seed in range(12):
        text = torch.from_numpy(np.random.default_rng(seed).choice(VOCAB, 30, p=probs))
        context = drafter.new_context(40)
        window = Window.at(0, torch.arange(29), torch.ones(29, 29, dtype=torch.bool))
        drafter.append(context, embedding[text[:-1]], window)
        logits = drafter.draft_logits(text[-1:], context, drafter.draft_window(29))
        tree = build_draft_trees(DraftMarginals.from_logits(logits[None], 31), text[-1:], 31)
        shapes.add((*tree.tokens[0].tolist(), *tree.parents[0].tolist()))
        reach = [1.0]
        for column in range(1, 32):
            reach.append(reach[int(tree.parents[0, column])] * probs[int(tree.tokens[0, column])])
        lengths.append(sum(reach))
        depth = max(depth, int(tree.depths.max()))
    assert depth == BLOCK_SIZE - 1
    assert len(shapes) == 12
    assert 1.5 < np.mean(lengths) < 2.5


# --- the reference ---


def slow_distribution(sampling, output):
    """One distribution, token by token, in plain Python."""
    scaled = []
    for token, logit in enumerate(LOGITS.tolist()):
        count = output.count(token)
        value = logit - count * sampling.get("frequency_penalty", 0.0)
        value -= sampling.get("presence_penalty", 0.0) if count else 0.0
        held_back = {EOS_TOKEN, *sampling.get("stop_token_ids", ())}
        if token in held_back and len(output) < sampling.get("min_new_tokens", 0):
            value = -math.inf
        if count:
            factor = sampling.get("repetition_penalty", 1.0)
            value = value * factor if value < 0 else value / factor
        value += sampling.get("logit_bias", {}).get(str(token), 0.0)
        scaled.append(value / sampling["temperature"])
    total = sum(map(math.exp, scaled))
    probs = {token: math.exp(value) / total for token, value in enumerate(scaled)}
    before, kept = 0.0, {}
    for rank, token in enumerate(sorted(probs, key=lambda t: (-probs[t], t))):
        in_top_k = rank < sampling.get("top_k", VOCAB)
        likely = probs[token] >= sampling.get("min_p", 0.0) * max(probs.values())
        if in_top_k and likely and before <= sampling.get("top_p", 2.0):
            kept[token] = probs[token]
        before += probs[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(VOCAB)]


@pytest.mark.parametrize("sampling", CASES["mixed"].sampling, ids=[*KINDS, "everything"])
def test_distributions_are_those_of_the_definition(sampling):
    short = {**sampling, "min_new_tokens": 5} if "min_new_tokens" in sampling else sampling
    tokens = np.random.default_rng(1).integers(0, VOCAB, 12)
    found = distributions(LOGITS, short, tokens, EOS_TOKEN)
    assert not found.is_near.any()
    for place in range(len(tokens)):
        expected = slow_distribution(short, tokens[:place].tolist())
        assert found.probs[place] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("sampling", "is_near"),
    [
        ({"top_p": 0.5}, True),
        ({"top_p": 0.5 + 1e-6}, True),
        ({"top_p": 0.6}, False),
        ({"min_p": 0.5}, True),
        ({"min_p": 0.4}, False),
        ({"top_k": 2}, True),
        ({"top_k": 1}, False),
    ],
)
def test_a_cut_at_a_token_is_left_to_rounding(sampling, is_near):
    assert cut(np.array([[0.25, 0.5, 0.25]]), sampling).is_near.tolist() == [is_near]


# --- uniforms ---


def test_uniforms_run_through_the_tokens_in_the_order_of_their_keys():
    probs = np.array([[0.1, 0.2, 0.3, 0.4]]).repeat(4, 0)
    keys = np.array([[5, 1, 5, 0]]).repeat(4, 0)  # order 3, 1, 0, 2
    tokens = np.arange(4)
    assert uniforms(probs, keys, tokens, np.zeros(4)) == pytest.approx([0.6, 0.4, 0.7, 0.0])
    assert uniforms(probs, keys, tokens, np.full(4, 0.5)) == pytest.approx([0.65, 0.5, 0.85, 0.2])


def test_last_places():
    assert last_places(np.array([1, 0, 1, 1]), 2).tolist() == [[-1, -1], [-1, 0], [1, 0], [1, 2]]


def test_repeats_take_the_latest_of_equal_tokens():
    probs = np.array([[0.5, 0.3, 0.2]]).repeat(4, 0)
    found = repeats(probs, np.array([0, 1, 0, 0]), np.ones(4, bool))
    # Before the third draw 1 is one draw back and 0 two; before the fourth 0 is one back and 1 two.
    assert found.seen[:3].tolist() == [1, 1, 0]
    assert found.expected[:3] == pytest.approx([0.5 + 0.3 + 0.5, 0.5 + 0.3, 0.0])
    assert found.covariance[0, 0] == pytest.approx(2 * 0.25 + 0.21)
    assert found.covariance[0, 1] == pytest.approx(-0.5 * 0.3 * 2)
    none = repeats(probs, np.array([0, 1, 0, 0]), np.zeros(4, bool))
    assert none.seen.sum() == none.expected.sum() == 0


def test_places_in_rounds():
    assert draw_places(6, [2, 1, 3]).tolist() == [0, 1, 2, 1, 1, 2]
    assert draw_places(1, []).tolist() == [0]
    with pytest.raises(ValueError, match="7 tokens, but the rounds commit 6"):
        draw_places(7, [2, 3])


# --- tests ---


def test_g_test_is_the_textbooks():
    statistic = 2 * (10 * math.log(10 / 15) + 20 * math.log(20 / 15))
    assert g_test(np.array([10, 20]), even(2)) == pytest.approx(math.erfc(math.sqrt(statistic / 2)))
    rows = np.array([[10, 20], [10, 20], [0, 0]])
    assert g_test(rows, even(2)) == pytest.approx(math.exp(-statistic))
    assert g_test(np.array([1, 2]), even(2)) is None
    # The three rare cells are one.
    pooled = g_test(np.array([97, 1, 2, 0]), np.array([0.94, 0.02, 0.02, 0.02]))
    assert pooled == pytest.approx(g_test(np.array([97, 3]), np.array([0.94, 0.06])))


def test_chi_squared_tail():
    assert chi_squared_tail(3.0, 2) == pytest.approx(math.exp(-1.5))
    assert chi_squared_tail(-1e-12, 5) == 1.0


def test_repeat_test():
    covariance = np.diag([90.0, 16.0, *[1.0] * (LAGS - 2)])
    expected = np.array([100.0, 30.0, *[3.0] * (LAGS - 2)])
    seen = expected + np.array([9.0, -4.0, *[50.0] * (LAGS - 2)])  # lags too rare to count
    statistic = 81 / 90 + 1
    assert repeat_test(Repeats(seen, expected, covariance)) == pytest.approx(math.exp(-statistic / 2))
    assert repeat_test(Repeats(seen, np.zeros(LAGS), covariance)) is None


def nothing_repeats():
    return Repeats(np.zeros(LAGS), np.zeros(LAGS), np.zeros((LAGS, LAGS)))


def test_pairs_find_draws_that_depend_on_the_one_before():
    values = np.repeat(np.random.default_rng(3).random(2000), 2)  # each twice, evenly spread
    drawn = Uniforms(values, values, np.ones(4000, bool), 0, nothing_repeats())
    counted = Tally(None)
    counted.add(np.zeros(4000, np.int64), drawn, None, 0)
    found = counted.p_values()
    assert found["pairs"] < 1e-100
    assert counted.pairs.sum() == 2000
    shifted = Tally(None)
    shifted.add(np.zeros(4000, np.int64), drawn, None, 1)
    assert shifted.pairs.sum() == 1999
    assert shifted.p_values()["pairs"] > 1e-4
    few = Tally(None)
    values = np.array([0.0, 0.2, 0.4, 0.6])  # bins 0, 1, 3 and 4 of 8
    few.add(np.zeros(4, np.int64), Uniforms(values, values, np.ones(4, bool), 0, nothing_repeats()), None, 1)
    assert few.pairs.nonzero()[0].tolist() == [1 * 8 + 3]


def test_places_find_what_is_wrong_at_one_depth_alone():
    rng = np.random.default_rng(4)
    values, places = rng.random(20_000), rng.choice(6, 20_000, p=[0.3, 0.3, 0.2, 0.1, 0.08, 0.02])
    values[places == 5] **= 2
    counted = Tally(None)
    drawn = Uniforms(values, values, np.ones(20_000, bool), 0, nothing_repeats())
    counted.add(np.zeros(20_000, np.int64), drawn, places, 0)
    found = counted.p_values()
    assert counted.places.shape[0] == 6
    assert found["likely"] > 1e-4
    assert found["places"] < 1e-8


def test_indices_find_what_is_wrong_at_one_token_alone():
    """Such as stop tokens, a sixth of all, that are held back one token too long."""
    rng, counted = np.random.default_rng(5), Tally(None)
    for _ in range(1700):
        values = rng.random(60)
        values[40] *= 5 / 6
        drawn = Uniforms(values, values, np.ones(60, bool), 0, nothing_repeats())
        counted.add(np.zeros(60, np.int64), drawn, None, 0)
    found = counted.p_values()
    assert found["likely"] > 1e-4
    assert found["indices"] < 1e-8
    few = Tally(None)
    few.add(np.zeros(60, np.int64), drawn, None, 0)
    assert "indices" not in few.p_values()


def test_draws_that_are_left_to_rounding_count_nowhere():
    probs = np.sort(np.exp(LOGITS) / np.exp(LOGITS).sum())[::-1]
    sampling = {"temperature": 1.0, "top_p": float(probs[:9].sum())}
    tokens = np.argsort(-LOGITS)[[0, 3, 9, 40]]  # the last two are cut, or not
    drawn = transform(LOGITS, sampling, tokens, EOS_TOKEN, np.random.default_rng(0))
    counted = Tally(None)
    counted.add(tokens, drawn, np.array([0, 1, 2, 1]), 0)
    assert (counted.num_draws, counted.num_near, counted.num_impossible) == (4, 4, 0)
    for table in (counted.likely, counted.recent, counted.pairs, counted.places, counted.repeats.expected):
        assert table.sum() == 0


def test_an_impossible_draw_fails_whatever_the_rest():
    case = CASES["top_k"]
    tokens = np.array(answers_of(requests_of(case, 10, 1))[0]["tokens"])
    tokens[-1] = LOGITS.argmin()
    counted = Tally(None)
    drawn = transform(LOGITS, case.sampling[0], tokens, EOS_TOKEN, np.random.default_rng(0))
    counted.add(tokens, drawn, None, 0)
    assert counted.num_impossible == 1
    assert counted.smallest_p() == 0.0
    assert min(counted.p_values().values()) > 1e-4


# --- draws made here ---


def answers_of(requests, spoil=None):
    """Draws one after the other, or with one of the faults below."""
    answers = []
    for request in requests:
        sampling = request["sampling"]
        rng = np.random.default_rng([sampling["sampling_seed"], 9])
        counts, tokens, waiting = np.zeros(VOCAB), [], []
        for uniform in rng.random(sampling["max_new_tokens"]):
            probs = next_distribution(sampling, counts, len(tokens))
            if spoil == "short":
                probs[np.where(probs > 0, probs, 2).argmin()] = 0
            if spoil == "preferred":
                probs[probs.argmax()] += 0.1
            cumulated = probs.cumsum()
            tokens.append(int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right")))
            waiting.append(tokens[-1])
            if spoil != "late" or len(waiting) > 2:
                counts[waiting.pop(0)] += 1
        answers.append({"tokens": tokens})
    return answers


def next_distribution(sampling, counts, num_tokens):
    """The distribution [V] after an output of so many tokens with these counts [V]."""
    x = LOGITS - counts * sampling.get("frequency_penalty", 0.0)
    x = x - (counts > 0) * sampling.get("presence_penalty", 0.0)
    if num_tokens < sampling.get("min_new_tokens", 0):
        x[[EOS_TOKEN, *sampling.get("stop_token_ids", ())]] = -np.inf
    x = np.where(counts > 0, x * sampling.get("repetition_penalty", 1.0) ** -np.sign(x), x)
    for token, bias in sampling.get("logit_bias", {}).items():
        x[int(token)] += bias
    weights = np.exp((x - x.max()) / sampling["temperature"])
    return cut(weights[None] / weights.sum(), sampling).probs[0]


def smallest(case, draws, spoil=None, **changed):
    """The smallest p-value of requests whose answers were drawn with `changed` sampling."""
    requests = requests_of(case, draws, 1)
    drawn = [{**r, "sampling": r["sampling"] | changed} for r in requests]
    return tally(LOGITS, EOS_TOKEN, requests, answers_of(drawn, spoil), None).smallest_p()


@pytest.mark.parametrize("name", CASES)
def test_fair_draws_pass(name):
    assert smallest(CASES[name], 1500) > 1e-4


@pytest.mark.parametrize(
    ("name", "spoil", "changed"),
    [
        ("temperature 1.3", "preferred", {}),
        ("temperature 0.7", None, {"temperature": 0.8}),
        ("top_k", "short", {}),
        ("top_k", None, {"top_k": 13}),
        ("top_p", "short", {}),
        ("min_p", None, {"min_p": 0.0}),
        ("frequency", None, {"frequency_penalty": 0.0}),
        ("frequency", "late", {}),
        ("presence", None, {"presence_penalty": 0.0}),
        ("repetition", None, {"repetition_penalty": 1.0}),
        ("min_new_tokens", None, {"min_new_tokens": 0}),
        ("min_new_tokens", None, {"min_new_tokens": 59}),
        ("logit_bias", None, {"logit_bias": {}}),
    ],
)
def test_unfair_draws_fail(name, spoil, changed):
    assert smallest(CASES[name], 4000, spoil, **changed) < 1e-8


def test_only_a_constant_distribution_has_its_tokens_counted():
    for name, case in CASES.items():
        requests = requests_of(case, 300, 1)
        counted = tally(LOGITS, EOS_TOKEN, requests, answers_of(requests), None)
        is_constant = not {
            "frequency",
            "presence",
            "repetition",
            "min_new_tokens",
            "all at once",
            "mixed",
        } & {name}
        assert (counted.tokens is not None) == is_constant
        if counted.tokens is not None:
            assert counted.tokens.sum() == counted.num_draws >= 300


def test_an_answer_that_is_missing_or_short_is_no_draw():
    requests = requests_of(CASES["top_k"], 10, 1)
    with pytest.raises(ValueError, match="0 of 160 tokens: RuntimeError: no"):
        tally(LOGITS, EOS_TOKEN, requests, [{"error": "RuntimeError: no"}], None)
    with pytest.raises(ValueError, match="2 of 160 tokens: abort"):
        tally(LOGITS, EOS_TOKEN, requests, [{"tokens": [1, 2], "finish": "abort"}], None)


# --- requests and verdict ---


def test_requests_have_seeds_of_their_own_and_end_at_different_lengths():
    args = parse_arguments(["--draws", "3000", "--fault-draws", "1000", "--plain-draws", "500"])
    cells = cells_of(args)
    assert len({cell.name for cell in cells}) == len(cells) == 2 * len(CASES) + len(FAULTS)
    seeds = Counter()
    for cell in cells:
        requests = requests_of(CASES[cell.case], cell.draws, cell.number)
        sampling = [request["sampling"] for request in requests]
        seeds.update(s["sampling_seed"] for s in sampling)
        assert sum(s["max_new_tokens"] for s in sampling) >= cell.draws
        assert all(s.get("min_new_tokens", 0) < s["max_new_tokens"] for s in sampling)
        assert all(len(r["tokens"]) + r["sampling"]["max_new_tokens"] < MAX_POSITIONS for r in requests)
    assert set(seeds.values()) == {1}
    lengths = {r["sampling"]["max_new_tokens"] for r in requests_of(CASES["top_p"], 3000, 1)}
    assert lengths == {160, 200, 240}


def test_a_cells_seeds_do_not_depend_on_the_cells_beside_it():
    every = {cell.name: cell for cell in cells_of(parse_arguments([]))}
    for cell in cells_of(parse_arguments(["--cases", "mixed", "top_p", "--faults", "late_counts"])):
        assert every[cell.name] == cell


def test_mixed_has_every_kind():
    kinds = CASES["mixed"].sampling
    assert len(kinds) == len(KINDS) + 1
    assert all(case.sampling[0] in kinds for case in KINDS.values())
    requests = requests_of(CASES["mixed"], 3000, 1)
    for kind in kinds:
        assert any(kind.items() <= request["sampling"].items() for request in requests)


def test_plain_decoding_is_not_asked_for_penalties_of_undefined_order():
    assert plain_case(KINDS["repetition"]) == KINDS["repetition"]
    (left,) = plain_case(CASES["all at once"]).sampling
    assert set(EVERYTHING) - set(left) == {"repetition_penalty"}


def test_walks():
    found = walks({"1": [1, 3], "2": [5, 1, 1]})
    assert found == {"accept_length": 2.2, "rounds_by_correct_drafts": [3, 0, 1, 0, 1]}


GOOD = {
    "p_values": {"likely": 0.3, "pairs": 0.2}, "smallest_p": 0.2, "impossible": 0, "draws": 100,
    "max_logit_error": 1e-6, "accept_length": 1.8, "rounds_by_correct_drafts": [50, 50, 50, 50, 50],
}  # fmt: skip
PLAIN = {name: value for name, value in GOOD.items() if "accept" not in name and "rounds" not in name}
CELLS = (
    Cell("ddtree:31", "top_p", "", 100, 1),
    Cell("ddtree:31", "top_p", "top_p_short", 100, 2),
    Cell("plain", "top_p", "", 100, 3),
)


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({0: {"smallest_p": 2.6e-5}}, True),
        ({0: {"smallest_p": 2.4e-5}}, False),  # 1e-4 over the four fair tests
        ({2: {"smallest_p": 1e-9}}, False),
        ({1: {"smallest_p": 1e-3}}, False),
        ({0: {"max_logit_error": 0.1}}, False),
        ({0: {"accept_length": 1.1}}, False),
        ({0: {"rounds_by_correct_drafts": [50, 50, 50, 50, 2]}}, False),
    ],
)
def test_the_verdict(changes, passes, tmp_path, capsys):
    results = Results(tmp_path / "r.json", {})
    rows = [GOOD, GOOD | {"smallest_p": 1e-30}, PLAIN]
    for number, (cell, row) in enumerate(zip(CELLS, rows, strict=True)):
        results.cells[cell.name] = row | changes.get(number, {})
    assert judge(results, CELLS) == passes
    assert results.verdict["passed"] == passes
    assert results.verdict["limit"] == pytest.approx(2.5e-5)
    assert capsys.readouterr().out


@pytest.mark.parametrize("words", [["--arm", "dflash"], ["--arm", "plain"], ["--keep-engines-s", "9"]])
def test_what_cannot_be_checked_is_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(words)
    assert "is not allowed" in capsys.readouterr().err


def test_plain_decodes_without_overlap():
    args = parse_arguments(["--engine-arguments", '{"page_size": 4}'])
    plain = check_sglang_draws.arm_arguments("plain", args).engine_arguments
    assert plain == {"random_seed": 1, "disable_overlap_schedule": True, "page_size": 4}
    assert check_sglang_draws.arm_arguments("ddtree:31", args).engine_arguments == {
        "random_seed": 1, "page_size": 4
    }  # fmt: skip
    assert args.engine_arguments == {"page_size": 4}


# --- probe and faults ---

PENALISED = RequestSampling(temperature=1.0, top_p=0.8, min_p=0.1, frequency_penalty=0.5, min_new_tokens=3,
                            stop_tokens=(2,))  # fmt: skip
TREE = DraftTree(
    torch.tensor([[9, 6, 7, 8]]), torch.tensor([[-1, 0, 0, 1]]), torch.tensor([[0, 1, 1, 2]]),
    torch.log(torch.tensor([[1.0, 0.5, 0.3, 0.25]])),
)  # fmt: skip
POSITIONS = torch.tensor([[10, 11, 11, 12]])


class State:
    """Records what a fault lets through."""

    def __init__(self):
        self.chosen, self.counted = [], []

    def choose(self, sampling, logits, positions, logit_bias, tree=None, *args, **kwargs):
        self.chosen.append((sampling, logits.clone(), positions))
        return torch.full(positions.shape, 40)

    def count(self, reqs, tokens, num_tokens):
        self.counted.append((tokens.tolist(), num_tokens.tolist()))


@pytest.fixture
def spoiled(tmp_path):
    state, file = State(), tmp_path / FAULT_FILE
    plant(types.SimpleNamespace(_sampling=state, block_size=3), file)

    def run(fault):
        file.write_text(fault, encoding="utf-8")
        sampling = BatchSampling.from_requests([PENALISED], "cpu")
        logits = torch.from_numpy(LOGITS).float().repeat(4, 1)
        tokens = state.choose(sampling, logits, POSITIONS, None, TREE, None, None)
        return sampling, tokens, state.chosen[-1]

    run.state, run.file = state, file
    return run


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_fault_spoils_only_what_it_names(spoiled, fault):
    sampling, tokens, (seen, logits, positions) = spoiled(fault)
    assert (seen.penalties is None) == (fault == "no_penalties")
    assert bool(seen.max_gaps.isinf().all()) == (fault == "no_min_p")
    assert torch.equal(positions, POSITIONS) == (fault != "one_noise")
    assert torch.equal(seen.top_ps, sampling.top_ps) == (fault != "top_p_short")
    assert bool(logits.isinf().any()) == (fault == "top_p_short")
    if fault not in ("ratio", "prefer"):
        assert tokens.tolist() == [[40] * 4]


def test_counts_come_a_round_late(spoiled):
    state, file = spoiled.state, spoiled.file
    reqs = [types.SimpleNamespace(rid="a"), types.SimpleNamespace(rid="b")]
    file.write_text("late_counts", encoding="utf-8")
    state.count(reqs, torch.tensor([[4], [5]]), torch.tensor([1, 1]))
    state.count(reqs, torch.tensor([[6, 7, 8], [9, 1, 0]]), torch.tensor([3, 2]))
    state.count(reqs[1:], torch.tensor([[1, 0, 0]]), torch.tensor([1]))
    assert state.counted == [
        ([[0, 0, 0], [0, 0, 0]], [0, 0]), ([[4, 0, 0], [5, 0, 0]], [1, 1]), ([[9, 1, 0]], [2])
    ]  # fmt: skip
    file.write_text("", encoding="utf-8")
    state.count(reqs[:1], torch.tensor([[3, 0, 0]]), torch.tensor([1]))
    assert state.counted[-1] == ([[3, 0, 0]], [1])


def test_top_p_is_cut_short_by_one_token():
    logits = torch.from_numpy(LOGITS).float().repeat(2, 1)
    requests = [RequestSampling(top_p=0.8), RequestSampling()]
    cut_short_(logits, BatchSampling.from_requests(requests, "cpu"))
    kept = distributions(LOGITS, {"temperature": 1.0, "top_p": 0.8}, np.array([0]), EOS_TOKEN).probs[0]
    left = logits[0].isfinite().numpy()
    assert left.sum() == (kept > 0).sum() - 1
    assert (kept[left] > 0).all()
    assert LOGITS[left].min() > LOGITS[(kept > 0) & ~left].max()
    assert logits[1].isfinite().all()


def test_drafts_are_taken_with_their_odds():
    logits = torch.zeros(4, VOCAB)
    logits[0, 6] = math.log(21)  # p = 21 / 84 = q / 2 of the root's likeliest child
    tokens, temperatures = torch.full((1, 4), 40), torch.ones(1)
    torch.manual_seed(0)
    drawn = torch.cat([with_drafts("ratio", tokens, logits, temperatures, TREE) for _ in range(2000)])
    assert (drawn[:, 0] == 6).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert (drawn[:, 1] == 8).float().mean().item() == pytest.approx(2 / VOCAB, abs=0.02)
    assert (drawn[:, 2:] == 40).all()
    drawn = torch.cat([with_drafts("prefer", tokens, logits, temperatures, TREE) for _ in range(2000)])
    assert (drawn[:, 0] == 6).float().mean().item() == pytest.approx(0.05, abs=0.02)


def test_the_probe_writes_lengths_by_seed_and_the_worst_logit(tmp_path):
    (tmp_path / LOGITS_FILE).write_text("[1.0, 2.0]", encoding="utf-8")
    probe = Probe(tmp_path)
    runner = types.SimpleNamespace(sample=lambda out, batch: "sampled")
    result = types.SimpleNamespace(accept_lens=torch.tensor([2, 1], dtype=torch.int32))
    worker = types.SimpleNamespace(_choose=lambda *args: "chosen", _decode_round=lambda batch, *args: result)
    probe.watch_runner(runner)
    probe.watch_worker(worker)
    probe.write()
    assert not (tmp_path / PROBE_FILE).exists()
    out = types.SimpleNamespace(next_token_logits=torch.tensor([[1.0, 2.0], [1.0, 2.25]]))
    assert runner.sample(out, None) == "sampled"
    assert worker._choose(None, types.SimpleNamespace(logits_output=out), None) == "chosen"
    params = [types.SimpleNamespace(sampling_params=types.SimpleNamespace(sampling_seed=s)) for s in (7, 8)]
    for _ in range(2):
        assert worker._decode_round(types.SimpleNamespace(reqs=params), None) is result
    probe.write()
    written = (tmp_path / PROBE_FILE).read_text(encoding="utf-8")
    assert written == '{"rows": 4, "max_logit_error": 0.25, "rounds": {"7": [2, 2], "8": [1, 1]}}'
    assert probe.rounds == []


def test_the_worker_has_what_is_watched_and_spoiled():
    """The worker cannot be imported without SGLang, and a fault that spoils nothing proves nothing."""
    folder = Path(ddtree.__file__).parent / "sglang_plugin"
    worker = (folder / "worker_v2.py").read_text(encoding="utf-8")
    for text in ("self._sampling.choose(", "self._sampling.count(", "self._decode_round(", "self._choose("):
        assert text in worker
    state = (folder / "sampling_state.py").read_text(encoding="utf-8")
    for text in ("self.choose(", "self.count(reqs, tokens"):
        assert text in state


def test_stops_are_likely_enough_to_matter():
    probs = np.exp(LOGITS) / np.exp(LOGITS).sum()
    assert 0.05 < probs[[EOS_TOKEN, *STOPS]].sum() < 0.5
