"""Finds the plan to set in about a minute: time goes to the plans that may turn out the fastest.

Every plan is looked at once, save trees larger than two in a row that were far behind. Then the trees are
halved step by step (successive halving), and what is left of the time goes to the best two, to the chain and
to plain decoding, text by text in turns. Draft trees are nested, so a round of a large tree also tells how
many tokens every smaller one would have committed there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddtree.bench.datasets import PromptSet, load_prompt_set
from ddtree.bench.evidence import times_of
from ddtree.bench.origin import device_name
from ddtree.bench.recommendation import Recommendation, group_advice
from ddtree.bench.run_format import EMBEDDED
from ddtree.config import Mode, SamplingParams, parse_budget
from ddtree.errors import ConfigError, counted
from ddtree.stats import RoundStats
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.plan_rates import Evidence, Measured, Trial, plan_order, rate_ratio, short_plan
from ddtree.tune_config import TuneConfig

if TYPE_CHECKING:
    from ddtree import Engine

LOOK_SHARE = 0.4  # of the time, for the first look at every plan
LOOK_ROUNDS = 4  # of it at least, so that a first round in which kernels compile stands out
LOOK_TEXTS = 3  # tried, where one ends before so many rounds
HOPELESS = 0.6  # of the best tree's rate: trees below it after the first look are not run again
HOPELESS_IN_A_ROW = 2  # and after so many larger ones are not looked at: rates fall from some budget on
MIN_TURNS = 12  # texts to fit into the time, by shorter answers where the machine is slow
MIN_TOKENS = 24  # of an answer
NUM_FINALISTS = 2
PLAIN_SHARE = 4  # plain decoding gets one in so many tokens: its rounds all take the same time
SLOW_ROUND = 4.0  # times the median: a pause of the machine or a graph's capture, not the plan
MIN_ROUNDS = 3  # of a look that was cut short, to count
MAX_TEXTS = 64

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt, as tokens, and its name."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """One text decoded under one plan.

    Attributes:
        seconds: of its rounds, without what slow ones took longer.
        nested_tokens: by smaller budget, the tokens that its tree would have committed in these rounds.
        num_slow: rounds whose time was set to the median.
    """

    text: str
    rounds: int
    tokens: int
    seconds: float
    nested_tokens: Mapping[int, int]
    num_slow: int
    repeat: int = 0


class Watcher:
    """Observes one request's rounds; trees are not asked for, since paths tell enough."""

    wants_trees = wants_stages = False

    def __init__(self, budgets: Sequence[int]) -> None:
        self.round_ms: list[float] = []
        self.tokens = 0
        self.nested_tokens = dict.fromkeys(budgets, 0)

    def on_round(self, stats: RoundStats) -> None:
        self.round_ms.append(stats.round_ms)
        self.tokens += stats.num_accept_tokens
        for budget in self.nested_tokens:
            self.nested_tokens[budget] += 1 + sum(0 < index <= budget for index in stats.accept_indices)


