"""Loads libmht_kernels.so on first use; the only place that knows ctypes.

`SIGNATURES` mirrors csrc/include/mht and is held to it by a test. The library is optional: `is_built` tells whether it
is there, and callers that can do without use the numpy reference instead.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final, NamedTuple

from mooncake_hetero_tp.errors import NativeError

LIBRARY_PATH: Final = Path(__file__).with_name("libmht_kernels.so")
ABI_VERSION: Final = 1
"""MHT_ABI_VERSION of the header that `SIGNATURES` describes."""
Int32 = ctypes.c_int32
"""For a function that writes an int32_t: pass one, read its `value`."""


class Signature(NamedTuple):
    """What ctypes has to know of one exported function."""

    restype: type
    argtypes: tuple[type, ...]


SIGNATURES: Final[dict[str, Signature]] = {
    "mht_abi_version": Signature(Int32, ()),
    "mht_cuda_version": Signature(Int32, ()),
    "mht_cuda_device_count": Signature(Int32, (ctypes.POINTER(Int32),)),
    "mht_status_text": Signature(ctypes.c_char_p, (Int32,)),
}


def is_built() -> bool:
    """Whether this installation came with the library; says nothing of whether it loads."""
    return LIBRARY_PATH.exists()


@functools.cache
def load() -> ctypes.CDLL:
    """The library, loaded once, every signature set.

    Raises:
        NativeError: it was not built, the loader refuses it, or it was built from another version of the header.
    """
    return open_library(LIBRARY_PATH)


def open_library(path: Path) -> ctypes.CDLL:
    """`load` for a library at `path`, not remembered.

    Raises:
        NativeError: as `load`.
    """
    if not path.exists():
        raise NativeError(
            f"{path} does not exist: this installation has no native library. "
            "Install CMake and a C++ compiler, then reinstall with MHT_NATIVE=1 to see why it cannot be built"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path} cannot be loaded: {error}") from error
    _check_abi(library, path)
    for name, signature in SIGNATURES.items():
        function = _symbol(library, path, name)
        function.restype = signature.restype
        function.argtypes = signature.argtypes
    return library


def _check_abi(library: ctypes.CDLL, path: Path) -> None:
    # First of all: with another version no other signature may be trusted.
    version = _symbol(library, path, "mht_abi_version")()
    if version != ABI_VERSION:
        raise NativeError(f"{path} has ABI version {version}, this package needs {ABI_VERSION}: reinstall the package")


def _symbol(library: ctypes.CDLL, path: Path, name: str) -> ctypes._NamedFuncPointer:
    try:
        # Not library[name]: that makes a new function, without signature, every time.
        function: ctypes._NamedFuncPointer = getattr(library, name)
    except AttributeError as error:
        message = f"{path} lacks {name}: it is another library or an old build, reinstall the package"
        raise NativeError(message) from error
    return function
