"""How many training steps a second, and where does a step's time go?

Steps of the real target and of a drafter of the shipped one's shape on random tokens, packed as
conversations of 200 to 300 tokens: 16 rows of 1,024 tokens with 96 anchors are 64 conversations with 24
anchors each. After a warm-up, which compiles, windows of steps are timed by the wall clock; CUDA events
between the phases say where the time goes. Figures are medians over windows. The last line is JSON.

    python benchmarks/bench_train_step.py --output results/train_step_gpu.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from common import write_results
from ddtree.config import Dtype
from ddtree.draft.dflash_config import DFlashConfig
from ddtree.models import resolve_drafter
from ddtree.train.attention import default_kind, draft_mask
from ddtree.train.drafter import TrainableDrafter
from ddtree.train.losses import draft_loss, position_weights
from ddtree.train.packed_batch import NO_LABEL, PackedBatch
from ddtree.train.recipe import TargetSettings
from ddtree.train.target import open_target
from ddtree.train.target_features import FrozenTarget

PHASES = ("target features", "drafter forward", "loss", "backward", "optimiser")
CONVERSATION_TOKENS = (200, 300)
PROMPT_SHARE = 0.3
BATCHES = 8  # made before, then used in turn
POSITION_DECAY, LEARNING_RATE, CLIP_NORM = 7.0, 6e-4, 1.0


class Models(NamedTuple):
    """What a step runs on, and what it updates with."""

    target: FrozenTarget
    drafter: TrainableDrafter
    optimizer: torch.optim.Optimizer
    weights: Tensor  # [draft_depth] float32
    mask_token: Tensor  # [1] int64


class Clock:
    """Times at the borders of phases: CUDA events, which wait for nothing, or the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """A border between two phases, or the start of a step."""
        if self._is_cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def read_ms(self) -> list[float]:
        """Mean milliseconds of each phase over the steps since the last reading."""
        self.wait()
        marks, self._marks = self._marks, []
        width = len(PHASES) + 1
        steps = [marks[first : first + width] for first in range(0, len(marks), width)]
        return [
            statistics.fmean(self._ms(step[i], step[i + 1]) for step in steps) for i in range(len(PHASES))
        ]

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self._is_cuda:
            torch.cuda.synchronize()

    def _ms(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second) if self._is_cuda else (second - first) * 1e3)


def random_row(
    generator: np.random.Generator, row_tokens: int, num_anchors: int, draft_depth: int, vocab_size: int
) -> tuple[np.ndarray, ...]:
    """Tokens, positions, document starts [row_tokens], anchors [num_anchors], labels of one row."""
    tokens = generator.integers(vocab_size, size=row_tokens)
    positions, starts, ends = (np.zeros(row_tokens, np.int64) for _ in range(3))
    roots: list[np.ndarray] = []
    first = 0
    while first < row_tokens:
        last = min(row_tokens, first + int(generator.integers(*CONVERSATION_TOKENS)))
        positions[first:last], starts[first:last], ends[first:last] = np.arange(last - first), first, last
        roots.append(np.arange(first + int(PROMPT_SHARE * (last - first)), last - 1))
        first = last
    anchors = np.sort(generator.choice(np.concatenate(roots), num_anchors, replace=False))
    places = anchors[:, None] + 1 + np.arange(draft_depth)  # [num_anchors, draft_depth]
    is_known = places < ends[anchors][:, None]
    labels = np.where(is_known, tokens[np.minimum(places, row_tokens - 1)], NO_LABEL)
    return tokens, positions, starts, anchors, labels


def random_batch(args: argparse.Namespace, config: DFlashConfig, seed: int) -> PackedBatch:
    """A batch of random conversations, on the CPU."""
    generator = np.random.default_rng(seed)
    rows = [
        random_row(generator, args.row_tokens, args.anchors, config.draft_depth, config.vocab_size)
        for _ in range(args.rows)
    ]
    return PackedBatch(*(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)))


