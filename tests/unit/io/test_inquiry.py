"""Asking live ranks, each kind of answer, and nothing left behind on either side."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from mooncake_hetero_tp.core.codec import decode_from_consumer, decode_from_producer, encode
from mooncake_hetero_tp.core.effects import Kept
from mooncake_hetero_tp.core.messages import PROBE, Hello, Ready, Refuse, Welcome
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.io import inquiry
from mooncake_hetero_tp.io.inquiry import Fault, FaultKind, inquire
from mooncake_hetero_tp.types import (
    EngineId,
    Identity,
    Mismatch,
    PullId,
    Rank,
    RequestId,
    SessionId,
    Severity,
    TransferId,
)
from tests.live import ENGINE, HOST, Engine, Producer, dead_address, identity, tables, vllm_answer
from tests.tables import Dense, ids

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TIMEOUT_S = 20.0
"""Of inquiries that are answered; none takes it."""
SHORT_S = 0.5
"""Of those that are not."""
BUSY_S = 3.0
"""Of those that are answered in part, on a busy machine."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as made:
        yield made


def only_answer(engine: Engine, timeout_s: float = TIMEOUT_S) -> Welcome | Fault:
    (report,) = inquire(engine.url, timeout_s=timeout_s)
    (rank,) = report.ranks
    return rank.answer


def fault_of(engine: Engine, timeout_s: float = TIMEOUT_S) -> Fault:
    answer = only_answer(engine, timeout_s)
    assert isinstance(answer, Fault)
    return answer


def state(producer: Producer) -> dict[str, Any]:
    """All that a producer's machine remembers."""
    machine = producer.machine
    return {
        "sessions": (len(machine._sessions), dict(machine._sessions._by_id)),
        "kept": dict(machine._kept),
        "pulls": [*machine._pulls.all()],
        "due": machine.next_deadline(),
        "drained": machine.drained,
    }


def test_every_rank_says_who_it_is() -> None:
    held = tables(Dense(8, tp=2, layers=3))
    with Engine.of(held) as engine:
        (report,) = inquire(engine.url, timeout_s=TIMEOUT_S)
        assert (report.dp, report.engine_id) == (0, ENGINE)
        assert [one.rank for one in report.ranks] == [*held]
        for one in report.ranks:
            answer, producer = one.answer, engine.producers[one.rank]
            assert isinstance(answer, Welcome)
            assert (answer.identity, answer.table) == (producer.identity, held[one.rank])
            assert one.incarnation == producer.identity.incarnation
            assert (answer.session, answer.transport_session, answer.lease_s) == (SessionId(0), f"{HOST}:7000", 10.0)
            assert one.latency_s is not None
            assert 0 < one.latency_s < TIMEOUT_S


def test_the_machine_is_as_before_even_when_it_is_in_use() -> None:
    with Engine.of(tables(Dense(8))) as engine:
        producer = engine.producers[Rank()]
        untouched = state(producer)
        inquire(engine.url, timeout_s=TIMEOUT_S)
        assert state(producer) == untouched
        producer.machine.keep(Kept(RequestId("r"), TransferId("t"), (ids([1, 2]),), 8, ready=True), time.monotonic())
        producer.answer(encode(hello(engine, features=())))
        before = state(producer)
        assert (len(before["kept"]), before["sessions"][0]) == (1, 1)
        for _ in range(3):
            inquire(engine.url, timeout_s=TIMEOUT_S)
        assert state(producer) == before
        assert producer.log == []


def hello(engine: Engine, features: tuple[str, ...]) -> Hello:
    """What a consumer with the producer's own table would send."""
    producer = engine.producers[Rank()]
    return Hello(1, 1, features, producer.identity, ENGINE, None, 1, tables(Dense(8))[Rank()])


def test_a_full_producer_is_probed_all_the_same() -> None:
    with Engine.of(tables(Dense(8))) as engine:
        producer = engine.producers[Rank()]
        producer.machine._sessions._limit = 0
        assert isinstance(decode_from_producer(producer.answer(encode(hello(engine, ()))) or b""), Refuse)
        assert isinstance(only_answer(engine), Welcome)


def test_what_is_sent_is_a_probe(engine: Engine) -> None:
    router = engine.router(lambda _: None)
    engine.register(Rank(), router.address, "00aa")
    assert fault_of(engine, SHORT_S).kind is FaultKind.SILENT
    (frame,) = router.frames
    sent = decode_from_consumer(frame)
    assert isinstance(sent, Hello)
    assert sent.features == (PROBE,)
    assert (sent.expected_engine, sent.expected_incarnation) == (ENGINE, "00aa")


def test_engines_of_several_data_parallel_ranks_are_told_apart(engine: Engine) -> None:
    held = tables(Dense(8))[Rank()]
    for dp in (1, 0):
        engine.add(Rank(dp=dp), held, EngineId(f"prefill_dp{dp}"))
    reports = inquire(engine.url, timeout_s=TIMEOUT_S)
    assert [(one.dp, one.engine_id, len(one.ranks)) for one in reports] == [
        (0, "prefill_dp0", 1),
        (1, "prefill_dp1", 1),
    ]


def test_a_server_without_engines_has_no_reports(engine: Engine) -> None:
    assert inquire(engine.url, timeout_s=TIMEOUT_S) == []


# --- what else may answer --------------------------------------------------------------------------------------------


def test_a_dead_rank_is_known_at_once(engine: Engine) -> None:
    engine.register(Rank(), dead_address())
    start = time.monotonic()
    found = fault_of(engine)
    assert time.monotonic() - start < TIMEOUT_S / 2
    assert found.kind is FaultKind.UNREACHABLE
    assert "refused" in found.text


