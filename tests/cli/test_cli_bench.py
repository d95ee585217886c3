"""`ddtree bench`: flags, the plan, the table, refusals, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import fields

import pytest

from bench_kit import write_models
from ddtree.bench.measure import figures
from ddtree.bench.run_format import read_run
from ddtree.bench_config import BenchConfig
from ddtree.cli import loading
from ddtree.cli.bench import READERS, TITLES, URLS
from ddtree.config import Dtype, Mode
from fake_server import MODELS, respond, serving

TEXT = "Why is the sky blue?"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder of a target and of a drafter's config, and an engine."""
    folder = tmp_path_factory.mktemp("models")
    return folder, write_models(folder, TEXT, 12)


@pytest.fixture
def loads(monkeypatch, tiny):
    """The settings with which the engine was loaded."""
    configs = []
    monkeypatch.setattr(loading, "load_engine", lambda config: configs.append(config) or tiny[1])
    return configs


@pytest.fixture
def flags(tmp_path, tiny, loads):
    """The flags of a short run."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": TEXT, "answer": "-123456"}) + "\n")
    return [
        "bench", "--output", str(tmp_path / "run.jsonl"), "--set", str(prompts), "--device", "cpu",
        "--model", str(tiny[0] / "target"), "--drafter", str(tiny[0] / "drafter"), "--max-tokens", "12",
        "--repeats", "2", "--budget", "6", "--warm-up-tokens", "2",
    ]  # fmt: skip


def test_a_run_ends_in_a_table_and_a_file(command, flags, tmp_path, loads):
    code, out, err = command(*flags)
    assert code == 0
    for arm in ("embedded ar", "embedded chain", "embedded tree:6"):
        assert f"│ {arm}" in out
    assert "T=0, concurrency 1" in out
    assert "0/2" in out  # answers that are right, of both repeats
    assert "3 arms" in err
    assert len(loads) == 1
    assert len(read_run(tmp_path / "run.jsonl").cells) == 6


def test_the_same_command_again_measures_nothing_and_shows_the_same(command, flags, loads):
    first, second = command(*flags), command(*flags)
    assert second[:2] == first[:2]
    assert len(loads) == 1
    assert "0 cells" in second[2]


def test_a_dry_run_lists_the_cells_and_writes_nothing(command, flags, tmp_path, loads):
    code, out, _ = command(*flags, "--dry-run")
    assert code == 0
    assert out.count("repeat 2 of 2") == 3
    assert "6 cells, 6 requests of at most 12 tokens, on cpu" in out
    assert loads == []
    assert not (tmp_path / "run.jsonl").exists()
    planned = json.loads(command(*flags, "--dry-run", "--json")[1])
    assert (len(planned["cells"]), planned["num_requests"]) == (6, 6)
    assert planned["cells"][0]["arm"] == "embedded ar"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file/outputs.jsonl", "file' is a file"),
        ("folder", "a file, not a folder or a device"),
        ("file", "there already, of something else: name another file"),
        ("run.jsonl", "another file than the run's"),
    ],
)
def test_a_dry_run_looks_at_the_outputs_file(refused, flags, tmp_path, loads, name, said):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    told = refused(*flags, "--dry-run", "--outputs", str(tmp_path / name))
    assert told.startswith("Error: --outputs=")
    assert said in told
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "run.jsonl").exists()


def test_a_dry_run_looks_at_the_runs_file(refused, flags, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "file' is a file" in refused(*flags, "--dry-run", "--output", str(tmp_path / "file" / "run"))


def test_where_servers_run_is_not_told(command, tmp_path):
    with serving({"/v1/models": lambda asked: respond(MODELS)}) as fake:
        code, out, _ = command(
            "bench", "--output", str(tmp_path / "run.jsonl"), "--engine", fake.url, "--set", "gsm8k",
            "--prompts", "1", "--repeats", "1", "--max-tokens", "12", "--dry-run",
        )  # fmt: skip
    assert code == 0
    assert out.endswith("1 cell, 1 request of at most 12 tokens\n")


def test_json_has_the_figures_of_every_arm(command, flags):
    code, out, _ = command(*flags, "--json", "--quiet")
    made = json.loads(out)
    assert (code, made["failures"]) == (0, [])
    assert [arm["arm"] for arm in made["arms"]] == ["embedded ar", "embedded chain", "embedded tree:6"]
    assert made["arms"][0]["accept_length"] == 1.0
    assert made["arms"][0]["to_plain"]["value"] == 1.0


def test_outputs_can_be_replayed(command, flags, tmp_path, tiny):
    outputs = tmp_path / "outputs.jsonl"
    assert command(*flags, "--outputs", str(outputs))[0] == 0
    lines = [json.loads(line) for line in outputs.read_text().splitlines()]
    assert len(lines) == 6
    assert {line["mode"] for line in lines} == {"ar", "chain", "tree"}
    replayed = command(
        "replay", str(outputs), "--model", str(tiny[0] / "target"), "--device", "cpu", "--json"
    )
    assert replayed[0] == 0


def test_every_flag_reaches_the_run(command, monkeypatch, tmp_path):
    planned = []

    def plan(config, output, engines):
        planned.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr("ddtree.bench.runner.plan_bench", plan)
    values = {
        "--engine": "embedded,sglang,http://h:1/v1", "--mode": "tree, chain", "--budget": "4, 9",
        "--concurrency": "2,8", "--temperature": "0,0.5", "--set": "gsm8k,a.jsonl", "--prompts": "3",
        "--prompt-seed": "4", "--max-tokens": "5", "--repeats": "6", "--seed": "-7", "--warm-up-tokens": "8",
        "--rank-prompts": "9", "--model": "m", "--drafter": "d", "--device": "cuda:1", "--dtype": "bfloat16",
        "--threads": "2", "--max-context": "64", "--sglang-python": "/p", "--sglang-args": "--a 1",
        "--memory-share": "0.5", "--servers-at-once": "one", "--start-timeout-s": "11",
        "--request-timeout-s": "12", "--api-key-env": "KEY",
    }  # fmt: skip
    given = [part for pair in values.items() for part in pair]
    assert command("bench", "--output", str(tmp_path / "r"), "--run-code", *given)[0] == 130
    expected = BenchConfig(
        engines=("embedded", "sglang", "http://h:1/v1"), modes=(Mode.TREE, Mode.CHAIN), budgets=(4, 9),
        concurrency=(2, 8), temperatures=(0.0, 0.5), sets=("gsm8k", "a.jsonl"), prompts=3, prompt_seed=4,
        max_tokens=5, repeats=6, seed=-7, warm_up_tokens=8, rank_prompts=9, run_code=True, model="m",
        drafter="d", device="cuda:1", dtype=Dtype.BFLOAT16, threads=2, max_context_tokens=64,
        sglang_python="/p", sglang_args="--a 1", memory_share=0.5, servers_at_once="one",
        start_timeout_s=11.0, request_timeout_s=12.0, api_key_env="KEY",
    )  # fmt: skip
    assert planned == [expected]
    untouched = BenchConfig()
    assert all(getattr(expected, f.name) != getattr(untouched, f.name) for f in fields(BenchConfig))
    assert set(TITLES) < {f.name for f in fields(BenchConfig)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--budget", "8,,16"], "--budget='' is not allowed"),
        (["--budget", "0"], "--budget=0 is not allowed"),
        (["--concurrency", "two"], "--concurrency='two' is not allowed"),
        (["--mode", "beam"], "--mode='beam' is not allowed"),
        (["--engine", "vllm"], "--engine='vllm' is not allowed"),
        (["--temperature", "hot"], "--temperature='hot' is not allowed"),
        (["--set", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--concurrency", "4"], "--concurrency=(4,) is not allowed: 1 among them"),
        (["--repeats", "0"], "--repeats=0"),
        (["--sglang-args", "'"], "--sglang-args="),
        (["--engine", "sglang", "--dry-run", "--sglang-args", "--dtype half"], "--dtype is set by the run"),
        (["--engine", "sglang", "--dry-run", "--budget", "auto"], "whole numbers with the engine sglang"),
        (["--engine", "sglang", "--dry-run", "--sglang-args", "--mod x"], "--mod is short for --model-path"),
    ],
)
def test_a_mistake_is_one_line(refused, flags, given, said):
    assert said in refused(*flags, *given)


def test_a_python_without_sglang_is_one_error_at_the_plan(refused, flags, loads, tmp_path):
    """Also where another engine was to be measured first, after which each arm would fail by itself."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho missing: "$3"\n')
    python.chmod(0o755)
    message = refused(*flags, "--engine", "embedded,sglang", "--sglang-python", str(python))
    assert f"the engine sglang cannot start, since {python} has no sglang: install" in message
    assert "--sglang-python" in message
    assert loads == []
    assert not (tmp_path / "run.jsonl").exists()
    assert "no-such' is not allowed: a Python" in refused(
        *flags, "--engine", "sglang", "--sglang-python", str(tmp_path / "no-such")
    )


