"""Calibrations of the cost model that ship, to predict from or to start a fit at.

Found by `scripts/roadmap_points.py` from the times under `results/` and those that others published; a test
fits them anew. Each has the typical error with which it foretells one of its points from the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.tree.cost_model import Calibration, ModelShape

SMALL_WEIGHTS = 1e9  # a small target's round is mostly latency and host, a large one's weights and arithmetic


@dataclass(frozen=True, slots=True)
class Fitted:
    """A calibration, what it was fitted to, and its typical leave-one-out error as a share."""

    source: str
    calibration: Calibration
    error: float


EMBEDDED = Fitted(
    "the embedded engine with a target of 135M on one H200, measured",
    Calibration(
        bandwidth_share=0.766,
        flop_share=0.0601,
        layer_latency_s=15.1e-6,
        tree_s=46.6e-6,
        state_bandwidth_share=0.2,
        step_host_s=38.2e-6,
        round_host_s=124e-6,
        request_host_s=0.0,
        overlaps_host=False,
    ),
    error=0.10,
)
SGLANG_SMALL = Fitted(
    "SGLang with a target of 135M on one H200, measured",
    Calibration(
        bandwidth_share=1.0,
        flop_share=0.342,
        layer_latency_s=42.9e-6,
        tree_s=124e-6,
        state_bandwidth_share=0.2,
        step_host_s=0.5e-3,
        round_host_s=2.57e-3,
        request_host_s=112e-6,
        overlaps_host=True,
        prefill_s=16.2e-3,
    ),
    error=0.09,
)
SGLANG_LARGE = Fitted(
    "SGLang with targets of billions, by times that others published",
    Calibration(
        bandwidth_share=0.626,
        flop_share=0.398,
        layer_latency_s=42.9e-6,
        tree_s=124e-6,
        state_bandwidth_share=0.118,
        step_host_s=0.5e-3,
        round_host_s=2.57e-3,
        request_host_s=112e-6,
        overlaps_host=True,
        link_share=0.65,
    ),
    error=0.23,
)


def sglang_calibration(target: ModelShape) -> Fitted:
    """The one for SGLang with a target of that size."""
    weights = target.dense_weights + target.head_weights
    return SGLANG_LARGE if target.experts is not None or weights > SMALL_WEIGHTS else SGLANG_SMALL
