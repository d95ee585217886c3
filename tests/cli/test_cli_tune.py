"""`ddtree tune`: what it prints, the flags to paste, and how it ends."""

import json

import pytest

from ddtree.bench.run_format import Cell, CellKey, RequestFigures, RunHeader
from ddtree.bench.run_writer import RunWriter
from ddtree.cli import loading
from engine_kit import real_engine

RATES = {
    "ar": (1.0, 10),
    "chain": (2.0, 12),
    "tree:8": (2.6, 12.2),
    "tree:16": (2.8, 12.6),
    "tree:32": (3.0, 13),
}


def request(number, rounds, length, seconds):
    return RequestFigures(number, 9, 1 + round(length * rounds), seconds, seconds, "0", "stop", rounds=rounds)


@pytest.fixture
def run_file(tmp_path):
    """A run of SGLang in which tree:32 is the fastest."""
    header = RunHeader(
        {"max_tokens": 64}, {}, {"target": {"name": "Qwen/Qwen3-8B"}, "drafter": {"name": "D"}}, "x"
    )
    path = tmp_path / "run.jsonl"
    writer = RunWriter(path, header)
    for plan, (length, round_ms) in RATES.items():
        for load in (1, 4):
            requests = tuple(
                request(i, rounds, length, rounds * round_ms / 1e3) for i, rounds in enumerate(range(50, 58))
            )
            wall_s = sum(request.total_s for request in requests) / load
            writer.cell(Cell(CellKey(f"sglang {plan}", "gsm8k", load, 0.0, 0), wall_s, requests))
    return str(path)


def test_a_run_gives_tables_reasons_and_flags(command, run_file):
    code, out, err = command("tune", "--from", run_file)
    assert (code, err) == (0, "")
    assert "sglang, T = 0 (gsm8k), 4 at once" in out
    assert "1 at once: tree:32, since tree:32 is 1.3" in out
    assert "one setting for 1, 4 at once: tree:32" in out
    assert "foretold from the others, typically" in out
    assert (
        "DDTREE_CONFIG='{\"node_budget\": 32}' python -m sglang.launch_server --model-path Qwen/Qwen3-8B"
        in out
    )


def test_a_run_that_measured_nothing_says_why(refused, tmp_path):
    path = tmp_path / "failed.jsonl"
    writer = RunWriter(path, RunHeader({}, {}, {"target": {"name": "m"}, "drafter": None}, "x"))
    writer.engine("sglang ar", {"error": "sglang ar, start: CUDA out of memory"})
    assert "no measured cell yet; sglang ar failed: start: CUDA out of memory" in refused(
        "tune", "--from", str(path)
    )


def test_the_json_of_a_run(command, run_file):
    code, out, _ = command("tune", "--from", run_file, "--json", "--concurrency", "2")
    document = json.loads(out)
    assert code == 0
    assert document["groups"][0]["plan"] == "tree:32"
    assert document["groups"][0]["by_load"]["2"]["options"][0]["is_predicted"]
    assert document["is_interrupted"] is False


def test_another_machine_is_predicted(command, run_file):
    code, out, _ = command("tune", "--from", run_file, "--gpu", "H200", "--concurrency", "1,16")
    assert code == 0
    assert "sglang on H200, T = 0 (gsm8k), 16 at once" in out
    assert "all of it is predicted" in out


@pytest.mark.parametrize(("arguments", "told"), [
    (("--from", "none.jsonl"), "none.jsonl"), (("--seconds", "0"), "--seconds=0"),
    (("--budget", "0"), "--budget=0"),
    (("--concurrency", "4"), "needs --from or --gpu"), (("--gpu", "H900"), "gpu='H900'"),
    (("--from", "x", "--concurrency", "1,b"), "--concurrency='1,b'"), (("--set", "nowhere"), "nowhere"),
    (("--drafter", "none"), "drafter='none'"), (("--gpu", "H200", "--concurrency", "0"), "concurrency=0"),
    (("--max-tokens", "2"), "--max-tokens=2"),
])  # fmt: skip
def test_mistakes_are_one_line(refused, arguments, told):
    assert told in refused("tune", *arguments)


@pytest.mark.parametrize(("flags", "told"), [
    (("--seconds", "60"), "--seconds is not read with --from"),  # though that is the default
    (("--set", "gsm8k", "--temperature", "1"), "--set, --temperature are not read with --from"),
    (("--max-tokens", "96"), "--max-tokens is"), (("--seed", "0"), "--seed is"),
    (("--device", "cpu"), "--device is"), (("--max-context", "64"), "--max-context is"),
    (("--model", "m", "--drafter", "d"), "--model, --drafter are not read with --from"),
    (("--gpu", "H200", "--dtype", "float32"), "--dtype is not read with --from"),
    (("--tp", "1"), "--tp is not read without --gpu"), (("--context", "9"), "--context is"),
])  # fmt: skip
def test_flags_that_would_change_nothing_are_refused(refused, run_file, flags, told):
    assert told in refused("tune", "--from", run_file, *flags)


def test_flags_that_are_read_of_a_run_are_taken(command, run_file):
    code, out, _ = command("tune", "--from", run_file, "--budget", "12,24", "--json", "-q")
    assert code == 0
    options = json.loads(out)["groups"][0]["by_load"]["1"]["options"]
    assert {"tree:12", "tree:24"} <= {option["plan"] for option in options}
    default = "4,7,15,31,63,127,255,511"
    shown = command("tune", "--from", run_file, "--budget", default)
    assert shown[0] == 0
    assert "tree:15" in shown[1]
    assert "tree:15" not in command("tune", "--from", run_file)[1]
    elsewhere = ("--gpu", "H200", "--tp", "1", "--context", "512", "--model", "Qwen/Qwen3-8B")
    assert command("tune", "--from", run_file, *elsewhere)[0] == 0


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return real_engine(tmp_path_factory.mktemp("tiny"), 256, vocab_size=128)


@pytest.fixture
def tiny(engine, monkeypatch, tmp_path):
    """A real engine of random weights behind `load_engine`, and prompts that it can read."""
    monkeypatch.setattr(loading, "load_engine", lambda config: engine)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(5)))
    return engine, ("tune", "--seconds", "1", "--budget", "2,8", "--max-tokens", "16", "--set", str(path))


def test_a_calibration_prints_plans_and_flags(command, tiny):
    code, out, err = command(*tiny[1])
    assert code == 0
    assert "loading smollm2-135m" in err
    for part in (
        "ar",
        "chain",
        "tree:2",
        "tree:8",
        "times the chain",
        "ddtree serve --model tiny --mode ",
        "rounds on",
    ):
        assert part in out


def test_ctrl_c_tells_what_was_measured_and_ends_with_130(command, tiny, monkeypatch):
    engine, arguments = tiny
    stream, calls = engine.stream, []

    def interrupted(request):
        calls.append(request)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return stream(request)

    monkeypatch.setattr(engine, "stream", interrupted)
    code, out, _ = command(*arguments, "--json", "-q")
    document = json.loads(out)
    assert (code, document["is_interrupted"]) == (130, True)
    assert document["groups"][0]["by_load"]["1"]["options"]
    assert "stopped early" in " ".join(document["groups"][0]["notes"])


def test_ctrl_c_before_anything_prints_nothing(command, tiny, monkeypatch):
    def interrupted(request):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny[0], "stream", interrupted)
    code, out, _ = command(*tiny[1])
    assert (code, out) == (130, "")
