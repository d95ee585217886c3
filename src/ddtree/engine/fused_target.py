"""Targets of the Llama and Qwen families on our own decoder stack, loaded straight from safetensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from ddtree.draft.load import INDEX_FILE, WEIGHT_DTYPES, WEIGHTS_FILE, TargetInfo, weight_files
from ddtree.engine.kv_cache import KVCache
from ddtree.engine.protocols import TargetOutput
from ddtree.errors import CheckpointError, first_line
from ddtree.layers.decoder import DecoderLayer, DecoderSpec, StackFactory, rms_norm
from ddtree.layers.linear import GateUp, Linear
from ddtree.layers.rotary import RotaryTable
from ddtree.layers.window import Window

FUSED_MODEL_TYPES = ("llama", "qwen2", "qwen3")
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def fused_unsupported_reason(config: Any) -> str | None:
    """Why a transformers config cannot run on the fused stack, or None; such targets use stock modules."""
    if config.model_type not in FUSED_MODEL_TYPES:
        return f"model_type {config.model_type} is not one of {', '.join(FUSED_MODEL_TYPES)}"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act} is not silu"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        return "it has sliding-window layers"
    rope = config.rope_parameters
    if rope.get("rope_type", "default") not in STATIC_ROPE_TYPES:
        return f"rope type {rope.get('rope_type')} depends on the length of the text"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "it rotates only a part of each head"
    return None


class SafetensorsReader:
    """Reads tensors by name from a checkpoint folder, one file or sharded."""

    def __init__(self, folder: Path) -> None:
        is_listed = any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE))
        files = weight_files(folder) if is_listed else sorted(folder.glob("model*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}; give a folder that has")
        self._folder = folder
        self._handles: dict[str, Any] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except Exception as error:  # safetensors raises its own error class and OSError alike
                raise CheckpointError(
                    f"{file} cannot be read ({error}); copy or download it again"
                ) from error
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return self._handles.keys()

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor of that name and shape, converted; `CheckpointError` where it differs."""
        if name not in self._handles:
            raise CheckpointError(
                f"tensor {name} is missing from {self._folder}; a file of it may be missing, "
                "or config.json is of another model"
            )
        tensor: Tensor = self._handles[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {shape}"
            )
        if tensor.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"tensor {name} is {tensor.dtype}; bfloat16, float16 and float32 weights are allowed"
            )
        return tensor.to(device, dtype)


