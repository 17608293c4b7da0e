"""Two engines of real connector objects in one process: real hooks, HTTP, ZMQ and allocation; loopback transport.

What vLLM's scheduler and workers do around the hooks is reduced to `Engine.step`.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from mooncake_hetero_tp import connector as connector_module
from mooncake_hetero_tp.connector import MooncakeHeteroTPConnector
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.io.release import ReleaseClient
from mooncake_hetero_tp.io.runtime import RuntimeConfig
from mooncake_hetero_tp.testing import LoopbackEngine, LoopbackFabric
from mooncake_hetero_tp.vllm_adapter import environment
from mooncake_hetero_tp.vllm_adapter import worker as worker_module
from mooncake_hetero_tp.vllm_adapter.probe import build_table
from tests.unit.vllm_adapter.doubles import Model, stub_vllm_config
from tests.unit.vllm_adapter.requests import Blocks

WITHIN_S = 20.0


class RankEngine:
    """All ranks of one vLLM engine: scheduler connector, worker connectors, KV memory."""

    def __init__(self, model: Callable[[int], Model], tp_size: int, role: str, name: str, bench: Bench) -> None:
        self.models = [model(rank) for rank in range(tp_size)]
        self.caches = [rank.cache_config() for rank in self.models]
        self.views = [rank.allocate(cache) for rank, cache in zip(self.models, self.caches, strict=True)]
        configs = [stub_vllm_config(rank, role, name) for rank in self.models]
        self.scheduler = MooncakeHeteroTPConnector(configs[0], KVConnectorRole.SCHEDULER, self.caches[0])
        self.workers = []
        for rank, config in enumerate(configs):
            bench.place = (rank, tp_size)
            worker = MooncakeHeteroTPConnector(config, KVConnectorRole.WORKER, self.caches[rank])
            worker.register_kv_caches(self.views[rank])
            self.workers.append(worker)
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler, tp_size)

    def tables(self) -> list[RankTable]:
        return [
            build_table(rank.engine(cache), views)
            for rank, cache, views in zip(self.models, self.caches, self.views, strict=True)
        ]

    def step(self) -> KVConnectorOutput:
        """One engine step: metadata out, results in, added up over the ranks as vLLM does."""
        metadata = self.scheduler.build_connector_meta(None)
        outputs: list[ModelRunnerOutput | None] = []
        for worker in self.workers:
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            worker.wait_for_save()
            results = worker.get_transfer_results(set())
            worker.clear_connector_metadata()
            outputs.append(
                ModelRunnerOutput(
                    req_ids=[],
                    req_id_to_index={},
                    kv_connector_output=KVConnectorOutput(
                        finished_sending=results.finished_sending or None,
                        finished_recving=results.finished_recving or None,
                        failed_recving=results.failed_recving,
                        kv_connector_stats=worker.get_kv_connector_stats(),
                    ),
                )
            )
        combined = self._aggregator.aggregate(outputs)
        assert combined is not None
        output = combined.kv_connector_output
        assert output is not None
        self.scheduler.update_connector_output(output)
        return output

    def shutdown(self) -> None:
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()


class Bench:
    """A producer and a consumer engine, and the loopback fabric between them."""

    def __init__(self) -> None:
        self.fabric = LoopbackFabric()
        self.transports: list[LoopbackEngine] = []
        self.place = (0, 1)
        self.engines: list[RankEngine] = []
        self.stats: dict[str, int] = {}

    def add(self, model: Callable[[int], Model], tp_size: int, role: str, name: str) -> RankEngine:
        engine = RankEngine(model, tp_size, role, name, self)
        self.engines.append(engine)
        return engine

    def until(self, done: Callable[[KVConnectorOutput], bool], *engines: RankEngine) -> KVConnectorOutput:
        """Step these engines until one of their outputs satisfies `done`."""
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            for engine in engines:
                output = engine.step()
                self._count(output)
                if done(output):
                    return output
            time.sleep(0.005)
        raise AssertionError(f"not within {WITHIN_S} s")

    def _count(self, output: KVConnectorOutput) -> None:
        if output.kv_connector_stats is not None:
            for name, amount in output.kv_connector_stats.data.items():
                if isinstance(amount, int):
                    self.stats[name] = self.stats.get(name, 0) + amount


@contextmanager
def connector_bench(patch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench whose workers get loopback engines and a bootstrap port of their own; everything ends with it."""
    bench = Bench()

    def transport(*_: Any, **__: Any) -> LoopbackEngine:
        engine = LoopbackEngine(bench.fabric)
        bench.transports.append(engine)
        return engine

    patch.setattr(worker_module, "MooncakeEngine", transport)
    patch.setattr(worker_module, "get_tensor_model_parallel_rank", lambda: bench.place[0])
    patch.setattr(worker_module, "get_tensor_model_parallel_world_size", lambda: bench.place[1])
    patch.setattr(worker_module, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    patch.setattr(worker_module, "RuntimeConfig", functools.partial(RuntimeConfig, close_timeout_s=0.3))
    patch.setattr(connector_module, "ReleaseClient", functools.partial(ReleaseClient, close_timeout_s=0.3))
    patch.setenv("VLLM_HOST_IP", "127.0.0.1")
    patch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", str(_free_port()))
    assert environment.read_environment().bootstrap_port != 8998
    try:
        yield bench
    finally:
        for engine in bench.engines:
            engine.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def region_values(table: RankTable, index: int, views: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[kernel page, unit, token, channel]` of one region, a view into the engine's memory."""
    region = table.regions[index]
    storage = views[region.layer].untyped_storage()
    item = region.item_bytes
    flat = torch.empty(0, dtype=views[region.layer].dtype).set_(storage)
    axes = (region.unit, region.token, region.channel)
    values: torch.Tensor = flat.as_strided(
        (region.num_blocks, *(axis.count for axis in axes)),
        (region.block_stride // item, *(axis.stride // item for axis in axes)),
        (region.base - storage.data_ptr()) // item,
    )
    return values


def token_values(table: RankTable, index: int, blocks: Sequence[int], tokens: int) -> torch.Tensor:
    """What the oracle says region `index` holds for a request: `[token, unit, channel]`, exact in float32."""
    region = table.regions[index]
    (span,) = region.spans
    layer = sum(ord(letter) for letter in region.layer + region.component)
    token, unit, channel = torch.meshgrid(
        torch.arange(tokens),
        torch.arange(span.global_start, span.global_start + span.count),
        torch.arange(region.channel.count),
        indexing="ij",
    )
    return (layer * 100003 + token * 1009 + unit * 101 + channel + 1).remainder(1 << 22).to(torch.float32)


def write_request(engine: RankEngine, blocks: Sequence[int], tokens: int) -> None:
    """Fill the request's pages with the oracle's values, as a prefill would."""
    for table, views in zip(engine.tables(), engine.views, strict=True):
        for index in range(len(table.regions)):
            pages = _pages(table, index, blocks, tokens)
            values = region_values(table, index, views)
            expected = token_values(table, index, blocks, tokens)
            for token, (page, offset) in enumerate(pages):
                values[page, :, offset] = expected[token]


def assert_request(engine: RankEngine, blocks: Sequence[int], tokens: int, *, first: int = 0) -> None:
    """Tokens `[first, tokens)` hold the oracle's values and the rest of the last block is zero."""
    for table, views in zip(engine.tables(), engine.views, strict=True):
        for index, region in enumerate(table.regions):
            size = table.groups[region.group].block_size
            values = region_values(table, index, views)
            expected = token_values(table, index, blocks, tokens)
            padded = -(-tokens // size) * size
            for token, (page, offset) in enumerate(_pages(table, index, blocks, padded)):
                if token < first:
                    continue
                wanted = expected[token] if token < tokens else torch.zeros_like(expected[0])
                assert torch.equal(values[page, :, offset], wanted), (region.name, token)


def _pages(table: RankTable, index: int, blocks: Sequence[int], tokens: int) -> list[tuple[int, int]]:
    """(kernel page, offset) of each token."""
    region = table.regions[index]
    group, kernel = table.groups[region.group], region.token.count
    return [
        (
            blocks[token // group.block_size] * group.kernel_pages + token % group.block_size // kernel,
            token % kernel,
        )
        for token in range(tokens)
    ]


def admit(engine: RankEngine, request: Request, blocks: Sequence[int], *, local: int = 0) -> int:
    """What vLLM's scheduler does when it admits a request; returns the external tokens."""
    engine.scheduler.on_new_request(request)
    count, load_async = engine.scheduler.get_num_new_matched_tokens(request, local)
    assert load_async == bool(count)
    engine.scheduler.update_state_after_alloc(request, Blocks(blocks), count or 0)
    return count or 0
