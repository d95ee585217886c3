"""The sections of docs/benchmarks.md, and the README's table, about draft trees in stock SGLang."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import tensor_parallel_docs
from benchmark_tables import Results, table

README_BUDGET = "ddtree:31"

# When `matmul` of a slice of blocks, a product a request, became one of all rows.
HEAD_READ_ONCE = "2026-11-30T22:58"


def release(results: Results) -> str:
    """The SGLang that answered."""
    return ", ".join(sorted({engine["sglang"] for engine in results["engines"].values()}))


def speed_rows(results: Results) -> dict[tuple[int, str, str], Results]:
    return {(row["concurrency"], row["set"], row["arm"]): row for row in results["verdict"]["table"]}


def round_ms(results: Results, name: str, arm: str, repeats: int) -> str:
    """Wall time a verify pass of one request at a time, prefill included; empty for plain decoding."""
    cells = [results["cells"][f"{arm} 1 {name} {repeat}"] for repeat in range(repeats)]
    if not sum(cells[0]["rounds"]):
        return ""
    return f"{statistics.median(cell['wall_s'] * 1e3 / sum(cell['rounds']) for cell in cells):.2f}"


def against(row: Results, key: str) -> str:
    """A ratio to DFLASH with its range over repeats."""
    low, high = row["ratio_range"]
    return f"{row[key]:.2f} ({low:.2f} to {high:.2f})"


def is_loss(row: Results) -> bool:
    """Whether a row of draft trees is slower than DFLASH in the median."""
    return bool(row["arm"].startswith("ddtree") and row["ratio_to_dflash"] < 1)


def sglang_speed(results: Results) -> Iterator[str]:
    """Tokens a second of all arms, and accept lengths against the embedded engine where they are there."""
    settings, rows = results["settings"], speed_rows(results)
    label = results["verdict"]["label"]
    repeats = max(row["repeats"] for row in rows.values())
    yield (
        f"Stock SGLang {release(results)}, backend {settings['attention_backend']}"
        f"{f' ({label})' if label else ''}, {settings['dtype']}, greedy, {settings['prompts']} prompts a "
        f"set, {settings['max_tokens']} new tokens, {repeats} repeats with the arms in turn, overlap "
        "scheduling and CUDA graphs on for all. Tokens over wall time, prefill included: the median, in "
        "brackets the slowest to the fastest repeat. Times DFLASH: the median of the repeats' ratios and "
        "their range; times plain: of the medians. Where drafts are slower than DFLASH or plain in the "
        "median, it is **bold**. The accept length leaves out a request's first token, which prefill makes."
    )
    if all(run["time_utc"] < HEAD_READ_ONCE for run in results["runs"]):
        yield (
            "Measured before the draft's head read its weights once for all requests instead of once a "
            "request: rows of several requests may gain by that, which is not measured."
        )
    written = []
    for (concurrency, name, arm), row in rows.items():
        plain = row["tokens_per_s"] / rows[concurrency, name, "plain"]["tokens_per_s"]
        times, to_plain = against(row, "ratio_to_dflash"), f"{plain:.2f}"
        written.append([
            concurrency, name, arm.replace("ddtree:", "DDTREE, ").replace("dflash", "DFLASH"),
            f"{row['tokens_per_s']:,.0f} ({row['slowest']:,.0f} to {row['fastest']:,.0f})",
            "" if arm == "dflash" else f"**{times}**" if is_loss(row) else times,
            "" if arm == "plain" else f"**{to_plain}**" if plain < 1 else to_plain,
            f"{row['accept_length']:.2f}" if row["accept_length"] else "",
            round_ms(results, name, arm, row["repeats"]) if concurrency == 1 else "",
        ])  # fmt: skip
    head = ["at once", "set", "arm, nodes", "tokens/s", "times DFLASH", "times plain", "accept length",
            "ms a round"]  # fmt: skip
    yield table(head, written)
    trees = [row for row in rows.values() if row["arm"].startswith("ddtree")]
    yield (
        f"Of {len(trees)} cells with trees {sum(map(is_loss, trees))} are slower than DFLASH in the median, "
        f"and {sum(row['ratio_range'][0] < 1 for row in trees)} in at least one repeat."
    )
    yield from against_embedded(results)


def against_embedded(results: Results) -> Iterator[str]:
    """Accept lengths of the plugin against the embedded engine's, if both were measured."""
    rows = results["verdict"]["against_embedded"]
    if not rows:
        return
    yield (
        "Accept length at one request against the embedded engine's on the same prompts, "
        f"{results['settings']['dtype']}; paired bootstrap over prompts (95 %) of plugin less embedded."
    )
    head = ["set", "nodes", "plugin", "embedded", "difference", "share of embedded"]
    yield table(head, [embedded_row(row) for row in rows])


