"""The Triton decoder stack against the plain one: interpreted here, compiled on a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ddtree.errors import UnsupportedModelError
from ddtree.layers.decoder import DecoderStack
from ddtree.layers.linear import Linear
from layer_kit import make_window, random_layers

pytest.importorskip("triton")

from ddtree.layers import triton_decoder
from ddtree.layers.triton_argmax import argmax_rows
from ddtree.layers.triton_decoder import TritonDecoderStack, triton_unsupported_reason
from ddtree.layers.triton_tiles import Tile, tiles_for

IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETER, reason="runs in the interpreter's own process")
compiled = pytest.mark.skipif(IS_INTERPRETER, reason="needs compiled kernels")

# tokens, prefix, mask, layer options
TINY_CASES = [
    (1, 0, "causal", {}),
    (1, 70, "causal", {"qkv_bias": True}),
    (1, 300, "causal", {"num_layers": 1}),
    (5, 64, "tree", {"sliding_windows": (None, 9), "head_norm": True}),
    (16, 20, "full", {"head_norm": True}),
    (17, 37, "tree", {}),
    (5, 60, "self", {"num_layers": 1}),
    (33, 1, "causal", {"qkv_bias": True, "num_layers": 1}),
]
SMOLLM2 = {"hidden": 576, "intermediate": 1536, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
GPU_CASES = [
    (n, prefix_len, kind, head_norm)
    for n, prefix_len, kind in (
        (1, 0, "causal"), (1, 1500, "causal"), (16, 200, "full"), (17, 1, "tree"), (33, 200, "tree"),
        (65, 1500, "tree"), (129, 0, "tree"),
    )
    for head_norm in (False, True)
]  # fmt: skip


def check_equals_reference(stack, window, *, atol, rtol):
    """Hidden states, taps and cache of both stacks; nothing else written, the input left alone."""
    weight, spec, n = stack.layers[0].qkv.weight, stack.spec, window.num_tokens
    torch.manual_seed(n)
    shape = (len(stack.layers), 2, spec.num_kv_heads, 2048 if weight.is_cuda else 512, spec.head_dim)
    kv = torch.randn(shape).to(weight)
    hidden = torch.randn(n, stack.layers[0].qkv.in_features).to(weight)
    reference_kv, before = kv.clone(), hidden.clone()
    taps = (0, len(stack.layers) - 1)
    reference = DecoderStack(spec, stack.layers, stack.rotary)
    expected, expected_taps = reference.forward(hidden, window, reference_kv, taps)
    actual, actual_taps = stack.forward(hidden, window, kv, taps)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)
    torch.testing.assert_close(actual_taps, expected_taps, atol=atol, rtol=rtol)
    torch.testing.assert_close(kv, reference_kv, atol=atol, rtol=rtol)
    slots = window.slots()
    kv[..., slots, :] = reference_kv[..., slots, :]
    assert torch.equal(kv, reference_kv)
    assert torch.equal(hidden, before)


@interpreted
@pytest.mark.parametrize(("n", "prefix_len", "kind", "options"), TINY_CASES)
def test_interpreted_stack_equals_reference(n, prefix_len, kind, options):
    stack = TritonDecoderStack(*random_layers(**options))
    check_equals_reference(stack, make_window(n, prefix_len, kind, kv_extent=512), atol=2e-5, rtol=1e-4)


@interpreted
def test_interpreted_splits_are_merged_for_many_rows():
    """Key splits, some empty, change nothing, and leave their counters as the next pass needs them."""
    tiles = replace(
        tiles_for(17, 512),
        num_splits=4,
        attention=Tile(16, 32, 0, 2, 4, 1),
        out=Tile(16, 16, 32, 1, 4, 1),
        gate_up=Tile(32, 16, 16, 1, 4, 1),
    )
    stack = TritonDecoderStack(*random_layers(num_layers=1), tiles=lambda n, kv_extent: tiles)
    for prefix_len in (200, 3, 200):
        check_equals_reference(
            stack, make_window(17, prefix_len, "tree", kv_extent=512), atol=2e-5, rtol=1e-4
        )


@interpreted
def test_interpreted_one_row_of_many_tiles():
    """More weight tiles than registers hold take the loop."""
    tiles = replace(tiles_for(1, 512), down=Tile(1, 4, 4, 1, 4, 1))
    stack = TritonDecoderStack(*random_layers(num_layers=1), tiles=lambda n, kv_extent: tiles)
    check_equals_reference(stack, make_window(1, 9, "causal", kv_extent=512), atol=2e-5, rtol=1e-4)


@interpreted
def test_interpreted_argmax_takes_the_lowest_of_equals():
    logits = torch.randn(2, 5000)
    logits[0, 4100] = logits[0, 77] = 9.0
    logits[1, 4999] = 9.0
    assert argmax_rows(logits).tolist() == [77, 4999]


@compiled
def test_kernels_through_the_interpreter():
    """Triton reads TRITON_INTERPRET once, when it is imported, hence a process of its own."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider",
         "-k", "interpreted", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert f"{len(TINY_CASES) + 3} passed" in run.stdout, run.stdout + run.stderr
    assert run.returncode == 0


