"""What tells one recipe's files from another's: hashes of the settings that decide their content.

Files count by content and folders by their config.json, so a run moved to another machine goes on.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddtree.errors import ConfigError
from ddtree.train.recipe import Recipe, plain

# Settings of `[train]` that change nothing in the weights.
WITHOUT_EFFECT = ("log_every", "checkpoint_every", "compile", "max_loss")


def corpus_fingerprint(recipe: Recipe) -> str:
    """64 hexadecimal digits that differ where two recipes make different corpora.

    Raises:
        ConfigError: a file that the recipe names cannot be read.
    """
    return digest({"target": target_part(recipe), "data": data_part(recipe)})


def training_fingerprint(recipe: Recipe) -> str:
    """64 hexadecimal digits that differ where two recipes train different drafters."""
    drafter = asdict(recipe.drafter)
    drafter["init_from"] = content(recipe.drafter.init_from)
    train = {name: value for name, value in asdict(recipe.train).items() if name not in WITHOUT_EFFECT}
    parts = {"target": target_part(recipe), "data": data_part(recipe), "drafter": drafter, "train": train}
    return digest(parts)


def digest(parts: dict[str, Any]) -> str:
    text = json.dumps(plain(parts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def target_part(recipe: Recipe) -> dict[str, Any]:
    model = recipe.target.model
    return {"model": content(model) if Path(model).is_dir() else model, "dtype": recipe.target.dtype}


def data_part(recipe: Recipe) -> dict[str, Any]:
    data = recipe.data
    files = {"prompts": content(data.prompts), "exclude": sorted(map(content, data.exclude))}
    return asdict(data) | files


def content(path: str) -> str:
    """The hash of a file, or of the config.json of a folder; "" for no path."""
    if not path:
        return ""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(file)!r}, which the recipe names: {error.strerror}; correct the path"
        ) from None
