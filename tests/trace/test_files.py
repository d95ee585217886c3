"""Whole files replayed and compared against a tiny target, texts included."""

import copy
import dataclasses

import pytest
import torch

from compare_kit import write_outputs
from ddtree.config import Mode, SamplingParams
from ddtree.engine.request import Request
from ddtree.errors import ConfigError
from ddtree.trace import files
from ddtree.trace.files import ReplayOptions, compare_files, replay_file
from ddtree.trace.record import TraceRecorder
from ddtree.trace.replay import Replayer
from ddtree.trace.text import accept_rows, compare_lines, replay_lines
from ddtree.trace_format import Detail
from ddtree.tree.noise import keyed_gumbel
from engine_kit import VOCAB_SIZE, scripted_engine, tiny_target
from tiny_models import tiny_llama

PROMPTS = [tuple(range(40, 60)), tuple(range(30, 45))]
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.2, seed=5)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def traces(model, tmp_path_factory):
    """A trace of both prompts, greedy and sampled, in each mode."""
    folder = tmp_path_factory.mktemp("traces")
    target = tiny_target(folder / "target", model)
    for mode in Mode:
        for prompt in PROMPTS:
            engine = scripted_engine(target, GREEDY, prompt)
            with TraceRecorder(folder / f"{mode}-{prompt[0]}", Detail.FULL) as recorder:
                for sampling in (GREEDY, SAMPLED):
                    recorder.generate(
                        engine, Request(prompt, sampling, mode, 12 if mode == "tree" else "auto")
                    )
    return folder


@pytest.fixture
def load(model, monkeypatch):
    monkeypatch.setattr(files, "check_target", lambda run, model: None)
    return lambda name, dtype: Replayer(model, (), noise=keyed_gumbel)


@pytest.mark.parametrize("mode", Mode)
def test_traces_of_every_mode_replay(traces, load, mode):
    report = replay_file(traces / f"{mode}-40", ReplayOptions(), load)
    assert (report.model, report.dtype, report.eps_source) == ("tiny", "float32", "float32")
    assert (report.judged.num_outputs, report.judged.num_tokens) == (2, 48)
    assert report.judged.is_lossless
    assert report.judged.max_gap < 1e-4
    assert report.judged.num_planted_found == report.judged.num_planted == 2
    assert list(replay_lines(report))[-1] == "every token is the target's own choice"


@pytest.mark.parametrize("prompt", ["40", "30"])
def test_traces_of_all_modes_compare_equal(traces, load, prompt):
    for mode in ("chain", "tree"):
        made = compare_files(traces / f"ar-{prompt}", traces / f"{mode}-{prompt}", ReplayOptions(), load)
        assert (made.num_equal, made.num_compared, made.findings) == (2, 2, [])
        assert not made.is_like_for_like
    again = compare_files(traces / f"tree-{prompt}", traces / f"tree-{prompt}", ReplayOptions())
    assert again.trees.compared > 3
    assert again.findings == []


def test_plain_runs_have_neither_trees_nor_accept_lengths(traces, load):
    made = compare_files(traces / "ar-40", traces / "ar-40", ReplayOptions(), load)
    assert (made.num_equal, made.trees, made.acceptance, made.notes) == (2, None, (None, None), [])
    text = "\n".join(compare_lines(made))
    assert "trees" not in text
    assert "accept" not in text
    assert accept_rows(made) == []
    other = compare_files(traces / "ar-40", traces / "tree-40", ReplayOptions(), load)
    assert other.acceptance[0].accept_length == 1.0 < other.acceptance[1].accept_length


def outputs_of(traces, **changes):
    """The greedy output of the tree trace as a line of an outputs file."""
    from ddtree.trace.run_file import read_run

    output = read_run(traces / "tree-40").answers[0].output
    return {"prompt_tokens": list(output.prompt), "tokens": list(output.tokens),
            "sampling": {"temperature": 0, "max_tokens": 24}, "finish_reason": "length",
            "dtype": "float32", "model": "tiny"} | changes  # fmt: skip


def test_a_wrong_token_in_an_outputs_file_is_told(traces, load, tmp_path):
    row = outputs_of(traces)
    row["tokens"][9] = (row["tokens"][9] + 1) % VOCAB_SIZE
    report = replay_file(write_outputs(tmp_path / "o", [outputs_of(traces), row]), ReplayOptions(), load)
    assert not report.judged.is_lossless
    text = "\n".join(replay_lines(report))
    assert f"WRONG, line 2: token 9 (position 29) is {row['tokens'][9]}, the target says" in text
    assert report.to_json()["violations"][0]["index"] == 9


