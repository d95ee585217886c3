"""Writes a trained drafter as a checkpoint in the z-lab layout, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.load import WEIGHTS_FILE, read_weights
from ddtree.errors import CheckpointError, ConfigError, ModelError

CARD_FILE = "README.md"
FILES = {"config.json", WEIGHTS_FILE, CARD_FILE}


def export_drafter(
    state_dict: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path, card: str
) -> Path:
    """Write config.json, bfloat16 weights and the model card; returns the folder.

    The files are written beside the folder, read back, and moved there as a whole; an export that stands
    there already is replaced.

    Args:
        state_dict: every tensor of the drafter by its z-lab name, any float dtype, any device.
        config: as `drafter_shape.drafter_config` makes it.
        folder: where the checkpoint goes.
        card: Markdown of the model card.

    Raises:
        ConfigError: the folder holds something else than an export.
        CheckpointError: weights that are not finite, or do not match the config.
        ModelError: the folder cannot be written.
    """
    refuse_occupied(folder)
    refuse_not_finite(state_dict)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write_files(unfinished, state_dict, config, card)
        read_weights(unfinished, DFlashConfig.from_path(unfinished))
        move(unfinished, folder)
    except OSError as error:
        raise ModelError(f"the drafter cannot be written to {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def refuse_occupied(folder: Path) -> None:
    """Raise where the export would replace files that are not an export's."""
    if folder.exists() and (not folder.is_dir() or {path.name for path in folder.iterdir()} - FILES):
        raise ConfigError(
            f"{folder} is not an exported drafter ({', '.join(sorted(FILES))}): choose another output"
        )


def refuse_not_finite(state_dict: Mapping[str, Tensor]) -> None:
    for name, weight in state_dict.items():
        if not bool(weight.isfinite().all()):
            raise CheckpointError(f"tensor {name} is not finite: training went wrong; see the log's losses")


def write_files(folder: Path, state_dict: Mapping[str, Tensor], config: Mapping[str, Any], card: str) -> None:
    exported = {**config, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(exported, indent=1) + "\n", encoding="utf-8")
    (folder / CARD_FILE).write_text(card, encoding="utf-8")
    # Clones, as safetensors refuses tensors that share memory.
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
        for name, weight in state_dict.items()
    }
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def move(source: Path, folder: Path) -> None:
    """Put a folder in the place of another; only between the two renames is there none."""
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(source, folder)
    shutil.rmtree(replaced, ignore_errors=True)
