"""The embedded engine with a fault planted through its seams: target, cache, drafter or step of the round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ddtree.config import SamplingParams
from ddtree.draft.context import DraftContext
from ddtree.draft.load import TargetInfo
from ddtree.engine import decode_round
from ddtree.engine.decode_round import Built, Round, VerifyPass
from ddtree.engine.engine import Engine
from ddtree.engine.kv_cache import KVCache
from ddtree.engine.logprobs import path_logprobs
from ddtree.engine.protocols import Drafter, TargetModel, TargetOutput
from ddtree.engine.request import Request
from ddtree.engine.round_runner import EagerRunner
from ddtree.engine.sampling import TokenChooser
from ddtree.engine.sequence import ModelPair
from ddtree.engine.sequence import Sequence as EngineSequence
from ddtree.engine.stages import NO_CLOCK, StageClock
from ddtree.layers.window import Window
from ddtree.trace.record import TraceRecorder
from ddtree.trace_format import Detail
from ddtree.tree.budget import DraftPlan
from ddtree.tree.verify import VerifyResult, follow
from engine_kit import VOCAB_SIZE, ScriptDrafter, tiny_engine

Accept = Callable[[Built, VerifyPass, TokenChooser, int], VerifyResult]
Commit = Callable[[ModelPair, EngineSequence, VerifyPass, VerifyResult], None]


# -- the seams -------------------------------------------------------------------------------------


@dataclass
class FaultTarget:
    """A target whose tree windows go through `window`, and whose cache through `cache`."""

    inner: TargetModel
    window: Callable[[Window], Window] = lambda window: window
    cache: Callable[[KVCache], KVCache] = lambda cache: cache

    @property
    def info(self) -> TargetInfo:
        return self.inner.info

    @property
    def kernels_per_layer(self) -> int | None:
        return self.inner.kernels_per_layer

    @property
    def supports_graphs(self) -> bool:
        return self.inner.supports_graphs

    def new_kv_cache(self, capacity_tokens: int) -> KVCache:
        return self.cache(self.inner.new_kv_cache(capacity_tokens))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.inner.embed(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.inner.head(hidden)

    def forward(
        self,
        tokens: Tensor,
        window: Window,
        kv_cache: KVCache,
        tap_layer_ids: Sequence[int],
        *,
        last_only: bool = False,
    ) -> TargetOutput:
        is_tree = window.tree_mask is not None
        seen = self.window(window) if is_tree else window
        return self.inner.forward(tokens, seen, kv_cache, tap_layer_ids, last_only=last_only)


class UnmovedCache(KVCache):
    """A cache whose commit moves nothing."""

    def __init__(self, cache: KVCache) -> None:
        self.data = cache.data

    def compact(self, prefix_len: Tensor, result: VerifyResult) -> None: ...


class SpillingCache(KVCache):
    """A cache whose commit also writes to the slot before the window, a neighbour's."""

    def __init__(self, cache: KVCache) -> None:
        self.data = cache.data

    def compact(self, prefix_len: Tensor, result: VerifyResult) -> None:
        super().compact(prefix_len, result)
        self.data[:, :, :, int(prefix_len) - 1] = self.data[:, :, :, int(prefix_len)]


@dataclass
class StaleRootDrafter:
    """A drafter whose block begins with the root of the round before."""

    inner: Drafter
    last_root: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))

    @property
    def block_size(self) -> int:
        return self.inner.block_size

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.inner.target_layer_ids

    def new_context(self, capacity: int) -> DraftContext:
        return self.inner.new_context(capacity)

    def append(self, context: DraftContext, taps: Tensor, window: Window) -> None:
        self.inner.append(context, taps, window)

    def draft_logits(self, root_token: Tensor, context: DraftContext, window: Window) -> Tensor:
        stale, self.last_root = self.last_root, root_token.clone()
        return self.inner.draft_logits(stale, context, window)


def round_of(
    accept: Accept = decode_round.accept, commit: Commit = decode_round.commit
) -> Callable[..., Round]:
    """`decode_round` with other steps in the places of its own."""

    def run(
        pair: ModelPair,
        sequence: EngineSequence,
        plan: DraftPlan,
        chooser: TokenChooser,
        top_logprobs: int | None = None,
        clock: StageClock = NO_CLOCK,
    ) -> Round:
        built = decode_round.build(decode_round.draft(pair, sequence, plan), sequence, plan)
        verified = decode_round.verify(pair, sequence, built)
        result = accept(built, verified, chooser, pair.block_size - 1)
        logprobs = path_logprobs(verified.output.logits, result, top_logprobs)
        commit(pair, sequence, verified, result)
        return Round(built, result, logprobs)

    return run


# -- the faults ------------------------------------------------------------------------------------


def see_siblings(window: Window) -> Window:
    """Every node also sees its earlier siblings."""
    mask = window.tree_mask
    assert mask is not None
    seen = mask.clone()
    parents = [-1] + [int(mask[node, :node].nonzero().max()) for node in range(1, mask.shape[0])]
    for node, parent in enumerate(parents):
        for other in range(1, node):
            seen[node, other] |= parents[other] == parent
    return dataclasses.replace(window, tree_mask=seen)


