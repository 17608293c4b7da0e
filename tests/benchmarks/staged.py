"""Pulls of every piece size between two processes: whole runtimes on both sides, over Mooncake TCP on loopback.

A prefill worker runs in a process of its own; this one holds a decode worker for each transfer mode, all on one
cache. A pull is timed from `submit` to its report: questions, grant, choice, reads, unpacking. Beside it one
descriptor of as many bytes, and what another plan comes to for the same blocks (planned anew each time, as vLLM does),
are read through an engine like ours without any protocol. All take turns, in an order that is drawn anew each time.

Over loopback a pair of connected threads runs at 1.4 or at 3 to 4 GB/s, by the cores that Linux has them on, and stays
so for seconds. So everything reads through one Mooncake engine, over the same connections (`shared.py`), and is started
afresh for each round. Rounds differ by more than what is compared in them: ratios are of the medians of one round, and
a row has the figures of the round whose ratio is the median.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors, bind
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.io.engine import MooncakeEngine
from mooncake_hetero_tp.io.reading import EngineLimits
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.io.transfer import Deadline
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.benchmarks.bind import WrongBytes, vllm_planner
from tests.benchmarks.caches import MIB, SHAPES, TOKEN_MAJOR, Cache, Expected, Shape, block_ids
from tests.benchmarks.consumer import Consumer
from tests.benchmarks.producer import Producer, producer
from tests.benchmarks.rows import Report, Round, Row
from tests.benchmarks.shared import SharedEngine
from tests.oracle_memory import Ints
from tests.tables import Dense

RING = RingSize(16 * MIB, 4)
"""The default settings, on both sides."""
ROUNDS = 5
"""Odd: one of them is the median."""
REPEATS = 8
"""In each round."""
QUICK_ROUNDS = 1
QUICK_REPEATS = 3
READ_WITHIN_S = 60.0
SLICED_SHARE = 32
"""Of the blocks, one in so many is read where pieces are so short that all would take seconds."""
BASELINE_LIMITS = EngineLimits(
    batch_descriptors=1000, peer_descriptors=1000, batch_bytes=256 * MIB, peer_bytes=256 * MIB
)
"""What vLLM's plan survives with; and one descriptor stays one."""
BULK_TARGETS = {name: 0.95 if name == "1_6_mb" else 0.75 for name in SHAPES}
BEST_TARGET = 0.95
PLAN_TARGETS = {**dict.fromkeys(SHAPES, 1.0), "16_kib": 1.8, "4_kib": 6.0, "256_b": 30.0}

_dice = random.Random(20_261_201)
_BULK, _BEST, _PLAN = "bulk", "better_mode", "plan"
_OURS = {Mode.AUTO: "auto", Mode.DIRECT: "direct", Mode.STAGED: "staged"}


def is_sliced(shape: Shape) -> bool:
    """Whether vLLM has no plan for it, and only a slice for each token and head could carry it."""
    return shape.producer_layout == TOKEN_MAJOR


def row_of(shape: Shape, beside: str) -> Row:
    """One of the three rows of a shape."""
    baseline, target = {
        _BULK: ("one descriptor of as many bytes, no protocol", BULK_TARGETS[shape.name]),
        _BEST: ("the better of transfer_mode direct and staged", BEST_TARGET),
        _PLAN: (
            "a descriptor for each token and head, batches of 1,000, no protocol"
            if is_sliced(shape)
            else "vLLM MooncakeConnector's plan, batches of 1,000, no protocol",
            PLAN_TARGETS[shape.name],
        ),
    }[beside]
    return Row(
        name=f"pull_{shape.name}_auto_{beside}",
        sizes={**shape.sizes, "ring_bytes": RING.slot_bytes * RING.slots, "slot_bytes": RING.slot_bytes},
        unit="MB/s",
        baseline=baseline,
        target=f"ratio >= {target}",
    )


def rows_of(shape: Shape) -> list[Row]:
    return [row_of(shape, beside) for beside in (_BULK, _BEST, _PLAN)]


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    return [row for shape in SHAPES.values() for row in rows_of(shape)]


