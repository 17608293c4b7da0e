"""Invariant: no message that decodes makes a machine raise, break a promise to vLLM, or grow beyond its bounds."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from mooncake_hetero_tp.core.codec import decode_from_consumer, decode_from_producer, encode
from mooncake_hetero_tp.core.cuts import pair_cuts
from mooncake_hetero_tp.core.effects import (
    FenceRead,
    FinishedSending,
    Gather,
    GatherOutcome,
    ReadOutcome,
    Report,
    StartChunk,
    StartRead,
)
from mooncake_hetero_tp.core.handshake import compare
from mooncake_hetero_tp.core.messages import Claim, Hello, Offer, PairCut, Pull, Stage
from mooncake_hetero_tp.core.plan import plan_pulls, prove
from mooncake_hetero_tp.core.releaser import ReleaserConfig, ReleaserMachine
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import PeerProtocolError
from mooncake_hetero_tp.types import Nonce, PullId, RequestId, SessionId, TokenRange, TransferId
from tests.fuzz.frames import CONSUMER_TABLE, PRODUCER_TABLE, TRANSFERS, damaged, from_consumer, from_producer
from tests.machines import (
    BOOTSTRAP,
    DECODE,
    PREFILL,
    Numbers,
    Pair,
    consumer_machine,
    identity,
    kept,
    only,
    producer_machine,
    pull_request,
    ring,
)

STEPS = 400
MOST = 12
"""Bound of every table here."""


def planner(own: Any, tables: Any) -> Any:
    plans = plan_pulls(own, tables)
    prove(own, plans)
    return plans


def received(rng: random.Random, draw: Any, decode: Any) -> Any:
    """A message as it comes off the wire; damaged ones that no longer decode are another test's."""
    while True:
        try:
            return decode(damaged(rng, draw(rng)) if rng.random() < 0.3 else encode(draw(rng)))
        except PeerProtocolError:
            continue


def of_one_pull(rng: random.Random) -> Any:
    """A message of a consumer that knows what it wants, so that among all others some chunks get staged."""
    session, pull = SessionId(1), PullId(50)
    ranges = (TokenRange(0, 7),)
    wanted = tuple(rng.sample(range(6), rng.randint(0, 4)))
    return rng.choice(
        (
            Hello(1, 1, (), identity(DECODE), PREFILL, None, 1, CONSUMER_TABLE, Offer(64, 2)),
            Pull(session, pull, TransferId("xfer-1"), RequestId("d-1"), ranges),
            Claim(session, pull, Nonce(1)),
            Stage(session, pull, rng.choice((1, 1, 2, 1001)), wanted, ranges, (PairCut(0, 0, 0, 2),)),
        )
    )


@pytest.mark.parametrize("seed", range(30))
def test_producer(seed: int) -> None:
    """Told to keep n requests it finishes each at most once, and all of them in the end."""
    rng = random.Random(seed)
    machine = producer_machine(
        table=PRODUCER_TABLE,
        draw=Numbers(1),
        compare=compare,
        validate=validate_table,
        max_sessions=MOST,
        max_pulls=MOST,
        max_waiting=MOST,
        max_tombstones=MOST,
        ring=ring(slots=3),
    )
    now, told, finished, gathers = 0.0, 0, Counter[str](), list[Gather]()
    for _ in range(STEPS):
        now += rng.choice((0.0, 0.01, 1.0, 7.0))
        if rng.random() < 0.05:
            told += 1
            effects = machine.keep(kept(f"p-{told}", rng.choice(TRANSFERS), blocks=(1, 2), tokens=7), now)
        elif rng.random() < 0.1 and gathers:
            outcome = GatherOutcome(5, 7, rng.choice((None, None, "failed")))
            effects = machine.gathered(gathers.pop().gather_id, outcome, now)
        else:
            draw = of_one_pull if rng.random() < 0.4 else from_consumer
            effects = machine.receive(b"x", received(rng, draw, decode_from_consumer), now)
        finished.update(effect.request_id for effect in only(effects, FinishedSending))
        gathers += only(effects, Gather)
        assert len(gathers) <= 3
        assert len(machine._shelf) <= len(machine._pulls) <= MOST
        assert len(machine._sessions) <= MOST
        assert len(machine._tombs) <= MOST
    now += 10_000.0
    finished.update(effect.request_id for effect in only(machine.tick(now), FinishedSending))
    for gather in gathers:
        machine.gathered(gather.gather_id, GatherOutcome(5, 7), now)
    assert machine._shelf._slots.all_home
    assert finished == {f"p-{number + 1}": 1 for number in range(told)}
    assert machine.drained


