"""Whether a planned server fits the memory of its GPUs, and the largest one that does."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddtree.config import MAX_NODE_BUDGET, PluginConfig
from ddtree.doctor import memory
from ddtree.doctor.checkpoints import Checkpoint
from ddtree.doctor.model_shape import ModelShape
from ddtree.doctor.pair import Pair
from ddtree.doctor.plan import GIB, MAX_REQUESTS, Plan
from ddtree.doctor.report import Finding, Level, Section
from ddtree.draft.dflash_config import DFlashConfig

TITLE = "Memory of each GPU"
KV_BYTES = {"fp8_e4m3": 1, "fp8_e5m2": 1}  # others have `NUMBER_BYTES`
# Without room for so much beside the tree's buffers not even the libraries' own memory fits.
LEAST_RESERVE_BYTES = 512 * memory.MIB


@dataclass(frozen=True, slots=True)
class Load:
    """What is planned, and what the largest is asked of."""

    node_budget: int
    num_requests: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What does not change with the load.

    Attributes:
        weight_bytes: of target and drafter on each GPU.
        gpu_bytes: memory of each GPU.
        fraction: --mem-fraction-static where it is given; None lets the doctor choose it.
        kv_element_bytes: of a number in the KV cache.
    """

    shape: ModelShape
    draft: DFlashConfig
    config: PluginConfig
    weight_bytes: int
    gpu_bytes: int
    fraction: float | None
    tp_size: int
    kv_element_bytes: int


