"""Whether anything accepts TCP connections at an address; ZeroMQ itself keeps trying and never says."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
import urllib.parse
from collections.abc import Iterable
from contextlib import ExitStack


def unreachable(addresses: Iterable[str], *, timeout_s: float) -> dict[str, str]:
    """The addresses (`tcp://host:port`) that take no connection, each with the reason.

    All are tried at once; a refusal is known immediately, a host that swallows packets after `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    reasons: dict[str, str] = {}
    with ExitStack() as opened:
        selector = opened.enter_context(selectors.DefaultSelector())
        for address in addresses:
            try:
                connection = opened.enter_context(_connect(address))
            except (OSError, ValueError, OverflowError) as error:
                reasons[address] = str(error)
            else:
                selector.register(connection, selectors.EVENT_WRITE, address)
        reasons |= _settle(selector, end)
        late = [key.data for key in selector.get_map().values()]
    return reasons | dict.fromkeys(late, f"no TCP connection within {timeout_s:.1f} s")


def _connect(address: str) -> socket.socket:
    """A connection under way.

    Raises:
        OSError, ValueError, OverflowError: it failed already, or the address is none.
    """
    parts = urllib.parse.urlsplit(address)
    family, kind, protocol, _, where = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    try:
        connection.setblocking(False)
        _raise(connection.connect_ex(where), but=errno.EINPROGRESS)
    except BaseException:
        connection.close()
        raise
    return connection


def _settle(selector: selectors.BaseSelector, end: float) -> dict[str, str]:
    """Waits for connections until `end` and unregisters those that are made or refused; the reasons of the latter."""
    reasons = {}
    while selector.get_map() and (left := end - time.monotonic()) > 0:
        for key, _ in selector.select(left):
            connection, address = key.fileobj, key.data
            selector.unregister(connection)
            try:
                _raise(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))  # type: ignore[union-attr]
            except OSError as error:
                reasons[address] = str(error)
    return reasons


def _raise(code: int, *, but: int = 0) -> None:
    if code not in (0, but):
        raise OSError(code, os.strerror(code))
