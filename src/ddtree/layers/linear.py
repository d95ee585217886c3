"""A linear map that keeps its weight in the layout that is fastest on the device."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN picks its packed layout for a batch size; 16 rows (a draft block) is the middle of 1..65.
PACKING_ROWS = 16


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch build packs CPU weights of that dtype for oneDNN, found by trying it.

    The two operators are what TorchInductor itself calls when it freezes a CPU model; they are
    not public, so every use goes through this probe and `F.linear` is the way back.
    """
    try:
        weight = torch.eye(32, dtype=dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
        out = torch.ops.mkldnn._linear_pointwise(weight[:3], packed, None, "none", [], "")
        return bool(torch.equal(out, weight[:3]))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


class Linear:
    """`x @ weight.T + bias` for inference; on the CPU the weight is packed once for oneDNN.

    Args:
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self.is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKING_ROWS)
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [rows, in_features] to [rows, out_features]."""
        if self.is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)