@dataclass(frozen=True, slots=True)
class Account:
    """Where the memory of a GPU goes, in bytes, tokens and requests.

    Attributes:
        buffers: what draft trees take outside of weights and KV pool, by name.
        plain_reserve: what SGLang leaves there for a plain server.
        fraction: of the memory that weights and KV pool get.
        best_fraction: the largest that leaves room for buffers and reserve.
        pool_tokens: tokens that the KV pool holds; negative where the weights alone are too much.
        request_tokens: slots of one request at its full context.
    """

    verify_width: int
    weights: int
    kv_per_token: int
    draft_kv_per_token: int
    states: int
    buffers: Mapping[str, int]
    plain_reserve: int
    fraction: float
    best_fraction: float
    pool: int
    pool_tokens: int
    request_tokens: int
    num_requests: int

    @property
    def full_requests(self) -> int:
        """Requests at their full context that the pool holds at once."""
        return max(0, self.pool_tokens // self.request_tokens)

    @property
    def has_headroom(self) -> bool:
        """Whether buffers and reserve have room outside of the pool."""
        return self.fraction <= self.best_fraction

    @property
    def fits(self) -> bool:
        """Whether all requests fit at their full context, with room for everything else."""
        return self.has_headroom and self.full_requests >= self.num_requests


def account_of(machine: Machine, load: Load) -> Account:
    """The sums for one load."""
    shape, draft = machine.shape, machine.draft
    width = replace(machine.config, node_budget=load.node_budget).verify_width(draft.block_size)
    buffers = buffers_of(machine, load, width)
    reserve = memory.plain_reserve_bytes(machine.gpu_bytes, load.num_requests, machine.tp_size)
    room = machine.gpu_bytes - reserve - sum(buffers.values())
    best = math.floor(1000 * room / machine.gpu_bytes) / 1000
    fraction = best if machine.fraction is None else machine.fraction
    kv = memory.kv_bytes_per_token(shape, machine.kv_element_bytes, machine.tp_size)
    draft_kv = memory.draft_kv_bytes_per_token(draft, machine.kv_element_bytes, machine.tp_size)
    states = memory.state_bytes(shape, load.num_requests, width, machine.tp_size)
    pool = math.floor(machine.gpu_bytes * fraction) - machine.weight_bytes - states
    return Account(
        verify_width=width,
        weights=machine.weight_bytes,
        kv_per_token=kv,
        draft_kv_per_token=draft_kv,
        states=states,
        buffers=buffers,
        plain_reserve=reserve,
        fraction=fraction,
        best_fraction=best,
        pool=pool,
        pool_tokens=pool // (kv + draft_kv),
        request_tokens=load.context_tokens + memory.reserve_tokens(width, draft.block_size),
        num_requests=load.num_requests,
    )


def buffers_of(machine: Machine, load: Load, width: int) -> dict[str, int]:
    """What draft trees take outside of weights and KV pool."""
    shape, draft, requests = machine.shape, machine.draft, load.num_requests
    return {
        "verify mask": memory.mask_bytes(requests, width, load.context_tokens),
        "float32 logits": memory.logits_bytes(requests, width, shape.vocab_size),
        f"{shape.served_dtype} logits": memory.logits_bytes(
            requests, width, shape.vocab_size, memory.NUMBER_BYTES
        ),
        "hidden states": memory.hidden_bytes(
            requests, width, draft.num_taps, shape.hidden_size, memory.NUMBER_BYTES
        ),
        "token table": memory.token_table_bytes(requests, width, draft.block_size, load.context_tokens),
        "token counts": memory.token_count_bytes(requests, shape.vocab_size),
    }


def largest(machine: Machine, load: Load) -> dict[str, int]:
    """The largest of each quantity that fits with the others as planned; 0 where none does."""
    tries: dict[str, tuple[int, Callable[[int], Load]]] = {
        "node_budget": (MAX_NODE_BUDGET, lambda n: replace(load, node_budget=n)),
        "max_requests": (MAX_REQUESTS, lambda n: replace(load, num_requests=n)),
        "context_tokens": (machine.shape.max_positions, lambda n: replace(load, context_tokens=n)),
    }

    def fits(change: Callable[[int], Load]) -> Callable[[int], bool]:
        return lambda number: account_of(machine, change(number)).fits

    return {name: largest_number(high, fits(change)) for name, (high, change) in tries.items()}


def largest_number(high: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 to `high` that fits, 0 for none; all below one that fits are taken to fit."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def memory_section(plan: Plan, pair: Pair, config: PluginConfig, gpu_bytes: int | None) -> Section:
    """The findings on memory; nothing where no pair is asked about."""
    if pair.shape is None or pair.draft is None or pair.target is None or pair.drafter is None:
        return Section("memory", TITLE, ())
    total = total_weight_bytes(plan, pair.target, pair.shape)
    if gpu_bytes is None or total is None:
        return Section("memory", TITLE, (unknown_finding(gpu_bytes, total),))
    weights = memory.weight_bytes(total + (pair.drafter.weight_bytes or 0), plan.tp_size)
    kv_bytes = KV_BYTES.get(plan.kv_dtype, memory.NUMBER_BYTES)
    machine = Machine(
        pair.shape, pair.draft, config, weights, gpu_bytes, plan.mem_fraction, plan.tp_size, kv_bytes
    )
    load = Load(config.node_budget, plan.num_requests, plan.context_tokens or pair.shape.max_positions)
    account, most = account_of(machine, load), largest(machine, load)
    found = headroom_findings(account)
    if account.fraction > 0:
        found += pool_findings(account, load)
    if load.context_tokens > pair.shape.max_positions:
        found.append(Finding(
            "memory.context", Level.WARN,
            f"a context of {load.context_tokens} passes the target's {pair.shape.max_positions} positions",
            why="SGLang refuses such a --context-length", todo="ask about a shorter one",
        ))  # fmt: skip
    if config.node_budget + 1 <= account.verify_width == pair.draft.block_size:
        told = f"the verify width is the block of {account.verify_width}, not the budget's"
        found.append(Finding("memory.width", Level.OK, told))
    if pair.shape.is_hybrid and pair.shape.states is None:
        found.append(Finding(
            "memory.states", Level.WARN, "its recurrent states are of a kind that is not reckoned here",
            why="each request, and each node of a tree, takes memory for them too",
            todo="take the pool as smaller than it stands below",
        ))  # fmt: skip
    found.append(largest_finding(most))
    data = {"load": asdict(load), "account": account_json(account), "largest": most}
    return Section("memory", TITLE, tuple(found), data, tuple(table(machine, account, load)))


def total_weight_bytes(plan: Plan, target: Checkpoint, shape: ModelShape) -> int | None:
    """Bytes of the target's weights once they are loaded, None where that is not known."""
    if plan.weights_gb is not None:
        return round(plan.weights_gb * GIB)
    return None if target.weight_bytes is None else shape.served_bytes(target.weight_bytes)


def unknown_finding(gpu_bytes: int | None, total: int | None) -> Finding:
    """What is missing for the arithmetic."""
    wanted = {
        "the GPU's memory (--gpu-memory-gb)": gpu_bytes,
        "the size of the weights (--weights-gb)": total,
    }
    missing = " and ".join(name for name, value in wanted.items() if value is None)
    return Finding(
        "memory.unknown", Level.WARN, f"not reckoned: {missing} is not known",
        why="whether the plan fits cannot be told", todo="give it with the flag",
    )  # fmt: skip


def headroom_findings(account: Account) -> list[Finding]:
    """Whether what is not the pool has room beside it."""
    buffers, name = sum(account.buffers.values()), "memory.headroom"
    told = f"draft trees take up to {gib(buffers)} outside of weights and KV pool"
    fraction = f"--mem-fraction-static {account.best_fraction:.3f}"
    if account.best_fraction <= 0:
        return [Finding(
            name, Level.ERROR, f"{told}, and with SGLang's own reserve nothing is left",
            why="the server would run out of memory", todo="plan fewer requests, a smaller budget or context",
        )]  # fmt: skip
    if account.has_headroom:
        return [
            Finding(
                name, Level.OK, f"{told}; there is room with --mem-fraction-static {account.fraction:.3f}"
            )
        ]
    left = (1 - account.fraction) / (1 - account.best_fraction) * (buffers + account.plain_reserve)
    level = Level.WARN if left >= buffers + LEAST_RESERVE_BYTES else Level.ERROR
    return [Finding(
        name, level,
        f"{told}, and --mem-fraction-static {account.fraction:.3f} leaves {gib(round(left))} for all",
        why=f"activations and graphs need {gib(account.plain_reserve)} more by SGLang's own rule; without it "
        "the server ends with out of memory, at start-up or under load",
        todo=f"pass {fraction}, or plan fewer requests, a smaller budget or context",
    )]  # fmt: skip


def pool_findings(account: Account, load: Load) -> list[Finding]:
    """Whether the KV pool holds what is planned."""
    name, full = "memory.pool", account.full_requests
    if account.pool <= 0:
        return [Finding(
            name, Level.ERROR,
            f"no KV fits: weights and states of {gib(account.weights + account.states)} are more than "
            f"{account.fraction:.3f} of the memory",
            why="SGLang ends with: Not enough memory", todo="use more GPUs (--tp), or a quantised target",
        )]  # fmt: skip
    told = (
        f"the KV pool holds {account.pool_tokens:,} tokens: {full} requests of {load.context_tokens:,} tokens"
    )
    if full >= load.num_requests:
        return [Finding(name, Level.OK, f"{told}, {load.num_requests} are planned")]
    if full == 0:
        return [Finding(
            name, Level.ERROR, f"the KV pool holds {account.pool_tokens:,} tokens, fewer than one request of "
            f"{load.context_tokens:,}",
            why="such a request can never be served",
            todo="plan a shorter context or more GPUs, or --kv-dtype fp8_e4m3",
        )]  # fmt: skip
    return [Finding(
        name, Level.WARN, f"{told}, {load.num_requests} are planned",
        why="shorter requests fit as planned; with many long ones SGLang lets new ones wait, or takes "
        "running ones back and computes their prompts again",
        todo="see the largest that fit, below",
    )]  # fmt: skip


def largest_finding(most: Mapping[str, int]) -> Finding:
    told = (
        "largest that fits with the other two as planned, and all requests at full context: "
        f"{told_most(most['node_budget'], 'nodes')}, or {told_most(most['max_requests'], 'requests')}, or "
        f"{told_most(most['context_tokens'], 'tokens of context')}"
    )
    return Finding("memory.largest", Level.OK, told)


def told_most(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number else f"no number of {noun}"


def table(machine: Machine, account: Account, load: Load) -> list[str]:
    """The sums, line by line."""
    sums = {
        "memory of the GPU": machine.gpu_bytes,
        "weights, drafter's too": account.weights,
        **({"recurrent states": account.states} if account.states else {}),
        "KV pool": account.pool,
        **account.buffers,
        "SGLang's own reserve": account.plain_reserve,
    }
    rows = [f"{name:<24}{gib(value):>12}" for name, value in sums.items()]
    numbers = {
        "KV of a token": f"{account.kv_per_token:,} B",
        "drafter's KV of a token": f"{account.draft_kv_per_token:,} B",
        "KV reserve of a request": f"{account.request_tokens - load.context_tokens} slots",
        "verify width": f"{account.verify_width}",
    }
    return rows + [f"{name:<24}{value:>12}" for name, value in numbers.items()]


def gib(count: int) -> str:
    """Bytes in GiB, small ones in MiB."""
    return f"{count / GIB:.2f} GiB" if abs(count) >= GIB else f"{count / memory.MIB:.1f} MiB"


def account_json(account: Account) -> dict[str, Any]:
    return {**asdict(account), "full_requests": account.full_requests, "fits": account.fits}
