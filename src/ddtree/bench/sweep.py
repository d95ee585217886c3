"""Runs the cells of a benchmark: arms side by side, each cell kept before the next is measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from ddtree.bench.accuracy import check_answer
from ddtree.bench.datasets import Prompt, PromptSet
from ddtree.bench.energy import EnergyMeter
from ddtree.bench.measure import Answer, BenchEngine, CellExtras, Chat, Observed, figures, first_turn
from ddtree.bench.outputs_file import OutputsFile
from ddtree.bench.plan import Group, request_seed, turned
from ddtree.bench.run_format import Arm
from ddtree.bench.run_writer import RunWriter
from ddtree.bench_config import EMBEDDED, SGLANG, BenchConfig, is_url
from ddtree.errors import ConfigError, DDTreeError, MissingExtraError, ModelError, first_line

logger = logging.getLogger(__name__)

START = "start"
MISTAKES = (ConfigError, MissingExtraError, ModelError)  # what ends a run that has measured nothing yet


# A GPU's energy counter lags: of shorter stretches it tells what ran before them.
LEAST_ENERGY_S = 1.0


class Opener(Protocol):
    """Opens the engine of an arm; see `Engines`."""

    def open(self, arm: Arm) -> BenchEngine: ...


class Reporter(Protocol):
    """Is told how far a run is, in requests."""

    def progress(self, done: float, total: float, text: str) -> None: ...

    def message(self, text: str) -> None: ...


class SilentReporter:
    """Tells nothing."""

    def progress(self, done: float, total: float, text: str) -> None: ...

    def message(self, text: str) -> None: ...


@dataclass(slots=True)
class Timed:
    """What an arm did in one cell so far."""

    wall_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    energy_j: float | None = 0.0

    def add(self, wall_s: float, answers: Sequence[Answer], energy_j: float | None) -> None:
        self.wall_s += wall_s
        self.answers += answers
        if energy_j is None or wall_s < LEAST_ENERGY_S or self.energy_j is None:
            self.energy_j = None
        else:
            self.energy_j += energy_j


class Sweep:
    """Measures groups of cells.

    Args:
        config: of the run.
        sets: its prompt sets by name.
        writer: of the run's file.
        opener: opens arms.
        reporter: is told how far it is.
        outputs: where finished outputs go, if anywhere.
        meter: of the GPUs' energy, where there is one.
        is_one_server_at_a_time: whether sglang servers are closed before another is opened.

    Attributes:
        failures: a line for each cell or arm that could not be measured.
    """

    def __init__(
        self,
        config: BenchConfig,
        sets: Mapping[str, PromptSet],
        writer: RunWriter,
        opener: Opener,
        reporter: Reporter,
        *,
        outputs: OutputsFile | None = None,
        meter: EnergyMeter | None = None,
        is_one_server_at_a_time: bool = False,
    ) -> None:
        self._config, self._sets, self._writer = config, sets, writer
        self._opener, self._reporter = opener, reporter
        self._outputs, self._meter, self._is_one_at_a_time = outputs, meter, is_one_server_at_a_time
        self._engines: dict[Arm, BenchEngine] = {}
        self._infos: dict[Arm, dict[str, Any]] = {}
        self._given_up: set[Arm] = set()
        self._checked: dict[tuple[str, str, str], bool | None] = {}
        self._done = self._total = self._num_cells = 0
        self.failures: list[str] = []

    def run(self, groups: Sequence[Group]) -> None:
        """Measure all groups; engines are closed whatever happens.

        Raises:
            ConfigError: a file cannot be written.
            DDTreeError: the user's mistake ends the run before anything is measured.
        """
        self._total = sum(self._num_requests(group) * len(group.arms) for group in groups)
        try:
            for group in groups:
                self._measure(group)
        finally:
            for arm in list(self._engines):
                self._close(arm)

    def _num_requests(self, group: Group) -> int:
        return len(self._sets[group.prompt_set].prompts)

    def _measure(self, group: Group) -> None:
        """The arms of a group: those in this process prompt by prompt in turn, each server by itself.

        With prompts in turn, a machine that slows down slows all arms alike. A server's requests overlap.
        """
        chats, begun = self._chats(group), self._done
        # All of them first, so that what idle servers take they take from every arm.
        ready = [arm for arm in group.arms if self._is_ready(arm)]
        self._side_by_side(
            group, [arm for arm in ready if arm.engine == EMBEDDED], [[chat] for chat in chats]
        )
        for arm in ready:
            if arm.engine != EMBEDDED:
                self._side_by_side(group, [arm], [chats])
        # Of arms that failed, too.
        self._advance(begun + len(chats) * len(group.arms) - self._done, str(group))

    def _chats(self, group: Group) -> list[Chat]:
        return [first_turn(prompt.turns) for prompt in self._sets[group.prompt_set].prompts]

    # -- engines -----------------------------------------------------------------------------------

    def _is_ready(self, arm: Arm) -> bool:
        """Open and warm up an arm where that is still to be done; whether it can be measured."""
        if arm in self._given_up:
            return False
        if arm in self._engines:
            return True
        if self._is_one_at_a_time and arm.engine == SGLANG:
            for other in [each for each in self._engines if each.engine == SGLANG]:
                self._close(other)
        self._reporter.message(f"{arm}: getting ready")
        if not self._attempt(arm, START, lambda: self._open(arm)):
            return False
        self._writer.engine(str(arm), self._infos[arm])
        return True

    def _open(self, arm: Arm) -> None:
        self._engines[arm] = self._opener.open(arm)
        self._warm_up(arm)
        self._infos[arm] = dict(self._engines[arm].info())

    def _warm_up(self, arm: Arm) -> None:
        """Warm up on all sets; without those of which the engine refuses a prompt, whose cells then fail."""
        sets = sorted(self._sets.values(), key=_longest)
        while True:
            try:
                return self._warm_up_on(arm, [first_turn(p.turns) for each in sets for p in each.prompts])
            except ConfigError as error:
                if len(sets) == 1:
                    raise
                logger.info("%s: warm-up without %s: %s", arm, sets.pop().name, first_line(error))

    def _warm_up_on(self, arm: Arm, chats: Sequence[Chat]) -> None:
        """The shortest and the longest prompt at every temperature, as many at a time as ever later."""
        ends = [find(chats, key=lambda chat: len(chat[0]["content"])) for find in (min, max)]
        if arm.engine == EMBEDDED and self._writer.run.header.device != "cpu":
            self._warm_up_prefill(arm, chats)
        concurrency = 1 if arm.engine == EMBEDDED else max(self._config.concurrency)
        prompts = [ends[number % 2] for number in range(max(2, concurrency))]
        for temperature in self._config.temperatures:
            self._engines[arm].run(
                prompts,
                max_tokens=self._config.warm_up_tokens or self._config.max_tokens,
                temperature=temperature,
                seeds=[request_seed(self._config.seed, number) for number in range(len(prompts))],
                concurrency=concurrency,
            )

    def _warm_up_prefill(self, arm: Arm, chats: Sequence[Chat]) -> None:
        """Every prompt once: kernels of a prefill are compiled a kind of length, in most of a second."""
        seeds = [request_seed(self._config.seed, number) for number in range(len(chats))]
        self._engines[arm].run(chats, max_tokens=1, temperature=0.0, seeds=seeds, concurrency=1)

    def _close(self, arm: Arm) -> None:
        engine = self._engines.pop(arm)
        try:
            engine.close()
        except Exception as error:  # whatever an engine that died leaves behind
            logger.warning("%s: closing it: %s", arm, first_line(error))

    def _attempt(self, arm: Arm, what: str, step: Callable[[], None]) -> bool:
        """Whether a step of an arm went well; an error is kept and told, and the run goes on without."""
        try:
            step()
        except Exception as error:
            if isinstance(error, MISTAKES) and what == START and not self._num_cells:
                raise
            logger.info("%s: %s", arm, what, exc_info=not isinstance(error, DDTreeError))
            self._fail(arm, what, error)
            return False
        return True

    def _fail(self, arm: Arm, what: str, error: Exception) -> None:
        """Keep an error; any but a `ConfigError` in a cell, which is about its prompts, gives the arm up."""
        line = f"{arm}, {what}: {' '.join(first_line(error).split())}"
        self.failures.append(line)
        self._reporter.message(line)
        self._writer.engine(str(arm), {**self._infos.get(arm, {}), "error": line})
        if what == START or not isinstance(error, ConfigError):
            self._given_up.add(arm)
            if arm in self._engines:
                self._close(arm)

    # -- cells -------------------------------------------------------------------------------------

    def _side_by_side(self, group: Group, arms: Sequence[Arm], batches: Sequence[Sequence[Chat]]) -> None:
        """One cell of each arm: every batch of prompts on every arm in turn."""
        timed = {arm: Timed() for arm in arms if self._attempt(arm, str(group), self._engines[arm].flush)}
        number = 0
        for turn, batch in enumerate(batches):
            seeds = self._seeds(range(number, number + len(batch)))
            number += len(batch)
            for arm in list(turned(list(timed), turn)):
                step = partial(self._timed_run, timed[arm], group, arm, batch, seeds)
                if not self._attempt(arm, str(group), step):
                    del timed[arm]
                self._advance(len(batch), f"{group}: {arm}")
        for arm, done in timed.items():
            self._keep(group, arm, done)

    def _seeds(self, numbers: range) -> list[int]:
        return [request_seed(self._config.seed, number) for number in numbers]

    def _timed_run(
        self, timed: Timed, group: Group, arm: Arm, batch: Sequence[Chat], seeds: Sequence[int]
    ) -> None:
        before_j = self._joules(arm)
        wall_s, answers = self._engines[arm].run(
            batch,
            max_tokens=self._config.max_tokens,
            temperature=group.temperature,
            seeds=seeds,
            concurrency=group.concurrency,
        )
        after_j = self._joules(arm)
        if len(answers) != len(batch):
            raise DDTreeError(f"{len(answers)} answers came for {len(batch)} prompts")
        timed.add(wall_s, answers, None if before_j is None or after_j is None else after_j - before_j)

    def _joules(self, arm: Arm) -> float | None:
        """What the GPUs here took so far; None for a server that may run elsewhere."""
        return None if self._meter is None or is_url(arm.engine) else self._meter.joules()

    def _advance(self, requests: int, text: str) -> None:
        self._done += requests
        self._reporter.progress(self._done, self._total, text)

    def _keep(self, group: Group, arm: Arm, timed: Timed) -> None:
        """Check a cell's answers, watch some rounds, and write it."""
        memory_bytes = self._engines[arm].peak_memory_bytes()
        observed: list[Observed] = []
        if self._is_watched(group):
            self._attempt(arm, f"{group}, watched", lambda: self._observe(group, arm, observed))
        correct = self._check(group, timed.answers)
        extras = CellExtras(correct, observed[0] if observed else None, memory_bytes, timed.energy_j)
        marks = []
        if self._outputs is not None:
            sampling = self._sampling(group, len(timed.answers))
            marks = [self._outputs.add(arm, group, timed.answers, sampling, self._dtype(arm))]
        self._writer.cell(figures(group.key(arm), timed.wall_s, timed.answers, extras), marks)
        self._num_cells += 1

    def _is_watched(self, group: Group) -> bool:
        """Once for each arm, set and temperature, if at all."""
        is_first = group.repeat == 0 and group.concurrency == min(self._config.concurrency)
        return is_first and self._config.rank_prompts > 0

    def _observe(self, group: Group, arm: Arm, observed: list[Observed]) -> None:
        """Watch the rounds of a few prompts."""
        chats = self._chats(group)[: self._config.rank_prompts]
        seen = self._engines[arm].observe(
            chats,
            max_tokens=self._config.max_tokens,
            temperature=group.temperature,
            seeds=self._seeds(range(len(chats))),
        )
        observed += [] if seen is None else [seen]

    def _check(self, group: Group, answers: Sequence[Answer]) -> list[bool | None]:
        """Whether answers are right; a text is checked once."""
        checks = []
        for prompt, answer in zip(self._sets[group.prompt_set].prompts, answers, strict=True):
            key = group.prompt_set, prompt.id, answer.text
            if key not in self._checked:
                self._checked[key] = self._is_correct(group.prompt_set, prompt, answer.text)
            checks.append(self._checked[key])
        return checks

    def _is_correct(self, prompt_set: str, prompt: Prompt, text: str) -> bool | None:
        """None, too, where it cannot be found out: the times are worth keeping all the same."""
        try:
            return check_answer(prompt_set, prompt, text, run_code=self._config.run_code)
        except DDTreeError as error:
            line = f"answers of {prompt_set} are not checked: {first_line(error)}"
            if line not in self.failures:
                self.failures.append(line)
                self._reporter.message(line)
            return None

    def _sampling(self, group: Group, count: int) -> list[dict[str, Any]]:
        return [
            {"temperature": group.temperature, "max_tokens": self._config.max_tokens, "seed": seed}
            for seed in self._seeds(range(count))
        ]

    def _dtype(self, arm: Arm) -> str | None:
        dtype = self._infos[arm].get("dtype")
        return dtype if isinstance(dtype, str) else None


def _longest(prompts: PromptSet) -> int:
    """Characters of a set's longest first turn."""
    return max(len(prompt.turns[0]) for prompt in prompts.prompts)
