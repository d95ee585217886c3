"""The tests' own SGLang plugin, beside the one under test: a CPU backend with a tree mask, and records.

SGLang finds it by its entry point, where `sglang_kit/doubles` is on PYTHONPATH.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang_kit.files import FOLDER_VARIABLE, POOL_FILE, append_line

BACKEND_NAME = "ddtree_cpu"
STOCK_DFLASH_VARIABLE = "DDTREE_TEST_STOCK_DFLASH"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def register() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices, add_draft_attention_backend_choices

    add_attention_backend_choices([BACKEND_NAME])
    add_draft_attention_backend_choices([BACKEND_NAME])
    register_attention_backend(BACKEND_NAME)(make_backend)
    if STOCK_DFLASH_VARIABLE in os.environ:
        from sglang_kit.stock_dflash import allow_stock_dflash

        allow_stock_dflash()
    HookRegistry.register(f"{SCHEDULER}.__init__", attach, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.flush_cache", write_pools, HookType.BEFORE)


def make_backend(runner: Any) -> Any:
    from sglang_kit.attention import TreeMaskAttnBackend

    return TreeMaskAttnBackend(runner)


def attach(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Record the rounds of a scheduler whose worker is the plugin's; let SGLang's own run on the CPU."""
    worker = scheduler.draft_worker
    if type(worker).__name__ == "DDTreeWorkerV2":
        if FOLDER_VARIABLE in os.environ:
            from sglang_kit.recorder import RoundRecorder

            RoundRecorder(worker, Path(os.environ[FOLDER_VARIABLE]))
    elif worker is not None and STOCK_DFLASH_VARIABLE in os.environ:
        from sglang_kit.stock_dflash import cast_draft_inputs

        cast_draft_inputs(worker)


def write_pools(scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Write down what of the pools is free or can be given back, before a flush of an idle scheduler."""
    if FOLDER_VARIABLE not in os.environ or not scheduler.is_fully_idle():
        return
    slots, rows = scheduler.token_to_kv_pool_allocator, scheduler.req_to_token_pool
    line = {
        "free_slots": slots.available_size() + scheduler.tree_cache.evictable_size(),
        "slots": slots.size,
        "free_rows": rows.available_size(),
        "rows": rows.size,
    }
    append_line(Path(os.environ[FOLDER_VARIABLE]) / POOL_FILE, line)
