"""Asks every rank of a producer who it is, and leaves no state there (`mooncake-hetero-tp handshake probe`).

A Hello with the `PROBE` feature is answered by a Welcome without a session. Nothing here trusts what answers:
an address may be dead, silent, of another process, or speak another protocol, vLLM's own Mooncake connector
first of all, which registers with the same bootstrap service.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Final, Literal

import msgspec

from mooncake_hetero_tp.core.codec import decode_from_producer, encode
from mooncake_hetero_tp.core.handshake import explain
from mooncake_hetero_tp.core.messages import PROBE, PROTOCOL_VERSION, Hello, Refuse, Welcome
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.sessions import OLDEST_VERSION
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.errors import ConfigError, PeerProtocolError
from mooncake_hetero_tp.io.bootstrap_client import list_engines
from mooncake_hetero_tp.io.control import ControlChannel
from mooncake_hetero_tp.io.reach import unreachable
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank

MAX_ASKED: Final = 1024
"""Ranks asked at once; each takes a socket."""
MAX_RANKS: Final = 65_536
"""TP x PP that a table may claim."""
CONNECTOR: Final = "MooncakeHeteroTPConnector"

_NAME: Final = EngineId("mooncake-hetero-tp-handshake-probe")
_NO_TABLE: Final = RankTable(tp_size=1, pp_size=1, layout="", model={}, groups=(), regions=(), buffers=())
_DIAL_SHARE: Final = 0.5
"""Part of the time left in which TCP connections must be made; the rest is for the answers."""

_GRACE_S: Final = 1.0


class FaultKind(StrEnum):
    """Why a rank did not say who it is."""

    UNREACHABLE = "unreachable"
    """No TCP connection."""
    SILENT = "silent"
    """A connection, and no answer in time."""
    FOREIGN = "foreign"
    """vLLM's own Mooncake connector."""
    GARBLED = "garbled"
    """An answer that is none of this protocol, or of no version known here."""
    STALE = "stale"
    """Another process than the bootstrap server names."""
    INVALID = "invalid"
    """A region table that contradicts itself."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one rank; `text` is for people."""

    kind: FaultKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What is known of one rank: its answer, or what is wrong with it."""

    rank: Rank
    address: str
    incarnation: Incarnation | None
    """What the bootstrap server says; None: it does not say."""
    answer: Welcome | Fault
    latency_s: float | None = None
    """From a hello on an open connection to its answer, which carries the region table."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One engine, which is one data-parallel rank of a deployment, with the ranks that it registered."""

    dp: int
    engine_id: EngineId
    ranks: tuple[RankReport, ...]


def inquire(bootstrap: str, *, timeout_s: float) -> list[EngineReport]:
    """Ask a bootstrap server for its engines, and each of their ranks who it is; all within `timeout_s`.

    What alone may take longer, and is left behind in a thread then, is the system's look-up of a host's name.

    Raises:
        ConfigError: the bootstrap server does not answer, or lists more than `MAX_ASKED` ranks.
    """
    future: Future[list[EngineReport]] = Future()

    def work() -> None:
        try:
            future.set_result(_inquire(bootstrap, timeout_s))
        except BaseException as error:  # noqa: BLE001 - raised where the future is read
            future.set_exception(error)

    threading.Thread(target=work, name="mht-inquiry", daemon=True).start()
    try:
        return future.result(timeout_s + _GRACE_S)
    except TimeoutError as error:
        raise ConfigError(f"no answer within {timeout_s:.1f} s: a host's name at {bootstrap} is not found") from error


def _inquire(bootstrap: str, timeout_s: float) -> list[EngineReport]:
    end = time.monotonic() + timeout_s
    engines = list_engines(bootstrap, timeout_s=timeout_s)
    asked = [
        _Asked(found.engine_id, rank, address, found.incarnations.get(rank))
        for found in engines.values()
        for rank, address in found.addresses.items()
    ]
    if len(asked) > MAX_ASKED:
        raise ConfigError(f"the bootstrap server lists {len(asked)} ranks; at most {MAX_ASKED} can be asked at once")
    reports = _ask(asked, end)
    return [
        EngineReport(dp, found.engine_id, tuple(report for report in reports if report.rank.dp == dp))
        for dp, found in engines.items()
    ]


