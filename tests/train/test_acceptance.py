"""Offline acceptance: counts against the paper's heap, the walk by hand, and the whole against the engine."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ddtree.config import Mode, SamplingParams
from ddtree.engine.request import Request
from ddtree.errors import ConfigError
from ddtree.train.acceptance import (
    AcceptanceRow,
    AcceptanceTable,
    Text,
    accept_counts,
    bootstrap_interval,
    drafter_texts_logits,
    measure_acceptance,
    pack_roots,
    root_spans,
    walk_rounds,
)
from ddtree.train.drafter import TrainableDrafter
from ddtree.train.packed_batch import NO_LABEL, PackedBatch
from ddtree.train.target_features import FrozenTarget
from ddtree.tree import DraftMarginals, build_draft_trees, follow, tree_layout
from ddtree.tree.build_reference import build_draft_tree
from engine_kit import CPU, real_engine, rounds_of
from tiny_models import MAX_POSITIONS, load_tiny_drafter, tiny_llama, write_tiny_drafter

NUM_ROOTS, DRAFT_DEPTH, VOCAB_SIZE = 60, 6, 29
BUDGETS = (1, 3, 8, 16, 50)


def random_case(seed: int = 0, levels: int | None = None) -> tuple[Tensor, Tensor]:
    """Logits [n, depth, vocab] and labels that are often among their best; few `levels` make ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(NUM_ROOTS, DRAFT_DEPTH, VOCAB_SIZE, generator=generator)
    if levels is not None:
        logits = (logits * levels / 8).round() * 8 / levels
    ranks = torch.multinomial(torch.tensor([0.6, 0.2, 0.1, 0.05, 0.05]), logits[..., 0].numel(), True,
                              generator=generator).view(NUM_ROOTS, DRAFT_DEPTH)  # fmt: skip
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    return logits, order.gather(2, ranks.unsqueeze(2)).squeeze(2)


def heap_count(logits: Tensor, labels: Tensor, budget: int) -> int:
    """Correct drafts of one root by the paper's heap in float64."""
    values, tokens = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    nodes = build_draft_tree(values[:, :budget].double().numpy(), budget)
    paths = {tuple(int(tokens[d, rank]) for d, rank in enumerate(node.ranks)) for node in nodes}
    text = tuple(labels.tolist())
    return max((depth for depth in range(1, len(text) + 1) if text[:depth] in paths), default=0)


@pytest.mark.parametrize("seed", range(3))
def test_trees_accept_what_the_papers_heap_accepts(seed):
    logits, labels = random_case(seed)
    counts = accept_counts(logits, labels, BUDGETS)
    for budget in BUDGETS:
        expected = [heap_count(*root, budget) for root in zip(logits, labels, strict=True)]
        assert counts[budget].tolist() == expected
    assert counts[1].max() == 1
    assert len(set(counts[50].tolist())) > 4


def test_the_chain_is_the_run_of_likeliest_tokens():
    logits, labels = random_case()
    expected = [
        next((depth for depth in range(DRAFT_DEPTH) if root[depth].argmax() != label[depth]), DRAFT_DEPTH)
        for root, label in zip(logits, labels, strict=True)
    ]
    counts = accept_counts(logits, labels, ())
    assert list(counts) == ["chain"]
    assert counts["chain"].tolist() == expected
    assert counts["chain"].dtype == torch.int64


@pytest.mark.parametrize("levels", [None, 2, 8])
def test_cutting_the_largest_tree_is_building_the_smaller_one(levels):
    logits, labels = random_case(levels=levels)
    together = accept_counts(logits, labels, BUDGETS)
    for budget in BUDGETS:
        marginals = DraftMarginals.from_logits(logits, budget)
        roots = torch.zeros(NUM_ROOTS, dtype=torch.int64)
        tree = build_draft_trees(marginals, roots, budget)
        after = torch.nn.functional.pad(labels, (0, 1), value=NO_LABEL)
        expected = after.gather(1, tree.depths)
        result = follow(tree, tree_layout(tree, roots).ancestor_mask, expected, DRAFT_DEPTH)
        assert together[budget].tolist() == result.num_correct_drafts.tolist()
        assert accept_counts(logits, labels, (budget,))[budget].tolist() == together[budget].tolist()


def test_of_tied_tokens_the_lowest_id_is_drafted():
    logits = torch.zeros(2, 1, 5)
    counts = accept_counts(logits, torch.tensor([[0], [1]]), (1, 2))
    assert [counts[column].tolist() for column in ("chain", 1, 2)] == [[1, 0], [1, 0], [1, 1]]


def test_nothing_is_correct_beyond_the_text():
    logits, labels = random_case()
    kept = torch.arange(NUM_ROOTS) % (DRAFT_DEPTH + 1)  # labels each root has
    cut = torch.where(torch.arange(DRAFT_DEPTH) < kept[:, None], labels, NO_LABEL)
    whole, counts = accept_counts(logits, labels, (16,)), accept_counts(logits, cut, (16,))
    for column in ("chain", 16):
        assert counts[column].tolist() == torch.minimum(whole[column], kept).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_impossible_positions_draft_nothing(value):
    logits = torch.zeros(1, 2, 4)
    logits[:, 1] = value
    counts = accept_counts(logits, torch.zeros(1, 2, dtype=torch.int64), (4,))
    assert (counts["chain"].item(), counts[4].item()) == (1, 1)


