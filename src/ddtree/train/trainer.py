"""One training step and the loop around it: features, draft, loss, update."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from ddtree.errors import DDTreeError
from ddtree.train.attention import draft_mask
from ddtree.train.drafter import TrainableDrafter
from ddtree.train.losses import DraftLoss, draft_loss, position_weights
from ddtree.train.packed_batch import PackedBatch
from ddtree.train.packing import World
from ddtree.train.recipe import TrainSettings
from ddtree.train.target_features import FrozenTarget

BATCHES_AHEAD = 4
MIN_WEIGHT_SUM = 1e-6


class TrainingError(DDTreeError):
    """Training cannot go on: the loss is no longer a number, or far too large."""


class StepResult(NamedTuple):
    """What one step did, as device tensors, so that nothing waits for them."""

    loss: Tensor  # [] float32, mean over labels by their weights
    grad_norm: Tensor  # [] float32, before clipping
    position_correct: Tensor  # [draft_depth] float32, share of labels that are the draft's likeliest token


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Linear warm-up, then a cosine from `learning_rate` to its `min_learning_rate_share`."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    low = settings.min_learning_rate_share
    return settings.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


class Trainer:
    """Trains one drafter; in each process of several, on its rows of the batch.

    Args:
        drafter: on its device, float32.
        target: the frozen target, on the same device.
        settings: optimiser and loss.
        world: which process of how many this is.
    """

    def __init__(
        self, drafter: TrainableDrafter, target: FrozenTarget, settings: TrainSettings, world: World
    ) -> None:
        self.drafter, self.target, self.settings, self.world = drafter, target, settings, world
        self.device = next(drafter.parameters()).device
        self.model: nn.Module = drafter if world.size == 1 else DistributedDataParallel(drafter)
        self.optimizer = make_optimizer(drafter, settings, fused=self.device.type == "cuda")
        config = drafter.config
        self.weights = position_weights(config.draft_depth, settings.position_decay).to(self.device)
        self.mask_token = torch.tensor([config.mask_token_id], device=self.device)

    def train_step(self, step: int, batch: PackedBatch) -> StepResult:
        """Update the drafter on a batch that lies on the device; `step` counts from 0."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, step)
        self.optimizer.zero_grad(set_to_none=True)
        result = self.loss(batch)
        weight_sum = self._summed(result.weight_sum).clamp(min=MIN_WEIGHT_SUM)
        # Averaging gradients over processes divides by their number, which the mean over all labels must not.
        (result.loss_sum * (self.world.size / weight_sum)).backward()
        grad_norm = clip_grad_norm_(self.drafter.parameters(), self.settings.clip_norm, foreach=True)
        self.optimizer.step()
        counts = self._summed(result.position_counts).clamp(min=1)
        return StepResult(
            self._summed(result.loss_sum.detach()) / weight_sum,
            grad_norm,
            self._summed(result.position_correct) / counts,
        )

    def loss(self, batch: PackedBatch) -> DraftLoss:
        """Loss sums of this process's rows; the graph reaches the drafter's parameters alone."""
        teacher = None
        with torch.no_grad():
            if self.settings.labels == "soft":
                taps, hidden = self.target.taps_and_hidden(batch)
                teacher = at_labels(hidden, batch.anchors, self.weights.shape[0])
            else:
                taps = self.target.taps(batch)
            root_embeds = self.target.embed(batch.root_tokens)  # [rows, num_anchors, hidden]
            mask_embed = self.target.embed(self.mask_token)[0]  # [hidden]
            mask = draft_mask(batch, self.drafter.config.block_size, self.target.kind)
        with self.autocast():
            drafted = self.model(batch, taps, root_embeds, mask_embed, mask)
        weighting = self.settings.weighting
        return draft_loss(drafted, self.target.head_weight, batch.labels, self.weights, teacher, weighting)

    def autocast(self) -> AbstractContextManager[object]:
        """bfloat16 products where the target runs in it."""
        dtype = self.target.head_weight.dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype)

    def _summed(self, value: Tensor) -> Tensor:
        if self.world.size == 1:
            return value
        total = value.clone()
        dist.all_reduce(total)
        return total


