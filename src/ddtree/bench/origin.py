"""What all cells of a run have in common: prompts, models, device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddtree.bench.datasets import PromptSet, load_prompt_set
from ddtree.bench.run_format import RunHeader
from ddtree.bench_config import BenchConfig
from ddtree.errors import MissingExtraError
from ddtree.models import resolve_drafter, resolve_target
from ddtree.trace_format import checkpoint_sha256


def load_sets(config: BenchConfig) -> dict[str, PromptSet]:
    """The prompts of each set.

    Raises:
        ConfigError: a set that is not there or cannot be read.
    """
    count, seed = config.prompts or None, config.prompt_seed or None
    return {name: load_prompt_set(name, count, seed) for name in config.sets}


def make_header(config: BenchConfig, sets: Mapping[str, PromptSet], served: Sequence[str]) -> RunHeader:
    """The header of a run.

    Args:
        served: names of the models that the servers at URLs give.

    Raises:
        ModelError: target or drafter cannot be found.
        MissingExtraError: torch is not installed.
    """
    return RunHeader(
        settings=asdict(config),
        sets={name: _set_fields(prompts) for name, prompts in sets.items()},
        models=_models(config) if config.has_own_engines else _served_models(served),
        device=device_name(config.device) if config.has_own_engines else "of the servers",
    )


def _set_fields(prompts: PromptSet) -> dict[str, Any]:
    return {
        "rows": len(prompts.prompts),
        "sha256": prompts.sha256,
        "source": prompts.source,
        "licence": prompts.licence,
    }


def _models(config: BenchConfig) -> dict[str, Any]:
    engine = config.engine_config()
    drafter = resolve_drafter(engine.drafter, engine.model)
    return {
        "target": _model(engine.model, resolve_target(engine.model)),
        "drafter": None if drafter is None else _model(
            drafter.name if engine.drafter == "auto" else engine.drafter, drafter
        ),
    }  # fmt: skip


def _served_models(served: Sequence[str]) -> dict[str, Any]:
    return {"target": {"name": ", ".join(sorted(set(served)))}, "drafter": None}


def _model(name: str, folder: Path) -> dict[str, Any]:
    return {"name": name, "folder_sha256": checkpoint_sha256(folder)}


def device_name(device: str) -> str:
    """`cpu`, or the name of the GPU that a setting stands for.

    Raises:
        MissingExtraError: torch is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise MissingExtraError("torch", "bench") from None

    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(device.partition(":")[2] or 0)
    if device == "cpu" or (device == "auto" and not available):
        return "cpu"
    return torch.cuda.get_device_name(index) if index < available else device
