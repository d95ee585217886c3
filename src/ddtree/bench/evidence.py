"""What a run's cells say of each plan, in the form in which plans are judged."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ddtree.bench.run_format import EMBEDDED, SGLANG, Arm, Cell, CellKey, Run
from ddtree.config import Mode, is_int
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.cost_calibrations import EMBEDDED as EMBEDDED_FIT
from ddtree.tree.cost_calibrations import sglang_calibration
from ddtree.tree.cost_shapes import known_gpu, known_pair
from ddtree.tree.forecast import (
    MIN_FIT_POINTS,
    RoundTimes,
    accept_lengths,
    forecasts,
    interpolated_times,
    modelled_times,
    round_times_of,
)
from ddtree.tree.plan_rates import Evidence, Measured, Trial, plan_order

DEFAULT_DRAFT_DEPTH = 15


def measured_of(cells: Iterable[Cell], depth: int) -> dict[int, list[Evidence]]:
    """What cells of one engine and temperature measured, by load and plan, all their sets together."""
    grouped: dict[tuple[int, DraftPlan], list[Cell]] = defaultdict(list)
    for cell in cells:
        grouped[cell.key.concurrency, plan_of(Arm.parse(cell.key.arm), depth)].append(cell)
    by_load: dict[int, list[Evidence]] = defaultdict(list)
    for (load, plan), found in grouped.items():
        trials = tuple(trial for cell in found for trial in _trials(cell))
        if sum(trial.tokens for trial in trials) > 0:
            busy_s = sum(request.total_s for cell in found for request in cell.requests)
            by_load[load].append(Measured(plan, load, trials, busy_s / sum(cell.wall_s for cell in found)))
    return {load: sorted(by_load[load], key=lambda found: plan_order(found.plan)) for load in sorted(by_load)}


def plan_of(arm: Arm, depth: int) -> DraftPlan:
    """The plan of an arm with a fixed one; a chain has the drafter's whole depth."""
    if arm.mode is Mode.AR:
        return PLAIN
    if arm.mode is Mode.CHAIN:
        return DraftPlan(Mode.CHAIN, depth)
    return DraftPlan(Mode.TREE, int(arm.node_budget))


def _trials(cell: Cell) -> list[Trial]:
    """Its requests, scaled so that all together have the cell's rate over wall time and its accept length."""
    total_s = sum(request.total_s for request in cell.requests)
    scale = cell.wall_s * cell.key.concurrency / total_s if total_s > 0 else 0.0
    counted = [request for request in cell.requests if request.rounds]
    rounds, tokens = sum(r.rounds or 0 for r in counted), sum(r.new_tokens - 1 for r in counted)
    per_token = (cell.accept_length or 0.0) * rounds / tokens if tokens > 0 else 0.0
    return [
        Trial(
            text=f"{cell.key.prompt_set}/{request.prompt}",
            tokens=request.new_tokens,
            seconds=request.total_s * scale,
            rounds=request.rounds or None,
            round_tokens=max(0, request.new_tokens - 1) * per_token,
            repeat=cell.key.repeat,
        )
        for request in cell.requests
        if request.total_s > 0
    ]


def with_forecasts(
    measured: Mapping[int, Sequence[Evidence]],
    times: Sequence[RoundTimes],
    concurrency: Sequence[int],
    asked: Sequence[DraftPlan],
) -> dict[int, list[Evidence]]:
    """What was measured, and forecasts of the plans asked for and of the loads asked for."""
    everything = [found for loads in measured.values() for found in loads]
    plans = sorted({*(found.plan for found in everything), *asked}, key=plan_order)
    lengths = accept_lengths(everything)
    evidence: dict[int, list[Evidence]] = {load: list(found) for load, found in measured.items()}
    for load in dict.fromkeys([*measured, *concurrency]):
        known = {found.plan for found in evidence.get(load, ())}
        wanted = [plan for plan in (asked if load in measured else plans) if plan not in known]
        foretold = forecasts(lengths, times, wanted, load)
        if foretold:
            evidence[load] = [*evidence.get(load, ()), *foretold]
    return evidence


def times_of(
    evidence: Iterable[Evidence], model: str, device: str, context_tokens: float, engine: str
) -> tuple[RoundTimes, ...]:
    """The ways to foretell round times, the least error first; none where too few are known."""
    points = round_times_of(evidence)
    if len(points) < MIN_FIT_POINTS:
        return ()
    ways = [interpolated_times(points)]
    pair, gpu = known_pair(model), known_gpu(device)
    if pair is not None and gpu is not None:
        start = EMBEDDED_FIT if engine == EMBEDDED else sglang_calibration(pair.target)
        ways.append(modelled_times(points, pair, gpu, start.calibration, context_tokens))
    return tuple(sorted(ways, key=lambda way: math.inf if way.error is None else way.error))


def context_tokens(cells: Sequence[Cell]) -> float:
    """Of a request halfway through, on average."""
    return fmean(r.prompt_tokens + r.new_tokens / 2 for cell in cells for r in cell.requests)


def draft_depth(run: Run, engine: str) -> int:
    """Levels below the root by what the engine says of itself, else the usual ones."""
    sizes = [info.get("block_size") for arm, info in run.engines.items() if Arm.parse(arm).engine == engine]
    depths = [int(size) - 1 for size in sizes if size is not None and is_int(size) and size > 1]
    return depths[0] if depths else DEFAULT_DRAFT_DEPTH


def is_sglang(run: Run, engine: str) -> bool | None:
    """Whether the engine is SGLang; None for a server that does not say."""
    if engine in (EMBEDDED, SGLANG):
        return engine == SGLANG
    said = {info.get("server") for arm, info in run.engines.items() if Arm.parse(arm).engine == engine}
    return {"sglang": True, "ddtree": False}.get(str(said.pop())) if len(said) == 1 else None


def is_uneven(cells: Sequence[Cell]) -> bool:
    """Whether an arm lacks a cell that another has."""
    where: dict[str, set[CellKey]] = defaultdict(set)
    for cell in cells:
        where[cell.key.arm].add(replace(cell.key, arm=""))
    return len({frozenset(keys) for keys in where.values()}) > 1


def model_name(run: Run, role: str) -> str:
    """The name of `target` or `drafter`; empty where it is not known."""
    model = run.header.models.get(role)
    return str(model.get("name") or "") if isinstance(model, Mapping) else ""


def short_cells(cells: Iterable[Cell]) -> list[tuple[int, int]]:
    """Loads that had fewer requests than run at once, with the most that there were."""
    most: dict[int, int] = defaultdict(int)
    for cell in cells:
        most[cell.key.concurrency] = max(most[cell.key.concurrency], len(cell.requests))
    return [(load, count) for load, count in sorted(most.items()) if count < load]
