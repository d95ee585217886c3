"""The cost model against sums done by hand, published sizes, and what no cost may do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.config import Mode
from ddtree.errors import ConfigError
from ddtree.tree.budget import NodeBudgetPolicy
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.cost_catalogue import GPUS, PAIRS
from ddtree.tree.cost_model import (
    AttentionShape,
    Calibration,
    DraftPair,
    ExpertShape,
    GpuSpec,
    Load,
    ModelShape,
    RecurrentShape,
    break_even_length,
    has_room,
    pass_cost,
    predicted_costs,
    request_bytes,
    round_cost,
    speed_up,
)

CHAIN = DraftPlan(Mode.CHAIN, 15)
# 100 GB/s and 10 TFLOP/s, half of either reached; 10 GB/s to the next GPU.
GPU = GpuSpec("made up", 16e9, 100e9, 10e12, 20e12, 10e9, 5e-6)
HALVES = Calibration(
    bandwidth_share=0.5, flop_share=0.5, layer_latency_s=1e-5, tree_s=2e-5, state_bandwidth_share=0.1,
    step_host_s=1e-4, round_host_s=3e-4, request_host_s=1e-5, overlaps_host=True, link_share=0.5,
)  # fmt: skip
# A layer's KV is 2 * 2 heads * 64 * 2 bytes = 512 a token.
MODEL = ModelShape(
    "made up", num_layers=10, hidden_size=256, dense_weights=1e8, head_weights=1e7, bytes_per_weight=2,
    attention=(AttentionShape(10, 4, 64, 64, 512, num_kv_heads=2),),
)  # fmt: skip
PAIR = DraftPair(MODEL, replace(MODEL, name="drafter", num_layers=2, dense_weights=1e7, gathers_logits=False))


def tree(budget):
    return DraftPlan(Mode.TREE, budget)


def test_a_pass_is_what_the_sum_by_hand_says():
    cost = pass_cost(MODEL, GPU, HALVES, Load(num_requests=4, context_tokens=984), width=16)
    assert cost.latency_s == pytest.approx(11 * 1e-5)  # ten layers and the head
    # 2.2e8 bytes at 50e9/s; 64 tokens * 2 * 1.1e8 at 5e12/s
    assert cost.weights_s == pytest.approx(4.4e-3 + 2.816e-3)
    # 4 requests * 1,000 tokens * 5,120 bytes at 50e9/s; 64 tokens * 1,000 * 10 * 4 * 128 * 2 at 5e12/s
    assert cost.attention_s == pytest.approx(4.096e-4 + 1.31072e-4)
    assert (cost.states_s, cost.links_s) == (0, 0)
    assert cost.total_s == pytest.approx(1.1e-4 + 7.216e-3 + 5.40672e-4)


def test_tensor_parallel_divides_and_pays_for_all_reduces():
    one = pass_cost(MODEL, GPU, HALVES, Load(2, 484), 16)
    two, four = (pass_cost(MODEL, GPU, HALVES, Load(2, 484, num_gpus=n), 16) for n in (2, 4))
    assert four.weights_s == pytest.approx(one.weights_s / 4)
    assert four.latency_s == one.latency_s
    assert two.attention_s == pytest.approx(one.attention_s / 2)
    # KV splits by its two heads only: 2 requests * 500 tokens * 5,120 bytes / 2 at 50e9/s; FLOPs by all four
    assert four.attention_s == pytest.approx(5.12e-5 + 32 * 500 * 10 * 4 * 128 * 2 / 5e12 / 4)
    # 20 all-reduces of 32 tokens * 256 * 2 bytes, of which 2 * 3/4 are sent, and a gathering of 32 * 39,062.5
    # logits of 2 bytes, of which 3/4 are, at half of 10e9/s, 5 us each at least
    links = [20 * (5e-6 + 1.5 * 16_384 / 5e9), 5e-6 + 0.75 * 2_500_000 / 5e9]
    assert four.links_s == pytest.approx(sum(links))
    draft = pass_cost(PAIR.drafter, GPU, HALVES, Load(2, 484, num_gpus=4), 16)
    assert draft.links_s == pytest.approx(links[0] * 2 / 10)  # two layers, logits stay where they are


def test_mla_keeps_its_latent_on_every_gpu():
    kimi, qwen = PAIRS["Kimi K2.5"].target, PAIRS["Qwen3-8B"].target
    assert kimi.kv_bytes_per_token(8) == kimi.kv_bytes_per_token() == 61 * 576 * 2
    assert qwen.kv_bytes_per_token(8) == qwen.kv_bytes_per_token() / 8


def test_a_window_bounds_what_is_read():
    windowed = replace(MODEL, attention=(AttentionShape(10, 4, 64, 64, 512, num_kv_heads=2, window=128),))
    near, far = (pass_cost(windowed, GPU, HALVES, Load(1, context), 1) for context in (200, 100_000))
    assert near == far
    assert far.attention_s < pass_cost(MODEL, GPU, HALVES, Load(1, 100_000), 1).attention_s


def test_recurrent_states_are_written_for_every_token():
    hybrid = replace(MODEL, recurrent=RecurrentShape(num_layers=6, state_bytes=1e6))
    cost = pass_cost(hybrid, GPU, HALVES, Load(3, 100), 16)
    assert cost.states_s == pytest.approx(3 * 16 * 6e6 / 10e9)


def test_expected_distinct_experts():
    experts = ExpertShape(1, num_experts=8, experts_per_token=2, weights=1, bytes_per_weight=2)
    assert experts.expected_distinct(1) == pytest.approx(2)
    assert experts.expected_distinct(2) == pytest.approx(8 * (1 - 0.75**2))  # 3.5: half a pair shared
    assert experts.expected_distinct(1000) == pytest.approx(8)
    mixture = replace(MODEL, experts=ExpertShape(10, 8, 2, 1e6, 0.5))
    assert mixture.weight_bytes_read(2) == pytest.approx(2.2e8 + 10 * 3.5 * 1e6 * 0.5)
    assert mixture.active_weights == pytest.approx(1.1e8 + 10 * 2e6)


def test_a_round_adds_draft_verify_and_tree():
    load = Load(1, 200)
    plain = round_cost(PAIR, GPU, HALVES, load, PLAIN)
    assert plain.draft is None
    assert plain.total_s == pytest.approx(pass_cost(MODEL, GPU, HALVES, load, 1).total_s)
    drafted = round_cost(PAIR, GPU, HALVES, load, tree(31))
    verify = pass_cost(MODEL, GPU, HALVES, load, 32).total_s
    draft = pass_cost(PAIR.drafter, GPU, HALVES, load, 16).total_s
    assert drafted.device_s == pytest.approx(draft + verify + 2e-5)
    assert speed_up(3.0, plain, drafted) == pytest.approx(3.0 * plain.total_s / drafted.total_s)
    assert speed_up(break_even_length(plain, drafted), plain, drafted) == pytest.approx(1)


def test_the_host_bounds_a_round_or_adds_to_it():
    load = Load(8, 200)
    slow = replace(HALVES, round_host_s=1.0)
    overlapped = round_cost(PAIR, GPU, slow, load, CHAIN)
    assert overlapped.total_s == pytest.approx(1.0 + 8 * 1e-5)
    added = round_cost(PAIR, GPU, replace(slow, overlaps_host=False), load, CHAIN)
    assert added.total_s == pytest.approx(overlapped.total_s + overlapped.device_s)


def test_small_trees_share_the_chains_width():
    widths = [PAIR.verify_width(plan) for plan in (PLAIN, CHAIN, tree(4), tree(15), tree(16), tree(63))]
    assert widths == [1, 16, 16, 16, 17, 64]


def test_a_shorter_block_has_a_narrower_chain_and_tree():
    kimi = PAIRS["Kimi K2.5"]
    plans = (kimi.chain, kimi.narrow_tree, tree(8))
    assert [str(plan) for plan in plans] == ["chain:7", "tree:7", "tree:8"]
    assert [kimi.verify_width(plan) for plan in plans] == [8, 8, 9]


@given(
    budget=st.integers(1, 255), more=st.integers(1, 256), requests=st.integers(1, 128),
    context=st.integers(0, 100_000), gpus=st.sampled_from([1, 2, 8]),
    target=st.sampled_from(sorted(PAIRS)), gpu=st.sampled_from(sorted(GPUS)),
)  # fmt: skip
def test_more_work_never_costs_less(budget, more, requests, context, gpus, target, gpu):
    pair, load = PAIRS[target], Load(requests, context, gpus)

    def seconds(plan, load=load):
        return round_cost(pair, GPUS[gpu], HALVES, load, plan).total_s

    assert seconds(tree(budget)) <= seconds(tree(budget + more))
    assert seconds(PLAIN) < seconds(tree(budget))
    assert seconds(tree(budget)) < seconds(tree(budget), replace(load, num_requests=requests + more))
    assert seconds(tree(budget)) <= seconds(tree(budget), replace(load, context_tokens=context + more))


@pytest.mark.parametrize("name", ["bandwidth_share", "flop_share", "state_bandwidth_share"])
def test_a_larger_share_is_faster(name):
    better = replace(HALVES, **{name: 0.9})
    pair, load = PAIRS["Qwen3.6-27B"], Load(4, 1000)
    before, after = (round_cost(pair, GPU, c, load, tree(31)).total_s for c in (HALVES, better))
    assert after < before


@pytest.mark.parametrize(
    ("target", "billions", "active", "gigabytes"),
    [
        ("Qwen3-4B", 4.02, 4.02, 8.0), ("Qwen3-8B", 8.19, 7.57, 16.4), ("Qwen3-Coder-30B-A3B", 30.5, 3.3, 61),
        ("Qwen3-32B", 32.76, 31.98, 65.5), ("Qwen3-235B-A22B", 235.1, 22, 470),
        ("GLM-4.5-Air", 106, 12, 213.6),
        ("Qwen3.6-27B", 26.9, 25.6, 53.8), ("gpt-oss-120b", 116.8, 5.13, 65.2), ("Kimi K2.5", 1026, 32, 594),
    ],
)  # fmt: skip
def test_the_catalogue_has_the_published_sizes(target, billions, active, gigabytes):
    model = PAIRS[target].target
    experts = model.experts
    routed = experts.num_layers * experts.num_experts * experts.weights if experts else 0
    heads = model.head_weights if model.ties_embedding else 2 * model.head_weights
    assert (model.dense_weights + heads + routed) / 1e9 == pytest.approx(billions, rel=0.01)
    assert model.active_weights / 1e9 == pytest.approx(active, rel=0.09)
    assert model.memory_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_kv_of_a_token():
    assert PAIRS["Qwen3-8B"].target.kv_bytes_per_token() == 36 * 2 * 8 * 128 * 2
    assert PAIRS["Qwen3.6-27B"].target.kv_bytes_per_token() == 16 * 2 * 4 * 256 * 2


def test_memory_of_a_request():
    hybrid = DraftPair(replace(MODEL, recurrent=RecurrentShape(6, 1e6)), PAIR.drafter)
    vocabulary = 1e7 / 256
    expected = (1000 + 32) * (5120 + 5120) + 6e6 * 33 + 32 * vocabulary * 4
    assert request_bytes(hybrid, tree(31), 1000) == pytest.approx(expected)
    halved = (1000 + 32) * (5120 + 5120) / 2 + 6e6 * 33 / 4 + 32 * vocabulary * 4
    assert request_bytes(hybrid, tree(31), 1000, num_gpus=4) == pytest.approx(halved)


def test_room():
    # Weights are 2.2e8 bytes, the embedding and the drafter's layers 2e7 each; a request is request_bytes.
    weights, request = 2.6e8, request_bytes(PAIR, tree(31), 1000)
    tight = replace(GPU, memory_bytes=2 * (weights + 3 * request) * 1.001)
    assert has_room(PAIR, tight, Load(3, 1000), tree(31), memory_share=0.5)
    assert not has_room(PAIR, tight, Load(4, 1000), tree(31), memory_share=0.5)
    assert has_room(PAIR, tight, Load(4, 1000, num_gpus=2), tree(31), memory_share=0.5)


def test_predictions_are_a_cost_table_for_the_policy():
    plans = [PLAIN, CHAIN, tree(16), tree(64)]
    table = predicted_costs(PAIRS["Qwen3-8B"], GPUS["H200"], HALVES, Load(1, 1000), plans)
    round_s = round_cost(PAIRS["Qwen3-8B"], GPUS["H200"], HALVES, Load(1, 1000), tree(64)).total_s
    assert table.cost_ms(tree(64)) == pytest.approx(1e3 * round_s)
    assert NodeBudgetPolicy(table, draft_depth=15).choose() in plans


@pytest.mark.parametrize(
    "wrong", [{"num_requests": 0}, {"context_tokens": -1}, {"num_gpus": 0}, {"num_gpus": 1.5}]
)
def test_loads_that_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}=.* is not allowed: "):
        Load(**wrong)


def test_a_width_is_at_least_one():
    with pytest.raises(ConfigError, match="width=0"):
        pass_cost(MODEL, GPU, HALVES, Load(), 0)


def test_a_gpu_without_fp8_computes_in_bfloat16():
    assert GPUS["A100 80GB"].flops_per_s("fp8") == GPUS["A100 80GB"].bf16_flops_per_s
    assert GPUS["H200"].flops_per_s("fp8") == 2 * GPUS["H200"].flops_per_s("bf16")
