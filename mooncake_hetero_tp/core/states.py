"""Every state, event and transition of the protocol machines. What is not in a table does not happen.

    producer rank    Hold     one transfer it keeps        Offer     one pull of it by a consumer rank
    consumer rank    Link     one producer engine          Load      one request
                     Stage    one pull of that request

A machine asks `after(TABLE, state, event)`; None means that the event is refused and changes nothing. Late
duplicates are refused all the time and are nobody's fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeVar

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)


def after(table: Mapping[State, Mapping[Event, State]], state: State, event: Event) -> State | None:
    """The state that `event` leads to; None: refused."""
    return table[state].get(event)


# --- producer ------------------------------------------------------------------------------------


class Hold(StrEnum):
    """A transfer whose blocks a producer rank was told to keep."""

    PENDING = "pending"
    """Finished by the scheduler; the GPU is still writing the last step."""
    OFFERED = "offered"
    """May be claimed; kept for `keep_s`."""
    LEASED = "leased"
    """Was claimed; kept as long as a lease or a recent reader asks for it."""
    ENDING = "ending"
    """Takes no claim and no renewal any more; kept until the last granted lease is over."""
    FREED = "freed"
    """Reported as finished sending."""


class HoldEvent(StrEnum):
    """What happens to a kept transfer."""

    WRITTEN = "written"
    """The GPU event of its last step completed."""
    CLAIM = "claim"
    END = "end"
    """Aborted, closing, or a doubtful release, while a lease is granted."""
    FREE = "free"
    """Released, expired or aborted, with no granted lease in the way."""


HOLD: Final[Mapping[Hold, Mapping[HoldEvent, Hold]]] = {
    Hold.PENDING: {HoldEvent.WRITTEN: Hold.OFFERED, HoldEvent.FREE: Hold.FREED},
    Hold.OFFERED: {HoldEvent.CLAIM: Hold.LEASED, HoldEvent.FREE: Hold.FREED},
    Hold.LEASED: {
        HoldEvent.CLAIM: Hold.LEASED,
        HoldEvent.END: Hold.ENDING,
        HoldEvent.FREE: Hold.FREED,
    },
    Hold.ENDING: {HoldEvent.FREE: Hold.FREED},
    Hold.FREED: {},
}


class Offer(StrEnum):
    """A pull as its producer rank sees it."""

    WAITING = "waiting"
    """The transfer is unknown so far, or the GPU is still writing it."""
    READY = "ready"
    """Told that a claim will be granted."""
    LEASED = "leased"
    """Granted; may read until its lease ends."""
    DROPPED = "dropped"
    """Cancelled, or told that it is gone."""


class OfferEvent(StrEnum):
    """What happens to a pull at its producer rank."""

    OFFER = "offer"
    """Its transfer is kept and written."""
    CLAIM = "claim"
    RENEW = "renew"
    DROP = "drop"


OFFER: Final[Mapping[Offer, Mapping[OfferEvent, Offer]]] = {
    Offer.WAITING: {OfferEvent.OFFER: Offer.READY, OfferEvent.DROP: Offer.DROPPED},
    Offer.READY: {
        OfferEvent.OFFER: Offer.READY,
        OfferEvent.CLAIM: Offer.LEASED,
        OfferEvent.DROP: Offer.DROPPED,
    },
    Offer.LEASED: {
        OfferEvent.CLAIM: Offer.LEASED,
        OfferEvent.RENEW: Offer.LEASED,
        OfferEvent.DROP: Offer.DROPPED,
    },
    Offer.DROPPED: {},
}


# --- consumer ------------------------------------------------------------------------------------


class Link(StrEnum):
    """A producer engine as a consumer rank knows it."""

    RESOLVING = "resolving"
    """The bootstrap was asked, or will be asked again soon."""
    GREETING = "greeting"
    """Hello went to every rank; some have not answered."""
    AGREED = "agreed"
    """All ranks welcomed us and the plans are proven."""
    REFUSED = "refused"
    """No transfer is possible; stands for `refuse_cache_s`."""
    FORGOTTEN = "forgotten"
    """Out of the table; the next request starts anew."""


class LinkEvent(StrEnum):
    """What happens to a producer engine at a consumer rank."""

    RESOLVED = "resolved"
    AGREE = "agree"
    REFUSE = "refuse"
    """A rank refused, its table is invalid, or the planner finds no plan."""
    AGAIN = "again"
    """What the bootstrap said is stale or incomplete: ask it afresh."""
    FORGET = "forget"
    """Unreachable in time, evicted, or a refusal that has stood long enough."""


LINK: Final[Mapping[Link, Mapping[LinkEvent, Link]]] = {
    Link.RESOLVING: {LinkEvent.RESOLVED: Link.GREETING, LinkEvent.FORGET: Link.FORGOTTEN},
    Link.GREETING: {
        LinkEvent.AGREE: Link.AGREED,
        LinkEvent.REFUSE: Link.REFUSED,
        LinkEvent.AGAIN: Link.RESOLVING,
        LinkEvent.FORGET: Link.FORGOTTEN,
    },
    Link.AGREED: {LinkEvent.AGAIN: Link.RESOLVING, LinkEvent.FORGET: Link.FORGOTTEN},
    Link.REFUSED: {LinkEvent.FORGET: Link.FORGOTTEN},
    Link.FORGOTTEN: {},
}


class Load(StrEnum):
    """A request that a consumer rank loads."""

    CONNECTING = "connecting"
    """Its producer engine is not agreed yet."""
    PULLING = "pulling"
    """At least one pull is under way."""
    ENDING = "ending"
    """Failed or cancelled; an engine call of it has not returned or may still write."""
    REPORTED = "reported"
    """Told to vLLM, and forgotten."""


class LoadEvent(StrEnum):
    """What happens to a request at a consumer rank."""

    AGREED = "agreed"
    RECONNECT = "reconnect"
    """Its session is stale and it has not been promised anything yet."""
    FAIL = "fail"
    FINISH = "finish"
    """All bytes are there, or it failed and nothing of it can write any more."""


LOAD: Final[Mapping[Load, Mapping[LoadEvent, Load]]] = {
    Load.CONNECTING: {
        LoadEvent.AGREED: Load.PULLING,
        LoadEvent.FAIL: Load.ENDING,
    },
    Load.PULLING: {
        LoadEvent.RECONNECT: Load.CONNECTING,
        LoadEvent.FAIL: Load.ENDING,
        LoadEvent.FINISH: Load.REPORTED,
    },
    Load.ENDING: {LoadEvent.FINISH: Load.REPORTED},
    Load.REPORTED: {},
}


class Stage(StrEnum):
    """One pull of a request from one producer rank."""

    ASKED = "asked"
    """Pull was sent."""
    CLAIMING = "claiming"
    """Ready came and Claim was sent."""
    READING = "reading"
    """Granted; the read is in the driver's hands."""
    STOPPING = "stopping"
    """Given up while the read has not returned."""
    FENCING = "fencing"
    """The read failed and may still write; the driver makes sure that it cannot."""
    DONE = "done"
    """Returned well, before its deadline."""
    DROPPED = "dropped"
    """Not done, and nothing of it can write."""


