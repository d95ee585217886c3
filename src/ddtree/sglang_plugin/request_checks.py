"""What a request may ask for that DDTREE cannot honour: it ends with the reason, never served without."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any


def abort_refused_requests(reqs: Iterable[Any], *, supports_logprobs: bool) -> None:
    """End each request of a prefill, SGLang's `Req`, that cannot be served: its client gets a 400."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    for req in reqs:
        reason = request_refusal(req, supports_logprobs=supports_logprobs)
        if reason is not None and req.to_finish is None:
            req.to_finish = FINISH_ABORT(reason, HTTPStatus.BAD_REQUEST, "BadRequestError")


def request_refusal(req: Any, *, supports_logprobs: bool) -> str | None:
    """Why a request, SGLang's `Req`, cannot be served, or None.

    `supports_logprobs`: this SGLang returns logprobs of speculative rounds (from 0.5.18 on, 0.5.17 refuses).
    """
    if req.custom_logit_processor:
        return told("custom_logit_processor", "use logit_bias, penalties or a grammar")
    if req.return_hidden_states:
        return told("return_hidden_states", "ask a server without speculation for them")
    if req.lora_id is not None:
        return told("LoRA adapters (lora_path)", "merge the adapter into the target")
    if req.return_logprob and not supports_logprobs:
        return told("return_logprob in this SGLang", "use SGLang 0.5.18 or later")
    if req.return_sampling_mask:
        return told("return_sampling_mask", "leave it out")
    # These are captured by KV slot, and an accept path's KV moves to other slots.
    if req.return_routed_experts or req.return_indexer_topk:
        return told("return_routed_experts and return_indexer_topk", "leave them out")
    return version_dependent_refusal(req)


def version_dependent_refusal(req: Any) -> str | None:
    """Refusals of what only some versions know: beam search from 0.5.19, watermarks from 0.5.22."""
    if getattr(req, "beam_group", None) is not None:
        return told("beam search (beam_width)", "sample with n instead")
    if getattr(req.sampling_params, "watermark", None) is not None:
        return told("watermark", "leave it out")
    return None


def told(feature: str, remedy: str) -> str:
    return f"DDTREE speculative decoding does not support {feature}: {remedy}."
