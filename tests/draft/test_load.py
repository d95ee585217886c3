"""Checkpoints that load, that are broken, and that were made for another target."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ddtree
from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.load import TargetInfo, check_drafter_fits, load_drafter, read_weights
from ddtree.errors import CheckpointError, DrafterMismatchError, UnsupportedModelError
from tiny_models import load_tiny_drafter, target_info, tiny_llama, write_tiny_drafter

TARGET = tiny_llama()
SHIPPED = Path(ddtree.__path__[0]) / "data" / "drafters" / "smollm2-135m-dflash-b16"
SHIPPED_TARGET = TargetInfo(
    hidden_size=576, num_layers=30, vocab_size=49152, model_type="llama", max_positions=8192
)
Q_PROJ = "layers.1.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_drafter(tmp_path / "drafter", TARGET)


def edit_weights(path: Path, change) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors")


def shard(path: Path) -> dict[str, str]:
    """Split the checkpoint's one file in two with an index; returns the weight map."""
    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {
        name: f"model-{1 + 2 * i // len(names):05d}-of-00002.safetensors" for i, name in enumerate(names)
    }
    for file in set(weight_map.values()):
        save_file({name: weights[name] for name in names if weight_map[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_shards_equal_the_whole_file(checkpoint: Path) -> None:
    config = DFlashConfig.from_path(checkpoint)
    whole = read_weights(checkpoint, config)
    assert len(set(shard(checkpoint).values())) == 2
    assert same(read_weights(checkpoint, config), whole)


def test_prefix_of_a_wrapper_and_rotary_caches_are_ignored(checkpoint: Path) -> None:
    config = DFlashConfig.from_path(checkpoint)
    plain = read_weights(checkpoint, config)
    prefixed = {f"model.{name}": weight for name, weight in plain.items()}
    prefixed["model.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(prefixed, checkpoint / "model.safetensors")
    assert same(read_weights(checkpoint, config), plain)


def test_missing_shard_is_named(checkpoint: Path) -> None:
    name = max(shard(checkpoint).values())
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name}, named by model.safetensors.index.json, is missing"):
        load_tiny_drafter(checkpoint, TARGET)


def test_shard_outside_the_folder_is_refused(checkpoint: Path) -> None:
    shard(checkpoint)
    write_tiny_drafter(checkpoint.parent / "other", TARGET)
    index = {"weight_map": {"norm.weight": "../other/model.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="is missing"):
        load_tiny_drafter(checkpoint, TARGET)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"norm.weight": 1}}])
def test_index_without_weight_map(index: dict, checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load_tiny_drafter(checkpoint, TARGET)


def test_tensor_in_two_shards(checkpoint: Path) -> None:
    weight_map = shard(checkpoint)
    file = max(weight_map.values())
    weights = load_file(checkpoint / file)
    weights["fc.weight"] = torch.zeros(2)
    save_file(weights, checkpoint / file)
    with pytest.raises(CheckpointError, match=r"tensor fc\.weight is in .* twice"):
        load_tiny_drafter(checkpoint, TARGET)


def test_no_weights_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"neither model.safetensors nor .*; only safetensors are read"):
        load_tiny_drafter(checkpoint, TARGET)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        load_tiny_drafter(tmp_path / "nowhere", TARGET)


@pytest.mark.parametrize("keep", [0, 7, 1000, -1])
def test_truncated_file_is_named(keep: int, checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole safetensors file"):
        load_tiny_drafter(checkpoint, TARGET)


def test_missing_tensor_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda weights: weights.pop(Q_PROJ))
    with pytest.raises(CheckpointError, match=f"{Q_PROJ} is missing"):
        load_tiny_drafter(checkpoint, TARGET)


def test_extra_tensor_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda weights: weights.update({"layers.3.mlp.up_proj.weight": torch.ones(2)}))
    with pytest.raises(
        CheckpointError, match=r"layers\.3\.mlp\.up_proj\.weight is not part of a DFlash drafter"
    ):
        load_tiny_drafter(checkpoint, TARGET)


def test_bias_that_the_config_does_not_announce(checkpoint: Path) -> None:
    edit_weights(
        checkpoint, lambda weights: weights.update({"layers.0.self_attn.q_proj.bias": torch.ones(64)})
    )
    with pytest.raises(CheckpointError, match=r"q_proj\.bias is not part"):
        load_tiny_drafter(checkpoint, TARGET)


