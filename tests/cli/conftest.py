"""A fake engine behind `load_engine`, and one command line run in this process."""

import io
import sys
from dataclasses import replace

import pytest

from ddtree.cli import loading
from ddtree.cli.main import run
from ddtree.config import Mode
from ddtree.engine.request import Chunk, FinishReason, Generation, TokenLogprobs
from ddtree.errors import ContextLengthError
from ddtree.stats import GenerationStats, RoundStats

MAX_PROMPT_TOKENS = 200


class FakeTokenizer:
    """One token a character."""

    def decode(self, tokens):
        return "".join(map(chr, tokens))


class FakeStream:
    """Hands out the engine's text; a round commits as many characters as the mode is worth."""

    def __init__(self, engine, request):
        self.engine, self.request = engine, request
        self.taken, self.is_cancelled = 0, False
        self.tokens = tuple(map(ord, engine.text_of(request.mode)))[: request.sampling.max_tokens]
        self.stats = GenerationStats(prompt_tokens=len(request.prompt_tokens), prefill_s=0.5)

    def cancel(self):
        self.is_cancelled = True

    def finish_reason(self):
        if self.taken < len(self.tokens):
            return FinishReason.CANCEL if self.is_cancelled else None
        return FinishReason.LENGTH if self.taken == self.request.sampling.max_tokens else FinishReason.STOP

    def __iter__(self):
        step = {Mode.AR: 1, Mode.CHAIN: 2, Mode.TREE: 3}[self.request.mode]
        while self.finish_reason() is None:
            size = min(step if self.taken else 1, len(self.tokens) - self.taken)
            tokens = self.tokens[self.taken : self.taken + size]
            self.taken += size
            self._count(size)
            self._observe(tokens)
            self.engine.on_chunk(self)
            yield Chunk(self.engine.tokenizer.decode(tokens), tokens, self.finish_reason())

    def _count(self, size):
        if self.taken > 1:
            self.stats.verify_ct += 1
            self.stats.accept_histogram[size] += 1
            self.stats.decode_s += 0.1
        self.stats.new_tokens = self.taken

    def _observe(self, tokens):
        observer = self.request.observer
        if observer is not None and self.taken > 1 and len(tokens) == 3:
            observer.on_round(replace(self.engine.tree_round, accept_tokens=tokens))

    def result(self):
        tokens = self.tokens[: self.taken]
        text = self.engine.tokenizer.decode(tokens)
        top = None if self.request.top_logprobs is None else ((7, -0.25), (8, -1.5))
        logprobs = (
            ()
            if top is None
            else tuple(TokenLogprobs(token, -2.5, top[: self.request.top_logprobs]) for token in tokens)
        )
        return Generation(text, tokens, self.finish_reason() or FinishReason.CANCEL, self.stats, logprobs)


class FakeEngine:
    """Answers with one text; a mode named in `texts` gets a text of its own."""

    tree_round = RoundStats(
        mode="tree",
        node_budget=4,
        num_nodes=4,
        prefix_len=9,
        accept_tokens=(97, 98, 99),
        round_ms=1.0,
        root_token=96,
        draft_tokens=(96, 97, 120, 98, 91),
        parents=(-1, 0, 0, 1, 1),
        log_probs=(0.0, -0.5, -1.0, -1.5, -2.0),
        accept_indices=(0, 1, 3),
    )

    def __init__(self, text="The answer is 42."):
        self.text, self.texts = text, {}
        self.tokenizer = FakeTokenizer()
        self.config, self.encoded, self.requests = None, [], []

    def text_of(self, mode):
        return self.texts.get(mode, self.text)

    def on_chunk(self, stream):
        """Called before each chunk is handed out."""

    def encode(self, prompt, *, chat=True):
        self.encoded.append((prompt, chat))
        return tuple(map(ord, prompt))

    def stream(self, request):
        self.requests.append(request)
        if len(request.prompt_tokens) > MAX_PROMPT_TOKENS:
            raise ContextLengthError(f"the prompt has {len(request.prompt_tokens)} tokens,\n too many")
        return FakeStream(self, request)

    def generate(self, request):
        stream = self.stream(request)
        for _ in stream:
            pass
        return stream.result()


@pytest.fixture
def engine(monkeypatch):
    fake = FakeEngine()

    def load_engine(config):
        fake.config = config
        return fake

    monkeypatch.setattr(loading, "load_engine", load_engine)
    return fake


@pytest.fixture
def command(monkeypatch, capsys):
    """Run one command line; returns (exit code, stdout, stderr). Standard input is empty unless given."""

    def call(*arguments, stdin=b"", is_terminal=False):
        source = io.TextIOWrapper(io.BytesIO(stdin))
        source.isatty = lambda: is_terminal
        monkeypatch.setattr(sys, "stdin", source)
        code = run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def error_line(result):
    """The one line of a refused command, its exit code and streams checked."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def refused(command):
    """Run a command line that must be refused in one line; returns the line."""
    return lambda *arguments, **options: error_line(command(*arguments, **options))
