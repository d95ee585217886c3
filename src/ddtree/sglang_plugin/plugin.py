"""The entry point that SGLang runs in each of its processes: it registers DDTREE and its two hooks.

SGLang only logs what a plugin raises, so a refusal is shown on standard error as well; later SGLang says
"Unknown speculative algorithm name". Nothing is logged here besides, since SGLang's log has it.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from ddtree.errors import ConfigError, DDTreeError
from ddtree.sglang_plugin import contract
from ddtree.sglang_plugin.settings import pin_config, plugin_config

logger = logging.getLogger(__name__)

DUMMY_VERIFY_INPUT = "sglang.srt.speculative.spec_info.create_dummy_verify_input"
ROW_HEADROOM = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"


@cache
def register() -> None:
    """Register DDTREE with SGLang, once a process.

    Raises:
        DDTreeError: the settings are wrong, or this SGLang cannot be read or does not keep the hook contract.
    """
    try:
        config = plugin_config()
    except ConfigError as error:
        raise refusal(f"DDTREE was not registered, its settings are wrong.\n{error}") from None
    try:
        report = contract.check_installed()
    except ConfigError as error:
        raise refusal(f"DDTREE was not registered, this SGLang cannot be checked.\n{error}") from None
    if not report.is_ok:
        raise refusal(f"DDTREE was not registered, this SGLang is not as it expects.\n{report.text}")
    for warning in report.warnings:
        logger.warning("DDTREE: %s", warning)
    pin_config(config, os.environ)
    register_algorithm()
    register_hooks()


def register_algorithm() -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from ddtree.sglang_plugin.spec_algo import NAME, DDTreeSpecAlgo, load_worker, validate_server_args

    SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=validate_server_args, spec_class=DDTreeSpecAlgo
    )(load_worker)


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(DUMMY_VERIFY_INPUT, around_dummy_verify_input, HookType.AROUND)
    HookRegistry.register(ROW_HEADROOM, after_row_headroom, HookType.AFTER)


def around_dummy_verify_input(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The verify input of SGLang's dummy passes: ours where DDTREE runs, else what SGLang makes.

    SGLang's own, made for DFLASH, has no mask and one width for drafter and target.
    """
    from ddtree.sglang_plugin.spec_algo import DDTreeSpecAlgo

    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if not isinstance(given["spec_algorithm"], DDTreeSpecAlgo):
        return original(*args, **kwargs)
    from ddtree.sglang_plugin.info import make_dummy_verify_input

    return make_dummy_verify_input(
        given["custom_mask"], given["num_tokens_per_req"], given["is_draft_worker"]
    )


def after_row_headroom(extra: int, *args: Any, **kwargs: Any) -> int | None:
    """Columns of a token-table row beyond the context length: room for a window opened at its very end.

    Committed tokens lag by up to a block under overlap, the reserve is a window and a block, and allocation
    rounds up to a page. None leaves SGLang's number alone.
    """
    from sglang.srt.runtime_context import get_schedule, get_spec

    from ddtree.sglang_plugin.spec_algo import NAME

    spec = get_spec()
    if spec.speculative_algorithm != NAME:
        return None
    block_size = int(spec.speculative_dflash_block_size)
    width = plugin_config().verify_width(block_size)
    return max(extra, width + 2 * block_size + int(get_schedule().page_size))


def refusal(text: str) -> DDTreeError:
    """Say loudly why DDTREE is not there; the error to raise."""
    show_framed(text)
    return DDTreeError(text)


@cache
def show_framed(text: str) -> None:
    """Print a text in a frame on standard error, once a process however often it is asked to."""
    frame = "=" * 80
    print(f"{frame}\n{text}\n{frame}", file=sys.stderr, flush=True)
