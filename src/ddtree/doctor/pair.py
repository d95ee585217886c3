"""Whether a drafter fits its target, and what of the two DDTREE refuses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ddtree.config import PluginConfig, is_int
from ddtree.doctor.checkpoints import Checkpoint, Fetch, open_drafter, open_target, tensor_shapes
from ddtree.doctor.model_shape import ModelShape, text_part
from ddtree.doctor.plan import Plan
from ddtree.doctor.report import Finding, Level, Section
from ddtree.draft.dflash_config import DFlashConfig
from ddtree.errors import CheckpointError, DDTreeError, UnsupportedModelError
from ddtree.models import KNOWN_MODELS
from ddtree.sglang_plugin.server_refusals import Launch, is_dflash, refusals

SIMULATE, HND = "SGLANG_SIMULATE_ACC_LEN", "SGLANG_USE_HND_KVCACHE"
TRUE = ("1", "true", "yes", "y")
OTHER_DRAFTER = "use a drafter that was trained for this target"


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafter, as far as they could be found and read.

    Attributes:
        drafter: None where its config is broken.
        draft: None where it is of a kind that `DFlashConfig` does not take.
    """

    target: Checkpoint | None = None
    shape: ModelShape | None = None
    drafter: Checkpoint | None = None
    draft: DFlashConfig | None = None


def open_pair(plan: Plan, fetch: Fetch | None) -> tuple[Pair, list[Finding]]:
    """The pair that a plan names, and what could not be found or read of it."""
    if plan.model is None:
        return Pair(), []
    found: list[Finding] = []
    target = drafter = shape = draft = None
    try:
        target = open_target(plan.model, fetch)
        shape = ModelShape.from_config(target.config)
    except DDTreeError as error:
        found.append(not_found("pair.target", error))
    try:
        drafter = open_drafter(plan.drafter, plan.model, fetch)
        draft = DFlashConfig.from_dict(drafter.config)
    except UnsupportedModelError as error:
        found.append(Finding(
            "pair.drafter-kind", Level.WARN, f"this package's own engine does not take the drafter: {error}",
            why="SGLang may load it nevertheless; whether DDTREE refuses it there stands below",
            todo="use a plain DFlash drafter",
        ))  # fmt: skip
    except DDTreeError as error:
        drafter = None
        found.append(not_found("pair.drafter", error))
    return Pair(target, shape, drafter, draft), found


def not_found(name: str, error: DDTreeError) -> Finding:
    return Finding(
        name, Level.ERROR, str(error),
        why="nothing can be said of a model whose config.json is not at hand",
        todo="give the folder that the server will read, with --model or --drafter",
    )  # fmt: skip


def pair_section(
    plan: Plan,
    pair: Pair,
    found: list[Finding],
    config: PluginConfig,
    backend: str,
    environ: Mapping[str, str],
) -> Section:
    """The findings on a pair."""
    if pair.target is not None and pair.shape is not None:
        found = [*found, *target_findings(pair.target, pair.shape)]
    if pair.drafter is not None and pair.draft is not None:
        found.append(draft_finding(pair.drafter, pair.draft))
        found += weight_findings(pair.drafter, pair.draft)
    if pair.shape is not None and pair.draft is not None:
        found += split_findings(pair.draft, pair.shape, plan.tp_size)
        differences = list(fit_findings(pair.draft, pair.shape, plan))
        found += differences or [Finding("pair.fit", Level.OK, "the drafter's shape is that of the target")]
    if pair.target is not None and pair.drafter is not None:
        found += list(copy_findings(plan, pair.target, pair.drafter))
    if pair.shape is not None:
        found += refusal_findings(launch_of(plan, pair, pair.shape, config, backend, environ))
    return Section("pair", "Target and drafter", tuple(found), pair_json(pair))


def target_findings(target: Checkpoint, shape: ModelShape) -> list[Finding]:
    kind = f"MLA, {shape.latent_dim} numbers a token" if shape.latent_dim else (
        f"{shape.num_kv_heads} KV heads of {shape.head_dim}"
    )  # fmt: skip
    quantised = f", quantised ({shape.quantization})" if shape.quantization else ""
    told = (
        f"target {target.name}: {shape.architecture}, {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"vocabulary {shape.vocab_size}, {kind}, {shape.dtype}{quantised}"
    )
    found = [Finding("pair.target", Level.OK, told)]
    if is_dflash({"architectures": [shape.architecture]}):
        found.append(Finding(
            "pair.target-kind", Level.ERROR, f"{target.name} is a DFlash drafter, not a target",
            why="it has neither an embedding nor an output head",
            todo="name the model that it was trained for with --model, and this one with --drafter",
        ))  # fmt: skip
    if not target.has_tokenizer and target.weight_bytes and any(target.folder.glob("*.safetensors")):
        found.append(Finding(
            "pair.tokenizer", Level.ERROR, f"{target.folder} has no tokenizer file",
            why="SGLang takes the tokenizer from the target's folder",
            todo="copy tokenizer.json and its like there, or pass --tokenizer-path",
        ))  # fmt: skip
    return found