def embedded_row(row: Results) -> list[Any]:
    (low, high), (low_share, high_share) = row["difference_interval_95"], row["interval_share"]
    return [
        row["set"], row["node_budget"], f"{row['plugin']:.3f}", f"{row['embedded']:.3f}",
        f"{low:+.3f} to {high:+.3f}", f"{low_share:+.1%} to {high_share:+.1%}",
    ]  # fmt: skip


def sglang_accept(results: Results) -> Iterator[str]:
    """Accept lengths alone, of a run whose speed says nothing."""
    settings = results["settings"]
    same = results["verdict"]["equal_rounds"]
    yield (
        f"Stock SGLang {release(results)} on a CPU with a test double of its attention backend, "
        f"{settings['prompts']} prompts, {settings['max_tokens']} new tokens, one request at a time: "
        f"{same['tokens']} prompts have as many tokens in the plugin as in the embedded engine, "
        f"{same['rounds']} as many rounds."
    )
    yield from against_embedded(results)


REPLAY_HEAD = ["arm, at once, kind", "outputs", "tokens", "not the replay's best", "largest gap",
               "wrong tokens", "wrong endings", "known endings", "planted faults found"]  # fmt: skip


def replay_row(name: str, row: Results) -> list[Any]:
    return [
        name, row["outputs"], f"{row['tokens']:,}", row["not_best"], f"{row['max_gap']:.3f}",
        sum(violation["of_its_tokens"] for violation in row["violations"]), len(row["endings"]),
        len(row["known_endings"]), f"{row['planted_found']} of {row['planted']}",
    ]  # fmt: skip


def pooled(rows: Iterator[Results]) -> Results:
    """One row of several cells'."""
    kept = list(rows)
    lists = ("violations", "endings", "known_endings", "errors")
    made: Results = {name: [entry for row in kept for entry in row[name]] for name in lists}
    sums = ("outputs", "tokens", "not_best", "planted", "planted_found")
    return made | {name: sum(row[name] for row in kept) for name in sums} | {
        "max_gap": max(row["max_gap"] for row in kept)
    }  # fmt: skip


def sglang_replay(results: Results) -> Iterator[str]:
    """Whether every emitted token follows from the target's own logits."""
    settings, verdict = results["settings"], results["verdict"]
    yield (
        f"Stock SGLang {release(results)}, backend {settings['attention_backend']}, pages of "
        f"{settings['page_size']}, {settings['dtype']}, {settings['prompts']} prompts, at most "
        f"{settings['max_tokens']} new tokens, greedy and with a mix of all sampling settings. Each output "
        "was teacher-forced through plain prefill on transformers; the gap of a token is by how many "
        "logits it misses the replay's own choice. Allowed are twice the "
        f"largest gap of plain SGLang's greedy outputs: {verdict['eps']}. A known ending is one that 0.5.17 "
        "gives with any speculation: it looks at the length before the end token, and so keeps what a round "
        "that reaches the length limit has behind an end token (mended in 0.5.18)."
    )
    yield table(REPLAY_HEAD, [replay_row(name, row) for name, row in verdict["rows"].items()])
    if verdict["faults"]:
        found = "; ".join(
            f"{name}: gap {fault['max_gap']:.1f}, {fault['times_eps']} times eps"
            for name, fault in verdict["faults"].items()
        )
        yield f"Faults planted in the running worker, which must exceed eps tenfold: {found}."
    same = verdict["texts_as_plain"]
    if same:
        counts = "; ".join(f"{name}: {count}" for name, count in same.items())
        yield f"Greedy texts equal to plain decoding's at one request (near ties part the others): {counts}."


