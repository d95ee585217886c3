"""Padded checkpoints compute what the plain ones compute, and load where those load."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from ddtree.models import resolve_drafter, resolve_target
from pad_heads import pad_checkpoint, pad_pair, padded_config, padded_weight
from tiny_models import load_tiny_drafter, tiny_llama, tiny_qwen3, write_tiny_drafter

TOLERANCE = 1e-5


def logits_of(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model.config, model(tokens).logits


@pytest.mark.parametrize(("make", "kv_heads", "heads"), [(tiny_llama, 4, 12), (tiny_qwen3, 3, 6)])
def test_a_padded_target_has_the_same_logits(tmp_path, make, kv_heads, heads):
    make(seed=2).save_pretrained(tmp_path / "plain")
    padded = pad_checkpoint(tmp_path / "plain", tmp_path / "padded", kv_heads)
    tokens = torch.randint(0, 211, (2, 30), generator=torch.Generator().manual_seed(1))
    (_, plain_logits), (config, logits) = logits_of(tmp_path / "plain", tokens), logits_of(padded, tokens)
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert torch.allclose(logits, plain_logits, atol=TOLERANCE, rtol=0)


def test_a_padded_drafter_has_the_same_logits(tmp_path):
    from ddtree.layers.window import Window

    target = tiny_qwen3(seed=4)
    folder = write_tiny_drafter(tmp_path / "plain", target, seed=5)
    padded = pad_checkpoint(folder, tmp_path / "padded", 4)
    made = []
    for path in (folder, padded):
        drafter = load_tiny_drafter(path, target)
        context = drafter.new_context(32)
        width = drafter.config.num_taps * drafter.config.hidden_size
        taps = torch.randn(9, width, generator=torch.Generator().manual_seed(3))
        with torch.inference_mode():
            drafter.append(context, taps, Window.at(0, torch.arange(9), None))
            made.append(drafter.draft_logits(torch.tensor([5]), context, drafter.draft_window(9)))
    assert json.loads((padded / "config.json").read_text())["num_attention_heads"] == 8
    assert torch.allclose(*made, atol=TOLERANCE, rtol=0)


def test_the_shipped_pair_can_be_shared_by_ranks(tmp_path):
    from ddtree.draft.dflash_config import DFlashConfig
    from ddtree.draft.load import read_weights

    target, drafter = pad_pair("smollm2-135m", "auto", tmp_path, 4)
    tokens = torch.randint(0, 49_152, (1, 24), generator=torch.Generator().manual_seed(1))
    _, plain_logits = logits_of(resolve_target("smollm2-135m"), tokens)
    config, logits = logits_of(target, tokens)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (12, 4, 64)
    assert torch.allclose(logits, plain_logits, atol=TOLERANCE, rtol=0)
    shape = DFlashConfig.from_path(drafter)
    weights = read_weights(drafter, shape)  # refuses what config.json does not imply
    plain = resolve_drafter("auto", "smollm2-135m")
    before = read_weights(plain, DFlashConfig.from_path(plain))
    assert all(weight.norm() == before[name].norm() for name, weight in weights.items())
    assert (target / "tokenizer.json").is_file()
    assert not (target / "manifest.json").exists()


def test_new_heads_are_whole_groups_of_zeros():
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 2, "hidden_size": 18}
    padded = padded_config(config, 4)
    assert (padded["num_attention_heads"], padded["num_key_value_heads"], padded["head_dim"]) == (12, 4, 2)
    rows = padded_weight("layers.0.self_attn.k_proj.weight", torch.ones(6, 18), padded)
    assert rows.shape == (8, 18)
    assert not rows[6:].any()
    columns = padded_weight("layers.0.self_attn.o_proj.weight", torch.ones(18, 18), padded)
    assert columns.shape == (18, 24)
    assert not columns[:, 18:].any()
    assert padded_weight("layers.0.self_attn.q_norm.weight", torch.ones(2), padded).shape == (2,)
    assert (
        padded_config({"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8}, 2)["head_dim"]
        == 2
    )
    with pytest.raises(SystemExit, match="has 3 already"):
        padded_config(config, 2)
