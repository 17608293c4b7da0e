"""The Python side of the C ABI agrees with the header, the library with both, and a wrong library is named."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from mooncake_hetero_tp.core.copies import Int64
from mooncake_hetero_tp.core.copy_table import AXIS, COPY, CopyTable
from mooncake_hetero_tp.errors import LocalUsageError, NativeError
from mooncake_hetero_tp.native import _library
from tests.unit.native.arena import listed

INCLUDE = Path(__file__).parents[3] / "csrc" / "include" / "mht"
Fields = list[tuple[str, int]]
"""Names and sizes, in order."""
C_TYPES: dict[str, type] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "int64_t*": ctypes.POINTER(ctypes.c_int64),
    "const mht_copy_table*": ctypes.POINTER(_library.TableStruct),
    "mht_status": ctypes.c_int32,
    "mht_cuda_context*": ctypes.c_void_p,
    "mht_cuda_context**": ctypes.POINTER(ctypes.c_void_p),
    "void*": ctypes.c_void_p,
    "const char*": ctypes.c_char_p,
    "int32_t*": ctypes.POINTER(ctypes.c_int32),
}


def header_text() -> str:
    """All public headers, comments left out."""
    return re.sub(r"//.*", "", "\n".join(path.read_text() for path in sorted(INCLUDE.glob("*.h"))))


def header_signatures() -> dict[str, _library.Signature]:
    """Every `MHT_API` declaration, as ctypes types."""
    found = {}
    for result, name, parameters in re.findall(r"MHT_API\s+([\w\s*]+?)\s*(\w+)\(([^)]*)\);", header_text()):
        kinds = [re.sub(r"\s*\w+$", "", " ".join(p.split())) for p in parameters.split(",") if p.strip() != "void"]
        found[name] = _library.Signature(C_TYPES[result], tuple(C_TYPES[kind] for kind in kinds))
    return found


def test_signatures_equal_the_header() -> None:
    found = header_signatures()
    assert len(found) == header_text().count("MHT_API ") - len(re.findall(r"define MHT_API ", header_text()))
    assert found == _library.SIGNATURES


def header_structs() -> dict[str, Fields]:
    """Every struct of the headers; a pointer is 8 bytes, a struct inside another counts as often as it is there."""
    defined = {name: int(value) for name, value in re.findall(r"#define (MHT_\w+) (\d+)\n", header_text())}
    found: dict[str, Fields] = {}
    for name, body in re.findall(r"typedef struct (\w+) \{([^}]*)\}", header_text()):
        found[name] = []
        for kind, field, length in re.findall(r"([\w\s*]+?)\s*\b(\w+)(?:\[(\w+)\])?;", body):
            sizes = {"int64_t": 8, "int32_t": 4, **{name: sum(size for _, size in of) for name, of in found.items()}}
            size = 8 if kind.endswith("*") else sizes[kind.strip()]
            found[name].append((field, size * (defined[length] if length else 1)))
    return found


def dtype_fields(dtype: np.dtype[np.void]) -> Fields:
    assert dtype.fields is not None
    assert [dtype.fields[name][1] for name in dtype.fields] == sorted(place for _, place, *_ in dtype.fields.values())
    return [(name, dtype.fields[name][0].itemsize) for name in dtype.fields]


def test_structs_equal_the_header() -> None:
    assert header_structs() == {
        "mht_axis": dtype_fields(AXIS),
        "mht_copy": dtype_fields(COPY),
        "mht_range": dtype_fields(_library.RANGE),
        "mht_copy_table": [(name, ctypes.sizeof(kind)) for name, kind, *_ in _library.TableStruct._fields_],
    }


@pytest.mark.usefixtures("library")
def test_struct_sizes_are_the_librarys() -> None:
    of = _library.load().mht_struct_bytes
    assert [of(index) for index in range(-1, 5)] == [0, *_library.STRUCT_BYTES, 0]


def test_other_struct_sizes_are_refused(compile_library: Callable[[str], Path]) -> None:
    known = {"mht_abi_version": _library.ABI_VERSION, "mht_struct_bytes": 24}
    source = "\n".join(f"long {name}() {{ return {known.get(name, 0)}; }}" for name in _library.SIGNATURES)
    with pytest.raises(NativeError, match=r"structs of \(24, 24, 24, 24\) bytes, this package \(16, 128, 16, 80\)"):
        _library.open_library(compile_library(source))


@pytest.mark.parametrize("copies,offsets", [(np.zeros(1, AXIS), listed(1)), (np.zeros(1, COPY), np.zeros(1, np.int32))])
def test_arrays_of_another_type_are_refused(copies: npt.NDArray[np.void], offsets: Int64) -> None:
    with pytest.raises(LocalUsageError, match=r"holds records of core\.copy_table\.COPY and int64 offsets"):
        _library.TableArgument(CopyTable(copies, offsets, 0), 0, [], check_overlap=False)


def test_abi_version_equals_the_header() -> None:
    match = re.search(r"#define MHT_ABI_VERSION (\d+)", header_text())
    assert match is not None
    assert int(match[1]) == _library.ABI_VERSION


@pytest.mark.usefixtures("library")
def test_exported_symbols_equal_the_header() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm (binutils) here")
    command = [nm, "--dynamic", "--defined-only", "--format=posix", str(_library.LIBRARY_PATH)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {line.split()[0] for line in lines} == set(header_signatures())


def test_every_signature_is_set(library: ctypes.CDLL) -> None:
    for name, signature in _library.SIGNATURES.items():
        function = getattr(library, name)
        assert function.restype is signature.restype
        assert tuple(function.argtypes) == signature.argtypes


def test_loaded_once(library: ctypes.CDLL) -> None:
    assert _library.load() is library


def test_absent_library_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match=r"libnone\.so does not exist.*MHT_NATIVE=1"):
        _library.open_library(tmp_path / "libnone.so")


def test_unloadable_library_keeps_the_loaders_words(tmp_path: Path) -> None:
    path = tmp_path / "libtext.so"
    path.write_text("no ELF file")
    with pytest.raises(NativeError, match=r"libtext\.so cannot be loaded: .*(invalid ELF header|too short)"):
        _library.open_library(path)


def test_other_abi_version_is_refused_with_both(compile_library: Callable[[str], Path]) -> None:
    path = compile_library("int mht_abi_version(void) { return 99; }")
    with pytest.raises(NativeError, match=rf"ABI version 99, this package needs {_library.ABI_VERSION}"):
        _library.open_library(path)


@pytest.mark.parametrize(
    "source,missing",
    [
        pytest.param("int unrelated;", "mht_abi_version", id="foreign"),
        pytest.param(
            f"int mht_abi_version(void) {{ return {_library.ABI_VERSION}; }}", "mht_cuda_version", id="incomplete"
        ),
    ],
)
def test_missing_symbol_is_named(compile_library: Callable[[str], Path], source: str, missing: str) -> None:
    with pytest.raises(NativeError, match=rf"lacks {missing}: "):
        _library.open_library(compile_library(source))
