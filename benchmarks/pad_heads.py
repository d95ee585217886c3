"""Writes a checkpoint with more attention heads that computes the same, for tensor-parallel ranks to share.

SmolLM2-135M and its drafter have 9 query and 3 key-value heads, which neither 2 nor 4 divides, and SGLang
gives every rank as many heads. New heads are added at the end, in whole groups of a key-value head and its
query heads, and all their weights are zero: what they attend to is zero, and the output projection adds
nothing of it. The drafter's attention is made wider in the same way.

    python benchmarks/pad_heads.py --kv-heads 4 --folder /tmp/smollm2-135m-padded
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree.draft.load import WEIGHTS_FILE
from ddtree.models import resolve_drafter, resolve_target

ROW_HEADS = {
    "q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"
}  # fmt: skip
KEPT_FILES = ("tokenizer*", "generation_config.json", "special_tokens_map.json", "*.jinja")
TARGET_FOLDER, DRAFTER_FOLDER = "target", "drafter"


def padded_config(config: dict[str, Any], num_kv_heads: int) -> dict[str, Any]:
    """config.json with `num_kv_heads`, as many query heads for each as before, and an explicit head_dim.

    Raises:
        SystemExit: the checkpoint has more key-value heads already.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if num_kv_heads < kv_heads:
        raise SystemExit(f"--kv-heads {num_kv_heads} is not allowed: the checkpoint has {kv_heads} already")
    return config | {
        "num_attention_heads": heads // kv_heads * num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
    }


def padded_weight(name: str, weight: Tensor, config: dict[str, Any]) -> Tensor:
    """A tensor of the checkpoint with zeros where `config` has heads that it has not."""
    kind = name.split(".")[-2] if "." in name else ""
    if kind in ROW_HEADS:
        missing = config[ROW_HEADS[kind]] * config["head_dim"] - weight.shape[0]
        return torch.cat((weight, weight.new_zeros(missing, *weight.shape[1:])))
    if kind == "o_proj" and name.endswith(".weight"):
        missing = config["num_attention_heads"] * config["head_dim"] - weight.shape[1]
        return torch.cat((weight, weight.new_zeros(weight.shape[0], missing)), 1)
    return weight


def pad_checkpoint(source: Path, folder: Path, num_kv_heads: int) -> Path:
    """Write the checkpoint of `source` with `num_kv_heads` to `folder`, its tokenizer as it is."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    padded = padded_config(config, num_kv_heads)
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in KEPT_FILES:
        for file in source.glob(pattern):
            shutil.copy(file, folder / file.name)
    weights = load_file(source / WEIGHTS_FILE)
    made = {name: padded_weight(name, weight, padded).contiguous() for name, weight in weights.items()}
    save_file(made, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(padded, indent=1) + "\n", encoding="utf-8")
    return folder


def pad_pair(model: str, drafter: str, folder: Path, num_kv_heads: int) -> tuple[Path, Path]:
    """Write a padded target and its padded drafter below a folder; their folders.

    Raises:
        SystemExit: there is no drafter.
    """
    drafter_folder = resolve_drafter(drafter, model)
    if drafter_folder is None:
        raise SystemExit("drafter none is not allowed: name the drafter to pad, or auto")
    target = pad_checkpoint(resolve_target(model), folder / TARGET_FOLDER, num_kv_heads)
    return target, pad_checkpoint(drafter_folder, folder / DRAFTER_FOLDER, num_kv_heads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    for made in pad_pair(args.model, args.drafter, args.folder, args.kv_heads):
        print(made)


if __name__ == "__main__":
    main()
