"""What tells one recipe's files from another's: hashes of the settings that decide their content.

Files and model folders count by content, so a run moved to another machine goes on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddtree.errors import ConfigError
from ddtree.train.recipe import Recipe, plain

MODEL_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
EXCERPT_BYTES = 1 << 22
# Settings of `[data]` that decide how much is generated and how, and not what.
AMOUNTS = ("new_tokens", "slots", "shard_tokens", "held_out")
# Settings of `[data]` that change nothing in the conversations that are there.
LAYOUT = ("slots", "shard_tokens")
# Settings of `[train]` that change nothing in the weights.
WITHOUT_EFFECT = ("log_every", "checkpoint_every", "compile", "max_loss")


def corpus_fingerprint(recipe: Recipe) -> str:
    """64 hexadecimal digits that differ where two recipes make different corpora.

    How much is generated is not part of it, so that a corpus can grow; neither is how many conversations
    are generated side by side, which matters only where a device rounds another batch size differently.

    Raises:
        ConfigError: a file that the recipe names cannot be read.
    """
    data = {name: value for name, value in data_part(recipe).items() if name not in AMOUNTS}
    return digest({"target": target_part(recipe), "data": data})


def training_fingerprint(recipe: Recipe) -> str:
    """64 hexadecimal digits that differ where two recipes train different drafters."""
    drafter = asdict(recipe.drafter)
    drafter["init_from"] = content(recipe.drafter.init_from)
    train = {name: value for name, value in asdict(recipe.train).items() if name not in WITHOUT_EFFECT}
    data = {name: value for name, value in data_part(recipe).items() if name not in LAYOUT}
    parts = {"target": target_part(recipe), "data": data, "drafter": drafter, "train": train}
    return digest(parts)


def digest(parts: dict[str, Any]) -> str:
    text = json.dumps(plain(parts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def target_part(recipe: Recipe) -> dict[str, Any]:
    model = recipe.target.model
    try:
        is_folder = Path(model).is_dir()
    except (OSError, ValueError):  # such as a name too long for a path
        is_folder = False
    return {"model": content(model) if is_folder else model, "dtype": recipe.target.dtype}


def data_part(recipe: Recipe) -> dict[str, Any]:
    data = recipe.data
    files = {"prompts": content(data.prompts), "exclude": sorted(map(content, data.exclude))}
    return asdict(data) | files


def target_fingerprint(recipe: Recipe) -> str:
    """64 hexadecimal digits that differ where two recipes have different targets."""
    return digest(target_part(recipe))


def content(path: str) -> str:
    """The hash of a file, or of a model folder's files; "" for no path."""
    if not path:
        return ""
    try:
        if not Path(path).is_dir():
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        files = sorted(file for file in Path(path).iterdir() if file.suffix in MODEL_SUFFIXES)
        return digest({file.name: excerpt(file) for file in files})
    except OSError as error:
        raise ConfigError(
            f"cannot read {error.filename or path!r}, which the recipe names: {error.strerror}; "
            "correct the path"
        ) from None


def excerpt(file: Path) -> str:
    """A hash of a file's size, beginning and end, which tells checkpoints apart without reading gigabytes."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(EXCERPT_BYTES)
        opened.seek(max(0, size - EXCERPT_BYTES))
        end = opened.read()
    return hashlib.sha256(b"%d:" % size + start + end).hexdigest()
