"""Who has which slot of a staging ring: fair shares, turns, quarantine. Numbers only, no memory.

A slot is free, held by one owner (a pull), or in quarantine: nobody's, but still written or read by something that
was not stopped in time. Only free slots are handed out, the one that has been free longest first.

While several owners want or hold slots none is given more than its share, which is at least one; those at their
share are passed over, the others take turns. So whoever holds nothing waits at most until every other owner
was served once, and an owner that is alone has the whole ring.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NewType, TypeVar

from mooncake_hetero_tp.errors import LocalUsageError

Slot = NewType("Slot", int)
"""Number of a slot, from 0."""
Owner = TypeVar("Owner", bound=Hashable)


@dataclass(slots=True)
class _Account:
    held: int = 0
    wanted: int = 0
    """How many more it would take."""


class SlotTable(Generic[Owner]):
    """The slots of one ring. Single-threaded."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = deque(Slot(number) for number in range(count))
        self._holders: dict[Slot, Owner] = {}
        self._quarantined: set[Slot] = set()
        self._accounts: OrderedDict[Owner, _Account] = OrderedDict()
        """Whoever holds or wants slots, in the order of turns: whoever got or gave back a slot goes to the end."""

    @property
    def share(self) -> int:
        """The most slots that one owner is given now."""
        usable = self.count - len(self._quarantined)
        return max(1, -(-usable // max(1, len(self._accounts))))

    @property
    def all_home(self) -> bool:
        """Whether every slot is free and nobody waits."""
        return len(self._free) == self.count and not self._accounts

    @property
    def holders(self) -> list[Owner]:
        """Each once."""
        return list(dict.fromkeys(self._holders.values()))

    @property
    def quarantined(self) -> int:
        """How many slots are in quarantine."""
        return len(self._quarantined)

    def held_by(self, owner: Owner) -> int:
        account = self._accounts.get(owner)
        return account.held if account else 0

    def waits(self, owner: Owner) -> bool:
        """Whether the owner wants more than it has got."""
        account = self._accounts.get(owner)
        return account is not None and account.wanted > 0

    @property
    def starved(self) -> bool:
        """Whether somebody wants slots and none is free."""
        return not self._free and any(account.wanted for account in self._accounts.values())

    def want(self, owner: Owner, more: int) -> None:
        """Set how many slots `owner` would take beyond those it holds; 0: it waits no more."""
        account = self._accounts.setdefault(owner, _Account())
        account.wanted = more
        self._close(owner, account)

    def take(self) -> tuple[Owner, Slot] | None:
        """Hand the next slot to the owner whose turn it is; None: no free slot, or nobody who may have one."""
        owner = self._next_owner() if self._free and self._accounts else None
        if owner is None:
            return None
        account, slot = self._accounts[owner], self._free.popleft()
        account.held += 1
        account.wanted -= 1
        self._holders[slot] = owner
        self._accounts.move_to_end(owner)
        return owner, slot

    def give_back(self, slot: Slot) -> None:
        """Its owner is done with it, and nothing else touches it.

        Raises:
            LocalUsageError: nobody holds it; nothing changes.
        """
        self._surrender(slot)
        self._free.append(slot)

    def quarantine(self, slot: Slot) -> None:
        """Its owner is done with it, but something may still write or read it.

        Raises:
            LocalUsageError: nobody holds it; nothing changes.
        """
        self._surrender(slot)
        self._quarantined.add(slot)

    def end_quarantine(self, slot: Slot) -> None:
        """Nothing touches it any more.

        Raises:
            LocalUsageError: it is not in quarantine; nothing changes.
        """
        if slot not in self._quarantined:
            raise LocalUsageError(f"slot {slot}: expected one in quarantine")
        self._quarantined.remove(slot)
        self._free.append(slot)

    def _next_owner(self) -> Owner | None:
        share = self.share
        eligible = (who for who, account in self._accounts.items() if account.wanted and account.held < share)
        return next(eligible, None)

    def _surrender(self, slot: Slot) -> None:
        owner = self._holders.pop(slot, None)
        if owner is None:
            raise LocalUsageError(f"slot {slot}: expected one that is held")
        account = self._accounts[owner]
        account.held -= 1
        self._accounts.move_to_end(owner)
        self._close(owner, account)

    def _close(self, owner: Owner, account: _Account) -> None:
        if not account.held and not account.wanted:
            del self._accounts[owner]
