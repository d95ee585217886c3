"""From a recipe's drafter settings and the target's config to the config.json of a DFlash drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddtree.config import check
from ddtree.draft.dflash_config import ARCHITECTURE, FULL, DFlashConfig, read_json
from ddtree.errors import CheckpointError, ConfigError, UnsupportedModelError
from ddtree.train.recipe import DrafterSettings

NUM_TAPS = 5
FIRST_TAP = 1
LAYERS_AFTER_LAST_TAP = 2


def drafter_config(settings: DrafterSettings, target_config: Any) -> dict[str, Any]:
    """The config.json of the drafter in the z-lab layout (arXiv 2602.06036).

    Args:
        settings: what the recipe wants.
        target_config: the target's config of transformers.

    Raises:
        ConfigError: settings that do not fit each other, the target, or the drafter of `init_from`.
        CheckpointError, UnsupportedModelError: the drafter of `init_from` cannot be used.
    """
    target = target_config.get_text_config()
    config = read_json(Path(settings.init_from) / "config.json") if settings.init_from else {}
    config = config or made_config(settings, target)
    try:
        shape = DFlashConfig.from_dict(config)
    except (CheckpointError, UnsupportedModelError) as error:
        if settings.init_from:
            raise
        raise ConfigError(f"[drafter] does not describe a DFlash drafter: {error}") from None
    if settings.init_from:
        refuse_other_shape(settings, shape)
    refuse_beyond_target(shape, target)
    return config


def made_config(settings: DrafterSettings, target: Any) -> dict[str, Any]:
    num_heads = settings.num_heads or target.num_attention_heads
    head_dim = settings.head_dim or target_head_dim(target)
    layer_ids = settings.target_layer_ids or spread_layer_ids(target.num_hidden_layers)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": settings.intermediate_size or target.intermediate_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.num_kv_heads or target.num_key_value_heads,
        "head_dim": head_dim,
        "rms_norm_eps": settings.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": settings.max_position_embeddings or target.max_position_embeddings,
        "rope_theta": settings.rope_theta or target_rope_theta(target),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "block_size": settings.block_size,
        "num_target_layers": target.num_hidden_layers,
        "dtype": "bfloat16",
        "layer_types": [FULL] * settings.num_layers,
        "dflash_config": {
            "mask_token_id": settings.mask_token_id,
            "target_layer_ids": list(layer_ids),
        },
    }


def spread_layer_ids(num_target_layers: int) -> tuple[int, ...]:
    """Five layers from the second to the third last, evenly, as z-lab's drafters read them."""
    last = num_target_layers - 1 - LAYERS_AFTER_LAST_TAP
    if last < FIRST_TAP:
        return (num_target_layers - 1,)
    span = last - FIRST_TAP
    return tuple(sorted({FIRST_TAP + i * span // (NUM_TAPS - 1) for i in range(NUM_TAPS)}))


def target_head_dim(target: Any) -> int:
    # Not every config class of transformers has the field.
    return int(getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads)


def target_rope_theta(target: Any) -> float:
    rule = getattr(target, "rope_parameters", None) or {}
    theta = rule.get("rope_theta", getattr(target, "rope_theta", None))
    if not isinstance(theta, int | float):
        raise ConfigError(
            "drafter.rope_theta=0 is not allowed: the target's config has no single rope_theta; set it"
        )
    return float(theta)


def refuse_other_shape(settings: DrafterSettings, shape: DFlashConfig) -> None:
    """Raise where the recipe asks for another shape than the drafter it starts from has."""
    check(
        settings.rope_theta in (0, shape.rope.theta),
        "drafter.rope_theta", settings.rope_theta,
        f"{shape.rope.theta:g}, as in the drafter of init_from, or 0",
    )  # fmt: skip
    wanted = {
        name: getattr(settings, name)
        for name in ("block_size", "num_layers", "intermediate_size", "num_heads", "num_kv_heads",
                     "head_dim", "target_layer_ids", "mask_token_id", "max_position_embeddings")
    }  # fmt: skip
    for name, value in wanted.items():
        found = getattr(shape, name)
        left_open = name != "mask_token_id" and not value
        check(
            left_open or value == found,
            f"drafter.{name}", value, f"{found!r}, as in the drafter of init_from",
            f"write {name} = {toml(found)}",
        )  # fmt: skip


def toml(value: int | tuple[int, ...]) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def refuse_beyond_target(shape: DFlashConfig, target: Any) -> None:
    check(
        shape.num_target_layers in (None, target.num_hidden_layers),
        "drafter.init_from", shape.num_target_layers,
        f"a drafter of a target with {target.num_hidden_layers} layers, as this one has",
    )  # fmt: skip
    check(
        shape.hidden_size == target.hidden_size and shape.vocab_size == target.vocab_size,
        "drafter.init_from", (shape.hidden_size, shape.vocab_size),
        f"a drafter of hidden_size and vocab_size {(target.hidden_size, target.vocab_size)}, the target's",
    )  # fmt: skip
    check(
        shape.mask_token_id < target.vocab_size,
        "drafter.mask_token_id", shape.mask_token_id, f"below the target's vocab_size {target.vocab_size}",
    )  # fmt: skip
    num_layers = target.num_hidden_layers
    check(
        shape.target_layer_ids[-1] < num_layers,
        "drafter.target_layer_ids", shape.target_layer_ids, f"below {num_layers}, the target's layers",
    )  # fmt: skip
