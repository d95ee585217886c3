"""Finds a model's small files, config.json above all, without loading or downloading its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.config import is_int
from ddtree.draft.dflash_config import read_json
from ddtree.errors import CheckpointError, MissingExtraError, ModelNotFoundError, first_line
from ddtree.model_cache import MANIFEST, is_complete, package_folder
from ddtree.models import DRAFTERS, HUB_TIMEOUT_S, KNOWN_MODELS, find_folder, known_names, resolve_drafter

# No weights; a tokenizer may be tens of megabytes, but is not needed.
SMALL_FILES = ("config.json", "*.index.json", "tokenizer_config.json", "generation_config.json")
WEIGHTS = "*.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
MAX_HEADER_BYTES = 100 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_WEIGHT_BYTES = 1 << 60

Fetch = Callable[[str], Path]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder, as far as it is here.

    Attributes:
        name: what was asked for.
        config: its config.json.
        weight_bytes: size of its weights, None where neither files nor an index say it.
        is_dequantised: whether it is the copy that this package makes from a quantised file.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    weight_bytes: int | None
    is_dequantised: bool = False

    @property
    def has_tokenizer(self) -> bool:
        return any(os.path.isfile(self.folder / name) for name in TOKENIZERS)


def open_target(name: str, fetch: Fetch | None = None) -> Checkpoint:
    """The target's small files.

    Raises:
        ModelNotFoundError: it is neither here nor can it be reached.
        CheckpointError: what is there is no checkpoint.
    """
    if name in KNOWN_MODELS:
        folder = package_folder(KNOWN_MODELS[name].package)
        if not is_complete(folder):
            raise ModelNotFoundError(
                f"{name!r} was not prepared here yet: ddtree demo downloads and dequantises it once"
            )
        return read_checkpoint(name, folder)
    return read_checkpoint(name, locate(name, fetch))


def open_drafter(name: str, target: str, fetch: Fetch | None = None) -> Checkpoint:
    """The drafter's small files; "auto" is the one that ships for the target (errors as `open_target`)."""
    if name == "auto":
        folder = resolve_drafter(name, target)
        return read_checkpoint(name, folder or DRAFTERS)
    return read_checkpoint(name, locate(name, fetch))


def locate(name: str, fetch: Fetch | None) -> Path:
    """The folder of a model that lies here, else that of its small files of the Hugging Face hub."""
    try:
        folder = find_folder(name)
    except (OSError, RuntimeError) as error:
        raise ModelNotFoundError(f"{name!r}: {first_line(error)}{known_names(name)}") from None
    return folder or (fetch or fetch_small_files)(name)


def fetch_small_files(name: str) -> Path:
    """Small files of a model of the Hugging Face hub, from its local cache where they are there."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(HUB_TIMEOUT_S))
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", str(HUB_TIMEOUT_S))
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError("huggingface_hub", "engine") from None
    problem = ""
    for is_local in (True, False):
        try:
            folder = Path(
                snapshot_download(name, allow_patterns=list(SMALL_FILES), local_files_only=is_local)
            )
        except Exception as error:  # the hub's client has an error of its own for each way to fail
            problem = f"{type(error).__name__}: {first_line(error)}"
            continue
        if (folder / "config.json").is_file():
            return folder
        problem = "it has no config.json"
    raise ModelNotFoundError(
        f"{name!r} is no folder here, and the Hugging Face hub does not give it ({problem})"
        f"{known_names(name)}, or a folder with the model's files"
    )


def read_checkpoint(name: str, folder: Path) -> Checkpoint:
    path = folder / "config.json"
    if os.path.isfile(path) and (size := os.path.getsize(path)) > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{name!r}: {path} has {size} bytes, which no model's config has")
    try:
        config = read_json(path)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from None
    return Checkpoint(name, folder, config, weight_bytes_of(folder), os.path.isfile(folder / MANIFEST))


def weight_bytes_of(folder: Path) -> int | None:
    """Size of the weights: what an index says, else of the files that are there."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            total = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
        except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError):
            continue
        if is_int(total) and 0 < total <= MAX_WEIGHT_BYTES:
            return int(total)
    sizes = [os.path.getsize(path) for path in folder.glob(WEIGHTS) if os.path.isfile(path)]
    return sum(sizes) or None


def tensor_shapes(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of each tensor in the safetensors files of a folder, from their headers alone.

    Raises:
        CheckpointError: a header cannot be read.
    """
    found = {}
    for path in sorted(filter(os.path.isfile, folder.glob(WEIGHTS))):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header: Any = json.loads(file.read(size)) if size <= MAX_HEADER_BYTES else None
            rows = {name: row for name, row in header.items() if name != "__metadata__"}
            found.update({name: (list(row["shape"]), str(row["dtype"])) for name, row in rows.items()})
        except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError):
            raise CheckpointError(f"{path} is no whole safetensors file; download it again") from None
    return found
