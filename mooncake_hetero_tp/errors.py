"""The exception tree; the type says who is at fault.

    HeteroTPError
    ├── ConfigError           the operator: a setting, an environment variable, a port, a missing package
    │   └── MissingLibraryError   a shared library that the loader could not find
    ├── LocalUsageError       our own caller: an API used against its contract
    ├── PeerProtocolError     the peer: bytes that do not decode, an unknown version, an absurd size
    ├── IncompatiblePeer      nobody: two sides that cannot exchange KV; carries every mismatch
    ├── StalePeer             the peer restarted: another incarnation answered
    ├── PlanError             a plan that would not write every destination byte exactly once
    ├── TransferError         the transport: an engine call that failed or came back too late
    └── NativeError           the native library: missing symbol, wrong ABI, status code

Every message names the thing, what was expected, what was seen and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_hetero_tp.types import Mismatch


class HeteroTPError(Exception):
    """Base of all errors this package raises on purpose."""


class ConfigError(HeteroTPError):
    """A setting, environment variable, port or package is wrong; the operator mends it."""


class MissingLibraryError(ConfigError):
    """A Python package or shared library could not be loaded; keeps the loader's own words."""


class LocalUsageError(HeteroTPError):
    """An API of this package was called against its contract."""


class PeerProtocolError(HeteroTPError):
    """A peer sent something that is not a valid message of an agreed version."""


class IncompatiblePeer(HeteroTPError):
    """Two sides cannot exchange KV; `mismatches` lists every reason at once."""

    def __init__(self, message: str, mismatches: Sequence[Mismatch] = ()) -> None:
        super().__init__(message)
        self.mismatches = tuple(mismatches)


class StalePeer(HeteroTPError):
    """A reference names an incarnation or session that no longer exists."""


class PlanError(HeteroTPError):
    """A plan failed its exactness proof; nothing was written."""


class TransferError(HeteroTPError):
    """The transfer engine failed, refused or came back after its deadline."""


class NativeError(HeteroTPError):
    """The native library could not be used or returned a failure status."""
