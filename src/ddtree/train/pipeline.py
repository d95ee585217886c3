"""From a recipe to a drafter: generate the corpus, train, measure, export; each stage can be run alone.

A run's folder: `data/` the corpus, `checkpoints/`, `log.csv` and `log.png`, `acceptance.json`, `drafter/` the
result. Several processes (torchrun) train together; all else is done by the first one.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddtree.config import MIN_CONTEXT_TOKENS, check
from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.load import read_weights
from ddtree.errors import ConfigError, MissingExtraError, ModelError, UnsupportedModelError, first_line
from ddtree.provenance import provenance
from ddtree.train.acceptance import Text
from ddtree.train.attention import default_kind
from ddtree.train.checkpoint import Checkpoint, load_checkpoint, newest_step
from ddtree.train.corpus import Corpus
from ddtree.train.drafter import TrainableDrafter, training_refusal
from ddtree.train.drafter_shape import drafter_config
from ddtree.train.evaluation import (
    HELD_OUT,
    Evaluator,
    accept_lengths,
    answered,
    held_out_prompts,
    report,
    set_prompts,
)
from ddtree.train.export import export_drafter
from ddtree.train.fingerprint import corpus_fingerprint, target_fingerprint, training_fingerprint
from ddtree.train.generate import ProgressReport, generate_corpus
from ddtree.train.loop import TrainingRun, train
from ddtree.train.model_card import CardFacts, model_card
from ddtree.train.packing import World
from ddtree.train.plot import plot_log
from ddtree.train.recipe import Recipe
from ddtree.train.reporting import PipelineOptions, PipelineResult, Reporter, SilentReporter, Stage
from ddtree.train.run_folder import RunFolder, read_json, write_json
from ddtree.train.target import Target, open_target
from ddtree.train.target_features import FrozenTarget
from ddtree.train.template import template_pieces
from ddtree.train.trainer import Trainer
from ddtree.train.training_log import TrainingLog, read_log

# Other processes wait this long for what the first one does alone.
WAIT_S = 6 * 3600


class Pipeline:
    """One run of a recipe in a folder.

    Args:
        recipe: what to make.
        folder: where everything is kept.
        options: stages, device, resuming and time.
        reporter: who listens; in processes other than the first nobody.
        world: which process of how many this is.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, options: PipelineOptions, reporter: Reporter, world: World
    ) -> None:
        self.recipe, self.options, self.world = recipe, options, world
        self.folder = RunFolder(folder)
        self.reporter = reporter if world.rank == 0 else SilentReporter()
        self.device = process_device(options.device)
        seconds = options.max_seconds
        self.deadline = None if seconds is None else time.monotonic() + seconds
        self.target: Target = open_target(recipe.target, self.device)
        self.config = drafter_config(recipe.drafter, self.target.config)
        self.fingerprint = training_fingerprint(recipe)
        self.is_late = False
        refuse_unfit(recipe, self.config, self.target, options)

    def run(self) -> PipelineResult:
        """Run the stages, in their order."""
        if self.world.rank == 0:
            self.folder.begin()
        steps = {
            Stage.DATA: self.generate,
            Stage.TRAIN: self.train,
            Stage.EVALUATE: self.evaluate,
            Stage.EXPORT: self.export,
        }
        try:
            for stage in self.options.stages:
                if self.world.rank == 0 or stage is Stage.TRAIN:
                    self.reporter.stage(stage.value)
                    steps[stage]()
                if self._everybody_stops():
                    self.reporter.message("the time is up; the same command goes on from here")
                    break
        finally:
            self.folder.end()
        return self._result()

    def _everybody_stops(self) -> bool:
        """Whether the time was up in the first process, which is the one that looks; waits for it."""
        if self.world.size == 1:
            return self.is_late
        is_late = torch.tensor(int(self.is_late), device=self.device)
        dist.broadcast(is_late, src=0)
        return bool(is_late.item())

    def generate(self) -> None:
        """Write the corpus, going on with what is there."""
        if not self.options.resume:
            self.folder.clear_corpus()
        done = generate_corpus(
            self.target.load_model(), self.target.tokenizer, self.recipe.data, self.folder.data,
            corpus_fingerprint(self.recipe), self._on_generation,
        )  # fmt: skip
        write_json(self.folder.generation, summed(read_json(self.folder.generation), asdict(done)))
        if done.new_tokens < self.recipe.data.new_tokens and not self.is_late:
            self.reporter.message(
                f"the prompts are used up: {done.new_tokens:,} of {self.recipe.data.new_tokens:,} tokens"
            )

    def train(self) -> None:
        """Train from the newest checkpoint, or from the start."""
        settings = self.recipe.train
        if not self.options.resume and self.world.rank == 0:
            self.folder.clear_training()
        if self.world.size > 1:
            dist.barrier()
        corpus = self._corpus()
        indices, held_out = corpus.split(self.recipe.data.held_out, self.recipe.data.seed)
        texts = self._held_out_texts(corpus, held_out) if self.world.rank == 0 else []
        drafter, target = self._pair()
        state = load_checkpoint(self.folder.checkpoints, self.fingerprint, self.device)
        trainer = Trainer(drafter, target, settings, self.world)
        if state is not None:
            restore(trainer, state)
            self.reporter.message(f"going on after step {state.step}")
        if settings.compile and self.device.type == "cuda":
            target.compile_layers()
            drafter.compile_layers()
        evaluator, first_step = Evaluator(drafter, target, self.recipe), state.step if state else 0
        run = TrainingRun(
            self.recipe, self.fingerprint, corpus, indices, self.folder.checkpoints, self._log(first_step),
            lambda: evaluator.measure(texts), self.reporter, first_step, self.deadline,
        )  # fmt: skip
        self.is_late = train(run, trainer) < settings.steps

    def evaluate(self) -> None:
        """Measure the newest checkpoint on the held-out conversations and on the recipe's sets."""
        settings = self.recipe.evaluation
        corpus = self._corpus()
        _, held_out = corpus.split(self.recipe.data.held_out, self.recipe.data.seed)
        prompts = {HELD_OUT: held_out_prompts(corpus, held_out, settings.prompts)} | {
            name: set_prompts(self.target.tokenizer, Path(path), settings.set_prompts)
            for name, path in settings.sets.items()
        }
        texts = answered(
            self.target, prompts, settings.max_tokens, self.folder.texts, target_fingerprint(self.recipe)
        )
        drafter, target = self._pair()
        step = self._load_newest(drafter)
        round_to_export(drafter)
        evaluator = Evaluator(drafter, target, self.recipe)
        tables = {}
        for done, (name, group) in enumerate(texts.items(), 1):
            tables[name] = evaluator.measure(group)
            self.reporter.progress(done, len(texts), name)
        write_json(self.folder.acceptance, {"step": step, "sets": report(tables)})

    def export(self) -> None:
        """Write the newest checkpoint as a drafter with its model card, and draw the log."""
        drafter = TrainableDrafter(DFlashConfig.from_dict(self.config), MIN_CONTEXT_TOKENS)
        step = self._load_newest(drafter)
        rows = read_log(self.folder.log) if self.folder.log.exists() else []
        final: dict[str, int | float | str] = {"steps": step}
        if rows:
            plot_log(rows, self.folder.plot)
            last = next((row for row in rows if row.step == step), rows[-1])
            final |= {"loss": last.loss, "first draft right": last.position_correct[0]}
        facts = CardFacts(
            recipe=self.recipe,
            config=self.config,
            num_parameters=sum(weight.numel() for weight in drafter.parameters()),
            corpus=read_json(self.folder.generation),
            final=final,
            acceptance=accept_lengths(self.folder.acceptance, step),
            commands=self.folder.commands(),
            provenance=provenance(),
        )
        path = export_drafter(drafter.state_dict(), self.config, self.folder.drafter, model_card(facts))
        self.reporter.message(f"drafter: {path}")

    def _pair(self) -> tuple[TrainableDrafter, FrozenTarget]:
        config = DFlashConfig.from_dict(self.config)
        longest = max(
            self.recipe.train.row_tokens + config.block_size, self.target.config.max_position_embeddings
        )
        drafter = TrainableDrafter(config, longest)
        kind = default_kind(self.device)
        target = FrozenTarget(self.target.load_model(), config.target_layer_ids, kind)
        if self.recipe.drafter.init_from:
            drafter.load_state_dict(read_weights(Path(self.recipe.drafter.init_from), config))
        else:
            drafter.init_weights(self.recipe.train.seed, target.head_weight)
        return drafter.to(self.device), target

    def _corpus(self) -> Corpus:
        corpus = Corpus.open(self.folder.data)
        if corpus.fingerprint != corpus_fingerprint(self.recipe):
            raise ConfigError(
                f"the corpus in {self.folder.data} was generated by other [target] or [data] settings; "
                "choose another output folder, or restore the recipe"
            )
        return corpus

    def _held_out_texts(self, corpus: Corpus, indices: NDArray[np.int64]) -> list[Text]:
        settings = self.recipe.evaluation
        prompts = {HELD_OUT: held_out_prompts(corpus, indices, settings.prompts)}
        return answered(
            self.target, prompts, settings.max_tokens, self.folder.texts, target_fingerprint(self.recipe)
        )[HELD_OUT]

    def _log(self, first_step: int) -> TrainingLog | None:
        if self.world.rank:
            return None
        columns = ["chain", *map(str, self.recipe.evaluation.budgets)]
        return TrainingLog(self.folder.log, int(self.config["block_size"]) - 1, columns, first_step)

    def _load_newest(self, drafter: TrainableDrafter) -> int:
        state = load_checkpoint(self.folder.checkpoints, self.fingerprint, torch.device("cpu"))
        if state is None:
            raise ConfigError(f"{self.folder.checkpoints} holds no checkpoint; run the stage train first")
        drafter.load_state_dict(state.drafter)
        return state.step

    def _on_generation(self, now: ProgressReport) -> bool:
        self.reporter.progress(
            min(now.new_tokens, self.recipe.data.new_tokens),
            self.recipe.data.new_tokens,
            f"{now.tokens_per_s:,.0f} tokens/s",
        )
        is_done = now.new_tokens >= self.recipe.data.new_tokens
        # A run that keeps nothing would never end if it is begun again and again.
        has_something = now.run_tokens > 0
        self.is_late = has_something and not is_done and self._is_deadline_over()
        return not self.is_late

    def _is_deadline_over(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _result(self) -> PipelineResult:
        acceptance = accept_lengths(self.folder.acceptance, newest_step(self.folder.checkpoints))
        return PipelineResult(not self.is_late, self.folder.files(), acceptance)


def refuse_unfit(recipe: Recipe, config: dict[str, Any], target: Target, options: PipelineOptions) -> None:
    """Raise for what would stop a later stage, before the first one begins."""
    reason = training_refusal(DFlashConfig.from_dict(config))
    if reason is not None:
        raise UnsupportedModelError(f"such a drafter cannot be trained here: {reason}")
    if Stage.EXPORT in options.stages and find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "train")
    pieces = template_pieces(target.tokenizer)
    used = {*pieces.prefix, *pieces.bridge, target.tokenizer.eos_token_id}
    mask_token = config["dflash_config"]["mask_token_id"]
    check(
        mask_token not in used, "drafter.mask_token_id", mask_token,
        "a token that never occurs in text: the chat template or the end of an answer has this one",
    )  # fmt: skip
    if Stage.EVALUATE in options.stages:
        for path in recipe.evaluation.sets.values():
            set_prompts(target.tokenizer, Path(path), recipe.evaluation.set_prompts)


