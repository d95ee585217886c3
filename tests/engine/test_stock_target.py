"""Other families on their stock modules: each says what transformers says, or is refused by name."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ddtree.config import Mode, SamplingParams
from ddtree.engine.request import Request
from ddtree.engine.stock_target import target_unsupported_reason
from ddtree.engine.target import checked_stock_target
from ddtree.errors import UnsupportedModelError
from engine_kit import PROMPT, VOCAB_SIZE, scripted_engine
from tiny_models import spread_weights

SMALL = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "gemma": {},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 8},
    "olmo2": {},
    "phi3": {},
    "cohere": {},
    "granite": {},
    "starcoder2": {},
    "stablelm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "gpt_neox": {"num_key_value_heads": None},
}
REFUSED = {
    "mamba": "cannot branch",
    "falcon_mamba": "cannot branch",
    "qwen3_next": "linear_attention",
    "bamba": "state",
    "jamba": "state",
    "deepseek_v3": "latent attention",
    "llama4_text": "chunked",
    "t5": "encoder-decoder",
}


def tiny(model_type, fields):
    config = AutoConfig.for_model(model_type, **{**SMALL, **fields})
    model = AutoModelForCausalLM.from_config(config).eval()
    spread_weights(model, seed=1, scale=0.15)
    return model


@pytest.mark.parametrize("model_type", FAMILIES)
def test_family_says_what_transformers_says(model_type):
    model = tiny(model_type, FAMILIES[model_type])
    sampling = SamplingParams(max_tokens=32)
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=32, min_new_tokens=32, do_sample=False, eos_token_id=None
    )[0, len(PROMPT) :].tolist()
    engine = scripted_engine(checked_stock_target(model, torch.float32, torch.device("cpu")), sampling)
    for mode, budget in [(Mode.AR, "auto"), (Mode.CHAIN, "auto"), (Mode.TREE, 16)]:
        result = engine.generate(Request(PROMPT, sampling, mode, budget))
        assert list(result.tokens) == expected, mode
    assert result.stats.accept_length > 1.5


@pytest.mark.parametrize("model_type", REFUSED)
def test_family_that_cannot_branch_is_refused(model_type):
    config = AutoConfig.for_model(model_type)
    assert REFUSED[model_type] in str(target_unsupported_reason(config))


@pytest.mark.parametrize("model_type", ["rwkv", "bloom"])
def test_family_that_does_not_honour_a_tree_is_found_out(model_type):
    """Nothing in these configs says so: recurrent state outside the cache, positions read off the mask."""
    fields = {"attention_hidden_size": 32, "n_layer": 4, "n_head": 4, "num_key_value_heads": None}
    with pytest.raises(UnsupportedModelError, match=f"target {model_type} cannot be used with draft trees"):
        checked_stock_target(tiny(model_type, fields), torch.float32, torch.device("cpu"))


def test_layers_of_another_kind_are_refused():
    config = AutoConfig.for_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    assert "conv layers" in str(target_unsupported_reason(config))


def test_sliding_window_over_all_layers_is_refused():
    config = AutoConfig.for_model("mistral", sliding_window=16)
    assert "sliding window of 16" in str(target_unsupported_reason(config))
