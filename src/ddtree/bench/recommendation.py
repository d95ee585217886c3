"""Which plan to set, by a benchmark run: for every load, and one for all where the budget is fixed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddtree.bench.document import escaped
from ddtree.bench.evidence import (
    context_tokens,
    draft_depth,
    is_sglang,
    is_uneven,
    measured_of,
    model_name,
    short_cells,
    times_of,
    with_forecasts,
)
from ddtree.bench.launch import launch_lines
from ddtree.bench.run_format import Arm, Cell, Run
from ddtree.config import Mode, check, is_int
from ddtree.errors import counted
from ddtree.tree.budget_cost import DraftPlan
from ddtree.tree.forecast import RoundTimes
from ddtree.tree.plan_rates import Evidence, Ratio, short_plan
from ddtree.tree.recommend import Advice, MixAdvice, Option, advise, advise_mix

NOISE = "within the noise: measure longer before you rely on it"
FORETOLD = "a forecast: measure it before you rely on it"


@dataclass(frozen=True, slots=True)
class GroupAdvice:
    """What to set for one engine at one temperature.

    Attributes:
        engine: `embedded`, `sglang` or a URL.
        temperature: of the requests.
        sets: prompt sets whose texts count, all together.
        by_load: the advice by requests at once.
        mix: the one plan for all loads; None for a single load.
        by_set: sets that by themselves surely say another plan, with their advice by load.
        times: the ways to foretell round times, the best first; none where too few are known.
        notes: what the reader should know, a sentence each.
        is_sglang: whether the engine is SGLang; None for a server that does not say.
        evidence: by load, what the advice rests on.
    """

    engine: str
    temperature: float
    sets: tuple[str, ...]
    by_load: Mapping[int, Advice]
    mix: MixAdvice | None
    by_set: Mapping[str, Mapping[int, Advice]]
    times: tuple[RoundTimes, ...]
    notes: tuple[str, ...] = ()
    is_sglang: bool | None = None
    evidence: Mapping[int, Sequence[Evidence]] = field(default_factory=dict, repr=False)

    @property
    def plan(self) -> DraftPlan:
        """The plan to launch with: for all loads, or for the only one."""
        return self.mix.plan if self.mix is not None else next(iter(self.by_load.values())).plan


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to set, by engine and temperature.

    Attributes:
        source: the run's file, or how else it was measured.
        model, drafter: names; empty where they are not known.
        device: where it was measured.
    """

    source: str
    model: str
    drafter: str
    device: str
    groups: tuple[GroupAdvice, ...]
    notes: tuple[str, ...] = ()


def recommend(run: Run, concurrency: Sequence[int] = (), budgets: Sequence[int] = ()) -> Recommendation:
    """What a run says should be set.

    Args:
        run: as read from its file; a run that is not finished will do.
        concurrency: further loads to tell, by forecast where they were not measured.
        budgets: further tree budgets to judge, by forecast.

    Raises:
        ConfigError: a load or budget that is not allowed.
    """
    for name, values in (("concurrency", concurrency), ("budgets", budgets)):
        for value in values:
            check(is_int(value) and value >= 1, name, value, "1 or more")
    asked = [DraftPlan(Mode.TREE, budget) for budget in budgets]
    grouped: dict[tuple[str, float], list[Cell]] = defaultdict(list)
    skipped: set[str] = set()
    for cell in run.cells.values():
        arm = Arm.parse(cell.key.arm)
        if arm.mode is None or arm.node_budget == "auto":
            skipped.add(cell.key.arm)
        elif cell.new_tokens > 0:
            grouped[arm.engine, cell.key.temperature].append(cell)
    found = [
        _group(run, engine, temperature, cells, concurrency, asked)
        for (engine, temperature), cells in sorted(grouped.items())
    ]
    groups = tuple(group for group in found if group.by_load)
    notes = [] if groups else ["nothing was measured yet of which a plan can be told"]
    notes += [f"{arm} has no fixed plan, so it is not judged" for arm in sorted(skipped)]
    return Recommendation(
        run.source,
        model_name(run, "target"),
        model_name(run, "drafter"),
        run.header.device,
        groups,
        tuple(notes),
    )


