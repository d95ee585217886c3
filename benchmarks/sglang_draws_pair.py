"""A planted pair for `check_sglang_draws`: a target that always says the same, a drafter that guesses it.

The target is a Qwen3 whose layers add nothing and whose last norm keeps one feature alone, which is 1 for
every token: its logits are `target_logits()` after any text. The other features differ from token to token,
and the drafter, which borrows the target's embedding and head, turns them into guesses that follow the
target's logits loosely and change with the text.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.dflash_model import weight_shapes

VOCAB, BLOCK_SIZE = 64, 5
EOS_TOKEN, MASK_TOKEN = 2, 3
MAX_POSITIONS = 512
HIDDEN, NUM_LAYERS = 64, 2
LOGIT_SPREAD = 2.0
LOGIT_STEP = 32  # logits are whole multiples of 1 / 32, which bfloat16 holds up to 8
HEAD_NOISE = 0.15  # what the drafter's other features do to its logits
DRAFT_SHARPNESS = 5.0  # weight of the feature that carries the target's logits in the drafter's last norm
WEIGHT_SCALE = 0.2
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": HIDDEN, "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "model_type": "qwen3",
    "dtype": "float32",
}  # fmt: skip
TARGET_CONFIG = SHAPE | {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": NUM_LAYERS, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": EOS_TOKEN, "pad_token_id": 0,
}  # fmt: skip
DRAFTER_CONFIG = SHAPE | {
    "architectures": ["DFlashDraftModel"], "num_hidden_layers": 1, "block_size": BLOCK_SIZE,
    "num_target_layers": NUM_LAYERS, "layer_types": ["full_attention"],
    "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [0]},
}  # fmt: skip


class PlantedPair(NamedTuple):
    """Where the two checkpoints lie."""

    target: Path
    drafter: Path


def target_logits() -> np.ndarray:
    """The target's logits after any text, [VOCAB] float64: normal quantiles, shuffled, all different."""
    quantiles = [NormalDist(0, LOGIT_SPREAD).inv_cdf((i + 0.5) / VOCAB) for i in range(VOCAB)]
    logits = np.round(np.array(quantiles) * LOGIT_STEP) / LOGIT_STEP
    return np.random.default_rng(7).permutation(logits)


def write_pair(folder: Path) -> PlantedPair:
    """Write both checkpoints below `folder`; the same bits every time."""
    pair = PlantedPair(folder / "target", folder / "drafter")
    write_checkpoint(pair.target, TARGET_CONFIG, target_weights())
    write_checkpoint(pair.drafter, DRAFTER_CONFIG, drafter_weights())
    # Servers want a tokenizer: a word for each token.
    words = {f"t{token}": token for token in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(pair.target / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"t{EOS_TOKEN}", "pad_token": "t0",
             "model_max_length": MAX_POSITIONS}  # fmt: skip
    (pair.target / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    return pair


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def random_layers(seed: int, num_layers: int) -> dict[str, Tensor]:
    """Tensors of decoder layers and what a drafter has around them, by name; norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    config = DFlashConfig.from_dict(DRAFTER_CONFIG | {
        "num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers,
    })  # fmt: skip
    return {
        name: torch.ones(shape) if "norm" in name else WEIGHT_SCALE * torch.randn(shape, generator=generator)
        for name, shape in weight_shapes(config).items()
    }


def target_weights() -> dict[str, Tensor]:
    """The target's tensors by their names in a checkpoint, float32."""
    layers = {n: weight for n, weight in random_layers(1, NUM_LAYERS).items() if n.startswith("layers.")}
    weights = {f"model.{name}": weight for name, weight in layers.items()}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    generator = torch.Generator().manual_seed(3)
    # All rows have the same length, so the last norm divides all by the same number, almost 1.
    embedding = torch.randint(2, (VOCAB, HIDDEN), generator=generator) * 2.0 - 1.0
    embedding[:, 0] = 1.0
    head = HEAD_NOISE * torch.randn(VOCAB, HIDDEN, generator=generator)
    head[:, 0] = torch.from_numpy(target_logits()).float()
    norm = torch.zeros(HIDDEN)
    norm[0] = 1.0
    outside = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm, "lm_head.weight": head}
    return weights | outside


def drafter_weights() -> dict[str, Tensor]:
    """The drafter's tensors, float32: random, but for the feature that carries the target's logits."""
    weights = random_layers(2, 1)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0  # the layer leaves that feature alone
    weights["norm.weight"][0] = DRAFT_SHARPNESS
    return weights
