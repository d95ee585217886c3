"""Start-up: every refusal with its reason and remedy, and what is assigned on either kind of arguments."""

import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ddtree.config import Mode, PluginConfig
from ddtree.errors import ConfigError
from ddtree.sglang_plugin import server_refusals
from ddtree.sglang_plugin.server_refusals import Launch, adaptive_refusal, refusals
from sglang_fakes import fake_modules, import_fresh

ARGS = {
    "speculative_draft_model_path": "drafter",
    "speculative_draft_model_revision": "main",
    "speculative_draft_attention_backend": None,
    "speculative_num_draft_tokens": None,
    "speculative_dflash_block_size": None,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_attention_mode": "prefill",
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "speculative_use_rejection_sampling": False,
    "speculative_adaptive": False,
    "speculative_draft_window_size": None,
    "decrypted_draft_config_file": None,
    "trust_remote_code": False,
    "attention_backend": "triton",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "device": "cuda",
    "pp_size": 1,
    "enable_dp_attention": False,
    "attn_cp_size": 1,
    "dcp_size": 1,
    "disaggregation_mode": "null",
    "enable_lora": None,
    "lora_paths": None,
    "enable_deterministic_inference": False,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "enable_unified_memory": False,
    "enable_hisparse": False,
    "enable_linear_replayssm": False,
    "enable_linear_replayssm_spec": False,
    "enable_mixed_chunk": False,
    "disable_overlap_schedule": False,
    "kv_cache_dtype": "auto",
    "max_running_requests": None,
}
DRAFTER = {"architectures": ["DFlashDraftModel"], "block_size": 16, "dflash_config": {"mask_token_id": 3}}
LAUNCH = Launch(
    args=SimpleNamespace(**ARGS),
    block_size=16,
    verify_width=32,
    verify_backend="triton",
    attention_arch="MHA",
    is_hybrid=False,
    has_sliding_window=False,
    has_attention_sinks=False,
    context_length=4096,
    vocab_size=1000,
    drafter=DRAFTER,
    simulated_accept_length=-1.0,
    has_hnd_kv_cache=False,
)


def launch_with(**changes):
    """A launch that is fine save for these server arguments and fields."""
    fields = {name: value for name, value in changes.items() if name in Launch.__slots__}
    args = {name: value for name, value in changes.items() if name not in fields}
    return replace(LAUNCH, args=SimpleNamespace(**{**ARGS, **args}), **fields)


def with_dflash_config(**values):
    return {**DRAFTER, "dflash_config": values}