def test_chunks_change_nothing(monkeypatch):
    logits, labels = random_case()
    whole = accept_counts(logits, labels, (8,))
    monkeypatch.setattr("ddtree.train.acceptance.CHUNK_BYTES", 7 * 4 * DRAFT_DEPTH * VOCAB_SIZE)
    cut = accept_counts(logits, labels, (8,))
    assert {column: counts.tolist() for column, counts in cut.items()} == {
        column: counts.tolist() for column, counts in whole.items()
    }


def test_a_budget_of_no_nodes_is_refused():
    with pytest.raises(ConfigError, match="budgets=0"):
        accept_counts(torch.zeros(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64), (0,))


@pytest.mark.parametrize(
    ("correct", "lengths"),
    [
        # Roots 0, 3, 4, 8 of an answer of 9 tokens, whose last is root 8's: it has none after it.
        ([2, 9, 9, 0, 3, 9, 9, 9], [3, 1, 4]),
        # The last round passes the end: roots 0 and 3, and 3 + 4 is beyond the last token, 6.
        ([2, 9, 9, 3, 9, 9], [3]),
        ([2, 9, 9, 2, 9, 9], [3, 3]),
        ([0], [1]),
        ([1], []),
        ([], []),
    ],
)
def test_rounds_are_walked_to_the_end_of_the_text(correct, lengths):
    assert walk_rounds(np.array(correct, np.int64)).tolist() == lengths


def texts_of(*sizes: tuple[int, int]) -> list[Text]:
    """Random texts of (prompt tokens, answer tokens)."""
    generator = np.random.default_rng(0)
    return [Text(generator.integers(VOCAB_SIZE, size=sum(size)), size[0]) for size in sizes]


def test_rows_hold_what_a_round_would_see():
    texts = texts_of((3, 7), (5, 4))
    spans = list(root_spans(texts, num_anchors=4))
    assert spans == [(0, 0, 4), (0, 4, 2), (1, 0, 3)]
    batch = pack_roots(texts, spans, rows=4, num_anchors=4, draft_depth=5)
    for row, span in enumerate(spans):
        text, start = texts[span.text]
        assert batch.tokens[row, : len(text)].tolist() == text.tolist()
        assert batch.positions[row, : len(text)].tolist() == list(range(len(text)))
        assert not batch.document_starts[row, : len(text)].any()
        for anchor, labels in zip(
            batch.anchors[row, : span.num_roots].tolist(), batch.labels[row], strict=False
        ):
            assert anchor >= start
            after = text[anchor + 1 : anchor + 6].tolist()
            assert labels.tolist() == after + [NO_LABEL] * (5 - len(after))
        assert (batch.labels[row, span.num_roots :] == NO_LABEL).all()
        padding = torch.arange(len(text), batch.tokens.shape[1])
        assert batch.document_starts[row, len(text) :].tolist() == padding.tolist()
        assert (batch.anchors[row].diff() >= 0).all()
    assert (batch.labels[3] == NO_LABEL).all()


def knowing_logits(num_known: int):
    """A drafter that knows the next `num_known` tokens of every text and guesses token 0 after them."""

    def logits(batch: PackedBatch) -> Tensor:
        known = torch.where(torch.arange(batch.labels.shape[2]) < num_known, batch.labels, NO_LABEL)
        return 9.0 * torch.nn.functional.one_hot(known.clamp(min=0), VOCAB_SIZE)

    return logits


@pytest.mark.parametrize(("rows", "num_anchors"), [(1, 8), (3, 5), (2, 64)])
def test_a_drafter_that_knows_two_tokens_commits_three_a_round(rows, num_anchors):
    texts = [
        Text(1 + text.tokens % (VOCAB_SIZE - 1), text.answer_start)
        for text in texts_of((3, 40), (9, 2), (2, 14))
    ]
    table = measure_acceptance(knowing_logits(2), texts, (4,), DRAFT_DEPTH, CPU, rows, num_anchors)
    assert [lengths.tolist() for lengths in table.accept_lengths["chain"]] == [[3] * 13, [], [3] * 4]
    assert table.pooled("chain") == AcceptanceRow(17, 51, (17, 17, 0, 0, 0, 0))


def test_texts_without_a_round_are_refused():
    with pytest.raises(ConfigError, match="two tokens"):
        measure_acceptance(knowing_logits(1), texts_of((4, 1)), (), DRAFT_DEPTH, CPU)


