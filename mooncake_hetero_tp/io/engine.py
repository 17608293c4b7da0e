"""Mooncake Transfer Engine behind the `TransferEngine` protocol; the only file that imports mooncake.

What Mooncake needs to stay healthy is next door: credits per peer (`credits.py`), bounded batches with
retries (`reading.py`), sessions that are replaced when a call fails (`sessions.py`). Here: loading it,
starting it, and a transport timeout below the lease.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError, MissingLibraryError, TransferError
from mooncake_hetero_tp.io.reading import EngineLimits, Reader
from mooncake_hetero_tp.io.sessions import ForeignEngine, Session, SessionTable, merge_overlaps
from mooncake_hetero_tp.io.transfer import Deadline, ReadFailed, ReadTally, TransferEngine

__all__ = ["Deadline", "EngineLimits", "MooncakeEngine", "ReadFailed", "ReadTally", "TransferEngine", "load_mooncake"]

logger = logging.getLogger(__name__)

TIMEOUT_SETTING = "MC_TRANSFER_TIMEOUT"
_LOG_SETTING = "MC_LOG_LEVEL"
_WARNINGS = "WARNING"
"""Mooncake writes a line of information for every batch that it is asked about; an operator's own level stands."""
_SHORTEST_TIMEOUT_S = 5
"""Mooncake takes a shorter MC_TRANSFER_TIMEOUT for this one."""
_chosen: dict[str, str] = {}
"""What was set here and not by the operator, so that another engine with another lease may set it again."""
_CLOSE_S = 15.0
_BUILDS = {
    "mooncake-transfer-engine": "cuda12",
    "mooncake-transfer-engine-cuda13": "cuda13",
    "mooncake-transfer-engine-non-cuda": "cpu",
}
"""Distribution -> our extra that installs it; all three have the import name `mooncake`."""


class MooncakeEngine:
    """Mooncake Transfer Engine behind the `TransferEngine` protocol.

    Peers read from one engine that lives as long as this object. We read in sessions of their own
    (`sessions.py`), so that replacing one changes nothing for those who read from us.
    """

    def __init__(
        self,
        host: str,
        *,
        lease_s: float,
        protocol: str = "rdma",
        device_name: str = "",
        serves: bool = True,
        reads: bool = True,
        limits: EngineLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        make_foreign: Callable[[], ForeignEngine] | None = None,
    ) -> None:
        """Load Mooncake; its engines start when memory is registered.

        Args:
            host: the address that peers use; never guessed here.
            lease_s: the lease of the reads; Mooncake's own timeout is set below it.
            protocol: Mooncake's name of the transport.
            device_name: RDMA devices, comma separated; empty: all.
            serves: peers will read from here.
            reads: we will read from peers.
            limits: batches and credits.
            clock: the clock of `Deadline`.
            make_foreign: makes an initialized Mooncake engine; for tests.

        Raises:
            MissingLibraryError: Mooncake or a library it needs is missing; in the loader's own words.
            ConfigError: MC_TRANSFER_TIMEOUT is not below the lease.
        """
        os.environ.setdefault(_LOG_SETTING, _WARNINGS)
        self._timeout_s = timeout_s = set_transfer_timeout(lease_s)
        limits = limits or EngineLimits()
        self._host = host
        self._make_foreign = make_foreign or _mooncake_factory(host, protocol, device_name)
        self._buffers: list[Buffer] | None = None
        self._served: Session | None = None
        self._retired: Session | None = None
        """The one that served, from `close` on."""
        self._serves, self._reads = serves, reads
        self._sessions = SessionTable(self._new_session, per_peer=protocol == "tcp", max_sessions=limits.max_sessions)
        self._reader = Reader(self._sessions, limits, clock, timeout_s)
        self._closing = threading.Lock()

    @property
    def transport_session(self) -> str:
        if self._served is None:
            raise LocalUsageError("transport_session: known after `register`, of an engine that serves")
        return self._served.transport_session

    def register(self, buffers: Sequence[Buffer]) -> None:
        if self._buffers is not None:
            raise LocalUsageError("register: called twice; pass all buffers at once")
        self._buffers = merge_overlaps(buffers)
        try:
            if self._serves:
                self._served = self._new_session()
            if self._reads:
                self._sessions.prepare()
        except BaseException:
            self.close()
            raise

    def _new_session(self) -> Session:
        if self._buffers is None:
            raise LocalUsageError("no memory is registered; call `register` first")
        return Session(self._make_foreign(), self._host, self._buffers, self._timeout_s)

    def read(self, transport_session: str, descriptors: Descriptors, *, deadline: Deadline) -> ReadTally:
        if not self._reads:
            raise LocalUsageError("read: this engine only serves")
        return self._reader.read(transport_session, descriptors, deadline)

    def fence(self, transport_session: str) -> None:
        if not self._sessions.fence(transport_session, _CLOSE_S):
            raise TransferError(f"reads from {transport_session} are still running after {_CLOSE_S:g} s")

    def close(self) -> bool:
        with self._closing:
            if self._served is not None:
                self._retired, self._served = self._served, None
                self._retired.retire()
            dead = self._sessions.close(_CLOSE_S)
            if self._retired is not None:
                dead = self._retired.wait_dead(_CLOSE_S) and dead
        if not dead:
            logger.error("a Mooncake call is still running after %g s; its engine is left behind", _CLOSE_S)
        return dead


