"""Packing: what a row holds, which labels an anchor has, and that a batch follows from its step alone."""

from itertools import islice

import numpy as np
import pytest
import torch

from ddtree.errors import ConfigError
from ddtree.train.corpus import Corpus, ShardData
from ddtree.train.packed_batch import NO_LABEL
from ddtree.train.packing import World, batches, conversation_ids, pack_rows
from ddtree.train.recipe import TrainSettings

DEPTH = 3
SETTINGS = TrainSettings(rows=2, row_tokens=32, num_anchors=4, seed=5)


def corpus_of(lengths, answer_starts):
    lengths, starts = np.array(lengths, np.int32), np.array(answer_starts, np.int32)
    # A token says which conversation it is of and where it stands there.
    tokens = np.concatenate([1000 * (i + 1) + np.arange(n) for i, n in enumerate(lengths)]).astype(np.uint16)
    ids = np.arange(len(lengths), dtype=np.int64) + 70
    return Corpus(ShardData(tokens, lengths, starts, np.zeros(len(lengths), np.float32), ids), 65536, "f")


def some_corpus(count=12):
    generator = np.random.default_rng(3)
    lengths = generator.integers(8, 20, count)
    return corpus_of(lengths, lengths // 2)


def first_batches(count, corpus=None, settings=SETTINGS, first_step=0, world=None):
    corpus = corpus or some_corpus()
    return list(islice(batches(corpus, np.arange(len(corpus)), settings, DEPTH, first_step, world), count))


def test_rows_hold_every_conversation_once_and_never_too_much():
    generator = np.random.default_rng(0)
    lengths = generator.integers(5, 100, 300)
    rows = pack_rows(lengths, np.arange(300), 128)
    assert sorted(i for row in rows for i in row) == list(range(300))
    assert all(lengths[row].sum() <= 128 for row in map(np.array, rows))
    # Best fit over the open rows wastes little; one conversation a row would fill 40 %.
    assert lengths.sum() / (128 * len(rows)) > 0.9


def test_a_conversation_longer_than_a_row_is_cut_to_it():
    corpus = corpus_of([50, 40], [4, 4])
    _, batch = first_batches(1, corpus)[0]
    assert batch.tokens.shape == (2, 32)
    assert {int(row[0]) for row in batch.tokens} == {1000, 2000}
    assert (batch.anchors <= 30).all()


def test_positions_and_starts_belong_to_the_conversation():
    for _, batch in first_batches(6):
        for row in range(2):
            for place in range(32):
                token, start = int(batch.tokens[row, place]), int(batch.document_starts[row, place])
                if token == 0:
                    assert start == place
                    continue
                assert int(batch.tokens[row, start]) == token // 1000 * 1000
                assert int(batch.positions[row, place]) == token % 1000 == place - start


def test_anchors_stand_in_answers_and_labels_follow_them_in_the_same_conversation():
    corpus, seen = some_corpus(), 0
    for _, batch in first_batches(40, corpus):
        for row in range(2):
            anchors = batch.anchors[row].tolist()
            assert anchors == sorted(anchors)
            for anchor, labels in zip(anchors, batch.labels[row].tolist(), strict=True):
                if labels == [NO_LABEL] * DEPTH:
                    continue
                root = int(batch.tokens[row, anchor])
                conversation, place = root // 1000 - 1, root % 1000
                size, start = len(corpus[conversation].tokens), corpus[conversation].answer_start
                assert start <= place < size - 1
                wanted = [root + k + 1 if place + k + 1 < size else NO_LABEL for k in range(DEPTH)]
                assert labels == wanted
                seen += 1
    assert seen > 200


def test_a_row_with_few_roots_uses_each_once_and_leaves_the_rest_without_labels():
    corpus = corpus_of([30, 30], [27, 27])  # two roots each
    _, batch = first_batches(1, corpus)[0]
    has_label = batch.labels[:, :, 0] != NO_LABEL
    assert has_label.sum(1).tolist() == [2, 2]
    assert all(len(set(batch.anchors[row][has_label[row]].tolist())) == 2 for row in range(2))


def test_a_batch_follows_from_its_step():
    whole = first_batches(9)
    late = first_batches(4, first_step=5)
    assert [step for step, _ in late] == [5, 6, 7, 8]
    for (_, one), (_, other) in zip(whole[5:], late, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in one.__slots__)
    assert not torch.equal(whole[0][1].anchors, whole[1][1].anchors)


def test_processes_share_one_batch():
    (_, whole), *_ = first_batches(1)
    parts = [first_batches(1, world=World(rank, 2))[0][1] for rank in range(2)]
    assert torch.equal(torch.cat([part.tokens for part in parts]), whole.tokens)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)


def test_epochs_differ_and_the_ids_of_a_step_can_be_told():
    corpus = some_corpus()
    ids = conversation_ids(corpus, np.arange(len(corpus)), SETTINGS, 3)
    tokens = first_batches(4, corpus)[3][1].tokens
    assert {token // 1000 - 1 + 70 for token in tokens.unique().tolist() if token} == set(ids)


def test_too_few_conversations_and_odd_numbers_of_processes_are_refused():
    with pytest.raises(ConfigError, match=r"train\.rows=2 .* fill only 1 rows"):
        first_batches(1, corpus_of([10], [5]))
    with pytest.raises(ConfigError, match="multiple"):
        first_batches(1, world=World(0, 3))
