"""This machine, seen from a process of its own, however broken torch or the driver are."""

import json
import sys

import pytest

from ddtree.doctor import environment
from ddtree.doctor.environment import MARK, Gpu, environment_section, probe_environment
from ddtree.doctor.plan import Plan
from ddtree.doctor.processes import Ran
from ddtree.doctor.report import Level
from doctor_kit import H200, RTX_PRO_6000, by_id, ids, machine

SMI = "NVIDIA RTX PRO 6000 Blackwell, 12.0, 97887, 580.95.05\nNVIDIA GB10, 12.1, [N/A], 580.95.05\n"


def probe(torch, smi=None):
    """A probe whose two programs end as given."""

    def run(command, limit_s):
        assert limit_s > 0
        return torch if command[0] == sys.executable else smi or Ran(None, problem="no such program")

    return probe_environment(run)


def printed(**found):
    return Ran(0, "a library says hello\n" + MARK + json.dumps({"gpus": [], **found}) + "\n")


def test_what_torch_says():
    found = probe(
        printed(torch="2.11.0", cuda="12.8", gpus=[["NVIDIA H200", 9, 0, 1 << 30]]),
        Ran(0, "x, 9.0, 5, 580.1\n"),
    )
    assert (found.torch, found.cuda, found.cuda_version, found.driver) == ("2.11.0", "12.8", (12, 8), "580.1")
    assert found.gpus == (Gpu("NVIDIA H200", (9, 0), 1 << 30),)
    assert found.gpus_of == "torch"


def test_without_torch_nvidia_smi_tells_the_gpus():
    found = probe(Ran(1, problem="ModuleNotFoundError: No module named 'torch'"), Ran(0, SMI))
    assert found.torch is None
    assert found.torch_problem == "ModuleNotFoundError: No module named 'torch'"
    assert found.gpus == (
        Gpu("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 97887 << 20), Gpu("NVIDIA GB10", (12, 1), None),
    )  # fmt: skip
    assert (found.driver, found.gpus_of) == ("580.95.05", "nvidia-smi")


@pytest.mark.parametrize(
    "out",
    [
        "", "no table at all\n", "a, b\n", "\0\xff, , , \n, , ,\n", "name, 9, x, y\n", "a,b,c,d,e\n",
        "\u00b2, \u00b2.\u00b2, \u00b2, \u00b2\n", f"a, {'9' * 5000}.0, {'9' * 5000}, b\n",
    ],
)  # fmt: skip
def test_junk_in_place_of_nvidia_smis_table_is_no_gpu(out):
    found = probe(printed(torch="2"), Ran(0, out))
    assert (found.gpus, found.driver) == ((), None)


@pytest.mark.parametrize(
    ("smi", "told"),
    [
        (
            Ran(9, "NVIDIA-SMI has failed\nmore\n", problem="it ended with 9"),
            " (nvidia-smi: NVIDIA-SMI has failed)",
        ),
        (
            Ran(None, problem="it did not end within 20 seconds"),
            " (nvidia-smi: it did not end within 20 seconds)",
        ),
        (Ran(0, ""), ""),
    ],
)
def test_why_nvidia_smi_tells_no_gpu(smi, told):
    section = environment_section(probe(printed(torch="2", cuda="12.8"), smi), Plan())
    (found,) = by_id(section.findings, "environment.gpu")
    assert found.what == f"no CUDA GPU was found{told}"


@pytest.mark.parametrize(
    ("cuda", "version"),
    [("12.8", (12, 8)), ("13.0.1", (13, 0)), ("", None), (None, None), ("x.y", None), ("12", None)],
)
def test_the_version_of_cuda(cuda, version):
    assert machine(cuda=cuda).cuda_version == version


def test_a_torch_for_rocm():
    found = probe(printed(torch="2.11", cuda=None, hip="6.4", gpus=[["AMD Instinct MI300X", 9, 4, 1 << 37]]))
    assert "built for ROCm 6.4" in environment_section(found, Plan()).findings[1].what
    assert ids(environment_section(found, Plan()), Level.ERROR) == ["environment.torch"]


@pytest.mark.parametrize("out", [MARK, MARK + "[1]", MARK + "{", "nothing"])
def test_a_probe_that_prints_nothing_of_use_is_a_torch_that_is_not_there(out):
    found = probe(Ran(0, out))
    assert found.torch is None
    assert found.torch_problem == "it printed nothing"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import os; os.abort()", "it was ended by SIGABRT"),
        ("import time; time.sleep(60)", "it did not end within 1 seconds"),
        ("import sys; sys.exit(3)", "it ended with 3"),
    ],
)
def test_a_broken_torch_does_not_take_the_doctor_down(body, problem, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(body, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(environment, "TORCH_LIMIT_S", 1.0 if "sleep" in body else 60.0)
    found = probe_environment()
    assert problem in found.torch_problem
    (finding,) = by_id(environment_section(found, Plan()).findings, "environment.torch")
    assert finding.level is Level.ERROR
    assert problem in finding.what


def test_a_driver_that_torch_cannot_use_is_told(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(
        "__version__ = '2.14.1'\nclass version: cuda, hip = '13.0', None\n"
        "class cuda:\n    def device_count():\n        raise RuntimeError('driver too old')\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = probe_environment()
    assert (found.torch, found.gpu_problem) == ("2.14.1", "driver too old")
    section = environment_section(found, Plan())
    assert "driver too old" in next(f for f in section.findings if f.id == "environment.gpu").what


@pytest.mark.parametrize(
    ("gpus", "fields", "errors"),
    [
        ([H200], {}, []),
        ([], {}, ["environment.gpu"]),
        ([], {"torch": None}, ["environment.torch", "environment.gpu"]),
        ([H200], {"cuda": None, "gpus_of": "nvidia-smi"}, ["environment.torch"]),
        ([H200], {"gpus_of": "nvidia-smi"}, ["environment.gpu-unseen"]),
    ],
)
def test_what_stops_ddtree(gpus, fields, errors):
    section = environment_section(machine(*gpus, **fields), Plan())
    assert ids(section, Level.ERROR) == errors
    assert all(f.why and f.todo for f in section.findings if f.level is not Level.OK)
    json.dumps(section.data)


def test_a_gpu_is_told_with_what_matters():
    told = environment_section(machine(RTX_PRO_6000), Plan()).findings[-1].what
    assert told == "GPU 0: NVIDIA RTX PRO 6000 Blackwell, compute capability 12.0, 95.0 GiB"


def test_an_old_gpu_unequal_gpus_and_too_few_of_them():
    section = environment_section(machine(H200, Gpu("T4", (7, 5), 15)), Plan(tp_size=4))
    assert ids(section, Level.WARN) == ["environment.gpu", "environment.gpus-differ"]
    assert ids(section, Level.ERROR) == ["environment.gpus-few"]


def test_a_named_gpu_stands_for_this_machines():
    section = environment_section(machine(), Plan(compute_capability="9.0", tp_size=8))
    assert ids(section, Level.ERROR) == []
    assert "compute capability 9.0, as asked" in section.findings[-1].what
    old = environment_section(machine(), Plan(compute_capability="7.5")).findings[-1]
    assert (old.level, old.todo) == (Level.WARN, "use a newer GPU")


def test_without_a_gpu_the_finding_says_how_to_plan_for_another_machine():
    (found,) = by_id(environment_section(machine(), Plan()).findings, "environment.gpu")
    assert "--compute-capability 9.0 --gpu-memory-gb 80" in found.todo
