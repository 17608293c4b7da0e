"""The hybrid row's models: valid, of one size, and what a pull brings is where the check looks for it."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_hetero_tp.cli.model_case import aligned_block
from mooncake_hetero_tp.core.tables import validate_table
from tests.benchmarks.hybrid import TOKENS, dense_request, hybrid_request
from tests.benchmarks.hybrids import (
    BLOCK,
    HYBRID,
    KV_HEADS,
    TOKEN_BYTES,
    Hybrid,
    blocks_needed,
    pull_bytes,
    state_bytes,
)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_tables_are_valid_and_a_page_just_holds_a_state(tp: int) -> None:
    rank = Hybrid(tp, tp - 1, blocks_needed(TOKENS), 1 << 20)
    validate_table(rank.table())
    assert aligned_block(16, 16, KV_HEADS // tp * TOKEN_BYTES, state_bytes(tp)) == BLOCK


def test_both_models_pull_as_many_bytes() -> None:
    hybrid, dense = hybrid_request().arrays(proven=True), dense_request().arrays(proven=True)
    assert hybrid.bytes == pull_bytes(TOKENS, 2)
    assert hybrid.bytes == pytest.approx(dense.bytes, rel=0.01)


def test_the_check_sees_one_wrong_byte() -> None:
    """Read with the plan's own descriptors, straight from one memory into the other."""
    source, cache = HYBRID.open("producer"), HYBRID.open("consumer")
    source.fill()
    found = hybrid_request()._replace(
        producer=source.table,
        consumer=cache.table,
        tokens=list(HYBRID.wanted(HYBRID.lists("consumer")[-1])[0]),
        blocks=(HYBRID.lists("producer"), HYBRID.lists("consumer")),
    )
    runs = found.arrays()
    for src, dst, length in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        start, into = src - source.address, dst - cache.address
        cache.memory[into : into + length] = source.memory[start : start + length]
    assert runs.bytes == HYBRID.pull_bytes
    assert HYBRID.wrong_bytes(cache) == 0
    cache.memory[int(runs.dst[-1]) - cache.address] ^= np.uint8(1)
    assert HYBRID.wrong_bytes(cache) == 1
