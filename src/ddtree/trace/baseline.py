"""Offline baselines: the embedded engine's answers to prompts, with the target's margins, as traces."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ddtree import Dtype, Engine, EngineConfig, Mode, Request, SamplingParams
from ddtree.config import is_int
from ddtree.errors import ConfigError, short_repr
from ddtree.trace.official import OfficialRun
from ddtree.trace.record import TraceRecorder
from ddtree.trace_format import Detail, parse_line

Prompt = str | tuple[int, ...]
"""A text, or the token ids of one."""
OnPrompt = Callable[[Dtype, Mode, int], None]


@dataclass(frozen=True, slots=True)
class BaselinePlan:
    """What a baseline is made of: a trace for each number format and mode.

    Attributes:
        chat: whether texts are put into the model's chat template.
        node_budget: of mode tree.
    """

    engine: EngineConfig
    sampling: SamplingParams = field(default_factory=SamplingParams)
    modes: tuple[Mode, ...] = tuple(Mode)
    dtypes: tuple[Dtype, ...] = (Dtype.FLOAT32, Dtype.BFLOAT16)
    node_budget: int = 31
    chat: bool = True

    def only(self, modes: tuple[Mode, ...], dtypes: tuple[Dtype, ...]) -> BaselinePlan:
        """The plan with these modes and number formats alone, each once; with none given, with all."""
        return replace(
            self,
            modes=tuple(dict.fromkeys(modes)) or self.modes,
            dtypes=tuple(dict.fromkeys(dtypes)) or self.dtypes,
        )

    def files(self, folder: Path) -> dict[tuple[Dtype, Mode], Path]:
        """Where each trace goes."""
        return {
            (dtype, mode): folder / f"{mode.value}-{dtype.value}.jsonl"
            for dtype in self.dtypes
            for mode in self.modes
        }


def read_prompts(path: Path, count: int | None = None) -> list[Prompt]:
    """The prompts of a JSON Lines file: `prompt_tokens`, `prompt`, or the first of `turns`, of each line.

    Raises:
        ConfigError: the file cannot be read, or a line has none of them.
    """
    name = short_repr(str(path))
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}; name a JSON Lines file") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or (count is not None and len(prompts) >= count):
            continue
        try:
            prompts.append(_prompt(parse_line(line)))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{name} line {number} is no prompt ({error}): an object with prompt_tokens, prompt or turns "
                "is allowed"
            ) from None
    if not prompts:
        raise ConfigError(f"{name} has no prompt")
    return prompts


def _prompt(values: dict[str, Any]) -> Prompt:
    if "prompt_tokens" in values:
        tokens = values["prompt_tokens"]
        if not (isinstance(tokens, list) and tokens and all(map(is_int, tokens))):
            raise ValueError(f"prompt_tokens={short_repr(tokens)}")
        return tuple(tokens)
    turns = values.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    text = values.get("prompt", first)
    if not isinstance(text, str) or not text.strip():
        raise ValueError("no text")
    text.encode()  # a ValueError where it has half a surrogate pair
    return text


def make_baselines(
    plan: BaselinePlan,
    prompts: Sequence[Prompt],
    folder: Path,
    load: Callable[[EngineConfig], Engine] = Engine.load,
    on_prompt: OnPrompt = lambda dtype, mode, number: None,
) -> dict[str, dict[str, Any]]:
    """Answer prompts in every number format and mode; returns totals by file.

    Args:
        load: makes an engine of settings; one a number format is in memory at a time.
        on_prompt: is called before each answer with its number format, mode and prompt, counted from 1.

    Raises:
        ConfigError: the folder cannot be written, or a prompt does not fit.
    """
    make_folder(folder)
    made: dict[str, dict[str, Any]] = {}
    files = plan.files(folder)
    for dtype in plan.dtypes:
        drafter = "none" if plan.modes == (Mode.AR,) else plan.engine.drafter
        engine = load(replace(plan.engine, dtype=dtype, drafter=drafter))
        encoded = [
            engine.encode(prompt, chat=plan.chat) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]  # fmt: skip
        for mode in plan.modes:
            made[str(files[dtype, mode])] = _make(plan, engine, encoded, mode, files[dtype, mode],
                                                   partial(on_prompt, dtype, mode))  # fmt: skip
        del engine  # before the next one is loaded
        gc.collect()
    return made


def _make(
    plan: BaselinePlan, engine: Engine, prompts: Sequence[tuple[int, ...]], mode: Mode, path: Path,
    on_prompt: Callable[[int], None],
) -> dict[str, Any]:  # fmt: skip
    tokens, seconds = 0, 0.0
    lengths: Counter[int] = Counter()
    with TraceRecorder(path, Detail.FULL) as recorder:
        for number, prompt in enumerate(prompts, 1):
            on_prompt(number)
            budget: int | Literal["auto"] = plan.node_budget if mode is Mode.TREE else "auto"
            stats = recorder.generate(engine, Request(prompt, plan.sampling, mode, budget)).stats
            tokens, seconds = tokens + stats.new_tokens, seconds + stats.decode_s
            lengths += stats.accept_histogram
    rounds = lengths.total()
    length = sum(length * count for length, count in lengths.items()) / rounds if rounds else 0.0
    return {
        "mode": mode.value, "requests": len(prompts), "tokens": tokens, "rounds": rounds,
        "accept_length": round(length, 4), "decode_s": round(seconds, 3),
    }  # fmt: skip


def write_official(runs: Sequence[OfficialRun], folder: Path) -> Iterator[tuple[Path, int]]:
    """Write official results as outputs files, one a method; yields each file and its number of outputs.

    Raises:
        ConfigError: the folder cannot be written.
    """
    make_folder(folder)
    for run in runs:
        path = folder / f"{run.method}.jsonl"
        try:
            path.write_text("".join(json.dumps(line) + "\n" for line in run.lines), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{short_repr(str(path))} cannot be written: {error.strerror}") from error
        yield path, len(run.lines)


def make_folder(folder: Path) -> None:
    """Make a folder where there is none.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {short_repr(str(folder))} cannot be made: {error.strerror}; choose another"
        ) from error
