"""Tile sizes of the decoder's Triton kernels by window width."""

from __future__ import annotations

from dataclasses import dataclass
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


def tiles_for(num_tokens: int, kv_extent: int) -> StackTiles:
    """Tiles for a window of `num_tokens` tokens that reads up to `kv_extent` key slots.

    Fitted to hidden sizes near 576 on an H200: enough programs to use every multiprocessor's share
    of bandwidth, and all of a program's input on its way at once.
    """
    num_splits = min(MAX_KEY_SPLITS, triton.cdiv(kv_extent, 128))
    if num_tokens == 1:
        return StackTiles(
            qkv=Tile(1, 8, 64, 1, 2, 1),
            qkv_whole_heads=Tile(1, 64, 64, 1, 8, 1),
            attention=Tile(16, 128, 0, 4, 4, 2),
            out=Tile(1, 4, 64, 1, 1, 1),
            gate_up=Tile(1, 16, 64, 1, 4, 1),
            down=Tile(1, 4, 256, 1, 4, 1),
            num_splits=num_splits,
            launch="early",
        )
    if num_tokens <= 16:
        return StackTiles(
            qkv=Tile(16, 16, 128, 4, 4, 6),
            qkv_whole_heads=Tile(16, 64, 128, 4, 4, 6),
            attention=Tile(16, 128, 0, 4, 4, 2),
            out=Tile(16, 16, 128, 4, 4, 6),
            gate_up=Tile(16, 32, 128, 4, 4, 6),
            down=Tile(16, 16, 256, 4, 4, 7),
            num_splits=num_splits,
            launch="plain",
        )
    if num_tokens <= 64:
        return StackTiles(
            qkv=Tile(32, 16, 128, 4, 4, 6),
            qkv_whole_heads=Tile(16, 64, 128, 4, 4, 6),
            attention=Tile(16, 128, 0, 4, 4, 2),
            out=Tile(16, 16, 128, 4, 4, 6),
            gate_up=Tile(32, 32, 128, 4, 4, 6),
            down=Tile(16, 16, 256, 4, 4, 7),
            num_splits=num_splits,
            launch="plain",
        )
    return StackTiles(
        qkv=Tile(32, 32, 128, 4, 4, 6),
        qkv_whole_heads=Tile(32, 64, 128, 4, 4, 4),
        attention=Tile(16, 128, 0, 4, 4, 2),
        out=Tile(32, 32, 128, 4, 4, 6),
        gate_up=Tile(64, 64, 64, 1, 4, 6),
        down=Tile(32, 32, 128, 4, 4, 5),
        num_splits=num_splits,
        launch="plain",
    )