@pytest.mark.parametrize(
    ("engine", "given", "said"),
    [
        ("embedded", "--sglang-args --x --sglang-python p", "--sglang-python, --sglang-args are not read"),
        ("embedded", "--sglang-args= --api-key-env KEY", "--sglang-args, --api-key-env are not read"),
        ("embedded", "--request-timeout-s 600", "--request-timeout-s is not read with --engine embedded:"),
        ("sglang", "--threads 2", "--threads is not read with --engine sglang: leave out what is not read"),
        ("sglang", "--api-key-env KEY", "--api-key-env is not read"),
        ("http://h:1/v1", "--drafter d --dtype bfloat16", "--drafter, --dtype are not read with --engine"),
    ],
)
def test_a_flag_that_no_engine_reads_is_refused_before_anything(refused, tmp_path, engine, given, said):
    run = tmp_path / "run.jsonl"
    assert said in refused("bench", "--output", str(run), "--engine", engine, *given.split())
    assert not run.exists()


def test_who_reads_what_is_told_of_settings_alone():
    assert set(READERS) <= {spec.name for spec in fields(BenchConfig)}
    assert {reader for readers in READERS.values() for reader in readers} == {"embedded", "sglang", URLS}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--mode", "ar", "--repeats", "1", "--max-tokens", "1"],
            "1 arm on {}: 1 cell, 1 request of at most 1 token,",
        ),
        ([], "3 arms on {}: 6 cells, 6 requests of at most 12 tokens,"),
    ],
)
def test_a_plan_counts_as_people_do(command, flags, tmp_path, given, said):
    code, out, _ = command(*flags, "--dry-run", *given)
    assert code == 0
    assert out.splitlines()[-1].startswith(said.format(tmp_path / "prompts.jsonl"))


