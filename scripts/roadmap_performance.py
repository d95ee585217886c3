"""The roadmap's tables and pictures of expected performance: measured, published, predicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmark_tables import Results, table
from roadmap_checks import chain_error
from roadmap_lengths import (
    MEASURED,
    PUBLISHED,
    SWEEP,
    TABLE_1,
    LengthCurve,
    our_curves,
    prediction_curves,
)
from roadmap_points import RESULTS, large_fit, read, tree
from sglang_benchmark_docs import against, is_loss, release, speed_rows

from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.cost_catalogue import ASSUMED_DRAFTERS, B200, GPUS, H200, PAIRS, RTX_PRO_6000
from ddtree.tree.cost_model import (
    Calibration,
    DraftPair,
    GpuSpec,
    Load,
    break_even_length,
    has_room,
    round_cost,
    speed_up,
)

PREDICTED = "predicted"
MEASURED_BUDGETS = (15, 31, 63)
# Speed runs by file, and what is said before each.
BENCHES: Mapping[str, str] = {
    "sglang_bench": "Three repeats. ",
    "sglang_bench_again": "A slower host with other engines alive; two repeats at 1, one at 8 and 32. ",
    "sglang_bench_0523": "A slower host too; two repeats at 1, one or two at 8, one at 32. ",
}
CONTEXT_TOKENS = 2048
REQUESTS = (1, 8, 32)
MORE_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDER_BUDGETS = (31, 63, 127)
MEMORY_FOR_MODEL = 0.9  # the rest is activations, graphs and the allocator's slack
PREDICTED_GPUS = (RTX_PRO_6000, H200, B200)
# Those whose weights leave no room, or too little, on one RTX PRO 6000.
GPUS_NEEDED: Mapping[str, int] = {"Qwen3-32B": 2, "Qwen3-235B-A22B": 8, "GLM-4.5-Air": 4, "Kimi K2.5": 8}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a prediction is of."""

    curve: LengthCurve
    gpu: GpuSpec
    requests: int

    @property
    def pair(self) -> DraftPair:
        return PAIRS[self.curve.target]

    @property
    def load(self) -> Load:
        return Load(self.requests, CONTEXT_TOKENS, GPUS_NEEDED.get(self.curve.target, 1))

    def fits(self, plan: DraftPlan) -> bool:
        return has_room(self.pair, self.gpu, self.load, plan, memory_share=MEMORY_FOR_MODEL)

    def speed_up(self, plan: DraftPlan, calibration: Calibration) -> float:
        plain, drafted = (round_cost(self.pair, self.gpu, calibration, self.load, p) for p in (PLAIN, plan))
        return speed_up(self.curve.at(plan), plain, drafted)


def gpus_of(target: str) -> tuple[GpuSpec, ...]:
    """Those a target is predicted on; one whose drafter is assumed only on the machine it was sized for."""
    return (RTX_PRO_6000,) if target in ASSUMED_DRAFTERS else PREDICTED_GPUS


def predicted_cell(setting: Setting, calibration: Calibration) -> str:
    """Speed-ups over plain decoding of the chain and of trees; bold below plain or below the chain."""
    pair = setting.pair
    if not setting.fits(PLAIN):
        return "no room"
    if not setting.fits(pair.chain):
        return "room for plain only"
    chain = setting.speed_up(pair.chain, calibration)
    times = [
        setting.speed_up(plan, calibration) if setting.fits(plan) else None
        for plan in (pair.chain, pair.narrow_tree, *map(tree, WIDER_BUDGETS))
    ]
    return " / ".join(
        "-" if x is None else f"**{x:.1f}**" if x < max(1.0, chain) else f"{x:.1f}" for x in times
    )


def predictions() -> str:
    """Speed-ups of every pair and GPU by requests at once and budget."""
    calibration = large_fit().calibration
    rows = [
        [
            f"{curve.target}, {curve.prompts}", name_of(gpu, curve.target), f"{PREDICTED}, {curve.kind}",
            *(predicted_cell(Setting(curve, gpu, requests), calibration) for requests in REQUESTS),
        ]
        for curve in prediction_curves()
        for gpu in gpus_of(curve.target)
    ]  # fmt: skip
    made = table(["target, prompts", "GPUs", "kind, lengths", *(f"{n} at once" for n in REQUESTS)], rows)
    return f"Typical error of a speed-up, from the chains above: {chain_error():.0%}.\n\n{made}"


