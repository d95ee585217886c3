"""The look at the Python that is to run SGLang: what it lacks is told before anything starts."""

import sys
from pathlib import Path

import pytest

from ddtree.bench.run_format import Arm
from ddtree.bench.sglang_python import check_python
from ddtree.bench_config import BenchConfig
from ddtree.config import Mode
from ddtree.errors import ConfigError

PLAIN, TREE = Arm("sglang", Mode.AR), Arm("sglang", Mode.TREE, 8)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder that the Python of these tests looks for packages in, before all others."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def add_package(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise SystemExit('it is not to be imported')")


def python_saying(folder: Path, script: str) -> BenchConfig:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return BenchConfig(engines=("sglang",), sglang_python=str(path))


def test_a_python_with_all_packages_will_do(packages):
    add_package(packages, "sglang")
    add_package(packages, "ddtree")
    check_python(BenchConfig(engines=("sglang",)), [PLAIN, TREE])
    check_python(BenchConfig(engines=("sglang",), sglang_python=sys.executable), [TREE])
    check_python(python_saying(packages, f'echo hello; exec "{sys.executable}" "$@"'), [TREE])


def test_what_is_missing_is_told_with_the_flag(packages):
    bare = python_saying(packages, f'exec "{sys.executable}" -S -I "$@"')  # sees the standard library only
    with pytest.raises(ConfigError, match=r"has no sglang: .*--sglang-python$"):
        check_python(bare, [PLAIN])
    with pytest.raises(ConfigError, match="has no sglang and no ddtree:"):
        check_python(bare, [PLAIN, TREE])


@pytest.mark.parametrize("script", ["exit 3", "echo hello", "kill -9 $$"])
def test_a_program_that_is_no_python_is_refused(tmp_path, script):
    with pytest.raises(ConfigError, match=r"^sglang_python='.*' is not allowed: a Python .* it ends with"):
        check_python(python_saying(tmp_path, script), [PLAIN])


@pytest.mark.parametrize("name", [".", "missing"])
def test_a_path_that_does_not_run_is_refused(tmp_path, name):
    config = BenchConfig(engines=("sglang",), sglang_python=str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"Permission denied|No such file"):
        check_python(config, [PLAIN])
