"""Which backend SGLang chooses on a GPU, and which fit a tree there."""

import pytest

from ddtree.doctor.backends import backends_section, default_backend, family_of, gpu_of, usable_backends
from ddtree.doctor.environment import Gpu
from ddtree.doctor.model_shape import ModelShape
from ddtree.doctor.plan import Plan
from ddtree.doctor.report import Level
from ddtree.sglang_plugin.server_refusals import VERIFY_BACKENDS
from doctor_kit import GPT_OSS_120B, H200, KIMI_K25, QWEN3_8B, QWEN36_27B, RTX_PRO_6000, machine

NEW = (12, 8)
SINKS = QWEN3_8B | {"architectures": ["MiMoV2FlashForCausalLM"]}
MLA = KIMI_K25["text_config"] | {"architectures": ["OtherForCausalLM"]}
GEMMA4 = QWEN3_8B | {"architectures": ["Gemma4ForConditionalGeneration"]}
OLMO2 = QWEN3_8B | {"architectures": ["Olmo2ForCausalLM"]}


@pytest.mark.parametrize(
    ("capability", "cuda", "has_flashinfer", "config", "wanted"),
    [
        ((8, 0), NEW, True, None, "flashinfer"),
        ((8, 6), NEW, True, QWEN3_8B, "flashinfer"),
        ((8, 9), NEW, False, QWEN3_8B, "triton"),
        ((9, 0), NEW, True, QWEN3_8B, "fa3"),
        ((9, 0), (12, 1), True, QWEN3_8B, "flashinfer"),
        ((10, 0), NEW, True, QWEN3_8B, "flashinfer"),
        ((10, 3), NEW, True, QWEN3_8B, "flashinfer"),
        ((12, 0), NEW, True, QWEN3_8B, "flashinfer"),
        ((12, 0), NEW, False, QWEN3_8B, "triton"),
        ((10, 0), NEW, True, GPT_OSS_120B, "trtllm_mha"),
        ((9, 0), NEW, True, GPT_OSS_120B, "fa3"),
        ((12, 0), NEW, True, GPT_OSS_120B, "triton"),
        ((12, 0), NEW, True, SINKS, "triton"),
        ((10, 0), NEW, True, OLMO2, "trtllm_mha"),
        ((10, 0), (12, 6), True, OLMO2, "fa3"),
        ((12, 0), NEW, True, OLMO2, "fa3"),
        ((9, 0), NEW, True, KIMI_K25, "fa3"),
        ((10, 0), NEW, True, KIMI_K25, "trtllm_mla"),
        ((10, 0), NEW, True, MLA, "flashinfer"),
        ((10, 0), NEW, True, QWEN36_27B, "triton"),
        ((12, 0), NEW, True, QWEN36_27B, "flashinfer"),
        ((12, 0), NEW, True, KIMI_K25, "triton"),
        ((9, 0), None, True, QWEN3_8B, "fa3"),
    ],
)
def test_what_sglang_chooses(capability, cuda, has_flashinfer, config, wanted):
    shape = ModelShape.from_config(config) if config else None
    assert default_backend(capability, cuda, shape, has_flashinfer=has_flashinfer) == wanted


@pytest.mark.parametrize(
    ("capability", "has_flashinfer", "wanted"),
    [
        ((8, 0), True, ["triton", "flashinfer", "fa3"]),
        ((9, 0), False, ["triton", "fa3"]),
        ((10, 0), True, ["triton", "flashinfer"]),
        ((12, 0), False, ["triton"]),
    ],
)
def test_what_fits_a_tree(capability, has_flashinfer, wanted):
    usable = usable_backends(capability, has_flashinfer=has_flashinfer)
    assert [u.name for u in usable] == list(VERIFY_BACKENDS)
    assert [u.name for u in usable if u.is_usable] == wanted
    assert all(u.note for u in usable)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [(OLMO2, ["triton", "fa3"]), (GPT_OSS_120B, ["triton", "fa3"]), (GEMMA4, ["triton"])],
)
def test_what_sglang_does_not_start_a_target_with(config, wanted):
    usable = usable_backends((9, 0), config["architectures"][0], has_flashinfer=True)
    assert [u.name for u in usable if u.is_usable] == wanted
    found = section(H200, config).findings[0]
    assert all(name in found.todo for name in wanted)
    assert "flashinfer" not in found.todo


def test_a_flashinfer_that_was_not_looked_for_is_taken_as_installed():
    found = section(RTX_PRO_6000, has_flashinfer=None)
    assert found.data["default"] == "flashinfer"
    notes = {row["name"]: row["note"] for row in found.data["usable"] if row["is_usable"]}
    assert notes["flashinfer"].endswith("; taken as there, not looked at on this machine")
    assert "not looked at" not in notes["triton"]
    known = section(RTX_PRO_6000).data["usable"]
    assert not any("not looked at" in row["note"] for row in known)


def section(gpu, config=QWEN3_8B, *, has_flashinfer=True):
    shape = ModelShape.from_config(config)
    return backends_section(gpu, NEW, shape, has_flashinfer=has_flashinfer)[0]


def test_a_choice_that_fits_is_told_with_its_alternatives():
    found = section(RTX_PRO_6000).findings[0]
    assert found.level is Level.OK
    assert "on Blackwell workstation (sm120) SGLang chooses flashinfer" in found.what
    assert found.todo == "pass --attention-backend triton; flashinfer fits too"


@pytest.mark.parametrize(
    ("gpu", "config", "reason"),
    [
        (Gpu("B200", (10, 0), 1), OLMO2, "with which a tree cannot be verified here (verifies chains only"),
        (RTX_PRO_6000, OLMO2, "with which a tree cannot be verified here (SGLang runs it on compute"),
    ],
)
def test_a_choice_that_does_not_fit_names_the_flag(gpu, config, reason):
    found = section(gpu, config).findings[0]
    assert found.level is Level.WARN
    assert reason in found.what
    assert found.todo.startswith("pass --attention-backend triton")


def test_data_for_scripts():
    data = section(H200).data
    assert (data["default"], data["pass"], data["compute_capability"]) == ("fa3", "triton", [9, 0])


def test_no_gpu_still_gives_a_flag():
    found, backend = backends_section(None, None, None, has_flashinfer=True)
    assert (found.findings[0].level, backend) == (Level.WARN, "triton")


def test_families():
    assert family_of((8, 9)) == "Ada (sm89)"
    assert family_of((13, 0)) == "sm130"


def test_the_gpu_that_answers_are_for():
    small = Gpu("small", (8, 6), 10)
    assert gpu_of(machine(H200, small), Plan()) is small
    assert gpu_of(machine(), Plan()) is None
    asked = gpu_of(machine(H200), Plan(compute_capability="12.0", gpu_memory_gb=2))
    assert (asked.capability, asked.memory_bytes) == ((12, 0), 2 << 30)
    assert gpu_of(machine(H200), Plan(gpu_memory_gb=1)).memory_bytes == 1 << 30
