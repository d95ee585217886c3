"""Tiny random models for tests: targets as transformers builds them, drafters as z-lab saves them.

Everything is float32 unless asked otherwise and made from a seed, so a failure repeats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.dflash_model import DFlashDrafter, weight_shapes
from ddtree.draft.load import TargetInfo, load_drafter

MAX_POSITIONS = 512


def spread_weights(model: PreTrainedModel, seed: int, scale: float) -> None:
    """Random weights large enough that logits differ clearly; norms near 1 but not 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if "norm" in name else scale * noise)


def tiny_llama(
    seed: int = 0,
    vocab_size: int = 211,
    hidden_size: int = 48,
    num_layers: int = 4,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    tie_word_embeddings: bool = True,
    **overrides: Any,
) -> LlamaForCausalLM:
    """A Llama with grouped-query attention and random weights."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        **overrides,
    )
    model = LlamaForCausalLM(config).eval()
    spread_weights(model, seed, scale=0.15)
    return model


def tiny_qwen3(
    seed: int = 0,
    vocab_size: int = 211,
    hidden_size: int = 48,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    tie_word_embeddings: bool = True,
    **overrides: Any,
) -> Qwen3ForCausalLM:
    """A Qwen3 whose heads are wider than hidden_size / num_heads, with random weights."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        **overrides,
    )
    model = Qwen3ForCausalLM(config).eval()
    spread_weights(model, seed, scale=0.15)
    return model


def tiny_drafter_config(target: PreTrainedModel, block_size: int = 8, **overrides: Any) -> dict[str, Any]:
    """config.json of a drafter for that target; an override of None removes the field."""
    shape = target.config
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "block_size": block_size,
        "num_target_layers": shape.num_hidden_layers,
        "dtype": "float32",
        "layer_types": ["full_attention"] * 3,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, shape.num_hidden_layers - 2]},
    } | overrides
    return {name: value for name, value in config.items() if value is not None}


def random_drafter_weights(
    config: DFlashConfig, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random tensors of every name a DFlash checkpoint with that config has."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = (1 + 0.1 * noise if "norm" in name else 0.15 * noise).to(dtype)
    return weights


def write_tiny_drafter(
    path: Path,
    target: PreTrainedModel,
    block_size: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a z-lab checkpoint with random weights for that target and return its folder."""
    config = tiny_drafter_config(target, block_size, **overrides)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    weights = random_drafter_weights(DFlashConfig.from_dict(config), seed, dtype)
    save_file(weights, path / "model.safetensors")
    return path


def target_info(target: PreTrainedModel) -> TargetInfo:
    """What a drafter must know of a transformers target."""
    config = target.config
    return TargetInfo(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=config.vocab_size,
        model_type=config.model_type,
        max_positions=config.max_position_embeddings,
    )


def load_tiny_drafter(
    path: Path, target: PreTrainedModel, max_positions: int = MAX_POSITIONS
) -> DFlashDrafter:
    """Load a drafter for a transformers target, in float32 on the CPU."""
    return load_drafter(
        path,
        target_info(target),
        embed=target.get_input_embeddings(),
        head=target.get_output_embeddings(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=max_positions,
    )
