"""Replay: does every token of a finished output follow from the target's own logits?

An output is teacher-forced through plain prefill of the target in transformers, its logits are processed
as plain decoding processes them, and each emitted token is judged by its *gap*, in units of logits: greedy,
the largest logit less the token's; sampled, the largest of (logit + temperature * noise) less the token's,
with the noise keyed by (seed, position, token). Exact arithmetic gives gaps of 0. An engine rounds
differently, so gaps up to `eps` are allowed, also at the edges of top-k, top-p and min-p: a token counts as
kept if logits within `eps` could keep it, and competes only if no such logits could drop it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.trace.choice import Noise, gaps, process
from ddtree.trace.grammar import MakeMasks
from ddtree.trace.outputs import Output, Sampling

ROWS = 128  # rows whose noise and sorted copies are in memory at once
GAP_STEPS = (0.125, 0.25, 0.5, 0.75, 1.0)
BATCH_TOKENS = 4096  # of a prefill, padding included; each makes one row of logits at most


@dataclass(frozen=True, slots=True)
class Violation:
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
    violations: tuple[Violation, ...]
    gaps_above: tuple[int, ...]  # tokens with a gap above each of GAP_STEPS

    @property
    def num_violations(self) -> int:
        return len(self.violations)

    @property
    def first_violation(self) -> Violation | None:
        return self.violations[0] if self.violations else None


class Replayer:
    """Judges outputs by a target on its own transformers modules.

    Args:
        model: the target, in the number format of the engine.
        stop_tokens: tokens that end a text, which min_new_tokens holds back.
        make_masks: needed for outputs with a grammar.
        noise: the engine's noise of a draw (`ddtree.tree.noise.keyed_gumbel`), needed for sampled outputs.
    """

    def __init__(
        self,
        model: Any,
        stop_tokens: Sequence[int],
        make_masks: MakeMasks | None = None,
        noise: Noise | None = None,
    ) -> None:
        self._model = model
        self.stop_tokens = tuple(stop_tokens)
        self.make_masks = make_masks
        self._noise = noise

    @property
    def vocab_size(self) -> int:
        """Width of the target's logits."""
        return int(self._model.config.vocab_size)

    @property
    def context_tokens(self) -> int | None:
        """The longest text that the target was made for, None where its config does not say."""
        positions = getattr(self._model.config, "max_position_embeddings", None)
        return None if positions is None else int(positions)

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
    def gaps(
        self, output: Output, eps: float, logits: Tensor | None = None, sampling: Sampling | None = None
    ) -> tuple[Tensor, Tensor]:
        """Gap of each token of an output [n] float64 and the target's own choice there [n] int64.

        `logits` [n, V] where they are already known; `sampling` in place of the output's own.
        """
        if logits is None:
            _, logits = next(self.logits([output]))
        sampling = sampling or output.read_sampling()
        tokens = torch.tensor(output.tokens, device=logits.device)
        found = [
            gaps(
                scores, tokens[rows], rows_positions(output, rows, logits.device), sampling, eps,
                self._noise, output.order,
            )
            for rows, scores in self._processed(output, logits, sampling)
        ]  # fmt: skip
        gap, best = (torch.cat(parts) for parts in zip(*found, strict=True))
        return gap, best

    def judge(self, output: Output, eps: float, logits: Tensor | None = None) -> Verdict:
        """Replay an output; `logits` [n, V] where they are already known."""
        gap, best = self.gaps(output, eps, logits)
        wrong = (gap > eps).nonzero().flatten().tolist()
        return Verdict(
            num_tokens=len(output.tokens),
            max_gap=float(gap.max()),
            num_not_best=int((gap > 0).sum()),
            violations=tuple(
                Violation(i, len(output.prompt) + i, output.tokens[i], int(best[i]), float(gap[i]))
                for i in wrong
            ),
            gaps_above=tuple(int((gap > step).sum()) for step in GAP_STEPS),
        )

    def _processed(
        self, output: Output, logits: Tensor, sampling: Sampling
    ) -> Iterator[tuple[slice, Tensor]]:
        allowed = None
        if (grammar := sampling.grammar) is not None:
            if self.make_masks is None:
                raise ValueError("an output with a grammar needs make_masks")
            allowed = self.make_masks(grammar, output.tokens).to(logits.device)
        for begin in range(0, len(output.tokens), ROWS):
            rows = slice(begin, min(begin + ROWS, len(output.tokens)))
            masks = None if allowed is None else allowed[rows]
            yield (
                rows,
                process(
                    logits[rows], output.prompt, output.tokens, begin, sampling, self.stop_tokens,
                    output.order, masks,
                ),
            )  # fmt: skip


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


def swapped(output: Output, places: int = 3) -> Output | None:
    """An output with a planted fault: tokens exchanged with their neighbours; None where all are equal."""
    tokens = list(output.tokens)
    differing = [i for i in range(len(tokens) - 1) if tokens[i] != tokens[i + 1]]
    if not differing:
        return None
    for number in range(places):
        place = differing[len(differing) * (2 * number + 1) // (2 * places)]
        tokens[place], tokens[place + 1] = tokens[place + 1], tokens[place]
    return Output(output.prompt, tokens, output.sampling, output.name, output.finish, output.order)
