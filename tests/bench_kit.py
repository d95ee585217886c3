"""Benchmark runs without an engine: fakes with a clock of their own, prompt sets, headers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ddtree.bench.datasets import Prompt, PromptSet
from ddtree.bench.measure import Answer, Chat, Observed
from ddtree.bench.run_format import Arm, Cell, CellKey, RequestFigures, RunHeader
from ddtree.bench_config import BenchConfig
from ddtree.config import Mode, SamplingParams
from ddtree.engine.engine import Engine
from engine_kit import VOCAB_SIZE, ScriptDrafter, plain, tiny_engine, tiny_target
from tiny_models import tiny_llama

Log = list[tuple[str, str, tuple[str, ...]]]
CONFIG = BenchConfig(
    sets=("one", "two"), budgets=(4,), prompts=3, max_tokens=8, repeats=2, rank_prompts=2, warm_up_tokens=2
)
HEADER = RunHeader(
    settings={"engines": ["embedded"], "max_tokens": 8, "seed": 0},
    sets={"one": {"rows": 3, "sha256": "aa"}, "two": {"rows": 3, "sha256": "bb"}},
    models={"target": {"name": "tiny"}, "drafter": None},
    device="cpu",
)
ROUND_S = {Mode.AR: 1.0, Mode.CHAIN: 1.5, Mode.TREE: 2.0}  # what a fake's round takes
ROUND_TOKENS = {Mode.AR: 1, Mode.CHAIN: 2, Mode.TREE: 4}


def prompt_sets(*names: str, count: int = 3) -> dict[str, PromptSet]:
    """Sets of prompts whose texts tell set and number; the last is the longest."""
    return {
        name: PromptSet(
            name,
            tuple(Prompt(f"{name}/{n}", (f"{name} {n}" + "!" * n, "next"), str(n)) for n in range(count)),
            "made up", "none", name,
        )
        for name in names
    }  # fmt: skip


def cell(arm: str = "embedded ar", repeat: int = 0, **changes: Any) -> Cell:
    """A cell of two requests; `key` fields and cell fields may be changed."""
    key = CellKey(arm, "one", 1, 0.0, repeat)
    names = set(CellKey.__dataclass_fields__) & set(changes)
    key = replace(key, **{name: changes.pop(name) for name in names})
    requests = tuple(
        RequestFigures(
            prompt=n, prompt_tokens=5, new_tokens=9, total_s=2.0, decode_s=1.6, tokens_sha256=f"{n:016}",
            finish_reason="length", rounds=4, first_token_s=0.4,
        )
        for n in range(2)
    )  # fmt: skip
    fields: dict[str, Any] = {"key": key, "wall_s": 4.0, "requests": requests}
    return Cell(**fields | changes)


class FakeEngine:
    """Answers in its own time: a round of a mode takes `ROUND_S` and commits `ROUND_TOKENS`.

    Attributes:
        log: what was asked, shared by all fakes of a test: (arm, what, texts).
    """

    def __init__(
        self,
        arm: Arm,
        log: list[tuple[str, str, tuple[str, ...]]],
        on_run: Callable[[str], None] | None = None,
    ) -> None:
        self.arm, self.log, self.on_run = arm, log, on_run
        self.now_s = 100.0
        self.seeds: list[int] = []

    def info(self) -> Mapping[str, Any]:
        return {"version": "1", "dtype": "float32"}

    def run(
        self, prompts: Sequence[Chat], *, max_tokens: int, temperature: float, seeds: Sequence[int],
        concurrency: int,
    ) -> tuple[float, list[Answer]]:  # fmt: skip
        texts = tuple(prompt[0]["content"] for prompt in prompts)
        self.log.append((str(self.arm), f"run {max_tokens} T={temperature:g} c={concurrency}", texts))
        self.seeds += seeds
        if self.on_run is not None:
            self.on_run(texts[0])
        answers = [self._answer(text, max_tokens) for text in texts]
        return answers[-1].end_s - answers[0].begin_s, answers

    def _answer(self, text: str, max_tokens: int) -> Answer:
        mode = self.arm.mode or Mode.AR
        begin_s = self.now_s
        times = [(begin_s + 0.5, 1)]
        made = 1
        while made < max_tokens:
            count = min(ROUND_TOKENS[mode], max_tokens - made)
            times.append((times[-1][0] + ROUND_S[mode], count))
            made += count
        self.now_s = times[-1][0]
        return Answer(
            tokens=tuple(range(made)), text=f"answer to {text}", prompt_tokens=len(text), new_tokens=made,
            finish_reason="length", begin_s=begin_s, first_s=times[0][0], end_s=self.now_s,
            chunk_times=tuple(times), rounds=len(times) - 1,
            accept_histogram={n: sum(count == n for _, count in times[1:]) for n in range(1, 5)},
            prompt=tuple(text.encode()),
        )  # fmt: skip

    def observe(
        self, prompts: Sequence[Chat], *, max_tokens: int, temperature: float, seeds: Sequence[int]
    ) -> Observed | None:
        self.log.append((str(self.arm), "observe", tuple(prompt[0]["content"] for prompt in prompts)))
        return Observed({0: 5, 1: len(prompts)}, {"draft": 0.25})

    def peak_memory_bytes(self) -> int | None:
        return 1 << 20

    def flush(self) -> None:
        self.log.append((str(self.arm), "flush", ()))

    def close(self) -> None:
        self.log.append((str(self.arm), "close", ()))


class FakeOpener:
    """Opens fakes; `broken` maps an arm to what its start raises, `on_run` to what its requests do."""

    def __init__(
        self,
        broken: Mapping[str, Exception] | None = None,
        on_run: Mapping[str, Callable[[str], None]] | None = None,
    ) -> None:
        self.log: Log = []
        self.broken, self.on_run = broken or {}, on_run or {}
        self.engines: dict[str, FakeEngine] = {}

    def open(self, arm: Arm) -> FakeEngine:
        self.log.append((str(arm), "open", ()))
        if str(arm) in self.broken:
            raise self.broken[str(arm)]
        self.engines[str(arm)] = FakeEngine(arm, self.log, self.on_run.get(str(arm)))
        return self.engines[str(arm)]


class Told:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, str]] = []
        self.messages: list[str] = []

    def progress(self, done: float, total: float, text: str) -> None:
        self.steps.append((done, total, text))

    def message(self, text: str) -> None:
        self.messages.append(text)


def write_models(folder: Path, text: str, max_tokens: int) -> Engine:
    """Write `target`, which replay can load, and what names a `drafter`; an engine that often knows what
    plain decoding says to `text`."""
    target = tiny_target(folder / "target", tiny_llama(vocab_size=VOCAB_SIZE))
    words = Tokenizer(WordLevel({f"w{token}": token for token in range(VOCAB_SIZE)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder / "target")
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text("{}")
    prompt = tuple(f"<user>{text}<assistant>".encode())
    script = plain(target, SamplingParams(max_tokens=max_tokens), prompt).tokens
    return tiny_engine(target, ScriptDrafter(script, len(prompt)), eos_tokens=frozenset({2}))