def draft_finding(drafter: Checkpoint, draft: DFlashConfig) -> Finding:
    told = (
        f"drafter {drafter.name}: block {draft.block_size}, {draft.num_layers} layers, hidden "
        f"{draft.hidden_size}, mask token {draft.mask_token_id}, reads the target's layers "
        f"{', '.join(map(str, draft.target_layer_ids))}, {dtype_of(drafter)}"
    )
    return Finding("pair.drafter", Level.OK, told)


def weight_findings(drafter: Checkpoint, draft: DFlashConfig) -> list[Finding]:
    """Whether the drafter's files hold what its config says, by the one tensor that reads the target."""
    try:
        shapes = tensor_shapes(drafter.folder)
    except CheckpointError as error:
        return [Finding(
            "pair.weights", Level.ERROR, str(error),
            why="SGLang cannot load it", todo="download the drafter again",
        )]  # fmt: skip
    if not shapes:
        return []  # only its small files are here
    wanted = [draft.hidden_size, draft.num_taps * draft.hidden_size]
    found = next(
        (shape for name, (shape, _) in shapes.items() if name.removeprefix("model.") == "fc.weight"), None
    )
    if found == wanted:
        return []
    told = "is missing" if found is None else f"has shape {found}, and its config.json implies {wanted}"
    return [Finding(
        "pair.weights", Level.ERROR, f"the drafter's fc.weight {told}",
        why="it turns the target's hidden states into what the drafter reads",
        todo="download the drafter again, and check that it is one in the z-lab layout",
    )]  # fmt: skip


def fit_findings(draft: DFlashConfig, shape: ModelShape, plan: Plan) -> Iterator[Finding]:
    """Every difference between what the drafter was made for and the target."""
    if draft.hidden_size != shape.hidden_size:
        yield misfit(
            "hidden-size", f"hidden size {draft.hidden_size}, the target's {shape.hidden_size}",
            "the drafter reads the target's hidden states and embeddings",
        )  # fmt: skip
    beyond = [i for i in draft.target_layer_ids if i >= shape.num_layers]
    if beyond or draft.num_target_layers not in (None, shape.num_layers):
        made_for = f", made for {draft.num_target_layers}" if draft.num_target_layers else ""
        yield misfit(
            "layers", f"target_layer_ids up to {max(draft.target_layer_ids)}{made_for}, and the target has "
            f"{shape.num_layers} layers",
            "the drafter reads the outputs of these layers",
        )  # fmt: skip
    if draft.vocab_size != shape.vocab_size:
        yield misfit(
            "vocabulary", f"a vocabulary of {draft.vocab_size}, the target's {shape.vocab_size}",
            "drafts and target share one embedding and one output head",
        )  # fmt: skip
    if draft.mask_token_id >= shape.vocab_size:
        yield misfit(
            "mask-token", f"mask token {draft.mask_token_id}, the target has {shape.vocab_size} tokens",
            "the mask token's embedding is the target's",
        )  # fmt: skip
    if (rope := (draft.rope.theta, draft.rope.rope_type)) != shape.rope:
        yield Finding(
            "pair.rope", Level.WARN,
            f"the drafter's rope is {rope[1]} with base {rope[0]:g}, the target's {shape.rope[1]} with base "
            f"{shape.rope[0]:g}",
            why="drafters are trained with their target's; a wrong key in config.json shows as poor drafts "
            "at long contexts",
            todo="compare with the drafter's card; if it says nothing, measure the accept length at length",
        )  # fmt: skip
    if (context := plan.context_tokens or shape.max_positions) > draft.max_position_embeddings:
        yield Finding(
            "pair.context", Level.WARN,
            f"contexts of {context} tokens pass the drafter's {draft.max_position_embeddings} positions",
            why="beyond them drafts may be poor, which costs speed and never correctness",
            todo="measure the accept length there, or limit --context-length",
        )  # fmt: skip


def split_findings(draft: DFlashConfig, shape: ModelShape, tp_size: int) -> list[Finding]:
    """Whether heads can be split over the ranks; KV heads may be fewer than ranks and are then copied."""
    heads = {
        "target": (shape.num_heads, shape.num_kv_heads),
        "drafter": (draft.num_heads, draft.num_kv_heads),
    }
    return [
        Finding(
            "pair.tp", Level.ERROR,
            f"the {who}'s {num_heads} heads and {num_kv} KV heads cannot be split over {tp_size} ranks",
            why="SGLang gives each rank the same number of heads",
            todo=f"choose a --tp that divides {num_heads}",
        )
        for who, (num_heads, num_kv) in heads.items()
        if num_heads % tp_size or (num_kv % tp_size and tp_size % num_kv)
    ]  # fmt: skip


