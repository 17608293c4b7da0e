"""The consumer rank's machine: requests it loads and their pulls. No I/O.

Its promises, which the simulation holds it to:

- one Report per `start`, and only when no engine call of the request is running or can write any more;
- ok only if every read *returned* before its deadline: the time the Claim or Renew that the last Grant
  answers was *sent*, plus the lease. A late read is a failed load (vllm#52234);
- every request ends by its deadline; a read that has not returned delays the Report, never mends it;
  one that failed and may still write delays it too, unless it writes into a slot of our ring;
- a stale session leads to exactly one fresh query of the bootstrap and one fresh handshake (vllm#49238).

States and transitions are in `core/states.py`, links to producer engines in `core/links.py`, what follows a Grant in
`core/reading.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mooncake_hetero_tp.core.asking import Asker, ConsumerConfig
from mooncake_hetero_tp.core.cuts import pair_cuts
from mooncake_hetero_tp.core.effects import (
    ConsumerEffect,
    Level,
    Notice,
    PullRequest,
    ReadId,
    ReadOutcome,
    Report,
    ResolvedEngine,
    ResolveFailed,
)
from mooncake_hetero_tp.core.links import EngineLink, LinkTable, Planner
from mooncake_hetero_tp.core.messages import (
    Gone,
    GoneReason,
    Grant,
    ProducerMessage,
    Ready,
    Refuse,
    Staged,
    Waiting,
    Welcome,
)
from mooncake_hetero_tp.core.pulls import EXPLANATIONS, PairPull, Request, new_pulls, wrong_grant
from mooncake_hetero_tp.core.reading import Reader
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.sessions import Validate
from mooncake_hetero_tp.core.stagings import Cuts
from mooncake_hetero_tp.core.states import Link, Load, LoadEvent, Stage, StageEvent
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.core.timers import Timers
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import Identity, PullId, RequestId

__all__ = ["ConsumerConfig", "ConsumerMachine", "Planner"]


class ConsumerMachine:
    """All protocol state of one consumer rank. Single-threaded; every method returns at once."""

    def __init__(
        self,
        identity: Identity,
        table: RankTable,
        config: ConsumerConfig,
        *,
        draw: Callable[[], int],
        planner: Planner,
        validate: Validate = validate_table,
        cuts: Cuts = pair_cuts,
    ) -> None:
        self._config = config
        self._draw = draw
        self._links = LinkTable(identity, table, config.for_links(), planner, validate)
        self._groups = len(table.groups)
        self._requests: dict[RequestId, Request] = {}
        self._pulls: dict[PullId, PairPull] = {}
        self._timers: Timers[Request | PairPull] = Timers()
        self._closing = False
        self._out: list[ConsumerEffect] = []
        self._asker = Asker(config, self._timers, self._out)
        self._reader = Reader(
            config, self._pulls, self._timers, self._asker, cuts, self._out, fail=self._fail, conclude=self._conclude
        )

    # --- inputs ----------------------------------------------------------------------------------

    def start(self, asked: PullRequest, now: float) -> list[ConsumerEffect]:
        """Begin to load a request.

        Raises:
            LocalUsageError: it is being loaded already, or has not one range and one block list per
                KV cache group; nothing changes.
        """
        self._check(asked)
        if not any(tokens.count for tokens in asked.ranges):
            self._out.append(Report(asked.request_id, ok=True))
        elif self._closing or len(self._requests) >= self._config.max_requests:
            self._decline(asked, "the consumer is shutting down" if self._closing else "too many loads at once")
        elif (link := self._links.want((asked.bootstrap, asked.engine_id), now)) is None:
            self._decline(asked, f"{self._config.max_engines} producer engines are in use; raise max_engines")
        else:
            self._enter(Request(asked, link, now + self._config.deadline_s), now)
        return self._take(now)

    def cancel(self, request_id: RequestId, now: float) -> list[ConsumerEffect]:
        """Give up a request that was aborted while it was loading; unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            request.cancelled = True
            self._fail(request, "cancelled")
        return self._take(now)

    def resolved(self, answer: ResolvedEngine | ResolveFailed, now: float) -> list[ConsumerEffect]:
        """The answer to a Resolve."""
        self._links.resolved(answer, now)
        return self._take(now)

    def receive(self, address: str, message: ProducerMessage, now: float) -> list[ConsumerEffect]:
        """One message that came from the producer rank at `address`; late duplicates are ignored."""
        match message:
            case Welcome() | Refuse():
                self._links.receive(address, message, now)
            case Waiting() | Ready() | Gone() | Grant() | Staged():
                pull = self._pulls.get(message.pull)
                if pull is not None and (pull.session, pull.address) == (message.session, address):
                    self._on_answer(pull, message, now)
        return self._take(now)

    def read_finished(self, read_id: ReadId, outcome: ReadOutcome, now: float) -> list[ConsumerEffect]:
        """The answer to a StartRead or StartChunk.

        Raises:
            LocalUsageError: no such read is running, or it asks for chunks and cannot; nothing changes.
        """
        self._reader.finished(read_id, outcome)
        return self._take(now)

    def read_fenced(self, read_id: ReadId, now: float) -> list[ConsumerEffect]:
        """Nothing of this read can write any more (answer to FenceRead).

        Raises:
            LocalUsageError: no fence was asked for; nothing changes.
        """
        self._reader.fenced(read_id)
        return self._take(now)

    def tick(self, now: float) -> list[ConsumerEffect]:
        """Do what is due."""
        self._links.tick(now)
        for due in self._timers.expired(now):
            if isinstance(due, PairPull):
                self._pull_due(due, now)
            else:
                self._fail(due, f"not loaded within {self._config.deadline_s:g} s; {due.whereabouts}")
        for pull in self._reader.stagings.silent(now):
            self._fail(pull.request, f"{pull.name}: {self._silence(pull)}")
        return self._take(now)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do; None: nothing is timed."""
        dues = (self._timers.next_due(), self._links.next_deadline(), self._reader.stagings.next_deadline())
        return min((due for due in dues if due is not None), default=None)

    def close(self, now: float) -> list[ConsumerEffect]:
        """End all requests as failed; those with a running read report when it has returned."""
        self._closing = True
        for request in list(self._requests.values()):
            self._fail(request, "the consumer is shutting down")
        return self._take(now)

    @property
    def drained(self) -> bool:
        """Whether every started request has been reported, and nothing may write into our ring."""
        return not self._requests and not self._reader.stagings.fencing

    # --- requests --------------------------------------------------------------------------------

    def _check(self, asked: PullRequest) -> None:
        if asked.request_id in self._requests:
            raise LocalUsageError(f"request {asked.request_id}: expected one load at a time, one is under way")
        if not len(asked.ranges) == len(asked.blocks) == self._groups:
            raise LocalUsageError(
                f"request {asked.request_id}: expected {self._groups} token ranges and block lists (one per KV "
                f"cache group), got {len(asked.ranges)} and {len(asked.blocks)}"
            )

    def _decline(self, asked: PullRequest, reason: str) -> None:
        self._out.append(Report(asked.request_id, ok=False, reason=reason))

    def _enter(self, request: Request, now: float) -> None:
        self._requests[request.asked.request_id] = request
        self._timers.arm(request, request.deadline)
        request.link.users += 1
        self._attach(request, now)

    def _attach(self, request: Request, now: float) -> None:
        """Go on with a request according to its link."""
        link = request.link
        match link.state:
            case Link.AGREED:
                self._begin(request, now)
            case Link.REFUSED | Link.FORGOTTEN:
                self._fail(request, f"{link.name}: {link.reason}")
            case _:
                link.waiting[request.asked.request_id] = None

    def _begin(self, request: Request, now: float) -> None:
        if not request.step(LoadEvent.AGREED):
            return
        if (witness := request.lost_with) is not None:
            self._fail(request, f"producer {witness} was restarted, and what it had computed is lost")
            return
        request.generation = request.link.generation
        request.pulls = new_pulls(request, self._numbers(), self._config.resend_s, self._config.resend_max_s)
        for pull in request.pulls:
            self._pulls[pull.number] = pull
            self._asker.ask(pull, now)
        self._conclude(request)

    def _reconnect(self, pull: PairPull, reason: str, now: float) -> None:
        """The session is stale, or its rank silent: one fresh handshake, if nothing was promised before."""
        request = pull.request
        if request.refreshed or request.promised:
            self._fail(request, f"{pull.name}: {reason}")
            return
        request.refreshed = True
        self._drop_pulls(request)
        request.pulls = []
        request.step(LoadEvent.RECONNECT)
        link = self._links.refresh(request.link, request.generation, now)
        if link is None:
            self._fail(request, f"{pull.name}: {reason}")
            return
        request.link.users -= 1
        request.link = link
        link.users += 1
        self._attach(request, now)

    def _fail(self, request: Request, reason: str) -> None:
        if not request.step(LoadEvent.FAIL):
            return
        request.reason = reason
        self._timers.disarm(request)
        self._drop_pulls(request)
        self._conclude(request)

    def _drop_pulls(self, request: Request) -> None:
        for pull in request.pulls:
            if pull.step(StageEvent.DROP):
                self._timers.disarm(pull)
                self._asker.cancel(pull)
                self._reader.give_up(pull)

    def _conclude(self, request: Request) -> None:
        """Report a request that has all its bytes, or that failed and cannot be written any more."""
        ok = request.state is Load.PULLING and request.complete
        failed = request.state is Load.ENDING and not request.may_be_written
        if not (ok or failed) or not request.step(LoadEvent.FINISH):
            return
        request_id = request.asked.request_id
        self._timers.disarm(request)
        request.link.users -= 1
        request.link.waiting.pop(request_id, None)
        del self._requests[request_id]
        if not ok and not request.cancelled:
            self._out.append(Notice(Level.WARNING, f"request {request_id} was not loaded: {request.reason}"))
        self._out.append(Report(request_id, ok, request.reason, request.cancelled))

    def _on_settled(self, link: EngineLink, now: float) -> None:
        waiting, link.waiting = link.waiting, {}
        for request_id in waiting:
            self._attach(self._requests[request_id], now)

    # --- pulls -----------------------------------------------------------------------------------

    def _on_answer(self, pull: PairPull, message: Waiting | Ready | Gone | Grant | Staged, now: float) -> None:
        if not isinstance(message, Gone):
            pull.request.witnesses[pull.welcome.identity.rank] = pull.welcome.identity
        match message:
            case Waiting():
                if pull.stage is Stage.ASKED:
                    self._asker.ask_later(pull, now + self._config.heartbeat_s)
                self._reader.stagings.on_waiting(pull, now)
            case Ready():
                if pull.step(StageEvent.READY):
                    pull.backoff.heard(now)
                    self._asker.claim(pull, now)
            case Grant():
                self._on_grant(pull, message, now)
            case Staged():
                self._reader.on_staged(pull, message, now)
            case Gone():
                self._on_gone(pull, message.reason, now)

    def _on_gone(self, pull: PairPull, reason: GoneReason, now: float) -> None:
        if pull.stage is Stage.ASKED and reason is GoneReason.OVERLOADED:
            self._asker.ask_later(pull, now + self._config.resend_max_s)
        elif reason is GoneReason.NO_STAGING:
            self._reader.fall_back(pull)
        elif reason is GoneReason.UNKNOWN_SESSION:
            self._reconnect(pull, EXPLANATIONS[reason], now)
        else:
            self._fail(pull.request, f"{pull.name}: {EXPLANATIONS[reason]}")

    def _on_grant(self, pull: PairPull, grant: Grant, now: float) -> None:
        sent = pull.answered(grant.nonce)
        if sent is None or pull.stage not in (Stage.ASKED, Stage.CLAIMING, Stage.READING, Stage.STAGING):
            return
        deadline = sent + grant.lease_s
        if pull.stage in (Stage.READING, Stage.STAGING):
            self._reader.extend(pull, deadline, now)
        elif deadline <= now:
            pull.step(StageEvent.READY)
            pull.backoff.heard(now)
            self._asker.claim(pull, now)
        elif wrong := wrong_grant(pull, grant):
            self._fail(pull.request, f"{pull.name}: {wrong}")
        else:
            pull.request.producer_tag = grant.request_tag
            self._reader.begin(pull, grant, deadline)
            self._asker.renew_later(pull, sent, now)

    def _pull_due(self, pull: PairPull, now: float) -> None:
        if pull.stage in (Stage.READING, Stage.STAGING):
            if now < pull.deadline:
                self._asker.renew(pull, now)
            else:
                self._reader.end_lease(pull)
        elif pull.backoff.silent_for(now) < self._config.silence_s:
            self._asker.ask(pull, now) if pull.stage is Stage.ASKED else self._asker.claim(pull, now)
        elif pull.stage is Stage.ASKED:
            self._reconnect(pull, self._silence(pull), now)
        else:
            self._fail(pull.request, f"{pull.name}: {self._silence(pull)}")

    def _silence(self, pull: PairPull) -> str:
        return f"no answer to {pull.stage} for {self._config.silence_s:g} s; it is down, stopped or unreachable"

    def _numbers(self) -> Iterator[PullId]:
        """Random numbers that no pull has, one another included."""
        fresh: set[PullId] = set()
        while True:
            number = PullId(self._draw() % 2**32)
            if number not in self._pulls and number not in fresh:
                fresh.add(number)
                yield number

    def _take(self, now: float) -> list[ConsumerEffect]:
        while settled := self._links.take_settled():
            for link in settled:
                self._on_settled(link, now)
        self._reader.stagings.flush(now)
        out = self._links.take_effects() + self._out
        self._out.clear()
        return out
