"""Metrics for Prometheus, under the names that dashboards for text-generation-inference and vLLM expect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Histogram, Metric
from prometheus_client.registry import Collector

from jingu.infer.engine_interface import EngineStats
from jingu.serve.async_engine import RequestHandle

# Histograms: their help text, and the names under which each is exported.
_SECONDS = {
    "e2e": ("Seconds from arrival to the end.", "tgi_request_duration vllm:e2e_request_latency_seconds"),
    "validation": ("Seconds from arrival to acceptance by the engine.", "tgi_request_validation_duration"),
    "queue": ("Seconds from acceptance to the start.", "tgi_request_queue_duration vllm:request_queue_time_seconds"),
    "inference": ("Seconds after it.", "tgi_request_inference_duration vllm:request_inference_time_seconds"),
    "first_token": ("Seconds from arrival to the first token.", "vllm:time_to_first_token_seconds"),
    "per_token": (
        "Mean seconds between two tokens.",
        "tgi_request_mean_time_per_token_duration vllm:request_time_per_output_token_seconds",
    ),
}
_TOKENS = {
    "prompt": ("Tokens of the prompt.", "tgi_request_input_length vllm:request_prompt_tokens"),
    "generated": ("Tokens generated.", "tgi_request_generated_tokens vllm:request_generation_tokens"),
    "max_tokens": ("Tokens allowed.", "tgi_request_max_new_tokens vllm:request_params_max_tokens"),
}
_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

# Finish reasons of successful requests, by the engine's names.
_SUCCESS_REASONS = {"end": "stop", "stop": "stop", "length": "length"}


class ServerMetrics(Collector):
    """Metrics of requests, and of the engine.

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
        for table, buckets in ((_SECONDS, _SECONDS_BUCKETS), (_TOKENS, _TOKENS_BUCKETS)):
            for key, (text, names) in table.items():
                self._histograms[key] = [
                    Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
                    for name in names.split()
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
        # Both are listed even while they are 0, so that rates can be computed from the start.
        successes = {"stop": 0, "length": 0}
        failures = {}
        for reason, count in self._finish_reasons.items():
            if reason in _SUCCESS_REASONS:
                successes[_SUCCESS_REASONS[reason]] += count
            else:
                failures[reason] = count
        yield self._labeled("tgi_request_failure", "Requests that have failed.", "err", failures)
        yield self._labeled("vllm:request_success_total", "Requests that have succeeded.", "finished_reason", successes)
        cache_usage = stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0
        gauges: list[tuple[str, str, float]] = [
            ("tgi_request_count", "Requests that have ended.", self._finish_reasons.total()),
            ("tgi_request_success", "Requests that have succeeded.", sum(successes.values())),
            ("tgi_batch_current_size", "Running sequences.", stats.running),
            ("tgi_queue_size", "Waiting sequences.", stats.waiting),
            ("vllm:num_requests_running", "Running sequences.", stats.running),
            ("vllm:num_requests_waiting", "Waiting sequences.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Fraction of the KV cache's blocks in use.", cache_usage),
            ("vllm:prompt_tokens_total", "Prompt tokens.", stats.prompt_tokens),
            ("vllm:generation_tokens_total", "Generated tokens.", stats.generated_tokens),
            ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("vllm:spec_decode_num_draft_tokens_total", "Draft tokens.", stats.draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens_total", "Accepted draft tokens.", stats.accepted_tokens),
            ("tgi_batch_inference_count", "Steps of the engine.", stats.steps),
        ]
        if (experts := stats.experts) is not None:
            gauges += [
                ("jingu_experts_resident_bytes", "Bytes of experts in memory.", experts.resident_bytes),
                ("jingu_experts_hits_total", "Experts needed that were in memory or being prefetched.", experts.hits),
                ("jingu_experts_misses_total", "Experts needed that were not.", experts.misses),
                ("jingu_experts_prefetched_total", "Experts that were prefetched.", experts.prefetched),
                ("jingu_experts_bytes_read_total", "Bytes of experts read into memory.", experts.bytes_read),
                ("jingu_experts_wait_seconds_total", "Seconds spent waiting for experts.", experts.wait_seconds),
            ]
        for name, text, value in gauges:
            yield self._metric(name, text, "unknown", (name, {}, value))
        for name, text, seconds in (
            ("tgi_batch_inference_duration", "Seconds of the engine's steps.", stats.step_seconds),
            ("tgi_batch_forward_duration", "Seconds of the model's forward passes.", stats.forward_seconds),
        ):
            yield self._metric(name, text, "summary", (f"{name}_sum", {}, seconds), (f"{name}_count", {}, stats.steps))

    def _labeled(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._metric(name, text, "unknown", *((name, {label: key}, value) for key, value in values.items()))

    def _metric(self, name: str, text: str, kind: str, *samples: tuple[str, dict[str, str], float]) -> Metric:
        """Return a metric whose samples keep their names. The library's own counters would append `_total`."""
        metric = Metric(name, text, kind)
        for sample, labels, value in samples:
            metric.add_sample(sample, {**self._labels, **labels}, value)
        return metric


def _measure(handle: RequestHandle) -> Iterator[tuple[str, float]]:
    """Yield the histograms' values for a request that has ended."""
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
