"""The metrics of loads, under the same names in every serving engine.

An engine puts its own prefix before the names, such as ``vllm:``.
"""

from collections.abc import Iterable, Mapping

from kvferry.observe.records import TransferRecord

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BYTES = tuple(float(1 << power) for power in range(12, 37, 2))
_TOKENS = tuple(float(1 << power) for power in range(4, 21, 2))
_COPIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0, 1_000_000.0)

HISTOGRAMS: Mapping[str, tuple[str, str, tuple[float, ...]]] = {
    "seconds": (
        "kvferry_load_seconds",
        "Seconds in which a load of one rank moved, without waits for a prompt that is computed.",
        _SECONDS,
    ),
    "nbytes": ("kvferry_load_bytes", "Bytes of a load on one rank.", _BYTES),
    "copies": (
        "kvferry_load_copies",
        "Contiguous copies of a load on one rank, after merging.",
        _COPIES,
    ),
    "prefix_tokens": (
        "kvferry_lent_prefix_tokens",
        "Tokens of a cached prefix that was lent (only_cached).",
        _TOKENS,
    ),
}
"""Field → metric, documentation and buckets. One observation per load and rank, or per lent
prefix."""

COUNTERS: Mapping[str, tuple[str, str]] = {
    "failed": ("kvferry_failed_loads", "Loads that failed on a rank."),
    "refused": (
        "kvferry_refused_loads",
        "Requests whose load was refused before a block moved: ticket, handshake or lease.",
    ),
    "plain": (
        "kvferry_plain_requests",
        "Requests without kv_transfer_params, whose KV is neither loaded nor lent.",
    ),
    "withdrawn": (
        "kvferry_withdrawn_prefixes",
        "Cached prefixes that were lent, not fetched, and withdrawn because blocks were lacking.",
    ),
    "expired": ("kvferry_expired_leases", "Leases on this engine's blocks whose time ran out."),
    "revoked": ("kvferry_revoked_leases", "Leases that this engine took back itself."),
}
"""Field → metric and documentation."""


GAUGES: Mapping[str, tuple[str, str]] = {
    "open": (
        "kvferry_open_requests",
        "Requests that load KV or lend it. At 0 the server may be ended.",
    ),
}
"""Field → metric and documentation. The last value counts."""


def observations(record: TransferRecord) -> Mapping[str, float]:
    """Field of :data:`HISTOGRAMS` → value of a load; empty for a load that failed."""
    if not record.ok:
        return {}
    return {"seconds": record.moved_s, "nbytes": record.nbytes, "copies": record.copies}


class PrometheusLoads:
    """The metrics of the loads of one engine, as metrics of prometheus_client."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        """Registers the metrics, all with this beginning of their names and with these labels."""
        # A serving engine sets the folder of the files before the first import.
        from prometheus_client import Counter, Histogram

        names = tuple(labels)
        self._histograms = {
            field: Histogram(prefix + name, text, names, buckets=buckets).labels(**labels)
            for field, (name, text, buckets) in HISTOGRAMS.items()
            if field in ("seconds", "nbytes", "copies")
        }
        self._counters = {
            field: Counter(prefix + name, text, names).labels(**labels)
            for field, (name, text) in COUNTERS.items()
            if field in ("failed", "refused")
        }

    def loaded(self, records: Iterable[TransferRecord]) -> None:
        """Counts the loads among the records of a step."""
        for record in records:
            if record.direction != "recv":
                continue
            if not record.ok:
                self._counters["failed"].inc()
            for field, value in observations(record).items():
                self._histograms[field].observe(value)

    def refused(self) -> None:
        """Counts a load that was refused before a rank read."""
        self._counters["refused"].inc()
