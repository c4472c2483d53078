"""The end of exclusions: a worker that was excluded for failures gets work again after a pause, which grows.

Rules of this file
- A pause begins with the first step that is committed without the worker, and ends at a step boundary. A run that
  commits no step has another way back: it pardons workers when no plan exists without them.
- The pause of a worker doubles each time that the worker is excluded again, up to a bound. A fault of a link may be
  over at any moment, so the bound for hearsay is short. A worker that failed by its own account waits longer.
- A worker that is back is on probation until a step is committed that it had a part in: until then one strike excludes
  it again. A link that is still cut therefore costs one time-out for each pause.
- Of two workers that do not reach each other, and of which neither is less credible (`accusations`), one gets no more
  work. A worker on probation goes before another one. Else
  the worker goes whose stages keep more holders without it, so that no link takes the last holder of a stage. Where
  both keep as many, the accused worker goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import assert_never

from skein.plan.plan import Plan
from skein.protocol.coordinator.runs.improving.replanning import Backoff
from skein.types import WorkerId

HEARSAY_FIRST_S, HEARSAY_LAST_S = 10.0, 40.0
CONTRADICTED_FIRST_S, CONTRADICTED_LAST_S = 30.0, 60.0
FAILED_FIRST_S, FAILED_LAST_S = 30.0, 3600.0


class Pauses(StrEnum):
    """Pauses until an exclusion ends, each kind with a shortest and a longest one."""

    HEARSAY = "hearsay"
    """Pauses of a worker that only peers accused."""
    CONTRADICTED = "contradicted"
    """Pauses of a worker that accused peers which others reach: a liar, or its own way out is broken."""
    FAILED = "failed"
    """Pauses of a worker that failed by its own account, or that lacks what the job names."""

    @property
    def bounds_s(self) -> tuple[float, float]:
        """The shortest pause and the longest."""
        match self:
            case Pauses.HEARSAY:
                return HEARSAY_FIRST_S, HEARSAY_LAST_S
            case Pauses.CONTRADICTED:
                return CONTRADICTED_FIRST_S, CONTRADICTED_LAST_S
            case Pauses.FAILED:
                return FAILED_FIRST_S, FAILED_LAST_S
            case _:
                assert_never(self)


class ExclusionCause(StrEnum):
    """Cause of an exclusion, which says what ends it."""

    LINK = "link"
    """Peers did not reach the worker, or the coordinator had no answer; the pause is short."""
    FAILURE = "failure"
    """The worker failed by its own account."""
    LACKING = "lacking"
    """The worker lacks what the job names, or does not read the checkpoint."""
    PROOF = "proof"
    """Others gave proof against the worker, or dispute with it: time does not end that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exclusion:
    """A worker that gets no more work of a job for now."""

    worker: WorkerId
    cause: ExclusionCause
    reason: str


class Probation:
    """Pauses of excluded workers, and workers that are back and have not proven yet that their fault is over."""

    def __init__(self) -> None:
        self._pauses: dict[tuple[WorkerId, Pauses], Backoff] = {}
        self._waiting: dict[WorkerId, Backoff] = {}
        self._on_probation: set[WorkerId] = set()

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._on_probation

    def over(self, excluded: Mapping[WorkerId, Pauses], *, now: float) -> list[WorkerId]:
        """Workers whose pause is over at this step boundary; pauses of newly excluded workers begin.

        Args:
            excluded: all workers whose exclusion may end, with the pauses of each.
            now: seconds.
        """
        ended = [worker for worker in sorted(self._waiting) if self._waiting[worker].may(now=now)]
        for worker, pauses in excluded.items():
            if worker not in self._waiting:
                known = self._pauses.setdefault((worker, pauses), Backoff(*pauses.bounds_s))
                self._waiting[worker] = known
                known.happened(now=now)
        return [worker for worker in ended if worker in excluded]

    def let_back(self, worker: WorkerId, *, is_on_probation: bool) -> None:
        """A worker is not excluded any more."""
        self._waiting.pop(worker, None)
        if is_on_probation:
            self._on_probation.add(worker)

    def proved(self, plan: Plan) -> None:
        """A step was committed by this plan: its workers reach each other."""
        self._on_probation.difference_update(plan.workers)

    def forget(self, worker: WorkerId) -> None:
        """Another process has the name of this worker, and begins anew."""
        self._on_probation.discard(worker)
        for pauses in Pauses:
            self._pauses.pop((worker, pauses), None)

    def worker_to_go(self, accuser: WorkerId, accused: WorkerId, plan: Plan | None) -> WorkerId:
        """Worker of two that gets no more work while they do not reach each other; the other one keeps its work."""

        def precedence(worker: WorkerId) -> tuple[bool, float, bool]:
            return worker in self, _num_other_holders(worker, plan), worker == accused

        return max((accuser, accused), key=precedence)


def _num_other_holders(worker: WorkerId, plan: Plan | None) -> float:
    """Holders that each stage of a worker has beside it at least; infinite for a worker that holds no stage."""
    if plan is None:
        return inf
    stages = {placed.chunk.stage for placed in plan.chunks if placed.chunk.worker == worker}
    return min((len(plan.holders(stage)) - 1 for stage in stages), default=inf)
