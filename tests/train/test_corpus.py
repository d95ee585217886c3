"""Shards hold what was added, whole or not at all; prompts are told apart by their words only."""

import hashlib
import json

import numpy as np
import pytest

from ddtree.errors import CheckpointError, ConfigError
from ddtree.train.corpus import Conversation, Corpus, CorpusWriter, shard_paths
from ddtree.train.prompts import load_excluded, load_prompts, normalised_prompt_hash


def conversation(i, length=9, vocab_size=300):
    """Tokens that begin with the id, so that no two user turns are equal."""
    rng = np.random.default_rng(i)
    tokens = np.concatenate([[i // 100, i % 100], rng.integers(0, vocab_size, length - 2)])
    return Conversation(tokens.astype(np.uint32), 4, 0.5 * (i % 3), i)


def write(folder, conversations, fingerprint="f", shard_tokens=40, vocab_size=300):
    writer = CorpusWriter(folder, vocab_size, fingerprint, shard_tokens)
    kept = [writer.add(c) for c in conversations]
    writer.close()
    return kept


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_a_corpus_gives_back_what_was_written(tmp_path, vocab_size, dtype):
    written = [conversation(i, 5 + i % 7, vocab_size) for i in range(23)]
    assert all(write(tmp_path, written, vocab_size=vocab_size))
    corpus = Corpus.open(tmp_path)
    assert len(shard_paths(tmp_path)) > 2
    assert len(corpus) == 23
    assert corpus.num_tokens == sum(len(c.tokens) for c in written)
    assert corpus.lengths.tolist() == [len(c.tokens) for c in written]
    assert (corpus.vocab_size, corpus.fingerprint) == (vocab_size, "f")
    for got, expected in zip(corpus, written, strict=True):
        assert got.tokens.dtype == dtype
        assert got.tokens.tolist() == expected.tokens.tolist()
        assert got[1:] == expected[1:]
    assert corpus[-1].id == 22
    with pytest.raises(IndexError):
        corpus[23]


def test_a_writer_goes_on_with_a_folder(tmp_path):
    write(tmp_path, [conversation(i) for i in range(5)])
    writer = CorpusWriter(tmp_path, 300, "f", 40)
    assert not writer.add(conversation(2)._replace(id=7))
    assert writer.num_duplicates == 1
    assert writer.add(conversation(5))
    writer.close()
    assert Corpus.open(tmp_path).ids.tolist() == list(range(6))


def test_a_user_turn_is_written_once(tmp_path):
    first = conversation(1)
    same_turn = Conversation(np.append(first.tokens[:4], [7, 8, 9]), 4, 1.0, 2)
    assert write(tmp_path, [first, same_turn, conversation(3)]) == [True, False, True]
    assert Corpus.open(tmp_path).ids.tolist() == [1, 3]


def test_other_settings_are_refused(tmp_path):
    write(tmp_path, [conversation(0)])
    with pytest.raises(ConfigError, match=r"shard-00000.*other data settings.*choose another folder"):
        CorpusWriter(tmp_path, 300, "g", 40)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def empty(path):
    path.write_bytes(b"")


def flip_length(path):
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    data[8 + int.from_bytes(data[:8], "little") + header["lengths"]["data_offsets"][0]] += 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, empty, flip_length])
def test_a_broken_shard_is_named(tmp_path, damage):
    write(tmp_path, [conversation(i) for i in range(12)])
    damage(shard_paths(tmp_path)[1])
    for open_folder in (Corpus.open, lambda folder: CorpusWriter(folder, 300, "f", 40)):
        with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors"):
            open_folder(tmp_path)


def test_an_empty_folder_is_no_corpus(tmp_path):
    with pytest.raises(CheckpointError, match="no shards"):
        Corpus.open(tmp_path)


def test_a_growing_corpus_keeps_what_is_held_out(tmp_path):
    write(tmp_path, [conversation(i) for i in range(60)])
    corpus = Corpus.open(tmp_path)
    train, held_out = corpus.split(10, seed=3)
    assert sorted([*train, *held_out]) == list(range(60))
    assert len(held_out) == 10
    write(tmp_path, [conversation(i) for i in range(60, 200)])
    _, later = Corpus.open(tmp_path).split(10, seed=3)
    assert later.tolist() == held_out.tolist()
    assert corpus.split(10, seed=4)[1].tolist() != held_out.tolist()
    with pytest.raises(ConfigError, match="held_out=60 is not allowed"):
        corpus.split(60, seed=3)


def test_hashes_ignore_case_and_white_space():
    assert normalised_prompt_hash(" What\n is\t2+2? ") == normalised_prompt_hash("what is 2+2?")
    assert normalised_prompt_hash("what is 2+2?") != normalised_prompt_hash("what is 2+3?")
    assert normalised_prompt_hash("a b") == hashlib.sha256(b"a b").hexdigest()


def test_every_turn_and_listed_hash_is_excluded(tmp_path):
    rows, hashes = tmp_path / "a.jsonl", tmp_path / "b.sha256"
    rows.write_text('{"turns": ["One", "Two"]}\n\n{"prompt": "Three"}\n')
    hashes.write_text(normalised_prompt_hash("four") + "\n")
    expected = {normalised_prompt_hash(text) for text in ("one", "two", "three", "four")}
    assert load_excluded([rows, hashes]) == expected


def test_prompts_are_first_turns(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["One", "Two"]}\n{"prompt": "Line\\u2028two", "id": 3}\n', encoding="utf-8")
    assert load_prompts(path) == ["One", "Line\u2028two"]


@pytest.mark.parametrize("line", ["{", "3", '{"turns": []}', '{"turns": [1]}', '{"prompt": " "}', '["a"]'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line)
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 3"):
        load_prompts(path)


def test_bad_files_are_named(tmp_path):
    (tmp_path / "h.sha256").write_text("abc")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe")
    for name, message in (("h.sha256", "line 1"), ("latin.jsonl", "UTF-8"), ("none.jsonl", "cannot read")):
        with pytest.raises(ConfigError, match=message):
            load_excluded([tmp_path / name])


def test_a_missing_shard_is_found(tmp_path):
    write(tmp_path, [conversation(i) for i in range(23)])
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no shard 1; delete the shards after it too"):
        Corpus.open(tmp_path)
