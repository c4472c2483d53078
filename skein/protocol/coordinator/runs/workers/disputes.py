"""Holders that disagree without a majority: who of them is to go, by what each has shown before.

Rules of this file
- Nobody can tell from one dispute who lies. But a liar disputes with everybody honest, the honest with liars alone: who
  has disputed with more different workers is less credible; of equals, who has agreed with others on fewer steps.
- Where all are equal nobody is believed, and all go: a model that one of them has spoilt is worse than none.
- Once somebody is less credible than all it disputed with, disputes with it say nothing against them any more.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from skein.plan.plan import Group
from skein.types import WorkerId

MAX_STRIKES = 3
"""Failures blamed on one worker, with no step committed between them, after which it gets no more work.

As many disputes, or strikes that last, are too many as well, whatever was committed between them.
"""


class Disputes:
    """Disputes and agreements of the holders of a run. Steps committed in between end no dispute."""

    def __init__(self) -> None:
        self._num_disputes: Counter[WorkerId] = Counter()
        self._num_agreed: Counter[WorkerId] = Counter()
        self._opponents: defaultdict[WorkerId, set[WorkerId]] = defaultdict(set)

    def agreed(self, groups: Iterable[Group]) -> None:
        """A step was committed: who had the result with others has shown as much."""
        self._num_agreed.update({x for group in groups if len(set(group.workers)) > 1 for x in group.workers})

    def disputed(self, workers: Collection[WorkerId]) -> tuple[WorkerId, ...]:
        """Count a dispute of these, nobody having a majority; gives those that are to go, if it was too often."""
        for worker in workers:
            self._num_disputes[worker] += 1
            self._opponents[worker].update(other for other in workers if other != worker)
        if max(self._num_disputes[worker] for worker in workers) < MAX_STRIKES:
            return ()
        least = max(map(self._doubt, workers))
        going = tuple(worker for worker in workers if self._doubt(worker) == least)
        for worker in workers:
            del self._num_disputes[worker]
        return going

    def cleared(self, gone: WorkerId) -> tuple[WorkerId, ...]:
        """Forget disputes with a worker that more than one has disputed with; gives who is in no dispute any more."""
        if len(self._opponents[gone]) < 2:
            return ()
        others = sorted(self._opponents[gone])
        for other in others:
            self._opponents[other].discard(gone)
        return tuple(other for other in others if not self._opponents[other])

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker, for another process has its name."""
        self._num_disputes.pop(worker, None)
        self._num_agreed.pop(worker, None)
        for other in self._opponents.pop(worker, ()):
            self._opponents[other].discard(worker)

    def _doubt(self, worker: WorkerId) -> tuple[int, int]:
        return len(self._opponents[worker]), -self._num_agreed[worker]