class FusedTarget:
    """A target whose layers run as one `DecoderStack`.

    Args:
        config: transformers config of a fused family.
        reader: the checkpoint.
        dtype, device: where and how it runs.
        max_positions: longest position that is used.
        stack_factory: the stack to run on, `DecoderStack` or one with its interface.
    """

    def __init__(
        self,
        config: Any,
        reader: SafetensorsReader,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        stack_factory: StackFactory,
    ) -> None:
        self.config = config
        self.info = TargetInfo(
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            model_type=config.model_type,
            max_positions=config.max_position_embeddings,
        )
        self.dtype, self.device = dtype, device
        load = _Loader(config, reader, dtype, device)
        self._embedding = load("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._norm = load("model.norm.weight", config.hidden_size)
        is_tied = config.tie_word_embeddings
        head = self._embedding if is_tied else load("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = Linear(head)
        self._spec = decoder_spec(config)
        rotary = rotary_table(config, max_positions, dtype, device)
        self._stack = stack_factory(self._spec, list(load.layers()), rotary)
        self.kernels_per_layer: int | None = self._stack.kernels_per_layer
        self.supports_graphs = device.type == "cuda"

    def new_kv_cache(self, capacity_tokens: int) -> KVCache:
        """A cache for one sequence of that many tokens."""
        spec = self._spec
        return KVCache(
            self.info.num_layers, spec.num_kv_heads, capacity_tokens, spec.head_dim, self.dtype, self.device
        )

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [n, hidden] of tokens [n]."""
        return F.embedding(tokens, self._embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab] of normed hidden states [n, hidden]."""
        return self._head(hidden)

    def forward(
        self,
        tokens: Tensor,
        window: Window,
        kv_cache: KVCache,
        tap_layer_ids: Sequence[int],
        *,
        last_only: bool = False,
    ) -> TargetOutput:
        """Run tokens [n] as a window over the cache."""
        hidden, taps = self._stack.forward(self.embed(tokens), window, kv_cache.data, tap_layer_ids)
        if last_only:
            hidden = hidden[-1:]
        return TargetOutput(self.head(rms_norm(hidden, self._norm, self._spec.rms_norm_eps)), taps)


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def decoder_spec(config: Any) -> DecoderSpec:
    """Shape of the stack of a Llama, Qwen2 or Qwen3 config."""
    return DecoderSpec(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim_of(config),
        rms_norm_eps=config.rms_norm_eps,
        sliding_windows=(None,) * config.num_hidden_layers,
    )


def rotary_table(config: Any, max_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
    """The rotary table of a config, with the scaling rule it names.

    Raises:
        CheckpointError: the rule has values that give no frequencies.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        rotary = LlamaRotaryEmbedding(config)
        inv_freq: Any = rotary.inv_freq
        scaling = float(rotary.attention_scaling)
        reason = "" if bool(inv_freq.isfinite().all()) else "frequencies are not finite"
    except Exception as error:  # whatever arithmetic with values of a wrong type raises
        reason = first_line(error)
    if reason:
        raise CheckpointError(f"config.json has rope_parameters={config.rope_parameters!r}: {reason}")
    return RotaryTable(inv_freq.to(device), max_positions, dtype, scaling)


def layer_of(name: str) -> int:
    """The layer number in a tensor's name, -1 for tensors of no layer."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return int(number) if number.isdecimal() and name.startswith("model.layers.") else -1


class _Loader:
    """Reads a checkpoint's layers in the fused layout."""

    def __init__(
        self, config: Any, reader: SafetensorsReader, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.reader, self.dtype, self.device = config, reader, dtype, device

    def __call__(self, name: str, *shape: int) -> Tensor:
        return self.reader.get(name, shape, self.dtype, self.device)

    def layers(self) -> Iterator[DecoderLayer]:
        """The decoder layers, first to last."""
        num_layers = self.config.num_hidden_layers
        beyond = next((name for name in self.reader.names() if layer_of(name) >= num_layers), None)
        if beyond is not None:
            raise CheckpointError(
                f"the checkpoint has tensor {beyond}, config.json says num_hidden_layers={num_layers}; "
                "one of them is of another model"
            )
        hidden, intermediate = self.config.hidden_size, self.config.intermediate_size
        head_dim = head_dim_of(self.config)
        q_width = self.config.num_attention_heads * head_dim
        kv_width = self.config.num_key_value_heads * head_dim
        for i in range(self.config.num_hidden_layers):
            layer, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
            yield DecoderLayer(
                input_norm=self(f"{layer}.input_layernorm.weight", hidden),
                qkv=self._stacked(
                    (f"{attention}.q_proj", q_width),
                    (f"{attention}.k_proj", kv_width),
                    (f"{attention}.v_proj", kv_width),
                ),
                q_norm=self._optional(f"{attention}.q_norm.weight", head_dim),
                k_norm=self._optional(f"{attention}.k_norm.weight", head_dim),
                out=self._stacked((f"{attention}.o_proj", hidden), in_features=q_width),
                post_norm=self(f"{layer}.post_attention_layernorm.weight", hidden),
                gate_up=GateUp(
                    torch.cat(
                        [
                            self(f"{layer}.mlp.{kind}_proj.weight", intermediate, hidden)
                            for kind in ("gate", "up")
                        ]
                    )
                ),
                down=self._stacked((f"{layer}.mlp.down_proj", hidden), in_features=intermediate),
            )

    def _optional(self, name: str, size: int) -> Tensor | None:
        return self(name, size) if name in self.reader else None

    def _stacked(self, *parts: tuple[str, int], in_features: int | None = None) -> Linear:
        """One linear map of several, their outputs side by side."""
        columns = in_features if in_features is not None else self.config.hidden_size
        weight = torch.cat([self(f"{name}.weight", rows, columns) for name, rows in parts])
        biases = [self(f"{name}.bias", rows) for name, rows in parts if f"{name}.bias" in self.reader]
        if len(biases) not in (0, len(parts)):
            raise CheckpointError(f"{parts[0][0]} and its sisters have biases only in part")
        return Linear(weight, torch.cat(biases) if biases else None)
