"""Where training reaches into a transformers model beside its public calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
