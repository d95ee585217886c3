"""Compares what a trace says of the target's log-probabilities with the replay's own.

A wrong verify pass shows here at once, at every token, also where it changed no choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddtree.errors import counted
from ddtree.trace.findings import Finding
from ddtree.trace.run_file import Answer

# Of an allowed gap, which near ties alone show: a log-probability has the errors of all logits.
SLACK_OF_EPS = 10.0


@dataclass(slots=True)
class FigureCheck:
    """Takes the replay's logits of each output in turn.

    Attributes:
        answers: the run's outputs.
        slack: the largest difference of log-probabilities that is rounding.
        off: for each output with figures, by its index, the places where they differ by more.
        largest: the largest difference.
    """

    answers: Sequence[Answer]
    slack: float
    off: dict[int, list[int]] = field(default_factory=dict)
    largest: float = 0.0

    def add(self, index: int, logits: Tensor) -> None:
        """Compare one output's figures with the replay's logits [n, V] at its tokens."""
        answer = self.answers[index]
        known = [
            (place, figure[0]) for place, figure in enumerate(answer.margins)
            if figure is not None and math.isfinite(figure[0])
        ]  # fmt: skip
        if not known or len(answer.margins) != logits.shape[0]:
            return
        places = torch.tensor([place for place, _ in known], device=logits.device)
        told = torch.tensor([log_prob for _, log_prob in known], device=logits.device)
        tokens = torch.tensor(answer.output.tokens, device=logits.device)[places]
        rows = logits[places]
        own = rows.gather(1, tokens[:, None]).squeeze(1) - rows.logsumexp(1)
        difference = (own - told).abs()
        self.largest = max(self.largest, float(difference.max()))
        self.off[index] = places[difference > self.slack].tolist()

    def findings(self) -> Iterator[Finding]:
        """That figures are off, where some are."""
        wrong = {index: places for index, places in sorted(self.off.items()) if places}
        if not wrong:
            return
        index, places = next(iter(wrong.items()))
        output, number = self.answers[index].output, sum(map(len, wrong.values()))
        yield Finding(
            "figures",
            f"{output.name}: the log-probability of token {places[0]} (position "
            f"{len(output.prompt) + places[0]}) is not the target's; {counted(number, 'such token')} in "
            f"{counted(len(wrong), 'output')}, at most {self.largest:.3g} off, allowed {self.slack:.3g}",
        )
