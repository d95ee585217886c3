"""Replay: does every token of a finished output follow from the target's own logits?

An output is teacher-forced through plain prefill of the target in transformers, its logits are processed
as plain decoding processes them, and each emitted token is judged by its *gap*, in units of logits: greedy,
the largest logit less the token's; sampled, the largest of (logit + temperature * noise) less the token's,
with the noise keyed by (seed, position, token). Exact arithmetic gives gaps of 0. An engine rounds
differently, so gaps up to `eps` are allowed, also at the edges of top-k, top-p and min-p: a token counts as
kept if logits within `eps` could keep it, and competes only if no such logits could drop it.

Written apart from the plugin's own choice on purpose, one request at a time, in the order of SGLang's plain
decoding: penalties, grammar, bias, temperature, joint top-k and top-p, min-p, draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddtree.tree.noise import keyed_gumbel

# Gap of a token that no logits within eps could have given: masked, or far outside top-k, top-p or min-p.
EXCLUDED = 1e6
ROWS = 128  # rows whose noise and sorted copies are in memory at once
GAP_STEPS = (0.125, 0.25, 0.5, 0.75, 1.0)
BATCH_TOKENS = 4096  # of a prefill, padding included; each makes one row of logits at most

MakeMasks = Callable[[str, Sequence[int]], Tensor]
"""From a regular expression and an output [n] to the tokens allowed at each place, [n, V] bool."""


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request: prompt and emitted tokens, and SGLang's sampling parameters as they were sent."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """SGLang's sampling parameters with their defaults."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    sampling_seed: int | None = None
    logit_bias: dict[str, float] | None = None
    regex: str | None = None

    @classmethod
    def of(cls, parameters: dict[str, Any]) -> Sampling:
        """The fields that decide a token; lengths and stop strings do not."""
        return cls(**{name: value for name, value in parameters.items() if name in cls.__dataclass_fields__})

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def counts_tokens(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    @property
    def scale(self) -> float:
        """By how much penalties can stretch an error of a logit."""
        return max(self.repetition_penalty, 1 / self.repetition_penalty)


class Violation(NamedTuple):
    """An emitted token that the replay did not give."""

    index: int  # in the output
    position: int  # in prompt and output
    emitted: int
    expected: int
    gap: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the replay of an output says; gaps in units of logits."""

    num_tokens: int
    max_gap: float
    num_not_best: int  # tokens with a gap above 0, allowed or not
    num_violations: int
    first_violation: Violation | None
    gaps_above: tuple[int, ...]  # tokens with a gap above each of GAP_STEPS


def token_counts(tokens: Sequence[int], begin: int, end: int, vocab_size: int, device: Any) -> Tensor:
    """How often each token is among those before place i, for i in begin..end; [end - begin, V] float32."""
    counts = torch.zeros(end - begin, vocab_size, device=device)
    rows = torch.arange(1 - begin, end - begin, device=device).clamp(min=0)  # first row that counts a token
    columns = torch.tensor(tokens[: end - 1], dtype=torch.int64, device=device)
    return counts.index_put_((rows, columns), counts.new_ones(()), accumulate=True).cumsum(0)


def process(
    logits: Tensor,  # [n, V] float32, of places begin..begin + n of the output
    tokens: Sequence[int],
    begin: int,
    sampling: Sampling,
    stop_tokens: Sequence[int],
    allowed: Tensor | None = None,  # [n, V] bool
) -> Tensor:
    """Logits [n, V] after penalties, grammar and bias, before the temperature."""
    end = begin + logits.shape[0]
    logits = logits.clone()
    if sampling.counts_tokens:
        counts = token_counts(tokens, begin, end, logits.shape[-1], logits.device)
        logits -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    if sampling.min_new_tokens > begin:
        logits[: sampling.min_new_tokens - begin, list(stop_tokens)] = -math.inf
    if sampling.counts_tokens:
        scaled = torch.where(
            logits < 0, logits * sampling.repetition_penalty, logits / sampling.repetition_penalty
        )
        logits = torch.where(counts > 0, scaled, logits)
    if allowed is not None:
        logits.masked_fill_(~allowed, -math.inf)
    for token, bias in (sampling.logit_bias or {}).items():
        logits[:, int(token)] += bias
    return logits


def kept_sets(scaled: Tensor, sampling: Sampling, eps: float) -> tuple[Tensor, Tensor]:
    """Tokens that top-k, top-p and min-p keep for some, and for all, logits within eps of `scaled` [n, V].

    `scaled` are logits over the temperature, and `eps` is in their units. Both results are [n, V] bool.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1)
    mass = torch.cat([torch.zeros_like(probs[:, :1]), probs.cumsum(-1)], -1)  # of the first j, j = 0..V
    # How many could at most, and must at least, come before a token. `-ordered` ascends.
    could_precede = torch.searchsorted(-ordered, eps - ordered, right=True)  # itself included
    must_precede = torch.searchsorted(-ordered, -ordered - eps, right=False)
    top_k = sampling.top_k if sampling.top_k > 0 else ordered.shape[-1]
    maybe, surely = must_precede < top_k, could_precede <= top_k
    if sampling.top_p < 1:
        maybe &= math.exp(-eps) * mass.gather(-1, must_precede) <= sampling.top_p
        surely &= math.exp(eps) * (mass.gather(-1, could_precede) - probs) <= sampling.top_p
    if sampling.min_p > 0:
        least = ordered[:, :1] + math.log(sampling.min_p)
        maybe &= ordered >= least - eps
        surely &= ordered >= least + eps
    # Whatever its neighbours, a row keeps its first token.
    maybe[:, 0] = True
    by_token = torch.zeros_like(maybe)
    return by_token.scatter(-1, order, maybe), by_token.scatter(-1, order, surely)


