"""Mask rules against loops over single pairs, and FlexAttention against the dense mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from ddtree.train.attention import (
    attend,
    block_rule,
    default_kind,
    dense_mask,
    document_rule,
    draft_mask,
    sliding_rule,
    target_mask,
)
from ddtree.train.packed_batch import PackedBatch
from packed_kit import pack, random_conversations

ROW_TOKENS, BLOCK_SIZE = 24, 4
CPU = torch.device("cpu")


@pytest.fixture
def batch() -> PackedBatch:
    """Two rows: conversations of 9 and 11 tokens, and of 5, 6 and 7; the rest is padding."""
    a, b, c, d, e = random_conversations((9, 11, 5, 6, 7), vocab_size=50)
    return pack([[a, b], [c, d, e]], ROW_TOKENS, [[3, 9, 15], [6, 11, 23]], BLOCK_SIZE - 1)


def document_of(batch: PackedBatch, row: int, token: int) -> int:
    return int(batch.document_starts[row, token])


def test_a_token_sees_what_came_before_in_its_conversation(batch):
    mask = target_mask(batch, "dense")
    assert mask.shape == (2, 1, ROW_TOKENS, ROW_TOKENS)
    for row in range(2):
        for query in range(ROW_TOKENS):
            for key in range(ROW_TOKENS):
                same = document_of(batch, row, query) == document_of(batch, row, key)
                assert mask[row, 0, query, key] == (same and key <= query), (row, query, key)


def test_a_sliding_window_counts_the_token_itself(batch):
    mask = target_mask(batch, "dense", sliding_window=3)
    assert mask[0, 0, 15].nonzero().flatten().tolist() == [13, 14, 15]
    assert mask[0, 0, 10].nonzero().flatten().tolist() == [9, 10]


def test_a_block_sees_its_conversation_before_the_root_and_itself(batch):
    mask = draft_mask(batch, BLOCK_SIZE, "dense")
    num_anchors = batch.anchors.shape[1]
    assert mask.shape == (2, 1, num_anchors * BLOCK_SIZE, ROW_TOKENS + num_anchors * BLOCK_SIZE)
    for row in range(2):
        for query in range(num_anchors * BLOCK_SIZE):
            anchor = int(batch.anchors[row, query // BLOCK_SIZE])
            context = list(range(document_of(batch, row, anchor), anchor))
            first = ROW_TOKENS + query // BLOCK_SIZE * BLOCK_SIZE
            seen = mask[row, 0, query].nonzero().flatten().tolist()
            assert seen == context + list(range(first, first + BLOCK_SIZE)), (row, query)


def test_every_query_sees_something(batch):
    assert target_mask(batch, "dense").any(-1).all()
    assert draft_mask(batch, BLOCK_SIZE, "dense").any(-1).all()


@pytest.mark.parametrize("name", ["document", "sliding", "block"])
def test_flex_reads_a_rule_as_the_dense_mask_does(batch, name):
    rules = {
        "document": document_rule(batch.document_starts),
        "sliding": sliding_rule(batch.document_starts, 4),
        "block": block_rule(batch.anchors, batch.document_starts, ROW_TOKENS, BLOCK_SIZE),
    }
    flex = create_mask(rules[name], 2, 1, 12, 36 if name == "block" else 12, device="cpu")
    dense = dense_mask(rules[name], 2, 12, flex.shape[-1], CPU)
    assert torch.equal(flex, dense)


def test_grouped_query_attention_pairs_heads_in_order(batch):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 6, ROW_TOKENS, 8, generator=generator)
    keys, values = torch.randn(2, 2, 2, ROW_TOKENS, 8, generator=generator)
    mask = target_mask(batch, "dense")
    output = attend(queries, keys, values, mask)
    for head in range(6):
        scores = queries[:, head] @ keys[:, head // 3].transpose(1, 2) / 8**0.5
        scores = scores.masked_fill(~mask[:, 0], float("-inf"))
        torch.testing.assert_close(output[:, head], scores.softmax(-1) @ values[:, head // 3])


def test_new_rules_of_every_step_compile_once(batch):
    compilations = []

    def count(graph, _inputs):
        compilations.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, k, mask: flex_attention(q, k, k, block_mask=mask),
                             backend=count, dynamic=False)  # fmt: skip
    queries, keys = torch.randn(2, 1, 12, 16), torch.randn(2, 1, 36, 16)
    for shift in range(3):
        rule = block_rule(batch.anchors - shift, batch.document_starts, ROW_TOKENS, BLOCK_SIZE)
        compiled(queries, keys, uncompiled_block_mask(rule, 2, 12, 36))
    assert len(compilations) == 1


def uncompiled_block_mask(rule, rows: int, num_queries: int, num_keys: int) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(rule, rows, None, num_queries, num_keys, device="cpu")


def test_the_device_decides_the_kind():
    assert default_kind(CPU) == "dense"
    assert default_kind(torch.device("cuda", 1)) == "flex"


@pytest.mark.gpu
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (4, 4)])
def test_flex_gives_the_dense_output_and_gradients(num_heads, num_kv_heads):
    device, row_tokens, block_size = torch.device("cuda"), 256, 16
    conversations = random_conversations((100, 90, 200), vocab_size=50)
    anchors = [[5, 20, 40, 60, 99, 100, 120, 150, 170, 185], [3, 20, 50, 90, 120, 150, 170, 190, 199, 230]]
    batch = pack([conversations[:2], conversations[2:]], row_tokens, anchors, block_size - 1).to(device)
    num_queries = 10 * block_size
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((num_heads, num_queries), (num_kv_heads, row_tokens + num_queries))
    results = {}
    queries = torch.randn(2, *shapes[0], 64, device=device, generator=generator, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 2, *shapes[1], 64, device=device, generator=generator, dtype=torch.bfloat16)
    for kind in ("dense", "flex"):
        inputs = [x.clone().requires_grad_() for x in (queries, keys, values)]
        output = attend(*inputs, draft_mask(batch, block_size, kind))
        results[kind] = [output, *torch.autograd.grad(output.float().square().sum(), inputs)]
    for dense, flex in zip(results["dense"], results["flex"], strict=True):
        # Both round to bfloat16 (8 bits) at different places.
        torch.testing.assert_close(flex, dense, rtol=0.05, atol=0.03 * dense.float().std().item() + 0.02)
