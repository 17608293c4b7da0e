from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.io import control
from mooncake_hetero_tp.io.control import ControlChannel, FromConsumer, FromProducer


@pytest.fixture
def channels() -> Iterator[Callable[[str | None], ControlChannel]]:
    made: list[ControlChannel] = []

    def make(host: str | None = None) -> ControlChannel:
        made.append(ControlChannel(host))
        return made[-1]

    yield make
    for channel in made:
        channel.close()


def frames_at(channel: ControlChannel, number: int = 1) -> list[FromConsumer | FromProducer]:
    found: list[FromConsumer | FromProducer] = []
    end = time.monotonic() + 30
    while len(found) < number and time.monotonic() < end:
        inbox = channel.poll(0.1)
        found += [*inbox.from_consumers, *inbox.from_producers]
    return found


def address(channel: ControlChannel) -> str:
    assert channel.address is not None
    return channel.address


def test_frames_go_both_ways_and_say_whose_they_are(channels: Callable[..., ControlChannel]) -> None:
    producers = [channels("127.0.0.1") for _ in range(2)]
    consumer = channels()
    assert len({producer.address for producer in producers}) == 2
    for number, producer in enumerate(producers):
        assert consumer.send(address(producer), b"hello %d" % number, now=0)
        (got,) = frames_at(producer)
        assert isinstance(got, FromConsumer)
        assert got.frame == b"hello %d" % number
        assert producer.reply(got.peer, b"welcome %d" % number)
    answers = frames_at(consumer, 2)
    assert sorted(answers) == sorted(FromProducer(address(p), b"welcome %d" % n) for n, p in enumerate(producers))
    assert (consumer.counts.sent, consumer.counts.received) == (2, 2)


def test_a_wake_from_another_thread_ends_a_poll(channels: Callable[..., ControlChannel]) -> None:
    channel = channels()
    threading.Timer(0.05, channel.wake).start()
    began = time.monotonic()
    assert channel.poll(10).from_producers == []
    assert time.monotonic() - began < 5
    channel.wake()
    channel.wake()
    channel.poll(10)
    began = time.monotonic()
    channel.poll(0.05)
    assert time.monotonic() - began >= 0.05


def test_nobody_there_blocks_nothing_and_a_full_queue_drops(
    channels: Callable[..., ControlChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_QUEUE", 3)
    channel = channels()
    sent = [channel.send("tcp://127.0.0.1:1", b"x", now=0) for _ in range(10)]
    assert sent == [True] * 3 + [False] * 7
    assert channel.counts.dropped == 7


def test_a_reply_to_a_consumer_that_has_gone_is_no_error(channels: Callable[..., ControlChannel]) -> None:
    producer = channels("127.0.0.1")
    producer.reply(b"\x00nobody", b"x")
    assert not channels().reply(b"\x00nobody", b"x")


@pytest.mark.parametrize("wrong", ["tcp://", "http://127.0.0.1:1", "tcp://127.0.0.1:notaport", ""])
def test_an_address_that_is_none_is_dropped_and_logged(
    channels: Callable[..., ControlChannel], wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    channel = channels()
    assert not channel.send(wrong, b"x", now=0)
    assert channel.counts.dropped == 1
    assert "cannot be used" in caplog.text


def test_frames_in_the_wrong_shape_are_dropped(channels: Callable[..., ControlChannel]) -> None:
    producer = channels("127.0.0.1")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(address(producer))
        dealer.send_multipart([b"a", b"b"])
        dealer.send(b"good")
        assert [got.frame for got in frames_at(producer)] == [b"good"]
    assert producer.counts.dropped == 1


def test_bytes_that_are_no_zmq_harm_nobody(channels: Callable[..., ControlChannel]) -> None:
    producer, consumer = channels("127.0.0.1"), channels()
    port = int(address(producer).rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        assert consumer.send(address(producer), b"good", now=0)
        assert [got.frame for got in frames_at(producer)] == [b"good"]


def test_a_frame_above_the_limit_is_not_taken(
    channels: Callable[..., ControlChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_TABLE_FRAME", 1000)
    producer = channels("127.0.0.1")
    consumer = channels()
    consumer.send(address(producer), b"x" * 1001, now=0)
    other = channels()
    other.send(address(producer), b"good", now=0)
    assert [got.frame for got in frames_at(producer)] == [b"good"]


def test_a_producer_that_comes_back_at_its_address_is_reached_again(channels: Callable[..., ControlChannel]) -> None:
    first = channels("127.0.0.1")
    where = address(first)
    consumer = channels()
    consumer.send(where, b"one", now=0)
    assert frames_at(first)
    first.close()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as second:
        second.setsockopt(zmq.LINGER, 0)
        second.bind(where)
        end = time.monotonic() + 10
        while not second.poll(100) and time.monotonic() < end:
            consumer.send(where, b"two", now=0)
        assert second.recv_multipart()[1] == b"two"


def test_idle_and_excess_connections_are_closed(
    channels: Callable[..., ControlChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = channels()
    for port in range(1, 4):
        channel.send(f"tcp://127.0.0.1:{port}", b"x", now=float(port))
    channel.close_idle(now=302.5)
    assert sorted(channel._dealers) == ["tcp://127.0.0.1:3"]
    monkeypatch.setattr(control, "_MAX_DEALERS", 1)
    channel.send("tcp://127.0.0.1:4", b"x", now=303)
    assert sorted(channel._dealers) == ["tcp://127.0.0.1:4"]


def test_an_address_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1.*VLLM_HOST_IP"):
        ControlChannel("192.0.2.1")


def test_ipv6_and_names_can_be_bound(channels: Callable[..., ControlChannel]) -> None:
    named = channels("localhost")
    assert address(named).startswith("tcp://localhost:")
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    six, consumer = channels("::1"), channels()
    assert address(six).startswith("tcp://[::1]:")
    assert consumer.send(address(six), b"x", now=0)
    assert frames_at(six)


@pytest.mark.usefixtures("leaves_nothing")
def test_the_end_leaves_nothing_and_later_wakes_are_harmless() -> None:
    channel = ControlChannel("127.0.0.1")
    channel.send(address(channel), b"x", now=0)
    channel.close()
    channel.close()
    channel.wake()
