"""Tuning within its time: every plan looked at, contenders halved, small trees told of by large ones."""

from collections import Counter
from types import SimpleNamespace

import pytest

from ddtree.bench.tune import LOOK_ROUNDS, Text, Tuner, encode_texts, load_prompts, recommend_tuned
from ddtree.config import EngineConfig, Mode
from ddtree.errors import ConfigError
from ddtree.stats import GenerationStats, RoundStats
from ddtree.tree.budget_cost import PLAIN, DraftPlan
from ddtree.tree.recommend import advise
from ddtree.tune_config import TuneConfig
from engine_kit import real_engine

CHAIN = DraftPlan(Mode.CHAIN, 7)
TEXTS = [Text(f"t{i}", (1, 2, 3, i)) for i in range(12)]
# Correct drafts of one round after another, as best-first numbers of the path's nodes.
PATHS = ((0, 1, 2), (0, 1), (0, 1, 3, 9), (0, 5), (0,), (0, 1, 2, 4, 12, 20))


def tree(budget):
    return DraftPlan(Mode.TREE, budget)


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


class FakeEngine:
    """Rounds follow `PATHS` from a place that the prompt gives; each takes its plan's time on the clock."""

    def __init__(self, clock, round_s, first_round_s=0.0, prefill_s=0.0, max_rounds=1000):
        self.clock, self.round_s, self.first_round_s = clock, round_s, first_round_s
        self.prefill_s, self.max_rounds = prefill_s, max_rounds
        self.pair = SimpleNamespace(block_size=8)
        self.config, self.device, self.max_context_tokens = EngineConfig(), "cpu", 256
        self.run_ct = Counter()
        self.on_round = lambda: None

    def encode(self, prompt):
        return tuple(prompt.encode())

    def stream(self, request):
        return FakeStream(self, request)


class FakeStream:
    def __init__(self, engine, request):
        self.engine, self.request, self.stats = engine, request, GenerationStats()
        is_tree = request.mode is Mode.TREE
        self.plan = tree(request.node_budget) if is_tree else PLAIN if request.mode is Mode.AR else CHAIN

    def result(self):
        return SimpleNamespace(stats=self.stats)

    def __iter__(self):
        engine = self.engine
        engine.clock.now_s += engine.prefill_s
        yield
        place, tokens = sum(self.request.prompt_tokens), 1
        for _ in range(engine.max_rounds):
            if tokens >= self.request.sampling.max_tokens:
                break
            engine.on_round()
            path = self.path(PATHS[place % len(PATHS)])
            round_s = engine.round_s[self.plan] + (0 if engine.run_ct[self.plan] else engine.first_round_s)
            engine.clock.now_s += round_s
            engine.run_ct[self.plan] += 1
            self.stats.decode_s += round_s
            place, tokens = place + 1, tokens + len(path)
            self.request.observer.on_round(RoundStats(
                self.plan.mode, self.plan.node_budget, 0, 0, tuple(path), round_s * 1e3, accept_indices=path
            ))  # fmt: skip
            yield

    def path(self, whole):
        if self.plan.mode is Mode.AR:
            return (0,)
        budget = 2 if self.plan.mode is Mode.CHAIN else self.plan.node_budget
        return tuple(index for index in whole if index <= budget)


def tuner_of(round_s, seconds=20.0, budgets=(2, 4, 8, 16, 32), texts=TEXTS, **options):
    clock = Clock()
    engine = FakeEngine(clock, round_s, **options)
    config = TuneConfig(seconds=seconds, budgets=budgets, max_tokens=48)
    return Tuner(engine, texts, config, clock=clock)


def times(**changes):
    """Round times that grow slowly with the budget."""
    made = {PLAIN: 0.010, CHAIN: 0.012} | {tree(b): 0.012 + b * 0.0001 for b in (2, 4, 8, 16, 32)}
    return made | {tree(int(name[1:])): value for name, value in changes.items()}


def test_the_time_is_kept_and_used():
    tuner = tuner_of(times())
    tuner.run()
    assert 20.0 <= tuner.spent_s <= 20.0 + 0.02
    assert all(tuner.looks.values())


