"""A random pair of a tiny shape: known greedy text in any number format, and a drafter that loads."""

import json
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import make_random_pair
from ddtree.draft.dflash_config import DFlashConfig
from make_random_pair import QWEN3_8B, drafter_config, write_pair
from planted_acceptance import Walk
from tiny_models import load_tiny_drafter

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("random"), SHAPE, dtype="float32", reserved_tokens=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_token_is_followed_by_the_walk_with_a_wide_margin(pair, dtype):
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=dtype).eval()
    following = torch.from_numpy(Walk.read(pair[0]).table())
    tokens = torch.randperm(304, generator=torch.Generator().manual_seed(0)).view(2, 152)
    with torch.inference_mode():
        logits = model(tokens).logits.float()
    best = logits.topk(2, dim=-1)
    assert torch.equal(best.indices[..., 0], following[tokens])
    assert (best.values[..., 0] - best.values[..., 1]).min() > 1.0


def test_the_drafter_loads_for_the_target(pair):
    target = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    drafter = load_tiny_drafter(pair[1], target, max_positions=64)
    assert drafter.block_size == 16
    assert drafter.config.num_layers == 5


def test_the_shape_of_qwen3_8b_taps_the_layers_of_its_drafter():
    config = DFlashConfig.from_dict(drafter_config(QWEN3_8B, "bfloat16", 5, 16, 1))
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.num_target_layers, config.vocab_size, config.mask_token_id) == (36, 151_936, 151_933)


def test_weights_are_split_and_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(make_random_pair, "SHARD_BYTES", 100_000)
    target, _ = write_pair(tmp_path, SHAPE, dtype="float32", reserved_tokens=16, seed=1)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    sizes = 0
    for file in files:
        with safe_open(target / file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                assert index["weight_map"][name] == file
                sizes += tensors.get_tensor(name).nbytes
    assert index["metadata"]["total_size"] == sizes
    before = (target / files[0]).stat().st_mtime_ns
    write_pair(tmp_path, SHAPE, dtype="float32", reserved_tokens=16, seed=1)
    assert (target / files[0]).stat().st_mtime_ns == before
    write_pair(tmp_path, SHAPE, dtype="float32", reserved_tokens=16, seed=2)
    assert (target / files[0]).stat().st_mtime_ns > before
    assert Walk.read(target).seed == 2


def test_the_program_writes_a_pair_of_the_shape_it_is_given(tmp_path, monkeypatch, capsys):
    flags = [text for name, value in SHAPE.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(
        sys, "argv", ["make_random_pair.py", "--folder", str(tmp_path), "--block-size", "8", *flags]
    )
    make_random_pair.main()
    assert str(tmp_path) in capsys.readouterr().out
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["block_size"] == 8
    assert json.loads((tmp_path / "target" / "config.json").read_text())["hidden_size"] == 64