def test_prefill_runs_the_reference(monkeypatch):
    """More rows than the kernels are made for give exactly what the plain stack gives."""
    monkeypatch.setattr(triton_decoder, "MAX_WINDOW_TOKENS", 4)
    spec, layers, rotary = random_layers()
    hidden, window = torch.randn(5, 48), make_window(5, 3, "causal")
    kv = torch.randn(2, 2, 2, 64, 16)
    expected, expected_taps = DecoderStack(spec, layers, rotary).forward(hidden, window, kv.clone(), (1,))
    actual, actual_taps = TritonDecoderStack(spec, layers, rotary).forward(hidden, window, kv, (1,))
    assert torch.equal(actual, expected)
    assert torch.equal(actual_taps, expected_taps)


def with_first(layers, **changes):
    return [replace(layers[0], **changes), *layers[1:]]


@pytest.mark.parametrize("head_dim", [24, 8])
def test_refuses_head_sizes_without_a_tile(head_dim):
    spec, layers, _ = random_layers(head_dim=head_dim)
    assert f"head_dim is {head_dim}" in triton_unsupported_reason(spec, layers)


def test_refuses_what_the_kernels_do_not_compute():
    spec, layers, rotary = random_layers(head_norm=True)
    assert triton_unsupported_reason(spec, layers) is None
    biased = Linear(torch.randn(48, 96))
    biased.weight, biased.is_packed, biased.bias = torch.randn(48, 96), False, torch.randn(48)
    packed = Linear(torch.randn(48, 96))
    packed.is_packed = True
    assert "bias outside qkv" in triton_unsupported_reason(spec, with_first(layers, out=biased))
    assert "packed" in triton_unsupported_reason(spec, with_first(layers, out=packed))
    assert "only one" in triton_unsupported_reason(spec, with_first(layers, k_norm=None))
    half_spec, half_layers, _ = random_layers(dtype=torch.float16)
    assert "float16" in triton_unsupported_reason(half_spec, half_layers)
    with pytest.raises(UnsupportedModelError, match=r"bias outside qkv.*use DecoderStack"):
        TritonDecoderStack(spec, with_first(layers, out=biased), rotary)


@pytest.mark.gpu
@compiled
@pytest.mark.parametrize(("n", "prefix_len", "kind", "head_norm"), GPU_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_stack_equals_reference(n, prefix_len, kind, head_norm, dtype):
    stack = TritonDecoderStack(*random_layers(**SMOLLM2, head_norm=head_norm, dtype=dtype, device="cuda"))
    atol = 1e-4 if dtype == torch.float32 else 8e-2
    window = make_window(n, prefix_len, kind, kv_extent=2048, device="cuda")
    check_equals_reference(stack, window, atol=atol, rtol=atol)


@pytest.mark.gpu
@compiled
def test_captured_stack_follows_the_device_prefix():
    """One graph, replayed at other prefixes, equals the reference at each; also repeated replays agree."""
    stack = TritonDecoderStack(*random_layers(**SMOLLM2, num_layers=4, dtype=torch.bfloat16, device="cuda"))
    window = make_window(17, 5, "tree", kv_extent=2048, device="cuda")
    depths, hidden = window.positions - 5, torch.randn(17, 576, device="cuda").bfloat16()
    kv = torch.randn(4, 2, 3, 2048, 64, device="cuda").bfloat16()
    stack.forward(hidden, window, kv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = stack.forward(hidden, window, kv)
    for prefix_len in (0, 63, 700, 1900):
        window.prefix_len.fill_(prefix_len)
        window.positions.copy_(prefix_len + depths)
        expected, _ = DecoderStack(stack.spec, stack.layers, stack.rotary).forward(hidden, window, kv.clone())
        graph.replay()
        first = out.clone()
        torch.testing.assert_close(first, expected, atol=8e-2, rtol=8e-2)
        for _ in range(50):
            graph.replay()
        assert torch.equal(out, first)
