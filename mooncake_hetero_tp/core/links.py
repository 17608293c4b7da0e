"""Producer engines as one consumer rank knows them: resolved, greeted, planned, or refused. No I/O.

A plan needs the tables of *all* ranks of an engine, so a link is agreed when every rank has said Welcome
and the planner has proven its plans. Agreed links are cached; what makes one stale (another incarnation,
an unknown session, silence, a failed read) leads to one fresh query of the bootstrap and one fresh
handshake (vllm#49238). Refusals are cached for a short while, so that a misconfigured pair does not hammer
and a restarted peer is tried again.

States and transitions are in `core/states.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

from mooncake_hetero_tp.core.backoff import Backoff
from mooncake_hetero_tp.core.effects import ConsumerEffect, Plan, Resolve, ResolvedEngine, ResolveFailed, Send
from mooncake_hetero_tp.core.handshake import explain
from mooncake_hetero_tp.core.messages import PROTOCOL_VERSION, Hello, Offer, Refuse, Welcome
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.sessions import OLDEST_VERSION, Validate
from mooncake_hetero_tp.core.states import LINK, Link, LinkEvent, after
from mooncake_hetero_tp.core.timers import Timers
from mooncake_hetero_tp.errors import HeteroTPError, PeerProtocolError
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId

Planner = Callable[[RankTable, Mapping[Rank, RankTable]], Mapping[Rank, Plan]]
"""Plans and proves: (own table, tables of all ranks of the producer engine) -> plan per rank to read from.

Raises IncompatiblePeer or PlanError; both refuse the engine by name.
"""
LinkKey: TypeAlias = tuple[str, EngineId]
"""Bootstrap address and engine id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkConfig:
    """Times and bounds of links; times in seconds."""

    connect_timeout_s: float
    """From the first question to the bootstrap to the last Welcome."""
    resend_s: float
    resend_max_s: float
    refuse_cache_s: float
    max_engines: int
    staging: Offer | None = None


@dataclass(slots=True, eq=False)
class RankLink:
    """One rank of a producer engine."""

    rank: Rank
    address: str
    incarnation: Incarnation | None
    """What the bootstrap says; None: it does not know."""
    attempt: int
    """Names our Hello, so that an answer to an older one is not taken for its answer."""
    welcome: Welcome | None = None


@dataclass(slots=True, eq=False)
class EngineLink:
    """One producer engine."""

    key: LinkKey
    backoff: Backoff
    state: Link = Link.RESOLVING
    generation: int = 0
    """Grows with every handshake; a request remembers the one its pulls belong to."""
    ranks: dict[Rank, RankLink] = field(default_factory=dict)
    plans: Mapping[Rank, Plan] = field(default_factory=dict)
    waiting: dict[RequestId, None] = field(default_factory=dict)
    """Requests that go on when it is agreed, and fail when it is not."""
    users: int = 0
    """Requests that use it in any way; a link with users is not evicted."""
    may_refresh: bool = True
    """Whether a stale answer in this handshake may lead to one more query."""
    asking: bool = False
    """A Resolve has not been answered."""
    suspect: bool = False
    """A read failed: the next request shakes hands afresh."""
    reason: str = ""
    """Why it is refused or forgotten, or what keeps it from being agreed."""
    until: float = 0.0
    """End of the connect timeout, or of a refusal."""

    @property
    def name(self) -> str:
        return f"producer engine {self.key[1]} (bootstrap {self.key[0]})"


