"""The command that starts the planned server."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict

from ddtree.config import PluginConfig
from ddtree.doctor.pair import Pair
from ddtree.doctor.plan import Plan
from ddtree.doctor.report import Section

NAME = "launch"


def launch_section(
    plan: Plan, pair: Pair, config: PluginConfig, backend: str, fraction: float | None
) -> Section:
    """Flags to paste; they stand here too where an error above has to be put right first."""
    arguments = launch_arguments(plan, pair, config, backend, fraction)
    environ = launch_environment(plan, config)
    lines = shell_lines(environ, ["python", "-m", "sglang.launch_server", *arguments])
    return Section(NAME, "Flags to paste", (), {"environ": environ, "arguments": arguments}, tuple(lines))


def launch_arguments(
    plan: Plan, pair: Pair, config: PluginConfig, backend: str, fraction: float | None
) -> list[str]:
    """SGLang's arguments; names in capitals stand for what is not known."""
    target, drafter = (pair.target, pair.drafter) if plan.model else (None, None)
    model = str(target.folder) if target and target.is_dequantised else plan.model or "TARGET"
    draft = "DRAFTER" if plan.drafter == "auto" else plan.drafter
    if drafter is not None and plan.drafter == "auto":
        draft = str(drafter.folder)
    flags = {
        "--model-path": model,
        "--speculative-algorithm": "DDTREE",
        "--speculative-draft-model-path": draft,
        "--attention-backend": backend,
        "--tp-size": plan.tp_size if plan.tp_size > 1 else None,
        "--context-length": plan.context_tokens,
        "--max-running-requests": plan.max_requests,
        "--kv-cache-dtype": plan.kv_dtype if plan.kv_dtype != "auto" else None,
        "--mem-fraction-static": f"{fraction:.3f}" if fraction is not None and fraction > 0 else None,
    }
    return [str(part) for flag, value in flags.items() if value is not None for part in (flag, value)]


def launch_environment(plan: Plan, config: PluginConfig) -> dict[str, str]:
    """`DDTREE_CONFIG`, where the plan asks for a budget; other settings are read as they are now."""
    if plan.node_budget is None:
        return {}
    default = asdict(PluginConfig())
    given = {k: v for k, v in asdict(config).items() if k == "node_budget" or v != default[k]}
    return {"DDTREE_CONFIG": json.dumps(given)}


def shell_lines(environ: dict[str, str], command: list[str]) -> list[str]:
    """A command for a shell, a flag and its value a line."""
    first = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in environ.items()), *command[:3]])
    pairs = [shlex.join(command[i : i + 2]) for i in range(3, len(command), 2)]
    rows = [first, *(f"  {pair}" for pair in pairs)]
    return [f"{row} \\" for row in rows[:-1]] + rows[-1:]
