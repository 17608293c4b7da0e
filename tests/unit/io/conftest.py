"""What all tests of io share."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.io import sessions
from tests.leftovers import leaves_nothing

__all__ = ["leaves_nothing"]


@pytest.fixture
def quick_burial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Foreign engines that are fakes end at once."""
    monkeypatch.setattr(sessions, "_ACCEPT_PERIOD_S", sessions._NUDGE_LEAD_S)
