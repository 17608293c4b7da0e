"""What must be one rank on both sides, whatever the other says."""

from __future__ import annotations

import msgspec
import pytest

from mooncake_hetero_tp.core.comparison import compare
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.types import Severity
from tests.tables import DST, Dense

FIELDS = {"dcp_size": "decode_context_parallel_size", "pcp_size": "prefill_context_parallel_size"}


@pytest.mark.parametrize("sizes", [(1, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("field", FIELDS)
def test_context_parallel_engines_are_refused_by_name_even_if_equal(field: str, sizes: tuple[int, int]) -> None:
    like = Dense(heads=2)
    ours, theirs = (
        msgspec.structs.replace(table, **{field: size})
        for table, size in zip((like.table(), Dense(heads=2, base=DST).table()), sizes, strict=True)
    )
    (found,) = compare(ours, theirs)
    assert (found.field, found.producer, found.consumer) == (FIELDS[field], str(sizes[0]), str(sizes[1]))
    assert found.severity is Severity.REFUSE
    assert "some of a request's tokens" in found.effect
    assert found.remedy == f"set --{FIELDS[field].replace('_', '-')} 1 on both engines"


def test_tables_of_peers_that_do_not_say_it_have_one_rank() -> None:
    said = msgspec.to_builtins(Dense(heads=2).table())
    for field in FIELDS:
        del said[field]
    assert msgspec.convert(said, type(Dense(heads=2).table())) == Dense(heads=2).table()


def declared(**encodings: str) -> RankTable:
    return msgspec.structs.replace(Dense(heads=2).table(), declared_encodings=encodings)


def test_unlike_declarations_of_one_backend_are_refused() -> None:
    (found,) = compare(declared(OURS="packed", A="packed"), declared(OURS="halves.transposed_k", B="latent"))
    assert (found.field, found.severity) == ("backend_encodings.OURS", Severity.REFUSE)
    assert (found.producer, found.consumer) == ("packed", "halves.transposed_k")
    assert "alike" in found.remedy


def test_a_backend_that_one_side_declares_needs_no_declaration_on_the_other() -> None:
    assert compare(declared(OURS="packed"), declared()) == ()


def test_tables_of_peers_that_declare_nothing() -> None:
    said = msgspec.to_builtins(declared())
    del said["declared_encodings"]
    assert msgspec.convert(said, RankTable) == declared()
