"""The plugin's trace, with fakes of SGLang's requests: rounds as they ran, ends as its scheduler had them."""

import gc
from types import SimpleNamespace

import pytest
import torch

from ddtree.config import Mode, PluginConfig
from ddtree.sglang_plugin import trace_rows, trace_writer
from ddtree.sglang_plugin.accept_path import AcceptPath
from ddtree.sglang_plugin.trace_rows import full_rows
from ddtree.sglang_plugin.trace_writer import RoundTracer, make_round_tracer, open_writer, sampling_fields
from ddtree.trace.read import read_trace
from ddtree.trace_format import Detail, TraceEnd, TraceHeader, TraceRequest, TraceRound, TraceWriter
from ddtree.tree.draft_tree import DraftTree

CPU = torch.device("cpu")
HEADER = TraceHeader("sglang", {"name": "m"}, None, {}, "cpu", "float32", {}, "2026-01-01T00:00:00+00:00")
PROMPT = (7, 8, 9)


class Params(SimpleNamespace):
    """SGLang's sampling parameters after it has normalised them, greedy."""

    def __init__(self, **values):
        super().__init__(**{
            "max_new_tokens": 8, "temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "logit_bias": None, "stop_strs": [], "stop_regex_strs": [], "stop_token_ids": None,
            "ignore_eos": False, "min_new_tokens": 0, "regex": None, "json_schema": None, "ebnf": None,
            "structural_tag": None,
        } | values)  # fmt: skip


class Req:
    """SGLang's request."""

    def __init__(self, rid, prompt=PROMPT):
        self.rid, self.origin_input_ids, self.sampling_params = rid, list(prompt), Params()
        self.output_ids_through_stop, self.finished_reason = [], None

    def finish(self, tokens, reason="length"):
        self.output_ids_through_stop = tokens
        self.finished_reason = SimpleNamespace(to_json=lambda: {"type": reason})


class Writer:
    """Keeps records; its thread's passes are made by hand."""

    def __init__(self, poll):
        self.poll, self.records, self.has_failed = poll, [], False

    def write(self, record):
        self.records.append(record)

    def fail(self, reason):
        self.has_failed = True

    def of(self, kind):
        return [record for record in self.records if isinstance(record, kind)]


@pytest.fixture
def tracer(monkeypatch):
    monkeypatch.setattr(trace_writer, "open_writer", lambda path, poll: Writer(poll))
    return RoundTracer(None, HEADER, Mode.TREE, 15, lambda req: 42)


def add(tracer, *rounds, block=4, full=None):
    """A batch's round: (req, position, root, columns, tokens) each."""

    def row(values):
        return torch.tensor([[*v, *[-1] * (block - len(v))] for v in values])

    reqs = [r[0] for r in rounds]
    path = AcceptPath(
        row([r[3] for r in rounds]), row([r[4] for r in rounds]).clamp(min=0),
        torch.tensor([len(r[3]) for r in rounds], dtype=torch.int32), torch.tensor([0] * len(rounds)),
    )  # fmt: skip
    roots, positions = (torch.tensor([r[at] for r in rounds]) for at in (2, 1))
    tracer.add(reqs, roots, positions, path, tracer.begin(CPU), full)
    tracer.arrive()


def passes(tracer, number=2):
    for _ in range(number):
        tracer._writer.poll(False)


def test_a_request_its_rounds_and_its_end(tracer):
    req, other = Req("a"), Req("b", (1,))
    tracer.see([req, other])
    add(tracer, (req, 3, 10, [0, 2], [11, 12]), (other, 1, 20, [0], [21]))
    passes(tracer)
    add(tracer, (req, 5, 12, [0, 1, 4], [13, 14, 15]))
    req.finish([10, 11, 12, 13, 14])
    passes(tracer)
    first, second = tracer._writer.of(TraceRequest)
    assert (first.id, first.server_id, first.prompt_tokens) == ("r0", "a", PROMPT)
    assert (second.id, second.sampling["seed"], second.mode, second.node_budget) == ("r1", 42, "tree", 15)
    rounds = tracer._writer.of(TraceRound)
    assert [(r.id, r.round, r.position, r.root, r.accept_indices, r.accept_tokens) for r in rounds] == [
        ("r0", 1, 3, 10, (0, 2), (11, 12)),
        ("r0", 2, 5, 12, (0, 1, 4), (13, 14, 15)),
    ]
    assert all(r.round_ms > 0 for r in rounds)
    (end,) = tracer._writer.of(TraceEnd)
    assert (end.id, end.tokens, end.finish_reason) == ("r0", (10, 11, 12, 13, 14), "length")
    assert end.stats == {"prompt_tokens": 3, "new_tokens": 5, "rounds": 2, "accept_length": 2.5}
    assert list(tracer._watched) == ["b"]


