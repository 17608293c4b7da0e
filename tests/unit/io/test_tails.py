from __future__ import annotations

import numpy as np
import pytest

from mooncake_hetero_tp.core.binding import tail_views
from mooncake_hetero_tp.io.tails import TailClearer
from mooncake_hetero_tp.native import reference
from mooncake_hetero_tp.native.executor import Executor, host_executor
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.oracle_memory import Arena, Layer, SideSpec, build_rank

LAYERS = [Layer("a", units=4, channels=8), Layer("b", units=4, channels=8)]


@pytest.mark.parametrize("executor", [host_executor(), reference], ids=["library", "reference"])
@pytest.mark.parametrize("layout,encoding", [("LBHNC", "packed"), ("BLNHC", "packed"), ("LBHNC", "cpu")])
def test_only_what_lies_past_the_end_is_cleared(layout: str, encoding: str, executor: Executor) -> None:
    """vllm#51527, vllm#54875: a page full of 0xAB, 70 tokens, blocks of 64: tokens 70..127 become zero."""
    spec = SideSpec(layout=layout, encoding=encoding, block_size=64, kernel_block_size=32, num_blocks=6, pad_bytes=0)
    if layout != "LBHNC":
        spec = SideSpec(layout=layout, encoding=encoding, block_size=64, kernel_block_size=64, num_blocks=6)
    rank = build_rank(spec, LAYERS, 2, Rank(), Arena(1 << 20))
    blocks = [np.array([3, 1]), np.array([1])]
    rank.memory[:] = 0xAB
    TailClearer(rank.table, executor)(tail_views(rank.table, [TokenRange(0, 70), TokenRange(0, 0)], blocks))

    touched = np.full_like(rank.memory, 0xAB)
    marks = np.zeros_like(rank.memory)
    rank.fill(blocks, [TokenRange(70, 128), TokenRange(0, 0)], marks)
    probe = np.full_like(rank.memory, 0xFF)
    rank.fill(blocks, [TokenRange(70, 128), TokenRange(0, 0)], probe)
    touched[marks == probe] = 0
    cleared = rank.memory == 0
    assert cleared.sum() == 58 * sum(2 * layer.units * layer.channels * 2 for layer in LAYERS)
    assert np.array_equal(rank.memory, touched)


def test_no_tails_change_nothing() -> None:
    TailClearer(build_rank(SideSpec(), LAYERS, 2, Rank(), Arena(1 << 20)).table, host_executor())([])
