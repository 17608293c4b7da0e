from __future__ import annotations

import msgspec
import pytest

from mooncake_hetero_tp.io import stats
from mooncake_hetero_tp.io.stats import PullRecord, StatsBook, TransferStats
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TransferId


def record(number: int = 0) -> PullRecord:
    return PullRecord(
        request_id=RequestId(f"r{number}"),
        transfer_id=TransferId("t"),
        producer=Identity(EngineId("p"), Incarnation("aa"), Rank(tp=1)),
        tokens=70,
        bytes=4096,
        descriptors=8,
        batches=2,
        retries=1,
        read_s=0.0015,
        total_s=0.25,
    )


def test_totals_are_since_the_last_look() -> None:
    book = StatsBook()
    assert book.take().is_empty
    book.pull(record())
    book.pull(record())
    book.add("loads_done")
    book.add("sends_done", 3)
    taken = book.take()
    assert (taken.bytes_pulled, taken.descriptors, taken.batches, taken.retries) == (8192, 16, 4, 2)
    assert (taken.loads_done, taken.sends_done, len(taken.pulls)) == (1, 3, 2)
    assert not taken.is_empty
    assert book.take() == TransferStats()


def test_records_are_bounded_and_totals_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_MAX_PULLS", 3)
    book = StatsBook()
    for number in range(5):
        book.pull(record(number))
    taken = book.take()
    assert [pull.request_id for pull in taken.pulls] == ["r2", "r3", "r4"]
    assert taken.bytes_pulled == 5 * 4096


def test_two_looks_share_no_list() -> None:
    book = StatsBook()
    first = book.take()
    first.pulls.append(record())
    assert book.take().pulls == []


def test_the_log_line_is_for_scripts() -> None:
    assert str(record()) == (
        "pulled request=r0 bytes=4096 descriptors=8 tokens=70 batches=2 retries=1 mode=direct chunks=0 "
        "read_ms=1.500 total_ms=250.000 "
        "transfer=t producer=p producer_rank=dp0.pp0.tp1"
    )


def test_stats_can_cross_processes() -> None:
    book = StatsBook()
    book.pull(record())
    taken = book.take()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(taken), type=TransferStats) == taken
