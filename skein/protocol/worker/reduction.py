"""Attempt at reducing one group, as one worker sees it: pack, exchange parts, sum, pass results on, join them.

Accumulators are never touched here; an attempt that fails leaves nothing to undo. Parts may arrive before the
directive that explains them, so an exchange starts empty and learns its group later. Which shards go which way is
the pattern's business (`skein.plan.agreeing.exchange`); ops name all that they take and make, so executors know no
patterns.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from skein.plan.agreeing.exchange import (
    Broadcast,
    Ring,
    Tree,
    owning_place,
    result_source,
    result_targets,
    sum_sources,
    sum_target,
)
from skein.plan.plan import Group
from skein.protocol.messages.directives import ExchangeTerms
from skein.protocol.messages.tensors import ShardKind, ShardTensor
from skein.protocol.worker.ops import JoinOp, PackOp, Parcel, ReductionOp, SumOp
from skein.types import Attempt, ChunkRef, Step, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Moves that an event makes possible: shards to send, to this worker itself as to others, and then ops to run.

    In that order, for an op may use up what is to be sent.
    """

    ops: tuple[ReductionOp, ...] = ()
    parcels: tuple[Parcel, ...] = ()


class Exchange:
    """State of one (group, attempt) at one worker."""

    def __init__(self, worker: WorkerId, step: Step, attempt: Attempt) -> None:
        self.worker = worker
        self.step = step
        self.attempt = attempt
        self.is_joined = False
        self.digest = ""
        """Digest of the result, once that is joined."""
        self._ways: _Ways | None = None
        self._arrived: dict[int, set[ShardTensor]] = {}
        """Parts and sums of shards that are not summed yet."""
        self._sums: dict[int, SumOp] = {}
        """Sums that are still to be made here, by shard."""
        self._results: set[int] = set()
        self._is_join_queued = False

    @property
    def is_prepared(self) -> bool:
        """Whether the coordinator has asked for it."""
        return self._ways is not None

    def prepare(self, group: Group, exchange: ExchangeTerms | None = None) -> Moves:
        """The coordinator asks for this attempt; gives the first ops, and results that have come to be passed on.

        With `exchange`, what is packed, combined and joined is the business of the job's rule.
        """
        if self._ways is not None:
            return Moves()
        ways = self._ways = _Ways(group, self.worker, self.step, self.attempt, exchange)
        if len(group.workers) == 1:
            return Moves(ops=(ways.join(()),))
        self._sums = ways.sums()
        due = self._due_sums(sorted(self._arrived))
        passed_on = tuple(parcel for shard in sorted(self._results) for parcel in ways.passed_on(shard))
        return Moves(ops=(ways.pack(), *due, *self._due_join()), parcels=passed_on)

    def arrive(self, tensor: ShardTensor) -> Moves:
        """A part, a sum or a result is here (also from this worker itself)."""
        if tensor.kind is not ShardKind.RESULT:
            if self._ways is None or tensor.shard in self._sums:
                self._arrived.setdefault(tensor.shard, set()).add(tensor)
            return Moves(ops=tuple(self._due_sums([tensor.shard])))
        if tensor.shard in self._results:
            return Moves()
        self._results.add(tensor.shard)
        parcels = () if self._ways is None else self._ways.passed_on(tensor.shard)
        return Moves(ops=self._due_join(), parcels=tuple(parcels))

    def _due_sums(self, shards: Iterable[int]) -> Iterator[SumOp]:
        """Take out the sums of `shards` whose parts are all here."""
        for shard in shards:
            op = self._sums.get(shard)
            if op is not None and self._arrived.get(shard, set()).issuperset(op.parts):
                del self._sums[shard], self._arrived[shard]
                yield op

    def _due_join(self) -> tuple[JoinOp, ...]:
        if self._ways is None or self._is_join_queued or not self._results.issuperset(self._ways.wanted):
            return ()
        self._is_join_queued = True
        return (self._ways.join(self._ways.wanted),)


def handed_out(op: PackOp | SumOp) -> tuple[Parcel, ...]:
    """Shards that are to be sent once `op` has ended, each with the worker that is to have it."""
    return op.parcels if isinstance(op, PackOp) else tuple((worker, op.total) for worker in op.to)


