"""Which rings and which executor a worker gets, by the device of its cache."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mooncake_hetero_tp.config import HeteroTPConfig
from mooncake_hetero_tp.core.copy_table import make_table
from mooncake_hetero_tp.errors import NativeError
from mooncake_hetero_tp.io.staging import RingSize, host_ring
from mooncake_hetero_tp.native.executor import host_executor
from mooncake_hetero_tp.vllm_adapter import staging as staging_module
from mooncake_hetero_tp.vllm_adapter.staging import CudaExecutor, device_ring, staging_for

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def settings(**extra: Any) -> HeteroTPConfig:
    return HeteroTPConfig.from_extra_config(extra)


def test_host_memory_is_staged_by_the_host() -> None:
    found = staging_for(settings(staging_mib=20, staging_slot_mib=8), CPU)
    assert found is not None
    assert found.size == RingSize(slot_bytes=8 << 20, slots=2)
    assert found.make_ring is host_ring
    assert found.executor is host_executor()


@pytest.mark.parametrize("extra", [{"transfer_mode": "direct"}, {"staging_mib": 0}])
def test_no_rings_where_nothing_is_staged(extra: dict[str, Any]) -> None:
    assert staging_for(settings(**extra), CPU) is None


def test_device_memory_is_staged_only_where_that_is_asked_for() -> None:
    assert staging_for(settings(), CUDA) is None
    assert staging_for(settings(transfer_mode="staged"), torch.device("xpu", 0)) is None


def test_kernels_that_cannot_be_used_mean_direct_reads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NativeError("no driver")

    monkeypatch.setattr(staging_module, "CudaExecutor", refuse)
    assert staging_for(settings(transfer_mode="staged"), CUDA) is None
    assert "reads are direct, because the CUDA kernels cannot be used: no driver" in caplog.text


def test_kernels_get_the_bound_on_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(staging_module, "CudaExecutor", lambda device, **limits: made.append((device, limits)))
    found = staging_for(settings(transfer_mode="staged", staging_max_sms=7), CUDA)
    assert found is not None
    assert made == [(CUDA, {"max_sms": 7, "max_calls": 10 + 8})]


class NotedCopies:
    """Stands in for `CudaCopies`: what was enqueued, and which calls were waited for."""

    def __init__(self, device: int, **limits: int) -> None:
        self.device, self.limits = device, limits
        self.calls: list[tuple[Any, ...]] = []
        self.waited: list[int] = []

    def gather(self, *args: Any, **options: Any) -> int:
        return self._note("gather", *args, *options.values())

    def scatter(self, *args: Any, **options: Any) -> int:
        return self._note("scatter", *args, *options.values())

    def clear(self, *args: Any) -> int:
        return self._note("clear", *args)

    def _note(self, *call: Any) -> int:
        self.calls.append(call)
        return len(self.calls)

    def wait(self, ticket: int) -> None:
        self.waited.append(ticket)


def test_a_call_is_enqueued_on_the_stream_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=77, device=CUDA)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: stream)
    monkeypatch.setattr(staging_module, "CudaCopies", NotedCopies)
    executor = CudaExecutor(CUDA, max_sms=5, max_calls=3)
    copies: Any = executor._copies
    assert (copies.device, copies.limits["max_sms"], copies.limits["max_calls"]) == (0, 5, 3)
    table, ranges = make_table([], 0), [(1, 2)]
    executor.gather(table, 100, ranges)
    executor.scatter(table, 200, ranges, check_overlap=True)
    executor.clear(table, ranges)
    assert copies.calls == [
        ("gather", table, 100, ranges, 77, False),
        ("scatter", table, 200, ranges, 77, True),
        ("clear", table, ranges, 77),
    ]
    assert copies.waited == [1, 2, 3]


def test_a_ring_in_device_memory_lives_until_it_is_closed() -> None:
    """On the CPU device here: the tensor's memory is the ring's."""
    ring = device_ring(CPU)(RingSize(slot_bytes=4096, slots=2))
    assert ring.buffer.length_bytes == RingSize(4096, 2).bytes
    assert ring.address_of(1) - ring.address_of(0) == 4096
    memory = (ctypes.c_uint8 * 8).from_address(ring.address_of(0))
    assert bytes(memory) == bytes(8)
    ring.close()
