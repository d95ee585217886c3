"""`sglang serve` for a test module, with the tests' plugin beside the one under test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

from sglang_kit.files import CONTROL_FILE
from sglang_kit.runs import end_group, engine_arguments, environment, next_port, tail, write_plans

if TYPE_CHECKING:
    from sglang_kit.models import Pair

START_S, END_S, POLL_S = 180, 60, 0.3


@contextmanager
def serve(
    folder: Path, pair: Pair, plans: list[dict[str, Any]], config: dict[str, Any], **overrides: Any
) -> Iterator[str]:
    """A running server's address; on leaving it gets SIGTERM and must end by itself."""
    write_plans(folder, plans)
    (folder / CONTROL_FILE).write_text("{}", encoding="utf-8")
    port, log_path = next_port(), folder / "server.log"
    arguments = engine_arguments(pair, port=port, host="127.0.0.1", **overrides)
    command = [str(Path(sys.executable).parent / "sglang"), "serve", *flags(arguments)]
    with log_path.open("w", encoding="utf-8") as log_file:
        process = subprocess.Popen(
            command, env=environment(folder, config, {}), stdout=log_file, stderr=subprocess.STDOUT,
            start_new_session=True, cwd=folder,
        )  # fmt: skip
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(process, address)
        yield address
        os.kill(process.pid, signal.SIGTERM)
        returncode = process.wait(END_S)
        assert returncode in (0, -signal.SIGTERM, -signal.SIGKILL), f"the server ended with {returncode}"
    except BaseException:
        print(tail(log_path.read_text(encoding="utf-8", errors="replace")))
        raise
    finally:
        end_group(process.pid)


def flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as command-line flags; True is a flag without a value."""
    words = []
    for name, value in arguments.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(value if isinstance(value, str) else json.dumps(value))
    return words


def wait_until_ready(process: subprocess.Popen[bytes], address: str) -> None:
    """Wait until the server generates, as its own health check says."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode} while it started"
        try:
            if requests.get(f"{address}/health_generate", timeout=10).status_code == 200:
                return
        except requests.RequestException:
            time.sleep(POLL_S)
    raise TimeoutError(f"the server was not ready after {START_S} s")
