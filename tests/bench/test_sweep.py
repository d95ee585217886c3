"""The loop over cells: turns, warm-up, resuming, engines that die, what is kept."""

import errno
import json
import os
from dataclasses import replace

import pytest

from bench_kit import CONFIG, HEADER, FakeEngine, FakeOpener, Told, prompt_sets
from ddtree.bench import runner
from ddtree.bench import sweep as sweep_module
from ddtree.bench.http_client import RequestRefusedError
from ddtree.bench.measure import Answer, figures
from ddtree.bench.plan import arms_of, one_server_at_a_time, plan_groups, request_seed
from ddtree.bench.run_format import CellKey, read_run
from ddtree.bench.runner import Plan, measure
from ddtree.config import Mode
from ddtree.errors import ConfigError, ContextLengthError, DDTreeError, ModelNotFoundError
from ddtree.trace.run_file import read_run as read_outputs

SETS = prompt_sets("one", "two")


def plan_of(config=CONFIG, done=()):
    arms = arms_of(config, lambda url: [runner.Arm(url, None)])
    header = replace(HEADER, settings={"max_tokens": config.max_tokens})
    groups = plan_groups(arms, config, done)
    is_one_at_a_time = config.servers_at_once == "one"
    if is_one_at_a_time:
        groups = one_server_at_a_time(groups)
    return Plan(config, SETS, header, tuple(arms), tuple(groups), len(done), is_one_at_a_time, ())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_every_cell_is_measured_and_on_disk(path):
    result = measure(plan_of(), path, FakeOpener())
    assert result.failures == ()
    assert len(result.run.cells) == 3 * 2 * 2
    read = read_run(path)
    assert read.cells == result.run.cells
    assert [len(cell.requests) for cell in read.cells.values()] == [3] * 12
    assert read.engines["embedded tree:4"] == {"version": "1", "dtype": "float32"}
    assert len(read.sessions) == 1


def test_the_embedded_arms_take_turns_prompt_by_prompt(path):
    opener = FakeOpener()
    measure(plan_of(replace(CONFIG, sets=("one",), repeats=1)), path, opener)
    timed = [(arm, texts) for arm, what, texts in opener.log if what == "run 8 T=0 c=1"]
    turns = [timed[n : n + 3] for n in range(0, len(timed), 3)]
    for number, turn in enumerate(turns):
        assert {texts for _, texts in turn} == {(f"one {number}" + "!" * number,)}
    assert [turn[0][0] for turn in turns] == ["embedded ar", "embedded chain", "embedded tree:4"]


def test_the_figures_of_an_arm_are_the_sum_of_its_turns(path):
    run = measure(plan_of(), path, FakeOpener()).run
    cell = run.cells[CellKey("embedded tree:4", "two", 1, 0.0, 1)]
    # Three requests of half a second and two rounds of two seconds each.
    assert cell.wall_s == pytest.approx(13.5)
    assert cell.accept_length == 3.5
    assert cell.peak_memory_bytes == 1 << 20


def test_a_server_gets_all_prompts_of_a_cell_at_once(path):
    config = replace(CONFIG, engines=("sglang",), concurrency=(1, 2), sets=("one",), repeats=1)
    opener = FakeOpener()
    measure(plan_of(config), path, opener)
    timed = [(what, len(texts)) for _, what, texts in opener.log if what.startswith("run 8")]
    assert timed == [("run 8 T=0 c=1", 3)] * 3 + [("run 8 T=0 c=2", 3)] * 3


def test_all_arms_of_a_group_are_up_before_one_is_timed(path):
    config = replace(CONFIG, engines=("embedded", "sglang"), modes=(Mode.AR,))
    opener = FakeOpener()
    measure(plan_of(config), path, opener)
    whats = [what for _, what, _ in opener.log]
    assert whats.count("open") == whats[: whats.index("flush")].count("open") == 2


def test_every_arm_is_warm_before_anything_is_timed_and_flushed_before_each_cell(path):
    opener = FakeOpener()
    config = replace(CONFIG, temperatures=(0.0, 0.5))
    measure(plan_of(config), path, opener)
    whats = [what for _, what, _ in opener.log]
    first = whats.index("flush")
    assert [(what, texts) for _, what, texts in opener.log[:first]] == [
        ("open", ()),
        *((f"run 2 T={t} c=1", ("one 0", "one 2!!")) for t in ("0", "0.5")),
    ] * 3
    assert not any(what.startswith("run 2") for what in whats[first:])
    assert whats.count("flush") == 3 * 2 * 2 * 2


