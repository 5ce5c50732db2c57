"""Metrics for Prometheus, with names in the style of vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from time import time

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hpcdecode.data.prompts.rows import RowError
from hpcdecode.engine.live import Event, Update
from hpcdecode.requests.sequence import CANCELLED
from hpcdecode.serve.context import Context
from hpcdecode.serve.failures import errors
from hpcdecode.serve.receivers import TimedRow

PREFIX = "hpcdecode:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name",)
ROW_LABELS = (*LABELS, "source")  # of rows: `request`, or `batch`, whose rows wait for each other
# Bounds in seconds.
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1200.0)
WHOLE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0)


class ServerMetrics:
    """Counts what happens to the rows of a server; `observe` is told every event.

    Args:
        context: Of the server.
    """

    def __init__(self, context: Context) -> None:
        self.registry = CollectorRegistry()
        self._model = context.models[0]
        self.registry.register(_DeskReadings(context))
        self._first_token = self._histogram(
            "time_to_first_token", "From arrival to the first token", FIRST_TOKEN_BUCKETS
        )
        self._gap = self._histogram("inter_token_latency", "Between tokens of rows that are streamed", GAP_BUCKETS)
        self._whole = self._histogram("e2e_request_latency", "From arrival to the last token", WHOLE_BUCKETS)
        self._finished = Counter(
            f"{PREFIX}request_success",
            "Samples that have ended, by reason: stop, length, abort (cancelled) or error.",
            (*ROW_LABELS, "finished_reason"),
            registry=self.registry,
        )

    def observe(self, row: TimedRow, event: Event) -> None:
        """Count an event of a row."""
        if isinstance(event, Update):
            self._token(row, len(event.token_ids))
        elif isinstance(event, RowError):
            self._ended(row, "abort" if event.reason == CANCELLED else "error")
        else:
            for result in event:
                self._ended(row, result.finish_reason)
            if not row.first_token_at:
                self._add(self._first_token, row, event[0].first_token_at - row.submitted_at)
            self._add(self._whole, row, max(result.finished_at for result in event) - row.submitted_at)

    def text(self) -> bytes:
        """Return all values in Prometheus' text format."""
        return generate_latest(self.registry)

    def _token(self, row: TimedRow, count: int) -> None:
        now = time()
        if not row.first_token_at:
            row.first_token_at = now
            self._add(self._first_token, row, now - row.submitted_at)
        elif row.prompt.params.samples == 1:
            for _ in range(count):
                self._add(self._gap, row, (now - row.last_token_at) / count)
        row.last_token_at = now

    def _ended(self, row: TimedRow, reason: str) -> None:
        self._finished.labels(self._model, row.source, reason).inc()

    def _add(self, histogram: Histogram, row: TimedRow, seconds: float) -> None:
        histogram.labels(self._model, row.source).observe(max(seconds, 0.0))

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        """Return a histogram of seconds, which is there from the start for rows of requests."""
        made = Histogram(f"{PREFIX}{name}_seconds", f"{what}.", ROW_LABELS, buckets=buckets, registry=self.registry)
        made.labels(self._model, TimedRow.source)
        return made


class _DeskReadings(Collector):
    """Reads what the desk knows when it is asked."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        """Yield gauges and counters."""
        desk, capacity = self._context.desk, self._context.kv_capacity
        counts = desk.counts
        gauges = {
            "num_requests_running": ("Rows in flight.", desk.running),
            "num_requests_waiting": ("Rows that wait.", desk.queued),
            "kv_cache_tokens": ("Tokens in KV caches, of rows in flight.", desk.load),
            "kv_cache_capacity_tokens": ("Tokens that KV caches have room for.", capacity),
            "kv_cache_usage_perc": ("Share of the KV caches that is in use, 1 for all.", desk.load / max(capacity, 1)),
        }
        counters = {
            "prompt_tokens": ("Tokens of the prompts of finished rows.", counts.prompt_tokens),
            "generation_tokens": ("Tokens that finished rows have generated.", counts.generated_tokens),
            "prefix_cache_queries": ("Tokens of their prompts, which other rows may share.", counts.prompt_tokens),
            "prefix_cache_hits": ("Those whose K and V other rows had.", counts.shortcuts.cached_tokens),
            "spec_decode_num_draft_tokens": ("Tokens guessed for them.", counts.shortcuts.drafted_tokens),
            "spec_decode_num_accepted_tokens": ("Those that were right.", counts.shortcuts.confirmed_tokens),
        }
        for kind, values in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (what, value) in values.items():
                family = kind(f"{PREFIX}{name}", what, labels=LABELS)
                family.add_metric((self._context.models[0],), value)
                yield family
        seconds = CounterMetricFamily(
            f"{PREFIX}operation_seconds", "Seconds of the lead by what it did.", labels=(*LABELS, "operation")
        )
        for operation, value in self._context.timeline.shares().items():
            seconds.add_metric((self._context.models[0], operation), value)
        yield seconds


def metrics_router(metrics: ServerMetrics) -> APIRouter:
    """Return the route of the metrics."""
    router = APIRouter()

    @router.get("/metrics", responses=errors(401))
    async def values() -> Response:
        """Return all metrics in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return router
