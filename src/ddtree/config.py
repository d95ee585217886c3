"""Everything a user can turn, in frozen dataclasses that check themselves once.

Command-line flags and the settings table in the docs are made from these fields: each carries its
help text in `metadata["help"]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from ddtree.errors import ConfigError, short_repr

MAX_NODE_BUDGET = 1024
DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]{0,3}))?")
MAX_CANDIDATE_TOPK = 1024
DEFAULT_PLUGIN_CANDIDATES = 32
# SGLang walks siblings by recursion where a grammar masks a tree.
MAX_PLUGIN_CANDIDATES = 256
MIN_CONTEXT_TOKENS = 16
MAX_STOP_STRINGS = 16
# Dividing logits by less than this overflows float32 for no visible change in the draw.
GREEDY_BELOW = 1e-5
# Further penalties and temperatures keep such a logit within float32.
MAX_LOGIT_BIAS = 1e30


class Mode(StrEnum):
    """How tokens are made: one a pass, a drafted chain, or a drafted tree."""

    AR = "ar"
    CHAIN = "chain"
    TREE = "tree"


class Dtype(StrEnum):
    """Number format of weights and activations; `auto` lets the engine choose for the device."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def setting(default: Any, help_text: str) -> Any:
    """A dataclass field with a default and the help text of its flag."""
    return field(default=default, metadata={"help": help_text})


def check(condition: bool, name: str, value: object, allowed: str, todo: str = "") -> None:
    """Raise `ConfigError` naming the field, its value, what is allowed and what to do."""
    if not condition:
        raise ConfigError(
            f"{name}={short_repr(value)} is not allowed: {allowed}" + (f"; {todo}" if todo else "")
        )


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def parse_mode(value: str) -> Mode:
    """The mode of that name, or a `ConfigError` that lists the modes."""
    check(value in list(Mode), "mode", value, f"one of {', '.join(Mode)}")
    return Mode(value)


