"""A producer engine and a consumer engine in one process, wired together."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.consumer import ConsumerConfig
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.effects import BlockIds, Kept, PullRequest
from mooncake_hetero_tp.core.producer import ProducerConfig
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.io.release import ReleaseClient
from mooncake_hetero_tp.io.runtime import RuntimeConfig, StepWork, WorkerRuntime
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.io.transfer import TransferEngine
from mooncake_hetero_tp.testing.clock import FakeClock
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank, RequestId, TokenRange, TransferId


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One hand-over through a pair: what every producer rank keeps and every consumer rank loads."""

    transfer_id: TransferId
    computed_tokens: int
    producer_blocks: tuple[BlockIds, ...]
    consumer_blocks: tuple[BlockIds, ...]
    ranges: tuple[TokenRange, ...]

    @property
    def producer_request(self) -> RequestId:
        return RequestId(f"p-{self.transfer_id}")

    @property
    def consumer_request(self) -> RequestId:
        return RequestId(f"d-{self.transfer_id}")


@dataclass(slots=True)
class Ended:
    """What the workers of a pair have reported so far, by rank."""

    sending: dict[Rank, set[RequestId]] = field(default_factory=dict)
    recving: dict[Rank, set[RequestId]] = field(default_factory=dict)
    failed: dict[Rank, set[RequestId]] = field(default_factory=dict)


class LinkedPair:
    """A producer engine and a consumer engine in this process, over real ZMQ and HTTP on 127.0.0.1.

    `make_engine(serves)` gives each rank its transfer engine, loopback or Mooncake. A context manager:
    entering starts everything, leaving closes it.
    """

    def __init__(
        self,
        producers: Mapping[Rank, RankTable],
        consumers: Mapping[Rank, RankTable],
        make_engine: Callable[[bool], TransferEngine],
        *,
        producer_config: ProducerConfig | None = None,
        consumer_config: ConsumerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        num_workers: int = 2,
        close_timeout_s: float = 3.0,
        transfer_mode: Mode = Mode.AUTO,
        staging: RingSize | None = None,
        stages_for_others: bool = True,
    ) -> None:
        """`stages_for_others`: whether producers have a ring too."""
        self.producer_id = EngineId("producer-engine")
        self.consumer_id = EngineId("consumer-engine")
        self.producers: dict[Rank, WorkerRuntime] = {}
        self.consumers: dict[Rank, WorkerRuntime] = {}
        self.releases = ReleaseClient(self.consumer_id, connector_timeout_s=5.0, clock=clock)
        self.ended = Ended()
        self.bootstrap = ""
        """What a proxy would pass as `remote_bootstrap_addr`; known once started."""
        self._tables = (dict(producers), dict(consumers))
        self._configs = (producer_config or ProducerConfig(), consumer_config or ConsumerConfig())
        self._make_engine = make_engine
        self._producer_staging = staging if stages_for_others else None
        self._clock = clock
        self._options: dict[str, Any] = {
            "host": "127.0.0.1",
            "num_workers": num_workers,
            "connector_timeout_s": 5.0,
            "close_timeout_s": close_timeout_s,
            "transfer_mode": transfer_mode,
            "staging": staging,
        }

    def __enter__(self) -> Self:
        producers, consumers = self._tables
        try:
            for rank, table in sorted(producers.items()):
                self.producers[rank] = self.start_producer(rank, table)
            self.bootstrap = f"http://{self._owner().bootstrap}"
            for rank, table in sorted(consumers.items()):
                config = RuntimeConfig(consumer=self._configs[1], **self._options)
                self.consumers[rank] = self._start(config, self.consumer_id, rank, table)
            self.releases.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _owner(self) -> WorkerRuntime:
        return self.producers[min(self.producers)]

    def start_producer(self, rank: Rank, table: RankTable) -> WorkerRuntime:
        """A started producer worker, a fresh process as far as others can see; the first runs the bootstrap."""
        config = RuntimeConfig(
            producer=self._configs[0],
            bootstrap_bind=None if self.producers else HostPort("127.0.0.1", 0),
            bootstrap_address=self._owner().bootstrap if self.producers else None,
            **(self._options | {"staging": self._producer_staging}),
        )
        return self._start(config, self.producer_id, rank, table)

    def _start(self, config: RuntimeConfig, engine_id: EngineId, rank: Rank, table: RankTable) -> WorkerRuntime:
        identity = Identity(engine_id, Incarnation(secrets.token_hex(8)), rank)
        engine = self._make_engine(config.producer is not None)
        runtime = WorkerRuntime(config, identity, table, engine, clock=self._clock)
        if isinstance(self._clock, FakeClock):
            self._clock.subscribe(runtime.wake)
        runtime.start()
        return runtime

    def keep(self, load: Load, *, ready: bool = True) -> None:
        """Every producer rank keeps the blocks of the load."""
        kept = Kept(load.producer_request, load.transfer_id, load.producer_blocks, load.computed_tokens, ready)
        for runtime in self.producers.values():
            runtime.submit(StepWork(kept=[kept]))

    def pull(self, load: Load) -> None:
        """Every consumer rank begins to load."""
        for runtime in self.consumers.values():
            asked = PullRequest(
                load.consumer_request,
                load.transfer_id,
                self.producer_id,
                self.bootstrap,
                load.ranges,
                load.consumer_blocks,
            )
            runtime.submit(StepWork(pulls=[asked]))

    def release(self, load: Load) -> None:
        """The consumer's scheduler releases the transfer."""
        self.releases.release(load.transfer_id, self.producer_id, self.bootstrap)

    def collect(self) -> Ended:
        """Everything that all workers have reported so far."""
        for rank, runtime in self.producers.items():
            self.ended.sending.setdefault(rank, set()).update(runtime.collect().sending)
        for rank, runtime in self.consumers.items():
            finished = runtime.collect()
            self.ended.recving.setdefault(rank, set()).update(finished.recving)
            self.ended.failed.setdefault(rank, set()).update(finished.failed)
        return self.ended

    def wait(self, done: Callable[[Ended], bool], timeout_s: float = 20.0) -> Ended:
        """Collect until `done`.

        Raises:
            TimeoutError: it does not come, in real time.
        """
        end = time.monotonic() + timeout_s
        while not done(self.collect()):
            if time.monotonic() >= end:
                raise TimeoutError(f"not reached within {timeout_s:g} s; reported so far: {self.ended}")
            time.sleep(0.002)
        return self.ended

    def wait_loaded(self, load: Load, timeout_s: float = 20.0) -> bool:
        """Wait until every consumer rank has reported the load; whether all succeeded."""
        wanted = load.consumer_request
        ended = self.wait(lambda ended: all(wanted in found for found in ended.recving.values()), timeout_s)
        return not any(wanted in found for found in ended.failed.values())

    def wait_freed(self, load: Load, timeout_s: float = 20.0) -> None:
        """Wait until every producer rank has said that the blocks are free."""
        wanted = load.producer_request
        self.wait(lambda ended: all(wanted in found for found in ended.sending.values()), timeout_s)

    def close(self) -> None:
        """Close everything; idempotent."""
        self.releases.close()
        for side in (self.consumers, self.producers):
            threads = [threading.Thread(target=runtime.close) for runtime in side.values()]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
