"""Energy from NVML's counters, and none where there are none."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ddtree.bench import runner
from ddtree.bench.energy import gpu_uuids, open_meter
from ddtree.bench_config import BenchConfig


class NVMLError(Exception):
    """As pynvml's."""


@pytest.fixture
def nvml(monkeypatch):
    """A fake pynvml: GPU "GPU-a" has counted 2,000 mJ, "GPU-b" 500 mJ, "GPU-old" cannot count."""
    fake = ModuleType("pynvml")
    fake.NVMLError = NVMLError
    fake.counters = {"GPU-a": 2000, "GPU-b": 500}
    fake.known = {*fake.counters, "GPU-old"}
    fake.nvmlInit = lambda: None

    def handle(uuid):
        if uuid not in fake.known:
            raise NVMLError("Not Found")
        return uuid

    def total(uuid):
        if uuid not in fake.counters:
            raise NVMLError("Not Supported")
        return fake.counters[uuid]

    fake.nvmlDeviceGetHandleByUUID, fake.nvmlDeviceGetTotalEnergyConsumption = handle, total
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_joules_are_summed_over_the_gpus(nvml):
    assert open_meter(["GPU-a"]).joules() == 2.0
    meter = open_meter(["GPU-a", "GPU-b"])
    assert meter.joules() == 2.5
    nvml.counters["GPU-b"] += 1500
    assert meter.joules() == 4.0


@pytest.mark.parametrize("uuids", [["GPU-old"], ["GPU-a", "GPU-old"], ["GPU-elsewhere"]])
def test_a_gpu_that_cannot_count_gives_no_figure_and_a_line_that_says_so(nvml, uuids, caplog):
    with caplog.at_level("INFO", "ddtree"):
        assert open_meter(uuids) is None
    assert len(caplog.records) == 1
    assert "Not" in caplog.text


def test_without_the_package_its_name_is_told(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level("INFO", "ddtree"):
        assert open_meter(["GPU-a"]) is None
    assert "pip install nvidia-ml-py" in caplog.text


def test_no_gpu_needs_no_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_meter([]) is None


@pytest.mark.parametrize(
    ("device", "num_gpus", "expected"),
    [
        ("auto", 1, ["GPU-u0"]),
        ("cuda:1", 1, ["GPU-u1"]),
        ("cuda", 2, ["GPU-u0", "GPU-u1"]),
        ("cuda:2", 8, ["GPU-u2"]),
        ("cpu", 1, []),
    ],
)
def test_the_gpus_of_a_run(monkeypatch, device, num_gpus, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"u{index}"))
    assert gpu_uuids(device, num_gpus) == expected


def test_a_run_on_a_cpu_or_elsewhere_has_no_meter(monkeypatch):
    monkeypatch.setattr(runner, "open_meter", lambda uuids: "meter")
    monkeypatch.setattr(runner, "gpu_uuids", lambda device, num_gpus: ["GPU-a"])
    header = SimpleNamespace(device="cpu")
    assert runner._meter(BenchConfig(), header) is None
    header.device = "NVIDIA H200"
    assert runner._meter(BenchConfig(), header) == "meter"
    assert runner._meter(BenchConfig(engines=("http://h/v1",)), header) is None
