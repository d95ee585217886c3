"""Arms, engine processes (with a stand-in for SGLang) and resumable results of the SGLang programs."""

import argparse
import json
import os
import shutil
import tempfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

import sglang_common
from sglang_common import (
    Clock,
    EngineDied,
    EngineProcess,
    Results,
    ddtree_config_of,
    engine_arguments_of,
    engine_environment,
    engines,
    free_port,
    sglang_arguments,
)

# Answers with the prompt reversed, a token every 10 ms, and does as its first prompt token says.
FAKE_SGLANG = """
import asyncio, os, types
__version__ = "0.0.fake"

class Manager:
    server_args = types.SimpleNamespace(page_size=1)
    model_config = types.SimpleNamespace(context_len=4096)
    def __init__(self):
        self.aborted, self.flushes = set(), 0
    async def get_internal_state(self):
        return [{"attention_backend": "fake", "speculative_algorithm": os.environ.get("DDTREE_CONFIG")}]
    async def flush_cache(self):
        self.flushes += 1
        return types.SimpleNamespace(success=self.flushes > 2)
    async def get_loads(self):
        return [types.SimpleNamespace(
            num_used_tokens=3, max_total_num_tokens=100, num_running_reqs=1, num_waiting_reqs=2)]
    def abort_request(self, rid):
        self.aborted.add(rid)

class Engine:
    running = 0
    most = 0
    def __init__(self, **arguments):
        print("arguments", arguments, flush=True)
        if arguments["model_path"].endswith("broken"):
            raise ValueError("no such weights")
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.tokenizer_manager = Manager()
    async def async_generate(self, input_ids, sampling_params, rid, stream=False):
        if input_ids[0] == 666:
            os._exit(1)
        if input_ids[0] == 400:
            raise ValueError("refused")
        chunks = self.chunks(input_ids[::-1], rid)
        if stream:
            return chunks
        return [chunk async for chunk in chunks][-1]
    async def chunks(self, tokens, rid):
        Engine.running += 1
        Engine.most = max(Engine.most, Engine.running)
        for end in range(1, len(tokens) + 1):
            await asyncio.sleep(0.01)
            over = rid in self.tokenizer_manager.aborted
            finish = {"type": "abort"} if over else {"type": "length"} if end == len(tokens) else None
            meta = {"finish_reason": finish, "spec_verify_ct": Engine.most}
            yield {"output_ids": tokens[:end], "meta_info": meta}
            if over:
                break
        Engine.running -= 1
    def shutdown(self):
        print("shut down", flush=True)
"""


