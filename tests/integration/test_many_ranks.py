"""More ranks than a pair over loopback: unlike stages and tensor ranks on both sides, replicas that share a pull.

Real threads, ZMQ and HTTP; loopback engines, for a Mooncake engine takes a second to close and there are a dozen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mooncake_hetero_tp.core import cover
from mooncake_hetero_tp.core.cost import Mode
from mooncake_hetero_tp.io.staging import RingSize
from mooncake_hetero_tp.testing import LoopbackEngine, LoopbackFabric
from tests.handovers import CONSUMER, PRODUCER, Handovers
from tests.oracle_memory import Layer

pytestmark = pytest.mark.usefixtures("leaves_nothing")

RING = RingSize(slot_bytes=2048, slots=3)
WAYS = [pytest.param({"transfer_mode": mode, "staging": RING}, id=mode) for mode in (Mode.DIRECT, Mode.STAGED)]
EIGHT = tuple(Layer(f"model.layers.{number}", units=4, channels=8) for number in range(8))
LATENTS = tuple(Layer(f"model.layers.{number}", "latent", channels=8) for number in range(8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layers", [EIGHT, EIGHT[:3]], ids=["eight layers", "a stage without any"])
def test_stages_and_tensor_ranks_unlike_on_both_sides(layers: tuple[Layer, ...], way: dict[str, Any]) -> None:
    """PP4 TP1 -> PP2 TP2 (vllm#56033, sglang#32270): each rank is told of the end, read from or not, with layers or not."""
    fabric = LoopbackFabric()
    sides = replace(PRODUCER, pp=4), replace(CONSUMER, pp=2)
    handovers = Handovers(lambda _: LoopbackEngine(fabric), producer=sides[0], consumer=sides[1], layers=layers, **way)
    load = handovers.load("stages", 27)
    with handovers.pair as pair:
        pair.keep(load)
        pair.pull(load)
        assert pair.wait_loaded(load)
        pair.release(load)
        pair.wait_freed(load)
        assert len(pair.ended.sending) == 4
    assert handovers.wrong_bytes(load) == 0


@pytest.mark.parametrize("way", WAYS)
def test_replicas_share_a_pull(way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents that four ranks hold whole, into one: a quarter from each."""
    monkeypatch.setattr(cover, "SHARE_BYTES", 1)
    fabric = LoopbackFabric()
    sides = replace(PRODUCER, tp=4), replace(CONSUMER, tp=1)
    handovers = Handovers(lambda _: LoopbackEngine(fabric), producer=sides[0], consumer=sides[1], layers=LATENTS, **way)
    load = handovers.load("latents", 27)
    with handovers.pair as pair:
        pair.keep(load)
        pair.pull(load)
        assert pair.wait_loaded(load)
        pair.release(load)
        pair.wait_freed(load)
        served = [runtime.stats() for runtime in pair.producers.values()]
    assert handovers.wrong_bytes(load) == 0
    if way["transfer_mode"] is Mode.STAGED:
        assert all(taken.chunks_packed for taken in served)
