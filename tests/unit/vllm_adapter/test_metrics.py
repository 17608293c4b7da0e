"""metrics: numbers add up over ranks and steps, and nothing here takes a server down."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from mooncake_hetero_tp.io.stats import PullRecord, TransferStats
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TransferId
from mooncake_hetero_tp.vllm_adapter.metrics import COUNTERS, HeteroTPPromMetrics, HeteroTPStats

PULL = PullRecord(
    request_id=RequestId("r"),
    transfer_id=TransferId("t"),
    producer=Identity(EngineId("P"), Incarnation("0" * 16), Rank()),
    tokens=69,
    bytes=1000,
    descriptors=4,
    batches=1,
    retries=0,
    read_s=0.01,
    total_s=0.02,
)


def worker_stats(**changes: Any) -> HeteroTPStats:
    values: dict[str, Any] = {"bytes_pulled": 1000, "descriptors": 4, "loads_done": 1, "pulls": [PULL]}
    return HeteroTPStats.of(TransferStats(**(values | changes)))


def prom(registry: CollectorRegistry, engines: int = 1) -> HeteroTPPromMetrics:
    def in_registry(kind: Any) -> Any:
        return lambda **options: kind(registry=registry, **options)

    types: dict[Any, Any] = {kind: in_registry(kind) for kind in (Gauge, Counter, Histogram)}
    labels: dict[int, list[object]] = {index: ["tiny", str(index)] for index in range(engines)}
    return HeteroTPPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], labels)


def sample(registry: CollectorRegistry, name: str, engine: int = 0) -> float | None:
    return registry.get_sample_value(f"vllm:mht_{name}", {"model_name": "tiny", "engine": str(engine)})


def test_every_counter_is_a_field_of_the_workers_stats() -> None:
    fields = {field.name for field in msgspec.structs.fields(TransferStats)} - {"pulls"}
    assert set(COUNTERS) == fields


def test_ranks_add_up() -> None:
    total = worker_stats().aggregate(worker_stats(bytes_pulled=500)).data
    assert (total["bytes_pulled"], total["descriptors"], total["loads_done"]) == (1500, 8, 2)
    assert total["pull_seconds"] == [0.02, 0.02]


def test_an_interval_without_anything_is_empty() -> None:
    assert HeteroTPStats().is_empty()
    assert HeteroTPStats.of(TransferStats()).is_empty()
    assert not worker_stats().is_empty()
    assert not HeteroTPStats.of(TransferStats(sends_expired=1)).is_empty(), "failures alone count too"
    stats = worker_stats()
    stats.reset()
    assert stats.is_empty()


def test_numbers_cross_process_borders() -> None:
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(worker_stats().to_dict()))
    assert HeteroTPStats.from_dict(wire) == worker_stats()


def test_missing_unknown_and_broken_numbers_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    assert HeteroTPStats.from_dict(None).is_empty()
    assert HeteroTPStats.from_dict({"bytes_pulled": 7, "future": 1}).data["bytes_pulled"] == 7
    with caplog.at_level(logging.ERROR):
        HeteroTPStats.from_dict({"bytes_pulled": "many"})
    assert "the numbers of this interval are lost" in caplog.text


def test_the_log_line() -> None:
    line = worker_stats(bytes_pulled=3 * 2**20, retries=2).reduce()
    assert line["Pulls"] == 1
    assert line["MiB pulled"] == 3.0
    assert line["Avg pull (ms)"] == line["P90 pull (ms)"] == 20.0
    assert line["Retries"] == 2
    assert "Bad frames" not in line
    assert HeteroTPStats().reduce()["Pulls"] == 0


def test_prometheus_counts_per_engine() -> None:
    registry = CollectorRegistry()
    metrics = prom(registry, engines=2)
    for _ in range(2):
        metrics.observe(worker_stats().to_dict(), 1)
    assert sample(registry, "bytes_pulled_total", 1) == 2000
    assert sample(registry, "descriptors_total", 1) == 8
    assert sample(registry, "pull_seconds_count", 1) == 2
    assert sample(registry, "bytes_pulled_total", 0) == 0


def test_observing_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    """vllm#43828: the API server died on the first successful transfer."""
    metrics = prom(CollectorRegistry())
    with caplog.at_level(logging.ERROR):
        metrics.observe({"pull_seconds": 3})
        metrics.observe(worker_stats().to_dict(), engine_idx=9)
    assert caplog.text.count("the numbers of this interval are lost") == 2


def test_a_registry_that_refuses_leaves_an_observer_that_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Stats without an observer kill a server under MultiConnector, so there is always one."""
    registry = CollectorRegistry()
    prom(registry)
    with caplog.at_level(logging.ERROR):
        second = prom(registry)
    assert "Duplicated timeseries" in caplog.text
    second.observe(worker_stats().to_dict())
