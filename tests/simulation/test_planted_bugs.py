"""Each invariant of the simulation fails when the bug it is there for is planted in a machine."""

from __future__ import annotations

import math
from dataclasses import replace
from types import FunctionType
from typing import Any

import msgspec
import pytest

from mooncake_hetero_tp.core import reading
from mooncake_hetero_tp.core.consumer import ConsumerMachine
from mooncake_hetero_tp.core.effects import FinishedSending, Report
from mooncake_hetero_tp.core.leases import PullTable
from mooncake_hetero_tp.core.messages import GoneReason
from mooncake_hetero_tp.core.producer import ProducerMachine
from mooncake_hetero_tp.core.pulls import Request
from mooncake_hetero_tp.core.reading import Reader
from mooncake_hetero_tp.core.shelf import Shelf
from mooncake_hetero_tp.core.stagings import Staging, Stagings
from mooncake_hetero_tp.core.states import Offer, OfferEvent
from mooncake_hetero_tp.core.timers import Timers
from tests.simulation import consumers, producers
from tests.simulation.cluster import run_seed
from tests.simulation.world import Violation

SEEDS = 10_000
RARE = {"staged_is_said_when_the_lease_is_over": 2000}
"""Where to begin to look for what few schedules lead to, to save time."""

Plant = FunctionType


def first_violation(seeds: range) -> str:
    for seed in seeds:
        try:
            run_seed(seed)
        except Violation as violation:
            return str(violation).partition("\n")[0]
    return "none"


def late_reads_count(patch: pytest.MonkeyPatch) -> None:
    """A read that returns after its lease is taken for good (vllm#52234)."""
    patch.setattr(reading, "read_failure", lambda _pull, outcome: None if outcome.ok else "failed")


def ready_before_the_gpu_is_done(patch: pytest.MonkeyPatch) -> None:
    """Blocks are offered when the scheduler is done, not when the GPU is (sglang#33970)."""
    keep = ProducerMachine.keep

    def eager(self: ProducerMachine, kept: Any, now: float) -> Any:
        out = keep(self, kept, now)
        return out + self.mark_ready(kept.transfer_id, kept.request_id, now)

    patch.setattr(ProducerMachine, "keep", eager)


def transport_names_are_reused(patch: pytest.MonkeyPatch) -> None:
    """A read granted by a process that died goes to the process that has its transport name now."""
    new_rank = producers.ProducerRank.__init__

    def named_by_index(self: producers.ProducerRank, engine: Any, index: int) -> None:
        new_rank(self, engine, index)
        self.transport = f"t{index}"
        self.machine._reception._desk = replace(self.machine._reception._desk, transport_session=self.transport)

    patch.setattr(producers.ProducerRank, "__init__", named_by_index)


def finished_twice(patch: pytest.MonkeyPatch) -> None:
    """A repeated Release is applied again."""
    free = ProducerMachine._free
    names: dict[str, str] = {}

    def remember(self: ProducerMachine, transfer: Any, reason: Any, now: float) -> None:
        names[transfer.transfer_id] = transfer.request_id
        free(self, transfer, reason, now)

    def again(self: ProducerMachine, peer: bytes, message: Any, now: float) -> None:
        if message.transfer_id in names and message.transfer_id not in self._kept:
            self._out.append(FinishedSending(names[message.transfer_id]))  # type: ignore[arg-type]
        release(self, peer, message, now)

    release = ProducerMachine._on_release
    patch.setattr(ProducerMachine, "_free", remember)
    patch.setattr(ProducerMachine, "_on_release", again)


def lease_counts_from_keep(patch: pytest.MonkeyPatch) -> None:
    """The producer's clock for a lease runs from the first Claim on; Renew does not move it."""
    hold = ProducerMachine._hold

    def stubborn(self: ProducerMachine, transfer: Any, until: float) -> None:
        if not transfer.hold_until or until < transfer.hold_until:
            hold(self, transfer, until)

    patch.setattr(ProducerMachine, "_hold", stubborn)


def release_ends_every_lease(patch: pytest.MonkeyPatch) -> None:
    """One engine's Release frees blocks that another engine is reading."""

    def free_at_once(self: ProducerMachine, transfer: Any, tag: int, now: float) -> None:
        self._free(transfer, GoneReason.RELEASED, now)

    patch.setattr(ProducerMachine, "_release_kept", free_at_once)


def pages_given_back_under_a_read(patch: pytest.MonkeyPatch) -> None:
    """A failed request is reported while its engine call still runs (sglang#24527)."""
    patch.setattr(Request, "may_be_written", property(lambda _self: False))


def wild_reads_are_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """A read that failed is taken to have stopped writing."""
    on_read = Reader._on_read

    def trusting(self: Reader, pull: Any, outcome: Any) -> None:
        on_read(self, pull, outcome if outcome.ok else type(outcome)(False, outcome.returned_at, transport_dead=True))

    patch.setattr(Reader, "_on_read", trusting)


def reported_twice(patch: pytest.MonkeyPatch) -> None:
    """A cancelled request is reported at once, and again when its read has returned."""
    cancel = ConsumerMachine.cancel

    def hasty(self: ConsumerMachine, request_id: Any, now: float) -> Any:
        known = request_id in self._requests
        out = cancel(self, request_id, now)
        return [*out, Report(request_id, ok=False, cancelled=True)] if known else out

    patch.setattr(ConsumerMachine, "cancel", hasty)