REFUSED = {
    "drafter_path_refusal": ({"speculative_draft_model_path": None}, "no drafter.*-draft-model-path"),
    "device_refusal": ({"device": "npu"}, "--device npu.*use cuda"),
    "block_refusal": ({"block_size": 1}, "block size 1.*--speculative-dflash-block-size"),
    "width_flag_refusal": (
        {"speculative_num_draft_tokens": 16},
        "--speculative-num-draft-tokens 16.*the width comes from node_budget in DDTREE_CONFIG",
    ),
    "verify_backend_refusal": ({"verify_backend": "fa4"}, "fa4 takes a tree mask at page size 1.*triton"),
    "draft_backend_refusal": (
        {"speculative_draft_attention_backend": "trtllm_mha"},
        "--speculative-draft-attention-backend trtllm_mha.*triton",
    ),
    "pipeline_refusal": ({"pp_size": 2}, "--pp-size 2.*--tp-size"),
    "dp_attention_refusal": ({"enable_dp_attention": True}, "attention data parallelism.*--tp-size"),
    "context_parallel_refusal": ({"dcp_size": 2}, "--dcp-size 2.*--tp-size"),
    "disaggregation_refusal": ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode.*one"),
    "accept_threshold_refusal": (
        {"speculative_accept_threshold_acc": 0.9},
        "--speculative-accept-threshold-acc 0.9.*leave it at 1",
    ),
    "rejection_sampling_refusal": (
        {"speculative_use_rejection_sampling": True},
        "--speculative-use-rejection-sampling.*leave the flag out",
    ),
    "simulated_accept_refusal": ({"simulated_accept_length": 3.5}, "SGLANG_SIMULATE_ACC_LEN=3.5.*unset it"),
    "draft_window_refusal": ({"speculative_draft_window_size": 512}, "draft-window-size 512.*leave it out"),
    "lora_refusal": ({"lora_paths": ["a=b"]}, "LoRA adapters.*merge the adapter"),
    "deterministic_refusal": (
        {"enable_deterministic_inference": True},
        "--enable-deterministic-inference.*leave it out",
    ),
    "batch_overlap_refusal": ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap.*leave it out"),
    "pdmux_refusal": ({"enable_pdmux": True}, "--enable-pdmux.*leave it out"),
    "unified_memory_refusal": ({"enable_unified_memory": True}, "--enable-unified-memory.*leave them out"),
    "hisparse_refusal": ({"enable_hisparse": True}, "--enable-hisparse.*leave it out"),
    "replayssm_refusal": ({"enable_linear_replayssm_spec": True}, "--enable-linear-replayssm-spec.*leave"),
    "kv_dtype_refusal": ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4.*fp8_e4m3"),
    "kv_layout_refusal": ({"has_hnd_kv_cache": True}, "SGLANG_USE_HND_KVCACHE=1.*unset it"),
    "mla_refusal": ({"attention_arch": "MLA"}, "MLA attention.*--speculative-algorithm DFLASH"),
    "hybrid_refusal": ({"is_hybrid": True}, "linear-attention.*--speculative-algorithm DFLASH"),
    "sliding_window_refusal": ({"has_sliding_window": True}, "sliding-window.*-algorithm DFLASH"),
    "attention_sinks_refusal": (
        {"has_attention_sinks": True, "verify_backend": "fa3"},
        "attention sinks.*--attention-backend triton",
    ),
    "drafter_kind_refusal": (
        {"drafter": {"architectures": ["Qwen3ForCausalLM"]}, "block_size": None, "verify_width": None},
        "the drafter is a Qwen3ForCausalLM, not a DFlash checkpoint.*--speculative-draft-model-path",
    ),
    "drafter_head_refusal": (
        {"drafter": with_dflash_config(projector_type="domino")},
        "Domino head.*plain DFlash drafter",
    ),
    "drafter_embedding_refusal": (
        {"drafter": {**DRAFTER, "has_embed_tokens": True}},
        "its own embedding.*shares the target's",
    ),
}  # fmt: skip


def test_a_plain_launch_is_not_refused():
    assert refusals(LAUNCH) == []


def test_every_refusal_is_asked_and_tested():
    asked = {check.__name__ for check in server_refusals.CHECKS}
    defined = {name for name in vars(server_refusals) if name.endswith("_refusal")}
    assert asked == defined - {"adaptive_refusal"}
    assert asked == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_is_wrong_and_what_to_use_instead(name):
    changes, told = REFUSED[name]
    launch = launch_with(**changes)
    (reason,) = refusals(launch)
    assert reason == getattr(server_refusals, name)(launch)
    assert re.search(told, reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"verify_backend": "flashinfer"},
        {"verify_backend": "fa3"},
        {"verify_backend": "ddtree_cpu", "device": "cpu"},
        {"speculative_draft_attention_backend": "fa4"},
        {"speculative_draft_attention_backend": "ddtree_cpu"},
        {"speculative_num_draft_tokens": 32},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"has_attention_sinks": True},
        {"drafter": with_dflash_config(lilicorr_enabled=False, lilicorr_hidden_size=8)},
        {"drafter": with_dflash_config(selector_rank=0, selector_top_k=0, conv_kernel_size=3)},
        {"block_size": 2, "verify_width": 32},
    ],
)
def test_what_fits_is_not_refused(changes):
    assert refusals(launch_with(**changes)) == []


@pytest.mark.parametrize("backend", server_refusals.UNFIT_BACKENDS)
def test_a_backend_that_does_not_fit_is_refused_with_its_reason(backend):
    (reason,) = refusals(launch_with(verify_backend=backend))
    assert reason.startswith(f"attention backend {backend} {server_refusals.UNFIT_BACKENDS[backend]};")


