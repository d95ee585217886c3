"""What the SGLang benchmark programs share: arms, engines in their own processes, prompts, resumable results.

An arm is a way of decoding: `plain`, `dflash` (SGLang's own chain), `ddtree:B` (this project's plugin with
a node budget) or `ddtree-chain:B` (the plugin with the tree of top-1 tokens).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import ddtree
from ddtree.models import resolve_drafter, resolve_target
from ddtree.provenance import provenance

BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent
PLUGIN_GROUP = "sglang.srt.plugins"
FIRST_PORT = 31_000
# What keeps float32 products exact to float32 on a GPU: cuBLAS without TF32, Triton's dot without it.
EXACT_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
START_LIMIT_S = 400


class EngineDied(RuntimeError):
    """An engine's process ended; the message has the end of its log."""


def sglang_arguments(parser: argparse.ArgumentParser, max_requests: int) -> None:
    """Add what decides an engine and its process, --output and --max-seconds."""
    add = parser.add_argument
    add("--model", default="smollm2-135m")
    add("--drafter", default="auto")
    add("--attention-backend", default="triton", help="triton, flashinfer or fa3")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--page-size", type=int, default=1)
    add("--max-requests", type=int, default=max_requests, help="requests at once that engines are made for")
    add("--memory-share", type=float, default=0.3, help="mem_fraction_static of each engine")
    add("--pool-tokens", type=int, default=65_536, help="KV slots of each engine")
    add("--context-tokens", type=int, default=None, help="the model's own limit where not given")
    add("--grammar-backend", default="none", help="none or xgrammar")
    add(
        "--engine-arguments",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further arguments of sglang.Engine",
    )
    add(
        "--ddtree-config", type=json.loads, default={}, metavar="JSON", help="further fields of DDTREE_CONFIG"
    )
    add("--keep-engines-s", type=float, default=0, metavar="SECONDS",
        help="leave engines running for the next command, until unused for so long")  # fmt: skip
    add("--max-seconds", type=float, default=540, help="start nothing new after this long")
    add("--output", type=Path)


# --- engines ---


