"""What a drafter's config.json may say, and the texts of the refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.errors import CheckpointError, UnsupportedModelError
from tiny_models import tiny_drafter_config, tiny_llama

TARGET = tiny_llama()


def parse(nested: dict | None = None, **overrides) -> DFlashConfig:
    config = tiny_drafter_config(TARGET, **overrides)
    config["dflash_config"] = config["dflash_config"] | (nested or {})
    return DFlashConfig.from_dict(config)


def test_reads_every_field() -> None:
    config = parse(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=7)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (48, 80, 211)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.block_size, config.draft_depth, config.mask_token_id) == (8, 7, 3)
    assert (config.target_layer_ids, config.num_taps, config.num_target_layers) == ((0, 2), 2, 4)
    assert config.layer_types == ("full_attention", "sliding_attention")
    assert config.sliding_windows == (None, 7)
    assert config.causal_layers == (False, True)
    assert (config.rms_norm_eps, config.attention_bias, config.max_position_embeddings) == (1e-6, False, 512)


def test_own_fields_may_stand_at_the_top_level() -> None:
    top = parse(dflash_config={}, mask_token_id=3, target_layer_ids=[0, 2])
    assert top == parse()


def test_nested_field_wins_over_the_top_level() -> None:
    assert parse({"block_size": 4}).block_size == 4
    assert parse({"num_target_layers": 9}).num_target_layers == 9


def test_token_zero_can_be_the_mask() -> None:
    assert parse({"mask_token_id": 0}).mask_token_id == 0


def test_defaults_of_optional_fields() -> None:
    config = parse(layer_types=None, num_target_layers=None, head_dim=None, num_key_value_heads=None,
                   rope_theta=None, rms_norm_eps=None, max_position_embeddings=None,
                   attention_bias=None, hidden_act=None)  # fmt: skip
    assert config.layer_types == ("full_attention",) * 3
    assert config.num_target_layers is None
    assert (config.head_dim, config.num_kv_heads) == (12, 4)
    assert (config.rope.theta, config.rms_norm_eps, config.max_position_embeddings) == (10000.0, 1e-6, 32768)


@pytest.mark.parametrize("is_causal", [True, False])
def test_is_causal_decides_for_all_layers(is_causal: bool) -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    config = parse(layer_types=types, sliding_window=5, is_causal=is_causal)
    assert config.causal_layers == (is_causal,) * 3


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_old_and_new_rope_names_mean_the_same(fields: dict) -> None:
    rope = parse(**fields).rope
    assert (rope.theta, rope.rope_type, rope.scaling) == (5e5, "linear", (("factor", 2.0),))


def test_rope_dim_of_a_whole_head_outranks_a_copied_partial_factor() -> None:
    rule = {"rope_type": "default", "rope_theta": 1e4, "rope_dim": 16, "partial_rotary_factor": 0.25}
    assert parse(rope_parameters=rule).rope.rope_type == "default"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"hidden_size": None}, "no hidden_size: a whole number of 1 or more is required"),
        ({"hidden_size": "48"}, "hidden_size='48': it must be a whole number of 1 or more"),
        ({"intermediate_size": 0}, "intermediate_size=0: it must be a whole number of 1 or more"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: it must be"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"block_size": None}, "no block_size: a whole number from 2 to 256 is required"),
        ({"block_size": 1}, "block_size=1: it must be a whole number from 2 to 256"),
        ({"block_size": 257}, "block_size=257: it must be a whole number from 2 to 256"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers=1025: it must be a whole number from 1 to 1024"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers=1000000"),
        ({"vocab_size": 10**5000}, "vocab_size=a number beyond all limits"),
        ({"rope_theta": 10**400}, r"rope_theta=1000.*\.\.\.: it must be a number above 0"),
        ({"architectures": 0}, r"architectures=0: it must be \['DFlashDraftModel'\]"),
        ({"architectures": [1]}, r"architectures=\[1\]: it must be"),
        ({"architectures": "DFlashDraftModel"}, "architectures='DFlashDraftModel': it must be"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "32"}},
            "yarn rope beta_fast='32': it must be a number",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: it must be a divisor of num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15: it must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0: it must be a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: it must be a number above 0"),
        ({"attention_bias": "no"}, "attention_bias='no': it must be true or false"),
        ({"is_causal": 1}, "is_causal=1: it must be true or false"),
        ({"layer_types": ["full_attention"]}, r"it must be 3 entries \(num_hidden_layers\)"),
        ({"layer_types": ["linear_attention"] * 3}, "each full_attention or sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window"),
        ({"num_target_layers": 0}, "num_target_layers=0"),
        ({"rope_theta": -1}, "rope_theta=-1: it must be a number above 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling='yarn': it must be an object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn rope factor=None: it must be a number above 0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 rope low_freq_factor=None"),
        ({"dflash_config": [1]}, r"dflash_config=\[1\]: it must be an object"),
        ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids=None: it must be a list"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "no mask_token_id"),
    ],
)
def test_missing_and_malformed_fields(overrides: dict, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        DFlashConfig.from_dict(tiny_drafter_config(TARGET, **overrides))


@pytest.mark.parametrize("ids", [[], "1", [1.0], [True], [-1], [2, 0], [1, 1]])
def test_malformed_target_layer_ids(ids: object) -> None:
    with pytest.raises(CheckpointError, match="target_layer_ids"):
        parse({"target_layer_ids": ids})


@pytest.mark.parametrize("mask_token_id", [-1, "3", True, 1.5])
def test_malformed_mask_token_id(mask_token_id: object) -> None:
    with pytest.raises(CheckpointError, match="mask_token_id"):
        parse({"mask_token_id": mask_token_id})


@pytest.mark.parametrize(
    ("overrides", "nested", "kind"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, {}, "DFlash2"),
        ({"architectures": ["MiniMaxDFlash2DraftModel"]}, {}, "DFlash2"),
        ({}, {"selector_rank": 64, "selector_top_k": 16}, "DFlash2"),
        ({}, {"projector_type": "domino"}, "Domino"),
        ({"projector_type": "domino"}, {}, "Domino"),
        ({"architectures": ["LiLiCorrDraftModel"]}, {}, "LiLiCorr"),
        ({}, {"lilicorr_rank": 8}, "LiLiCorr"),
        ({"architectures": ["Qwen3DSparkModel"]}, {}, "DSpark"),
        ({"markov_rank": 256}, {}, "DSpark"),
    ],
)
def test_dependent_drafters_are_refused_by_name(overrides: dict, nested: dict, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"of the kind {kind}.*positions are not independent"):
        parse(nested, **overrides)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures=\['LlamaForCausalLM'\] is not supported"),
        ({"architectures": None}, "architectures=None is not supported: only"),
        ({"hidden_act": "swigluoai"}, "hidden_act='swigluoai' is not supported: only 'silu' is"),
        ({"projector_type": "mlp"}, "projector_type='mlp'"),
        ({"sample_from_anchor": True}, "sample_from_anchor=True"),
        ({"has_embed_tokens": True}, "an embedding of its own"),
        ({"has_lm_head": True}, "an output head of its own"),
        ({"use_gemma_norm": True}, "Gemma norms"),
        ({"mlp_bias": True}, "biases in the MLP"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type='longrope' is not one of default"),
        ({"partial_rotary_factor": 0.5}, "rotates only part of a head"),
        ({"rope_parameters": {"rope_dim": 8}}, "rotates only part of a head"),
        ({"rope_is_neox_style": False}, "interleaves pairs"),
    ],
)
def test_unsupported_variants(overrides: dict, text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        parse(**overrides)


@pytest.mark.parametrize(
    ("nested", "text"),
    [
        ({"conv_kernel_size": 2, "conv_group_size": 8}, "convolutions over the block"),
        ({"attention_sink_bias": True}, "attention sinks"),
        ({"attention_value_scale": 0.5}, "attention_value_scale=0.5"),
        ({"output_multiplier": 2.0}, "output_multiplier=2.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_unsupported_nested_variants(nested: dict, text: str) -> None:
    with pytest.raises(UnsupportedModelError, match=text):
        parse(nested)


@pytest.mark.parametrize(
    "overrides",
    [{"final_logit_softcapping": 30.0}, {"tie_word_embeddings": True}, {"projector_type": "dflash"}],
)
def test_copies_of_target_fields_are_harmless(overrides: dict) -> None:
    assert parse(**overrides) == parse()


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "config.json is missing"), (b"{", "cannot be read as JSON"), (b"[]", "holds a JSON list"),
     (b"\xff\xfe", "cannot be read as JSON")],
)  # fmt: skip
def test_broken_config_files(content: bytes | None, text: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=text):
        DFlashConfig.from_path(tmp_path)


def test_from_path_equals_from_dict(tmp_path: Path) -> None:
    fields = tiny_drafter_config(TARGET)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert DFlashConfig.from_path(tmp_path) == DFlashConfig.from_dict(fields)
