"""Where training reaches into a transformers model beside its public calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ddtree.errors import UnsupportedModelError

# Fields of a config whose model keeps state from token to token that is neither keys nor values.
RECURRENT_FIELDS = ("linear_num_value_heads", "ssm_state_size", "state_size", "mamba_d_state", "conv_kernel")


@contextmanager
def attention_of(config: Any, name: str) -> Iterator[None]:
    """The model of that config attends with the registered function of that name inside."""
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def refuse_other_scores(module: object, softcap: float | None, s_aux: Tensor | None) -> None:
    """Raise for an attention layer whose scores are capped or share their mass with sinks."""
    if softcap is not None or s_aux is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} caps its scores or has attention sinks, which is not built here; "
            "docs/training.md names other trainers"
        )
