from __future__ import annotations

import gc
import socket
import threading
import time

import pytest

from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import LocalUsageError, TransferError
from mooncake_hetero_tp.io.sessions import Session, SessionTable, handshake_answers, merge_overlaps, register_all
from tests.unit.io.foreign import BUFFERS, FakeForeign, descriptors

pytestmark = pytest.mark.usefixtures("quick_burial")


def session(foreign: FakeForeign | None = None) -> Session:
    return Session(foreign or FakeForeign(), "127.0.0.1", BUFFERS)


def table(*, per_peer: bool = True, most: int = 8) -> tuple[SessionTable, list[FakeForeign]]:
    made: list[FakeForeign] = []

    def make() -> Session:
        made.append(FakeForeign())
        return session(made[-1])

    return SessionTable(make, per_peer=per_peer, max_sessions=most, answers=lambda *_: True), made


# --- memory --------------------------------------------------------------------------------------


def test_overlaps_are_merged_and_neighbours_are_not() -> None:
    given = [Buffer(300, 50), Buffer(100, 100), Buffer(150, 100), Buffer(250, 50), Buffer(100, 20)]
    assert merge_overlaps(given) == [Buffer(100, 150), Buffer(250, 50), Buffer(300, 50)]


@pytest.mark.parametrize("buffer", [Buffer(0, 10), Buffer(10, 0)])
def test_what_is_no_memory_is_refused(buffer: Buffer) -> None:
    with pytest.raises(LocalUsageError, match="not memory"):
        merge_overlaps([buffer])


def test_a_failed_registration_names_the_buffer_and_is_rolled_back() -> None:
    """Mooncake#351, #3663: the third of five fails, the first two are unregistered."""
    foreign = FakeForeign(fail_registration_of=2)
    buffers = [Buffer(0x1000 * (i + 1), 0x800 + i) for i in range(5)]
    with pytest.raises(TransferError, match=r"buffer 3 of 5: registering 2050 bytes at 0x3000 returned -12 .*memlock"):
        register_all(foreign, buffers)
    assert foreign.registered == [0x1000, 0x2000]
    assert foreign.unregistered == [0x2000, 0x1000]


# --- one session ---------------------------------------------------------------------------------


def test_a_session_registers_reads_and_unregisters() -> None:
    foreign = FakeForeign([0, -1])
    one = session(foreign)
    assert one.transport_session == f"127.0.0.1:{foreign.port}"
    assert [one.read("peer", descriptors(3)), one.read("peer", descriptors(5))] == [0, -1]
    assert foreign.reads == [3, 5]
    one.retire()
    assert one.wait_dead(30)
    assert foreign.unregistered == foreign.registered == [buffer.address for buffer in BUFFERS]


def test_a_retired_session_takes_no_call() -> None:
    foreign = FakeForeign()
    one = session(foreign)
    one.retire()
    assert one.read("peer", descriptors(1)) is None
    assert foreign.reads == []


def test_a_session_ends_only_when_its_last_call_has_returned() -> None:
    foreign = FakeForeign()
    foreign.gate = threading.Event()
    one = session(foreign)
    calls = [threading.Thread(target=one.read, args=("peer", descriptors(1))) for _ in range(2)]
    for call in calls:
        call.start()
    while foreign.inside < 2:
        time.sleep(0.001)
    one.retire()
    assert not one.wait_dead(0.1)
    foreign.gate.set()
    assert one.wait_dead(30)
    for call in calls:
        call.join(5)


def test_a_dead_session_keeps_no_reference_to_its_engine() -> None:
    """Destroying the engine is what stops its writes, so nothing else may hold it."""
    ended = threading.Event()

    class Mortal(FakeForeign):
        def __del__(self) -> None:
            ended.set()

    one = Session(Mortal(), "127.0.0.1", BUFFERS)
    one.read("peer", descriptors(1))
    one.retire()
    assert one.wait_dead(30)
    gc.collect()
    assert ended.is_set()


# --- the table -----------------------------------------------------------------------------------


def test_each_peer_has_its_own_session_or_all_share_one() -> None:
    separate, made = table()
    assert separate.current("a") is separate.current("a")
    assert separate.current("a") is not separate.current("b")
    assert len(made) == 2
    shared, made = table(per_peer=False)
    assert shared.current("a") is shared.current("b")
    assert len(made) == 1
    assert separate.close(30)
    assert shared.close(30)


def test_a_prepared_session_is_the_first_one_used() -> None:
    sessions, made = table()
    sessions.prepare()
    sessions.current("a")
    assert len(made) == 1
    sessions.current("b")
    assert len(made) == 2
    assert sessions.close(30)


def test_a_retired_session_is_replaced_once_for_all_readers() -> None:
    sessions, made = table()
    old = sessions.current("a")
    sessions.retire("a", old)
    new = sessions.current("a")
    sessions.retire("a", old)
    assert sessions.current("a") is new is not old
    assert len(made) == 2
    assert sessions.close(30)


def test_a_fence_waits_for_retired_sessions_of_that_peer_only() -> None:
    sessions, made = table()
    sessions.current("b")
    made[0].gate = threading.Event()
    stuck = threading.Thread(target=sessions.current("b").read, args=("b", descriptors(1)))
    stuck.start()
    while not made[0].inside:
        time.sleep(0.001)
    sessions.current("a")
    assert sessions.fence("a", 30)
    assert not sessions.fence("b", 0.1)
    made[0].gate.set()
    assert sessions.fence("b", 30)
    stuck.join(5)
    assert sessions.close(30)


def test_the_longest_unused_session_makes_room() -> None:
    sessions, made = table(most=2)
    first = sessions.current("a")
    first.read("a", descriptors(1))
    time.sleep(0.01)
    sessions.current("b").read("b", descriptors(1))
    sessions.current("c")
    assert first.wait_dead(30)
    assert len(made) == 3
    assert sessions.close(30)


def test_a_peer_that_failed_is_asked_before_it_is_read_again() -> None:
    asked: list[str] = []

    def answers(peer: str, patience_s: float) -> bool:
        asked.append(peer)
        return len(asked) > 1

    sessions = SessionTable(session, per_peer=False, max_sessions=8, answers=answers)
    sessions.current("b")
    sessions.retire("a", sessions.current("a"))
    with pytest.raises(TransferError, match="a failed before and answers no handshake"):
        sessions.current("a")
    sessions.current("b")
    sessions.current("a")
    sessions.current("a")
    assert asked == ["a", "a"]
    assert sessions.close(30)


def test_a_handshake_thread_is_known_by_its_hanging_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert not handshake_answers(address, 0.05)

        def hang_up() -> None:
            for _ in range(2):  # the first connection is the one above, still in the backlog
                connection, _ = listener.accept()
                connection.recv(1)
                connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        assert handshake_answers(address, 30)
        thread.join(30)
    assert not handshake_answers(address, 5)
    assert not handshake_answers("nonsense", 5)


def test_a_closed_table_makes_no_session() -> None:
    sessions, made = table()
    sessions.prepare()
    assert sessions.close(30)
    assert sessions.close(30)
    assert made[0].unregistered == made[0].registered
    with pytest.raises(TransferError, match="closed"):
        sessions.current("a")
