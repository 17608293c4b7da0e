"""Statuses are those of the header, their texts those of the library."""

from __future__ import annotations

import ctypes
import re

import pytest

from mooncake_hetero_tp.native.status import TEXTS, Status, StatusError
from tests.unit.native.test_library import INCLUDE


def test_statuses_equal_the_header() -> None:
    header = (INCLUDE / "abi.h").read_text(encoding="utf-8")
    found = {name: int(value) for name, value in re.findall(r"#define MHT_(\w+) \(?(-?\d+)\)?\s+//", header)}
    assert {"OK": 0, **found} == {status.name: status.value for status in Status}


@pytest.mark.parametrize("status", Status)
def test_texts_are_the_librarys(library: ctypes.CDLL, status: Status) -> None:
    assert library.mht_status_text(status).decode() == TEXTS[status]


def test_an_error_names_function_status_and_copy() -> None:
    error = StatusError("mht_gather", -8, "outside", row=3)
    assert str(error) == "mht_gather returned status -8 at copy 3: outside"
    assert (error.status, error.row) == (-8, 3)
    assert str(StatusError("mht_gather", 35, "no driver")) == "mht_gather returned status 35: no driver"
