"""The memory formulas against sums done by hand for known models."""

import pytest

from ddtree.config import PluginConfig
from ddtree.doctor import memory
from ddtree.doctor.memory_plan import Load, Machine, account_of, largest, largest_number
from ddtree.doctor.model_shape import ModelShape
from ddtree.draft.dflash_config import DFlashConfig
from doctor_kit import GPT_OSS_120B, KIMI_K25, QWEN3_8B, QWEN3_8B_DFLASH, QWEN36_27B

GIB, MIB = 1 << 30, 1 << 20
QWEN, DRAFT = ModelShape.from_config(QWEN3_8B), DFlashConfig.from_dict(QWEN3_8B_DFLASH)


@pytest.mark.parametrize(
    ("config", "tp", "wanted"),
    [
        (QWEN3_8B, 1, 147_456),  # 36 layers x 8 heads x (128 + 128) x 2 bytes
        (QWEN3_8B, 8, 18_432),  # one head a rank
        (QWEN3_8B, 16, 18_432),  # a head on two ranks
        (GPT_OSS_120B, 1, 73_728),  # 36 x 8 x 128 x 2
        (KIMI_K25, 1, 70_272),  # 61 x (512 + 64) x 2
        (KIMI_K25, 8, 70_272),  # the latent is whole on every rank
        (QWEN36_27B, 1, 65_536),  # 16 full layers of 64 x 4 x 512 x 2
    ],
)
def test_kv_of_a_token(config, tp, wanted):
    assert memory.kv_bytes_per_token(ModelShape.from_config(config), 2, tp) == wanted


def test_an_fp8_cache_is_half():
    assert memory.kv_bytes_per_token(QWEN, 1, 1) == 73_728


def test_draft_kv_of_a_token():
    assert memory.draft_kv_bytes_per_token(DRAFT, 2, 1) == 20_480  # 5 layers x 8 heads x 256 x 2
    assert memory.draft_kv_bytes_per_token(DRAFT, 2, 4) == 5_120


def test_weights_are_split():
    assert memory.weight_bytes(16_381_470_720, 1) == 16_381_470_720
    assert memory.weight_bytes(10, 4) == 3


@pytest.mark.parametrize(
    ("width", "block", "page", "wanted"),
    [(32, 16, 1, 48), (64, 16, 1, 80), (33, 16, 1, 50), (32, 16, 64, 64)],
)
def test_reserve_of_a_request(width, block, page, wanted):
    assert memory.reserve_tokens(width, block, page) == wanted


def test_the_verify_mask():
    # 48 requests x 64 columns x (262,144 + 64) cells
    assert memory.mask_bytes(48, 64, 262_144) == 805_502_976


def test_verify_logits():
    assert memory.logits_bytes(32, 64, 151_936) == 1_244_659_712  # in float32
    assert memory.logits_bytes(32, 64, 151_936, 2) == 622_329_856


def test_what_else_is_kept():
    assert memory.hidden_bytes(48, 32, 5, 4096, 2) == 62_914_560
    assert memory.token_table_bytes(48, 32, 16, 40_960) == 48 * (40_960 + 32 + 32 + 1) * 4
    assert memory.token_count_bytes(48, 151_936) == 29_171_712


def test_states_of_a_hybrid_target_grow_with_each_node():
    shape = ModelShape.from_config(QWEN36_27B)
    assert shape.is_hybrid
    # a layer: 48 x 128 x 128 float32 and (2 x 16 x 128 + 48 x 128) x 3 of 2 bytes; 48 layers
    one = 48 * (48 * 128 * 128 * 4 + 10_240 * 3 * 2)
    assert memory.state_bytes(shape, 1, 1, 1) == 2 * one
    assert memory.state_bytes(shape, 8, 16, 1) == 8 * 17 * one
    assert memory.state_bytes(QWEN, 8, 16, 1) == 0


