"""Prometheus metrics of one server, kept by the official client library; names follow vLLM's.

`Metrics` counts requests as they end; `JointSteps` reads the scheduler's totals over decoding steps at each scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..session.events import Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class JointSteps(Collector):
    """Totals over the decoding steps of all requests, read at each scrape; see `session.scheduler.Tally`.

    Args:
        load: Returns the totals; an empty mapping if there are none.
    """

    def __init__(self, load: Callable[[], dict[str, float]]) -> None:
        self._load = load

    def describe(self) -> Iterable[Metric]:
        """Empty: the metrics are not known before they are collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The current metrics."""
        load = self._load()
        if not load:
            return
        for name, text in (
            ("passes", "Verification passes over all running requests"),
            ("sequences", "Requests in these passes, in sum"),
            ("columns", "Columns of these passes: drafted tokens, and one of each request"),
        ):
            yield CounterMetricFamily(f"dflash_joint_{name}", text, load[name])
        preempted = "Requests that were preempted for want of cache rows"
        yield CounterMetricFamily("dflash_joint_parkings", preempted, load["preemptions"])
        yield CounterMetricFamily("dflash_graphs_built", "Computation graphs built", load["built"])
        yield GaugeMetricFamily("dflash_graphs", "Computation graphs that are kept", load["graphs"])
        yield CounterMetricFamily("dflash_joint_seconds", "Seconds in these passes", load["seconds"])
        yield CounterMetricFamily("dflash_joint_tokens", "Tokens that these passes gave", load["emitted"])
        per_pass = load["columns"] / load["passes"] if load["passes"] else 0.0
        per_second = load["emitted"] / load["seconds"] if load["seconds"] else 0.0
        yield GaugeMetricFamily("dflash_columns_per_pass", "Mean columns of a pass since the start", per_pass)
        yield GaugeMetricFamily(
            "dflash_tokens_per_second", "Tokens per second of passes, of all requests in sum", per_second
        )


class Metrics:
    """Counters in a separate registry; thread-safe.

    Args:
        running: Returns the number of running requests.
        waiting: Returns the number of queued requests.
        load: Returns the totals for `JointSteps`.
    """

    def __init__(
        self,
        running: Callable[[], int],
        waiting: Callable[[], int],
        load: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"dflash_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"dflash_{name}", text, buckets=buckets, registry=registry)

        registry.register(JointSteps(load))
        Gauge("dflash_num_requests_running", "Requests being answered", registry=registry).set_function(
            running
        )
        Gauge("dflash_num_requests_waiting", "Requests in the queue", registry=registry).set_function(waiting)
        self._finished = counter("request_success", "Finished requests", "finished_reason")
        self._failed = counter("request_failure", "Requests answered with an error", "status")
        self._prompt = counter("prompt_tokens", "Prompt tokens")
        self._cached = counter("prefix_cache_hit_tokens", "Prompt tokens taken from the prefix cache")
        self._generated = counter("generation_tokens", "Tokens generated")
        self._steps = counter("spec_decode_num_drafts", "Verification passes of the target")
        self._drafted = counter("spec_decode_num_draft_tokens", "Draft tokens (tree nodes) offered")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self._drafted_by = counter(
            "spec_decode_source_draft_tokens",
            "Draft tokens offered, by source: a kind of draft, or suffix",
            "source",
        )
        self._accepted_by = counter(
            "spec_decode_source_accepted_tokens", "Draft tokens accepted, by source", "source"
        )
        self._seconds = histogram(
            "e2e_request_latency_seconds", "Time from start to end of a request", _SECONDS
        )
        self._prefill = histogram("request_prefill_time_seconds", "Time spent on the prompt", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "Time spent on generating", _SECONDS)
        self._speed = histogram(
            "request_tokens_per_second",
            "Tokens per second of a request while it was written",
            (1, 5, 10, 20, 40, 80, 160, 320, 640, 1280),
        )
        self._per_step = histogram(
            "spec_decode_tokens_per_step",
            "Mean tokens per verification pass of a request",
            (1, 1.5, 2, 3, 4, 6, 8, 12, 16),
        )

    def usage(self, usage: Usage) -> None:
        """Count one request's tokens, also those of a cancelled one."""
        self._prompt.inc(usage.prompt_n)
        self._cached.inc(usage.cached_n)
        self._generated.inc(usage.predicted_n)
        self._steps.inc(usage.steps)
        self._drafted.inc(usage.draft_n)
        self._accepted.inc(usage.draft_n_accepted)
        for source in usage.sources:
            self._drafted_by.labels(source.name).inc(source.draft_n)
            self._accepted_by.labels(source.name).inc(source.draft_n_accepted)
        self._prefill.observe(usage.prompt_ms / 1000)
        self._decode.observe(usage.predicted_ms / 1000)
        if usage.predicted_ms > 0 and usage.predicted_n:
            self._speed.observe(usage.predicted_per_second)
        if usage.steps:
            self._per_step.observe(usage.tokens_per_step)

    def finished(self, reason: str) -> None:
        """Count an answer by its finish reason."""
        self._finished.labels(reason).inc()

    def failed(self, status: int) -> None:
        """Count an error response by its status."""
        self._failed.labels(str(status)).inc()

    def seconds(self, seconds: float) -> None:
        """Record how long the engine was busy with one request."""
        self._seconds.observe(seconds)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
