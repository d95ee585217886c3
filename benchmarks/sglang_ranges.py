"""An SGLang plugin that names the steps of a round in profiler traces, for DFLASH and DDTREE alike.

It changes nothing until a profiler starts in the process; then the methods below record ranges.
`profile_sglang_round` loads it into the engines that it measures.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

PREFIX = "round: "
Label = str | Callable[[Any], str]


def _pass_label(runner: Any) -> str:
    return "draft pass" if runner.is_draft_worker else "target pass"


# (module, class, method, label): the innermost range around a kernel's launch names its step.
DFLASH = ("sglang.srt.speculative.dflash_worker_v2", "DFlashWorkerV2")
DDTREE = ("ddtree.sglang_plugin.worker_v2", "DDTreeWorkerV2")
RANGES: tuple[tuple[str, str, str, Label], ...] = (
    ("sglang.srt.model_executor.model_runner", "ModelRunner", "forward", _pass_label),
    (*DFLASH, "forward_batch_generation", "rest of the round"),
    (*DFLASH, "_append_target_hidden_to_draft_kv_by_loc", "draft KV write"),
    (*DDTREE, "forward_batch_generation", "rest of the round"),
    (*DDTREE, "_draft", "before the draft pass"),
    (*DDTREE, "_verify", "before the target pass"),
    (*DDTREE, "_verify_mask", "mask"),
    (*DDTREE, "_choose", "choice"),
    (*DDTREE, "_commit_path", "commit"),
    (*DDTREE, "_record", "counts and logprobs"),
    ("ddtree.sglang_plugin.kv_move", "KVMover", "move", "KV move"),
)


def ranged(function: Callable[..., Any], label: Label) -> Callable[..., Any]:
    """A method that records a range around itself."""
    import torch

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = label if isinstance(label, str) else label(self)
        with torch.profiler.record_function(PREFIX + name):
            return function(self, *args, **kwargs)

    return wrapper


def wrap_loaded() -> list[str]:
    """Wrap the methods above of the modules that are loaded; what was wrapped."""
    wrapped = []
    for module, owner, method, label in RANGES:
        holder = getattr(sys.modules.get(module), owner, None)
        # An inherited method would be wrapped twice, and a release may lack one.
        if holder is not None and method in vars(holder):
            setattr(holder, method, ranged(vars(holder)[method], label))
            wrapped.append(f"{owner}.{method}")
    return wrapped


def register() -> None:
    """Entry point: wrap the methods when the first profiler starts, by when all modules are loaded."""
    import torch

    # The profiler has no hook for its start, so the method is replaced, which mypy is told below.
    start = torch.profiler.profile.start

    @functools.wraps(start)
    def start_with_ranges(profiler: Any) -> Any:
        torch.profiler.profile.start = start  # type: ignore[method-assign]
        print("ranges:", *wrap_loaded(), flush=True)
        return start(profiler)

    torch.profiler.profile.start = start_with_ranges  # type: ignore[method-assign]
