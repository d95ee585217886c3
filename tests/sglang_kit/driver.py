"""Runs one SGLang engine through a spec's steps: `python -m sglang_kit.driver SPEC.json RESULT.json`.

It is its own program since SGLang ends the process that holds an engine when its scheduler fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from sglang_kit.files import CONTROL_FILE, FOLDER_VARIABLE

FLUSH_ATTEMPTS, FLUSH_WAIT_S = 100, 0.05


async def run_request(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """A request's last output; its `delay_s` and `abort_after_tokens` say when it comes and goes."""
    options = {name: value for name, value in request.items() if name != "plan"}
    await asyncio.sleep(options.pop("delay_s", 0.0))
    abort_after = options.pop("abort_after_tokens", None)
    last: dict[str, Any] = {}
    try:
        async for output in await engine.async_generate(**options, stream=True):
            last = output
            if abort_after is not None and len(output["output_ids"]) >= abort_after:
                engine.tokenizer_manager.abort_request(rid=request["rid"])
    except ValueError as error:
        return {"error": str(error)}
    return last


async def run_requests(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*(run_request(engine, request) for request in requests)))


def run_step(engine: Any, step: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a step's requests, together or one after the other, with its cache empty if it says so."""
    if step.get("flush"):
        flush(engine)
    set_control(step.get("control", {}))
    requests = step["requests"]
    waves = [[request] for request in requests] if step.get("alone") else [requests]
    outputs = [engine.loop.run_until_complete(run_requests(engine, wave)) for wave in waves]
    return [output for wave in outputs for output in wave]


def flush(engine: Any) -> None:
    """Empty the cache; a request's last output comes before the scheduler is done with it."""
    for _ in range(FLUSH_ATTEMPTS):
        if engine.flush_cache().success:
            return
        time.sleep(FLUSH_WAIT_S)
    raise TimeoutError("the scheduler is not idle: a request was not ended")


def set_control(control: dict[str, Any]) -> None:
    path = Path(os.environ[FOLDER_VARIABLE]) / CONTROL_FILE
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(control), encoding="utf-8")
    fresh.replace(path)


def main(spec_path: Path, result_path: Path) -> None:
    import sglang

    spec = json.loads(spec_path.read_text(encoding="utf-8"))
    set_control({})
    engine = sglang.Engine(**spec["engine"])
    outputs = [output for step in spec["steps"] for output in run_step(engine, step)]
    flush(engine)
    result = {"outputs": outputs, "info": engine.get_server_info()}
    result_path.write_text(json.dumps(result, default=repr), encoding="utf-8")
    engine.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
