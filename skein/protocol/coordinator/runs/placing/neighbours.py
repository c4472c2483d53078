"""Peers of each worker under a plan, and the difference between what a worker is assigned and what it was before.

Rules of this file
- A worker is told of the workers that it exchanges tensors with or fetches state from, and of no others, so that a
  generation costs each worker what its own place in the plan costs, however many members there are.
- Who is a neighbour is symmetric where tensors travel: a worker takes tensors from its peers alone.
- A difference is told only to a process that has acknowledged the Assign that it is the difference to.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from skein.plan.plan import Path, Plan
from skein.protocol.messages.directives import Assign, Member
from skein.types import Generation, JobId, WorkerId


def neighbours_of(plan: Plan) -> dict[WorkerId, set[WorkerId]]:
    """Workers that each worker of the plan sends tensors to or takes tensors from, itself left out."""
    near: dict[WorkerId, set[WorkerId]] = {worker: set() for worker in plan.workers}
    for one, other in _next_hops((*plan.paths, *plan.evaluation_paths)):
        near[one].add(other)
        near[other].add(one)
    for group in plan.groups:
        for worker in group.workers:
            near[worker].update(group.workers)
    for worker, others in near.items():
        others.discard(worker)
    return near


def _next_hops(paths: Iterable[Path]) -> set[tuple[WorkerId, WorkerId]]:
    """Pairs of workers that hand tensors to each other, each pair once."""
    return {(one.worker, other.worker) for path in paths for one, other in pairwise(path.hops)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Newest Assign of one process, as far as the next one may be a difference to it."""

    generation: Generation
    job: JobId
    peers: Mapping[WorkerId, Member]


def difference(assign: Assign, peers: Sequence[Member], before: Assigned | None) -> Assign:
    """An Assign with these peers; after `before`, which the process has, only with what is not the same."""
    if before is None or before.job != assign.job:
        return replace(assign, peers=tuple(peers))
    names = {peer.worker for peer in peers}
    return replace(
        assign,
        job_spec="",
        peers=tuple(peer for peer in peers if before.peers.get(peer.worker) != peer),
        gone=tuple(worker for worker in before.peers if worker not in names),
        since=before.generation,
    )
