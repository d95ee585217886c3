"""What docs/benchmarks.md and the roadmap say of draft trees over tensor-parallel ranks in stock SGLang."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from benchmark_tables import Results, table

RESULTS = Path(__file__).parents[1] / "results"
NAME = "sglang_tensor_parallel"
TITLE = "Draft trees in stock SGLang: tensor parallel"


def cells_of(results: Results, part: str) -> dict[str, Results]:
    """A part's cells by the rest of their names."""
    start = f"{part} "
    return {
        name.removeprefix(start): cell for name, cell in results["cells"].items() if name.startswith(start)
    }


def split_group(name: str) -> tuple[str, str]:
    """ "random-8b tp2 dflash 1" as its pair with its ranks, and the rest."""
    pair, ranks, *rest = name.split(" ")
    return f"{pair}, {ranks.removeprefix('tp')}", " ".join(rest)


def tensor_parallel(results: Results) -> Iterator[str]:
    """All parts of the run."""
    settings, verdict = results["settings"], results["verdict"]
    releases = sorted({engine["sglang"] for engine in results["engines"].values() if "sglang" in engine})
    label = f" ({verdict['label']})" if verdict["label"] else ""
    shape = settings["random_shape"]
    yield (
        f"Stock SGLang {', '.join(releases)}, backend {settings['attention_backend']}{label}, "
        f"{settings['dtype']}. `shipped` is the pair that ships with heads of zeros added, so that ranks can "
        f"share them ({settings['kv_heads']} key-value heads); `random-8b` a random Qwen3 of "
        f"{shape['num_hidden_layers']} layers, hidden {shape['hidden_size']:,}, vocabulary "
        f"{shape['vocab_size']:,}, and a random drafter of 5 layers. The number behind a pair is that of its "
        "ranks, a GPU each."
    )
    if "note" in verdict:
        yield verdict["note"]
    yield from ranks_and_ids(results)
    yield from replays(verdict.get("replay", {}))
    yield from speeds(results)
    yield from profiles(cells_of(results, "profile"))
    yield from gathers(cells_of(results, "gather"))
    if verdict.get("failed"):
        yield f"**Parts that failed**: {', '.join(verdict['failed'])}."


def ranks_and_ids(results: Results) -> Iterator[str]:
    """Whether ranks draft the same, and whether ids are those of the whole vocabulary."""
    cells = cells_of(results, "ranks")
    if cells:
        yield (
            "Do ranks build the same trees? Compared in every round; `ties` rounds the drafter's logits, so "
            "that equal scores stand between siblings, between ranks and at the cut:"
        )
        rows = [
            [*split_group(name), f"{cell['rounds']:,}", f"{cell['trees']:,}", f"{cell['nodes']:,}",
             f"{cell['tied_trees']:,}", "all" if cell["equal"] else "**not all**"]
            for name, cell in cells.items()
        ]  # fmt: skip
        head = [
            "pair, ranks",
            "logits",
            "rounds",
            "trees",
            "nodes",
            "trees with tied siblings",
            "equal on all ranks",
        ]
        yield table(head, rows)
    seen = {name: shard for name, shard in results["verdict"]["shards"].items() if shard["max_id"] >= 0}
    if seen:
        yield "Ids that were committed, which are those of the whole vocabulary and not of a rank's part:"
        rows = [
            [split_group(name)[0], f"{row['vocab_size']:,}", f"{row['rank_tokens']:,}", f"{row['max_id']:,}"]
            for name, row in seen.items()
        ]
        yield table(["pair, ranks", "vocabulary", "a rank's part", "largest id"], rows)


def replays(verdicts: Results) -> Iterator[str]:
    """The outputs over ranks, judged by the unpadded target on one device."""
    for group, verdict in verdicts.items():
        yield (
            f"Replay of {split_group(group)[0]} ranks against the unpadded target on one device, as above; "
            f"allowed are {verdict['eps']} logits, by plain SGLang's own greedy outputs over those ranks:"
        )
        rows = [
            [name, row["outputs"], f"{row['tokens']:,}", row["not_best"], f"{row['max_gap']:.3f}",
             sum(violation["of_its_tokens"] for violation in row["violations"]), len(row["endings"]),
             f"{row['planted_found']} of {row['planted']}"]
            for name, row in verdict["rows"].items()
        ]  # fmt: skip
        head = ["arm, at once, kind", "outputs", "tokens", "not the replay's best", "largest gap",
                "wrong tokens", "wrong endings", "planted faults found"]  # fmt: skip
        yield table(head, rows)


