"""Producer engines as a consumer rank knows them: resolving, greeting, refusals, stale registrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from mooncake_hetero_tp.core.effects import Resolve, ResolvedEngine, ResolveFailed, Send
from mooncake_hetero_tp.core.links import EngineLink, LinkConfig, LinkTable
from mooncake_hetero_tp.core.messages import Hello, Refuse, Welcome
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.states import Link
from mooncake_hetero_tp.errors import IncompatiblePeer, PeerProtocolError
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, SessionId
from tests.machines import BOOTSTRAP, DECODE, MISFIT, PREFILL, identity, only, plan_all, rank_table

KEY = (BOOTSTRAP, PREFILL)
CONFIG = LinkConfig(connect_timeout_s=12.0, resend_s=0.5, resend_max_s=2.0, refuse_cache_s=8.0, max_engines=2)


class Bench:
    """A LinkTable and the answers of a producer engine of `size` ranks."""

    def __init__(self, size: int = 2, planner: Any = plan_all, validate: Any = lambda _table: None) -> None:
        self.size = size
        self.links = LinkTable(identity(DECODE), rank_table(), CONFIG, planner, validate)
        self.now = 0.0
        self.effects: list[Any] = []

    def want(self, key: tuple[str, EngineId] = KEY) -> EngineLink:
        link = self.links.want(key, self.now)
        assert link is not None
        self.collect()
        return link

    def collect(self) -> None:
        self.effects += self.links.take_effects()

    def resolve(self, *, ranks: int | None = None, incarnation: str | None = "one", key: Any = KEY) -> None:
        """The bootstrap lists the first `ranks` ranks."""
        found = range(self.size if ranks is None else ranks)
        addresses = {Rank(tp=tp): f"p{tp}" for tp in found}
        named = {Rank(tp=tp): Incarnation(incarnation) if incarnation else None for tp in found}
        self.links.resolved(ResolvedEngine(key[0], key[1], addresses, named), self.now)
        self.collect()

    def hellos(self) -> dict[str, Hello]:
        """The latest Hello to each address."""
        return {
            effect.address: effect.message for effect in only(self.effects, Send) if isinstance(effect.message, Hello)
        }

    def welcome(self, address: str, incarnation: str = "one", **changes: Any) -> None:
        tp = int(address[1:])
        fields: dict[str, Any] = {
            "version": 1,
            "features": (),
            "identity": Identity(PREFILL, Incarnation(incarnation), Rank(tp=tp)),
            "attempt": self.hellos()[address].attempt,
            "session": SessionId(50 + tp),
            "transport_session": f"t{tp}",
            "lease_s": 10.0,
            "table": rank_table(self.size),
        }
        self.links.receive(address, Welcome(**{**fields, **changes}), self.now)
        self.collect()

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.links.next_deadline()) is not None and due <= end:
            self.now = due
            self.links.tick(self.now)
            self.collect()
        self.now = end

    @property
    def resolves(self) -> int:
        return len(only(self.effects, Resolve))

    def agree(self) -> EngineLink:
        link = self.want()
        self.resolve()
        for tp in range(self.size):
            self.welcome(f"p{tp}")
        assert self.links.take_settled() == [link]
        return link


def test_agreed_when_every_rank_has_said_welcome() -> None:
    bench = Bench()
    link = bench.want()
    assert bench.effects == [Resolve(*KEY)]
    bench.resolve()
    assert {hello.expected_incarnation for hello in bench.hellos().values()} == {"one"}
    bench.welcome("p0")
    assert (link.state, bench.links.take_settled()) == (Link.GREETING, [])
    bench.welcome("p1")
    assert (link.state, bench.links.take_settled()) == (Link.AGREED, [link])
    assert set(link.plans) == {Rank(tp=0), Rank(tp=1)}
    assert bench.links.next_deadline() is None


def test_an_agreed_link_is_used_again_without_a_word() -> None:
    bench = Bench()
    link = bench.agree()
    bench.effects.clear()
    assert bench.want() is link
    assert bench.effects == []


def test_what_the_planner_sees_is_every_rank() -> None:
    seen: list[Mapping[Rank, RankTable]] = []

    def planner(_own: RankTable, tables: Mapping[Rank, RankTable]) -> dict[Rank, object]:
        seen.append(tables)
        return {}

    Bench(3, planner).agree()
    assert [sorted(tables) for tables in seen] == [[Rank(tp=0), Rank(tp=1), Rank(tp=2)]]


# --- repetition and time --------------------------------------------------------------------------------


def test_hello_is_repeated_to_those_who_have_not_answered() -> None:
    bench = Bench()
    bench.want()
    bench.resolve()
    bench.welcome("p0")
    bench.effects.clear()
    bench.pass_time(0.5)
    assert list(bench.hellos()) == ["p1"]


def test_answers_to_an_older_hello_or_from_elsewhere_are_ignored() -> None:
    bench = Bench()
    link = bench.want()
    bench.resolve()
    bench.welcome("p0", attempt=999)
    bench.welcome("p1", attempt=bench.hellos()["p0"].attempt)
    bench.welcome("p0")
    bench.welcome("p0")
    assert link.state is Link.GREETING


def test_a_silent_rank_is_named_when_the_time_is_over() -> None:
    bench = Bench()
    link = bench.want()
    bench.resolve()
    bench.welcome("p0")
    bench.pass_time(12.0)
    assert bench.links.take_settled() == [link]
    assert link.state is Link.FORGOTTEN
    assert "dp0.pp0.tp1 at p1" in link.reason
    assert "12 s" in link.reason
    assert "p0" not in link.reason.partition(":")[2].replace("dp0.pp0", "")
    assert len(bench.links) == 0


def test_a_bootstrap_that_fails_is_asked_again_until_the_time_is_over() -> None:
    bench = Bench()
    link = bench.want()
    for _ in range(20):
        bench.links.resolved(ResolveFailed(*KEY, "connection refused"), bench.now)
        bench.pass_time(1.0)
    assert bench.resolves > 3
    assert link.state is Link.FORGOTTEN
    assert "connection refused" in link.reason


def test_one_question_to_the_bootstrap_at_a_time() -> None:
    bench = Bench()
    bench.want()
    bench.want()
    bench.pass_time(5.0)
    assert bench.resolves == 1


def test_answers_nobody_waits_for_are_ignored() -> None:
    bench = Bench()
    bench.resolve()
    link = bench.agree()
    bench.resolve(incarnation="two")
    assert link.state is Link.AGREED


def test_ranks_that_have_not_registered_yet_are_waited_for() -> None:
    bench = Bench()
    link = bench.want()
    bench.resolve(ranks=1)
    bench.welcome("p0")
    states = [link.state]
    bench.pass_time(3.0)
    assert bench.resolves == 2
    bench.resolve()
    bench.welcome("p0")
    bench.welcome("p1")
    assert [*states, link.state] == [Link.RESOLVING, Link.AGREED]


def test_ranks_that_never_register_are_counted_in_the_reason() -> None:
    bench = Bench()
    link = bench.want()
    bench.resolve(ranks=1)
    bench.welcome("p0")
    bench.pass_time(12.0)
    assert "lists 1 of 2 ranks" in link.reason


def test_an_empty_listing_is_no_listing() -> None:
    bench = Bench()
    link = bench.want()
    bench.resolve(ranks=0)
    assert (link.state, link.reason) == (Link.RESOLVING, "the bootstrap server lists no rank of it")


# --- refusals -------------------------------------------------------------------------------------------


def refused(bench: Bench) -> EngineLink:
    link = bench.want()
    bench.resolve()
    who = Identity(PREFILL, Incarnation("one"), Rank(tp=0))
    bench.links.receive("p0", Refuse(who, bench.hellos()["p0"].attempt, (MISFIT,)), bench.now)
    return link


def test_a_refusal_carries_the_reasons_and_stands_for_a_while() -> None:
    bench = Bench()
    link = refused(bench)
    assert bench.links.take_settled() == [link]
    assert "bfloat16" in link.reason
    bench.now = 7.9
    assert bench.want() is link
    assert bench.resolves == 1


def test_after_a_while_a_refused_engine_is_asked_again() -> None:
    """It may have been restarted with other settings."""
    bench = Bench()
    link = refused(bench)
    bench.now = 8.0
    fresh = bench.want()
    assert fresh is not link
    assert (fresh.state, bench.resolves) == (Link.RESOLVING, 2)


def misfit(*_: Any) -> Any:
    raise IncompatiblePeer("layer 3: no rank holds head 5", (MISFIT,))


def damaged(_table: Any) -> None:
    raise PeerProtocolError("region a/k leaves its buffer")


@pytest.mark.parametrize(
    "options,words",
    [({"planner": misfit}, "no rank holds head 5"), ({"validate": damaged}, "region a/k leaves its buffer")],
)
def test_no_plan_and_invalid_tables_refuse_too(options: dict[str, Any], words: str) -> None:
    bench = Bench(1, **options)
    link = bench.want()
    bench.resolve()
    bench.welcome("p0")
    assert link.state is Link.REFUSED
    assert words in link.reason


def test_a_version_nobody_offered_is_refused() -> None:
    bench = Bench(1)
    link = bench.want()
    bench.resolve()
    bench.welcome("p0", version=9)
    assert link.state is Link.REFUSED
    assert "protocol version 9, expected 1 to 1" in link.reason


# --- stale registrations (vllm#49238) ---------------------------------------------------------------------


def test_another_incarnation_leads_to_one_fresh_question() -> None:
    bench = Bench(1)
    link = bench.want()
    bench.resolve(incarnation="one")
    bench.welcome("p0", incarnation="two")
    assert (link.state, bench.resolves) == (Link.RESOLVING, 2)
    bench.resolve(incarnation="two")
    bench.welcome("p0", incarnation="two")
    assert link.state is Link.AGREED


def test_a_registration_that_stays_stale_is_named() -> None:
    bench = Bench(1)
    link = bench.want()
    for _ in range(2):
        bench.resolve(incarnation="one")
        bench.welcome("p0", incarnation="two")
    assert (link.state, bench.resolves) == (Link.FORGOTTEN, 2)
    assert "registration is stale" in link.reason
    assert "[one]" in link.reason
    assert "[two]" in link.reason


def test_a_refusal_by_another_process_is_stale_not_a_refusal() -> None:
    bench = Bench(1)
    link = bench.want()
    bench.resolve()
    other = Identity(EngineId("another"), Incarnation("x"), Rank())
    bench.links.receive("p0", Refuse(other, bench.hellos()["p0"].attempt, (MISFIT,)), 0.0)
    bench.collect()
    assert (link.state, bench.resolves) == (Link.RESOLVING, 2)


def test_another_rank_at_the_address_is_stale() -> None:
    bench = Bench(1)
    link = bench.want()
    bench.resolve()
    bench.welcome("p0", identity=Identity(PREFILL, Incarnation("one"), Rank(tp=3)))
    assert link.state is Link.RESOLVING


def test_bootstraps_that_know_no_incarnation_are_believed() -> None:
    bench = Bench(1)
    link = bench.want()
    bench.resolve(incarnation=None)
    bench.welcome("p0", incarnation="any")
    assert link.state is Link.AGREED


def test_refresh_asks_once_for_all_who_find_the_link_stale() -> None:
    bench = Bench()
    link = bench.agree()
    generation = link.generation
    for _ in range(3):
        assert bench.links.refresh(link, generation, bench.now) is link
    bench.collect()
    assert (link.state, bench.resolves) == (Link.RESOLVING, 2)
    bench.resolve()
    for address in ("p0", "p1"):
        bench.welcome(address)
    assert bench.links.refresh(link, generation, bench.now) is link
    assert (link.state, link.generation) == (Link.AGREED, generation + 1)


def test_a_suspect_link_is_greeted_afresh_by_the_next_request() -> None:
    bench = Bench()
    link = bench.agree()
    link.suspect = True
    assert bench.want() is link
    assert link.state is Link.RESOLVING
    bench.resolve()
    for address in ("p0", "p1"):
        bench.welcome(address)
    assert (link.state, link.suspect) == (Link.AGREED, False)


# --- bounds ---------------------------------------------------------------------------------------------


def test_idle_links_make_room_and_used_ones_do_not() -> None:
    bench = Bench()
    first, second = bench.want(("a", PREFILL)), bench.want(("b", PREFILL))
    first.users = 1
    third = bench.want(("c", PREFILL))
    assert second.state is Link.FORGOTTEN
    assert len(bench.links) == 2
    third.users = 1
    assert bench.links.want(("d", PREFILL), 0.0) is None
