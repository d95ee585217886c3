"""One seed, one text: plain, chain and trees of every width commit the same tokens in float32."""

import dataclasses

import pytest
import torch

from ddtree.config import Mode, SamplingParams
from ddtree.engine import decode_round
from ddtree.engine.kv_cache import KVCache
from ddtree.engine.request import Request
from engine_kit import (
    PROMPT,
    VOCAB_SIZE,
    ScriptDrafter,
    plain,
    real_engine,
    rounds_of,
    scripted_engine,
    tiny_engine,
    tiny_target,
)
from tiny_models import tiny_llama, tiny_qwen3

PLANS = [(Mode.CHAIN, "auto"), (Mode.TREE, 1), (Mode.TREE, 4), (Mode.TREE, 16), (Mode.TREE, 64)]
NUM_TOKENS = 48
SAMPLINGS = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.0, "seed": 7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.3},
    "greedy repetition": {"repetition_penalty": 1.5},
    "presence": {"temperature": 1.0, "presence_penalty": 1.5},
    "greedy frequency": {"frequency_penalty": 1.7},
    "negative presence": {"temperature": 1.0, "presence_penalty": -1.0},
    "logit bias": {"temperature": 1.0, "logit_bias": {0: 3.0, 7: -100.0}},
    "all": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.5}, "seed": -5,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_mode_says_the_same(target, name):
    sampling = SamplingParams(max_tokens=NUM_TOKENS, **SAMPLINGS[name])
    expected = plain(target, sampling)
    engine = scripted_engine(target, sampling)
    for mode, budget in PLANS:
        got = engine.generate(Request(PROMPT, sampling, mode, budget))
        assert got.tokens == expected.tokens, (name, mode, budget)
        assert got.text == expected.text
    assert got.stats.accept_length > 2.2  # the drafts were used, else this test would show nothing


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_families_and_the_stock_path_agree(make, tmp_path):
    from ddtree.engine.stock_target import StockTarget

    model = make(vocab_size=VOCAB_SIZE)
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    fused = tiny_target(tmp_path, model)
    stock = StockTarget(model.eval(), torch.float32, torch.device("cpu"))
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    for target in (fused, stock):
        engine = scripted_engine(target, sampling)
        for mode, budget in [(Mode.AR, "auto"), (Mode.CHAIN, "auto"), (Mode.TREE, 16)]:
            assert list(engine.generate(Request(PROMPT, sampling, mode, budget)).tokens) == expected, (
                target,
                mode,
            )


@pytest.mark.parametrize(("mode", "budget"), PLANS)
def test_the_block_keeps_its_size_whatever_the_budget(target, mode, budget):
    """A small budget trims the tree, never the block: the drafter itself asserts what it is given."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    engine = scripted_engine(target, sampling)
    stats = engine.generate(Request(PROMPT, sampling, mode, budget)).stats
    assert engine.drafter.draft_ct == stats.verify_ct


def test_a_useless_drafter_changes_nothing_but_speed(target):
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0)
    expected = plain(target, sampling).tokens
    engine = tiny_engine(target, ScriptDrafter((), len(PROMPT)))
    for mode, budget in PLANS:
        assert engine.generate(Request(PROMPT, sampling, mode, budget)).tokens == expected


def test_drafter_gets_each_committed_token_once(target):
    """Prompt and committed tokens but the root, in order, without gap or overlap."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    engine = scripted_engine(target, sampling)
    engine.generate(Request(PROMPT, sampling, Mode.TREE, 16))
    drafter = engine.drafter
    expected = 0
    for start, rows in drafter.appended:
        assert start == expected
        expected += rows
    assert expected == int(engine.sequence.prefix_len)


def test_requests_share_no_state(tmp_path):
    """The rounds are those of a fresh engine: what leaked into the drafter's context would change trees."""
    sampling = SamplingParams(max_tokens=20, temperature=1.0, frequency_penalty=0.5)
    request = Request(tuple(range(5, 25)), sampling, Mode.TREE, 16)
    alone = rounds_of(real_engine(tmp_path / "fresh", max_context=256), request)
    engine = real_engine(tmp_path / "used", max_context=256)
    engine.generate(Request(tuple(i % 32 for i in range(80)), SamplingParams(max_tokens=30), Mode.TREE, 64))
    for _ in range(2):
        assert rounds_of(engine, request) == alone
    assert any(len(seen.accept_tokens) > 1 for seen in alone)


def planted(monkeypatch, fault):
    """Plant a fault of the kind that others shipped."""
    if fault == "kv not moved":
        monkeypatch.setattr(KVCache, "compact", lambda self, prefix_len, result: None)
    elif fault == "positions by slot":
        real = decode_round.verify

        def by_slot(pair, sequence, built):
            positions = sequence.prefix_len + torch.arange(built.tree.num_verify_tokens)[None]
            layout = dataclasses.replace(built.layout, positions=positions)
            return real(pair, sequence, built._replace(layout=layout))

        monkeypatch.setattr(decode_round, "verify", by_slot)
    else:
        real_window = decode_round.Sequence.window

        def sees_siblings(self, depths, tree_mask):
            if tree_mask is not None and not tree_mask.all():  # the drafter's block sees all anyway
                tree_mask = torch.ones_like(tree_mask).tril()
            return real_window(self, depths, tree_mask)

        monkeypatch.setattr(decode_round.Sequence, "window", sees_siblings)


@pytest.mark.parametrize("fault", ["kv not moved", "positions by slot", "siblings seen"])
def test_planted_faults_change_the_text(target, monkeypatch, fault):
    """The tests above can fail: each of the three classic faults is seen."""
    sampling = SamplingParams(max_tokens=NUM_TOKENS)
    expected = plain(target, sampling).tokens
    engine = scripted_engine(target, sampling)
    planted(monkeypatch, fault)
    assert engine.generate(Request(PROMPT, sampling, Mode.TREE, 16)).tokens != expected
