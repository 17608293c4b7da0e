"""What an engine holds while nobody asks it anything: KV blocks, processes, threads, sockets."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable
from pathlib import Path

from client import counters
from deployment import HOST
from guard import descendants

SETTLE_S = 20.0
KV_USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
BUSY = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclasses.dataclass(frozen=True)
class Held:
    """Counts over the engine core and worker processes below one service's guard.

    The API server is left out: its connections and executor threads belong to the HTTP clients.
    """

    processes: int
    threads: int
    sockets: int

    def exceeds(self, before: Held) -> bool:
        return self.processes > before.processes or self.threads > before.threads or self.sockets > before.sockets


def _sockets(pid: int) -> int:
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += str(entry.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    return found


def held(service_pid: int) -> Held:
    """Count what the engine behind this guard holds now."""
    api_server, *engine = descendants(service_pid)
    del api_server
    threads = sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in engine)
    return Held(len(engine), threads, sum(_sockets(pid) for pid in engine))


def kv_state(url: str) -> dict[str, float]:
    """Share of KV blocks in use (cached ones count as free), running and waiting requests."""
    samples = counters(url)
    return {name: samples[name] for name in (KV_USAGE, *BUSY)}


def is_idle(url: str) -> bool:
    """No request runs or waits, and every KV block is free."""
    return not any(kv_state(url).values())


def waits(url: str) -> bool:
    """Whether one request waits and none runs."""
    samples = counters(url)
    return [samples[name] for name in BUSY] == [0, 1]


def preemptions(url: str) -> float:
    """How often a request was thrown out; counted when that request has its next token."""
    return counters(url)[PREEMPTIONS]


def is_open(port: int) -> bool:
    """Whether anybody listens on this local port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def eventually(condition: Callable[[], bool], within_s: float = SETTLE_S) -> bool:
    """Whether `condition` comes true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
