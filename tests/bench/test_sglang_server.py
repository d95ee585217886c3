"""SGLang servers of a run: started, asked, and gone afterwards, whatever goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ddtree.bench.http_client import Received, RequestRefusedError, ServerError
from ddtree.bench.run_format import Arm
from ddtree.bench.server_guard import processes_below
from ddtree.bench.sglang_launch import (
    Memory,
    gpu_memory,
    launch_of,
    least_free,
    memory_fraction,
    num_server_gpus,
    servers_at_once,
    taken_bytes,
)
from ddtree.bench.sglang_server import generate_body, read_generated, start_engine
from ddtree.bench_config import BenchConfig, ServersAtOnce
from ddtree.config import Mode
from ddtree.errors import ConfigError
from fake_server import event
from server_kit import byte_tokenizer

TESTS = Path(__file__).parents[1]
CHATS = [[{"role": "user", "content": text}] for text in ("One.", "Two?", "Three!")]
GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return str(folder)


@pytest.fixture
def python(tmp_path):
    """A program that takes Python's place and runs the fake SGLang."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{TESTS / "fake_sglang.py"}" "$@"\n')
    program.chmod(0o755)
    return str(program)


class Fake:
    """Starts arms on the fake SGLang and tells what became of its processes."""

    def __init__(self, folder, monkeypatch, model, python):
        self.folder, self._monkeypatch = folder, monkeypatch
        self.notes_path = folder / "notes.jsonl"
        self.settings = {
            "engines": ("sglang",), "model": model, "drafter": model, "device": "cpu", "budgets": (7,),
            "sglang_python": python, "start_timeout_s": 30.0,
        }  # fmt: skip
        self.engines = []

    def config(self, **settings):
        return BenchConfig(**self.settings | settings)

    def start(self, plan, behaviour="", **settings):
        self._monkeypatch.setenv("FAKE_SGLANG", behaviour)
        self._monkeypatch.setenv("FAKE_SGLANG_NOTES", str(self.notes_path))
        engine = start_engine(Arm.parse(f"sglang {plan}"), self.config(**settings), self.folder / "logs")
        self.engines.append(engine)
        return engine

    def notes(self, name):
        lines = map(json.loads, self.notes_path.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if name in line]

    def pids(self):
        return [pid for note in self.notes("pids") for pid in note["pids"]]

    def assert_all_gone(self, limit_s=10):
        end_s = time.monotonic() + limit_s
        while left := [pid for pid in self.pids() if is_alive(pid)]:
            assert time.monotonic() < end_s, f"still there: {left}"
            time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def fake(tmp_path, monkeypatch, model, python):
    fake = Fake(tmp_path, monkeypatch, model, python)
    yield fake
    for engine in fake.engines:
        engine.close()
        engine.close()


def run(engine, **options):
    given = {"max_tokens": 9, "temperature": 0.0, "seeds": [1, 2, 3], "concurrency": 2} | options
    return engine.run(CHATS, **given)


# -- a server that works ----------------------------------------------------------------------------


def test_a_server_is_started_asked_and_gone(fake, model):
    engine = fake.start("tree:7", sglang_args="--page-size 16")
    [begun] = fake.notes("pids")
    assert begun["argv"][:2] == ["-m", "sglang.launch_server"]
    assert begun["argv"][-2:] == ["--page-size", "16"]
    assert json.loads(begun["config"]) == {"node_budget": 7}
    wall_s, answers = run(engine, temperature=0.7)
    assert [answer.tokens for answer in answers] == [(5, 6, 7, 2)] * 3
    assert wall_s > 0
    asked = sorted(
        (note["generate"] for note in fake.notes("generate")), key=lambda body: len(body["input_ids"])
    )
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(asked[0]["input_ids"]) == "<s>user:One.\n<s>assistant:"
    assert answers[0].prompt == tuple(asked[0]["input_ids"])
    assert sorted(body["sampling_params"]["sampling_seed"] for body in asked) == [1, 2, 3]
    engine.flush()
    assert fake.notes("post") == [{"post": "/flush_cache"}]
    assert engine.peak_memory_bytes() > 1 << 20
    info = engine.info()
    assert json.loads(json.dumps(info))["dtype"] == "float32"
    assert "--speculative-algorithm DDTREE" in info["command"]
    assert Path(info["log"]).name == "sglang-tree-7.log"
    engine.close()
    fake.assert_all_gone()


