"""Writes docs/benchmarks.md and the README's table from the files under results/: no figure is typed by hand.

python scripts/make_benchmark_docs.py

A section whose file is missing is left out; `"drafter": "prototype"` in a file says that it is older than
the drafter that ships.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import sglang_benchmark_docs
from benchmark_tables import Results, table

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "benchmarks.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: made by scripts/make_benchmark_docs.py -->", "<!-- end of figures -->"
BEGIN_TRAINING = "<!-- training figures: made by scripts/make_benchmark_docs.py -->"
BEGIN_SGLANG = "<!-- SGLang figures: made by scripts/make_benchmark_docs.py -->"

INTRODUCTION = """# Benchmarks

Made by `scripts/make_benchmark_docs.py` from the JSON files under `results/`; each holds the machine,
the versions, the command and every figure. The target is SmolLM2-135M-Instruct dequantised from a Q4_1
file (not the original weights), the drafter the one that ships, trained by `ddtree train`, where a
section does not say otherwise. Speeds are measured side by side in one
run, arms interleaved, after a warm-up; "plain" is this engine's own plain decoding, and SGLang's in the
sections about draft trees in stock SGLang. A 135M model in
bfloat16 has many near ties, so there texts part between modes without a fault; losslessness is shown in
float32, where they must not."""


PROTOTYPE = (
    "**Measured with the prototype drafter**, which was of the same shape and accepted less; not measured "
    "again with the trained one yet."
)


# Published with the prototype drafter.
PROTOTYPE_LENGTHS = {
    "gsm8k": {"chain": 2.42, "16": 3.09, "32": 3.32, "64": 3.53, "128": 3.74, "256": 3.97},
    "humaneval": {"chain": 1.76, "16": 2.24, "32": 2.39, "64": 2.55, "128": 2.71, "256": 2.86},
    "mt_bench": {"chain": 1.74, "16": 2.22, "32": 2.36, "64": 2.51, "128": 2.65, "256": 2.81},
}


def conditions(results: Results) -> str:
    """Machine, versions and command of each run, in one paragraph."""
    if "runs" in results:
        return "; ".join(run_conditions(run) for run in results["runs"])
    if "provenance" not in results:
        where = results.get("device", "simulated")
        return f"{where}; `{results['command'].removeprefix('python ')}`"
    return run_conditions(results["provenance"])


def run_conditions(made: Results) -> str:
    """Machine, versions and command of one run."""
    machine, packages = made["machine"], made["packages"]
    gpus = ", ".join(machine.get("gpus", []))
    where = gpus or f"{machine['cpu']}, {machine['cores']} cores"
    versions = ", ".join(
        f"{name} {packages[name]}" for name in ("torch", "triton", "transformers") if packages[name]
    )
    return f"{where}; {versions}; {made['time_utc'][:10]}; `python {made['command']}`"


def engine_speed(results: Results) -> Iterator[str]:
    dtype = results["dtype"].removeprefix("torch.")
    yield f"{dtype}, greedy, {results['prompts']} prompts a set, {results['max_tokens']} new tokens."
    if "verify_ms" in results:
        widths = list(next(iter(results["verify_ms"].values())))
        rows = [[name, *row.values()] for name, row in results["verify_ms"].items()]
        yield table(["verify pass of … tokens after 200, ms, eager", *widths], rows)
    rows = [
        [name, arm, row["tokens_per_s"], row["ratio_to_plain"], row["accept_length"], row["round_ms"]]
        for name, arms in results["sets"].items()
        for arm, row in arms.items()
    ]
    yield table(["set", "mode", "tokens/s", "times plain", "accept length", "ms a round"], rows)
    if "a_round" in results:
        rows = [[arm, row["kernels"], row["host_waits"]] for arm, row in results["a_round"].items()]
        yield f"Launches, {results['kernels_per_layer']} kernels a layer of the target:"
        yield table(["mode", "kernels a round", "waits of the host a round"], rows)


def lossless(results: Results) -> Iterator[str]:
    temperatures = sorted({row["temperature"] for row in results["rows"]})
    prompts = len({row["prompt"] for row in results["rows"]})
    yield (
        f"Chain and trees of 4, 16, 64 and 256 nodes against plain decoding, token for token, {prompts} "
        f"prompts at temperatures {', '.join(map(str, temperatures))}, one seed a prompt: "
        f"**{results['texts_that_differ']} of "
        f"{results['texts_compared']} texts differ.**"
    )


def sampling(results: Results) -> Iterator[str]:
    yield (
        f"{results['draws']:,} draws an option through the accept walk against the exact distribution: "
        "G-test, smallest of the p-values of the first token and of the second after each child; the "
        "limit is 1e-4 over their number. The planted "
        "biased walk must fail."
    )
    rows = [
        [
            name,
            len(row["p_values"]),
            f"{min(row['p_values'].values()):.3f}",
            f"{row['biased_walk_smallest_p']:.1g}",
        ]
        for name, row in results["options"].items()
    ]
    yield table(["option", "tests", "smallest p", "smallest p, biased walk"], rows)


def acceptance(results: Results) -> Iterator[str]:
    yield (
        f"{results['dtype']}, {results['prompts']} prompts a set, {results['max_tokens']} new tokens. "
        "Reference: the paper's heap on teacher-forced text; difference: paired bootstrap interval (95 %) of "
        "engine less reference."
    )
    rows = [
        [
            name, budget, f"{row['engine']:.2f}", f"{row['reference']:.2f}",
            "{:+.3f} to {:+.3f}".format(*row["difference_interval_95"]),
            row["prompts_with_equal_rounds"],
        ]
        for name, budgets in results["sets"].items()
        for budget, row in budgets.items()
    ]  # fmt: skip
    head = ["set", "nodes", "engine", "reference", "difference", "prompts with equal rounds"]
    yield table(head, rows)


def training(results: Results) -> Iterator[str]:
    yield (
        f"Exact offline acceptance on the target's own greedy texts, {results['prompts']} prompts a set, at "
        f"most {results['max_tokens']} new tokens, {results['dtype']}; intervals by bootstrap over prompts "
        "(95 %). Prototype: as published with it (64 prompts, 256 tokens, offline, another tokeniser "
        "conversion)."
    )
    rows = []
    for name, columns in results["sets"].items():
        for nodes, row in columns.items():
            before = PROTOTYPE_LENGTHS.get(name, {}).get(nodes)
            rows.append([
                name, nodes, f"{before:.2f}" if before else "", f"{row['accept_length']:.2f}",
                "{:.2f} to {:.2f}".format(*row["interval_95"]),
                f"{row['accept_length'] / before:.2f}" if before else "",
            ])  # fmt: skip
    yield table(["set", "nodes", "prototype", "trained", "interval", "times prototype"], rows)
    made, run = results["corpus"], results["speed"]
    yield (
        f"Corpus: {made['conversations']:,} conversations, {made['new_tokens']:,} new tokens in "
        f"{made['seconds']:,.0f} s, **{made['new_tokens'] / made['seconds']:,.0f} tokens/s**. Training: "
        f"{results['steps']:,} steps, **{run['median_steps_per_s']} steps/s** in the median "
        f"({run['lowest']} to {run['highest']} between rows of the log, compiling included); the prototype's "
        "trainer made 10."
    )


def ablations(results: Results) -> Iterator[str]:
    yield (
        "The recipe in small, on the same corpus, one seed; accept length of the chain / of the tree of 64 "
        "nodes. The last rows are whole runs."
    )
    sets = list(results["ablations"][0]["accept_length"])
    rows = [
        [row["name"], f"{row['steps']:,}", *(chain_and_tree(row["accept_length"][name]) for name in sets)]
        for row in results["ablations"]
    ]
    for file in ("training", "training_soft"):
        path = RESULTS / f"{file}.json"
        if path.is_file():
            run = json.loads(path.read_text(encoding="utf-8"))
            lengths = {
                name: {c: cell["accept_length"] for c, cell in row.items()}
                for name, row in run["sets"].items()
            }
            title = f"{run['weighting']} weights, {run['labels']} labels"
            rows.append([title, f"{run['steps']:,}", *(chain_and_tree(lengths[name]) for name in sets)])
    yield table(["variant", "steps", *sets], rows)


def chain_and_tree(lengths: Results) -> str:
    return f"{lengths['chain']:.2f} / {lengths['64']:.2f}"


def train_step(step: Results) -> Iterator[str]:
    yield (
        f"{step['rows']} rows of {step['row_tokens']:,} tokens with {step['anchors_a_row']} anchors of "
        f"{step['block_size']} positions, {step['dtype']}, layers {step['layers']}, position weights: "
        f"**{step['steps_per_s']} steps/s** (windows of {step['steps_a_window']} steps: "
        f"{min(step['steps_per_s_windows'])} to {max(step['steps_per_s_windows'])})."
    )
    total = sum(step["phase_ms"].values())
    rows = [[name, f"{ms:.2f}", f"{ms / total:.0%}"] for name, ms in step["phase_ms"].items()]
    yield table(["phase", "ms a step", "share"], rows)


def training_acceptance(results: Results) -> Iterator[str]:
    yield (
        f"{results['dtype']}, {results['prompts']} prompts a set, {results['max_tokens']} new tokens. "
        "Offline: what training reports, on the engine's plain texts; difference: paired bootstrap interval "
        "(95 %) of engine less offline. In float32 every round must agree; in bfloat16 near ties part the "
        "texts, so the interval must hold 0 and should reach at most 3 % to each side, for which 64 prompts "
        "are too few."
    )
    rows = [
        [
            name, nodes, f"{row['engine']:.2f}", f"{row['reference']:.2f}",
            "{:+.1%} to {:+.1%}".format(*row["interval_share_of_reference"]),
            row["prompts_with_equal_rounds"],
        ]
        for name, columns in results["sets"].items()
        for nodes, row in columns.items()
    ]  # fmt: skip
    head = ["set", "nodes", "engine", "offline", "difference", "prompts with equal rounds"]
    yield table(head, rows)


def tree_oracle(results: Results) -> Iterator[str]:
    yield f"`{json.dumps({key: value for key, value in results.items() if key != 'provenance'})}`"


def tree_steps(results: Results) -> Iterator[str]:
    rows = [
        [row["step"], row["bs"], row["node_budget"], row["candidate_topk"], row["vocab"], row["median_us"]]
        for row in results["rows"]
    ]
    yield (
        f"Device time in replayed CUDA graphs, warm caches; before, {results['cases_compared']} random cases "
        "were compared with the torch "
        f"builder, {results['cases_different']} differ."
    )
    yield table(["step", "requests", "nodes", "candidates", "vocabulary", "median µs"], rows)


def stack(results: Results) -> Iterator[str]:
    modes = list(next(iter(results["stack_us"].values())))
    rows = [[name, *(round(row[mode]) for mode in modes)] for name, row in results["stack_us"].items()]
    yield (
        "Microseconds of the 30 layers in a replayed CUDA graph, n rows after a prefix of 300 or 1,500, by "
        "launch mode; `table` are the tiles before the search, `best` after it."
    )
    yield table(["tiles", *modes], rows)


def budget_policy(results: Results) -> Iterator[str]:
    summary = results["summary"]
    yield (
        f"Simulated: rounds drawn from measured or assumed acceptance, {len(results['seeds'])} seeds, regret "
        "in % of time against the best fixed choice in hindsight (negative is a gain). "
        f"{summary['cells_with_mean_above_3']} of {summary['cells']} cells have a mean above 3 %, "
        f"{summary['cells_with_worst_above_3']} a seed above it. The live run is `tree:auto` in the speed "
        "tables."
    )
    scenarios = dict.fromkeys(row["scenario"] for row in results["results"])
    rows = []
    for scenario in scenarios:
        cells = [row for row in results["results"] if row["scenario"] == scenario]
        means = [cell["regret_percent_mean"] for cell in cells]
        worst = max(cell["regret_percent_worst"] for cell in cells)
        rows.append([scenario, f"{sum(means) / len(means):.2f}", f"{max(means):.2f}", f"{worst:.2f}"])
    yield table(["scenario", "mean over cost tables", "highest mean", "worst seed"], rows)


def memory(results: Results) -> Iterator[str]:
    if "demo_peak_mb" in results:
        yield f"`ddtree demo`, peak resident: {results['demo_peak_mb']:.0f} MB."
    names = [name for name in results["memory_mb"][0] if name != "rounds"]
    yield table(
        ["rounds", *names], [[row["rounds"], *(row[name] for name in names)] for row in results["memory_mb"]]
    )


def sglang_dflash(results: Results) -> Iterator[str]:
    yield (
        f"The drafter in stock SGLang {results['sglang']}, `--speculative-algorithm DFLASH` (chain), backend "
        f"{results['backend']}, {results['prompts']} requests at once, greedy, {results['max_tokens']} new "
        "tokens; a request's first token, which prefill makes, is not counted."
    )
    rows = [
        [name, row["rounds"], f"{row['accept_length']:.2f}", f"{row['offline_chain']:.2f}"]
        for name, row in results["sets"].items()
    ]
    yield table(["set", "verify passes", "accept length", "offline chain"], rows)


SECTIONS: tuple[tuple[str, str, Callable[[Results], Iterator[str]]], ...] = (
    ("Speed on a CPU, bfloat16", "engine_cpu_bf16", engine_speed),
    ("Speed on a CPU, float32", "engine_cpu_fp32", engine_speed),
    ("Speed on a GPU", "engine_gpu", engine_speed),
    ("Lossless on a CPU, float32", "lossless_cpu_fp32", lossless),
    ("Sampling options", "sampling_gtest", sampling),
    ("Acceptance on a CPU, float32", "acceptance_cpu_fp32", acceptance),
    ("Acceptance on a GPU, float32", "acceptance_gpu_fp32", acceptance),
    ("Training", "training", training),
    ("Training: what each change gave", "train_ablations", ablations),
    ("Training: a step", "train_step_gpu", train_step),
    ("The chain in stock SGLang", "sglang_dflash", sglang_dflash),
    ("Acceptance in training, CPU, float32", "training_acceptance_cpu_fp32", training_acceptance),
    ("Acceptance in training, GPU, bfloat16", "training_acceptance_gpu", training_acceptance),
    ("Trees against the oracle", "tree_oracle", tree_oracle),
    ("What the tree costs on a GPU", "tree_build_gpu", tree_steps),
    ("Decoder stack on a GPU", "decoder_gpu", stack),
    ("Node budget policy", "budget_policy", budget_policy),
    ("Memory, CPU", "memory_cpu", memory),
    ("Memory, GPU", "memory_gpu", memory),
    *sglang_benchmark_docs.SECTIONS,
)


def page() -> str:
    """The whole page; a section whose results are not there is left out."""
    parts = [INTRODUCTION]
    for title, name, write in SECTIONS:
        file = RESULTS / f"{name}.json"
        if file.is_file():
            results = json.loads(file.read_text(encoding="utf-8"))
            parts += [f"## {title}", *write(results)]
            if results.get("drafter") == "prototype":
                parts.append(PROTOTYPE)
            if "note" in results:
                parts.append(f"Note: {results['note']}")
            parts.append(conditions(results))
    return "\n\n".join(parts) + "\n"


def readme_figures() -> str:
    """The README's short table: each set's plain decoding, chain and best fixed tree."""
    rows = []
    for where, name in (("CPU, 2 cores", "engine_cpu_bf16"), ("one H200", "engine_gpu")):
        results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        for prompts, arms in results["sets"].items():
            trees = {arm: row for arm, row in arms.items() if arm.startswith("tree:") and arm != "tree:auto"}
            best = max(trees, key=lambda arm: trees[arm]["tokens_per_s"])
            rows.append([
                where, prompts, arms["ar"]["tokens_per_s"], f"{arms['chain']['ratio_to_plain']:.2f}",
                f"{trees[best]['ratio_to_plain']:.2f}", best.removeprefix("tree:"),
                f"{trees[best]['accept_length']:.2f}",
            ])  # fmt: skip
    head = [
        "machine",
        "prompts",
        "plain, tokens/s",
        "chain, times plain",
        "best tree, times plain",
        "its nodes",
        "accept length",
    ]
    return table(head, rows)


def training_figures() -> str:
    """The README's table of acceptance: the prototype, the drafter that ships, and it in SGLang."""
    trained, sglang = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["sets"]
        for name in ("training", "sglang_dflash")
    )
    rows = [
        [
            name, before["chain"], f"{trained[name]['chain']['accept_length']:.2f}",
            f"{sglang[name]['accept_length']:.2f}", before["64"],
            f"{trained[name]['64']['accept_length']:.2f}",
        ]
        for name, before in PROTOTYPE_LENGTHS.items()
    ]  # fmt: skip
    head = [
        "prompts",
        "chain, prototype",
        "chain, trained",
        "chain in SGLang",
        "tree of 64, prototype",
        "tree of 64, trained",
    ]
    return table(head, rows)


def readme() -> str:
    """The README with its tables made anew."""
    text = README.read_text(encoding="utf-8")
    bench = json.loads((RESULTS / "sglang_bench.json").read_text(encoding="utf-8"))
    for begin, made in (
        (BEGIN, readme_figures()),
        (BEGIN_TRAINING, training_figures()),
        (BEGIN_SGLANG, sglang_benchmark_docs.readme_sglang(bench)),
    ):
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{made}\n{END}{rest.split(END, 1)[1]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
