"""Test double of `sgl_kernel`, whose CPU build has no wheel: what SGLang calls here, in plain torch.

SGLang imports many of its names where its device is the CPU. Those not written below can be imported
too, and say so when they are called.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

__version__ = "0.0.0+test.double"


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"the test double of sgl_kernel has no {name}")

    return missing


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,  # [bs]
    req_to_token: Tensor,  # [rows, columns], written
    start_offsets: Tensor,  # [bs]
    end_offsets: Tensor,  # [bs]
    out_cache_loc: Tensor,  # [sum of lengths]
    num_columns: int,
) -> None:
    """Write the requests' next slots into columns start .. end - 1 of their rows."""
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offsets.tolist(), end_offsets.tolist(), strict=True
    ):
        check_columns(end, num_columns)
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,  # [bs]
    req_to_token: Tensor,  # [rows, columns]
    start_offsets: Tensor,  # [bs]
    end_offsets: Tensor,  # [bs]
    out_cache_loc: Tensor,  # [sum of lengths], written
    num_columns: int,
) -> None:
    """Read the slots in columns start .. end - 1 of the requests' rows."""
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offsets.tolist(), end_offsets.tolist(), strict=True
    ):
        check_columns(end, num_columns)
        slots = req_to_token[row, start:end]
        out_cache_loc[taken : taken + end - start] = slots.to(out_cache_loc.dtype)
        taken += end - start


def copy_all_layer_kv_cache_cpu(
    data_pointers: Tensor,  # [buffers]
    row_bytes: Tensor,  # [buffers]
    target_slots: Tensor,  # [n]
    source_slots: Tensor,  # [n]
) -> None:
    """Copy rows of every buffer, all read before any is written; here SGLang only warms it up."""
    for pointer, size in zip(data_pointers.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + slot * size, size) for slot in source_slots.tolist()]
        for slot, row in zip(target_slots.tolist(), rows, strict=True):
            ctypes.memmove(pointer + slot * size, row, size)


def check_columns(end: int, num_columns: int) -> None:
    """On a GPU the kernels go on into the neighbour's row, unseen; here that ends the run."""
    if end > num_columns:
        raise IndexError(
            f"column {end} of a row of {num_columns} slots: the neighbour's row would be touched"
        )
