"""Who is behind a URL: what a running server says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from ddtree.bench.http_client import HttpClient, ServerError
from ddtree.errors import ConfigError, short_repr

SGLANG_INFO_PATHS = ("/server_info", "/get_server_info")  # the second of releases before the first
# Of hundreds of fields, one of which is the API key.
SGLANG_SETTINGS = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend", "sampling_backend",
    "speculative_algorithm", "speculative_draft_model_path", "speculative_num_draft_tokens",
    "speculative_dflash_block_size", "speculative_draft_attention_backend", "speculative_attention_mode",
    "disable_overlap_schedule", "disable_cuda_graph", "disable_radix_cache", "page_size", "dtype",
    "quantization", "kv_cache_dtype", "tp_size", "dp_size", "max_running_requests", "max_total_num_tokens",
    "context_length", "mem_fraction_static", "chunked_prefill_size", "device", "random_seed",
    "enable_deterministic_inference", "stream_interval",
)  # fmt: skip
MAX_NAMED = 8


class ServerKind(StrEnum):
    """Whose server it is, which decides what a request may ask beyond OpenAI's API."""

    DDTREE = "ddtree"
    SGLANG = "sglang"
    VLLM = "vllm"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is.

    Attributes:
        root: before the server's own paths, such as `http://127.0.0.1:8080`.
        api: path from there to OpenAI's routes, such as `/v1`.
        model: the model that the URL names behind `#`, or nothing.
    """

    root: str
    api: str
    model: str = ""


def address_of(url: str) -> Address:
    """The parts of a URL, `/v1` where it has no path.

    Raises:
        ConfigError: it has a query, or a user and password, which would stand in the run's file.
    """
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ConfigError(
            f"the URL of {parts.netloc.rpartition('@')[2]} is not allowed: no user and password, which would "
            "stand in the run's file; name the environment variable that holds an API key with --api-key-env"
        )
    if parts.query:
        raise ConfigError(
            f"the URL {short_repr(url)} is not allowed: no query; end it at the path, such as /v1"
        )
    path = parts.path.rstrip("/")
    above, _, last = path.rpartition("/")
    root = f"{parts.scheme}://{parts.netloc}"
    if not path:
        return Address(root, "/v1", parts.fragment)
    return Address(root + above, f"/{last}", parts.fragment)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a running server says of itself.

    Attributes:
        model: name that requests give.
        version: of the server's program, where it tells.
        details: settings and device, ready for JSON.
        has_drafter: of a `ddtree serve`, whether it can draft.
    """

    kind: ServerKind
    model: str
    version: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    has_drafter: bool = False

    def as_info(self) -> dict[str, Any]:
        """For the run's file."""
        return {"server": self.kind.value, "version": self.version, "model": self.model, **self.details}


def find_facts(client: HttpClient, address: Address) -> ServerFacts:
    """Ask a server who it is.

    Raises:
        ServerError: it cannot be reached, or has no models.
        ConfigError: it has several, and the URL names none of them; it wants another API key.
    """
    model = _choose_model(client, address)
    return (
        _ddtree_facts(client, address, model)
        or sglang_facts(client, model)
        or _vllm_facts(client, model)
        or ServerFacts(ServerKind.OTHER, model)
    )


def _choose_model(client: HttpClient, address: Address) -> str:
    path = f"{address.api}/models"
    document = client.get_json(path)
    entries = document.get("data") if isinstance(document, dict) else None
    names = [
        entry["id"]
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]
    if address.model:
        if names and address.model not in names:
            raise ConfigError(
                f"the server at {client.root} has no model {address.model!r}: it has {_some(names)}"
            )
        return address.model
    if not names:
        raise ServerError(
            f"{client.root}{path} lists no model (status {client.status('GET', path)}): give the URL of an "
            "OpenAI-compatible server, such as http://host:8000/v1, and the model behind it as in URL#MODEL"
        )
    if len(names) > 1:
        raise ConfigError(
            f"the server at {client.root} has several models: {_some(names)}; name one as in URL#MODEL"
        )
    return str(names[0])


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(map(short_repr, names[:MAX_NAMED])) + more


def _ddtree_facts(client: HttpClient, address: Address, model: str) -> ServerFacts | None:
    stats = client.get_json(f"{address.api}/ddtree/stats")
    engine = stats.get("engine") if isinstance(stats, dict) else None
    if not isinstance(engine, dict):
        return None
    return ServerFacts(
        ServerKind.DDTREE,
        model,
        _text(stats.get("version")),
        {
            name: engine.get(name)
            for name in ("device", "dtype", "max_context_tokens", "drafter", "block_size")
        },
        has_drafter=engine.get("drafter") is not None,
    )


def sglang_facts(client: HttpClient, model: str) -> ServerFacts | None:
    """What an SGLang server says of itself; None for any other server."""
    for path in SGLANG_INFO_PATHS:
        info = client.get_json(path)
        if isinstance(info, dict) and "internal_states" in info:
            settings = {name: info[name] for name in SGLANG_SETTINGS if info.get(name) is not None}
            details: dict[str, Any] = {"settings": settings, **_memory(info["internal_states"])}
            if settings.get("dtype") not in (None, "auto"):
                details["dtype"] = settings["dtype"]
            return ServerFacts(ServerKind.SGLANG, model, _text(info.get("version")), details)
    return None


def _memory(states: Any) -> dict[str, Any]:
    """What SGLang says of the memory it keeps: gigabytes by use, and slots of the KV cache."""
    first = states[0] if isinstance(states, list) and states else None
    usage = first.get("memory_usage") if isinstance(first, dict) else None
    return {"memory_usage": usage} if isinstance(usage, dict) else {}


def _vllm_facts(client: HttpClient, model: str) -> ServerFacts | None:
    answer = client.get_json("/version")
    version = answer.get("version") if isinstance(answer, dict) else None
    return ServerFacts(ServerKind.VLLM, model, version) if isinstance(version, str) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
