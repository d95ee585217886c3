"""The tensor-parallel program's parts, with stand-ins for engines, and what the docs say of a run."""

import json
import runpy
import sys
from pathlib import Path

import pytest

import bench_sglang_tensor_parallel as program
import sglang_fleet
import tensor_parallel_pairs
from ddtree.trace.outputs import Output
from planted_acceptance import Simulation
from sglang_common import EngineDied
from sglang_rank_trees import RANKS_FOLDER
from tensor_parallel_pairs import RANDOM, SHIPPED, Group, ServedPair, engine_spec, random_pair, rank_specs

ROOT = Path(__file__).parents[2]
SHAPE = {"vocab_size": 640, "num_hidden_layers": 6, "hidden_size": 64}
LOG = {"rounds": 40, "trees": 90, "nodes": 2000, "tied_trees": 7, "tree_hash": "a", "score_hash": "b"}


class FakeEngine:
    """Answers with the known texts; `dead` and `unequal` name arms and logs that go wrong."""

    started, dead, unequal, wrong, pairs = [], set(), False, False, {}

    def __init__(self, arm, args, folder, index, plugins, environment, call_limit_s):
        self.arm, self.args, self.environment = arm, args, environment
        self.plugins, self.batches = plugins, 0
        self.planted = next(
            (pair.planted for pair in self.pairs.values() if str(pair.target) == args.model and pair.planted),
            None,
        )

    def start(self):
        FakeEngine.started.append((self.args.model, self.args.engine_arguments["tp_size"], self.arm))

    def wait(self, limit_s):
        if self.arm in self.dead:
            raise EngineDied(f"{self.arm} did not start")

    def close(self):
        pass

    def call(self, name, **arguments):
        if name == "info":
            return {"sglang": "0.fake", "context_tokens": 512, "settings": {"speculative_algorithm": None}}
        if name == "flush":
            self._write_ranks()
            return {"success": True}
        self.batches += 1
        answers = [self._answer(request) for request in arguments["requests"]]
        return {"wall_s": 0.5 if self.arm == "dflash" else 0.25, "answers": answers}

    def _answer(self, request):
        if self.args.engine_arguments.get("skip_tokenizer_init") and "min_new_tokens" in request["sampling"]:
            return {"error": "ValueError: min_new_tokens needs a tokenizer"}
        count, rounds = request["sampling"]["max_new_tokens"], 0 if self.arm == "plain" else 9
        tokens = [600] * count
        if self.planted is not None:
            simulation = self.planted._simulation(self.arm)
            tokens = simulation.text(request["tokens"][-1] + self.wrong, count)
            rounds = rounds and simulation.rounds(request["tokens"], count)
        return {"tokens": tokens, "rounds": rounds, "finish": {"type": "length"}}

    def _write_ranks(self):
        if RANKS_FOLDER in self.environment:
            for rank in range(self.args.engine_arguments["tp_size"]):
                log = (
                    LOG
                    | {"rounds": 20 * self.batches}
                    | ({"tree_hash": "other"} if self.unequal and rank else {})
                )
                file = Path(self.environment[RANKS_FOLDER]) / f"rank-{rank}.json"
                file.write_text(json.dumps(log))


