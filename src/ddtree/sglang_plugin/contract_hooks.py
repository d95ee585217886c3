"""The table of the hook contract: every symbol of SGLang that the plugin touches.

A release that changes one of them gets a row of its own, and the row before it an end.
"""

from __future__ import annotations

from ddtree.sglang_plugin.contract_rules import (
    Rows,
    callback,
    called,
    fields,
    imported,
    modules,
    or_inherited,
    overridden,
    overridden_properties,
    since,
    until,
)
from ddtree.sglang_plugin.contract_start_hooks import REGISTRATION, SETTINGS

SPECULATIVE = "sglang.srt.speculative"
WORKER = f"{SPECULATIVE}.dflash_worker_v2:DFlashWorkerV2"
DRAFT_INPUT = f"{SPECULATIVE}.dflash_info_v2:DFlashDraftInputV2"
VERIFY_INPUT = f"{SPECULATIVE}.eagle_info:EagleVerifyInput"
TARGET_WORKER = "sglang.srt.managers.tp_worker:TpModelWorker"
MODEL_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
RUNNER_OUTPUT = "sglang.srt.model_executor.model_runner:ModelRunnerOutput"
GRAPH_RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"
GRAPH_CONFIG = "sglang.srt.model_executor.cuda_graph_config"
FORWARD_BATCH = "sglang.srt.model_executor.forward_batch_info"
KV_POOL = "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool"
KV_LOC_PLAN = "sglang.srt.mem_cache.kv_loc_plan:KVLocPlan"
VERIFY_MASK = "sglang.srt.layers.attention.verify_mask:VerifyMask"
VOCABULARY = "sglang.srt.layers.vocab_parallel_embedding"
LOGITS = "sglang.srt.layers.logits_processor"
SAMPLER = "sglang.srt.layers.sampler:Sampler"
GROUP = "sglang.srt.distributed.parallel_state:GroupCoordinator"
SCHEDULE = "sglang.srt.managers.schedule_batch"
RESULT = "sglang.srt.managers.utils:GenerationBatchResult"
SAMPLING = "sglang.srt.sampling"
# Parameters that stand in more than one row.
SAMPLER_FORWARD = (
    "logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions"
)
GRAMMAR_TREE = "retrieve_next_token, retrieve_next_sibling, draft_token"

