"""Whether a job can run on some workers: who plans is asked, as when the job would be there, and who has its data."""

from collections import OrderedDict
from collections.abc import Mapping

from skein.config.location import OFFERED, parse_offered
from skein.plan.balanced import make_balanced_plan
from skein.plan.plan import Infeasible
from skein.protocol.log.history import JobHistory
from skein.protocol.membership.membership import Entry
from skein.topology.fleet import Fleet
from skein.types import JobId, WorkerId

_NUM_KNOWN = 1024
_Question = tuple[JobId, tuple[tuple[WorkerId, int, str], ...]]


class Fitting:
    """Answers, remembered: memory is what decides, and it does not change while a process lives."""

    def __init__(self, live: Mapping[WorkerId, Entry]) -> None:
        self._live = live
        self._named: dict[JobId, frozenset[str]] = {}
        self._known: OrderedDict[_Question, str | None] = OrderedDict()

    def lacks(self, job: JobHistory, workers: frozenset[WorkerId]) -> str | None:
        """Reason why no plan of a job exists on these live workers, or none could read its data; None if one does."""
        named = self._names(job)
        if named and not any(named <= {*self._live[worker].hello.offers} for worker in workers):
            return f"none offers {', '.join(f'{OFFERED}{name}' for name in sorted(named))}"
        fleet = tuple(self._live[worker].fleet_worker for worker in sorted(workers))
        question = job.job, tuple((x.worker, x.profile.memory_bytes, x.profile.device) for x in fleet)
        if question not in self._known:
            made = make_balanced_plan(job.spec, Fleet(workers=fleet, links=()), None, 0)
            self._known[question] = made.reason if isinstance(made, Infeasible) else None
            if len(self._known) > _NUM_KNOWN:
                self._known.popitem(last=False)
        return self._known[question]

    def _names(self, job: JobHistory) -> frozenset[str]:
        """Names of the data that workers of the first stage read, as far as the job names any that are offered."""
        if job.job not in self._named:
            data = [path for field, path in job.spec.paths() if field.startswith("data.")]
            found = (parse_offered(path, field="data") for path in data)
            self._named[job.job] = frozenset(offered.name for offered in found if offered is not None)
        return self._named[job.job]