def test_on_a_gpu_every_prompt_is_read_once_before_anything_is_timed(path):
    opener = FakeOpener()
    plan = plan_of()
    measure(replace(plan, header=replace(plan.header, device="NVIDIA H200")), path, opener)
    read = [texts for _, what, texts in opener.log if what == "run 1 T=0 c=1"]
    assert read == [("one 0", "one 1!", "one 2!!", "two 0", "two 1!", "two 2!!")] * 3


def test_a_warm_up_of_no_tokens_is_as_long_as_a_request(path):
    opener = FakeOpener()
    measure(plan_of(replace(CONFIG, warm_up_tokens=0)), path, opener)
    assert opener.log[1][1] == "run 8 T=0 c=1"


def test_rounds_are_watched_once_an_arm_set_and_temperature_and_not_timed(path):
    opener = FakeOpener()
    run = measure(plan_of(), path, opener).run
    watched = [(arm, texts) for arm, what, texts in opener.log if what == "observe"]
    assert len(watched) == len(set(watched)) == 6
    assert watched[0][1] == ("one 0", "one 1!")
    for key, cell in run.cells.items():
        assert cell.rank_histogram == (None if key.repeat else {"0": 5, "1": 2})
        assert cell.stages_ms == (None if key.repeat else {"draft": 0.25})


def test_no_rounds_are_watched_unless_asked(path):
    opener = FakeOpener()
    measure(plan_of(replace(CONFIG, rank_prompts=0)), path, opener)
    assert all(what != "observe" for _, what, _ in opener.log)


def test_each_prompt_has_its_seed_in_every_arm(path):
    opener = FakeOpener()
    measure(plan_of(replace(CONFIG, sets=("one",), repeats=1, seed=7)), path, opener)
    seeds = [request_seed(7, number) for number in range(3)]
    for engine in opener.engines.values():
        assert engine.seeds[-3:] == seeds


def test_a_killed_run_goes_on_where_it_stood(path):
    def kill(text):
        if text == "two 1!":
            raise KeyboardInterrupt

    opener = FakeOpener(on_run={"embedded tree:4": kill})
    with pytest.raises(KeyboardInterrupt):
        measure(plan_of(), path, opener)
    assert [what for _, what, _ in opener.log[-3:]] == ["close"] * 3
    kept = read_run(path).cells
    assert {key.prompt_set for key in kept} == {"one"}
    assert len(kept) == 3
    with path.open("ab") as file:
        file.write(b'{"type":"cell","arm":"emb')
    again = FakeOpener()
    run = measure(plan_of(done=set(kept)), path, again).run
    assert len(run.cells) == 12
    assert read_run(path).cells == run.cells
    assert {key: run.cells[key] for key in kept} == kept
    first_set = [texts for _, what, texts in again.log if what == "run 8 T=0 c=1" and texts[0][:3] == "one"]
    assert len(first_set) == 3 * 3  # of the second repeat
    assert len(read_run(path).sessions) == 2


def test_a_second_run_on_the_same_file_is_refused_and_harms_nothing(path, tmp_path):
    def second(text):
        if text == "one 1!" and not refusals:
            for output, outputs in ((path, None), (path, kept), (tmp_path / "other.jsonl", kept)):
                with pytest.raises(ConfigError, match="written by another ddtree bench: wait") as raised:
                    measure(plan_of(), output, FakeOpener(), outputs)
                refusals.append(str(raised.value))

    refusals, kept = [], tmp_path / "outputs.jsonl"
    measure(plan_of(), path, FakeOpener(on_run={"embedded chain": second}), kept)
    assert [refusal.split()[0] for refusal in refusals] == ["--output", "--output", "--outputs"]
    assert len(path.read_bytes().splitlines()) == 1 + 1 + 3 + 12  # header, session, engines, cells
    assert len(kept.read_bytes().splitlines()) == 36
    measure(plan_of(replace(CONFIG, repeats=3)), path, FakeOpener())  # the file is free again


def test_cells_that_another_run_measured_since_the_plan_are_not_measured_again(path):
    stale = plan_of()
    measure(plan_of(replace(CONFIG, repeats=1)), path, FakeOpener())
    run = measure(stale, path, FakeOpener()).run
    assert len(run.cells) == 12
    cells = [line for line in path.read_text().splitlines() if '"type":"cell"' in line]
    assert len(cells) == 12


