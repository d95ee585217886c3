"""What a benchmark run measures and how, in one dataclass that checks itself once."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from ddtree.config import MAX_NODE_BUDGET, Dtype, EngineConfig, Mode, check, is_int, is_number, setting
from ddtree.errors import ConfigError

EMBEDDED, SGLANG = "embedded", "sglang"
MAX_LIST = 64  # values of one list
MAX_CONCURRENCY = 4096
MAX_SECONDS = 86_400.0


class ServersAtOnce(StrEnum):
    """Whether the servers that a run compares are all up together."""

    AUTO = "auto"
    ALL = "all"
    ONE = "one"


def is_url(engine: str) -> bool:
    """Whether an engine's name is the URL of a server that runs already."""
    return engine.startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """A benchmark run: every engine in every mode on every set, at each concurrency and temperature.

    Raises:
        ConfigError: a value that is not allowed, or nothing is left to measure.
    """

    engines: tuple[str, ...] = setting(
        (EMBEDDED,), "embedded, sglang (servers are started and stopped), or the URL of a running server"
    )
    modes: tuple[Mode, ...] = setting(tuple(Mode), "ar (plain decoding), chain, tree")
    budgets: tuple[int | str, ...] = setting((16, 32, 64), "nodes of a tree, root not counted, or auto")
    concurrency: tuple[int, ...] = setting((1,), "requests in flight; the embedded engine takes one")
    temperatures: tuple[float, ...] = setting((0.0,), "0 is greedy")
    sets: tuple[str, ...] = setting(
        ("gsm8k", "humaneval", "mt_bench"), "prompt sets by name, or JSON Lines files (docs/bench.md)"
    )
    prompts: int = setting(8, "prompts of each set (0: as many as the paper took; of a file, all)")
    prompt_seed: int = setting(0, "shuffle the prompts by this seed before they are taken (0: as they stand)")
    max_tokens: int = setting(256, "most new tokens a request")
    repeats: int = setting(3, "times that every cell is measured")
    seed: int = setting(0, "seed of the sampling noise; each prompt has its own, made from it")
    warm_up_tokens: int = setting(
        0, "new tokens of warm-up requests (0: max-tokens, so that all CUDA graphs are there before timing)"
    )
    rank_prompts: int = setting(
        4, "prompts of a set whose trees and stage times are watched, apart from the timed ones (0: none)"
    )
    run_code: bool = setting(
        False, "run the code that models write, in a sandbox, for the accuracy of humaneval (docs/bench.md)"
    )
    model: str = setting("smollm2-135m", "target: a known name, a local path or a Hugging Face name")
    drafter: str = setting("auto", "DFlash drafter: auto (the one shipped for the model), a path or a name")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: Dtype = setting(Dtype.AUTO, "auto, float32, bfloat16 or float16")
    threads: int = setting(0, "CPU threads of the embedded engine (0: measured at start-up)")
    max_context_tokens: int = setting(4096, "prompt and new tokens together")
    sglang_python: str = setting("", "Python that has SGLang and this package (empty: the one that runs)")
    sglang_args: str = setting("", "further flags for every sglang server, in one text")
    memory_share: float = setting(
        0.0, "share of the GPU's memory for all sglang servers together (0: what they take by themselves)"
    )
    servers_at_once: ServersAtOnce = setting(
        ServersAtOnce.AUTO, "all sglang servers up together, taking turns, or one after the other (auto: all "
        "on a GPU, one on a CPU)"
    )  # fmt: skip
    start_timeout_s: float = setting(600.0, "seconds that a server gets to start")
    request_timeout_s: float = setting(600.0, "seconds that a request to a server gets")
    api_key_env: str = setting("", "environment variable that holds the API key of the servers at URLs")

    def __post_init__(self) -> None:
        self._check_lists()
        self._check_numbers()
        self._check_servers()
        self.engine_config()
        drafts = [mode for mode in self.modes if mode != Mode.AR]
        needs_drafter = bool(drafts) and not all(map(is_url, self.engines))
        check(
            self.drafter != "none" or not needs_drafter,
            "drafter", self.drafter, f"a drafter for {', '.join(drafts)}", "name one, or measure ar alone",
        )  # fmt: skip
        check(
            1 in self.concurrency or any(engine != EMBEDDED for engine in self.engines),
            "concurrency", self.concurrency, "1 among them: the embedded engine runs one request at a time",
        )  # fmt: skip

    def _check_lists(self) -> None:
        _check_list(self, "engines", _is_engine, "embedded, sglang or a URL such as http://host:8080/v1")
        _check_list(self, "modes", lambda mode: mode in list(Mode), f"of {', '.join(Mode)}")
        _check_list(self, "concurrency", lambda n: is_int(n) and 1 <= n <= MAX_CONCURRENCY,
                    f"whole numbers from 1 to {MAX_CONCURRENCY}")  # fmt: skip
        _check_list(self, "temperatures", lambda t: is_number(t) and 0 <= t <= 100, "numbers from 0 to 100")
        _check_list(self, "sets", lambda name: isinstance(name, str) and name != "", "names or paths")
        if Mode.TREE in self.modes:
            _check_list(self, "budgets", _is_budget,
f"whole numbers from 1 to {MAX_NODE_BUDGET}, or auto")  # fmt: skip
            check(
                SGLANG not in self.engines or "auto" not in self.budgets, "budgets", "auto",
                "whole numbers with the engine sglang",
                "DDTREE in SGLang has one node budget, set when it starts",
            )  # fmt: skip

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("prompts", 0, 1 << 20), ("prompt_seed", 0, 2**63 - 1), ("max_tokens", 1, 1 << 20),
            ("repeats", 1, 1000), ("seed", -(2**63), 2**63 - 1), ("warm_up_tokens", 0, 1 << 20),
            ("rank_prompts", 0, 1 << 20),
        ):  # fmt: skip
            value = getattr(self, name)
            check(is_int(value) and low <= value <= high, name, value, f"a whole number from {low} to {high}")
        check(isinstance(self.run_code, bool), "run_code", self.run_code, "true or false")

    def _check_servers(self) -> None:
        for name in ("sglang_python", "sglang_args", "api_key_env"):
            value = getattr(self, name)
            check(isinstance(value, str) and "\0" not in value, name, value, "a text")
        try:
            self.sglang_flags()
        except ValueError as error:
            raise ConfigError(
                f"sglang_args={self.sglang_args!r} is not allowed: flags as a shell reads them ({error})"
            ) from None
        check(
            is_number(self.memory_share) and 0 <= self.memory_share < 1,
            "memory_share", self.memory_share, "from 0 to below 1",
        )  # fmt: skip
        check(
            self.servers_at_once in list(ServersAtOnce),
            "servers_at_once", self.servers_at_once, f"one of {', '.join(ServersAtOnce)}",
        )  # fmt: skip
        for name in ("start_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            check(is_number(value) and 0 < value <= MAX_SECONDS, name, value, "seconds, above 0, to 86400")

    def engine_config(self) -> EngineConfig:
        """What the embedded engine loads; no drafter where nothing drafts.

        Raises:
            ConfigError: a field of it has a value that is not allowed.
        """
        is_plain = all(mode == Mode.AR for mode in self.modes)
        return EngineConfig(
            model=self.model,
            drafter="none" if is_plain else self.drafter,
            device=self.device,
            dtype=self.dtype,
            threads=self.threads,
            max_context_tokens=self.max_context_tokens,
        )

    def sglang_flags(self) -> list[str]:
        """The further flags of sglang servers, one an item."""
        return shlex.split(self.sglang_args)

    @property
    def has_own_engines(self) -> bool:
        """Whether an engine is among them that this run itself loads or starts."""
        return any(engine in (EMBEDDED, SGLANG) for engine in self.engines)


def _is_engine(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    if value in (EMBEDDED, SGLANG):
        return True
    try:
        parts = urlsplit(value)
        has_place = bool(parts.hostname) and parts.port != 0  # raises for a port that is none
        return is_url(value) and has_place and not any(map(str.isspace, value))
    except ValueError:
        return False


def _is_budget(value: Any) -> bool:
    return value == "auto" or (is_int(value) and 1 <= value <= MAX_NODE_BUDGET)


def _check_list(config: BenchConfig, name: str, is_allowed: Callable[[Any], bool], allowed: str) -> None:
    """A tuple of 1 to `MAX_LIST` different values, each of which is allowed."""
    values = getattr(config, name)
    check(
        isinstance(values, tuple) and 1 <= len(values) <= MAX_LIST,
        name, values, f"1 to {MAX_LIST} values: {allowed}",
    )  # fmt: skip
    for value in values:
        check(is_allowed(value), name, value, allowed)
        check(values.count(value) == 1, name, values, "each value once")
