"""Starts an engine for a test module: a spec in, every request's output and rounds out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_kit.files import FOLDER_VARIABLE, PLANS_FILE, POOL_FILE, ROUNDS_FILE, read_lines
from sglang_kit.plugin import BACKEND_NAME

if TYPE_CHECKING:
    from sglang_kit.models import Pair

TESTS = Path(__file__).parents[1]
DOUBLES = TESTS / "sglang_kit" / "doubles"
TIMEOUT_S = 240
LOG_TAIL_LINES, LOG_TAIL_COLUMNS = 60, 400
PORTS_PER_ENGINE = 40
USED_MODELS = {"qwen3", "llama", "dflash"}
_starts = count()


def next_port() -> int:
    """A port of this test process's own: two engines that look for one at once find the same."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return 21000 + 2000 * worker + PORTS_PER_ENGINE * next(_starts)


def request(
    rid: str, prompt: Sequence[int], params: dict[str, Any], plan: Sequence[int] = (), **options: Any
) -> dict[str, Any]:
    """A request of a step; `plan` is the output whose tokens are planted among the drafter's candidates."""
    full_plan = [*prompt, *plan] if plan else []
    return {"rid": rid, "input_ids": list(prompt), "sampling_params": params, "plan": full_plan, **options}


def step(requests: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Requests that run together, or one by one if `alone`; `flush` empties the cache before them."""
    return {"requests": requests, **options}


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine did with a spec."""

    outputs: dict[str, dict[str, Any]]  # by request id
    rounds: dict[str, list[dict[str, Any]]]  # by request id
    info: dict[str, Any]
    pool: list[dict[str, int]]  # before each flush
    log: str

    def tokens(self, rid: str) -> list[int]:
        output = self.outputs[rid]
        assert "error" not in output, f"{rid}: {output}"
        tokens: list[int] = output["output_ids"]
        return tokens


def environment(folder: Path, config: dict[str, Any], extra: dict[str, str]) -> dict[str, str]:
    """The variables of a process that runs SGLang on the CPU with the doubles and the tests' plugin."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DDTREE_")}
    return inherited | {
        "PYTHONPATH": f"{DOUBLES}{os.pathsep}{TESTS}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        # Imports of some two hundred models take seconds in each process.
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(unused_models()),
        FOLDER_VARIABLE: str(folder),
        "DDTREE_CONFIG": json.dumps(config),
    } | extra  # fmt: skip


@cache
def unused_models() -> list[str]:
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    files = (Path(spec.origin).parent / "srt" / "models").glob("*.py")
    return sorted({file.stem for file in files} - USED_MODELS)


def engine_arguments(pair: Pair, **overrides: Any) -> dict[str, Any]:
    """Arguments of `sglang.Engine`, by the names of its flags."""
    return {
        "model_path": str(pair.target_path),
        "speculative_algorithm": "DDTREE",
        "speculative_draft_model_path": str(pair.drafter_path),
        "attention_backend": BACKEND_NAME,
        "device": "cpu",
        "dtype": "float32",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "log_level": "info",
    } | overrides


def run_engine(
    folder: Path,
    pair: Pair,
    steps: list[dict[str, Any]],
    *,
    config: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    **overrides: Any,
) -> Run:
    """Run `steps` in one engine; `config` is the plugin's, `overrides` are engine arguments."""
    engine = engine_arguments(pair, port=next_port(), **overrides)
    write_plans(folder, [r for s in steps for r in s["requests"]])
    (folder / "spec.json").write_text(json.dumps({"engine": engine, "steps": steps}), encoding="utf-8")
    command = [
        sys.executable, "-m", "sglang_kit.driver", str(folder / "spec.json"), str(folder / "result.json")
    ]  # fmt: skip
    log = run_process(command, environment(folder, config or {}, env or {}), folder / "engine.log")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    rids = [r["rid"] for s in steps for r in s["requests"]]
    assert len(set(rids)) == len(rids), "request ids tell rounds apart"
    rounds = defaultdict(list)
    for line in read_lines(folder / ROUNDS_FILE):
        rounds[line["rid"]].append(line)
    outputs = dict(zip(rids, result["outputs"], strict=True))
    return Run(outputs, dict(rounds), result["info"], read_lines(folder / POOL_FILE), log)


def write_plans(folder: Path, requests: list[dict[str, Any]]) -> None:
    """Tell the recorder what to plant for each request."""
    plans = {r["rid"]: r["plan"] for r in requests}
    (folder / PLANS_FILE).write_text(json.dumps(plans), encoding="utf-8")


def run_process(command: list[str], env: dict[str, str], log_path: Path) -> str:
    """Run a command to its end and return its log, which a failure shows the end of."""
    with log_path.open("w", encoding="utf-8") as log_file:
        process = subprocess.Popen(
            command, env=env, stdout=log_file, stderr=subprocess.STDOUT, start_new_session=True,
            cwd=log_path.parent,
        )  # fmt: skip
        try:
            returncode = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            end_group(process.pid)
    log = log_path.read_text(encoding="utf-8", errors="replace")
    assert returncode == 0, f"{command[2]} ended with {returncode}:\n{tail(log)}"
    return log


def end_group(pid: int) -> None:
    """End what is left of the process group that `pid` leads."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def tail(log: str) -> str:
    return "\n".join(line[:LOG_TAIL_COLUMNS] for line in log.splitlines()[-LOG_TAIL_LINES:])
