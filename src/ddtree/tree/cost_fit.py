"""Fits the cost model's calibration to measured times, and says how well it foretells one it has not seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddtree.config import check
from ddtree.tree.cost_model import Calibration

STEPS = 200
DERIVATIVE_STEP = 1e-4  # natural log
FIRST_DAMPING = 1e-2
CONVERGED = 1e-5  # improvement of the loss, as a share of it
PRIOR_SPREAD = 10.0  # a number e times its start costs as much as one point that is off by a tenth
SHARES = ("bandwidth_share", "flop_share", "state_bandwidth_share")


@dataclass(frozen=True, slots=True)
class CostPoint:
    """A measured time and what the model says of it under a calibration, both in seconds."""

    name: str
    seconds: float
    predict: Callable[[Calibration], float]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A measured time beside the prediction by a fit that did not have it."""

    name: str
    seconds: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.seconds - 1


def fit(
    points: Sequence[CostPoint],
    start: Calibration,
    free: Sequence[str],
    *,
    prior_spread: float = PRIOR_SPREAD,
    guess: Calibration | None = None,
) -> Calibration:
    """The calibration whose times are closest to the measured ones, in logarithms, by damped Gauss-Newton.

    `free` names the numbers to fit. Each is held to its value in `start`, weakly: to be off by a factor
    counts as its logarithm over `prior_spread`, so what the points do not show stays. Shares are at most 1.
    The search begins at `guess`, which saves steps, else at `start`.

    Raises:
        ConfigError: no points, or a measured time that is not above 0.
    """
    check(len(points) > 0, "points", points, "one measured time or more")
    for point in points:
        check(point.seconds > 0, point.name, point.seconds, "a time above 0")
    first = np.log([getattr(start, name) for name in free])

    def at(values: NDArray[np.float64]) -> Calibration:
        numbers = dict(zip(free, np.exp(values).tolist(), strict=True))
        return replace(start, **{n: min(1.0, v) if n in SHARES else v for n, v in numbers.items()})

    def residuals(values: NDArray[np.float64]) -> NDArray[np.float64]:
        calibration = at(values)
        off = [math.log(point.predict(calibration) / point.seconds) for point in points]
        return np.array([*off, *((values - first) / prior_spread)])

    begin = np.log([getattr(guess or start, name) for name in free])
    return at(_least_squares(residuals, begin))


def _least_squares(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Levenberg and Marquardt's method with numeric derivatives."""
    current = residuals(values)
    damping = FIRST_DAMPING
    for _ in range(STEPS):
        steps = np.eye(len(values)) * DERIVATIVE_STEP
        jacobian = np.array([(residuals(values + step) - current) / DERIVATIVE_STEP for step in steps]).T
        normal = jacobian.T @ jacobian
        change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ current)
        proposed = residuals(values + change)
        gain = float(current @ current - proposed @ proposed)
        if gain <= 0:
            damping *= 4
            if damping > 1e8:
                break
            continue
        values, current, damping = values + change, proposed, damping / 3
        if gain < CONVERGED * float(current @ current):
            break
    return values


def leave_one_out(
    points: Sequence[CostPoint],
    start: Calibration,
    free: Sequence[str],
    *,
    prior_spread: float = PRIOR_SPREAD,
) -> list[Prediction]:
    """Every point as a fit to all the others foretells it."""
    predictions = []
    all_points = fit(points, start, free, prior_spread=prior_spread)
    for index, point in enumerate(points):
        others = [*points[:index], *points[index + 1 :]]
        fitted = fit(others, start, free, prior_spread=prior_spread, guess=all_points)
        predictions.append(Prediction(point.name, point.seconds, point.predict(fitted)))
    return predictions


def typical_error(predictions: Sequence[Prediction]) -> float:
    """Root mean square of the logarithms of predicted over measured, as a share: 0.2 is a fifth."""
    squares = [math.log(p.predicted_s / p.seconds) ** 2 for p in predictions]
    return math.exp(math.sqrt(sum(squares) / len(squares))) - 1


def describe(predictions: Sequence[Prediction]) -> str:
    """Leave-one-out errors as text, one line a point and the typical error last."""
    width = max(len(p.name) for p in predictions)
    lines = [
        f"{p.name:<{width}}  {p.seconds * 1e3:9.3f} ms  {p.predicted_s * 1e3:9.3f} ms  {p.error:+7.1%}"
        for p in predictions
    ]
    return "\n".join([*lines, f"typical error, each point left out: {typical_error(predictions):.0%}"])