def positions_by_column(window: Window) -> Window:
    """Positions count the columns of the tree, not its depths."""
    return dataclasses.replace(window, positions=window.prefix_len + torch.arange(window.num_tokens))


def give_first_columns(
    pair: ModelPair, sequence: EngineSequence, verified: VerifyPass, result: VerifyResult
) -> None:
    """The drafter gets the states of the window's last nodes instead of the path's."""
    taps = verified.output.taps
    assert taps is not None
    wrong = verified._replace(output=verified.output._replace(taps=taps.flip(0)))
    decode_round.commit(pair, sequence, wrong, result)


def walk_first_children(
    built: Built, verified: VerifyPass, chooser: TokenChooser, draft_depth: int
) -> VerifyResult:
    """A walk that looks at the first child of every node only."""
    tree, seen = built.tree, set()
    tokens = tree.tokens.clone()
    for node, parent in enumerate(tree.parents[0].tolist()):
        if parent in seen:
            tokens[0, node] = -1
        seen.add(parent)
    chain = dataclasses.replace(tree, tokens=tokens)
    return decode_round.accept(built._replace(tree=chain), verified, chooser, draft_depth)


def take_by_ratio(
    built: Built, verified: VerifyPass, chooser: TokenChooser, draft_depth: int
) -> VerifyResult:
    """A child is taken with probability min(1, p/q), though the tree's tokens were not drawn from q."""
    tree = built.tree
    start = verified.window.start
    assert start is not None
    generator = torch.Generator().manual_seed(int(chooser.seeds[0]) * 1_000_003 + start)
    probs = chooser.node_log_probs(verified.output.logits).exp()
    parents, tokens, scores = tree.parents[0].tolist(), tree.tokens[0].tolist(), tree.log_probs[0]
    target_tokens = torch.full_like(tree.tokens[0], -1)
    at: int | None = 0
    while at is not None:
        below, here = [node for node, parent in enumerate(parents) if parent == at], at
        at = None
        for node in below:
            ratio = float(probs[here, tokens[node]] / (scores[node] - scores[here]).exp())
            if float(torch.rand((), generator=generator)) < ratio:
                at = node
                break
        drawn = int(torch.multinomial(probs[here], 1, generator=generator)) if at is None else tokens[at]
        carriers = [node for node in below if tokens[node] == drawn]
        at = carriers[0] if carriers else None
        target_tokens[here] = drawn
    return follow(tree, built.layout.ancestor_mask, target_tokens[None], draft_depth)


def accept_without(**neutral: float) -> Accept:
    """The accept step with sampling parameters at their neutral values."""

    def accept(built: Built, verified: VerifyPass, chooser: TokenChooser, draft_depth: int) -> VerifyResult:
        params = dataclasses.replace(chooser.params, **neutral)
        other = TokenChooser(params, (0,), VOCAB_SIZE, torch.device("cpu"))
        return decode_round.accept(built, verified, other, draft_depth)

    return accept


class SpreadDrafter(ScriptDrafter):
    """Drafts with three likely tokens at each position, of which the script's is often one.

    Its trees have branches between the nodes of a path, so that columns are no depths and siblings matter.
    """

    def _logits(self, position: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + position)
        logits = 0.1 * torch.randn(VOCAB_SIZE, generator=generator)
        likely = torch.randperm(VOCAB_SIZE, generator=generator)[:3]
        rank = int(torch.multinomial(torch.tensor([0.5, 0.2, 0.15, 0.15]), 1, generator=generator))
        at = position - self.prompt_len
        if 0 <= at < len(self.script) and rank < 3:
            likely[rank] = self.script[at]
        logits[likely] = torch.tensor([8.0, 7.4, 7.0])
        return logits


# -- runs ------------------------------------------------------------------------------------------


def record(
    path: Path,
    engine: Engine,
    requests: Sequence[Request],
    scripts: Sequence[Sequence[int]] = (),
    detail: Detail = Detail.FULL,
) -> Path:
    """A trace of the requests; a scripted drafter is told each one's script before it."""
    with TraceRecorder(path, detail) as recorder:
        for number, request in enumerate(requests):
            if scripts and isinstance(engine.drafter, ScriptDrafter):
                engine.drafter.script = list(scripts[number])
                engine.drafter.prompt_len = len(request.prompt_tokens)
            recorder.generate(engine, request)
    return path


def engine_of(
    target: TargetModel, drafter: Drafter | None = None, round_fn: Callable[..., Round] | None = None
) -> Engine:
    """An engine, by default with a drafter of scripts, whose rounds are run by `round_fn`."""
    engine = tiny_engine(target, drafter or SpreadDrafter((), 0))
    if round_fn is not None:
        engine.runner = EagerRunner(engine.pair, engine.sequence, round_fn)
    return engine


def prompts(number: int, vocab_size: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of 8 to 8 + number - 1 tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(4, vocab_size, (8 + i,), generator=generator).tolist()) for i in range(number)
    ]


def sampling(max_tokens: int = 16, **fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **fields)
