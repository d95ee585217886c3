"""The recommendation of a run: by load, for all loads, by set, as Markdown, JSON and flags to paste."""

import json
import random
import shlex

import pytest

from ddtree.bench.evidence import measured_of
from ddtree.bench.launch import launch_lines
from ddtree.bench.recommendation import launch_of, markdown, recommend, to_json
from ddtree.bench.run_format import Cell, CellKey, RequestFigures, Run, RunHeader
from ddtree.config import Mode
from ddtree.errors import ConfigError
from ddtree.tree.budget_cost import PLAIN, DraftPlan

CHAIN = DraftPlan(Mode.CHAIN, 7)
LENGTHS = {"ar": 1.0, "chain": 2.5, "tree:8": 3.0, "tree:16": 3.2, "tree:32": 3.4, "tree:64": 3.5}
# Milliseconds of a round by requests at once: wide trees grow dear under load.
ROUND_MS = {
    1: {"ar": 10, "chain": 13, "tree:8": 13, "tree:16": 13, "tree:32": 13.3, "tree:64": 14},
    16: {"ar": 11, "chain": 20, "tree:8": 21, "tree:16": 28, "tree:32": 40, "tree:64": 60},
}


def cell(
    arm, load, prompt_set="gsm8k", temperature=0.0, repeat=0, num_prompts=16, round_ms=None, length=None
):
    """A cell whose requests all have their own length of text, and rates that differ a little by text."""
    plan = arm.partition(" ")[2]
    round_s = (round_ms or ROUND_MS[load][plan]) / 1e3
    length = length or LENGTHS[plan]
    noise = random.Random(f"{prompt_set}")
    requests = []
    for prompt in range(num_prompts):
        rounds = 40 + noise.randrange(10)
        total_s = rounds * round_s
        requests.append(
            RequestFigures(
                prompt=prompt,
                prompt_tokens=50,
                new_tokens=1 + round(rounds * length),
                total_s=total_s,
                decode_s=total_s,
                tokens_sha256="0",
                finish_reason="stop",
                rounds=None if plan == "ar" else rounds,
            )
        )
    wall_s = sum(request.total_s for request in requests) / min(load, num_prompts)
    key = CellKey(arm, prompt_set, load, temperature, repeat)
    return Cell(key, wall_s, tuple(requests))


def run_of(cells, device="cpu", target="smollm2-135m", drafter="smollm2-135m-dflash-b16"):
    header = RunHeader({}, {}, {"target": {"name": target}, "drafter": {"name": drafter}}, device)
    return Run("run.jsonl", header, engines={}, cells={c.key: c for c in cells})


def grid(engine="sglang", loads=(1, 16), **options):
    return [cell(f"{engine} {plan}", load, **options) for load in loads for plan in LENGTHS]


def test_the_advice_of_each_load_and_the_one_for_both():
    group = recommend(run_of(grid())).groups[0]
    assert {load: str(advice.plan) for load, advice in group.by_load.items()} == {1: "tree:32", 16: "tree:8"}
    assert group.mix.plan == DraftPlan(Mode.TREE, 8)
    assert group.plan == group.mix.plan
    rates = {load: {p: LENGTHS[p] / ms for p, ms in by.items()} for load, by in ROUND_MS.items()}
    assert group.mix.losses[1] == pytest.approx(1 - rates[1]["tree:8"] / rates[1]["tree:32"], abs=0.01)
    assert group.mix.losses[16] == pytest.approx(0, abs=1e-9)


def test_rates_are_those_over_wall_time():
    cells = [cell("sglang chain", 16), cell("sglang chain", 16, repeat=1)]
    found = measured_of(cells, 7)[16][0]
    tokens, wall_s = sum(c.new_tokens for c in cells), sum(c.wall_s for c in cells)
    assert found.tokens_per_s == pytest.approx(tokens / wall_s)
    assert found.accept_length.value == pytest.approx(cells[0].accept_length)
    assert found.in_flight == pytest.approx(16)


def test_the_accept_length_is_the_histograms_where_there_is_one():
    made = cell("sglang chain", 1)
    told = Cell(made.key, made.wall_s, made.requests, accept_histogram={"2": 10, "4": 10})
    assert measured_of([told], 7)[1][0].accept_length.value == pytest.approx(3.0)


def test_engines_and_temperatures_are_told_apart():
    cells = [*grid("embedded", (1,)), *grid("sglang", (1,), temperature=1.0)]
    groups = recommend(run_of(cells)).groups
    assert [(g.engine, g.temperature, g.is_sglang) for g in groups] == [
        ("embedded", 0.0, False),
        ("sglang", 1.0, True),
    ]
    assert all(group.mix is None for group in groups)


def test_a_set_that_surely_says_another_plan_is_named():
    hopeless = [cell(f"embedded {p}", 1, "poems", length=1.0 if p == "ar" else 1.05) for p in LENGTHS]
    made = recommend(run_of([*grid("embedded", (1,)), *hopeless]))
    assert made.groups[0].by_load[1].plan != PLAIN
    assert made.groups[0].by_set["poems"][1].plan == PLAIN
    assert "- poems alone, 1 at once: ar, since drafting does not pay" in markdown(made)


def test_sets_that_agree_are_not_named():
    group = recommend(
        run_of([*grid("embedded", (1,)), *grid("embedded", (1,), prompt_set="humaneval")])
    ).groups[0]
    assert group.by_set == {}
    assert group.sets == ("gsm8k", "humaneval")