WORKER_ROWS: Rows = (
    *imported(f"{SPECULATIVE}.dflash_worker_v2", "DFlashWorkerV2"),
    *until("0.5.20", called(WORKER, "server_args=, gpu_id=, ps=, nccl_port=, target_worker=")),
    *since("0.5.21", called(WORKER, "server_args=, gpu_id=, nccl_port=, target_worker=")),
    *until("0.5.18", overridden(WORKER, "forward_batch_generation", "batch, on_publish, grammar_barrier")),
    *since(
        "0.5.19",
        overridden(
            WORKER, "forward_batch_generation", "batch, on_publish, grammar_barrier, pp_proxy_tensors"
        ),
    ),
    *overridden(
        WORKER,
        "alloc_memory_pool",
        "memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator",
    ),
    *overridden(WORKER, "init_attention_backends init_cuda_graphs _maybe_build_draft_sampler"),
    # Its scratch memory moves when it grows, so graphs have a helper of their own.
    *called(f"{WORKER}._init_fused_kv_helper"),
    *fields(WORKER, "_fused_kv_helper"),
    *since("0.5.20", overridden(WORKER, "prewarm_sampling")),
    *overridden(WORKER, "_validate_phase1_sampling_support", "batch"),
    *or_inherited(overridden(WORKER, "on_verify_complete_cpu", "num_correct_drafts_per_req, batch_size")),
    *overridden(WORKER, "_make_next_draft_input_prefill", "bonus_tokens, seq_lens"),
    *overridden(WORKER, "_make_next_draft_input_decode", "bonus_tokens, new_seq_lens"),
    *called(f"{WORKER}._ensure_draft_block_buffers", "bs"),
    *called(
        f"{WORKER}._append_target_hidden_to_draft_kv_by_loc",
        "target_hidden=, cache_loc=, positions=, cache_loc_2d=, commit_lens=",
    ),
    *fields(
        WORKER,
        "server_args target_worker model_runner draft_model_runner draft_model block_size device "
        "_mask_token_id _block_pos_offsets _draft_block_ids_buf _draft_block_positions_buf "
        "_draft_block_spec_info _draft_seq_lens_cpu_buf _draft_verify_out_cache_loc_buf",
    ),
    *since("0.5.18", fields(WORKER, "_noise_embed_scale")),
    *since("0.5.20", fields(WORKER, "_full_embed_gpu")),
    *since("0.5.20", until("0.5.21", fields(WORKER, "draft_tp_context"))),
    *since("0.5.21", until("0.5.22", fields(WORKER, "draft_owns_attention"))),
    *since("0.5.23", fields(WORKER, "draft_parallel_layout _target_logits_processor")),
    *since("0.5.23", fields(f"{LOGITS}:LogitsProcessor", "defer_verify_gather")),
    *modules(f"{SPECULATIVE}.spec_utils"),
    # To 0.5.21 it is called through the worker.
    *until("0.5.20", called(f"{SPECULATIVE}.spec_utils:draft_tp_context", "tp_group")),
    *since(
        "0.5.21",
        until("0.5.21", called(f"{SPECULATIVE}.spec_utils:draft_tp_context", "tp_group, owns_attention=")),
    ),
    *since("0.5.22", until("0.5.22", called(f"{SPECULATIVE}.spec_utils:draft_tp_context", "owns_attention"))),
    *since("0.5.23", called(f"{SPECULATIVE}.spec_utils:draft_tp_context", "layout")),
    *called(
        "sglang.kernels.ops.speculative.dflash:_prepare_dflash_draft_block_unchecked",
        "bonus_tokens=, prefix_lens=, req_pool_indices=, req_to_token=, block_ids_out=, positions_out=, "
        "cache_loc_out=, mask_token_id=",
    ),
    *called(
        "sglang.kernels.ops.speculative.cache_locs:assign_extend_cache_locs_uniform_func",
        "req_pool_indices=, req_to_token=, start_offset=, batch_size=, draft_token_num=, device=",
    ),
)

ROUND_INPUTS: Rows = (
    *imported(f"{SPECULATIVE}.eagle_info", "EagleVerifyInput"),
    *overridden_properties(VERIFY_INPUT, "max_tree_depth tree_topk"),
    *called(
        VERIFY_INPUT,
        "draft_token=, custom_mask=, positions=, retrieve_index=, retrieve_next_token=, "
        "retrieve_next_sibling=, retrieve_cum_len=, spec_steps=, topk=, draft_token_num=, "
        "capture_hidden_mode=, seq_lens_sum=, seq_lens_cpu=",
    ),
    *fields(VERIFY_INPUT, "spec_steps"),
    *since("0.5.22", fields(VERIFY_INPUT, "prepared_out_cache_loc kv_loc_plan")),
    *imported(f"{SPECULATIVE}.dflash_info_v2", "DFlashDraftInputV2"),
    *overridden(DRAFT_INPUT, "prepare_for_decode", "batch"),
    *called(DRAFT_INPUT, "topk_p=, topk_index=, bonus_tokens=, new_seq_lens=, hidden_states="),
    *until("0.5.18", fields(DRAFT_INPUT, "reserved_seq_lens_cpu reserved_seq_lens_sum")),
    *since("0.5.19", fields(DRAFT_INPUT, "nxt_kv_lens_cpu nxt_kv_lens_sum")),
    *called(
        f"{SPECULATIVE}.dflash_info:DFlashVerifyInput",
        "draft_token=, positions=, draft_token_num=, custom_mask=, capture_hidden_mode=",
    ),
)

