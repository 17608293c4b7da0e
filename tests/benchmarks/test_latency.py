"""What the stamps of two engines say about one hand-over."""

from __future__ import annotations

from tests.benchmarks.latency import Spent, marks_of, words_of
from tests.benchmarks.pairs import Stamp

PRODUCER = [Stamp(1_000_000, "finished", "p"), Stamp(3_000_000, "started", "p")]
CONSUMER = [
    Stamp(6_000_000, "asked", "d"),
    Stamp(7_000_000, "started", "d"),
    Stamp(8_000_000, "started", "d"),
    Stamp(11_000_000, "ready", "d"),
    Stamp(12_000_000, "ready", "d"),
    Stamp(99_000_000, "loaded", "d"),
]


def test_the_last_rank_counts() -> None:
    assert marks_of(1_000_000, PRODUCER, CONSUMER) == {
        "producer started": 2.0,
        "consumer asked": 5.0,
        "consumer started": 7.0,
        "consumer ready": 11.0,
    }


def test_words_give_medians_and_the_first_failure() -> None:
    spent = [Spent(5.0, marks={"consumer ready": at}) for at in (5.0, 6.0, 9.0)]
    assert words_of("ours", [*spent, Spent(None, "HTTP 500")]) == (
        "ours: consumer ready 6.0; ours: 1 of 4 failed, the first with HTTP 500"
    )
