"""metadata: crosses process borders as it is."""

from __future__ import annotations

import pickle

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from mooncake_hetero_tp.core.effects import Kept, PullRequest
from mooncake_hetero_tp.io.work import Handover
from mooncake_hetero_tp.types import EngineId, RequestId, TokenRange, TransferId
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata


def test_pickling_keeps_every_fact() -> None:
    blocks = (np.asarray([3, 0, 4], dtype=np.int32), np.asarray([], dtype=np.int32))
    step = StepMetadata(
        kept=[Kept(RequestId("a"), TransferId("t"), blocks, computed_tokens=40, ready=True)],
        aborted=[Handover(TransferId("u"), RequestId("d"))],
        pulls=[
            PullRequest(RequestId("b"), TransferId("t"), EngineId("P"), "http://p0:8998", (TokenRange(16, 69),), blocks)
        ],
        cancelled=[RequestId("c")],
    )
    assert isinstance(step, KVConnectorMetadata)
    copy = pickle.loads(pickle.dumps(step))
    assert copy.kept[0].transfer_id == "t"
    assert [ids.tolist() for ids in copy.kept[0].blocks] == [[3, 0, 4], []]
    assert copy.pulls[0].ranges == (TokenRange(16, 69),)
    assert (copy.aborted, copy.cancelled) == ([("u", "d")], ["c"])
    assert not copy.is_empty
    assert StepMetadata().is_empty
