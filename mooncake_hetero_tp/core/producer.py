"""The producer rank's machine: kept transfers, pulls of them and their leases. No I/O.

Its promises, which the simulation holds it to:

- FinishedSending exactly once per `keep`, never for anything else;
- not while a granted lease is live, unless the lease's own consumer cancelled or released it;
- a lease ends here `clock_drift` later than `lease_s` after its Claim or Renew was *received*, so never
  before the consumer's deadline, which counts from when it *sent* them;
- a pull that waits holds a table entry and nothing else (vllm#51236); every table is bounded.

States and transitions are in `core/states.py`, the ring and what lies in it in `core/shelf.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from mooncake_hetero_tp.core.admission import Admission, ProducerConfig
from mooncake_hetero_tp.core.effects import (
    FinishedSending,
    GatherId,
    GatherOutcome,
    Kept,
    Level,
    Notice,
    ProducerEffect,
    Reply,
)
from mooncake_hetero_tp.core.handshake import compare as compare_tables
from mooncake_hetero_tp.core.handshake import explain
from mooncake_hetero_tp.core.leases import PullEntry, PullTable, Transfer, make_transfer
from mooncake_hetero_tp.core.messages import (
    Cancel,
    Claim,
    ConsumerMessage,
    Gone,
    GoneReason,
    Grant,
    Hello,
    ProducerMessage,
    Pull,
    Ready,
    Refuse,
    Release,
    ReleaseAck,
    Renew,
    Stage,
    Waiting,
)
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.sessions import Compare, Desk, Reception, Session, SessionTable, Validate
from mooncake_hetero_tp.core.shelf import Ring, Shelf
from mooncake_hetero_tp.core.states import HOLD, Hold, HoldEvent, Offer, OfferEvent, after
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.core.timers import Timers
from mooncake_hetero_tp.core.tombstones import Tombstones
from mooncake_hetero_tp.types import Identity, Nonce, RequestId, TransferId

__all__ = ["ProducerConfig", "ProducerMachine"]


class ProducerMachine:
    """All protocol state of one producer rank. Single-threaded; every method returns at once."""

    def __init__(
        self,
        identity: Identity,
        table: RankTable,
        transport_session: str,
        config: ProducerConfig,
        *,
        draw: Callable[[], int],
        compare: Compare = compare_tables,
        validate: Validate = validate_table,
        ring: Ring | None = None,
    ) -> None:
        """`ring`: where chunks are staged; None: every pull is read directly."""
        self._groups = table.groups
        self._config = config
        self._lease_s = config.lease_s * (1 + config.clock_drift)
        self._sessions = SessionTable(config.max_sessions, draw)
        offer = ring.offer if ring else None
        desk = Desk(identity, table, transport_session, config.lease_s, compare, validate, offer)
        self._reception = Reception(desk, self._sessions)
        self._kept: dict[TransferId, Transfer] = {}
        self._pulls = PullTable()
        self._tombs = Tombstones(config.max_tombstones, config.keep_s)
        self._admission = Admission(config, table.groups, self._kept, self._pulls, self._tombs)
        self._timers: Timers[Transfer | PullEntry] = Timers()
        self._closing = False
        self._overloaded = False
        """The last Gone was for a full table, which is in the log already."""
        self._out: list[ProducerEffect] = []
        self._shelf = Shelf(ring, table, self._out)

    # --- inputs ----------------------------------------------------------------------------------

    def receive(self, peer: bytes, message: ConsumerMessage, now: float) -> list[ProducerEffect]:
        """One message of a consumer rank or scheduler; answers go to `peer`."""
        self._expire(now)
        match message:
            case Pull():
                self._on_pull(peer, message, now)
            case Claim() | Renew():
                self._on_claim(peer, message, now)
            case Stage():
                self._on_stage(peer, message, now)
            case Cancel():
                self._on_cancel(message, now)
            case Release():
                self._on_release(peer, message, now)
            case Hello():
                self._on_hello(peer, message)
        return self._take()

    def keep(self, kept: Kept, now: float) -> list[ProducerEffect]:
        """Keep the blocks of a finished prefill until FinishedSending names its request.

        A transfer id that is in use here is refused: its second request is free at once.

        Raises:
            LocalUsageError: not one block list per KV cache group, or ids that do not fit; nothing changes.
        """
        transfer = make_transfer(kept, self._groups)
        self._expire(now)
        if kept.transfer_id in self._kept:
            self._notice(
                Level.ERROR,
                f"transfer id {kept.transfer_id}: still in use by request "
                f"{self._kept[kept.transfer_id].request_id}; request {kept.request_id} is not handed over; "
                f"the proxy must give live requests distinct transfer ids",
            )
        if kept.transfer_id in self._kept or self._closing or self._released_early(transfer):
            self._out.append(FinishedSending(kept.request_id))
        else:
            self._adopt(transfer, now)
            if kept.ready:
                self._written(transfer, now)
        return self._take()

    def mark_ready(self, transfer_id: TransferId, request_id: RequestId, now: float) -> list[ProducerEffect]:
        """The GPU has written the blocks kept for this request; ignored where it is kept no more."""
        self._expire(now)
        transfer = self._kept.get(transfer_id)
        if transfer is not None and transfer.request_id == request_id:
            self._written(transfer, now)
        return self._take()

    def abort(self, transfer_id: TransferId, request_id: RequestId, now: float) -> list[ProducerEffect]:
        """The request will not be handed over (any more); everyone who waits is told at once (sglang#30233)."""
        self._expire(now)
        transfer = self._kept.get(transfer_id)
        if transfer is None:
            self._abort_unkept(transfer_id, now)
        elif transfer.request_id == request_id:
            self._end(transfer, GoneReason.ABORTED, now)
        return self._take()

    def gathered(self, gather_id: GatherId, outcome: GatherOutcome, now: float) -> list[ProducerEffect]:
        """The answer to a Gather.

        Raises:
            LocalUsageError: no such gather is running; nothing changes.
        """
        self._expire(now)
        self._shelf.gathered(gather_id, outcome, now)
        return self._take()

    def tick(self, now: float) -> list[ProducerEffect]:
        """Do what is due."""
        self._expire(now)
        return self._take()

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None: nothing is timed."""
        dues = (self._timers.next_due(), self._tombs.next_due(), self._shelf.next_due())
        return min((due for due in dues if due is not None), default=None)

    def close(self, now: float) -> list[ProducerEffect]:
        """Refuse what is new, tell waiters; granted leases run on until `drained`."""
        self._expire(now)
        self._closing = True
        for transfer in list(self._kept.values()):
            self._end(transfer, GoneReason.CLOSING, now)
        self._drop_all((pull for pull in self._pulls.all() if pull.state is Offer.WAITING), GoneReason.CLOSING)
        return self._take()

    @property
    def drained(self) -> bool:
        """Whether nothing is kept, waiting or leased, and no gather runs."""
        return not self._kept and not self._pulls and not self._shelf.gathering

    def _on_hello(self, peer: bytes, hello: Hello) -> None:
        if self._closing:  # silence: the consumer keeps asking until our successor answers
            return
        answer = self._reception.answer(hello)
        if isinstance(answer, Refuse):
            self._notice(Level.WARNING, f"refused consumer {hello.identity}:\n{explain(answer.mismatches)}")
        self._out.append(Reply(peer, answer))

    # --- pulls -----------------------------------------------------------------------------------

    def _on_pull(self, peer: bytes, message: Pull, now: float) -> None:
        session = self._sessions.use(message.session)
        known = self._pulls.get(message.session, message.pull)
        if session is None:
            self._gone(peer, message, GoneReason.UNKNOWN_SESSION)
        elif known is not None and known.transfer_id == message.transfer_id:
            self._again(known, peer, message.nonce, now)
        elif known is not None:
            self._gone(peer, message, GoneReason.BAD_RANGES)
        elif (reason := self._obstacle(session, message)) is not None:
            self._gone(peer, message, reason)
        else:
            self._admit(peer, session, message, now)

    def _obstacle(self, session: Session, message: Pull) -> GoneReason | None:
        return GoneReason.CLOSING if self._closing else self._admission.obstacle(session, message)

    def _admit(self, peer: bytes, session: Session, message: Pull, now: float) -> None:
        pull = PullEntry(
            key=(message.session, message.pull),
            session=session,
            peer=peer,
            transfer_id=message.transfer_id,
            request_id=message.request_id,
            ranges=message.ranges,
            never_at=now + self._config.keep_s,
        )
        self._pulls.add(pull)
        self._again(pull, peer, message.nonce, now)

    def _again(self, pull: PullEntry, peer: bytes, nonce: Nonce | None, now: float) -> None:
        """Answer a Pull, first or repeated; without a nonce, one that repeats after its Grant is a late duplicate."""
        pull.peer = peer
        transfer = self._kept.get(pull.transfer_id)
        if transfer is None:
            self._timers.arm(pull, min(now + self._config.orphan_s, pull.never_at))
        if transfer is None or transfer.state is Hold.PENDING:
            self._answer(pull, Waiting(*pull.key))
        elif nonce is None or transfer.state is Hold.ENDING:
            self._offer(transfer, pull, now)
        else:
            self._pulls.step(pull, OfferEvent.OFFER)
            self._pulls.step(pull, OfferEvent.CLAIM)
            self._grant(pull, transfer, Claim(*pull.key, nonce), now)

    def _offer(self, transfer: Transfer, pull: PullEntry, now: float) -> None:
        if not self._pulls.step(pull, OfferEvent.OFFER):
            return
        if transfer.state is Hold.LEASED:  # another reader's lease must not end under a fresh promise
            self._hold(transfer, max(transfer.hold_until, now + self._lease_s))
        self._answer(pull, Ready(*pull.key))

    def _on_claim(self, peer: bytes, message: Claim | Renew, now: float) -> None:
        event = OfferEvent.RENEW if isinstance(message, Renew) else OfferEvent.CLAIM
        found = self._promised(peer, message)
        if found is not None and self._pulls.step(found[0], event):
            self._grant(*found, message, now)

    def _on_stage(self, peer: bytes, message: Stage, now: float) -> None:
        """One whose lease is over gets no answer: its Renew, if there is one, will."""
        found = self._promised(peer, message)
        if found is not None and found[0].holds_lease(now):
            self._shelf.ask(*found, message)

    def _promised(self, peer: bytes, message: Claim | Renew | Stage) -> tuple[PullEntry, Transfer] | None:
        """The pull that a message is about, and what it reads; None: it was told that this is over."""
        if self._sessions.use(message.session) is None:
            self._gone(peer, message, GoneReason.UNKNOWN_SESSION)
            return None
        pull = self._pulls.get(message.session, message.pull)
        transfer = self._kept.get(pull.transfer_id) if pull else None
        if pull is None or transfer is None:
            self._gone(peer, message, GoneReason.EXPIRED)
            return None
        pull.peer = peer
        if transfer.state is Hold.ENDING:
            self._answer(pull, Gone(*pull.key, transfer.end_reason))
            return None
        return pull, transfer

    def _grant(self, pull: PullEntry, transfer: Transfer, message: Claim | Renew, now: float) -> None:
        pull.lease_until = now + self._lease_s
        first = transfer.state is Hold.OFFERED
        self._move(transfer, HoldEvent.CLAIM)
        self._hold(transfer, pull.lease_until if first else max(transfer.hold_until, pull.lease_until))
        grant = Grant(
            session=message.session,
            pull=message.pull,
            nonce=message.nonce,
            lease_s=self._config.lease_s,
            request_tag=zlib.crc32(transfer.request_id.encode()),
            computed_tokens=transfer.computed_tokens,
            blocks=transfer.packed if isinstance(message, Claim) else (),
        )
        self._answer(pull, grant)

    def _on_cancel(self, message: Cancel, now: float) -> None:
        pull = self._pulls.get(message.session, message.pull)
        if pull is not None:
            self._drop(pull)
            self._settle(pull.transfer_id, now)

    # --- transfers -------------------------------------------------------------------------------

    def _released_early(self, transfer: Transfer) -> bool:
        """Whether its readers released it before it came, and no other engine's pull waits for it."""
        tomb = self._tombs.get(transfer.transfer_id)
        if tomb is None or not tomb.early or self._pulls.of(transfer.transfer_id):
            return False
        tomb.early = False
        return True

    def _adopt(self, transfer: Transfer, now: float) -> None:
        tomb = self._tombs.pop(transfer.transfer_id)
        if tomb is not None:  # a consumer engine does not come back to a transfer it has released
            transfer.released_by |= tomb.released_by
        self._kept[transfer.transfer_id] = transfer
        self._hold(transfer, now + self._config.keep_s)
        for pull in self._pulls.of(transfer.transfer_id):
            self._timers.disarm(pull)
            if (reason := self._admission.unreadable(transfer, pull)) is not None:
                self._drop(pull, reason)

    def _written(self, transfer: Transfer, now: float) -> None:
        if self._move(transfer, HoldEvent.WRITTEN):
            for pull in self._pulls.of(transfer.transfer_id):
                self._offer(transfer, pull, now)

    def _on_release(self, peer: bytes, message: Release, now: float) -> None:
        self._out.append(Reply(peer, ReleaseAck(message.number)))
        transfer = self._kept.get(message.transfer_id)
        if transfer is not None:
            self._release_kept(transfer, message.consumer_tag, now)
        else:
            self._release_unkept(message.transfer_id, message.consumer_tag, now)

    def _release_kept(self, transfer: Transfer, tag: int, now: float) -> None:
        """End one consumer engine's interest; another's (a proxy retried elsewhere) keeps the blocks."""
        transfer.add_release(tag)
        pulls = self._pulls.of(transfer.transfer_id)
        mine = [pull for pull in pulls if pull.session.tag == tag]
        self._drop_all(mine, GoneReason.RELEASED)
        if len(mine) == len(pulls):
            self._free(transfer, GoneReason.RELEASED, now)
        elif transfer.state is Hold.ENDING:
            self._settle(transfer.transfer_id, now)
        else:
            leased = self._pulls.leased_until(transfer.transfer_id, now)
            self._hold(transfer, max(leased, now + self._lease_s))

    def _release_unkept(self, transfer_id: TransferId, tag: int, now: float) -> None:
        pulls = self._pulls.of(transfer_id)
        self._drop_all((pull for pull in pulls if pull.session.tag == tag), GoneReason.RELEASED)
        tomb = self._tombs.get(transfer_id)
        if tomb is None:
            self._tombs.put(transfer_id, GoneReason.RELEASED, now, released_by={tag}, early=True)
        else:
            tomb.add_release(tag)

    def _abort_unkept(self, transfer_id: TransferId, now: float) -> None:
        self._drop_all(self._pulls.of(transfer_id), GoneReason.ABORTED)
        tomb = self._tombs.get(transfer_id)
        if tomb is None or tomb.early:
            released = tomb.released_by if tomb else set()
            self._tombs.put(transfer_id, GoneReason.ABORTED, now, released_by=released)

    def _end(self, transfer: Transfer, reason: GoneReason, now: float) -> None:
        """Tell every reader now; free it as soon as no granted lease is in the way."""
        transfer.end_reason = reason
        for pull in self._pulls.of(transfer.transfer_id):
            if pull.holds_lease(now):
                self._answer(pull, Gone(*pull.key, reason))
            else:
                self._drop(pull, reason)
        if self._pulls.leased_until(transfer.transfer_id, now) > now:
            self._move(transfer, HoldEvent.END)
            self._settle(transfer.transfer_id, now)
        else:
            self._free(transfer, reason, now)

    def _settle(self, transfer_id: TransferId, now: float) -> None:
        """An ending transfer waits for its last granted lease, and for nothing else."""
        transfer = self._kept.get(transfer_id)
        if transfer is None or transfer.state is not Hold.ENDING:
            return
        until = self._pulls.leased_until(transfer_id, now)
        if until > now:
            self._hold(transfer, until)
        else:
            self._free(transfer, transfer.end_reason, now)

    def _hold(self, transfer: Transfer, until: float) -> None:
        transfer.hold_until = until
        self._timers.arm(transfer, until)

    def _free(self, transfer: Transfer, reason: GoneReason, now: float) -> None:
        if not self._move(transfer, HoldEvent.FREE):
            return
        self._drop_all(self._pulls.of(transfer.transfer_id), reason)
        self._timers.disarm(transfer)
        del self._kept[transfer.transfer_id]
        self._tombs.put(transfer.transfer_id, reason, now, released_by=transfer.released_by)
        self._out.append(FinishedSending(transfer.request_id))

    # --- common ----------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for due in self._timers.expired(now):
            if isinstance(due, Transfer):
                self._expired(due, now)
            else:
                self._drop(due, GoneReason.NEVER_CAME)
        for pull in self._shelf.overdue(now):  # its consumer counts nothing more, and must not be let back in
            self._drop(pull)
        self._tombs.expire(now)

    def _expired(self, transfer: Transfer, now: float) -> None:
        claimed = transfer.state in (Hold.LEASED, Hold.ENDING)
        why = "its last lease ended" if claimed else f"nobody claimed it within {self._config.keep_s:g} s"
        text = f"request {transfer.request_id} (transfer {transfer.transfer_id}) was not released: {why}; blocks freed"
        self._notice(Level.WARNING, text)
        self._free(transfer, transfer.end_reason, now)

    def _drop_all(self, pulls: Iterable[PullEntry], reason: GoneReason) -> None:
        """Drop pulls; those that were granted know from their own clock."""
        for pull in pulls:
            self._drop(pull, None if pull.state is Offer.LEASED else reason)

    def _drop(self, pull: PullEntry, reason: GoneReason | None = None) -> None:
        if self._pulls.step(pull, OfferEvent.DROP):
            self._timers.disarm(pull)
            self._shelf.drop(pull)
            if reason is not None:
                self._answer(pull, Gone(*pull.key, reason))

    def _move(self, transfer: Transfer, event: HoldEvent) -> bool:
        state = after(HOLD, transfer.state, event)
        if state is not None:
            transfer.state = state
        return state is not None

    def _answer(self, pull: PullEntry, message: ProducerMessage) -> None:
        self._out.append(Reply(pull.peer, message))

    def _gone(self, peer: bytes, message: Pull | Claim | Renew | Stage, reason: GoneReason) -> None:
        if reason is GoneReason.OVERLOADED and not self._overloaded:
            self._notice(
                Level.WARNING,
                f"pulls are turned away: {len(self._pulls)} of {self._config.max_pulls} are held, "
                f"{self._pulls.waiting} of {self._config.max_waiting} wait; consumers ask again later",
            )
        self._overloaded = reason is GoneReason.OVERLOADED
        self._out.append(Reply(peer, Gone(message.session, message.pull, reason)))

    def _notice(self, level: Level, text: str) -> None:
        self._out.append(Notice(level, text))

    def _take(self) -> list[ProducerEffect]:
        out = self._out.copy()
        self._out.clear()
        return out
