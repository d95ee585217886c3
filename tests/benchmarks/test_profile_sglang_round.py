"""How profile_sglang_round reads a trace, and how sglang_ranges names steps."""

import gzip
import json
import sys
import types

import pytest
import torch

import profile_sglang_round
import sglang_ranges
from profile_sglang_round import PREFIX, busy_us, load_trace, read_round, table, untraced_round_us


class Trace:
    """Events as torch's profiler writes them."""

    def __init__(self):
        self.events, self._correlation = [], 0

    def range(self, name, begin, end, thread=1):
        row = {"cat": "user_annotation", "name": name, "ts": begin, "dur": end - begin, "tid": thread}
        self.events.append(row)

    def launch(self, host_time, *kernels, call="cudaGraphLaunch", cat="cuda_runtime", thread=1):
        self._correlation += 1
        args = {"correlation": self._correlation}
        self.events.append({"cat": cat, "name": call, "ts": host_time, "dur": 1, "tid": thread, "args": args})
        for name, begin, duration in kernels:
            event = {"cat": "kernel", "name": name, "ts": begin, "dur": duration, "tid": 7, "args": args}
            self.events.append(event)

    def round(self, at):
        self.range(PREFIX + "rest of the round", at, at + 100)
        self.range(PREFIX + "before the draft pass", at + 1, at + 20)
        self.range(PREFIX + "draft pass", at + 5, at + 18)
        self.range(PREFIX + "target pass", at + 30, at + 60)
        self.range(PREFIX + "commit", at + 70, at + 90)
        self.range(PREFIX + "KV move", at + 72, at + 75)
        self.launch(at + 2, ("copy", at + 3, 1), call="cudaLaunchKernel")
        self.launch(
            at + 6, ("attention", at + 7, 10), ("gemm", at + 17, 4), ("chunk_kernel", at + 21, 2),
            ("select_kernel", at + 23, 1), ("build_tree_kernel", at + 24, 3), ("copy", at + 27, 1),
        )  # fmt: skip
        self.launch(at + 31, ("gemm", at + 32, 30), ("attention", at + 62, 10))
        self.launch(at + 73, ("kv_move_kernel", at + 74, 2), call="cuLaunchKernelEx", cat="cuda_driver")
        self.launch(at + 80, ("gather", at + 81, 5), call="cudaLaunchKernel")
        self.launch(at + 95, ("argmax", at + 96, 3), call="cudaLaunchKernel")
        self.launch(at + 110, ("Memcpy DtoH", at + 111, 2), call="cudaMemcpyAsync")
        self.launch(at + 112, call="cudaEventSynchronize")


def test_device_time_goes_to_the_innermost_range_and_to_named_kernels():
    trace = Trace()
    for at in (0, 1000):
        trace.round(at)
    row = read_round(trace.events)
    assert row["rounds"] == 2
    assert row["steps_us"] == {
        "before the draft pass": 1.0, "draft pass": 10.0, "draft head": 4.0, "draft top-K": 3.0, "tree": 4.0,
        "target pass": 40.0, "commit": 5.0, "KV move": 2.0, "rest of the round": 3.0, "scheduler": 2.0,
    }  # fmt: skip
    assert row["device_events"]["tree"] == 2.0
    assert row["busy_us"] == 74.0
    assert row["host_waits"] == {"cudaEventSynchronize": 1.0}


def test_a_targets_graph_that_commits_is_told_apart_by_its_kernels():
    trace = Trace()
    trace.range(PREFIX + "target pass", 0, 10)
    trace.launch(
        1, ("gemm", 2, 30), ("reduce_kernel<ArgMaxOps>", 32, 4), ("copy", 36, 1), ("walk_kernel", 37, 2),
        ("index", 39, 1), ("kv_move_kernel", 40, 3), ("gemm", 43, 5), ("kv_write", 48, 6),
    )  # fmt: skip
    trace.launch(2, ("reduce_kernel<ArgMaxOps>", 60, 7))  # without a walk it is the model's own
    assert read_round(trace.events)["steps_us"] == {
        "target pass": 37.0, "choice": 5.0, "walk": 3.0, "KV move": 3.0, "draft KV write": 11.0,
    }  # fmt: skip


def test_what_ranks_exchange_is_told_apart_by_step_and_kind():
    trace = Trace()
    trace.range(PREFIX + "target pass", 0, 10)
    trace.launch(1, ("gemm", 2, 30), ("void sglang::all_reduce_1shot_push_kernel<bf16>", 32, 4))
    trace.launch(2, ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 6))
    trace.range(PREFIX + "draft pass", 50, 60)
    trace.launch(
        51, ("chunk_kernel", 70, 3), ("ncclDevKernel_AllGather_RING_LL(args)", 80, 8), ("sort", 90, 2)
    )
    trace.launch(65, ("ncclDevKernel_Broadcast_RING_LL", 100, 5), call="cudaLaunchKernel")
    row = read_round(trace.events)
    assert row["exchanges_us"] == {
        "target pass: all-reduce": 10.0, "draft top-K: all-gather": 8.0, "scheduler: broadcast": 5.0,
    }  # fmt: skip
    assert row["steps_us"]["draft top-K"] == 13.0


