"""Where the engine computes: without gradients, on its own device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def inference(device: torch.device) -> Iterator[None]:
    """Inference mode with `device` as the current one, on which kernels are launched and graphs captured."""
    with torch.inference_mode():
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            yield
