"""The shape of a target by its config.json: what of it takes memory, and what DDTREE refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddtree.config import is_int, is_number
from ddtree.errors import CheckpointError, short_repr

MAX_NUMBER = 1 << 40  # of any size in a config, so that sums stay within what can be told
# Parts of a config of a model with more than text, in the order in which SGLang looks for the text's.
TEXT_PARTS = ("thinker_config", "llm_config", "language_config", "text_config")
FULL = "full_attention"
LINEAR_LAYERS = ("linear_attention", "mamba", "mamba2", "conv")
WINDOW_LAYERS = ("sliding_attention", "chunked_attention")
# What makes a target hybrid to SGLang where its config lists no layer types.
HYBRID_FIELDS = ("linear_num_value_heads", "mamba_d_state", "mamba_num_heads", "hybrid_override_pattern",
                 "linear_attn_config")  # fmt: skip
# SGLang takes these for models with sliding windows, whatever their config says.
WINDOW_ARCHITECTURES = ("GptOss", "Llama4", "Gemma4", "MiMoV2", "Step3p5", "Step3p7", "Mellum", "Inkling")
SINK_ARCHITECTURES = ("GptOss", "MiMoV2")


@dataclass(frozen=True, slots=True)
class StateShape:
    """Recurrent layers of a hybrid target with gated delta rule (GDN) states.

    Attributes:
        num_layers: layers that keep a state.
        state_size: numbers in a layer's recurrent state: value heads x key size x value size.
        conv_size: numbers in a layer's convolution window: channels x (kernel - 1).
    """

    num_layers: int
    state_size: int
    conv_size: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the doctor must know of a target.

    Attributes:
        num_kv_layers: layers with a KV cache; the others keep a state.
        head_dim, v_head_dim: sizes of a key and a value of one head.
        latent_dim: numbers a token keeps in a layer under MLA (kv_lora_rank + qk_rope_head_dim), else None.
        rope: the rotary rule as far as a drafter should share it: base frequency and kind.
        states: recurrent layers, None where there are none or their sizes are not known here.
    """

    architecture: str
    num_layers: int
    num_kv_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    latent_dim: int | None
    max_positions: int
    rope: tuple[float, str]
    dtype: str
    quantization: str
    is_hybrid: bool
    has_window: bool
    has_sinks: bool
    states: StateShape | None = None

    @property
    def attention(self) -> str:
        """SGLang's name of its kind of attention."""
        return "MHA" if self.latent_dim is None else "MLA"

    @property
    def served_dtype(self) -> str:
        """The dtype in which SGLang serves it."""
        return "float16" if self.dtype == "float32" else self.dtype

    def served_bytes(self, weight_bytes: int) -> int:
        """Bytes that the files' weights take when they are loaded."""
        return weight_bytes // 2 if self.dtype == "float32" and not self.quantization else weight_bytes

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a config.json; of a model with more than text, its text part.

        Raises:
            CheckpointError: a needed field is missing or no number.
        """
        return shape_of(Reader(text_part(config)), Reader(config))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    parts = [part for name in TEXT_PARTS if isinstance(part := config.get(name), Mapping)]
    if not parts:
        return config
    inner = parts[0].get("text_config")
    return inner if isinstance(inner, Mapping) else parts[0]


class Reader:
    """Checked look-ups in a config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def number(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        value = default if value is None else value
        if value is None or not is_int(value) or not 1 <= value <= MAX_NUMBER:
            raise CheckpointError(
                f"the target's config.json has {name}={short_repr(value)}: a whole number from 1 to "
                f"{MAX_NUMBER} is needed"
            )
        return int(value)

    def optional(self, name: str) -> int | None:
        return None if self.config.get(name) is None else self.number(name)

    def text(self, name: str, default: str = "") -> str:
        value = self.config.get(name)
        return value if isinstance(value, str) else default

    def texts(self, name: str) -> list[str]:
        value = self.config.get(name)
        return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.config.get(name)
        return value if isinstance(value, Mapping) else {}


def shape_of(text: Reader, whole: Reader) -> ModelShape:
    num_heads, hidden_size = text.number("num_attention_heads"), text.number("hidden_size")
    num_layers = text.number("num_hidden_layers")
    head_dim = text.number("head_dim", max(1, hidden_size // num_heads))
    rank = text.optional("kv_lora_rank")
    layer_types = text.texts("layer_types")
    architecture = (whole.texts("architectures") or text.texts("architectures") or ["unknown"])[0]
    num_recurrent = count_recurrent(text, layer_types, num_layers)
    quantization = whole.mapping("quantization_config") or text.mapping("quantization_config")
    dtype = text.text("dtype") or text.text("torch_dtype") or whole.text("dtype") or whole.text("torch_dtype")
    return ModelShape(
        architecture=architecture,
        num_layers=num_layers,
        num_kv_layers=num_layers - num_recurrent,
        hidden_size=hidden_size,
        vocab_size=text.number("vocab_size"),
        num_heads=num_heads,
        num_kv_heads=text.number("num_key_value_heads", num_heads),
        head_dim=head_dim,
        v_head_dim=text.number("v_head_dim", head_dim),
        latent_dim=None if rank is None else rank + text.number("qk_rope_head_dim"),
        max_positions=text.number("max_position_embeddings", 4096),
        rope=rope_of(text),
        dtype=dtype or "bfloat16",
        quantization=str(quantization.get("quant_method", "")) if quantization else "",
        is_hybrid=bool(num_recurrent) or any(text.config.get(name) for name in HYBRID_FIELDS),
        has_window=architecture.startswith(WINDOW_ARCHITECTURES)
        or any(kind in WINDOW_LAYERS for kind in layer_types),
        has_sinks=architecture.startswith(SINK_ARCHITECTURES),
        states=states_of(text, num_recurrent),
    )


def count_recurrent(text: Reader, layer_types: list[str], num_layers: int) -> int:
    """Layers without a KV cache: by their types, else by how often full attention returns."""
    if layer_types:
        return min(num_layers, sum(kind in LINEAR_LAYERS for kind in layer_types))
    interval = text.optional("full_attention_interval")
    return num_layers - num_layers // interval if interval and text.optional("linear_num_value_heads") else 0


def states_of(text: Reader, num_recurrent: int) -> StateShape | None:
    """The states of GDN layers (Qwen3-Next, Qwen3.5, Qwen3.6), None for other kinds."""
    if not num_recurrent or text.optional("linear_num_value_heads") is None:
        return None
    num_v, num_k = text.number("linear_num_value_heads"), text.number("linear_num_key_heads")
    k_dim, v_dim = text.number("linear_key_head_dim"), text.number("linear_value_head_dim")
    channels = 2 * num_k * k_dim + num_v * v_dim
    kernel = text.number("linear_conv_kernel_dim")
    return StateShape(num_recurrent, num_v * k_dim * v_dim, channels * (kernel - 1))


def rope_of(text: Reader) -> tuple[float, str]:
    """Base frequency and kind, under the field names of transformers 4 and 5."""
    rule = text.mapping("rope_parameters") or text.mapping("rope_scaling")
    rule = Reader(rule).mapping(FULL) or rule  # a rule for each type of layer
    theta = rule.get("rope_theta", text.config.get("rope_theta"))
    kind = rule.get("rope_type") or rule.get("type") or "default"
    return (float(theta) if is_number(theta) else 10000.0), str(kind)
