"""The target of a replay, on its own transformers modules, apart from every engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ddtree.config import Dtype
from ddtree.errors import CheckpointError, ConfigError, first_line
from ddtree.models import resolve_target
from ddtree.trace.choice import Noise
from ddtree.trace.grammar import MakeMasks
from ddtree.trace.replay import Replayer


def load_replayer(
    name: str,
    dtype: str,
    device: str = "auto",
    noise: Noise | None = None,
    make_masks: MakeMasks | None = None,
) -> Replayer:
    """A replayer with the target of that name, in a number format, on a device.

    Raises:
        ModelError: the target cannot be found or read.
        ConfigError: a device or number format that is not allowed.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if dtype not in list(Dtype) or dtype == Dtype.AUTO:
        raise ConfigError(f"dtype={dtype!r} is not allowed: float32, bfloat16 or float16, as the engine had")
    where = _device(device)
    # A replay in tf32 would be no replay in float32.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    folder = resolve_target(name)
    tokenizer = load_tokenizer(name)
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    except Exception as error:  # transformers and safetensors have many
        raise CheckpointError(f"the target in {folder} cannot be used: {first_line(error)}") from error
    return Replayer(model.to(where).eval(), end_tokens(folder, tokenizer), make_masks, noise)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a target.

    Raises:
        ModelError: the target cannot be found, or its tokenizer not read.
    """
    from transformers import AutoTokenizer

    folder = resolve_target(name)
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # tokenizers raises bare Exception; transformers ValueError, OSError, KeyError
        raise CheckpointError(f"the tokenizer in {folder} cannot be used: {first_line(error)}") from error


def end_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """Token ids that end a text: the tokenizer's and those of the generation config, in order."""
    from transformers import GenerationConfig

    ends: Any = None
    if (folder / "generation_config.json").is_file():
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
    configured = ends if isinstance(ends, list) else [ends]
    return sorted({tokenizer.eos_token_id, *configured} - {None})


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r} is not allowed here: no CUDA device found; use cpu or auto")
    return name


class LazyTokenizer:
    """The tokenizer of a target, loaded when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loaded: Any = None

    def _own(self) -> Any:
        if self._loaded is None:
            self._loaded = load_tokenizer(self._name)
        return self._loaded

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        return list(self._own().encode(text, add_special_tokens=add_special_tokens))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return str(self._own().decode(list(tokens), skip_special_tokens=skip_special_tokens))