def round_to_export(drafter: TrainableDrafter) -> None:
    """Make the weights what an export holds, which is what is measured."""
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(weight.bfloat16())


def restore(trainer: Trainer, state: Checkpoint) -> None:
    """Put a checkpoint's weights and optimiser state into a trainer."""
    trainer.drafter.load_state_dict(state.drafter)
    trainer.optimizer.load_state_dict(state.optimizer)


def summed(earlier: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Figures of a corpus that several runs generated: what it holds now, and what they did together."""
    counted = ("run_tokens", "duplicates", "excluded", "unfinished_prompts", "seconds")
    return now | {name: earlier.get(name, 0) + now[name] for name in counted}


def process_world() -> World:
    """This process's place among those that torchrun started, from its environment; alone without it."""
    names = {"RANK": "0", "WORLD_SIZE": "1"}
    texts = {name: os.environ.get(name, default) for name, default in names.items()}
    is_whole = all(text.isdecimal() for text in texts.values())
    allowed = "whole numbers with RANK below WORLD_SIZE, as torchrun sets them, or none of both"
    check(is_whole and int(texts["RANK"]) < int(texts["WORLD_SIZE"]), "RANK, WORLD_SIZE", texts, allowed)
    return World(int(texts["RANK"]), int(texts["WORLD_SIZE"]))


def process_device(name: str) -> torch.device:
    """The device of this process: with several GPUs and "auto" or "cuda", the one of its local rank."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    check(name == "cpu" or torch.cuda.is_available(), "device", name, "cpu: torch finds no CUDA GPU here")
    device = torch.device(name)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        count = torch.cuda.device_count()
        check((device.index or 0) < count, "device", str(device), f"one of the {count} GPUs, from cuda:0")
        torch.cuda.set_device(device)
    return device


def run_pipeline(
    recipe: Recipe, folder: Path, options: PipelineOptions, reporter: Reporter
) -> PipelineResult:
    """Run a recipe's stages in a folder; under torchrun, in all processes together.

    Raises:
        DDTreeError: a recipe, folder, model or corpus that cannot be used, or training that went wrong.
    """
    world = process_world()
    device = process_device(options.device)
    if world.size > 1:
        check(
            Stage.DATA not in options.stages or RunFolder(folder).data.exists(),
            "stages", [stage.value for stage in options.stages], "without data in several processes",
            "run --stage data first, without torchrun: one process generates",
        )  # fmt: skip
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=WAIT_S))
    try:
        return Pipeline(recipe, folder, options, reporter, world).run()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"there is not enough memory ({first_line(error)}); in the stage data lower data.slots "
            f"(now {recipe.data.slots}), in train lower train.rows or train.num_anchors, or use a larger GPU"
        ) from error
    finally:
        if world.size > 1:
            dist.destroy_process_group()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch could not get memory; on the CPU only its text says so."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error)