def test_misshapen_tensor_is_named_with_both_shapes(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda weights: weights.update({"fc.weight": torch.ones(48, 48)}))
    with pytest.raises(
        CheckpointError, match=r"fc.weight has shape \[48, 48\], its config.json implies \[48, 96\]"
    ):
        load_tiny_drafter(checkpoint, TARGET)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.float64])
def test_wrong_dtype_is_named(dtype: torch.dtype, checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda weights: weights.update({Q_PROJ: torch.ones(64, 48).to(dtype)}))
    with pytest.raises(CheckpointError, match=f"{Q_PROJ} is {dtype}, not bfloat16"):
        load_tiny_drafter(checkpoint, TARGET)


def test_many_problems_are_cut_short(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda weights: [weights.pop(name) for name in list(weights)[:9]])
    with pytest.raises(CheckpointError, match=r"and 4 more$"):
        load_tiny_drafter(checkpoint, TARGET)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("prefix_gru.weight_ih_l0", "a Domino drafter"),
        ("embed_proj.0.weight", "a Domino drafter"),
        ("candidate_selector.predecessor_codebook", "a DFlash2 drafter"),
        ("lilicorr.left.weight", "a LiLiCorr drafter"),
        ("markov_head.markov_w1.weight", "a DSpark drafter"),
        ("model.embed_tokens.weight", "a drafter with an embedding of its own"),
        ("lm_head.weight", "a drafter with an output head of its own"),
    ],
)
def test_tensors_of_other_kinds_are_refused_by_name(name: str, kind: str, checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda weights: weights.update({name: torch.ones(2)}))
    with pytest.raises(UnsupportedModelError, match=f"belongs to {kind}"):
        load_tiny_drafter(checkpoint, TARGET)


def test_fitting_drafter_has_no_reasons(checkpoint: Path) -> None:
    assert check_drafter_fits(DFlashConfig.from_path(checkpoint), target_info(TARGET)) == []


@pytest.mark.parametrize(
    ("difference", "text"),
    [
        (
            {"hidden_size": 64},
            "hidden_size is 48, the target's 64 (fc reads 96 features, 2 taps of the target give 128)",
        ),
        ({"vocab_size": 212}, "vocab_size is 211, the target's 212"),
        ({"num_layers": 5}, "num_target_layers is 4, the target has 5"),
    ],
)  # fmt: skip
def test_each_difference_is_a_reason(difference: dict, text: str, checkpoint: Path) -> None:
    info = replace(target_info(TARGET), **difference)
    assert check_drafter_fits(DFlashConfig.from_path(checkpoint), info) == [text]


def test_num_target_layers_may_be_absent(tmp_path: Path) -> None:
    path = write_tiny_drafter(tmp_path, TARGET, num_target_layers=None)
    assert check_drafter_fits(DFlashConfig.from_path(path), replace(target_info(TARGET), num_layers=9)) == []


def test_refusal_lists_all_differences(checkpoint: Path) -> None:
    info = TargetInfo(hidden_size=64, num_layers=2, vocab_size=3, model_type="qwen3", max_positions=512)
    with pytest.raises(DrafterMismatchError) as caught:
        load_drafter(
            checkpoint,
            info,
            lambda tokens: tokens,
            lambda hidden: hidden,
            torch.float32,
            torch.device("cpu"),
            512,
        )
    text = str(caught.value)
    for part in (
        "does not fit the target (qwen3)",
        "hidden_size is 48",
        "target_layer_ids [2] are out of range, the target has 2 layers",
        "num_target_layers is 4, the target has 2",
        "vocab_size is 211, the target's 3",
        "mask_token_id 3 is outside the target's 3 tokens",
        "use a drafter that was trained for this target, or none",
    ):
        assert part in text


def test_context_past_the_drafters_positions_is_logged(checkpoint: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="ddtree.draft.load"):
        load_tiny_drafter(checkpoint, TARGET, max_positions=512)
        assert not caplog.records
        load_tiny_drafter(checkpoint, TARGET, max_positions=513)
    assert "513 tokens pass the drafter's max_position_embeddings=512" in caplog.text


def test_shipped_drafter_loads() -> None:
    table = torch.zeros(49152, 8)
    drafter = load_drafter(
        SHIPPED, SHIPPED_TARGET, lambda tokens: table[tokens], lambda hidden: hidden @ table.T,
        torch.bfloat16, torch.device("cpu"), 1024,
    )  # fmt: skip
    assert (drafter.block_size, drafter.draft_depth) == (16, 15)
    assert drafter.target_layer_ids == (1, 7, 14, 20, 27)
    assert drafter.config.mask_token_id == 3
    assert drafter.new_context(32).kv_data.shape == (4, 2, 3, 32, 64)
