"""The plugin's Prometheus metrics in the multiprocess mode that SGLang's /metrics collects."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.sglang

PROGRAM = """
import sys
import torch
from ddtree.sglang_plugin.metrics import DeviceCounters, RoundMetrics

counters = DeviceCounters(torch.device("cpu"), read_every=1)
labels = {"model_name": "tiny", "tp_rank": sys.argv[1]}
metrics = RoundMetrics(labels, num_nodes=31, verify_width=32, draft_depth=7, device_counters=counters)
counters.add(torch.tensor([[0, 2, 5], [0, 1, -1], [0, -1, -1]]))
metrics.observe([2, 1, 0])
metrics.observe([7])
metrics.observe([])
"""
EXPECTED = {
    "ddtree_rounds_total": 4,
    "ddtree_nodes_verified_total": 4 * 31,
    "ddtree_committed_tokens_total": 4 + 10,
    "ddtree_root_sibling_hits_total": 1,
    "ddtree_verify_width": 32,
}
CORRECT_BY_DEPTH = {"1": 3, "2": 2, "3": 1, "4": 1, "5": 1, "6": 1, "7": 1}


def test_other_processes_see_what_schedulers_count(tmp_path):
    from prometheus_client import CollectorRegistry, multiprocess

    for rank in ("0", "1"):
        environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([sys.executable, "-c", PROGRAM, rank], env=environ, check=True)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    for rank in ("0", "1"):
        labels = {"model_name": "tiny", "tp_rank": rank}
        found = {name: registry.get_sample_value(name, labels) for name in EXPECTED}
        assert found == EXPECTED
        for depth, count in CORRECT_BY_DEPTH.items():
            value = registry.get_sample_value("ddtree_correct_drafts_total", {**labels, "depth": depth})
            assert value == count, depth


@pytest.mark.parametrize(("all_schedulers", "tp_rank"), [(False, 0), (True, 3)])
def test_a_scheduler_that_reports_has_metrics(monkeypatch, all_schedulers, tp_rank):
    import torch
    from prometheus_client import CollectorRegistry
    from sglang.srt.runtime_context import get_context

    from ddtree.config import PluginConfig
    from ddtree.sglang_plugin.metrics import make_round_metrics

    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    with get_context().override_server_args(
        enable_metrics=True, enable_metrics_for_all_schedulers=all_schedulers, served_model_name="tiny"
    ):
        metrics = make_round_metrics(
            PluginConfig(node_budget=15), tp_rank=tp_rank, block_size=8, device=torch.device("cpu")
        )
    metrics.observe([3, 0])
    labels = {"model_name": "tiny", "tp_rank": str(tp_rank)}
    assert registry.get_sample_value("ddtree_nodes_verified_total", labels) == 2 * 15
    assert registry.get_sample_value("ddtree_verify_width", labels) == 16