class Writer:
    returncode = 0

    def wait(self):
        return 0


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the program with further flags; what it wrote and its exit status."""
    monkeypatch.setattr(sglang_fleet, "EngineProcess", FakeEngine)
    monkeypatch.setattr(tensor_parallel_pairs.PlantedTexts, "start_writing", lambda self, args: Writer())
    shipped = ServedPair(tmp_path / "s", tmp_path / "d", 1000, lambda count: [[1, 2, 3]] * count)
    monkeypatch.setattr(program, "shipped_pair", lambda args, folder: shipped)

    def remember(args, folder):
        FakeEngine.pairs = {RANDOM: random_pair(args, folder)}
        return FakeEngine.pairs[RANDOM]

    monkeypatch.setattr(program, "random_pair", remember)
    for name, value in {"started": [], "dead": set(), "unequal": False, "wrong": False}.items():
        monkeypatch.setattr(FakeEngine, name, value)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    output = tmp_path / "out.json"

    def main(*flags):
        argv = [
            "bench_sglang_tensor_parallel.py", "--output", str(output), "--random-shape", json.dumps(SHAPE),
            "--reserved-tokens", "16", "--weights-folder", str(tmp_path), "--max-tokens", "20",
            "--concurrency", "1", "4", "--repeats", "2", "--rank-rounds", "30", *flags,
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            program.main()
        return json.loads(output.read_text()), ended.value.code

    return main


def test_both_pairs_are_measured_at_every_number_of_ranks(run, monkeypatch):
    monkeypatch.setattr(program, "judge_all", judge_none)
    monkeypatch.setattr(program, "load_replayer", lambda args: None)
    made, code = run("--parts", "ranks", "replay", "bench", "--tp-size", "2", "1")
    assert code == 0, made["verdict"]["failed"]
    table = {(row["set"], row["concurrency"], row["arm"]): row for row in made["verdict"]["table"]}
    assert len(table) == 2 * 2 * 2 * 5
    assert {row["repeats"] for row in table.values()} == {2}
    assert table["random-8b tp2", 4, "ddtree:31"]["ratio_to_dflash"] == 2.0
    assert made["cells"]["ranks shipped tp2 ties"]["equal"]
    assert not any(name.startswith("ranks") and "tp1" in name for name in made["cells"])
    assert made["verdict"]["shards"]["shipped tp2"] == {
        "vocab_size": 1000, "rank_tokens": 500, "max_id": 600,
    }  # fmt: skip
    assert "answers" not in made["cells"]["replay shipped tp2 ddtree:31 16 sampled"]
    planted = [cell for cell in made["cells"].values() if "simulated_rounds" in cell]
    assert planted
    assert all(cell["rounds"] == cell["simulated_rounds"] for cell in planted)
    assert all(cell["wrong_texts"] == 0 for cell in planted)
    check_pages(made)


def check_pages(made):
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        docs = runpy.run_path(str(ROOT / "scripts" / "tensor_parallel_docs.py"))
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    made["runs"][0]["machine"]["gpus"] = ["A GPU"]
    text = "\n\n".join(docs["tensor_parallel"](made))
    for words in ("random-8b, 2 | 4 | DDTREE, 31", "| shipped, 2 | ties | 40 |", "0 of 80 texts differ"):
        assert words in text or "texts differ" in words
    assert "40 | 90 | 2,000 | 7 | all |" in text
    paragraph = docs["roadmap_of"](made)
    assert "all ranks built the same trees in 120 rounds" in paragraph
    assert "random-8b, 2 ranks at 4 at once: 2.00 times DFLASH" in paragraph
    assert "A GPU" in paragraph


def judge_none(replayer, results, cells, requests, dtype, round_tokens):
    """Stands for the replay, and checks what it is given."""
    assert cells[0][0] == "plain"
    for arm, concurrency, kind in cells:
        answers = results.cells[f"{arm} {concurrency} {kind}"]["answers"]
        assert len(answers) == len(requests[kind]) == 40
        Output(requests[kind][0]["tokens"], answers[0]["tokens"], requests[kind][0]["sampling"], "0", None)
        assert arm in results.engines
        results.verdict.setdefault("rows", {})[f"{arm} {concurrency} {kind}"] = {
            "outputs": 40, "tokens": 800, "not_best": 0, "max_gap": 0.0, "violations": [], "endings": [],
            "known_endings": [], "errors": [], "planted": 0, "planted_found": 0,
        }  # fmt: skip
    results.verdict["eps"] = 0.25


def test_a_second_run_starts_no_engine(run):
    flags = ("--parts", "ranks", "bench", "--tp-size", "2", "--pairs", RANDOM)
    first, _ = run(*flags)
    assert FakeEngine.started
    FakeEngine.started.clear()
    second, code = run(*flags)
    assert code == 0
    assert not FakeEngine.started
    assert second["cells"] == first["cells"]


def test_a_run_of_other_ranks_keeps_the_rows_of_the_one_before(run):
    run("--parts", "bench", "--tp-size", "2", "--pairs", RANDOM)
    made, code = run("--parts", "bench", "--tp-size", "1", "--pairs", RANDOM)
    assert code == 0
    assert {row["set"] for row in made["verdict"]["table"]} == {"random-8b tp2", "random-8b tp1"}
    assert list(made["verdict"]["shards"]) == ["random-8b tp2", "random-8b tp1"]


def test_a_dead_engine_is_named_and_spares_the_others(run):
    FakeEngine.dead = {"ddtree:15"}
    made, code = run("--parts", "bench", "--tp-size", "2", "--pairs", RANDOM)
    assert code == 1
    assert "ddtree:15 did not start" in made["verdict"]["failed"]["start tp2"]
    assert {row["arm"] for row in made["verdict"]["table"]} == {"plain", "dflash", "ddtree:31", "ddtree:63"}
    assert "died" in made["engines"]["random-8b tp2 ddtree:15"]


def test_ranks_that_differ_fail_the_run(run):
    FakeEngine.unequal = True
    made, code = run("--parts", "ranks", "--tp-size", "2", "--pairs", SHIPPED)
    assert code == 1
    assert not made["cells"]["ranks shipped tp2 check"]["equal"]


def test_wrong_texts_are_counted_and_fail_the_run(run):
    FakeEngine.wrong = True
    made, code = run("--parts", "bench", "--tp-size", "2", "--pairs", RANDOM, "--arms", "plain", "dflash")
    assert code == 1
    assert made["cells"]["dflash 1 random-8b tp2 0"]["wrong_texts"] == 4


def test_ranks_that_do_not_divide_the_heads_are_refused(run, capsys):
    with pytest.raises((SystemExit, FileNotFoundError)):
        run("--tp-size", "3")
    assert "--kv-heads 4 is not allowed: --tp-size 3 does not divide it" in capsys.readouterr().err


def test_specs_of_engines(tmp_path):
    args = program.arguments(["--random-shape", json.dumps(SHAPE), "--ddtree-config", '{"metrics": false}'])
    pair = random_pair(args, tmp_path)
    timed = engine_spec(pair, Group(RANDOM, 2), "ddtree:15", first_gpu=3)
    made = timed.arguments(args)
    assert made.engine_arguments["tp_size"] == 2
    assert made.engine_arguments["skip_tokenizer_init"]
    assert made.engine_arguments["base_gpu_id"] == 0
    assert set(timed.plugins) == {"ddtree-planted", "ddtree-ranges"}
    [check] = rank_specs(pair, Group(RANDOM, 2), "ddtree:31", tmp_path)
    assert check.arguments(args).ddtree_config == {"metrics": False, "check_ranks": True}
    assert set(check.plugins) == {"ddtree-rank-trees"}
    shipped = ServedPair(tmp_path, tmp_path, 9, lambda count: [])
    steps = [
        spec.environment["DDTREE_TIE_STEP"] for spec in rank_specs(shipped, Group(SHIPPED, 2), "a", tmp_path)
    ]
    assert steps == ["0.0", "2.0"]


def test_random_prompts_stay_the_same_and_are_walked(tmp_path):
    args = program.arguments(["--random-shape", json.dumps(SHAPE), "--reserved-tokens", "16"])
    planted = random_pair(args, tmp_path).planted
    few, more = planted.prompts(3), planted.prompts(8)
    assert more[:3] == few
    assert max(max(prompt) for prompt in more) < 624
    assert isinstance(planted._simulation("dflash"), Simulation)
    assert planted._simulation("dflash").accept_length(5) <= planted._simulation("ddtree:31").accept_length(5)