def test_a_silent_rank_costs_the_timeout_and_hides_no_other(engine: Engine) -> None:
    engine.register(Rank(tp=1), engine.silent_address())
    engine.add(Rank(), tables(Dense(8))[Rank()])
    start = time.monotonic()
    (report,) = inquire(engine.url, timeout_s=BUSY_S)
    assert time.monotonic() - start > BUSY_S / 2
    alive, silent = (one.answer for one in report.ranks)
    assert isinstance(alive, Welcome)
    assert isinstance(silent, Fault)
    assert silent.kind is FaultKind.SILENT


def test_vllms_own_connector_is_named_with_the_remedy(engine: Engine) -> None:
    engine.register(Rank(), engine.router(vllm_answer).address)
    found = fault_of(engine)
    assert found.kind is FaultKind.FOREIGN
    assert "vLLM's own MooncakeConnector" in found.text
    assert '"kv_connector": "MooncakeHeteroTPConnector"' in found.text


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00",
        b"garbage",
        b"\xff" * 1000,
        b"\x02" + msgspec.msgpack.encode([1]),
        encode(Ready(SessionId(1), PullId(2))),
        msgspec.msgpack.encode({"status": 9}),
        msgspec.msgpack.encode({"status": 2, "other": 1}),
    ],
)
def test_garbage_is_a_fault_and_no_crash(frame: bytes, engine: Engine) -> None:
    engine.register(Rank(), engine.router(lambda _: frame).address)
    assert fault_of(engine).kind is FaultKind.GARBLED


def welcoming(**changes: Any) -> Callable[[bytes], bytes]:
    """A rank whose Welcome is right but for `changes`."""

    def answer(frame: bytes) -> bytes:
        asked = decode_from_consumer(frame)
        assert isinstance(asked, Hello)
        right = Welcome(
            version=1,
            features=(),
            identity=identity(Rank()),
            attempt=asked.attempt,
            session=SessionId(0),
            transport_session="",
            lease_s=1.0,
            table=tables(Dense(8))[Rank()],
        )
        return encode(msgspec.structs.replace(right, **changes))

    return answer


def test_a_welcome_to_another_hello_is_no_answer(engine: Engine) -> None:
    engine.register(Rank(), engine.router(welcoming(attempt=99)).address)
    assert fault_of(engine, SHORT_S).kind is FaultKind.SILENT


@pytest.mark.parametrize(
    "answers",
    [identity(Rank(tp=1)), identity(Rank(), EngineId("another")), identity(Rank(pp=3, tp=0))],
)
def test_another_process_than_registered_is_stale(answers: Identity, engine: Engine) -> None:
    engine.register(Rank(), engine.router(welcoming(identity=answers)).address, identity(Rank()).incarnation)
    found = fault_of(engine)
    assert found.kind is FaultKind.STALE
    assert str(answers) in found.text
    assert f"{ENGINE}[0000000000000000] dp0.pp0.tp0" in found.text


def test_a_bootstrap_server_that_knows_no_incarnations_trusts_the_rank(engine: Engine) -> None:
    engine.register(Rank(), engine.router(welcoming()).address)
    assert isinstance(only_answer(engine), Welcome)


def damaged() -> Iterator[RankTable]:
    table = tables(Dense(8))[Rank()]
    yield msgspec.structs.replace(table, buffers=())
    for sizes in ((0, 1), (1, 0), (-1, 1), (2**40, 2**10)):
        yield msgspec.structs.replace(table, tp_size=sizes[0], pp_size=sizes[1])


@pytest.mark.parametrize("table", [*damaged()])
def test_a_table_that_contradicts_itself_is_invalid(table: RankTable, engine: Engine) -> None:
    engine.register(Rank(), engine.router(welcoming(table=table)).address)
    assert fault_of(engine).kind is FaultKind.INVALID


def test_a_refusal_is_passed_on(engine: Engine) -> None:
    reason = Mismatch("version", "2", "1", Severity.REFUSE, "they differ", "install one")

    def refuse(frame: bytes) -> bytes:
        asked = decode_from_consumer(frame)
        assert isinstance(asked, Hello)
        return encode(Refuse(identity(Rank()), asked.attempt, (reason,)))

    engine.register(Rank(), engine.router(refuse).address)
    found = fault_of(engine)
    assert found.kind is FaultKind.GARBLED
    assert str(reason) in found.text


# --- the bootstrap server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:1", "ftp://127.0.0.1:1", "http://:1", "", "http://["])
def test_no_bootstrap_server_is_an_error_that_names_it(url: str) -> None:
    with pytest.raises(ConfigError, match=r"bootstrap server at .* does not answer"):
        inquire(url, timeout_s=TIMEOUT_S)


def test_a_bootstrap_server_that_says_nothing_costs_the_timeout() -> None:
    with socket.create_server((HOST, 0)) as listener:
        start = time.monotonic()
        with pytest.raises(ConfigError, match="no answer within"):
            inquire(f"http://{HOST}:{listener.getsockname()[1]}", timeout_s=SHORT_S)
        assert time.monotonic() - start < TIMEOUT_S


def test_a_host_name_that_is_looked_up_for_ever_costs_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(inquiry, "list_engines", lambda *_, **__: released.wait(30.0) and {})
    monkeypatch.setattr(inquiry, "_GRACE_S", 0.1)
    with pytest.raises(ConfigError, match=r"no answer within 0.1 s"):
        inquire("http://name:8998", timeout_s=0.1)
    released.set()


def test_more_ranks_than_can_be_asked_are_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "MAX_ASKED", 1)
    for tp in range(2):
        engine.register(Rank(tp=tp), dead_address())
    with pytest.raises(ConfigError, match="2 ranks; at most 1"):
        inquire(engine.url, timeout_s=TIMEOUT_S)