@pytest.fixture
def args(tmp_path, monkeypatch):
    package = tmp_path / "fake" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_SGLANG, encoding="utf-8")
    for name in ("target", "broken", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    short = tempfile.mkdtemp()  # sockets need short paths
    monkeypatch.setattr(sglang_common.tempfile, "tempdir", short)
    parser = argparse.ArgumentParser()
    sglang_arguments(parser, max_requests=4)
    yield parser.parse_args(["--model", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")])
    shutil.rmtree(short)


def request(*tokens, **options):
    return {"tokens": list(tokens), "sampling": {}, **options}


def test_configurations_of_arms():
    assert ddtree_config_of("plain", {}) is None
    assert ddtree_config_of("dflash", {}) is None
    assert ddtree_config_of("ddtree:31", {"metrics": False}) == {
        "node_budget": 31, "mode": "tree", "metrics": False,
    }  # fmt: skip
    assert ddtree_config_of("ddtree-chain:15", {})["mode"] == "chain"
    for arm in ("ddtree", "ddtree:", "ddtree:x", "eagle", "plain:3"):
        with pytest.raises(SystemExit, match="not allowed"):
            ddtree_config_of(arm, {})


def test_engine_arguments_of_arms(args):
    assert "speculative_algorithm" not in engine_arguments_of("plain", args)
    assert engine_arguments_of("dflash", args)["speculative_algorithm"] == "DFLASH"
    args.engine_arguments = {"attention_backend": "other", "tp_size": 2}
    made = engine_arguments_of("ddtree:15", args)
    assert made["speculative_algorithm"] == "DDTREE"
    assert (made["attention_backend"], made["tp_size"]) == ("other", 2)


def entry_points_in(environment):
    paths = environment["PYTHONPATH"].split(os.pathsep)
    found = [dist for dist in distributions(path=paths) if dist.name == "ddtree-benchmark"]
    return {point.name: point.value for dist in found for point in dist.entry_points}


def test_an_uninstalled_plugin_is_found(args, tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_common, "entry_points", lambda group: [])
    environment = engine_environment("ddtree:15", args, tmp_path / "a", {"more": "module:function"})
    assert entry_points_in(environment) == {
        "ddtree": "ddtree.sglang_plugin.plugin:register", "more": "module:function",
    }  # fmt: skip
    assert json.loads(environment["DDTREE_CONFIG"])["node_budget"] == 15
    assert str(tmp_path / "fake") in environment["PYTHONPATH"].split(os.pathsep)


def test_a_baseline_has_neither_plugin_nor_configuration(args, tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_common, "entry_points", lambda group: [])
    monkeypatch.setenv("DDTREE_CONFIG", "{}")
    environment = engine_environment("dflash", args, tmp_path / "b", {})
    assert entry_points_in(environment) == {}
    assert "DDTREE_CONFIG" not in environment
    assert "TRITON_F32_DEFAULT" not in environment


def test_float32_is_exact(args, tmp_path):
    args.dtype = "float32"
    environment = engine_environment("plain", args, tmp_path / "c", {})
    assert environment["TRITON_F32_DEFAULT"] == "ieee"
    assert environment["NVIDIA_TF32_OVERRIDE"] == "0"


def test_free_port_is_one_nobody_has():
    import socket

    with socket.socket() as taken:
        first = free_port(41_000)
        taken.bind(("127.0.0.1", first))
        assert free_port(first) > first


def test_requests_are_answered_in_order_at_a_concurrency(args):
    requests = [request(n, n + 1, n + 2, stream=n % 2 == 0) for n in range(6)]
    with engines(["plain"], args) as processes:
        made = processes["plain"].call("run", requests=requests, concurrency=2)
        info = processes["plain"].call("info")
        assert processes["plain"].call("flush") == {"success": True}
        pool = processes["plain"].call("pool")
    answers = made["answers"]
    assert [answer["tokens"] for answer in answers] == [[n + 2, n + 1, n] for n in range(6)]
    assert {answer["finish"]["type"] for answer in answers} == {"length"}
    assert answers[-1]["rounds"] == 2  # requests that ran at once
    assert made["wall_s"] >= 3 * 0.03
    for answer in answers:
        assert answer["begin_s"] <= answer["first_s"] <= answer["end_s"] <= made["wall_s"]
    assert answers[0]["first_s"] < answers[0]["end_s"]
    assert (info["sglang"], info["context_tokens"]) == ("0.0.fake", 4096)
    assert info["settings"]["attention_backend"] == "fake"
    assert info["settings"]["page_size"] == 1
    assert pool == {"used_tokens": 3, "capacity_tokens": 100, "requests": 3}


def test_refused_and_cut_off_requests_are_answers_too(args):
    requests = [request(400), request(*range(1, 200), abort_after_s=0.05, stream=True), request(7)]
    with engines(["plain"], args) as processes:
        answers = processes["plain"].call("run", requests=requests, concurrency=3)["answers"]
    assert answers[0]["error"] == "ValueError: refused"
    assert answers[1]["finish"] == {"type": "abort"}
    assert 0 < len(answers[1]["tokens"]) < 199
    assert answers[2]["tokens"] == [7]


def test_engines_of_other_variables_are_others(args, tmp_path):
    args.keep_engines_s = 5  # an engine of the same settings would be taken over
    short = Path(sglang_common.tempfile.gettempdir())
    for value in ("a", "b"):
        engine = EngineProcess("plain", args, short, 0, {}, {"DDTREE_CONFIG": value})
        engine.start()
        assert engine.call("info")["settings"]["speculative_algorithm"] == value
        engine.call("shutdown")
        engine.close()


def test_a_call_beyond_its_limit_is_the_engines_death(args):
    engine = EngineProcess("plain", args, Path(sglang_common.tempfile.gettempdir()), 0, {}, None, 0.2)
    engine.start()
    with pytest.raises(EngineDied, match="ended during 'run'"):
        engine.call("run", requests=[request(*range(100))], concurrency=1)
    engine.close()


def test_an_engine_that_is_not_up_in_time_is_told(args):
    engine = EngineProcess("plain", args, Path(sglang_common.tempfile.gettempdir()), 0, {})
    engine.start()
    with pytest.raises(EngineDied, match="plain did not answer for 0 s"):
        engine.wait(0.0)
    engine.call("shutdown")
    engine.close()


def test_an_engine_that_dies_says_so(args):
    with engines(["plain"], args) as processes:
        assert processes["plain"].call("run", requests=[request(1)], concurrency=1)
        with pytest.raises(EngineDied, match="plain ended during 'run'"):
            processes["plain"].call("run", requests=[request(666)], concurrency=1)


def test_an_engine_that_cannot_start_shows_its_log_and_spares_the_others(args):
    args.model = args.model.replace("target", "broken")
    with (
        engines(["plain"], args) as processes,
        pytest.raises(EngineDied, match=r"did not start(.|\n)*no such weights"),
    ):
        processes["plain"].call("info")


def test_a_wrong_call_leaves_the_engine_alive(args):
    with engines(["plain"], args) as processes:
        with pytest.raises(RuntimeError, match="run: TypeError"):
            processes["plain"].call("run", nothing=1)
        assert processes["plain"].call("info")["sglang"] == "0.0.fake"


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_engines_end_with_their_program_unless_kept(args):
    with engines(["plain", "ddtree:15"], args) as processes:
        for process in processes.values():
            process.wait()
        pids = [process._process.pid for process in processes.values()]
        folder = processes["plain"].log.parent
    assert not any(is_alive(pid) for pid in pids)
    assert not folder.exists()


def test_a_kept_engine_answers_the_next_program(args):
    args.keep_engines_s = 5
    with engines(["plain"], args) as processes:
        processes["plain"].wait()
        first = processes["plain"]._process
    assert first.poll() is None
    with engines(["plain"], args) as processes:
        answers = processes["plain"].call("run", requests=[request(1, 2)], concurrency=1)["answers"]
        assert processes["plain"]._process is None
        assert answers[0]["tokens"] == [2, 1]
        processes["plain"].call("shutdown")
    first.wait(timeout=10)
    args.dtype = "float16"  # another engine
    with engines(["plain"], args) as processes:
        processes["plain"].wait()
        assert processes["plain"]._process is not None
        processes["plain"].call("shutdown")


def test_results_go_on_where_they_were(tmp_path):
    file = tmp_path / "deep" / "results.json"
    first = Results(file, {"a": (1, 2)})
    first.engines["arm"] = {"start_s": 3}
    first.add("cell", {"x": 1})
    again = Results(file, {"a": (1, 2)})
    assert again.cells == {"cell": {"x": 1}}
    assert again.engines == {"arm": {"start_s": 3}}
    again.verdict["best"] = 5
    again.add("other", 2)
    stored = json.loads(file.read_text(encoding="utf-8"))
    assert stored["cells"] == {"cell": {"x": 1}, "other": 2}
    assert stored["verdict"] == {"best": 5}
    assert len(stored["runs"]) == 2
    assert [path.name for path in file.parent.iterdir()] == ["results.json"]
    with pytest.raises(SystemExit, match="another file"):
        Results(file, {"a": (1, 3)})


def test_results_without_a_file_stay_in_memory():
    results = Results(None, {})
    results.add("cell", 1)
    assert results.cells == {"cell": 1}


def test_clock_runs_down():
    assert 9 < Clock(10).left_s() <= 10
    assert Clock(-1).left_s() < 0


def test_the_worker_is_run_by_path():
    """The engine's program imports nothing of ours: it runs in SGLang's environment."""
    source = (Path(sglang_common.__file__).parent / "sglang_engine.py").read_text(encoding="utf-8")
    assert "import ddtree" not in source
    assert "from ddtree" not in source