FORWARD: Rows = (
    *called(
        f"{SPECULATIVE}.eagle_utils:eagle_prepare_for_verify",
        "verify_input, req_to_token_pool, batch, target_worker",
    ),
    *called(f"{TARGET_WORKER}.forward_batch_generation", "batch=, forward_batch=, is_verify="),
    *fields(TARGET_WORKER, "model_runner random_seed"),
    *called(f"{MODEL_RUNNER}.forward", "forward_batch"),
    *since("0.5.20", called(f"{MODEL_RUNNER}.prewarm_sampling")),
    *overridden(MODEL_RUNNER, "_decode_cuda_graph_runner_cls"),
    *fields(
        MODEL_RUNNER,
        "attn_backend capture_tail_hooks dtype model model_config req_to_token_pool sampler token_to_kv_pool",
    ),
    *until("0.5.21", fields(MODEL_RUNNER, "tp_group")),
    *since("0.5.19", fields(MODEL_RUNNER, "kv_index_translator")),
    *since(
        "0.5.22",
        called(
            "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.plan",
            "req_pool_indices=, seq_lens=, seq_lens_cpu=, write_virtual=, read_extent=",
        ),
        called(f"{KV_LOC_PLAN}.bind", "batch, reader, cols="),
        called(f"{KV_LOC_PLAN}.write_ids", "reader, cols="),
    ),
    *fields(RUNNER_OUTPUT, "logits_output can_run_graph"),
    *fields(f"{LOGITS}:LogitsProcessorOutput", "hidden_states next_token_logits next_token_logprobs"),
    *imported(FORWARD_BATCH, "CaptureHiddenMode ForwardBatch ForwardMode"),
    *fields(f"{FORWARD_BATCH}:CaptureHiddenMode", "FULL NULL"),
    *fields(f"{FORWARD_BATCH}:ForwardMode", "TARGET_VERIFY"),
    *called(f"{FORWARD_BATCH}:ForwardMode.is_extend"),
    *called(f"{FORWARD_BATCH}:ForwardMode.is_idle"),
    *called(
        f"{FORWARD_BATCH}:ForwardBatch",
        "forward_mode=, batch_size=, input_ids=, req_pool_indices=, seq_lens=, out_cache_loc=, "
        "seq_lens_sum=, seq_lens_cpu=, positions=, input_embeds=, spec_algorithm=, spec_info=, "
        "capture_hidden_mode=",
    ),
    *fields(
        f"{FORWARD_BATCH}:ForwardBatch", "input_ids num_token_non_padded out_cache_loc seq_lens spec_info"
    ),
    *since("0.5.19", fields(f"{FORWARD_BATCH}:ForwardBatch", "can_run_decode_cuda_graph")),
    *since("0.5.20", fields(f"{FORWARD_BATCH}:ForwardBatch", "global_num_token_non_padded_cpu")),
    *since("0.5.22", fields(f"{FORWARD_BATCH}:ForwardBatch", "kv_loc_plan")),
    *called(f"{FORWARD_BATCH}:enable_num_token_non_padded"),
    *fields("sglang.srt.layers.attention.base_attn_backend:AttentionBackend", "verify_mask"),
    *fields(VERIFY_MASK, "buffer"),
    *called(f"{VERIFY_MASK}.fits", "bs"),
    *fields("sglang.srt.mem_cache.memory_pool:ReqToTokenPool", "req_to_token size"),
    *imported("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool"),
    *fields(KV_POOL, "k_buffer v_buffer use_hnd"),
)

GRAPHS: Rows = (
    *imported("sglang.srt.model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner"),
    *overridden(GRAPH_RUNNER, "get_spec_info", "num_tokens"),
    *overridden(GRAPH_RUNNER, "can_run_graph", "forward_batch"),
    *fields(GRAPH_RUNNER, "buffers captured_req_width model_runner"),
    *callback(GRAPH_RUNNER, "capture_tail_hooks", "self, out, forward_batch, num_tokens"),
    *imported(GRAPH_CONFIG, "Backend"),
    *fields(f"{GRAPH_CONFIG}:Backend", "DISABLED"),
    *fields(f"{GRAPH_CONFIG}:CudaGraphConfig", "decode"),
    *fields(f"{GRAPH_CONFIG}:PhaseConfig", "backend bs"),
)

