"""Inputs and effects are values: frozen, and each effect belongs to the machines that emit it."""

from __future__ import annotations

import logging
from typing import Any, get_args

import pytest

from mooncake_hetero_tp.core import effects
from mooncake_hetero_tp.core.effects import ConsumerEffect, Level, Notice, ProducerEffect, ReleaserEffect, Report
from mooncake_hetero_tp.types import RequestId

MACHINES: tuple[Any, ...] = (ProducerEffect, ConsumerEffect, ReleaserEffect)
EMITTED: set[Any] = {kind for union in MACHINES for kind in get_args(union)}


def test_records_are_frozen() -> None:
    report = Report(RequestId("r"), ok=True)
    with pytest.raises(AttributeError):
        report.ok = False  # type: ignore[misc]


@pytest.mark.parametrize("kind", sorted(EMITTED, key=str))
def test_the_module_docstring_names_every_effect(kind: type[object]) -> None:
    """The table there is what a driver is written from."""
    assert f"    {kind.__name__} " in (effects.__doc__ or "")
    assert kind.__doc__


def test_levels_are_those_of_logging() -> None:
    assert all(isinstance(logging.getLevelName(level.upper()), int) for level in Level)
    assert Notice(Level.INFO, "x") == Notice(Level.INFO, "x")
