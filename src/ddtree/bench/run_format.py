"""The file of a benchmark run: JSON Lines that a killed run goes on with; see docs/bench.md.

The first line is the header; each session of the run adds a `session` line, after a new `header` where it
adds to the run, each arm's engine an `engine` line once it is up, each measured cell a `cell` line. A cell
is one arm on one prompt set at one concurrency and temperature, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddtree.bench.run_checks import check_cell, check_fields, check_mark
from ddtree.bench_config import EMBEDDED as EMBEDDED
from ddtree.bench_config import SGLANG as SGLANG
from ddtree.config import MAX_NODE_BUDGET, Mode, check, is_int, parse_budget, parse_mode
from ddtree.errors import ConfigError, short_repr
from ddtree.trace_format import parse_line

FORMAT, VERSION = "ddtree-bench", 1
TEXT_SHA256 = "text:"  # before the checksum of a text, which equals no checksum of tokens
CELL_FIGURES = ("between_tokens_ms", "accept_histogram", "rank_histogram", "stages_ms", "peak_memory_bytes",
                "energy_j")  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Arm:
    """One way of decoding: an engine and what it is told.

    Attributes:
        engine: `embedded`, `sglang`, or the base URL of a server that runs already, such as
            `http://127.0.0.1:8080/v1`.
        mode: `ar`, `chain` or `tree`; None for a server that is taken as it is.
        node_budget: of a tree, or "auto"; 0 in other modes.
    """

    engine: str
    mode: Mode | None
    node_budget: int | str = 0

    def __post_init__(self) -> None:
        if self.mode is Mode.TREE:
            check(
                self.node_budget == "auto"
                or (is_int(self.node_budget) and 1 <= int(self.node_budget) <= MAX_NODE_BUDGET),
                "node_budget", self.node_budget, f"1 to {MAX_NODE_BUDGET}, or auto",
            )  # fmt: skip
        else:
            check(self.node_budget == 0, "node_budget", self.node_budget, "0 without a tree")

    @classmethod
    def parse(cls, text: str) -> Arm:
        """The arm that `str` wrote, such as `embedded tree:64`, `sglang chain` or `http://host:1/v1`.

        Raises:
            ConfigError: `str` writes no such arm.
        """
        engine, _, plan = text.partition(" ")
        mode, _, budget = plan.partition(":")
        arm = cls(engine, parse_mode(mode) if plan else None, parse_budget(budget) if budget else 0)
        check(bool(engine) and str(arm) == text, "arm", text, "an engine and how it decodes, as in "
              "'embedded tree:16'")  # fmt: skip
        return arm

    def __str__(self) -> str:
        return f"{self.engine} {self.plan}".rstrip()

    @property
    def plan(self) -> str:
        """Mode and budget: `ar`, `chain`, `tree:64`, or nothing for a server that is taken as it is."""
        if self.mode is None:
            return ""
        return f"tree:{self.node_budget}" if self.mode is Mode.TREE else self.mode.value


@dataclass(frozen=True, slots=True)
class CellKey:
    """Which cell: unique in a run."""

    arm: str
    prompt_set: str
    concurrency: int
    temperature: float
    repeat: int


@dataclass(frozen=True, slots=True)
class RequestFigures:
    """One request of a cell, in the order of the prompts.

    Attributes:
        prompt: number of the prompt in its set, from 0.
        prompt_tokens, new_tokens: counts.
        rounds: verify passes; None where the server does not tell, 0 in plain decoding of a server.
        first_token_s: from sending the request to its first token; None where not streamed.
        total_s: from sending to the end.
        decode_s: from the first token to the end; the engine's own figure where it gives one.
        tokens_sha256: first 16 digits of the checksum of the new tokens; `text:` and those of the text
            where ids are unknown.
        is_correct: against the set's answer; None where it has none or was not checked.
        finish_reason: as the engine says, such as `stop` or `length`.
    """

    prompt: int
    prompt_tokens: int
    new_tokens: int
    total_s: float
    decode_s: float
    tokens_sha256: str
    finish_reason: str
    rounds: int | None = None
    first_token_s: float | None = None
    is_correct: bool | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured of one arm on one set; units in the names, None where it could not be measured.

    Attributes:
        wall_s: from the first request sent to the last one's end.
        between_tokens_ms: percentiles ("50", "90", "99") over tokens of the wait for a token: the gap between
            streamed chunks, divided by the tokens of the chunk that ends it.
        accept_histogram: rounds by tokens committed, the bonus token included.
        rank_histogram: correct drafts by their rank among their siblings, from 0, from rounds observed apart
            from the timed ones.
        stages_ms: mean milliseconds of a round by stage.
        peak_memory_bytes: of the device where there is one, else of the process.
        energy_j: of the GPUs used, over `wall_s`.
    """

    key: CellKey
    wall_s: float
    requests: tuple[RequestFigures, ...]
    between_tokens_ms: Mapping[str, float] | None = None
    accept_histogram: Mapping[str, int] | None = None
    rank_histogram: Mapping[str, int] | None = None
    stages_ms: Mapping[str, float] | None = None
    peak_memory_bytes: int | None = None
    energy_j: float | None = None

    @property
    def new_tokens(self) -> int:
        return sum(request.new_tokens for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all requests over wall time, prefill included."""
        return self.new_tokens / self.wall_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """New tokens after each request's first over the sum of decode times: the speed of one request."""
        seconds = sum(request.decode_s for request in self.requests)
        tokens = sum(max(request.new_tokens - 1, 0) for request in self.requests)
        return tokens / seconds if seconds > 0 else None

    @property
    def accept_length(self) -> float | None:
        """Tokens committed a round, pooled: by the histogram, else by tokens after each first over rounds."""
        if self.accept_histogram:
            rounds = sum(self.accept_histogram.values())
            return sum(int(n) * count for n, count in self.accept_histogram.items()) / rounds
        counted = [request for request in self.requests if request.rounds]
        rounds = sum(request.rounds or 0 for request in counted)
        return sum(request.new_tokens - 1 for request in counted) / rounds if rounds else None


@dataclass(frozen=True, slots=True)
class RunHeader:
    """What all cells of a run have in common.

    Attributes:
        settings: `BenchConfig` by field, as given last.
        sets: by name: `rows` (prompts taken), `sha256` (of the prompts taken), `source`, `licence`.
        models: `target` and `drafter`: name, and `folder_sha256` where the folder is known; null without.
        device: such as `cpu` or `NVIDIA H200`; of servers, where they tell.
    """

    settings: Mapping[str, Any]
    sets: Mapping[str, Mapping[str, Any]]
    models: Mapping[str, Any]
    device: str


@dataclass(frozen=True, slots=True)
class OutputsMark:
    """What an outputs file held when the cell in whose line this stands was measured.

    Attributes:
        path: from the run's folder.
        num_bytes, sha256: of all cells' outputs, this one's included.
    """

    path: str
    num_bytes: int
    sha256: str


@dataclass(slots=True)
class Run:
    """A run as read from its file.

    Attributes:
        source: the file, as named.
        sessions: provenance of each session that measured, in order.
        engines: by arm: what its engine said of itself (versions, settings, command line, start time), or
            `error` where it did not start or died.
        outputs: of each outputs file, by its path, what it held after the last cell.
        num_torn: lines that broke off and were left out (at most the last one).
    """

    source: str
    header: RunHeader
    sessions: list[Mapping[str, Any]] = field(default_factory=list)
    engines: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    cells: dict[CellKey, Cell] = field(default_factory=dict)
    outputs: dict[str, OutputsMark] = field(default_factory=dict)
    num_torn: int = 0


def cell_record(cell: Cell) -> dict[str, Any]:
    """A cell as it stands in the file: requests by column, what is None left out."""
    columns = {
        name: [_rounded(getattr(request, name)) for request in cell.requests]
        for name in RequestFigures.__dataclass_fields__
    }
    known = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    record: dict[str, Any] = {"type": "cell", **asdict(cell.key), "wall_s": _rounded(cell.wall_s)}
    record |= {name: _rounded(value) for name in CELL_FIGURES if (value := getattr(cell, name)) is not None}
    return record | {"requests": known}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def parse_cell(record: Mapping[str, Any]) -> Cell:
    """The cell of a line.

    Raises:
        AttributeError, ConfigError, KeyError, TypeError, ValueError: it is none.
    """
    check_cell(record)
    key = CellKey(**{name: record[name] for name in CellKey.__dataclass_fields__})
    columns = record["requests"]
    count = len(columns["prompt"])
    if count == 0 or any(len(values) != count for values in columns.values()):
        raise ValueError("its requests have columns of different lengths")
    requests = tuple(
        RequestFigures(**{name: values[i] for name, values in columns.items()}) for i in range(count)
    )
    Arm.parse(key.arm)
    others = ("type", "requests", "outputs", *CellKey.__dataclass_fields__)
    rest = {name: value for name, value in record.items() if name not in others}
    return Cell(key=key, requests=requests, **rest)


def read_run(path: Path) -> Run:
    """The run of a file; a last line that broke off is left out.

    Raises:
        ConfigError: the file cannot be read, is no benchmark run or has a line that is not what it should be.
    """
    name = short_repr(str(path))
    try:
        if path.is_char_device() or path.is_block_device():
            raise ConfigError(f"the run {name} is a device; name a file")
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"the run {name} cannot be read: {error.strerror}") from error
    try:
        first = parse_line(lines[0]) if lines else {}
    except ValueError:
        first = {}
    if first.get("format") != FORMAT or first.get("version") != VERSION:
        raise ConfigError(
            f"{name} is no benchmark run of version {VERSION}: the first line must have "
            f'"format": "{FORMAT}"; ddtree bench --output FILE makes one'
        )
    run: Run | None = None
    for number, line in enumerate(lines, 1):
        try:
            record = parse_line(line)
            if run is None:
                run = Run(str(path), _header(record))
            else:
                _take(run, record)
        except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
            if run is not None and number == len(lines) and not line.endswith(b"\n"):
                run.num_torn = 1
                break
            raise ConfigError(f"{name} line {number} is not what it should be: {error!r}") from error
    assert run is not None
    return run