REQUESTS: Rows = (
    *fields(
        f"{SCHEDULE}:ScheduleBatch",
        "extend_lens forward_mode has_grammar is_extend_in_batch out_cache_loc prefix_lens req_pool_indices "
        "reqs return_logprob sampling_info seq_lens seq_lens_cpu spec_info",
    ),
    *since("0.5.19", fields(f"{SCHEDULE}:ScheduleBatch", "can_run_decode_cuda_graph")),
    *fields(
        f"{SCHEDULE}:Req",
        "custom_logit_processor eos_token_ids finished_reason kv lora_id origin_input_ids output_ids "
        "output_ids_through_stop return_hidden_states return_indexer_topk return_logprob "
        "return_routed_experts return_sampling_mask rid sampling_params to_finish tokenizer",
    ),
    *called(f"{SCHEDULE}:BaseFinishReason.to_json"),
    *called(f"{SCHEDULE}:FINISH_ABORT", "message, status_code, err_type"),
    *since("0.5.19", fields(f"{SCHEDULE}:Req", "beam_group")),
    *until("0.5.18", fields(f"{SCHEDULE}:Req", "req_pool_idx")),
    *since("0.5.19", fields(f"{SCHEDULE}:ReqKvInfo", "req_pool_idx")),
    *fields(f"{SCHEDULE}:ReqKvInfo", "kv_allocated_len"),
    *fields(
        f"{SAMPLING}.sampling_params:SamplingParams",
        "ebnf frequency_penalty ignore_eos json_schema logit_bias max_new_tokens min_new_tokens min_p "
        "presence_penalty regex repetition_penalty sampling_seed stop_regex_strs stop_strs stop_token_ids "
        "structural_tag temperature top_k top_p",
    ),
    *since("0.5.22", fields(f"{SAMPLING}.sampling_params:SamplingParams", "watermark")),
    *fields(
        f"{SAMPLING}.sampling_batch_info:SamplingBatchInfo",
        "acc_additive_penalties acc_scaling_penalties is_all_greedy logit_bias temperatures",
    ),
    *imported("sglang.srt.layers.sampler", "Sampler"),
    *called(SAMPLER),
    *until("0.5.21", overridden(SAMPLER, "forward", f"{SAMPLER_FORWARD}")),
    *since("0.5.22", overridden(SAMPLER, "forward", f"{SAMPLER_FORWARD}, logprob_logits")),
    *called(f"{SPECULATIVE}.spec_utils:GrammarTree.from_device", GRAMMAR_TREE),
    *called(
        f"{SPECULATIVE}.spec_utils:build_grammar_vocab_mask",
        "reqs=, tree=, sampling_info=, device=, barrier=",
    ),
    *called(f"{SPECULATIVE}.spec_utils:GrammarMask.apply", "logits"),
    *modules("sglang.srt.layers.logprob_processor"),
    *since(
        "0.5.18",
        called(
            "sglang.srt.layers.logprob_processor:compute_spec_logprobs",
            "batch, logits_output, predict, accept_index=",
        ),
    ),
    *called(
        RESULT,
        "logits_output=, next_token_ids=, accept_lens=, can_run_cuda_graph=, next_draft_input=, "
        "new_seq_lens=, extra_keep_alive_refs=, speculative_num_draft_tokens=",
    ),
    *since("0.5.20", fields(RESULT, "speculative_output_stride")),
    *fields(RESULT, "logits_output can_run_cuda_graph"),
)

TENSOR_PARALLEL: Rows = (
    *fields(GROUP, "rank_in_group world_size"),
    *called(f"{GROUP}.all_gather_into_tensor", "output, input"),
    *called(f"{GROUP}.broadcast", "input_, src="),
    *fields(f"{VOCABULARY}:VocabParallelEmbedding", "shard_indices"),
    *fields(
        f"{VOCABULARY}:VocabParallelEmbeddingShardIndices",
        "num_added_elements num_org_elements org_vocab_start_index",
    ),
)

TABLE: Rows = (
    *REGISTRATION,
    *SETTINGS,
    *WORKER_ROWS,
    *ROUND_INPUTS,
    *FORWARD,
    *GRAPHS,
    *REQUESTS,
    *TENSOR_PARALLEL,
)