def parse_budget(value: int | str, name: str = "node_budget") -> int | Literal["auto"]:
    """A node budget from 1 to `MAX_NODE_BUDGET`, or "auto"; `name` is what the caller calls it."""
    if value == "auto":
        return "auto"
    allowed = f"a whole number from 1 to {MAX_NODE_BUDGET}, or auto"
    try:
        number = int(value)
    except (OverflowError, TypeError, ValueError):
        raise ConfigError(f"{name}={short_repr(value)} is not allowed: {allowed}") from None
    check(1 <= number <= MAX_NODE_BUDGET, name, value, allowed, "try 16 on a CPU, 64 on a GPU")
    return number


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. `temperature=0` is greedy.

    Processing order at every position: logit bias, repetition penalty, presence and frequency
    penalty, temperature, top-k, top-p, min-p; then one draw with noise keyed by (seed, absolute
    position, token id).
    """

    max_tokens: int = setting(256, "most new tokens")
    temperature: float = setting(0.0, "0 (below 1e-5) is greedy; 1 samples the model's own distribution")
    top_k: int = setting(0, "keep the k most likely tokens (0: all)")
    top_p: float = setting(1.0, "keep the smallest set of tokens with this much probability")
    min_p: float = setting(0.0, "drop tokens below this fraction of the most likely one's probability")
    repetition_penalty: float = setting(1.0, "divide (or multiply) logits of tokens seen in prompt or output")
    presence_penalty: float = setting(0.0, "subtract once from logits of tokens in the output")
    frequency_penalty: float = setting(0.0, "subtract per occurrence from logits of tokens in the output")
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"help": "token id -> number added to its logit"}
    )
    seed: int = setting(0, "seed of the sampling noise")
    stop: tuple[str, ...] = setting((), "end before this text appears (repeatable)")
    stop_token_ids: tuple[int, ...] = setting(
        (), "end at this token id, besides the model's own (repeatable)"
    )
    ignore_eos: bool = setting(False, "go on past the model's end token")

    def __post_init__(self) -> None:
        check(is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        check(
            is_number(self.temperature) and 0 <= self.temperature <= 100,
            "temperature", self.temperature, "from 0 to 100",
        )  # fmt: skip
        check(is_int(self.top_k) and self.top_k >= 0, "top_k", self.top_k, "0 (all) or more")
        check(is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "above 0, at most 1")
        check(is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "from 0 to 1")
        check(
            is_number(self.repetition_penalty) and 0.01 <= self.repetition_penalty <= 10,
            "repetition_penalty", self.repetition_penalty, "from 0.01 to 10",
        )  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            check(is_number(value) and -2 <= value <= 2, name, value, "from -2 to 2")
        self._check_lists()

        check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")

    def _check_lists(self) -> None:
        allowed = f"token ids from 0 with numbers from {-MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}"
        check(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, allowed)
        for token, bias in self.logit_bias.items():
            check(
                is_int(token) and token >= 0 and is_number(bias) and abs(bias) <= MAX_LOGIT_BIAS,
                "logit_bias", {token: bias}, allowed,
            )  # fmt: skip
        check(is_int(self.seed) and -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit whole number")
        check(
            isinstance(self.stop, tuple) and len(self.stop) <= MAX_STOP_STRINGS
            and all(isinstance(text, str) and text for text in self.stop),
            "stop", self.stop, f"a tuple of at most {MAX_STOP_STRINGS} non-empty strings",
        )  # fmt: skip
        check(
            isinstance(self.stop_token_ids, tuple) and all(is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids", self.stop_token_ids, "a tuple of token ids from 0",
        )  # fmt: skip

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def changes_logits(self) -> bool:
        """Whether logits depend on bias or on the tokens before them."""
        return bool(self.logit_bias) or self.counts_tokens

    @property
    def counts_tokens(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What an engine loads and where it runs."""

    model: str = setting("smollm2-135m", "target: a known name, a local path or a Hugging Face name")
    drafter: str = setting(
        "auto", "DFlash drafter: auto (the one shipped for the model), none, a path or a name"
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    dtype: Dtype = setting(Dtype.AUTO, "auto, float32, bfloat16 or float16")
    threads: int = setting(0, "CPU threads (0: measured at start-up)")
    max_context_tokens: int = setting(4096, "prompt and new tokens together; sizes the KV cache")
    candidate_topk: int = setting(0, "candidates kept a position (0: as many as the node budget)")
    cuda_graphs: bool = setting(True, "capture the draft and verify passes on CUDA")

    def __post_init__(self) -> None:
        for name in ("model", "drafter"):
            value = getattr(self, name)
            check(isinstance(value, str) and value != "", name, value, "a name or a path")
        check(
            isinstance(self.device, str) and DEVICE.fullmatch(self.device) is not None,
            "device", self.device, "auto, cpu, cuda or cuda:N",
        )  # fmt: skip
        check(self.dtype in list(Dtype), "dtype", self.dtype, f"one of {', '.join(Dtype)}")
        check(
            is_int(self.threads) and 0 <= self.threads <= 1024,
            "threads",
            self.threads,
            "0 (measured) to 1024",
        )
        check(
            is_int(self.max_context_tokens) and MIN_CONTEXT_TOKENS <= self.max_context_tokens <= 1 << 20,
            "max_context_tokens", self.max_context_tokens, f"from {MIN_CONTEXT_TOKENS} to 1048576",
        )  # fmt: skip
        check(
            is_int(self.candidate_topk) and 0 <= self.candidate_topk <= MAX_CANDIDATE_TOPK,
            "candidate_topk", self.candidate_topk, f"0 (the node budget) to {MAX_CANDIDATE_TOPK}",
        )  # fmt: skip
        check(isinstance(self.cuda_graphs, bool), "cuda_graphs", self.cuda_graphs, "true or false")


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """What DDTREE in SGLang can be told beyond SGLang's own flags."""

    node_budget: int = setting(
        31, f"most nodes of a draft tree, the root not counted (1 to {MAX_NODE_BUDGET})"
    )
    candidate_topk: int = setting(0, "candidates kept a draft position (0: the node budget, at most 32)")
    mode: Mode = setting(Mode.TREE, "tree; or chain, the most likely token of each position, to compare with")
    max_accept_tokens: int = setting(
        0, "most tokens a round commits (0: the whole path); 1 is plain decoding through the tree's path"
    )
    metrics: bool = setting(True, "count rounds for Prometheus, where SGLang runs with --enable-metrics")
    check_ranks: bool = setting(False, "compare the trees of all tensor-parallel ranks each round; slow")
    trace_file: str = setting(
        "", "for debugging: file to which rank 0 writes every round (docs/traces.md); empty for none"
    )
    trace_detail: str = setting(
        "summary", "of the trace: summary, or full, with trees and target log-probabilities too; slower"
    )

    def __post_init__(self) -> None:
        check(
            is_int(self.node_budget) and 1 <= self.node_budget <= MAX_NODE_BUDGET,
            "node_budget", self.node_budget, f"a whole number from 1 to {MAX_NODE_BUDGET}",
        )  # fmt: skip
        check(
            is_int(self.candidate_topk) and 0 <= self.candidate_topk <= MAX_PLUGIN_CANDIDATES,
            "candidate_topk", self.candidate_topk, f"0 (by the node budget) to {MAX_PLUGIN_CANDIDATES}",
        )  # fmt: skip
        check(self.mode in (Mode.TREE, Mode.CHAIN), "mode", self.mode, "tree or chain")
        check(
            is_int(self.max_accept_tokens) and self.max_accept_tokens >= 0,
            "max_accept_tokens", self.max_accept_tokens, "0 (the whole path) or more",
        )  # fmt: skip
        for name in ("metrics", "check_ranks"):
            value = getattr(self, name)
            check(isinstance(value, bool), name, value, "true or false")
        check(
            isinstance(self.trace_file, str) and "\0" not in self.trace_file,
            "trace_file", self.trace_file, "the path of a file, or empty for none",
        )  # fmt: skip
        check(self.trace_detail in ("summary", "full"), "trace_detail", self.trace_detail, "summary or full")

    @property
    def num_candidates(self) -> int:
        """Candidates kept a draft position (K): more than the node budget could never be used."""
        if self.mode == Mode.CHAIN:
            return 1
        return min(self.candidate_topk or DEFAULT_PLUGIN_CANDIDATES, self.node_budget)

    def verify_width(self, block_size: int) -> int:
        """Tokens of a request in a verify pass (W): the tree and its root, at least the drafter's block."""
        return block_size if self.mode == Mode.CHAIN else max(block_size, self.node_budget + 1)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where `ddtree serve` listens, whom it lets in and what it refuses to take on."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 is every network interface")
    port: int = setting(8080, "TCP port (0: any free one)")
    served_model_name: str = setting("", "name of the model in the API (default: of the engine's model)")
    api_key_env: str = setting("", "environment variable that holds the API key which clients must send")
    api_key_file: str = setting("", "file that holds the API key which clients must send")
    max_queue: int = setting(128, "requests that may wait for the one that runs; more get 429")
    request_timeout_s: float = setting(600.0, "seconds from a request's arrival to its end, waiting included")
    shutdown_s: float = setting(30.0, "seconds that requests get to finish after SIGTERM or Ctrl-C")
    max_body_bytes: int = setting(4 << 20, "largest body of a request; larger ones get 413")
    mode: Mode = setting(Mode.TREE, "mode of requests that name none: ar, chain or tree")
    node_budget: int | Literal["auto"] = setting("auto", "node budget of requests that name none")

    def __post_init__(self) -> None:
        check(
            isinstance(self.host, str)
            and self.host != "" and self.host.isascii() and self.host.isprintable(),
            "host", self.host, "an address or a host name",
        )  # fmt: skip
        check(is_int(self.port) and 0 <= self.port <= 65535, "port", self.port, "from 0 (any) to 65535")
        check(
            isinstance(self.served_model_name, str)
            and self.served_model_name.isprintable() and len(self.served_model_name) <= 200,
            "served_model_name", self.served_model_name, "at most 200 printable characters",
        )  # fmt: skip
        for name in ("api_key_env", "api_key_file"):
            check(isinstance(getattr(self, name), str), name, getattr(self, name), "a name")
        check(
            not (self.api_key_env and self.api_key_file),
            "api_key_file", self.api_key_file, "not with api_key_env", "give one of them",
        )  # fmt: skip
        check(
            is_int(self.max_queue) and 1 <= self.max_queue <= 100_000,
            "max_queue",
            self.max_queue,
            "1 to 100000",
        )
        for name, low in (("request_timeout_s", 0.001), ("shutdown_s", 0.0)):
            value = getattr(self, name)
            check(is_number(value) and low <= value <= 86_400, name, value, f"seconds from {low:g} to 86400")
        check(
            is_int(self.max_body_bytes) and 1024 <= self.max_body_bytes <= 1 << 30,
            "max_body_bytes", self.max_body_bytes, "from 1024 to 1073741824",
        )  # fmt: skip
        parse_mode(self.mode)
        check(
            self.node_budget == "auto" or is_int(self.node_budget),
            "node_budget", self.node_budget, "a whole number or auto",
        )  # fmt: skip
        parse_budget(self.node_budget)
