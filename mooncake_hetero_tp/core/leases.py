"""What a producer rank remembers of live transfers: the blocks it keeps and the pulls of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from mooncake_hetero_tp.core.codec import pack_blocks
from mooncake_hetero_tp.core.effects import BlockIds, Kept
from mooncake_hetero_tp.core.messages import GoneReason
from mooncake_hetero_tp.core.regions import Group
from mooncake_hetero_tp.core.sessions import Session
from mooncake_hetero_tp.core.states import OFFER, Hold, Offer, OfferEvent, after
from mooncake_hetero_tp.core.tombstones import MAX_RELEASED
from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.types import PullId, RequestId, SessionId, TokenRange, TransferId

PullKey: TypeAlias = tuple[SessionId, PullId]


@dataclass(slots=True, eq=False)
class PullEntry:
    """One pull of one consumer rank."""

    key: PullKey
    session: Session
    peer: bytes
    """Where its last message came from; answers that wait go there."""
    transfer_id: TransferId
    request_id: RequestId
    """The consumer's; for the log."""
    ranges: tuple[TokenRange, ...]
    never_at: float
    """When a pull of a transfer that never comes is answered so, whatever its consumer says."""
    state: Offer = Offer.WAITING
    lease_until: float = 0.0

    def holds_lease(self, now: float) -> bool:
        return self.state is Offer.LEASED and self.lease_until > now


class PullTable:
    """Every live pull, by its key and by its transfer. Bounds are the machine's to enforce."""

    def __init__(self) -> None:
        self._by_key: dict[PullKey, PullEntry] = {}
        self._by_transfer: dict[TransferId, dict[PullKey, PullEntry]] = {}
        self.waiting = 0
        """Pulls in state WAITING."""

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, session: SessionId, pull: PullId) -> PullEntry | None:
        return self._by_key.get((session, pull))

    def of(self, transfer_id: TransferId) -> list[PullEntry]:
        """The pulls of one transfer, oldest first; a copy, so that they may be dropped on the way."""
        return list(self._by_transfer.get(transfer_id, {}).values())

    def all(self) -> list[PullEntry]:
        return list(self._by_key.values())

    def add(self, pull: PullEntry) -> None:
        self._by_key[pull.key] = pull
        self._by_transfer.setdefault(pull.transfer_id, {})[pull.key] = pull
        pull.session.pulls += 1
        self.waiting += 1

    def step(self, pull: PullEntry, event: OfferEvent) -> bool:
        """Make a transition; False: refused. A dropped pull leaves the table."""
        state = after(OFFER, pull.state, event)
        if state is None:
            return False
        self.waiting -= pull.state is Offer.WAITING
        pull.state = state
        if state is Offer.DROPPED:
            self._remove(pull)
        return True

    def leased_until(self, transfer_id: TransferId, now: float) -> float:
        """End of the last granted lease of a transfer; `now` when none is granted."""
        pulls = self._by_transfer.get(transfer_id, {}).values()
        return max((pull.lease_until for pull in pulls if pull.holds_lease(now)), default=now)

    def _remove(self, pull: PullEntry) -> None:
        pull.session.pulls -= 1
        del self._by_key[pull.key]
        siblings = self._by_transfer[pull.transfer_id]
        del siblings[pull.key]
        if not siblings:
            del self._by_transfer[pull.transfer_id]


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer whose blocks this rank keeps for its scheduler."""

    transfer_id: TransferId
    request_id: RequestId
    """The producer's; FinishedSending names it."""
    computed_tokens: int
    blocks: tuple[BlockIds, ...]
    packed: tuple[bytes, ...]
    state: Hold = Hold.PENDING
    hold_until: float = 0.0
    """When it expires: keep time, lease or a reader's grace, whichever the state asks for."""
    released_by: set[int] = field(default_factory=set)
    """Tags of consumer engines that will not read it (any more)."""
    end_reason: GoneReason = GoneReason.EXPIRED

    def add_release(self, tag: int) -> None:
        if len(self.released_by) < MAX_RELEASED:
            self.released_by.add(tag)


def make_transfer(kept: Kept, groups: tuple[Group, ...]) -> Transfer:
    """A kept transfer from what the scheduler side says.

    Raises:
        LocalUsageError: not one block list per KV cache group, or ids that do not fit.
    """
    if len(kept.blocks) != len(groups):
        raise LocalUsageError(
            f"keep of {kept.request_id}: expected {len(groups)} block lists (one per KV cache group), "
            f"got {len(kept.blocks)}"
        )
    return Transfer(
        transfer_id=kept.transfer_id,
        request_id=kept.request_id,
        computed_tokens=kept.computed_tokens,
        blocks=kept.blocks,
        packed=tuple(map(pack_blocks, kept.blocks)),
    )


def unreadable(
    transfer: Transfer, ranges: tuple[TokenRange, ...], groups: tuple[Group, ...], null_block: int | None
) -> GoneReason | None:
    """Why these ranges cannot be read from the kept blocks; None: they can.

    Of a state group only the state after the last computed token can: an earlier slot may hold one from the middle of
    its block (vLLM: `is_mamba_prefill_checkpoint_valid`).
    """
    for tokens, blocks, group in zip(ranges, transfer.blocks, groups, strict=True):
        if tokens.end <= tokens.start:
            continue
        if tokens.end > transfer.computed_tokens:
            return GoneReason.BEYOND_COMPUTED
        last = -(-tokens.end // group.block_size)
        if last > len(blocks):
            return GoneReason.BEYOND_COMPUTED
        if group.is_state and tokens.end != transfer.computed_tokens:
            return GoneReason.OTHER_STATE
        first = last - 1 if group.is_state else tokens.start // group.block_size
        if null_block is not None and bool(np.any(blocks[first:last] == null_block)):
            return GoneReason.NULL_PAGE
    return None
