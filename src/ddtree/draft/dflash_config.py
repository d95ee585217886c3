"""The config.json of a DFlash drafter, parsed once into a typed value."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.config import is_number
from ddtree.errors import CheckpointError, UnsupportedModelError, short_repr

ARCHITECTURE = "DFlashDraftModel"
FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_MAX_POSITIONS = 32768
MAX_LAYERS, MAX_BLOCK_SIZE = 1024, 256
# Position-wise scaling only: these rules give one table of frequencies for all lengths.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
# Old name -> v5 name of the field that holds a rope rule.
ROPE_FIELDS = ("rope_parameters", "rope_scaling")

PLAIN_VALUES = {
    "hidden_act": "silu",
    "projector_type": "dflash",
    "output_multiplier": 1.0,
    "attention_value_scale": 1.0,
    # True would mean that the root's slot predicts the first token; here the mask slots do.
    "sample_from_anchor": False,
}
UNSUPPORTED_SWITCHES = {
    "conv_kernel_size": "convolutions over the block (DFlash2)",
    "attention_sink_bias": "attention sinks",
    "use_gemma_norm": "Gemma norms",
    "has_embed_tokens": "an embedding of its own, but the target's is borrowed",
    "has_lm_head": "an output head of its own, but the target's is borrowed",
    "mlp_bias": "biases in the MLP",
    "quantization_config": "quantised weights; use the bfloat16 checkpoint",
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency, kind of scaling and its numbers as transformers names them."""

    theta: float
    rope_type: str = "default"
    scaling: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Shape of a DFlash drafter (arXiv 2602.06036; z-lab checkpoint layout).

    Attributes:
        target_layer_ids: target layers whose outputs make the context features, in the order of `fc`.
        num_target_layers: layers of the target it was trained for, None where the config says nothing.
        layer_types: attention of each layer, `full_attention` or `sliding_attention`.
        sliding_windows: keys a layer sees, the token itself included; None for full attention.
        causal_layers: whether a layer is causal inside the block.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    layer_types: tuple[str, ...]
    sliding_windows: tuple[int | None, ...]
    causal_layers: tuple[bool, ...]
    rope: RopeConfig
    attention_bias: bool
    max_position_embeddings: int

    @property
    def draft_depth(self) -> int:
        """Positions drafted a pass: the block without the root."""
        return self.block_size - 1

    @property
    def num_taps(self) -> int:
        """Target layers whose outputs the drafter reads."""
        return len(self.target_layer_ids)

    @classmethod
    def from_path(cls, path: Path) -> DFlashConfig:
        """Parse config.json of a checkpoint folder; raises `CheckpointError` or `UnsupportedModelError`."""
        return cls.from_dict(read_json(path / "config.json"))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> DFlashConfig:
        """Parse a config.json.

        Fields of DFlash's own may stand in `dflash_config` (which wins) or at the top level, as SGLang
        reads them (`parse_dflash_draft_config`).

        Raises:
            CheckpointError: a field is missing or has a value that is not allowed.
            UnsupportedModelError: another kind of drafter, or a variant that is not implemented.
        """
        fields = Fields(config)
        reason = unsupported_reason(fields)
        if reason:
            raise UnsupportedModelError(reason)
        return parse(fields)


