"""A tiny pair in training: a random target, a corpus of random conversations, a fresh drafter."""

from __future__ import annotations

import numpy as np

from ddtree.draft.dflash_config import DFlashConfig
from ddtree.train.corpus import Corpus, ShardData
from ddtree.train.drafter import TrainableDrafter
from ddtree.train.packing import World
from ddtree.train.recipe import TrainSettings
from ddtree.train.target_features import FrozenTarget
from ddtree.train.trainer import Trainer
from tiny_models import tiny_drafter_config, tiny_llama

SETTINGS = TrainSettings(
    steps=8, rows=4, row_tokens=64, num_anchors=6, learning_rate=3e-3, warmup_steps=2, seed=1, log_every=1
)
VOCAB_SIZE = 211


def random_corpus(count: int = 40, seed: int = 0) -> Corpus:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(12, 30, count).astype(np.int32)
    data = ShardData(
        tokens=generator.integers(4, VOCAB_SIZE, lengths.sum()).astype(np.uint16),
        lengths=lengths,
        answer_starts=(lengths // 3).astype(np.int32),
        temperatures=np.zeros(count, np.float32),
        ids=np.arange(count, dtype=np.int64),
    )
    return Corpus(data, VOCAB_SIZE, "random")


def tiny_trainer(settings: TrainSettings = SETTINGS, world: World | None = None) -> Trainer:
    model = tiny_llama(vocab_size=VOCAB_SIZE)
    config = DFlashConfig.from_dict(tiny_drafter_config(model))
    drafter = TrainableDrafter(config, max_positions=128)
    target = FrozenTarget(model, config.target_layer_ids, "dense")
    drafter.init_weights(settings.seed, target.head_weight)
    return Trainer(drafter, target, settings, world or World())