def test_pooled_figures_and_their_interval():
    lengths = (np.array([1, 3, 2]), np.zeros(0, np.int64), np.array([3]))
    table = AcceptanceTable(2, {"chain": lengths})
    row = table.pooled("chain")
    assert row == AcceptanceRow(rounds=4, tokens=9, correct_by_depth=(3, 2))
    assert row.tokens == row.rounds + sum(row.correct_by_depth)
    assert row.accept_length == 2.25
    low, high = table.interval("chain")
    assert (low, high) == (2.0, 3.0)
    assert table.interval("chain") == (low, high)
    assert np.isnan(AcceptanceTable(2, {"chain": (np.zeros(0, np.int64),)}).interval("chain")).all()


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(600):
        rounds = generator.integers(20, 60, size=50)
        tokens = rounds + generator.binomial(rounds * 4, generator.beta(8, 8, size=50))
        low, high = bootstrap_interval(tokens, rounds, repeats=400, seed=0)
        covered += low <= 3.0 <= high
    assert 0.91 <= covered / 600 <= 0.97


def block_logits(drafter, taps: Tensor, tokens: Tensor, root: int) -> Tensor:
    """What the inference drafter drafts after a root, [draft_depth, vocab], from taps [n, width]."""
    from ddtree.layers.window import Window

    context = drafter.new_context(root + drafter.block_size)
    drafter.append(context, taps[:root], Window.at(0, torch.arange(root), None))
    return drafter.draft_logits(tokens[root : root + 1], context, drafter.draft_window(root))


def inference_logits(model, drafter):
    """The inference drafter on packed rows, one anchor after the other."""

    def logits(batch: PackedBatch) -> Tensor:
        rows = []
        for tokens, anchors in zip(batch.tokens, batch.anchors, strict=True):
            hidden = model(tokens[None], output_hidden_states=True).hidden_states
            taps = torch.cat([hidden[i + 1][0] for i in drafter.target_layer_ids], -1)
            rows.append(torch.stack([block_logits(drafter, taps, tokens, root) for root in anchors.tolist()]))
        return torch.stack(rows)

    return logits


@pytest.mark.parametrize("budget", [None, 4, 24])
def test_every_round_is_one_that_the_engine_makes(tmp_path, budget):
    engine = real_engine(tmp_path, max_context=128)
    prompts = [tuple(range(3, 3 + size)) for size in (9, 14)]
    sampling = SamplingParams(max_tokens=40)
    answers = [engine.generate(Request(prompt, sampling, Mode.AR)).tokens for prompt in prompts]
    texts = [
        Text(np.array(prompt + text), len(prompt)) for prompt, text in zip(prompts, answers, strict=True)
    ]
    logits = inference_logits(tiny_llama(vocab_size=32), engine.pair.drafter)
    with torch.inference_mode():
        table = measure_acceptance(logits, texts, [budget] if budget else [], 7, CPU, 1, 39)
    mode = Mode.TREE if budget else Mode.CHAIN
    for index, prompt in enumerate(prompts):
        rounds = rounds_of(engine, Request(prompt, sampling, mode, budget or "auto"))
        live = [len(done.accept_tokens) for done in rounds]
        expected = table.accept_lengths[budget or "chain"][index].tolist()
        assert len(live) - len(expected) in (0, 1)  # the last round may pass the end
        assert live[: len(expected)] == expected
    assert table.pooled(budget or "chain").tokens > table.pooled(budget or "chain").rounds


@pytest.mark.parametrize("num_anchors", [5, 64])
def test_the_drafter_in_training_accepts_what_the_inference_drafter_accepts(tmp_path, num_anchors):
    model = tiny_llama(vocab_size=32)
    folder = write_tiny_drafter(tmp_path, model, block_size=8)
    inference_drafter = load_tiny_drafter(folder, model)
    drafter = TrainableDrafter(inference_drafter.config, MAX_POSITIONS)
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    target = FrozenTarget(model, inference_drafter.target_layer_ids, "dense")
    texts = greedy_of(model, [range(3, 12), range(5, 30), range(4, 6)], 30)
    trained = measure_acceptance(
        drafter_texts_logits(drafter, target), texts, (4, 24), 7, CPU, 2, num_anchors
    )
    with torch.inference_mode():
        logits = inference_logits(tiny_llama(vocab_size=32), inference_drafter)
        expected = measure_acceptance(logits, texts, (4, 24), 7, CPU, 1, 29)
    for column in ("chain", 4, 24):
        assert trained.pooled(column) == expected.pooled(column)
        assert trained.pooled(column).accept_length > 1


@torch.no_grad()
def greedy_of(model, prompts, max_tokens: int) -> list[Text]:
    """Greedy texts by the whole model again and again, without an end token."""
    texts = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        texts.append(Text(np.array(tokens), len(prompt)))
    return texts


@pytest.mark.gpu
def test_a_gpu_counts_what_a_cpu_counts():
    logits, labels = random_case()
    expected = accept_counts(logits, labels, (16, 64, 256))
    counts = accept_counts(logits.cuda(), labels.cuda(), (16, 64, 256))
    assert {column: each.tolist() for column, each in counts.items()} == {
        column: each.tolist() for column, each in expected.items()
    }
