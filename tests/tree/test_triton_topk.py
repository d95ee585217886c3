"""The top-K kernels against the torch path: through the interpreter on a CPU, for real with mark `gpu`.

What is promised: the row's log-sum is within 1e-6 of the exact one, and given that log-sum tokens and
log-probabilities are the torch path's bit for bit. `test_triton_interpreter.py` runs the interpreted tests.
"""

import os

import pytest
import torch

from ddtree.tree import DraftMarginals
from ddtree.tree.marginals import marginals_torch

KINDS = ("continuous", "ties", "equal", "near_ties", "trouble", "infinite", "certain")


def logits_of(kind: str, num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    """[num_rows, vocab] float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab, generator=generator) * 4
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits[:] = 0.0
        logits[:, ::2] = -0.0
    elif kind == "near_ties":
        # Distinct logits of which many have one log-probability.
        logits = torch.rand(num_rows, vocab, generator=generator) * 1e-5
        logits[:, vocab // 3] = 30.0
    elif kind == "trouble":
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = float("-inf")
        logits[:, vocab // 2] = float("nan")
        logits[0] = float("-inf")
    elif kind == "infinite":
        logits[0, vocab // 2] = float("inf")
        logits[:, : vocab // 4] = float("nan")
    elif kind == "certain":
        logits[:, vocab // 2] = 1e4
    return logits


def check_equals_torch(logits: torch.Tensor, topk: int) -> None:
    from ddtree.tree.triton_topk import top_tokens

    result = top_tokens(logits, topk)
    expected = marginals_torch(logits[None], topk, result.log_sums[None, :, None])
    assert torch.equal(result.tokens, expected.tokens[0])
    assert torch.equal(result.log_probs, expected.log_probs[0])
    values = torch.where(logits.isnan(), float("-inf"), logits.double())
    exact = (values - values.amax(1, keepdim=True)).exp().sum(1).log()
    torch.testing.assert_close(result.log_sums.double(), exact, rtol=1e-7, atol=1e-6, equal_nan=True)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's own process")
@pytest.mark.parametrize(
    ("vocab", "topk", "dtype"),
    [
        (300, 5, torch.bfloat16),
        (300, 64, torch.float32),
        (50, 50, torch.float16),
        (1, 1, torch.float32),
        (5000, 16, torch.bfloat16),
        (9000, 130, torch.float32),
        (4096, 20, torch.float32),
    ],
)
def test_interpreted_topk_equals_torch(vocab, topk, dtype):
    for seed, kind in enumerate(KINDS):
        check_equals_torch(logits_of(kind, 2, vocab, seed).to(dtype), topk)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in the interpreter's own process")
def test_interpreted_topk_takes_strided_rows():
    base = logits_of("continuous", 3, 700, 5)
    check_equals_torch(base[:, 3:400], 20)
    check_equals_torch(base.T[:, :2].T, 20)
    check_equals_torch(base.T.contiguous().T, 20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("num_rows", "vocab", "topk"),
    [(15, 49152, 64), (15, 49152, 1), (30, 49152, 16), (15, 151936, 128), (15, 151937, 256), (3, 77, 77)],
)
def test_compiled_topk_equals_torch(num_rows, vocab, topk, dtype):
    from ddtree.tree.triton_topk import top_tokens

    for seed, kind in enumerate(KINDS):
        logits = logits_of(kind, num_rows, vocab, seed).to("cuda", dtype)
        check_equals_torch(logits, topk)
        first, second = top_tokens(logits, topk), top_tokens(logits, topk)
        assert all(torch.equal(a, b) for a, b in zip(first[:2], second[:2], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_from_logits_on_cuda_uses_the_kernels_and_agrees_with_the_cpu(dtype):
    from ddtree.tree.triton_topk import top_tokens

    logits = logits_of("continuous", 15, 49152, 3).to(dtype)
    moved = logits[None].cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        on_gpu = DraftMarginals.from_logits(moved, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    result = top_tokens(moved[0], 64)
    on_cpu = marginals_torch(logits[None], 64, result.log_sums.cpu()[None, :, None])
    assert torch.equal(on_gpu.log_probs[0], result.log_probs)
    assert torch.equal(on_gpu.tokens.cpu(), on_cpu.tokens)
    assert torch.equal(on_gpu.log_probs.cpu(), on_cpu.log_probs)
