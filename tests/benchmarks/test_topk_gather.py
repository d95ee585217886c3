"""Bytes that are counted, and both exchanges over two ranks on the CPU."""

import json
import sys

import pytest
import torch

import topk_gather
from ddtree.tree import DraftMarginals
from topk_gather import logits_bytes, marginals_of_logits, topk_bytes


@pytest.mark.parametrize(("ranks", "batch", "candidates"), [(2, 1, 15), (4, 16, 32)])
def test_bytes_are_those_of_what_is_handed_over(ranks, batch, candidates):
    # float32 scores and a log-sum a position, int64 ids
    assert topk_bytes(ranks, batch, 15, candidates) == batch * 15 * (4 * (candidates + 1) + 8 * candidates)
    assert logits_bytes(ranks, batch, 15, 151_936) == batch * 15 * 151_936 // ranks * 2


def test_gathered_logits_give_the_candidates_of_the_whole_vocabulary():
    class Group:
        world_size = 2

        def all_gather_into_tensor(self, output, input):
            output.copy_(torch.cat((input, other)))

    whole = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    mine, other = whole[..., :20].contiguous(), whole[..., 20:].contiguous()
    made, expected = marginals_of_logits(mine, 5, Group()), DraftMarginals.from_logits(whole, 5)
    assert torch.equal(made.tokens, expected.tokens)
    assert torch.equal(made.log_probs, expected.log_probs)


def test_two_ranks_measure_every_case(monkeypatch, tmp_path, capsys):
    argv = ["topk_gather.py", "--batches", "1", "--candidates", "4", "--vocab-size", "512"]
    monkeypatch.setattr(sys, "argv", [*argv, "--output", str(tmp_path / "made.json")])
    topk_gather.main()
    made = json.loads((tmp_path / "made.json").read_text())
    assert (made["ranks"], made["backend"], made["vocab_size"]) == (2, "gloo", 512)
    [row] = made["rows"]
    assert (row["batch"], row["candidates"]) == (1, 4)
    assert row["logits_sent_bytes"] == 15 * 256 * 2
    for way in ("topk", "logits"):
        assert row[f"{way}_exchange_us"] > 0
        assert row[f"{way}_step_us"] > 0
    assert json.loads(capsys.readouterr().out)["rows"] == made["rows"]
