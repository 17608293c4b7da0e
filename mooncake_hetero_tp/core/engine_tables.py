"""What the tables of one engine's ranks have in common: one scheduler gives all of them the same block ids.

A rank that cuts its memory into other blocks than its siblings would be read at the wrong places: vllm-ascend#15646
told peers 8 tokens where 128 were configured, and vllm#59592 takes the size of one rank for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.errors import PeerProtocolError
from mooncake_hetero_tp.types import Rank

_ENGINE_FACTS: tuple[tuple[str, Callable[[RankTable], object]], ...] = (
    ("tensor parallel size", lambda table: table.tp_size),
    ("pipeline parallel size", lambda table: table.pp_size),
    ("number of KV cache groups", lambda table: len(table.groups)),
    ("decode context parallel size", lambda table: table.dcp_size),
    ("prefill context parallel size", lambda table: table.pcp_size),
)


def check_same_engine(tables: Mapping[Rank, RankTable]) -> None:
    """Checks that the ranks of a peer engine agree on what all of them must share.

    Raises:
        PeerProtocolError: two ranks differ; names the fact, both ranks and both values.
    """
    seen: dict[str, tuple[Rank, object]] = {}
    for rank, table in sorted(tables.items()):
        for fact, value in _facts(table):
            first, expected = seen.setdefault(fact, (rank, value))
            if value != expected:
                raise PeerProtocolError(
                    f"{fact}: rank {first} of the peer engine says {expected}, its rank {rank} says {value}; all ranks "
                    "of an engine must agree, or block ids mean other tokens on each; start its workers with the "
                    "same settings and the same vLLM and mooncake-hetero-tp versions"
                )


def _facts(table: RankTable) -> Iterator[tuple[str, object]]:
    """A kernel block size is one of a group's layers, so a pipeline stage without any has no say in it."""
    held = {region.group for region in table.regions}
    for name, read in _ENGINE_FACTS:
        yield name, read(table)
    for group in table.groups:
        yield f"kind of group {group.index}", group.kind
        yield f"block size of group {group.index}", group.block_size
        if group.index in held:
            yield f"kernel block size of group {group.index}", group.kernel_block_size
