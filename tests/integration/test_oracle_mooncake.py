"""The value oracle over two real Mooncake engines on TCP, in one process: a read by the peer's addresses."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from mooncake_hetero_tp.core.binding import Descriptors, batches
from mooncake_hetero_tp.types import TokenRange
from tests.oracle import Case, Reader, draw_case, run_case
from tests.oracle_memory import VLLM_LAYOUTS, Arena, Layer, SideSpec

FIRST_SEED, RANDOM_CASES, CHUNKS = 100_000, 200, 4
BATCH_DESCRIPTORS, BATCH_BYTES = 1_000, 8 << 20
"""2,500 reads in flight kill a Mooncake TCP session for good; 2,000 pass."""


class MooncakeReader:
    """Two registered arenas and the engines that own them."""

    def __init__(self, engines: tuple[Any, Any], arenas: tuple[Arena, Arena]) -> None:
        self.arenas = arenas
        self._engines = engines
        self._session = f"127.0.0.1:{engines[0].get_rpc_port()}"
        for engine, arena in zip(engines, arenas, strict=True):
            assert engine.batch_register_memory([arena.address], [arena.memory.size]) == 0

    def read(self, descriptors: Descriptors) -> None:
        for part in batches(descriptors, BATCH_DESCRIPTORS, BATCH_BYTES):
            status = self._engines[1].batch_transfer_sync_read(
                self._session, part.dst.tolist(), part.src.tolist(), part.length.tolist()
            )
            assert status == 0, f"Mooncake returned {status} for a batch of {part.count} descriptors"

    def close(self) -> None:
        for engine, arena in zip(self._engines, self.arenas, strict=True):
            assert engine.batch_unregister_memory([arena.address]) == 0


@pytest.fixture(scope="module")
def mooncake() -> Iterator[MooncakeReader]:
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    engine_module = importlib.import_module("mooncake.engine")  # not skipped where missing: it is the proof
    engines = (engine_module.TransferEngine(), engine_module.TransferEngine())
    for engine in engines:
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    reader = MooncakeReader(engines, (Arena(8 << 20), Arena(4 << 20)))
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