def test_arms_differ_in_how_they_decode_and_in_nothing_else(fake, monkeypatch):
    monkeypatch.setenv("DDTREE_CONFIG", '{"node_budget": 500}')
    for plan in ("ar", "chain", "tree:7"):
        fake.start(plan).close()
    commands = [note["argv"] for note in fake.notes("pids")]
    configs = [note["config"] for note in fake.notes("pids")]
    ports = [command.index("--port") + 1 for command in commands]
    for command, port in zip(commands, ports, strict=True):
        command[port] = "PORT"
    ar, chain, tree = commands
    assert chain == [*ar, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", chain[-1]]
    assert tree == ["DDTREE" if word == "DFLASH" else word for word in chain]
    assert configs == [None, None, '{"node_budget": 7}']


def test_plain_decoding_has_no_rounds(fake):
    _, [plain, *_] = run(fake.start("ar"))
    _, [chain, *_] = run(fake.start("chain"))
    assert (plain.rounds, plain.accept_histogram) == (0, None)
    assert (chain.rounds, chain.accept_histogram) == (2, {1: 1, 2: 1})


# -- a server that fails ----------------------------------------------------------------------------


def test_a_crash_at_start_is_told_by_the_log(fake):
    with pytest.raises(ServerError) as raised:
        fake.start("ar", "crash")
    said = str(raised.value)
    assert "exit code 1 while it started" in said
    assert "ValueError: this model is not for here" in said
    assert str(fake.folder / "logs" / "sglang-ar.log") in said


def test_a_log_of_an_earlier_start_is_not_blamed(fake):
    with pytest.raises(ServerError):
        fake.start("ar", "crash")
    with pytest.raises(ServerError, match="not ready after 2 s: its log says 'nothing'"):
        fake.start("ar", "hang", start_timeout_s=2.0)
    assert "last words" in (fake.folder / "logs" / "sglang-ar.log").read_text(encoding="utf-8")


def test_a_server_that_hangs_is_given_up_and_ended(fake):
    with pytest.raises(ServerError, match="not ready after 2 s"):
        fake.start("ar", "hang", start_timeout_s=2.0)
    assert fake.pids()
    fake.assert_all_gone()


def test_a_server_that_dies_at_work_is_told_by_the_log(fake):
    engine = fake.start("tree:7", "die")
    with pytest.raises(ServerError, match=r"exit code 3 while it worked.*CUDA out of memory"):
        run(engine)
    with pytest.raises(ServerError, match="exit code 3"):
        engine.flush()
    engine.close()
    fake.assert_all_gone()


def test_a_server_that_was_killed_is_told_by_its_signal(fake):
    engine = fake.start("ar")
    os.kill(fake.pids()[0], signal.SIGKILL)
    with pytest.raises(ServerError, match="SIGKILL while it worked"):
        run(engine)
    fake.assert_all_gone()  # its child too


def test_a_server_that_does_not_end_is_ended(fake, monkeypatch):
    monkeypatch.setattr("ddtree.bench.sglang_server.GRACE_S", 0.5)
    engine = fake.start("ar", "stubborn")
    engine.close()
    assert fake.notes("signal") == [{"signal": "SIGTERM"}]
    fake.assert_all_gone()


def test_a_process_that_left_the_servers_session_is_ended_too(fake):
    fake.start("ar", "leaver").close()
    assert len(fake.pids()) == 2
    fake.assert_all_gone()
    fake.start("ar", "leaver")
    os.kill(fake.pids()[-2], signal.SIGKILL)
    fake.assert_all_gone()


def test_a_second_interrupt_does_not_wait(fake, monkeypatch):
    engine = fake.start("ar", "stubborn")
    monkeypatch.setattr(engine._process._guard, "wait", interrupted_once(engine._process._guard.wait))
    begin_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    fake.assert_all_gone()
    assert time.monotonic() - begin_s < 15  # GRACE_S is 30


def interrupted_once(wait):
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return wait(*args)

    return interrupted


def test_an_interrupt_while_it_starts_ends_it(fake, monkeypatch):
    def interrupt(*_args):
        while not fake.notes_path.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr("ddtree.bench.server_process.ServerProcess.wait_until_ready", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fake.start("ar")
    fake.assert_all_gone()


PARENT = """
import os, sys, time
from pathlib import Path
from ddtree.bench.server_process import ServerProcess

process = ServerProcess("x", sys.argv[1:], dict(os.environ), Path(os.environ["FAKE_LOG"]), grace_s=5)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "behaviour"),
    [(signal.SIGKILL, ""), (signal.SIGKILL, "leaver"), (signal.SIGTERM, ""), (signal.SIGHUP, "")],
)
def test_a_server_ends_with_the_program_that_started_it(fake, python, tmp_path, number, behaviour):
    notes = fake.notes_path
    environment = os.environ | {
        "FAKE_SGLANG": behaviour,
        "FAKE_SGLANG_NOTES": str(notes),
        "FAKE_LOG": str(tmp_path / "l"),
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, python, "--port", "0"], env=environment, start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None,
    )  # fmt: skip
    try:
        end_s = time.monotonic() + 60
        while not notes.exists() or not notes.read_text(encoding="utf-8").endswith("\n"):
            assert time.monotonic() < end_s
            time.sleep(0.02)
        parent.send_signal(number)
        parent.wait(30)
        fake.assert_all_gone()
    finally:
        parent.kill()
        parent.wait()


def test_a_python_that_is_not_there(fake, tmp_path):
    with pytest.raises(ServerError, match=r"exit code 127.*No such file"):
        fake.start("ar", sglang_python=str(tmp_path / "none"))


def test_a_log_that_cannot_be_written(fake):
    (fake.folder / "logs").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        fake.start("ar")


def test_the_processes_of_a_session_and_of_those_that_left_it():
    code = (
        "import subprocess, sys\n"
        "nap = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "started = [subprocess.Popen(nap, start_new_session=new) for new in (False, True)]\n"
        "print(*(each.pid for each in started), flush=True)\nstarted[0].wait()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    children = sorted(map(int, process.stdout.readline().split()))
    try:
        assert processes_below(process.pid) == children
    finally:
        for pid in (process.pid, *children):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert not set(children) & set(processes_below(process.pid))


# -- the command line -------------------------------------------------------------------------------


def config(**settings):
    return BenchConfig(engines=("sglang",), **settings)


def launch(arm, settings, memory=None):
    return launch_of(arm, settings, Path("/t"), Path("/d"), 1234, memory)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--port 3", "--port is set by the run itself"),
        ("--host=0.0.0.0", "--host is set"),
        ("--api-key x", "--api-key is set"),
        ("--speculative_algorithm EAGLE", "--speculative-algorithm is set"),
        ("--model-path /m", "--model-path is set"),
        ("--model /m", "--model is set"),
        ("--page-size 4 --mod /m", "--mod is short for --model-path, which is set by the run itself"),
        ("--por=3", "--por is short for --port"),
        ("--speculative-draft /m", "--speculative-draft is short for --speculative-draft-model-path"),
        ("--config x.yaml", "a file may set what the run itself sets; give its flags one by one"),
        ("--conf=x.yaml", "a file may set"),
    ],
)
def test_flags_that_the_run_sets_are_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        launch(Arm("sglang", Mode.AR), config(sglang_args=flags))


@pytest.mark.parametrize(
    "flags", ["--model-impl auto", "--tp 2", "--speculative-draft-window-size 9", "--context-length 99"]
)
def test_flags_that_begin_alike_are_passed_on(flags):
    command = launch(Arm("sglang", Mode.AR), config(sglang_args=flags)).command
    assert list(command[-2:]) == flags.split()


def test_places_for_all_requests():
    command = launch(Arm("sglang", Mode.AR), config(concurrency=(1, 64))).command
    assert command[command.index("--max-running-requests") + 1] == "64"


def test_float32_is_exact_on_a_gpu():
    environment = launch(Arm("sglang", Mode.AR), config(dtype="float32")).environment
    assert environment["NVIDIA_TF32_OVERRIDE"] == "0"


def test_servers_share_a_gpu_evenly():
    three = {"modes": (Mode.AR, Mode.TREE), "budgets": (15, 31)}
    whole, shared = Memory(100 * GIB, 100 * GIB), Memory(50 * GIB, 100 * GIB)
    settings = config(**three, memory_share=0.9)
    assert servers_at_once(settings, is_gpu=True) == 3
    assert servers_at_once(settings, is_gpu=False) == 1
    assert memory_fraction(settings, 3, whole) == pytest.approx(0.3)
    assert memory_fraction(settings, 3, shared) == pytest.approx(0.6)  # of what is left: the same bytes
    with pytest.raises(ConfigError, match=r"memory_share=0\.9.*30\.0 GiB, and 20\.0 GiB are free"):
        memory_fraction(settings, 3, Memory(20 * GIB, 100 * GIB))
    alone = config(**three, servers_at_once=ServersAtOnce.ONE)
    assert servers_at_once(alone, is_gpu=True) == 1
    assert memory_fraction(alone, 1, whole) is None
    command = launch(Arm("sglang", Mode.AR), config(**three), whole).command
    assert float(command[command.index("--mem-fraction-static") + 1]) == pytest.approx(0.8 / 3, abs=1e-4)
    assert "--sleep-on-idle" in command


def test_a_gpu_by_number():
    command = launch(Arm("sglang", Mode.AR), config(device="cuda:2"), Memory(GIB, GIB)).command
    assert command[command.index("--base-gpu-id") + 1] == "2"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", 1),
        ("--tp 2", 2),
        ("--tp-size=4 --x", 4),
        ("--tensor-parallel-size 8", 8),
        ("--tp", 1),
        ("--tp_size 2", 2),
        ("--tensor-par=2", 2),
        ("--tp 2 --pp-size 2", 4),
        ("--tp 2 --dp 2", 4),
        ("--tp 2 --dp 2 --enable-dp-attention", 2),
    ],
)
def test_the_gpus_of_a_server_are_read_from_its_flags(flags, expected):
    assert num_server_gpus(config(sglang_args=flags)) == expected
    assert num_server_gpus(BenchConfig(sglang_args=flags)) == 1


def test_memory_is_that_of_all_gpus_of_a_server(monkeypatch):
    free = {0: 50, 1: 60, 2: 40, 3: 10}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 100))
    settings = config(device="cuda:1", sglang_args="--tp 2")
    before = gpu_memory(settings)
    assert before == [Memory(60, 100), Memory(40, 100)]
    assert least_free(before) == Memory(40, 100)
    free |= {0: 0, 1: 25, 2: 15}
    assert taken_bytes(before, gpu_memory(settings)) == 35 + 25
    assert gpu_memory(config(device="cpu")) == []
    assert (least_free([]), taken_bytes([], [])) == (None, None)


# -- what /generate says ----------------------------------------------------------------------------


def generated(*chunks, is_stream=True):
    return Received(10.0, 20.0, tuple((11.0 + i, event(c)) for i, c in enumerate(chunks)), is_stream)


def part(tokens, text, total, finish=None, **meta):
    reason = finish and {"type": finish}
    return {"output_ids": tokens, "text": text,
            "meta_info": {"completion_tokens": total, "finish_reason": reason, **meta}}  # fmt: skip


SPEC = {"spec_verify_ct": 2, "spec_correct_drafts_histogram": [1, 0, 1]}
WHOLE = part([5], "a", 1), part([5, 6], "ab", 2), part([5, 6, 7, 8, 2], "abcd", 5, "stop", **SPEC)
PARTS = part([5], "a", 1), part([6], "b", 2), part([7, 8, 2], "cd", 5, "stop", **SPEC)


@pytest.mark.parametrize("chunks", [WHOLE, PARTS])
def test_chunks_have_all_tokens_so_far_or_the_new_ones(chunks):
    answer = read_generated(generated(*chunks, "[DONE]"), (1, 2), is_plain=False)
    assert (answer.tokens, answer.text, answer.finish_reason) == ((5, 6, 7, 8, 2), "abcd", "stop")
    assert answer.chunk_times == ((11.0, 1), (12.0, 1), (13.0, 3))
    assert (answer.begin_s, answer.first_s, answer.end_s) == (10.0, 11.0, 20.0)
    assert (answer.rounds, answer.accept_histogram, answer.prompt_tokens) == (2, {1: 1, 3: 1}, 2)


@pytest.mark.parametrize(
    ("received", "named"),
    [
        (generated(*WHOLE[:2]), "broke off after 2 tokens"),
        (generated(), "broke off after 0 tokens"),
        (generated(part([5], "a", 3, "stop")), "broke off after 1 tokens"),
        (generated(part([5], "a", 1, "abort")), "aborted"),
        (generated({"error": {"message": "input is too long"}}), "input is too long"),
        (generated({"output_ids": [1]}), "cannot be read"),
        (generated({"output_ids": 3, "meta_info": {}}), "cannot be read"),
        (generated({"answer": 1}, is_stream=False), "broke off"),
    ],
)
def test_what_cannot_be_used_is_named(received, named):
    with pytest.raises(ServerError) as raised:
        read_generated(received, (1, 2), is_plain=False)
    assert named in str(raised.value)


@pytest.mark.parametrize(
    "chunk",
    [
        {"error": {"message": "longer than the model's context", "code": 400}},
        {"output_ids": [], "meta_info": {"completion_tokens": 0, "finish_reason": {
            "type": "abort", "message": "longer than the model's context", "status_code": 400}}},
    ],
)  # fmt: skip
def test_a_request_that_is_refused_is_no_fault_of_the_server(chunk):
    with pytest.raises(RequestRefusedError, match="longer than the model's context"):
        read_generated(generated(chunk), (1, 2), is_plain=False)


def test_greedy_requests_have_no_seed():
    body = generate_body([1], 4, 0.0, 7)
    assert "sampling_seed" not in body["sampling_params"]
    assert body["sampling_params"]["repetition_penalty"] == 1.0
