"""One target token a node against a slow reference, and what a choice must not depend on."""

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from choice_kit import Case, choose, counts_of, output_at, random_tree, reference_choice
from ddtree.errors import ConfigError
from ddtree.sglang_plugin import target_choice
from ddtree.sglang_plugin.batch_sampling import NO_TOP_K, BatchSampling, RequestSampling
from ddtree.sglang_plugin.penalties import apply_counts_
from ddtree.sglang_plugin.sampling_filters import drop_unlikely_
from ddtree.sglang_plugin.target_choice import choose_target_tokens
from ddtree.tree import DraftTree, ancestor_mask

NEG_INF = float("-inf")
REQUESTS = st.builds(
    RequestSampling,
    temperature=st.sampled_from([0.1, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([1, 2, 3, 5, 8, 40, NO_TOP_K, NO_TOP_K, NO_TOP_K]),
    top_p=st.sampled_from([1e-6, 0.3, 0.5, 0.8, 0.95, 1.0, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.0, 0.02, 0.2, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, 1.3, -0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.8, -1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 0.8]),
    min_new_tokens=st.sampled_from([0, 0, 3, 5]),
    stop_tokens=st.sampled_from([(), (0,), (4, 2), (2, 90), (91, 90), (-1, 3)]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@st.composite
def cases(draw, max_bs: int = 4) -> Case:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    bs, vocab = draw(st.integers(1, max_bs)), draw(st.sampled_from([1, 2, 6, 13]))
    has_tree = draw(st.booleans())
    width = draw(st.integers(2, 9)) if has_tree else 1
    logits = torch.randn(bs, width, vocab, generator=generator) * draw(st.sampled_from([0.0, 1.0, 4.0]))
    kind = draw(st.sampled_from(["continuous", "continuous", "ties", "trouble"]))
    if kind == "ties":
        logits = logits.round()
    elif kind == "trouble":
        logits[torch.rand(logits.shape, generator=generator) < 0.4] = NEG_INF
        logits[torch.rand(logits.shape, generator=generator) < 0.2] = float("nan")
    requests = [
        dataclasses.replace(draw(REQUESTS), slot=row + draw(st.integers(0, 1)) * bs) for row in range(bs)
    ]
    tree = random_tree(generator, bs, width, vocab) if has_tree else None
    outputs = [
        torch.randint(vocab, (draw(st.integers(0, 5)),), generator=generator).tolist() for _ in range(bs)
    ]
    if tree is not None:
        outputs = [[*output, int(tree.tokens[row, 0])] for row, output in enumerate(outputs)]
    prefix = torch.randint(1, 1000, (bs, 1), generator=generator)
    return Case(
        logits=logits,
        requests=tuple(requests),
        outputs=tuple(map(tuple, outputs)),
        tree=tree,
        positions=prefix if tree is None else prefix + tree.depths,
        logit_bias=torch.randn(bs, vocab, generator=generator).round() if draw(st.booleans()) else None,
        allowed=torch.rand(bs * width, vocab, generator=generator) < 0.7 if draw(st.booleans()) else None,
        options={
            "sequential_top_k_top_p": draw(st.booleans()),
            "ties": draw(st.sampled_from(["lowest_id", "all"])),
        },
    )


@settings(max_examples=250, deadline=None)
@given(cases())
def test_choice_equals_the_reference(case):
    tokens = choose(case)
    assert tokens.dtype == torch.int64
    assert tokens.shape == case.positions.shape
    for row in range(tokens.shape[0]):
        for column in range(tokens.shape[1]):
            if case.tree is None or case.tree.log_probs[row, column] > NEG_INF:
                expected, is_near = reference_choice(case, row, column)
                assert tokens[row, column] == expected or is_near


@settings(max_examples=120, deadline=None)
@given(cases(max_bs=5), st.data())
def test_a_choice_does_not_depend_on_the_batch(case, data):
    """Alone, in another order and beside others each request gets the same tokens."""
    together = choose(case)
    order = data.draw(st.permutations(range(len(case.requests))))
    cut = data.draw(st.integers(0, len(order)))
    for rows in (order[:cut], order[cut:], order):
        if rows:
            assert torch.equal(choose(case.select(list(rows))), together[list(rows)])


@settings(max_examples=60, deadline=None)
@given(cases(max_bs=2), st.data())
def test_a_choice_does_not_depend_on_the_chunk(case, data):
    """Bounded memory: nodes handled in any number at a time choose the same."""
    together = choose(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_choice, "CHUNK_BYTES", data.draw(st.integers(1, 5)) * 48 * case.logits.shape[2])
        patch.setattr("ddtree.sglang_plugin.penalties.MAX_PATH_CELLS", 1)
        assert torch.equal(choose(case), together)


@settings(max_examples=80, deadline=None)
@given(cases(max_bs=3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_a_choice_does_not_depend_on_padding(case, num_more, seed):
    """More columns, filled with padding and any logits, leave the tokens of the nodes as they are."""
    assume(case.tree is not None)
    generator = torch.Generator().manual_seed(seed)
    bs, width, vocab = case.logits.shape

    def widen(values: torch.Tensor, filler: float) -> torch.Tensor:
        return torch.cat([values, values.new_full((bs, num_more), filler)], 1)

    tree = case.tree
    wide = dataclasses.replace(
        case,
        logits=torch.cat([case.logits, torch.randn(bs, num_more, vocab, generator=generator)], 1),
        tree=DraftTree(
            widen(tree.tokens, 0),
            widen(tree.parents, -1),
            widen(tree.depths, 0),
            widen(tree.log_probs, NEG_INF),
        ),
        positions=widen(case.positions, 3),
        allowed=None,
    )
    narrow = choose(dataclasses.replace(case, allowed=None))
    assert torch.equal(choose(wide)[:, :width][tree.is_node], narrow[tree.is_node])


@settings(max_examples=60, deadline=None)
@given(cases(max_bs=3))
def test_a_path_in_a_tree_chooses_as_decoding_it_token_by_token(case):
    """A node's token is the one that plain decoding draws after the same output, without a tree."""
    assume(case.tree is not None)
    tokens = choose(case)
    bs, width, _ = case.logits.shape
    for column in range(width):
        plain = dataclasses.replace(
            case,
            logits=case.logits[:, column : column + 1],
            outputs=tuple(tuple(output_at(case, row, column)) for row in range(bs)),
            tree=None,
            positions=case.positions[:, column : column + 1],
            allowed=None if case.allowed is None else case.allowed.unflatten(0, (bs, width))[:, column],
        )
        is_node = case.tree.is_node[:, column]
        assert torch.equal(choose(plain)[:, 0][is_node], tokens[:, column][is_node])


def plain_case(logits: list[list[float]], **sampling) -> Case:
    """One request a row of `logits`, without a tree."""
    return Case(
        torch.tensor(logits)[:, None], tuple(RequestSampling(slot=i, **sampling) for i in range(len(logits))),
        ((),) * len(logits), None, torch.arange(len(logits))[:, None],
    )  # fmt: skip


def test_greedy_takes_the_lowest_id_of_equals_and_survives_trouble():
    nan, inf = float("nan"), float("inf")
    rows = [
        [0.0, 2.0, 2.0],
        [nan, 1.0, 0.0],
        [-inf, -inf, -inf],
        [nan, nan, nan],
        [nan, -inf, -1e30],
        [0, inf, inf],
    ]
    assert choose(plain_case(rows, top_k=1)).flatten().tolist() == [1, 1, 0, 0, 2, 1]
    for sampling in ({}, {"top_k": 2}, {"top_p": 0.9, "min_p": 0.1}):
        tokens = choose(plain_case(rows, **sampling)).flatten().tolist()
        assert tokens[2:5] == [0, 0, 2]
        assert tokens[1] in (1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_float_type_and_rows_with_a_gap_between_them(dtype):
    """SGLang cuts a padded vocabulary off by a slice, which leaves rows apart in memory."""
    generator = torch.Generator().manual_seed(3)
    tree = random_tree(generator, 2, 5, 6)
    requests = (
        RequestSampling(frequency_penalty=0.5, min_new_tokens=9, stop_tokens=(2,)),
        RequestSampling(slot=1),
    )
    outputs = tuple((1, int(token)) for token in tree.tokens[:, 0])
    logits = torch.randn(2, 5, 6, generator=generator).to(dtype)
    case = Case(logits, requests, outputs, tree, 7 + tree.depths)
    padded = torch.zeros(10, 9, dtype=dtype)
    padded[:, :6] = logits.flatten(0, 1)
    tokens = choose_target_tokens(
        padded[:, :6], sampling=BatchSampling.from_requests(requests, "cpu"), positions=case.positions,
        tree=tree, ancestor_mask=ancestor_mask(tree), counts=counts_of(case), logit_bias=None,
        apply_grammar=None,
    )  # fmt: skip
    assert torch.equal(tokens, choose(case))
    assert (padded[:, 6:] == 0).all()
    if dtype == torch.float32:
        for row in range(2):
            for column in range(5):
                if tree.is_node[row, column]:
                    assert tokens[row, column] == reference_choice(case, row, column)[0]


def test_only_penalised_requests_are_touched():
    generator = torch.Generator().manual_seed(1)
    tree = random_tree(generator, 3, 4, 6)
    requests = (
        RequestSampling(),
        RequestSampling(slot=1, repetition_penalty=2.0),
        RequestSampling(slot=2, top_k=1),
    )
    logits = torch.randn(12, 6, generator=generator)
    before = logits.clone()
    case = Case(
        logits.view(3, 4, 6), requests, tuple((int(t),) for t in tree.tokens[:, 0]), tree, tree.depths
    )
    choose_target_tokens(
        logits, sampling=BatchSampling.from_requests(requests, "cpu"), positions=case.positions, tree=tree,
        ancestor_mask=ancestor_mask(tree), counts=counts_of(case), logit_bias=None, apply_grammar=None,
    )  # fmt: skip
    assert torch.equal(logits.view(3, 4, 6)[[0, 2]], before.view(3, 4, 6)[[0, 2]])
    assert not torch.equal(logits, before)


def test_the_repetition_penalty_moves_either_sign_away_from_a_token():
    logits, counts, zero = torch.tensor([2.0, -2.0, 2.0, -2.0]), torch.tensor([1, 3, 0, 0]), torch.tensor(0.0)
    values = apply_counts_(logits, counts, zero, zero, torch.tensor(4.0))
    assert values.tolist() == [0.5, -8.0, 2.0, -2.0]


@pytest.mark.parametrize(("min_new_tokens", "stops_from"), [(2, 0), (3, 1), (4, 2), (5, 3), (6, 4)])
def test_stop_tokens_are_held_back_until_the_output_is_long_enough(min_new_tokens, stops_from):
    """A chain of four after two tokens of output: the node at depth d stands after 2 + d of them."""
    depths = torch.arange(4)[None]
    tree = DraftTree(torch.zeros_like(depths), depths - 1, depths, -depths.float())
    request = RequestSampling(top_k=1, min_new_tokens=min_new_tokens, stop_tokens=(2, 1))
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(1, 4, 3)
    tokens = choose(Case(logits, (request,), ((0, 0),), tree, depths))
    assert tokens[0].tolist() == [0] * stops_from + [2] * (4 - stops_from)


FOUR = [2.0, 1.0, 1.0, 0.0]  # weights 1, 1/e, 1/e, 1/e**2 of 1.871


@pytest.mark.parametrize(
    ("sampling", "ties", "is_sequential", "kept"),
    [
        ({"top_k": 2}, "lowest_id", False, [0, 1]),
        ({"top_k": 2}, "all", False, [0, 1, 2]),
        ({"top_k": 9}, "lowest_id", False, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, "lowest_id", False, [0]),
        ({"top_p": 0.54}, "lowest_id", False, [0, 1]),
        ({"top_p": 0.54}, "all", False, [0, 1, 2]),
        ({"top_p": 0.53}, "all", False, [0]),
        ({"top_p": 0.999999}, "lowest_id", False, [0, 1, 2, 3]),
        ({"top_k": 2, "top_p": 0.6}, "lowest_id", False, [0, 1]),
        ({"top_k": 2, "top_p": 0.6}, "lowest_id", True, [0]),
        ({"min_p": 0.36}, "lowest_id", False, [0, 1, 2]),
        ({"min_p": 0.37}, "lowest_id", False, [0]),
        ({"min_p": 1.0}, "lowest_id", False, [0]),
    ],
)
def test_what_the_filters_keep(sampling, ties, is_sequential, kept):
    batch = BatchSampling.from_requests([RequestSampling(**sampling)], "cpu")
    scaled = drop_unlikely_(
        torch.tensor([FOUR]), batch.top_ks, batch.top_ps, batch.max_gaps, torch.tensor([is_sequential]), ties
    )
    assert (scaled[0] > NEG_INF).nonzero().flatten().tolist() == kept
    assert scaled[0, kept].tolist() == [FOUR[token] for token in kept]


def test_requests_fall_into_three_kinds():
    requests = [
        RequestSampling(), RequestSampling(top_k=1, top_p=0.5), RequestSampling(top_p=0.5),
        RequestSampling(min_p=0.1), RequestSampling(top_k=3, frequency_penalty=1.0),
        RequestSampling(min_new_tokens=2),
        RequestSampling(min_new_tokens=2, stop_tokens=(4,)),
    ]  # fmt: skip
    batch = BatchSampling.from_requests(requests, "cpu")
    assert (batch.greedy.numbers, batch.plain.numbers, batch.filtered.numbers) == ((1,), (0, 5, 6), (2, 3, 4))
    assert batch.filter_places.tolist() == [-1, -1, 0, 1, 2, -1, -1]
    assert batch.penalised_rows.tolist() == [4, 6]
    assert batch.penalties.rows.numbers == (4,)
    assert batch.min_new_tokens.rows.numbers == (6,)
    assert not BatchSampling.from_requests(requests[:4], "cpu").needs_counts


def test_seeds_of_64_bits_and_more_wrap_around():
    seeds = [2**63, -1, 2**64 - 1, 2**64 + 5, -(2**63)]
    batch = BatchSampling.from_requests([RequestSampling(seed=seed) for seed in seeds], "cpu")
    assert batch.seeds.tolist() == [-(2**63), -1, -1, 5, -(2**63)]


def test_what_does_not_fit_together_is_refused():
    case = plain_case([[0.0, 1.0]], frequency_penalty=1.0)
    sampling = BatchSampling.from_requests(case.requests, "cpu")
    common = {"tree": None, "ancestor_mask": None, "logit_bias": None, "apply_grammar": None}
    with pytest.raises(ConfigError, match="counts=None is not allowed: a TokenCounts"):
        choose_target_tokens(
            case.logits[0], sampling=sampling, positions=case.positions, counts=None, **common
        )
    with pytest.raises(ConfigError, match="rows of logits=3 is not allowed: 1 requests of 1 nodes"):
        choose_target_tokens(
            torch.zeros(3, 2), sampling=sampling, positions=case.positions, counts=counts_of(case), **common
        )
    with pytest.raises(
        ConfigError, match="vocab_size of counts=2 is not allowed: the width of the logits, 5"
    ):
        choose_target_tokens(
            torch.zeros(1, 5), sampling=sampling, positions=case.positions, counts=counts_of(case), **common
        )