def name_of(gpu: GpuSpec, target: str) -> str:
    return f"{GPUS_NEEDED.get(target, 1)} x {gpu.name}"


def costs_in_steps() -> str:
    """What rounds cost in plain steps: the accept length at which they break even, whatever the drafter."""
    fitted, rows = large_fit().calibration, []
    for target, pair in PAIRS.items():
        if target == "SmolLM2-135M":
            continue
        for gpu in gpus_of(target):
            cells = []
            for requests in REQUESTS:
                load = Load(requests, CONTEXT_TOKENS, GPUS_NEEDED.get(target, 1))
                plain = round_cost(pair, gpu, fitted, load, PLAIN)
                steps = [
                    f"{break_even_length(plain, round_cost(pair, gpu, fitted, load, plan)):.2f}"
                    for plan in (pair.chain, tree(31), tree(63))
                ]
                cells.append(" / ".join([f"{plain.total_s * 1e3:.1f} ms", *steps]))
            rows.append([target, name_of(gpu, target), *cells, PREDICTED])
    return table(["target", "GPUs", *(f"{n} at once" for n in REQUESTS), "kind"], rows)


def losses() -> str:
    """With how many requests at once a tree does not pay, against the chain and against plain decoding."""
    fitted, rows = large_fit().calibration, []
    for curve in prediction_curves():
        chain, narrow = PAIRS[curve.target].chain, PAIRS[curve.target].narrow_tree
        for gpu in gpus_of(curve.target):
            settings = [Setting(curve, gpu, requests) for requests in MORE_REQUESTS]
            cells = [
                where_slower(settings, plan, than, fitted)
                for plan, than in ((tree(31), chain), (tree(63), chain), (narrow, PLAIN), (chain, PLAIN))
            ]
            rows.append([f"{curve.target}, {curve.prompts}", name_of(gpu, curve.target), *cells, PREDICTED])
    head = [
        "target, prompts", "GPUs", "tree 31 below chain", "tree 63 below chain",
        "tree of block - 1 below plain", "chain below plain", "kind",
    ]  # fmt: skip
    return table(head, rows)


def where_slower(
    settings: Sequence[Setting], plan: DraftPlan, than: DraftPlan, calibration: Calibration
) -> str:
    """The numbers of requests at which the plan is slower than another, of those that have room."""
    possible = [setting for setting in settings if setting.fits(plan)]
    if not possible:
        return "no room"

    def slower(setting: Setting) -> bool:
        return setting.speed_up(plan, calibration) < setting.speed_up(than, calibration)

    runs = [(loses, [setting.requests for setting in run]) for loses, run in groupby(possible, slower)]
    last = possible[-1].requests
    ranges = [f"from {run[0]}" if run[-1] == last else span(run) for loses, run in runs if loses]
    return ", ".join(ranges) or f"not up to {last}"


def span(requests: Sequence[int]) -> str:
    return str(requests[0]) if len(requests) == 1 else f"{requests[0]} to {requests[-1]}"


def lengths() -> str:
    """Accept lengths over the budget."""
    budgets = (16, 32, 64, 128, 256, 512)
    rows = [
        [
            f"{curve.target}, {curve.prompts}", f"{curve.chain:.2f}",
            *(f"{curve.trees[b]:.2f}" if b in curve.trees else "" for b in budgets), curve.source,
        ]
        for curve in (*our_curves(), SWEEP)
    ]  # fmt: skip
    return table(["target, prompts", "chain", *map(str, budgets), "kind"], rows)


def paper() -> str:
    """The DDTree paper's table 1 in part."""
    rows = []
    for target, cells in TABLE_1.items():
        for (prompts, temperature), (chain, chain_length, best, length) in cells.items():
            rows.append([
                target, prompts, temperature, f"{chain:.2f} / {chain_length:.2f}",
                f"{best:.2f} / {length:.2f}", f"{best / chain:.2f}", f"{best / length:.2f}", PUBLISHED,
            ])  # fmt: skip
    head = [
        "target",
        "prompts",
        "temperature",
        "chain",
        "best tree",
        "tree / chain",
        "speed-up / length",
        "kind",
    ]
    return table(head, rows)


