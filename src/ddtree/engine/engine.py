"""The embedded engine: one sequence at a time, plain, chain or tree, with the same text for one seed."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any, NoReturn

import torch

from ddtree.config import MAX_NODE_BUDGET, EngineConfig, is_int
from ddtree.draft.dflash_config import DFlashConfig
from ddtree.draft.load import load_drafter
from ddtree.engine.calibrate import choose_dtype, choose_threads, measure_costs, settle_cpu_math
from ddtree.engine.inference import inference
from ddtree.engine.logprobs import pack_logprobs, unpack_logprobs
from ddtree.engine.planner import Planner, fixed_plan
from ddtree.engine.protocols import Drafter, TargetModel
from ddtree.engine.request import Generation, Request, TokenLogprobs
from ddtree.engine.round_runner import EagerRunner, GraphRunner, RoundRunner
from ddtree.engine.sampling import TokenChooser
from ddtree.engine.sequence import ModelPair, Sequence
from ddtree.engine.stream import TokenStream
from ddtree.engine.target import load_target, load_target_config, make_stack
from ddtree.errors import CheckpointError, ConfigError, ContextLengthError, DDTreeError, first_line
from ddtree.layers.window import Window
from ddtree.model_cache import remake_hint
from ddtree.models import resolve_drafter, resolve_target
from ddtree.tree.budget import NodeBudgetPolicy

logger = logging.getLogger(__name__)

PREFILL_CHUNK_TOKENS = 256


class Engine:
    """A target, its drafter and one static cache.

    Args:
        target: the model being sped up.
        drafter: its drafter, or None for plain decoding only.
        tokenizer: a transformers tokenizer.
        config: settings; `max_context_tokens` is cut to what the target was made for.
        eos_tokens: token ids that end a text.
        device: where the models are.
        folder: the target's checkpoint, for error messages.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        tokenizer: Any,
        config: EngineConfig,
        eos_tokens: frozenset[int],
        device: torch.device,
        folder: Path | None = None,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.config, self.eos_tokens, self.device = config, eos_tokens, device
        self.folder = folder if folder is not None else Path(config.model)
        self.max_context_tokens = min(config.max_context_tokens, target.info.max_positions)
        capacity = self.max_context_tokens + MAX_NODE_BUDGET + 1
        context = drafter.new_context(capacity) if drafter else None
        kv_cache = target.new_kv_cache(capacity)
        self.pair = ModelPair(target, kv_cache, drafter, context, config.candidate_topk)
        # A plain request pays nothing for a drafter: no taps, no context.
        self.plain_pair = ModelPair(target, kv_cache, None, None)
        self.sequence = Sequence(device)
        use_graphs = device.type == "cuda" and config.cuda_graphs and target.supports_graphs
        make_runner = GraphRunner if use_graphs else EagerRunner
        self.runner: RoundRunner = make_runner(self.pair, self.sequence)
        self.plain_runner: RoundRunner = make_runner(self.plain_pair, self.sequence)
        self.lock = threading.Lock()
        self._policy: NodeBudgetPolicy | None = None

    @classmethod
    def load(cls, config: EngineConfig | None = None) -> Engine:
        """Load target, drafter and tokenizer as the settings say.

        Raises:
            ModelError: a model cannot be found, read or used; a drafter does not fit.
            ConfigError: a device or dtype that this machine does not have.
        """
        config = config or EngineConfig()
        settle_cpu_math()
        device = choose_device(config.device)
        drafter_folder = resolve_drafter(config.drafter, config.model)
        folder = Path(resolve_target(config.model))
        block_size = DFlashConfig.from_path(Path(drafter_folder)).block_size if drafter_folder else 1
        with remake_hint(folder):
            target_config = load_target_config(folder)
        context = min(config.max_context_tokens, target_config.max_position_embeddings)
        max_positions = context + block_size  # a tree at the end of the context reaches a block past it
        if device.type == "cpu":
            torch.set_num_threads(config.threads or torch.get_num_threads())
        dtype = choose_dtype(config.dtype, device)
        with inference(device):
            with remake_hint(folder):
                target = load_target(folder, target_config, dtype, device, max_positions)
                tokenizer = load_tokenizer(folder)
                eos_tokens = eos_tokens_of(folder, tokenizer, target.info.vocab_size)
            drafter = None
            if drafter_folder is not None:
                drafter = load_drafter(
                    Path(drafter_folder), target.info, target.embed, target.head, dtype, device,
                    max_positions, make_stack,
                )  # fmt: skip
            engine = cls(target, drafter, tokenizer, config, eos_tokens, device, folder)
            if device.type == "cpu" and config.threads == 0:
                choose_threads(engine.pair, engine.max_context_tokens)
        logger.info("engine ready: %s on %s, %s", config.model, device, dtype)
        return engine

    def encode(self, prompt: str, *, chat: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, put into the model's chat template unless `chat` is false.

        Raises:
            ConfigError: the prompt is empty, or the model has no chat template.
            CheckpointError: its chat template is broken.
        """
        if not prompt.strip():
            raise ConfigError(f"prompt={prompt!r} is not allowed: some text; give a prompt that is not empty")
        if not chat:
            return tuple(self.tokenizer.encode(prompt))
        if not self.tokenizer.chat_template:
            raise ConfigError("the model has no chat template; give the text as it is with --raw")
        messages = [{"role": "user", "content": prompt}]
        try:
            text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # jinja2 has its own, and a template may do anything
            raise CheckpointError(
                f"the chat template in {self.folder} cannot be used: {first_line(error)}; "
                "give the text as it is with --raw"
            ) from error
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def generate(self, request: Request) -> Generation:
        """Run a request to its end."""
        stream = self.stream(request)
        for _ in stream:
            pass
        return stream.result()

    def stream(self, request: Request) -> TokenStream:
        """Start a request; iterate over the stream to run it.

        Raises:
            ConfigError: the request asks for something this engine cannot honour.
            ContextLengthError: the prompt leaves no room for a new token.
        """
        self._check(request)
        plan = fixed_plan(request.mode, request.node_budget, self.pair.block_size)
        planner = Planner(plan, None if plan is not None else self.policy())
        chooser = TokenChooser(
            request.sampling, request.prompt_tokens, self.target.info.vocab_size, self.device
        )
        return TokenStream(self, request, planner, chooser)

    def acquire(self) -> None:
        """Take the engine for one request; whoever takes it releases `lock`.

        Raises:
            DDTreeError: it runs another request.
        """
        if not self.lock.acquire(blocking=False):
            raise DDTreeError(
                "the engine runs one request at a time and is busy; finish or cancel that one first"
            )

    def policy(self) -> NodeBudgetPolicy:
        """The node budget policy, kept over requests; made at first use by measuring what rounds cost."""
        if self._policy is None:
            self.acquire()
            try:
                with inference(self.device):
                    costs = measure_costs(self.pair, self.sequence, self.runner, self.max_context_tokens)
            finally:
                self.lock.release()
            self._policy = NodeBudgetPolicy(costs, self.pair.block_size - 1)
        return self._policy

    def prefill(
        self,
        pair: ModelPair,
        prompt_tokens: tuple[int, ...],
        chooser: TokenChooser,
        top_logprobs: int | None = None,
    ) -> tuple[int, tuple[TokenLogprobs, ...]]:
        """Fill the pair's cache and drafter context from a prompt; returns the first new token.

        The new token becomes the root: committed, its KV not yet in the cache. With it comes its
        log-probability where `top_logprobs` asks for it, else ().

        Raises:
            CheckpointError: the logits are no numbers, as those of damaged weights.
        """
        tokens = torch.tensor(prompt_tokens, device=self.device)
        logits = None
        for start in range(0, len(prompt_tokens), PREFILL_CHUNK_TOKENS):
            chunk = tokens[start : start + PREFILL_CHUNK_TOKENS]
            positions = torch.arange(start, start + chunk.shape[0], device=self.device)
            window = Window.at(start, positions, None)
            output = pair.target.forward(chunk, window, pair.kv_cache, pair.tap_layer_ids, last_only=True)
            if pair.drafter is not None and pair.draft_context is not None and output.taps is not None:
                pair.drafter.append(pair.draft_context, output.taps, window)
            logits = output.logits
        assert logits is not None
        position = torch.tensor([len(prompt_tokens)], device=self.device)
        root_token = chooser.choose(logits, position)
        is_finite = logits[-1:].amax(-1).isfinite().to(root_token.dtype)  # [1]
        parts, columns = [root_token, is_finite], 0
        if top_logprobs is not None:
            packed = pack_logprobs(logits[-1:], root_token, top_logprobs)  # [1, columns]
            columns = packed.shape[1]
            parts.append(packed[0])
        first, has_logits, *said = torch.cat(parts).tolist()
        if not has_logits:
            self._refuse_logits()
        chooser.count(root_token)
        self.sequence.begin(first, len(prompt_tokens))
        return first, unpack_logprobs(said, columns, (first,)) if columns else ()

    def _refuse_logits(self) -> NoReturn:
        with remake_hint(self.folder):
            raise CheckpointError(
                f"the model's logits are NaN or infinite: the checkpoint in {self.folder} is damaged, "
                "or its numbers overflow; download it again, or try dtype float32 (--dtype float32)"
            )

    def _check(self, request: Request) -> None:
        limit = self.max_context_tokens
        if len(request.prompt_tokens) >= limit:
            is_models = limit == self.target.info.max_positions
            raise ContextLengthError(
                f"the prompt has {len(request.prompt_tokens)} tokens, at most {limit - 1} are allowed "
                f"(context {limit} less one new token); shorten it"
                + ("" if is_models else " or raise max_context_tokens (--max-context)")
            )
        vocab_size = self.target.info.vocab_size
        for name, tokens in (
            ("prompt token", request.prompt_tokens),
            ("stop_token_ids has", request.sampling.stop_token_ids),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise ConfigError(f"{name} {token}, which is not allowed: ids from 0 to {vocab_size - 1}")


def choose_device(name: str) -> torch.device:
    """The torch device of a setting.

    Raises:
        ConfigError: a CUDA device that is not there.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    kind, _, index = name.partition(":")
    if kind == "cuda" and int(index or 0) >= available:
        raise ConfigError(
            f"device={name!r} is not allowed here: {available} CUDA devices found; use cpu or auto"
        )
    return torch.device(name)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a checkpoint folder.

    Raises:
        CheckpointError: it is missing or broken.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # tokenizers raises bare Exception; transformers ValueError, OSError, KeyError
        raise CheckpointError(f"the tokenizer in {folder} cannot be used: {first_line(error)}") from error


def eos_tokens_of(folder: Path, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Token ids that end a text: the generation config's, or the tokenizer's where that names none.

    Raises:
        CheckpointError: the generation config cannot be read, or an id is none of the vocabulary.
    """
    eos: Any = tokenizer.eos_token_id
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            configured = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (AttributeError, OSError, RecursionError, ValueError) as error:
            raise CheckpointError(f"{file} is no JSON object ({error}); download the model again") from error
        eos = configured if configured is not None else eos
    if eos is None:
        return frozenset()
    tokens = eos if isinstance(eos, list | tuple) else [eos]
    if not all(is_int(token) and 0 <= token < vocab_size for token in tokens):
        raise CheckpointError(
            f"{folder} has eos_token_id={eos!r}: token ids from 0 to {vocab_size - 1} are allowed; "
            "correct generation_config.json or tokenizer_config.json"
        )
    return frozenset(tokens)
