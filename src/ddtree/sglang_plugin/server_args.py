"""What DDTREE makes of SGLang's server arguments before a server starts.

SGLang calls both functions while it resolves its arguments: on the record itself up to 0.5.19, from 0.5.20 on
a stand-in that turns plain assignments into resolved values. So all reads come before the first assignment.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang.srt.arg_groups import overrides
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import is_hybrid_swa_model
from sglang.srt.environ import envs
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.utils.hf_transformers_utils import get_config

from ddtree.config import PluginConfig
from ddtree.errors import ConfigError
from ddtree.sglang_plugin.server_refusals import (
    DRAFT_BACKENDS,
    TEST_BACKEND_PREFIX,
    Launch,
    adaptive_refusal,
    dependent_head,
    is_dflash,
    refusals,
)
from ddtree.sglang_plugin.settings import plugin_config
from ddtree.sglang_plugin.verify_mask import TREE_TOPK

logger = logging.getLogger(__name__)

# DFLASH's own default, kept so that both algorithms size their pools alike.
DEFAULT_MAX_RUNNING_REQUESTS = 48
NUM_STEPS = 1


def validate_server_args(server_args: Any) -> None:
    """Refuse what SGLang would switch off by itself before `handle_server_args` (`ConfigError`)."""
    reason = adaptive_refusal(overrides.resolved_view(server_args))
    raise_refusals([reason] if reason else [])


def handle_server_args(server_args: Any) -> None:
    """Refuse what DDTREE does not run with, then assign the block, the verify width and their like.

    Raises:
        ConfigError: with every reason, each naming what to use instead.
    """
    config = plugin_config()
    launch = inspect_launch(server_args, config)
    raise_refusals(refusals(launch))
    values = resolved_values(launch)
    for name, value in values.items():
        setattr(server_args, name, value)
    logger.info("%s", start_line(launch, config, values["max_running_requests"]))


def raise_refusals(reasons: list[str]) -> None:
    if reasons:
        raise ConfigError("DDTREE cannot start:" + "".join(f"\n  - {reason}" for reason in reasons))


def inspect_launch(server_args: Any, config: PluginConfig) -> Launch:
    """Gather what the refusals look at."""
    args = overrides.resolved_view(server_args)
    target = target_config(server_args)
    drafter = drafter_config(args)
    block_size = drafter_block_size(args, drafter)
    return Launch(
        args=args,
        block_size=block_size,
        verify_width=None if block_size is None else config.verify_width(block_size),
        verify_backend=verify_backend(args),
        attention_arch=target.attention_arch.name,
        is_hybrid=mambaish_config(target) is not None,
        has_sliding_window=has_sliding_window(target),
        has_attention_sinks=bool(target.has_attention_sinks),
        context_length=int(target.context_len),
        vocab_size=int(target.vocab_size),
        drafter=drafter.to_dict() if drafter is not None else {},
        simulated_accept_length=float(envs.SGLANG_SIMULATE_ACC_LEN.get()),
        has_hnd_kv_cache=bool(envs.SGLANG_USE_HND_KVCACHE.get()),
    )


def target_config(server_args: Any) -> Any:
    """SGLang's `ModelConfig` of the target, which it made earlier; a function from 0.5.19 on."""
    if hasattr(overrides, "model_config_of"):
        return overrides.model_config_of(server_args)
    return server_args.get_model_config()


def drafter_config(args: Any) -> Any:
    """The drafter's Hugging Face config, None where no drafter is named; SGLang has read it once before."""
    path = args.speculative_draft_model_path
    if not path:
        return None
    given = (args.decrypted_draft_config_file or "").strip()
    kwargs = {"_configuration_file": given} if given else {}
    revision = args.speculative_draft_model_revision
    return get_config(path, trust_remote_code=args.trust_remote_code, revision=revision, **kwargs)


