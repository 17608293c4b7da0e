"""Planning one long request: our `bind` beside the planner of vLLM's own MooncakeConnector, in one process.

    python -m tests.benchmarks.bind

80 layers, 8 KV heads, bf16, head size 128, block 16, 32,768 tokens, TP 1 -> TP 2, LBHNC: 163,840 descriptors
of 32 KiB. Both must give the same descriptors. Medians over 15 runs each.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np

from mooncake_hetero_tp.core.binding import Descriptors, bind
from mooncake_hetero_tp.core.plan import PairPlan, plan_pulls, prove
from mooncake_hetero_tp.core.tables import validate_table
from mooncake_hetero_tp.types import Rank, TokenRange
from tests.oracle_memory import Ints
from tests.tables import DST, Dense

PRODUCER = Dense(heads=8, layers=80, tokens=16, head_size=128, item=2, blocks=4096)
CONSUMER = replace(PRODUCER, tp=2, rank=1, base=DST)
TOKENS = TokenRange(0, 32_768)
RUNS = 15

Found = tuple[list[int], list[int], list[int]]
"""Source addresses, destination addresses, lengths."""


def vllm_planner(blocks: tuple[list[int], list[int]]) -> Callable[[], Found]:
    """`MooncakeConnectorWorker._build_transfer_params` for the same request, its worker replaced by a record."""
    logging.disable(logging.WARNING)
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as theirs

    worker = SimpleNamespace(
        kv_cache_config=SimpleNamespace(transfer_groups=[SimpleNamespace(kv_cache_spec=None)]),
        _logical_to_kernel_block_ids=lambda ids: ids,
        _get_sender_transfer_plan=partial(
            theirs._compute_sender_transfer_plan, 0, 1, producer_cache_replicated=False, total_num_kv_heads=8
        ),
    )
    peer = SimpleNamespace(
        remote_hostname="d", remote_port=1, remote_tp_rank=1, remote_tp_size=2, req_blocks={"r": ("t", [blocks[1]])}
    )
    kept = SimpleNamespace(local_block_ids=[blocks[0]])
    regions = [_regions(theirs.TransferRegion, side) for side in (PRODUCER, CONSUMER)]
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


def median_ms(run: Callable[[], object]) -> tuple[float, float]:
    """(median, fastest) of some runs, in milliseconds."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times)


def compare(blocks: tuple[Ints, Ints], plan: PairPlan, title: str) -> bool:
    """Times both planners on one request and compares their descriptors."""

    def ours() -> Descriptors:
        return bind(plan, [TOKENS], [blocks[0]], [blocks[1]])

    theirs = vllm_planner((blocks[0].tolist(), blocks[1].tolist()))
    found, expected = ours(), np.array(theirs())
    same = np.array_equal(np.stack([found.src, found.dst, found.length]), expected[:, np.argsort(expected[1])])
    baseline, bound = median_ms(theirs), median_ms(ours)
    print(f"{title}: {found.count} descriptors, {found.bytes} bytes, equal to vLLM's: {same}")
    show("  vLLM MooncakeConnector", baseline)
    show("  bind", bound)
    print(f"  bind is {baseline[0] / bound[0]:.0f} times as fast (medians)")
    return same


def show(name: str, times: tuple[float, float]) -> None:
    print(f"{name:26} median {times[0]:7.2f} ms   fastest {times[1]:7.2f} ms")


def main() -> int:
    producer, consumer = PRODUCER.table(), CONSUMER.table()
    plans = plan_pulls(consumer, {Rank(): producer})
    rng = np.random.default_rng(0)
    scattered = (rng.permutation(4_095)[:2_048] + 1, rng.permutation(4_095)[:2_048] + 1)
    in_row = (np.arange(1, 2_049), np.arange(1_001, 3_049))
    same = [
        compare(scattered, plans[Rank()], "random blocks"),
        compare(in_row, plans[Rank()], "consecutive blocks"),
    ]
    print("once a handshake:")
    show("  validate_table", median_ms(lambda: validate_table(producer)))
    show("  plan_pulls", median_ms(lambda: plan_pulls(consumer, {Rank(): producer})))
    show("  plan_pulls and prove", median_ms(lambda: prove(consumer, plan_pulls(consumer, {Rank(): producer}))))
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