def _header(record: Mapping[str, Any]) -> RunHeader:
    header = RunHeader(**{name: record[name] for name in RunHeader.__dataclass_fields__})
    check_fields(record, texts=("device",), objects=("settings", "sets", "models"))
    check_fields(header.sets, texts=(), objects=tuple(header.sets))
    return header


def _take(run: Run, record: Mapping[str, Any]) -> None:
    kind = record["type"]
    marks = [parse_mark(mark) for mark in record.get("outputs", ())]
    if kind == "session":
        check_fields(record, texts=(), objects=("provenance",))
        run.sessions.append(record["provenance"])
    elif kind == "header":
        run.header = _header(record)
    elif kind == "engine":
        check_fields(record, texts=("arm",), objects=("info",))
        Arm.parse(record["arm"])
        run.engines[record["arm"]] = record["info"]
    elif kind == "cell":
        cell = parse_cell(record)
        run.cells[cell.key] = cell
    else:
        raise ValueError(f"type={kind!r}")
    run.outputs |= {mark.path: mark for mark in marks}


def parse_mark(record: Mapping[str, Any]) -> OutputsMark:
    """The mark of an outputs file in a line.

    Raises:
        AttributeError, TypeError, ValueError: it is none.
    """
    check_mark(record)
    return OutputsMark(**record)


