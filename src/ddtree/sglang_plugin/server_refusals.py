"""What DDTREE does not run with: functions that return a reason with its remedy, or None.

They look at a `Launch`, plain values gathered by `server_args.py`, so that none of them imports SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

VERIFY_BACKENDS = ("triton", "flashinfer", "fa3")
DRAFT_BACKENDS = ("triton", "flashinfer", "fa3", "fa4")
# Test doubles register their attention backends under such names.
TEST_BACKEND_PREFIX = "ddtree_"
MIN_BLOCK_SIZE = 2
DRAFTER_CLASS_PART = "DFlash"
# DFlash classes of SGLang whose names do not say so.
OTHER_DRAFTER_CLASSES = ("MuseGlimmerAssistantModel",)
# Storage that keeps no scales beside the rows, so that moving a token's rows moves all of its KV.
PLAIN_KV_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
CHAIN_ONLY = "verifies chains only: it does not read a tree mask"
NO_MASK = "has no tree mask"
UNTESTED = "was never tested with a tree mask"
UNFIT_BACKENDS = {
    "trtllm_mha": CHAIN_ONLY,
    "trtllm_mla": CHAIN_ONLY,
    "flashinfer_mla": CHAIN_ONLY,
    "cutedsl_mla": CHAIN_ONLY,
    "tokenspeed_mla": CHAIN_ONLY,
    "flashmla": CHAIN_ONLY,
    "cutlass_mla": CHAIN_ONLY,
    "dsa": CHAIN_ONLY,
    "nsa": CHAIN_ONLY,
    "dsv4": CHAIN_ONLY,
    "torch_native": NO_MASK,
    "flex_attention": NO_MASK,
    "dual_chunk_flash_attn": NO_MASK,
    "fa4": "takes a tree mask at page size 1 only, and was never tested with one",
    "aiter": UNTESTED,
    "wave": UNTESTED,
    "intel_amx": UNTESTED,
    "intel_xpu": UNTESTED,
    "ascend": UNTESTED,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """What a server is about to start with.

    Attributes:
        args: SGLang's server arguments as resolved so far; read with `flag`, as fields differ by version.
        block_size: the drafter's block, None where neither its config nor a flag says it.
        verify_width: tokens of a request in a verify pass, None with `block_size`.
        verify_backend: the attention backend of the target's verify passes.
        attention_arch: the target's kind of attention: MHA (GQA too), MLA, SSM.
        is_hybrid: the target has linear-attention or state-space layers.
        has_sliding_window: the target has sliding-window or chunked layers.
        has_attention_sinks: the target adds sinks to the softmax.
        context_length: of the target, in tokens.
        vocab_size: of the target.
        drafter: the drafter's config, empty where no drafter is named.
        simulated_accept_length: SGLANG_SIMULATE_ACC_LEN; 0 or less is off.
        has_hnd_kv_cache: SGLANG_USE_HND_KVCACHE.
    """

    args: Any
    block_size: int | None
    verify_width: int | None
    verify_backend: str | None
    attention_arch: str
    is_hybrid: bool
    has_sliding_window: bool
    has_attention_sinks: bool
    context_length: int
    vocab_size: int
    drafter: Mapping[str, Any]
    simulated_accept_length: float
    has_hnd_kv_cache: bool


def refusals(launch: Launch) -> list[str]:
    """Every reason why DDTREE cannot start."""
    return [reason for check in CHECKS if (reason := check(launch)) is not None]


def adaptive_refusal(args: Any) -> str | None:
    """A refusal of its own, since SGLang switches the flag off before the others are asked."""
    if not args.speculative_adaptive:
        return None
    return "--speculative-adaptive changes the step count of EAGLE chains: leave it out, set node_budget"


def flag(launch: Launch, name: str, default: Any = None) -> Any:
    """A server argument, or the default in a version without it."""
    return getattr(launch.args, name, default)


def drafter_path_refusal(launch: Launch) -> str | None:
    if flag(launch, "speculative_draft_model_path"):
        return None
    return "no drafter: name a DFlash checkpoint with --speculative-draft-model-path"


def device_refusal(launch: Launch) -> str | None:
    device = str(flag(launch, "device"))
    if device.split(":")[0] in ("cuda", "cpu"):
        return None
    return f"--device {device} is not supported: use cuda"


def block_refusal(launch: Launch) -> str | None:
    if not launch.drafter or dependent_head(launch.drafter) or not is_dflash(launch.drafter):
        return None
    if launch.block_size is None:
        return "the drafter's config has no block_size: give it with --speculative-dflash-block-size"
    if launch.block_size < MIN_BLOCK_SIZE:
        return (
            f"block size {launch.block_size} is not allowed: a block is the root and at least one draft "
            f"position; give {MIN_BLOCK_SIZE} or more with --speculative-dflash-block-size, or leave it out"
        )
    return None


def width_flag_refusal(launch: Launch) -> str | None:
    given = flag(launch, "speculative_num_draft_tokens")
    if given in (None, launch.verify_width):
        return None
    return (
        f"--speculative-num-draft-tokens {given} is not used: the width comes from node_budget in "
        "DDTREE_CONFIG, such as DDTREE_CONFIG='{\"node_budget\": 31}'; leave the flag out"
    )


def verify_backend_refusal(launch: Launch) -> str | None:
    backend = launch.verify_backend
    if backend in VERIFY_BACKENDS or str(backend).startswith(TEST_BACKEND_PREFIX):
        return None
    why = UNFIT_BACKENDS.get(str(backend), "is not known to read a tree mask")
    return (
        f"attention backend {backend} {why}; verify passes need --attention-backend triton, flashinfer or "
        "fa3 (where prefill and decode differ, --speculative-attention-mode says which of them verifies)"
    )


def draft_backend_refusal(launch: Launch) -> str | None:
    backend = flag(launch, "speculative_draft_attention_backend")
    if backend is None or backend in DRAFT_BACKENDS or str(backend).startswith(TEST_BACKEND_PREFIX):
        return None
    return (
        f"--speculative-draft-attention-backend {backend} was never tested with a DFlash block: "
        f"use one of {', '.join(DRAFT_BACKENDS)}, or leave it out"
    )


def pipeline_refusal(launch: Launch) -> str | None:
    if flag(launch, "pp_size", 1) == 1:
        return None
    return f"--pp-size {flag(launch, 'pp_size')}: pipeline parallelism is not supported; use --tp-size"


def dp_attention_refusal(launch: Launch) -> str | None:
    if not flag(launch, "enable_dp_attention") and flag(launch, "attn_dp_size", 1) == 1:
        return None
    return "attention data parallelism is not supported: use --tp-size, or --dp-size alone for replicas"


def context_parallel_refusal(launch: Launch) -> str | None:
    for name in ("attn_cp_size", "dcp_size"):
        if (size := flag(launch, name, 1)) > 1:
            return f"--{name.replace('_', '-')} {size}: context parallelism is not supported; use --tp-size"
    return None


def disaggregation_refusal(launch: Launch) -> str | None:
    mode = flag(launch, "disaggregation_mode", "null")
    if mode == "null":
        return None
    return f"--disaggregation-mode {mode} is not supported: serve prefill and decode in one process"


def accept_threshold_refusal(launch: Launch) -> str | None:
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if (value := flag(launch, name, 1.0)) != 1.0:
            return (
                f"--{name.replace('_', '-')} {value} would change what the model says: "
                "DDTREE is lossless; leave it at 1"
            )
    return None


def rejection_sampling_refusal(launch: Launch) -> str | None:
    if not flag(launch, "speculative_use_rejection_sampling"):
        return None
    return (
        "--speculative-use-rejection-sampling is for sampled drafts; a draft tree is deterministic, and "
        "following the target's own draws accepts as much as any lossless rule: leave the flag out"
    )


def simulated_accept_refusal(launch: Launch) -> str | None:
    if launch.simulated_accept_length <= 0:
        return None
    return (
        f"SGLANG_SIMULATE_ACC_LEN={launch.simulated_accept_length:g} commits tokens that the target did not "
        "choose: unset it"
    )


def draft_window_refusal(launch: Launch) -> str | None:
    if (window := flag(launch, "speculative_draft_window_size")) is None:
        return None
    return f"--speculative-draft-window-size {window}: the compact draft cache is not supported; leave it out"


def lora_refusal(launch: Launch) -> str | None:
    if not flag(launch, "enable_lora") and not flag(launch, "lora_paths"):
        return None
    return "LoRA adapters are not supported: leave out --enable-lora and --lora-paths, or merge the adapter"


def deterministic_refusal(launch: Launch) -> str | None:
    if not flag(launch, "enable_deterministic_inference"):
        return None
    return (
        "--enable-deterministic-inference takes another attention kernel, which reads mask cells that DDTREE "
        "does not write: leave it out; a request with a sampling_seed gets the same draws in any batch"
    )


def batch_overlap_refusal(launch: Launch) -> str | None:
    if not flag(launch, "enable_two_batch_overlap"):
        return None
    return "--enable-two-batch-overlap splits a verify pass, which is not supported: leave it out"


def pdmux_refusal(launch: Launch) -> str | None:
    if not flag(launch, "enable_pdmux"):
        return None
    return (
        "--enable-pdmux runs prefill and decode on streams of its own, which is not supported: leave it out"
    )


def unified_memory_refusal(launch: Launch) -> str | None:
    if not flag(launch, "enable_unified_memory") and not flag(launch, "enable_page_major_kv_layout"):
        return None
    return (
        "--enable-unified-memory and --enable-page-major-kv-layout store KV in a layout in which an accept "
        "path cannot be moved: leave them out"
    )


def hisparse_refusal(launch: Launch) -> str | None:
    if not flag(launch, "enable_hisparse"):
        return None
    return "--enable-hisparse keeps KV outside of the pool in which accept paths are moved: leave it out"


def replayssm_refusal(launch: Launch) -> str | None:
    for name in ("enable_linear_replayssm", "enable_linear_replayssm_spec"):
        if flag(launch, name):
            return f"--{name.replace('_', '-')} replays chains only: leave it out"
    return None


def kv_dtype_refusal(launch: Launch) -> str | None:
    dtype = flag(launch, "kv_cache_dtype", "auto")
    if dtype in PLAIN_KV_DTYPES:
        return None
    return (
        f"--kv-cache-dtype {dtype} keeps scales apart from the KV, which would not move with an accept path: "
        f"use one of {', '.join(PLAIN_KV_DTYPES)}"
    )


def kv_layout_refusal(launch: Launch) -> str | None:
    if not launch.has_hnd_kv_cache:
        return None
    return "SGLANG_USE_HND_KVCACHE=1: accept paths cannot be moved in the HND layout; unset it"


def mla_refusal(launch: Launch) -> str | None:
    if launch.attention_arch == "MHA" or launch.is_hybrid:
        return None
    return (
        f"the target has {launch.attention_arch} attention, which is not supported yet: "
        "use --speculative-algorithm DFLASH"
    )


def hybrid_refusal(launch: Launch) -> str | None:
    if not launch.is_hybrid:
        return None
    return (
        "the target has linear-attention or state-space layers (GDN, Mamba, KDA), whose states are not moved "
        "along a tree yet: use --speculative-algorithm DFLASH"
    )


def sliding_window_refusal(launch: Launch) -> str | None:
    if not launch.has_sliding_window:
        return None
    return (
        "the target has sliding-window or chunked layers, for which no backend is known to be exact with a "
        "tree: triton counts the window in columns of the tree and not in positions, flashinfer reads the "
        "wrong end of the cache, fa3 counts attention sinks twice; use --speculative-algorithm DFLASH"
    )


def attention_sinks_refusal(launch: Launch) -> str | None:
    if not launch.has_attention_sinks or launch.verify_backend != "fa3":
        return None
    return "the target has attention sinks, which fa3 counts twice for a tree: use --attention-backend triton"


def drafter_kind_refusal(launch: Launch) -> str | None:
    if not launch.drafter or dependent_head(launch.drafter) or is_dflash(launch.drafter):
        return None
    kind = ", ".join(launch.drafter.get("architectures") or ()) or "model of unnamed architecture"
    return (
        f"the drafter is a {kind}, not a DFlash checkpoint (such as DFlashDraftModel); name one that was "
        "trained for the target with --speculative-draft-model-path"
    )


def drafter_head_refusal(launch: Launch) -> str | None:
    if (head := dependent_head(launch.drafter)) is None:
        return None
    return (
        f"the drafter has a {head} head: its positions depend on each other, and a draft tree is built from "
        "independent ones; use a plain DFlash drafter, or --speculative-algorithm DFLASH"
    )


def drafter_embedding_refusal(launch: Launch) -> str | None:
    if not launch.drafter.get("has_embed_tokens"):
        return None
    return (
        "the drafter brings its own embedding, which is not supported: use a drafter that shares the "
        "target's, or --speculative-algorithm DFLASH"
    )


def is_dflash(drafter: Mapping[str, Any]) -> bool:
    """Whether a drafter's config names a class that SGLang loads as a DFlash drafter."""
    names = drafter.get("architectures") or ()
    return any(DRAFTER_CLASS_PART in name or name in OTHER_DRAFTER_CLASSES for name in names)