def engine_arguments_of(arm: str, args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of sglang.Engine for an arm; prefill graphs cost minutes at the start and are left out."""
    arguments = {
        "model_path": str(resolve_target(args.model)),
        "attention_backend": args.attention_backend,
        "sampling_backend": "pytorch",
        "grammar_backend": args.grammar_backend,
        "dtype": args.dtype,
        "page_size": args.page_size,
        "mem_fraction_static": args.memory_share,
        "max_total_tokens": args.pool_tokens,
        "max_running_requests": args.max_requests,
        "cuda_graph_max_bs_decode": args.max_requests,
        "disable_prefill_cuda_graph": True,
        "sleep_on_idle": True,  # several engines share the cores
        "log_level": "warning",
    }
    if args.context_tokens is not None:
        arguments["context_length"] = args.context_tokens
    if arm != "plain":
        arguments["speculative_algorithm"] = "DFLASH" if arm == "dflash" else "DDTREE"
        arguments["speculative_draft_model_path"] = str(resolve_drafter(args.drafter, args.model))
    return arguments | args.engine_arguments


def ddtree_config_of(arm: str, further: dict[str, Any]) -> dict[str, Any] | None:
    """DDTREE_CONFIG of an arm; None for an arm that is not ours.

    Raises:
        SystemExit: there is no such arm.
    """
    name, _, budget = arm.partition(":")
    if name in ("plain", "dflash") and not budget:
        return None
    if name not in ("ddtree", "ddtree-chain") or not budget.isdigit():
        raise SystemExit(
            f"arm {arm!r} is not allowed: plain, dflash, ddtree:B or ddtree-chain:B, such as ddtree:31"
        )
    return {"node_budget": int(budget), "mode": "chain" if name == "ddtree-chain" else "tree", **further}


def plugins_of(arm: str) -> dict[str, str]:
    """This checkout's plugin, name -> module:function, for an arm that needs it and no package has it."""
    if not arm.startswith("ddtree") or any(p.name == "ddtree" for p in entry_points(group=PLUGIN_GROUP)):
        return {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["entry-points"][PLUGIN_GROUP])


def write_metadata(folder: Path, plugins: dict[str, str]) -> None:
    """Make `folder` one on whose path SGLang finds the plugins: it looks for a package's entry points."""
    metadata = folder / f"ddtree_benchmark-{ddtree.__version__}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    lines = [f"[{PLUGIN_GROUP}]", *(f"{name} = {target}" for name, target in plugins.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    about = f"Metadata-Version: 2.1\nName: ddtree-benchmark\nVersion: {ddtree.__version__}\n"
    (metadata / "METADATA").write_text(about, encoding="utf-8")


def engine_environment(
    arm: str, args: argparse.Namespace, folder: Path, plugins: dict[str, str]
) -> dict[str, str]:
    """Environment of an arm's process, with `plugins` beside the arm's own found through `folder`."""
    environment = dict(os.environ)
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    write_metadata(folder, plugins_of(arm) | plugins)
    paths = [str(folder), str(ROOT / "src"), str(BENCHMARKS), *filter(None, known)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.pop("DDTREE_CONFIG", None)
    config = ddtree_config_of(arm, args.ddtree_config)
    if config is not None:
        environment["DDTREE_CONFIG"] = json.dumps(config)
    if args.dtype == "float32":
        environment |= EXACT_FLOAT32
    return environment


def free_port(first: int) -> int:
    """The first port from `first` on that nobody listens at; engines that start together need several."""
    for port in range(first, first + 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port from {first} to {first + 99}")


class EngineProcess:
    """An engine of an arm in a process of its own; `start` returns at once, the first call waits for it.

    Args:
        arm: name of the arm.
        args: what `sglang_arguments` parsed.
        folder: where its socket, log and metadata go.
        index: number of the engine among those of one program, for its port.
        plugins: further SGLang plugins, name -> module:function.
        environment: further variables of its process.
        call_limit_s: a call that takes longer counts as the engine's death; None for no limit.
    """

    def __init__(
        self, arm: str, args: argparse.Namespace, folder: Path, index: int, plugins: dict[str, str],
        environment: Mapping[str, str] | None = None, call_limit_s: float | None = None,
    ) -> None:  # fmt: skip
        self.arm = arm
        self._environment, self._call_limit_s = dict(environment or {}), call_limit_s
        config = ddtree_config_of(arm, args.ddtree_config)
        self._plugins = plugins
        self._arguments = engine_arguments_of(arm, args)
        self._first_port = FIRST_PORT + 200 * index
        identity = [self._arguments, config, self._plugins, self._environment]
        key = json.dumps(identity, sort_keys=True).encode()
        digest = hashlib.sha256(key).hexdigest()[:8]
        name = f"{arm.replace(':', '-')}-{digest}"
        self._socket_path = folder / digest  # a socket's path may have some 100 characters
        self.log = folder / f"{name}.log"
        self._metadata = folder / f"{name}.path"
        self._linger_s = args.keep_engines_s
        self._args = args
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Any = None

    def start(self) -> None:
        """Start the process, unless one of the same settings was kept."""
        if self._connect():
            return
        self._socket_path.unlink(missing_ok=True)
        options = {
            "socket": str(self._socket_path),
            "engine": {"port": free_port(self._first_port), **self._arguments},
            "linger_s": self._linger_s,
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(BENCHMARKS / "sglang_engine.py"), json.dumps(options)],
                env=engine_environment(self.arm, self._args, self._metadata, self._plugins)
                | self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _connect(self) -> bool:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._socket_path))
        except OSError:
            connection.close()
            return False
        connection.settimeout(self._call_limit_s)
        self._connection = connection.makefile("rwb")
        return True

    def wait(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until the engine answers.

        Raises:
            EngineDied: it ended, or did not answer within `limit_s`.
        """
        begin = time.monotonic()
        while self._connection is None and not self._connect():
            if self._process is None or self._process.poll() is not None:
                raise EngineDied(f"{self.arm} did not start:\n{self.log_end()}")
            if time.monotonic() - begin > limit_s:
                raise EngineDied(f"{self.arm} did not answer for {limit_s:.0f} s:\n{self.log_end()}")
            time.sleep(0.2)

    def call(self, name: str, **arguments: Any) -> Any:
        """Result of a method of `sglang_engine.EngineServer`.

        Raises:
            EngineDied: the engine ended before it answered.
            RuntimeError: the method raised; the message is its error.
        """
        self.wait()
        try:
            self._connection.write(json.dumps({"call": name, **arguments}).encode() + b"\n")
            self._connection.flush()
            line = self._connection.readline()
        except OSError:
            line = b""
        if not line:
            raise EngineDied(f"{self.arm} ended during {name!r}:\n{self.log_end()}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{self.arm}: {name}: {reply['error']}")
        return reply["result"]

    def log_end(self, lines: int = 40) -> str:
        """The last lines of the engine's log."""
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])

    def close(self) -> None:
        """Hang up; end the process unless it is to be kept."""
        if self._connection is not None:
            if self._linger_s == 0:
                with suppress(EngineDied, RuntimeError):
                    self.call("shutdown")
            with suppress(OSError):  # what a dead engine did not read
                self._connection.close()
            self._connection = None
        if self._linger_s == 0 and self._process is not None:
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()