def test_an_unknown_backend_is_refused():
    assert refusals(launch_with(verify_backend="newest")) == [
        server_refusals.verify_backend_refusal(launch_with(verify_backend="newest"))
    ]


@pytest.mark.parametrize(
    ("drafter", "head"),
    [
        (with_dflash_config(selector_rank=64, selector_top_k=8), "candidate selector"),
        (with_dflash_config(lilicorr_hidden_size=8), "LiLiCorr"),
        ({**DRAFTER, "architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
        ({**DRAFTER, "projector_type": "domino"}, "Domino"),
    ],
)
def test_heads_that_couple_positions_are_recognised(drafter, head):
    """Their block sizes are left alone, so that the head is the one reason."""
    (reason,) = refusals(launch_with(drafter=drafter, block_size=None, verify_width=None))
    assert head in reason


@pytest.mark.parametrize(
    ("architectures", "kind"),
    [
        (["Qwen3ForCausalLM"], "Qwen3ForCausalLM"),
        (["LlamaForCausalLMEagle3"], "LlamaForCausalLMEagle3"),
        (["DSparkDraftModel"], "DSparkDraftModel"),
        ([], "model of unnamed architecture"),
        (None, "model of unnamed architecture"),
    ],
)
def test_a_drafter_of_another_kind_is_refused_by_name_alone(architectures, kind):
    """No block size would mend it, so none is asked for."""
    for block_size in (None, 1):
        launch = launch_with(
            drafter={"model_type": "qwen3", "architectures": architectures},
            block_size=block_size,
            verify_width=None,
        )
        (reason,) = refusals(launch)
        assert reason.startswith(f"the drafter is a {kind}, not a DFlash checkpoint")


@pytest.mark.parametrize("name", ["DFlashDraftModel", "DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel"])
def test_the_classes_that_sglang_loads_as_dflash_drafters_fit(name):
    assert refusals(launch_with(drafter={**DRAFTER, "architectures": [name]})) == []


def test_the_config_of_another_kind_is_not_asked_for_a_block(monkeypatch):
    drafter = {"architectures": ["Qwen3ForCausalLM"], "block_size": 16}
    module, make = load(monkeypatch, StandIn, drafter=drafter)
    read = SimpleNamespace(to_dict=lambda: drafter)
    assert module.drafter_block_size(make(), read) is None
    with pytest.raises(
        ConfigError, match=r"DDTREE cannot start:\n  - the drafter is a Qwen3ForCausalLM[^\n]*$"
    ):
        module.handle_server_args(make())


def test_a_drafter_without_block_size_is_refused():
    (reason,) = refusals(launch_with(block_size=None, verify_width=None))
    assert "no block_size: give it with --speculative-dflash-block-size" in reason


def test_adaptive_speculation_is_refused():
    assert adaptive_refusal(SimpleNamespace(speculative_adaptive=False)) is None
    assert "--speculative-adaptive" in adaptive_refusal(SimpleNamespace(speculative_adaptive=True))


def test_arguments_that_a_version_does_not_have_are_not_missed():
    assert refusals(launch_with(attn_dp_size=1)) == []
    assert len(refusals(launch_with(attn_dp_size=2))) == 1
    args = {name: value for name, value in ARGS.items() if not name.startswith("enable_linear_")}
    assert refusals(replace(LAUNCH, args=SimpleNamespace(**args))) == []


# -- what is assigned ----------------------------------------------------------------------------------


class Record:
    """0.5.17: the arguments themselves, which know their model's config."""

    def __init__(self, target, **values):
        self.__dict__.update(values)
        self._target = target

    def get_model_config(self):
        return self._target


class StandIn:
    """0.5.20 and later: reads resolve, assignments are recorded."""

    def __init__(self, target, **values):
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "written", {})

    def __getattr__(self, name):
        if name not in self._values:
            raise AttributeError(name)
        return self._values[name]

    def __setattr__(self, name, value):
        self.written[name] = value


def attention_backends_of(args):
    base = args.attention_backend
    return args.prefill_attention_backend or base, args.decode_attention_backend or base


def target_with(**values):
    text_config = SimpleNamespace(layer_types=values.pop("layer_types", None))
    fields = {
        "attention_arch": SimpleNamespace(name="MHA"), "has_attention_sinks": False, "context_len": 1024,
        "vocab_size": 256, "hf_config": SimpleNamespace(architectures=["Qwen3ForCausalLM"]),
        "hf_text_config": text_config,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **values})