class _Ways:
    """Ways of the shards of a group, as far as one worker has to do with them."""

    def __init__(
        self, group: Group, worker: WorkerId, step: Step, attempt: Attempt, exchange: ExchangeTerms | None
    ) -> None:
        self._group = group
        self._exchange = exchange
        self._step = step
        self._attempt = attempt
        self._workers = group.workers
        self._members: dict[WorkerId, list[ChunkRef]] = {}
        for member in group.members:
            self._members.setdefault(member.worker, []).append(member)
        self._me = self._workers.index(worker)
        self._own = tuple(self._members[worker])
        num_places = len(self._workers)
        self._owners = [owning_place(group.pattern, num_places, shard) for shard in range(group.num_shards)]
        self.wanted = tuple(
            shard
            for shard, owner in enumerate(self._owners)
            if result_source(group.pattern, num_places, owner, self._me) is not None
        )

    def pack(self) -> PackOp:
        parcels = tuple(
            (self._workers[self._adder(owner, self._me)], part)
            for shard, owner in enumerate(self._owners)
            for part in self._packed(shard, self._own)
        )
        stages = tuple(member.stage for member in self._own)
        return PackOp(
            step=self._step,
            group=self._group,
            attempt=self._attempt,
            stages=stages,
            parcels=parcels,
            exchange=self._exchange,
        )

    def sums(self) -> dict[int, SumOp]:
        """Sums that are made here, by shard."""
        mine = [shard for shard, owner in enumerate(self._owners) if self._adder(owner, self._me) == self._me]
        return {shard: self._sum(shard) for shard in mine}

    def join(self, shards: Iterable[int]) -> JoinOp:
        results = tuple(self._result(shard) for shard in shards)
        return JoinOp(
            step=self._step,
            group=self._group,
            attempt=self._attempt,
            results=results,
            exchange=self._exchange,
        )

    def passed_on(self, shard: int) -> tuple[Parcel, ...]:
        """To whom a result goes that has come from another; what is made here goes with its SumOp."""
        if not 0 <= shard < len(self._owners) or self._owners[shard] == self._me:
            return ()
        return tuple((worker, self._result(shard)) for worker in self._result_targets(shard))

    def _sum(self, shard: int) -> SumOp:
        is_owner = self._owners[shard] == self._me
        own = self._workers[self._me]
        to = (own, *self._result_targets(shard)) if is_owner else (self._workers[self._target(shard)],)
        return SumOp(
            step=self._step,
            group=self._group,
            attempt=self._attempt,
            shard=shard,
            parts=tuple(self._parts(shard)),
            total=self._result(shard) if is_owner else self._tensor(ShardKind.SUM, shard, self._own[0]),
            to=to,
            exchange=self._exchange,
        )

    def _parts(self, shard: int) -> Iterator[ShardTensor]:
        """Parts that are added up here, in order: what others have added up before what they and this worker pack."""
        pattern, owner = self._group.pattern, self._owners[shard]
        if not isinstance(pattern, Ring | Tree):
            for worker in dict.fromkeys(member.worker for member in self._group.contributors(shard)):
                yield from self._packed(shard, self._members[worker])
            return
        for place in sum_sources(pattern, len(self._workers), owner, self._me):
            members = self._members[self._workers[place]]
            if self._adder(owner, place) == place:
                yield self._tensor(ShardKind.SUM, shard, members[0])
            else:
                yield from self._packed(shard, members)
        yield from self._packed(shard, self._own)

    def _packed(self, shard: int, members: Sequence[ChunkRef]) -> Iterator[ShardTensor]:
        """The one part of a worker that holds `members`, named after the first; none where they make nothing of it."""
        is_partial = self._group.weights or isinstance(self._group.pattern, Broadcast)
        if not is_partial or not set(self._group.contributors(shard)).isdisjoint(members):
            yield self._tensor(ShardKind.PART, shard, members[0])

    def _adder(self, owner: int, place: int) -> int:
        """Place that adds up the parts of a place: one that has only its own to add sends them on as they are."""
        pattern, num_places = self._group.pattern, len(self._workers)
        if not isinstance(pattern, Ring | Tree):
            return owner
        is_last = place == owner or sum_sources(pattern, num_places, owner, place)
        return place if is_last else sum_target(pattern, num_places, owner, place)

    def _target(self, shard: int) -> int:
        return sum_target(self._group.pattern, len(self._workers), self._owners[shard], self._me)

    def _result_targets(self, shard: int) -> tuple[WorkerId, ...]:
        places = result_targets(self._group.pattern, len(self._workers), self._owners[shard], self._me)
        return tuple(self._workers[place] for place in places)

    def _result(self, shard: int) -> ShardTensor:
        owner = self._members[self._workers[self._owners[shard]]][0]
        return self._tensor(ShardKind.RESULT, shard, owner)

    def _tensor(self, kind: ShardKind, shard: int, member: ChunkRef) -> ShardTensor:
        return ShardTensor(
            kind=kind,
            step=self._step,
            group=self._group.group,
            attempt=self._attempt,
            shard=shard,
            member=member,
        )
