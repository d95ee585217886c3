"""Where SGLang's releases differ, as probes of what the installed one has; no other module asks.

But for `server_args.target_config`: it runs before there is a model, and what this module imports is for
processes that run one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func
from sglang.srt.layers import logprob_processor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative import spec_utils
from torch import Tensor

# 0.5.22 plans an iteration's KV locations once, for all pools.
HAS_KV_LOC_PLAN = "kv_loc_plan" in ForwardBatch.__dataclass_fields__
HAS_OUTPUT_STRIDE = "speculative_output_stride" in GenerationBatchResult.__dataclass_fields__
SUPPORTS_LOGPROBS = hasattr(logprob_processor, "compute_spec_logprobs")


def draft_settings(block_size: int) -> contextlib.AbstractContextManager[Any]:
    """While the drafter and its backends are built, a block is all there is to verify, as in DFLASH."""
    manager: contextlib.AbstractContextManager[Any] = get_spec().override(**_draft_values(block_size))
    return manager


def base_worker_arguments(server_args: Any, block_size: int, parallel_state: Any) -> dict[str, Any]:
    """Arguments of `DFlashWorkerV2` that depend on the release.

    To 0.5.20 the worker is given the parallel state. To 0.5.18 it takes its block size from the server
    arguments, and in 0.5.19 a copy of them does no harm; later ones are a struct that refuses the write.
    """
    if parallel_state is None:
        return {"server_args": server_args}
    if not dataclasses.is_dataclass(server_args):
        return {"server_args": server_args, "ps": parallel_state}
    draft_args = copy.deepcopy(server_args)
    for name, value in _draft_values(block_size).items():
        object.__setattr__(draft_args, name, value)  # the arguments are read-only after start-up
    return {"server_args": draft_args, "ps": parallel_state}


def _draft_values(block_size: int) -> dict[str, int]:
    return {"speculative_num_draft_tokens": block_size, "speculative_eagle_topk": 1}


def tensor_parallel_group() -> Any:
    """SGLang's tensor-parallel `GroupCoordinator`."""
    return get_parallel().tp_group


def sampling_backend() -> str:
    """The resolved `--sampling-backend`."""
    return str(get_exec().kernel.sampling_backend)


def draft_scope(worker: Any) -> contextlib.AbstractContextManager[Any]:
    """The parallel layout in which the drafter runs, as DFLASH enters it; to 0.5.19 it has none."""
    known = worker.__dict__
    scope: contextlib.AbstractContextManager[Any]
    if "draft_parallel_layout" in known:
        scope = spec_utils.draft_tp_context(worker.draft_parallel_layout)
    elif "draft_tp_context" in known:  # 0.5.20 and 0.5.21 hold the function, or one that does nothing
        group = worker.draft_model_runner.tp_group
        if "draft_owns_attention" in known:
            scope = worker.draft_tp_context(group, owns_attention=worker.draft_owns_attention)
        else:
            scope = worker.draft_tp_context(group)
    elif "draft_owns_attention" in known:
        scope = spec_utils.draft_tp_context(worker.draft_owns_attention)
    else:
        scope = contextlib.nullcontext()
    return scope


def gather_verify_logits(worker: Any) -> None:
    """Have the target gather the logits of verify passes by itself.

    From 0.5.23 on DFLASH defers it, to take the argmax of the shards where that is enough.
    """
    processor = worker.__dict__.get("_target_logits_processor")
    if processor is not None:
        processor.defer_verify_gather = False
        worker._target_logits_processor = None


def request_slot(req: Any) -> int:
    """The row of the request pool that `req` has; on its KV record from 0.5.19 on."""
    kv = req.kv
    return int(kv.req_pool_idx if hasattr(kv, "req_pool_idx") else req.req_pool_idx)


def reserved_kv_lens(draft_input: Any) -> tuple[Tensor | None, int | None]:
    """Upper bounds of the requests' KV lengths on the host, [bs], and their sum."""
    if hasattr(draft_input, "nxt_kv_lens_cpu"):
        return draft_input.nxt_kv_lens_cpu, draft_input.nxt_kv_lens_sum
    return draft_input.reserved_seq_lens_cpu, draft_input.reserved_seq_lens_sum


