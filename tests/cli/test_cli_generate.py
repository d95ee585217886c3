"""`ddtree generate` on a fake engine: sources of the prompt, what is written where, interrupts."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree.config import Mode


def test_the_text_alone_is_on_stdout_and_figures_on_stderr(command, engine):
    code, out, err = command("generate", "Hi", "--max-tokens", "5")
    assert (code, out) == (0, "The a\n")
    assert "5 tokens" in err
    assert "accept length 2.00" in err  # rounds of 3 and 1 after the first token
    assert "length" in err
    assert "\x1b" not in err


def test_a_text_that_ends_a_line_gets_no_second_newline(command, engine):
    engine.text = "line\n"
    assert command("generate", "Hi")[1] == "line\n"


def test_text_is_streamed_as_it_is_committed(command, engine, capsys):
    seen = []
    engine.on_chunk = lambda stream: seen.append(capsys.readouterr().out)
    command("generate", "Hi", "--mode", "ar", "--max-tokens", "4")
    assert seen == ["", "T", "h", "e"]


def test_quiet_leaves_stderr_empty(command, engine):
    engine.on_chunk = lambda stream: logging.getLogger("ddtree.engine").warning("slow")
    assert command("generate", "Hi", "--quiet", "--max-tokens", "3") == (0, "The\n", "")


def test_warnings_are_shown_and_decisions_only_when_verbose(command, engine):
    def log(stream):
        logging.getLogger("ddtree.engine").info("decided")
        logging.getLogger("ddtree.engine").warning("beware")

    engine.on_chunk = log
    plain, verbose = command("generate", "Hi")[2], command("generate", "Hi", "-v")[2]
    assert ("decided" in plain, "decided" in verbose) == (False, True)
    assert "beware" in plain
    assert logging.getLogger("ddtree").handlers == []


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (["Grüße 你好 🌲"], b""),
        (["Grüße 你好 🌲"], b"not this"),
        ([], "Grüße 你好 🌲\n".encode()),
        (["-"], "Grüße 你好 🌲\r\n".encode()),
        (["--file", "-"], "Grüße 你好 🌲".encode()),
        ([], "\ufeffGrüße 你好 🌲\n".encode()),
    ],
)
def test_sources_of_the_prompt(command, engine, arguments, stdin):
    assert command("generate", *arguments, stdin=stdin)[0] == 0
    assert engine.encoded == [("Grüße 你好 🌲", True)]


def test_a_file_keeps_all_but_its_last_newline(command, engine, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes("  a\n\n你\n\n".encode())
    assert command("generate", "--file", str(path), "--raw", stdin=b"not this")[0] == 0
    assert engine.encoded == [("  a\n\n你\n", False)]


@pytest.mark.parametrize(
    ("arguments", "options", "told"),
    [
        ([""], {}, "prompt=''"),
        ([" \n"], {}, "prompt="),
        ([], {}, "prompt=''"),
        (["-"], {"stdin": b"\n"}, "prompt=''"),
        ([], {"is_terminal": True}, "--file"),
        ([], {"stdin": b"a\xff"}, "standard input is not UTF-8 (byte 1)"),
        (["a\udcff"], {}, "not UTF-8"),
        (["--file", "no/such/file"], {}, "no/such/file"),
        (["--file", "."], {}, "irectory"),
        (["Hi", "--file", "."], {}, "PROMPT and --file"),
        (["-", "--file", "."], {}, "PROMPT and --file"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused(refused, engine, arguments, options, told):
    assert told in refused("generate", *arguments, **options)
    assert engine.config is None


@pytest.mark.parametrize(("content", "told"), [(b"", "prompt=''"), (b"\xff\xfe\x00", "not UTF-8 (byte 0)")])
def test_a_file_that_cannot_be_used_is_refused(refused, engine, tmp_path, content, told):
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    assert told in refused("generate", "--file", str(path))


def test_a_prompt_longer_than_the_context_is_refused_in_one_line(refused, engine):
    assert "201 tokens, too many" in refused("generate", "x" * 201)


def test_json(command, engine):
    code, out, err = command("generate", "Hi", "--json", "--max-tokens", "7", "--budget", "32", "--seed", "4")
    document = json.loads(out)
    assert code == 0
    assert "tokens/s" in err
    assert document["text"] == "The ans"
    assert document["tokens"] == [84, 104, 101, 32, 97, 110, 115]
    assert document["finish_reason"] == "length"
    assert (document["mode"], document["budget"], document["model"]) == ("tree", 32, "smollm2-135m")
    stats = document["stats"]
    assert (stats["prompt_tokens"], stats["new_tokens"], stats["rounds"]) == (2, 7, 2)
    assert (stats["accept_length"], stats["accept_histogram"]) == (3.0, {"3": 2})
    assert (stats["tokens_per_s"], stats["prefill_ms"]) == (30.0, 500.0)
    assert {"ddtree", "python", "torch", "transformers"} <= set(document["versions"])


def test_json_has_log_probabilities_where_asked_for(command, engine):
    arguments = ("generate", "Hi", "--json", "--max-tokens", "2")
    assert "logprobs" not in json.loads(command(*arguments)[1])
    for number in (0, 1):
        document = json.loads(command(*arguments, "--logprobs", str(number))[1])
        top = [{"token": 7, "log_prob": -0.25}][:number]
        assert document["logprobs"] == [
            {"token": token, "log_prob": -2.5, "top": top} for token in document["tokens"]
        ]


def test_log_probabilities_without_json_are_told_not_dropped_in_silence(command, engine):
    code, out, err = command("generate", "Hi", "--logprobs", "3")
    assert (code, out) == (0, engine.text + "\n")
    assert "--logprobs 3 has no effect without --json" in err
    assert engine.requests[0].top_logprobs is None  # the engine does no work that nobody sees


@pytest.mark.parametrize("number", ["-1", "21"])
def test_too_many_log_probabilities_are_refused_before_loading(refused, engine, number):
    assert f"--logprobs={number} is not allowed: a whole number from 0 to 20" in refused(
        "generate", "Hi", "--json", "--logprobs", number
    )
    assert engine.config is None


def test_json_has_no_budget_where_the_mode_has_none(command, engine):
    document = json.loads(command("generate", "Hi", "--json", "--mode", "chain")[1])
    assert (document["mode"], document["budget"], document["finish_reason"]) == ("chain", None, "stop")


def test_a_budget_without_a_tree_is_told_not_dropped_in_silence(command, engine):
    code, _, err = command("generate", "Hi", "--mode", "ar", "--budget", "8")
    assert code == 0
    assert "--budget 8 has no effect in mode ar" in err


def test_plain_decoding_loads_no_drafter_unless_one_is_named(command, engine):
    command("generate", "Hi", "--mode", "ar")
    assert engine.config.drafter == "none"
    command("generate", "Hi", "--mode", "ar", "--drafter", "d")
    assert engine.config.drafter == "d"
    assert [request.mode for request in engine.requests] == [Mode.AR, Mode.AR]


def interrupt_at(num_tokens):
    def on_chunk(stream):
        if stream.taken == num_tokens:
            os.kill(os.getpid(), signal.SIGINT)

    return on_chunk


def test_an_interrupt_ends_after_the_round_with_what_there_is(command, engine):
    engine.on_chunk = interrupt_at(4)
    before = signal.getsignal(signal.SIGINT)
    code, out, err = command("generate", "Hi")
    assert (code, out) == (130, "The \n")
    assert "ended by cancel" in err
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupted_request_still_writes_its_json(command, engine):
    engine.on_chunk = interrupt_at(1)
    code, out, _ = command("generate", "Hi", "--json")
    assert code == 130
    assert (json.loads(out)["text"], json.loads(out)["finish_reason"]) == ("T", "cancel")


def test_a_second_interrupt_ends_at_once(command, engine):
    def twice(stream):
        if stream.taken == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    engine.on_chunk = twice
    code, out, err = command("generate", "Hi")
    assert (code, out, err) == (130, "T", "")


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_interrupt_while_importing_ends_quietly(tmp_path, module):
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"}
    for start in (["-m", "ddtree"], ["-c", "from ddtree.cli.main import main; main()"]):
        command = [sys.executable, *start, "generate", "Hi", "--model", str(tmp_path), "--mode", "ar"]
        result = subprocess.run(command, env=environment, capture_output=True, timeout=120)
        assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


def test_an_interrupt_while_loading_ends_quietly(command, engine):
    engine.encode = lambda prompt, chat: os.kill(os.getpid(), signal.SIGINT)
    assert command("generate", "Hi") == (130, "", "")