def misfit(name: str, what: str, why: str) -> Finding:
    return Finding(f"pair.{name}", Level.ERROR, f"the drafter has {what}", why=why, todo=OTHER_DRAFTER)


def copy_findings(plan: Plan, target: Checkpoint, drafter: Checkpoint) -> Iterator[Finding]:
    """Which of two copies a known target is, and whether the dtypes of the pair differ."""
    for known in KNOWN_MODELS.values():
        is_shipped = drafter.folder.name == known.drafter
        if target.is_dequantised and is_shipped:
            yield Finding(
                "pair.copy", Level.OK,
                "the target is the copy dequantised from a quantised file, on which the drafter was trained; "
                f"it is not bit for bit {known.hub_name} of the hub",
            )  # fmt: skip
        elif is_shipped and not target.is_dequantised:
            yield Finding(
                "pair.copy", Level.WARN,
                f"the target is not the dequantised copy on which the drafter was trained ({known.hub_name} "
                "has the original weights)",
                why="texts stay the target's own; accept lengths were measured on the other copy",
                todo="to repeat published figures, serve the folder that ddtree demo prepares",
            )  # fmt: skip
    if (draft_dtype := dtype_of(drafter)) != (target_dtype := dtype_of(target)):
        yield Finding(
            "pair.dtype", Level.OK, f"the drafter's weights are {draft_dtype}, the target's {target_dtype}",
        )  # fmt: skip


def dtype_of(checkpoint: Checkpoint) -> str:
    config, text = checkpoint.config, text_part(checkpoint.config)
    return str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype")
               or config.get("torch_dtype") or "bfloat16")  # fmt: skip


def launch_of(
    plan: Plan, pair: Pair, shape: ModelShape, config: PluginConfig, backend: str, environ: Mapping[str, str]
) -> Launch:
    """The planned server as the plugin's start-up checks see one; they pass over an unknown drafter."""
    drafter = pair.drafter.config if pair.drafter else {}
    block = pair.draft.block_size if pair.draft else block_size_of(drafter)
    arguments = SimpleNamespace(
        device="cuda",
        speculative_draft_model_path=plan.drafter,
        kv_cache_dtype=plan.kv_dtype,
        tp_size=plan.tp_size,
    )
    return Launch(
        args=arguments,
        block_size=block,
        verify_width=None if block is None else config.verify_width(block),
        verify_backend=backend,
        attention_arch=shape.attention,
        is_hybrid=shape.is_hybrid,
        has_sliding_window=shape.has_window,
        has_attention_sinks=shape.has_sinks,
        context_length=plan.context_tokens or shape.max_positions,
        vocab_size=shape.vocab_size,
        drafter=drafter,
        simulated_accept_length=number_of(environ.get(SIMULATE, "")),
        has_hnd_kv_cache=environ.get(HND, "").lower() in TRUE,
    )


def block_size_of(config: Mapping[str, Any]) -> int | None:
    """The block size in a drafter's config that `DFlashConfig` does not take."""
    nested = config.get("dflash_config")
    places: list[Any] = [nested if isinstance(nested, Mapping) else {}, config]
    return next((int(size) for place in places if is_int(size := place.get("block_size"))), None)


def number_of(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def refusal_findings(launch: Launch) -> list[Finding]:
    """What the plugin refuses at start-up, all of it."""
    return [
        Finding(
            "pair.refused", Level.ERROR, f"DDTREE refuses to start: {reason}",
            why="a server with this pair and these settings ends at start-up",
            todo="change what it names; --speculative-algorithm DFLASH serves most of what DDTREE does not",
        )
        for reason in refusals(launch)
    ]  # fmt: skip


def pair_json(pair: Pair) -> dict[str, Any]:
    """The pair's figures for scripts."""
    shape, draft = pair.shape, pair.draft
    return {
        "target": shape and pair.target and {
            "folder": str(pair.target.folder), "architecture": shape.architecture,
            "attention": shape.attention, "layers": shape.num_layers, "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size, "max_positions": shape.max_positions, "dtype": shape.dtype,
            "weight_bytes": pair.target.weight_bytes, "is_dequantised": pair.target.is_dequantised,
        },
        "drafter": draft and pair.drafter and {
            "folder": str(pair.drafter.folder), "block_size": draft.block_size, "layers": draft.num_layers,
            "hidden_size": draft.hidden_size, "vocab_size": draft.vocab_size,
            "mask_token_id": draft.mask_token_id, "target_layer_ids": list(draft.target_layer_ids),
            "weight_bytes": pair.drafter.weight_bytes,
        },
    }  # fmt: skip
