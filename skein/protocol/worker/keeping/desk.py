"""The desk: payloads that wait for an op or for sending, where they come from, and how long they stay.

Rules of this file
- Payloads are filed under (generation, key); what has been handed over is gone. What crosses a stage boundary in
  training is kept in the boundary log until its step commits, for it may be needed again.
- An op that lacks an operand fails; that the boundary log has lost it is no fault.
- What an op finds out about a tensor that was sent before is added to it in the log, for whoever is sent it again.
"""

from collections.abc import Callable, Mapping
from typing import Generic, Protocol, TypeGuard, TypeVar

from skein.errors import LocalError
from skein.plan.ops import Direction
from skein.protocol.messages.tensors import Envelope, HopTensor, ShardKind, ShardTensor, TensorHeader
from skein.protocol.worker.ops import (
    ApplyOp,
    ComputeOp,
    HopKey,
    JoinOp,
    Op,
    SumOp,
    TensorKey,
    hop_key,
)
from skein.types import Generation, Step, WorkerId

P = TypeVar("P")


class ForgetfulLog(Protocol[P]):
    """A boundary log: a cache, which never refuses and may forget."""

    def put(self, key: HopKey, payload: P, /) -> tuple[HopKey, ...]:
        """Keep a payload; gives the keys that are forgotten for it."""

    def get(self, key: HopKey, /) -> P | None:
        """Payload that is kept under a key; None if there is none."""

    def add(self, key: HopKey, payload: P, /) -> tuple[HopKey, ...]:
        """Keep more under a key, if anything is kept there; gives the keys that are forgotten for it."""

    def drop_steps(self, step: Step, /) -> None:
        """`step` is committed: what belongs to it or to one before goes."""

    def clear(self) -> None:
        """Forget everything."""


class Desk(Generic[P]):
    """The payloads of one worker.

    Args:
        me: this worker.
        log: keeps what crosses stage boundaries.
        weigh: how many bytes a payload takes.
        release: what goes with a tensor that says all by arriving.
    """

    def __init__(self, me: WorkerId, log: ForgetfulLog[P], *, weigh: Callable[[P], int], release: P) -> None:
        self.num_bytes = 0
        self._me = me
        self._log = log
        self._weigh = weigh
        self._release = release
        self._generation = Generation(0)
        self._payloads: dict[tuple[Generation, TensorKey], P] = {}
        self._has_op = self._is_op_void = False

    def __len__(self) -> int:
        return len(self._payloads)

    # --- what comes and goes ---

    def file(self, generation: Generation, key: TensorKey, payload: P) -> None:
        """Keep a payload; one that is there under the same key gives way."""
        self.drop(generation, key)
        self._payloads[generation, key] = payload
        self.num_bytes += self._weigh(payload)

    def drop(self, generation: Generation, key: TensorKey) -> P | None:
        """Forget a payload, if it is there; gives it."""
        payload = self._payloads.pop((generation, key), None)
        if payload is not None:
            self.num_bytes -= self._weigh(payload)
        return payload

    def for_sending(self, envelope: Envelope) -> P | None:
        """Payload that goes with `envelope`; None: the boundary log has forgotten it.

        A shard's result stays filed: it goes to several, and is used here too.

        Raises:
            LocalError: nothing is filed there.
        """
        header, generation = envelope.header, envelope.generation
        if is_release(header):
            return self._release
        key = key_of(header)
        if is_logged(key):
            return self._log.get(key)
        is_shared = isinstance(header, ShardTensor) and header.kind is ShardKind.RESULT
        payload = self._payloads.get((generation, key)) if is_shared else self.drop(generation, key)
        if payload is None:
            raise LocalError(f"generation {generation} has no payload under {key}")
        return payload

    # --- ops ---

    def take(self, op: Op, generation: Generation) -> tuple[dict[TensorKey, P], tuple[HopKey, ...]]:
        """An op begins: what it takes of what peers have sent or was made here; and what the boundary log has lost."""
        self._has_op = True
        operands: dict[TensorKey, P] = {}
        lost: list[HopKey] = []
        for key in operand_keys(op):
            payload = self.drop(generation, key)
            if payload is None and is_logged(key):
                payload = self._log.get(key)
            if payload is not None:
                operands[key] = payload
            elif is_logged(key):
                lost.append(key)
        return operands, tuple(lost)

    def ended(
        self,
        op: Op,
        generation: Generation,
        outputs: Mapping[TensorKey, P] | None,
        added: Mapping[HopKey, P] | None = None,
    ) -> tuple[HopKey, ...]:
        """An op is over; gives what the boundary log has forgotten for what it made.

        What stays here is filed as it is; what an op of a forgotten job made goes nowhere.

        Args:
            op: the op.
            generation: under which it began.
            outputs: what it made; None: it has failed.
            added: what goes with tensors of earlier ops from now on.
        """
        is_void, self._has_op, self._is_op_void = self._is_op_void, False, False
        if outputs is None or is_void:
            return ()
        forgotten: tuple[HopKey, ...] = ()
        for key, payload in outputs.items():
            if is_logged(key):
                forgotten += self._log.put(key, payload)
            if generation == self._generation and not self._leaves(op, key):
                self.file(generation, key, payload)
        for logged, payload in (added or {}).items():
            forgotten += self._log.add(logged, payload)
        if isinstance(op, ApplyOp):
            self._drop_steps(op.record.step)
        return forgotten

    def _leaves(self, op: Op, key: TensorKey) -> bool:
        """Whether what an op made is for another worker, and in the boundary log till it is sent."""
        return isinstance(op, ComputeOp) and is_logged(key) and op.path.hops[key.hop].worker != self._me

    # --- how long it stays ---

    def _drop_steps(self, step: Step) -> None:
        """Drop what belongs to `step`, which is committed, or to one before: it is of no use."""
        over = [x for x in self._payloads if x[1].step <= step and not x[1].outlasts_steps]
        for generation, key in over:
            self.drop(generation, key)
        self._log.drop_steps(step)

    def selected(self) -> None:
        """Rows are chosen: what is still here of any selection is of no use."""
        for generation, key in [place for place in self._payloads if place[1].outlasts_steps]:
            self.drop(generation, key)

    def adopt(self, generation: Generation) -> None:
        """Forget what belongs to older generations; what came early for a later one stays."""
        if generation != self._generation:
            self._generation = generation
            for of, key in [place for place in self._payloads if place[0] < generation]:
                self.drop(of, key)

    def forget(self) -> None:
        """The job is over."""
        self._is_op_void = self._has_op
        self._payloads.clear()
        self.num_bytes = 0
        self._log.clear()


def key_of(header: TensorHeader) -> TensorKey:
    """Key that a tensor of this header is filed under."""
    return hop_key(header) if isinstance(header, HopTensor) else header


def operand_keys(op: Op) -> tuple[TensorKey, ...]:
    """Keys of the filed payloads that an op takes, besides what its executor holds."""
    match op:
        case ComputeOp():
            return () if op.operand is None else (op.operand,)
        case SumOp():
            return op.parts
        case JoinOp():
            return op.results
        case _:
            return ()


def is_logged(key: TensorKey) -> TypeGuard[HopKey]:
    """Whether a tensor belongs into the boundary log: what crosses a stage boundary in training."""
    return isinstance(key, HopKey) and key.phase.trains


def is_release(header: TensorHeader) -> bool:
    """Whether it says all by arriving: an evaluation's slot is free again."""
    return (
        isinstance(header, HopTensor) and not header.phase.trains and header.direction is Direction.BACKWARD
    )