def test_loads_and_budgets_that_were_not_measured_are_predicted():
    group = recommend(run_of(grid()), concurrency=(4, 64), budgets=(24,)).groups[0]
    assert sorted(group.by_load) == [1, 4, 16]
    assert all(option.is_predicted for option in group.by_load[4].options)
    foretold = {str(o.plan): o for o in group.by_load[1].options}["tree:24"]
    assert foretold.is_predicted
    assert foretold.accept_length.value == pytest.approx(3.3, abs=0.05)
    assert any("64 at once" in note for note in group.notes)
    assert "a forecast: measure it" in markdown(recommend(run_of(grid()), concurrency=(4,)))


def test_the_cost_model_is_fitted_where_the_gpu_is_known_and_its_error_printed():
    made = recommend(run_of(grid(), device="NVIDIA H200"), concurrency=(64,))
    assert {way.method.split()[0] for way in made.groups[0].times} == {"cost", "interpolation"}
    assert 64 in made.groups[0].by_load
    assert "foretold from the others, typically" in markdown(made)


def test_arms_without_a_fixed_plan_are_left_out_and_said():
    cells = [*grid("embedded", (1,)), cell("embedded tree:auto", 1, round_ms=10, length=3)]
    made = recommend(run_of([*cells, cell("http://host:1/v1", 1, round_ms=10, length=3)]))
    assert made.notes == (
        "embedded tree:auto has no fixed plan, so it is not judged",
        "http://host:1/v1 has no fixed plan, so it is not judged",
    )
    assert [group.engine for group in made.groups] == ["embedded"]


def test_an_empty_run_says_so():
    made = recommend(run_of([]))
    assert made.groups == ()
    assert markdown(made) == "nothing was measured yet of which a plan can be told.\n"


def test_a_load_that_was_never_reached_and_uneven_arms_are_said():
    cells = [cell("sglang ar", 16, num_prompts=4), cell("sglang chain", 16, num_prompts=4),
             cell("sglang ar", 16, "humaneval", num_prompts=4)]  # fmt: skip
    notes = recommend(run_of(cells)).groups[0].notes
    assert any("16 at once was never reached" in note for note in notes)
    assert any("not every arm has every cell" in note for note in notes)


def test_a_load_below_1_is_refused():
    with pytest.raises(ConfigError, match="concurrency=0"):
        recommend(run_of([]), concurrency=(0,))


def test_json_holds_what_markdown_says():
    made = recommend(run_of(grid()))
    document = json.loads(json.dumps(to_json(made)))
    group = document["groups"][0]
    assert group["plan"] == "tree:8"
    assert group["by_load"]["1"]["plan"] == "tree:32"
    assert set(group["mix"]["losses"]) == {"1", "16"}
    option = group["by_load"]["1"]["options"][3]
    assert (option["plan"], option["over_chain"]["value"] > 1) == ("tree:16", True)
    assert group["round_times"][0]["left_out"]
    assert group["launch"] == list(launch_of(made, made.groups[0]))


def test_names_from_a_file_are_no_markup():
    made = recommend(run_of([cell("embedded ar", 1, "<script>|`x`\n")], target="`rm`\n"))
    text = markdown(made)
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert "`rm`" not in text
    assert "ddtree serve --model TARGET" in text


@pytest.mark.parametrize(("plan", "expected"), [
    (PLAIN, ["python -m sglang.launch_server --model-path Qwen/Qwen3-8B"]),
    (CHAIN, ["python -m sglang.launch_server --model-path Qwen/Qwen3-8B \\",
             "  --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16"]),
    (DraftPlan(Mode.TREE, 64), [
        "DDTREE_CONFIG='{\"node_budget\": 64}' python -m sglang.launch_server --model-path Qwen/Qwen3-8B \\",
        "  --speculative-algorithm DDTREE --speculative-draft-model-path z-lab/Qwen3-8B-DFlash-b16"]),
])  # fmt: skip
def test_flags_for_sglang(plan, expected):
    assert list(launch_lines(plan, "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", is_sglang=True)) == expected


@pytest.mark.parametrize(("plan", "flags"), [
    (PLAIN, "--mode ar"), (CHAIN, "--mode chain"), (DraftPlan(Mode.TREE, 64), "--mode tree --budget 64"),
])  # fmt: skip
def test_flags_for_the_embedded_engine_are_those_of_serve(plan, flags):
    (line,) = launch_lines(plan, "smollm2-135m", "smollm2-135m-dflash-b16", is_sglang=False)
    assert line == f"ddtree serve {flags}"
    (line,) = launch_lines(plan, "my models/a", "b", is_sglang=False)
    assert shlex.split(line)[:6] == ["ddtree", "serve", "--model", "my models/a", "--drafter", "b"]


def test_the_shipped_pair_is_pointed_to_for_sglang():
    lines = launch_lines(CHAIN, "smollm2-135m", "smollm2-135m-dflash-b16", is_sglang=True)
    assert lines[0] == "# ddtree doctor --model smollm2-135m prints the folders TARGET and DRAFTER"
    assert "--model-path TARGET" in lines[1]
    assert "--speculative-draft-model-path DRAFTER" in lines[2]


@pytest.mark.parametrize(("server", "expected"), [("ddtree", False), ("sglang", True), ("vllm", None)])
def test_a_running_server_is_what_it_says(server, expected):
    run = run_of(grid("http://host:1/v1", (1,)))
    run.engines = {"http://host:1/v1 tree:8": {"server": server}}
    group = recommend(run).groups[0]
    assert group.is_sglang is expected
    assert bool(launch_of(recommend(run), group)) == (expected is not None)


def test_a_server_that_does_not_say_what_it_is_gets_no_flags():
    made = recommend(run_of(grid("http://host:1/v1", (1,))))
    assert made.groups[0].is_sglang is None
    assert launch_of(made, made.groups[0]) == ()
