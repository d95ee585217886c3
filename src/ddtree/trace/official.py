"""Reads result files of the official DDTree and DFlash benchmarks, and nothing else that a pickle can hold.

The DDTree benchmark (github.com/liranringel/ddtree, benchmark.py) saves with `torch.save` a dictionary:
`responses`, a list with one dictionary a user turn, from a method (`baseline`, `dflash`, `ddtree_tb64`) to a
`SimpleNamespace` with `output_ids` [1, n] of prompt and output, `num_input_tokens` and `acceptance_lengths`;
`block_size`; and `args`, the command line. Forks of the DFlash benchmark save the list of responses alone,
with a block size as the method (1 is plain decoding).

A file of `torch.save` is a pickle, and unpickling may run anything. So it is loaded with
`weights_only=True`, which runs nothing but what is allowed by name: tensors, and `SimpleNamespace`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree.config import is_int, is_number
from ddtree.errors import ConfigError, first_line, short_repr

PLAIN = "baseline"


class OfficialRun(NamedTuple):
    """The answers of one method: lines of an outputs file."""

    method: str
    lines: list[dict[str, Any]]


def read_official(path: Path) -> list[OfficialRun]:
    """The runs of an official result file, one a method.

    Raises:
        ConfigError: the file cannot be read, holds anything but tensors, plain values and namespaces, or is
            no result file.
    """
    content = _load(path)
    arguments: Mapping[str, Any] = {}
    if isinstance(content, dict):
        responses, arguments = content.get("responses"), content.get("args") or {}
    else:
        responses = content
    if not (isinstance(responses, list) and responses and all(isinstance(row, dict) for row in responses)):
        raise ConfigError(
            f"{short_repr(str(path))} is no result file of the DDTree or DFlash benchmark: it has no list of "
            "responses, each a dictionary by method"
        )
    if not isinstance(arguments, dict):
        raise ConfigError(f"{short_repr(str(path))} has args={short_repr(arguments)}, which are no arguments")
    found: dict[str, list[dict[str, Any]]] = {}
    for number, row in enumerate(responses):
        for method, answer in row.items():
            where = f"{path} response {number} {method}"
            found.setdefault(_method_name(method), []).append(_line(answer, method, arguments, where))
    return [OfficialRun(method, lines) for method, lines in found.items()]


def _load(path: Path) -> Any:
    """What a file of `torch.save` holds, without running anything of it."""
    name = short_repr(str(path))
    try:
        with torch.serialization.safe_globals([SimpleNamespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = _other_globals(path)
        held = f"it holds {', '.join(found)}, which may run code; " if found else ""
        raise ConfigError(
            f"{name} is refused, nothing of it was run: {held}only what torch.save makes of tensors, plain "
            "values and types.SimpleNamespace is read"
        ) from error
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # a broken archive ends in many
        raise ConfigError(f"{name} is no file of torch.save: {first_line(error)}") from error


def _other_globals(path: Path) -> list[str]:
    """Classes and functions that a file names beside the allowed ones, read without loading it."""
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # what is no archive of torch.save ends in many
        return []
    return sorted(set(named) - {"types.SimpleNamespace"})


def _method_name(method: Any) -> str:
    if is_int(method):
        return PLAIN if method == 1 else "dflash"
    return re.sub(r"[^\w.-]", "_", str(method))


def _line(answer: Any, method: Any, arguments: Mapping[str, Any], where: str) -> dict[str, Any]:
    fields = vars(answer) if isinstance(answer, SimpleNamespace) else answer
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is {short_repr(type(answer).__name__)}, no namespace of results")
    tokens = fields.get("output_ids")
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.is_complex():
        raise ConfigError(f"{where} has no output_ids, a tensor of token ids [1, n]")
    flat: Sequence[int] = tokens.flatten().tolist()
    begin: Any = fields.get("num_input_tokens")
    if not is_int(begin) or not 0 < begin < len(flat):
        raise ConfigError(
            f"{where} has num_input_tokens={short_repr(begin)}: from 1 to {len(flat) - 1} is allowed, "
            "the tokens before the output"
        )
    temperature = arguments.get("temperature", 0.0)
    if not is_number(temperature):
        raise ConfigError(f"{where}: temperature={short_repr(temperature)} is no number")
    budget = re.fullmatch(r"ddtree_tb(\d+)", str(method))
    name = _method_name(method)
    line: dict[str, Any] = {
        "prompt_tokens": list(flat[:begin]),
        "tokens": list(flat[begin:]),
        "sampling": {"temperature": float(temperature)} | _limit(arguments),
        "mode": "ar" if name == PLAIN else "tree" if budget else "chain",
        "accept_lengths": _accept_lengths(fields.get("acceptance_lengths"), where),
        "dtype": "bfloat16",  # the benchmarks load their targets in nothing else
    }
    if budget:
        line["node_budget"] = int(budget[1])
    model = arguments.get("model_name_or_path")
    return line | ({"model": model} if isinstance(model, str) else {})


def _limit(arguments: Mapping[str, Any]) -> dict[str, int]:
    limit: Any = arguments.get("max_new_tokens")
    return {"max_tokens": limit} if is_int(limit) else {}


def _accept_lengths(lengths: Any, where: str) -> list[int]:
    """Tokens that each round committed, as plain numbers."""
    if isinstance(lengths, Tensor):
        lengths = lengths.flatten().tolist()
    values: list[Any] = [value.item() if isinstance(value, Tensor) else value for value in lengths or ()]
    if not all(is_int(value) and value >= 1 for value in values):
        raise ConfigError(f"{where} has acceptance_lengths={short_repr(lengths)}, no numbers from 1")
    return values