def sglang_soak(results: Results) -> Iterator[str]:
    """What a mixed load did to a server, and whether its outputs replay."""
    settings, verdict = results["settings"], results["verdict"]
    totals, judged = verdict["totals"], verdict["rows"]
    yield (
        f"Stock SGLang {release(results)}, backend {settings['attention_backend']}, pages of "
        f"{settings['page_size']}, grammar backend {settings['grammar_backend']}, arm {settings['arm']}, "
        f"{settings['concurrency']} requests at once for {totals['minutes']:.1f} minutes: prompts, lengths "
        "and sampling settings drawn from a seed, streamed or not, some cut off, in each wave two requests "
        f"side by side into the context limit of {settings['context_tokens']:,}. {totals['requests']:,} "
        f"requests in {totals['waves']} waves: {totals['finished']:,} finished, {totals['cut_off']} cut off "
        f"as planned, **{totals['failed']} failed**; after **{len(totals['pool_problems'])}** waves the pool "
        "was not whole."
    )
    row, plain = pooled(iter(judged.values())), verdict["calibration"]
    yield (
        f"Replayed on the GPU, {len(judged)} of {totals['waves']} waves. eps is {verdict['eps']}: twice the "
        "largest gap of plain SGLang's own greedy outputs under a load of the same kind "
        f"({plain['outputs']:,} outputs, {plain['tokens']:,} tokens):"
    )
    yield table(REPLAY_HEAD, [replay_row(f"{settings['arm']}, mixed", row)])
    yield "Tokens of 100,000 with a gap above so many logits, which is rounding's tail in bfloat16:"
    both = {settings["arm"]: verdict["replayed"], "plain, greedy": plain}
    yield table(
        ["", *plain["gaps_above"]],
        [
            [name, *(f"{count * 1e5 / found['tokens']:.1f}" for count in found["gaps_above"].values())]
            for name, found in both.items()
        ],
    )
    if row["planted_found"] < row["planted"]:
        yield (
            f"The {row['planted'] - row['planted_found']} planted exchanges that were not found are in "
            "sampled outputs of a few tokens, where both orders are about as likely; since then only outputs "
            "of 16 tokens or more get one."
        )
    if row["violations"]:
        yield (
            f"**{len(row['violations'])} outputs hold a token beyond eps**; the largest gap of each: "
            f"{', '.join(format(violation['gap'], '.3f') for violation in row['violations'])}."
        )


def sglang_draws(results: Results) -> Iterator[str]:
    """Whether tokens that the server drew are distributed as the target says."""
    verdict, cells = results["verdict"], results["cells"]
    fair = {name: cell for name, cell in cells.items() if ", " not in name}
    draws = " and ".join(f"{count:,} by {arm}" for arm, count in verdict["draws"].items())
    yield (
        f"Stock SGLang {release(results)} on a CPU with a test double of its attention backend serves a tiny "
        f"target of known logits; {draws} through its scheduler, each held against its exact distribution "
        f"after the request's own tokens. {verdict['tests']} G-tests, limit {verdict['limit']:.1e}, smallest "
        f"p {verdict['smallest_p']:.3f}: **{'all pass' if verdict['passed'] else 'not all pass'}**. Rounds "
        f"by correct drafts, from none: {', '.join(f'{n:,}' for n in verdict['rounds_by_correct_drafts'])}."
    )
    trees = [name for name in fair if name.startswith("ddtree")]
    rows = []
    for name in trees:
        case, cell = name.partition(" ")[2], fair[name]
        plain = fair.get(f"plain {case}")
        rows.append([
            case, f"{cell['draws']:,}", f"{cell['accept_length']:.2f}", len(cell["p_values"]),
            f"{cell['smallest_p']:.3f}", "" if plain is None else f"{plain['smallest_p']:.3f}",
        ])  # fmt: skip
    yield table(
        ["case", "draws", "accept length", "tests", "smallest p", "smallest p, plain SGLang, a tenth"], rows
    )
    found = "; ".join(
        f"{name.partition(' ')[2]}: {f'p {p:.0e}' if p else 'p under 1e-300'}"
        for name, p in verdict["faults_smallest_p"].items()
    )
    yield f"Faults planted in the running worker, a tenth of the draws each, all of which must fail: {found}."


