"""The reductions and exchanges that a worker takes part in: which there are, what arrives for them, which have ended.

Rules of this file
- A shard may come before the directive that explains it, so whatever may concern a chunk here is taken.
- What ends with a step is forgotten when that is applied; what goes on beside steps stays till the step that ends it.
"""

from collections.abc import Collection, Iterable

from skein.plan.plan import Group
from skein.protocol.messages.directives import Decision, GroupResult, Prepare, StepRecord
from skein.protocol.messages.tensors import ShardTensor, TensorHeader
from skein.protocol.worker.ops import ReductionOp
from skein.protocol.worker.reduction import Exchange, Moves
from skein.types import Attempt, ChunkRef, Exchanged, GroupId, Local, StageSpec, Step, WorkerId

MAX_UNEXPLAINED = 64
"""So many exchanges may have shards here that no directive has explained yet; peers can make no more be remembered."""


class Exchanges:
    """Exchanges of one worker in one generation, by group and attempt."""

    def __init__(self, worker: WorkerId) -> None:
        self._me = worker
        self._groups: frozenset[GroupId] = frozenset()
        self._stages: tuple[StageSpec, ...] = ()
        self._by_key: dict[tuple[GroupId, Attempt], Exchange] = {}
        self._to_take: list[Prepare] = []
        """Directives for exchanges that begin with a version still to come."""

    def settle(self, groups: Iterable[Group], stages: tuple[StageSpec, ...]) -> None:
        """Take these chunks as held, and reduced in these groups."""
        self._groups = frozenset(group.group for group in groups if self._me in group.workers)
        self._stages = stages

    def clear(self) -> None:
        """A new generation: nothing that was begun counts."""
        self._by_key.clear()
        self._to_take.clear()

    def applied(self, version: Step) -> list[Prepare]:
        """The chunks are at `version`: what ended before is forgotten; what is to be taken now is given back."""
        self._by_key = {key: exchange for key, exchange in self._by_key.items() if exchange.step >= version}
        to_take, self._to_take = self._to_take, []
        return to_take

    # --- what comes ---

    def is_due(self, directive: Prepare, version: Step) -> bool:
        """Whether a directive is for now and for this worker; an exchange of a version to come is kept till then."""
        exchange = directive.exchange
        at = directive.step if exchange is None or exchange.taken_at is None else exchange.taken_at
        if at == version:
            return self._me in directive.group.workers
        if exchange is not None and at > version:
            self._to_take.append(directive)
        return False

    def prepare(self, directive: Prepare) -> tuple[Exchange, Moves]:
        """Take part in what the coordinator asks for."""
        exchange = self._of(directive.group.group, directive.attempt, directive.step)
        return exchange, exchange.prepare(directive.group, directive.exchange)

    def is_on_its_way(self, header: TensorHeader) -> bool:
        """Whether a tensor belongs to something that has begun, be it of a later step."""
        if not isinstance(header, ShardTensor):
            return False
        # Each step begins to count attempts anew: what arrives again may be the step's before.
        found = self._by_key.get((header.group, header.attempt))
        return found is not None and found.step == header.step

    def arrive(self, header: ShardTensor) -> tuple[Exchange, Moves] | None:
        """Take a shard; None if it concerns nothing here."""
        if header.group not in self._groups and not (
            isinstance(header.group, Exchanged) and header.member.stage in (x.index for x in self._stages)
        ):
            return None
        exchange = self._by_key.get((header.group, header.attempt))
        if exchange is None:
            if self._num_unexplained >= MAX_UNEXPLAINED:
                return None
            exchange = self._of(header.group, header.attempt, header.step)
        return exchange, exchange.arrive(header)

    @property
    def _num_unexplained(self) -> int:
        """Number of exchanges that have begun with shards alone."""
        return sum(not exchange.is_prepared for exchange in self._by_key.values())

    def of_op(self, op: ReductionOp) -> Exchange | None:
        """Exchange that an op belongs to; None once that is over."""
        return self._by_key.get((op.group.group, op.attempt))

    def _of(self, group: GroupId, attempt: Attempt, step: Step) -> Exchange:
        exchange = self._by_key.get((group, attempt))
        if exchange is None:
            exchange = self._by_key[group, attempt] = Exchange(self._me, step, attempt)
        return exchange

    # --- what is decided ---

    def has_results(self, record: StepRecord) -> bool:
        """Whether all that a decision applies to the chunks here is here, and is what most others have."""
        if record.decision is Decision.SKIP:
            return True
        known = {*self._groups, *self._local, *(group for group, _ in self._by_key)}
        mine = [x for x in record.results if x.group in known]
        return bool(mine) and all(self._has(x) for x in mine)

    def is_joined(self, group: GroupId, attempt: Attempt) -> bool:
        """Whether the result of an attempt is here."""
        exchange = self._by_key.get((group, attempt))
        return exchange is not None and exchange.is_joined

    def _has(self, result: GroupResult) -> bool:
        exchange = self._by_key.get((result.group, result.attempt))
        # Where each has its own, the record has no digest.
        return exchange is not None and exchange.is_joined and result.digest in ("", exchange.digest)

    def is_left_out(self, record: StepRecord) -> bool:
        """Whether a step was decided without the chunks here: others were weighed one by one, and none of these."""
        groups = {result.group for result in record.results}
        return (
            any(isinstance(group, Local) for group in groups)
            and groups.isdisjoint(self._local)
            and not any(isinstance(group, Exchanged) for group in groups)
        )

    @property
    def _local(self) -> Collection[GroupId]:
        """The groups of chunks on their own."""
        return {Local(ChunkRef(stage=x.index, worker=self._me)) for x in self._stages}
