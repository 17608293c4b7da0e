"""What integration tests share."""

from __future__ import annotations

from tests.leftovers import leaves_nothing

__all__ = ["leaves_nothing"]
