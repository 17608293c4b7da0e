"""Reading sessions: one foreign engine each, replaced as a whole when a call in it has failed.

A batch that returns an error leaves the rest of it running: of 1,000 descriptors with one bad source
26 were written when the call came back with -1 and 999 a second later (measured over TCP). Nothing but
destroying the engine stops that. So a session in which a call failed is *retired*: no new call enters
it, and when the last one has left it is destroyed, after which nothing of it can write any more.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import LocalUsageError, TransferError
from mooncake_hetero_tp.io.calls import BatchEngine, read_batch

logger = logging.getLogger(__name__)

_ACCEPT_PERIOD_S = 1.0
"""Mooncake's handshake thread looks for the end once in this time, and its destructor holds the GIL
while it waits for that thread: up to a second in which no other Python thread runs (measured)."""
_NUDGE_LEAD_S = 0.05
_PROBE_S = 5.0
"""A peer's handshake thread serves one connection after the other, each for up to 5 s."""


class ForeignEngine(BatchEngine, Protocol):
    """What is used of `mooncake.engine.TransferEngine`; these calls return 0 or a negative code."""

    def get_rpc_port(self) -> int: ...
    def register_memory(self, buffer_addr: int, capacity: int) -> int: ...
    def unregister_memory(self, buffer_addr: int) -> int: ...


