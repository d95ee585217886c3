"""Made-up benchmark runs, for tests of reports."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from ddtree.bench.run_format import Arm, Cell, CellKey, RequestFigures, Run, RunHeader
from ddtree.bench.run_writer import RunWriter
from ddtree.config import Mode

SETS = ("gsm8k", "humaneval", "mt_bench")
ARMS = (
    "embedded ar",
    "embedded chain",
    *(f"embedded tree:{2**n}" for n in range(2, 8)),
    "embedded tree:auto",
)
PROVENANCE = {
    "time_utc": "2026-11-30T00:00:00+00:00",
    "command": "ddtree bench --engine embedded --output run.jsonl",
    "ddtree": {"version": "0.1.0", "commit": "f00", "modified": False},
    "python": "3.12.1",
    "packages": {"torch": "2.11.0", "sglang": None},
    "machine": {"cpu": "EPYC", "cores": 2, "gpus": ["NVIDIA H200"]},
}


def header(sets: Sequence[str] = SETS, **changes: Any) -> RunHeader:
    """The header of a run, fields changed."""
    fields: dict[str, Any] = {
        "settings": {"engines": ["embedded"], "max_tokens": 256, "seed": 0, "drafter": "auto"},
        "sets": {
            name: {"rows": 8, "sha256": hashlib.sha256(name.encode()).hexdigest()[:16], "source": "shipped"}
            for name in sets
        },
        "models": {"target": {"name": "smollm2-135m"}, "drafter": {"name": "smollm2-135m-dflash-b16"}},
        "device": "NVIDIA H200",
    }
    return RunHeader(**fields | changes)


def made_up_run(
    arms: Sequence[str] = ARMS, sets: Sequence[str] = SETS, *, temperatures: Sequence[float] = (0.0, 1.0),
    concurrencies: Sequence[int] = (1,), repeats: int = 2, prompts: int = 8,
    changes: Mapping[str, Any] | None = None,
) -> Run:  # fmt: skip
    """A run whose speeds follow a simple law, with noise of a seed."""
    run = Run("runs/h200.jsonl", header(sets, **changes or {}), sessions=[PROVENANCE])
    run.engines = {arm: {"versions": {"torch": "2.11.0"}, "start_s": 3.5} for arm in arms}
    for key in keys(arms, sets, temperatures, concurrencies, repeats):
        run.cells[key] = made_up_cell(key, prompts)
    return run


def keys(
    arms: Sequence[str], sets: Sequence[str], temperatures: Sequence[float], concurrencies: Sequence[int],
    repeats: int,
) -> Iterator[CellKey]:  # fmt: skip
    for repeat in range(repeats):
        for concurrency in concurrencies:
            for temperature in temperatures:
                for name in sets:
                    for arm in arms:
                        yield CellKey(arm, name, concurrency, temperature, repeat)


def made_up_cell(key: CellKey, num_prompts: int) -> Cell:
    arm = Arm.parse(key.arm)
    noise = random.Random(repr(key))
    nodes = 48 if arm.node_budget == "auto" else int(arm.node_budget)
    length = {Mode.AR: 1.0, Mode.CHAIN: 2.6}.get(arm.mode, 2.4 + 0.35 * nodes.bit_length())
    length = 1 + (length - 1) * (1 - 0.2 * SETS.index(key.prompt_set) if key.prompt_set in SETS else 0.7)
    drafted = arm.mode is not Mode.AR
    round_s = 0.001 * (1 + 0.3 * drafted + (nodes * key.concurrency) / 200)
    requests = []
    for prompt in range(num_prompts):
        tokens = random.Random(prompt).randint(60, 256)
        rounds = max(round((tokens - 1) / length), 1)
        decode_s = rounds * round_s * noise.uniform(0.97, 1.03)
        requests.append(RequestFigures(
            prompt=prompt, prompt_tokens=40, new_tokens=tokens, total_s=decode_s + 0.004, decode_s=decode_s,
            tokens_sha256=f"{prompt}-{noise.random() < 0.1 and drafted}", finish_reason="stop", rounds=rounds,
            first_token_s=0.004 * noise.uniform(0.9, 1.3),
            is_correct=None if key.prompt_set == "mt_bench" else prompt % 3 > 0,
        ))  # fmt: skip
    histogram: Counter[str] = Counter()
    for _ in range(400):
        value = min(1 + int(noise.expovariate(1 / length)), 16) if drafted else 1
        histogram[str(value)] += 1
    return Cell(
        key=key,
        wall_s=sum(request.total_s for request in requests) / key.concurrency,
        requests=tuple(requests),
        between_tokens_ms={"50": 0.4, "90": 1.1, "99": 2.5},
        accept_histogram=dict(histogram),
        rank_histogram={"0": 900, "1": 80, "2": 20} if arm.mode is Mode.TREE else None,
        stages_ms={"draft": 0.3, "build": 0.1, "verify": 1.0 + nodes / 200, "commit": 0.1}
        if drafted
        else None,
        peak_memory_bytes=2**30,
        energy_j=400.0,
    )


def write_run(path: Path, run: Run) -> Path:
    """The run as a file."""
    writer = RunWriter(path, run.header)
    for session in run.sessions:
        writer.session(session)
    for arm, info in run.engines.items():
        writer.engine(arm, info)
    for cell in run.cells.values():
        writer.cell(cell)
    return path


# -- any run ---------------------------------------------------------------------------------------

NASTY_NAMES = (
    "<script>alert(1)</script>", "a|b", "`tick` *star* _under_", "$x^2$", "_hidden", "line\nbreak",
    "\N{RIGHT-TO-LEFT OVERRIDE}x", "[x](javascript:alert(1))", "![x](http://evil/x.png)", "\\", "</table>",
    "x" * 400, "",
)  # fmt: skip
ANY_ARMS = (
    "embedded ar", "embedded chain", "embedded tree:4", "embedded tree:16", "embedded tree:auto", "sglang ar",
    "sglang tree:8", "http://127.0.0.1:8080/v1",
)  # fmt: skip


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


SECONDS = st.floats(1e-6, 1e6)
HISTOGRAMS = st.dictionaries(st.integers(1, 16).map(str), st.integers(0, 1000), min_size=1).filter(
    lambda counts: any(counts.values())
)
REQUESTS = st.fixed_dictionaries({
    "prompt_tokens": st.integers(0, 4096),
    "new_tokens": st.integers(0, 4096),
    "total_s": SECONDS,
    "decode_s": st.just(0.0) | SECONDS,
    "tokens_sha256": st.sampled_from(("a", "b")),
    "finish_reason": st.sampled_from(("stop", "length")),
    "rounds": optional(st.integers(0, 4096)),
    "first_token_s": optional(SECONDS),
    "is_correct": optional(st.booleans()),
})  # fmt: skip
FIGURES = st.fixed_dictionaries({
    "wall_s": SECONDS,
    "between_tokens_ms": optional(st.dictionaries(st.sampled_from(("50", "90", "99")), SECONDS)),
    "accept_histogram": optional(HISTOGRAMS),
    "rank_histogram": optional(HISTOGRAMS),
    "stages_ms": optional(st.dictionaries(st.sampled_from(("draft", "verify", "odd")), SECONDS)),
    "peak_memory_bytes": optional(st.integers(0, 2**40)),
    "energy_j": optional(SECONDS),
})  # fmt: skip


@st.composite
def any_runs(draw: st.DrawFn) -> Run:
    """Runs with whatever missing: arms, repeats, columns; with names that break pages."""
    sets = draw(st.lists(st.sampled_from(("gsm8k", *NASTY_NAMES)), min_size=1, max_size=3, unique=True))
    arms = draw(st.lists(st.sampled_from(ANY_ARMS), min_size=1, max_size=4, unique=True))
    temperatures = draw(st.sampled_from(((0.0,), (1.0,), (0.0, 0.7))))
    concurrencies = draw(st.sampled_from(((1,), (1, 8))))
    run = Run(draw(st.sampled_from(("run.jsonl", *NASTY_NAMES))), header(sets))
    if draw(st.booleans()):
        run.sessions.append(PROVENANCE)
        run.engines["sglang chain"] = {"error": draw(st.sampled_from(NASTY_NAMES))}
    wanted = list(keys(arms, sets, temperatures, concurrencies, draw(st.integers(1, 2))))
    for key in draw(st.lists(st.sampled_from(wanted), min_size=1, unique=True)):
        prompts = draw(st.lists(REQUESTS, min_size=1, max_size=3))
        requests = tuple(RequestFigures(prompt=n, **fields) for n, fields in enumerate(prompts))
        run.cells[key] = Cell(key=key, requests=requests, **draw(FIGURES))
    return run
