"""A whole benchmark run: from settings to the run's file."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ddtree import Engine
from ddtree.bench.datasets import PromptSet
from ddtree.bench.energy import EnergyMeter, gpu_uuids, open_meter
from ddtree.bench.engines import Engines, Load
from ddtree.bench.file_lock import check_writable, sole_writer
from ddtree.bench.origin import load_sets, make_header
from ddtree.bench.outputs_file import OutputsFile
from ddtree.bench.plan import (
    Group,
    arms_of,
    can_run,
    one_server_at_a_time,
    plan_groups,
    without_cells,
)
from ddtree.bench.prompt_lengths import check_lengths
from ddtree.bench.run_format import Arm, Run, RunHeader
from ddtree.bench.run_writer import RunWriter, read_like
from ddtree.bench.sandbox import SandboxError, missing_protections
from ddtree.bench.sglang_launch import check_flags, num_server_gpus
from ddtree.bench.sglang_python import check_python
from ddtree.bench.sweep import Opener, Reporter, SilentReporter, Sweep
from ddtree.bench_config import EMBEDDED, SGLANG, BenchConfig, ServersAtOnce, is_url
from ddtree.config import check
from ddtree.provenance import provenance


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is to measure.

    Attributes:
        groups: what is left to measure, in order.
        num_done: cells that the run's file has already.
        is_one_server_at_a_time: whether an sglang server is stopped before another is started.
        notices: what the user should know before it begins.
    """

    config: BenchConfig
    sets: dict[str, PromptSet]
    header: RunHeader
    arms: tuple[Arm, ...]
    groups: tuple[Group, ...]
    num_done: int
    is_one_server_at_a_time: bool
    notices: tuple[str, ...]

    @property
    def num_cells(self) -> int:
        """Cells that are left to measure."""
        return sum(len(group.arms) for group in self.groups)

    @property
    def num_requests(self) -> int:
        """Timed requests that are left."""
        return sum(len(self.sets[group.prompt_set].prompts) * len(group.arms) for group in self.groups)


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What a run has measured, in this session and before.

    Attributes:
        failures: a line for each cell or arm that could not be measured.
        num_left_out: outputs whose token ids are unknown, left out of the outputs file.
    """

    run: Run
    failures: tuple[str, ...] = ()
    num_left_out: int = 0


def plan_bench(config: BenchConfig, output: Path, engines: Engines) -> Plan:
    """What a run would measure; writes nothing.

    Raises:
        ConfigError: a set cannot be read, the file is no run, nothing can be measured, a prompt does not
            fit the embedded engine's context, or SGLang is to be started and is not there.
        DDTreeError: a model cannot be found, or a server at a URL does not answer.
    """
    if SGLANG in config.engines:
        check_flags(config)
    sets = load_sets(config)
    arms = arms_of(config, engines.arms_of_url)
    served = [engines.served_model(engine) for engine in config.engines if is_url(engine)]
    header = make_header(config, sets, served)
    before = read_like(output, header)
    done = set(before.cells) if before else set()
    groups = plan_groups(arms, config, done)
    if any(arm.engine == EMBEDDED for group in groups for arm in group.arms):
        check_lengths(config, [sets[name] for name in dict.fromkeys(group.prompt_set for group in groups)])
    servers = [arm for arm in arms if arm.engine == SGLANG and any(arm in group.arms for group in groups)]
    if servers:
        check_python(config, servers)
    is_one_at_a_time = is_one_server_at_a_time(config, header)
    if is_one_at_a_time:
        groups = one_server_at_a_time(groups)
    return Plan(
        config, sets, header, tuple(arms), tuple(groups), len(done), is_one_at_a_time,
        (*_notices(config, arms, sets), *_other_models(config, served)),
    )  # fmt: skip


def _notices(config: BenchConfig, arms: Sequence[Arm], sets: dict[str, PromptSet]) -> tuple[str, ...]:
    notices = [prompts.notice for prompts in sets.values() if prompts.notice]
    skipped = sorted({c for arm in arms for c in config.concurrency if not can_run(arm, c)})
    if skipped:
        values = ", ".join(map(str, skipped))
        notices.append(f"the embedded engine runs one request at a time: without it at concurrency {values}")
    if config.run_code and any(prompt.code for prompts in sets.values() for prompt in prompts.prompts):
        notices += _sandbox_notices()
    return tuple(notices)


def _sandbox_notices() -> list[str]:
    """What the sandbox does not keep model-written code from on this machine."""
    try:
        missing = missing_protections()
    except SandboxError as error:
        return [f"answers in code are not checked: {error}"]
    if not missing:
        return []
    return [
        f"--run-code: the sandbox is without {', '.join(missing)} on this machine, so a model's code has "
        "your rights there (docs/datasets.md): run in a container, or without --run-code"
    ]


def _other_models(config: BenchConfig, served: Sequence[str]) -> list[str]:
    """Models of servers whose names are not the target's: whether they are the same is not known."""
    names = dict.fromkeys([config.model, *served] if config.has_own_engines else served)
    if len(names) < 2:
        return []
    return [f"the engines name different models ({', '.join(names)}): compare them only if they are one"]


