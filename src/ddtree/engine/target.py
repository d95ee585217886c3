"""Loads a target: on the fused stack where its family allows, else on its own transformers modules."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ddtree.config import MIN_CONTEXT_TOKENS, is_int
from ddtree.engine.fused_target import FusedTarget, SafetensorsReader, fused_unsupported_reason
from ddtree.engine.protocols import TargetModel
from ddtree.engine.self_check import tree_verify_fault
from ddtree.engine.stock_target import StockTarget, target_unsupported_reason
from ddtree.errors import CheckpointError, UnsupportedModelError, first_line
from ddtree.layers.decoder import DecoderLayer, DecoderSpec, DecoderStack, Stack
from ddtree.layers.rotary import RotaryTable
from ddtree.tree.triton_choice import prefers_triton

logger = logging.getLogger(__name__)

MAX_LAYERS = 1024


def load_target(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, max_positions: int
) -> TargetModel:
    """The target in a checkpoint folder.

    Args:
        folder: a Hugging Face checkpoint folder.
        config: its transformers config, from `load_target_config`.
        dtype, device: where and how it runs.
        max_positions: longest position that is used.

    Raises:
        CheckpointError: files are missing or broken.
        UnsupportedModelError: the architecture cannot be verified with draft trees here.
    """
    reason = fused_unsupported_reason(config)
    if reason is None and any(folder.glob("*.safetensors")):
        reader = SafetensorsReader(folder)
        return FusedTarget(config, reader, dtype, device, max_positions, make_stack)
    logger.info("target %s runs on its stock modules: %s", config.model_type, reason or "no safetensors file")
    return checked_stock_target(_load_stock(folder, dtype, device), dtype, device)


def checked_stock_target(model: Any, dtype: torch.dtype, device: torch.device) -> StockTarget:
    """A transformers model as a target, once it has shown that it honours a tree.

    Raises:
        UnsupportedModelError: it does not, or cannot run with our cache at all.
    """
    try:
        target = StockTarget(model, dtype, device)
        fault = tree_verify_fault(target, dtype, device)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        fault = f"it cannot run with a static cache and an explicit mask ({first_line(error)})"
    if fault is not None:
        raise UnsupportedModelError(
            f"target {model.config.model_type} cannot be used with draft trees: {fault}"
        )
    return target


def make_stack(spec: DecoderSpec, layers: Sequence[DecoderLayer], rotary: RotaryTable) -> Stack:
    """The fastest stack for these layers: fused Triton kernels on CUDA, torch operations elsewhere."""
    if prefers_triton(layers[0].input_norm):
        from ddtree.layers.triton_decoder import TritonDecoderStack, triton_unsupported_reason

        reason = triton_unsupported_reason(spec, layers)
        if reason is None:
            return TritonDecoderStack(spec, layers, rotary)
        logger.warning("no fused kernels for this model, torch operations run instead: %s", reason)
    return DecoderStack(spec, layers, rotary)


def load_target_config(folder: Path) -> Any:
    """The transformers config of a checkpoint folder; the text part of a multimodal one.

    Raises:
        CheckpointError: it is missing or broken.
        UnsupportedModelError: such a model cannot be verified with draft trees here.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; give a Hugging Face checkpoint folder")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises KeyError, ValueError, OSError and its own here
        raise CheckpointError(f"{folder}/config.json cannot be used: {first_line(error)}") from error
    config = config.get_text_config()
    reason = target_unsupported_reason(config)
    if reason is not None:
        raise UnsupportedModelError(f"target {config.model_type} cannot be used with draft trees: {reason}")
    check_sizes(config, folder)
    return config


def check_sizes(config: Any, folder: Path) -> None:
    """Raise `CheckpointError` unless the sizes that every target has are whole numbers in their range."""
    for name, low, high in (
        ("hidden_size", 1, sys.maxsize),
        ("vocab_size", 1, sys.maxsize),
        ("num_hidden_layers", 1, MAX_LAYERS),
        ("max_position_embeddings", MIN_CONTEXT_TOKENS, sys.maxsize),
    ):
        value = getattr(config, name, None)
        if not (isinstance(value, int) and is_int(value) and low <= value <= high):
            most = f" to {high}" if high < sys.maxsize else ""
            raise CheckpointError(
                f"{folder}/config.json has {name}={value!r}: it must be a whole number from {low}{most}"
            )


def _load_stock(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except Exception as error:  # as above
        raise CheckpointError(f"the model in {folder} cannot be loaded: {first_line(error)}") from error
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise CheckpointError(
            f"{len(missing)} tensors are missing from {folder}, {missing[0]} first; download the model again"
        )
    return model.to(device).eval().requires_grad_(False)