def _group(
    run: Run,
    engine: str,
    temperature: float,
    cells: Sequence[Cell],
    concurrency: Sequence[int],
    asked: Sequence[DraftPlan],
) -> GroupAdvice:
    depth = draft_depth(run, engine)
    measured = measured_of(cells, depth)
    everything = [found for loads in measured.values() for found in loads]
    target = model_name(run, "target")
    times = times_of(everything, target, run.header.device, context_tokens(cells), engine)
    evidence = with_forecasts(measured, times, concurrency, asked)
    sets = tuple(dict.fromkeys(cell.key.prompt_set for cell in cells))
    by_set = {}
    if len(sets) > 1:
        by_set = {name: measured_of([c for c in cells if c.key.prompt_set == name], depth) for name in sets}
    made = group_advice(engine, temperature, sets, evidence, by_set, times)
    missing = [load for load in concurrency if load not in evidence]
    notes = [f"nothing can be told of {load} at once: too little was measured around it" for load in missing]
    notes += [
        f"{load} at once was never reached: {counted(count, 'prompt')} a set"
        for load, count in short_cells(cells)
    ]
    if is_uneven(cells):
        notes.append("not every arm has every cell yet; gains are over the texts that both arms have")
    return replace(made, notes=(*made.notes, *notes), is_sglang=is_sglang(run, engine))


def group_advice(
    engine: str,
    temperature: float,
    sets: tuple[str, ...],
    evidence: Mapping[int, Sequence[Evidence]],
    by_set: Mapping[str, Mapping[int, Sequence[Evidence]]],
    times: tuple[RoundTimes, ...],
) -> GroupAdvice:
    """The advice for what was found at every load, all sets together and of each set."""
    by_load = {load: advise(found) for load, found in sorted(evidence.items())}
    mix = advise_mix({load: evidence[load] for load in by_load}) if len(by_load) > 1 else None
    others: dict[str, dict[int, Advice]] = defaultdict(dict)
    for name, loads in by_set.items():
        for load, found in sorted(loads.items()):
            own = advise(found)
            if own.is_certain and load in by_load and own.plan != by_load[load].plan:
                others[name][load] = own
    notes = []
    if len(by_load) > 1 and mix is None:
        notes.append("no plan was measured at every load, so no single one can be named for all")
    return GroupAdvice(
        engine, temperature, sets, by_load, mix, dict(others), times, tuple(notes), evidence=evidence
    )


def launch_of(recommendation: Recommendation, group: GroupAdvice) -> tuple[str, ...]:
    """Shell lines that start the group's engine with its plan; none where the engine is not known."""
    if group.is_sglang is None:
        return ()
    return launch_lines(group.plan, recommendation.model, recommendation.drafter, is_sglang=group.is_sglang)


def option_cells(option: Option) -> tuple[str, ...]:
    """Plan, tokens/s, accept length, gain over the chain, gain over plain decoding, how they are known."""
    return (
        short_plan(option.plan),
        f"{option.tokens_per_s:,.0f}" if option.tokens_per_s >= 100 else f"{option.tokens_per_s:.1f}",
        "" if option.accept_length is None else f"{option.accept_length.value:.2f}",
        "" if option.over_chain is None else str(option.over_chain),
        "" if option.over_plain is None else str(option.over_plain),
        "predicted" if option.is_predicted else "measured",
    )


COLUMNS = ("plan", "tokens/s", "accept length", "times the chain", "times plain", "")


def summary_lines(group: GroupAdvice) -> list[str]:
    """What to set at each load and for all of them, each with its reason, and what else is to be said."""
    lines = [_advice_line(f"{load} at once", advice) for load, advice in group.by_load.items()]
    if group.mix is not None:
        losses = ", ".join(f"{loss:.1%} at {load}" for load, loss in group.mix.losses.items())
        doubt = "" if group.mix.is_certain else f" ({NOISE})"
        lines.append(
            f"one setting for {', '.join(map(str, group.mix.losses))} at once: {short_plan(group.mix.plan)}"
            f"{doubt}, which loses {losses} against the advice there"
        )
    for name, loads in group.by_set.items():
        lines += [_advice_line(f"{name} alone, {load} at once", advice) for load, advice in loads.items()]
    return [*lines, *map(_error_line, group.times), *group.notes]