def unlike(one: RunHeader, other: RunHeader) -> list[str]:
    """What keeps a run from being gone on with under another header; empty if nothing does.

    Arms, budgets, concurrencies, temperatures and repeats may grow; what a cell means may not change.
    """
    differences = [
        f"{name}: {short_repr(one.settings.get(name))}, now {short_repr(other.settings.get(name))}"
        for name in sorted({*one.settings, *other.settings} - GROWING_SETTINGS)
        if one.settings.get(name) != other.settings.get(name)
    ]
    differences += unlike_workloads(one, other)
    drafters = [header.models.get("drafter") for header in (one, other)]
    if None not in drafters and drafters[0] != drafters[1]:
        differences.append(f"drafter: {short_repr(drafters[0])}, now {short_repr(drafters[1])}")
    if one.device != other.device:
        differences.append(f"device: {one.device}, now {other.device}")
    return list(dict.fromkeys(differences))


def unlike_workloads(one: RunHeader, other: RunHeader) -> list[str]:
    """What keeps figures of two runs from standing side by side: another target, prompts or lengths."""
    differences = []
    if one.models.get("target") != other.models.get("target"):
        differences.append(
            f"target: {short_repr(one.models.get('target'))}, now {short_repr(other.models.get('target'))}"
        )
    for name in sorted(set(one.sets) & set(other.sets)):
        if one.sets[name].get("sha256") != other.sets[name].get("sha256"):
            differences.append(f"prompts of {name}: {one.sets[name]}, now {other.sets[name]}")
    limit = "max_tokens"
    if one.settings.get(limit) != other.settings.get(limit):
        differences.append(f"{limit}: {one.settings.get(limit)}, now {other.settings.get(limit)}")
    return list(dict.fromkeys(differences))


GROWING_SETTINGS = frozenset(
    {
        "api_key_env", "budgets", "concurrency", "engines", "modes", "repeats", "request_timeout_s", "sets",
        "start_timeout_s", "temperatures",
    }
)  # fmt: skip


def sorted_arms(arms: Iterable[str]) -> list[str]:
    """Arms by engine, then ar, chain and trees by budget, auto last."""
    order = {mode: number for number, mode in enumerate(Mode)}

    def rank(text: str) -> tuple[str, int, float]:
        arm = Arm.parse(text)
        budget = float("inf") if arm.node_budget == "auto" else float(arm.node_budget)
        return arm.engine, -1 if arm.mode is None else order[arm.mode], budget

    return sorted(arms, key=rank)
