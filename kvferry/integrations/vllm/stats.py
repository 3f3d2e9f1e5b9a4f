"""Figures of the adapter for vLLM's log and its Prometheus metrics."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvferry.connectors.base import TransferRecord
from kvferry.integrations.vllm.compat import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    create_metric_per_engine,
)

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BYTES = tuple(float(1 << power) for power in range(12, 37, 2))
_TOKENS = tuple(float(1 << power) for power in range(4, 21, 2))
_COPIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0, 1_000_000.0)

#: Field of the data → (metric, what it says, buckets). One observation per load and rank, or per
#: prefix that is lent.
_HISTOGRAMS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "seconds": (
        "vllm:kvferry_load_seconds",
        "Seconds in which a load of one rank moved, without waits for a prompt that is computed.",
        _SECONDS,
    ),
    "nbytes": ("vllm:kvferry_load_bytes", "Bytes of a load on one rank.", _BYTES),
    "copies": (
        "vllm:kvferry_load_copies",
        "Contiguous copies of a load on one rank, after merging.",
        _COPIES,
    ),
    "prefix_tokens": (
        "vllm:kvferry_lent_prefix_tokens",
        "Tokens of a cached prefix that was lent (only_cached).",
        _TOKENS,
    ),
}
#: Field of the data → (metric, what it says). Each entry of the field counts once.
_COUNTERS: Mapping[str, tuple[str, str]] = {
    "failed": ("vllm:kvferry_failed_loads", "Loads that failed on a rank."),
    "refused": (
        "vllm:kvferry_refused_loads",
        "Requests whose load was refused before a block moved: ticket, handshake or lease.",
    ),
    "plain": (
        "vllm:kvferry_plain_requests",
        "Requests without kv_transfer_params, whose KV is neither loaded nor lent.",
    ),
    "withdrawn": (
        "vllm:kvferry_withdrawn_prefixes",
        "Cached prefixes that were lent, not fetched, and withdrawn because blocks were lacking.",
    ),
}


class LoadStats(KVConnectorStats):
    """What loads did since the last report. Its data is plain lists, so it travels anywhere."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, list[Any]] = {field: [] for field in (*_HISTOGRAMS, *_COUNTERS)}

    def note_load(self, record: TransferRecord) -> None:
        """A load ended on a rank."""
        if not record.ok:
            self.data["failed"].append(record.error)
            return
        self.data["seconds"].append(record.moved_s)
        self.data["nbytes"].append(record.nbytes)
        self.data["copies"].append(record.copies)

    def note_refusal(self, reason: str) -> None:
        """A load was refused before it began."""
        self.data["refused"].append(reason)

    def note_plain(self) -> None:
        """A request came without parameters."""
        self.data["plain"].append(1)

    def note_prefix(self, num_tokens: int) -> None:
        """A cached prefix was lent."""
        self.data["prefix_tokens"].append(num_tokens)

    def note_withdrawal(self) -> None:
        """A cached prefix that was lent, and that nobody had fetched, was withdrawn."""
        self.data["withdrawn"].append(1)

    def aggregate(self, other: KVConnectorStats) -> "LoadStats":
        """This and another's, in this."""
        for field, values in other.data.items():
            self.data[field].extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures of vLLM's log line."""
        counts: dict[str, int | float] = {
            "Num loads": len(self.data["seconds"]),
            "Num failed loads": len(self.data["failed"]),
            "Num refused loads": len(self.data["refused"]),
            "Num plain requests": len(self.data["plain"]),
        }
        if not self.data["seconds"]:
            return counts
        seconds = np.array(self.data["seconds"])
        total_mb = sum(self.data["nbytes"]) / 2**20
        return counts | {
            "Avg load time (ms)": round(float(seconds.mean()) * 1e3, 3),
            "P90 load time (ms)": round(float(np.percentile(seconds, 90)) * 1e3, 3),
            "Total MB": round(total_mb, 3),
            "Throughput (MB/s)": round(total_mb / max(float(seconds.sum()), 1e-9), 3),
        }

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())


class LoadMetrics(KVConnectorPromMetrics):
    """The same for Prometheus."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._histograms = {
            field: create_metric_per_engine(
                self._histogram_cls(
                    name=name, documentation=text, buckets=buckets, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for field, (name, text, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            field: create_metric_per_engine(
                self._counter_cls(name=name, documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for field, (name, text) in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the data of a :class:`LoadStats`."""
        for field, histogram in self._histograms.items():
            for value in transfer_stats_data[field]:
                histogram[engine_idx].observe(value)
        for field, counter in self._counters.items():
            counter[engine_idx].inc(len(transfer_stats_data[field]))
