"""Numbers for Prometheus, under the names by which dashboards of text-generation-inference and vLLM ask for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Histogram, Metric
from prometheus_client.registry import Collector

from jingu.infer.engine import EngineStats
from jingu.serve.driver import Account, Ticket

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_HISTOGRAMS: dict[str, tuple[tuple[str, ...], tuple[float, ...], str]] = {
    "duration": (
        ("tgi_request_duration", "vllm:e2e_request_latency_seconds"),
        _SECONDS,
        "Seconds from a request's arrival to its end.",
    ),
    "validation": (
        ("tgi_request_validation_duration",),
        _SECONDS,
        "Seconds from a request's arrival until the engine takes it.",
    ),
    "queue": (
        ("tgi_request_queue_duration", "vllm:request_queue_time_seconds"),
        _SECONDS,
        "Seconds from then until the engine begins with it.",
    ),
    "inference": (
        ("tgi_request_inference_duration", "vllm:request_inference_time_seconds"),
        _SECONDS,
        "Seconds from then to its end.",
    ),
    "first": (
        ("vllm:time_to_first_token_seconds",),
        _SECONDS,
        "Seconds from a request's arrival to its first token.",
    ),
    "each": (
        ("tgi_request_mean_time_per_token_duration", "vllm:request_time_per_output_token_seconds"),
        _SECONDS,
        "Seconds between two tokens of a request, in the mean.",
    ),
    "prompt": (
        ("tgi_request_input_length", "vllm:request_prompt_tokens"),
        _TOKENS,
        "Tokens of a request's prompt.",
    ),
    "generated": (
        ("tgi_request_generated_tokens", "vllm:request_generation_tokens"),
        _TOKENS,
        "Tokens that a request was answered with.",
    ),
    "asked": (
        ("tgi_request_max_new_tokens", "vllm:request_params_max_tokens"),
        _TOKENS,
        "Tokens that a request allowed.",
    ),
}
_EXPERTS = {
    "resident_bytes": "Size of the experts that are in memory at a time.",
    "hits_total": "Times that a layer needed an expert which was in memory, or being read ahead.",
    "misses_total": "Times that it was not.",
    "read_ahead_total": "Experts read because they were foreseen.",
    "bytes_moved_total": "Bytes of experts read into memory.",
    "waited_seconds_total": "Seconds that the computation stood still for them.",
}
"""Where only some are in memory, by attributes of `jingu.infer.residency.ResidencyStats`."""
Samples = Iterable[tuple[dict[str, str], float]]


class Metrics(Collector):
    """Counts of requests, and the engine's own.

    Args:
        model: name of the base, for labels.
    """

    def __init__(self, model: str) -> None:
        self._model = {"model_name": model}
        self._requests: dict[str, int] = {}
        self._histograms = {
            key: Histogram(names[0], words, buckets=buckets, registry=None)
            for key, (names, buckets, words) in _HISTOGRAMS.items()
        }
        self._stats: EngineStats | None = None

    def ended(self, ticket: Ticket) -> None:
        """Count a request that has ended."""
        account = ticket.account
        self._requests[account.finish] = self._requests.get(account.finish, 0) + 1
        for key, value in _observed(account, ticket):
            self._histograms[key].observe(value)

    def page(self, stats: EngineStats) -> bytes:
        """All of it as Prometheus reads it."""
        self._stats = stats
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: names are told with the values."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every metric under each of its names."""
        stats = self._stats
        assert stats is not None
        for key, histogram in self._histograms.items():
            (found,) = histogram.collect()
            for name in _HISTOGRAMS[key][0]:
                yield self._renamed(found, name)
        good = {reason: self._requests.get(reason, 0) for reason in ("end", "stop", "length")}
        bad = {reason: count for reason, count in self._requests.items() if reason not in good}
        reasons = {"end": "stop", "stop": "stop", "length": "length"}
        by_reason: dict[str, float] = {"stop": 0.0, "length": 0.0}
        for reason, count in good.items():
            by_reason[reasons[reason]] += count
        yield self._plain("tgi_request_count", "Requests that have ended.", sum(self._requests.values()))
        yield self._plain("tgi_request_success", "Of these, answered.", sum(good.values()))
        yield self._many("tgi_request_failure", "Of these, not.", [({"err": key}, count) for key, count in bad.items()])
        successes = [({"finished_reason": key}, count) for key, count in by_reason.items()]
        yield self._many("vllm:request_success_total", "Requests answered.", successes)
        pages = stats.pages_used / stats.pages_total if stats.pages_total else 0.0
        for name, words, value in (
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
            yield self._plain(name, words, value)
        for name, words, seconds in (
            ("tgi_batch_inference_duration", "Seconds of the engine's steps.", stats.step_seconds),
            ("tgi_batch_forward_duration", "Of these, in the model.", stats.model_seconds),
        ):
            summary = Metric(name, words, "summary")
            summary.add_sample(f"{name}_sum", self._model, seconds)
            summary.add_sample(f"{name}_count", self._model, stats.steps)
            yield summary
        for name, words in _EXPERTS.items() if stats.experts is not None else ():
            yield self._plain(f"jingu_experts_{name}", words, getattr(stats.experts, name.removesuffix("_total")))

    def _plain(self, name: str, words: str, value: float) -> Metric:
        return self._many(name, words, [({}, value)])

    def _many(self, name: str, words: str, samples: Samples) -> Metric:
        """Names are told as they are, which the library's own counters would not do."""
        metric = Metric(name, words, "unknown")
        for labels, value in samples:
            metric.add_sample(name, {**self._model, **labels}, value)
        return metric

    def _renamed(self, found: Metric, name: str) -> Metric:
        metric = Metric(name, found.documentation, found.type)
        for sample in found.samples:
            if not sample.name.endswith("_created"):
                suffix = sample.name.removeprefix(found.name)
                metric.add_sample(name + suffix, {**self._model, **sample.labels}, sample.value)
        return metric


def _observed(account: Account, ticket: Ticket) -> Iterator[tuple[str, float]]:
    if account.ended is not None:
        yield "duration", account.ended - account.arrived
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
