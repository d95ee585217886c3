"""Parts of the worker that need SGLang's classes, but no engine."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.sglang


def test_lengths_stay_within_the_context():
    from ddtree.sglang_plugin.worker_v2 import clamp_lens

    batch = SimpleNamespace(seq_lens=torch.tensor([5, 100, 112]), seq_lens_cpu=torch.tensor([5, 99, 101]))
    clamp_lens(batch, 100)
    assert batch.seq_lens.tolist() == [5, 100, 100]
    assert batch.seq_lens_cpu.tolist() == [5, 99, 100]
    batch.seq_lens_cpu = None
    clamp_lens(batch, 50)
    assert batch.seq_lens.tolist() == [5, 50, 50]
    assert batch.seq_lens_cpu is None


@pytest.mark.parametrize("is_same_buffer", [True, False])
def test_a_mask_in_another_buffer_is_written_anew(is_same_buffer):
    """The drafter's graph has written its own buffer, which a target captured anew does not read."""
    from ddtree.sglang_plugin.worker_v2 import DDTreeWorkerV2

    buffer = torch.full((2 * (9 + 2),), 7, dtype=torch.uint8)
    mask = SimpleNamespace(buffer=buffer, fits=lambda bs: bs == 1)
    worker = object.__new__(DDTreeWorkerV2)
    worker.model_runner = SimpleNamespace(attn_backend=SimpleNamespace(verify_mask=mask))
    worker.num_verify_tokens = 2
    worker._graph_mask = buffer if is_same_buffer else buffer.clone()
    trees = SimpleNamespace(ancestor_mask=torch.tensor([[[True, False], [True, True]]]))
    batch = SimpleNamespace(seq_lens=torch.tensor([9]))
    assert worker._verify_mask(batch, trees, True) is buffer
    cells = buffer.view(2, 11)[:, 9:].tolist()
    assert cells == ([[7, 7], [7, 7]] if is_same_buffer else [[1, 0], [1, 1]])


def test_an_fp8_head_is_refused():
    from ddtree.sglang_plugin.draft_sampler import VocabularyShard

    with pytest.raises(ValueError, match="float8_e4m3fn"):
        VocabularyShard.of(SimpleNamespace(weight=torch.zeros(4, 2).to(torch.float8_e4m3fn)), None)
