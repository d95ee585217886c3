"""Which attention backend SGLang chooses on a GPU, and which ones read a tree mask there.

The choice is that of `get_default_attn_backend` in SGLang 0.5.17 to 0.5.23 (a method of `ServerArgs` up to
0.5.18) and of its overrides by architecture, as it comes out for DDTREE: none of these releases knows the
algorithm's name there, and its `--speculative-eagle-topk` is not set yet. For DFLASH, 0.5.23 chooses
trtllm_mha on compute capability 10.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ddtree.doctor.environment import Environment, Gpu
from ddtree.doctor.model_shape import ModelShape
from ddtree.doctor.plan import Plan
from ddtree.doctor.report import Finding, Level, Section
from ddtree.sglang_plugin.server_refusals import UNFIT_BACKENDS, VERIFY_BACKENDS

Capability = tuple[int, int]
OwnDefaults = tuple[str | None, str | None, str | None]
RECOMMENDED = "triton"
FA3_CUDA, BLACKWELL_CUDA = (12, 3), (12, 8)
GPT_OSS, LLAMA4, OLMO2 = "GptOssForCausalLM", "Llama4ForConditionalGeneration", "Olmo2ForCausalLM"
GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4UnifiedForConditionalGeneration")
QWEN_HYBRIDS = ("Qwen3NextForCausalLM", "Qwen3_5ForConditionalGeneration",
                "Qwen3_5MoeForConditionalGeneration")  # fmt: skip
# Architectures with defaults of their own: on compute capability 10, on 9, else; None is the general rule.
NO_DEFAULTS: OwnDefaults = (None, None, None)
OWN_DEFAULTS: dict[str, OwnDefaults] = {
    **dict.fromkeys((GPT_OSS, LLAMA4, "Llama4ForCausalLM"), ("trtllm_mha", "fa3", "triton")),
    **dict.fromkeys(GEMMA4, ("trtllm_mha", "triton", "triton")),
    OLMO2: ("trtllm_mha", "fa3", "fa3"),
    **dict.fromkeys(QWEN_HYBRIDS, ("triton", None, None)),
    **dict.fromkeys(("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"), ("trtllm_mla", None, None)),
}
# What SGLang does not start these with.
NOT_TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((GPT_OSS, LLAMA4, "Llama4ForCausalLM", OLMO2), ("flashinfer",)),
    **dict.fromkeys(GEMMA4, ("flashinfer", "fa3")),
}
FAMILIES = {
    (8, 0): "Ampere data centre", (8, 6): "Ampere workstation", (8, 7): "Ampere Orin", (8, 9): "Ada",
    (9, 0): "Hopper", (10, 0): "Blackwell data centre", (10, 3): "Blackwell Ultra data centre",
    (11, 0): "Blackwell Thor", (12, 0): "Blackwell workstation", (12, 1): "Blackwell GB10",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Usable:
    """A backend that reads a tree mask, and whether SGLang lets it run on a GPU; `note` says why not, or what
    to know."""

    name: str
    is_usable: bool
    note: str


def family_of(capability: Capability) -> str:
    """A GPU's family in words, with its sm number."""
    sm = f"sm{capability[0]}{capability[1]}"
    return f"{FAMILIES[capability]} ({sm})" if capability in FAMILIES else sm


def default_backend(
    capability: Capability, cuda: Capability | None, shape: ModelShape | None, *, has_flashinfer: bool
) -> str:
    """What SGLang chooses with `--speculative-algorithm DDTREE` and no backend flag.

    Args:
        capability: of the GPU.
        cuda: of torch's build; None counts as new enough.
        shape: of the target; None stands for a plain model of grouped-query attention.
        has_flashinfer: whether flashinfer is installed.
    """
    major = capability[0]
    is_hopper = major == 9 and is_at_least(cuda, FA3_CUDA)
    is_sm100 = major == 10 and is_at_least(cuda, BLACKWELL_CUDA)
    own = OWN_DEFAULTS.get(shape.architecture, NO_DEFAULTS) if shape is not None else NO_DEFAULTS
    if (chosen := own[0] if is_sm100 else own[1] if major == 9 else own[2]) is not None:
        return chosen
    if shape is not None and shape.attention == "MLA":
        return "fa3" if is_hopper else "flashinfer" if is_sm100 else "triton"
    if is_hopper:
        return "fa3"
    has_sinks = shape is not None and shape.has_sinks
    return "flashinfer" if has_flashinfer and not has_sinks else "triton"


def is_at_least(version: Capability | None, wanted: Capability) -> bool:
    return version is None or version >= wanted