NEG_INF = float("-inf")
TREES = DraftTree(
    tokens=torch.tensor([[10, 11, 12, 13], [20, 21, 0, 0]]),
    parents=torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, -1]]),
    depths=torch.tensor([[0, 1, 1, 2], [0, 1, 0, 0]]),
    log_probs=torch.tensor([[0.0, -0.5, -1.0, -1.25], [0.0, -0.25, NEG_INF, NEG_INF]]),
)


@pytest.mark.parametrize("has_logits", [True, False])
def test_full_rounds_have_trees_and_the_target_s_figures(tracer, monkeypatch, has_logits):
    monkeypatch.setattr(trace_rows, "FIGURE_ROWS", 3)  # so that a batch takes several parts
    req, other = Req("a"), Req("b", (1,))
    tracer.see([req, other])
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    path = AcceptPath(
        torch.tensor([[0, 2, -1, -1], [0, -1, -1, -1]]), torch.tensor([[12, 5, 0, 0], [7, 0, 0, 0]]),
        torch.tensor([2, 1]), torch.tensor([5, 7]),
    )  # fmt: skip
    full = full_rows(TREES, path, logits if has_logits else None)
    add(tracer, (req, 3, 10, [0, 2], [12, 5]), (other, 1, 20, [0], [7]), full=full)
    req.finish([10, 12])  # the bonus token came too late
    other.finish([20, 7])
    passes(tracer)
    first, second = tracer._writer.of(TraceRound)
    assert (first.tokens, first.parents) == ((10, 11, 12, 13), (-1, 0, 0, 1))
    assert first.log_probs == (0.0, -0.5, -1.0, -1.25)
    assert (second.tokens, second.parents, second.log_probs) == ((20, 21), (-1, 0), (0.0, -0.25))
    if not has_logits:
        assert first.target == second.target == ()
        return
    for found, row, token in ((first.target, 0, 12), (second.target, 4, 7)):
        ((log_prob, margin),) = found  # of emitted tokens only
        best = logits[row].topk(2).values
        assert log_prob == pytest.approx(float(logits[row].log_softmax(0)[token]), abs=1e-5)
        assert margin == pytest.approx(float(best[0] - best[1]), abs=1e-5)


@pytest.mark.parametrize("is_seen_late", [False, True])
def test_the_round_after_the_end_is_left_out(tracer, is_seen_late):
    req = Req("a")
    tracer.see([req])
    add(tracer, (req, 3, 10, [0], [11]))
    req.finish([10, 11], "stop")
    passes(tracer, 2 if is_seen_late else 0)
    add(tracer, (req, 4, 11, [0], [99]))
    passes(tracer)
    assert [r.accept_tokens for r in tracer._writer.of(TraceRound)] == [(11,)]
    (end,) = tracer._writer.of(TraceEnd)
    assert (end.tokens, end.finish_reason, end.stats["rounds"]) == ((10, 11), "stop", 1)
    assert len(tracer._writer.of(TraceRequest)) == 1


def test_the_output_may_get_its_final_length_after_its_reason(tracer):
    """SGLang sets the reason first, and this is another thread."""
    req = Req("a")
    tracer.see([req])
    add(tracer, (req, 3, 10, [0, 1], [11, 12]))
    req.finish([10, 11, 12], "stop")
    passes(tracer, 1)
    req.output_ids_through_stop = [10, 11]
    passes(tracer, 1)
    assert [end.tokens for end in tracer._writer.of(TraceEnd)] == [(10, 11)]


def test_rounds_wait_for_the_device_in_order(tracer, monkeypatch):
    req = Req("a")
    tracer.see([req])
    events = [SimpleNamespace(is_done=False, elapsed_time=lambda end: 2.5) for _ in range(4)]
    for event in events:
        event.query = lambda event=event: event.is_done
    waiting = iter(events)
    monkeypatch.setattr(trace_writer, "_event", lambda device: next(waiting))
    add(tracer, (req, 3, 10, [0], [11]))
    add(tracer, (req, 4, 11, [0], [12]))
    events[3].is_done = True
    tracer.arrive()
    passes(tracer)
    assert tracer._watched["a"].newest is None
    events[1].is_done = True
    tracer.arrive()
    req.finish([10, 11, 12])
    passes(tracer)
    assert [(r.position, r.round_ms) for r in tracer._writer.of(TraceRound)] == [(3, 2.5), (4, 2.5)]


