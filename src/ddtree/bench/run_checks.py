"""Whether the values of a run's lines can be what was measured: their types and ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddtree.config import MAX_NODE_BUDGET, is_int, is_number
from ddtree.errors import short_repr

LARGEST_COUNT = 2**53
MAX_ACCEPT_LENGTH = MAX_NODE_BUDGET + 1  # of a tree that is one path, with the bonus token


def check_cell(record: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming the first value of a cell's line that cannot be.

    Fields that are not there, and ones that a cell does not have, are left to the caller.
    """
    _check_fields(record, CELL)
    for name, values in record["requests"].items():
        is_right = REQUEST.get(name)
        for value in values:
            if is_right is not None and not is_right(value):
                raise ValueError(f"{name}={short_repr(value)} in requests")


def check_fields(record: Mapping[str, Any], *, texts: tuple[str, ...], objects: tuple[str, ...]) -> None:
    """Raise `ValueError` where a field is no text or no object, `KeyError` where it is missing."""
    _check_fields({name: record[name] for name in texts}, dict.fromkeys(texts, _is_text))
    _check_fields({name: record[name] for name in objects}, dict.fromkeys(objects, _is_object))


def check_mark(record: Mapping[str, Any]) -> None:
    """Raise `ValueError` where a value of an outputs file's mark cannot be."""
    _check_fields(record, {"path": _is_text, "num_bytes": _is_count, "sha256": _is_text})


def _check_fields(record: Mapping[str, Any], rules: Mapping[str, Callable[[Any], bool]]) -> None:
    for name, is_right in rules.items():
        if name in record and not is_right(record[name]):
            raise ValueError(f"{name}={short_repr(record[name])}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_count(value: Any) -> bool:
    return is_int(value) and 0 <= value <= LARGEST_COUNT


def _is_amount(value: Any) -> bool:
    return is_number(value) and 0 <= value <= LARGEST_COUNT


def _is_amounts(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_amount, value.values()))


def _is_histogram(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(name.isascii() and name.isdigit() and len(name) <= 6 for name in value)
        and all(map(_is_count, value.values()))
        and (not value or any(value.values()))
    )


def _is_length_histogram(value: Any) -> bool:
    return _is_histogram(value) and all(int(name) <= MAX_ACCEPT_LENGTH for name in value)


def _or_none(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


CELL: Mapping[str, Callable[[Any], bool]] = {
    "arm": _is_text,
    "prompt_set": _is_text,
    "concurrency": lambda value: _is_count(value) and value > 0,
    "temperature": _is_amount,
    "repeat": _is_count,
    "wall_s": lambda value: _is_amount(value) and value > 0,
    "requests": _is_object,
    "between_tokens_ms": _or_none(_is_amounts),
    "accept_histogram": _or_none(_is_length_histogram),
    "rank_histogram": _or_none(_is_histogram),
    "stages_ms": _or_none(_is_amounts),
    "peak_memory_bytes": _or_none(_is_count),
    "energy_j": _or_none(_is_amount),
}
REQUEST: Mapping[str, Callable[[Any], bool]] = {
    "prompt": _is_count,
    "prompt_tokens": _is_count,
    "new_tokens": _is_count,
    "total_s": _is_amount,
    "decode_s": _is_amount,
    "tokens_sha256": _is_text,
    "finish_reason": _is_text,
    "rounds": _or_none(_is_count),
    "first_token_s": _or_none(_is_amount),
    "is_correct": _or_none(lambda value: isinstance(value, bool)),
}