def merge_overlaps(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Buffers that share bytes become one; neighbours that only touch stay apart (two allocations).

    Raises:
        LocalUsageError: an address or a length that is not positive.
    """
    merged: list[Buffer] = []
    for index, buffer in sorted(enumerate(buffers), key=lambda item: item[1].address):
        if buffer.address <= 0 or buffer.length_bytes <= 0:
            raise LocalUsageError(
                f"buffer {index}: address {buffer.address:#x}, {buffer.length_bytes} bytes: not memory"
            )
        last = merged[-1] if merged else None
        if last is None or buffer.address >= last.address + last.length_bytes:
            merged.append(buffer)
        else:
            end = max(last.address + last.length_bytes, buffer.address + buffer.length_bytes)
            merged[-1] = Buffer(last.address, end - last.address)
    return merged


def register_all(engine: ForeignEngine, buffers: Sequence[Buffer]) -> None:
    """Register one buffer after the other; all or none (parallel registration kills ROCm, Mooncake#3663).

    Raises:
        TransferError: names the buffer, its size and address, the code and the likely cause.
    """
    for index, buffer in enumerate(buffers):
        code = engine.register_memory(buffer.address, buffer.length_bytes)
        if code == 0:
            continue
        for done in reversed(buffers[:index]):
            engine.unregister_memory(done.address)
        raise TransferError(
            f"buffer {index + 1} of {len(buffers)}: registering {buffer.length_bytes} bytes at {buffer.address:#x} "
            f"returned {code}{_likely_cause(code)}; the {index} before it were unregistered again"
        )


def _likely_cause(code: int) -> str:
    causes = {
        -7: " (overlaps memory that is registered already)",
        -12: " (ENOMEM: raise `ulimit -l` or the container's memlock limit)",
        -14: " (EFAULT: not memory of this process, or GPU memory without nvidia-peermem)",
        -22: " (EINVAL: too large for the device, or a kind of memory it cannot register)",
    }
    return causes.get(code, " (see Mooncake's own message above; on RDMA check `ulimit -l`)")


class Session:
    """One foreign engine with registered memory, the calls that run in it, and its end."""

    def __init__(self, engine: ForeignEngine, host: str, buffers: Sequence[Buffer], timeout_s: float = 30.0) -> None:
        """`timeout_s`: after which the engine gives a batch up."""
        register_all(engine, buffers)
        self._timeout_s = timeout_s
        self._engine: ForeignEngine | None = engine
        self._host = host
        self._rpc_port = engine.get_rpc_port()
        self._buffers = tuple(buffers)
        self._lock = threading.Lock()
        self._calls = 0
        self._retired = False
        self._dead = threading.Event()
        self.used_at = time.monotonic()

    @property
    def retired(self) -> bool:
        return self._retired

    @property
    def idle(self) -> bool:
        return self._calls == 0

    @property
    def transport_session(self) -> str:
        """What a peer reads from: host and port of the engine's handshake."""
        return f"{self._host}:{self._rpc_port}"

    def read(self, peer: str, batch: Descriptors) -> int | None:
        """One engine call: its return code, or None where the session is retired and nothing was done.

        Blocks until it ends or Mooncake's own timeout is over.
        """
        with self._inside() as inside:
            return self._transfer(peer, batch) if inside else None

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        with self._lock:
            inside = not self._retired
            self._calls += inside
        try:
            yield inside
        finally:
            if inside:
                self._leave()

    def _transfer(self, peer: str, batch: Descriptors) -> int:
        engine = self._engine
        try:
            # The engine is gone only when no call is inside.
            return read_batch(engine, peer, batch, self._timeout_s)  # type: ignore[arg-type]
        finally:
            del engine  # a reference kept by a traceback would put the destruction off

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            self.used_at = time.monotonic()
            last = self._retired and self._calls == 0
        if last:
            self._bury()

    def retire(self) -> None:
        """Let no further call in; destroy the engine when the last one has left. Idempotent."""
        with self._lock:
            first = not self._retired
            self._retired = True
            idle = self._calls == 0
        if first and idle:
            self._bury()

    def wait_dead(self, timeout_s: float) -> bool:
        """Whether the engine is gone, so that nothing of this session can write any more."""
        return self._dead.wait(timeout_s)

    def _bury(self) -> None:
        threading.Thread(target=self._destroy, name="mht-engine-end", daemon=True).start()

    def _destroy(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            self._unregister(engine)
            self._wait_for_accept_loop()
            del engine
        self._dead.set()

    def _unregister(self, engine: ForeignEngine) -> None:
        for buffer in self._buffers:
            code = engine.unregister_memory(buffer.address)
            if code != 0:
                logger.warning("unregistering %d bytes at %#x returned %d", buffer.length_bytes, buffer.address, code)

    def _wait_for_accept_loop(self) -> None:
        """Wake the handshake thread now, and come back when it is about to look again.

        The destructor then holds the GIL for some 50 ms instead of up to a second.
        """
        try:
            socket.create_connection((self._host.strip("[]"), self._rpc_port), timeout=1.0).close()
        except OSError as error:
            logger.debug("no connection to the own handshake port %s: %s", self.transport_session, error)
        time.sleep(_ACCEPT_PERIOD_S - _NUDGE_LEAD_S)


class SessionTable:
    """The current session per key, made on demand; retired ones until they are dead.

    A key is a peer where sessions are cheap (TCP), so that a peer that hangs or is poisoned holds up
    nobody else, and one for all where each costs a registration of the whole cache (RDMA).
    """

    def __init__(
        self,
        make: Callable[[], Session],
        *,
        per_peer: bool,
        max_sessions: int,
        answers: Callable[[str, float], bool] | None = None,
    ) -> None:
        """`answers(peer, patience_s)`: whether a peer that failed is there again."""
        self._make = make
        self._answers = answers or handshake_answers
        self._per_peer = per_peer
        self._max_sessions = max_sessions
        self._lock = threading.Lock()
        self._current: dict[str, Session] = {}
        self._retired: dict[str, list[Session]] = {}
        self._spare: Session | None = None
        self._suspects: set[str] = set()
        self._closed = False

    def _key(self, peer: str) -> str:
        return peer if self._per_peer else ""

    def prepare(self) -> None:
        """Make the first session ahead of its use, so that what is wrong shows at start.

        Raises:
            ConfigError, TransferError: as making a session does.
        """
        with self._lock:
            self._spare = self._make()

    def current(self, peer: str) -> Session:
        """The session to read from `peer` in.

        A peer that failed last time is asked first whether it is there: Mooncake's own handshake with a
        stopped process takes 60 s, with a lock held that all reads of the engine need (measured).

        Raises:
            TransferError: the engine is closed, a new session could not be made, or the peer is not there.
        """
        key = self._key(peer)
        if peer in self._suspects:
            if not self._answers(peer, _PROBE_S):
                raise TransferError(f"{peer} failed before and answers no handshake within {_PROBE_S:g} s")
            self._suspects.discard(peer)
        with self._lock:
            if self._closed:
                raise TransferError(f"reading from {peer}: the transfer engine is closed")
            session = self._current.get(key)
            if session is None or session.retired:
                self._evict_idle()
                spare, self._spare = self._spare, None
                session = self._current[key] = spare or self._make()
            return session

    def _evict_idle(self) -> None:
        idle = sorted((s.used_at, key) for key, s in self._current.items() if s.idle)
        excess = len(self._current) + 1 - self._max_sessions
        for _, key in idle[: max(excess, 0)]:
            self._retire_locked(key, self._current[key])

    def retire(self, peer: str, session: Session) -> None:
        """Take a session out of use in which a read from `peer` failed."""
        with self._lock:
            self._suspects.add(peer)
            self._retire_locked(self._key(peer), session)

    def _retire_locked(self, key: str, session: Session) -> None:
        if self._current.get(key) is session:
            del self._current[key]
        self._forget_dead()
        retired = self._retired.setdefault(key, [])
        if session not in retired:
            retired.append(session)
        session.retire()

    def _forget_dead(self) -> None:
        alive = {key: [old for old in olds if not old.wait_dead(0)] for key, olds in self._retired.items()}
        self._retired = {key: olds for key, olds in alive.items() if olds}

    def fence(self, peer: str, timeout_s: float) -> bool:
        """Retire what reads from `peer` now; whether all its retired sessions are dead in time."""
        key = self._key(peer)
        with self._lock:
            session = self._current.get(key)
            if session is not None:
                self._retire_locked(key, session)
            waiting = list(self._retired.get(key, []))
        return _all_dead(waiting, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Retire everything; whether all sessions are dead in time. Idempotent."""
        with self._lock:
            self._closed = True
            if self._spare is not None:
                self._current["(spare)"], self._spare = self._spare, None
            for key, session in list(self._current.items()):
                self._retire_locked(key, session)
            waiting = [session for sessions in self._retired.values() for session in sessions]
        return _all_dead(waiting, timeout_s)


def handshake_answers(peer: str, patience_s: float) -> bool:
    """Whether Mooncake's handshake thread at `host:port` runs: it hangs up on who hangs up.

    Mooncake's own probe has no timeout of ours, and the kernel accepts connections for a stopped process.
    """
    host, _, port = peer.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=patience_s) as connection:
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) == b""
    except (OSError, ValueError) as error:
        logger.debug("%s answers no handshake: %s", peer, error)
        return False


def _all_dead(sessions: Sequence[Session], timeout_s: float) -> bool:
    end = time.monotonic() + timeout_s
    return all(session.wait_dead(max(end - time.monotonic(), 0.0)) for session in sessions)
