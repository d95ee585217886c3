"""Counters kept on the device: right sums, read back without a wait."""

from types import SimpleNamespace

import pytest
import torch

from ddtree.config import PluginConfig
from ddtree.sglang_plugin.metrics import DeviceCounters, make_round_metrics
from sglang_fakes import fake_modules

CPU = torch.device("cpu")


def paths(*first_nodes):
    """Accept indices of requests whose path goes from the root to these columns (-1: nowhere)."""
    return torch.tensor([[0, node, -1] for node in first_nodes])


def test_a_hit_leaves_the_root_by_another_child_than_the_first():
    counters = DeviceCounters(CPU, read_every=1)
    counters.add(paths(1, -1, 2, 7))
    assert counters.take_root_sibling_hits() == 2
    assert counters.take_root_sibling_hits() == 0


def test_sums_are_read_every_so_many_rounds_and_no_hit_is_lost():
    counters = DeviceCounters(CPU, read_every=3)
    taken = []
    for _ in range(7):
        counters.add(paths(2, 1))
        taken.append(counters.take_root_sibling_hits())
    assert taken == [0, 0, 3, 0, 0, 3, 0]


def test_a_copy_under_way_is_neither_waited_for_nor_overwritten():
    """With an event that has not come yet, as on a busy GPU."""
    counters = DeviceCounters(CPU, read_every=1)
    event = SimpleNamespace(done=False, record=lambda: None)
    event.query = lambda: event.done
    counters._event = event
    counters.add(paths(2))
    assert counters.take_root_sibling_hits() == 0
    counters.add(paths(3))
    assert counters.take_root_sibling_hits() == 0
    event.done = True
    assert counters.take_root_sibling_hits() == 1
    counters.add(paths(1))
    assert counters.take_root_sibling_hits() == 1


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits():
    counters = DeviceCounters(torch.device("cuda"), read_every=1)
    accept_indices = paths(2, 3).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        counters.add(accept_indices)
        counters.take_root_sibling_hits()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    counters.add(paths(1).cuda())
    torch.cuda.synchronize()
    assert counters._taken + counters.take_root_sibling_hits() == 2


@pytest.mark.parametrize(
    ("config", "enable_metrics", "all_schedulers", "tp_rank"),
    [
        (PluginConfig(metrics=False), True, False, 0),
        (PluginConfig(), False, True, 0),
        (PluginConfig(), True, False, 1),
    ],
)
def test_no_metrics_where_none_are_wanted(monkeypatch, config, enable_metrics, all_schedulers, tp_rank):
    observability = SimpleNamespace(
        enable_metrics=enable_metrics, enable_metrics_for_all_schedulers=all_schedulers
    )
    fake_modules(
        monkeypatch,
        {"sglang.srt.runtime_context": {"get_observability": lambda: observability, "get_serving": None}},
    )
    assert make_round_metrics(config, tp_rank=tp_rank, block_size=8, device=CPU) is None
