"""What a round should take, from the bytes it moves and the arithmetic it does against a GPU's ceilings.

`budget_cost.CostTable` holds round times that were measured; this module predicts them for models, GPUs,
batches and budgets that were not, in the same words: a `DraftPlan` says what the round does. A pass costs

    layers x latency + weight and KV bytes / bandwidth + FLOPs / rate + recurrent states / bandwidth
    + all-reduces,

each ceiling times the share of it that is reached (`Calibration`). Bytes and FLOPs add up: taking the larger
of the two, as in a roofline, foretells published times worse. A round is a draft pass, a verify pass and the
work on the tree, and lasts at least as long as the host needs to prepare it. Plain Python, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddtree.config import Mode, check, is_int, is_number
from ddtree.tree.budget_cost import CostTable, DraftPlan

HEAD_BYTES = 2  # bfloat16, also in quantised checkpoints
ACTIVATION_BYTES = 2  # bfloat16, as hidden states and logits cross the links
ALL_REDUCES_PER_LAYER = 2  # after attention and after the MLP
ComputeDtype = Literal["bf16", "fp8"]


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """A GPU's ceilings, as its maker's data sheet gives them; dense rates, without sparsity.

    Attributes:
        name: as people call it.
        memory_bytes: size of its memory.
        memory_bytes_per_s: bandwidth of its memory.
        bf16_flops_per_s: dense tensor rate, accumulating in float32.
        fp8_flops_per_s: the same for FP8, 0 where it has none.
        link_bytes_per_s: to the other GPUs of its host, one direction.
        link_latency_s: least time of an all-reduce; no data sheet has it.
    """

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    bf16_flops_per_s: float
    fp8_flops_per_s: float
    link_bytes_per_s: float
    link_latency_s: float

    def flops_per_s(self, dtype: ComputeDtype) -> float:
        """The dense rate for that dtype; a GPU without FP8 computes in bfloat16."""
        return self.fp8_flops_per_s or self.bf16_flops_per_s if dtype == "fp8" else self.bf16_flops_per_s


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Softmax attention of some of a model's layers.

    `qk_dim` and `v_dim` are what one query head reads of a cached token: the head's size twice, or for MLA
    with absorbed projections the latent with and without its rotary part. `kv_bytes_per_token` is of one
    layer. Tensor parallelism splits the cache by `num_kv_heads` and copies it beyond; MLA's latent is one.
    `window` is None where a layer sees the whole context.
    """

    num_layers: int
    num_heads: int
    qk_dim: int
    v_dim: int
    kv_bytes_per_token: float
    num_kv_heads: int
    window: int | None = None

    def kv_bytes_per_gpu(self, num_gpus: int) -> float:
        """What one of the GPUs keeps of a token in all these layers."""
        return self.num_layers * self.kv_bytes_per_token / min(num_gpus, self.num_kv_heads)

    def tokens_seen(self, context_tokens: float) -> float:
        """Cached tokens that a query reads."""
        return context_tokens if self.window is None else min(context_tokens, float(self.window))


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Routed experts of a mixture: `weights` numbers in each, `bytes_per_weight` with their scales."""

    num_layers: int
    num_experts: int
    experts_per_token: int
    weights: float
    bytes_per_weight: float

    def expected_distinct(self, num_tokens: float) -> float:
        """Experts of a layer that `num_tokens` tokens touch, each routed by itself and evenly.

        A token leaves out an expert with probability 1 - k/E. Tokens of one text route alike, so this is
        an upper estimate.
        """
        missed: float = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_experts * (1 - missed)


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Linear-attention or state-space layers; a pass writes `state_bytes` a layer for every token."""

    num_layers: int
    state_bytes: float


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a decoder makes a pass read and compute.

    Attributes:
        name: of the model.
        num_layers: all its layers.
        hidden_size: its width.
        dense_weights: numbers every token is multiplied with: projections, MLPs, shared experts; no head.
        head_weights: vocabulary times width.
        bytes_per_weight: of the dense weights; the head is bfloat16.
        attention: its softmax attention, one entry a kind of layer.
        experts: its routed experts, if any.
        recurrent: its recurrent layers, if any.
        compute: the dtype it multiplies in.
        ties_embedding: whether the head is the embedding, stored once.
        gathers_logits: whether every tensor-parallel rank gets all logits, to choose from them; a drafter's
            ranks exchange candidates only.
    """

    name: str
    num_layers: int
    hidden_size: int
    dense_weights: float
    head_weights: float
    bytes_per_weight: float
    attention: tuple[AttentionShape, ...]
    experts: ExpertShape | None = None
    recurrent: RecurrentShape | None = None
    compute: ComputeDtype = "bf16"
    ties_embedding: bool = False
    gathers_logits: bool = True

    @property
    def vocabulary(self) -> float:
        """Tokens its head scores."""
        return self.head_weights / self.hidden_size

    @property
    def active_weights(self) -> float:
        """Numbers one token is multiplied with, head included."""
        routed = self.experts
        chosen = routed.num_layers * routed.experts_per_token * routed.weights if routed else 0.0
        return self.dense_weights + self.head_weights + chosen

    @property
    def memory_bytes(self) -> float:
        """All weights, the embedding included."""
        embedding = 0.0 if self.ties_embedding else self.head_weights * HEAD_BYTES
        experts = self._expert_bytes(self.experts.num_experts) if self.experts else 0.0
        return (
            self.dense_weights * self.bytes_per_weight + self.head_weights * HEAD_BYTES + embedding + experts
        )

    def weight_bytes_read(self, num_tokens: float) -> float:
        """Weights a pass over `num_tokens` tokens reads: all dense ones, the head, the experts touched."""
        experts = self._expert_bytes(self.experts.expected_distinct(num_tokens)) if self.experts else 0.0
        return self.dense_weights * self.bytes_per_weight + self.head_weights * HEAD_BYTES + experts

    def _expert_bytes(self, experts_a_layer: float) -> float:
        routed = self.experts
        if routed is None:
            return 0.0
        return routed.num_layers * experts_a_layer * routed.weights * routed.bytes_per_weight

    def kv_bytes_per_token(self, num_gpus: int = 1) -> float:
        """KV cache of one token over all layers on each of the GPUs."""
        return sum(kind.kv_bytes_per_gpu(num_gpus) for kind in self.attention)


@dataclass(frozen=True, slots=True)
class DraftPair:
    """A target and the DFlash drafter trained for it; `drafter.head_weights` is the target's head."""

    target: ModelShape
    drafter: ModelShape
    block_size: int = 16

    @property
    def chain(self) -> DraftPlan:
        """The drafter's whole block as a chain."""
        return DraftPlan(Mode.CHAIN, self.block_size - 1)

    @property
    def narrow_tree(self) -> DraftPlan:
        """The largest tree that is no wider than the chain."""
        return DraftPlan(Mode.TREE, self.block_size - 1)

    def verify_width(self, plan: DraftPlan) -> int:
        """Tokens of a request in the plan's verify pass, as in SGLang: a tree shares the block's window."""
        if plan.mode is Mode.AR:
            return 1
        return max(self.block_size, plan.node_budget + 1)


