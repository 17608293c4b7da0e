"""The device code of csrc/kernels, run on the host by csrc/tests/emulation.cpp: warps and lanes as loops."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.native import _library
from mooncake_hetero_tp.native._library import Ranges
from mooncake_hetero_tp.native.status import TEXTS, Status, StatusError

CSRC = Path(__file__).parents[3] / "csrc"
SOURCES = (
    "tests/emulation_library.cpp",
    "tests/emulation.cpp",
    "src/check.cpp",
    "src/overlap.cpp",
    "src/tile_table.cpp",
)
INCLUDES = ("include", "src", "kernels")


def build(folder: Path) -> Path:
    """Compile it into `folder`."""
    path = folder / "libemulation.so"
    command = ["c++", "-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(path)]
    command += [f"-I{CSRC / include}" for include in INCLUDES] + [str(CSRC / source) for source in SOURCES]
    subprocess.run(command, check=True)
    return path


class Emulation:
    """An `Executor` of the device code; `threads` is the number of warps, of which there are many on a GPU."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        for name in ("gather", "scatter", "clear"):
            signature = _library.SIGNATURES[f"mht_{name}"]
            function: Any = getattr(self._library, f"mht_emulated_{name}")
            function.restype, function.argtypes = signature

    def gather(
        self, table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
    ) -> None:
        self._run("gather", table, packed_address, ranges, threads, check_overlap=check_overlap)

    def scatter(
        self, table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
    ) -> None:
        self._run("scatter", table, packed_address, ranges, threads, check_overlap=check_overlap)

    def clear(self, table: CopyTable, ranges: Ranges, *, threads: int = 1) -> None:
        self._run("clear", table, 0, ranges, threads, check_overlap=False)

    def _run(
        self, name: str, table: CopyTable, packed_address: int, ranges: Ranges, warps: int, *, check_overlap: bool
    ) -> None:
        row = _library.Int64(-1)
        argument = _library.TableArgument(table, packed_address, ranges, check_overlap=check_overlap)
        status = getattr(self._library, f"mht_emulated_{name}")(argument.struct, warps, row)
        if status != 0:
            raise StatusError(f"mht_emulated_{name}", status, TEXTS[Status(status)], row.value)
