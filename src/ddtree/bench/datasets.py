"""Prompt sets: three that ship, the paper's others from the Hugging Face hub, and any JSONL file."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddtree.bench.hub_sets import HUB_SETS, fetch_records
from ddtree.config import check, is_int, is_number
from ddtree.errors import ConfigError, counted, short_repr

PROMPTS = Path(__file__).parents[1] / "data" / "prompts"
TEXT_FIELDS = ("prompt", "question", "text")
ROW_FORMS = '"turns": ["text", ...], "messages": [{"role": "user", "content": "text"}] or "prompt": "text"'


@dataclass(frozen=True, slots=True)
class CodeTask:
    """What an answer in Python is checked with.

    Attributes:
        prompt: the code that the answer goes on from: imports, signature, docstring.
        entry_point: name of the function.
        test: code that defines `check(candidate)`, which raises where the function is wrong.
    """

    prompt: str
    entry_point: str
    test: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user says, turn by turn, and what is known of the right answer; ids are unique in a file."""

    id: str
    turns: tuple[str, ...]
    answer: str | None = None
    code: CodeTask | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts taken from one source, in the order in which they are used.

    Attributes:
        name: a name of `KNOWN_SETS`, or the path as given.
        sha256: of what the prompts hold, their ids left out: equal for equal prompts in equal order.
        notice: what the user should know, such as that the set has fewer prompts than were asked for.
    """

    name: str
    prompts: tuple[Prompt, ...]
    source: str
    licence: str
    sha256: str
    notice: str = ""


@dataclass(frozen=True, slots=True)
class ShippedSet:
    """A prompt set of this package, whole; `paper_count` as in `HubSet`."""

    source: str
    licence: str
    paper_count: int


SHIPPED_SETS: Mapping[str, ShippedSet] = MappingProxyType(
    {
        "gsm8k": ShippedSet("openai/grade-school-math (test split)", "MIT", 128),
        "humaneval": ShippedSet("openai/human-eval", "MIT", 164),
        "mt_bench": ShippedSet("lm-sys/FastChat (mt_bench questions)", "Apache-2.0", 80),
    }
)
KNOWN_SETS = (*SHIPPED_SETS, *HUB_SETS)


def load_prompt_set(name_or_path: str, count: int | None = None, seed: int | None = None) -> PromptSet:
    """The prompts of a known set or of a JSONL file.

    Args:
        name_or_path: one of `KNOWN_SETS`, which go before files, or a path.
        count: prompts to take; None takes the paper's count of a known set, and all of a file.
        seed: of a shuffle before they are taken; None keeps the source's order.

    Raises:
        ConfigError: no such set, a file of another form, or a hub that does not give the set.
        MissingExtraError: a set of the hub without `datasets` installed.
    """
    check(count is None or (is_int(count) and count >= 1), "count", count, "1 or more")
    check(seed is None or is_int(seed), "seed", seed, "a whole number")
    name = name_or_path
    if name in HUB_SETS:
        hub = HUB_SETS[name]
        count = hub.paper_count if count is None else count
        prompts = _hub_prompts(name, count if seed is None else None)
        source, licence = hub.source, hub.licence
    elif name in SHIPPED_SETS:
        shipped = SHIPPED_SETS[name]
        count = shipped.paper_count if count is None else count
        prompts = read_prompts(PROMPTS / f"{name}.jsonl")
        source, licence = shipped.source, shipped.licence
    else:
        prompts = read_prompts(_checked_path(name))
        source, licence = name, "the file's own"
    taken = _take(prompts, count, seed)
    return PromptSet(name, taken, source, licence, _sha256(taken), _notice(name, len(taken), count))


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a JSONL file.

    Raises:
        ConfigError: a file that cannot be read, holds no prompt, or has a line of another form.
    """
    check(not path.is_char_device(), "set", str(path), "a JSONL file, not a device")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read prompts from {str(path)!r}: {error.strerror or error}; name a JSONL file"
        ) from None
    except ValueError:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text; save it as UTF-8") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{str(path)!r} holds no prompt; write one JSON object a line, with {ROW_FORMS}")
    prompts = [_parse_line(line, f"{path}, line {number}", str(number)) for number, line in lines]
    first_lines: dict[str, int] = {}
    for (number, _), prompt in zip(lines, prompts, strict=True):
        first = first_lines.setdefault(prompt.id, number)
        if first != number:
            raise ConfigError(
                f"{path}, line {number}: id {prompt.id!r} is also that of line {first}; change one"
            )
    return prompts


