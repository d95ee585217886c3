"""Rows of the hook contract about start-up: registration, settings, what is refused."""

from __future__ import annotations

from ddtree.sglang_plugin.contract_rules import (
    Rows,
    called,
    covered,
    fields,
    hooked,
    imported,
    modules,
    optional,
    overridden,
    since,
    until,
)

SPECULATIVE = "sglang.srt.speculative"
ALGORITHM = f"{SPECULATIVE}.spec_info:SpeculativeAlgorithm"
CUSTOM_ALGORITHM = f"{SPECULATIVE}.spec_registry:CustomSpecAlgo"
MODEL_CONFIG = "sglang.srt.configs.model_config:ModelConfig"
SIZING = "sglang.srt.mem_cache.allocation_sizing"
SERVER_ARGS = "sglang.srt.server_args:ServerArgs"


def settings(namespace: str, names: str) -> Rows:
    """Server arguments: of one class a namespace (module:Class), to 0.5.19 all of `ServerArgs`."""
    owner = f"sglang.srt.arg_groups.fields.{namespace}"
    return (*until("0.5.19", fields(SERVER_ARGS, names)), *since("0.5.20", fields(owner, names)))


def flags(namespace: str, names: str) -> Rows:
    """Server arguments that are looked at only to refuse them."""
    return optional("DDTREE does not refuse to run with this flag", settings(namespace, names))


REGISTRATION: Rows = (
    *imported("sglang.srt.plugins.hook_registry", "HookRegistry"),
    *called("sglang.srt.plugins.hook_registry:HookRegistry.register", "target, hook, hook_type"),
    *fields("sglang.srt.plugins.hook_registry:HookType", "AROUND AFTER"),
    *until(
        "0.5.17",
        hooked(
            f"{SPECULATIVE}.spec_info:create_dummy_verify_input",
            "spec_algorithm, server_args, custom_mask, num_tokens_per_req, is_draft_worker",
        ),
        hooked(f"{SIZING}:get_req_to_token_extra_context_len", "server_args"),
    ),
    *since(
        "0.5.18",
        hooked(
            f"{SPECULATIVE}.spec_info:create_dummy_verify_input",
            "spec_algorithm, custom_mask, num_tokens_per_req, is_draft_worker",
        ),
        hooked(f"{SIZING}:get_req_to_token_extra_context_len"),
    ),
    *fields(ALGORITHM, "DFLASH"),
    *called(f"{ALGORITHM}.register", "name, supports_overlap=, validate_server_args=, spec_class="),
    *covered(
        ALGORITHM,
        "carries_draft_hidden_states create_future_map need_topk "
        # Of the enumeration itself, and not asked of an algorithm that DDTREE runs with.
        "from_string register get_platform_worker_cls",
        inherited=CUSTOM_ALGORITHM,
    ),
    *imported(f"{SPECULATIVE}.spec_registry", "CustomSpecAlgo"),
    *overridden(
        CUSTOM_ALGORITHM,
        "is_dflash is_dflash_family supports_target_verify_for_draft supports_grammar_overlap has_draft_kv",
    ),
    *since("0.5.21", overridden(CUSTOM_ALGORITHM, "supports_prefill_shared_read_done")),
    *overridden(
        CUSTOM_ALGORITHM,
        "get_num_tokens_per_req_for_target_verify",
        "num_draft_tokens, is_draft_worker",
    ),
    *overridden(CUSTOM_ALGORITHM, "handle_server_args", "server_args"),
    *overridden(ALGORITHM, "carries_draft_hidden_states need_topk"),
    *overridden(
        ALGORITHM,
        "create_future_map",
        "device, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay",
    ),
    *called(
        "sglang.srt.managers.overlap_utils:FutureMap",
        "device, spec_algo, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay",
    ),
)