def test_nothing_is_opened_where_nothing_is_left(path):
    measure(plan_of(), path, FakeOpener())
    before = path.read_bytes()
    opener = FakeOpener()
    done = set(read_run(path).cells)
    assert len(measure(plan_of(done=done), path, opener).run.cells) == 12
    assert opener.log == []
    assert path.read_bytes() == before


def test_an_engine_that_dies_is_told_and_the_others_go_on(path):
    def die(text):
        if text == "two 2!!":
            raise RuntimeError("CUDA error:\nout of memory\nmore")

    opener, told = FakeOpener(on_run={"embedded chain": die}), Told()
    result = measure(plan_of(), path, opener, reporter=told)
    assert len(result.failures) == 1
    assert result.failures[0].startswith("embedded chain, two, T=0, c=1, repeat 1: CUDA error: out of memory")
    assert result.failures[0] in told.messages
    assert len(result.run.cells) == 12 - 3
    assert read_run(path).engines["embedded chain"]["error"] == result.failures[0]
    assert read_run(path).engines["embedded chain"]["version"] == "1"
    assert next(arm for arm, what, _ in opener.log if what == "close") == "embedded chain"
    assert told.steps[-1][:2] == (36, 36)
    again = measure(plan_of(done=set(result.run.cells)), path, FakeOpener())
    assert len(again.run.cells) == 12
    assert "error" not in read_run(path).engines["embedded chain"]


def test_a_prompt_that_does_not_fit_costs_its_cells_and_no_others(path):
    def refuse(text):
        if text.startswith("two 1"):
            raise ContextLengthError("the prompt has 9 tokens")

    opener = FakeOpener(on_run={"embedded ar": refuse})
    result = measure(plan_of(), path, opener)
    assert len(result.failures) == 2
    missing = {CellKey("embedded ar", "two", 1, 0.0, repeat) for repeat in (0, 1)}
    assert {key for key in plan_keys() if key not in result.run.cells} == missing
    assert [arm for arm, what, _ in opener.log if what == "open"].count("embedded ar") == 1


def test_a_server_that_refuses_a_prompt_loses_the_cells_of_its_set_and_no_others(path):
    class Short(FakeEngine):
        def run(self, prompts, **options):
            if any(prompt[0]["content"] == "two 2!!" for prompt in prompts):  # the longest: in the warm-up
                raise RequestRefusedError("the prompt is longer than the context")
            return super().run(prompts, **options)

    opener = FakeOpener()
    opener.open = lambda arm: Short(arm, opener.log)
    result = measure(plan_of(replace(CONFIG, engines=("http://h:1/v1", "sglang"))), path, opener)
    assert {key.prompt_set for key in result.run.cells} == {"one"}
    assert len(result.run.cells) == 4 * 2
    assert len(result.failures) == 4 * 2
    assert all(", two, " in line and "longer than the context" in line for line in result.failures)


def test_a_server_that_refuses_a_prompt_of_every_set_is_told_at_its_start(path):
    def refuse(text):
        raise RequestRefusedError("no such model")

    with pytest.raises(RequestRefusedError, match="no such model"):
        measure(plan_of(), path, FakeOpener(on_run={"embedded ar": refuse}))


def plan_keys():
    return [group.key(arm) for group in plan_of().groups for arm in group.arms]


def test_an_engine_that_does_not_start_is_told_and_the_others_go_on(path):
    opener = FakeOpener(broken={"embedded chain": DDTreeError("the server ended with 1")})
    result = measure(plan_of(), path, opener)
    assert result.failures == ("embedded chain, start: the server ended with 1",)
    assert len(result.run.cells) == 8
    assert [arm for arm, what, _ in opener.log if what == "open"].count("embedded chain") == 1


def test_a_mistake_of_the_user_ends_a_run_that_has_measured_nothing(path):
    for error in (ConfigError("device='cuda'"), ModelNotFoundError("no such model")):
        opener = FakeOpener(broken={"embedded chain": error})
        with pytest.raises(type(error)):
            measure(plan_of(), path, opener)
        assert opener.log[-1] == ("embedded ar", "close", ())


def test_an_engine_that_answers_too_little_is_no_cell(path, monkeypatch):
    opener = FakeOpener()
    config = replace(CONFIG, engines=("sglang",), modes=(Mode.AR,), sets=("one",), repeats=1)

    class Short(type(FakeOpener().open(runner.Arm("sglang", Mode.AR)))):
        def run(self, prompts, **options):
            wall_s, answers = super().run(prompts, **options)
            return wall_s, answers[1:]

    monkeypatch.setattr(opener, "open", lambda arm: Short(arm, opener.log))
    result = measure(plan_of(config), path, opener)
    assert "2 answers came for 3 prompts" in result.failures[0]
    assert result.run.cells == {}


