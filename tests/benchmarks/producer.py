"""A prefill worker in a process of its own: a filled cache, a real runtime and engine, and what it was told to keep.

Reads commands on stdin and answers each with one line of JSON; ends with stdin. See `Producer` for the other end.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.effects import Kept
from mooncake_hetero_tp.core.producer import ProducerConfig
from mooncake_hetero_tp.io.engine import MooncakeEngine
from mooncake_hetero_tp.io.runtime import RuntimeConfig, StepWork, WorkerRuntime
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TransferId
from tests.benchmarks.pullable import BY_NAME, Pullable
from tests.benchmarks.residence import Residence

HOST = "127.0.0.1"
ENGINE = EngineId("producer-engine")
LEASE_S = 30
FREED_WITHIN_S = 20.0


class Started(NamedTuple):
    """What the process says first."""

    session: str
    """Of its transfer engine."""
    address: int
    """Of its cache."""
    bootstrap: str


class Producer:
    """The process, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.started = Started(**self._answer())

    def keep(self, names: Sequence[str], blocks: int) -> None:
        """Keep the first `blocks` blocks under each of these transfer ids."""
        self._ask(f"keep {blocks} {' '.join(names)}")

    def wait_freed(self, names: Sequence[str]) -> None:
        """Until all of them were released."""
        if self._ask(f"freed {' '.join(names)}")["missing"]:
            raise TimeoutError(f"the producer did not free {names}")

    def growth_bytes(self) -> int:
        """Resident memory at its highest so far, less what there was before the runtime."""
        return int(self._ask("growth")["bytes"])

    def _ask(self, command: str) -> dict[str, Any]:
        if self._process.stdin is None:
            raise RuntimeError("the producer has no stdin")
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"the producer process ended with status {self._process.poll()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def producer(shape: Pullable, ring: RingSize) -> Iterator[Producer]:
    """A process that holds one of `pullable.BY_NAME`."""
    command = [sys.executable, "-m", "tests.benchmarks.producer", shape.name, str(ring.slot_bytes), str(ring.slots)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Producer(process)
        finally:
            process.kill()


# --- in the process ------------------------------------------------------------------------------


class _Worker:
    """The runtime and what its parent may ask."""

    def __init__(self, shape: Pullable, ring: RingSize) -> None:
        self._shape = shape
        self._cache = shape.open("producer")
        self._cache.fill()
        self._residence = Residence()
        engine = MooncakeEngine(HOST, lease_s=LEASE_S, protocol="tcp", reads=False)
        config = RuntimeConfig(
            host=HOST, producer=ProducerConfig(lease_s=LEASE_S), bootstrap_bind=HostPort(HOST, 0), staging=ring
        )
        identity = Identity(ENGINE, Incarnation(secrets.token_hex(8)), Rank())
        self._runtime = WorkerRuntime(config, identity, self._cache.table, engine)
        self._runtime.start()
        self._freed: set[str] = set()
        self._say(Started(engine.transport_session, self._cache.address, f"http://{self._runtime.bootstrap}"))

    def serve(self) -> None:
        for line in sys.stdin:
            command, *words = line.split()
            self._say({"keep": self._keep, "freed": self._wait_freed, "growth": self._growth}[command](words))

    def _say(self, answer: dict[str, Any] | Started) -> None:
        print(json.dumps(answer._asdict() if isinstance(answer, Started) else answer), flush=True)

    def _keep(self, words: Sequence[str]) -> dict[str, Any]:
        blocks, tokens = self._shape.kept(int(words[0]))
        kept = [Kept(RequestId(name), TransferId(name), blocks, tokens, ready=True) for name in words[1:]]
        self._runtime.submit(StepWork(kept=kept))
        return {}

    def _wait_freed(self, names: Sequence[str]) -> dict[str, Any]:
        end = time.monotonic() + FREED_WITHIN_S
        while not self._freed.issuperset(names) and time.monotonic() < end:
            self._freed |= self._runtime.collect().sending
            time.sleep(0.001)
        return {"missing": sorted(set(names) - self._freed)}

    def _growth(self, _words: Sequence[str]) -> dict[str, Any]:
        return {"bytes": self._residence.growth_bytes()}


def main() -> None:
    name, slot_bytes, slots = sys.argv[1:]
    _Worker(BY_NAME[name], RingSize(int(slot_bytes), int(slots))).serve()


if __name__ == "__main__":
    main()