def speeds(results: Results) -> Iterator[str]:
    """Tokens a second of all arms."""
    rows = results["verdict"]["table"]
    if not rows:
        return
    plain = {(row["set"], row["concurrency"]): row["tokens_per_s"] for row in rows if row["arm"] == "plain"}
    repeats = sorted({row["repeats"] for row in rows})
    yield (
        f"Greedy, {results['settings']['max_tokens']} new tokens, {' or '.join(map(str, repeats))} repeats "
        "with the arms in turn; medians, and in brackets the slowest to the fastest repeat. Where drafts are "
        "slower than DFLASH or plain decoding in the median, it is **bold**. Drafts of `random-8b` are "
        f"planted: {planted_text(results)}"
    )
    written = []
    for row in rows:
        base = plain.get((row["set"], row["concurrency"]))
        to_plain = row["tokens_per_s"] / base if base and row["arm"] != "plain" else None
        times = ratio(row)
        written.append([
            split_group(row["set"])[0], row["concurrency"],
            row["arm"].replace("ddtree:", "DDTREE, ").replace("dflash", "DFLASH"),
            f"{row['tokens_per_s']:,.0f} ({row['slowest']:,.0f} to {row['fastest']:,.0f})",
            "" if row["arm"] == "dflash" else times,
            "" if to_plain is None else f"**{to_plain:.2f}**" if to_plain < 1 else f"{to_plain:.2f}",
            f"{row['accept_length']:.2f}" if row["accept_length"] else "",
        ])  # fmt: skip
    head = [
        "pair, ranks",
        "at once",
        "arm, nodes",
        "tokens/s",
        "times DFLASH",
        "times plain",
        "accept length",
    ]
    yield table(head, written)


def ratio(row: Results) -> str:
    """A row's ratio to DFLASH, bold for trees that lose; empty without DFLASH."""
    if "ratio_to_dflash" not in row:
        return ""
    low, high = row["ratio_range"]
    text = f"{row['ratio_to_dflash']:.2f} ({low:.2f} to {high:.2f})"
    return f"**{text}**" if row["arm"].startswith("ddtree") and row["ratio_to_dflash"] < 1 else text


def planted_text(results: Results) -> str:
    """How drafts were planted, and whether texts and rounds came out as they must."""
    planted, cells = results["verdict"]["planted"], results["cells"].values()
    sure = ", ".join(f"{rate} at {share:.0%} of the positions" for share, rate in planted["sureness"])
    checked = [cell for cell in cells if "wrong_texts" in cell]
    wrong = sum(cell["wrong_texts"] for cell in checked)
    texts = sum(len(cell["tokens"]) for cell in checked)
    pairs = [pair for cell in checked if "simulated_rounds" in cell
             for pair in zip(cell["rounds"], cell["simulated_rounds"], strict=True)]  # fmt: skip
    same = sum(made == simulated for made, simulated in pairs)
    return (
        f"the first candidate is right with a rate of {sure}, and {planted['found_later']:.0%} of its misses "
        f"stand at a later rank. {wrong} of {texts:,} texts differ from the known one; {same:,} of "
        f"{len(pairs):,} requests took as many rounds as a simulation."
    )


def profiles(cells: dict[str, Results]) -> Iterator[str]:
    """Device time of a round by step, on the first rank."""
    if not cells:
        return
    yield (
        "Where a round's time goes, microseconds on the first rank: steps, then what of them ranks exchange "
        "(a rank that waits for another one counts too), then the device's busy time, the round of an "
        "untraced run, and what the device idles of it, below 0 where traced ranks waited longer for each "
        "other than untraced ones."
    )
    rows: list[list[Any]] = []
    for key, prefix in (("steps_us", ""), ("exchanges_us", "exchanged in ")):
        names = dict.fromkeys(name for cell in cells.values() for name in cell[key])
        rows += [[prefix + name, *(cell[key].get(name, "") for cell in cells.values())] for name in names]
    for title, key in (("device busy", "busy_us"), ("round", "round_us"), ("device idle", "idle_us")):
        rows.append([f"**{title}**", *(cell[key] for cell in cells.values())])
    waits = [f"{sum(cell['host_waits'].values()):.1f}" for cell in cells.values()]
    rows.append(["waits of the host", *waits])
    yield table(["step", *(f"{split_group(name)[0]}: {split_group(name)[1]}" for name in cells)], rows)


