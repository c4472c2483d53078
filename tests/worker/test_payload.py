"""Payloads between ops: what stays filed, and for how long."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from skein.errors import LocalError
from skein.plan.ops import Direction
from skein.plan.plan import Path
from skein.protocol.messages.tensors import Envelope, HopTensor, Phase, ShardKind, ShardTensor, TensorHeader
from skein.protocol.worker.keeping.desk import Desk, key_of
from skein.protocol.worker.ops import ApplyOp, BackwardOp, ForwardOp, HopKey, Op, hop_key
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
from tests.support.hands import record
from worker.boundary import BoundaryLog
from worker.compute.payload import Payload, pack, unpack, weight_bytes

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


def desk(log: BoundaryLog | None = None) -> Desk[Payload]:
    return Desk(HERE.worker, log or BoundaryLog(), weigh=weight_bytes, release=())


def filed(*headers: TensorHeader, generation: int = 1) -> Desk[Payload]:
    store = desk()
    for header in headers:
        store.file(Generation(generation), key_of(header), X)
    return store


def test_what_was_packed_is_unpacked_without_a_copy() -> None:
    bundle = pack(X)
    again = unpack(bundle, torch.device("cpu"))["x"]
    assert torch.equal(again, X["x"])
    assert again.data_ptr() == X["x"].data_ptr()


def test_a_boundary_tensor_of_an_evaluation_is_handed_over_once() -> None:
    header = hop(phase=Phase.EVALUATE)
    store = filed(header)
    assert store.for_sending(envelope(header)) is X
    assert (len(store), store.num_bytes) == (0, 0)
    with pytest.raises(LocalError, match="no payload"):
        store.for_sending(envelope(header))


FORWARD = ForwardOp(phase=Phase.TRAIN, step=Step(0), microbatch=MicrobatchId(0), hop=0, path=PATH)
BACKWARD = BackwardOp(step=Step(0), microbatch=MicrobatchId(0), hop=0, path=PATH)
APPLY = ApplyOp(record=record(0))


def ran(store: Desk[Payload], op: Op, *made: TensorHeader, generation: int = 1) -> tuple[HopKey, ...]:
    store.take(op, Generation(generation))
    return store.ended(op, Generation(generation), {key_of(header): X for header in made})


def test_what_crosses_a_boundary_in_training_is_logged_until_its_step_commits() -> None:
    store = desk()
    store.adopt(Generation(1))
    ran(store, FORWARD, hop())
    assert len(store) == 0, "it leaves, and the log has it"
    for _ in range(2):
        sent = store.for_sending(envelope(hop()))
        assert sent is not None
        assert weight_bytes(sent) == 24
    ran(store, APPLY)
    assert store.for_sending(envelope(hop())) is None


def test_an_op_takes_what_was_sent_before_what_was_logged_and_says_what_is_lost() -> None:
    store, back = desk(), replace(hop(direction=Direction.BACKWARD), hop=0)
    assert store.take(BACKWARD, Generation(1)) == ({}, (hop_key(back),))
    store.ended(BACKWARD, Generation(1), {hop_key(back): X})
    store.file(Generation(1), hop_key(back), {"sent": X["x"]})
    found = [store.take(BACKWARD, Generation(1))[0][hop_key(back)] for _ in range(2)]
    assert isinstance(found[0], Mapping)
    assert isinstance(found[1], tuple)


def test_what_is_found_out_later_goes_with_what_is_sent_again() -> None:
    store = desk()
    store.adopt(Generation(1))
    ran(store, FORWARD, hop())
    for told in (torch.ones(2), torch.zeros(1)):
        store.take(BACKWARD, Generation(1))
        unmade = replace(hop(), microbatch=MicrobatchId(1))
        added = {hop_key(header): {"repeated": told} for header in (hop(), unmade)}
        store.ended(BACKWARD, Generation(1), {}, added)
    sent = store.for_sending(envelope(hop()))
    assert sent is not None
    assert {name: x.tolist() for name, x in unpack(sent, torch.device("cpu")).items()} == {
        **{name: x.tolist() for name, x in X.items()},
        "repeated": [0.0],
    }
    assert store.for_sending(envelope(unmade)) is None, "of what was never made nothing is kept"


def test_what_an_op_of_an_older_generation_makes_is_logged_and_of_a_forgotten_job_goes_nowhere() -> None:
    store = desk()
    store.adopt(Generation(2))
    ran(store, FORWARD, hop(), shard(ShardKind.PART), generation=1)
    assert len(store) == 0
    assert store.for_sending(envelope(hop())) is not None
    store.take(FORWARD, Generation(2))
    store.forget()
    store.ended(FORWARD, Generation(2), {key_of(x): X for x in (hop(), shard(ShardKind.PART))})
    assert len(store) == 0
    assert store.for_sending(envelope(hop())) is None
    ran(store, FORWARD, hop(), shard(ShardKind.PART), generation=2)
    assert len(store) == 1


def test_a_sum_stays_for_the_others_and_for_this_worker() -> None:
    result = shard(ShardKind.RESULT)
    store = filed(result, shard(ShardKind.PART))
    assert store.for_sending(envelope(result))
    assert store.for_sending(envelope(result))
    assert store.drop(Generation(1), key_of(result)) is X
    assert store.for_sending(envelope(shard(ShardKind.PART)))
    assert len(store) == 0


def test_a_release_travels_without_a_payload() -> None:
    release = hop(phase=Phase.EVALUATE, direction=Direction.BACKWARD)
    assert desk().for_sending(envelope(release)) == ()


def test_what_came_early_outlives_older_generations_and_committed_steps() -> None:
    store = filed(hop(0), hop(1))
    store.file(Generation(2), key_of(hop(0)), X)
    ran(store, APPLY)
    assert len(store) == 1
    store.file(Generation(2), key_of(hop(1)), X)
    store.adopt(Generation(2))
    assert store.drop(Generation(2), key_of(hop(1))) is X
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_is_not_filed_is_not_found() -> None:
    store = filed(hop(), generation=1)
    assert store.drop(Generation(2), key_of(hop())) is None
    assert store.drop(Generation(1), key_of(hop())) is X
    assert store.drop(Generation(1), key_of(hop())) is None


def test_the_same_key_is_filed_once() -> None:
    store = filed(hop(), hop())
    assert (len(store), store.num_bytes) == (1, 24)
