"""Payloads between ops: what stays filed, and for how long."""

import pytest
import torch

from skein.errors import LocalError
from skein.plan.ops import Direction
from skein.plan.plan import Path
from skein.protocol.messages.tensors import Envelope, HopTensor, Phase, ShardKind, ShardTensor, TensorHeader
from skein.types import (
    Attempt,
    ChunkRef,
    Epoch,
    Generation,
    Incarnation,
    JobId,
    MicrobatchId,
    StageIndex,
    Step,
    WorkerId,
    parse_group,
)
from worker.bundle import bundle_bytes
from worker.compute.payload import PayloadStore, key_of, pack, unpack

HERE = ChunkRef(stage=StageIndex(0), worker=WorkerId("w0"))
PATH = Path(hops=(HERE, ChunkRef(stage=StageIndex(1), worker=WorkerId("w1"))))
X = {"x": torch.arange(6.0).view(2, 3)}


def hop(step: int = 0, *, phase: Phase = Phase.TRAIN, direction: Direction = Direction.FORWARD) -> HopTensor:
    return HopTensor(
        direction=direction, phase=phase, step=Step(step), microbatch=MicrobatchId(0), hop=1, path=PATH
    )


def shard(kind: ShardKind) -> ShardTensor:
    attempt = Attempt(epoch=Epoch(1), generation=Generation(1), number=0)
    return ShardTensor(
        kind=kind, step=Step(0), group=parse_group("s0"), attempt=attempt, shard=0, member=HERE
    )


def envelope(header: TensorHeader, generation: int = 1) -> Envelope:
    return Envelope(
        job=JobId("j"),
        epoch=Epoch(1),
        generation=Generation(generation),
        sender=WorkerId("w0"),
        incarnation=Incarnation("i"),
        header=header,
    )


def filed(*headers: TensorHeader, generation: int = 1) -> PayloadStore:
    store = PayloadStore()
    for header in headers:
        store.file(Generation(generation), key_of(header), X)
    return store


def test_what_was_packed_is_unpacked_without_a_copy() -> None:
    bundle = pack(X)
    again = unpack(bundle, torch.device("cpu"))["x"]
    assert torch.equal(again, X["x"])
    assert again.data_ptr() == X["x"].data_ptr()


def test_a_boundary_tensor_is_handed_over_once() -> None:
    store = filed(hop())
    assert bundle_bytes(store.for_sending(envelope(hop()))) == 24
    assert (len(store), store.num_bytes) == (0, 0)
    with pytest.raises(LocalError, match="no payload"):
        store.for_sending(envelope(hop()))


def test_a_sum_stays_for_the_others_and_for_this_worker() -> None:
    result = shard(ShardKind.RESULT)
    store = filed(result, shard(ShardKind.PART))
    assert store.for_sending(envelope(result))
    assert store.for_sending(envelope(result))
    assert store.find(Generation(1), key_of(result)) is X
    assert store.for_sending(envelope(shard(ShardKind.PART)))
    assert len(store) == 0


def test_a_release_travels_without_a_payload() -> None:
    release = hop(phase=Phase.EVALUATE, direction=Direction.BACKWARD)
    assert PayloadStore().for_sending(envelope(release)) == ()


def test_what_came_early_outlives_older_generations_and_committed_steps() -> None:
    store = filed(hop(0), hop(1))
    store.file(Generation(2), key_of(hop(0)), X)
    store.drop_steps(Step(0))
    assert len(store) == 1
    store.file(Generation(2), key_of(hop(1)), X)
    store.drop_older(Generation(2))
    assert store.find(Generation(2), key_of(hop(1))) is X
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_is_not_filed_is_not_found() -> None:
    store = filed(hop(), generation=1)
    assert store.find(Generation(2), key_of(hop())) is None
    assert store.find(Generation(1), key_of(hop())) is X
    assert store.find(Generation(1), key_of(hop())) is None


def test_the_same_key_is_filed_once() -> None:
    store = filed(hop(), hop())
    assert (len(store), store.num_bytes) == (1, 24)
