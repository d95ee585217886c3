# mypy: disable-error-code="untyped-decorator, no-untyped-def, import-untyped"
"""Where top-k, top-p and min-p cut a row, on a GPU without sorting: what `drop_unlikely_` leaves.

Tokens are ordered by their gap below the row's best scaled logit. Gaps are at least 0, so their bits ascend
with them, and how many tokens are above a bound, and their mass, say whether a token there would stay.
First all parts of a row, each a program, count above a few fixed bounds; the tokens between the two bounds
around the cut, mostly some hundred, go into a list; and one program a row bisects the list, eight ways a
pass. A row whose list would be too long, and one with top-p in sequence, is bisected as a whole.
Import it only where Triton is installed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ddtree.sglang_plugin.batch_sampling import BatchSampling
from ddtree.sglang_plugin.sampling_filters import TiesAtCut

PART_TOKENS = 1024
NUM_BOUNDS = 16
LIST_TOKENS = 2048
SEARCH_TOKENS = 1024
WAYS = 8
INF_BITS = tl.constexpr(0x7F800000)
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
MANY = tl.constexpr(0x7FFFFFFF)


class Cuts(NamedTuple):
    """Where the rows of the filtered requests are cut; n is 1 where there are none."""

    peaks: Tensor  # [n] float32: the largest scaled logit, 0 where there is none
    gap_bits: Tensor  # [n] int32: of the gaps of the last tokens that stay
    last_tokens: Tensor  # [n] int32: of these, the highest id that stays, or the size of the vocabulary


@triton.jit
def scaled_logits(row_ptr, tokens, vocab, temperature):
    """Logits over temperature, float32: -inf for NaN and behind the vocabulary, +inf as the largest float."""
    logits = tl.load(row_ptr + tokens, mask=tokens < vocab, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits != logits, float("-inf"), logits)
    return tl.minimum(tl.div_rn(logits, temperature + tl.zeros_like(logits)), FLOAT_MAX)


@triton.jit
def gap_bits(scaled, peak):
    """Bits of the gaps below the row's best logit, those of +inf for -inf."""
    return (peak - scaled).to(tl.int32, bitcast=True)


@triton.jit
def _fixed_bounds(NUM: tl.constexpr):
    """Gap bits of 1, 2, ... and, last, of +inf, [NUM] int32."""
    places = tl.arange(0, NUM)
    return tl.where(places < NUM - 1, (places + 1.0).to(tl.int32, bitcast=True), INF_BITS)


@triton.jit
def _weights(bits):
    """Weights of tokens relative to the best, from their gap bits."""
    return tl.exp(0.0 - bits.to(tl.float32, bitcast=True))