def usable_backends(
    capability: Capability, architecture: str = "", *, has_flashinfer: bool | None
) -> list[Usable]:
    """Each backend that reads a tree mask, on one GPU and for one architecture of targets.

    With `has_flashinfer` None flashinfer was not looked for, and is taken as installed.
    """
    not_taken = NOT_TAKEN.get(architecture, ())
    return [
        Usable(name, False, f"SGLang does not start {architecture} with it")
        if name in not_taken
        else usable_backend(name, capability, has_flashinfer=has_flashinfer)
        for name in VERIFY_BACKENDS
    ]


def usable_backend(name: str, capability: Capability, *, has_flashinfer: bool | None) -> Usable:
    if name == "fa3" and capability[0] not in (8, 9):
        return Usable(name, False, "SGLang runs it on compute capability 8 and 9 only")
    if name == "fa3":
        return Usable(name, True, "DDTREE was not run with it")
    if name == "flashinfer" and has_flashinfer is False:
        return Usable(name, False, "flashinfer is not installed")
    if name == "flashinfer":
        unseen = "; taken as there, not looked at on this machine" if has_flashinfer is None else ""
        return Usable(name, True, f"its plan waits for the device in each round; measured on an H200{unseen}")
    return Usable(
        name, True, "slow at long contexts, since it reads the prefix serially; measured on an H200"
    )


def backends_section(
    gpu: Gpu | None, cuda: Capability | None, shape: ModelShape | None, *, has_flashinfer: bool | None
) -> tuple[Section, str]:
    """The findings, and the backend to pass; with `has_flashinfer` None flashinfer is taken as installed."""
    title = "Attention backend"
    if gpu is None or gpu.capability is None:
        found = Finding(
            "backends.unknown", Level.WARN, "which backends fit is not told, since no GPU is known",
            why="SGLang's choice and what runs depend on the compute capability",
            todo=f"pass --attention-backend {RECOMMENDED}, or name the GPU with --compute-capability",
        )  # fmt: skip
        return Section("backends", title, (found,), {"default": None, "pass": RECOMMENDED}), RECOMMENDED
    architecture = "" if shape is None else shape.architecture
    usable = usable_backends(gpu.capability, architecture, has_flashinfer=has_flashinfer)
    default = default_backend(gpu.capability, cuda, shape, has_flashinfer=has_flashinfer is not False)
    lines = [f"{u.name:<12}{'fits' if u.is_usable else 'no':<6}{u.note}" for u in usable]
    target = "a target of grouped-query attention" if shape is None else "this target"
    finding = choice_finding(gpu.capability, default, usable, target)
    data: dict[str, Any] = {
        "compute_capability": list(gpu.capability),
        "default": default,
        "pass": RECOMMENDED,
        "usable": [asdict(u) for u in usable],
    }
    return Section("backends", title, (finding,), data, tuple(lines)), RECOMMENDED


def choice_finding(capability: Capability, default: str, usable: list[Usable], target: str) -> Finding:
    """What becomes of SGLang's own choice."""
    fits = [u.name for u in usable if u.is_usable]
    told = f"on {family_of(capability)} SGLang chooses {default} for {target} where no flag says otherwise"
    todo = f"pass --attention-backend {RECOMMENDED}"
    others = [name for name in fits if name != RECOMMENDED]
    if others:
        todo += f"; {' and '.join(others)} fit{'s' * (len(others) == 1)} too"
    if default in fits:
        return Finding(
            "backends.default", Level.OK, f"{told}, which reads a tree mask",
            why="another release, target or --speculative-eagle-topk changes the choice", todo=todo,
        )  # fmt: skip
    reason = next((u.note for u in usable if u.name == default), UNFIT_BACKENDS.get(default, "is not known"))
    return Finding(
        "backends.default", Level.WARN, f"{told}, with which a tree cannot be verified here ({reason})",
        why="DDTREE refuses it at start-up, or SGLang does", todo=todo,
    )  # fmt: skip


def gpu_of(environment: Environment, plan: Plan) -> Gpu | None:
    """The GPU that answers are for: the one that was named, else the smallest of this machine."""
    known = [gpu for gpu in environment.gpus if gpu.capability is not None]
    here = min(known, key=lambda gpu: gpu.memory_bytes or 0, default=None)
    if plan.capability is not None:
        return Gpu("as asked", plan.capability, plan.gpu_memory_bytes)
    if here is not None and plan.gpu_memory_bytes is not None:
        return Gpu(here.name, here.capability, plan.gpu_memory_bytes)
    return here
