"""What is decided for one generation: who holds what, which way each microbatch goes, who reduces with whom."""

import hashlib
from dataclasses import dataclass

from skein.types import ChunkRef, GroupId, Layout, MicrobatchId, StageIndex, StageSpec, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Where one microbatch goes, hop by hop; its gradient comes back the same way.

    In the `loop` layout the last hop is the head stage, on the worker of the first hop.
    """

    hops: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """A chunk and how many microbatches it may hold between forward and backward."""

    chunk: ChunkRef
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Chunks that reduce the same tensors. Shard i is summed by `owner(i)`, in the order of `members`."""

    group: GroupId
    members: tuple[ChunkRef, ...]
    num_shards: int

    def owner(self, shard: int) -> ChunkRef:
        """The member that sums `shard` and hands the result out."""
        return self.members[shard % len(self.members)]

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Each worker once, in member order."""
        return tuple(dict.fromkeys(member.worker for member in self.members))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One generation's decisions.

    `paths[m]` is microbatch m's; evaluation microbatch e takes `paths[e % len(paths)]`.
    """

    layout: Layout
    stages: tuple[StageSpec, ...]
    chunks: tuple[ChunkPlan, ...]
    paths: tuple[Path, ...]
    groups: tuple[Group, ...]
    predicted_step_s: float
    lower_bound_s: float
    reason: str
    """In one line, why this plan and not another."""

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Every worker that holds a chunk, sorted."""
        return tuple(sorted({plan.chunk.worker for plan in self.chunks}))

    def holders(self, stage: StageIndex) -> tuple[WorkerId, ...]:
        """Workers that hold `stage`, in plan order."""
        return tuple(plan.chunk.worker for plan in self.chunks if plan.chunk.stage == stage)

    def microbatches_by_chunk(self) -> dict[ChunkRef, tuple[MicrobatchId, ...]]:
        """E(s) cut by holder: which microbatches each chunk must see in a step, ascending."""
        visits: dict[ChunkRef, list[MicrobatchId]] = {plan.chunk: [] for plan in self.chunks}
        for index, path in enumerate(self.paths):
            for hop in path.hops:
                visits[hop].append(MicrobatchId(index))
        return {chunk: tuple(ids) for chunk, ids in visits.items()}

    def content_hash(self) -> str:
        """Hex SHA-256 over everything decided; equal plans have equal hashes."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Infeasible:
    """No plan exists for this job on this fleet; `reason` says what lacks."""

    reason: str
