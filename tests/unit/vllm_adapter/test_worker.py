"""worker: configuration of the runtime, the gate in front of it, and what happens without one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mooncake_hetero_tp.config import HeteroTPConfig, HostPort
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.core.effects import Kept, PullRequest
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError
from mooncake_hetero_tp.io.runtime import RuntimeConfig
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.io.stats import TransferStats
from mooncake_hetero_tp.io.work import Finished, Handover, StepWork
from mooncake_hetero_tp.types import EngineId, Rank, RequestId, TokenRange, TransferId
from mooncake_hetero_tp.vllm_adapter import worker as worker_module
from mooncake_hetero_tp.vllm_adapter.device import DeviceTails
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata
from mooncake_hetero_tp.vllm_adapter.worker import WorkerSide, own_rank, published_host
from tests.unit.vllm_adapter.doubles import Model, stub_vllm_config

SETTINGS = HeteroTPConfig.from_extra_config({"mooncake_protocol": "tcp", "num_workers": 3})
BLOCKS = (np.asarray([1, 2], dtype=np.int32),)
KEPT = Kept(RequestId("p"), TransferId("t"), BLOCKS, computed_tokens=20, ready=True)
PULL = PullRequest(RequestId("d"), TransferId("t"), EngineId("P"), "http://p0:1", (TokenRange(0, 19),), BLOCKS)


class NotedEngine:
    """Stands in for Mooncake: remembers how it was made."""

    made: list[dict[str, Any]]

    def __init__(self, host: str, **options: Any) -> None:
        NotedEngine.made.append({"host": host, **options})
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


class NotedRuntime:
    """Stands in for WorkerRuntime: remembers what it was told."""

    made: list[NotedRuntime]

    def __init__(self, config: RuntimeConfig, identity: Any, table: Any, engine: Any, **options: Any) -> None:
        self.config, self.identity, self.table, self.engine, self.options = config, identity, table, engine, options
        self.work: list[StepWork] = []
        self.started = self.closed = 0
        self.broken = False
        self.finished = Finished()
        NotedRuntime.made.append(self)

    def start(self) -> None:
        self.started += 1

    def close(self) -> None:
        self.closed += 1

    def submit(self, work: StepWork) -> None:
        if self.broken:
            raise LocalUsageError("the driver thread has failed")
        self.work.append(work)

    def collect(self) -> Finished:
        finished, self.finished = self.finished, Finished()
        return finished

    def stats(self) -> TransferStats:
        return TransferStats(loads_done=len(self.work))


@pytest.fixture(autouse=True)
def vllm_and_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of TP 1 and stand-ins for the engine and the runtime."""
    NotedEngine.made, NotedRuntime.made = [], []
    monkeypatch.setattr(worker_module, "MooncakeEngine", NotedEngine)
    monkeypatch.setattr(worker_module, "WorkerRuntime", NotedRuntime)
    monkeypatch.setattr(worker_module, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(worker_module, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(worker_module, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.5")


def make_worker(role: str = "kv_both", settings: HeteroTPConfig = SETTINGS) -> tuple[WorkerSide, NotedRuntime]:
    model = Model()
    config = model.cache_config()
    worker = WorkerSide(stub_vllm_config(model, role), config, settings)
    worker.register_kv_caches(model.allocate(config))
    return worker, NotedRuntime.made[-1]


@pytest.mark.parametrize(
    "role,serves,reads", [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)]
)
def test_roles_and_settings_reach_engine_and_runtime(role: str, serves: bool, reads: bool) -> None:
    _, runtime = make_worker(role)
    (engine,) = NotedEngine.made
    assert engine == {
        "host": "10.0.0.5",
        "lease_s": 30.0,
        "protocol": "tcp",
        "device_name": "",
        "serves": serves,
        "reads": reads,
    }
    config = runtime.config
    assert ((config.producer is not None), (config.consumer is not None)) == (serves, reads)
    assert (config.host, config.num_workers, config.null_block) == ("10.0.0.5", 3, 0)
    assert config.bootstrap_bind == (HostPort("0.0.0.0", 8998) if serves else None)
    assert config.bootstrap_address == (HostPort("127.0.0.1", 8998) if serves else None)
    if config.producer is not None:
        assert (config.producer.keep_s, config.producer.lease_s) == (480.0, 30.0)
    if config.consumer is not None:
        assert config.consumer.deadline_s == 420.0
        assert config.consumer.deadline_s < 480.0
    assert runtime.identity.engine_id == "E"
    assert len(runtime.identity.incarnation) == 16
    assert runtime.started == 1


def test_an_external_bootstrap_is_registered_at_and_not_served() -> None:
    settings = HeteroTPConfig.from_extra_config({"bootstrap_server_address": "boot:9000"})
    _, runtime = make_worker(settings=settings)
    assert (runtime.config.bootstrap_bind, runtime.config.bootstrap_address) == (None, HostPort("boot", 9000))


def test_ipv6_hosts_get_an_ipv6_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "fd00::5")
    _, runtime = make_worker()
    assert runtime.config.bootstrap_bind == HostPort("::", 8998)


def test_a_step_is_passed_on_in_one_piece() -> None:
    worker, runtime = make_worker()
    worker.start_load_kv(StepMetadata())
    assert runtime.work == []
    aborted = [Handover(TransferId("u"), RequestId("q"))]
    worker.start_load_kv(StepMetadata(kept=[KEPT], aborted=aborted, pulls=[PULL], cancelled=[RequestId("c")]))
    (work,) = runtime.work
    assert (work.kept, work.aborted, work.pulls, work.cancelled) == ([KEPT], aborted, [PULL], ["c"])


def test_on_an_accelerator_kept_blocks_wait_for_the_forward() -> None:
    worker, runtime = make_worker()
    passed: list[Handover] = []

    class Gate:
        is_needed = True

        def wait_for(self, handovers: list[Handover]) -> None:
            self.waiting = list(handovers)

        def passed(self) -> list[Handover]:
            return passed

    gate = Gate()
    worker._gate = gate  # type: ignore[assignment]
    worker.start_load_kv(StepMetadata(kept=[KEPT]))
    assert runtime.work[0].kept[0].ready is False
    assert gate.waiting == [("t", "p")]
    worker.get_transfer_results()
    assert len(runtime.work) == 1
    passed.append(Handover(TransferId("t"), RequestId("p")))
    worker.get_transfer_results()
    assert runtime.work[1].ready == [("t", "p")]


def test_results_and_statistics_are_the_runtimes() -> None:
    worker, runtime = make_worker()
    assert worker.get_kv_connector_stats() is None, "an empty interval says nothing"
    runtime.finished = Finished(sending={RequestId("p")}, recving={RequestId("d")}, failed={RequestId("d")})
    results = worker.get_transfer_results()
    assert (results.finished_sending, results.finished_recving, results.failed_recving) == ({"p"}, {"d"}, {"d"})
    assert worker.get_transfer_results().finished_recving == set()
    worker.start_load_kv(StepMetadata(pulls=[PULL]))
    stats = worker.get_kv_connector_stats()
    assert stats is not None
    assert stats.data["loads_done"] == 1


@pytest.mark.parametrize("how", ["broken", "unregistered"])
def test_without_a_runtime_loads_fail_and_kept_blocks_are_free(how: str) -> None:
    worker, runtime = make_worker()
    if how == "broken":
        runtime.broken = True
    else:
        worker.unregister_kv_caches()
    worker.start_load_kv(StepMetadata(kept=[KEPT], pulls=[PULL]))
    results = worker.get_transfer_results()
    assert (results.finished_sending, results.finished_recving, results.failed_recving) == ({"p"}, {"d"}, {"d"})
    assert worker.get_transfer_results().finished_sending == set(), "reported once"


def test_registering_again_ends_the_first_runtime() -> None:
    worker, first = make_worker()
    model = Model()
    worker.register_kv_caches(model.allocate(model.cache_config()))
    second = NotedRuntime.made[-1]
    assert (first.closed, second.started, second.closed) == (1, 1, 0)
    assert first.identity.incarnation != second.identity.incarnation
    assert first.engine is not second.engine


def closings() -> list[int]:
    """How often each runtime made so far was closed."""
    return [runtime.closed for runtime in NotedRuntime.made]


def test_sleep_hooks_and_shutdown_are_idempotent() -> None:
    worker, _ = make_worker()
    worker.restore_kv_caches()
    assert closings() == [0], "nothing to restore"
    for _ in range(2):
        worker.unregister_kv_caches()
    assert closings() == [1]
    worker.restore_kv_caches()
    assert closings() == [1, 0]
    for _ in range(2):
        worker.shutdown()
    assert closings() == [1, 1]


def test_an_engine_that_was_never_used_is_closed() -> None:
    model = Model()
    worker = WorkerSide(stub_vllm_config(model), model.cache_config(), SETTINGS)
    engine: Any = worker._engine
    worker.shutdown()
    assert isinstance(engine, NotedEngine)
    assert engine.closed == 1


def test_what_cannot_work_stops_the_start() -> None:
    model = Model()
    stub = stub_vllm_config(model)
    stub.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ConfigError, match="decode_context_parallel_size=2"):
        WorkerSide(stub, model.cache_config(), SETTINGS)
    with pytest.raises(ConfigError, match="received nothing"):
        WorkerSide(stub_vllm_config(model), model.cache_config(), SETTINGS).register_kv_caches({})