def measured_sglang() -> str:
    """Stock SGLang on our H200: trees against DFLASH and plain decoding."""
    parts = [
        f"{said}{sglang_table(read(file))}"
        for file, said in BENCHES.items()
        if (RESULTS / f"{file}.json").is_file()
    ]
    return "\n\n".join(parts)


def sglang_table(results: Results) -> str:
    rows = []
    found = speed_rows(results)
    for requests, prompts in dict.fromkeys((requests, prompts) for requests, prompts, _ in found):
        arms = (found[requests, prompts, f"ddtree:{nodes}"] for nodes in MEASURED_BUDGETS)
        plain = found[requests, prompts, "plain"]
        rows.append([requests, prompts, *(measured_cell(row, plain) for row in arms), MEASURED])
    settings = results["settings"]
    where = f"SGLang {release(results)}, {', '.join(gpus(results))}, {settings['attention_backend']}, "
    head = ["at once", "prompts", *(f"{nodes} nodes" for nodes in MEASURED_BUDGETS), "kind"]
    return f"{where}{settings['dtype']}, greedy, {settings['model']}:\n\n{table(head, rows)}"


def measured_cell(row: Results, plain: Results) -> str:
    """Times DFLASH with the range of repeats, times plain decoding, accept length; losses bold."""
    over_plain = row["tokens_per_s"] / plain["tokens_per_s"]
    against_dflash = against(row, "ratio_to_dflash")
    return ", ".join((
        f"**{against_dflash}**" if is_loss(row) else against_dflash,
        f"**{over_plain:.2f}**" if over_plain < 1 else f"{over_plain:.2f}",
        f"{row['accept_length']:.2f}",
    ))  # fmt: skip


def gpus(results: Results) -> list[str]:
    """The kinds of GPU that a results file's runs had."""
    return sorted({gpu for run in results["runs"] for gpu in run["machine"]["gpus"]})


def measured_embedded() -> str:
    """The embedded engine: chain and best fixed tree over its own plain decoding."""
    rows = []
    for where, name in (("one H200", "engine_gpu"), ("CPU, 2 cores", "engine_cpu_bf16")):
        for prompts, arms in read(name)["sets"].items():
            trees = {a: r for a, r in arms.items() if a.startswith("tree:") and a != "tree:auto"}
            best = max(trees, key=lambda arm: trees[arm]["tokens_per_s"])
            rows.append([
                where, prompts, f"{arms['chain']['ratio_to_plain']:.2f}", best.partition(":")[2],
                f"{trees[best]['ratio_to_plain']:.2f}", f"{trees[best]['accept_length']:.2f}", MEASURED,
            ])  # fmt: skip
    return table(
        ["machine", "prompts", "chain x plain", "nodes", "tree x plain", "accept length", "kind"], rows
    )


def ceilings() -> Iterator[str]:
    """What the model knows of GPUs and of pairs."""
    yield table(
        ["GPU", "memory, GB", "bandwidth, TB/s", "bf16, TFLOP/s", "fp8", "link, GB/s"],
        [
            [
                gpu.name, f"{gpu.memory_bytes / 1e9:.0f}", f"{gpu.memory_bytes_per_s / 1e12:.2f}",
                f"{gpu.bf16_flops_per_s / 1e12:.0f}",
                f"{gpu.fp8_flops_per_s / 1e12:.0f}" if gpu.fp8_flops_per_s else "",
                f"{gpu.link_bytes_per_s / 1e9:.0f}",
            ]
            for gpu in GPUS.values()
        ],
    )  # fmt: skip
    yield table(
        ["target", "weights, GB", "active, billion", "KV a token, KB", "drafter, billion", "layers", "block"],
        [
            [
                name, f"{pair.target.memory_bytes / 1e9:.1f}", f"{pair.target.active_weights / 1e9:.2f}",
                f"{pair.target.kv_bytes_per_token() / 1e3:.0f}", f"{pair.drafter.dense_weights / 1e9:.2f}",
                pair.drafter.num_layers, pair.block_size,
            ]
            for name, pair in PAIRS.items()
        ],
    )  # fmt: skip
