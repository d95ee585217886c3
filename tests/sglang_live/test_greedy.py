"""Greedy requests through stock SGLang on the CPU: texts as transformers', rounds as the paper's heap."""

import pytest
import torch

from sglang_kit.checks import check_rounds, path_ranks
from sglang_kit.prompts import prompt
from sglang_kit.runs import request, run_engine, step

pytestmark = pytest.mark.sglang

NODE_BUDGET = 31
LENGTHS = (1, 7, 20, 33)
NEW_TOKENS = 48
CUT_TEXT = 2
REUSE_CUTS, PREFILL_CUTS = (3, 17, 30), range(1, 33)
FAULTS = ("no_mask", "no_kv_move", "node_positions")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def texts(qwen3_pair):
    """Prompts, and more greedy tokens of transformers than any request asks for."""
    from sglang_kit.reference import decode

    prompts = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    params = GREEDY | {"max_new_tokens": NEW_TOKENS + 16}
    return [(p, decode(qwen3_pair.target, p, params).tokens) for p in prompts]


def requests(texts, name, num_tokens=NEW_TOKENS):
    params = GREEDY | {"max_new_tokens": num_tokens}
    return [request(f"{name}-{i}", p, params, plan=output) for i, (p, output) in enumerate(texts)]


def cut_requests(texts, name, cuts, num_tokens):
    """Prompts that hold a part of one text's output."""
    p, output = texts[CUT_TEXT]
    params = GREEDY | {"max_new_tokens": num_tokens}
    return [request(f"{name}-{cut}", [*p, *output[:cut]], params, plan=output[cut:]) for cut in cuts]


def crowd(texts):
    """More requests than run at once, of many lengths, some of them given up on the way."""
    crowd = []
    for i in range(24):
        p, output = texts[i % len(texts)]
        num_tokens = (1, 2, 5, 9, 16, 23, 31, 40)[i % 8]
        aborted = {"abort_after_tokens": 6} if i % 7 == 4 else {}
        params = GREEDY | {"max_new_tokens": num_tokens}
        crowd.append(request(f"crowd-{i}", p, params, plan=output, delay_s=0.03 * (i % 5), **aborted))
    return crowd


@pytest.fixture(scope="module")
def run(qwen3_pair, texts, tmp_path_factory):
    steps = [
        step(requests(texts, "alone"), alone=True, flush=True, control={"hidden": True}),
        step(cut_requests(texts, "reuse", REUSE_CUTS, 12), alone=True, control={"hidden": True}),
        step(cut_requests(texts, "prefill", PREFILL_CUTS, 2), flush=True, control={"hidden": True}),
        step(requests(texts, "batch"), flush=True),
        step(crowd(texts)),
        *(step(requests(texts, fault), flush=True, control={"fault": fault}) for fault in FAULTS),
        step(requests(texts, "no_gather"), flush=True, control={"fault": "no_hidden_gather", "hidden": True}),
    ]
    folder = tmp_path_factory.mktemp("greedy")
    return run_engine(folder, qwen3_pair, steps, config={"node_budget": NODE_BUDGET})


@pytest.mark.parametrize("name", ["alone", "batch"])
def test_texts_are_those_of_transformers(run, texts, name):
    for i, (_, output) in enumerate(texts):
        assert run.tokens(f"{name}-{i}") == output[:NEW_TOKENS]


@pytest.mark.parametrize("name", ["alone", "batch"])
def test_every_round_commits_what_the_heap_says(run, texts, name):
    for i, (p, output) in enumerate(texts):
        check_rounds(run.rounds[f"{name}-{i}"], [*p, *output], NODE_BUDGET, block_size=8)


def test_trees_branch_and_paths_are_long(run, texts):
    """The planted drafts ask for more than a chain, so that the other tests say something."""
    lens, off_chain = [], 0
    for i, (p, output) in enumerate(texts):
        for round_ in run.rounds[f"alone-{i}"]:
            ranks = path_ranks(round_, [*p, *output])
            lens.append(len(ranks) + 1)
            off_chain += any(ranks[:-1])
    assert max(lens) >= 6
    assert len(set(lens)) >= 4
    assert off_chain >= 5


def test_cached_prefixes_are_reused(run, texts):
    p, output = texts[CUT_TEXT]
    for cut in REUSE_CUTS:
        rid = f"reuse-{cut}"
        assert run.tokens(rid) == output[cut : cut + 12]
        assert run.outputs[rid]["meta_info"]["cached_tokens"] >= len(p) + cut - 1
        check_rounds(run.rounds[rid], [*p, *output], NODE_BUDGET, block_size=8)


def test_requests_join_leave_and_are_aborted(run, texts):
    batch_sizes = set()
    for i in range(24):
        output = run.outputs[f"crowd-{i}"]
        tokens, text = output["output_ids"], texts[i % len(texts)][1]
        assert tokens == text[: len(tokens)]
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            assert i % 7 == 4
        else:
            assert len(tokens) == (1, 2, 5, 9, 16, 23, 31, 40)[i % 8]
        batch_sizes |= {r["batch_size"] for r in run.rounds.get(f"crowd-{i}", [])}
    assert len(batch_sizes) >= 4


def test_the_pools_return_to_their_size(run):
    assert len(run.pool) >= 5
    for line in run.pool:
        assert line["free_slots"] == line["slots"]
        assert line["free_rows"] == line["rows"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_verify_pass_changes_the_texts(run, texts, fault):
    """The control of all that is above: a mask, a KV move or positions that are wrong show in the text."""
    same = [run.tokens(f"{fault}-{i}") == output[:NEW_TOKENS] for i, (_, output) in enumerate(texts)]
    assert not any(same)


def hidden_gaps(run, name, others):
    """Largest differences between the drafter's hidden states of two runs' rounds, where prefixes are equal.

    Without a hidden state of each committed token in the drafter's context they differ, and nothing else does
    where drafts are planted.
    """
    rounds = {round_["prefix_len"]: torch.tensor(round_["hidden"]) for round_ in run.rounds[name]}
    return [
        float((rounds[round_["prefix_len"]] - torch.tensor(round_["hidden"])).abs().max())
        for other in others
        for round_ in run.rounds[other]
        if round_["prefix_len"] in rounds
    ]


def test_the_drafter_sees_the_same_after_decoding_as_after_prefill(run):
    others = [f"prefill-{cut}" for cut in PREFILL_CUTS] + [f"reuse-{cut}" for cut in REUSE_CUTS]
    gaps = hidden_gaps(run, f"alone-{CUT_TEXT}", others)
    assert len(gaps) >= 8
    assert max(gaps) < 1e-4


def test_a_forgotten_gather_shows_in_the_drafter_alone(run, texts):
    for i, (_, output) in enumerate(texts):
        assert run.tokens(f"no_gather-{i}") == output[:NEW_TOKENS]
    assert max(hidden_gaps(run, f"no_gather-{CUT_TEXT}", [f"alone-{CUT_TEXT}"])) > 1e-2