def load_models(args: argparse.Namespace, device: torch.device) -> Models:
    """Real target, drafter with random weights, fused AdamW on CUDA."""
    opened = open_target(TargetSettings(model=args.model, dtype=Dtype(args.dtype)), device)
    config = DFlashConfig.from_path(Path(resolve_drafter(args.drafter, args.model) or ""))
    target = FrozenTarget(opened.load_model(), config.target_layer_ids, default_kind(device))
    drafter = TrainableDrafter(config, args.row_tokens + config.block_size)
    drafter.init_weights(0, target.head_weight)
    drafter = drafter.to(device)
    if args.layers == "compiled":
        target.compile_layers()
        drafter.compile_layers()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda")
    weights = position_weights(config.draft_depth, POSITION_DECAY).to(device)
    return Models(target, drafter, optimizer, weights, torch.tensor([config.mask_token_id], device=device))


def train_step(models: Models, batch: PackedBatch, clock: Clock) -> Tensor:
    """One update, its phases marked; the loss stays on the device."""
    target, drafter, config = models.target, models.drafter, models.drafter.config
    device, dtype = batch.tokens.device, target.head_weight.dtype
    clock.mark()
    taps = target.taps(batch)
    root_embeds, mask_embed = target.embed(batch.root_tokens), target.embed(models.mask_token)[0]
    mask = draft_mask(batch, config.block_size, default_kind(device))
    clock.mark()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        drafted = drafter(batch, taps, root_embeds, mask_embed, mask)
    clock.mark()
    result = draft_loss(drafted, target.head_weight, batch.labels, models.weights)
    loss = result.loss_sum / result.weight_sum
    clock.mark()
    models.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    clock.mark()
    clip_grad_norm_(drafter.parameters(), CLIP_NORM, foreach=True)
    models.optimizer.step()
    clock.mark()
    return loss.detach()


def timed_windows(
    models: Models, batches: list[PackedBatch], clock: Clock, args: argparse.Namespace
) -> tuple[list[float], list[list[float]]]:
    """Steps a second of each window, and each window's milliseconds by phase."""
    rates, phases = [], []
    for _ in range(args.windows):
        clock.wait()
        begin = time.perf_counter()
        for step in range(args.steps):
            train_step(models, batches[step % len(batches)], clock)
        clock.wait()
        rates.append(args.steps / (time.perf_counter() - begin))
        phases.append(clock.read_ms())
    return rates, phases


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto", help="whose shape is trained")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--layers", default="compiled", choices=("compiled", "eager"))
    for name, default in {
        "rows": 16, "row-tokens": 1024, "anchors": 96, "warm-up": 20, "steps": 50, "windows": 5,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    models = load_models(args, device)
    config = models.drafter.config
    batches = [random_batch(args, config, seed).to(device) for seed in range(BATCHES)]
    clock = Clock(device)
    begin = time.perf_counter()
    first_loss = float(train_step(models, batches[0], clock))
    start_s = time.perf_counter() - begin
    for step in range(args.warm_up):
        train_step(models, batches[step % BATCHES], clock)
    clock.read_ms()
    rates, phases = timed_windows(models, batches, clock, args)
    last_loss = float(train_step(models, batches[0], clock))
    phase_ms = [statistics.median(column) for column in zip(*phases, strict=True)]
    is_cuda = device.type == "cuda"
    results = {
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "dtype": args.dtype,
        "layers": args.layers,
        "rows": args.rows,
        "row_tokens": args.row_tokens,
        "anchors_a_row": args.anchors,
        "block_size": config.block_size,
        "steps_a_window": args.steps,
        "steps_per_s": round(statistics.median(rates), 2),
        "steps_per_s_windows": [round(rate, 2) for rate in rates],
        "phase_ms": {name: round(ms, 3) for name, ms in zip(PHASES, phase_ms, strict=True)},
        "first_step_s": round(start_s, 1),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 2) if is_cuda else None,
        "loss_first_and_last": [round(first_loss, 3), round(last_loss, 3)],
    }
    write_results(args.output, results)


if __name__ == "__main__":
    main()
