"""How a subcommand ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Outcome:
    """What the subcommand wants to exit with; `main` passes one in as the context's `obj`."""

    status: int = 0
