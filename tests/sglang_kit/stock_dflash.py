"""Lets SGLang's own DFLASH run on the CPU, where it is refused, for the tests that compare with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_kit.plugin import BACKEND_NAME


class CpuPlatform:
    """What the argument checks ask of a platform that is not one of SGLang's own, which may have DFLASH."""

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, _algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, *_args: Any, **_kwargs: Any) -> bool:
        return True

    def get_default_speculative_draft_attention_backend(self, *_args: Any, **_kwargs: Any) -> str:
        return BACKEND_NAME


def allow_stock_dflash() -> None:
    """Replace, in this process, what asks for a GPU."""
    from sglang.srt.arg_groups import speculative_hook

    speculative_hook.current_platform = CpuPlatform()

    def record_stream(_tensor: Tensor, _stream: Any) -> None:
        """A CPU tensor has no streams to record."""

    torch.Tensor.record_stream = record_stream


def cast_draft_inputs(worker: Any) -> None:
    """SGLang's eager pass makes the drafter's inputs bfloat16, whatever the drafter is."""
    forward = worker.draft_model.forward

    def forward_in_float32(*args: Any, **kwargs: Any) -> Any:
        kwargs["input_embeds"] = kwargs["input_embeds"].float()
        return forward(*args, **kwargs)

    worker.draft_model.forward = forward_in_float32