@pytest.mark.parametrize("seed", range(30))
def test_consumer(seed: int) -> None:
    """Each started request is reported once, however its producer behaves."""
    rng = random.Random(seed)
    machine = consumer_machine(
        table=CONSUMER_TABLE,
        planner=planner,
        validate=validate_table,
        draw=Numbers(1),
        cuts=pair_cuts,
        staging=Offer(64, 3),
    )
    pair = Pair(machine, {"p0:1": producer_machine(table=PRODUCER_TABLE, draw=Numbers(1), ring=ring(64))})
    reports: Counter[str] = Counter()
    started, running = 0, list[StartRead | StartChunk]()
    for _ in range(STEPS):
        pair.now += rng.choice((0.0, 0.01, 1.0, 7.0))
        choice = rng.random()
        if choice < 0.05:
            started += 1
            pair.keep(kept(f"p-{started}", "xfer-1", blocks=(1, 2), tokens=7))
            pair.start(pull_request(f"d-{started}", tokens=(0, 7), blocks=(1, 2)))
        elif choice < 0.1 and running:
            read = running.pop()
            staged = isinstance(read, StartRead) and read.staging and rng.random() < 0.7
            ok = bool(staged) or rng.random() < 0.5
            outcome = ReadOutcome(ok, pair.now, transport_dead=rng.random() < 0.5, chunks=5 if staged else 0)
            pair.deliver(machine.read_finished(read.read_id, outcome, pair.now))
        elif choice < 0.12:
            for gather in only(pair.told, Gather):
                pair.told.remove(gather)
                outcome_of_it = GatherOutcome(5, 7, rng.choice((None, None, None, "failed")))
                effects = pair.producers["p0:1"].gathered(gather.gather_id, outcome_of_it, pair.now)
                pair.deliver_replies("p0:1", effects)
        elif choice < 0.15:
            pair.deliver(machine.tick(pair.now))
        else:
            message = received(rng, from_producer, decode_from_producer)
            pair.deliver(machine.receive(rng.choice(("p0:1", "p9:1")), message, pair.now))
        running += [*only(pair.effects, StartRead), *only(pair.effects, StartChunk)]
        for fence in only(pair.effects, FenceRead):
            pair.deliver(machine.read_fenced(fence.read_id, pair.now))
        reports.update(report.request_id for report in only(pair.effects, Report))
        pair.effects.clear()
    pair.now += 1_000.0
    pair.deliver(machine.tick(pair.now))
    for read in running + only(pair.effects, StartRead) + only(pair.effects, StartChunk):
        outcome = ReadOutcome(ok=True, returned_at=pair.now)
        pair.deliver(machine.read_finished(read.read_id, outcome, pair.now))
    reports.update(report.request_id for report in pair.reports)
    assert reports == {f"d-{number + 1}": 1 for number in range(started)}
    assert machine.drained
    assert machine._reader.stagings._slots.all_home
    assert len(machine._pulls) == len(machine._reader) == len(machine._timers) == 0


@pytest.mark.parametrize("seed", range(10))
def test_releaser(seed: int) -> None:
    """A stranger's acknowledgements settle nothing but the ranks that were told."""
    rng = random.Random(seed)
    machine = ReleaserMachine(DECODE, ReleaserConfig(deadline_s=50.0, max_releases=MOST), draw=Numbers(1))
    listing = Pair().listing()
    now = 0.0
    for step in range(STEPS):
        now += rng.choice((0.0, 0.01, 1.0))
        if rng.random() < 0.1:
            machine.release(TransferId(f"xfer-{step}"), PREFILL, BOOTSTRAP, now)
        elif rng.random() < 0.1:
            machine.resolved(listing, now)
        else:
            message = received(rng, from_producer, decode_from_producer)
            if type(message).__name__ == "ReleaseAck":
                machine.receive(rng.choice(("p0:1", "p9:1")), message, now)
        assert len(machine._pending) <= MOST
    machine.tick(now + 1_000.0)
    assert machine.drained


@pytest.mark.parametrize("seed", range(200))
def test_damaged_tables_are_refused_by_name(seed: int) -> None:
    """A Hello whose table was damaged gets a Welcome or a Refuse; nothing in between (vllm#52234)."""
    rng = random.Random(seed)
    machine = producer_machine(table=PRODUCER_TABLE, compare=compare, validate=validate_table)
    hello = from_consumer(random.Random(0))
    while type(hello).__name__ != "Hello":
        hello = from_consumer(rng)
    for _ in range(20):
        try:
            message = decode_from_consumer(damaged(rng, hello))
        except PeerProtocolError:
            continue
        effects = machine.receive(b"x", message, 0.0)
        assert effects
