"""The roadmap's tables that hold the cost model to measured and published times."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmark_tables import table
from roadmap_points import (
    PUBLISHED_CHECKS,
    PUBLISHED_TIMES,
    Published,
    embedded_fit,
    large_fit,
    sglang_fit,
)

from ddtree.config import Mode
from ddtree.tree.budget_cost import DraftPlan
from ddtree.tree.cost_fit import typical_error


def fits() -> str:
    """The three calibrations and how well they foretell a point that was left out."""
    rows = []
    for fitted in (embedded_fit(), sglang_fit(), large_fit()):
        c = fitted.calibration
        of_states = f"{c.state_bandwidth_share:.2f}" if fitted is large_fit() else ""
        rows.append([
            fitted.title, len(fitted.predictions), f"{typical_error(fitted.predictions):.0%}",
            f"{c.bandwidth_share:.2f}", f"{c.flop_share:.2f}", f"{c.layer_latency_s * 1e6:.0f}",
            f"{c.tree_s * 1e6:.0f}", f"{c.step_host_s * 1e3:.2f} / {c.round_host_s * 1e3:.2f}", of_states,
        ])  # fmt: skip
    head = [
        "calibration", "points", "typical error, point left out", "bandwidth share", "FLOP share",
        "µs a layer", "tree, µs", "host ms, step / round", "share for states",
    ]  # fmt: skip
    return table(head, rows)


def checks() -> str:
    """Published times that were not fitted beside what the model says of them."""
    fitted = large_fit().calibration
    rows = []
    for row in PUBLISHED_CHECKS:
        says = row.point().predict(fitted)
        rows.append([
            row.target, row.gpus, plan_name(row.plan), row.requests, row.who, f"{row.round_s * 1e3:.1f}",
            f"{says * 1e3:.1f}", f"{row.round_s / says:.1f}",
        ])  # fmt: skip
    head = [
        "target", "GPU", "plan", "at once", "published by", "published, ms a round", "predicted",
        "published / predicted",
    ]  # fmt: skip
    return table(head, rows)


@dataclass(frozen=True, slots=True)
class SpeedUpCheck:
    """A published speed-up over plain decoding of the same pair, GPU and requests, and the model's."""

    row: Published
    published: float
    predicted: float


def speed_ups() -> list[SpeedUpCheck]:
    """Every published round that has a published plain step beside it."""
    fitted = large_fit().calibration
    rows = (*PUBLISHED_TIMES, *PUBLISHED_CHECKS)
    plain = {(r.target, r.gpus, r.requests): r for r in rows if r.plan.mode is Mode.AR}
    found = []
    for row in rows:
        step = plain.get((row.target, row.gpus, row.requests))
        if step and row.plan.mode is not Mode.AR:
            times = row.accept_length * step.point().predict(fitted) / row.point().predict(fitted)
            found.append(SpeedUpCheck(row, row.tokens_per_s / step.tokens_per_s, times))
    return found


def chain_error() -> float:
    """Typical error of the predicted speed-ups of chains, as a share."""
    chains = [check for check in speed_ups() if check.row.plan.mode is Mode.CHAIN]
    squares = [math.log(check.predicted / check.published) ** 2 for check in chains]
    return math.exp(math.sqrt(sum(squares) / len(squares))) - 1


def checked_speed_ups() -> str:
    """Published speed-ups beside the model's."""
    rows = [
        [
            check.row.target, check.row.gpu.name, plan_name(check.row.plan), check.row.requests,
            check.row.who,
            f"{check.published:.2f}", f"{check.predicted:.2f}", f"{check.predicted / check.published:.2f}",
        ]
        for check in speed_ups()
    ]  # fmt: skip
    head = [
        "target", "GPU", "plan", "at once", "published by", "published, x plain", "predicted",
        "predicted / published",
    ]  # fmt: skip
    return table(head, rows)


def plan_name(plan: DraftPlan) -> str:
    if plan.mode is Mode.TREE:
        return f"tree {plan.node_budget}"
    return "plain" if plan.mode is Mode.AR else "chain"