def test_no_file_is_refused_in_one_line(refused):
    assert "--output" in refused("bench")


def test_another_runs_file_is_refused(command, refused, flags):
    command(*flags)
    assert "is another run (seed: 0, now 5)" in refused(*flags, "--seed", "5")


def test_a_run_that_is_being_measured_is_refused_to_a_second_program(refused, flags, loads, tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom ddtree.bench.file_lock import sole_writer\n"
        "with sole_writer(Path(sys.argv[1]), '--output'):\n    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    run = tmp_path / "run.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        told = refused(*flags, "--quiet")
        other.stdin.close()
    assert f"--output {str(run)!r} is being written by another ddtree bench: wait for its end" in told
    assert loads == []


def test_ctrl_c_keeps_what_was_measured(command, flags, monkeypatch, tmp_path):
    kept = []

    def interrupted(*arguments):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept.append(figures(*arguments))
        return kept[-1]

    with monkeypatch.context() as patch:
        patch.setattr("ddtree.bench.sweep.figures", interrupted)
        code, _, err = command(*flags)
    assert code == 130
    assert "the same command goes on" in err
    assert len(read_run(tmp_path / "run.jsonl").cells) == 2
    assert command(*flags)[0] == 0
    assert len(read_run(tmp_path / "run.jsonl").cells) == 6


def test_sigterm_closes_the_engines_and_says_so(flags, monkeypatch, capsys):
    from ddtree.cli.main import run

    closed = []
    monkeypatch.setattr("ddtree.bench.embedded.EmbeddedEngine.close", lambda engine: closed.append(engine))
    monkeypatch.setattr(
        "ddtree.bench.embedded.EmbeddedEngine.flush", lambda engine: os.kill(os.getpid(), signal.SIGTERM)
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run(flags)
    assert ended.value.code == 143
    assert len(closed) == 3
    assert "the same command goes on" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_engine_that_dies_makes_the_exit_code_1(command, flags, monkeypatch, tmp_path):
    def observe(engine, prompts, **options):
        raise RuntimeError("device lost")

    monkeypatch.setattr("ddtree.bench.embedded.EmbeddedEngine.observe", observe)
    code, out, err = command(*flags)
    assert code == 1
    assert "embedded ar" in out
    assert "not measured: embedded ar" in err
    assert "device lost" in err
    assert "Traceback" not in err


def test_a_missing_package_names_its_extra(refused, flags, monkeypatch):
    def plan(*_):
        raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

    monkeypatch.setattr("ddtree.bench.runner.plan_bench", plan)
    assert "pip install 'sglang-ddtree[bench]'" in refused(*flags)
