"""A decode worker in this process: a real runtime and engine per transfer mode, timed from submit to report."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import count

from mooncake_hetero_tp.core.consumer import ConsumerConfig
from mooncake_hetero_tp.core.cost import Mode, Rates
from mooncake_hetero_tp.core.effects import PullRequest
from mooncake_hetero_tp.io.engine import MooncakeEngine
from mooncake_hetero_tp.io.release import ReleaseClient
from mooncake_hetero_tp.io.runtime import RuntimeConfig, StepWork, WorkerRuntime
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.io.stats import PullRecord
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TransferId
from tests.benchmarks.producer import ENGINE, HOST, LEASE_S, Producer
from tests.benchmarks.pullable import Opened, Pullable
from tests.oracle_memory import Ints

PULLED_WITHIN_S = 60.0
_LOOK_EVERY_S = 5e-4
_numbers = count(1)


class Consumer:
    """Rank 0 of 2, in one mode; `close` it."""

    def __init__(
        self,
        shape: Pullable,
        cache: Opened,
        mode: Mode,
        ring: RingSize,
        producer: Producer,
        engine: MooncakeEngine | None = None,
    ) -> None:
        """`engine`: to read through; without it, one that nobody else uses."""
        self._shape = shape
        self._producer = producer
        engine_id = EngineId(f"consumer-{mode}")
        config = RuntimeConfig(host=HOST, consumer=ConsumerConfig(), transfer_mode=mode, staging=ring)
        identity = Identity(engine_id, Incarnation(secrets.token_hex(8)), Rank())
        engine = engine or MooncakeEngine(HOST, lease_s=LEASE_S, protocol="tcp", serves=False)
        self._runtime = WorkerRuntime(config, identity, cache.table, engine)
        self._runtime.start()
        self._releases = ReleaseClient(engine_id)
        self._releases.start()

    def pull(self, blocks: Sequence[Ints]) -> list[float]:
        """Pull the first blocks into each of these block lists at once; seconds that each took, in their order.

        Raises:
            RuntimeError: a pull failed.
        """
        names = [f"t-{next(_numbers)}" for _ in blocks]
        self._producer.keep(names, max(ids.size for ids in blocks))
        asked = [self._request(name, ids) for name, ids in zip(names, blocks, strict=True)]
        began = time.perf_counter()
        self._runtime.submit(StepWork(pulls=asked))
        ended = self._wait(set(names), began)
        for name in names:
            self._releases.release(TransferId(name), ENGINE, self._producer.started.bootstrap)
        self._producer.wait_freed(names)
        return [ended[name] - began for name in names]

    def records(self) -> list[PullRecord]:
        """Of all pulls since the last look."""
        return self._runtime.stats().pulls

    def rates(self) -> Rates:
        """What it believes of the path to the producer, measured and refined."""
        reads = self._runtime._reads
        if reads is None or reads.tools.chooser is None:
            raise RuntimeError("this consumer stages nothing and has measured no path")
        return reads.tools.chooser.rates(self._producer.started.session)

    def close(self) -> None:
        self._releases.close()
        self._runtime.close()

    def _request(self, name: str, ids: Ints) -> PullRequest:
        ranges, blocks = self._shape.wanted(ids)
        bootstrap = self._producer.started.bootstrap
        return PullRequest(RequestId(name), TransferId(name), ENGINE, bootstrap, ranges, blocks)

    def _wait(self, names: set[str], began: float) -> dict[str, float]:
        ended: dict[str, float] = {}
        while len(ended) < len(names):
            finished, now = self._runtime.collect(), time.perf_counter()
            if finished.failed or now - began > PULLED_WITHIN_S:
                raise RuntimeError(f"of {len(names)} pulls {sorted(finished.failed)} failed; {len(ended)} had ended")
            ended.update(dict.fromkeys(map(str, finished.recving), now))
            time.sleep(_LOOK_EVERY_S)
        return ended
