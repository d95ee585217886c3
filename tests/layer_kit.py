"""Random decoder layers and windows for the tests of `ddtree.layers`, all from seeds."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.layers.decoder import DecoderLayer, DecoderSpec
from ddtree.layers.linear import GateUp, Linear
from ddtree.layers.rotary import RotaryTable
from ddtree.layers.window import Window


def unpacked(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A Linear whose weight keeps the layout that kernels read, on the CPU too."""
    linear = Linear(weight, bias)
    linear.weight, linear.is_packed = weight, False
    return linear


def unpacked_gate_up(weight: Tensor) -> GateUp:
    """The same of a GateUp."""
    gate_up = GateUp(weight)
    gate_up.weight, gate_up.is_packed = weight, False
    return gate_up


def random_layers(
    *,
    num_layers: int = 2,
    hidden: int = 48,
    intermediate: int = 80,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    head_norm: bool = False,
    qkv_bias: bool = False,
    sliding_windows: tuple[int | None, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[DecoderSpec, list[DecoderLayer], RotaryTable]:
    """What a stack is built from; activations keep their size from layer to layer."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def placed(x: Tensor) -> Tensor:
        return x.to(device, dtype)

    def linear(rows: int, cols: int, bias: bool = False) -> Linear:
        return unpacked(placed(normal(rows, cols) * cols**-0.5), placed(normal(rows)) if bias else None)

    def norm(features: int) -> Tensor:
        return placed(1 + 0.1 * normal(features))

    layers = [
        DecoderLayer(
            input_norm=norm(hidden),
            qkv=linear((num_heads + 2 * num_kv_heads) * head_dim, hidden, qkv_bias),
            q_norm=norm(head_dim) if head_norm else None,
            k_norm=norm(head_dim) if head_norm else None,
            out=linear(hidden, num_heads * head_dim),
            post_norm=norm(hidden),
            gate_up=unpacked_gate_up(placed(normal(2 * intermediate, hidden) * hidden**-0.5)),
            down=linear(hidden, intermediate),
        )
        for _ in range(num_layers)
    ]
    windows = sliding_windows or (None,) * num_layers
    spec = DecoderSpec(num_heads, num_kv_heads, head_dim, 1e-5, windows)
    inv_freq = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return spec, layers, RotaryTable(inv_freq.to(device), 2048, dtype)


def random_tree(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Depths [n] and ancestor mask [n, n] of a random tree, parents before children."""
    generator = torch.Generator().manual_seed(seed)
    depths, mask = torch.zeros(n, dtype=torch.int64), torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        parent = int(torch.randint(0, i, (1,), generator=generator))
        depths[i] = depths[parent] + 1
        mask[i] |= mask[parent]
    return depths, mask


def make_window(
    n: int, prefix_len: int, kind: str, *, kv_extent: int | None = None, device: str = "cpu"
) -> Window:
    """A window of kind causal, full, tree or self; with `kv_extent` as in a CUDA graph, its start unknown."""
    depths, mask = torch.arange(n), None
    if kind == "tree":
        depths, mask = random_tree(n, seed=n)
    elif kind == "full":
        mask = torch.ones(n, n, dtype=torch.bool)
    elif kind == "self":  # not even the root
        mask = torch.eye(n, dtype=torch.bool)
    if mask is not None:
        mask = mask.to(device)
    positions = (prefix_len + depths).to(device)
    if kv_extent is None:
        return Window.at(prefix_len, positions, mask)
    return Window(positions, torch.tensor([prefix_len], device=device), kv_extent, mask, None)
