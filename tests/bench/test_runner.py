"""A whole run on the embedded engine, and what is refused before anything is loaded."""

import json
import subprocess
import sys

import pytest
import torch

from bench_kit import write_models
from ddtree import bench
from ddtree.bench.engines import Engines
from ddtree.bench.origin import device_name
from ddtree.bench.run_format import Arm, read_run
from ddtree.bench.runner import is_one_server_at_a_time, log_folder, plan_bench, run_bench
from ddtree.bench.sandbox import Protection
from ddtree.bench_config import BenchConfig
from ddtree.config import EngineConfig
from ddtree.errors import ConfigError, ContextLengthError, ModelNotFoundError
from ddtree.trace.files import ReplayOptions, replay_file
from ddtree.trace.run_file import read_run as read_outputs
from ddtree.tree.noise import keyed_gumbel

TEXTS = ("Why is the sky blue?", "And the sea? " * 3)
URL = "http://127.0.0.1:9/v1"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target that can be loaded from its folder, and an engine of it."""
    folder = tmp_path_factory.mktemp("models")
    return folder, write_models(folder, TEXTS[0], 16)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return str(path)


@pytest.fixture
def config_of(models, prompts):
    def make(**changes):
        fields = {
            "model": str(models[0] / "target"), "drafter": str(models[0] / "drafter"), "device": "cpu",
            "dtype": "float32", "sets": (prompts,), "prompts": 0, "max_tokens": 16, "repeats": 1,
            "budgets": (6,), "rank_prompts": 1, "warm_up_tokens": 2,
        }  # fmt: skip
        return BenchConfig(**fields | changes)

    return make


def test_a_run_of_the_embedded_engine_is_whole_and_lossless(tmp_path, models, prompts, config_of):
    loaded = []
    output, outputs = tmp_path / "new" / "run.jsonl", tmp_path / "outputs.jsonl"
    result = run_bench(
        config_of(temperatures=(0.0, 1.0)), output, outputs=outputs,
        load=lambda config: loaded.append(config) or models[1],
    )  # fmt: skip
    assert result.failures == ()
    assert loaded == [
        EngineConfig(str(models[0] / "target"), str(models[0] / "drafter"), "cpu", "float32")
    ]  # once, for all arms
    run = read_run(output)
    assert run.header.device == "cpu"
    assert run.header.sets[prompts]["rows"] == 2
    assert run.header.models["target"]["folder_sha256"]
    assert len(run.cells) == 3 * 2
    for temperature in (0.0, 1.0):
        texts = {
            tuple(request.tokens_sha256 for request in cell.requests)
            for key, cell in run.cells.items()
            if key.temperature == temperature
        }
        assert len(texts) == 1
    lengths = {key.arm: cell.accept_length for key, cell in run.cells.items() if key.temperature == 0}
    assert lengths["embedded ar"] == 1.0 < lengths["embedded tree:6"]
    assert len(read_outputs(outputs).answers) == 3 * 2 * 2
    options = ReplayOptions(str(models[0] / "target"), "float32", device="cpu", noise=keyed_gumbel)
    replayed = replay_file(outputs, options)
    assert replayed.judged.is_lossless


def test_a_run_grows_by_what_is_asked_later(tmp_path, models, config_of):
    output = tmp_path / "run.jsonl"

    def load(config):
        return models[1]

    run_bench(config_of(modes=("ar",)), output, load=load)
    assert read_run(output).header.models["drafter"] is None
    result = run_bench(config_of(budgets=(2, 6), repeats=2), output, load=load)
    assert len(result.run.cells) == 4 * 2
    assert read_run(output).header.models["drafter"]["name"] == str(models[0] / "drafter")


def test_another_runs_file_is_refused_before_anything_is_loaded(tmp_path, models, config_of):
    output = tmp_path / "run.jsonl"
    run_bench(config_of(modes=("ar",)), output, load=lambda config: models[1])

    def load(config):
        raise AssertionError("loaded")

    with pytest.raises(ConfigError, match=r"max_tokens: 16, now 8.*another --output"):
        run_bench(config_of(max_tokens=8), output, load=load)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"sets": ("nowhere.jsonl",)}, ConfigError, "nowhere.jsonl"),
        ({"model": "./nowhere"}, ModelNotFoundError, "no such folder"),
        ({"drafter": "./nowhere"}, ModelNotFoundError, "no such folder"),
        ({"drafter": "auto"}, ModelNotFoundError, "no drafter ships"),
    ],
)
def test_what_is_not_there_is_told_before_anything_is_loaded(tmp_path, config_of, changes, error, said):
    def load(config):
        raise AssertionError("loaded")

    with pytest.raises(error, match=said):
        run_bench(config_of(**changes), tmp_path / "run.jsonl", load=load)
    assert not (tmp_path / "run.jsonl").exists()


@pytest.fixture
def looked_at(monkeypatch):
    """The arms for which a Python with SGLang was looked for; it is always there."""
    looked = []
    monkeypatch.setattr("ddtree.bench.runner.check_python", lambda config, arms: looked.extend(arms))
    return looked


def test_a_plan_writes_nothing_and_tells_what_is_left_out(tmp_path, config_of, looked_at):
    config = config_of(engines=("embedded", "sglang"), concurrency=(1, 4))
    output = tmp_path / "run.jsonl"
    plan = plan_bench(config, output, Engines(config, log_folder(output)))
    assert (plan.num_cells, plan.num_requests) == (3 + 6, 18)
    assert any("without it at concurrency 4" in notice for notice in plan.notices)
    assert list(tmp_path.glob("run*")) == []
    assert log_folder(output) == tmp_path / "run-logs"
    assert [str(arm) for arm in looked_at] == ["sglang ar", "sglang chain", "sglang tree:6"]


def test_a_prompt_too_long_for_the_embedded_engine_is_refused_in_the_plan(
    tmp_path, config_of, monkeypatch, prompts, looked_at
):
    def refuse(config, sets):
        raise ContextLengthError(", ".join(found.name for found in sets))

    monkeypatch.setattr("ddtree.bench.runner.check_lengths", refuse)
    config = config_of()
    with pytest.raises(ContextLengthError, match=prompts):
        plan_bench(config, tmp_path / "run.jsonl", Engines(config, tmp_path))
    servers = config_of(engines=("sglang",))  # whose context is theirs to tell
    assert plan_bench(servers, tmp_path / "run.jsonl", Engines(servers, tmp_path)).num_cells == 3


def test_a_plan_asks_running_servers_and_names_their_models(tmp_path, config_of):
    class Asked(Engines):
        def arms_of_url(self, url):
            return [Arm(url, None)]

        def served_model(self, url):
            return "served"

    config = config_of(engines=(URL,), concurrency=(4,))
    plan = plan_bench(config, tmp_path / "run.jsonl", Asked(config, tmp_path))
    assert plan.header.models == {"target": {"name": "served"}, "drafter": None}
    assert plan.header.device != "cpu"
    assert [str(arm) for arm in plan.arms] == [URL]
    assert plan.notices == ()
    mixed = config_of(engines=("embedded", URL))
    (notice,) = plan_bench(mixed, tmp_path / "run.jsonl", Asked(mixed, tmp_path)).notices
    assert f"({mixed.model}, served)" in notice


def test_what_the_sandbox_lacks_is_told_before_code_is_run(tmp_path, config_of, monkeypatch):
    monkeypatch.setattr("ddtree.bench.runner.missing_protections", lambda: [Protection.NETWORK])
    config = config_of(sets=("humaneval",), run_code=True)
    plan = plan_bench(config, tmp_path / "run.jsonl", Engines(config, tmp_path))
    assert any("without network" in notice for notice in plan.notices)


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [("auto", "cpu", True), ("auto", "GPU", False), ("one", "GPU", True), ("all", "cpu", False)],
)
def test_servers_are_up_together_on_a_gpu_unless_asked(asked, device, expected):
    config = BenchConfig(engines=("sglang",), servers_at_once=asked)
    header = type("Header", (), {"device": device})
    assert is_one_server_at_a_time(config, header) is expected


def test_the_device_is_named(monkeypatch):
    assert device_name("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    assert device_name("auto") == "GPU 0"
    assert device_name("cuda:1") == "GPU 1"
    assert device_name("cuda:7") == "cuda:7"  # the engine says that it is not there
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_name("auto") == "cpu"


def test_public_names_load_nothing_heavy():
    code = (
        "import sys\nfrom ddtree.bench import BenchConfig, Run, read_run\n"
        "assert not {'torch', 'transformers', 'httpx', 'numpy'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(getattr(bench, name) is not None for name in bench.__all__)
    assert bench.run_bench is run_bench
    assert dir(bench) == bench.__all__
    with pytest.raises(AttributeError, match="run_bensh"):
        _ = bench.run_bensh
