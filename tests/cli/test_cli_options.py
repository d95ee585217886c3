"""Flags are the fields of the settings classes: names, defaults, values, refusals."""

from dataclasses import fields

import pytest

from ddtree.cli.main import run
from ddtree.config import Dtype, EngineConfig, SamplingParams


def test_defaults_are_those_of_the_settings_classes(command, engine):
    assert command("generate", "Hi")[0] == 0
    assert engine.config == EngineConfig()
    assert engine.requests[0].sampling == SamplingParams()
    assert engine.requests[0].node_budget == "auto"


def test_every_sampling_flag_reaches_the_request(command, engine):
    flags = {
        "--max-tokens": "7", "--temperature": "0.5", "--top-k": "5", "--top-p": "0.9", "--min-p": "0.1",
        "--repetition-penalty": "1.5", "--presence-penalty": "-1", "--frequency-penalty": "0.25",
        "--logit-bias": "0=-2.5", "--seed": "-3", "--stop": "\n", "--stop-token-id": "0",
    }  # fmt: skip
    arguments = [part for pair in flags.items() for part in pair]
    code, _, err = command(
        "generate", "Hi", *arguments, "--logit-bias", "42=1e1", "--stop", "b", "--ignore-eos"
    )
    assert (code, "Error" in err) == (0, False)
    expected = SamplingParams(
        max_tokens=7, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.5,
        presence_penalty=-1.0, frequency_penalty=0.25, logit_bias={0: -2.5, 42: 10.0}, seed=-3,
        stop=("\n", "b"), stop_token_ids=(0,), ignore_eos=True,
    )  # fmt: skip
    assert engine.requests[0].sampling == expected
    untouched = SamplingParams()
    assert all(getattr(expected, f.name) != getattr(untouched, f.name) for f in fields(SamplingParams))


def test_every_engine_flag_reaches_the_engine(command, engine):
    arguments = [
        "--model", "m", "--drafter", "d", "--device", "cuda:1", "--dtype", "bfloat16", "--threads", "3",
        "--max-context", "64", "--candidate-topk", "9", "--no-cuda-graphs",
    ]  # fmt: skip
    assert command("generate", "Hi", *arguments)[0] == 0
    expected = EngineConfig("m", "d", "cuda:1", Dtype.BFLOAT16, 3, 64, 9, False)
    assert engine.config == expected
    assert all(getattr(expected, f.name) != getattr(EngineConfig(), f.name) for f in fields(EngineConfig))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--mode", "trie"], "trie"),
        (["--dtype", "int3"], "int3"),
        (["--budget", "0"], "--budget='0' is not allowed: a whole number from 1 to 1024"),
        (["--budget", "1e9"], "1e9"),
        (["--budget", "1000000000"], "1000000000"),
        (["--budget", "-1"], "-1"),
        (["--budget", "x"], "whole number"),
        (["--budget", ""], "whole number"),
        (["--temperature", "-1"], "--temperature=-1.0"),
        (["--temperature", "nan"], "--temperature=nan"),
        (["--temperature", "inf"], "--temperature=inf"),
        (["--temperature", "warm"], "--temperature"),
        (["--top-p", "0"], "--top-p=0.0"),
        (["--top-p", "1.5"], "--top-p=1.5"),
        (["--top-k", "-1"], "--top-k=-1"),
        (["--top-k", "2.5"], "--top-k"),
        (["--min-p", "2"], "--min-p=2"),
        (["--repetition-penalty", "0"], "--repetition-penalty=0"),
        (["--presence-penalty", "3"], "--presence-penalty=3"),
        (["--max-tokens", "0"], "--max-tokens=0"),
        (["--seed", "99999999999999999999"], "--seed="),
        (["--stop", ""], "--stop="),
        (["--stop-token-id", "-1"], "--stop-token-id="),
        (["--logit-bias", "3"], "ID=VALUE"),
        (["--logit-bias", "a=1"], "a=1"),
        (["--logit-bias", "3=big"], "3=big"),
        (["--logit-bias", "3=nan"], "--logit-bias="),
        (["--logit-bias", "-3=1"], "--logit-bias="),
        (["--logit-bias", "3=1e39"], "--logit-bias={3: 1e+39}"),
        (["--drafter", "none"], "--drafter='none' is not allowed in mode tree"),
        (["--drafter", "none", "--mode", "chain"], "--drafter='none' is not allowed in mode chain"),
        (["--logit-bias", "3=1", "--logit-bias", "3=2"], "once"),
        (["--device", "tpu"], "--device='tpu'"),
        (["--device", "cuda:x"], "--device='cuda:x'"),
        (["--model", ""], "--model=''"),
        (["--drafter", ""], "--drafter=''"),
        (["--threads", "-1"], "--threads=-1"),
        (["--max-context", "3"], "--max-context=3"),
        (["--candidate-topk", "-4"], "--candidate-topk=-4"),
        (["--quiet", "--verbose"], "--quiet"),
        (["--no-such-flag"], "--no-such-flag"),
        (["a second prompt"], "a second prompt"),
        (["--seed"], "--seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_value_that_is_not_allowed_is_refused_before_anything_loads(refused, engine, flags, told):
    assert told in refused("generate", "Hi", *flags)
    assert engine.config is None


def test_an_unknown_command_is_refused(refused):
    assert "generat" in refused("generat")


def test_no_command_shows_the_help(command):
    code, out, _ = command()
    assert code == 0
    assert "generate" in out
    assert "demo" in out


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["generate", "--help"], ["demo", "-h"]], ids=" ".join
)
def test_help_has_examples_and_no_escape_codes_in_a_pipe(command, arguments):
    code, out, err = command(*arguments)
    assert (code, err) == (0, "")
    assert "Examples:" in out
    assert "\x1b" not in out


def test_version(command):
    from ddtree import __version__

    assert command("--version") == (0, f"ddtree {__version__}\n", "")


def test_a_bug_keeps_its_traceback(monkeypatch, engine):
    def broken(request):
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine, "stream", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run(["generate", "Hi"])