def drafter_block_size(args: Any, drafter: Any) -> int | None:
    """The flag's block size, else the drafter's own; a drafter that is refused anyway is not parsed."""
    if args.speculative_dflash_block_size is not None:
        return int(args.speculative_dflash_block_size)
    if drafter is None or dependent_head(drafter.to_dict()) or not is_dflash(drafter.to_dict()):
        return None
    block_size = parse_dflash_draft_config(draft_hf_config=drafter).resolve_block_size(default=None)
    return None if block_size is None else int(block_size)


def verify_backend(args: Any) -> str | None:
    """The attention backend of verify passes; of a pair, the one that SGLang's hybrid backend picks."""
    prefill, decode = overrides.attention_backends_of(args)
    backend: str | None = decode if args.speculative_attention_mode == "decode" else prefill
    return backend


def has_sliding_window(target: Any) -> bool:
    """Whether some layers of the target see a window or a chunk only, whatever pool they are kept in."""
    if is_hybrid_swa_model(target.hf_config.architectures, target.hf_text_config):
        return True
    layer_types = getattr(target.hf_text_config, "layer_types", None) or ()
    return any(name in ("sliding_attention", "chunked_attention") for name in layer_types)


def resolved_values(launch: Launch) -> Mapping[str, Any]:
    """The server arguments that DDTREE decides, each with a warning where it overrules the user."""
    args = launch.args
    values: dict[str, Any] = {
        "speculative_dflash_block_size": launch.block_size,
        "speculative_num_draft_tokens": launch.verify_width,
        "speculative_num_steps": NUM_STEPS,
        "speculative_eagle_topk": TREE_TOPK,
        "speculative_draft_attention_backend": draft_backend(launch),
        "max_running_requests": args.max_running_requests or DEFAULT_MAX_RUNNING_REQUESTS,
    }
    for name in ("speculative_num_steps", "speculative_eagle_topk"):
        if getattr(args, name) not in (None, values[name]):
            logger.warning("--%s is not used by DDTREE: its tree follows node_budget", name.replace("_", "-"))
    if args.max_running_requests is None:
        logger.warning("--max-running-requests is set to %d, as for DFLASH", DEFAULT_MAX_RUNNING_REQUESTS)
    if args.enable_mixed_chunk:
        values["enable_mixed_chunk"] = False
        logger.warning("--enable-mixed-chunk is switched off: a mixed batch has no verify window")
    if str(args.device) == "cpu" and not args.disable_overlap_schedule:
        values["disable_overlap_schedule"] = True
        logger.warning("overlap scheduling is switched off: SGLang has none on the CPU with speculation")
    return values


def draft_backend(launch: Launch) -> str | None:
    """The drafter's attention backend: the flag's, else as for DFLASH the prefill one, else the target's."""
    given = launch.args.speculative_draft_attention_backend
    if given is not None:
        return str(given)
    prefill, _ = overrides.attention_backends_of(launch.args)
    is_usable = prefill in DRAFT_BACKENDS or str(prefill).startswith(TEST_BACKEND_PREFIX)
    return prefill if is_usable else launch.verify_backend


def start_line(launch: Launch, config: PluginConfig, max_requests: int) -> str:
    """One line on what was decided, with what a verify pass of all requests takes."""
    width = launch.verify_width or 0
    mask_bytes = max_requests * width * (launch.context_length + width)
    logits_bytes = max_requests * width * launch.vocab_size * 4
    counts_bytes = max_requests * launch.vocab_size * 4
    return (
        f"DDTREE: block {launch.block_size}, node budget {config.node_budget}, verify width {width}, "
        f"{config.num_candidates} candidates a position, mode {config.mode}, "
        f"attention backend {launch.verify_backend}; at {max_requests} requests up to "
        f"{mask_bytes / 2**20:.0f} MiB of verify mask and {logits_bytes / 2**20:.0f} MiB of float32 logits, "
        f"and {counts_bytes / 2**20:.0f} MiB of token counts once a request has penalties"
    )