# --- what takes turns ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One way to get the bytes of the first `blocks` blocks."""

    run: Callable[[], float]
    """Seconds that it took."""
    blocks: int
    fills_pages: bool = True
    """Whether what arrives is what a pull brings."""


class Baselines:
    """Reads into the same cache through an engine like a consumer's, without any protocol."""

    def __init__(self, shape: Shape, cache: Cache, served: Producer, engine: MooncakeEngine) -> None:
        self._shape = shape
        self._cache = cache
        self._peer = served.started
        self._engine = engine
        self._engine.register([Buffer(cache.dense.base, cache.memory.nbytes)])

    def close(self) -> None:
        self._engine.close()

    def bulk(self) -> Turn:
        """From the start of one cache to the start of the other, in one descriptor."""
        columns = (
            np.array([n], np.int64) for n in (self._peer.address, self._cache.dense.base, self._shape.pull_bytes)
        )
        whole = Descriptors(*columns)
        return Turn(partial(self._timed, lambda: whole), self._shape.blocks, fills_pages=False)

    def plan(self, blocks: int) -> Turn:
        """What somebody else's plan reads for the first blocks."""
        make = self._slices if is_sliced(self._shape) else self._vllm
        ids = [block_ids(self._shape, side)[:blocks] for side in ("producer", "consumer")]
        return Turn(partial(self._timed, partial(make, *ids)), blocks)

    def _slices(self, theirs: Ints, ours: Ints) -> Descriptors:
        shape = self._shape
        source = replace(shape.producer, base=self._peer.address).table()
        plan = plan_pulls(self._cache.table, {Rank(): source})[Rank()]
        return bind(plan, [TokenRange(0, ours.size * shape.like.tokens)], [theirs], [ours], null_block=0)

    def _vllm(self, theirs: Ints, ours: Ints) -> Descriptors:
        sides = [_as_vllm_sees(side) for side in (self._shape.producer, self._cache.dense)]
        sides[0] = replace(sides[0], base=self._peer.address)
        found = vllm_planner((theirs.tolist(), ours.tolist()), *sides)()
        return Descriptors(*(np.array(column, np.int64) for column in found))

    def _timed(self, make: Callable[[], Descriptors]) -> float:
        began = time.perf_counter()
        deadline = Deadline(time.monotonic() + READ_WITHIN_S)
        self._engine.read(self._peer.session, make(), deadline=deadline)
        return time.perf_counter() - began


def _as_vllm_sees(dense: Dense) -> Dense:
    """Pages that span all layers are one region to vLLM; with heads outermost it cuts them like long pages."""
    if not dense.layout.startswith("B"):
        return dense
    return replace(dense, layers=1, tokens=dense.tokens * dense.layers)


# --- measuring -----------------------------------------------------------------------------------


