"""Whether a job can run on some workers: whoever plans is asked, as when the job would be there."""

from collections import OrderedDict
from collections.abc import Mapping

from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Infeasible
from skein.protocol.log.history import JobHistory
from skein.protocol.membership.membership import Entry
from skein.topology.fleet import Fleet
from skein.types import JobId, WorkerId

_NUM_KNOWN = 1024
_Question = tuple[JobId, tuple[tuple[WorkerId, int], ...]]


class Fitting:
    """Answers, remembered: memory is what decides, and it does not change while a process lives."""

    def __init__(self, live: Mapping[WorkerId, Entry]) -> None:
        self._live = live
        self._known: OrderedDict[_Question, str | None] = OrderedDict()

    def lacks(self, job: JobHistory, workers: frozenset[WorkerId]) -> str | None:
        """Reason why no plan of a job exists on these live workers; None if one does."""
        fleet = tuple(self._live[worker].fleet_worker for worker in sorted(workers))
        question = job.job, tuple((x.worker, x.profile.memory_bytes) for x in fleet)
        if question not in self._known:
            made = make_balanced_plan(job.spec, Fleet(workers=fleet, links=()), None, 0)
            self._known[question] = made.reason if isinstance(made, Infeasible) else None
            if len(self._known) > _NUM_KNOWN:
                self._known.popitem(last=False)
        return self._known[question]