def test_device_memory_gets_its_own_tail_clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "ForwardGate", lambda device: SimpleNamespace(is_needed=True, device=device))
    direct = HeteroTPConfig.from_extra_config({"mooncake_protocol": "tcp", "transfer_mode": "direct"})
    _, runtime = make_worker(settings=direct)
    assert isinstance(runtime.options["clear_tails"], DeviceTails)
    assert runtime.config.staging is None


def test_staging_settings_reach_the_runtime() -> None:
    settings = {"mooncake_protocol": "tcp", "transfer_mode": "staged", "staging_mib": 17, "staging_slot_mib": 4}
    _, runtime = make_worker(settings=HeteroTPConfig.from_extra_config(settings))
    assert runtime.config.transfer_mode is Mode.STAGED
    assert runtime.config.staging == RingSize(slot_bytes=4 << 20, slots=4)
    assert runtime.options["clear_tails"] is None, "the executor clears them"


def test_ranks_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "get_tensor_model_parallel_rank", lambda: 3)
    monkeypatch.setattr(worker_module, "get_pp_group", lambda: SimpleNamespace(rank_in_group=1))
    stub = stub_vllm_config(Model())
    stub.parallel_config.data_parallel_index = 5
    assert own_rank(stub, SETTINGS) == Rank(dp=5, pp=1, tp=3)
    assert published_host() == "10.0.0.5"


def test_declared_encodings_reach_the_table() -> None:
    settings = HeteroTPConfig.from_extra_config({"backend_encodings": {"OURS": "packed"}})
    _, runtime = make_worker(settings=settings)
    assert runtime.table.declared_encodings == {"OURS": "packed"}
