# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""Penalties and target tokens on a GPU without sorting: what `penalties` and `choose_torch` do.

One kernel scales, filters, adds keyed noise and takes the best of every part of every row, and another the
best part; where filters cut a row is found before, by `triton_cut`. Logits are read, never written, and
nothing of [rows, V] is stored. Import it only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.sglang_plugin.batch_sampling import BatchSampling, PenaltyRows
from ddtree.sglang_plugin.sampling_filters import TiesAtCut
from ddtree.sglang_plugin.triton_cut import find_cuts, gap_bits, scaled_logits
from ddtree.tree.triton_draw import draw_merge_kernel, uniforms_of

PART_TOKENS = 1024


@triton.jit
def choose_part_kernel(
    logits_ptr,  # [bs * W, V]
    temperatures_ptr,  # these four [bs]
    top_ks_ptr,
    seeds_ptr,
    filter_places_ptr,
    positions_ptr,  # [bs * W] int64, of the nodes
    peaks_ptr,  # these three [n * W], of `Cuts`
    cuts_ptr,
    last_tokens_ptr,
    best_ptr,  # [bs * W, num_parts] float64
    tokens_ptr,  # [bs * W, num_parts] int32
    vocab,
    row_stride,
    width,
    BLOCK: tl.constexpr,
):
    """The best of BLOCK tokens of row `program_id(1)`: by logit for a greedy request, else with noise."""
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    request, column = row // width, row % width
    is_greedy = tl.load(top_ks_ptr + request) <= 1
    temperature = tl.where(is_greedy, 1.0, tl.load(temperatures_ptr + request))
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    scaled = scaled_logits(logits_ptr + row * row_stride, tokens, vocab, temperature)
    filter_place = tl.load(filter_places_ptr + request)
    if filter_place >= 0:
        place = filter_place * width + column
        bits, cut = gap_bits(scaled, tl.load(peaks_ptr + place)), tl.load(cuts_ptr + place)
        stays = (bits < cut) | ((bits == cut) & (tokens <= tl.load(last_tokens_ptr + place)))
        scaled = tl.where(stays, scaled, float("-inf"))
    totals = scaled.to(tl.float64)
    # Where a filter has left nothing there is nothing to draw, and noise is dear.
    if (tl.max(scaled, 0) > float("-inf")) & (is_greedy == 0):
        uniforms = uniforms_of(tl.load(seeds_ptr + request), tl.load(positions_ptr + row) + 1, tokens)
        totals = (0.0 - tl.log(0.0 - tl.log(uniforms))) + totals
    best, index = tl.max(totals, 0, return_indices=True)
    tl.store(best_ptr + row * num_parts + part, best)
    tl.store(tokens_ptr + row * num_parts + part, part * BLOCK + index)


@triton.jit
def penalise_kernel(
    logits_ptr,  # [bs * W, V], changed in place
    counts_ptr,  # [num_slots, V] int32
    requests_ptr,  # these five [n]
    slots_ptr,
    frequency_ptr,
    presence_ptr,
    repetition_ptr,
    vocab,
    row_stride,
    width,
    BLOCK: tl.constexpr,
):
    """`apply_counts_` on BLOCK logits of row `program_id(1)` of the penalised requests' rows."""
    place = tl.program_id(1) // width
    row = tl.load(requests_ptr + place) * width + tl.program_id(1) % width
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab
    pointers = logits_ptr + row * row_stride + tokens
    logits = tl.load(pointers, mask=is_token, other=0.0)
    counts = tl.load(counts_ptr + tl.load(slots_ptr + place) * vocab + tokens, mask=is_token, other=0)
    additive = 0.0 - counts.to(tl.float32) * tl.load(frequency_ptr + place)
    additive = additive - tl.where(counts > 0, tl.load(presence_ptr + place), 0.0)
    penalised = (logits.to(tl.float32) + additive).to(logits.dtype).to(tl.float32)
    scaling = tl.where(counts > 0, tl.load(repetition_ptr + place), 1.0)
    penalised = tl.where(penalised < 0, penalised * scaling, tl.div_rn(penalised, scaling))
    tl.store(pointers, penalised.to(logits.dtype), mask=is_token)


def penalise_committed_triton_(
    logits: Tensor,  # [bs, W, V], changed in place
    penalties: PenaltyRows,
    start: int,
    stop: int,
    counts: Tensor,  # [num_slots, V] int32
) -> None:
    """The penalties of the committed output for the penalised requests `start` to `stop`, in one launch."""
    by_row = logits.flatten(0, 1)
    assert by_row.data_ptr() == logits.data_ptr()
    assert logits.stride(2) == 1
    vocab, width = by_row.shape[1], logits.shape[1]
    with torch.cuda.device_of(logits):
        # Without fused multiply-adds, so that it rounds as the torch path does.
        penalise_kernel[(triton.cdiv(vocab, PART_TOKENS), (stop - start) * width)](
            by_row, counts, penalties.rows.indices[start:stop], penalties.slots[start:stop],
            penalties.frequency[start:stop], penalties.presence[start:stop], penalties.repetition[start:stop],
            vocab, by_row.stride(0), width, BLOCK=PART_TOKENS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip


def choose_triton(
    logits: Tensor,  # [bs * W, V] float32, bf16 or fp16
    sampling: BatchSampling,
    positions: Tensor,  # [bs, W] int64
    is_sequential: bool,
    ties: TiesAtCut,
) -> Tensor:
    """The tokens of processed logits, [bs, W] int64, as `choose_torch` chooses them.

    Sums of weights and logarithms may differ from torch's in their last bits, so a token within rounding of
    a top-p cut may fall on its other side, and of two totals a few float64 steps apart either may win.
    """
    logits, width = _as_rows(logits), positions.shape[1]
    num_rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, PART_TOKENS)
    best = logits.new_empty(num_rows, num_parts, dtype=torch.float64)
    tokens = logits.new_empty(num_rows, num_parts, dtype=torch.int32)
    out = positions.new_empty(positions.shape)
    cuts = find_cuts(logits, sampling, width, is_sequential, ties)
    with torch.cuda.device_of(logits):
        choose_part_kernel[(num_parts, num_rows)](
            logits, sampling.temperatures, sampling.top_ks, sampling.seeds, sampling.filter_places,
            positions.contiguous(), *cuts, best, tokens, vocab, logits.stride(0), width,
            BLOCK=PART_TOKENS, num_warps=4,
        )  # fmt: skip
        draw_merge_kernel[(num_rows,)](
            best, tokens, out, num_parts, PARTS_PAD=triton.next_power_of_2(num_parts), num_warps=1
        )
    return out


def _as_rows(logits: Tensor) -> Tensor:
    """`logits` [n, V] with rows that are contiguous in themselves."""
    return logits if logits.stride(1) == 1 else logits.contiguous()
