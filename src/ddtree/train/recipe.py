"""What a training run does, in typed settings that check themselves, read from one TOML file.

A recipe has five tables: `[target]`, `[data]`, `[drafter]`, `[train]` and `[evaluation]`. All keys have
defaults save `drafter.mask_token_id`; the keys of `docs/training.md` are these fields.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ddtree.config import MAX_NODE_BUDGET, Dtype, check, is_int, is_number, setting
from ddtree.errors import ConfigError, first_line, short_repr

Labels = Literal["hard", "soft"]
Weighting = Literal["position", "path"]
MAX_TOKENS = 1 << 40
MAX_SMALL = 1 << 20
MAX_BUDGETS = 16


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The model that the drafter is trained for."""

    model: str = setting("smollm2-135m", "a known name, a local path or a Hugging Face name")
    dtype: Dtype = setting(Dtype.BFLOAT16, "number format of the target's weights: auto, float32 or bfloat16")

    def __post_init__(self) -> None:
        check_text(self, "model", "a name or a path")
        allowed = [dtype for dtype in Dtype if dtype is not Dtype.FLOAT16]
        check(self.dtype in allowed, "dtype", self.dtype, f"one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """The corpus: user turns and answers, both written by the target."""

    new_tokens: int = setting(
        30_000_000, "tokens to generate: user turns and answers of the conversations that are kept"
    )
    seed: int = setting(0, "seed of the sampling noise")
    slots: int = setting(2048, "conversations generated side by side")
    max_prompt_tokens: int = setting(256, "longest user turn, in tokens")
    max_answer_tokens: int = setting(384, "longest answer, in tokens")
    prompt_temperature: float = setting(1.0, "temperature at which user turns are written")
    temperatures: tuple[float, ...] = setting((0.0, 0.7, 1.0), "temperatures of the answers; 0 is greedy")
    temperature_weights: tuple[float, ...] = setting(
        (0.5, 0.25, 0.25), "share of each temperature, one a temperature, together 1"
    )
    openings: tuple[str, ...] = setting((), "beginnings of user turns that the target goes on from")
    opening_share: float = setting(0.0, "share of the written user turns that begin with an opening")
    prompts: str = setting("", "JSONL file of prompts of your own (a `prompt` or `turns` each line)")
    prompt_share: float = setting(0.0, "share of the conversations that take a prompt of the file")
    exclude: tuple[str, ...] = setting((), "JSONL or .sha256 files of prompts that must never occur")
    shard_tokens: int = setting(7_500_000, "tokens a file of the corpus holds")
    held_out: int = setting(256, "conversations kept out of training, for evaluation")

    def __post_init__(self) -> None:
        check_whole(self, {
            "new_tokens": (1, MAX_TOKENS), "seed": (0, 2**63 - 1), "slots": (1, MAX_SMALL),
            "max_prompt_tokens": (1, MAX_SMALL), "max_answer_tokens": (2, MAX_SMALL),
            "shard_tokens": (1, MAX_TOKENS), "held_out": (1, MAX_SMALL),
        })  # fmt: skip
        check_numbers(self, {
            "prompt_temperature": (0.01, 100), "opening_share": (0, 1), "prompt_share": (0, 1),
        })  # fmt: skip
        self._check_temperatures()
        check_texts(self, "openings")
        check_texts(self, "exclude")
        check(isinstance(self.prompts, str), "prompts", self.prompts, "the path of a JSONL file, or empty")
        for share, source in (("opening_share", "openings"), ("prompt_share", "prompts")):
            value = getattr(self, share)
            check(value == 0 or bool(getattr(self, source)), share, value, f"0 without {source}")

    def _check_temperatures(self) -> None:
        values, weights = self.temperatures, self.temperature_weights
        check(
            is_numbers(values) and len(values) > 0 and all(0 <= value <= 100 for value in values),
            "temperatures", values, "a list of numbers from 0 to 100",
        )  # fmt: skip
        check(
            is_numbers(weights) and all(w >= 0 for w in weights) and len(weights) == len(values)
            and math.isclose(sum(weights), 1.0, abs_tol=1e-6),
            "temperature_weights", weights, f"{len(values)} numbers from 0 (one a temperature), together 1",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """Shape of the drafter (arXiv 2602.06036); 0 stands for the target's own value."""

    block_size: int = setting(16, "slots of a block: the root and the drafted tokens")
    num_layers: int = setting(4, "decoder layers")
    intermediate_size: int = setting(0, "width of the MLP (0: the target's)")
    num_heads: int = setting(0, "attention heads (0: the target's)")
    num_kv_heads: int = setting(0, "key-value heads (0: the target's)")
    head_dim: int = setting(0, "width of a head (0: the target's)")
    target_layer_ids: tuple[int, ...] = setting(
        (), "target layers whose outputs it reads (empty: five, spread evenly)"
    )
    mask_token_id: int = setting(-1, "token that stands for a slot to fill; must be chosen")
    rope_theta: float = setting(0.0, "base of the rotary embedding, without scaling (0: the target's)")
    rms_norm_eps: float = setting(1e-6, "epsilon of the norms")
    max_position_embeddings: int = setting(0, "longest context in tokens (0: the target's)")
    init_from: str = setting("", "folder of a DFlash drafter whose shape and weights training starts from")

    def __post_init__(self) -> None:
        check_whole(self, {
            "block_size": (2, 256), "num_layers": (1, 1024), "intermediate_size": (0, MAX_SMALL),
            "num_heads": (0, MAX_SMALL), "num_kv_heads": (0, MAX_SMALL), "head_dim": (0, MAX_SMALL),
            "max_position_embeddings": (0, 1 << 30),
        })  # fmt: skip
        check_numbers(self, {"rope_theta": (0, 1e12), "rms_norm_eps": (1e-12, 0.1)})
        check(
            is_int(self.mask_token_id) and self.mask_token_id >= 0,
            "mask_token_id", self.mask_token_id, "a token id from 0",
            "pick a special token that never occurs in text (SmolLM2: 3, <repo_name>)",
        )  # fmt: skip
        ids = self.target_layer_ids
        check(
            isinstance(ids, tuple) and all(is_int(i) and i >= 0 for i in ids)
            and list(ids) == sorted(set(ids)),
            "target_layer_ids", ids, "strictly increasing layer numbers from 0, or empty",
        )  # fmt: skip
        check(isinstance(self.init_from, str), "init_from", self.init_from, "a folder, or empty")


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The optimisation: batches, schedule, loss, and what is written when."""

    steps: int = setting(20_000, "optimiser steps")
    rows: int = setting(16, "packed rows a step, over all processes")
    row_tokens: int = setting(1024, "tokens a row")
    num_anchors: int = setting(96, "blocks trained a row")
    learning_rate: float = setting(1.5e-3, "highest learning rate")
    min_learning_rate_share: float = setting(0.02, "share of it left at the last step")
    warmup_steps: int = setting(200, "steps of linear warm-up")
    weight_decay: float = setting(0.01, "weight decay of AdamW, norms excepted")
    beta1: float = setting(0.9, "AdamW's decay of the mean gradient")
    beta2: float = setting(0.95, "AdamW's decay of the mean square")
    clip_norm: float = setting(1.0, "largest norm of the gradient")
    position_decay: float = setting(7.0, "positions after which a label's weight falls by e")
    weighting: Weighting = setting(
        "path", "position: by depth alone; path: also by how likely the drafts before are right"
    )
    labels: Labels = setting("hard", "hard: the corpus's tokens; soft: the target's distributions")
    seed: int = setting(0, "seed of weights, order and anchors")
    log_every: int = setting(20, "steps between rows of the log")
    checkpoint_every: int = setting(1000, "steps between checkpoints")
    compile: bool = setting(True, "compile the training step on CUDA")
    max_loss: float = setting(100.0, "a loss above this ends training as exploded")

    def __post_init__(self) -> None:
        check_whole(self, {
            "steps": (1, 1 << 31), "rows": (1, MAX_SMALL), "row_tokens": (16, MAX_SMALL),
            "num_anchors": (1, MAX_SMALL), "warmup_steps": (0, 1 << 31), "seed": (0, 2**63 - 1),
            "log_every": (1, 1 << 31), "checkpoint_every": (1, 1 << 31),
        })  # fmt: skip
        check_numbers(self, {
            "learning_rate": (1e-9, 10), "min_learning_rate_share": (0, 1), "weight_decay": (0, 10),
            "beta1": (0, 0.99999), "beta2": (0, 0.99999), "clip_norm": (1e-6, 1e6),
            "position_decay": (0.1, 1e6), "max_loss": (0.1, 1e6),
        })  # fmt: skip
        for name, kind in (("labels", Labels), ("weighting", Weighting)):
            value = getattr(self, name)
            check(value in get_args(kind), name, value, f"one of {', '.join(get_args(kind))}")
        check(isinstance(self.compile, bool), "compile", self.compile, "true or false")
        allowed = f"fewer than train.steps={self.steps}"
        check(self.warmup_steps < self.steps, "warmup_steps", self.warmup_steps, allowed)


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Exact offline acceptance: during training on held-out conversations, at the end on whole sets."""

    every: int = setting(2000, "steps between evaluations during training (0: only at the end)")
    prompts: int = setting(64, "held-out conversations measured, at most data.held_out")
    max_tokens: int = setting(256, "most new tokens a prompt")
    budgets: tuple[int, ...] = setting((16, 32, 64, 128, 256), "node budgets of the trees")
    set_prompts: int = setting(64, "most prompts taken from each set")
    sets: Mapping[str, str] = field(
        default_factory=dict, metadata={"help": "name -> JSONL file of prompts, measured once at the end"}
    )

    def __post_init__(self) -> None:
        check_whole(self, {
            "every": (0, 1 << 31), "prompts": (1, MAX_SMALL), "max_tokens": (2, MAX_SMALL),
            "set_prompts": (1, MAX_SMALL),
        })  # fmt: skip
        budgets = self.budgets
        allowed = f"at most {MAX_BUDGETS} strictly increasing numbers from 1 to {MAX_NODE_BUDGET}"
        check(
            isinstance(budgets, tuple) and len(budgets) <= MAX_BUDGETS
            and all(is_int(b) and 1 <= b <= MAX_NODE_BUDGET for b in budgets)
            and list(budgets) == sorted(set(budgets)),
            "budgets", budgets, allowed,
        )  # fmt: skip
        check(
            isinstance(self.sets, Mapping)
            and all(isinstance(part, str) and part for pair in self.sets.items() for part in pair),
            "sets", self.sets, "a table of names and paths of JSONL files",
        )  # fmt: skip
        check("held_out" not in self.sets, "sets", "held_out", "another name: this one is the corpus's own")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what a training run makes."""

    target: TargetSettings
    data: DataSettings
    drafter: DrafterSettings
    train: TrainSettings
    evaluation: EvaluationSettings

    def __post_init__(self) -> None:
        prompts, held_out = self.evaluation.prompts, self.data.held_out
        check(prompts <= held_out, "evaluation.prompts", prompts, f"at most data.held_out={held_out}")

    def as_dict(self) -> dict[str, Any]:
        """The recipe as plain values, ready for JSON."""
        return {table: plain(asdict(getattr(self, table))) for table in TABLES}


TABLES = {
    "target": TargetSettings,
    "data": DataSettings,
    "drafter": DrafterSettings,
    "train": TrainSettings,
    "evaluation": EvaluationSettings,
}


def load_recipe(path: Path) -> Recipe:
    """The recipe of a TOML file; relative paths in it count from its folder.

    Raises:
        ConfigError: no such file, no TOML, or a table, key or value that is not allowed.
    """
    document = read_toml(path)
    try:
        refuse_unknown(document, list(TABLES), "table")
        tables = {name: read_table(name, document.get(name, {}), path) for name in TABLES}
        return Recipe(**tables)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def dry_run_recipe(recipe: Recipe, target_folder: Path) -> Recipe:
    """The same recipe shrunk to seconds on a CPU, for the tiny target of `tiny_pair.write_tiny_target`."""
    return Recipe(
        target=TargetSettings(model=str(target_folder), dtype=Dtype.FLOAT32),
        data=replace(
            recipe.data, new_tokens=1200, slots=4, max_prompt_tokens=64, max_answer_tokens=32,
            openings=recipe.data.openings[:4], shard_tokens=600, held_out=4,
        ),
        drafter=DrafterSettings(
            block_size=min(recipe.drafter.block_size, 8), num_layers=min(recipe.drafter.num_layers, 2),
            target_layer_ids=(0, 1, 2), mask_token_id=3,
        ),
        train=replace(
            recipe.train, steps=12, rows=2, row_tokens=128, num_anchors=6, warmup_steps=2, log_every=1,
            checkpoint_every=6, compile=False,
        ),
        evaluation=replace(
            recipe.evaluation, every=6, prompts=2, max_tokens=16, budgets=(4, 8), set_prompts=2
        ),
    )  # fmt: skip


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {str(path)!r}: {error.strerror or error}") from None
    except (RecursionError, ValueError) as error:  # bad TOML and bad UTF-8
        raise ConfigError(f"the recipe {str(path)!r} is not TOML: {error}") from None


def read_table(name: str, table: object, path: Path) -> Any:
    """The settings of one table, lists made tuples and paths made absolute."""
    check(isinstance(table, dict), name, table, f"a table: write [{name}]")
    assert isinstance(table, dict)
    settings = TABLES[name]
    refuse_unknown(table, [spec.name for spec in fields(settings)], f"key in [{name}]")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    try:
        return resolve_paths(settings(**values), path.parent)
    except ConfigError as error:
        raise ConfigError(f"[{name}] {error}") from None


def resolve_paths(settings: Any, folder: Path) -> Any:
    """The settings with paths taken from a folder; a target that is no path stays a name."""
    match settings:
        case DataSettings(prompts=prompts, exclude=exclude):
            paths = tuple(str(resolved(folder, file)) for file in exclude)
            return replace(settings, prompts=str(resolved(folder, prompts)) if prompts else "", exclude=paths)
        case DrafterSettings(init_from=init_from) if init_from:
            return replace(settings, init_from=str(resolved(folder, init_from)))
        case EvaluationSettings(sets=sets):
            return replace(settings, sets={name: str(resolved(folder, file)) for name, file in sets.items()})
        case TargetSettings(model=model) if model.startswith((".", "~")) or (folder / model).is_dir():
            return replace(settings, model=str(resolved(folder, model)))
    return settings


def resolved(folder: Path, name: str) -> Path:
    try:
        return (folder / Path(name).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # the last two: no home for ~, a NUL
        raise ConfigError(f"{short_repr(name)} is no path: {first_line(error)}") from None


def refuse_unknown(given: Mapping[str, Any], allowed: list[str], what: str) -> None:
    for name in given:
        if name not in allowed:
            close = difflib.get_close_matches(name, allowed, n=1)
            hint = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(allowed)}"
            raise ConfigError(f"unknown {what}: {name!r}; {hint}")


def check_whole(settings: object, limits: Mapping[str, tuple[int, int]]) -> None:
    for name, (low, high) in limits.items():
        value = getattr(settings, name)
        allowed = f"a whole number from {low} to {high}"
        check(is_int(value) and low <= value <= high, name, value, allowed)


def check_numbers(settings: object, limits: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in limits.items():
        value = getattr(settings, name)
        check(is_number(value) and low <= value <= high, name, value, f"a number from {low:g} to {high:g}")


def check_text(settings: object, name: str, allowed: str) -> None:
    value = getattr(settings, name)
    check(isinstance(value, str) and value != "", name, value, allowed)


def check_texts(settings: object, name: str) -> None:
    value = getattr(settings, name)
    is_list = isinstance(value, tuple) and all(isinstance(text, str) and text for text in value)
    check(is_list, name, value, "a list of texts, none empty")


def is_numbers(value: object) -> bool:
    return isinstance(value, tuple) and all(is_number(item) for item in value)


def plain(value: Any) -> Any:
    """Tuples as lists and enums as text, at all depths."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, Dtype) else value
