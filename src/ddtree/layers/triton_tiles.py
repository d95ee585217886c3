"""Tile sizes of the decoder's Triton kernels by window width."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile of one kernel.

    Attributes:
        block_m: rows a program takes; 1 selects the one-row form, otherwise at least 16.
        block_n: weight rows a program takes; in attention, key slots a step.
        block_k: input features a step (unused by attention).
        num_warps, num_stages: Triton's launch settings.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class StackTiles:
    """Tiles of a layer's five kernels.

    Attributes:
        qkv: where heads have no norm.
        qkv_whole_heads: where they have one; its block_n is the head's size whatever it says.
        attention, out, gate_up, down: as they say.
        num_splits: key splits of attention, a power of two.
    """

    qkv: Tile
    qkv_whole_heads: Tile
    attention: Tile
    num_splits: int
    out: Tile
    gate_up: Tile
    down: Tile


def tiles_for(num_tokens: int, kv_extent: int) -> StackTiles:
    """Tiles for a window of `num_tokens` tokens that reads up to `kv_extent` key slots.

    One row: whole weight rows at once, and 60 to 192 programs a kernel. More rows: 16-row tiles
    keep at least as many programs; the table is for hidden sizes near 576.
    """
    if num_tokens == 1:
        return StackTiles(
            qkv=Tile(1, 8, 1024, 4, 1),
            qkv_whole_heads=Tile(1, 64, 128, 8, 1),
            attention=Tile(16, 64, 0, 4, 2),
            num_splits=8 if kv_extent >= 256 else 2,
            out=Tile(1, 4, 1024, 4, 1),
            gate_up=Tile(1, 16, 1024, 4, 1),
            down=Tile(1, 4, 512, 4, 1),
        )
    block_m = 16 if num_tokens <= 16 else 32
    return StackTiles(
        qkv=Tile(block_m, 16, 64, 4, 5),
        qkv_whole_heads=Tile(16, 64, 64, 4, 5),
        attention=Tile(16, 64, 0, 4, 2),
        num_splits=1,
        out=Tile(16, 16, 64, 4, 5),
        gate_up=Tile(block_m, 32, 64, 4, 5),
        down=Tile(16, 16, 128, 4, 5),
    )
