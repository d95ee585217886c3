"""Writes a random target of a Qwen3's shape, whose greedy text is known, and a random DFlash drafter for it.

Timing asks for a target of a real size, but not for what it says. The layers are random and small beside the
embedding that passes through them, and the output head's row of walk[t] is the embedding of t: so the target
continues every token t with walk[t], by a margin far above rounding in any number format, batch or number of
tensor-parallel ranks (`planted_acceptance.Walk`). The drafter is random outright. Neither has a tokenizer:
SGLang serves them with `skip_tokenizer_init`. Weights are made on a GPU where there is one.

    python benchmarks/make_random_pair.py --folder /tmp/random-8b
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.dflash_model import weight_shapes
from planted_acceptance import Walk

SHARD_BYTES = 4 << 30
EMBEDDING_SCALE, PROJECTION_SCALE = 1.0, 0.02
# Of the projections back into the residual stream: all of them together stay below a fifth of the embedding.
RESIDUAL_SCALE = 1e-4
TARGET_FOLDER, DRAFTER_FOLDER = "target", "drafter"
QWEN3_8B: Mapping[str, int] = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
# The ids behind are special tokens and padding in Qwen3's own vocabulary.
RESERVED_TOKENS = 293
CONTEXT_TOKENS = 40_960


def target_config(shape: Mapping[str, int], dtype: str, seed: int) -> dict[str, Any]:
    """config.json of the target."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **shape, "made_from_seed": seed,
        "max_position_embeddings": CONTEXT_TOKENS, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "dtype": dtype,
        "bos_token_id": shape["vocab_size"] - 2, "eos_token_id": shape["vocab_size"] - 2,
    }  # fmt: skip


def drafter_config(
    shape: Mapping[str, int], dtype: str, num_layers: int, block_size: int, seed: int
) -> dict[str, Any]:
    """config.json of the drafter, which reads five layers of the target, spread as in z-lab's checkpoints."""
    depth = shape["num_hidden_layers"]
    first, last = 1, max(depth - 3, 1)
    taps = sorted({first + round(i * (last - first) / 4) for i in range(5)})
    return {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **shape, "made_from_seed": seed,
        "num_hidden_layers": num_layers, "max_position_embeddings": CONTEXT_TOKENS,
        "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "dtype": dtype, "block_size": block_size, "num_target_layers": depth,
        "layer_types": ["full_attention"] * num_layers,
        "dflash_config": {"mask_token_id": shape["vocab_size"] - 3, "target_layer_ids": taps},
    }  # fmt: skip


class RandomWeights:
    """Normal weights of a seed; norms are 1.

    Args:
        dtype: of the weights.
        device: where they are made; a seed gives other weights on another kind of device.
        seed: of all of them.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def __call__(self, scale: float, *shape: int) -> Tensor:
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        return made.normal_(std=scale, generator=self._generator)

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=self._dtype, device=self._device)


def target_weights(shape: Mapping[str, int], walk: Walk, make: RandomWeights) -> Iterator[tuple[str, Tensor]]:
    """The target's tensors by transformers' names."""
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    embedding = make(EMBEDDING_SCALE, shape["vocab_size"], hidden)
    yield "model.embed_tokens.weight", embedding
    head = torch.empty_like(embedding)
    # A power of two changes no bit but the exponent; logits of the right tokens are near its square root's.
    head[torch.from_numpy(walk.table()).to(head.device)] = embedding * 2.0 ** -(hidden.bit_length() // 2)
    yield "lm_head.weight", head
    del embedding, head
    yield "model.norm.weight", make.ones(hidden)
    queries, keys = (shape[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    inner = shape["intermediate_size"]
    for i in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", make.ones(hidden)
        yield f"{layer}.post_attention_layernorm.weight", make.ones(hidden)
        yield f"{layer}.self_attn.q_norm.weight", make.ones(head_dim)
        yield f"{layer}.self_attn.k_norm.weight", make.ones(head_dim)
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{layer}.self_attn.{name}_proj.weight", make(PROJECTION_SCALE, width, hidden)
        yield f"{layer}.self_attn.o_proj.weight", make(RESIDUAL_SCALE, hidden, queries)
        for name in ("gate", "up"):
            yield f"{layer}.mlp.{name}_proj.weight", make(PROJECTION_SCALE, inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", make(RESIDUAL_SCALE, hidden, inner)


def drafter_weights(config: Mapping[str, Any], make: RandomWeights) -> Iterator[tuple[str, Tensor]]:
    """The drafter's tensors by z-lab's names."""
    for name, shape in weight_shapes(DFlashConfig.from_dict(config)).items():
        yield name, make.ones(*shape) if "norm" in name else make(PROJECTION_SCALE, *shape)


def write_sharded(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> int:
    """Write safetensors of at most about `SHARD_BYTES` with their index; the bytes written."""
    shard: dict[str, Tensor] = {}
    size, total, files = 0, 0, 0
    names: dict[str, str] = {}

    def flush() -> None:
        nonlocal size, files
        file = f"model-{files + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        names.update(dict.fromkeys(shard, file))
        shard.clear()
        size, files = 0, files + 1

    for name, weight in weights:
        shard[name] = weight.cpu()
        size, total = size + weight.nbytes, total + weight.nbytes
        if size >= SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")
    return total


def write_once(folder: Path, config: dict[str, Any], write: Callable[[Path], int]) -> int:
    """Fill a folder, its config.json last; 0 where it already holds that config.json."""
    text = json.dumps(config, indent=1) + "\n"
    file = folder / "config.json"
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    written = write(folder)
    file.write_text(text, encoding="utf-8")
    return written


def write_pair(
    folder: Path, shape: Mapping[str, int], *, num_draft_layers: int = 5, block_size: int = 16,
    dtype: str = "bfloat16", seed: int = 0, reserved_tokens: int = RESERVED_TOKENS,
) -> tuple[Path, Path]:  # fmt: skip
    """Write target and drafter of a shape below a folder, unless they are there; their folders."""
    walk = Walk(shape["vocab_size"], shape["vocab_size"] - reserved_tokens, seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch_dtype = getattr(torch, dtype)
    target, drafter = folder / TARGET_FOLDER, folder / DRAFTER_FOLDER

    def write_target(place: Path) -> int:
        walk.write(place)
        return write_sharded(place, target_weights(shape, walk, RandomWeights(torch_dtype, device, seed)))

    def write_drafter(place: Path) -> int:
        return write_sharded(place, drafter_weights(config, RandomWeights(torch_dtype, device, seed + 1)))

    write_once(target, target_config(shape, dtype, seed), write_target)
    config = drafter_config(shape, dtype, num_draft_layers, block_size, seed + 1)
    write_once(drafter, config, write_drafter)
    return target, drafter


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    for name, value in QWEN3_8B.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--draft-layers", type=int, default=5)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--reserved-tokens", type=int, default=RESERVED_TOKENS, help="ids no text contains")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = {name: getattr(args, name) for name in QWEN3_8B}
    begin = time.perf_counter()
    write_pair(
        args.folder, shape, num_draft_layers=args.draft_layers, block_size=args.block_size, dtype=args.dtype,
        seed=args.seed, reserved_tokens=args.reserved_tokens,
    )  # fmt: skip
    print(f"{args.folder}: {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