def load(monkeypatch, kind, target=None, drafter=DRAFTER, config=None):
    """`server_args.py` over stand-ins for SGLang of one kind, and a function that makes arguments for it."""
    target = target or target_with()
    overrides = {"resolved_view": lambda args: args, "attention_backends_of": attention_backends_of}
    if kind is StandIn:
        overrides["model_config_of"] = lambda args: target
    parsed = SimpleNamespace(resolve_block_size=lambda default: drafter.get("block_size"))
    switch = SimpleNamespace
    fake_modules(
        monkeypatch,
        {
            "sglang.srt.arg_groups.overrides": overrides,
            "sglang.srt.configs.hybrid_arch": {"mambaish_config": lambda target: None},
            "sglang.srt.configs.model_config": {
                "is_hybrid_swa_model": lambda names, text_config: names == ["GptOssForCausalLM"]
            },
            "sglang.srt.environ": {
                "envs": SimpleNamespace(
                    SGLANG_SIMULATE_ACC_LEN=switch(get=lambda: -1),
                    SGLANG_USE_HND_KVCACHE=switch(get=lambda: False),
                )
            },
            "sglang.srt.speculative.dflash_utils": {
                "parse_dflash_draft_config": lambda draft_hf_config: parsed
            },
            "sglang.srt.utils.hf_transformers_utils": {
                "get_config": lambda path, **_: SimpleNamespace(to_dict=lambda: drafter)
            },
        },
    )
    module = import_fresh(monkeypatch, "ddtree.sglang_plugin.server_args")
    monkeypatch.setattr(module, "plugin_config", lambda: config or PluginConfig())
    return module, lambda **changes: kind(target, **{**ARGS, **changes})


def written(args):
    return args.written if isinstance(args, StandIn) else vars(args)


@pytest.mark.parametrize("kind", [Record, StandIn])
def test_the_width_and_what_follows_from_it(monkeypatch, kind):
    module, make = load(monkeypatch, kind)
    args = make()
    module.handle_server_args(args)
    expected = {
        "speculative_num_draft_tokens": 32,
        "speculative_dflash_block_size": 16,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 2,
        "speculative_draft_attention_backend": "triton",
        "max_running_requests": 48,
    }
    assert {name: written(args)[name] for name in expected} == expected
    assert written(args).get("disable_overlap_schedule", False) is False


@pytest.mark.parametrize(
    ("budget", "mode", "width"),
    [(4, Mode.TREE, 16), (15, Mode.TREE, 16), (16, Mode.TREE, 17), (63, Mode.TREE, 64), (63, Mode.CHAIN, 16)],
)
def test_the_width_holds_the_block_and_the_tree(monkeypatch, budget, mode, width):
    module, make = load(monkeypatch, StandIn, config=PluginConfig(node_budget=budget, mode=mode))
    args = make()
    module.handle_server_args(args)
    assert args.written["speculative_num_draft_tokens"] == width
    assert args.written["speculative_dflash_block_size"] == 16


def test_a_record_that_was_handled_before_is_handled_again(monkeypatch):
    module, make = load(monkeypatch, Record)
    args = make()
    module.handle_server_args(args)
    before = dict(vars(args))
    module.handle_server_args(args)
    assert vars(args) == before


def test_the_users_block_size_goes_before_the_drafters(monkeypatch):
    module, make = load(monkeypatch, StandIn, config=PluginConfig(node_budget=3))
    args = make(speculative_dflash_block_size=8)
    module.handle_server_args(args)
    assert args.written["speculative_dflash_block_size"] == 8
    assert args.written["speculative_num_draft_tokens"] == 8


