"""A tiny pair on disk that SGLang loads: a float32 target with a tokenizer, and a DFlash drafter for it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedModel
from transformers.utils import logging

from ddtree.train.tiny_pair import tiny_tokenizer
from sglang_kit.sizes import BLOCK_SIZE, VOCAB_SIZE
from tiny_models import tiny_llama, tiny_qwen3, write_tiny_drafter

FAMILIES = {"qwen3": tiny_qwen3, "llama": tiny_llama}


class Pair(NamedTuple):
    """Where the two checkpoints lie, and the target as transformers runs it."""

    target_path: Path
    drafter_path: Path
    target: PreTrainedModel


def write_pair(folder: Path, family: str = "qwen3", block_size: int = BLOCK_SIZE, seed: int = 0) -> Pair:
    """Write a random target of that family and a random drafter for it; the same seed, the same pair."""
    logging.disable_progress_bar()
    tokenizer = tiny_tokenizer()
    target = FAMILIES[family](seed, vocab_size=VOCAB_SIZE)
    assert len(tokenizer) == VOCAB_SIZE
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    drafter_path = write_tiny_drafter(folder / "drafter", target, block_size, seed)
    return Pair(folder / "target", drafter_path, target)
