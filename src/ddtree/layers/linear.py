"""Linear maps that keep their weights in the layout that is fastest on the device."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# oneDNN picks its packed layout for a batch size; 16 rows (a draft block) is the middle of 1..65.
PACKING_ROWS = 16


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKING_ROWS)
    return packed


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, activation: str = "none") -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, activation, [], "")
    return out


def _packed_binary(x: Tensor, other: Tensor, packed: Tensor, bias: Tensor | None, operation: str) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, operation)
    return out


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch build packs CPU weights of that dtype for oneDNN, found by trying it.

    The operators are what TorchInductor itself calls when it freezes a CPU model; they are not public,
    so every use goes through this probe and plain torch is the way back.
    """
    try:
        one = torch.eye(32, dtype=dtype)
        packed = _pack(one)
        outputs = (
            _packed_linear(one, packed, None),
            _packed_linear(one, packed, None, "swish"),
            _packed_binary(one, one, packed, None, "mul"),
            _packed_binary(one, one, packed, None, "add"),
        )
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    expected = (one, F.silu(one), one, 2 * one)
    return all(torch.allclose(a, b, atol=0.01) for a, b in zip(outputs, expected, strict=True))


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
        self.weight = _pack(weight) if self.is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [rows, in_features] to [rows, out_features]."""
        if self.is_packed:
            return _packed_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + the map of x, in one pass where the weight is packed."""
        if self.is_packed:
            return _packed_binary(x, residual, self.weight, self.bias, "add")
        return residual + F.linear(x, self.weight, self.bias)


class GateUp:
    """The two first maps of SwiGLU from one stacked weight; packed, activation and product are fused in.

    Args:
        weight: [2 * intermediate, in_features], gate rows first.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None
        self.is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self.weight = weight
        if self.is_packed:
            self.weight, self._up = (_pack(half) for half in weight.chunk(2))

    def swiglu(self, x: Tensor) -> Tensor:
        """silu(gate) * up of x [rows, in_features], [rows, intermediate]."""
        if self.is_packed:
            gate = _packed_linear(x, self.weight, None, "swish")
            return _packed_binary(x, gate, self._up, None, "mul")
        gate, up = F.linear(x, self.weight).chunk(2, -1)
        return F.silu(gate).mul_(up)
