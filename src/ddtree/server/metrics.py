"""What the server counts, for Prometheus and for /v1/ddtree/stats."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ddtree.engine.request import Generation
from ddtree.stats import RoundStats

SHORT_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
LONG_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
PREFIX = "ddtree_server"


class ServerMetrics:
    """The server's metrics, in a registry of their own; safe to feed from several threads."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.started_at = time.time()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=registry)

        self.requests = counter("requests", "Requests by how they ended.", "endpoint", "outcome")
        self.tokens = counter("tokens", "Prompt and completion tokens of requests that ran.", "kind")
        self.queue_requests = gauge("queue_requests", "Requests that wait for the engine.")
        self.running_requests = gauge("running_requests", "Requests that the engine runs: 0 or 1.")
        self.queue_wait = histogram("queue_wait_seconds", "From a request's arrival to its start.", LONG_S)
        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", LONG_S
        )
        self.inter_token = histogram(
            "inter_token_seconds", "Time between rounds over the tokens committed, once a token.", SHORT_S
        )
        self.request_time = histogram(
            "request_seconds", "From arrival to end of requests that were answered.", LONG_S
        )
        self.accept_length = histogram(
            "accept_length", "Tokens that a round commits, the bonus token included.",
            tuple(map(float, range(1, 17))),
        )  # fmt: skip
        self.accept_depth = counter("accept_depth", "Rounds whose draft at this depth was correct.", "depth")
        self.rounds = counter("rounds", "Rounds by mode.", "mode")
        self.node_budget = gauge("node_budget", "Node budget of the last round, the root not counted.")
        self.round_time = histogram(
            "round_seconds", "One round: draft, build, verify, accept, commit.", SHORT_S
        )
        self.stage_time = counter(
            "stage_seconds", "Engine time by stage: prefill, rounds, and text (what decoding adds).", "stage"
        )

    def on_started(self, wait_s: float) -> None:
        self.queue_wait.observe(wait_s)

    def on_round(self, stats: RoundStats) -> None:
        self.rounds.labels(str(stats.mode)).inc()
        self.accept_length.observe(stats.num_accept_tokens)
        for depth in range(1, stats.num_accept_tokens):
            self.accept_depth.labels(str(depth)).inc()
        self.node_budget.set(stats.node_budget)
        self.round_time.observe(stats.round_ms / 1e3)
        self.stage_time.labels("rounds").inc(stats.round_ms / 1e3)

    def on_tokens(self, count: int, gap_s: float) -> None:
        """Tokens that came together, so long after the ones before."""
        for _ in range(count):
            self.inter_token.observe(gap_s / count)

    def on_ended(self, generation: Generation, rounds_s: float) -> None:
        """Totals of a request that ran, to its end or not."""
        stats = generation.stats
        self.tokens.labels("prompt").inc(stats.prompt_tokens)
        self.tokens.labels("completion").inc(stats.new_tokens)
        self.stage_time.labels("prefill").inc(stats.prefill_s)
        self.stage_time.labels("text").inc(max(0.0, stats.decode_s - rounds_s))

    def on_answered(self, endpoint: str, outcome: str, seconds: float) -> None:
        """A request left the server."""
        self.requests.labels(endpoint, outcome).inc()
        if outcome == "ok":
            self.request_time.observe(seconds)

    def totals(self) -> dict[str, Any]:
        """The counts so far, with the ratios that matter."""
        requests: dict[str, dict[str, int]] = {}
        for labels, count in self._samples(self.requests, "_total"):
            requests.setdefault(labels["endpoint"], {})[labels["outcome"]] = int(count)
        rounds = {labels["mode"]: int(count) for labels, count in self._samples(self.rounds, "_total")}
        [(_, round_ct)] = self._samples(self.accept_length, "_count")
        [(_, committed)] = self._samples(self.accept_length, "_sum")
        stages = {labels["stage"]: seconds for labels, seconds in self._samples(self.stage_time, "_total")}
        depths = {labels["depth"]: count for labels, count in self._samples(self.accept_depth, "_total")}
        decode_s = stages.get("rounds", 0.0) + stages.get("text", 0.0)
        return {
            "uptime_s": round(time.time() - self.started_at, 3),
            "requests": requests,
            "tokens": {labels["kind"]: int(count) for labels, count in self._samples(self.tokens, "_total")},
            "rounds": rounds,
            "accept_length": round(committed / round_ct, 4) if round_ct else None,
            "accept_histogram": self._accept_histogram(),
            "accept_rate_by_depth": {depth: round(count / round_ct, 4) for depth, count in depths.items()},
            "tokens_per_s": round(committed / decode_s, 3) if decode_s else None,
            "stage_s": {stage: round(seconds, 4) for stage, seconds in stages.items()},
        }

    def _accept_histogram(self) -> dict[str, int]:
        """Rounds by accept length; what Prometheus keeps is how many were at most so long."""
        counts, below = {}, 0
        for labels, count in self._samples(self.accept_length, "_bucket"):
            if count > below:
                length = labels["le"]
                counts["17+" if length == "+Inf" else str(int(float(length)))] = int(count) - below
            below = int(count)
        return counts

    def _samples(self, metric: Any, suffix: str) -> list[tuple[dict[str, str], float]]:
        return [
            (sample.labels, sample.value)
            for family in metric.collect()
            for sample in family.samples
            if sample.name == family.name + suffix
        ]