def test_a_slow_machine_runs_over_by_the_first_looks_only():
    slow = {plan: 100 * value for plan, value in times().items()}
    tuner = tuner_of(slow, seconds=5.0)
    tuner.run()
    least = LOOK_ROUNDS * sum(slow.values())
    assert tuner.spent_s <= 5.0 + least
    assert all(looks[0].rounds >= LOOK_ROUNDS for looks in tuner.looks.values())


def test_the_fastest_tree_is_found():
    advice = advise(tuner_of(times()).run())
    assert advice.plan == tree(16)
    assert advice.is_certain
    # 17 tokens of six rounds against 12 of the chain's, at 13.6 and 12 ms.
    assert advice.chosen.over_chain.value == pytest.approx(17 / 12 * 12 / 13.6, rel=0.01)


def test_a_planted_slow_arm_is_not_advised_and_gets_no_more_time():
    tuner = tuner_of(times(b16=0.050))
    advice = advise(tuner.run())
    assert advice.plan != tree(16)
    assert len(tuner.looks[tree(16)]) == 1
    assert len(tuner.looks[advice.plan]) > 10


def test_trees_beyond_two_that_are_far_behind_are_not_looked_at():
    tuner = tuner_of(times(b4=0.5, b8=0.5))
    assert advise(tuner.run()).plan == CHAIN
    assert [plan for plan, looks in tuner.looks.items() if not looks] == [tree(16), tree(32)]
    assert "not measured: tree:16, tree:32, since smaller trees were far behind already" in tuner.notes()


def test_a_slow_machine_decodes_shorter_answers_of_more_texts():
    fast, slow = tuner_of(times()), tuner_of({plan: 4 * value for plan, value in times().items()})
    fast.run()
    slow.run()
    assert (
        max(look.tokens for look in slow.looks[CHAIN][1:])
        <= 30
        < max(look.tokens for look in fast.looks[CHAIN])
    )
    assert len({look.text for look in slow.looks[CHAIN]}) >= 6


def test_drafting_that_never_pays_gives_plain_decoding():
    assert advise(tuner_of(dict.fromkeys(times(), 0.1) | {PLAIN: 0.01}).run()).plan == PLAIN


def test_time_goes_to_few_plans_in_the_end():
    tuner = tuner_of(times(), seconds=60.0)
    tuner.run()
    counts = {plan: len(looks) for plan, looks in tuner.looks.items()}
    finalists = [plan for plan in counts if counts[plan] >= max(counts.values()) - 1]
    assert {PLAIN, CHAIN, tree(16)} < set(finalists)
    assert len(finalists) == 4
    assert counts[tree(2)] < counts[tree(16)] / 2


def test_texts_that_a_tree_did_not_decode_are_told_by_larger_trees():
    tuner = tuner_of(times(b8=0.050))
    found = {measured.plan: measured for measured in tuner.run()}[tree(8)]
    own = {(look.text, look.repeat) for look in tuner.looks[tree(8)]}
    told = [trial for trial in found.trials if (trial.text, trial.repeat) not in own]
    assert told
    seen = {(look.text, look.repeat): look for look in tuner.looks[tree(16)]}
    for trial in told:
        look = seen.get((trial.text, trial.repeat))
        if look:
            assert trial.tokens == look.nested_tokens[8]
            assert trial.seconds == pytest.approx(look.rounds * 0.050)


def test_nested_budgets_are_counted_by_the_nodes_numbers():
    tuner = tuner_of(times())
    tuner.run()
    look = tuner.looks[tree(32)][0]
    assert set(look.nested_tokens) == {2, 4, 8, 16}
    place = sum(TEXTS[0].tokens)
    paths = [PATHS[(place + i) % len(PATHS)] for i in range(look.rounds)]
    assert look.nested_tokens[4] == sum(sum(index <= 4 for index in path) for path in paths)
    assert look.tokens == sum(map(len, paths))


def test_a_first_round_that_compiles_does_not_count():
    tuner = tuner_of(times(), first_round_s=1.0)
    advice = advise(tuner.run())
    assert advice.plan == tree(16)
    assert tuner.looks[tree(16)][0].num_slow == 1
    assert tuner.looks[tree(16)][0].seconds == pytest.approx(tuner.looks[tree(16)][0].rounds * 0.0136)
    assert any("7 rounds took over 4 times the usual" in note for note in tuner.notes())


