"""The target as training loads it: transformers' own modules, tokenizer and config."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddtree.config import Dtype
from ddtree.errors import CheckpointError, first_line
from ddtree.models import resolve_target
from ddtree.train.recipe import TargetSettings

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}


class Target(NamedTuple):
    """A target on disk with what can be read without its weights."""

    folder: Path
    config: Any
    tokenizer: Any
    dtype: torch.dtype
    device: torch.device

    def load_model(self) -> Any:
        """The causal LM on its device, frozen; raises `CheckpointError` if it cannot be loaded."""
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype)
        except Exception as error:  # transformers raises KeyError, ValueError, OSError and its own here
            raise CheckpointError(
                f"the model in {self.folder} cannot be loaded: {first_line(error)}"
            ) from error
        return model.to(self.device).eval().requires_grad_(False)


def open_target(settings: TargetSettings, device: torch.device) -> Target:
    """Find a recipe's target and read its config and tokenizer.

    Raises:
        ModelNotFoundError: the name leads to no model.
        CheckpointError: its files cannot be used.
    """
    from transformers import AutoConfig, AutoTokenizer

    folder = resolve_target(settings.model)
    try:
        config = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # as above
        raise CheckpointError(f"the model in {folder} cannot be used: {first_line(error)}") from error
    wanted = Dtype(settings.dtype)
    if wanted is Dtype.AUTO:
        wanted = Dtype.BFLOAT16 if device.type == "cuda" else Dtype.FLOAT32
    return Target(folder, config, tokenizer, TORCH_DTYPES[wanted], device)
