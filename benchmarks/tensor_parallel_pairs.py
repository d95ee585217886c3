"""What `bench_sglang_tensor_parallel` serves: its two pairs, and the engines of each at a number of ranks."""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sglang_planted
import sglang_rank_trees
from common import SETS, load_prompts
from ddtree.config import PluginConfig
from make_random_pair import DRAFTER_FOLDER, TARGET_FOLDER
from pad_heads import pad_pair
from planted_acceptance import PlantedDrafts, Simulation, Walk
from sglang_common import BENCHMARKS, chat_prompts

SHIPPED, RANDOM = "shipped", "random-8b"
PAIRS = (SHIPPED, RANDOM)
RANGES_PLUGIN = {"ddtree-ranges": "sglang_ranges:register"}
TIE_STEP = 2.0  # of logits that span some 40
PROMPT_TOKENS = (24, 96)  # least and most of a random prompt
WEIGHTS_BYTES = 22 << 30
MEMORY_FOLDER = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Group:
    """A pair at a number of ranks."""

    pair: str
    tp_size: int

    def __str__(self) -> str:
        return f"{self.pair} tp{self.tp_size}"

    def engine(self, arm: str) -> str:
        """The name of the engine that decodes in a way."""
        return f"{self} {arm}"


class PlantedTexts:
    """The random pair's known texts.

    Args:
        folder: of the pair.
        walk: its target's greedy text.
        block_size: of its drafter.
    """

    def __init__(self, folder: Path, walk: Walk, block_size: int) -> None:
        self.folder, self.walk, self._block_size = folder, walk, block_size
        self._simulations: dict[str, Simulation] = {}

    def start_writing(self, args: argparse.Namespace) -> subprocess.Popen[bytes]:
        """Write the weights beside what goes on here."""
        shape = [text for name, value in args.random_shape.items()
                 for text in (f"--{name.replace('_', '-')}", str(value))]  # fmt: skip
        command = [sys.executable, str(BENCHMARKS / "make_random_pair.py"), "--folder", str(self.folder),
                   *shape, "--block-size", str(args.random_block), "--dtype", args.dtype,
                   "--seed", str(args.seed), "--reserved-tokens", str(args.reserved_tokens)]  # fmt: skip
        return subprocess.Popen(command)

    def prompts(self, count: int) -> list[list[int]]:
        """Random prompts of a seed: the first ones stay the same whatever the count."""
        generator = np.random.default_rng(self.walk.seed + 1)
        prompts = []
        for _ in range(count):
            length = int(generator.integers(*PROMPT_TOKENS))
            prompts.append(generator.integers(0, self.walk.num_walked, length).tolist())
        return prompts

    def check(
        self, arm: str, prompts: Sequence[Sequence[int]], answers: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """How many texts are not the known one, and for drafts the rounds that a simulation makes."""
        simulation = self._simulation(arm)
        texts = [simulation.text(prompt[-1], len(answer["tokens"]))
                 for prompt, answer in zip(prompts, answers, strict=True)]  # fmt: skip
        wrong = sum(text != answer["tokens"] for text, answer in zip(texts, answers, strict=True))
        if arm == "plain":
            return {"wrong_texts": wrong}
        simulated = [simulation.rounds(prompt, len(answer["tokens"]))
                     for prompt, answer in zip(prompts, answers, strict=True)]  # fmt: skip
        return {"wrong_texts": wrong, "simulated_rounds": simulated}

    @functools.cached_property
    def _drafts(self) -> PlantedDrafts:
        return PlantedDrafts(self.walk, self._block_size - 1)

    def _simulation(self, arm: str) -> Simulation:
        if arm not in self._simulations:
            kind, _, nodes = arm.partition(":")
            budget = int(nodes) if kind == "ddtree" else 0
            candidates = PluginConfig(node_budget=budget).num_candidates if budget else 1
            self._simulations[arm] = Simulation(self.walk, self._drafts, budget or None, candidates)
        return self._simulations[arm]


@dataclass(frozen=True, slots=True)
class ServedPair:
    """A pair as engines are given it.

    Attributes:
        target, drafter: checkpoint folders.
        prompts: makes so many prompts, in tokens.
        arguments: of sglang.Engine.
        plugins: SGLang plugins of the engines that are timed.
        environment: for those plugins.
        planted: the known texts of the random pair.
    """

    target: Path
    drafter: Path
    vocab_size: int
    prompts: Callable[[int], list[list[int]]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    plugins: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    planted: PlantedTexts | None = None

    @property
    def has_tokenizer(self) -> bool:
        return not self.arguments.get("skip_tokenizer_init")


def shipped_pair(args: argparse.Namespace, folder: Path) -> ServedPair:
    """The pair that ships, padded below a folder; prompts alternate between the sets."""
    target, drafter = pad_pair(args.model, args.drafter, folder, args.kv_heads)
    vocab_size = json.loads((target / "config.json").read_text(encoding="utf-8"))["vocab_size"]

    @functools.cache
    def prompts(count: int) -> list[list[int]]:
        columns = [load_prompts(name, -(-count // len(SETS))) for name in SETS]
        return chat_prompts(str(target), [text for row in zip(*columns, strict=True) for text in row][:count])

    return ServedPair(target, drafter, vocab_size, prompts)


def random_pair(args: argparse.Namespace, folder: Path) -> ServedPair:
    """The random pair, whose weights are to be written below a folder."""
    vocab_size = args.random_shape["vocab_size"]
    walk = Walk(vocab_size, vocab_size - args.reserved_tokens, args.seed)
    planted = PlantedTexts(folder, walk, args.random_block)
    return ServedPair(
        folder / TARGET_FOLDER, folder / DRAFTER_FOLDER, vocab_size, planted.prompts,
        {"skip_tokenizer_init": True}, sglang_planted.PLUGIN,
        {sglang_planted.PLANTED_FOLDER: str(folder / TARGET_FOLDER)}, planted,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to start; names tell engines apart."""

    name: str
    group: Group
    arm: str
    pair: ServedPair
    first_gpu: int
    plugins: Mapping[str, str]
    environment: Mapping[str, str]
    ddtree_config: Mapping[str, Any]

    def arguments(self, args: argparse.Namespace) -> argparse.Namespace:
        """The program's arguments as `EngineProcess` wants them for this engine."""
        engine = {"tp_size": self.group.tp_size, **self.pair.arguments}
        if args.engine_arguments.get("device", "cuda") == "cuda":
            # Only the concurrencies that are measured get graphs, which are most of a start.
            engine |= {"base_gpu_id": self.first_gpu, "cuda_graph_bs_decode": sorted(args.concurrency)}
        own = {
            "model": str(self.pair.target), "drafter": str(self.pair.drafter),
            "engine_arguments": engine | args.engine_arguments,
            "ddtree_config": {**args.ddtree_config, **self.ddtree_config},
        }  # fmt: skip
        return argparse.Namespace(**vars(args) | own)

    def rank_logs(self) -> list[dict[str, Any]]:
        """What the ranks of a check engine wrote down."""
        folder = Path(self.environment[sglang_rank_trees.RANKS_FOLDER])
        return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("rank-*.json"))]


def engine_spec(pair: ServedPair, group: Group, arm: str, first_gpu: int) -> EngineSpec:
    """The engine of an arm that is timed; engines of one rank are spread over the GPUs."""
    num_gpus = torch.cuda.device_count()
    return EngineSpec(
        group.engine(arm), group, arm, pair, first_gpu % num_gpus if group.tp_size == 1 and num_gpus else 0,
        {**pair.plugins, **RANGES_PLUGIN}, pair.environment, {},
    )  # fmt: skip


def rank_specs(pair: ServedPair, group: Group, arm: str, folder: Path) -> list[EngineSpec]:
    """Engines whose ranks compare their trees: with the drafter's own logits, and with rounded ones."""
    specs = []
    for title, step in (("check", 0.0), ("ties", TIE_STEP)):
        name = group.engine(title)
        ranks = folder / name.replace(" ", "-")
        ranks.mkdir(parents=True, exist_ok=True)
        environment = {sglang_rank_trees.RANKS_FOLDER: str(ranks), sglang_rank_trees.TIE_STEP: str(step)}
        specs.append(EngineSpec(name, group, arm, pair, 0, sglang_rank_trees.PLUGIN, environment,
                                {"check_ranks": True}))  # fmt: skip
    # Of a random drafter's logits all are alike, and rounded ones are all the same.
    return specs if pair.planted is None else specs[:1]


def weights_folder() -> Path:
    """Where weights go by themselves: where they are, else in memory if it has room, else on disk."""
    in_memory, on_disk = (
        Path(place) / "ddtree-tp-weights" for place in (MEMORY_FOLDER, tempfile.gettempdir())
    )
    if in_memory.exists() or on_disk.exists():
        return in_memory if in_memory.exists() else on_disk
    has_room = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free > WEIGHTS_BYTES
    return in_memory if has_room else on_disk
