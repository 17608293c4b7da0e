"""Transfer statistics for vLLM's log line and Prometheus endpoint; never raising (vllm#43828).

Workers report plain numbers; every rank adds its own, so the counters of an engine are those of all its
ranks together.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from mooncake_hetero_tp.io.stats import TransferStats

logger = logging.getLogger(__name__)

Params = ParamSpec("Params")

COUNTERS: Mapping[str, str] = {
    "bytes_pulled": "Bytes of KV cache pulled from producers.",
    "descriptors": "Transfer engine descriptors of these bytes.",
    "batches": "Transfer engine calls.",
    "retries": "Transfer engine calls that failed and then succeeded.",
    "replaced_sessions": "Transport sessions replaced after failures.",
    "pulls_staged": "Pulls from one producer rank that came packed, through staging slots.",
    "chunks": "Packed pieces of these pulls.",
    "chunks_packed": "Pieces that a producer rank packed for consumers.",
    "gathers_failed": "Pieces that it could not pack.",
    "loads_done": "Loads of a rank that ended well.",
    "loads_failed": "Loads of a rank that failed.",
    "loads_cancelled": "Loads of a rank that the client aborted.",
    "reads_failed": "Reads from one producer rank that failed or came too late.",
    "sends_done": "Requests whose blocks a producer rank kept and let go.",
    "sends_expired": "Of these, those whose keep time or lease ran out.",
    "frames_dropped": "Control messages dropped because a peer takes none.",
    "bad_frames": "Control messages of peers that did not decode.",
}
"""Fields of `io.stats.TransferStats`, exported as `vllm:mht_<name>_total`."""
SECONDS: Mapping[str, str] = {
    "pull_seconds": "From a load's start to its end, one producer rank.",
    "read_seconds": "The part of it in which bytes moved.",
}
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def _empty() -> dict[str, Any]:
    return dict.fromkeys(COUNTERS, 0) | {name: [] for name in SECONDS}


def never_raises(method: Callable[Params, None]) -> Callable[Params, None]:
    """Log a failure instead: statistics must not take a server down."""

    @functools.wraps(method)
    def guarded(*args: Params.args, **kwargs: Params.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            logger.exception("%s failed; the numbers of this interval are lost", method.__qualname__)

    return guarded


@dataclass
class HeteroTPStats(KVConnectorStats):
    """Numbers of one interval; adds up over steps and ranks. `data` is what crosses process borders."""

    data: dict[str, Any] = field(default_factory=_empty)

    @classmethod
    def of(cls, stats: TransferStats) -> HeteroTPStats:
        """What a worker counted."""
        data: dict[str, Any] = {name: getattr(stats, name, 0) for name in COUNTERS}
        data["pull_seconds"] = [pull.total_s for pull in stats.pulls]
        data["read_seconds"] = [pull.read_s for pull in stats.pulls]
        return cls(data=data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> HeteroTPStats:
        """What arrives on the other side of a process border; what is missing or unknown counts as nothing."""
        stats = cls()
        stats._add(data or {})
        return stats

    def reset(self) -> None:
        self.data = _empty()

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> HeteroTPStats:
        """Add `other` to this one."""
        self._add(other.data)
        return self

    @never_raises
    def _add(self, data: Mapping[str, Any]) -> None:
        for name in COUNTERS:
            self.data[name] = self.data.get(name, 0) + data.get(name, 0)
        for name in SECONDS:
            self.data[name] = [*self.data.get(name, ()), *data.get(name, ())]

    def reduce(self) -> dict[str, int | float]:
        """The numbers of vLLM's `KV Transfer metrics` log line."""
        seconds = sorted(self.data["pull_seconds"])
        line: dict[str, int | float] = {
            "Pulls": len(seconds),
            "MiB pulled": round(self.data["bytes_pulled"] / 2**20, 3),
            "Descriptors": self.data["descriptors"],
            "Avg pull (ms)": _milliseconds(sum(seconds) / len(seconds) if seconds else 0.0),
            "P90 pull (ms)": _milliseconds(seconds[(9 * len(seconds)) // 10] if seconds else 0.0),
            "Loads failed": self.data["loads_failed"],
            "Loads cancelled": self.data["loads_cancelled"],
            "Sends": self.data["sends_done"],
            "Sends expired": self.data["sends_expired"],
        }
        unusual = (
            "pulls_staged",
            "chunks_packed",
            "gathers_failed",
            "retries",
            "replaced_sessions",
            "frames_dropped",
            "bad_frames",
        )
        return line | {name.replace("_", " ").capitalize(): self.data[name] for name in unusual if self.data[name]}


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class HeteroTPPromMetrics(KVConnectorPromMetrics):
    """`vllm:mht_*` per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self._counters: dict[str, dict[int, Counter]] = {}
        self._histograms: dict[str, dict[int, Histogram]] = {}
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._register()

    @never_raises
    def _register(self) -> None:
        for name, text in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:mht_{name}", documentation=text, labelnames=self._labelnames)
            self._counters[name] = create_metric_per_engine(counter, self.per_engine_labelvalues)
        for name, text in SECONDS.items():
            histogram = self._histogram_cls(
                name=f"vllm:mht_{name}", documentation=text, buckets=_BUCKETS, labelnames=self._labelnames
            )
            self._histograms[name] = create_metric_per_engine(histogram, self.per_engine_labelvalues)

    @never_raises
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one interval of one engine."""
        stats = HeteroTPStats.from_dict(transfer_stats_data).data
        for name, counters in self._counters.items():
            if stats[name] > 0:
                counters[engine_idx].inc(stats[name])
        for name, histograms in self._histograms.items():
            for seconds in stats[name]:
                histograms[engine_idx].observe(seconds)