def test_of_several_ranks_the_first_ones_trace_is_read(tmp_path):
    for rank in (1, 0):
        with gzip.open(tmp_path / f"1700-TP-{rank}.trace.json.gz", "wt") as file:
            json.dump({"traceEvents": [{"name": f"rank {rank}"}]}, file)
    assert load_trace(tmp_path) == [{"name": "rank 0"}]


def test_launches_of_another_thread_are_in_no_range():
    trace = Trace()
    trace.range(PREFIX + "target pass", 0, 50)
    trace.launch(10, ("copy", 11, 6), thread=2)
    assert read_round(trace.events)["steps_us"] == {"scheduler": 6}


def test_overlapping_events_are_busy_once():
    events = [{"ts": 0, "dur": 10}, {"ts": 5, "dur": 10}, {"ts": 6, "dur": 2}, {"ts": 30, "dur": 1}]
    assert busy_us(events) == 16


def test_a_trace_without_rounds_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="no target pass"):
        read_round([])
    with pytest.raises(RuntimeError, match="0 traces"):
        load_trace(tmp_path)
    with gzip.open(tmp_path / "1-TP-0.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": [{"name": "x"}]}, file)
    assert load_trace(tmp_path) == [{"name": "x"}]


def test_an_untraced_round_is_timed_from_streams():
    answers = [
        {"first_s": 1.0, "end_s": 2.0, "rounds": 300},
        {"first_s": 1.0, "end_s": 1.5, "rounds": 100},
        {"first_s": 1.0, "end_s": 1.0, "rounds": 0},
    ]
    assert untraced_round_us(answers) == pytest.approx(1.5 / 400 * 1e6)


def test_the_table_has_every_step_and_arm():
    trace = Trace()
    trace.round(0)
    cell = read_round(trace.events) | {"round_us": 100.0, "idle_us": 26.0}
    text = table({"dflash": cell, "ddtree:31": cell})
    for word in ("ddtree:31", "target pass", "KV move", "idle", "host waits"):
        assert word in text
    assert "choice" not in text


class Runner:
    """Stands for SGLang's ModelRunner."""

    def __init__(self, is_draft_worker):
        self.is_draft_worker = is_draft_worker

    def forward(self, x):
        return torch.ones(2) * x


class Derived(Runner):
    pass


@pytest.fixture
def loaded(monkeypatch):
    module = types.ModuleType("some.module")
    original = Runner.forward
    module.Runner, module.Derived = Runner, Derived
    monkeypatch.setitem(sys.modules, "some.module", module)
    ranges = (
        ("some.module", "Runner", "forward", sglang_ranges._pass_label),
        ("some.module", "Derived", "forward", "inherited"),
        ("some.module", "Absent", "forward", "absent"),
        ("no.such.module", "Runner", "forward", "absent"),
    )
    monkeypatch.setattr(sglang_ranges, "RANGES", ranges)
    yield
    Runner.forward = original


def names_of(profile):
    return [event.name for event in profile.events() if event.name.startswith(PREFIX)]


def test_ranges_appear_from_the_first_profile_on(loaded, monkeypatch, capsys):
    monkeypatch.setattr(torch.profiler.profile, "start", torch.profiler.profile.start)
    sglang_ranges.register()
    assert not hasattr(Runner.forward, "__wrapped__")
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    profile.start()
    for is_draft in (True, False):
        assert Derived(is_draft).forward(3).tolist() == [3, 3]
    profile.stop()
    assert names_of(profile) == [PREFIX + "draft pass", PREFIX + "target pass"]
    assert "Runner.forward" in capsys.readouterr().out


def test_every_step_has_a_place_in_the_table():
    labels = {label for *_, label in sglang_ranges.RANGES if isinstance(label, str)}
    labels |= {sglang_ranges._pass_label(Runner(is_draft)) for is_draft in (True, False)}
    assert labels | set(profile_sglang_round.KERNELS.values()) <= set(profile_sglang_round.ORDER)


def test_named_kernels_and_methods_exist():
    """A renamed kernel or method would silently move its time to another step."""
    from pathlib import Path

    import ddtree

    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in Path(ddtree.__file__).parent.rglob("*.py")
    )
    for kernel in profile_sglang_round.KERNELS:
        assert f"def {kernel}(" in sources
    for module, owner, method, _ in sglang_ranges.RANGES:
        if module.startswith("ddtree."):
            file = Path(ddtree.__file__).parent / (module.removeprefix("ddtree.").replace(".", "/") + ".py")
            source = file.read_text(encoding="utf-8")
            assert f"class {owner}" in source
            assert f"    def {method}(" in source
