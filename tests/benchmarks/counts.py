"""What a staged pull asks of the engine, and from which piece size on it does not pay. Nothing is moved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mooncake_hetero_tp.core.binding import bind
from mooncake_hetero_tp.core.chunks import cut_chunks
from mooncake_hetero_tp.core.plan import plan_pulls
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.benchmarks.bind import WrongBytes
from tests.benchmarks.caches import MIB
from tests.benchmarks.rows import Report, Row, Sample
from tests.tables import DST, Dense

QWEN3_8B = Dense(heads=8, layers=36, head_size=128, item=2, tokens=16, blocks=513)
TOKENS = TokenRange(0, 8_192)
DIRECT = 18_432
"""One for each layer and block."""
FEWER = 900
SLOTS_MIB = (32, 16)
"""The size that the target names, and the default setting."""


def row_of(slot_mib: int) -> Row:
    return Row(
        name=f"descriptors_slots_of_{slot_mib}_mib",
        sizes={
            "model": "Qwen3-8B",
            "layers": 36,
            "kv_heads": 8,
            "head_size": 128,
            "dtype": "bfloat16",
            "tokens": TOKENS.count,
            "block_size": 16,
            "tp": "1 -> 2",
            "slot_bytes": slot_mib * MIB,
        },
        unit="descriptors",
        baseline="the same request read directly, random blocks",
        target=f"at least {FEWER} times fewer" if slot_mib == SLOTS_MIB[0] else None,
    )


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    return [row_of(slot_mib) for slot_mib in SLOTS_MIB]


def measure(report: Report) -> None:
    """Fill in all rows.

    Raises:
        WrongBytes: a direct read of this request does not take the descriptors that everybody counts.
    """
    producer, consumer = QWEN3_8B.table(), replace(QWEN3_8B, tp=2, rank=1, base=DST).table()
    plan = plan_pulls(consumer, {Rank(): producer})[Rank()]
    rng = np.random.default_rng(0)
    blocks = [1 + 2 * rng.permutation(256), 2 + 2 * rng.permutation(256)]
    order = np.stack(blocks, axis=1).ravel()  # odd and even ids in turns: no two neighbours in a row
    direct = bind(plan, [TOKENS], [order], [order[::-1]], null_block=0)
    if direct.count != DIRECT:
        raise WrongBytes(f"read directly it takes {direct.count} descriptors, expected {DIRECT}")
    for slot_mib in SLOTS_MIB:
        chunks = cut_chunks(plan, [TOKENS], slot_mib * MIB)
        report.add(
            row_of(slot_mib).measured(
                Sample.of([float(chunks.reads)]),
                Sample.of([float(direct.count)]),
                met=_is_few if slot_mib == SLOTS_MIB[0] else None,
                note=f"{direct.count / chunks.reads:,.0f} times fewer; {chunks.count} chunks",
            )
        )


def _is_few(row: Row) -> bool | None:
    return None if row.ratio is None else row.ratio <= 1 / FEWER