def test_one_server_is_up_at_a_time_where_asked(path):
    config = replace(CONFIG, engines=("embedded", "sglang"), servers_at_once="one")
    opener = FakeOpener()
    measure(plan_of(config), path, opener)
    up = set()
    for arm, what, _ in opener.log:
        up |= {arm} if what == "open" else set()
        up -= {arm} if what == "close" else set()
        assert sum(name.startswith("sglang") for name in up) <= 1
    assert [what for _, what, _ in opener.log].count("open") == 6


def test_a_full_disk_ends_the_run_in_one_error_and_closes_the_engines(path, monkeypatch):
    opener = FakeOpener()
    synced = []

    def full(number):
        synced.append(number)
        if len(synced) > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        measure(plan_of(), path, opener)
    assert [what for _, what, _ in opener.log[-3:]] == ["close"] * 3


def test_answers_are_checked_after_they_were_timed_and_each_text_once(path, monkeypatch):
    checked = []

    def check(prompt_set, prompt, text, *, run_code):
        checked.append((prompt_set, prompt.id, text, run_code))
        return prompt.id.endswith("1")

    monkeypatch.setattr(sweep_module, "check_answer", check)
    run = measure(plan_of(replace(CONFIG, run_code=True)), path, FakeOpener()).run
    assert len(checked) == len(set(checked)) == 6
    assert checked[0] == ("one", "one/0", "answer to one 0", True)
    for cell in run.cells.values():
        assert [request.is_correct for request in cell.requests] == [False, True, False]


def test_answers_that_cannot_be_checked_cost_no_figure(path, monkeypatch):
    def check(*_, run_code):
        raise DDTreeError("no sandbox here")

    monkeypatch.setattr(sweep_module, "check_answer", check)
    result = measure(plan_of(), path, FakeOpener())
    assert len(result.run.cells) == 12
    assert result.failures == tuple(f"answers of {name} are not checked: no sandbox here" for name in SETS)


class FakeMeter:
    """Each request of an arm takes 10 joules, reading the meter none."""

    def __init__(self, opener):
        self.opener = opener

    def joules(self):
        return 10.0 * sum(len(texts) for _, what, texts in self.opener.log if what.startswith("run"))


def test_energy_is_of_the_timed_requests_of_an_arm_and_of_no_server_elsewhere(path, monkeypatch):
    config = replace(CONFIG, engines=("embedded", "http://h:1/v1"), modes=(Mode.AR,))
    opener = FakeOpener()
    monkeypatch.setattr(runner, "_meter", lambda config, header: FakeMeter(opener))
    run = measure(plan_of(config), path, opener).run
    for key, cell in run.cells.items():
        assert cell.energy_j == (30.0 if key.arm == "embedded ar" else None)


def test_a_stretch_too_short_for_the_counter_has_no_energy(path, monkeypatch):
    opener = FakeOpener()
    monkeypatch.setattr(runner, "_meter", lambda config, header: FakeMeter(opener))
    monkeypatch.setattr(sweep_module, "LEAST_ENERGY_S", 7.6)  # a request of plain decoding takes 7.5 s
    run = measure(plan_of(replace(CONFIG, modes=(Mode.AR,))), path, opener).run
    assert {cell.energy_j for cell in run.cells.values()} == {None}


def test_outputs_are_kept_for_replay(path, tmp_path):
    outputs = tmp_path / "outputs.jsonl"
    measure(plan_of(replace(CONFIG, temperatures=(0.5,), seed=3)), path, FakeOpener(), outputs)
    read = read_outputs(outputs)
    assert len(read.answers) == 36
    assert (read.target, read.dtype, read.order) == ({"name": "tiny"}, "float32", "embedded")
    assert {(each.mode, each.node_budget) for each in read.answers} == {
        ("ar", None),
        ("chain", None),
        ("tree", 4),
    }
    first = read.answers[0].output
    assert bytes(first.prompt) == b"one 0"
    assert list(first.tokens) == list(range(8))
    assert first.sampling == {"temperature": 0.5, "max_tokens": 8, "seed": request_seed(3, 0)}
    assert first.finish == {"type": "length"}


