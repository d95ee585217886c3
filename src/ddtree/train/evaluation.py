"""What a drafter in training is measured on: held-out conversations and prompt sets, answered greedily."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ddtree.config import check
from ddtree.errors import ConfigError
from ddtree.train.acceptance import AcceptanceTable, Text, drafter_texts_logits, measure_acceptance
from ddtree.train.batch_decoder import BatchDecoder
from ddtree.train.corpus import Corpus
from ddtree.train.drafter import TrainableDrafter
from ddtree.train.greedy_texts import greedy_texts
from ddtree.train.prompts import load_prompts
from ddtree.train.recipe import Recipe
from ddtree.train.run_folder import read_json
from ddtree.train.target import Target
from ddtree.train.target_features import FrozenTarget
from ddtree.train.template import end_tokens, render, template_pieces
from ddtree.train.whole_file import write_whole

HELD_OUT = "held_out"
MAX_SLOTS = 256


def held_out_prompts(corpus: Corpus, indices: NDArray[np.int64], count: int) -> list[list[int]]:
    """Tokens of the first `count` of these conversations up to their answers."""
    conversations = [corpus[int(i)] for i in indices[:count]]
    return [conversation.tokens[: conversation.answer_start].tolist() for conversation in conversations]


def set_prompts(tokenizer: Any, path: Path, count: int) -> list[list[int]]:
    """Tokens of the first `count` prompts of a JSONL file, in the chat template.

    Raises:
        ConfigError: it cannot be read, or holds no prompt.
    """
    texts = load_prompts(path)[:count]
    check(len(texts) > 0, "evaluation.sets", str(path), "a file with one prompt or more")
    return [render(tokenizer, text) for text in texts]


def answered(
    target: Target, prompts: Mapping[str, Sequence[Sequence[int]]], max_tokens: int, folder: Path, key: str
) -> dict[str, list[Text]]:
    """The target's greedy answers to the prompts of each name; kept in `folder` and made once.

    `key` tells the target from others.

    Raises:
        ConfigError: a prompt with its answer is longer than the target's context.
    """
    paths = {
        name: folder / f"{texts_key(group, max_tokens, key)}.safetensors" for name, group in prompts.items()
    }
    texts = {name: load_texts(path) for name, path in paths.items()}
    missing = {name: prompts[name] for name, found in texts.items() if found is None}
    made = answer(target, missing, max_tokens) if missing else {}
    for name, group in made.items():
        save_texts(paths[name], group)
    return {name: made.get(name) or texts[name] or [] for name in prompts}


def texts_key(prompts: Sequence[Sequence[int]], max_tokens: int, target: str) -> str:
    """What tells a target's answers to these prompts from others, 16 hexadecimal digits."""
    content = json.dumps([target, max_tokens, *map(list, prompts)])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def answer(
    target: Target, prompts: Mapping[str, Sequence[Sequence[int]]], max_tokens: int
) -> dict[str, list[Text]]:
    """As `answered`, made now, all in one batch."""
    model = target.load_model()
    flat = [prompt for group in prompts.values() for prompt in group]
    room = max(map(len, flat)) + max_tokens
    longest = target.config.max_position_embeddings
    if room > longest:
        raise ConfigError(
            f"evaluation.max_tokens={max_tokens} is not allowed: with the longest prompt it makes {room} "
            f"tokens, the target's context has {longest}; lower it or shorten the prompts"
        )
    decoder = BatchDecoder(model, min(MAX_SLOTS, len(flat)), room)
    ends = end_tokens(model, target.tokenizer, template_pieces(target.tokenizer))
    texts = iter(greedy_texts(decoder, flat, max_tokens, ends))
    return {name: [next(texts) for _ in group] for name, group in prompts.items()}


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Keep texts in one safetensors file."""
    arrays = {
        "tokens": np.concatenate([text.tokens for text in texts]).astype(np.int32),
        "lengths": np.array([len(text.tokens) for text in texts], np.int32),
        "answer_starts": np.array([text.answer_start for text in texts], np.int32),
    }
    write_whole(path, lambda file: save_file(arrays, file))


def load_texts(path: Path) -> list[Text] | None:
    """Texts of `save_texts`; None if there is no such file, or a broken one."""
    if not path.exists():
        return None
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError):
        return None
    ends = np.cumsum(arrays["lengths"])[:-1]
    parts = np.split(arrays["tokens"].astype(np.int64), ends)
    starts = arrays["answer_starts"].tolist()
    return [Text(tokens, start) for tokens, start in zip(parts, starts, strict=True)]


class Evaluator:
    """Measures the drafter as it stands.

    Args:
        drafter, target: the pair in training.
        recipe: budgets.
    """

    def __init__(self, drafter: TrainableDrafter, target: FrozenTarget, recipe: Recipe) -> None:
        self._drafter, self._budgets = drafter, recipe.evaluation.budgets
        self._logits = drafter_texts_logits(drafter, target)
        self._device = target.head_weight.device

    def measure(self, texts: Sequence[Text]) -> AcceptanceTable:
        """Accept length of every round of every text, chain and trees."""
        depth = self._drafter.config.draft_depth
        with torch.no_grad():
            return measure_acceptance(self._logits, texts, self._budgets, depth, self._device)


def report(tables: Mapping[str, AcceptanceTable]) -> dict[str, dict[str, dict[str, Any]]]:
    """Set -> drafting -> accept length with its interval, rounds and tokens, ready for JSON."""
    return {
        name: {str(column): _cell(table, column) for column in table.accept_lengths}
        for name, table in tables.items()
    }


def _cell(table: AcceptanceTable, column: Any) -> dict[str, Any]:
    row, (low, high) = table.pooled(column), table.interval(column)
    return {
        "accept_length": round(row.accept_length, 4),
        "interval_95": [round(low, 4), round(high, 4)],
        "rounds": row.rounds,
        "tokens": row.tokens,
        "rounds_by_correct_drafts": row.correct_by_depth,
    }


def accept_lengths(path: Path, step: int) -> dict[str, dict[str, float]]:
    """Set -> drafting -> accept length of the drafter after `step` steps; empty if that was not measured."""
    measured = read_json(path)
    if measured.get("step") != step:
        return {}
    return {
        name: {column: cell["accept_length"] for column, cell in row.items()}
        for name, row in measured["sets"].items()
    }