@triton.jit
def _row(logits_ptr, requests_ptr, temperatures_ptr, place, row_stride, width):
    """(request, pointer to the logits, temperature) of row `place` of the filtered requests' rows."""
    request = tl.load(requests_ptr + place // width)
    row_ptr = logits_ptr + (request * width + place % width) * row_stride
    return request, row_ptr, tl.load(temperatures_ptr + request)


@triton.jit
def _peak(part_max_ptr, num_parts, PARTS_PAD: tl.constexpr):
    """A row's largest scaled logit, 0 where there is none."""
    parts = tl.arange(0, PARTS_PAD)
    peak = tl.max(tl.load(part_max_ptr + parts, mask=parts < num_parts, other=float("-inf")), 0)
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def part_max_kernel(
    logits_ptr, requests_ptr, temperatures_ptr,
    part_max_ptr,  # [n, num_parts] float32
    vocab, row_stride, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest scaled logit of part `program_id(0)` of row `program_id(1)`."""
    part, place = tl.program_id(0), tl.program_id(1)
    _, row_ptr, temperature = _row(logits_ptr, requests_ptr, temperatures_ptr, place, row_stride, width)
    scaled = scaled_logits(row_ptr, part * BLOCK + tl.arange(0, BLOCK), vocab, temperature)
    tl.store(part_max_ptr + place * tl.num_programs(0) + part, tl.max(scaled, 0))


@triton.jit
def part_count_kernel(
    logits_ptr, requests_ptr, temperatures_ptr, part_max_ptr,
    nums_ptr,  # [n, NUM, num_parts] int32: tokens above each of the fixed bounds
    masses_ptr,  # [n, NUM, num_parts] float32
    vocab, row_stride, width,
    BLOCK: tl.constexpr, NUM: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    """Number and mass above the fixed bounds in part `program_id(0)` of row `program_id(1)`."""
    part, place, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    _, row_ptr, temperature = _row(logits_ptr, requests_ptr, temperatures_ptr, place, row_stride, width)
    peak = _peak(part_max_ptr + place * num_parts, num_parts, PARTS_PAD)
    scaled = scaled_logits(row_ptr, part * BLOCK + tl.arange(0, BLOCK), vocab, temperature)
    bits = gap_bits(scaled, peak)
    is_above = bits[None, :] < _fixed_bounds(NUM)[:, None]
    offsets = (place * NUM + tl.arange(0, NUM)) * num_parts + part
    tl.store(nums_ptr + offsets, tl.sum(is_above.to(tl.int32), 1))
    tl.store(masses_ptr + offsets, tl.sum(tl.where(is_above, _weights(bits)[None, :], 0.0), 1))


@triton.jit
def bracket_kernel(
    requests_ptr, top_ks_ptr, top_ps_ptr, max_gaps_ptr, part_max_ptr, nums_ptr, masses_ptr,
    peaks_ptr,  # [n] float32
    brackets_ptr,  # [n, 4] int32: gap bits inside and outside, tokens above the first and between
    limits_ptr,  # [n, 2] float64: mass above, the most that may be above a token that stays
    width, num_parts,
    IS_SEQUENTIAL: tl.constexpr, NUM: tl.constexpr, PARTS_PAD: tl.constexpr,
):  # fmt: skip
    """The two fixed bounds around the cut of row `program_id(0)`."""
    place = tl.program_id(0)
    request = tl.load(requests_ptr + place // width)
    top_k, top_p = tl.load(top_ks_ptr + request), tl.load(top_ps_ptr + request)
    max_gap = tl.load(max_gaps_ptr + request)
    parts = tl.arange(0, PARTS_PAD)
    offsets = (place * NUM + tl.arange(0, NUM)[:, None]) * num_parts + parts[None, :]
    is_part = parts[None, :] < num_parts
    nums = tl.sum(tl.load(nums_ptr + offsets, mask=is_part, other=0), 1)  # [NUM]
    masses = tl.sum(tl.load(masses_ptr + offsets, mask=is_part, other=0.0).to(tl.float64), 1)
    total = tl.max(masses, 0)  # of the last bound, which is above all tokens that weigh anything
    limit = tl.where(top_p < 1.0, total * top_p.to(tl.float64), float("inf"))
    high = tl.minimum(max_gap.to(tl.int32, bitcast=True), INF_BITS - 1) + 1
    bounds = _fixed_bounds(NUM)
    is_inside = (nums < top_k) & (masses <= limit) & (bounds < high)
    low = tl.max(tl.where(is_inside, bounds, 0), 0)
    num_low = tl.max(tl.where(is_inside, nums, 0), 0)
    mass_low = tl.max(tl.where(is_inside, masses, 0.0), 0)
    num_between = tl.min(tl.where(is_inside, MANY, nums), 0) - num_low
    outside = tl.min(tl.where(is_inside, INF_BITS, bounds), 0)
    if IS_SEQUENTIAL & (max_gap < float("inf")) & (top_p < 1.0):
        # The limit is not known before top-k has cut: no list for this row.
        low, num_low, mass_low, num_between, outside = low * 0, num_low * 0, mass_low * 0.0, MANY, INF_BITS
    tl.store(peaks_ptr + place, _peak(part_max_ptr + place * num_parts, num_parts, PARTS_PAD))
    tl.store(brackets_ptr + place * 4, low)
    tl.store(brackets_ptr + place * 4 + 1, outside)
    tl.store(brackets_ptr + place * 4 + 2, num_low)
    tl.store(brackets_ptr + place * 4 + 3, num_between)
    tl.store(limits_ptr + place * 2, mass_low)
    tl.store(limits_ptr + place * 2 + 1, limit)


@triton.jit
def list_kernel(
    logits_ptr, requests_ptr, temperatures_ptr, nums_ptr, peaks_ptr, brackets_ptr,
    list_ptr,  # [n, 2, LIST] int32: gap bits and token ids, by token id
    vocab, row_stride, width,
    BLOCK: tl.constexpr, NUM: tl.constexpr, PARTS_PAD: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Puts the tokens of part `program_id(0)` between the bounds of row `program_id(1)` into its list."""
    part, place, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    low, outside = tl.load(brackets_ptr + place * 4), tl.load(brackets_ptr + place * 4 + 1)
    if tl.load(brackets_ptr + place * 4 + 3) <= LIST:
        bounds = _fixed_bounds(NUM)
        parts = tl.arange(0, PARTS_PAD)
        of_outside = place * NUM + tl.sum((bounds < outside).to(tl.int32), 0)
        of_low = place * NUM + tl.sum((bounds < low).to(tl.int32), 0)
        before = tl.load(nums_ptr + of_outside * num_parts + parts, mask=parts < part, other=0)
        # No fixed bound is 0, and no token is above it.
        before -= tl.load(nums_ptr + of_low * num_parts + parts, mask=(parts < part) & (low > 0), other=0)
        num_before = tl.sum(before, 0)
        _, row_ptr, temperature = _row(logits_ptr, requests_ptr, temperatures_ptr, place, row_stride, width)
        tokens = part * BLOCK + tl.arange(0, BLOCK)
        bits = gap_bits(scaled_logits(row_ptr, tokens, vocab, temperature), tl.load(peaks_ptr + place))
        is_between = (bits >= low) & (bits < outside)
        places = num_before + tl.cumsum(is_between.to(tl.int32), 0) - 1
        tl.store(list_ptr + place * 2 * LIST + places, bits, mask=is_between)
        tl.store(list_ptr + place * 2 * LIST + LIST + places, tokens, mask=is_between)


@triton.jit
def _bits_of(source_ptr, places, count, temperature, peak, IS_LIST: tl.constexpr):
    """Gap bits at `places` of a list of them or of a row of logits; beyond all bounds behind its end."""
    if IS_LIST:
        bits = tl.load(source_ptr + places, mask=places < count, other=MANY)
    else:
        bits = gap_bits(scaled_logits(source_ptr, places, count, temperature), peak)
    return bits


@triton.jit
def _find_cut(
    source_ptr, count, temperature, peak, top_k, limit, high, low, num_low, mass_low,
    IS_LIST: tl.constexpr, ALL_TIES: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """(end, stay, ties, mass) of a row cut by `top_k`, by a mass of `limit` and to gap bits below `high`.

    Tokens with gap bits below `end` stay, except that of the `ties` last of them, which are equal, only
    `stay` do where that is fewer; `mass` is that of all that stay.

    A gap is inside if a token with it would stay, were it the first of its equals. Gaps are inside up to
    some bound; `low` is always inside, with `num_low` tokens and `mass_low` above it, `high` outside, and
    they close in until at most one token or one value is between them. A list has all tokens from the
    first `low` to the first `high`, a row has all there are.
    """
    num_high, mass_high = MANY, limit
    first_num, first_mass, ways = num_low, mass_low, tl.arange(0, WAYS) + 1
    if not IS_LIST:
        first_num, first_mass = num_low * 0, mass_low * 0.0
    while (num_high == MANY) | ((high - low > 1) & (num_high - num_low > 1)):
        bounds = (low + (high - low).to(tl.int64) * ways // WAYS).to(tl.int32)
        is_above_nums = tl.zeros([WAYS, BLOCK], tl.int32)
        is_above_masses = tl.zeros([WAYS, BLOCK], tl.float32)
        for start in range(0, count, BLOCK):
            bits = _bits_of(source_ptr, start + tl.arange(0, BLOCK), count, temperature, peak, IS_LIST)
            is_above = bits[None, :] < bounds[:, None]
            is_above_nums += is_above.to(tl.int32)
            is_above_masses += tl.where(is_above, _weights(bits)[None, :], 0.0)
        nums = tl.sum(is_above_nums, 1) + first_num
        masses = tl.sum(is_above_masses.to(tl.float64), 1) + first_mass
        is_inside = (nums < top_k) & (masses <= limit) & (bounds < high)
        num_low = tl.maximum(num_low, tl.max(tl.where(is_inside, nums, 0), 0))
        mass_low = tl.maximum(mass_low, tl.max(tl.where(is_inside, masses, 0.0), 0))
        num_high = tl.min(tl.where(is_inside, MANY, nums), 0)
        mass_high = tl.min(tl.where(is_inside, float("inf"), masses), 0)
        low = tl.maximum(low, tl.max(tl.where(is_inside, bounds, 0), 0))
        high = tl.min(tl.where(is_inside, high, bounds), 0)
    ties = num_high - num_low
    stay = ties
    if not ALL_TIES and ties > 1:
        weight = (mass_high - mass_low) / ties
        by_mass = tl.where(weight > 0.0, tl.floor((limit - mass_low) / weight) + 1.0, 1.0 * ties)
        stay = tl.minimum(by_mass, 1.0 * ties).to(tl.int32)
        stay = tl.minimum(stay, top_k - num_low)
        mass_high = mass_low + weight * stay
    return high, stay, ties, mass_high


@triton.jit
def _place_of_tie(
    source_ptr, count, temperature, peak, tie_bits, stay, IS_LIST: tl.constexpr, BLOCK: tl.constexpr
):
    """The place of the `stay`-th token, 1 or more, whose gap has `tie_bits`."""
    last, seen = count, 0
    for start in range(0, count, BLOCK):
        places = start + tl.arange(0, BLOCK)
        bits = _bits_of(source_ptr, places, count, temperature, peak, IS_LIST)
        is_tie = ((bits == tie_bits) & (places < count)).to(tl.int32)
        is_last = (is_tie > 0) & (tl.cumsum(is_tie, 0) + seen == stay)
        last = tl.minimum(last, tl.min(tl.where(is_last, places, count), 0))
        seen += tl.sum(is_tie, 0)
    return last


@triton.jit
def cut_kernel(
    logits_ptr, requests_ptr, temperatures_ptr, top_ks_ptr, top_ps_ptr, max_gaps_ptr,
    list_ptr, brackets_ptr, limits_ptr,
    peaks_ptr, cuts_ptr, last_tokens_ptr,  # of `Cuts`
    vocab, row_stride, width,
    IS_SEQUENTIAL: tl.constexpr, ALL_TIES: tl.constexpr, LIST: tl.constexpr,
    BLOCK: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The cut of row `program_id(0)`, from its list or, where that is too long, from its logits."""
    place = tl.program_id(0)
    request, row_ptr, temperature = _row(logits_ptr, requests_ptr, temperatures_ptr, place, row_stride, width)
    top_k = tl.minimum(tl.load(top_ks_ptr + request), vocab).to(tl.int32)
    top_p, max_gap = tl.load(top_ps_ptr + request), tl.load(max_gaps_ptr + request)
    peak = tl.load(peaks_ptr + place)
    low, outside = tl.load(brackets_ptr + place * 4), tl.load(brackets_ptr + place * 4 + 1)
    num_low, num_between = tl.load(brackets_ptr + place * 4 + 2), tl.load(brackets_ptr + place * 4 + 3)
    mass_low, limit = tl.load(limits_ptr + place * 2), tl.load(limits_ptr + place * 2 + 1)
    high = tl.minimum(tl.minimum(max_gap.to(tl.int32, bitcast=True), INF_BITS - 1) + 1, outside)
    if num_between <= LIST:
        bits_ptr = list_ptr + place * 2 * LIST
        end, stay, ties, _mass = _find_cut(
            bits_ptr, num_between, temperature, peak, top_k, limit, high, low, num_low, mass_low,
            True, ALL_TIES, BLOCK, WAYS,
        )  # fmt: skip
        last = vocab
        if stay < ties:
            tie = _place_of_tie(bits_ptr, num_between, temperature, peak, end - 1, stay, True, BLOCK)
            last = tl.load(bits_ptr + LIST + tie)
    else:
        if IS_SEQUENTIAL & (max_gap < float("inf")) & (top_p < 1.0):
            of_top_k = _find_cut(
                row_ptr, vocab, temperature, peak, top_k, tl.full([], float("inf"), tl.float64), outside, low,
                num_low, mass_low, False, ALL_TIES, BLOCK, WAYS,
            )  # fmt: skip
            limit = of_top_k[3] * top_p.to(tl.float64)
        end, stay, ties, _mass = _find_cut(
            row_ptr, vocab, temperature, peak, top_k, limit, high, low, num_low, mass_low,
            False, ALL_TIES, BLOCK, WAYS,
        )  # fmt: skip
        last = vocab
        if stay < ties:
            last = _place_of_tie(row_ptr, vocab, temperature, peak, end - 1, stay, False, BLOCK)
    tl.store(cuts_ptr + place, end - 1)
    tl.store(last_tokens_ptr + place, last)


def find_cuts(
    logits: Tensor,  # [bs * W, V], rows contiguous in themselves
    sampling: BatchSampling,
    width: int,
    is_sequential: bool,
    ties: TiesAtCut,
) -> Cuts:
    """What `drop_unlikely_` leaves of the filtered requests' rows, in five launches.

    Memory: some 36 kB a row at a vocabulary of 152,000, a twentieth of its float32 logits.
    """
    num_rows, vocab = len(sampling.filtered.numbers) * width, logits.shape[1]
    gap_bits, last_tokens = logits.new_empty(2, max(num_rows, 1), dtype=torch.int32)
    cuts = Cuts(logits.new_empty(max(num_rows, 1), dtype=torch.float32), gap_bits, last_tokens)
    if not num_rows:
        return cuts
    num_parts = triton.cdiv(vocab, PART_TOKENS)
    part_max = logits.new_empty(num_rows, num_parts, dtype=torch.float32)
    nums = logits.new_empty(num_rows, NUM_BOUNDS, num_parts, dtype=torch.int32)
    masses = torch.empty_like(nums, dtype=torch.float32)
    brackets = logits.new_empty(num_rows, 4, dtype=torch.int32)
    limits = logits.new_empty(num_rows, 2, dtype=torch.float64)
    lists = logits.new_empty(num_rows, 2, LIST_TOKENS, dtype=torch.int32)
    rows = (logits, sampling.filtered.indices, sampling.temperatures)
    settings = (sampling.top_ks, sampling.top_ps, sampling.max_gaps)
    shape = (vocab, logits.stride(0), width)
    sizes = {"NUM": NUM_BOUNDS, "PARTS_PAD": triton.next_power_of_2(num_parts)}
    grid = (num_parts, num_rows)
    with torch.cuda.device_of(logits):
        part_max_kernel[grid](*rows, part_max, *shape, BLOCK=PART_TOKENS, num_warps=4)
        part_count_kernel[grid](
            *rows, part_max, nums, masses, *shape, BLOCK=PART_TOKENS, **sizes, num_warps=4
        )
        bracket_kernel[(num_rows,)](
            rows[1], *settings, part_max, nums, masses, cuts.peaks, brackets, limits, width, num_parts,
            IS_SEQUENTIAL=is_sequential, **sizes, num_warps=4,
        )  # fmt: skip
        list_kernel[grid](
            *rows, nums, cuts.peaks, brackets, lists, *shape, BLOCK=PART_TOKENS, LIST=LIST_TOKENS, **sizes,
            num_warps=4,
        )  # fmt: skip
        cut_kernel[(num_rows,)](
            *rows, *settings, lists, brackets, limits, *cuts, *shape, IS_SEQUENTIAL=is_sequential,
            ALL_TIES=ties == "all", LIST=LIST_TOKENS, BLOCK=SEARCH_TOKENS, WAYS=WAYS, num_warps=8,
        )  # fmt: skip
    return cuts
