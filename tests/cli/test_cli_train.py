"""`ddtree train` on a pipeline that is replaced: what it is asked for, what is shown, what is refused."""

import io
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from ddtree.cli.train_progress import BarReporter, LineReporter
from ddtree.errors import ConfigError
from ddtree.train.reporting import PipelineResult, Stage


class FakePipeline(ModuleType):
    """Notes what it is called with; returns `result`."""

    def __init__(self):
        super().__init__("ddtree.train.pipeline")
        self.calls = []
        self.result = PipelineResult(
            is_finished=True,
            files={"drafter": Path("runs/r/drafter"), "log": Path("runs/r/log.csv")},
            acceptance={"gsm8k": {"chain": 3.104, "64": 4.5}},
        )

    def run_pipeline(self, recipe, folder, options, reporter):
        self.calls.append((recipe, folder, options))
        reporter.stage("data")
        reporter.progress(50, 100, "9 tokens/s [x]")
        reporter.message("a [message]")
        return self.result


@pytest.fixture
def pipeline(monkeypatch):
    fake = FakePipeline()
    monkeypatch.setitem(sys.modules, "ddtree.train.pipeline", fake)
    monkeypatch.delenv("RANK", raising=False)
    return fake


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text("[drafter]\nmask_token_id = 3\n")
    return str(path)


def test_all_stages_run_and_the_table_and_paths_are_shown(command, pipeline, recipe):
    code, out, err = command("train", recipe)
    assert code == 0
    ((found, folder, options),) = pipeline.calls
    assert found.drafter.mask_token_id == 3
    assert folder == Path("runs/mine")
    assert options.stages == tuple(Stage)
    assert (options.device, options.resume, options.max_seconds) == ("auto", True, None)
    assert "drafter: runs/r/drafter\nlog: runs/r/log.csv\n" in out
    assert "B=64" in out
    assert "3.10" in out
    assert "a [message]" in err
    assert "a [message]" not in out


def test_options_reach_the_pipeline(command, pipeline, recipe):
    arguments = ("--stage", "export", "--stage", "data", "--no-resume", "--device", "cuda:1",
                 "--max-seconds", "60", "--output", "there")  # fmt: skip
    assert command("train", recipe, *arguments)[0] == 0
    ((_, folder, options),) = pipeline.calls
    assert folder == Path("there")
    assert options.stages == (Stage.DATA, Stage.EXPORT)
    assert (options.device, options.resume, options.max_seconds) == ("cuda:1", False, 60.0)


def test_all_is_every_stage(command, pipeline, recipe):
    command("train", recipe, "--stage", "all", "--stage", "data")
    assert pipeline.calls[0][2].stages == tuple(Stage)


def test_quiet_leaves_stderr_empty(command, pipeline, recipe):
    code, out, err = command("train", recipe, "--quiet")
    assert (code, err) == (0, "")
    assert "drafter: " in out


def test_a_run_that_was_stopped_says_so_and_ends_with_its_own_code(command, pipeline, recipe):
    pipeline.result = PipelineResult(False, {"checkpoints": Path("c")})
    code, out, _ = command("train", recipe, "--max-seconds", "1")
    assert code == 75
    assert out == "checkpoints: c\nstopped by --max-seconds; the same command goes on\n"


def test_only_the_first_process_of_several_speaks(command, pipeline, recipe, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert command("train", recipe) == (0, "", "")
    assert len(pipeline.calls) == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_stopped_run_of_several_processes_is_no_failure_to_torchrun(
    command, pipeline, recipe, monkeypatch, rank
):
    monkeypatch.setenv("RANK", rank)
    pipeline.result = PipelineResult(False, {})
    code, out, _ = command("train", recipe, "--max-seconds", "1")
    assert code == 0
    assert ("stopped by" in out) is (rank == "0")


def test_a_dry_run_is_small_on_the_cpu_and_anew(command, pipeline, recipe):
    assert command("train", recipe, "--dry-run")[0] == 0
    ((small, folder, options),) = pipeline.calls
    assert folder == Path("runs/mine-dry-run")
    assert small.target.model == str(folder / "target")
    assert (folder / "target" / "config.json").is_file()
    assert small.train.steps <= 12
    assert (options.device, options.resume, options.stages) == ("cpu", False, tuple(Stage))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--stage", "dta"], "--stage='dta' is not allowed: one of all, data, train, evaluate, export"),
        (["--device", "tpu"], "device='tpu'"),
        (["--max-seconds", "0"], "--max-seconds=0"),
        (["--max-seconds", "soon"], "--max-seconds"),
        (["--dry-run", "--stage", "data"], "--dry-run and --stage"),
        (["--quiet", "--verbose"], "--quiet and --verbose"),
    ],
)
def test_mistakes_are_one_line(refused, pipeline, recipe, arguments, told):
    assert told in refused("train", recipe, *arguments)
    assert pipeline.calls == []


def test_a_recipe_with_a_mistake_is_one_line(refused, pipeline, tmp_path):
    (tmp_path / "r.toml").write_text("[drafter]\nmask_token_id = 3\n[train]\nstep = 1\n")
    assert "unknown key in [train]: 'step'; did you mean steps?" in refused("train", str(tmp_path / "r.toml"))
    assert "No such file" in refused("train", str(tmp_path / "none.toml"))


def test_no_recipe_is_one_line(refused, pipeline):
    assert "CONFIG" in refused("train").upper()


def test_an_error_of_the_pipeline_is_one_line(command, pipeline, recipe):
    def refuse(*_):
        raise ConfigError("the folder holds\nanother recipe's run")

    pipeline.run_pipeline = refuse
    assert command("train", recipe) == (2, "", "Error: the folder holds another recipe's run\n")


@pytest.mark.parametrize(("package", "code"), [("tokenizers", 2), ("ddtree", None)])
def test_a_missing_package_names_the_extra(command, pipeline, recipe, package, code):
    def refuse(*_):
        raise ModuleNotFoundError(f"No module named '{package}.x'", name=f"{package}.x")

    pipeline.run_pipeline = refuse
    if code is None:
        with pytest.raises(ModuleNotFoundError):
            command("train", recipe)
    else:
        result = command("train", recipe)
        assert result[0] == code
        assert "sglang-ddtree[train]" in result[2]


def test_lines_come_now_and_then_and_at_the_end():
    now, console = [0.0], Console(file=io.StringIO(), width=200)
    with LineReporter(console, clock=lambda: now[0]) as reporter:
        reporter.stage("data")
        for second in (1, 29, 31, 40, 62):
            now[0] = second
            reporter.progress(second, 124, "7 tokens/s [b]")
        reporter.progress(124, 124, "done")
    assert console.file.getvalue().splitlines() == [
        "data: begins",
        "data: 31 of 124, 7 tokens/s [b], 93 s left",
        "data: 62 of 124, 7 tokens/s [b], 62 s left",
        "data: 124 of 124, done",
    ]


def test_bars_show_figures_and_messages_as_they_are():
    console = Console(file=io.StringIO(), width=200, force_terminal=True, highlight=False)
    with BarReporter(console) as reporter:
        reporter.progress(1, 2, "before any stage")
        for name in ("data", "train"):
            reporter.stage(name)
            reporter.progress(50, 100, "7 tokens/s [b]")
        reporter.message("kept [b]")
    text = console.file.getvalue()
    assert "7 tokens/s [b]" in text
    assert "kept [b]" in text
    assert "train" in text
