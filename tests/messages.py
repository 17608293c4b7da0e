"""Hypothesis strategies for wire messages without tables."""

from __future__ import annotations

from hypothesis import strategies as st

from mooncake_hetero_tp.core.messages import (
    MAX_NUMBER,
    Cancel,
    Claim,
    Gone,
    GoneReason,
    Grant,
    PairCut,
    Pull,
    Ready,
    Release,
    ReleaseAck,
    Renew,
    Stage,
    Staged,
    Waiting,
)
from mooncake_hetero_tp.types import TokenRange

numbers = st.integers(0, MAX_NUMBER)
positive = st.integers(1, MAX_NUMBER)
names = st.text(min_size=1, max_size=60)
ranges = st.lists(st.builds(TokenRange, numbers, numbers), max_size=5).map(tuple)
blocks = st.lists(st.binary(max_size=10).map(lambda data: data * 4), max_size=4).map(tuple)
seconds = st.floats(0.1, 86_400)
wanted = st.lists(numbers, max_size=8).map(tuple)
cuts = st.lists(st.builds(PairCut, numbers, numbers, numbers, positive), max_size=4).map(tuple)

FROM_CONSUMER = st.one_of(
    st.builds(Pull, numbers, numbers, names, names, ranges),
    st.builds(Claim, numbers, numbers, numbers),
    st.builds(Renew, numbers, numbers, numbers),
    st.builds(Stage, numbers, numbers, numbers, wanted, ranges, cuts),
    st.builds(Cancel, numbers, numbers),
    st.builds(Release, numbers, numbers, names),
)
FROM_PRODUCER = st.one_of(
    st.builds(Waiting, numbers, numbers),
    st.builds(Ready, numbers, numbers),
    st.builds(Gone, numbers, numbers, st.sampled_from(GoneReason)),
    st.builds(Grant, numbers, numbers, numbers, seconds, numbers, numbers, blocks),
    st.builds(Staged, numbers, numbers, numbers, numbers, positive, numbers),
    st.builds(ReleaseAck, numbers),
)