class StageEvent(StrEnum):
    """What happens to a pull at its consumer rank."""

    READY = "ready"
    GRANT = "grant"
    READ = "read"
    """The read returned well and in time."""
    LOST = "lost"
    """The read returned too late, or failed and cannot write any more."""
    WILD = "wild"
    """The read failed and may still write."""
    FENCED = "fenced"
    DROP = "drop"


STAGE: Final[Mapping[Stage, Mapping[StageEvent, Stage]]] = {
    Stage.ASKED: {StageEvent.READY: Stage.CLAIMING, StageEvent.DROP: Stage.DROPPED},
    Stage.CLAIMING: {StageEvent.GRANT: Stage.READING, StageEvent.DROP: Stage.DROPPED},
    Stage.READING: {
        StageEvent.GRANT: Stage.READING,
        StageEvent.READ: Stage.DONE,
        StageEvent.LOST: Stage.DROPPED,
        StageEvent.WILD: Stage.FENCING,
        StageEvent.DROP: Stage.STOPPING,
    },
    Stage.STOPPING: {
        StageEvent.READ: Stage.DROPPED,
        StageEvent.LOST: Stage.DROPPED,
        StageEvent.WILD: Stage.FENCING,
    },
    Stage.FENCING: {StageEvent.FENCED: Stage.DROPPED},
    Stage.DONE: {StageEvent.DROP: Stage.DROPPED},
    Stage.DROPPED: {},
}