@dataclass
class Found:
    """What was measured of one shape."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    """Of each, the median MB/s by turn."""
    modes: Counter[str] = field(default_factory=Counter)
    """How the pulls of `auto` went."""

    def beside(self, name: str, baseline: str) -> list[Round]:
        """Two turns, round by round."""
        return [Round(rates[name], rates[baseline]) for rates in self.rounds]

    def median(self, name: str) -> float:
        """MB/s of the median round."""
        return statistics.median(rates[name] for rates in self.rounds)

    @property
    def better_mode(self) -> str:
        """Of the two set ones, the one that is faster in most rounds."""
        pairs = self.beside(_OURS[Mode.STAGED], _OURS[Mode.DIRECT])
        return _OURS[Mode.STAGED if statistics.median(pair.ratio for pair in pairs) > 1 else Mode.DIRECT]


class Bench:
    """A producer process, consumers of all modes, the baselines, and the check of what arrives."""

    def __init__(self, shape: Shape, served: Producer) -> None:
        self.shape = shape
        self._cache = Cache.of(shape.like)
        self._expected = Expected(shape)
        self._ids = block_ids(shape, "consumer")
        shared = SharedEngine.start()
        self._consumers = {
            mode: Consumer(shape, self._cache, mode, RING, served, engine=shared.opened()) for mode in Mode
        }
        self._baselines = Baselines(shape, self._cache, served, shared.opened(BASELINE_LIMITS))

    def close(self) -> None:
        """All at once, for each takes a second."""
        ends = [self._baselines.close, *(consumer.close for consumer in self._consumers.values())]
        threads = [threading.Thread(target=end) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def turns(self) -> dict[str, Turn]:
        few = self._ids.size // SLICED_SHARE if is_sliced(self.shape) else self._ids.size
        made = {_BULK: self._baselines.bulk(), _PLAN: self._baselines.plan(few)}
        for mode, consumer in self._consumers.items():
            blocks = few if mode is Mode.DIRECT else self._ids.size
            made[_OURS[mode]] = Turn(partial(_pull, consumer, self._ids[:blocks]), blocks)
        return made

    def check(self, name: str, turn: Turn) -> None:
        """Run it once over spoilt memory.

        Raises:
            WrongBytes: what arrived is not what the producer holds.
        """
        self._cache.memory[:] = 0x5A
        turn.run()
        wrong = self._expected.wrong_bytes(self._cache, self._ids[: turn.blocks]) if turn.fills_pages else 0
        if wrong:
            raise WrongBytes(f"{self.shape.name}, {name}: {wrong} bytes are wrong")

    def measure(self, repeats: int, found: Found) -> None:
        """Add a round: MB/s of all turns, and how `auto` chose."""
        turns = self.turns()
        for name, turn in turns.items():
            self.check(name, turn)
        order = list(turns.items())
        rates: dict[str, list[float]] = defaultdict(list)
        for _ in range(repeats):
            _dice.shuffle(order)  # who comes after whom is worth some percent
            for name, turn in order:
                rates[name].append(turn.blocks * self.shape.block_bytes / 1e6 / turn.run())
        found.rounds.append({name: statistics.median(values) for name, values in rates.items()})
        found.modes.update(record.mode for record in self._consumers[Mode.AUTO].records())


def _pull(consumer: Consumer, ids: Ints) -> float:
    (seconds,) = consumer.pull([ids])
    return seconds


@contextmanager
def bench(shape: Shape) -> Iterator[Bench]:
    with producer(shape, RING) as served:
        made = Bench(shape, served)
        try:
            yield made
        finally:
            made.close()


def measure(report: Report, *, quick: bool) -> None:
    """Fill in all rows.

    Raises:
        WrongBytes: a pull brought other bytes than the producer holds.
    """
    rounds, repeats = (QUICK_ROUNDS, QUICK_REPEATS) if quick else (ROUNDS, REPEATS)
    for shape in SHAPES.values():
        if report.wants(rows_of(shape)):
            found = Found()
            for _ in range(rounds):
                with bench(shape) as made:
                    made.measure(repeats, found)
            _fill_in(report, shape, found)


def _fill_in(report: Report, shape: Shape, found: Found) -> None:
    medians = ", ".join(f"{name} {found.median(name):,.0f}" for name in (_BULK, _PLAN, *_OURS.values()))
    note = f"MB/s, medians of {len(found.rounds)} rounds: {medians}; "
    note += f"auto staged {found.modes[Mode.STAGED]} of {found.modes.total()} pulls"
    if is_sliced(shape):
        note += f"; direct and slices: one block in {SLICED_SHARE}, as a rate"
    beside = {_BULK: _BULK, _BEST: found.better_mode, _PLAN: _PLAN}
    targets = {_BULK: BULK_TARGETS[shape.name], _BEST: BEST_TARGET, _PLAN: PLAN_TARGETS[shape.name]}
    for name, baseline in beside.items():
        met = partial(_is_at_least, targets[name])
        rounds = found.beside(_OURS[Mode.AUTO], baseline)
        report.add(row_of(shape, name).measured_in_rounds(rounds, met=met, note=note))


def _is_at_least(target: float, row: Row) -> bool | None:
    return None if row.ratio is None else row.ratio >= target