class KVWindow:
    """The KV slots of a round: W a request, behind its committed prefix; the draft block takes the first.

    Args:
        worker: the speculative worker.
        batch: the running batch; its `seq_lens` [bs] are the committed lengths.
        num_verify_tokens: slots a request.
    """

    def __init__(self, worker: Any, batch: Any, num_verify_tokens: int) -> None:
        self.worker = worker
        self._batch = batch
        self._width = num_verify_tokens
        self._slots: Tensor | None = None
        self.plan: Any = None
        if HAS_KV_LOC_PLAN:
            seq_lens_cpu = batch.seq_lens_cpu
            self.plan = worker.model_runner.kv_index_translator.plan(
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=reserved_kv_lens(batch.spec_info)[0] if seq_lens_cpu is None else seq_lens_cpu,
                write_virtual=self.slots.view(-1),
                read_extent=num_verify_tokens,
            )

    @property
    def slots(self) -> Tensor:
        """All slots, [bs, W] int64."""
        if self._slots is None:
            batch = self._batch
            self._slots = assign_extend_cache_locs_uniform_func(
                req_pool_indices=batch.req_pool_indices,
                req_to_token=self.worker.model_runner.req_to_token_pool.req_to_token,
                start_offset=batch.seq_lens,
                batch_size=len(batch.req_pool_indices),
                draft_token_num=self._width,
                device=batch.seq_lens.device,
            ).view(-1, self._width)
        return self._slots

    def found(self, slots: Tensor) -> None:
        """Take the slots [bs * W] that SGLang has looked up itself."""
        if self._slots is None:
            self._slots = slots.view(-1, self._width)

    def draft_slots(self, count: int) -> Tensor:
        """The first `count` slots of each request as the draft pool names them, [bs * count] int64."""
        if self.plan is not None:
            translator = self.worker.draft_model_runner.kv_index_translator
            slots: Tensor = self.plan.write_ids(translator, cols=slice(0, count))
            return slots
        if self._slots is None and self._batch.seq_lens.is_cuda:
            # The kernel that wrote the block's tokens has looked them up.
            found: Tensor = self.worker._draft_verify_out_cache_loc_buf[: len(self._batch.seq_lens)]
            return found.view(-1)
        return self.slots[:, :count].reshape(-1)

    def bind_draft(self, forward_batch: Any, block_size: int) -> None:
        """Let the draft pass write the first `block_size` slots of each request."""
        if self.plan is not None:
            translator = self.worker.draft_model_runner.kv_index_translator
            self.plan.bind(forward_batch, translator, cols=slice(0, block_size))

    def verify_fields(self) -> dict[str, Any]:
        """Fields of the verify input that carry the window."""
        if self.plan is None:
            return {}
        return {"prepared_out_cache_loc": self.slots.view(-1), "kv_loc_plan": self.plan}


def block_embeddings(worker: Any, block_tokens: Tensor) -> Tensor:
    """The drafter's input for `block_tokens` [bs, block]: embeddings [bs * block, hidden_size]."""
    full_embedding = worker.__dict__.get("_full_embed_gpu")
    if full_embedding is not None:
        embeddings = torch.nn.functional.embedding(block_tokens, full_embedding)
    else:
        embeddings = worker.model_runner.model.get_input_embeddings()(block_tokens)
    scale = worker.__dict__.get("_noise_embed_scale", 1.0)
    if scale != 1.0:
        embeddings = embeddings * scale
    return embeddings.view(-1, embeddings.shape[-1])


def draft_batch_fields(batch: Any, num_tokens: int, device: Any) -> dict[str, Any]:
    """Fields of the draft pass's `ForwardBatch` that only some releases have."""
    fields: dict[str, Any] = {}
    known = ForwardBatch.__dataclass_fields__
    if "can_run_decode_cuda_graph" in known:
        fields["can_run_decode_cuda_graph"] = batch.can_run_decode_cuda_graph
    if "global_num_token_non_padded_cpu" in known:
        from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded

        fields["global_num_token_non_padded_cpu"] = num_tokens
        if enable_num_token_non_padded():
            fields["num_token_non_padded"] = torch.full((), num_tokens, dtype=torch.int32, device=device)
    return fields


def write_logprobs(batch: Any, logits_output: Any, target_tokens: Tensor, accept_index: Tensor) -> None:
    """Fill in the log-probabilities of the accepted tokens, where the release can (0.5.18 and later).

    `target_tokens` is [bs * W], `accept_index` [bs, draft_depth + 1] with rows of the flat logits.
    """
    logprob_processor.compute_spec_logprobs(batch, logits_output, target_tokens, accept_index=accept_index)


def result_widths(num_verify_tokens: int, block_size: int) -> dict[str, int]:
    """Fields that say how the result's rows are laid out; without a stride the width is the stride."""
    if HAS_OUTPUT_STRIDE:
        return {"speculative_num_draft_tokens": num_verify_tokens, "speculative_output_stride": block_size}
    return {"speculative_num_draft_tokens": block_size}


def cast_draft_inputs(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """The drafter's `forward` with inputs in `dtype`: SGLang's eager pass makes them bfloat16."""

    def forward_in_dtype(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("input_embeds") is not None:
            kwargs["input_embeds"] = kwargs["input_embeds"].to(dtype)
        return forward(*args, **kwargs)

    return forward_in_dtype
