"""Programs that are run for a limited time, however they behave."""

import os
import subprocess
import sys

import pytest

from ddtree.doctor import processes
from ddtree.doctor.processes import MAX_OUTPUT_BYTES, MAX_PROBLEM, end_group, ending, run_limited


def run(program, limit_s=60):
    return run_limited([sys.executable, "-c", program], limit_s)


def test_output_and_code():
    ran = run("import sys; print('out'); print('first\\nlast', file=sys.stderr); sys.exit(3)")
    assert (ran.code, ran.out, ran.problem) == (3, "out\n", "last")
    assert ran.errors == "first\nlast\n"


def test_a_program_that_is_not_there(tmp_path):
    assert "No such file" in run_limited([str(tmp_path / "no")], 5).problem
    assert "Permission denied" in run_limited([str(tmp_path)], 5).problem
    junk = tmp_path / "junk"
    junk.write_bytes(b"\0\xff")
    junk.chmod(0o755)
    ran = run_limited([str(junk)], 5)
    assert (ran.code, ran.problem) == (None, "the program cannot be run: Exec format error")


def test_endless_output_is_read_to_the_limit_only():
    ran = run("while True: print('junk' * 1000)")
    assert ran.code != 0
    assert MAX_OUTPUT_BYTES <= len(ran.out) < 2 * MAX_OUTPUT_BYTES


def test_a_child_that_outlives_the_program_is_not_waited_for():
    assert run("import os, time; os.fork() or time.sleep(60); print('out')").code == 0


def test_a_child_that_left_the_process_group_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(processes, "END_LIMIT_S", 0.2)
    ran = run("import os, time; os.fork() or (os.setsid(), time.sleep(3)); print('out', flush=True)")
    assert (ran.code, ran.out.split()[0]) == (0, "out")


def test_what_takes_too_long_is_ended():
    ran = run("import time; time.sleep(60)", limit_s=0.3)
    assert (ran.code, ran.problem) == (None, "it did not end within 0.3 seconds")


def test_what_cannot_even_be_killed_is_left(monkeypatch):
    """A program that waits for a broken driver ends only when the driver lets it."""

    class Stuck:
        pid = os.getpid()

        def kill(self):
            pass

        def wait(self, limit_s):
            raise subprocess.TimeoutExpired("stuck", limit_s)

    monkeypatch.setattr(processes.os, "killpg", lambda *_: None)
    end_group(Stuck())


@pytest.mark.parametrize(
    ("code", "errors", "problem"),
    [
        (0, "a warning", ""),
        (1, "one\n two \n\n", "two"),
        (7, "\n", "it ended with 7"),
        (-11, "x", "it was ended by SIGSEGV"),
        (-99, "", "it was ended by signal 99"),
        (1, "x" * 5000, "x" * MAX_PROBLEM),
    ],
)
def test_how_a_program_ended(code, errors, problem):
    assert ending(code, errors) == problem
