"""Which tokens of a group the next token still reads: full attention all, windows and chunks the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_hetero_tp.types import TokenRange
from mooncake_hetero_tp.vllm_adapter.specs import chunk_of, is_state_group, window_of


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupReach:
    """How far back a group's next token reads."""

    block_size: int
    """Tokens of a logical block."""
    window: int | None = None
    """Tokens that the next one reads, itself included; None: all."""
    chunk: int | None = None
    """Length of the chunk whose start is the oldest token read; None: not chunked."""
    is_state: bool = False
    """One state stands for all tokens before the next one: it is that of `end` tokens or of no use."""

    @property
    def is_partial(self) -> bool:
        """Whether the group drops old pages or states, so that a prefill must end exactly where the load does."""
        return self.window is not None or self.chunk is not None or self.is_state

    def first_read(self, end: int) -> int:
        """The oldest of the tokens `[0, end)` that token `end` reads (vLLM: `get_num_skipped_tokens`)."""
        first = 0
        if self.window is not None:
            first = max(end - self.window + 1, 0)
        if self.chunk is not None:
            first = max(first, end // self.chunk * self.chunk)
        return first


def reach_of(group: Any) -> GroupReach:
    """The reach of one KVCacheGroupSpec."""
    return GroupReach(
        block_size=int(group.kv_cache_spec.block_size),
        window=window_of(group),
        chunk=chunk_of(group),
        is_state=is_state_group(group),
    )


def load_ranges(groups: Sequence[GroupReach], start: int, end: int, *, whole_pages: bool) -> tuple[TokenRange, ...]:
    """The tokens to load per group so that token `end` can run.

    With `whole_pages` (prefix caching is on) the oldest page of a window is loaded from its first token:
    vLLM will offer that page to later requests, whose windows may reach further back in it.
    """
    return tuple(_load_range(group, start, end, whole_pages=whole_pages) for group in groups)


def _load_range(group: GroupReach, start: int, end: int, *, whole_pages: bool) -> TokenRange:
    first = group.first_read(end)
    if whole_pages:
        first = first // group.block_size * group.block_size
    return TokenRange(min(max(start, first), end), end)
