"""Tile sizes of the decoder's Triton kernels by window width."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import triton

# When a kernel may start: after the one before it, at that one's last stores, or at once.
Launch = Literal["plain", "late", "early"]
MAX_KEY_SPLITS = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of one kernel.

    Attributes:
        block_m: rows a program takes; 1 selects the one-row form, otherwise at least 16.
        block_n: weight rows a program takes; in attention, key slots a step.
        block_k: input features a step (unused by attention).
        k_groups: groups of warps that share a step's features (in attention, its keys) among them;
            16 or more are left for each.
        num_warps, num_stages: Triton's launch settings.
    """

    block_m: int
    block_n: int
    block_k: int
    k_groups: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class StackTiles:
    """Tiles of a layer's five kernels.

    Attributes:
        qkv: where heads have no norm.
        qkv_whole_heads: where they have one; its block_n is the head's size whatever it says.
        attention, out, gate_up, down: as they say.
        num_splits: most key splits of attention.
        launch: how the kernels follow each other on devices that leave a choice.
    """

    qkv: Tile
    qkv_whole_heads: Tile
    attention: Tile
    out: Tile
    gate_up: Tile
    down: Tile
    num_splits: int
    launch: Launch


# Widest window -> tiles, narrowest first. Measured on an H200 by benchmarks/bench_decoder_gpu.py at hidden
# size 576 and a prefix of 300: each kernel alone over 30 layers, then the whole stack in each launch mode.
TABLE: tuple[tuple[int, StackTiles], ...] = (
    (
        1,
        StackTiles(
            qkv=Tile(1, 8, 64, 1, 2, 1),
            qkv_whole_heads=Tile(1, 64, 64, 1, 8, 1),
            attention=Tile(16, 128, 0, 4, 4, 2),
            out=Tile(1, 4, 64, 1, 1, 1),
            gate_up=Tile(1, 16, 64, 1, 4, 1),
            down=Tile(1, 4, 256, 1, 4, 1),
            num_splits=MAX_KEY_SPLITS,
            launch="early",
        ),
    ),
    (
        16,
        StackTiles(
            qkv=Tile(16, 8, 256, 4, 4, 4),
            qkv_whole_heads=Tile(16, 64, 64, 1, 4, 10),
            attention=Tile(16, 64, 0, 4, 4, 2),
            out=Tile(16, 8, 128, 2, 2, 6),
            gate_up=Tile(16, 16, 128, 2, 2, 6),
            down=Tile(16, 8, 256, 4, 4, 7),
            num_splits=8,
            launch="late",
        ),
    ),
    (
        32,
        StackTiles(
            qkv=Tile(16, 32, 128, 2, 2, 6),
            qkv_whole_heads=Tile(16, 64, 128, 4, 4, 6),
            attention=Tile(16, 64, 0, 4, 4, 2),
            out=Tile(16, 16, 128, 2, 2, 6),
            gate_up=Tile(16, 64, 128, 1, 4, 6),
            down=Tile(16, 16, 256, 4, 4, 7),
            num_splits=8,
            launch="late",
        ),
    ),
    (
        64,
        StackTiles(
            qkv=Tile(16, 32, 128, 2, 2, 6),
            qkv_whole_heads=Tile(16, 64, 128, 4, 4, 6),
            attention=Tile(16, 128, 0, 4, 4, 2),
            out=Tile(16, 16, 128, 2, 2, 6),
            gate_up=Tile(32, 64, 128, 1, 4, 6),
            down=Tile(16, 16, 256, 4, 4, 7),
            num_splits=8,
            launch="late",
        ),
    ),
    (
        96,
        StackTiles(
            qkv=Tile(16, 64, 128, 1, 4, 4),
            qkv_whole_heads=Tile(32, 64, 128, 4, 4, 4),
            attention=Tile(16, 128, 0, 4, 4, 2),
            out=Tile(16, 64, 64, 1, 4, 4),
            gate_up=Tile(16, 64, 64, 1, 4, 4),
            down=Tile(16, 32, 256, 4, 4, 7),
            num_splits=4,
            launch="plain",
        ),
    ),
    (
        256,
        StackTiles(
            qkv=Tile(32, 64, 64, 1, 4, 10),
            qkv_whole_heads=Tile(32, 64, 128, 4, 4, 4),
            attention=Tile(16, 64, 0, 2, 2, 2),
            out=Tile(32, 32, 64, 1, 4, 10),
            gate_up=Tile(32, 64, 64, 1, 4, 10),
            down=Tile(32, 32, 128, 1, 4, 4),
            num_splits=4,
            launch="late",
        ),
    ),
)


def tiles_for(num_tokens: int, kv_extent: int) -> StackTiles:
    """Tiles for a window of `num_tokens` tokens that reads up to `kv_extent` key slots."""
    tiles = next((tiles for widest, tiles in TABLE if num_tokens <= widest), TABLE[-1][1])
    return replace(tiles, num_splits=min(tiles.num_splits, triton.cdiv(kv_extent, 128)))
