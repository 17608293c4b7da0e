"""Carrying out Gather: a producer rank packs what a consumer rank asks for, in worker threads."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache

from mooncake_hetero_tp.core.cuts import pair_cuts, plan_of_cuts
from mooncake_hetero_tp.core.effects import Gather, GatherId, GatherOutcome
from mooncake_hetero_tp.core.messages import PairCut
from mooncake_hetero_tp.core.pairing import PairPlan
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import HeteroTPError
from mooncake_hetero_tp.io.packer import Packer, StagedPull
from mooncake_hetero_tp.io.pool import WorkerPool

logger = logging.getLogger(__name__)

_KEPT_PLANS = 64
"""Pairs of this rank with a consumer rank; with more of them, a plan is made for every pull."""


@dataclass(slots=True)
class Gathers:
    """Gathers under way. `start` returns at once; `done` is called in a worker thread."""

    packer: Packer
    pool: WorkerPool
    done: Callable[[GatherId, GatherOutcome], None]

    def start(self, gather: Gather) -> None:
        """Queue a gather."""
        self.pool.submit(lambda: self.done(gather.gather_id, self._outcome(gather)))

    def _outcome(self, gather: Gather) -> GatherOutcome:
        try:
            return self._packed(gather)
        except HeteroTPError as error:
            return GatherOutcome(error=str(error))
        except Exception as error:  # a bug, or memory: whatever it is, the gather has an outcome
            logger.exception("packing chunk %d for %s failed unexpectedly", gather.chunk, gather.consumer)
            return GatherOutcome(error=repr(error))

    def _packed(self, gather: Gather) -> GatherOutcome:
        key = (gather.consumer, gather.request_id)
        pull = StagedPull(self._plan(key, gather), gather.ranges, gather.chunk_bytes, gather.blocks)
        self.packer.prepare_pack(key, pull)  # once a pull, and no part of the rate at which chunks are packed
        began = time.perf_counter()
        length_bytes = self.packer.pack(key, pull, gather.chunk, gather.slot)
        return GatherOutcome(length_bytes, round(1e6 * (time.perf_counter() - began)))

    def _plan(self, key: Hashable, gather: Gather) -> PairPlan:
        """That of the pull's last chunk: with another one, however alike, its tables would have to be made anew."""
        plan = self.packer.plan_of(key)
        if plan is not None and plan.consumer is gather.consumer_table and pair_cuts(plan) == gather.cuts:
            return plan
        return _known_plan(_Pair(gather.consumer_table, self.packer.table), gather.cuts)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two tables by identity: a session's and this rank's own are the same objects all the time."""

    consumer: RankTable
    producer: RankTable

    def __hash__(self) -> int:
        return hash((id(self.consumer), id(self.producer)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pair) and self.consumer is other.consumer and self.producer is other.producer


@lru_cache(maxsize=_KEPT_PLANS)
def _known_plan(pair: _Pair, cuts: tuple[PairCut, ...]) -> PairPlan:
    return plan_of_cuts(pair.consumer, pair.producer, cuts)