def test_a_divergence_is_judged_by_the_target(traces, load, tmp_path):
    row = outputs_of(traces)
    row["tokens"][9] = (row["tokens"][9] + 1) % VOCAB_SIZE
    right, wrong = write_outputs(tmp_path / "a", [outputs_of(traces)]), write_outputs(tmp_path / "b", [row])
    made = compare_files(right, wrong, ReplayOptions(model="tiny"), load)
    (parted,) = made.divergences
    assert (parted.index, parted.verdict, parted.gap_a) == (9, "difference", pytest.approx(0, abs=1e-4))
    assert parted.gap_b > 1e-2
    assert "B misses the target's choice by" in parted.reason
    assert list(compare_lines(made))[-1] == "the runs differ: 1 finding"
    lenient = compare_files(right, wrong, ReplayOptions(model="tiny", eps=parted.gap_b * 1.1), load)
    assert [found.verdict for found in lenient.divergences] == ["tie"]
    undecided = compare_files(right, wrong, ReplayOptions())
    assert [found.verdict for found in undecided.divergences] == ["undecided"]
    assert "whether the runs differ is not decided in 1 place" in list(compare_lines(undecided))


def test_a_sampled_divergence_is_judged_by_its_noise(traces, load, tmp_path):
    from ddtree.trace.run_file import read_run

    output = read_run(traces / "tree-40").answers[1].output
    row = {"prompt_tokens": list(output.prompt), "tokens": list(output.tokens), "engine": "embedded",
           "sampling": dict(output.sampling), "dtype": "float32"}  # fmt: skip
    other = row | {"tokens": [*output.tokens[:6], (output.tokens[6] + 1) % VOCAB_SIZE, *output.tokens[7:]]}
    paths = write_outputs(tmp_path / "a", [row]), write_outputs(tmp_path / "b", [other])
    (parted,) = compare_files(*paths, ReplayOptions(model="tiny"), load).divergences
    assert (parted.index, parted.verdict) == (6, "difference")
    assert parted.gap_a < 1e-3 < parted.gap_b


# -- how much is rounding --------------------------------------------------------------------------


def test_16_bits_need_to_be_told_how_much_is_rounding(traces, load, tmp_path, model):
    path = write_outputs(tmp_path / "o", [outputs_of(traces, dtype="float16")])
    with pytest.raises(ConfigError, match="how much is rounding in float16"):
        replay_file(path, ReplayOptions(), load)
    assert replay_file(path, ReplayOptions(eps=0.5), load).judged.eps == 0.5
    row = near_tie(model, outputs_of(traces))
    report = replay_file(path, ReplayOptions(eps_from=write_outputs(tmp_path / "plain", [row])), load)
    assert 0.03125 < report.judged.eps < 4
    assert report.eps_source.startswith("twice the largest gap of")


@pytest.mark.parametrize(("dtype", "floor"), [("float32", 1e-3), ("bfloat16", 0.25), ("float16", 0.03125)])
def test_plain_outputs_without_a_near_tie_give_the_least_gap_of_the_format(
    traces, load, tmp_path, dtype, floor
):
    row = outputs_of(traces, dtype=dtype)
    wrong = row | {"tokens": [*row["tokens"][:9], (row["tokens"][9] + 1) % VOCAB_SIZE, *row["tokens"][10:]]}
    plain = write_outputs(tmp_path / "plain", [row])
    report = replay_file(write_outputs(tmp_path / "o", [row, wrong]), ReplayOptions(eps_from=plain), load)
    assert report.judged.eps == floor
    assert report.eps_source.startswith(f"the least in {dtype}, since the largest gap of")
    paths = plain, write_outputs(tmp_path / "wrong", [wrong])
    assert compare_files(*paths, ReplayOptions(model="tiny", eps_from=plain), load).eps == floor


def test_wrong_tokens_of_a_16_bit_replay_are_judged_in_float32(traces, load, tmp_path, model):
    row = outputs_of(traces, dtype="bfloat16")
    wrong = row | {"tokens": [*row["tokens"][:9], (row["tokens"][9] + 1) % VOCAB_SIZE, *row["tokens"][10:]]}
    coarse = copy.deepcopy(model)
    with torch.no_grad():
        coarse.lm_head.weight.add_(torch.randn_like(coarse.lm_head.weight))
    replayers = {"bfloat16": Replayer(coarse, ()), "float32": Replayer(model, ())}
    options = ReplayOptions(eps=0.01)
    report = replay_file(write_outputs(tmp_path / "o", [row]), options, lambda name, dtype: replayers[dtype])
    assert report.is_clean
    assert report.judged.max_gap > 0.01
    assert report.judged.rounded
    assert any(line.startswith("rounding of the replay, line 1: token") for line in replay_lines(report))

    both = write_outputs(tmp_path / "both", [row, wrong])
    judged = replay_file(both, options, lambda name, dtype: replayers[dtype]).judged
    assert {name for name, _ in judged.violations} == {"line 2"}
    assert judged.violations[0][1].index == 9

    def no_room(name, dtype):
        if dtype == "float32":
            raise torch.OutOfMemoryError
        return replayers[dtype]

    assert not replay_file(tmp_path / "o", options, no_room).judged.is_lossless