# --- asking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Asked:
    """One rank as the bootstrap server names it."""

    engine_id: EngineId
    rank: Rank
    address: str
    incarnation: Incarnation | None

    def report(self, answer: _Answer) -> RankReport:
        return RankReport(
            rank=self.rank,
            address=self.address,
            incarnation=self.incarnation,
            answer=answer.content if isinstance(answer.content, Fault) else _judged(self, answer.content),
            latency_s=answer.latency_s,
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    content: Welcome | Fault
    latency_s: float | None = None


def _ask(asked: Sequence[_Asked], end: float) -> list[RankReport]:
    """All ranks at once, then each once more on its own: that second answer is the latency."""
    patience_s = max(end - time.monotonic(), 0.0)
    dead = unreachable({one.address for one in asked}, timeout_s=_DIAL_SHARE * patience_s)
    answers = {
        one: _Answer(Fault(FaultKind.UNREACHABLE, f"cannot be reached: {dead[one.address]}"))
        for one in asked
        if one.address in dead
    }
    with closing(_Caller(end)) as caller:
        answers |= caller.ask([one for one in asked if one not in answers])
        for one, answer in answers.items():
            if isinstance(answer.content, Welcome):
                answers[one] = caller.ask([one]).get(one, answer)
    silent = _Answer(Fault(FaultKind.SILENT, _silence(patience_s)))
    return [one.report(answers.get(one, silent)) for one in asked]


class _Caller:
    """Sends hellos and collects answers until `end`."""

    def __init__(self, end: float) -> None:
        self._end = end
        self._channel = ControlChannel()
        self._identity = Identity(_NAME, Incarnation(secrets.token_hex(8)), Rank())
        self._attempts = count(1)

    def ask(self, asked: Iterable[_Asked]) -> dict[_Asked, _Answer]:
        """The answers of those that give one in time."""
        sent_at: dict[int, float] = {}
        waiting: dict[int, _Asked] = {}
        for one in asked:
            attempt = next(self._attempts)
            waiting[attempt], sent_at[attempt] = one, time.monotonic()
            self._channel.send(one.address, encode(self._hello(one, attempt)), sent_at[attempt])
        answers: dict[_Asked, _Answer] = {}
        while waiting and (left := self._end - time.monotonic()) > 0:
            for address, frame in self._channel.poll(left).from_producers:
                arrived_at = time.monotonic()
                answered, content = _read(frame)
                for attempt in [number for number, one in waiting.items() if one.address == address]:
                    if answered in (None, attempt):
                        answers[waiting.pop(attempt)] = _Answer(content, arrived_at - sent_at[attempt])
        return answers

    def _hello(self, one: _Asked, attempt: int) -> Hello:
        return Hello(
            min_version=OLDEST_VERSION,
            max_version=PROTOCOL_VERSION,
            features=(PROBE,),
            identity=self._identity,
            expected_engine=one.engine_id,
            expected_incarnation=one.incarnation,
            attempt=attempt,
            table=_NO_TABLE,
        )

    def close(self) -> None:
        self._channel.close()


# --- judging ---------------------------------------------------------------------------------------------------------


class _VllmAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """`MooncakeXferResponse` of vLLM's own connector, which is what it says to a request it cannot read."""

    status: Literal[0, 1, 2]
    ok_reqs: list[str] | None = None
    err_reqs: list[str] | None = None
    err_msg: str | None = None


def _read(frame: bytes) -> tuple[int | None, Welcome | Fault]:
    """The attempt that a frame answers (None: whatever was asked), and what it says."""
    try:
        message = decode_from_producer(frame)
    except PeerProtocolError as error:
        return None, _foreign(frame) or Fault(FaultKind.GARBLED, f"sends no message of this connector: {error}")
    if isinstance(message, Welcome):
        return message.attempt, message
    if isinstance(message, Refuse):
        return message.attempt, Fault(FaultKind.GARBLED, f"refuses to be asked:\n{explain(message.mismatches)}")
    return None, Fault(FaultKind.GARBLED, f"answers a hello with {type(message).__name__}")


def _foreign(frame: bytes) -> Fault | None:
    try:
        answer = msgspec.msgpack.decode(frame, type=_VllmAnswer)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    said = f", which says {answer.err_msg[:200]!r}" if answer.err_msg else ""
    return Fault(
        FaultKind.FOREIGN,
        f"is vLLM's own MooncakeConnector{said}; its control messages are not this connector's: "
        f'give the producer "kv_connector": "{CONNECTOR}"',
    )


def _judged(asked: _Asked, welcome: Welcome) -> Welcome | Fault:
    """The answer, if it comes from the rank that was asked and can be planned with."""
    own = welcome.identity
    if (own.engine_id, own.rank) != (asked.engine_id, asked.rank) or asked.incarnation not in (None, own.incarnation):
        expected = f"{asked.engine_id}[{asked.incarnation or 'any'}] {asked.rank}"
        return Fault(
            FaultKind.STALE,
            f"is {own}, the bootstrap server says {expected}: its registration is stale; "
            "start the producer again, or the bootstrap server if it runs elsewhere",
        )
    try:
        _check_place(own.rank, welcome.table)
        validate_table(welcome.table)
    except PeerProtocolError as error:
        return Fault(FaultKind.INVALID, f"sends an invalid region table: {error}")
    return welcome


def _check_place(rank: Rank, table: RankTable) -> None:
    fits = 0 <= rank.tp < table.tp_size and 0 <= rank.pp < table.pp_size
    if not fits or table.tp_size * table.pp_size > MAX_RANKS:
        raise PeerProtocolError(
            f"{rank}: expected a place among at most {MAX_RANKS} ranks, seen TP {table.tp_size} x PP {table.pp_size}"
        )


def _silence(patience_s: float) -> str:
    return (
        f"takes a connection and answers no hello within {patience_s:.1f} s: the process is stopped, starting, "
        "shutting down or overloaded, or no producer of this connector listens there"
    )