@dataclass(frozen=True, slots=True)
class Calibration:
    """How much of its ceilings an engine reaches, and what it takes besides; `cost_fit` finds these.

    Attributes:
        bandwidth_share: of the memory's bandwidth, for weights and KV.
        flop_share: of the dense tensor rate.
        layer_latency_s: of a layer (and of the head) whatever its size: kernels starting and draining.
        tree_s: a drafting round's work on the device besides its two passes.
        state_bandwidth_share: of the bandwidth, for recurrent states; low where a kernel goes token by token.
        step_host_s: least time of a plain step on the host.
        round_host_s: least time of a drafting round on the host.
        request_host_s: what every request of the batch adds to the latter.
        overlaps_host: whether the host prepares one round while the device runs another; else they add up.
        prefill_s: of a prompt or of those taken in together; only where a measurement includes it.
        link_share: of a link's bandwidth; not fitted, since no fitted time has links.
    """

    bandwidth_share: float
    flop_share: float
    layer_latency_s: float
    tree_s: float
    state_bandwidth_share: float
    step_host_s: float
    round_host_s: float
    request_host_s: float
    overlaps_host: bool
    prefill_s: float = 0.0
    link_share: float = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is decoded at once: requests of `context_tokens` tokens each, tensor-parallel over GPUs."""

    num_requests: float = 1
    context_tokens: float = 1024
    num_gpus: int = 1

    def __post_init__(self) -> None:
        check(
            is_number(self.num_requests) and self.num_requests > 0,
            "num_requests",
            self.num_requests,
            "above 0",
        )
        check(
            is_number(self.context_tokens) and self.context_tokens >= 0,
            "context_tokens", self.context_tokens, "0 or more",
        )  # fmt: skip
        check(is_int(self.num_gpus) and self.num_gpus >= 1, "num_gpus", self.num_gpus, "1 or more")


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one forward pass by what they are spent on."""

    latency_s: float
    weights_s: float
    attention_s: float
    states_s: float
    links_s: float

    @property
    def total_s(self) -> float:
        return self.latency_s + self.weights_s + self.attention_s + self.states_s + self.links_s


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Seconds of one round: its draft pass (None in plain decoding), verify pass, tree and host."""

    draft: PassCost | None
    verify: PassCost
    tree_s: float
    host_s: float
    overlaps_host: bool

    @property
    def device_s(self) -> float:
        return (self.draft.total_s if self.draft else 0.0) + self.verify.total_s + self.tree_s

    @property
    def total_s(self) -> float:
        return max(self.device_s, self.host_s) if self.overlaps_host else self.device_s + self.host_s


def pass_cost(model: ModelShape, gpu: GpuSpec, calibration: Calibration, load: Load, width: int) -> PassCost:
    """A pass of the model over `width` tokens of every request.

    Tensor parallelism divides weights, states and arithmetic evenly and KV by its heads, leaves the latency
    of a layer as it is, and adds two ring all-reduces a layer and the gathering of the logits.
    """
    check(is_int(width) and width >= 1, "width", width, "1 token or more")
    num_tokens = load.num_requests * width
    reached = gpu.memory_bytes_per_s * calibration.bandwidth_share
    rate = gpu.flops_per_s(model.compute) * load.num_gpus * calibration.flop_share
    states = model.recurrent.num_layers * model.recurrent.state_bytes * num_tokens if model.recurrent else 0.0
    state_rate = gpu.memory_bytes_per_s * load.num_gpus * calibration.state_bandwidth_share
    return PassCost(
        latency_s=(model.num_layers + 1) * calibration.layer_latency_s,
        weights_s=model.weight_bytes_read(num_tokens) / (reached * load.num_gpus)
        + 2 * model.active_weights * num_tokens / rate,
        attention_s=sum(_attention_s(kind, load, width, reached, rate) for kind in model.attention),
        states_s=states / state_rate,
        links_s=_links_s(model, gpu, calibration, load, num_tokens),
    )


def _attention_s(kind: AttentionShape, load: Load, width: int, bandwidth: float, rate: float) -> float:
    """One kind of layer: every request's KV is read once, every token is compared with what it sees.

    `bandwidth` is of one GPU, `rate` of all.
    """
    seen = kind.tokens_seen(load.context_tokens + width)
    kv_bytes = load.num_requests * seen * kind.kv_bytes_per_gpu(load.num_gpus)
    flops = (
        2.0 * kind.num_layers * load.num_requests * width * kind.num_heads * (kind.qk_dim + kind.v_dim) * seen
    )
    return kv_bytes / bandwidth + flops / rate


def _links_s(
    model: ModelShape, gpu: GpuSpec, calibration: Calibration, load: Load, num_tokens: float
) -> float:
    if load.num_gpus == 1:
        return 0.0
    others = (load.num_gpus - 1) / load.num_gpus
    rate = gpu.link_bytes_per_s * calibration.link_share
    states = num_tokens * model.hidden_size * ACTIVATION_BYTES
    logits = num_tokens * model.vocabulary * ACTIVATION_BYTES
    reduced = ALL_REDUCES_PER_LAYER * model.num_layers * (gpu.link_latency_s + 2 * others * states / rate)
    return reduced + (gpu.link_latency_s + others * logits / rate if model.gathers_logits else 0.0)


def round_cost(
    pair: DraftPair, gpu: GpuSpec, calibration: Calibration, load: Load, plan: DraftPlan
) -> RoundCost:
    """A round by the plan: plain decoding, the chain, or a tree."""
    verify = pass_cost(pair.target, gpu, calibration, load, pair.verify_width(plan))
    if plan.mode is Mode.AR:
        return RoundCost(None, verify, 0.0, calibration.step_host_s, calibration.overlaps_host)
    draft = pass_cost(pair.drafter, gpu, calibration, load, pair.block_size)
    host_s = calibration.round_host_s + load.num_requests * calibration.request_host_s
    return RoundCost(draft, verify, calibration.tree_s, host_s, calibration.overlaps_host)


def speed_up(accept_length: float, plain: RoundCost, drafted: RoundCost) -> float:
    """Times plain decoding: accept length x plain step / round."""
    return accept_length * plain.total_s / drafted.total_s


def break_even_length(plain: RoundCost, drafted: RoundCost) -> float:
    """The accept length from which on the round is faster than plain decoding: its cost in plain steps."""
    return drafted.total_s / plain.total_s


def predicted_costs(
    pair: DraftPair, gpu: GpuSpec, calibration: Calibration, load: Load, plans: Sequence[DraftPlan]
) -> CostTable:
    """Predicted round times as a cost table, from which the node budget policy can start."""
    return CostTable({
        plan: 1e3 * round_cost(pair, gpu, calibration, load, plan).total_s for plan in plans
    })  # fmt: skip


def request_bytes(pair: DraftPair, plan: DraftPlan, context_tokens: int, num_gpus: int = 1) -> float:
    """Memory of one more request on each GPU: KV of target and drafter, recurrent states, verify logits.

    Logits are float32 and whole on every GPU; layers with a window are counted as if they kept all tokens.
    """
    width = pair.verify_width(plan)
    states = pair.target.recurrent
    kv_bytes = sum(model.kv_bytes_per_token(num_gpus) for model in (pair.target, pair.drafter))
    return (
        (context_tokens + width) * kv_bytes
        + (states.num_layers * states.state_bytes * (width + 1) / num_gpus if states else 0.0)
        + width * pair.target.vocabulary * 4
    )


def has_room(pair: DraftPair, gpu: GpuSpec, load: Load, plan: DraftPlan, *, memory_share: float) -> bool:
    """Whether weights and the load's requests find room in that share of every GPU's memory."""
    # The drafter's head is the target's, already counted.
    weights = pair.target.memory_bytes + pair.drafter.dense_weights * pair.drafter.bytes_per_weight
    requests = load.num_requests * request_bytes(pair, plan, int(load.context_tokens), load.num_gpus)
    return weights / load.num_gpus + requests <= memory_share * gpu.memory_bytes
