"""Every state, event and transition of the protocol machines. What is not in a table does not happen.

    producer rank    Hold     one transfer it keeps        Offer     one pull of it by a consumer rank
                     Shelved  one chunk of a staged pull
    consumer rank    Link     one producer engine          Load      one request
                     Stage    one pull of that request     Fetch     one chunk of a staged pull

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


class Shelved(StrEnum):
    """A chunk of a staged pull in its producer rank's ring."""

    WANTED = "wanted"
    """Has no slot yet."""
    FILLING = "filling"
    """Its gather runs."""
    STAGED = "staged"
    """May be read."""
    DOOMED = "doomed"
    """Nobody will read it, but its gather still writes into the slot."""
    FREED = "freed"


class ShelvedEvent(StrEnum):
    """What happens to a chunk in its producer rank's ring."""

    SLOT = "slot"
    """It was its pull's turn."""
    FILLED = "filled"
    FAILED = "failed"
    """Its gather returned and left nothing that may be read."""
    DROP = "drop"
    """No longer wanted, or its pull is over."""


SHELVED: Final[Mapping[Shelved, Mapping[ShelvedEvent, Shelved]]] = {
    Shelved.WANTED: {ShelvedEvent.SLOT: Shelved.FILLING, ShelvedEvent.DROP: Shelved.FREED},
    Shelved.FILLING: {
        ShelvedEvent.FILLED: Shelved.STAGED,
        ShelvedEvent.FAILED: Shelved.FREED,
        ShelvedEvent.DROP: Shelved.DOOMED,
    },
    Shelved.STAGED: {ShelvedEvent.DROP: Shelved.FREED},
    Shelved.DOOMED: {ShelvedEvent.FILLED: Shelved.FREED, ShelvedEvent.FAILED: Shelved.FREED},
    Shelved.FREED: {},
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
    STAGING = "staging"
    """Granted, and read chunk by chunk."""
    STOPPING = "stopping"
    """Given up while a read has not returned."""
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
    """The read, or that of every chunk, returned well and in time."""
    CHUNKED = "chunked"
    """The read moved nothing and asks to be staged."""
    DIRECT = "direct"
    """The producer cannot stage it: it is read directly, from the start."""
    LOST = "lost"
    """The read returned too late, or failed and cannot write any more."""
    WILD = "wild"
    """The read failed and may still write."""
    FENCED = "fenced"
    DROP = "drop"


STAGE: Final[Mapping[Stage, Mapping[StageEvent, Stage]]] = {
    Stage.ASKED: {
        StageEvent.READY: Stage.CLAIMING,
        StageEvent.GRANT: Stage.READING,
        StageEvent.DROP: Stage.DROPPED,
    },
    Stage.CLAIMING: {StageEvent.GRANT: Stage.READING, StageEvent.DROP: Stage.DROPPED},
    Stage.READING: {
        StageEvent.GRANT: Stage.READING,
        StageEvent.READ: Stage.DONE,
        StageEvent.CHUNKED: Stage.STAGING,
        StageEvent.LOST: Stage.DROPPED,
        StageEvent.WILD: Stage.FENCING,
        StageEvent.DROP: Stage.STOPPING,
    },
    Stage.STAGING: {
        StageEvent.GRANT: Stage.STAGING,
        StageEvent.READ: Stage.DONE,
        StageEvent.DIRECT: Stage.READING,
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


class Fetch(StrEnum):
    """A chunk of a staged pull that has a slot of its consumer rank's ring."""

    ASKED = "asked"
    """Stage names it."""
    READING = "reading"
    """Staged came; the read is in the driver's hands."""
    STOPPING = "stopping"
    """Given up while its read has not returned."""
    FENCING = "fencing"
    """Its read failed and may still write into the slot, which is in quarantine."""
    DONE = "done"
    """Scattered into the pages from a read that returned well and in time."""
    DROPPED = "dropped"
    """Not done, and nothing of it can write."""


class FetchEvent(StrEnum):
    """What happens to a chunk at its consumer rank."""

    STAGED = "staged"
    READ = "read"
    """Its read returned well and in time."""
    LOST = "lost"
    """Its read returned too late, or failed and cannot write any more."""
    WILD = "wild"
    """Its read failed and may still write."""
    FENCED = "fenced"
    DROP = "drop"


FETCH: Final[Mapping[Fetch, Mapping[FetchEvent, Fetch]]] = {
    Fetch.ASKED: {FetchEvent.STAGED: Fetch.READING, FetchEvent.DROP: Fetch.DROPPED},
    Fetch.READING: {
        FetchEvent.READ: Fetch.DONE,
        FetchEvent.LOST: Fetch.DROPPED,
        FetchEvent.WILD: Fetch.FENCING,
        FetchEvent.DROP: Fetch.STOPPING,
    },
    Fetch.STOPPING: {
        FetchEvent.READ: Fetch.DROPPED,
        FetchEvent.LOST: Fetch.DROPPED,
        FetchEvent.WILD: Fetch.FENCING,
    },
    Fetch.FENCING: {FetchEvent.FENCED: Fetch.DROPPED},
    Fetch.DONE: {},
    Fetch.DROPPED: {},
}
