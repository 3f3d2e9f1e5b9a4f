"""Statistics of the adapter for vLLM's log and Prometheus metrics."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvferry.integrations.load_metrics import COUNTERS, GAUGES, HISTOGRAMS, observations
from kvferry.integrations.vllm.compat import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    create_metric_per_engine,
)
from kvferry.observe.records import TransferRecord

PREFIX = "vllm:"
"""Beginning of the names of vLLM's metrics."""


class LoadStats(KVConnectorStats):
    """Statistics of loads since the last report. The data is plain lists, and so easy to
    serialise.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        fields = (*HISTOGRAMS, *COUNTERS, *GAUGES)
        self.data: dict[str, list[Any]] = {field: [] for field in fields}

    def note_load(self, record: TransferRecord) -> None:
        """Notes a load that ended on a rank."""
        if not record.ok:
            self.data["failed"].append(record.error)
        for field, value in observations(record).items():
            self.data[field].append(value)

    def note_refusal(self, reason: str) -> None:
        """Notes a load that was refused before its start."""
        self.data["refused"].append(reason)

    def note_open(self, count: int) -> None:
        """Notes the current number of requests that load or lend."""
        self.data["open"].append(count)

    def note_plain(self) -> None:
        """Notes a request without parameters."""
        self.data["plain"].append(1)

    def note_prefix(self, num_tokens: int) -> None:
        """Notes a lent cached prefix."""
        self.data["prefix_tokens"].append(num_tokens)

    def note_withdrawal(self) -> None:
        """Notes a cached prefix lent, never fetched, and withdrawn."""
        self.data["withdrawn"].append(1)

    def aggregate(self, other: KVConnectorStats) -> "LoadStats":
        """Adds the data of another object to this object."""
        for field, values in other.data.items():
            self.data[field].extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The figures for vLLM's log line."""
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


class PendingStats:
    """Statistics of the scheduler half that vLLM has not taken yet."""

    def __init__(self) -> None:
        self._stats: LoadStats | None = None
        self._told_open = 0
        self._told_ended: Counter[str] = Counter()

    @property
    def stats(self) -> LoadStats:
        """The statistics for the next report."""
        if self._stats is None:
            self._stats = LoadStats()
        return self._stats

    def take(self, num_open: int, counters: Mapping[str, float]) -> LoadStats | None:
        """The statistics since the last report, ``None`` if there is no news.

        Args:
            num_open: number of requests that load or lend, which is reported if it has changed.
            counters: counters of the connector; leases that were lost since then are reported.
        """
        for field in ("expired", "revoked"):
            ended = int(counters.get(f"leases_{field}", 0)) - self._told_ended[field]
            if ended:
                self._told_ended[field] += ended
                self.stats.data[field] += [1] * ended
        if num_open != self._told_open:
            self._told_open = num_open
            self.stats.note_open(num_open)
        stats, self._stats = self._stats, None
        return stats


class LoadMetrics(KVConnectorPromMetrics):
    """The statistics as Prometheus metrics."""

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
                    name=PREFIX + name, documentation=text, buckets=buckets, labelnames=labelnames
                ),
                per_engine_labelvalues,
            )
            for field, (name, text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            field: create_metric_per_engine(
                self._counter_cls(name=PREFIX + name, documentation=text, labelnames=labelnames),
                per_engine_labelvalues,
            )
            for field, (name, text) in COUNTERS.items()
        }
        self._gauges = {
            field: create_metric_per_engine(
                self._gauge_cls(
                    name=PREFIX + name,
                    documentation=text,
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                ),
                per_engine_labelvalues,
            )
            for field, (name, text) in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the data of a :class:`LoadStats`."""
        for field, histogram in self._histograms.items():
            for value in transfer_stats_data[field]:
                histogram[engine_idx].observe(value)
        for field, counter in self._counters.items():
            counter[engine_idx].inc(len(transfer_stats_data[field]))
        for field, gauge in self._gauges.items():
            for value in transfer_stats_data[field][-1:]:
                gauge[engine_idx].set(value)