# --- loading Mooncake ----------------------------------------------------------------------------


def load_mooncake() -> Any:
    """The class `mooncake.engine.TransferEngine`.

    Raises:
        MissingLibraryError: the loader's own words, the missing name and the package that has it
            (Mooncake#1298, vllm#42511).
    """
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise MissingLibraryError(explain_import_error(error, installed_builds())) from error


def installed_builds() -> list[str]:
    """Which of the three distributions of Mooncake are installed, with their versions."""
    found = []
    for name in _BUILDS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def explain_import_error(error: ImportError, installed: Sequence[str]) -> str:
    """What the loader said, what is missing, what is installed and what to install."""
    words = str(error)
    match = re.search(r"lib[\w+-]+\.so(?:\.\d+)*", words)
    missing = match[0] if match else (error.name or "mooncake")
    here = ", ".join(installed) or "no build of Mooncake Transfer Engine"
    return (
        f"Mooncake Transfer Engine could not be loaded. The loader says: {words!r}. "
        f"Missing: {missing}. Installed: {here}. {_remedy(missing)}"
    )


def _remedy(missing: str) -> str:
    extras = "mooncake-hetero-tp[cpu] without CUDA, [cuda12] for CUDA 12, [cuda13] for CUDA 13"
    if missing.startswith(("libcudart", "libcuda", "libnv")):
        return f"The build is for another CUDA version than this machine has; install the one that fits: {extras}."
    if missing.startswith(("libibverbs", "librdmacm", "libnuma", "libmlx5", "libcurl")):
        return "Install the system libraries: apt-get install libibverbs1 librdmacm1 libnuma1 libcurl4."
    return f"Install exactly one build: {extras}."


def _mooncake_factory(host: str, protocol: str, device_name: str) -> Callable[[], ForeignEngine]:
    make = load_mooncake()

    def start() -> ForeignEngine:
        engine = make()
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, device_name)
        if code != 0:
            raise ConfigError(
                f"Mooncake Transfer Engine does not start: initialize returned {code} for address {host!r}, "
                f"mooncake_protocol {protocol!r}, device_name {device_name!r}; check that the address is this "
                "machine's (VLLM_HOST_IP) and that the devices exist; Mooncake's own message is above"
            )
        started: ForeignEngine = engine
        return started

    return start


def set_transfer_timeout(lease_s: float) -> int:
    """Let Mooncake give a call up before the lease ends; the seconds it will take.

    Mooncake reads MC_TRANSFER_TIMEOUT whenever an engine is made, in whole seconds, 5 at least. A value
    that the operator set is only checked.

    Raises:
        ConfigError: the operator's value is no number or not below the lease.
    """
    given = os.environ.get(TIMEOUT_SETTING)
    if given is None or given == _chosen.get(TIMEOUT_SETTING):
        return _choose_timeout(lease_s)
    if not given.isdecimal():
        raise ConfigError(f"{TIMEOUT_SETTING}={given!r}: expected whole seconds below the lease of {lease_s:g} s")
    if int(given) >= lease_s and int(given) > _SHORTEST_TIMEOUT_S:
        raise ConfigError(
            f"{TIMEOUT_SETTING}={given} is not below the lease of {lease_s:g} s (lease_s), so a stuck read would "
            "outlive its blocks; unset it, lower it, or raise lease_s on both sides"
        )
    return max(int(given), _SHORTEST_TIMEOUT_S)


def _choose_timeout(lease_s: float) -> int:
    chosen = max(_SHORTEST_TIMEOUT_S, int(lease_s * 2 / 3))
    os.environ[TIMEOUT_SETTING] = _chosen[TIMEOUT_SETTING] = str(chosen)
    if chosen >= lease_s:
        logger.warning(
            "the lease of %g s is shorter than Mooncake's shortest timeout, %d s: a stuck read holds its pages "
            "for that long",
            lease_s,
            chosen,
        )
    return chosen
