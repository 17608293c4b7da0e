"""Checked native functions."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.errors import NativeError
from mooncake_hetero_tp.native import _library, ops

pytestmark = pytest.mark.usefixtures("library")


def test_abi_version() -> None:
    assert ops.abi_version() == _library.ABI_VERSION


def test_cuda_version_is_a_runtime_version_or_none() -> None:
    version = ops.cuda_version()
    assert version == 0 or version >= 11_000


def test_device_count_without_cuda_names_the_reason() -> None:
    try:
        count = ops.cuda_device_count()
    except NativeError as error:
        # A build without CUDA, no or an old driver, or a driver that sees no device.
        assert any(f"status {status}: " in str(error) for status in (-2, 35, 100))  # noqa: PT017 - either way is right
    else:
        assert count >= 0
        assert ops.cuda_version() > 0


@pytest.mark.parametrize("status,text", [(-1, "invalid argument"), (-2, "no CUDA part"), (-99, "unknown status")])
def test_status_becomes_a_native_error(status: int, text: str) -> None:
    with pytest.raises(NativeError, match=rf"mht_x returned status {status}: .*{text}"):
        ops.check(status, "mht_x")


def test_success_is_silent() -> None:
    ops.check(0, "mht_x")


def test_null_pointer_is_refused() -> None:
    assert _library.load().mht_cuda_device_count(None) == -1