@dataclass(slots=True)
class Tuner:
    """Measures an engine's plans within `config.seconds`.

    Args:
        engine: loaded, with a drafter.
        texts: to decode, in this order; gone through again where they do not suffice.
        config: what to measure.
        on_progress: is told before every look.
        clock: seconds.
    """

    engine: Engine
    texts: Sequence[Text]
    config: TuneConfig
    on_progress: Callable[[float, float, str], None] = lambda done, total, text: None
    clock: Clock = time.perf_counter
    looks: dict[DraftPlan, list[Look]] = field(init=False)
    is_interrupted: bool = field(init=False, default=False)
    _begin_s: float = field(init=False, default=0.0)
    _num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        trees = [DraftPlan(Mode.TREE, budget) for budget in sorted(self.config.budgets)]
        self._num_tokens = self.config.max_tokens
        self.looks = {plan: [] for plan in (PLAIN, self.chain, *trees)}

    @property
    def chain(self) -> DraftPlan:
        """The drafter's whole block."""
        return DraftPlan(Mode.CHAIN, self.engine.pair.block_size - 1)

    @property
    def plans(self) -> list[DraftPlan]:
        """All plans, in order."""
        return list(self.looks)

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return self.clock() - self._begin_s

    def run(self) -> list[Evidence]:
        """Measure until the time is over; Ctrl-C ends it early with what is there.

        Raises:
            KeyboardInterrupt: before anything was measured.
            ConfigError: every text ended with its first token.
        """
        self._begin_s = self.clock()
        try:
            self._look_at_all()
            self._halve()
        except KeyboardInterrupt:
            self.is_interrupted = True
            if not any(self.looks.values()):
                raise
        evidence = self.evidence()
        if not evidence:
            raise ConfigError(
                f"all texts of {', '.join(self.config.sets)} ended with their first token, so there was no "
                "round to measure: name other prompts (--set)"
            )
        return evidence

    def evidence(self) -> list[Evidence]:
        """Every plan that was run, with the texts that it decoded and those that larger trees tell of it."""
        return [found for plan in self.plans if (found := self._measured(plan)) is not None]

    def _measured(self, plan: DraftPlan) -> Measured | None:
        trials = tuple(self._trials(plan))
        return Measured(plan, 1, trials) if trials else None

    def _look_at_all(self) -> None:
        """Decode a text under every plan, each within its part of a share of the time."""
        until_s = LOOK_SHARE * self.config.seconds
        rates: list[float] = []
        for place, plan in enumerate(plans := self.plans):
            part_s = (until_s - self.spent_s) / (len(plans) - place)
            look = self._first_look(plan, self.spent_s + max(part_s, 0.0))
            if plan.mode is not Mode.TREE:
                continue
            rates.append(look.tokens / look.seconds)
            last = rates[-HOPELESS_IN_A_ROW:]
            if len(last) == HOPELESS_IN_A_ROW and max(last) < HOPELESS * max(rates):
                break

    def _first_look(self, plan: DraftPlan, end_s: float) -> Look:
        """The first text with rounds enough."""
        for text in self.texts[:LOOK_TEXTS]:
            look = self._decode(plan, text, self._max_tokens(plan), end_s, least_rounds=LOOK_ROUNDS)
            self.looks[plan] = [look]
            if look.rounds >= LOOK_ROUNDS:
                break
        return look

    def _halve(self) -> None:
        """Text by text, the contenders in turns; fewer trees from step to step."""
        trees = self._hopeful()
        self._shorten(trees)
        num_steps = max(1, math.ceil(math.log2(len(trees) / NUM_FINALISTS)) + 1)
        begin_s, left_s = self.spent_s, self.config.seconds - self.spent_s
        turn = 1
        for step in range(1, num_steps + 1):
            end_s = begin_s + left_s * step / num_steps
            while True:
                self._turn(turn, trees)
                turn += 1
                if self.spent_s >= end_s:
                    break
            trees = self._best(trees, max(NUM_FINALISTS, math.ceil(len(trees) / 2)))

    def _shorten(self, trees: Sequence[DraftPlan]) -> None:
        """Cut answers so that enough texts are decoded, by the rates of the first looks."""
        left_s = max(self.config.seconds - self.spent_s, 0.0)
        token_s = [
            self.looks[plan][0].seconds / max(self.looks[plan][0].tokens, 1) / self._share(plan)
            for plan in (PLAIN, self.chain, *trees[:NUM_FINALISTS])
        ]
        fitting = int(left_s / MIN_TURNS / math.fsum(token_s))
        self._num_tokens = min(self.config.max_tokens, max(MIN_TOKENS, fitting))

    def _turn(self, turn: int, trees: Sequence[DraftPlan]) -> None:
        """One text under plain decoding, the chain and these trees; who begins changes."""
        plans = [plan for plan in self.plans if plan.mode is not Mode.TREE or plan in trees]
        text, repeat = self.texts[turn % len(self.texts)], turn // len(self.texts)
        for place in range(len(plans)):
            plan = plans[(place + turn) % len(plans)]
            if self.spent_s >= self.config.seconds:
                return
            look = self._decode(plan, text, self._max_tokens(plan), self.config.seconds, repeat)
            if look.rounds >= MIN_ROUNDS or self.spent_s < self.config.seconds:
                self.looks[plan].append(look)

    def _max_tokens(self, plan: DraftPlan) -> int:
        return self._num_tokens // self._share(plan)

    @staticmethod
    def _share(plan: DraftPlan) -> int:
        return PLAIN_SHARE if plan.mode is Mode.AR else 1

    def _decode(
        self,
        plan: DraftPlan,
        text: Text,
        max_tokens: int,
        end_s: float,
        repeat: int = 0,
        least_rounds: int = 1,
    ) -> Look:
        """Decode a text until it ends, or until the time is over and it had the least rounds."""
        from ddtree import Request

        self.on_progress(min(self.spent_s, self.config.seconds), self.config.seconds, short_plan(plan))
        budgets = [p.node_budget for p in self.plans if p.mode is plan.mode is Mode.TREE and p < plan]
        watcher = Watcher(budgets)
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=self.config.temperature, seed=self.config.seed
        )
        budget = parse_budget(plan.node_budget if plan.mode is Mode.TREE else "auto")
        stream = self.engine.stream(Request(text.tokens, sampling, plan.mode, budget, watcher))
        for _ in stream:
            if len(watcher.round_ms) >= least_rounds and self.spent_s >= end_s:
                break
        slow_ms, num_slow = _slow_part(watcher.round_ms)
        return Look(
            text=text.name,
            rounds=len(watcher.round_ms),
            tokens=watcher.tokens,
            seconds=max(stream.result().stats.decode_s - slow_ms / 1e3, 1e-9),
            nested_tokens=watcher.nested_tokens,
            num_slow=num_slow,
            repeat=repeat,
        )

    def _hopeful(self) -> list[DraftPlan]:
        """The trees that the first look does not rule out."""
        trees = [plan for plan, looks in self.looks.items() if plan.mode is Mode.TREE and looks]
        scores = self._scores(trees)
        return [tree for tree in trees if scores[tree] >= HOPELESS * max(scores.values())]

    def _best(self, trees: Sequence[DraftPlan], count: int) -> list[DraftPlan]:
        scores = self._scores(trees)
        return sorted(sorted(trees, key=scores.__getitem__)[-count:], key=plan_order)

    def _scores(self, trees: Sequence[DraftPlan]) -> dict[DraftPlan, float]:
        """How many times as fast as the chain each tree is, over the texts that both have."""
        base = self._measured(self.chain)
        scores = dict.fromkeys(trees, 0.0)
        for tree in trees:
            found = self._measured(tree)
            ratio = None if base is None or found is None else rate_ratio(found, base)
            scores[tree] = 0.0 if ratio is None else ratio.value
        return scores

    def _trials(self, plan: DraftPlan) -> Iterator[Trial]:
        """Texts that the plan decoded, and those that the next larger tree tells of it."""
        own = {(look.text, look.repeat): look for look in self.looks[plan] if look.rounds}
        for (text, repeat), look in own.items():
            yield Trial(text, look.tokens, look.seconds, look.rounds, look.tokens, repeat)
        if not own or plan.mode is not Mode.TREE:
            return
        round_s = sum(look.seconds for look in own.values()) / sum(look.rounds for look in own.values())
        told: dict[tuple[str, int], Look] = {}
        for larger in reversed(self.plans[self.plans.index(plan) + 1 :]):
            told |= {(look.text, look.repeat): look for look in self.looks[larger] if look.rounds}
        for (text, repeat), look in told.items():
            if (text, repeat) not in own:
                tokens = look.nested_tokens[plan.node_budget]
                yield Trial(text, tokens, look.rounds * round_s, look.rounds, tokens, repeat)

    def notes(self) -> list[str]:
        """What the reader should know of how this was measured."""
        num_rounds = sum(look.rounds for looks in self.looks.values() for look in looks)
        num_texts = len({look.text for looks in self.looks.values() for look in looks})
        notes = [
            f"{counted(num_rounds, 'round')} on {counted(num_texts, 'text')} in {self.spent_s:.0f} s; rates "
            "are of decoding, prefills left out"
        ]
        if self.is_interrupted:
            notes.append("stopped early: this is from what was measured so far")
        unseen = [short_plan(plan) for plan, looks in self.looks.items() if not looks]
        if unseen:
            why = "" if self.is_interrupted else ", since smaller trees were far behind already"
            notes.append(f"not measured: {', '.join(unseen)}{why}")
        num_slow = sum(look.num_slow for looks in self.looks.values() for look in looks)
        if num_slow:
            notes.append(
                f"{counted(num_slow, 'round')} took over {SLOW_ROUND:g} times the usual and counted as usual"
            )
        return notes


