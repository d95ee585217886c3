"""DDTREE in the registries of the installed SGLang, and what it makes of real server arguments."""

import json
from types import SimpleNamespace

import pytest

from ddtree.errors import ConfigError, DDTreeError

pytestmark = pytest.mark.sglang

BLOCK_SIZE = 8
# Asked by nobody of a registered algorithm: one is for platforms, the others make algorithms.
NOT_ASKED = {"from_string", "register", "get_platform_worker_cls"}


@pytest.fixture(scope="module", autouse=True)
def registered():
    """Register once for this file, with the tests' attention backend."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from ddtree.sglang_plugin.plugin import register
    from sglang_kit import plugin as kit

    register()
    if "ddtree_cpu" not in known_backends():
        kit.register()
    HookRegistry.apply_hooks()


def known_backends():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    return ATTENTION_BACKENDS


def algorithm(name="DDTREE"):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string(name)


def resolve(pair, **flags):
    """Server arguments as a launch resolves them."""
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(pair.target_path),
        **{
            "speculative_algorithm": "DDTREE",
            "speculative_draft_model_path": str(pair.drafter_path),
            "device": "cpu",
            "attention_backend": "ddtree_cpu",
            "disable_cuda_graph": True,
            **flags,
        },
    )
    args.resolve_once()
    return args


def resolved(args, *names):
    from sglang.srt.arg_groups.overrides import resolution_result

    return {name: resolution_result(args, name) for name in names}


def answers(algo):
    """What an algorithm says of itself where nothing is asked but its name."""
    names = [name for name in dir(algo) if name.startswith(("is_", "supports_", "has_", "need_", "carries_"))]
    return {name: getattr(algo, name)() for name in names if callable(getattr(algo, name))}


def test_the_name_is_found_in_any_case():
    from ddtree.sglang_plugin.spec_algo import DDTreeSpecAlgo

    assert isinstance(algorithm("ddtree"), DDTreeSpecAlgo)
    assert algorithm().supports_overlap is True


def test_registering_twice_is_registering_once():
    from sglang.srt.plugins.hook_registry import HookRegistry

    from ddtree.sglang_plugin.plugin import DUMMY_VERIFY_INPUT, register

    register()
    assert len(HookRegistry._hooks[DUMMY_VERIFY_INPUT]) == 1


def test_every_method_that_sglang_asks_of_an_algorithm_is_there():
    builtin = type(algorithm("DFLASH"))
    public = {name for name, value in vars(builtin).items() if callable(value) and not name.startswith("_")}
    assert public - NOT_ASKED <= set(dir(algorithm()))


def test_it_answers_as_dflash_does_save_for_two_questions():
    ours, dflash = answers(algorithm()), answers(algorithm("DFLASH"))
    dflash["supports_overlap"] = ours["supports_overlap"] = None
    differing = {name for name in dflash if ours[name] != dflash[name]}
    assert differing == {"has_draft_kv", "supports_mixed_chunk"}


def test_the_future_map_is_sglangs(monkeypatch):
    from sglang.srt.managers import overlap_utils

    made = []
    monkeypatch.setattr(overlap_utils, "FutureMap", lambda *args: made.append(args))
    algorithm().create_future_map("cpu", "pool", needs_cpu_seq_lens=False)
    assert made == [("cpu", algorithm(), "pool", False, False)]


def test_the_worker_is_ours(qwen3_pair):
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    worker = algorithm().create_worker(resolve(qwen3_pair))
    assert worker.__name__ == "DDTreeWorkerV2"
    assert issubclass(worker, DFlashWorkerV2)


def test_server_arguments(qwen3_pair):
    from sglang.srt.arg_groups.overrides import max_speculative_num_draft_tokens

    args = resolve(qwen3_pair)
    expected = {
        "speculative_num_draft_tokens": 32,
        "speculative_dflash_block_size": BLOCK_SIZE,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 2,
        "speculative_draft_attention_backend": "ddtree_cpu",
        "max_running_requests": 48,
        "disable_overlap_schedule": True,
    }
    assert resolved(args, *expected) == expected
    assert max_speculative_num_draft_tokens(args) == 32


def test_what_the_user_sets_is_kept(qwen3_pair):
    args = resolve(
        qwen3_pair,
        max_running_requests=5,
        speculative_dflash_block_size=4,
        speculative_draft_attention_backend="triton",
    )
    expected = {
        "max_running_requests": 5,
        "speculative_dflash_block_size": 4,
        "speculative_draft_attention_backend": "triton",
    }
    assert resolved(args, *expected) == expected


def test_the_draft_of_a_split_backend_takes_the_verify_backend_where_prefills_does_not_fit(qwen3_pair):
    args = resolve(
        qwen3_pair,
        attention_backend=None,
        prefill_attention_backend="torch_native",
        decode_attention_backend="triton",
        speculative_attention_mode="decode",
    )
    assert resolved(args, "speculative_draft_attention_backend") == {
        "speculative_draft_attention_backend": "triton"
    }


def test_mixed_chunks_are_switched_off(qwen3_pair):
    assert resolved(resolve(qwen3_pair, enable_mixed_chunk=True), "enable_mixed_chunk") == {
        "enable_mixed_chunk": False
    }


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"attention_backend": None}, "attention backend torch_native has no tree mask"),
        (
            {
                "attention_backend": None,
                "prefill_attention_backend": "torch_native",
                "decode_attention_backend": "triton",
            },
            "attention backend torch_native has no tree mask",
        ),
        ({"speculative_draft_model_path": None}, "no drafter"),
        ({"speculative_num_draft_tokens": 7}, "the width comes from node_budget in DDTREE_CONFIG"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_accept_threshold_single": 0.5}, "--speculative-accept-threshold-single 0.5"),
        ({"speculative_use_rejection_sampling": True}, "--speculative-use-rejection-sampling"),
        ({"speculative_draft_window_size": 64}, "--speculative-draft-window-size 64"),
        ({"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": ["all"]}, "LoRA adapters"),
    ],
)
def test_refusals_of_real_arguments(qwen3_pair, flags, told):
    with pytest.raises(ConfigError, match=told):
        resolve(qwen3_pair, **flags)


def test_a_simulated_accept_length_is_refused(qwen3_pair, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3.5")
    with pytest.raises(ConfigError, match=r"SGLANG_SIMULATE_ACC_LEN=3\.5"):
        resolve(qwen3_pair)


def test_targets_that_do_not_fit_are_refused(qwen3_pair, tmp_path):
    """By their configs: a target with sliding-window layers, a drafter with a head over its positions."""
    target = tmp_path / "target"
    target.mkdir()
    config = json.loads((qwen3_pair.target_path / "config.json").read_text())
    layers = ["sliding_attention"] * config["num_hidden_layers"]
    (target / "config.json").write_text(
        json.dumps({**config, "layer_types": layers, "use_sliding_window": True, "sliding_window": 64})
    )
    drafter = tmp_path / "drafter"
    drafter.mkdir()
    config = json.loads((qwen3_pair.drafter_path / "config.json").read_text())
    config["dflash_config"] |= {"projector_type": "domino", "block_size": 8}
    (drafter / "config.json").write_text(json.dumps(config))
    pair = SimpleNamespace(target_path=target, drafter_path=drafter)
    with pytest.raises(ConfigError, match=r"sliding-window(.|\n)*Domino head"):
        resolve(pair)


def test_the_drafter_runs_its_block_and_the_target_the_width():
    from sglang.srt.runtime_context import get_context
    from sglang.srt.speculative.spec_utils import resolve_num_tokens_per_req

    with get_context().override_server_args(
        speculative_algorithm="DDTREE", speculative_num_draft_tokens=32, speculative_dflash_block_size=8
    ):
        widths = [
            resolve_num_tokens_per_req(
                phase="target_verify", spec_algorithm=algorithm(), is_draft_worker=is_draft
            )
            for is_draft in (True, False)
        ]
    assert widths == [8, 32]


def test_rows_of_the_token_table_have_room_for_a_window_at_their_end():
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.runtime_context import get_context

    def headroom(name, page_size):
        with get_context().override_server_args(
            speculative_algorithm=name, speculative_num_draft_tokens=32, speculative_num_steps=1,
            speculative_eagle_topk=2, speculative_dflash_block_size=8, page_size=page_size,
        ):  # fmt: skip
            return kv_cache_configurator.get_req_to_token_extra_context_len()

    assert headroom("DDTREE", 1) == 32 + 2 * 8 + 1
    assert headroom("DDTREE", 64) == 2 * 32 + 64 - 1  # SGLang's own is larger there
    assert headroom("DFLASH", 1) == 4 + 32


def test_dummy_verify_inputs_are_ours_for_ddtree_alone():
    from sglang.srt.model_executor.runner import base_runner
    from sglang.srt.runtime_context import get_context

    from ddtree.sglang_plugin.info import DDTreeVerifyInput

    with get_context().override_server_args(
        speculative_algorithm="DDTREE", speculative_num_draft_tokens=32, speculative_num_steps=1,
        speculative_eagle_topk=2, speculative_dflash_block_size=8,
    ):  # fmt: skip
        make = base_runner.create_dummy_verify_input
        target = make(algorithm(), "mask", 32, False)
        draft = make(algorithm(), "mask", num_tokens_per_req=8, is_draft_worker=True)
        stock = make(algorithm("DFLASH"), "mask", 32, False)
    assert (type(target), target.draft_token_num, target.custom_mask) == (DDTreeVerifyInput, 32, "mask")
    assert (type(draft).__name__, draft.draft_token_num) == ("DFlashVerifyInput", 8)
    assert (type(stock).__name__, stock.custom_mask) == ("DFlashVerifyInput", None)


def test_a_broken_contract_is_shown_and_nothing_is_registered(monkeypatch, capsys):
    from ddtree.sglang_plugin import plugin

    report = SimpleNamespace(is_ok=False, text="missing: sglang.srt.somewhere:Something")
    monkeypatch.setattr(plugin.contract, "check_installed", lambda: report)
    monkeypatch.setattr(plugin, "register_algorithm", lambda: pytest.fail("registered"))
    with pytest.raises(DDTreeError, match="not as it expects"):
        plugin.register.__wrapped__()
    shown = capsys.readouterr().err
    assert "=" * 80 in shown
    assert "missing: sglang.srt.somewhere:Something" in shown