def dependent_head(drafter: Mapping[str, Any]) -> str | None:
    """The head that makes a drafter's positions depend on each other, by its config."""
    config = drafter.get("dflash_config") or {}
    architectures = drafter.get("architectures") or []
    projector = config.get("projector_type", drafter.get("projector_type"))
    if projector == "domino":
        return "Domino"
    if any(name.startswith("LiLiCorr") for name in architectures):
        return "LiLiCorr"
    if any(key.startswith("lilicorr_") for key in config) and config.get("lilicorr_enabled", True):
        return "LiLiCorr"
    if config.get("selector_rank") or config.get("selector_top_k"):
        return "candidate selector (DFlash2)"
    return None


CHECKS: tuple[Callable[[Launch], str | None], ...] = (
    drafter_path_refusal,
    device_refusal,
    block_refusal,
    width_flag_refusal,
    verify_backend_refusal,
    draft_backend_refusal,
    pipeline_refusal,
    dp_attention_refusal,
    context_parallel_refusal,
    disaggregation_refusal,
    accept_threshold_refusal,
    rejection_sampling_refusal,
    simulated_accept_refusal,
    draft_window_refusal,
    lora_refusal,
    deterministic_refusal,
    batch_overlap_refusal,
    pdmux_refusal,
    unified_memory_refusal,
    hisparse_refusal,
    replayssm_refusal,
    kv_dtype_refusal,
    kv_layout_refusal,
    mla_refusal,
    hybrid_refusal,
    sliding_window_refusal,
    attention_sinks_refusal,
    drafter_kind_refusal,
    drafter_head_refusal,
    drafter_embedding_refusal,
)
