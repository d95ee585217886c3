"""The kernels of the target's choice against torch: interpreted on a CPU, for real with mark `gpu`.

What is promised: the same tokens stay, but for those within rounding of a top-p limit, the same are drawn,
and penalised logits are equal bit for bit. One test runs the interpreted ones in a process of their own.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from choice_kit import NEAR, Case, choose, random_tree
from ddtree.sglang_plugin import penalties
from ddtree.sglang_plugin.batch_sampling import BatchSampling, RequestSampling
from ddtree.sglang_plugin.penalties import apply_counts_, penalise_
from ddtree.sglang_plugin.sampling_filters import drop_unlikely_
from ddtree.sglang_plugin.target_choice import choose_processed, choose_torch
from ddtree.sglang_plugin.token_counts import TokenCounts
from ddtree.tree import ancestor_mask
from interpreter_kit import IS_INTERPRETER, run_interpreted

pytest.importorskip("triton")
from ddtree.sglang_plugin import triton_cut, triton_sampling

NEG_INF = float("-inf")
interpreted = pytest.mark.skipif(not IS_INTERPRETER, reason="runs in the interpreter's own process")
KINDS = ("continuous", "ties", "equal", "certain", "trouble", "infinite", "flat")
# (temperature, top_k, top_p, min_p)
FILTERS = [
    (1.0, 3, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.0, 1 << 30, 0.8, 0.0), (1.3, 1 << 30, 1e-6, 0.0),
    (1.0, 1 << 30, 0.999, 0.0), (0.9, 20, 0.5, 0.0), (1.0, 1 << 30, 1.0, 0.05), (1.0, 1 << 30, 1.0, 1.0),
    (0.6, 12, 0.9, 0.02), (1.0, 2, 0.3, 0.3), (1.0, 1 << 30, 0.3, 1e-30),
]  # fmt: skip
HOWS = [(False, "lowest_id"), (False, "all"), (True, "lowest_id"), (True, "all")]
MIXED = [
    RequestSampling(top_k=1, seed=3), RequestSampling(temperature=0.8, seed=4),
    *(RequestSampling(*values, seed=row - 5) for row, values in enumerate(FILTERS)),
    RequestSampling(top_k=1, temperature=0.3),
]  # fmt: skip


def logits_of(kind: str, num_rows: int, vocab: int, seed: int) -> torch.Tensor:
    """[num_rows, vocab] float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    if kind == "ties":
        logits = logits.round()
    elif kind == "equal":
        logits[:] = 0.5
    elif kind == "certain":
        logits[:, vocab // 2] = 1e4
    elif kind == "trouble":
        logits[torch.rand(logits.shape, generator=generator) < 0.5] = NEG_INF
        logits[:, vocab // 2] = float("nan")
        logits[0] = NEG_INF
    elif kind == "infinite":
        logits[:, vocab // 2] = float("inf")
        logits[:, : vocab // 4] = -3e38
    elif kind == "flat":
        logits *= 1e-5
    return logits


def near_limit(scaled: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Tokens whose mass before them is within rounding of the row's limit, [n, V] bool."""
    gaps, order = (scaled.amax(1, keepdim=True) - scaled).double().nan_to_num(nan=torch.inf).sort(stable=True)
    weights = gaps.neg().exp()
    before = weights.cumsum(1) - weights
    # Equals are cut together where all ties stay.
    before = torch.stack([before, before.gather(1, torch.searchsorted(gaps, gaps))])
    is_near = ((before - limits.unsqueeze(1)).abs() < NEAR * weights.sum(1, keepdim=True)).any(0)
    return torch.zeros_like(is_near).scatter_(1, order, is_near)


def stays_by_kernel(
    logits: torch.Tensor, scaled: torch.Tensor, sampling: BatchSampling, *how
) -> torch.Tensor:
    """Which tokens the cut kernel keeps, [n, V] bool on the CPU."""
    from ddtree.sglang_plugin.triton_cut import find_cuts

    peaks, cuts, last_tokens = (part.cpu().unsqueeze(1) for part in find_cuts(logits, sampling, 1, *how))
    bits, tokens = (peaks - scaled).view(torch.int32), torch.arange(scaled.shape[1])
    return (bits < cuts) | ((bits == cuts) & (tokens <= last_tokens))


def check_cuts(kind: str, vocab: int, dtype: torch.dtype, device: str, hows: list = HOWS) -> None:
    """A row of one kind for each filter, in both orders and with both ways of treating ties."""
    requests = [RequestSampling(*values) for values in FILTERS]
    on_cpu = BatchSampling.from_requests(requests, "cpu")
    logits = logits_of(kind, len(FILTERS), vocab, 7).to(dtype)
    scaled = logits.float().nan_to_num(nan=NEG_INF, posinf=torch.inf, neginf=NEG_INF)
    scaled = (scaled / on_cpu.temperatures.unsqueeze(1)).clamp_(max=torch.finfo(torch.float32).max)
    filters = (on_cpu.top_ks, on_cpu.top_ps, on_cpu.max_gaps)
    for how in hows:
        is_sequential = on_cpu.max_gaps.isfinite() & how[0]
        expected = drop_unlikely_(scaled.clone(), *filters, is_sequential, how[1])
        sampling = BatchSampling.from_requests(requests, device)
        stays = stays_by_kernel(logits.to(device), scaled, sampling, *how)
        # A token of -inf is never drawn, whatever is said of it.
        differs = (stays != (expected > NEG_INF)) & (scaled > NEG_INF)
        no_limits = (torch.ones_like(on_cpu.top_ps), torch.full_like(on_cpu.max_gaps, torch.inf))
        top_k_alone = drop_unlikely_(scaled.clone(), on_cpu.top_ks, *no_limits, is_sequential, how[1])
        peaks = scaled.amax(1, keepdim=True)
        of_row, of_top_k = ((peaks - x).double().neg().exp().sum(1) for x in (scaled, top_k_alone))
        limits = on_cpu.top_ps.double() * torch.where(is_sequential, of_top_k, of_row)
        differs &= ~(near_limit(scaled, limits) & (on_cpu.top_ps < 1).unsqueeze(1))
        assert not differs[peaks.squeeze(1) > NEG_INF].any(), (kind, how)


def check_choices(kind: str, vocab: int, width: int, dtype: torch.dtype, device: str) -> None:
    """A mixed batch gets the same tokens; with these seeds no two totals are within rounding."""
    from ddtree.sglang_plugin.triton_sampling import choose_triton

    logits = logits_of(kind, len(MIXED) * width, vocab, 11).to(dtype)
    positions = torch.arange(len(MIXED) * width).view(-1, width) + 100
    for how in [HOWS[0], HOWS[3]]:
        expected = choose_torch(logits, BatchSampling.from_requests(MIXED, "cpu"), positions, *how)
        sampling = BatchSampling.from_requests(MIXED, device)
        moved = logits.to(device)
        tokens = choose_triton(moved, sampling, positions.to(device), *how).cpu()
        assert tokens.dtype == torch.int64
        assert torch.equal(tokens, expected)
        assert torch.equal(moved.cpu().view(torch.uint8), logits.view(torch.uint8))


def check_penalties(dtype: torch.dtype, device: str, vocab: int) -> None:
    """Rows of a batch with gaps between them in memory, against torch, row by row and bit for bit."""
    from ddtree.sglang_plugin.triton_sampling import penalise_committed_triton_

    generator = torch.Generator().manual_seed(vocab)
    requests = [
        RequestSampling(slot=2, frequency_penalty=0.3, presence_penalty=-0.7),
        RequestSampling(slot=4),
        RequestSampling(slot=0, repetition_penalty=1.3, frequency_penalty=0.1),
        RequestSampling(slot=3, presence_penalty=0.6),
    ]
    counts = torch.randint(0, 4, (5, vocab), generator=generator, dtype=torch.int32) // 2
    logits = (torch.randn(4, 3, vocab + 5, generator=generator) * 3).to(dtype)[:, :, :vocab]
    expected = logits.clone()
    for row in (2, 3):
        apply_counts_(
            expected[row], counts[requests[row].slot], torch.tensor(requests[row].frequency_penalty),
            torch.tensor(requests[row].presence_penalty), torch.tensor(requests[row].repetition_penalty),
        )  # fmt: skip
    moved = torch.zeros(4, 3, vocab + 5, dtype=dtype, device=device)[:, :, :vocab]
    moved.copy_(logits)
    rows = BatchSampling.from_requests(requests, device).penalties
    assert rows is not None
    penalise_committed_triton_(moved, rows, 1, 3, counts.to(device))
    assert torch.equal(moved.cpu(), expected)


@pytest.fixture
def _many_ways(monkeypatch):
    """Fewer passes, since the interpreter is slow."""
    monkeypatch.setattr(triton_cut, "WAYS", 64)


@interpreted
@pytest.mark.usefixtures("_many_ways")
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_cuts_equal_torch(kind):
    check_cuts(kind, 70, torch.float32, "cpu", HOWS if kind == "ties" else [HOWS[0], HOWS[3]])


@interpreted
def test_interpreted_cuts_of_half_floats_eight_ways_a_pass():
    check_cuts("continuous", 7, torch.bfloat16, "cpu", [HOWS[2]])
    check_cuts("ties", 1, torch.float16, "cpu", [HOWS[0]])


@interpreted
@pytest.mark.usefixtures("_many_ways")
@pytest.mark.parametrize(
    ("kind", "list_tokens"), [("continuous", 64), ("ties", 64), ("flat", 128), ("ties", 2)]
)
def test_interpreted_cuts_of_several_parts(kind, list_tokens, monkeypatch):
    """A row longer than a part, with a list of more than one block and with one that is too short."""
    monkeypatch.setattr(triton_cut, "PART_TOKENS", 32)
    monkeypatch.setattr(triton_cut, "SEARCH_TOKENS", 32)
    monkeypatch.setattr(triton_cut, "LIST_TOKENS", list_tokens)
    check_cuts(kind, 101, torch.float32, "cpu", [HOWS[0]])


@interpreted
@pytest.mark.usefixtures("_many_ways")
@pytest.mark.parametrize("kind", ["continuous", "trouble", "infinite"])
def test_interpreted_choices_equal_torch(kind):
    check_choices(kind, 70, 1, torch.float32, "cpu")


@interpreted
@pytest.mark.usefixtures("_many_ways")
def test_interpreted_choices_of_several_parts_and_nodes(monkeypatch):
    monkeypatch.setattr(triton_sampling, "PART_TOKENS", 32)
    check_choices("ties", 70, 2, torch.float16, "cpu")


# The interpreter rounds to bf16 by cutting bits off, which no GPU does.
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_interpreted_penalties_equal_torch(dtype):
    check_penalties(dtype, "cpu", 300)
    check_penalties(dtype, "cpu", 1100)


@interpreted
def test_interpreted_penalties_of_a_tree(monkeypatch):
    """The path's own counts are put right over what the kernel wrote."""
    tree = random_tree(torch.Generator().manual_seed(4), 3, 7, 12)
    requests = [
        RequestSampling(frequency_penalty=0.7),
        RequestSampling(slot=1),
        RequestSampling(0.5, presence_penalty=1.0, slot=2),
    ]
    sampling = BatchSampling.from_requests(requests, "cpu")
    counts = TokenCounts(3, 12, "cpu")
    counts.reset([0, 2], [[3, 3, int(tree.tokens[0, 0])], [int(tree.tokens[2, 0])]])
    logits = torch.randn(3, 7, 12, generator=torch.Generator().manual_seed(5))
    expected, result = logits.clone(), logits.clone()
    penalise_(expected, sampling, tree, ancestor_mask(tree), counts)
    monkeypatch.setattr(penalties, "prefers_triton", lambda tensor: True)
    penalise_(result, sampling, tree, ancestor_mask(tree), counts)
    assert torch.equal(result, expected)
    assert not torch.equal(result, logits)


@pytest.mark.skipif(IS_INTERPRETER, reason="is the interpreter's own process")
def test_kernels_through_the_interpreter():
    assert run_interpreted(Path(__file__)) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [77, 49152, 151937])
def test_compiled_cuts_equal_torch(kind, dtype, vocab):
    check_cuts(kind, vocab, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["continuous", "ties", "trouble", "certain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_choices_equal_torch(kind, dtype):
    check_choices(kind, 151936, 4, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compiled_penalties_equal_torch(dtype):
    check_penalties(dtype, "cuda", 49152)


@pytest.mark.gpu
def test_a_whole_choice_on_cuda_does_not_wait_and_agrees_with_the_cpu():
    tree = random_tree(torch.Generator().manual_seed(8), len(MIXED), 9, 4000)
    requests = [
        replace(
            request, slot=slot, frequency_penalty=0.2 * (slot % 3), min_new_tokens=3 * (slot % 2),
            stop_tokens=(5, 9),
        )
        for slot, request in enumerate(MIXED)
    ]  # fmt: skip
    case = Case(
        logits_of("continuous", len(MIXED) * 9, 4000, 2).view(-1, 9, 4000), tuple(requests),
        tuple((1, int(token)) for token in tree.tokens[:, 0]), tree, 50 + tree.depths,
        logit_bias=torch.zeros(len(MIXED), 4000).index_fill_(1, torch.tensor([7]), 2.0),
    )  # fmt: skip
    expected = choose(case)
    assert torch.equal(choose(case, "cuda")[tree.is_node], expected[tree.is_node])
    sampling = BatchSampling.from_requests(requests, "cuda")
    logits, positions = case.logits.flatten(0, 1).cuda(), case.positions.cuda()
    moved = type(tree)(*(getattr(tree, name).cuda() for name in ("tokens", "parents", "depths", "log_probs")))
    mask, counts = ancestor_mask(tree).cuda(), TokenCounts(len(MIXED), 4000, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        counts.reset(list(range(len(MIXED))), [list(output) for output in case.outputs])
        BatchSampling.from_requests(requests, "cuda")
        penalise_(logits.view(-1, 9, 4000), sampling, moved, mask, counts)
        choose_processed(logits, sampling, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
