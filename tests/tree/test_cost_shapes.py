"""Shapes of models by name and by config.json, and shipped calibrations by the points they come from."""

import json
import runpy
from pathlib import Path

import pytest

from ddtree.errors import ConfigError
from ddtree.tree import cost_calibrations
from ddtree.tree.cost_catalogue import A100, H200, PAIRS, QWEN3_CODER_30B_A3B, RTX_PRO_6000
from ddtree.tree.cost_fit import typical_error
from ddtree.tree.cost_shapes import known_gpu, known_pair, model_of_config, pair_of_configs

ROOT = Path(__file__).parents[2]
DRAFTER = json.loads((ROOT / "src/ddtree/data/drafters/smollm2-135m-dflash-b16/config.json").read_text())
TARGET = {
    "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "/models/SmolLM2-135M/"]
)
def test_names_of_a_pair(name):
    assert known_pair(name) is PAIRS["SmolLM2-135M"]


def test_unknown_names():
    assert known_pair("someone/model") is None
    assert known_pair("") is None
    assert known_gpu("cpu") is None


@pytest.mark.parametrize(("name", "gpu"), [
    ("NVIDIA H200", H200), ("H200", H200), ("NVIDIA A100-SXM4-80GB", A100), ("a100 80gb", A100),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", RTX_PRO_6000),
])  # fmt: skip
def test_names_of_a_gpu(name, gpu):
    assert known_gpu(name) is gpu


def test_the_configs_give_the_catalogues_shape():
    assert pair_of_configs("SmolLM2-135M", TARGET, DRAFTER) == PAIRS["SmolLM2-135M"]


def test_routed_experts_by_config():
    config = {
        "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936,
    }  # fmt: skip
    assert model_of_config("Qwen3-Coder-30B-A3B", config) == QWEN3_CODER_30B_A3B


@pytest.mark.parametrize(("change", "told"), [
    ({"kv_lora_rank": 512}, "kv_lora_rank"), ({"quantization_config": {"a": 1}}, "quantization_config"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"hidden_size": "576"}, "hidden_size='576'"), ({"vocab_size": None}, "vocab_size=None"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
])  # fmt: skip
def test_what_the_model_cannot_read_is_refused(change, told):
    with pytest.raises(ConfigError, match=told):
        model_of_config("x", TARGET | change)


def test_a_drafter_without_taps_is_refused():
    with pytest.raises(ConfigError, match="target_layer_ids"):
        pair_of_configs("x", TARGET, {**DRAFTER, "dflash_config": {}})


def test_calibrations_that_ship_are_those_of_the_points(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    points = runpy.run_path(str(ROOT / "scripts" / "roadmap_points.py"))
    for name, shipped in (
        ("embedded_fit", cost_calibrations.EMBEDDED),
        ("sglang_fit", cost_calibrations.SGLANG_SMALL),
        ("large_fit", cost_calibrations.SGLANG_LARGE),
    ):
        fitted = points[name]()
        for field in fitted.calibration.__dataclass_fields__:
            made, kept = getattr(fitted.calibration, field), getattr(shipped.calibration, field)
            assert kept == pytest.approx(made, rel=0.01), (name, field)
        assert shipped.error == pytest.approx(typical_error(fitted.predictions), abs=0.01)
