"""The roadmap's first table: what of three model families runs on eight RTX PRO 6000 today."""

from __future__ import annotations

from dataclasses import dataclass

from benchmark_tables import table
from roadmap_checks import chain_error
from roadmap_lengths import LengthCurve, prediction_curves
from roadmap_performance import GPUS_NEEDED, PREDICTED, REQUESTS, Setting
from roadmap_points import large_fit, tree

from ddtree.tree.budget_cost import DraftPlan
from ddtree.tree.cost_catalogue import PAIRS, RTX_PRO_6000

HARD_PROMPTS = ("MT-Bench", "GSM8K", "chat")  # the hardest set a target has lengths for
WIDE = 31  # the plugin's default
NO, NEEDS_DRAFTER = "**no**, refused", "once a drafter is trained"
NOT_RUN = "yes, not run here yet"


@dataclass(frozen=True, slots=True)
class Family:
    """A row: what people call it, what is to be done, and the target of the catalogue it is predicted by."""

    name: str
    today: str
    blocked: str
    drafter: str
    target: str | None
    note: str = ""  # in place of the GPUs, for what the catalogue does not have

    @property
    def gpus(self) -> str:
        return str(GPUS_NEEDED.get(self.target, 1)) if self.target else self.note


FAMILIES = (
    Family("Qwen3-4B", NOT_RUN, "nothing; 9 proves it", "z-lab/Qwen3-4B-DFlash-b16", "Qwen3-4B"),
    Family("Qwen3-8B", NOT_RUN, "nothing; 9 proves it", "z-lab/Qwen3-8B-DFlash-b16", "Qwen3-8B"),
    Family(
        "Qwen3-Coder-30B-A3B", NOT_RUN, "nothing; 14 proves it", "z-lab/Qwen3-Coder-30B-A3B-DFlash",
        "Qwen3-Coder-30B-A3B",
    ),
    Family("Qwen3-32B", NEEDS_DRAFTER, "drafter; 9, 10", "none known", "Qwen3-32B"),
    Family("Qwen3-235B-A22B", NEEDS_DRAFTER, "drafter; 10, 14", "none known", "Qwen3-235B-A22B"),
    Family(
        "Qwen3.5, 3.6, Coder-Next (hybrid; times: 3.6-27B)", NO, "17", "z-lab/Qwen3.6-27B-DFlash and others",
        "Qwen3.6-27B",
    ),
    Family(
        "GLM-4.5-Air (106B-A12B)", "**no**, DFLASH neither", "23: layer capture in SGLang, drafter",
        "none known", "GLM-4.5-Air",
    ),
    Family(
        "GLM-4.5, 4.6 (355B-A32B)", "**no**, DFLASH neither", "23, 10", "none known", None,
        "8 with FP8; bfloat16 has no room",
    ),
    Family("GLM-4.7-Flash, GLM-5.1 (MLA)", NO, "16", "GLM-5.1: z-lab", None, "not sized"),
    Family(
        "Kimi K2.5, K2.6 (MLA; times: K2.5)", NO, "16, 10", "z-lab, for K2.5 and K2.6", "Kimi K2.5"),
)  # fmt: skip


def curve_of(target: str) -> LengthCurve:
    """The lengths of a target on its hardest prompts."""
    return next(c for c in prediction_curves() if c.target == target and c.prompts in HARD_PROMPTS)


def times_dflash(target: str, plan: DraftPlan) -> str:
    """Predicted speed of a tree over the chain's, at each number of requests; bold where it loses."""
    calibration, chain, cells = large_fit().calibration, PAIRS[target].chain, []
    for requests in REQUESTS:
        setting = Setting(curve_of(target), RTX_PRO_6000, requests)
        if not setting.fits(plan):
            cells.append("-")
            continue
        times = setting.speed_up(plan, calibration) / setting.speed_up(chain, calibration)
        cells.append(f"**{times:.2f}**" if times < 1 else f"{times:.2f}")
    return " / ".join(cells)


def start() -> str:
    """What runs today, what blocks the rest, and what a tree should bring over DFLASH there."""
    rows = []
    for family in FAMILIES:
        cells = ["", "not predicted", "not predicted", ""]
        if family.target:
            narrow = PAIRS[family.target].narrow_tree
            curve = curve_of(family.target)
            cells = [
                str(narrow.node_budget), times_dflash(family.target, narrow),
                times_dflash(family.target, tree(WIDE)), f"{PREDICTED}, {curve.prompts} {curve.kind}",
            ]  # fmt: skip
        rows.append([family.name, family.today, family.blocked, family.drafter, family.gpus, *cells])
    head = [
        "family", "DDTREE today?", "what is missing (stage)", "public drafter", "TP, 96 GB cards",
        "start: node_budget", "times DFLASH, that budget", f"times DFLASH, {WIDE}", "kind, lengths",
    ]  # fmt: skip
    at_once = " / ".join(map(str, REQUESTS))
    return (
        f"Times DFLASH at {at_once} requests; typical error of a chain's speed-up over plain "
        f"{chain_error():.0%}, trees untested at this size.\n\n{table(head, rows)}"
    )
