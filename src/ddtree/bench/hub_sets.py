"""The paper's prompt sets that are fetched by name from the Hugging Face hub.

Names, splits and columns follow the hub's cards; the wording around a problem is ours. Each row becomes the
same record as a line of a JSONL prompt set: `id`, `turns` and, where there is one, `answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from ddtree.errors import ConfigError, MissingExtraError, first_line

Row = Mapping[str, Any]

MATH_REQUEST = "Work through the problem in steps and put the final answer in \\boxed{}."
CODE_REQUEST = "Solve this programming problem in Python and give the whole program in one code block."
STDIN_REQUEST = "The program reads standard input and writes the result to standard output."
STARTER_REQUEST = "Start from this code and keep its names:"
ISSUE_REQUEST = (
    "Here is an issue of a software project. Say what causes it and write a patch that resolves it."
)
LIVECODEBENCH = "hf://datasets/livecodebench/code_generation_lite/"


@dataclass(frozen=True, slots=True)
class HubSet:
    """Where a prompt set lies on the hub and how its rows become prompts.

    Attributes:
        path: the data set's name on the hub, or `json` with `files`.
        config: of the data set; None for its only one.
        record: makes a prompt record of a row and its number; a `KeyError` is a column that is not there.
        licence: as the hub's card says.
        paper_count: prompts that the DDTree paper (arXiv 2604.12989) takes.
        files: read one after the other and only as far as needed, for sets too large to fetch whole.
    """

    path: str
    config: str | None
    split: str
    record: Callable[[Row, int], dict[str, Any]]
    licence: str
    paper_count: int
    files: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """What a report names as the origin."""
        name = LIVECODEBENCH if self.files else f"hf://datasets/{self.path}"
        return f"{name} ({', '.join(filter(None, (self.config, self.split)))} split)"


def _math(row: Row, index: int) -> dict[str, Any]:
    return {"id": str(index), "turns": [f"{row['problem']}\n\n{MATH_REQUEST}"], "answer": str(row["answer"])}


def _alpaca(row: Row, index: int) -> dict[str, Any]:
    parts = [part for part in (row["instruction"], row["input"]) if part]
    return {"id": str(index), "turns": ["\n\n".join(parts)]}


def _livecodebench(row: Row, index: int) -> dict[str, Any]:
    starter = row["starter_code"]
    ending = f"{STARTER_REQUEST}\n```python\n{starter}\n```" if starter else STDIN_REQUEST
    text = f"{CODE_REQUEST}\n\n{row['question_content']}\n\n{ending}"
    return {"id": str(row["question_id"]), "turns": [text]}


def _mbpp(row: Row, index: int) -> dict[str, Any]:
    return {"id": str(row["task_id"]), "turns": [row["prompt"]]}


def _swe_bench(row: Row, index: int) -> dict[str, Any]:
    return {"id": row["instance_id"], "turns": [f"{ISSUE_REQUEST}\n\n{row['problem_statement']}"]}


HUB_SETS: Mapping[str, HubSet] = MappingProxyType({
    "aime24": HubSet("HuggingFaceH4/aime_2024", None, "train", _math, "none stated", 30),
    "aime25": HubSet("MathArena/aime_2025", None, "train", _math, "CC-BY-NC-SA-4.0", 30),
    "alpaca": HubSet("tatsu-lab/alpaca", None, "train", _alpaca, "CC-BY-NC-4.0", 128),
    "livecodebench": HubSet(
        "json", None, "train", _livecodebench, "cc (no version stated)", 128,
        files=tuple(f"{LIVECODEBENCH}test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6)),
    ),
    "math_500": HubSet("HuggingFaceH4/MATH-500", None, "test", _math, "none stated", 128),
    "mbpp": HubSet("google-research-datasets/mbpp", "sanitized", "test", _mbpp, "CC-BY-4.0", 128),
    "swe_bench_lite": HubSet("princeton-nlp/SWE-bench_Lite", None, "test", _swe_bench, "none stated", 128),
})  # fmt: skip


def fetch_records(name: str, first: int | None) -> list[dict[str, Any]]:
    """The records of a set of `HUB_SETS` in the hub's order; all of them, or the `first` so many.

    Raises:
        ConfigError: the hub does not give the set, or its rows have other columns.
        MissingExtraError: `datasets` is not installed.
    """
    entry = HUB_SETS[name]
    try:
        rows = _rows(entry)
        return [_record(name, row, index) for index, row in enumerate(islice(rows, first))]
    except (ConfigError, MissingExtraError):
        raise
    except Exception as error:  # of datasets, its readers or the network: they share no base
        raise ConfigError(
            f"cannot fetch prompt set {name!r} from {entry.source}: {first_line(error)}; "
            f"check the network and HF_TOKEN, or use gsm8k, humaneval, mt_bench or a JSONL file"
        ) from None


def _rows(entry: HubSet) -> Iterable[Row]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise MissingExtraError("datasets", "bench") from None

    rows: Iterable[Row]
    if entry.files:
        rows = load_dataset(entry.path, data_files=list(entry.files), split=entry.split, streaming=True)
    else:
        rows = load_dataset(entry.path, entry.config, split=entry.split)
    return rows


def _record(name: str, row: Row, index: int) -> dict[str, Any]:
    try:
        return HUB_SETS[name].record(row, index)
    except KeyError as error:
        raise ConfigError(
            f"prompt set {name!r}, row {index} of {HUB_SETS[name].source}: no column {error}, "
            f"only {', '.join(sorted(row))}; the set on the hub has changed: save its prompts as a JSONL file"
        ) from None
