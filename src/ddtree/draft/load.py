"""Loads a DFlash checkpoint and refuses one that is broken or does not fit the target."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddtree.draft.dflash_config import DFlashConfig, read_json
from ddtree.draft.dflash_model import DFlashDrafter, weight_shapes
from ddtree.errors import CheckpointError, DrafterMismatchError, UnsupportedModelError
from ddtree.layers.decoder import DecoderStack, StackFactory

logger = logging.getLogger(__name__)

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# First part of a tensor's name -> what a checkpoint with such a tensor is.
FOREIGN_TENSORS = {
    "prefix_gru": "a Domino drafter, whose positions are not independent",
    "embed_proj": "a Domino drafter, whose positions are not independent",
    "candidate_selector": "a DFlash2 drafter, whose positions are not independent",
    "lilicorr": "a LiLiCorr drafter, whose positions are not independent",
    "markov_head": "a DSpark drafter, whose positions are not independent",
    "embed_tokens": "a drafter with an embedding of its own, but the target's is borrowed",
    "lm_head": "a drafter with an output head of its own, but the target's is borrowed",
}


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a drafter must know of its target."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    model_type: str
    max_positions: int


def load_drafter(
    path: Path,
    target_info: TargetInfo,
    embed: Callable[[Tensor], Tensor],
    head: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    stack_factory: StackFactory = DecoderStack,
) -> DFlashDrafter:
    """Load a drafter from a checkpoint folder in the z-lab layout (config.json and safetensors).

    Args:
        path: the folder.
        target_info: the target it must fit.
        embed, head: the target's embedding and output head, see `DFlashDrafter`.
        dtype: dtype to run in; the checkpoint's floats are converted.
        device: where the drafter runs.
        max_positions: longest context in tokens, the block included.
        stack_factory: makes what runs the layers.

    Raises:
        CheckpointError: a file or tensor is missing, broken, unexpected or of the wrong shape or dtype.
        UnsupportedModelError: another kind of drafter.
        DrafterMismatchError: it was made for another target; the message lists all differences.
    """
    path = Path(path)
    config = DFlashConfig.from_path(path)
    reasons = check_drafter_fits(config, target_info)
    if reasons:
        raise DrafterMismatchError(
            f"the drafter in {path} does not fit the target ({target_info.model_type}): "
            + "; ".join(reasons)
            + "; use a drafter that was trained for this target, or none"
        )
    if max_positions > config.max_position_embeddings:
        logger.warning(
            "contexts of %d tokens pass the drafter's max_position_embeddings=%d, where drafts may be poor",
            max_positions, config.max_position_embeddings,
        )  # fmt: skip
    weights = read_weights(path, config)
    return DFlashDrafter(weights, config, dtype, device, max_positions, embed, head, stack_factory)


def check_drafter_fits(config: DFlashConfig, target: TargetInfo) -> list[str]:
    """All differences that keep a drafter from working with a target; empty if it fits."""
    reasons = []
    if config.hidden_size != target.hidden_size:
        width = config.num_taps * config.hidden_size
        reasons.append(
            f"hidden_size is {config.hidden_size}, the target's {target.hidden_size} (fc reads {width} "
            f"features, {config.num_taps} taps of the target give {config.num_taps * target.hidden_size})"
        )
    beyond = [i for i in config.target_layer_ids if i >= target.num_layers]
    if beyond:
        reasons.append(
            f"target_layer_ids {beyond} are out of range, the target has {target.num_layers} layers"
        )
    if config.num_target_layers not in (None, target.num_layers):
        reasons.append(f"num_target_layers is {config.num_target_layers}, the target has {target.num_layers}")
    if config.vocab_size != target.vocab_size:
        reasons.append(f"vocab_size is {config.vocab_size}, the target's {target.vocab_size}")
    if config.mask_token_id >= target.vocab_size:
        reasons.append(
            f"mask_token_id {config.mask_token_id} is outside the target's {target.vocab_size} tokens"
        )
    return reasons


def read_weights(path: Path, config: DFlashConfig) -> dict[str, Tensor]:
    """All tensors of a checkpoint by z-lab name, checked against the config."""
    weights: dict[str, Tensor] = {}
    for file in weight_files(path):
        for name, weight in read_file(file):
            if name in weights:
                raise CheckpointError(f"tensor {name} is in {path} twice; download it again")
            weights[name] = weight
    check_weights(weights, config, path)
    return weights


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint, one or the shards its index names."""
    if (path / WEIGHTS_FILE).is_file():
        return [path / WEIGHTS_FILE]
    if not (path / INDEX_FILE).is_file():
        raise CheckpointError(
            f"{path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; only safetensors are read"
        )
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{path / INDEX_FILE} has no weight_map from tensor names to file names")
    files = [path / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if file.parent != path or not file.is_file():
            raise CheckpointError(f"{file}, named by {INDEX_FILE}, is missing; download it again")
    return files


def read_file(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                # Checkpoints saved from a wrapper carry its prefix; rotary caches hold no weights.
                if not name.endswith("rotary_emb.inv_freq"):
                    yield name.removeprefix("model."), tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is not a whole safetensors file ({error}); download it again"
        ) from None


def check_weights(weights: dict[str, Tensor], config: DFlashConfig, path: Path) -> None:
    """Raise unless names, shapes and dtypes are exactly those that the config implies."""
    shapes = weight_shapes(config)
    for name in weights:
        foreign = FOREIGN_TENSORS.get(name.split(".")[0])
        if foreign:
            raise UnsupportedModelError(
                f"tensor {name} in {path} belongs to {foreign}; use a plain DFlash drafter"
            )
    problems = [f"{name} is missing" for name in shapes if name not in weights]
    problems += [f"{name} is not part of a DFlash drafter" for name in weights if name not in shapes]
    for name, weight in weights.items():
        shape = tuple(weight.shape)
        if shape != shapes.get(name, shape):
            problems.append(f"{name} has shape {list(shape)}, its config.json implies {list(shapes[name])}")
        if weight.dtype not in WEIGHT_DTYPES:
            problems.append(f"{name} is {weight.dtype}, not bfloat16, float16 or float32")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            f"the tensors in {path} do not match config.json: {'; '.join(problems[:5])}{more}"
        )