def cancelled_requests_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    """An aborted request is forgotten without a word."""
    take = ConsumerMachine._take

    def silent(self: ConsumerMachine, now: float) -> Any:
        return [effect for effect in take(self, now) if not (isinstance(effect, Report) and effect.cancelled)]

    patch.setattr(ConsumerMachine, "_take", silent)


def deadline_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A request waits for a prefill as long as the producer answers (vllm#35943)."""
    arm = Timers.arm
    patch.setattr(Timers, "arm", lambda self, key, when: None if isinstance(key, Request) else arm(self, key, when))


def dropped_pulls_stay(patch: pytest.MonkeyPatch) -> None:
    """What is dropped from one index stays in the other."""

    def forgetful(self: PullTable, pull: Any, event: OfferEvent) -> bool:
        if event is OfferEvent.DROP and pull.state is Offer.WAITING:
            return False
        return step(self, pull, event)

    step = PullTable.step
    patch.setattr(PullTable, "step", forgetful)


def unread_ranks_are_not_released(patch: pytest.MonkeyPatch) -> None:
    """Kept blocks go when they are released, and only then."""
    expire = ProducerMachine._expire

    def patient(self: ProducerMachine, now: float) -> None:
        self._timers.next_due = lambda: None  # type: ignore[method-assign]
        expire(self, now)

    patch.setattr(ProducerMachine, "_expire", patient)


def pages_reused_under_a_read(patch: pytest.MonkeyPatch) -> None:
    """The same, with nobody who looks at reports: the write into another request's page is what is found."""
    pages_given_back_under_a_read(patch)
    patch.setattr(consumers.ConsumerEngine, "_check_report", lambda _self, _rank, _job: None)


def staged_slots_are_free_again_at_once(patch: pytest.MonkeyPatch) -> None:
    """A producer slot is reused as soon as its consumer was told of it, and may be read."""
    tell = Shelf._tell

    def hasty(self: Shelf, staged: Any, chunk: Any) -> None:
        tell(self, staged, chunk)
        if chunk.slot is not None:
            self._slots.give_back(chunk.slot)
            chunk.slot = None

    patch.setattr(Shelf, "_tell", hasty)


def slots_are_freed_under_their_gathers(patch: pytest.MonkeyPatch) -> None:
    """A pull's end frees the slots that are being filled for it."""
    drop = Shelf._drop_chunks

    def hasty(self: Shelf, staged: Any, numbers: Any) -> None:
        drop(self, staged, numbers)
        for slot in list(self._slots._quarantined):
            self._slots.end_quarantine(slot)

    patch.setattr(Shelf, "_drop_chunks", hasty)
    patch.setattr(Shelf, "_free_doomed", lambda _self, _chunk, _outcome: None)


def quarantine_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """A slot of the consumer is reused while a failed read may still write into it."""
    returned = Stagings.returned

    def trusting(self: Stagings, chunk: Any, outcome: Any, *, counts: bool) -> None:
        returned(self, chunk, msgspec.structs.replace(outcome, transport_dead=True), counts=counts)

    patch.setattr(Stagings, "returned", trusting)


def staged_is_said_when_the_lease_is_over(patch: pytest.MonkeyPatch) -> None:
    """A gather that took long is announced without a look at the clock."""
    gathered = Shelf.gathered
    patch.setattr(Shelf, "gathered", lambda self, number, outcome, _now: gathered(self, number, outcome, -math.inf))


def chunks_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A failed request is reported while a chunk of it is being read."""
    patch.setattr(Staging, "running", property(lambda _self: []))


def slots_of_failed_pulls_are_lost(patch: pytest.MonkeyPatch) -> None:
    """What was asked for when a pull was given up keeps its slot."""
    patch.setattr(Stagings, "_give_up_asking", lambda _self, _staging: None)


@pytest.mark.parametrize(
    "plant,violation",
    [
        (late_reads_count, "holds"),
        (ready_before_the_gpu_is_done, "holds"),
        (transport_names_are_reused, "holds"),
        (finished_twice, "not told to keep"),
        (lease_counts_from_keep, "under a read"),
        (release_ends_every_lease, "under a read"),
        (pages_given_back_under_a_read, "while a read of it may write"),
        (wild_reads_are_not_fenced, "while a read of it may write"),
        (pages_reused_under_a_read, "belongs to"),
        (reported_twice, "not loading"),
        (cancelled_requests_are_not_reported, "never ended"),
        (deadline_is_forgotten, "only at"),
        (dropped_pulls_stay, "tables are not empty"),
        (unread_ranks_are_not_released, "blocks missing"),
        (staged_slots_are_free_again_at_once, "scatters"),
        (slots_are_freed_under_their_gathers, "twice at a time"),
        (quarantine_is_ignored, "which another read may still write into"),
        (staged_is_said_when_the_lease_is_over, "but the lease is over"),
        (chunks_are_not_waited_for, "while a read of it may write"),
        (slots_of_failed_pulls_are_lost, "slots are missing"),
    ],
)
def test_planted_bug_is_found(plant: Plant, violation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    first = RARE.get(plant.__name__, 0)
    assert violation in first_violation(range(first, first + SEEDS))