class LinkTable:
    """All links of one consumer rank. Changes that requests must hear of are in `take_settled`."""

    def __init__(
        self, identity: Identity, table: RankTable, config: LinkConfig, planner: Planner, validate: Validate
    ) -> None:
        self._identity = identity
        self._table = table
        self._config = config
        self._planner = planner
        self._validate = validate
        self._links: OrderedDict[LinkKey, EngineLink] = OrderedDict()
        self._attempts: dict[int, tuple[EngineLink, RankLink]] = {}
        self._counter = count(1)
        self._timers: Timers[EngineLink] = Timers()
        self._settled: list[EngineLink] = []
        self._out: list[ConsumerEffect] = []

    def __len__(self) -> int:
        return len(self._links)

    def want(self, key: LinkKey, now: float) -> EngineLink | None:
        """The link to an engine, started or restarted if need be; None: the table is full of links in use."""
        link = self._links.get(key)
        if link is not None and link.state is Link.REFUSED and link.until <= now:
            self._forget(link)
            link = None
        if link is None:
            if len(self._links) >= self._config.max_engines and not self._evict():
                return None
            link = self._links[key] = EngineLink(key, self._new_backoff())
            self._start(link, now)
        elif link.suspect and link.state is Link.AGREED:
            self._restart(link, now, may_refresh=True)
        self._links.move_to_end(key)
        return link

    def refresh(self, link: EngineLink, generation: int, now: float) -> EngineLink | None:
        """A link whose sessions of `generation` are stale, asked afresh unless that is done or under way."""
        if link.state is Link.AGREED and link.generation == generation:
            self._restart(link, now, may_refresh=False)
        return link if link.state in (Link.RESOLVING, Link.GREETING, Link.AGREED) else self.want(link.key, now)

    def resolved(self, answer: ResolvedEngine | ResolveFailed, now: float) -> None:
        """The bootstrap's answer; one that nobody waits for is ignored."""
        link = self._links.get((answer.bootstrap, answer.engine_id))
        if link is None or not link.asking:
            return
        link.asking = False
        if link.state is not Link.RESOLVING:
            return
        if isinstance(answer, ResolveFailed):
            link.reason = f"the bootstrap server could not be asked: {answer.reason}"
        elif not answer.addresses:
            link.reason = "the bootstrap server lists no rank of it"
        else:
            self._greet(link, answer, now)

    def receive(self, address: str, message: Welcome | Refuse, now: float) -> None:
        """An answer to a Hello; one to an older Hello is ignored."""
        link, rank = self._attempts.get(message.attempt, (None, None))
        if link is None or rank is None or rank.address != address or rank.welcome is not None:
            return
        if link.state is not Link.GREETING:
            return
        stale = _stale(link, rank, message.identity)
        if stale:
            self._on_stale(link, stale, now)
        elif isinstance(message, Refuse):
            self._refuse(link, f"{message.identity} at {address} refused us:\n{explain(message.mismatches)}", now)
        else:
            self._on_welcome(link, rank, message, now)

    def tick(self, now: float) -> None:
        for link in self._timers.expired(now):
            if now >= link.until:
                self._fail(link, f"not connected within {self._config.connect_timeout_s:g} s: {link.reason}")
            elif link.state is Link.RESOLVING:
                self._ask(link, now)
            elif link.state is Link.GREETING:
                self._send_hellos(link, now)

    def next_deadline(self) -> float | None:
        return self._timers.next_due()

    def take_settled(self) -> list[EngineLink]:
        """Links that became agreed, refused or forgotten since the last call."""
        settled, self._settled = self._settled, []
        return settled

    def take_effects(self) -> list[ConsumerEffect]:
        out, self._out = self._out, []
        return out

    # --- resolving -------------------------------------------------------------------------------

    def _start(self, link: EngineLink, now: float) -> None:
        link.until = now + self._config.connect_timeout_s
        link.reason = "the bootstrap server has not answered"
        link.backoff = self._new_backoff()
        self._ask(link, now)

    def _restart(self, link: EngineLink, now: float, *, may_refresh: bool) -> None:
        if self._move(link, LinkEvent.AGAIN):
            self._clear(link)
            link.may_refresh = may_refresh
            self._start(link, now)

    def _ask(self, link: EngineLink, now: float) -> None:
        if not link.asking:
            link.asking = True
            self._out.append(Resolve(*link.key))
        self._timers.arm(link, min(link.backoff.sent(now), link.until))

    # --- greeting --------------------------------------------------------------------------------

    def _greet(self, link: EngineLink, answer: ResolvedEngine, now: float) -> None:
        if not self._move(link, LinkEvent.RESOLVED):
            return
        link.generation += 1
        for rank, address in answer.addresses.items():
            ranked = RankLink(rank, address, answer.incarnations.get(rank), next(self._counter))
            link.ranks[rank] = ranked
            self._attempts[ranked.attempt] = (link, ranked)
        link.backoff = self._new_backoff()
        self._send_hellos(link, now)

    def _send_hellos(self, link: EngineLink, now: float) -> None:
        missing = [ranked for ranked in link.ranks.values() if ranked.welcome is None]
        link.reason = "no answer to Hello from " + ", ".join(f"{m.rank} at {m.address}" for m in missing)
        for ranked in missing:
            hello = Hello(
                min_version=OLDEST_VERSION,
                max_version=PROTOCOL_VERSION,
                features=(),
                identity=self._identity,
                expected_engine=link.key[1],
                expected_incarnation=ranked.incarnation,
                attempt=ranked.attempt,
                table=self._table,
                staging=self._config.staging,
            )
            self._out.append(Send(ranked.address, hello))
        self._timers.arm(link, min(link.backoff.sent(now), link.until))

    def _on_stale(self, link: EngineLink, reason: str, now: float) -> None:
        if link.may_refresh:
            self._restart(link, now, may_refresh=False)
            link.reason = reason
        else:
            self._fail(link, f"{reason}, and asking the bootstrap server again did not help; its registration is stale")

    def _on_welcome(self, link: EngineLink, rank: RankLink, welcome: Welcome, now: float) -> None:
        if not OLDEST_VERSION <= welcome.version <= PROTOCOL_VERSION:
            reason = f"chose protocol version {welcome.version}, expected {OLDEST_VERSION} to {PROTOCOL_VERSION}"
            self._refuse(link, f"{welcome.identity} at {rank.address} {reason}", now)
            return
        try:
            self._validate(welcome.table)
        except PeerProtocolError as error:
            self._refuse(link, f"{welcome.identity} at {rank.address} sent an invalid region table: {error}", now)
            return
        rank.welcome = welcome
        del self._attempts[rank.attempt]
        if all(ranked.welcome is not None for ranked in link.ranks.values()):
            self._plan(link, now)

    def _plan(self, link: EngineLink, now: float) -> None:
        tables = {rank: ranked.welcome.table for rank, ranked in link.ranks.items() if ranked.welcome}
        wanted = max(table.tp_size * table.pp_size for table in tables.values())
        if len(tables) < wanted:  # some workers have not registered yet
            waited = link.backoff
            self._move(link, LinkEvent.AGAIN)
            self._clear(link)
            link.reason = f"the bootstrap server lists {len(tables)} of {wanted} ranks"
            link.backoff = waited
            self._timers.arm(link, min(waited.sent(now), link.until))
            return
        try:
            link.plans = self._planner(self._table, tables)
        except HeteroTPError as error:
            self._refuse(link, str(error), now)
            return
        link.suspect = False
        link.reason = ""
        self._timers.disarm(link)
        self._settle(link, LinkEvent.AGREE)

    # --- ends ------------------------------------------------------------------------------------

    def _refuse(self, link: EngineLink, reason: str, now: float) -> None:
        self._clear(link)
        self._timers.disarm(link)
        link.reason = reason
        link.until = now + self._config.refuse_cache_s
        self._settle(link, LinkEvent.REFUSE)

    def _fail(self, link: EngineLink, reason: str) -> None:
        link.reason = reason
        self._forget(link)
        self._settled.append(link)

    def _forget(self, link: EngineLink) -> None:
        self._move(link, LinkEvent.FORGET)
        self._clear(link)
        self._timers.disarm(link)
        self._links.pop(link.key, None)

    def _evict(self) -> bool:
        idle = next((link for link in self._links.values() if not link.users), None)
        if idle is not None:
            self._forget(idle)
        return idle is not None

    def _clear(self, link: EngineLink) -> None:
        for ranked in link.ranks.values():
            self._attempts.pop(ranked.attempt, None)
        link.ranks = {}
        link.plans = {}

    def _settle(self, link: EngineLink, event: LinkEvent) -> None:
        if self._move(link, event):
            self._settled.append(link)

    def _move(self, link: EngineLink, event: LinkEvent) -> bool:
        state = after(LINK, link.state, event)
        if state is not None:
            link.state = state
        return state is not None

    def _new_backoff(self) -> Backoff:
        return Backoff(self._config.resend_s, self._config.resend_max_s)


def _stale(link: EngineLink, rank: RankLink, answered: Identity) -> str:
    """How the process that answered differs from the one the bootstrap named; empty: it does not."""
    expected = f"{link.key[1]}[{rank.incarnation or 'any'}] {rank.rank}"
    same = answered.engine_id == link.key[1] and answered.rank == rank.rank
    if same and rank.incarnation in (None, answered.incarnation):
        return ""
    return f"expected {expected} at {rank.address}, {answered} answered"