def gaps(
    logits: Tensor,  # [n, V] float32, processed
    tokens: Tensor,  # [n] int64, emitted
    positions: Tensor,  # [n] int64, of the emitted tokens
    sampling: Sampling,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Gap of each emitted token [n] float64, at least 0, and the best token [n] int64."""
    if sampling.is_greedy:
        values, maybe, surely, temperature = logits.double(), None, None, 1.0
    else:
        temperature = sampling.temperature
        vocabulary = torch.arange(logits.shape[-1], device=logits.device)
        seeds = torch.full_like(positions, sampling.sampling_seed or 0)
        values = logits / temperature
        maybe, surely = kept_sets(values, sampling, eps * sampling.scale / temperature)
        values = values + keyed_gumbel(seeds, positions, vocabulary)
    emitted = values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    if maybe is not None and surely is not None:
        emitted = torch.where(maybe.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), emitted, -math.inf)
        values = values.masked_fill(~surely, -math.inf)
    largest, best = values.max(-1)
    # A row without any sure token says nothing about one that may be kept.
    gap = torch.where(largest == -math.inf, torch.zeros_like(largest), (largest - emitted) * temperature)
    gap = torch.where(emitted == -math.inf, torch.full_like(gap, EXCLUDED), gap)
    return gap.div(sampling.scale).clamp(0.0, EXCLUDED), best


class Replayer:
    """Judges outputs by a target on its own transformers modules.

    Args:
        model: the target, in the number format of the engine.
        stop_tokens: tokens that end a text, which min_new_tokens holds back.
        make_masks: needed for outputs with a regular expression.
    """

    def __init__(self, model: Any, stop_tokens: Sequence[int], make_masks: MakeMasks | None = None) -> None:
        self._model = model
        self.stop_tokens = tuple(stop_tokens)
        self._make_masks = make_masks

    def logits(self, outputs: Sequence[Output]) -> Iterator[tuple[int, Tensor]]:
        """Index of each output and the target's logits [n, V] float32 at its tokens, by plain prefill.

        Outputs with prompts of about one length go through the target together, padded behind their ends.
        """
        for batch in batches(outputs):
            begin = min(len(outputs[index].prompt) for index in batch) - 1
            for index, scores in zip(batch, self._prefill([outputs[index] for index in batch]), strict=True):
                first = len(outputs[index].prompt) - 1 - begin
                yield index, scores[first : first + len(outputs[index].tokens)].float()

    @torch.inference_mode()
    def _prefill(self, outputs: Sequence[Output]) -> Tensor:
        """Logits [len(outputs), length, V] from the last token of the shortest prompt on."""
        rows = [[*output.prompt, *output.tokens[:-1]] for output in outputs]
        length = max(map(len, rows))
        padded = [row + [0] * (length - len(row)) for row in rows]
        context = torch.tensor(padded, device=self._model.device)  # causal: nothing sees what is behind it
        keep = length - min(len(output.prompt) for output in outputs) + 1
        logits: Tensor = self._model(input_ids=context, use_cache=False, logits_to_keep=keep).logits
        return logits

    @torch.inference_mode()
    def judge(self, output: Output, eps: float, logits: Tensor | None = None) -> Verdict:
        """Replay an output; `logits` [n, V] where they are already known."""
        if logits is None:
            _, logits = next(self.logits([output]))
        sampling = Sampling.of(output.sampling)
        tokens = torch.tensor(output.tokens, device=logits.device)
        found = [
            gaps(scores, tokens[rows], rows_positions(output, rows, logits.device), sampling, eps)
            for rows, scores in self._processed(output, logits, sampling)
        ]
        gap, best = (torch.cat(parts) for parts in zip(*found, strict=True))
        is_wrong = gap > eps
        first = int(is_wrong.int().argmax()) if bool(is_wrong.any()) else None
        return Verdict(
            num_tokens=len(output.tokens),
            max_gap=float(gap.max()),
            num_not_best=int((gap > 0).sum()),
            num_violations=int(is_wrong.sum()),
            first_violation=None if first is None else Violation(
                first, len(output.prompt) + first, output.tokens[first], int(best[first]), float(gap[first])
            ),
            gaps_above=tuple(int((gap > step).sum()) for step in GAP_STEPS),
        )  # fmt: skip

    def _processed(
        self, output: Output, logits: Tensor, sampling: Sampling
    ) -> Iterator[tuple[slice, Tensor]]:
        allowed = None
        if sampling.regex is not None:
            if self._make_masks is None:
                raise ValueError("an output with a regex needs make_masks")
            allowed = self._make_masks(sampling.regex, output.tokens).to(logits.device)
        for begin in range(0, len(output.tokens), ROWS):
            rows = slice(begin, min(begin + ROWS, len(output.tokens)))
            masks = None if allowed is None else allowed[rows]
            yield rows, process(logits[rows], output.tokens, begin, sampling, self.stop_tokens, masks)


def batches(outputs: Sequence[Output]) -> Iterator[list[int]]:
    """Indices of outputs in batches for a prefill each, by the length of their prompts."""
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(outputs)), key=lambda index: len(outputs[index].prompt)):
        length = len(outputs[index].prompt) + len(outputs[index].tokens)
        if batch and max(longest, length) * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch, longest = [], 0
        batch.append(index)
        longest = max(longest, length)
    if batch:
        yield batch


def rows_positions(output: Output, rows: slice, device: Any) -> Tensor:
    """Positions [n] of emitted tokens in prompt and output."""
    begin = len(output.prompt)
    return torch.arange(begin + rows.start, begin + rows.stop, device=device)


def ending_problem(
    output: Output, finish: dict[str, Any], stop_tokens: Sequence[int], context_tokens: int
) -> str | None:
    """Why an output should not have ended where it did, from SGLang's finish_reason; None where it should."""
    sampling, tokens = output.sampling, output.tokens
    limit = sampling.get("max_new_tokens")
    stops = {*stop_tokens, *sampling.get("stop_token_ids", ())}
    early = early_end(output, stop_tokens)
    if early is not None:
        return f"token {tokens[early]} at place {early} of {len(tokens)} should have ended it"
    if finish["type"] == "length":
        # At the context's end SGLang stops one or two tokens short of it.
        at_limit = len(output.prompt) + len(tokens) >= context_tokens - 2
        if len(tokens) != limit and not at_limit:
            return f"ended by length after {len(tokens)} tokens, not {limit}"
    elif finish["type"] == "stop":
        matched = finish.get("matched")
        if isinstance(matched, int) and (tokens[-1] != matched or matched not in stops):
            return f"ended by token {matched}, but the last one is {tokens[-1]}"
    else:
        return f"ended by {finish['type']}"
    return None


def early_end(output: Output, stop_tokens: Sequence[int]) -> int | None:
    """Place of the first token that should have ended an output before its last one; None without any."""
    if output.sampling.get("ignore_eos"):
        return None
    stops = {*stop_tokens, *output.sampling.get("stop_token_ids", ())}
    return next((place for place, token in enumerate(output.tokens[:-1]) if token in stops), None)


def is_overrun(output: Output, finish: dict[str, Any], stop_tokens: Sequence[int], round_tokens: int) -> bool:
    """Whether a round of at most `round_tokens` ran from before an end token to the output's length limit.

    SGLang 0.5.17 looks at the length first and so keeps what such a round has behind the end token, with any
    speculation; from 0.5.18 on it looks at the end token first (`Req.update_finish_state`).
    """
    early, length = early_end(output, stop_tokens), len(output.tokens)
    at_limit = finish["type"] == "length" and length == output.sampling.get("max_new_tokens")
    # The token at place 0 is prefill's, alone.
    return early is not None and early > 0 and at_limit and length - early <= round_tokens


def swapped(output: Output, places: int = 3) -> Output | None:
    """An output with a planted fault: tokens exchanged with their neighbours; None where all are equal."""
    tokens = list(output.tokens)
    differing = [i for i in range(len(tokens) - 1) if tokens[i] != tokens[i + 1]]
    if not differing:
        return None
    for number in range(places):
        place = differing[len(differing) * (2 * number + 1) // (2 * places)]
        tokens[place], tokens[place + 1] = tokens[place + 1], tokens[place]
    return Output(output.prompt, tokens, output.sampling)


def regex_masks(tokenizer: Any, vocab_size: int, stop_tokens: Sequence[int]) -> MakeMasks:
    """Masks of regular expressions by xgrammar, as SGLang's grammar backend makes them."""
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop_tokens)
    )
    compiler = xgrammar.GrammarCompiler(info)

    def masks(regex: str, tokens: Sequence[int]) -> Tensor:
        matcher = xgrammar.GrammarMatcher(compiler.compile_regex(regex))
        words = xgrammar.allocate_token_bitmask(len(tokens), vocab_size)
        for place, token in enumerate(tokens):
            if matcher.is_terminated():
                words[place] = 0
                continue
            matcher.fill_next_token_bitmask(words, place)
            if not matcher.accept_token(token):
                words[place + 1 :] = 0
                break
        bits = words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1
        return bits.flatten(1)[:, :vocab_size].bool()

    return masks
