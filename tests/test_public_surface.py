"""The public names, and what importing them may load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ddtree

HEAVY = ("torch", "transformers", "sglang", "numpy", "triton")


def loaded_after(code):
    """Which heavy packages a fresh Python holds after running `code`."""
    program = (
        f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(ddtree.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stderr.split()


def test_all_is_sorted_and_unique():
    assert ddtree.__all__ == sorted(set(ddtree.__all__))


@pytest.mark.parametrize("name", ddtree.__all__)
def test_public_name_resolves(name):
    assert getattr(ddtree, name) is not None
    assert name in dir(ddtree)


def test_every_error_is_public():
    from ddtree import errors

    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes <= set(ddtree.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        _ = ddtree.Enginee


def test_import_loads_nothing_heavy():
    assert loaded_after("import ddtree") == []


def test_leaves_load_nothing_heavy():
    leaves = "config, dequantise, errors, model_cache, models, provenance, stats"
    assert loaded_after(f"from ddtree import {leaves}") == []


def test_settings_and_errors_load_nothing_heavy():
    assert (
        loaded_after("from ddtree import DDTreeError, EngineConfig, Mode, RoundStats, SamplingParams") == []
    )


def test_help_loads_nothing_heavy():
    code = "import sys\nsys.argv = ['ddtree', '--help']\nfrom ddtree.cli.main import main\n"
    code += "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    assert loaded_after(code) == []
