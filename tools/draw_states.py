"""Draws docs/states.md from the tables in core/states.py: `python tools/draw_states.py` (a test compares them)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from mooncake_hetero_tp.core import states

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "states.md"
TABLES: Mapping[str, Mapping[Any, Mapping[Any, Any]]] = {
    "HOLD": states.HOLD,
    "OFFER": states.OFFER,
    "SHELVED": states.SHELVED,
    "LINK": states.LINK,
    "LOAD": states.LOAD,
    "STAGE": states.STAGE,
    "FETCH": states.FETCH,
}
HEAD = """# States of the protocol machines

Generated from `mooncake_hetero_tp/core/states.py`, where each state and event is described, by
`python tools/draw_states.py`. What is not drawn does not happen: the machine refuses the event and nothing changes.
"""


def drawn() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(name, table) for name, table in TABLES.items())])


def _section(name: str, table: Mapping[StrEnum, Mapping[StrEnum, StrEnum]]) -> str:
    kind = type(next(iter(table)))
    about = (kind.__doc__ or "").strip().splitlines()[0]
    return "\n".join([f"## `{name}`: {about}", "", "```mermaid", "stateDiagram-v2", *_lines(table), "```", ""])


def _lines(table: Mapping[StrEnum, Mapping[StrEnum, StrEnum]]) -> list[str]:
    first = next(iter(table))
    lines = [f"    [*] --> {first.value}"]
    for state, moves in table.items():
        targets = dict.fromkeys(moves.values())
        for target in targets:
            events = ", ".join(event.value for event, to in moves.items() if to is target)
            lines.append(f"    {state.value} --> {target.value}: {events}")
        if not moves:
            lines.append(f"    {state.value} --> [*]")
    return lines


if __name__ == "__main__":
    PAGE.write_text(drawn(), encoding="utf-8")
