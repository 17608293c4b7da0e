"""Planning one long request: our `bind` beside the planner of vLLM's own MooncakeConnector, in one process.

80 layers, 8 KV heads, bf16, head size 128, block 16, 32,768 tokens, TP 1 -> TP 2, LBHNC: 163,840 descriptors
of 32 KiB. Both start from block ids and end with the three arrays that the engine call takes, and both must
give the same descriptors. What a handshake costs once stands beside them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors, batches, bind
from mooncake_hetero_tp.core.plan import plan_pulls, prove
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.io.reading import EngineLimits
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.benchmarks.rows import Report, Row, interleaved
from tests.oracle_memory import Ints
from tests.tables import DST, Dense

PRODUCER = Dense(heads=8, layers=80, tokens=16, head_size=128, item=2, blocks=4096)
CONSUMER = replace(PRODUCER, tp=2, rank=1, base=DST)
TOKENS = TokenRange(0, 32_768)
REPEATS = 15
TARGET = 0.2
"""At least five times as fast as vLLM's planner (`ratio` is value over baseline)."""
SIZES: dict[str, int | str] = {
    "layers": 80,
    "kv_heads": 8,
    "head_size": 128,
    "block_size": 16,
    "tokens": TOKENS.count,
    "tp": "1 -> 2",
    "dtype": "bfloat16",
}

BASELINE = "vLLM MooncakeConnector, _build_transfer_params"
RANDOM = Row(
    name="plan_random_blocks",
    sizes={**SIZES, "block_ids": "random"},
    unit="ms",
    baseline=BASELINE,
    target=f"ratio <= {TARGET} (5 times as fast)",
    note="plan, bind, arrays; planned afresh each time, though a plan serves all requests of a pair",
)
CONSECUTIVE = replace(RANDOM, name="plan_consecutive_blocks", sizes={**SIZES, "block_ids": "consecutive"}, target=None)
CALL = replace(
    RANDOM, name="plan_to_call_arguments", target=None, note="the same, cut into batches of Python lists for Mooncake"
)
ONCE = Row(name="plan_once_a_handshake", sizes=SIZES, unit="ms", note="validate the table, plan, prove")


class WrongBytes(RuntimeError):
    """Something was moved, or would be, to where it does not belong."""


Found = tuple[list[int], list[int], list[int]]
"""Source addresses, destination addresses, lengths."""


def vllm_planner(blocks: tuple[list[int], list[int]], producer: Dense, consumer: Dense) -> Callable[[], Found]:
    """`MooncakeConnectorWorker._build_transfer_params` from TP 1 to TP 2, its worker replaced by a record."""
    logging.disable(logging.WARNING)
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as theirs

    worker = SimpleNamespace(
        kv_cache_config=SimpleNamespace(transfer_groups=[SimpleNamespace(kv_cache_spec=None)]),
        _logical_to_kernel_block_ids=lambda ids: ids,
        _get_sender_transfer_plan=partial(
            theirs._compute_sender_transfer_plan,
            0,
            1,
            producer_cache_replicated=False,
            total_num_kv_heads=producer.heads,
        ),
    )
    peer = SimpleNamespace(
        remote_hostname="d",
        remote_port=1,
        remote_tp_rank=consumer.rank,
        remote_tp_size=2,
        req_blocks={"r": ("t", [blocks[1]])},
    )
    kept = SimpleNamespace(local_block_ids=[blocks[0]])
    regions = [_regions(theirs.TransferRegion, side) for side in (producer, consumer)]
    build = theirs.MooncakeConnectorWorker._build_transfer_params

    def run() -> Found:
        src, dst, length, failed, _ = asyncio.run(build(worker, [("r", kept)], peer, *regions))
        if failed:
            raise RuntimeError("vLLM's planner refused the request")
        return src, dst, length

    return run


def _regions(make: Callable[..., object], side: Dense) -> list[object]:
    page = side.heads // side.tp * side.tokens * 2 * side.head_size * side.item
    return [make(f"l{i}", i, side.base + i * side.blocks * page, page, page) for i in range(side.layers)]


def rows() -> list[Row]:
    """Everything that `measure` fills in."""
    return [RANDOM, CONSECUTIVE, CALL, ONCE]


@dataclass(frozen=True)
class Case:
    """One request on both planners."""

    producer: RankTable
    consumer: RankTable
    blocks: tuple[Ints, Ints]

    def arrays(self) -> Descriptors:
        """Ours, from two tables and block ids to the arrays of the engine call."""
        plan = plan_pulls(self.consumer, {Rank(): self.producer})[Rank()]
        return bind(plan, [TOKENS], [self.blocks[0]], [self.blocks[1]], null_block=0)

    def call_arguments(self) -> list[Found]:
        """The same as Mooncake's Python binding takes it."""
        limits = EngineLimits()
        return [
            (batch.src.tolist(), batch.dst.tolist(), batch.length.tolist())
            for batch in batches(self.arrays(), limits.batch_descriptors, limits.batch_bytes)
        ]

    def vllm(self) -> Callable[[], Found]:
        """VLLM's planner for the same request."""
        return vllm_planner((self.blocks[0].tolist(), self.blocks[1].tolist()), PRODUCER, CONSUMER)

    def check(self) -> int:
        """How many descriptors there are.

        Raises:
            WrongBytes: the two planners differ.
        """
        found, expected = self.arrays(), np.array(self.vllm()())
        if not np.array_equal(np.stack([found.src, found.dst, found.length]), expected[:, np.argsort(expected[1])]):
            raise WrongBytes("our descriptors are not those of vLLM's planner")
        return found.count


def _is_fast_enough(row: Row) -> bool | None:
    return None if row.ratio is None else row.ratio <= TARGET


def measure(report: Report, *, quick: bool) -> None:
    """Fill in all rows.

    Raises:
        WrongBytes: the two planners do not agree.
    """
    repeats = 3 if quick else REPEATS
    producer, consumer = PRODUCER.table(), CONSUMER.table()
    rng = np.random.default_rng(0)
    scattered = Case(producer, consumer, (rng.permutation(4_095)[:2_048] + 1, rng.permutation(4_095)[:2_048] + 1))
    in_row = Case(producer, consumer, (np.arange(1, 2_049), np.arange(1_001, 3_049)))
    _compare(report, RANDOM, scattered, repeats)
    _compare(report, CONSECUTIVE, in_row, repeats)
    times = interleaved({"ours": scattered.call_arguments, "theirs": scattered.vllm()}, repeats)
    report.add(CALL.measured(times["ours"], times["theirs"]))

    def handshake() -> None:
        validate_table(producer)
        prove(consumer, plan_pulls(consumer, {Rank(): producer}))

    report.add(ONCE.measured(interleaved({"ours": handshake}, repeats)["ours"]))


def _compare(report: Report, row: Row, case: Case, repeats: int) -> None:
    count = case.check()
    times = interleaved({"ours": case.arrays, "theirs": case.vllm()}, repeats)
    filled = row.measured(times["ours"], times["theirs"], met=_is_fast_enough if row.target else None)
    report.add(replace(filled, sizes={**row.sizes, "descriptors": count}))