def gathers(cells: dict[str, Results]) -> Iterator[str]:
    """Bytes and times of the candidates' exchange."""
    for cell in cells.values():
        yield (
            f"What {cell['ranks']} ranks exchange for the draft of a round, {cell['backend']}: bytes that a "
            "rank sends to each other one, microseconds of the exchange alone, and of the whole step from a "
            "rank's logits to candidates, against gathering the logits of the same positions:"
        )
        rows = [
            [row["batch"], row["candidates"], f"{row['topk_sent_bytes']:,}", f"{row['logits_sent_bytes']:,}",
             f"{row['logits_sent_bytes'] / row['topk_sent_bytes']:,.0f}",
             *(f"{row[name]:,.0f}" for name in ("topk_exchange_us", "logits_exchange_us",
                                                "topk_step_us", "logits_step_us"))]
            for row in cell["rows"]
        ]  # fmt: skip
        head = ["requests", "candidates", "bytes, top-K", "bytes, logits", "times", "exchange µs, top-K",
                "exchange µs, logits", "step µs, top-K", "step µs, logits"]  # fmt: skip
        yield table(head, rows)


# --- the roadmap ---


def roadmap() -> str:
    """The state of tensor parallelism on GPUs in a paragraph."""
    file = RESULTS / f"{NAME}.json"
    if not file.is_file():
        return (
            "State on GPUs: **not run yet**; `benchmarks/bench_sglang_tensor_parallel.py` does all of it and "
            "needs two GPUs of one host."
        )
    return roadmap_of(json.loads(file.read_text(encoding="utf-8")))


def roadmap_of(results: Results) -> str:
    """The same of a run."""
    verdict = results["verdict"]
    parts = [*rank_evidence(cells_of(results, "ranks").values()), *replay_evidence(verdict.get("replay", {}))]
    for row in verdict["table"]:
        if row["arm"] == "ddtree:31" and "ratio_to_dflash" in row and not row["set"].endswith("tp1"):
            name = split_group(row["set"])[0]
            times = f"{row['ratio_to_dflash']:.2f} times DFLASH"
            parts.append(f"{name} ranks at {row['concurrency']} at once: {times}")
    gpus = ", ".join(sorted({gpu for run in results["runs"] for gpu in run["machine"].get("gpus", [])}))
    anchor = TITLE.lower().replace(":", "").replace(" ", "-")
    failed = f" Failed: {', '.join(verdict['failed'])}." if verdict.get("failed") else ""
    note = f" {verdict['note']}" if "note" in verdict else ""
    return (
        f"State on GPUs ({gpus or 'none: run on a CPU'}), 31 nodes: {'; '.join(parts)}. "
        f"[All figures](docs/benchmarks.md#{anchor}).{failed}{note}"
    )


def rank_evidence(cells: Collection[Results]) -> list[str]:
    if not cells:
        return []
    rounds, tied = (sum(cell[name] for cell in cells) for name in ("rounds", "tied_trees"))
    unequal = sum(not cell["equal"] for cell in cells)
    found = "all ranks built the same trees" if not unequal else f"**ranks differed in {unequal} runs**"
    return [f"{found} in {rounds:,} rounds, {tied:,} trees with ties among them"]


def replay_evidence(verdicts: Results) -> list[str]:
    rows = [row for verdict in verdicts.values() for row in verdict["rows"].values()]
    if not rows:
        return []
    wrong = sum(len(row["violations"]) + len(row["endings"]) + len(row["errors"]) for row in rows)
    return [
        f"{sum(row['outputs'] for row in rows)} outputs replayed against one device's target, {wrong} wrong"
    ]
