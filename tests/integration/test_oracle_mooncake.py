"""The value oracle over two real Mooncake engines on TCP, in one process: a read by the peer's addresses."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from mooncake_hetero_tp.core import cover
from mooncake_hetero_tp.core.binding import Descriptors
from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.io.engine import MooncakeEngine
from mooncake_hetero_tp.io.transfer import Deadline
from mooncake_hetero_tp.types import TokenRange
from tests.hybrid_oracle import build_hybrid_pulls, draw_hybrid
from tests.oracle import Case, Reader, draw_case, run_case, run_pulls
from tests.oracle_memory import VLLM_LAYOUTS, Arena, Layer, SideSpec
from tests.staged import StagedTally, run_staged, run_staged_pulls

FIRST_SEED, RANDOM_CASES, CHUNKS = 100_000, 200, 4
STAGED_CASES = HYBRID_CASES = 60
READ_S = 60.0


class MooncakeReader:
    """Two engines, each with one registered arena: the second reads from the first."""

    def __init__(self) -> None:
        self.arenas = (Arena(8 << 20), Arena(4 << 20))
        self._serving = MooncakeEngine("127.0.0.1", lease_s=READ_S, protocol="tcp", reads=False)
        self._reading = MooncakeEngine("127.0.0.1", lease_s=READ_S, protocol="tcp", serves=False)
        for engine, arena in zip((self._serving, self._reading), self.arenas, strict=True):
            engine.register([Buffer(arena.address, arena.memory.size)])

    def read(self, descriptors: Descriptors) -> None:
        deadline = Deadline(time.monotonic() + READ_S)
        tally = self._reading.read(self._serving.transport_session, descriptors, deadline=deadline)
        assert (tally.bytes, tally.descriptors) == (descriptors.bytes, descriptors.count)

    def close(self) -> None:
        self._reading.close()
        self._serving.close()


@pytest.fixture(scope="module")
def mooncake() -> Iterator[MooncakeReader]:
    reader = MooncakeReader()  # not skipped where Mooncake is missing: it is the proof
    yield reader
    reader.close()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_hand_overs_over_tcp_equal_the_oracle(chunk: int, mooncake: MooncakeReader) -> None:
    size = RANDOM_CASES // CHUNKS
    for seed in range(FIRST_SEED + chunk * size, FIRST_SEED + (chunk + 1) * size):
        run_case(draw_case(seed), mooncake.arenas, mooncake.read, most_ranks=1)


def test_every_layout_pair_over_tcp(mooncake: MooncakeReader) -> None:
    layers = tuple(Layer(f"layers.{i}.attn", "attention", 4, 4) for i in range(2))
    for seed, producer in enumerate(VLLM_LAYOUTS):
        for consumer in VLLM_LAYOUTS:
            case = Case(SideSpec(layout=producer), SideSpec(tp=2, layout=consumer), layers, 2, TokenRange(0, 7), seed)
            assert run_case(case, mooncake.arenas, mooncake.read).ranks == 2


def test_staged_hand_overs_over_tcp_equal_the_oracle(mooncake: MooncakeReader) -> None:
    """Slots lie in the registered arenas, one descriptor a chunk."""
    tally = StagedTally()
    for seed in range(FIRST_SEED, FIRST_SEED + STAGED_CASES):
        run_staged(draw_case(seed), mooncake.arenas, mooncake.read, tally, most_ranks=1)
    assert tally.ranks == STAGED_CASES


def test_a_flipped_byte_is_seen(mooncake: MooncakeReader) -> None:
    """The comparison is by content: one byte changed on the way fails the case."""

    def read_and_flip(descriptors: Descriptors) -> None:
        mooncake.read(descriptors)
        mooncake.arenas[1].memory[int(descriptors.dst[0]) - mooncake.arenas[1].address] ^= 1

    read: Reader = read_and_flip
    layers = (Layer("layers.0.attn", "attention", 2, 4),)
    case = Case(SideSpec(), SideSpec(tp=2), layers, 2, TokenRange(0, 7))
    with pytest.raises(AssertionError, match="1 bytes differ"):
        run_case(case, mooncake.arenas, read, most_ranks=1)


def test_hybrid_models_over_tcp_equal_the_oracle(mooncake: MooncakeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several groups, state slots, latents and scales; every replica shares. Direct reads, then packed ones."""
    monkeypatch.setattr(cover, "SHARE_BYTES", 64)
    for seed in range(FIRST_SEED, FIRST_SEED + HYBRID_CASES):
        pulls = build_hybrid_pulls(draw_hybrid(seed), mooncake.arenas, most_ranks=1)
        run_pulls(pulls, mooncake.read)
    tally = StagedTally()
    for seed in range(FIRST_SEED + HYBRID_CASES, FIRST_SEED + 2 * HYBRID_CASES):
        pulls = build_hybrid_pulls(draw_hybrid(seed), mooncake.arenas, most_ranks=1)
        run_staged_pulls(pulls, random.Random(seed), mooncake.arenas, mooncake.read, tally)
    assert tally.ranks == HYBRID_CASES
