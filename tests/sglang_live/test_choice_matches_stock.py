"""Our processed distribution against the pieces of stock SGLang that make its own, run as they are.

Penalties, grammar and bias go through SGLang's penalizers on a stand-in batch and its `SamplingBatchInfo`,
filters through its torch sampling with `return_filtered_probs`; flashinfer's kernels need a GPU, so what they
do is written out here. Draws differ by design (the noise is ours): it is distributions that are compared.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator

import pytest
import torch

from ddtree.sglang_plugin.batch_sampling import NO_TOP_K, BatchSampling, RequestSampling
from ddtree.sglang_plugin.sampling_filters import drop_unlikely_
from ddtree.sglang_plugin.target_choice import process_logits_
from ddtree.sglang_plugin.token_counts import TokenCounts
from ddtree.tree import DraftTree, ancestor_mask

pytestmark = pytest.mark.sglang

VOCAB = 40
REQUESTS = [
    RequestSampling(frequency_penalty=0.5),
    RequestSampling(presence_penalty=-0.75),
    RequestSampling(repetition_penalty=1.5),
    RequestSampling(min_new_tokens=6, stop_tokens=(3, 17)),
    RequestSampling(),
    RequestSampling(
        frequency_penalty=0.25,
        presence_penalty=0.5,
        repetition_penalty=1.25,
        min_new_tokens=4,
        stop_tokens=(39,),
    ),
]
# Root 7; the path 7, 9, 7, 9 repeats itself, and 11 is on two branches.
PARENTS, DEPTHS, TOKENS = [-1, 0, 0, 1, 3, 2, 4], [0, 1, 1, 2, 3, 2, 4], [7, 9, 11, 7, 9, 5, 11]
OUTPUT = [2, 9, 9, 7]
FILTERS = [
    (NO_TOP_K, 1.0, 0.0), (5, 1.0, 0.0), (NO_TOP_K, 0.8, 0.0), (NO_TOP_K, 0.999, 0.0), (NO_TOP_K, 1e-6, 0.0),
    (12, 0.7, 0.0), (NO_TOP_K, 1.0, 0.05), (NO_TOP_K, 1.0, 1.0), (9, 0.9, 0.02), (4, 0.6, 0.1),
    (VOCAB + 9, 1.0, 0.0),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _eager_on_the_cpu() -> Iterator[None]:
    """SGLang compiles some of these functions, which changes no result and takes a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")  # read where SGLang is first imported
        torch.compiler.set_stance("force_eager")
        yield
        torch.compiler.set_stance("default")


def sampling_of(request: RequestSampling) -> types.SimpleNamespace:
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
    params = types.SimpleNamespace(**{name: getattr(request, name) for name in names})
    params.stop_token_ids = set(request.stop_tokens)
    return params


class Batch:
    """What the penalizers read of a `ScheduleBatch`, to which they hold a weak reference."""

    def __init__(self, requests: list[RequestSampling]) -> None:
        tokenizer = types.SimpleNamespace(additional_stop_token_ids=None, eos_token_id=None)
        self.device = "cpu"
        self.reqs = [
            types.SimpleNamespace(sampling_params=sampling_of(r), eos_token_ids=None, tokenizer=tokenizer)
            for r in requests
        ]


