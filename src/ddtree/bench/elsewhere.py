"""What SGLang should do on another machine: accept lengths as measured, round times by the cost model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddtree.bench.recommendation import GroupAdvice, Recommendation, group_advice
from ddtree.config import check, is_int, is_number
from ddtree.errors import ConfigError, ModelError
from ddtree.models import resolve_drafter, resolve_target
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.cost_calibrations import sglang_calibration
from ddtree.tree.cost_catalogue import GPUS, PAIRS
from ddtree.tree.cost_model import DraftPair, GpuSpec, Load, has_room
from ddtree.tree.cost_shapes import known_gpu, known_pair, pair_of_configs
from ddtree.tree.forecast import accept_lengths, calibrated_times, forecasts
from ddtree.tree.plan_rates import Evidence, plan_order

MEMORY_SHARE = 0.9  # of the GPUs' memory, for weights and requests


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A machine to tell of.

    Attributes:
        gpu: name of a GPU of the catalogue.
        concurrency: requests at once.
        tp_size: GPUs over which the target is split.
        context_tokens: of a request.

    Raises:
        ConfigError: a value that is not allowed.
    """

    gpu: str
    concurrency: tuple[int, ...] = (1,)
    tp_size: int = 1
    context_tokens: int = 1024

    def __post_init__(self) -> None:
        check(known_gpu(self.gpu) is not None, "gpu", self.gpu, f"one of {', '.join(GPUS)}")
        check(len(self.concurrency) > 0, "concurrency", self.concurrency, "one or more")
        for load in self.concurrency:
            check(is_int(load) and 1 <= load <= 4096, "concurrency", load, "whole numbers from 1 to 4096")
        check(is_int(self.tp_size) and 1 <= self.tp_size <= 64, "tp", self.tp_size, "from 1 to 64")
        check(
            is_number(self.context_tokens) and 1 <= self.context_tokens <= 1 << 20,
            "context", self.context_tokens, "from 1 to 1048576",
        )  # fmt: skip

    @property
    def spec(self) -> GpuSpec:
        """The GPU's ceilings."""
        found = known_gpu(self.gpu)
        assert found is not None
        return found


def draft_pair(model: str, drafter: str) -> DraftPair:
    """The shapes of target and drafter: of the catalogue, else by their config.json.

    Raises:
        ConfigError: no such pair is known, and the configs are not here or of a kind that is not known.
    """
    known = known_pair(model)
    if known is not None:
        return known
    try:
        folders = resolve_target(model), resolve_drafter(drafter, model)
    except ModelError as error:
        raise ConfigError(
            f"model={model!r} is not in the cost model's catalogue ({', '.join(PAIRS)}), and its config.json "
            f"cannot be read: {error}"
        ) from error
    if folders[1] is None:
        raise ConfigError("drafter='none' is not allowed here: name the drafter")
    return pair_of_configs(model, _config(folders[0]), _config(folders[1]))


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    check(isinstance(config, dict), str(path), config, "a JSON object")
    return dict(config)


def predict_elsewhere(
    evidence: Iterable[Evidence],
    pair: DraftPair,
    machine: Elsewhere,
    temperature: float,
    sets: Sequence[str],
) -> GroupAdvice:
    """What to set there, all of it predicted.

    Raises:
        ConfigError: no accept lengths were measured.
    """
    evidence = list(evidence)
    lengths = accept_lengths(evidence)
    plans = sorted({PLAIN, *(found.plan for found in evidence)}, key=plan_order)
    fitted = sglang_calibration(pair.target)
    calibration = replace(fitted.calibration, prefill_s=0.0)
    times = calibrated_times(
        pair, machine.spec, calibration, fitted.error, machine.context_tokens, machine.tp_size
    )
    by_load = {load: forecasts(lengths, (times,), plans, load) for load in dict.fromkeys(machine.concurrency)}
    if all(len(found) < 2 for found in by_load.values()):
        raise ConfigError(
            "nothing can be predicted, since no accept length is known: measure a chain or a tree on an "
            "engine that tells its rounds"
        )
    count = f"{machine.tp_size} x " if machine.tp_size > 1 else ""
    made = group_advice(
        f"sglang on {count}{machine.spec.name}", temperature, tuple(sets), dict(by_load), {}, (times,)
    )
    notes = [
        "all of it is predicted: accept lengths as measured here, round times by the cost model fitted to "
        f"{fitted.source}, {machine.context_tokens} tokens of context; measure there before you rely on it",
        *_crowded(pair, machine, plans),
    ]
    return replace(made, notes=(*made.notes, *notes), is_sglang=True)


def _crowded(pair: DraftPair, machine: Elsewhere, plans: Sequence[DraftPlan]) -> list[str]:
    """Loads for whose requests not every plan finds room."""
    notes = []
    for requests in dict.fromkeys(machine.concurrency):
        load = Load(requests, machine.context_tokens, machine.tp_size)
        tight = [
            str(plan)
            for plan in plans
            if not has_room(pair, machine.spec, load, plan, memory_share=MEMORY_SHARE)
        ]
        if tight:
            notes.append(f"without room in memory at {requests} at once: {', '.join(tight)}")
    return notes


def with_group(recommendation: Recommendation, group: GroupAdvice) -> Recommendation:
    """The recommendation with one more engine."""
    return replace(recommendation, groups=(*recommendation.groups, group))