def test_outputs_of_several_engines_go_to_a_file_each(path, tmp_path):
    config = replace(CONFIG, engines=("embedded", "sglang", "http://h:1/v1"), modes=(Mode.AR,))
    measure(plan_of(config), path, FakeOpener(), tmp_path / "o.jsonl")
    assert read_outputs(tmp_path / "o-embedded.jsonl").order == "embedded"
    assert read_outputs(tmp_path / "o-sglang.jsonl").order == "sglang"
    assert read_outputs(tmp_path / "o-h-1.jsonl").answers
    assert not (tmp_path / "o.jsonl").exists()


def test_outputs_without_token_ids_are_counted(path, tmp_path, monkeypatch):
    opener = FakeOpener()
    monkeypatch.setattr(
        "bench_kit.FakeEngine._answer",
        lambda engine, text, max_tokens: Answer(None, "text", 1, 2, "stop", 0.0, None, 1.0),
    )
    outputs = tmp_path / "outputs.jsonl"
    assert measure(plan_of(), path, opener, outputs).num_left_out == 36
    assert outputs.read_bytes() == b""


def test_outputs_of_another_run_are_not_added_to(path, tmp_path):
    outputs = tmp_path / "outputs.jsonl"
    outputs.write_text("mine\n")
    opener = FakeOpener()
    with pytest.raises(ConfigError, match=r"outputs=.*outputs.jsonl.*name another file"):
        measure(plan_of(), path, opener, outputs)
    assert outputs.read_text() == "mine\n"
    assert opener.log == []
    with pytest.raises(ConfigError, match="another file than the run's"):
        measure(plan_of(), path, opener, path)


def test_outputs_of_a_resumed_run_go_on_behind_a_torn_line(path, tmp_path):
    outputs = tmp_path / "outputs.jsonl"
    measure(plan_of(replace(CONFIG, repeats=1)), path, FakeOpener(), outputs)
    with outputs.open("ab") as file:
        file.write(b'{"prompt_tok')
    measure(plan_of(done=set(read_run(path).cells)), path, FakeOpener(), outputs)
    lines = [json.loads(line) for line in outputs.read_text().splitlines()]
    assert [line["repeat"] for line in lines] == [0] * 18 + [1] * 18


@pytest.mark.parametrize("num_cells", [0, 1, 2, 7])
@pytest.mark.parametrize("engines", [("embedded",), ("embedded", "sglang")])
def test_a_crash_between_outputs_and_cell_doubles_no_outputs(path, tmp_path, monkeypatch, num_cells, engines):
    """The outputs are on disk by then, and the cell's line is not."""
    config = replace(CONFIG, engines=engines)

    def crash(*arguments):
        if made.append(arguments) or len(made) > num_cells:
            raise KeyboardInterrupt
        return figures(*arguments)

    made, outputs = [], tmp_path / "outputs.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(sweep_module, "figures", crash)
        with pytest.raises(KeyboardInterrupt):
            measure(plan_of(config), path, FakeOpener(), outputs)
    assert len(read_run(path).cells) == num_cells
    assert sum(len(file.read_bytes().splitlines()) for file in tmp_path.glob("out*")) == 3 * (num_cells + 1)
    run = measure(plan_of(config, done=set(read_run(path).cells)), path, FakeOpener(), outputs).run
    lines = [json.loads(line) for file in tmp_path.glob("out*") for line in file.read_text().splitlines()]
    fields = ("engine", "mode", "prompt_set", "repeat", "prompt_tokens")
    kept = [tuple(str(line[name]) for name in fields) for line in lines]
    assert len(kept) == len(set(kept)) == 3 * len(run.cells) == 36 * len(engines)


def test_a_run_that_goes_on_does_not_add_to_the_outputs_of_another(path, tmp_path):
    outputs, other = tmp_path / "outputs.jsonl", tmp_path / "other.jsonl"
    measure(plan_of(replace(CONFIG, repeats=1)), path, FakeOpener(), outputs)
    measure(plan_of(replace(CONFIG, repeats=1)), other, FakeOpener())
    before = outputs.read_bytes()
    with pytest.raises(ConfigError, match="of something else: name another file"):
        measure(plan_of(done=set(read_run(other).cells)), other, FakeOpener(), outputs)
    assert outputs.read_bytes() == before


def test_progress_counts_every_request_once(path):
    told = Told()
    measure(plan_of(), path, FakeOpener(), reporter=told)
    done = [step[0] for step in told.steps]
    assert done == sorted(done)
    assert told.steps[-1][:2] == (36, 36)
    assert "one, T=0, c=1, repeat 1: embedded ar" in [step[2] for step in told.steps]