SETTINGS: Rows = (
    *called("sglang.srt.runtime_context:get_exec"),
    *called("sglang.srt.runtime_context:get_observability"),
    *called("sglang.srt.runtime_context:get_parallel"),
    *called("sglang.srt.runtime_context:get_schedule"),
    *called("sglang.srt.runtime_context:get_serving"),
    *called("sglang.srt.runtime_context:get_spec"),
    *called(
        "sglang.srt.runtime_context:_ConfigBag.override",
        "speculative_num_draft_tokens=, speculative_eagle_topk=",
    ),
    *modules("sglang.srt.arg_groups.overrides"),
    *called("sglang.srt.runtime_context:_ConfigBag.override", "speculative_num_draft_tokens="),
    *called("sglang.srt.arg_groups.overrides:resolved_view", "server_args"),
    *called("sglang.srt.arg_groups.overrides:attention_backends_of", "cfg"),
    *until("0.5.18", called(f"{SERVER_ARGS}.get_model_config")),
    *since("0.5.19", called("sglang.srt.arg_groups.overrides:model_config_of", "server_args")),
    *settings(
        "spec:Spec",
        "speculative_algorithm speculative_attention_mode speculative_dflash_block_size "
        "speculative_draft_attention_backend speculative_draft_model_path "
        "speculative_draft_model_revision speculative_eagle_topk speculative_num_draft_tokens "
        "speculative_num_steps",
    ),
    *settings("model:Model", "decrypted_draft_config_file trust_remote_code"),
    *settings(
        "schedule:Schedule", "disable_overlap_schedule enable_mixed_chunk max_running_requests page_size"
    ),
    *settings("device:Device", "device"),
    *settings("exec_:ExecKernel", "sampling_backend"),
    *settings("exec_:ExecGraph", "cuda_graph_config"),
    *settings("observability:Observability", "enable_metrics enable_metrics_for_all_schedulers"),
    *settings("serving:Serving", "served_model_name"),
    *flags(
        "spec:Spec",
        "speculative_accept_threshold_acc speculative_accept_threshold_single speculative_adaptive "
        "speculative_draft_window_size speculative_use_rejection_sampling",
    ),
    *flags("model:Model", "kv_cache_dtype"),
    *flags("parallel:Parallel", "attn_cp_size dcp_size enable_dp_attention pp_size"),
    *optional(
        "DDTREE does not refuse attention data parallelism of this name",
        since("0.5.20", fields("sglang.srt.arg_groups.fields.parallel:Parallel", "attn_dp_size")),
    ),
    *flags("disagg:Disagg", "disaggregation_mode enable_pdmux"),
    *flags("lora:Lora", "enable_lora lora_paths"),
    *flags("memory:Memory", "enable_hisparse enable_page_major_kv_layout enable_unified_memory"),
    *flags("exec_:ExecDeterministic", "enable_deterministic_inference"),
    *flags("exec_:ExecOverlap", "enable_two_batch_overlap"),
    *flags("exec_:ExecMamba", "enable_linear_replayssm enable_linear_replayssm_spec"),
    *imported("sglang.srt.environ", "envs"),
    *fields(
        "sglang.srt.environ:Envs",
        "SGLANG_RETURN_ORIGINAL_LOGPROB SGLANG_SIMULATE_ACC_LEN SGLANG_USE_HND_KVCACHE",
    ),
    *called("sglang.srt.environ:EnvField.get"),
    *called("sglang.srt.configs.hybrid_arch:mambaish_config", "model_config"),
    *called("sglang.srt.configs.model_config:is_hybrid_swa_model", "model_architectures, hf_text_config"),
    *fields(
        MODEL_CONFIG,
        "attention_arch context_len has_attention_sinks hf_config hf_text_config model_path vocab_size",
    ),
    *called("sglang.srt.utils.hf_transformers_utils:get_config", "model, trust_remote_code=, revision="),
    *called(f"{SPECULATIVE}.dflash_utils:parse_dflash_draft_config", "draft_hf_config="),
    *called(f"{SPECULATIVE}.dflash_utils:DFlashDraftConfig.resolve_block_size", "default="),
)
