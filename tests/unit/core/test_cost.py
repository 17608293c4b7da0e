"""Estimates, the choice between modes, the crossover, and rates that follow what is observed."""

from __future__ import annotations

import pytest

from mooncake_hetero_tp.core.cost import (
    FEWEST_BYTES,
    LARGEST_JUMP,
    WEIGHT,
    Choice,
    Measured,
    Mode,
    Rates,
    choose,
    crossover_bytes,
)

MIB = 1 << 20


def _choose(descriptors: int, length_bytes: int, wanted: Mode = Mode.AUTO, obstacle: str | None = None) -> Choice:
    chunks = -(-length_bytes // (8 * MIB))
    return choose(Rates(), wanted, descriptors=descriptors, length_bytes=length_bytes, chunks=chunks, obstacle=obstacle)


def test_a_direct_read_is_bound_by_count_or_by_bytes() -> None:
    assert Rates().direct_s(1_000, MIB) == pytest.approx(25e-3)
    assert Rates().direct_s(1, 1_600_000_000) == pytest.approx(1.0)


def test_one_chunk_takes_every_stage_and_more_take_the_slowest() -> None:
    rates = Rates(
        descriptor_s=1e-3,
        bytes_per_s=1e9,
        gather_bytes_per_s=4e9,
        scatter_bytes_per_s=2e9,
        round_trip_s=0.5,
        chunk_s=0.1,
    )
    one = 0.5 + 0.25 + (1.0 + 0.001 + 0.1) + 0.5
    assert rates.staged_s(1, 10**9) == pytest.approx(one)
    assert rates.staged_s(4, 4 * 10**9) == pytest.approx(one + 3 * 1.101)
    slow_gather = Rates(gather_bytes_per_s=1e8)
    assert slow_gather.staged_s(9, 9 * 10**9) - slow_gather.staged_s(8, 8 * 10**9) == pytest.approx(10.0)
    assert rates.staged_s(0, 0) == 0.0


def test_one_slot_hides_nothing() -> None:
    rates = Rates()
    assert rates.staged_s(5, 5 * MIB, slots=1) == pytest.approx(5 * rates.staged_s(1, MIB))
    assert rates.staged_s(5, 5 * MIB, slots=8) < 0.7 * rates.staged_s(5, 5 * MIB, slots=1)


@pytest.mark.parametrize(
    "descriptors, length_bytes, mode",
    [
        (18_432, 18_432 * 32 * 1_024, Mode.STAGED),  # Qwen3-8B, 8,192 tokens, TP1 -> TP2, block 16
        (100_000, 100_000 * 256, Mode.STAGED),  # token-major
        (64, 64 * 1_605_632, Mode.DIRECT),  # vllm#59594's pages, head-major
        (20, 143_360, Mode.DIRECT),  # a few descriptors: a round trip takes longer
        (1, 100, Mode.DIRECT),
        (0, 0, Mode.DIRECT),
    ],
)  # fmt: skip
def test_many_small_pieces_are_staged_and_large_or_few_ones_are_not(
    descriptors: int, length_bytes: int, mode: Mode
) -> None:
    assert _choose(descriptors, length_bytes).mode is mode


def test_why_is_one_sentence_with_both_estimates() -> None:
    assert _choose(1_000, 4_096_000).why == "staged: about 4.02 ms in 1 chunk, direct about 25 ms in 1000 descriptors"
    assert _choose(1, 100).why == "direct: about 0.025 ms in 1 descriptor, staged about 0.825 ms in 1 chunk"


def test_a_set_mode_is_kept_and_both_are_still_told() -> None:
    forced = _choose(1, 100, Mode.STAGED)
    assert (forced.mode, forced.why) == (
        Mode.STAGED,
        "staged, as set: about 0.825 ms in 1 chunk, direct about 0.025 ms in 1 descriptor",
    )
    assert _choose(1_000, 4_096_000, Mode.DIRECT).why.startswith("direct, as set: about 25 ms in 1000 descriptors, ")


@pytest.mark.parametrize("wanted", Mode)
def test_what_cannot_be_staged_is_direct_and_says_so(wanted: Mode) -> None:
    found = _choose(1_000, 4_096_000, wanted, "a page is longer than a slot")
    assert (found.mode, found.staged_s) == (Mode.DIRECT, None)
    assert found.why == "direct: about 25 ms in 1000 descriptors; not staged because a page is longer than a slot"


@pytest.mark.parametrize("length_bytes", [MIB, 64 * MIB, 1 << 30])
def test_the_crossover_separates_the_two(length_bytes: int) -> None:
    border = crossover_bytes(Rates(), length_bytes, 8 * MIB)
    for factor, mode in ((0.95, Mode.STAGED), (1.05, Mode.DIRECT)):
        assert _choose(round(length_bytes / (border * factor)), length_bytes).mode is mode


def test_the_crossover_of_the_built_in_rates() -> None:
    # As the README says: pieces below 37 KiB are staged in long pulls, below 16 KiB in pulls of 1 MiB.
    assert crossover_bytes(Rates(), 1 << 30, 8 * MIB) == pytest.approx(37 * 1_024, rel=0.05)
    assert crossover_bytes(Rates(), MIB, 8 * MIB) == pytest.approx(16 * 1_024, rel=0.1)


# --- measuring -----------------------------------------------------------------------------------


def test_a_read_refines_the_bound_that_it_ran_into() -> None:
    start = Measured()
    by_count = start.read(1_000, 4_096_000, 0.05).rates
    assert by_count.descriptor_s == pytest.approx(25e-6 * 2**WEIGHT)
    assert by_count.bytes_per_s == start.rates.bytes_per_s
    by_bytes = start.read(2, 64 * MIB, 64 * MIB / 3.2e9).rates
    assert by_bytes.bytes_per_s == pytest.approx(1.6e9 * 2**WEIGHT)
    assert by_bytes.descriptor_s == start.rates.descriptor_s


def test_steady_observations_are_believed() -> None:
    seen = Measured()
    for _ in range(40):  # a path of 3 us a descriptor and 20 GB/s
        seen = seen.read(1_000, 4_096_000, 3e-3).read(8, 64 * MIB, 64 * MIB / 20e9)
        seen = seen.gathered(MIB, MIB / 5e9).scattered(MIB, MIB / 6e9).answered(2e-3)
    found = [seen.rates.descriptor_s, seen.rates.bytes_per_s, seen.rates.gather_bytes_per_s]
    found += [seen.rates.scatter_bytes_per_s, seen.rates.round_trip_s]
    assert found == pytest.approx([3e-6, 20e9, 5e9, 6e9, 2e-3], rel=0.01)


def test_one_odd_observation_moves_little() -> None:
    stalled, instant = Measured().read(1_000, 4_096_000, 1e6), Measured().read(1_000, 4_096_000, 1e-12)
    assert stalled.rates.descriptor_s == pytest.approx(25e-6 * LARGEST_JUMP**WEIGHT)
    assert instant.rates.descriptor_s == pytest.approx(25e-6 / LARGEST_JUMP**WEIGHT)


def test_rates_never_reach_nothing() -> None:
    fast = slow = Measured()
    for _ in range(400):
        fast = fast.read(1_000, 1, 1e-12).gathered(1 << 40, 1e-12).answered(1e-15)
        slow = slow.scattered(FEWEST_BYTES, 1e9).answered(1e9)
    assert (fast.rates.descriptor_s, fast.rates.gather_bytes_per_s, fast.rates.round_trip_s) == (1e-8, 1e13, 1e-8)
    assert (slow.rates.scatter_bytes_per_s, slow.rates.round_trip_s) == (1e6, 1.0)


def test_what_tells_nothing_changes_nothing() -> None:
    start = Measured()
    assert start.read(15, 15, 1.0) == start.read(1, FEWEST_BYTES - 1, 1.0) == start
    assert start.read(1_000, 4_096_000, 0.0) == start.gathered(FEWEST_BYTES, -1.0) == start.answered(0.0) == start


def test_staged_reads_teach_what_a_chunk_takes_and_leave_the_bulk_rate_to_direct_ones() -> None:
    before = Measured().rates
    known = Measured()
    for _ in range(30):
        known = known.staged(8, 64 << 20, 8 * 2e-3 + (64 << 20) / before.bytes_per_s)
    assert known.rates.chunk_s == pytest.approx(2e-3, rel=0.05)
    assert known.rates.bytes_per_s == before.bytes_per_s


def test_staged_reads_that_beat_the_bulk_rate_teach_it() -> None:
    before = Measured().rates
    known = Measured().staged(8, 64 << 20, (64 << 20) / (2 * before.bytes_per_s))
    assert known.rates.bytes_per_s > before.bytes_per_s
    assert known.rates.chunk_s == before.chunk_s


def _disappointed() -> Measured:
    """A path on which staging was slow for a while."""
    known = Measured()
    for _ in range(20):
        known = known.staged(4, 64 * MIB, 2.0).answered(0.5)
    return known


def _mode(known: Measured) -> Mode:
    return choose(known.rates, Mode.AUTO, descriptors=4_096, length_bytes=64 * MIB, chunks=8).mode


def test_a_path_on_which_staging_was_slow_once_is_staged_over_again() -> None:
    known = _disappointed()
    assert _mode(known) is Mode.DIRECT
    pulls = 0
    while _mode(known) is Mode.DIRECT:
        known = known.not_staged()
        pulls += 1
        assert pulls < 1_000, "never again"
    assert pulls > 50, "not to be tried again and again while it is slow"


def test_what_is_known_of_staging_ages_and_what_is_known_of_direct_reads_does_not() -> None:
    known = _disappointed().gathered(MIB, 1.0).scattered(MIB, 1.0).read(1_000, 4_096_000, 1.0).read(2, 64 * MIB, 1.0)
    aged = known.not_staged().rates
    assert (aged.descriptor_s, aged.bytes_per_s) == (known.rates.descriptor_s, known.rates.bytes_per_s)
    assert known.rates.chunk_s > aged.chunk_s > 0.8 * known.rates.chunk_s
    assert known.rates.round_trip_s > aged.round_trip_s > 0.8 * known.rates.round_trip_s
    assert known.rates.gather_bytes_per_s < aged.gather_bytes_per_s < 1.1 * known.rates.gather_bytes_per_s
    assert known.rates.scatter_bytes_per_s < aged.scatter_bytes_per_s < 1.1 * known.rates.scatter_bytes_per_s


def test_built_in_rates_do_not_age() -> None:
    assert Measured().not_staged() == Measured()


def test_a_short_chunk_teaches_nothing() -> None:
    assert Measured().staged(1, 1000, 1.0) == Measured()
