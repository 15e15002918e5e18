"""Numbers for Prometheus, under the names by which dashboards of text-generation-inference and vLLM ask for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Histogram, Metric
from prometheus_client.registry import Collector

from jingu.infer.engine import EngineStats
from jingu.serve.driver import Account, Ticket

_SECONDS = {
    "whole": ("Seconds from arrival to the end.", "tgi_request_duration vllm:e2e_request_latency_seconds"),
    "validation": ("Seconds from arrival until the engine takes it.", "tgi_request_validation_duration"),
    "queue": (
        "Seconds from then until the engine begins with it.",
        "tgi_request_queue_duration vllm:request_queue_time_seconds",
    ),
    "inference": (
        "Seconds from then to the end.",
        "tgi_request_inference_duration vllm:request_inference_time_seconds",
    ),
    "first": ("Seconds from arrival to the first token.", "vllm:time_to_first_token_seconds"),
    "each": (
        "Seconds between two tokens, in the mean.",
        "tgi_request_mean_time_per_token_duration vllm:request_time_per_output_token_seconds",
    ),
}
"""Of requests: words, and names."""
_TOKENS = {
    "prompt": ("Tokens of a request's prompt.", "tgi_request_input_length vllm:request_prompt_tokens"),
    "generated": ("Tokens of its answer.", "tgi_request_generated_tokens vllm:request_generation_tokens"),
    "asked": ("Tokens that it allowed.", "tgi_request_max_new_tokens vllm:request_params_max_tokens"),
}
_BUCKETS = (
    (_SECONDS, (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)),
    (_TOKENS, (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)),
)
_EXPERTS = {
    "resident_bytes": "Size of the experts that are in memory at a time.",
    "hits_total": "Times that a layer needed an expert which was in memory, or being read ahead.",
    "misses_total": "Times that it was not.",
    "read_ahead_total": "Experts read because they were foreseen.",
    "bytes_moved_total": "Bytes of experts read into memory.",
    "waited_seconds_total": "Seconds that the computation stood still for them.",
}
"""Where only some are in memory, by attributes of `jingu.infer.residency.ResidencyStats`."""
_ANSWERED = {"end": "stop", "stop": "stop", "length": "length"}
"""How requests end that are answered, and what that is called."""


class Metrics(Collector):
    """Counts of requests, and the engine's own.

    Args:
        model: name of the base, for labels.
    """

    def __init__(self, model: str) -> None:
        self._model = {"model_name": model}
        self._ended: Counter[str] = Counter()
        self._stats: EngineStats | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._histograms = {
            key: [
                Histogram(name, words, ["model_name"], buckets=buckets, registry=self._registry)
                for name in names.split()
            ]
            for table, buckets in _BUCKETS
            for key, (words, names) in table.items()
        }

    def ended(self, ticket: Ticket) -> None:
        """Count a request that has ended."""
        self._ended[ticket.account.finish] += 1
        for key, value in _observed(ticket.account, ticket):
            for histogram in self._histograms[key]:
                histogram.labels(**self._model).observe(value)

    def page(self, stats: EngineStats) -> bytes:
        """All of it as Prometheus reads it."""
        self._stats = stats
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What is counted elsewhere than in histograms."""
        stats = self._stats
        assert stats is not None
        answered = {"stop": 0, "length": 0}
        for reason, shown in _ANSWERED.items():
            answered[shown] += self._ended[reason]
        failed = {reason: count for reason, count in self._ended.items() if reason not in _ANSWERED}
        yield self._many("tgi_request_failure", "Requests that have ended without an answer.", "err", failed)
        yield self._many("vllm:request_success_total", "Requests answered.", "finished_reason", answered)
        pages = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        for name, words, value in (
            ("tgi_request_count", "Requests that have ended.", self._ended.total()),
            ("tgi_request_success", "Of these, answered.", sum(answered.values())),
            ("tgi_batch_current_size", "Choices being made.", stats.running),
            ("tgi_queue_size", "Choices that wait to begin.", stats.waiting),
            ("vllm:num_requests_running", "Choices being made.", stats.running),
            ("vllm:num_requests_waiting", "Choices that wait to begin.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the cache's pages in use, 1 for all.", pages),
            ("vllm:prompt_tokens_total", "Tokens of prompts.", stats.prompt_tokens),
            ("vllm:generation_tokens_total", "Tokens generated.", stats.generated_tokens),
            ("vllm:prefix_cache_queries_total", "Tokens of prompts looked for in the cache.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits_total", "Of these, found there.", stats.prefix_hits),
            ("vllm:spec_decode_num_draft_tokens_total", "Tokens that were guessed to follow.", stats.guessed_tokens),
            ("vllm:spec_decode_num_accepted_tokens_total", "Of these, those that came.", stats.right_guesses),
            ("tgi_batch_inference_count", "Steps of the engine.", stats.steps),
        ):
            yield self._metric(name, words, "unknown", (name, {}, value))
        for name, words, seconds in (
            ("tgi_batch_inference_duration", "Seconds of the engine's steps.", stats.step_seconds),
            ("tgi_batch_forward_duration", "Of these, in the model.", stats.model_seconds),
        ):
            yield self._metric(name, words, "summary", (f"{name}_sum", {}, seconds), (f"{name}_count", {}, stats.steps))
        for name, words in _EXPERTS.items() if stats.experts is not None else ():
            value, shown = getattr(stats.experts, name.removesuffix("_total")), f"jingu_experts_{name}"
            yield self._metric(shown, words, "unknown", (shown, {}, value))

    def _many(self, name: str, words: str, label: str, values: Mapping[str, float]) -> Metric:
        return self._metric(name, words, "unknown", *((name, {label: key}, value) for key, value in values.items()))

    def _metric(self, name: str, words: str, kind: str, *samples: tuple[str, dict[str, str], float]) -> Metric:
        """Names are told as they are, which the library's own counters would not do."""
        metric = Metric(name, words, kind)
        for sample, labels, value in samples:
            metric.add_sample(sample, {**self._model, **labels}, value)
        return metric


def _observed(account: Account, ticket: Ticket) -> Iterator[tuple[str, float]]:
    if account.ended is not None:
        yield "whole", account.ended - account.arrived
        yield "validation", account.accepted - account.arrived
        if account.begun:
            yield "queue", account.begun - account.accepted
            yield "inference", account.ended - account.begun
    yield "asked", sum(request.max_tokens for request in ticket.requests)
    if account.first_token is not None and account.last_token is not None:
        yield "first", account.first_token - account.arrived
        yield "prompt", account.prompt_tokens
        yield "generated", account.generated_tokens
        if account.generated_tokens > 1:
            yield "each", (account.last_token - account.first_token) / (account.generated_tokens - 1)
