"""Random schedules of the real machines over a fake network, clock and engine; every invariant, every time.

What must hold (see `cluster.py`, `consumers.py`, `producers.py`, `reads.py`, `rings.py` for the checks): a
request is ready only with the right bytes of the right incarnation; blocks are freed exactly once and never under a
granted, unexpired reader; pages of the decode side are never reused under a running read; a slot of a ring is never
filled under a reader that counts, nor while anything may still write into it, and what is scattered from one is the
chunk it is taken for; every request ends exactly once and by its deadline; all tables return to empty and all slots
come home. Some schedules have no rings, in some one side has none, in some gathers fail.

A failure prints its seed and the whole story; `MHT_SIM_SEED=<seed> MHT_SIM_SCHEDULES=1` repeats it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import pytest

from mooncake_hetero_tp.core import leases, links, producer, pulls, shelf, stagings, states
from mooncake_hetero_tp.core.messages import Offer
from tests.simulation.cluster import run_seed
from tests.simulation.world import CALM

FIRST_SEED = int(os.environ.get("MHT_SIM_SEED", "0"))
SCHEDULES = int(os.environ.get("MHT_SIM_SCHEDULES", "10000"))
MOST_SECONDS = 60.0


@pytest.mark.timeout(600)
def test_random_schedules() -> None:
    print(f"seeds {FIRST_SEED} to {FIRST_SEED + SCHEDULES - 1}")
    began = time.process_time()
    ready = jobs = messages = chunks = 0
    for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES):
        cluster = run_seed(seed)
        ready += cluster.ready
        jobs += len(cluster.jobs)
        messages += cluster.world.sent
        chunks += cluster.scattered
    seconds = time.process_time() - began
    print(f"{SCHEDULES} schedules, {jobs} requests ({ready} ready), {chunks} chunks, {messages} messages")
    print(f"in {seconds:.1f} s of CPU time")
    if SCHEDULES >= 10_000:
        assert seconds < MOST_SECONDS
        assert 0.4 < ready / jobs < 0.9, "too calm or too rough to tell anything"


def test_same_seed_same_story() -> None:
    assert run_seed(4711).world.story() == run_seed(4711).world.story()


@pytest.mark.parametrize("seed", range(8))
def test_any_one_message_may_be_lost(seed: int) -> None:
    """With nothing else wrong every load succeeds whichever message is lost (vllm#35943)."""
    messages = run_seed(seed, weather=CALM).world.sent
    for nth in range(1, messages + 1):
        run_seed(seed, weather=CALM, drop_nth=nth)


@pytest.mark.parametrize("slots", [1, 2])
def test_requests_larger_than_the_ring_stream_through_it(slots: int) -> None:
    """Loads of up to three chunks from each of two producer ranks, several at once: with nothing else wrong all succeed."""
    scattered = sum(
        run_seed(seed, weather=CALM, rings=(Offer(1, slots), Offer(2, slots))).scattered for seed in range(150)
    )
    assert scattered > 1000


# An idle link makes room when the table is full, which these clusters are too small for.
NEVER_TAKEN = {(states.Link.AGREED, states.LinkEvent.FORGET)}


def test_schedules_take_every_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation that avoids a corner proves nothing about it."""
    taken: Counter[tuple[Any, Any]] = Counter()

    def recording(table: Any, state: Any, event: Any) -> Any:
        reached = states.after(table, state, event)
        if reached is not None:
            taken[state, event] += 1
        return reached

    for module in (leases, links, producer, pulls, shelf, stagings):
        monkeypatch.setattr(module, "after", recording)
    for seed in range(1500):
        run_seed(seed)
    tables: list[Any] = [states.HOLD, states.OFFER, states.LINK, states.LOAD, states.STAGE]
    tables += [states.SHELVED, states.FETCH]
    wanted = {(state, event) for table in tables for state, row in table.items() for event in row}
    assert wanted - set(taken) == NEVER_TAKEN
