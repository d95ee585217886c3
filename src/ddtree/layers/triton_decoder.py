"""The decoder stack of small windows as five Triton kernels a layer; see `ddtree.layers.triton_kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ddtree.errors import UnsupportedModelError
from ddtree.layers.decoder import DecoderLayer, DecoderSpec, DecoderStack
from ddtree.layers.rotary import RotaryTable
from ddtree.layers.triton_attention import attention_kernel
from ddtree.layers.triton_kernels import (
    project_add_kernel,
    qkv_rope_kernel,
    start_window_kernel,
    swiglu_kernel,
)
from ddtree.layers.triton_tiles import Launch, StackTiles, Tile, tiles_for
from ddtree.layers.window import Window

KERNELS_PER_LAYER = 5
# Above this many rows cuBLAS and the library's attention win over kernels made for small windows.
MAX_WINDOW_TOKENS = 160
# Fewest rows of an attention tile, hence the most programs that meet at a key head.
MIN_ATTENTION_ROWS = 16
# An input row is read in registers or short loops; wider layers belong to library matrix products.
MAX_FEATURES = 16384


def triton_unsupported_reason(spec: DecoderSpec, layers: Sequence[DecoderLayer]) -> str | None:
    """Why these layers cannot run on the Triton path, or None."""
    head_dim, dtype = spec.head_dim, layers[0].qkv.weight.dtype
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        return f"head_dim is {head_dim}; the kernels take 16, 32, 64, 128 or 256"
    if dtype not in (torch.bfloat16, torch.float32):
        return f"weights are {dtype}; the kernels take bfloat16 and float32"
    for i, layer in enumerate(layers):
        linears = (layer.qkv, layer.out, layer.gate_up, layer.down)
        if any(linear.is_packed or not linear.weight.is_contiguous() for linear in linears):
            return f"layer {i} has packed or strided weights"
        if any(linear.bias is not None for linear in linears[1:]):
            return f"layer {i} has a bias outside qkv"
        if (layer.q_norm is None) != (layer.k_norm is None):
            return f"layer {i} has a norm on only one of query and key heads"
        if any(linear.in_features > MAX_FEATURES for linear in linears):
            return f"layer {i} is wider than {MAX_FEATURES} features"
    return None


def can_launch_dependents(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch (Hopper and newer)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@dataclass(frozen=True, slots=True)
class Buffers:
    """What the kernels of one pass hand to each other; layers reuse them.

    Attributes:
        rope: [n, head_dim], cosines and sines of the window's positions.
        query, attention: [n, num_heads * head_dim].
        parts: [num_splits, n, num_heads * head_dim], attention over splits of the keys.
        lse: [num_splits, n, num_heads] float32, base 2.
        middle: [n, hidden], the residual stream between attention and MLP.
        gated: [n, intermediate].
        hidden: [n, hidden], the residual stream after a layer that is not tapped.
        scaled: [n, hidden], the residual stream times the next norm's weight.
        squares: [column blocks, n] float32, its squares summed over each of its writer's blocks.
        taps: [n, num_taps * hidden], where tapped layers leave their output.
    """

    rope: Tensor
    query: Tensor
    attention: Tensor
    parts: Tensor
    lse: Tensor
    middle: Tensor
    gated: Tensor
    hidden: Tensor
    scaled: Tensor
    squares: Tensor
    taps: Tensor

    @classmethod
    def empty(
        cls, hidden: Tensor, spec: DecoderSpec, intermediate: int, tiles: StackTiles, num_taps: int
    ) -> Buffers:
        n, features = hidden.shape
        heads, splits = spec.num_heads * spec.head_dim, tiles.num_splits
        num_blocks = triton.cdiv(features, min(tiles.out.block_n, tiles.down.block_n))
        return cls(
            rope=hidden.new_empty(n, spec.head_dim),
            query=hidden.new_empty(n, heads),
            attention=hidden.new_empty(n, heads),
            parts=hidden.new_empty(splits, n, heads),
            lse=hidden.new_empty(splits, n, spec.num_heads, dtype=torch.float32),
            middle=hidden.new_empty(n, features),
            gated=hidden.new_empty(n, intermediate),
            hidden=hidden.new_empty(n, features),
            scaled=hidden.new_empty(n, features),
            squares=hidden.new_empty(num_blocks, n, dtype=torch.float32),
            taps=hidden.new_empty(n, num_taps * features),
        )


@dataclass(frozen=True, slots=True)
class WindowArgs:
    """A window as the kernels read it.

    Attributes:
        positions: [n] int64.
        prefix_len: [1] int64.
        mask: [n, n] uint8, or `positions` as a stand-in where the window is causal.
        has_mask: whether `mask` is one.
    """

    positions: Tensor
    prefix_len: Tensor
    mask: Tensor
    has_mask: bool

    @classmethod
    def of(cls, window: Window) -> WindowArgs:
        positions, tree_mask = window.positions, window.tree_mask
        if tree_mask is None:
            return cls(positions, window.prefix_len, positions, False)
        return cls(positions, window.prefix_len, tree_mask.contiguous().view(torch.uint8), True)


class TritonDecoderStack(DecoderStack):
    """`DecoderStack` with small windows on fused kernels; larger ones (prefill) run the reference.

    A pass makes no host sync and reads `prefix_len` on the device, so it can be captured in a CUDA
    graph; outside of one, launching costs more than the kernels save. Passes of one stack share the
    counters of attention, so they must not overlap on two streams.

    Args:
        spec: shape of the stack.
        layers: weights, first layer first, all of one dtype and device.
        rotary: tables up to the longest position used.
        tiles: tile sizes for a number of tokens and key slots, `tiles_for` unless measuring.

    Raises:
        UnsupportedModelError: for layers that `triton_unsupported_reason` names.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        layers: Sequence[DecoderLayer],
        rotary: RotaryTable,
        tiles: Callable[[int, int], StackTiles] = tiles_for,
    ) -> None:
        reason = triton_unsupported_reason(spec, layers)
        if reason is not None:
            raise UnsupportedModelError(f"the Triton path cannot run this model: {reason}; use DecoderStack")
        super().__init__(spec, layers, rotary)
        self.tiles = tiles
        weight = self.layers[0].qkv.weight
        self.pdl = can_launch_dependents(weight.device)
        group = spec.num_heads // spec.num_kv_heads
        row_blocks = triton.cdiv(MAX_WINDOW_TOKENS * group, MIN_ATTENTION_ROWS)
        self._arrivals = weight.new_zeros(spec.num_kv_heads * row_blocks, dtype=torch.int32)

    @property
    def kernels_per_layer(self) -> int:
        """Kernels a layer launches for a window of up to `MAX_WINDOW_TOKENS` tokens."""
        return KERNELS_PER_LAYER

    def forward(
        self, hidden: Tensor, window: Window, kv_data: Tensor, tap_layer_ids: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run the stack.

        Args:
            hidden: [n, hidden] embeddings of the window's tokens, left as they are.
            window: their positions, slots and mask.
            kv_data: [num_layers, 2, num_kv_heads, capacity, head_dim], written at the window's slots.
            tap_layer_ids: layers whose outputs are wanted (layer id i = output of layer i).

        Returns: hidden [n, hidden] before the final norm (rows strided where the last layer is a
        tap), and the taps [n, num_taps * hidden] in layer order or None.
        """
        n = hidden.shape[0]
        if n > MAX_WINDOW_TOKENS:
            return super().forward(hidden, window, kv_data, tap_layer_ids)
        tiles = self.tiles(n, window.kv_extent)
        taps = sorted({i for i in tap_layer_ids if i < len(self.layers)})
        intermediate = self.layers[0].down.in_features
        buffers = Buffers.empty(hidden, self.spec, intermediate, tiles, len(taps))
        args = WindowArgs.of(window)
        hidden = hidden.contiguous()
        self._launch_start(hidden, args, buffers)
        num_parts = 1
        for i, layer in enumerate(self.layers):
            out = buffers.hidden
            if i in taps:
                out = buffers.taps.view(n, len(taps), -1)[:, taps.index(i)]
            # Nobody reads what the last layer leaves for the norm after it.
            next_norm = self.layers[min(i + 1, len(self.layers) - 1)].input_norm
            self._launch_qkv(i, args, kv_data[i], buffers, num_parts, tiles)
            self._launch_attention(i, args, kv_data[i], buffers, tiles)
            num_parts = self._launch_project_add(
                buffers.attention, layer.out.weight, hidden, layer.post_norm, buffers.middle, buffers,
                tiles.out, tiles.launch,
            )  # fmt: skip
            self._launch_swiglu(layer, buffers, num_parts, tiles)
            num_parts = self._launch_project_add(
                buffers.gated, layer.down.weight, buffers.middle, next_norm, out, buffers,
                tiles.down, tiles.launch,
            )  # fmt: skip
            hidden = out
        return hidden, buffers.taps if taps else None

    def _launch_mode(self, launch: Launch) -> Launch:
        return launch if self.pdl else "plain"

    def _launch_options(self, tile: Tile, launch: Launch) -> dict[str, int | bool]:
        # The interpreter knows no `launch_pdl`, so it is passed only where it is used.
        options: dict[str, int | bool] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if self.layers[0].qkv.weight.dtype == torch.float32:  # twice the shared memory a stage
            options["num_stages"] = min(tile.num_stages, 2)
        if self._launch_mode(launch) != "plain":
            options["launch_pdl"] = True
        return options

    def _launch_start(self, hidden: Tensor, args: WindowArgs, buffers: Buffers) -> None:
        n, features = hidden.shape
        start_window_kernel[(n,)](
            hidden, self.layers[0].input_norm, self.rotary.cos, self.rotary.signed_sin, args.positions,
            buffers.scaled, buffers.squares, buffers.rope,
            features, self.spec.head_dim, triton.next_power_of_2(features),
        )  # fmt: skip

    def _launch_qkv(
        self, i: int, args: WindowArgs, kv: Tensor, buffers: Buffers, num_parts: int, tiles: StackTiles
    ) -> None:
        spec, layer, n = self.spec, self.layers[i], buffers.query.shape[0]
        has_head_norm, weight = layer.q_norm is not None, layer.qkv.weight
        tile = tiles.qkv_whole_heads if has_head_norm else tiles.qkv
        block_n = spec.head_dim if has_head_norm else min(tile.block_n, spec.head_dim)
        grid = (layer.qkv.out_features // block_n, triton.cdiv(n, tile.block_m))
        qkv_rope_kernel[grid](
            buffers.scaled, buffers.squares, weight, weight if layer.qkv.bias is None else layer.qkv.bias,
            layer.input_norm if layer.q_norm is None else layer.q_norm,
            layer.input_norm if layer.k_norm is None else layer.k_norm,
            buffers.rope, args.prefix_len, buffers.query, kv,
            n, num_parts, kv.stride(0), kv.stride(1), spec.rms_norm_eps,
            layer.qkv.in_features, spec.num_heads, spec.num_kv_heads, spec.head_dim,
            layer.qkv.bias is not None, has_head_norm, self._launch_mode(tiles.launch),
            triton.next_power_of_2(buffers.squares.shape[0]),
            tile.block_m, block_n, tile.block_k, tile.k_groups,
            **self._launch_options(tile, tiles.launch),
        )  # fmt: skip

    def _launch_attention(
        self, i: int, args: WindowArgs, kv: Tensor, buffers: Buffers, tiles: StackTiles
    ) -> None:
        spec, tile, n = self.spec, tiles.attention, buffers.query.shape[0]
        group = spec.num_heads // spec.num_kv_heads
        grid = (triton.cdiv(n * group, tile.block_m), spec.num_kv_heads, tiles.num_splits)
        attention_kernel[grid](
            buffers.query, kv, args.mask, args.positions, args.prefix_len,
            buffers.attention, buffers.parts, buffers.lse, self._arrivals,
            n, kv.stride(0), kv.stride(1), spec.head_dim**-0.5 * math.log2(math.e),
            spec.num_heads, spec.num_kv_heads, spec.head_dim, args.has_mask, spec.sliding_windows[i] or 0,
            tiles.num_splits, kv.is_cuda, self._launch_mode(tiles.launch),
            tile.block_m, tile.block_n, tile.k_groups,
            **self._launch_options(tile, tiles.launch),
        )  # fmt: skip

    def _launch_project_add(
        self,
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        next_norm: Tensor,
        out: Tensor,
        buffers: Buffers,
        tile: Tile,
        launch: Launch,
    ) -> int:
        """Returns how many column blocks left their sums of squares."""
        (n, features), num_cols = x.shape, out.shape[1]
        num_blocks: int = triton.cdiv(num_cols, tile.block_n)
        project_add_kernel[(num_blocks, triton.cdiv(n, tile.block_m))](
            x, weight, residual, next_norm, out, buffers.scaled, buffers.squares,
            n, num_cols, residual.stride(0), out.stride(0),
            features, self._launch_mode(launch), tile.block_m, tile.block_n, tile.block_k, tile.k_groups,
            **self._launch_options(tile, launch),
        )  # fmt: skip
        return num_blocks

    def _launch_swiglu(
        self, layer: DecoderLayer, buffers: Buffers, num_parts: int, tiles: StackTiles
    ) -> None:
        (n, intermediate), tile = buffers.gated.shape, tiles.gate_up
        grid = (triton.cdiv(2 * intermediate, tile.block_n), triton.cdiv(n, tile.block_m))
        swiglu_kernel[grid](
            buffers.scaled, buffers.squares, layer.gate_up.weight, buffers.gated,
            n, num_parts, intermediate, self.spec.rms_norm_eps,
            layer.gate_up.in_features, self._launch_mode(tiles.launch),
            triton.next_power_of_2(buffers.squares.shape[0]),
            tile.block_m, tile.block_n, tile.block_k, tile.k_groups,
            **self._launch_options(tile, tiles.launch),
        )  # fmt: skip
