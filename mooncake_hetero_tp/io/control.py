"""The control channel: a ROUTER that consumers connect to, and a DEALER per producer address.

One thread owns a `ControlChannel`; only `wake` may be called from others. Nothing here blocks on the
network: what cannot be queued is dropped and counted, for the protocol repeats what matters.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import zmq

from mooncake_hetero_tp.core.codec import MAX_TABLE_FRAME
from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.io.address import join_host_port

logger = logging.getLogger(__name__)

_QUEUE: Final = 4096
"""Messages queued per connection and direction; more are dropped."""
_BURST: Final = 256
"""Messages taken from one socket before the others get their turn."""
_HEARTBEAT_MS: Final = 5000
_RECONNECT_MS: Final = (100, 2000)
_IDLE_S: Final = 300.0
_MAX_DEALERS: Final = 1024


class FromConsumer(NamedTuple):
    """A frame that a consumer sent us; `peer` is its routing id."""

    peer: bytes
    frame: bytes


class FromProducer(NamedTuple):
    """A frame that the producer at `address` sent us."""

    address: str
    frame: bytes


@dataclass(slots=True)
class Inbox:
    """What one `poll` brought."""

    from_consumers: list[FromConsumer] = field(default_factory=list)
    from_producers: list[FromProducer] = field(default_factory=list)


@dataclass(slots=True)
class ChannelCounts:
    """Frames since the channel was opened."""

    sent: int = 0
    received: int = 0
    dropped: int = 0
    """Not sent because a queue was full or the peer gone, or received in a shape that is not ours."""


@dataclass(slots=True)
class _Dealer:
    socket: zmq.Socket[bytes]
    used_at: float


class ControlChannel:
    """All ZMQ sockets of one driver thread."""

    def __init__(self, host: str | None = None) -> None:
        """Open the channel; with `host`, bind a ROUTER to a free port of that address.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._dealers: dict[str, _Dealer] = {}
        self._by_socket: dict[zmq.Socket[bytes], str] = {}
        self._router: zmq.Socket[bytes] | None = None
        self.counts = ChannelCounts()
        self.address: str | None = None
        self._closed = False
        if host is not None:
            self._bind(host)

    def _bind(self, host: str) -> None:
        router = self._router = self._socket(zmq.ROUTER)
        try:
            numeric = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0]
            router.setsockopt(zmq.IPV6, int(":" in str(numeric)))
            router.bind(f"tcp://{join_host_port(str(numeric), 0)}")
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ConfigError(
                f"the control channel cannot listen on {host}: {error}. Set VLLM_HOST_IP to an address of this machine"
            ) from error
        port = router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1]
        self.address = f"tcp://{join_host_port(host, int(port))}"
        self._poller.register(router, zmq.POLLIN)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: _QUEUE,
            zmq.RCVHWM: _QUEUE,
            zmq.MAXMSGSIZE: MAX_TABLE_FRAME,
            zmq.HEARTBEAT_IVL: _HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: 2 * _HEARTBEAT_MS,
            zmq.RECONNECT_IVL: _RECONNECT_MS[0],
            zmq.RECONNECT_IVL_MAX: _RECONNECT_MS[1],
        }
        for option, value in options.items():
            made.setsockopt(option, value)
        return made

    def wake(self) -> None:
        """End a running or the next `poll`; from any thread, and harmless after the end."""
        with self._wake_lock:
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float) -> Inbox:
        """Wait for frames or a wake, at most `timeout_s`, and take what is there."""
        inbox = Inbox()
        for source, _ in self._poller.poll(math.ceil(max(timeout_s, 0.0) * 1000)):
            if isinstance(source, int):
                os.eventfd_read(self._wake_fd)
            elif source in self._by_socket:
                self._take_from_producer(source, inbox)
            else:
                self._take_from_consumers(source, inbox)
        return inbox

    def _take_from_consumers(self, router: zmq.Socket[bytes], inbox: Inbox) -> None:
        for parts in self._take(router):
            if len(parts) == 2:
                inbox.from_consumers.append(FromConsumer(parts[0], parts[1]))
            else:
                self.counts.dropped += 1

    def _take_from_producer(self, dealer: zmq.Socket[bytes], inbox: Inbox) -> None:
        address = self._by_socket[dealer]
        for parts in self._take(dealer):
            if len(parts) == 1:
                inbox.from_producers.append(FromProducer(address, parts[0]))
            else:
                self.counts.dropped += 1

    def _take(self, source: zmq.Socket[bytes]) -> list[list[bytes]]:
        taken: list[list[bytes]] = []
        while len(taken) < _BURST:
            try:
                taken.append(source.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        self.counts.received += len(taken)
        return taken

    def reply(self, peer: bytes, frame: bytes) -> bool:
        """Queue a frame for a consumer; False: it is gone or its queue is full."""
        return self._router is not None and self._send(self._router, [peer, frame])

    def send(self, address: str, frame: bytes, now: float) -> bool:
        """Queue a frame for the producer at `address`, connecting on demand; False: it was dropped."""
        dealer = self._dealer(address, now)
        return dealer is not None and self._send(dealer, [frame])

    def _send(self, target: zmq.Socket[bytes], parts: list[bytes]) -> bool:
        try:
            target.send_multipart(parts, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.counts.dropped += 1
            logger.debug("a control message was dropped: %s", error)
            return False
        self.counts.sent += 1
        return True

    def _dealer(self, address: str, now: float) -> zmq.Socket[bytes] | None:
        known = self._dealers.get(address)
        if known is not None:
            known.used_at = now
            return known.socket
        self.close_idle(now)
        dealer = self._socket(zmq.DEALER)
        dealer.setsockopt(zmq.IPV6, int("[" in address))
        try:
            dealer.connect(address)
        except zmq.ZMQError as error:
            logger.warning("the producer address %s cannot be used: %s", address, error)
            self.counts.dropped += 1
            dealer.close()
            return None
        self._dealers[address] = _Dealer(dealer, now)
        self._by_socket[dealer] = address
        self._poller.register(dealer, zmq.POLLIN)
        return dealer

    def close_idle(self, now: float) -> None:
        """Close what was not sent to for minutes, and the longest unused of too many."""
        by_age = sorted(self._dealers.items(), key=lambda item: item[1].used_at)
        excess = len(by_age) + 1 - _MAX_DEALERS
        for index, (address, dealer) in enumerate(by_age):
            if index < excess or now - dealer.used_at > _IDLE_S:
                self._close_dealer(address)

    def _close_dealer(self, address: str) -> None:
        dealer = self._dealers.pop(address).socket
        del self._by_socket[dealer]
        self._poller.unregister(dealer)
        dealer.close()

    def close(self, linger_s: float = 0.0) -> None:
        """Close all sockets, leaving queued frames `linger_s` to go out; idempotent."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_fd)
        self._dealers.clear()
        self._by_socket.clear()
        self._router = None
        self._context.destroy(linger=int(linger_s * 1000))
