"""What the doctor is asked: the server that is planned, and where it would run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddtree.config import MAX_NODE_BUDGET, check
from ddtree.sglang_plugin.server_refusals import PLAIN_KV_DTYPES

GIB = 1 << 30
DEFAULT_MAX_REQUESTS = 48  # DFLASH's, and so DDTREE's
MAX_REQUESTS, MAX_CONTEXT, MAX_RANKS, MAX_GB = 4096, 1 << 24, 1024, 1 << 20
MIN_FRACTION, MAX_FRACTION = 0.001, 0.999
CAPABILITY = re.compile("([0-9]{1,2})[.]([0-9])")


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned server; None leaves a matter to SGLang, to the plugin's settings or to this machine.

    Attributes:
        model: target: a known name, a local folder or a Hugging Face name; None asks nothing of a pair.
        drafter: a folder or name, or auto: the one that ships for the model.
        node_budget: most nodes of a draft tree.
        max_requests: requests decoded at once.
        context_tokens: of a request, prompt and answer together.
        gpu_memory_gb: of each GPU, in GiB.
        mem_fraction: SGLang's --mem-fraction-static.
        tp_size: GPUs over which the target is split.
        kv_dtype: SGLang's --kv-cache-dtype.
        weights_gb: of the target, in GiB, where its files are not here.
        compute_capability: of a GPU that is not this machine's, such as "12.0".
    """

    model: str | None = None
    drafter: str = "auto"
    node_budget: int | None = None
    max_requests: int | None = None
    context_tokens: int | None = None
    gpu_memory_gb: float | None = None
    mem_fraction: float | None = None
    tp_size: int = 1
    kv_dtype: str = "auto"
    weights_gb: float | None = None
    compute_capability: str | None = None

    def __post_init__(self) -> None:
        check(self.model != "", "--model", self.model, "a name or a folder")
        check(self.drafter not in ("", "none"), "--drafter", self.drafter, "auto, a name or a folder")
        for name, high in (("node_budget", MAX_NODE_BUDGET), ("max_requests", MAX_REQUESTS)):
            self._check_range(name, getattr(self, name), high)
        self._check_range("context", self.context_tokens, MAX_CONTEXT)
        self._check_range("tp", self.tp_size, MAX_RANKS)
        for name, low in (("gpu_memory_gb", 1), ("weights_gb", 0.001)):
            value = getattr(self, name)
            check(value is None or low <= value <= MAX_GB, flag_name(name), value, f"GiB, {low} to {MAX_GB}")
        fraction = self.mem_fraction
        check(
            fraction is None or MIN_FRACTION <= fraction <= MAX_FRACTION,
            "--mem-fraction", fraction, f"from {MIN_FRACTION} to {MAX_FRACTION}",
        )  # fmt: skip
        kinds = ", ".join(PLAIN_KV_DTYPES)
        check(self.kv_dtype in PLAIN_KV_DTYPES, "--kv-dtype", self.kv_dtype, f"one of {kinds}")
        check(
            self.compute_capability is None or self.capability is not None,
            "--compute-capability", self.compute_capability, "major.minor, such as 9.0 or 12.0",
        )  # fmt: skip

    def _check_range(self, name: str, value: int | None, high: int) -> None:
        check(value is None or 1 <= value <= high, flag_name(name), value, f"a whole number from 1 to {high}")

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability that was given, as numbers."""
        found = CAPABILITY.fullmatch(self.compute_capability or "")
        return (int(found[1]), int(found[2])) if found else None

    @property
    def is_elsewhere(self) -> bool:
        """Whether the server would run on another machine, so that this one's software says nothing of it."""
        return self.capability is not None

    @property
    def num_requests(self) -> int:
        """Requests at once, with DDTREE's default."""
        return self.max_requests or DEFAULT_MAX_REQUESTS

    @property
    def gpu_memory_bytes(self) -> int | None:
        """Memory of each GPU where it was given."""
        return None if self.gpu_memory_gb is None else round(self.gpu_memory_gb * GIB)


def flag_name(name: str) -> str:
    return f"--{name.replace('_', '-')}"
