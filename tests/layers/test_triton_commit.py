"""The commit kernels against plain torch: interpreted here, compiled on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ddtree.layers.rotary import RotaryTable

pytest.importorskip("triton")

from ddtree.layers.triton_commit import move_rows, write_context

IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETER else "cuda"
runs_kernels = (lambda test: test) if IS_INTERPRETER else pytest.mark.gpu


@pytest.mark.skipif(IS_INTERPRETER, reason="starts the interpreter's own process")
def test_kernels_in_the_interpreter():
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:]
    assert "passed" in result.stdout


@runs_kernels
@pytest.mark.parametrize("path", [[0], [0, 2, 5], [0, 1, 2, 3], [0, 3, 4, 9, 11, 20], list(range(0, 32, 2))])
@pytest.mark.parametrize("prefix_len", [0, 7])
def test_move_rows_gathers_before_it_scatters(path, prefix_len):
    generator = torch.Generator().manual_seed(len(path))
    data = torch.randn(3, 2, 2, 48, 16, generator=generator).to(DEVICE)
    padded = torch.tensor(path + [-1] * (16 - len(path)), device=DEVICE)
    expected = data.clone()
    sources = prefix_len + torch.tensor(path, device=DEVICE)
    expected[:, :, :, prefix_len : prefix_len + len(path)] = data[:, :, :, sources]
    move_rows(data, torch.tensor([prefix_len], device=DEVICE), padded)
    assert torch.equal(data, expected)


@runs_kernels
@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_write_context_is_norm_rotation_and_write(n, num_heads, head_dim):
    generator = torch.Generator().manual_seed(n)
    kv = torch.randn(n, 2, 2, num_heads, head_dim, generator=generator).to(DEVICE)
    norms = (1 + 0.2 * torch.randn(2, 1, head_dim, generator=generator)).to(DEVICE)
    rotary = RotaryTable((10.0 ** -torch.arange(0, head_dim, 2).div(head_dim)).to(DEVICE), 64, torch.float32)
    positions = torch.arange(5, 5 + n, device=DEVICE)
    data = torch.randn(2, 2, num_heads, 40, head_dim, generator=generator).to(DEVICE)
    expected = data.clone()
    keys = F.rms_norm(kv[:, :, 0], (head_dim,), eps=1e-6) * norms
    keys = rotary.rotate(keys.flatten(1, 2), *rotary.at(positions)).view(keys.shape)
    expected[:, 0, :, 5 : 5 + n] = keys.permute(1, 2, 0, 3)
    expected[:, 1, :, 5 : 5 + n] = kv[:, :, 1].permute(1, 2, 0, 3)
    prefix_len = torch.tensor([5], device=DEVICE)
    write_context(kv, norms, rotary.cos, rotary.signed_sin, 1e-6, positions, prefix_len, data)
    torch.testing.assert_close(data, expected, atol=1e-5, rtol=1e-5)