def _checked_path(name: str) -> Path:
    known = ", ".join(KNOWN_SETS)
    is_path = isinstance(name, str) and name != "" and "\0" not in name
    check(is_path, "prompt set", name, f"one of {known}, or the path of a JSONL file")
    path = Path(name)
    if path.suffix not in (".jsonl", ".json") and not path.exists():
        raise ConfigError(f"no prompt set or file {name!r}: one of {known}, or the path of a JSONL file")
    return path


def _hub_prompts(name: str, first: int | None) -> list[Prompt]:
    records = fetch_records(name, first)
    if not records:
        raise ConfigError(f"prompt set {name!r} of {HUB_SETS[name].source} has no rows; use a JSONL file")
    return [_parse_row(record, f"{name}, row {i}", str(i)) for i, record in enumerate(records)]


def _parse_line(line: str, where: str, default_id: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: {short_repr(row)} is not a JSON object; write one with {ROW_FORMS}")
    return _parse_row(row, where, default_id)


def _parse_row(row: Mapping[str, Any], where: str, default_id: str) -> Prompt:
    identity = row.get("id", default_id)
    prompt = Prompt(
        str(identity) if isinstance(identity, str) or is_int(identity) else default_id,
        _turns(row, where), _answer(row, where), _code(row, where),
    )  # fmt: skip
    if not _is_utf8(prompt):
        raise ConfigError(f"{where}: half a surrogate pair in the text, which is not UTF-8; write it whole")
    return prompt


def _turns(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    if "turns" in row:
        turns = row["turns"]
    elif "messages" in row:
        turns = _user_messages(row["messages"], where)
    else:
        turns = [row[name] for name in TEXT_FIELDS if name in row][:1]
    if isinstance(turns, list) and turns and all(isinstance(t, str) and t.strip() for t in turns):
        return tuple(turns)
    raise ConfigError(f"{where}: {short_repr(row)} is not allowed; write {ROW_FORMS}")


def _user_messages(messages: object, where: str) -> list[object]:
    """What the user says; the assistant's part is the model's to write, and other roles would be lost."""
    if not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
        raise ConfigError(f"{where}: messages={short_repr(messages)} is not allowed; write {ROW_FORMS}")
    for message in messages:
        role = message.get("role")
        if role not in ("user", "assistant"):
            raise ConfigError(
                f"{where}: role={short_repr(role)} is not allowed: user or assistant; "
                f"write its text into the user's first message"
            )
    return [message.get("content") for message in messages if message["role"] == "user"]


def _answer(row: Mapping[str, Any], where: str) -> str | None:
    answer = row.get("answer")
    if answer is None or isinstance(answer, str):
        return answer
    if is_number(answer):
        return str(answer)
    raise ConfigError(f"{where}: answer={short_repr(answer)} is not allowed: text or a finite number")


def _code(row: Mapping[str, Any], where: str) -> CodeTask | None:
    if "entry_point" not in row or "test" not in row:
        return None
    fields = [row.get(name, "") for name in ("prompt", "entry_point", "test")]
    if not all(isinstance(value, str) for value in fields) or not fields[1].isidentifier():
        raise ConfigError(
            f"{where}: entry_point={short_repr(row['entry_point'])} is not allowed: the name of a function, "
            f"with prompt and test as text"
        )
    return CodeTask(*fields)


def _take(prompts: Sequence[Prompt], count: int | None, seed: int | None) -> tuple[Prompt, ...]:
    order = list(prompts)
    if seed is not None:
        random.Random(seed).shuffle(order)
    return tuple(order[:count])


def _notice(name: str, taken: int, count: int | None) -> str:
    if count is None or taken >= count:
        return ""
    return f"{name} has {counted(taken, 'prompt')}, fewer than the {count} asked for: all are taken"


def _content(prompt: Prompt) -> list[Any]:
    code = prompt.code and [prompt.code.prompt, prompt.code.entry_point, prompt.code.test]
    return [prompt.turns, prompt.answer, code]


def _is_utf8(prompt: Prompt) -> bool:
    try:
        json.dumps([prompt.id, _content(prompt)], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _sha256(prompts: Sequence[Prompt]) -> str:
    """Hexadecimal checksum of the prompts' contents as JSON, one a line."""
    lines = "".join(json.dumps(_content(prompt)) + "\n" for prompt in prompts)
    return hashlib.sha256(lines.encode()).hexdigest()