class Fields:
    """Typed look-ups in a config whose DFlash fields may be nested."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        nested = config.get("dflash_config")
        if nested is not None and not isinstance(nested, Mapping):
            raise bad_field("dflash_config", nested, "an object")
        self.top = config
        self.nested: Mapping[str, Any] = nested or {}

    def get(self, name: str, default: Any = None) -> Any:
        value = self.nested.get(name)
        if value is None:
            value = self.top.get(name)
        return default if value is None else value

    def integer(self, name: str, low: int, default: int | None = None, high: int = sys.maxsize) -> int:
        value = self.get(name, default)
        limits = f"from {low} to {high}" if high < sys.maxsize else f"of {low} or more"
        allowed = f"a whole number {limits}"
        if value is None:
            raise CheckpointError(
                f"the drafter's config.json has no {name}: {allowed} is required; "
                "is this a DFlash checkpoint in the z-lab layout?"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise bad_field(name, value, allowed)
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not is_positive(value):
            raise bad_field(name, value, "a number above 0")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise bad_field(name, value, "true or false")
        return value


def bad_field(name: str, value: object, allowed: str) -> CheckpointError:
    return CheckpointError(f"the drafter's config.json has {name}={short_repr(value)}: it must be {allowed}")


def is_positive(value: object) -> bool:
    return isinstance(value, int | float) and is_number(value) and value > 0


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `CheckpointError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: a drafter is a folder with config.json and safetensors"
        ) from None
    except (OSError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def dependent_kind(fields: Fields) -> str | None:
    """Name of a drafter family whose positions depend on each other, if the config is of one."""
    architectures = " ".join(fields.get("architectures", ())).lower()
    projector = str(fields.get("projector_type", "")).lower()
    names = [str(name).lower() for name in (*fields.top, *fields.nested)]
    if fields.get("selector_rank") or fields.get("selector_top_k") or "dflash2" in architectures:
        return "DFlash2 (candidate selector)"
    if projector == "domino" or "domino" in architectures:
        return "Domino (GRU correction of the logits)"
    if "lilicorr" in architectures + projector or any("lilicorr" in name for name in names):
        return "LiLiCorr (correlation head)"
    if "dspark" in architectures or any("dspark" in name or "markov" in name for name in names):
        return "DSpark (Markov head)"
    return None


def unsupported_reason(fields: Fields) -> str | None:
    """Why this drafter cannot be used, or None."""
    architectures = fields.get("architectures")
    names = architectures if architectures is not None else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise bad_field("architectures", architectures, f"[{ARCHITECTURE!r}]")
    kind = dependent_kind(fields)
    if kind:
        return (
            f"the drafter is of the kind {kind}, whose positions are not independent, so their "
            f"distributions cannot be multiplied along a branch of a draft tree; use a plain DFlash drafter"
        )
    if architectures != [ARCHITECTURE]:
        return f"the drafter's architectures={architectures!r} is not supported: only [{ARCHITECTURE!r}] is"
    return variant_reason(fields) or rope_reason(fields)


def variant_reason(fields: Fields) -> str | None:
    """Which unimplemented variant of the DFlash layer the config asks for, or None."""
    for name, value in PLAIN_VALUES.items():
        if fields.get(name, value) != value:
            return f"the drafter's {name}={fields.get(name)!r} is not supported: only {value!r} is"
    for name, meaning in UNSUPPORTED_SWITCHES.items():
        if fields.get(name):
            return f"the drafter's {name}={fields.get(name)!r} is not supported: it means {meaning}"
    # At the top level this one is a copy of the target's; the borrowed head applies that.
    if fields.nested.get("final_logit_softcapping"):
        return "the drafter's own final_logit_softcapping is not supported: the target's head is borrowed"
    return None


def rope_fields(fields: Fields) -> dict[str, Any]:
    """The rope rule under either name; theta is taken from the rule before the top level."""
    rule: dict[str, Any] = {}
    for name in ROPE_FIELDS:
        value = fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise bad_field(name, value, "an object")
        if value:
            rule = dict(value)
            break
    rule.setdefault("rope_theta", fields.get("rope_theta", 10000.0))
    rule["rope_type"] = rule.get("rope_type") or rule.pop("type", None) or "default"
    rule.pop("type", None)
    return rule


def rope_reason(fields: Fields) -> str | None:
    """Why the rotary embedding is not supported, or None."""
    rule = rope_fields(fields)
    if rule["rope_type"] not in ROPE_TYPES:
        return f"the drafter's rope_type={rule['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}"
    head_dim = head_dim_of(fields)
    partial = rule.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    # As in SGLang, an explicit rope_dim outranks the factor, which may be a copy of the target's.
    if rule.get("rope_dim", head_dim if partial == 1.0 else None) != head_dim:
        return f"the drafter rotates only part of a head (rope rule {rule!r}); only whole heads are supported"
    if not fields.get("rope_is_neox_style", fields.get("is_neox_style", True)):
        return "the drafter's rope interleaves pairs (rope_is_neox_style=false); only half-split is supported"
    return None


def head_dim_of(fields: Fields) -> int:
    num_heads, hidden_size = fields.integer("num_attention_heads", 1), fields.integer("hidden_size", 1)
    return fields.integer("head_dim", 2, hidden_size // num_heads)


def parse_rope(fields: Fields) -> RopeConfig:
    rule = rope_fields(fields)
    theta, rope_type = rule.pop("rope_theta"), rule.pop("rope_type")
    if not is_positive(theta):
        raise bad_field("rope_theta", theta, "a number above 0")
    if rope_type == "default":
        return RopeConfig(float(theta))
    needed = {
        "linear": ("factor",),
        "yarn": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }[rope_type]
    for name in needed:
        if not is_positive(rule.get(name)):
            raise bad_field(f"{rope_type} rope {name}", rule.get(name), "a number above 0")
    # The rest (rope_dim, mrope fields copied from a target) has no meaning for 1-D positions.
    used = (*needed, "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
            "mscale", "mscale_all_dim", "truncate")  # fmt: skip
    for name in used:
        if name != "truncate" and rule.get(name) is not None and not is_number(rule[name]):
            raise bad_field(f"{rope_type} rope {name}", rule[name], "a number")
    return RopeConfig(float(theta), rope_type, tuple((k, v) for k, v in sorted(rule.items()) if k in used))


def parse_layers(
    fields: Fields, num_layers: int
) -> tuple[tuple[str, ...], tuple[int | None, ...], tuple[bool, ...]]:
    """Layer types, sliding windows and causality of each layer.

    As in SGLang (`_get_dflash_layer_attention_params`): sliding layers are causal inside the block and
    full layers are not, unless `is_causal` decides for all of them.
    """
    types = fields.get("layer_types", [FULL] * num_layers)
    is_whole = isinstance(types, list) and len(types) == num_layers
    if not is_whole or any(kind not in (FULL, SLIDING) for kind in types):
        allowed = f"{num_layers} entries (num_hidden_layers), each {FULL} or {SLIDING}"
        raise bad_field("layer_types", types, allowed)
    window = fields.integer("sliding_window", 1) if SLIDING in types else None
    causal = fields.get("is_causal")
    if causal is not None:
        causal = fields.boolean("is_causal", False)
    return (
        tuple(types),
        tuple(window if kind == SLIDING else None for kind in types),
        tuple(kind == SLIDING if causal is None else causal for kind in types),
    )


def parse_target_layer_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.get("target_layer_ids")
    is_list = isinstance(ids, list) and len(ids) > 0
    if not is_list or any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise bad_field("target_layer_ids", ids, "a list of one or more layer numbers from 0")
    # Engines tap the layers as the target's pass reaches them, and `fc` was trained on that order.
    if ids != sorted(set(ids)):
        raise bad_field("target_layer_ids", ids, "strictly increasing")
    return tuple(ids)


def parse(fields: Fields) -> DFlashConfig:
    num_layers = fields.integer("num_hidden_layers", 1, high=MAX_LAYERS)
    num_heads = fields.integer("num_attention_heads", 1)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads)
    hidden_size = fields.integer("hidden_size", 1)
    head_dim = head_dim_of(fields)
    if num_heads % num_kv_heads:
        raise bad_field("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads={num_heads}")
    if head_dim % 2:
        raise bad_field("head_dim", head_dim, "even")
    layer_types, sliding_windows, causal_layers = parse_layers(fields, num_layers)
    has_num_target_layers = fields.get("num_target_layers") is not None
    return DFlashConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        vocab_size=fields.integer("vocab_size", 1),
        block_size=fields.integer("block_size", 2, high=MAX_BLOCK_SIZE),
        mask_token_id=fields.integer("mask_token_id", 0),
        target_layer_ids=parse_target_layer_ids(fields),
        num_target_layers=fields.integer("num_target_layers", 1) if has_num_target_layers else None,
        layer_types=layer_types,
        sliding_windows=sliding_windows,
        causal_layers=causal_layers,
        rope=parse_rope(fields),
        attention_bias=fields.boolean("attention_bias", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 1, DEFAULT_MAX_POSITIONS),
    )