def test_a_prefill_in_parts_and_after_a_retraction_is_of_one_request(tracer):
    req = Req("a")
    tracer.see([req])
    tracer.see([req])
    add(tracer, (req, 3, 10, [0], [11]))
    tracer.see([req])
    add(tracer, (req, 5, 12, [0], [13]))  # 12 was made by the second prefill
    passes(tracer)
    req.finish([10, 11, 12, 13])
    passes(tracer)
    assert len(tracer._writer.of(TraceRequest)) == 1
    assert [r.round for r in tracer._writer.of(TraceRound)] == [1, 2]


def test_a_request_that_ends_with_its_first_token_has_no_rounds(tracer):
    req = Req("a")
    tracer.see([req])
    req.finish([10])
    passes(tracer)
    (end,) = tracer._writer.of(TraceEnd)
    assert (end.tokens, end.stats["accept_length"]) == ((10,), 0.0)


def test_a_row_that_commits_nothing_is_no_round(tracer):
    req = Req("a")
    tracer.see([req])
    add(tracer, (req, 3, 10, [], []))
    passes(tracer)
    req.finish([10])
    passes(tracer)
    assert tracer._writer.of(TraceRound) == []


def test_requests_are_let_go_and_one_that_is_gone_was_aborted(tracer, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(trace_writer.time, "monotonic", lambda: clock.now)
    gone, waiting = Req("gone"), Req("waiting")
    tracer.see([gone, waiting])
    add(tracer, (gone, 3, 10, [0, 1], [11, 12]))
    passes(tracer)
    del gone
    clock.now = trace_writer.KEEP_S - 0.1
    passes(tracer)
    gc.collect()
    assert tracer._writer.of(TraceEnd) == []
    clock.now = trace_writer.KEEP_S + 0.1
    passes(tracer)
    gc.collect()
    passes(tracer)
    (end,) = tracer._writer.of(TraceEnd)
    assert (end.tokens, end.finish_reason, end.stats["rounds"]) == ((10, 11, 12), "abort", 1)
    waiting.finish([1, 2])
    passes(tracer)
    assert tracer._writer.of(TraceEnd)[1].finish_reason == "length"
    assert tracer._watched == {}


def test_an_id_may_be_used_again(tracer):
    first, second = Req("a"), Req("a")
    tracer.see([first])
    add(tracer, (first, 3, 10, [0], [11]))
    first.finish([10, 11])
    tracer.see([second])
    add(tracer, (first, 4, 11, [0], [99]), (second, 3, 20, [0], [21]))
    second.finish([20, 21])
    passes(tracer)
    assert [(end.id, end.tokens) for end in tracer._writer.of(TraceEnd)] == [
        ("r0", (10, 11)),
        ("r1", (20, 21)),
    ]
    assert [(r.id, r.root) for r in tracer._writer.of(TraceRound)] == [("r0", 10), ("r1", 20)]


def test_rounds_that_nobody_reads_end_the_trace_not_the_memory(tracer, monkeypatch):
    monkeypatch.setattr(trace_writer, "MAX_UNREAD", 5)
    req = Req("a")
    for _ in range(20):
        tracer.see([req])
        add(tracer, (req, 3, 10, [0], [11]))
    assert tracer._writer.has_failed
    assert len(tracer._unread) + len(tracer._in_flight) <= 6
    tracer.see([req])
    assert (len(tracer._unread), tracer._watched) == (0, {})


def test_a_file_is_whole_after_a_close(tmp_path):
    path = tmp_path / "t.jsonl"
    tracer = RoundTracer(path, HEADER, Mode.CHAIN, 3, lambda req: 0)
    req = Req("Grüße")
    tracer.see([req])
    add(tracer, (req, 3, 10, [0, 1], [11, 12]))
    req.finish([10, 11, 12])
    tracer.close()
    (traced,) = read_trace(path).requests
    assert (traced.request.server_id, traced.tokens, len(traced.rounds)) == ("Grüße", (10, 11, 12), 1)
    assert traced._replace(end=None).tokens == traced.tokens


def test_each_process_has_a_file_of_its_own(tmp_path):
    writers = [open_writer(tmp_path / "t.jsonl", lambda is_last: None) for _ in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.jsonl", "t.jsonl-1", "t.jsonl-2"]
    for writer in writers:
        writer.close()


def test_greedy_has_temperature_zero():
    greedy = sampling_fields(Params(), 5)
    assert (greedy["temperature"], greedy["top_k"], greedy["seed"], greedy["max_tokens"]) == (0.0, 0, 5, 8)


@pytest.mark.parametrize(("top_k", "written"), [(1 << 30, 0), (20, 20)])
def test_sampling_parameters(top_k, written):
    sampled = sampling_fields(
        Params(top_k=top_k, temperature=0.7, logit_bias={"3": 1.5}, stop_token_ids={4}, regex="a+"), 5
    )
    assert (sampled["temperature"], sampled["top_k"]) == (0.7, written)
    assert (sampled["logit_bias"], sampled["stop_token_ids"], sampled["regex"]) == ({"3": 1.5}, [4], "a+")


def worker(tmp_path):
    runners = [
        SimpleNamespace(model_config=SimpleNamespace(model_path=str(tmp_path / name)), dtype=torch.bfloat16)
        for name in ("target", "drafter")
    ]
    return SimpleNamespace(model_runner=runners[0], draft_model_runner=runners[1], block_size=8, device="cpu")


@pytest.mark.parametrize(("file", "tp_rank"), [("", 0), ("t.jsonl", 1)])
def test_no_trace_where_none_is_wanted(tmp_path, file, tp_rank):
    config = PluginConfig(trace_file=file and str(tmp_path / file))
    assert make_round_tracer(config, worker(tmp_path), tp_rank=tp_rank, seed_of=hash) is None
    assert list(tmp_path.iterdir()) == []


def test_the_detail_is_the_setting_s_and_is_told_where_it_has_no_effect(tmp_path, caplog):
    with_file = PluginConfig(trace_file=str(tmp_path / "t.jsonl"), trace_detail="full")
    tracer = make_round_tracer(with_file, worker(tmp_path), tp_rank=0, seed_of=hash)
    tracer.close()
    assert (tracer.detail, caplog.records) == (Detail.FULL, [])
    assert (
        make_round_tracer(PluginConfig(trace_detail="full"), worker(tmp_path), tp_rank=0, seed_of=hash)
        is None
    )
    assert [r.getMessage() for r in caplog.records] == ["trace_detail full has no effect without trace_file"]


@pytest.mark.parametrize(("mode", "node_budget"), [(Mode.TREE, 31), (Mode.CHAIN, 7)])
def test_the_header_is_of_the_worker(tmp_path, mode, node_budget):
    config = PluginConfig(trace_file=str(tmp_path / "t.jsonl"), mode=mode)
    tracer = make_round_tracer(config, worker(tmp_path), tp_rank=0, seed_of=lambda req: 1)
    tracer.see([Req("a")])
    tracer.close()
    trace = read_trace(tmp_path / "t.jsonl")
    assert (trace.header.engine, trace.header.dtype, trace.header.device) == ("sglang", "bfloat16", "cpu")
    assert trace.header.settings["block_size"] == 8
    assert trace.header.target == {"name": str(tmp_path / "target")}
    assert trace.requests[0].request.node_budget == node_budget


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits(tmp_path):
    tracer = RoundTracer(tmp_path / "t.jsonl", HEADER, Mode.TREE, 3, lambda req: 0)
    req, device = Req("a"), torch.device("cuda")
    path = AcceptPath(*(torch.tensor(values, device=device) for values in ([[0, 1]], [[11, 12]], [2], [12])))
    roots, positions = torch.tensor([10], device=device), torch.tensor([3], device=device)
    trees = [part.pin_memory() for part in (TREES.tokens, TREES.parents, TREES.depths, TREES.log_probs)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin = tracer.begin(device)
        tracer.see([req])
        tree = DraftTree(*(part[:1].to(device, non_blocking=True) for part in trees))
        logits = torch.zeros(4, 30, device=device)
        tracer.add([req], roots, positions, path, begin, full_rows(tree, path, logits))
        tracer.arrive()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    tracer.arrive()
    req.finish([10, 11, 12])
    tracer.close()
    (traced,) = read_trace(tmp_path / "t.jsonl").requests
    assert traced.rounds[0].accept_tokens == (11, 12)
    assert traced.rounds[0].round_ms > 0


def test_a_writer_s_failure_is_silent_to_the_scheduler(tmp_path, caplog):
    class Broken(Req):
        @property
        def finished_reason(self):
            raise AttributeError("gone in this release")

        @finished_reason.setter
        def finished_reason(self, value):
            """Set by the constructor."""

    tracer = RoundTracer(tmp_path / "t.jsonl", HEADER, Mode.TREE, 3, lambda req: 0)
    req = Broken("a")
    tracer.see([req])
    tracer._writer.close()
    add(tracer, (req, 3, 10, [0], [11]))
    assert isinstance(tracer._writer, TraceWriter)
    assert [r.getMessage() for r in caplog.records if "gone in this release" in r.getMessage()]
