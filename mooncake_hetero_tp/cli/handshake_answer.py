"""What `handshake probe`, `dump` and `diff` answer, apart from how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from mooncake_hetero_tp.cli.decoder import build_decoder
from mooncake_hetero_tp.cli.engines import EngineSummary, hello_of, sum_up, troubles
from mooncake_hetero_tp.cli.hello import SavedHello
from mooncake_hetero_tp.cli.verdict import Tables, Verdict, judge_all, refused
from mooncake_hetero_tp.cli.wish import Wish
from mooncake_hetero_tp.core.handshake import Agreement
from mooncake_hetero_tp.errors import ConfigError, IncompatiblePeer
from mooncake_hetero_tp.types import Mismatch

if TYPE_CHECKING:  # it loads ZeroMQ, which `plan` needs not
    from mooncake_hetero_tp.io.inquiry import EngineReport


class HandshakeAnswer(msgspec.Struct, kw_only=True):
    """The first four fields are always there; agreement and mismatches have the shapes of `plan`'s answer."""

    status: str
    """`ok`, `refused`, `unreachable` (a rank did not say who it is) or `invalid` (settings that do not fit)."""
    agreement: Agreement | None = None
    mismatches: list[Mismatch] = []
    why: str
    asked: Wish | msgspec.UnsetType = msgspec.UNSET
    """What `--as` named."""
    assumptions: list[str] | msgspec.UnsetType = msgspec.UNSET
    """What the judgement of that decoder takes for granted."""
    bootstrap: str | msgspec.UnsetType = msgspec.UNSET
    engines: list[EngineSummary] | msgspec.UnsetType = msgspec.UNSET


def probe(bootstrap: str, wish: Wish | None, *, timeout_s: float) -> HandshakeAnswer:
    """Who a live producer is and, with a wish, what such a decoder would agree on; takes `timeout_s` at most."""
    try:
        reports = ask(bootstrap, timeout_s=timeout_s)
    except ConfigError as error:
        return HandshakeAnswer(status="unreachable", why=str(error), bootstrap=bootstrap)
    if trouble := _troubles(bootstrap, reports):
        answer = HandshakeAnswer(status="unreachable", why=trouble)
    elif wish is None:
        answer = HandshakeAnswer(status="ok", why=_all_there(reports))
    else:
        answer = judge_wish([hello_of(report).tables for report in reports], wish)
    answer.bootstrap, answer.engines = bootstrap, [sum_up(report) for report in reports]
    return answer


def hello(bootstrap: str, *, timeout_s: float) -> SavedHello:
    """What all ranks of a live producer say of themselves.

    Raises:
        ConfigError: some rank does not, each named.
    """
    reports = ask(bootstrap, timeout_s=timeout_s)
    if trouble := _troubles(bootstrap, reports):
        raise ConfigError(trouble)
    return SavedHello(bootstrap=bootstrap, engines=tuple(hello_of(report) for report in reports))


def ask(bootstrap: str, *, timeout_s: float) -> list[EngineReport]:
    """Raises ConfigError if the bootstrap server does not answer."""
    from mooncake_hetero_tp.io.inquiry import inquire  # noqa: PLC0415 - it loads ZeroMQ, which `plan` needs not

    return inquire(bootstrap, timeout_s=timeout_s)


def judge_wish(producers: Sequence[Tables], wish: Wish) -> HandshakeAnswer:
    """What a decoder that differs from the producer as asked would agree on; one set of tables for each engine."""
    try:
        decoders = [build_decoder(tables, wish) for tables in producers]
    except ConfigError as error:
        return HandshakeAnswer(status="invalid", why=str(error), asked=wish)
    except IncompatiblePeer as error:
        return _answer(refused(error.mismatches), asked=wish)
    verdict = judge_all(zip(producers, (decoder.tables for decoder in decoders), strict=True))
    return _answer(verdict, asked=wish, assumptions=decoders[0].assumptions)


def judge_two(producer: SavedHello, consumer: SavedHello) -> HandshakeAnswer:
    """What a saved producer and a saved consumer would agree on: every engine of one with every one of the other."""
    pairs = product(producer.engines, consumer.engines)
    return _answer(judge_all((ours.tables, theirs.tables) for ours, theirs in pairs))


def _answer(
    verdict: Verdict,
    asked: Wish | msgspec.UnsetType = msgspec.UNSET,
    assumptions: list[str] | msgspec.UnsetType = msgspec.UNSET,
) -> HandshakeAnswer:
    return HandshakeAnswer(
        status=verdict.status,
        agreement=verdict.agreement,
        mismatches=verdict.mismatches,
        why=verdict.why,
        asked=asked,
        assumptions=assumptions,
    )


def _troubles(bootstrap: str, reports: Sequence[EngineReport]) -> str:
    """Why nothing can be judged; empty: all ranks of all engines said who they are."""
    if not reports:
        return f"the bootstrap server at {bootstrap} knows no engine: none has registered yet, or it serves another use"
    return "\n".join(trouble for report in reports for trouble in troubles(report))


def _all_there(reports: Sequence[EngineReport]) -> str:
    return "; ".join(f"engine {report.engine_id}: all {len(report.ranks)} rank(s) answered" for report in reports)