def test_a_files_own_plain_outputs_calibrate_it(traces, load, tmp_path, model):
    row = near_tie(model, outputs_of(traces, mode="ar", dtype="float16"))
    report = replay_file(
        write_outputs(tmp_path / "o", [row, outputs_of(traces, mode="tree", dtype="float16")]),
        ReplayOptions(), load,
    )  # fmt: skip
    assert report.judged.is_lossless
    assert report.judged.eps == pytest.approx(2 * report.judged.max_gap)


def near_tie(model, row):
    """The row with its last token the second best."""
    with torch.inference_mode():
        logits = model(torch.tensor([row["prompt_tokens"] + row["tokens"][:-1]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert best - second < 2
    return row | {"tokens": [*row["tokens"][:-1], int(logits.topk(2).indices[1])]}


# -- texts -----------------------------------------------------------------------------------------


class Pairs:
    """A token is a letter, or a pair of the same letters, of which the tokenizer prefers pairs."""

    def encode(self, text, *, add_special_tokens=True):
        tokens, place = [], 0
        while place < len(text):
            is_pair = text[place : place + 1] == text[place + 1 : place + 2]
            tokens.append(ord(text[place]) - 96 + (26 if is_pair else 0))
            place += 1 + is_pair
        return tokens

    def decode(self, tokens, *, skip_special_tokens=False):
        return "".join(chr(96 + t) if t <= 26 else chr(70 + t) * 2 for t in tokens)


def test_a_text_is_read_as_the_target_would_have_written_it(model, load, tmp_path, monkeypatch):
    pairs = Pairs()
    model = tiny_llama(seed=3, vocab_size=53)
    with torch.inference_mode():
        tokens = [1, 2, 3]
        for _ in range(40):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            logits[0] = -torch.inf
            tokens.append(int(logits.argmax()))
    own, text = tokens[3:], pairs.decode(tokens[3:])
    bias = {"0": -1e9}
    row = {"prompt_tokens": [1, 2, 3], "text": text, "sampling": {"temperature": 0, "logit_bias": bias}}
    monkeypatch.setattr(ReplayOptions, "tokenizer", lambda self: pairs)
    options = ReplayOptions(model="tiny", dtype="float32")

    def replayed(row):
        return replay_file(write_outputs(tmp_path / "o", [row]), options, lambda *_: Replayer(model, ()))

    assert pairs.encode(text) != own  # or the test would show nothing
    assert replayed(row).judged.is_lossless
    other = "z" if text[20] != "z" else "y"
    assert not replayed(row | {"text": text[:20] + other + text[21:]}).judged.is_lossless


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({"model": None}, {}, "name it with --model"),
        ({"dtype": None}, {}, "give --dtype"),
        ({"tokens": [1, 999]}, {}, "the token 999 is not the target's"),
        ({"sampling": {"temperature": 1.0}}, {}, "line 1 was sampled without a seed"),
        (
            {"sampling": {"temperature": 0, "regex": "a"}, "engine": "embedded"},
            {},
            "has regex, which",
        ),
        ({"sampling": {"temperature": 0, "logit_bias": {"300": 1}}}, {}, "the token 300"),
    ],
)
def test_what_cannot_be_replayed_is_refused(traces, load, tmp_path, changes, options, told):
    row = {name: value for name, value in outputs_of(traces, **changes).items() if value is not None}
    with pytest.raises(ConfigError, match=told):
        replay_file(write_outputs(tmp_path / "o", [row]), ReplayOptions(**options), load)


def test_options_that_exclude_each_other_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="both given"):
        ReplayOptions(eps=0.1, eps_from=tmp_path)
    with pytest.raises(ConfigError, match="above 0"):
        ReplayOptions(eps=0.0)


def test_another_checkpoint_than_the_traces_is_refused(traces, tmp_path):
    from ddtree.trace.run_file import read_run

    other = tmp_path / "other"
    tiny_llama(seed=1, vocab_size=VOCAB_SIZE).save_pretrained(other)
    run = read_run(traces / "ar-40")
    run = dataclasses.replace(run, target={"name": "x", "folder_sha256": "0123456789abcdef"})
    with pytest.raises(ConfigError, match="checksum 0123456789ab"):
        files.check_target(run, str(other))
    own = files.checkpoint_sha256(other)
    files.check_target(dataclasses.replace(run, target={"name": "x", "folder_sha256": own}), str(other))