@pytest.mark.parametrize(
    ("prefill", "decode", "mode", "verify", "draft"),
    [
        ("fa3", "triton", "prefill", "fa3", "fa3"),
        ("fa3", "triton", "decode", "triton", "fa3"),
        ("trtllm_mha", "triton", "decode", "triton", "triton"),
        (None, None, "prefill", "flashinfer", "flashinfer"),
    ],
)
def test_of_a_pair_of_backends_the_one_that_verifies_counts(
    monkeypatch, prefill, decode, mode, verify, draft
):
    module, make = load(monkeypatch, StandIn)
    args = make(
        attention_backend="flashinfer", prefill_attention_backend=prefill, decode_attention_backend=decode,
        speculative_attention_mode=mode,
    )  # fmt: skip
    assert module.verify_backend(args) == verify
    module.handle_server_args(args)
    assert args.written["speculative_draft_attention_backend"] == draft


def test_a_pair_whose_verifying_backend_does_not_fit_is_refused(monkeypatch):
    module, make = load(monkeypatch, StandIn)
    args = make(prefill_attention_backend="trtllm_mha", decode_attention_backend="triton")
    with pytest.raises(ConfigError, match="attention backend trtllm_mha"):
        module.handle_server_args(args)
    assert args.written == {}


def test_all_reasons_are_told_at_once(monkeypatch):
    module, make = load(monkeypatch, Record)
    with pytest.raises(ConfigError, match=r"DDTREE cannot start:\n  - --pp-size 2.*\n  - LoRA"):
        module.handle_server_args(make(pp_size=2, enable_lora=True))


def test_adaptive_speculation_is_refused_before_sglang_switches_it_off(monkeypatch):
    module, make = load(monkeypatch, StandIn)
    with pytest.raises(ConfigError, match="--speculative-adaptive"):
        module.validate_server_args(make(speculative_adaptive=True))
    module.validate_server_args(make(pp_size=2))


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (target_with(hf_config=SimpleNamespace(architectures=["GptOssForCausalLM"])), "sliding-window"),
        (target_with(layer_types=["full_attention", "sliding_attention"]), "sliding-window"),
        (target_with(layer_types=["chunked_attention"]), "sliding-window"),
        (target_with(attention_arch=SimpleNamespace(name="MLA")), "MLA"),
    ],
)
def test_targets_that_do_not_fit_are_recognised(monkeypatch, target, told):
    module, make = load(monkeypatch, Record, target)
    with pytest.raises(ConfigError, match=told):
        module.handle_server_args(make())


def test_targets_with_full_attention_everywhere_fit(monkeypatch):
    module, make = load(monkeypatch, Record, target_with(layer_types=["full_attention"] * 2))
    module.handle_server_args(make())


def test_overruled_flags_are_told(monkeypatch, caplog):
    module, make = load(monkeypatch, StandIn)
    args = make(speculative_num_steps=5, speculative_eagle_topk=8, enable_mixed_chunk=True, device="cpu",
                attention_backend="ddtree_cpu", max_running_requests=7)  # fmt: skip
    with caplog.at_level(logging.WARNING):
        module.handle_server_args(args)
    assert args.written["enable_mixed_chunk"] is False
    assert args.written["disable_overlap_schedule"] is True
    assert args.written["max_running_requests"] == 7
    told = " ".join(caplog.messages)
    for flag in ("--speculative-num-steps", "--speculative-eagle-topk", "--enable-mixed-chunk", "overlap"):
        assert flag in told
    assert "--max-running-requests" not in told


def test_one_line_says_what_was_decided(monkeypatch, caplog):
    config = PluginConfig(node_budget=63, candidate_topk=8)
    module, make = load(monkeypatch, StandIn, config=config)
    with caplog.at_level(logging.INFO):
        module.handle_server_args(make(max_running_requests=1024))
    (line,) = [message for message in caplog.messages if message.startswith("DDTREE:")]
    assert "block 16, node budget 63, verify width 64, 8 candidates a position, mode tree" in line
    assert "attention backend triton" in line
    assert "68 MiB of verify mask and 64 MiB of float32 logits" in line
