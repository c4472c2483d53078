"""Accusations among the workers of a run: of two workers that do not reach each other, the one that is to go.

Rules of this file
- An accusation says that the accuser, the accused worker or the link between them fails. So it counts against both.
  One that cannot be true, or that other workers refute, counts against the accuser alone.
- After too many the worker of the two goes that is at odds with more different workers: so a worker that accuses one
  peer after the other is told apart from each of them.
- Steps that are committed in between do not end an accusation at once, or a worker could accuse after each of them.
- The death of an accused worker bears its accusations out: they count against nobody any more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from skein.plan.plan import Plan
from skein.types import WorkerId

NUM_REMEMBERED_STEPS = 16
"""Committed steps after which an accusation counts no more. A link that fails more often is not fit for a plan."""
MAX_REMEMBERED = 64
"""Accusations that are remembered, the newest; of one worker far fewer exclude it."""

_Pair = tuple[WorkerId, WorkerId]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Accusation:
    accuser: WorkerId
    accused: WorkerId
    is_refuted: bool
    step_number: int
    """Steps that had been committed before."""


class Accusations:
    """Accusations of the last steps, and which workers have reached each other in the present generation."""

    def __init__(self) -> None:
        self._heard: list[_Accusation] = []
        self._reached: set[_Pair] = set()
        """Pairs of a worker and a peer that took a tensor of it."""
        self._committed: Plan | None = None
        """Plan by which a step was committed in the present generation; None: none was."""
        self._num_steps = 0

    # --- what happens ---

    def fenced(self) -> None:
        """A generation is opened: whether its workers reach each other is not known yet."""
        self._reached.clear()
        self._committed = None

    def reached(self, worker: WorkerId, peers: Iterable[WorkerId]) -> None:
        """A worker says that peers have taken its tensors in this generation."""
        self._reached.update((worker, peer) for peer in peers)

    def committed(self, plan: Plan) -> None:
        """A step was committed: workers that had tensors for each other in it have reached each other."""
        self._num_steps += 1
        self._committed = plan
        oldest = self._num_steps - NUM_REMEMBERED_STEPS
        self._heard = [x for x in self._heard if x.step_number > oldest]

    def lost(self, worker: WorkerId) -> None:
        """A worker is gone: who accused it was right."""
        self._heard = [x for x in self._heard if x.accused != worker]

    def forget(self, worker: WorkerId) -> None:
        """Another process has the name of this worker."""
        self._heard = [x for x in self._heard if worker not in (x.accuser, x.accused)]

    # --- what it comes to ---

    def heard(self, accuser: WorkerId, accused: WorkerId, *, is_possible: bool) -> None:
        """Count an accusation.

        Args:
            accuser: worker that says it.
            accused: peer that it says not to reach.
            is_possible: whether the plan has tensors or state go from one of the two to the other.
        """
        is_refuted = not is_possible or self._is_refuted(accuser, accused)
        accusation = _Accusation(
            accuser=accuser, accused=accused, is_refuted=is_refuted, step_number=self._num_steps
        )
        self._heard = [*self._heard, accusation][-MAX_REMEMBERED:]

    def num_strikes(self, worker: WorkerId) -> int:
        """Accusations that count against a worker."""
        return sum(x.accuser == worker or (x.accused == worker and not x.is_refuted) for x in self._heard)

    def less_credible(self, accuser: WorkerId, accused: WorkerId) -> WorkerId | None:
        """Worker of the two that made the last accusation that is at odds with more others; None: neither is."""
        num_of_accuser, num_of_accused = (len(self._opponents(worker)) for worker in (accuser, accused))
        if num_of_accuser == num_of_accused:
            return accuser if self._heard[-1].is_refuted else None
        return accuser if num_of_accuser > num_of_accused else accused

    def cleared(self, gone: WorkerId) -> tuple[WorkerId, ...]:
        """Forget what a worker said that is to go, if it is not believed; gives workers that it alone was at odds with.

        It is not believed if it is at odds with several, or if its last accusation was refuted. What is counted against
        the worker itself stays, should it come back.
        """
        opponents, last = self._opponents(gone), self._heard[-1]
        if len(opponents) < 2 and not (last.accuser == gone and last.is_refuted):
            return ()
        self._heard = [replace(x, is_refuted=x.is_refuted or x.accuser == gone) for x in self._heard]
        return tuple(sorted(x for x in opponents if not self._opponents(x)))

    def _is_refuted(self, accuser: WorkerId, accused: WorkerId) -> bool:
        """Whether a third worker has reached the accused one in this generation, and nobody else accuses it."""
        reached_by = {worker for worker, peer in self._reached if peer == accused}
        if self._committed is not None:
            reached_by |= _partners(self._committed, accused)
        return bool(reached_by - {accuser, accused}) and self._opponents(accused) <= {accuser}

    def _opponents(self, worker: WorkerId) -> set[WorkerId]:
        """Workers that are at odds with this one."""
        by_it = {x.accused for x in self._heard if x.accuser == worker}
        return by_it | {x.accuser for x in self._heard if x.accused == worker and not x.is_refuted}


def _partners(plan: Plan, worker: WorkerId) -> set[WorkerId]:
    """Workers that have tensors for this one in each step of a plan, or from it."""
    ends = ((one.worker, other.worker) for path in plan.paths for one, other in path.links)
    found = {x for pair in ends if worker in pair for x in pair}
    return found.union(*(group.workers for group in plan.groups if worker in group.workers)) - {worker}