def stock_processed(
    logits: torch.Tensor,  # [bs, V]
    output: list[int],
    bias: torch.Tensor | None = None,
    grammar: Callable[[torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """What a stock step makes of `logits` before the temperature, after each request has put out `output`."""
    from sglang.srt.sampling import penaltylib
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    batch = Batch(REQUESTS)
    orchestrator = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=VOCAB,
        batch=batch,
        penalizers={
            penaltylib.BatchedFrequencyPenalizer, penaltylib.BatchedMinNewTokensPenalizer,
            penaltylib.BatchedPresencePenalizer, penaltylib.BatchedRepetitionPenalizer,
        },
    )  # fmt: skip
    for token in output:
        orchestrator.cumulate_output_tokens(torch.full((len(batch.reqs),), token))
    # Additive ones together and first, as in an overlapped step: in the other their order is that of a set.
    additive = torch.zeros_like(logits)
    orchestrator.accumulate_additive_penalties(additive)
    needless = dict.fromkeys(("temperatures", "top_ps", "top_ks", "min_ps"), torch.zeros(len(batch.reqs)))
    flags = (f.name for f in dataclasses.fields(SamplingBatchInfo) if f.name.startswith(("is_", "need_")))
    info = SamplingBatchInfo(
        **needless, **dict.fromkeys(flags, False), vocab_size=VOCAB, acc_additive_penalties=additive,
        acc_scaling_penalties=orchestrator.accumulate_scaling_penalties(), logit_bias=bias,
        grammar_mask=None if grammar is None else types.SimpleNamespace(apply=grammar),
    )  # fmt: skip
    logits = logits.clone()
    info.apply_logits_bias(logits)
    return logits


def path_to(column: int) -> list[int]:
    path: list[int] = []
    while column > 0:
        path.insert(0, TOKENS[column])
        column = PARENTS[column]
    return path


def ours_processed(
    logits: torch.Tensor,
    tree: DraftTree | None,
    bias: torch.Tensor | None = None,
    grammar: Callable[[torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """`logits` [bs, W, V] as our choice processes them."""
    bs, width, _ = logits.shape
    requests = [
        RequestSampling(**{name: getattr(r, name) for name in r.__slots__} | {"slot": slot})
        for slot, r in enumerate(REQUESTS)
    ]
    counts = TokenCounts(bs, VOCAB, "cpu")
    counts.reset(list(range(bs)), [OUTPUT] * bs)
    flat = logits.flatten(0, 1).clone()
    process_logits_(
        flat, sampling=BatchSampling.from_requests(requests, "cpu"),
        positions=torch.zeros(bs, width, dtype=torch.int64), tree=tree,
        ancestor_mask=None if tree is None else ancestor_mask(tree), counts=counts, logit_bias=bias,
        apply_grammar=grammar,
    )  # fmt: skip
    return flat.view(bs, width, VOCAB)


def tree_of(bs: int) -> DraftTree:
    columns = [torch.tensor(values).expand(bs, -1) for values in (TOKENS, PARENTS, DEPTHS)]
    return DraftTree(*columns, torch.zeros(bs, len(TOKENS)))


def test_penalties_at_every_node_are_those_of_a_stock_step_after_its_path():
    logits = torch.randn(len(REQUESTS), len(TOKENS), VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    ours = ours_processed(logits, tree_of(len(REQUESTS)))
    for column in range(len(TOKENS)):
        stock = stock_processed(logits[:, column], OUTPUT + path_to(column))
        # Penalties that a float holds exactly add up to the same bits however they are added.
        assert torch.equal(ours[:, column], stock), column
        assert not torch.equal(stock, logits[:, column])


def test_the_first_token_counts_no_path():
    logits = torch.randn(len(REQUESTS), 1, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    assert torch.equal(ours_processed(logits, None)[:, 0], stock_processed(logits[:, 0], OUTPUT))


def test_grammar_comes_after_the_penalties_and_the_bias_last():
    logits = torch.randn(len(REQUESTS), 1, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    bias = torch.zeros(len(REQUESTS), VOCAB)
    bias[:, [2, 9, 20]] = torch.tensor([4.0, -3.0, 1.5])

    def grammar(logits: torch.Tensor) -> None:
        logits[:, 9] = 10.0  # no grammar does this, but it tells what was done before and what after

    stock = stock_processed(logits[:, 0], OUTPUT, bias, grammar)
    assert (stock[:, 9] == 7.0).all()
    assert torch.equal(ours_processed(logits, None, bias, grammar)[:, 0], stock)


def ours_filtered(scaled: torch.Tensor, ties: str, is_sequential: bool) -> torch.Tensor:
    """Our probabilities, [n, V], a row of `scaled` for each of FILTERS."""
    batch = BatchSampling.from_requests([RequestSampling(1.0, *values) for values in FILTERS], "cpu")
    kept = drop_unlikely_(
        scaled.clone(), batch.top_ks, batch.top_ps, batch.max_gaps,
        batch.max_gaps.isfinite() & is_sequential, ties,
    )  # fmt: skip
    return torch.softmax(kept, 1)


def settings_of(device: str = "cpu") -> tuple[torch.Tensor, ...]:
    top_ks, top_ps, min_ps = zip(*FILTERS, strict=True)
    return torch.tensor(top_ks, dtype=torch.int32), torch.tensor(top_ps), torch.tensor(min_ps)


@pytest.mark.parametrize("seed", range(6))
def test_joint_filters_are_those_of_the_torch_sampler(seed):
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    scaled = torch.randn(len(FILTERS), VOCAB, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
    _, weights, tokens, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        torch.softmax(scaled, 1), *settings_of(), True, None, torch.zeros(len(FILTERS)),
        return_filtered_probs=True,
    )  # fmt: skip
    stock = torch.zeros_like(scaled).scatter_(1, tokens.long(), weights)
    stock /= stock.sum(1, keepdim=True)
    ours = ours_filtered(scaled, "lowest_id", False)
    # Where a float32 sum has passed 1, stock drops the rest even at top_p 1.
    has_top_p = settings_of()[1].unsqueeze(1) < 1
    assert not ((ours > 0) != (stock > 0))[has_top_p.expand_as(ours) | (ours > 1e-6)].any()
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-6)


def flashinfer_order(probs: torch.Tensor) -> torch.Tensor:
    """Top-k, then top-p of what is left, then min-p, by thresholds that keep ties as its kernels do."""
    top_ks, top_ps, min_ps = settings_of()
    ordered = probs.sort(1, descending=True).values
    pivots = ordered.gather(1, (top_ks.long().clamp(max=VOCAB) - 1).unsqueeze(1))
    probs = torch.where(probs < pivots, 0.0, probs)
    probs = probs / probs.sum(1, keepdim=True)
    above = torch.where(probs.unsqueeze(1) > probs.unsqueeze(2), probs.unsqueeze(1), 0.0).sum(2)  # [n, V]
    probs = torch.where(above > top_ps.unsqueeze(1), 0.0, probs)
    probs = torch.where(probs < min_ps.unsqueeze(1) * probs.amax(1, keepdim=True), 0.0, probs)
    return probs / probs.sum(1, keepdim=True)


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_flashinfer_with_min_p(seed):
    scaled = torch.randn(len(FILTERS), VOCAB, generator=torch.Generator().manual_seed(10 + seed)) * (1 + seed)
    scaled[:, 20:] = scaled[:, :20]  # every token has an equal, so that ties stand at every cut
    stock = flashinfer_order(torch.softmax(scaled, 1))
    ours = ours_filtered(scaled, "all", True)
    has_min_p = settings_of()[2] > 0
    assert torch.equal((ours > 0)[has_min_p], (stock > 0)[has_min_p])
    torch.testing.assert_close(ours[has_min_p], stock[has_min_p], rtol=1e-5, atol=1e-7)


def test_the_two_orders_differ():
    """Else the tests above could not tell them apart."""
    scaled = torch.randn(len(FILTERS), VOCAB, generator=torch.Generator().manual_seed(10)) * 2
    assert not torch.equal(ours_filtered(scaled, "all", True), ours_filtered(scaled, "all", False))


def test_stock_still_normalises_greedy_and_no_top_k_as_we_read_them():
    from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams

    assert TOP_K_ALL == NO_TOP_K
    greedy, whole = SamplingParams(temperature=0.0), SamplingParams(top_k=-1)
    assert (greedy.temperature, greedy.top_k, whole.top_k) == (1.0, 1, NO_TOP_K)