def at_labels(hidden: Tensor, anchors: Tensor, draft_depth: int) -> Tensor:
    """The target's final states that predict each label, [rows, anchors, draft_depth, hidden].

    `hidden` is [rows, row_tokens, hidden]; the label k tokens after a root is predicted k - 1 after it.
    """
    places = anchors.unsqueeze(-1) + torch.arange(draft_depth, device=anchors.device)
    places = places.clamp(max=hidden.shape[1] - 1)  # [rows, anchors, draft_depth]
    rows = torch.arange(hidden.shape[0], device=anchors.device)[:, None, None]
    return hidden[rows, places]


def make_optimizer(drafter: nn.Module, settings: TrainSettings, *, fused: bool) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and none on norms."""
    parameters = list(drafter.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, fused=fused)


class Prefetcher:
    """Packs batches in a thread, in pinned memory, so that the device need not wait for them."""

    def __init__(self, source: Iterator[tuple[int, PackedBatch]], device: torch.device) -> None:
        self._source, self._device = source, device
        self._queue: queue.Queue[tuple[int, PackedBatch] | BaseException | None] = queue.Queue(BATCHES_AHEAD)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, PackedBatch]]:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            step, batch = item
            yield step, batch.to(self._device)

    def close(self) -> None:
        """End the thread."""
        self._is_closed.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _work(self) -> None:
        try:
            for step, batch in self._source:
                if self._is_closed.is_set():
                    return
                self._queue.put((step, batch.pinned() if self._device.type == "cuda" else batch))
            self._queue.put(None)
        except BaseException as error:  # handed to the loop, which raises it
            self._queue.put(error)


class StepFigures(NamedTuple):
    """Figures of the steps since the last report, read from the device at once."""

    step: int
    loss: float
    grad_norm: float
    position_correct: tuple[float, ...]
    steps_per_s: float


class StepReader:
    """Collects step results and turns them into one `StepFigures`; finds a step whose loss is no good."""

    def __init__(self, max_loss: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_loss, self._clock = max_loss, clock
        self._results: list[tuple[int, StepResult]] = []
        self._started = clock()

    def add(self, step: int, result: StepResult) -> None:
        """Keep the result of a step."""
        self._results.append((step, result))

    def __len__(self) -> int:
        return len(self._results)

    def read(self, batch_names: Callable[[int], str]) -> StepFigures:
        """Mean figures since the last reading; `batch_names` says what a step's batch held.

        Raises:
            TrainingError: a loss or gradient is not finite, or a loss is above the limit.
        """
        steps = [step for step, _ in self._results]
        results = [result for _, result in self._results]
        scalars = torch.stack([torch.stack((r.loss, r.grad_norm.float())) for r in results]).tolist()
        correct = torch.stack([r.position_correct for r in results]).mean(0).tolist()
        for step, (loss, grad_norm) in zip(steps, scalars, strict=True):
            reason = bad_step_reason(loss, grad_norm, self._max_loss)
            if reason:
                raise TrainingError(
                    f"training stopped at step {step}: {reason}; its batch held {batch_names(step)}. "
                    "The last checkpoint is from before; lower train.learning_rate, raise "
                    "train.warmup_steps, or look at these conversations"
                )
        now = self._clock()
        speed = len(steps) / max(1e-9, now - self._started)
        self._results, self._started = [], now
        losses, norms = zip(*scalars, strict=True)
        return StepFigures(
            steps[-1], sum(losses) / len(losses), sum(norms) / len(norms), tuple(correct), speed
        )

    def restart_clock(self) -> None:
        """Leave the time until now out of the speed (an evaluation, say)."""
        self._started = self._clock()


def bad_step_reason(loss: float, grad_norm: float, max_loss: float) -> str | None:
    """Why training must not go on after a step, or None."""
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(grad_norm):
        return f"the gradient's norm is {grad_norm} at a loss of {loss:.3f}"
    if loss > max_loss:
        return f"the loss is {loss:.3f}, above train.max_loss={max_loss:g}"
    return None
