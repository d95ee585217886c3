"""The draw kernels against the torch draw: through the interpreter on a CPU, for real with mark `gpu`.

`test_triton_interpreter.py` runs the interpreted tests.
"""

import os

import pytest
import torch

from ddtree.tree.noise import draw, draw_torch, keyed_gumbel, keyed_uniform

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from ddtree.tree.triton_draw import draw_triton, uniforms_of  # noqa: E402

ATOL = 1e-12  # two totals this close may swap, since the logarithm's last bit is the device's


def log_probs_of(shape: tuple[int, ...], seed: int, share_dropped: float) -> torch.Tensor:
    """[..., V] log-probabilities of which a share is -inf, as after top-k."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.log_softmax(torch.randn(shape, generator=generator) * 3, -1)
    dropped = torch.rand(shape, generator=generator) < share_dropped
    dropped[..., seed % shape[-1]] = False
    return log_probs.masked_fill(dropped, float("-inf"))


@triton.jit
def uniforms_kernel(keys_ptr, out_ptr, SIZE: tl.constexpr):
    tokens = tl.arange(0, SIZE)
    tl.store(out_ptr + tokens, uniforms_of(tl.load(keys_ptr), tl.load(keys_ptr + 1), tokens))


def check_uniforms(device: str) -> None:
    for seed, position in [(0, 0), (-1, 7), (2**63 - 1, 2**40), (-(2**63), 3)]:
        keys = torch.tensor([seed, position], device=device)
        out = torch.empty(256, dtype=torch.float64, device=device)
        uniforms_kernel[(1,)](keys, out, SIZE=256)
        expected = keyed_uniform(torch.tensor(seed), torch.tensor(position), torch.arange(256))
        assert torch.equal(out.cpu(), expected)


def check_draws(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, device: str) -> None:
    tokens = draw_triton(log_probs.to(device), seeds.to(device), positions.to(device)).cpu()
    expected = draw_torch(log_probs, seeds, positions)
    assert tokens.dtype == torch.int64
    assert tokens.shape == expected.shape
    vocab = torch.arange(log_probs.shape[-1])
    totals = keyed_gumbel(seeds, positions, vocab) + log_probs
    ours, theirs = (totals.gather(-1, t.unsqueeze(-1)) for t in (tokens, expected))
    assert torch.equal(tokens, expected) or torch.allclose(ours, theirs, rtol=0, atol=ATOL)


def check_shapes(device: str, vocab: int, width: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    seeds = torch.randint(-(2**62), 2**62, (3,), generator=generator)
    positions = torch.randint(0, 2**40, (3, width), generator=generator)
    for share_dropped in (0.0, 0.5, 1.0):
        log_probs = log_probs_of((3, width, vocab), 7, share_dropped)
        check_draws(log_probs, seeds[:, None], positions, device)
        check_draws(log_probs[0], seeds[0].expand(width), positions[0], device)
        check_draws(log_probs[0], seeds[0], positions[0], device)
        check_draws(log_probs, seeds[:, None], positions.T.contiguous().T, device)
        check_draws(log_probs[0, 0], seeds[0], positions[0, 0], device)
        check_draws(log_probs[None], seeds[None, :, None], positions[None], device)
    check_draws(log_probs_of((width, vocab), 3, 0.2).bfloat16(), seeds[0], positions[0], device)
    check_draws(log_probs_of((width, vocab), 4, 0.2).double(), seeds[0], positions[0], device)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's own process")
@pytest.mark.parametrize("vocab", [1, 9, 1500])
def test_interpreted_draw_equals_torch(vocab):
    check_shapes("cpu", vocab, width=4)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's own process")
def test_interpreted_draw_gives_a_tie_to_the_lowest_id():
    """Uniforms have 52 bits, so real ties do not come up: an infinite log-probability makes one."""
    log_probs = torch.zeros(2, 3000)
    log_probs[0, [1200, 1201, 2900]] = float("inf")
    log_probs[1] = float("-inf")
    assert draw_triton(log_probs, torch.tensor(1), torch.tensor(2)).tolist() == [1200, 0]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's own process")
def test_interpreted_uniforms_follow_the_recipe():
    check_uniforms("cpu")


@pytest.mark.gpu
def test_compiled_uniforms_follow_the_recipe():
    check_uniforms("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [9, 49152, 151937])
def test_compiled_draw_equals_torch(vocab):
    check_shapes("cuda", vocab, width=8)


@pytest.mark.gpu
def test_draw_on_cuda_uses_the_kernels_and_does_not_wait():
    log_probs = log_probs_of((64, 49152), 1, 0.0).cuda()
    seeds, positions = torch.full((64,), 42, device="cuda"), torch.arange(64, device="cuda")
    expected = draw_triton(log_probs, seeds, positions)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = draw(log_probs, seeds, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens, expected)
