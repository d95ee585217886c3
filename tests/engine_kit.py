"""A whole engine small enough for tests: tiny target, byte tokenizer, a drafter that is often right."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ddtree.config import EngineConfig, Mode, SamplingParams
from ddtree.draft.context import DraftContext
from ddtree.engine.engine import Engine
from ddtree.engine.protocols import Drafter, TargetModel
from ddtree.engine.request import Generation, Request
from ddtree.engine.target import load_target, load_target_config
from ddtree.layers.window import Window
from ddtree.stats import RoundStats
from tiny_models import load_tiny_drafter, tiny_llama, write_tiny_drafter

CPU = torch.device("cpu")
VOCAB_SIZE = 256
BLOCK_SIZE = 8
PROMPT = tuple(range(40, 60))


class ByteTokenizer:
    """Token id = byte."""

    chat_template = "{{ messages }}"
    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], **_options: bool) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: list[dict[str, str]], **_options: bool) -> str:
        return f"<user>{messages[0]['content']}<assistant>"


class ScriptDrafter:
    """Drafts a known text with mistakes: at some depths the right token is second, third or absent.

    Its drafts depend on absolute positions only, so that every round of every width sees the same.
    It asks what every drafter may rely on: a block of full size that stands at the root.
    """

    block_size = BLOCK_SIZE
    target_layer_ids = (0, 2)

    def __init__(self, script: Sequence[int], prompt_len: int, seed: int = 0) -> None:
        self.script, self.prompt_len, self.seed = list(script), prompt_len, seed
        self.appended: list[tuple[int, int]] = []  # (first slot, rows) of each append
        self.draft_ct = 0

    def new_context(self, capacity: int) -> DraftContext:
        return DraftContext(1, 1, capacity, 4, torch.float32, CPU)

    def append(self, context: DraftContext, taps: Tensor, window: Window) -> None:
        assert window.start is not None
        assert taps.shape[0] == window.num_tokens
        self.appended.append((window.start, taps.shape[0]))

    def draft_logits(self, root_token: Tensor, context: DraftContext, window: Window) -> Tensor:
        prefix_len = int(window.prefix_len)
        assert window.num_tokens == BLOCK_SIZE
        assert window.positions.tolist() == list(range(prefix_len, prefix_len + BLOCK_SIZE))
        assert window.tree_mask is not None
        assert bool(window.tree_mask.all())
        self.draft_ct += 1
        first = prefix_len + 1
        return torch.stack([self._logits(first + i) for i in range(self.block_size - 1)])

    def _logits(self, position: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + position)
        logits = 0.5 * torch.randn(VOCAB_SIZE, generator=generator)
        at = position - self.prompt_len
        rank = int(torch.multinomial(torch.tensor([0.6, 0.2, 0.1, 0.1]), 1, generator=generator))
        if 0 <= at < len(self.script) and rank < 3:
            better = logits.topk(3).indices
            logits[self.script[at]] = 4.0
            logits[better[:rank]] = 5.0
        return logits


def tiny_target(folder: Path, model: PreTrainedModel | None = None, max_positions: int = 512) -> TargetModel:
    """A tiny target from a checkpoint written to `folder`, in float32 on the CPU."""
    model = model if model is not None else tiny_llama(vocab_size=VOCAB_SIZE)
    model.save_pretrained(folder)
    return load_target(folder, load_target_config(folder), torch.float32, CPU, max_positions)


def tiny_engine(
    target: TargetModel,
    drafter: Drafter | None,
    eos_tokens: frozenset[int] = frozenset(),
    max_context: int = 256,
) -> Engine:
    config = EngineConfig(model="tiny", drafter="none", device="cpu", max_context_tokens=max_context)
    return Engine(target, drafter, ByteTokenizer(), config, eos_tokens, CPU)


def plain(target: TargetModel, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> Generation:
    """The request decoded plainly, by an engine without a drafter."""
    return tiny_engine(target, None).generate(Request(prompt, sampling, Mode.AR))


def scripted_engine(
    target: TargetModel, sampling: SamplingParams, prompt: tuple[int, ...] = PROMPT
) -> Engine:
    """An engine whose drafter often knows what plain decoding of the request says."""
    script = plain(target, sampling, prompt).tokens
    return tiny_engine(target, ScriptDrafter(script, len(prompt)))


def real_engine(folder: Path, max_context: int, vocab_size: int = 32) -> Engine:
    """An engine with a tiny DFlash drafter; so few tokens that its random drafts are right at times.

    Rotary tables end where `Engine.load` ends them, a block past the context.
    """
    target, drafter, _ = load_real_pair(folder, max_context, vocab_size)
    return tiny_engine(target, drafter, max_context=max_context)


def load_real_pair(
    folder: Path, max_context: int, vocab_size: int = 32
) -> tuple[TargetModel, Drafter, PreTrainedModel]:
    """Target and drafter of `real_engine`, and the target's transformers model."""
    model = tiny_llama(vocab_size=vocab_size)
    model.config.max_position_embeddings = 2048
    max_positions = max_context + BLOCK_SIZE
    target = tiny_target(folder / "target", model, max_positions)
    drafter_folder = write_tiny_drafter(
        folder / "drafter", model, BLOCK_SIZE, max_position_embeddings=max_positions
    )
    return target, load_tiny_drafter(drafter_folder, model, max_positions), model


class Recorder:
    """Keeps what each round did, its tree too, without its times."""

    wants_trees = True
    wants_stages = False

    def __init__(self) -> None:
        self.rounds: list[RoundStats] = []

    def on_round(self, stats: RoundStats) -> None:
        self.rounds.append(dataclasses.replace(stats, round_ms=0.0, stages_ms=None))


def rounds_of(engine: Engine, request: Request) -> list[RoundStats]:
    """Run a request and return its rounds."""
    recorder = Recorder()
    engine.generate(dataclasses.replace(request, observer=recorder))
    return recorder.rounds
