"""Metrics for Prometheus, under the names that dashboards for text-generation-inference and vLLM expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Histogram, Metric
from prometheus_client.registry import Collector

from jingu.infer.engine_interface import EngineStats
from jingu.serve.async_engine import RequestHandle
from jingu.tables import read_table

# Names and help texts of all metrics.
_TABLES = read_table(__file__, "metrics.toml")
_BUCKETS = {
    "seconds": (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300),
    "tokens": (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
}

# Finish reasons of successful requests, by the engine's names.
_SUCCESS_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


class ServerMetrics(Collector):
    """Metrics of the requests and of the engine.

    Args:
        model: name of the base model, which labels every sample.
    """

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model}
        self._finish_reasons: Counter[str] = Counter()
        self._stats: EngineStats | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._histograms: dict[str, list[Histogram]] = {}
        for unit, buckets in _BUCKETS.items():
            for key, (text, *names) in _TABLES[unit].items():
                self._histograms[key] = [
                    Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry) for name in names
                ]

    def record(self, handle: RequestHandle) -> None:
        """Count a request that has ended."""
        self._finish_reasons[handle.stats.finish_reason] += 1
        for key, value in _measure(handle):
            for histogram in self._histograms[key]:
                histogram.labels(**self._labels).observe(value)

    def export(self, stats: EngineStats) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are not histograms."""
        stats = self._stats
        assert stats is not None
        # List both reasons even while they are 0, so that rates can be computed from the start.
        successes = {"stop": 0, "length": 0}
        failures = {}
        for reason, count in self._finish_reasons.items():
            if reason in _SUCCESS_REASONS:
                successes[_SUCCESS_REASONS[reason]] += count
            else:
                failures[reason] = count
        yield self._counts("tgi_request_failure", "Requests that have failed.", "err", failures)
        yield self._counts("vllm:request_success_total", "Requests that have succeeded.", "finished_reason", successes)
        values = {
            **vars(stats),
            "ended": self._finish_reasons.total(),
            "succeeded": sum(successes.values()),
            "cache_usage": stats.used_bytes / stats.total_bytes if stats.total_bytes else 0.0,
        }
        if stats.experts is not None:
            values |= {f"experts.{name}": value for name, value in vars(stats.experts).items()}
        for name, (text, value) in _TABLES["gauges"].items():
            if value in values:
                yield self._metric(name, text, "unknown", (name, {}, values[value]))
        for name, text, seconds in (
            ("tgi_batch_inference_duration", "Seconds of the engine's steps.", stats.step_seconds),
            ("tgi_batch_forward_duration", "Seconds of the model's forward passes.", stats.forward_seconds),
        ):
            yield self._metric(name, text, "summary", (f"{name}_sum", {}, seconds), (f"{name}_count", {}, stats.steps))

    def _counts(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._metric(name, text, "unknown", *((name, {label: key}, value) for key, value in values.items()))

    def _metric(self, name: str, text: str, kind: str, *samples: tuple[str, dict[str, str], float]) -> Metric:
        """Return a metric with exactly these sample names; the library's own counters would append `_total`."""
        metric = Metric(name, text, kind)
        for sample, labels, value in samples:
            metric.add_sample(sample, {**self._labels, **labels}, value)
        return metric


def _measure(handle: RequestHandle) -> Iterator[tuple[str, float]]:
    """Yield (key of a histogram, value) for a request that has ended."""
    stats = handle.stats
    if stats.end_time is not None:
        yield "e2e", stats.end_time - stats.arrival_time
        yield "validation", stats.accepted_time - stats.arrival_time
        if stats.start_time:
            yield "queue", stats.start_time - stats.accepted_time
            yield "inference", stats.end_time - stats.start_time
    yield "max_tokens", sum(request.max_tokens for request in handle.requests)
    if stats.first_token_time is not None and stats.last_token_time is not None:
        yield "first_token", stats.first_token_time - stats.arrival_time
        yield "prompt", stats.prompt_tokens
        yield "generated", stats.generated_tokens
        if stats.generated_tokens > 1:
            yield "per_token", (stats.last_token_time - stats.first_token_time) / (stats.generated_tokens - 1)