def sglang_kv_move(results: Results) -> Iterator[str]:
    """Whether KV compaction moves what it should."""
    yield (
        f"KV compaction on the GPU, {results['cases']:,} random windows and paths, {results['rows_moved']:,} "
        f"rows moved, compared bit for bit with a plain move: **{len(results['different'])} differ**; a "
        f"planted fault was {'found' if results['planted_fault_found'] else '**not found**'}."
    )


def sglang_profile(results: Results) -> Iterator[str]:
    """Device time of a round by step."""
    cells = results["cells"]
    yield (
        f"Stock SGLang {release(results)}, one request, microseconds a round. The busy time is of a traced "
        "run, the round's of an untraced one (192 tokens, so it moves by chance); the device idles for what "
        "is left of it. The host waits once a round, in every arm."
    )
    steps = list(dict.fromkeys(step for cell in reversed(cells.values()) for step in cell["steps_us"]))
    rows = [[step, *(cell["steps_us"].get(step, "") for cell in cells.values())] for step in steps]
    for title, key in (("device busy", "busy_us"), ("round", "round_us"), ("device idle", "idle_us")):
        rows.append([f"**{title}**", *(cell[key] for cell in cells.values())])
    yield table(["step", *(name.removesuffix(" 1") for name in cells)], rows)


def readme_sglang(results: Results) -> str:
    """The README's table: the default budget against DFLASH and plain."""
    rows, written = speed_rows(results), []
    for (concurrency, name, arm), row in rows.items():
        if arm != README_BUDGET:
            continue
        dflash = rows[concurrency, name, "dflash"]
        plain = row["tokens_per_s"] / rows[concurrency, name, "plain"]["tokens_per_s"]
        written.append([
            concurrency, name, f"{dflash['tokens_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}",
            against(row, "ratio_to_dflash"), f"{plain:.2f}",
            f"{dflash['accept_length']:.2f} → {row['accept_length']:.2f}",
        ])  # fmt: skip
    head = ["requests at once", "prompts", "DFLASH, tokens/s", "DDTREE, tokens/s", "times DFLASH (range)",
            "times plain", "accept length"]  # fmt: skip
    return table(head, written)


SECTIONS = (
    ("Draft trees in stock SGLang", "sglang_bench", sglang_speed),
    ("Draft trees in stock SGLang: accept length on a CPU, float32", "sglang_accept_cpu_fp32", sglang_accept),
    ("Draft trees in stock SGLang: replay, triton", "sglang_replay", sglang_replay),
    ("Draft trees in stock SGLang: replay, flashinfer", "sglang_replay_flashinfer", sglang_replay),
    ("Draft trees in stock SGLang: replay, pages of 16", "sglang_replay_page16", sglang_replay),
    ("Draft trees in stock SGLang: replay, pages of 64", "sglang_replay_page64", sglang_replay),
    ("Draft trees in stock SGLang: replay, SGLang 0.5.23", "sglang_replay_0523", sglang_replay),
    ("Draft trees in stock SGLang: mixed load", "sglang_soak", sglang_soak),
    ("Draft trees in stock SGLang: mixed load, pages of 16, grammar", "sglang_soak_page16", sglang_soak),
    ("Draft trees in stock SGLang: draws through the scheduler", "sglang_draws", sglang_draws),
    ("Draft trees in stock SGLang: KV move", "sglang_kv_move", sglang_kv_move),
    (tensor_parallel_docs.TITLE, tensor_parallel_docs.NAME, tensor_parallel_docs.tensor_parallel),
    ("Draft trees in stock SGLang 0.5.23, two repeats or one", "sglang_bench_0523", sglang_speed),
    ("Draft trees in stock SGLang 0.5.17, measured again", "sglang_bench_again", sglang_speed),
    (
        "Draft trees in stock SGLang, before greedy rounds ended in the graph",
        "sglang_bench_before",
        sglang_speed,
    ),
    ("Where a round's time went, before that", "sglang_profile", sglang_profile),
)
