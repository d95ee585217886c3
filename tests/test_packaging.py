"""The distribution installs beside any SGLang: it must not move one of SGLang's pins."""

import tomllib
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import ddtree

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "fastapi", "sglang", "triton"}
SGLANG_VERSIONS = ("0.5.17", "0.5.23")


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """The METADATA that the wheel will have, from the build backend itself."""
    hatchling = pytest.importorskip("hatchling.build")
    folder = tmp_path_factory.mktemp("metadata")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        name = hatchling.prepare_metadata_for_build_wheel(str(folder))
    return HeaderParser().parsestr((folder / name / "METADATA").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def requirements(metadata):
    return [Requirement(line) for line in metadata.get_all("Requires-Dist")]


def is_extra(requirement):
    return requirement.marker is not None and "extra" in str(requirement.marker)


def sglang_requirements(version):
    lines = (
        (ROOT / "tests" / "data" / f"sglang-requires-{version}.txt").read_text(encoding="utf-8").splitlines()
    )
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def conflicts(ours, theirs):
    """Exact versions that `theirs` pins and `ours` does not admit."""
    pins = [
        Version(s.version) for s in theirs.specifier if s.operator == "==" and not s.version.endswith(".*")
    ]
    return [pin for pin in pins if not ours.specifier.contains(pin, prereleases=True)]


def test_metadata_names_the_distribution(metadata):
    assert metadata["Name"] == "sglang-ddtree"
    assert metadata["Version"] == ddtree.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra")) == {"engine", "serve", "train", "grammar", "bench"}


def test_core_requires_nothing_heavy(requirements):
    core = {canonicalize_name(r.name) for r in requirements if not is_extra(r)}
    assert core == {"numpy", "rich", "typer"}
    assert not core & HEAVY


def test_requirements_are_lower_bounds_only(requirements):
    for requirement in requirements:
        if requirement.name != "sglang-ddtree":
            assert [s.operator for s in requirement.specifier] == [">="], requirement


@pytest.mark.parametrize("version", SGLANG_VERSIONS)
def test_requirements_admit_what_sglang_pins(requirements, version):
    theirs = sglang_requirements(version)
    assert {"torch", "transformers", "numpy"} <= set(theirs)
    for ours in requirements:
        other = theirs.get(canonicalize_name(ours.name))
        assert other is None or not conflicts(ours, other), f"{ours} against SGLang {version}: {other}"


def test_conflicts_are_found():
    theirs = Requirement("torch==2.11.0")
    assert conflicts(Requirement("torch>=2.12"), theirs) == [Version("2.11.0")]
    assert conflicts(Requirement("torch==2.13.0"), theirs) == [Version("2.11.0")]
    assert not conflicts(Requirement("torch>=2.11"), theirs)


def read_lock(name):
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(r.name): r for r in map(Requirement, filter(is_requirement, lines))}


def is_requirement(line):
    return bool(line) and not line.startswith("#")


def test_locks_pin_every_package():
    runtime, dev = read_lock("runtime.lock"), read_lock("dev.lock")
    for requirement in (*runtime.values(), *dev.values()):
        assert [s.operator for s in requirement.specifier] == ["=="], requirement
        assert "+" not in str(requirement.specifier), f"{requirement} names one build"
    assert all(str(dev[name]) == str(pin) for name, pin in runtime.items())


def test_locks_satisfy_the_project(requirements):
    runtime = read_lock("runtime.lock")
    for ours in requirements:
        if not is_extra(ours) or 'extra == "engine"' in str(ours.marker).replace("'", '"'):
            pin = next(iter(runtime[canonicalize_name(ours.name)].specifier)).version
            assert ours.specifier.contains(pin), f"{ours} against the lock's {pin}"


def test_marks_are_registered():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    marks = {line.partition(":")[0] for line in settings["tool"]["pytest"]["ini_options"]["markers"]}
    assert marks == {"gpu", "multi_gpu", "sglang", "slow"}


def test_shipped_files_are_there():
    package = ROOT / "src" / "ddtree"
    drafter = package / "data" / "drafters" / "smollm2-135m-dflash-b16"
    prompts = package / "data" / "prompts"
    assert (package / "py.typed").exists()
    assert {p.name for p in drafter.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert {p.name for p in prompts.iterdir()} == {
        "LICENCES", "gsm8k.jsonl", "humaneval.jsonl", "mt_bench.jsonl",
    }  # fmt: skip
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")
