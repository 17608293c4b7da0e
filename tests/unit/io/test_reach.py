from __future__ import annotations

import socket
import time

import pytest

from mooncake_hetero_tp.io.reach import unreachable
from tests.live import HOST, dead_address

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_who_listens_is_absent_and_who_does_not_is_named_at_once() -> None:
    dead = dead_address()
    with socket.create_server((HOST, 0)) as listener:
        alive = f"tcp://{HOST}:{listener.getsockname()[1]}"
        start = time.monotonic()
        assert unreachable([alive, dead, alive], timeout_s=30.0) == {dead: "[Errno 111] Connection refused"}
    assert time.monotonic() - start < 30.0


def test_a_host_that_swallows_packets_ends_with_the_time() -> None:
    # A listener whose queue is full drops what comes next, as a firewall would.
    with socket.create_server((HOST, 0), backlog=0) as listener:
        where = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(where)
        address = f"tcp://{HOST}:{where[1]}"
        assert unreachable([address], timeout_s=0.2) == {address: "no TCP connection within 0.2 s"}
        for filler in fillers:
            filler.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:99999", "tcp://127.0.0.1:0", "tcp://:5", "tcp://[::1:5", ""])
def test_an_address_that_is_none_has_a_reason(address: str) -> None:
    assert set(unreachable([address], timeout_s=1.0)) == {address}


def test_no_addresses_take_no_time() -> None:
    assert unreachable([], timeout_s=30.0) == {}