@contextmanager
def engines(
    arms: Sequence[str], args: argparse.Namespace, plugins: dict[str, str] | None = None
) -> Iterator[dict[str, EngineProcess]]:
    """Engines of several arms side by side; the first one starts alone and compiles what all need.

    Whether the others came up shows at their first call.
    """
    kept = args.keep_engines_s > 0
    folder = (
        Path(tempfile.gettempdir()) / f"ddtree-engines-{os.getuid()}" if kept else Path(tempfile.mkdtemp())
    )
    folder.mkdir(mode=0o700, exist_ok=True)
    processes = {arm: EngineProcess(arm, args, folder, i, plugins or {}) for i, arm in enumerate(arms)}
    try:
        for number, process in enumerate(processes.values()):
            process.start()
            if number == 0:
                with suppress(EngineDied):
                    process.wait()
        yield processes
    finally:
        for process in processes.values():
            process.close()
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


# --- prompts ---


def chat_prompts(model: str, texts: Sequence[str]) -> list[list[int]]:
    """Texts as token ids in the model's chat template, the same as the embedded engine's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_target(model))
    turns = [[{"role": "user", "content": text}] for text in texts]
    chats = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]


# --- results ---


class Results:
    """A JSON file of named cells, rewritten after each one, so that a killed run goes on where it was.

    Args:
        output: the file; None keeps the cells in memory.
        settings: what all cells have in common.

    Raises:
        SystemExit: the file's cells were made with other settings.
    """

    def __init__(self, output: Path | None, settings: dict[str, Any]) -> None:
        self._output = output
        self.settings = json.loads(json.dumps(settings))
        self.cells: dict[str, Any] = {}
        self.engines: dict[str, Any] = {}
        self.verdict: dict[str, Any] = {}  # figures made of the cells
        self._runs: list[Any] = []
        if output is not None and output.exists():
            before = json.loads(output.read_text(encoding="utf-8"))
            if before["settings"] != self.settings:
                raise SystemExit(
                    f"{output} was made with settings {before['settings']}, not {self.settings}: "
                    "use the same ones, or another file"
                )
            self.cells, self.engines = before["cells"], before["engines"]
            self.verdict, self._runs = before["verdict"], before["runs"]
        self._runs.append(provenance())

    def add(self, name: str, cell: Any) -> None:
        """Keep a cell and write the file."""
        self.cells[name] = cell
        self.write()

    def write(self) -> None:
        """Write the file in one step: a reader or a kill never finds half of it."""
        if self._output is None:
            return
        self._output.parent.mkdir(parents=True, exist_ok=True)
        part = self._output.with_name(self._output.name + ".part")
        report = {
            "runs": self._runs, "settings": self.settings, "engines": self.engines,
            "verdict": self.verdict, "cells": self.cells,
        }  # fmt: skip
        part.write_text(json.dumps(report) + "\n", encoding="utf-8")
        part.replace(self._output)


class Clock:
    """How much of --max-seconds is left."""

    def __init__(self, max_seconds: float) -> None:
        self._end_s = time.monotonic() + max_seconds

    def left_s(self) -> float:
        """Seconds left; negative when over."""
        return self._end_s - time.monotonic()
