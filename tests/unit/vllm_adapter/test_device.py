"""device: tails through the region's strides, and readiness only after the event. On a CPU, and on a GPU if marked."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from mooncake_hetero_tp.core.binding import TailView
from mooncake_hetero_tp.core.regions import Axis, Region, Span
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.work import Handover
from mooncake_hetero_tp.types import RequestId, TransferId
from mooncake_hetero_tp.vllm_adapter.device import DeviceTails, ForwardGate, permit_amx

UNITS, TOKENS, WIDTH, PAGES, ITEM = 2, 4, 3, 5, 2


def region_in(memory: torch.Tensor, offset: int) -> Region:
    """Pages `[unit][channel][token]`: the transposed half of CPU attention."""
    return Region(
        layer="layer",
        component="k",
        group=0,
        base=memory.data_ptr() + offset,
        block_stride=64,
        num_blocks=PAGES,
        spans=(Span(0, 0, UNITS),),
        unit=Axis(UNITS, TOKENS * WIDTH * ITEM),
        token=Axis(TOKENS, ITEM),
        channel=Axis(WIDTH, TOKENS * ITEM),
        item_bytes=ITEM,
        dtype="float16",
        encoding="halves.transposed_k",
    )


def check_tails(place: str) -> None:
    memory = torch.full((512,), 0xAB, dtype=torch.uint8, device=place)
    clear = DeviceTails([memory[32:64], memory])
    clear([TailView(region_in(memory, 16), 3, 1), TailView(region_in(memory, 16), 1, 4)])
    expected = torch.full((512,), 0xAB, dtype=torch.uint8)
    for unit in range(UNITS):
        for channel in range(WIDTH):
            start = 16 + 3 * 64 + (unit * WIDTH + channel) * TOKENS * ITEM
            expected[start + ITEM : start + TOKENS * ITEM] = 0
    assert torch.equal(memory.cpu(), expected)


def test_tails_are_zero_and_nothing_else_is_touched() -> None:
    check_tails("cpu")


@pytest.mark.gpu
def test_tails_on_a_gpu() -> None:
    check_tails("cuda")


def test_a_tail_outside_the_tensors_is_refused() -> None:
    memory, other = torch.zeros(512, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(LocalUsageError, match="layer/k: page 3 lies in no registered tensor"):
        DeviceTails([other])([TailView(region_in(memory, 0), 3, 1)])


def handover(name: str) -> Handover:
    return Handover(TransferId(f"t-{name}"), RequestId(name))


def test_a_handover_passes_only_after_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang#33970: the sender never waited for the event of the forward that wrote the blocks."""
    events: list[Any] = []

    class FakeEvent:
        def __init__(self, kind: str) -> None:
            assert kind == "cuda"
            self.recorded = self.done = False
            events.append(self)

        def record(self) -> None:
            self.recorded = True

        def query(self) -> bool:
            return self.done

    monkeypatch.setattr(torch, "Event", FakeEvent)
    gate = ForwardGate(torch.device("cuda"))
    assert gate.is_needed
    gate.wait_for([handover("a"), handover("b")])
    gate.wait_for([handover("c")])
    assert [event.recorded for event in events] == [True, True]
    assert gate.passed() == []
    events[1].done = True
    assert gate.passed() == [], "events complete in order"
    events[0].done = True
    assert gate.passed() == [handover("a"), handover("b"), handover("c")]
    assert gate.passed() == []


def test_a_cpu_needs_no_gate() -> None:
    gate = ForwardGate(torch.device("cpu"))
    assert not gate.is_needed
    assert gate.passed() == []


@pytest.mark.parametrize("supported,granted,warned", [(True, True, False), (True, False, True), (False, False, False)])
def test_amx_is_asked_for_where_the_cpu_has_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, supported: bool, granted: bool, warned: bool
) -> None:
    asked: list[int] = []

    def init() -> bool:
        asked.append(1)
        return granted

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: supported)
    monkeypatch.setattr(torch.cpu, "_init_amx", init)
    with caplog.at_level(logging.WARNING):
        permit_amx()
    assert bool(asked) == supported
    assert ("SIGILL" in caplog.text) == warned


def test_a_torch_without_amx_functions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "_init_amx")
    permit_amx()


@pytest.mark.gpu
def test_a_real_event_passes_after_the_work_before_it() -> None:
    gate = ForwardGate(torch.device("cuda"))
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
    gate.wait_for([handover("a")])
    assert gate.passed() == []
    torch.cuda.synchronize()
    assert gate.passed() == [handover("a")]