@pytest.mark.parametrize(
    ("gpu_gib", "requests", "tp", "wanted_mib"),
    [
        (80, 48, 1, 12_288 + 512 + 96 + 128),  # a chunk of 8192 tokens
        (24, 48, 1, 6_144 + 512 + 96 + 128),
        (16, 8, 2, 3_072 + 512 + 16 + 256),
        (180, 48, 8, 24_576 + 512 + 96 + 1_024),
    ],
)
def test_sglangs_own_reserve(gpu_gib, requests, tp, wanted_mib):
    assert memory.plain_reserve_bytes(gpu_gib * GIB, requests, tp) == wanted_mib * MIB


def test_float32_files_are_served_in_half_their_size():
    shape = ModelShape.from_config(QWEN3_8B | {"torch_dtype": "float32"})
    assert (shape.served_dtype, shape.served_bytes(100)) == ("float16", 50)
    assert (QWEN.served_dtype, QWEN.served_bytes(100)) == ("bfloat16", 100)
    quantised = ModelShape.from_config(
        QWEN3_8B | {"torch_dtype": "float32", "quantization_config": {"quant_method": "awq"}}
    )
    assert quantised.served_bytes(100) == 100
    assert "float16 logits" in account_of(machine(shape=shape), Load(31, 16, 8192)).buffers


def machine(gpu_gib=80, fraction=None, **fields):
    known = {"shape": QWEN, "draft": DRAFT, "config": PluginConfig(), "weight_bytes": 16 * GIB,
             "gpu_bytes": gpu_gib * GIB, "fraction": fraction, "tp_size": 1,
             "kv_element_bytes": 2}  # fmt: skip
    return Machine(**{**known, **fields})


def test_an_account_adds_up():
    account = account_of(machine(fraction=0.8), Load(31, 16, 8192))
    assert account.verify_width == 32
    assert account.pool == int(64 * GIB) + 0 - 16 * GIB
    assert account.pool_tokens == account.pool // (147_456 + 20_480)
    assert account.request_tokens == 8192 + 48
    assert account.full_requests == account.pool_tokens // 8240
    logits = 16 * 32 * 151_936
    assert account.buffers["float32 logits"] == 4 * logits
    assert account.buffers["bfloat16 logits"] == 2 * logits
    assert account.has_headroom
    assert account.fits


def test_without_a_fraction_the_largest_that_leaves_room_is_taken():
    account = account_of(machine(), Load(31, 16, 8192))
    left = 80 * GIB * (1 - account.fraction)
    needed = sum(account.buffers.values()) + account.plain_reserve
    assert 0 <= left - needed < 80 * GIB / 1000
    assert account_of(machine(fraction=account.fraction), Load(31, 16, 8192)).has_headroom
    assert not account_of(machine(fraction=account.fraction + 0.001), Load(31, 16, 8192)).has_headroom


def test_a_small_budget_does_not_narrow_the_window_below_the_block():
    assert account_of(machine(), Load(4, 16, 8192)).verify_width == 16


@pytest.mark.parametrize("gpu_gib", [58, 80])
def test_the_largest_fit_and_one_more_do_not(gpu_gib):
    load = Load(31, 16, 8192)
    most = largest(machine(gpu_gib), load)
    assert all(most.values())
    for name, number in most.items():
        field = {"node_budget": "node_budget", "max_requests": "num_requests"}.get(name, name)
        for value, fits in ((number, True), (number + 1, False)):
            changed = Load(**{"node_budget": 31, "num_requests": 16, "context_tokens": 8192, field: value})
            if value <= {"node_budget": 1024, "context_tokens": 40_960}.get(name, 4096):
                assert account_of(machine(gpu_gib), changed).fits == fits, name


def test_what_never_fits_is_0():
    assert largest(machine(16), Load(31, 16, 8192)) == {
        "node_budget": 0, "max_requests": 0, "context_tokens": 0,
    }  # fmt: skip


@pytest.mark.parametrize("limit", [0, 1, 2, 57, 99, 100, 1000])
def test_largest_number_is_found_by_halves(limit):
    assert largest_number(100, lambda n: n <= limit) == min(limit, 100)
