"""Many pulls at once through a small ring, one large pull through the default one, and where staging stops to pay."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mooncake_hetero_tp.core.cost import Mode, crossover_bytes
from mooncake_hetero_tp.io.staging import RingSize
from tests.benchmarks.bind import WrongBytes
from tests.benchmarks.caches import CROWD, MIB, Cache, Expected, block_ids
from tests.benchmarks.consumer import Consumer
from tests.benchmarks.producer import producer
from tests.benchmarks.residence import Residence
from tests.benchmarks.rows import Report, Row, Sample
from tests.benchmarks.staged import RING
from tests.oracle_memory import Ints

PULLS = 40
ROUNDS = 5
QUICK_ROUNDS = 2
SMALL_RING = RingSize(MIB, 4)
SPREAD_TARGET = 3.0
SPARE_BYTES = 64 * MIB
LONG_PULLS_BYTES = 64 * MIB

FAIRNESS = Row(
    name="crowd_p99_over_p50",
    sizes={
        "pulls": PULLS,
        "pull_bytes": CROWD.pull_bytes // PULLS,
        "piece_bytes": CROWD.piece_bytes,
        "ring_bytes": SMALL_RING.slots * SMALL_RING.slot_bytes,
        "slots": SMALL_RING.slots,
    },
    unit="ms",
    baseline="median of the same pulls",
    target=f"p99 / p50 <= {SPREAD_TARGET:g}, none fails",
)
MEMORY = Row(
    name="staging_peak_memory",
    sizes={"pull_bytes": CROWD.pull_bytes, "piece_bytes": CROWD.piece_bytes, "ring_bytes": RING.bytes},
    unit="MiB",
    baseline="the two rings",
    target=f"at most {SPARE_BYTES // MIB} MiB more than the rings",
)
CROSSOVER = Row(
    name="staging_crossover",
    sizes={"pull_bytes": LONG_PULLS_BYTES, "slot_bytes": RING.slot_bytes, "slots": RING.slots},
    unit="KiB",
    note="pieces from this length on are read directly",
)


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    return [FAIRNESS, MEMORY, CROSSOVER]


def measure(report: Report, *, quick: bool) -> None:
    """Fill in all rows.

    Raises:
        WrongBytes: a pull brought other bytes than the producer holds.
    """
    if report.wants([MEMORY, CROSSOVER]):
        _measure_long(report)
    if report.wants([FAIRNESS]):
        _measure_crowd(report, QUICK_ROUNDS if quick else ROUNDS)


def _measure_long(report: Report) -> None:
    cache = Cache.of(CROWD.like)
    with producer(CROWD, RING) as served:
        residence = Residence()
        consumer = Consumer(CROWD, cache, Mode.AUTO, RING, served)
        try:
            consumer.pull([block_ids(CROWD, "consumer")])
            grown = (served.growth_bytes(), residence.growth_bytes())
            modes = {record.mode for record in consumer.records()}
            rates = consumer.rates()
        finally:
            consumer.close()
    _check(cache, [block_ids(CROWD, "consumer")])
    if modes != {Mode.STAGED}:
        raise RuntimeError(f"the long pull went {modes}, expected it staged")
    report.add(
        MEMORY.measured(
            Sample.of([sum(grown) / MIB]),
            Sample.of([2 * RING.bytes / MIB]),
            met=lambda row: None if row.value is None else row.value * MIB <= 2 * RING.bytes + SPARE_BYTES,
            note=f"resident at most, beyond caches and imports: producer {grown[0] / MIB:.0f} MiB, "
            f"consumer {grown[1] / MIB:.0f} MiB",
        )
    )
    at = crossover_bytes(rates, LONG_PULLS_BYTES, RING.slot_bytes, RING.slots)
    report.add(CROSSOVER.measured(Sample.of([at / 1024]), note=f"{CROSSOVER.note}; {rates}"))


def _measure_crowd(report: Report, rounds: int) -> None:
    """All pulls read the same blocks of the producer, each into blocks of its own."""
    cache = Cache.of(CROWD.like)
    each = CROWD.blocks // PULLS
    targets = [block_ids(CROWD, "consumer")[n * each : (n + 1) * each] for n in range(PULLS)]
    with producer(CROWD, SMALL_RING) as served:
        consumer = Consumer(CROWD, cache, Mode.STAGED, SMALL_RING, served)
        try:
            consumer.pull(targets)
            found = [consumer.pull(targets) for _ in range(rounds)]
        finally:
            consumer.close()
    _check(cache, targets)
    late, usual = (Sample.of(1e3 * float(np.quantile(times, share)) for times in found) for share in (0.99, 0.5))
    report.add(
        FAIRNESS.measured(
            late,
            usual,
            met=lambda row: None if row.ratio is None else row.ratio <= SPREAD_TARGET,
            note=f"all {PULLS} at once, {rounds} times; the slowest took {1e3 * max(map(max, found)):.0f} ms",
        )
    )


def _check(cache: Cache, targets: Sequence[Ints]) -> None:
    expected = Expected(CROWD)
    wrong = sum(expected.wrong_bytes(cache, ids) for ids in targets)
    if wrong:
        raise WrongBytes(f"{wrong} bytes of {len(targets)} pulls are wrong")
