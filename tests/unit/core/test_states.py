"""The transition tables themselves: closed, reachable, and refusing what they do not list."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mooncake_hetero_tp.core import states
from mooncake_hetero_tp.core.states import (
    FETCH,
    HOLD,
    LINK,
    LOAD,
    OFFER,
    SHELVED,
    STAGE,
    Fetch,
    FetchEvent,
    Hold,
    Link,
    Load,
    Offer,
    Shelved,
    ShelvedEvent,
    Stage,
    StageEvent,
    after,
)

ROOT = Path(__file__).parents[3]
Table = Mapping[Any, Mapping[Any, Any]]

TABLES = [
    (HOLD, Hold, Hold.PENDING, {Hold.FREED}),
    (OFFER, Offer, Offer.WAITING, {Offer.DROPPED}),
    (LINK, Link, Link.RESOLVING, {Link.FORGOTTEN}),
    (LOAD, Load, Load.CONNECTING, {Load.REPORTED}),
    (STAGE, Stage, Stage.ASKED, {Stage.DROPPED}),
    (SHELVED, Shelved, Shelved.WANTED, {Shelved.FREED}),
    (FETCH, Fetch, Fetch.ASKED, {Fetch.DONE, Fetch.DROPPED}),
]


@pytest.mark.parametrize("table,states,_first,_last", TABLES)
def test_every_state_has_a_row_and_every_row_leads_to_states(
    table: Table, states: type[StrEnum], _first: Any, _last: Any
) -> None:
    assert set(table) == set(states)
    assert {target for row in table.values() for target in row.values()} <= set(states)


@pytest.mark.parametrize("table,states,first,_last", TABLES)
def test_every_state_is_reached(table: Table, states: type[StrEnum], first: Any, _last: Any) -> None:
    reached, fresh = {first}, {first}
    while fresh:
        fresh = {target for state in fresh for target in table[state].values()} - reached
        reached |= fresh
    assert reached == set(states)


@pytest.mark.parametrize("table,_states,_first,last", TABLES)
def test_ends_are_final_and_nothing_else_is(table: Table, _states: Any, _first: Any, last: set[Any]) -> None:
    assert {state for state, row in table.items() if not row} == last


def exits(table: Table, inside: set[Any]) -> set[Any]:
    return {event for state in inside for event, target in table[state].items() if target not in inside}


def test_a_pull_whose_engine_call_may_write_is_left_only_when_it_cannot() -> None:
    running = {Stage.READING, Stage.STAGING, Stage.STOPPING, Stage.FENCING}
    assert exits(STAGE, running) == {StageEvent.READ, StageEvent.LOST, StageEvent.FENCED}


def test_a_slot_that_may_be_written_is_left_only_when_it_cannot() -> None:
    assert exits(FETCH, {Fetch.READING, Fetch.STOPPING, Fetch.FENCING}) == {
        FetchEvent.READ,
        FetchEvent.LOST,
        FetchEvent.FENCED,
    }
    assert exits(SHELVED, {Shelved.FILLING, Shelved.DOOMED}) == {ShelvedEvent.FILLED, ShelvedEvent.FAILED}


def test_a_refused_event_leads_nowhere() -> None:
    assert after(STAGE, Stage.ASKED, StageEvent.READ) is None
    assert after(STAGE, Stage.ASKED, StageEvent.READY) is Stage.CLAIMING


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_states", ROOT / "tools" / "draw_states.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_drawn_from_the_tables(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.drawn(), "run tools/draw_states.py"


def test_every_table_is_drawn(tool: ModuleType) -> None:
    tables = {name for name in dir(states) if name.isupper() and isinstance(getattr(states, name), dict)}
    assert tables == set(tool.TABLES)
