"""Sampling noise keyed by (seed, absolute position, token id) and by nothing else.

Plain, chain and tree decoding therefore draw the same tokens for one seed, in any batch. The
recipe, in 64-bit unsigned arithmetic that wraps around, `>>` shifting in zeros:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9
             z ^= z >> 27;  z *= 0x94D049BB133111EB
             z ^= z >> 31
    key     = mix(mix(seed + G) ^ position),   G = 0x9E3779B97F4A7C15
    bits    = mix(key + (token + 1) * G)
    uniform = ((bits >> 12) + 0.5) / 2**52,    in (0, 1), exact in float64
    noise   = -log(-log(uniform)),             float64, Gumbel

`mix` and G are those of SplitMix64 (Steele, Lea, Flood 2014): a token's bits are output number
token + 1 of a SplitMix64 generator started at `key`. `reference_uniform` is the recipe in Python.
The position is that of the token drawn: the one after the node whose logits it is drawn from.
Bits and uniforms are the same everywhere; `log` may differ in its last bit between devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.tree.triton_choice import prefers_triton

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
WORD = 1 << 64
ONE_BITS = 0x3FF0000000000000  # of the float64 1.0


def _signed(word: int) -> int:
    return word - WORD if word >= WORD >> 1 else word


def _shift_right_(words: Tensor, count: int) -> Tensor:
    return words.bitwise_right_shift_(count).bitwise_and_((1 << (64 - count)) - 1)


def _mix_(words: Tensor) -> Tensor:
    """SplitMix64's finaliser on `words` [...] int64, in place."""
    shifted = torch.empty_like(words)
    for count, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
        words.bitwise_xor_(_shift_right_(shifted.copy_(words), count)).mul_(_signed(multiplier))
    return words.bitwise_xor_(_shift_right_(shifted.copy_(words), 31))


def keyed_uniform(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Uniforms in (0, 1), [..., V] float64, for int64 `seeds` [...], `positions` [...] and `tokens` [V]."""
    keys = _mix_(_mix_(seeds + _signed(GOLDEN)) ^ positions)  # [...]
    words = _mix_(keys.unsqueeze(-1) + (tokens + 1) * _signed(GOLDEN))  # [..., V]
    # The top 52 bits as a fraction of a float64 in [1, 2), taken down to the middle of its step.
    return _shift_right_(words, 12).bitwise_or_(ONE_BITS).view(torch.float64).sub_(1.0 - 2.0**-53)


def keyed_gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise [..., V] float64 for int64 `seeds` [...], `positions` [...] and `tokens` [V]."""
    return keyed_uniform(seeds, positions, tokens).log_().neg_().log_().neg_()


def draw(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token a row, [...] int64, drawn from `log_probs` [..., V] with keyed noise (Gumbel-max).

    `positions` [...] are those of the drawn tokens. A token of -inf is never drawn, a tie goes to
    the lowest id. Log-probabilities need not be normalised, must not be NaN, and each row must
    have one above -inf. On CUDA it takes two Triton launches, which hold the noise in registers.
    """
    if prefers_triton(log_probs):
        from ddtree.tree.triton_draw import draw_triton

        return draw_triton(log_probs, seeds, positions)
    return draw_torch(log_probs, seeds, positions)


def draw_torch(log_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """`draw` in torch, with noise [..., V] float64."""
    tokens = torch.arange(log_probs.shape[-1], device=log_probs.device)
    return keyed_gumbel(seeds, positions, tokens).add_(log_probs).argmax(-1)


def reference_uniform(seed: int, position: int, token: int) -> float:
    """The uniform of one (seed, position, token) by the recipe above, one number at a time."""

    def mix(word: int) -> int:
        for count, multiplier in zip((30, 27), MULTIPLIERS, strict=True):
            word = ((word ^ (word >> count)) * multiplier) % WORD
        return word ^ (word >> 31)

    key = mix(mix((seed + GOLDEN) % WORD) ^ (position % WORD))
    bits = mix((key + (token + 1) * GOLDEN) % WORD)
    return float(((bits >> 12) + 0.5) / 2.0**52)
