"""One attempt at reducing one group, as one worker sees it: pack, exchange parts, sum owned shards, join the result.

Accumulators are never touched here; an attempt that fails leaves nothing to undo. Parts may arrive before the
directive that explains them, so an exchange starts empty and learns its group later.
"""

from collections.abc import Iterable

from skein.plan.plan import Group
from skein.protocol.ops import JoinOp, PackOp, SumOp
from skein.protocol.tensors import ShardKind, ShardTensor
from skein.types import Attempt, ChunkRef, Step, WorkerId

ReductionOp = PackOp | SumOp | JoinOp
Parcel = tuple[WorkerId, ShardTensor]
"""A shard and who is to have it."""


class Exchange:
    """State of one (group, attempt) at one worker."""

    def __init__(self, worker: WorkerId, step: Step, attempt: Attempt) -> None:
        self.worker = worker
        self.step = step
        self.attempt = attempt
        self.is_joined = False
        self._group: Group | None = None
        self._workers: tuple[WorkerId, ...] = ()
        self._parts: dict[int, set[ChunkRef]] = {}
        self._summed: set[int] = set()
        self._results: set[int] = set()
        self._is_join_queued = False

    @property
    def group(self) -> Group:
        assert self._group is not None, "the exchange was not prepared"
        return self._group

    def prepare(self, group: Group) -> list[ReductionOp]:
        """The coordinator asks for this attempt; gives the first ops."""
        if self._group is not None:
            return []
        self._group = group
        self._workers = group.workers
        if len(group.members) == 1:
            return [JoinOp(step=self.step, group=group, attempt=self.attempt)]
        stages = tuple(member.stage for member in group.members if member.worker == self.worker)
        ops: list[ReductionOp] = [PackOp(step=self.step, group=group, attempt=self.attempt, stages=stages)]
        return ops + self._due_sums(sorted(self._parts)) + self._due_join()

    def packed(self) -> list[Parcel]:
        """The parts of this worker's chunks are ready: where each goes."""
        parcels = []
        for member in self.group.members:
            if member.worker == self.worker:
                for shard in range(self.group.num_shards):
                    parcels.append(
                        (self.group.owner(shard).worker, self._tensor(ShardKind.PART, shard, member))
                    )
        return parcels

    def summed(self, shard: int) -> list[Parcel]:
        """An owned shard is summed: who gets the result."""
        tensor = self._tensor(ShardKind.RESULT, shard, self.group.owner(shard))
        return [(worker, tensor) for worker in self._workers]

    def arrive(self, tensor: ShardTensor) -> list[ReductionOp]:
        """A part or a result is here (also from this worker itself); gives the ops it makes possible."""
        if tensor.kind is ShardKind.PART:
            if tensor.shard in self._summed:
                return []
            self._parts.setdefault(tensor.shard, set()).add(tensor.member)
            return self._due_sums([tensor.shard])
        self._results.add(tensor.shard)
        return self._due_join()

    def _tensor(self, kind: ShardKind, shard: int, member: ChunkRef) -> ShardTensor:
        return ShardTensor(
            kind=kind,
            step=self.step,
            group=self.group.group,
            attempt=self.attempt,
            shard=shard,
            member=member,
        )

    def _due_sums(self, shards: Iterable[int]) -> list[ReductionOp]:
        """Those of `shards` whose parts are all here."""
        if self._group is None:
            return []
        due = [s for s in shards if s in self._parts and len(self._parts[s]) >= len(self._group.members)]
        due = [s for s in due if self._parts[s] >= set(self._group.members)]
        for shard in due:
            del self._parts[shard]
            self._summed.add(shard)
        return [SumOp(step=self.step, group=self._group, attempt=self.attempt, shard=shard) for shard in due]

    def _due_join(self) -> list[ReductionOp]:
        if self._group is None or self._is_join_queued:
            return []
        if not self._results.issuperset(range(self._group.num_shards)):
            return []
        self._is_join_queued = True
        return [JoinOp(step=self.step, group=self._group, attempt=self.attempt)]