def test_ctrl_c_gives_the_answer_so_far():
    tuner = tuner_of(times())

    def on_round():
        if tuner.spent_s > 9.0:
            raise KeyboardInterrupt

    tuner.engine.on_round = on_round
    assert advise(tuner.run()).plan == tree(16)
    assert tuner.is_interrupted
    assert 9.0 < tuner.spent_s < 9.1
    assert "stopped early: this is from what was measured so far" in tuner.notes()


def test_ctrl_c_during_the_first_looks_names_what_was_not_measured():
    tuner = tuner_of(times())

    def on_round():
        if tuner.looks[CHAIN]:
            raise KeyboardInterrupt

    tuner.engine.on_round = on_round
    assert [found.plan for found in tuner.run()] == [PLAIN, CHAIN]
    assert "not measured: tree:2, tree:4, tree:8, tree:16, tree:32" in tuner.notes()


def test_ctrl_c_before_anything_ends_it():
    tuner = tuner_of(times())

    def on_round():
        raise KeyboardInterrupt

    tuner.engine.on_round = on_round
    with pytest.raises(KeyboardInterrupt):
        tuner.run()


def test_texts_that_end_at_once_are_refused():
    tuner = tuner_of(times(), prefill_s=1.0, max_rounds=0)
    with pytest.raises(ConfigError, match="ended with their first token"):
        tuner.run()


def test_equal_seeds_and_times_give_equal_looks():
    runs = []
    for _ in range(2):
        tuner = tuner_of(times())
        tuner.run()
        runs.append(tuner.looks)
    assert runs[0] == runs[1]


def test_progress_never_falls_or_exceeds_the_time():
    tuner, seen = tuner_of(times()), []
    tuner.on_progress = lambda done, total, text: seen.append((done, total, text))
    tuner.run()
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert all(0 <= done <= total == 20.0 for done, total, _ in seen)
    assert {"ar", "chain", "tree:16"} <= {text for _, _, text in seen}


def test_the_recommendation_of_a_calibration():
    tuner = tuner_of(times())
    made = recommend_tuned(tuner, tuner.run())
    group = made.groups[0]
    assert (made.device, group.engine, group.plan, group.is_sglang) == ("cpu", "embedded", tree(16), False)
    assert group.times[0].error < 0.05
    assert any("rounds on" in note for note in group.notes)


def test_a_real_engine_of_random_weights(tmp_path):
    engine = real_engine(tmp_path, 256)
    texts = [Text(f"t{i}", tuple(range(i + 1, i + 9))) for i in range(6)]
    config = TuneConfig(seconds=1.0, budgets=(2, 8), max_tokens=24, temperature=1.0)
    tuner = Tuner(engine, texts, config)
    found = {measured.plan: measured for measured in tuner.run()}
    assert set(found) == {PLAIN, CHAIN, tree(2), tree(8)}
    assert all(1 <= measured.accept_length.value <= 8 for measured in found.values())
    assert not engine.lock.locked()


def test_prompts_are_taken_set_by_set_and_long_ones_left_out(tmp_path):
    for name, words in (("a", ("x", "y" * 300)), ("b", ("z", "w"))):
        rows = "".join(f'{{"id": "{name}{i}", "prompt": "{word}"}}\n' for i, word in enumerate(words))
        (tmp_path / f"{name}.jsonl").write_text(rows)
    paths = tuple(str(tmp_path / f"{name}.jsonl") for name in "ab")
    config = TuneConfig(sets=paths, max_tokens=8)
    engine = FakeEngine(Clock(), {})
    texts = encode_texts(engine, load_prompts(config), config)
    assert sorted(bytes(text.tokens).decode() for text in texts) == ["w", "x", "z"]
    assert len({text.name for text in texts}) == 3
    engine.max_context_tokens = 8
    with pytest.raises(ConfigError, match="leaves room for --max-tokens 8"):
        encode_texts(engine, load_prompts(config), config)


@pytest.mark.parametrize("change", [
    {"seconds": 0}, {"seconds": float("nan")}, {"budgets": ()}, {"budgets": (0,)}, {"budgets": (8, 8)},
    {"budgets": (2000,)}, {"sets": ()}, {"sets": ("",)}, {"max_tokens": 7}, {"temperature": -1},
    {"seed": 1 << 63},
])  # fmt: skip
def test_settings_that_are_not_allowed(change):
    with pytest.raises(ConfigError, match="is not allowed"):
        TuneConfig(**change)
