"""Shell lines that start an engine with a plan."""

from __future__ import annotations

import json
import shlex

from ddtree.config import EngineConfig, Mode
from ddtree.models import KNOWN_MODELS
from ddtree.tree.budget_cost import DraftPlan

SERVER = "python -m sglang.launch_server"
ALGORITHMS = {Mode.CHAIN: "DFLASH", Mode.TREE: "DDTREE"}


def launch_lines(plan: DraftPlan, model: str, drafter: str, *, is_sglang: bool) -> tuple[str, ...]:
    """The command, and in comments what to know of it; names in capitals stand for what is not known."""
    return _sglang_lines(plan, model, drafter) if is_sglang else (_serve_line(plan, model, drafter),)


def _serve_line(plan: DraftPlan, model: str, drafter: str) -> str:
    words = ["ddtree", "serve"]
    if model and model != EngineConfig().model:
        words += ["--model", _word(model, "TARGET")]
    if drafter and not _is_shipped(drafter):
        words += ["--drafter", _word(drafter, "DRAFTER")]
    words += ["--mode", plan.mode.value]
    if plan.mode is Mode.TREE:
        words += ["--budget", str(plan.node_budget)]
    return " ".join(words)


def _sglang_lines(plan: DraftPlan, model: str, drafter: str) -> tuple[str, ...]:
    is_known = model in KNOWN_MODELS
    target = "TARGET" if is_known else _word(model, "TARGET")
    draft = "DRAFTER" if _is_shipped(drafter) else _word(drafter, "DRAFTER")
    environ = ""
    if plan.mode is Mode.TREE:
        environ = f"DDTREE_CONFIG={shlex.quote(json.dumps({'node_budget': plan.node_budget}))} "
    words = [f"{environ}{SERVER} --model-path {target}"]
    if plan.mode is not Mode.AR:
        words.append(
            f"  --speculative-algorithm {ALGORITHMS[plan.mode]} --speculative-draft-model-path {draft}"
        )
    hint = f"# ddtree doctor --model {model} prints the folders TARGET and DRAFTER"
    command = [f"{word} \\" for word in words[:-1]] + words[-1:]
    return (hint, *command) if is_known else tuple(command)


def _word(name: str, unknown: str) -> str:
    """The name as a shell reads it back, or what stands for one that is not known or cannot be shown."""
    return shlex.quote(name) if name and name.isprintable() and "`" not in name else unknown


def _is_shipped(drafter: str) -> bool:
    return any(drafter == known.drafter for known in KNOWN_MODELS.values())