def _slow_part(round_ms: Sequence[float]) -> tuple[float, int]:
    """Milliseconds that slow rounds took beyond the median, and how many they are."""
    if len(round_ms) < MIN_ROUNDS:
        return 0.0, 0
    median = statistics.median(round_ms)
    slow = [ms - median for ms in round_ms if ms > SLOW_ROUND * median]
    return math.fsum(slow), len(slow)


def load_prompts(config: TuneConfig) -> list[PromptSet]:
    """The sets' prompts, shuffled by the seed.

    Raises:
        ConfigError: no such set or file.
    """
    return [load_prompt_set(name, None, config.seed) for name in config.sets]


def encode_texts(engine: Engine, sets: Sequence[PromptSet], config: TuneConfig) -> list[Text]:
    """First turns as tokens, set by set in turns; those without room for an answer are left out.

    Raises:
        ConfigError: no prompt fits.
    """
    room = engine.max_context_tokens - config.max_tokens
    texts: list[Text] = []
    for place in range(max(len(found.prompts) for found in sets)):
        for found in sets:
            if place < len(found.prompts) and len(texts) < MAX_TEXTS:
                tokens = engine.encode(found.prompts[place].turns[0])
                if len(tokens) <= room:
                    texts.append(Text(f"{found.name}/{found.prompts[place].id}", tokens))
    if not texts:
        raise ConfigError(
            f"no prompt of {', '.join(config.sets)} leaves room for --max-tokens {config.max_tokens} in a "
            f"context of {engine.max_context_tokens} tokens: lower --max-tokens or raise --max-context"
        )
    return texts


def recommend_tuned(tuner: Tuner, evidence: Sequence[Evidence]) -> Recommendation:
    """What a calibration says should be set in the embedded engine."""
    engine, config = tuner.engine.config, tuner.config
    device = device_name(str(tuner.engine.device))
    context = statistics.fmean(len(text.tokens) for text in tuner.texts) + config.max_tokens / 2
    times = times_of(evidence, engine.model, device, context, EMBEDDED)
    made = group_advice(EMBEDDED, config.temperature, config.sets, {1: evidence}, {}, times)
    made = replace(made, notes=(*made.notes, *tuner.notes()), is_sglang=False)
    drafter = "" if engine.drafter in ("auto", "none") else engine.drafter
    return Recommendation("ddtree tune", engine.model, drafter, device, (made,))
