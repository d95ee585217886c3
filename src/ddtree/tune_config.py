"""What `ddtree tune` measures, in one dataclass that checks itself once."""

from __future__ import annotations

from dataclasses import dataclass

from ddtree.config import MAX_NODE_BUDGET, SamplingParams, check, is_int, is_number, setting

MIN_SECONDS, MAX_SECONDS = 1.0, 86_400.0


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """A calibration: plain decoding, the chain and trees on prompts of some sets, within a time.

    Raises:
        ConfigError: a value that is not allowed.
    """

    seconds: float = setting(60.0, "how long to measure, once the models are loaded")
    # One row more, the root, fills the tiles of a GPU's matrix units.
    budgets: tuple[int, ...] = setting((4, 7, 15, 31, 63, 127, 255, 511), "trees to try, root not counted")
    sets: tuple[str, ...] = setting(
        ("gsm8k", "humaneval", "mt_bench"), "prompt sets by name, or JSON Lines files (docs/bench.md)"
    )
    max_tokens: int = setting(96, "most new tokens of a text; plain decoding gets a quarter of it")
    temperature: float = setting(0.0, "0 is greedy")
    seed: int = setting(0, "seed of the prompts' order and of the sampling noise")

    def __post_init__(self) -> None:
        check(
            is_number(self.seconds) and MIN_SECONDS <= self.seconds <= MAX_SECONDS,
            "seconds", self.seconds, f"from {MIN_SECONDS:g} to {MAX_SECONDS:g}",
        )  # fmt: skip
        check(
            isinstance(self.budgets, tuple) and len(self.budgets) > 0, "budgets", self.budgets, "one or more"
        )
        for budget in self.budgets:
            check(
                is_int(budget) and 1 <= budget <= MAX_NODE_BUDGET,
                "budgets", budget, f"whole numbers from 1 to {MAX_NODE_BUDGET}",
            )  # fmt: skip
            check(self.budgets.count(budget) == 1, "budgets", self.budgets, "each once")
        check(isinstance(self.sets, tuple) and len(self.sets) > 0, "sets", self.sets, "one or more")
        for name in self.sets:
            check(isinstance(name, str) and name != "", "sets", name, "names or paths")
            check(self.sets.count(name) == 1, "sets", self.sets, "each once")
        check(is_int(self.max_tokens) and self.max_tokens >= 8, "max_tokens", self.max_tokens, "8 or more")
        SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed)
