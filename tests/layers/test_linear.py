"""The linear map, packed for oneDNN or not."""

import pytest
import torch
import torch.nn.functional as F

from ddtree.layers import linear as linear_module
from ddtree.layers.linear import Linear, can_pack

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 65])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_f_linear(dtype, rows, has_bias):
    torch.manual_seed(rows)
    weight, bias = torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype) if has_bias else None
    x = torch.randn(rows, 40).to(dtype)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    out = Linear(weight, bias)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=20 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_without_packing_the_weight_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(linear_module, "can_pack", lambda dtype: False)
    weight = torch.randn(8, 16)
    linear = Linear(weight)
    assert not linear.is_packed
    assert linear.weight is weight
    assert (linear.out_features, linear.in_features) == (8, 16)


def test_a_build_without_the_operators_is_found_out(monkeypatch):
    def missing(*args):
        raise AttributeError("no such operator")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", missing, raising=False)
    can_pack.cache_clear()
    try:
        assert not can_pack(torch.float32)
        assert not Linear(torch.randn(4, 4)).is_packed
    finally:
        can_pack.cache_clear()
