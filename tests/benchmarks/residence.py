"""Resident memory of this process at its highest, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"
"""Sets VmHWM to VmRSS (proc(5), since Linux 4.0)."""


class Residence:
    """Memory since this was made."""

    def __init__(self) -> None:
        _CLEAR.write_text(_FORGET_PEAK, encoding="ascii")
        self._before = _bytes("VmRSS")

    def growth_bytes(self) -> int:
        """The highest so far, less what there was at first."""
        return _bytes("VmHWM") - self._before


def _bytes(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    raise RuntimeError(f"{_STATUS} has no {field}")
