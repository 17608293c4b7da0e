"""The slot allocator: a model of it in lists, random use, and who is served when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_hetero_tp.core.slots import Slot, SlotTable
from mooncake_hetero_tp.errors import LocalUsageError

OWNERS = "abcde"


class Use(RuleBasedStateMachine):
    """Owners that come, want, get, give back and leave; the model knows where each slot is."""

    @initialize(count=st.integers(1, 7))
    def begin(self, count: int) -> None:
        self.slots: SlotTable[str] = SlotTable(count)
        self.count = count
        self.free = list(range(count))
        self.held: dict[int, str] = {}
        self.quarantined: set[int] = set()
        self.wanted: dict[str, int] = {}
        self.passed: dict[str, int] = {}
        """Owner that waits with nothing -> how many slots others may still get before it."""

    def owners(self) -> set[str]:
        return set(self.held.values()) | {owner for owner, more in self.wanted.items() if more}

    def watch(self) -> None:
        """Whoever waits with nothing is owed a slot after one turn of all who are there already."""
        waiting = {o for o, more in self.wanted.items() if more and o not in self.held.values()}
        others = len(self.owners()) - 1
        self.passed = {owner: self.passed.get(owner, others) for owner in waiting}

    @rule(owner=st.sampled_from(OWNERS), more=st.integers(0, 9))
    def want(self, owner: str, more: int) -> None:
        self.slots.want(owner, more)
        self.wanted[owner] = more
        self.watch()

    @rule()
    def take(self) -> None:
        share = max(1, -(-(self.count - len(self.quarantined)) // max(1, len(self.owners()))))
        counts = {owner: list(self.held.values()).count(owner) for owner in OWNERS}
        eligible = {owner for owner, more in self.wanted.items() if more and counts[owner] < share}
        taken = self.slots.take()
        if not self.free or not eligible:
            assert taken is None
            return
        assert taken is not None
        owner, slot = taken
        assert owner in eligible
        assert slot == self.free.pop(0), "the slot that has been free longest"
        self.held[slot] = owner
        self.wanted[owner] -= 1
        self.passed.pop(owner, None)
        self.passed = {other: left - 1 for other, left in self.passed.items()}
        self.watch()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), quarantine=st.booleans())
    def give_back(self, data: st.DataObject, quarantine: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[slot]
        if quarantine:
            self.slots.quarantine(Slot(slot))
            self.quarantined.add(slot)
        else:
            self.slots.give_back(Slot(slot))
            self.free.append(slot)
        self.watch()

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def end_quarantine(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.quarantined)))
        self.slots.end_quarantine(Slot(slot))
        self.quarantined.remove(slot)
        self.free.append(slot)

    @invariant()
    def agrees(self) -> None:
        for owner in OWNERS:
            assert self.slots.held_by(owner) == list(self.held.values()).count(owner)
            assert self.slots.waits(owner) == bool(self.wanted.get(owner))
        assert set(self.slots.holders) == set(self.held.values())
        assert self.slots.quarantined == len(self.quarantined)
        assert self.slots.all_home == (len(self.free) == self.count and not self.owners())
        assert self.slots.starved == (not self.free and any(self.wanted.values()))

    @invariant()
    def nobody_is_passed_over_for_ever(self) -> None:
        assert all(left >= 0 for left in self.passed.values())


Use.TestCase.settings = settings(max_examples=200, stateful_step_count=60)
TestUse = Use.TestCase


def served(slots: SlotTable[str]) -> str:
    """Owners in the order in which they get what is free now."""
    owners = ""
    while (taken := slots.take()) is not None:
        owners += taken[0]
    return owners


def test_an_owner_alone_has_the_whole_ring() -> None:
    slots: SlotTable[str] = SlotTable(4)
    slots.want("a", 9)
    assert served(slots) == "aaaa"
    assert slots.waits("a")
    assert slots.starved


def test_two_owners_share_by_turns() -> None:
    slots: SlotTable[str] = SlotTable(5)
    slots.want("a", 9)
    slots.want("b", 9)
    assert served(slots) == "ababa"


def test_whoever_comes_later_gets_its_share_as_slots_come_back() -> None:
    slots: SlotTable[str] = SlotTable(4)
    slots.want("a", 9)
    served(slots)
    slots.want("b", 9)
    for expected in "bb":
        slots.give_back(next(slot for slot, owner in slots._holders.items() if owner == "a"))
        assert served(slots) == expected
    slots.give_back(next(slot for slot, owner in slots._holders.items() if owner == "b"))
    assert served(slots) == "b", "a has its half"


def test_more_owners_than_slots_take_turns() -> None:
    slots: SlotTable[str] = SlotTable(1)
    for owner in "abc":
        slots.want(owner, 9)
    order = served(slots)
    for _ in range(5):
        slots.give_back(Slot(0))
        order += served(slots)
    assert order == "abcabc"


def test_slots_are_used_in_ring_order() -> None:
    slots: SlotTable[str] = SlotTable(3)
    numbers = []
    for _ in range(7):
        slots.want("a", 1)
        taken = slots.take()
        assert taken is not None
        numbers.append(taken[1])
        slots.give_back(taken[1])
    assert numbers == [0, 1, 2, 0, 1, 2, 0]


def test_quarantine_shrinks_the_shares() -> None:
    slots: SlotTable[str] = SlotTable(4)
    slots.want("a", 4)
    served(slots)
    for slot in (0, 1):
        slots.quarantine(Slot(slot))
    slots.want("b", 4)
    assert slots.share == 1
    slots.give_back(Slot(2))
    assert served(slots) == "b"
    slots.end_quarantine(Slot(0))
    assert slots.share == 2


@pytest.mark.parametrize(
    "misuse,words",
    [
        (lambda slots: slots.give_back(Slot(1)), "expected one that is held"),
        (lambda slots: slots.quarantine(Slot(9)), "expected one that is held"),
        (lambda slots: slots.end_quarantine(Slot(0)), "expected one in quarantine"),
    ],
    ids=["free", "unknown", "held"],
)
def test_misuse_is_refused(misuse: Callable[[Any], None], words: str) -> None:
    slots: SlotTable[str] = SlotTable(2)
    slots.want("a", 1)
    served(slots)
    with pytest.raises(LocalUsageError, match=words):
        misuse(slots)
    assert (slots.held_by("a"), slots.quarantined) == (1, 0)
