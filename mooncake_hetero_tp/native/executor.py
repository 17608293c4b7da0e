"""Which of the two implementations carries out copy tables in host memory: the library, or the numpy reference."""

from __future__ import annotations

import functools
import logging
from typing import Protocol

from mooncake_hetero_tp.core.copy_table import CopyTable
from mooncake_hetero_tp.errors import NativeError
from mooncake_hetero_tp.native import _library, ops, reference
from mooncake_hetero_tp.native._library import Ranges

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """The functions that `ops` and `reference` share; `ops` describes them."""

    def gather(
        self, table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
    ) -> None: ...

    def scatter(
        self, table: CopyTable, packed_address: int, ranges: Ranges, *, threads: int = 1, check_overlap: bool = False
    ) -> None: ...

    def clear(self, table: CopyTable, ranges: Ranges, *, threads: int = 1) -> None: ...


@functools.cache
def host_executor() -> Executor:
    """The library where it is built and loads, else the reference; the log says so, once."""
    try:
        _library.load()
    except NativeError as error:
        logger.warning("packing with numpy, several times slower than the native library: %s", error)
        return reference
    return ops
