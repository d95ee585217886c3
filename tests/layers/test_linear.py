"""The linear map, packed for oneDNN or not."""

import pytest
import torch
import torch.nn.functional as F

from ddtree.layers import linear as linear_module
from ddtree.layers.linear import GateUp, Linear, can_pack

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 17, 65])
def test_packed_maps_are_the_plain_ones(dtype, rows):
    """Residual, activation and product inside the packed product: the same up to one rounding."""
    generator = torch.Generator().manual_seed(rows)
    weight = (torch.randn(64, 48, generator=generator) * 48**-0.5).to(dtype)
    x, residual = (
        torch.randn(rows, 48, generator=generator).to(dtype),
        torch.randn(rows, 64, generator=generator),
    )
    packed = Linear(weight)
    plain = Linear(weight)
    plain.weight, plain.is_packed = weight, False
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.02}
    torch.testing.assert_close(packed(x), plain(x), **tolerance)
    torch.testing.assert_close(
        packed.add(x, residual.to(dtype)), plain.add(x, residual.to(dtype)), **tolerance
    )
    gate_up = GateUp(weight)
    gate, up = F.linear(x.float(), weight.float()).chunk(2, -1)
    torch.testing.assert_close(gate_up.swiglu(x).float(), F.silu(gate) * up, **tolerance)