def _advice_line(where: str, advice: Advice) -> str:
    doubt = "" if advice.is_certain else f"; {NOISE}"
    if advice.chosen.is_predicted:
        doubt = f"; {FORETOLD}"
    return f"{where}: {short_plan(advice.plan)}, since {advice.reason}{doubt}"


def _error_line(times: RoundTimes) -> str:
    if times.error is None:
        return f"round times by {times.method}: too few to foretell one from the others"
    if not times.left_out:
        return f"round times by {times.method}: typically {times.error:.0%} off"
    return (
        f"round times by {times.method}: each of {len(times.left_out)} measured ones foretold from the "
        f"others, typically {times.error:.0%} off"
    )


def title_of(group: GroupAdvice) -> str:
    """Engine, temperature and sets."""
    return f"{group.engine}, T = {group.temperature:g} ({', '.join(group.sets)})"


def markdown(recommendation: Recommendation, heading: str = "###") -> str:
    """The recommendation as Markdown: a part for each engine and temperature, with the flags to paste."""
    parts = [f"{escaped(note)}.\n" for note in recommendation.notes]
    for group in recommendation.groups:
        parts.append(f"{heading} {escaped(title_of(group))}\n")
        parts.append("".join(f"- {escaped(line)}\n" for line in summary_lines(group)))
        rows = [
            (str(load), *option_cells(option))
            for load, advice in group.by_load.items()
            for option in advice.options
        ]
        parts.append(_table(("at once", *COLUMNS[:-1], "known"), rows))
        launch = launch_of(recommendation, group)
        if launch:
            parts.append("\n".join(["```sh", *launch, "```\n"]))
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def to_json(recommendation: Recommendation) -> dict[str, Any]:
    """Everything of it, ready for JSON."""
    return {
        "source": recommendation.source,
        "model": recommendation.model,
        "drafter": recommendation.drafter,
        "device": recommendation.device,
        "notes": list(recommendation.notes),
        "groups": [_group_json(recommendation, group) for group in recommendation.groups],
    }


def _group_json(recommendation: Recommendation, group: GroupAdvice) -> dict[str, Any]:
    mix = group.mix
    return {
        "engine": group.engine,
        "temperature": group.temperature,
        "sets": list(group.sets),
        "plan": short_plan(group.plan),
        "by_load": {str(load): _advice_json(advice) for load, advice in group.by_load.items()},
        "by_set": {
            name: {str(load): _advice_json(advice) for load, advice in loads.items()}
            for name, loads in group.by_set.items()
        },
        "mix": mix and {
            "plan": short_plan(mix.plan), "is_certain": mix.is_certain, "reason": mix.reason,
            "losses": {str(load): loss for load, loss in mix.losses.items()},
        },
        "round_times": [
            {
                "method": way.method,
                "leave_one_out_error": way.error,
                "left_out": [
                    {"name": one.name, "measured_s": one.seconds, "predicted_s": one.predicted_s}
                    for one in way.left_out
                ],
            }
            for way in group.times
        ],
        "launch": list(launch_of(recommendation, group)),
        "notes": list(group.notes),
    }  # fmt: skip


def _advice_json(advice: Advice) -> dict[str, Any]:
    return {
        "plan": short_plan(advice.plan),
        "is_certain": advice.is_certain,
        "reason": advice.reason,
        "options": [
            {
                "plan": short_plan(option.plan),
                "tokens_per_s": option.tokens_per_s,
                "accept_length": _ratio_json(option.accept_length),
                "over_chain": _ratio_json(option.over_chain),
                "over_plain": _ratio_json(option.over_plain),
                "is_predicted": option.is_predicted,
            }
            for option in advice.options
        ],
    }


def _ratio_json(ratio: Ratio | None) -> dict[str, float | None] | None:
    return None if ratio is None else {"value": ratio.value, "low": ratio.low, "high": ratio.high}
