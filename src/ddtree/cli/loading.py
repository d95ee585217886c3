"""Loads the engine for a command; nothing heavy is imported before."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ddtree.config import EngineConfig, Mode
from ddtree.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from ddtree.engine.engine import Engine

ENGINE_PACKAGES = ("huggingface_hub", "safetensors", "torch", "transformers")


def check_drafter(config: EngineConfig, mode: Mode) -> None:
    """Refuse a drafted mode without a drafter before anything is loaded."""
    if config.drafter == "none" and mode is not Mode.AR:
        raise ConfigError(f"drafter='none' is not allowed in mode {mode}: name a drafter or use mode ar")


def load_engine(config: EngineConfig) -> Engine:
    """The engine that the settings describe.

    Raises:
        MissingExtraError: a package of the extra `engine` is not installed.
        DDTreeError: as `Engine.load`.
    """
    # Its advice is for those who program it; ours comes as errors.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from ddtree.engine.engine import Engine

        return Engine.load(config)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ENGINE_PACKAGES:
            raise
        raise MissingExtraError(package, "engine") from error
