"""Token runs: a token range cut at the page borders of both sides.

Equal block sizes, 16 -> 64, 64 -> 16, 12 -> 8, kernel blocks in logical blocks, prefix hits and
half-filled last pages are all the same cut, and no block ratio appears anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import TokenRange


@dataclass(frozen=True, eq=False, slots=True)
class RunTable:
    """Runs in token order, int64 columns of equal length; pages count from the request's token 0.

    Pages are *kernel* pages of each side; `count` tokens start `*_offset` tokens into the page.
    """

    producer_page: Int64
    producer_offset: Int64
    consumer_page: Int64
    consumer_offset: Int64
    count: Int64

    def __len__(self) -> int:
        return int(self.count.size)


def cut_runs(tokens: TokenRange, producer_page_tokens: int, consumer_page_tokens: int) -> RunTable:
    """Cuts `tokens` so that each run lies inside one page of each side.

    Raises:
        LocalUsageError: a negative or reversed range, or a page of no tokens.
    """
    check_range(tokens)
    if producer_page_tokens < 1 or consumer_page_tokens < 1:
        raise LocalUsageError(
            f"page sizes {producer_page_tokens} (producer) and {consumer_page_tokens} (consumer) tokens: "
            f"expected at least 1 each; pass Group.kernel_block_size"
        )
    starts = np.union1d(_borders(tokens, producer_page_tokens), _borders(tokens, consumer_page_tokens))
    producer_page, producer_offset = np.divmod(starts, producer_page_tokens)
    consumer_page, consumer_offset = np.divmod(starts, consumer_page_tokens)
    count = np.diff(starts, append=np.int64(tokens.end))
    return RunTable(producer_page, producer_offset, consumer_page, consumer_offset, count)


def check_range(tokens: TokenRange) -> None:
    """Raises LocalUsageError unless `0 <= start <= end`."""
    if not 0 <= tokens.start <= tokens.end:
        raise LocalUsageError(
            f"token range [{tokens.start}, {tokens.end}): expected 0 <= start <= end; an empty range has start == end"
        )


def _borders(tokens: TokenRange, page_tokens: int) -> Int64:
    """Run starts that pages of `page_tokens` force: the range's own, then every page border inside."""
    if not tokens.count:
        return np.empty(0, np.int64)
    inner = np.arange(tokens.start // page_tokens + 1, -(-tokens.end // page_tokens), dtype=np.int64)
    return np.concatenate((np.array([tokens.start], np.int64), inner * page_tokens))
