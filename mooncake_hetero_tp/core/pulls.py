"""One request that a consumer rank loads, and its pulls: one from each producer rank it reads from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from mooncake_hetero_tp.core.backoff import Backoff
from mooncake_hetero_tp.core.effects import Plan, PullRequest, ReadId, ReadOutcome
from mooncake_hetero_tp.core.links import EngineLink
from mooncake_hetero_tp.core.messages import GoneReason, Grant, Welcome
from mooncake_hetero_tp.core.states import LOAD, STAGE, Load, LoadEvent, Stage, StageEvent, after
from mooncake_hetero_tp.types import Identity, PullId, Rank, SessionId, TokenRange

RUNNING: Final = frozenset((Stage.READING, Stage.STAGING, Stage.STOPPING, Stage.FENCING))
"""Stages in which an engine call or a scatter of the pull may still write into our pages."""

EXPLANATIONS: Final[dict[GoneReason, str]] = {
    GoneReason.ABORTED: "its request was aborted before it was handed over",
    GoneReason.EXPIRED: "it has freed the blocks: nobody claimed them in time, or the lease ended",
    GoneReason.RELEASED: "this transfer was released already; a remote prefill can be loaded once",
    GoneReason.UNKNOWN_SESSION: "it does not know our session: it was restarted, or dropped the session",
    GoneReason.BEYOND_COMPUTED: "it has not computed all tokens we ask for",
    GoneReason.NULL_PAGE: "it has dropped a page we ask for (outside its attention window)",
    GoneReason.OVERLOADED: "a table of it is full",
    GoneReason.NEVER_CAME: "it has never heard of this transfer; check that the proxy sends both sides one transfer id",
    GoneReason.CLOSING: "it is shutting down",
    GoneReason.BAD_RANGES: "it does not understand our token ranges; run one version on both sides",
    GoneReason.OTHER_STATE: "its state is not that of the last token we ask for; "
    "its prompt must be one token shorter than ours, see the token rule",
    GoneReason.NO_STAGING: "it cannot stage this pull",
}


@dataclass(slots=True, eq=False)
class Request:
    """One load, from `start` to its Report."""

    asked: PullRequest
    link: EngineLink
    deadline: float
    state: Load = Load.CONNECTING
    pulls: list[PairPull] = field(default_factory=list)
    generation: int = 0
    """Handshake that its pulls belong to."""
    refreshed: bool = False
    """It has used its one fresh handshake."""
    witnesses: dict[Rank, Identity] = field(default_factory=dict)
    """Producer processes that have answered a pull of it: the prefill is theirs, and dies with them."""
    producer_tag: int | None = None
    """`request_tag` of the first grant; all ranks must give the same."""
    reason: str | None = None
    cancelled: bool = False

    @property
    def promised(self) -> bool:
        """Whether any producer rank has offered or granted it anything."""
        return any(pull.stage is not Stage.ASKED for pull in self.pulls)

    @property
    def lost_with(self) -> Identity | None:
        """A process that knew of this transfer and is no longer part of the link; None: all still are."""
        for rank, witness in self.witnesses.items():
            ranked = self.link.ranks.get(rank)
            if ranked is None or ranked.welcome is None or ranked.welcome.identity != witness:
                return witness
        return None

    @property
    def whereabouts(self) -> str:
        """How far it has come, for people."""
        if self.state is Load.CONNECTING:
            return f"still connecting to {self.link.name}: {self.link.reason}"
        return "; ".join(f"{pull.name}: {pull.stage}" for pull in self.pulls)

    @property
    def may_be_written(self) -> bool:
        return any(pull.stage in RUNNING for pull in self.pulls)

    @property
    def complete(self) -> bool:
        return all(pull.stage is Stage.DONE for pull in self.pulls)

    def step(self, event: LoadEvent) -> bool:
        """Make a transition; False: refused."""
        state = after(LOAD, self.state, event)
        if state is not None:
            self.state = state
        return state is not None


@dataclass(slots=True, eq=False)
class PairPull:
    """One pull of one request from one producer rank."""

    number: PullId
    request: Request
    address: str
    welcome: Welcome
    plan: Plan
    ranges: tuple[TokenRange, ...]
    """In the order of the producer's groups."""
    backoff: Backoff
    stage: Stage = Stage.ASKED
    questions: dict[int, float] = field(default_factory=dict)
    """Nonce of each Claim or Renew that may still be answered -> when it was *sent*."""
    lease_s: float = 0.0
    deadline: float = 0.0
    """A read counts if it returned by then: the send time of the latest answered question, plus the lease."""
    blocks: tuple[bytes, ...] = ()
    """The producer's, as granted."""
    read_id: ReadId | None = None
    """Of its StartRead, until that is done with."""
    direct_only: bool = False
    """The producer cannot stage it."""
    stopped: bool = False

    @property
    def session(self) -> SessionId:
        return self.welcome.session

    @property
    def name(self) -> str:
        return f"producer {self.welcome.identity} at {self.address}"

    @property
    def end_token(self) -> int:
        return max(tokens.end for tokens in self.ranges if tokens.count)

    def step(self, event: StageEvent) -> bool:
        """Make a transition; False: refused."""
        stage = after(STAGE, self.stage, event)
        if stage is not None:
            self.stage = stage
        return stage is not None

    def answered(self, nonce: int) -> float | None:
        """When the question with this nonce was sent; older questions are forgotten. None: not ours, or answered."""
        sent = self.questions.get(nonce)
        if sent is not None:
            self.questions = {key: at for key, at in self.questions.items() if at > sent}
        return sent


def new_pulls(request: Request, numbers: Iterator[PullId], resend_s: float, resend_max_s: float) -> list[PairPull]:
    """The pulls of a request on an agreed link; producer ranks it needs no byte of are left out."""
    pulls = []
    for rank, plan in request.link.plans.items():
        ranges = plan.producer_ranges(request.asked.ranges)
        ranked = request.link.ranks[rank]
        if ranked.welcome is None or not any(tokens.count for tokens in ranges):
            continue
        pulls.append(
            PairPull(
                number=next(numbers),
                request=request,
                address=ranked.address,
                welcome=ranked.welcome,
                plan=plan,
                ranges=ranges,
                backoff=Backoff(resend_s, resend_max_s),
            )
        )
    return pulls


def wrong_grant(pull: PairPull, grant: Grant) -> str | None:
    """What is wrong with the first Grant of a pull; None: it may be read."""
    groups = len(pull.welcome.table.groups)
    if len(grant.blocks) != groups:
        return f"granted {len(grant.blocks)} block lists, expected {groups} (one per KV cache group of its table)"
    if grant.computed_tokens < pull.end_token:
        return f"granted {grant.computed_tokens} computed tokens, expected at least {pull.end_token}"
    if pull.request.producer_tag not in (None, grant.request_tag):
        return "granted blocks of another request than its fellow rank; transfer ids must not be used twice"
    return None


def read_failure(pull: PairPull, outcome: ReadOutcome) -> str | None:
    """Why a read does not count; None: it does."""
    late_s = outcome.returned_at - pull.deadline
    late = f"the read returned {late_s:.3f} s after its lease ended; the blocks may have been reused meanwhile"
    if outcome.ok:
        return late if late_s > 0 else None
    failed = f"the read failed: {outcome.error or 'the engine gave no reason'}"
    return f"{failed}; {late}" if late_s > 0 else failed
