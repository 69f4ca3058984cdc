"""
Counters, gauges and histograms of /metrics, and named counts that stores keep.

Each server has its own registry, so two of them in one process (tests) do not mix.
docs/metrics.md says what each means and which should stay 0.
"""

import collections
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as _exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

# Of a store and its pipeline: docs/metrics.md says what each means.
HEALTHY_AT_ZERO = (
    "alignment_unavailable",
    "exact_key_rejected_by_model_lcp",
    "invariant_violation",
    "splice_unavailable",
    "watchdog_abort",
)


class Counters:
    """Counts by name. Any thread."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        start = dict.fromkeys(names, 0)
        self._counts: collections.Counter[str] = collections.Counter(start)
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        """Count `amount` events."""
        with self._lock:
            self._counts[name] += amount

    def add_all(self, amounts: Mapping[str, int]) -> None:
        """Count several, in one go."""
        with self._lock:
            self._counts.update(amounts)

    def snapshot(self) -> dict[str, int]:
        """All counts now."""
        with self._lock:
            return dict(self._counts)

    def __getitem__(self, name: str) -> int:
        return self._counts[name]


_DRAFTS = {
    "calls": "Forward passes that tried a draft.",
    "drafted": "Tokens that were drafted.",
    "accepted": "Drafted tokens that were said.",
}
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_SECONDS_A_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)


class _Counts(Collector):
    def __init__(self, begin: str, source: Callable[[], Mapping[str, int]]) -> None:
        self._begin, self._source = begin, source

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, count in sorted(self._source().items()):
            family = CounterMetricFamily(f"{self._begin}{name}", "See docs/metrics.md.")
            family.add_metric([], count)
            yield family


class _ModelStates(Collector):
    def __init__(self, source: Callable[[], Mapping[str, str]]) -> None:
        self._source = source

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "mlx_model_state", "1 for the state of a model.", labels=["model", "state"]
        )
        for model, state in self._source().items():
            family.add_metric([model, state], 1)
        yield family


def _of_drafts(registry: CollectorRegistry) -> dict[str, Counter]:
    return {
        name: Counter(f"mlx_speculation_{name}", help, ["drafter"], registry=registry)
        for name, help in _DRAFTS.items()
    }


def _between_tokens(registry: CollectorRegistry) -> Histogram:
    return Histogram(
        "mlx_inter_token_seconds",
        "Seconds between the tokens of an answer: its mean, once an answer.",
        buckets=_SECONDS_A_TOKEN,
        registry=registry,
    )


class ReuseMetrics:
    """Why prompts were not warm, and what reuse has saved."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.warmth = Counter(
            "mlx_warmth",
            "Chats that were not warm, by cause.",
            ["cause"],
            registry=registry,
        )
        self.lost_tokens = Counter(
            "mlx_lost_tokens",
            "Tokens of a conversation's last prompt computed again, by cause.",
            ["cause"],
            registry=registry,
        )
        self.saved_s = Counter(
            "mlx_prefill_seconds_saved",
            "Seconds that computing the reused tokens would have taken.",
            registry=registry,
        )


class Metrics:
    """All metrics of one server."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.audit_dropped = Counter(
            "mlx_audit_dropped",
            "Rows of the audit that were lost.",
            registry=registry,
        )
        self.requests = Counter(
            "mlx_requests",
            "Requests by status.",
            ["endpoint", "status"],
            registry=registry,
        )
        seconds = functools.partial(Histogram, buckets=_SECONDS, registry=registry)
        self.latency = seconds(
            "mlx_request_latency_seconds",
            "Seconds from head to last byte.",
            ["endpoint"],
        )
        self.ttft = seconds(
            "mlx_ttft_seconds", "Seconds from submission to the first token."
        )
        self.queue = seconds(
            "mlx_queue_seconds", "Seconds from submission until the prompt's turn came."
        )
        self.inter_token = _between_tokens(registry)
        self.active = Gauge(
            "mlx_active_requests", "Generations queued or running.", registry=registry
        )
        self.tokens = Counter(
            "mlx_token_throughput",
            "Tokens by kind: prompt, cached, generated.",
            ["kind"],
            registry=registry,
        )
        self.jobs_ended = Counter(
            "mlx_jobs_ended",
            "Generations by how they ended.",
            ["reason"],
            registry=registry,
        )
        self.model_load_s = seconds(
            "mlx_model_load_duration_seconds", "Seconds of a model load."
        )
        self.drafts = _of_drafts(registry)
        self.reuse = ReuseMetrics(registry)
        gauge = functools.partial(Gauge, registry=registry)
        self.model_bytes = gauge(
            "mlx_model_memory_bytes", "Weights of a loaded model.", ["model"]
        )
        self.active_bytes = gauge("mlx_active_memory_bytes", "What MLX holds.")
        self.peak_bytes = gauge("mlx_peak_memory_bytes", "Most that MLX has held.")
        self.live_buffers = gauge("mlx_live_buffers", "Arrays that the device holds.")
        self.kv_bytes = gauge("mlx_prefix_cache_bytes", "KV kept for reuse.")

    def add_counts(self, begin: str, source: Callable[[], Mapping[str, int]]) -> None:
        """Show counts kept elsewhere as `<begin><name>_total`."""
        self._registry.register(_Counts(begin, source))

    def add_model_source(self, source: Callable[[], Mapping[str, str]]) -> None:
        """Show the state of each model, by its id, as `mlx_model_state`."""
        self._registry.register(_ModelStates(source))

    def exposition(self) -> bytes:
        """The Prometheus text format 0.0.4."""
        return _exposition(self._registry)