def is_one_server_at_a_time(config: BenchConfig, header: RunHeader) -> bool:
    """Whether sglang servers take turns as a whole: idle ones keep a CPU busy."""
    if config.servers_at_once == ServersAtOnce.AUTO:
        return header.device == "cpu"
    return config.servers_at_once == ServersAtOnce.ONE


def run_bench(
    config: BenchConfig,
    output: Path,
    *,
    outputs: Path | None = None,
    load: Load = Engine.load,
    reporter: Reporter | None = None,
) -> BenchResult:
    """Measure what a run's file does not have yet; each cell is on disk before the next is measured.

    Args:
        config: what to measure.
        output: the run's file, made or gone on with.
        outputs: file for the finished outputs, which `ddtree replay` reads.
        load: makes the embedded engine of its settings.
        reporter: is told how far it is.

    Raises:
        ConfigError: a setting, a set or a file that cannot be used, or a file of another run.
        DDTreeError: a model cannot be found or loaded.
    """
    engines = Engines(config, log_folder(output), load)
    return measure(plan_bench(config, output, engines), output, engines, outputs, reporter)


def log_folder(output: Path) -> Path:
    """Where the servers of a run write their logs."""
    check(output.name != "", "output", str(output), "the path of a file")
    return output.with_name(f"{output.stem}-logs")


def measure(
    plan: Plan,
    output: Path,
    opener: Opener,
    outputs: Path | None = None,
    reporter: Reporter | None = None,
) -> BenchResult:
    """Measure the groups of a plan that the run's file does not have by now.

    Raises:
        ConfigError: a file that cannot be written, that another run is writing, or that is of another run.
        DDTreeError: a model cannot be loaded.
    """
    config, reporter = plan.config, reporter or SilentReporter()
    kept = None if outputs is None else _outputs_file(plan, output, outputs)
    with ExitStack() as held:
        held.enter_context(sole_writer(output, "--output"))
        for path in kept.paths if kept else ():
            held.enter_context(sole_writer(path, "--outputs"))
        writer = RunWriter(output, plan.header)
        # Another run may have ended between the plan and the lock.
        groups = without_cells(plan.groups, writer.run.cells)
        if not groups:
            return BenchResult(writer.run)
        writer.session(provenance(), kept.begin(writer.run.outputs) if kept else ())
        sweep = Sweep(
            config, plan.sets, writer, opener, reporter,
            outputs=kept,
            meter=_meter(config, plan.header),
            is_one_server_at_a_time=plan.is_one_server_at_a_time,
        )  # fmt: skip
        sweep.run(groups)
        return BenchResult(writer.run, tuple(sweep.failures), kept.num_left_out if kept else 0)


def check_files(plan: Plan, output: Path, outputs: Path | None) -> None:
    """Refuse files that `measure` could not write; changes nothing.

    Raises:
        ConfigError: one of them cannot be written, or is there and is not of the run.
    """
    check_writable(output, "output")
    if outputs is not None:
        before = read_like(output, plan.header)
        _outputs_file(plan, output, outputs).check(before.outputs if before else {})


def _outputs_file(plan: Plan, output: Path, outputs: Path) -> OutputsFile:
    engines = list(dict.fromkeys(arm.engine for arm in plan.arms))
    return OutputsFile(outputs, engines, plan.header.models["target"]["name"], output)


def _meter(config: BenchConfig, header: RunHeader) -> EnergyMeter | None:
    """A meter of the GPUs that engines of this run use."""
    if not config.has_own_engines or header.device == "cpu":
        return None
    return open_meter(gpu_uuids(config.device, num_server_gpus(config)))
