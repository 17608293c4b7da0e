"""Checked functions of the native library: Python types in and out, a status code becomes a `NativeError`."""

from __future__ import annotations

from mooncake_hetero_tp.errors import NativeError
from mooncake_hetero_tp.native import _library


def abi_version() -> int:
    """The ABI version the library reports; `_library.ABI_VERSION`, or loading it raised."""
    return int(_library.load().mht_abi_version())


def cuda_version() -> int:
    """CUDART_VERSION of the CUDA runtime linked in (13000 for 13.0); 0 in a CPU-only build."""
    return int(_library.load().mht_cuda_version())


def cuda_device_count() -> int:
    """Number of CUDA devices the library can use.

    Raises:
        NativeError: the build has no CUDA part, or CUDA reports an error (35: no driver, or one that is too old).
    """
    count = _library.Int32()
    check(_library.load().mht_cuda_device_count(count), "mht_cuda_device_count")
    return count.value


def check(status: int, function: str) -> None:
    """Turn a status other than 0 into an exception.

    Raises:
        NativeError: naming the function, the status and what it means.
    """
    if status != 0:
        text = _library.load().mht_status_text(status).decode()
        raise NativeError(f"{function} returned status {status}: {text}")
