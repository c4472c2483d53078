"""Workers that lack what a job names, or say that the job itself is wrong: they are set aside, and others go on.

Rules of this file
- What one worker lacks another may have: it costs that worker its place, never the job. Nobody left: the run waits,
  says for what, and asks all again now and then.
- A job that is wrong would be wrong everywhere, but a file may be damaged on one worker alone. So two have to say it,
  or the only one there; and of a job that has made steps nobody says it.
"""

from collections.abc import Collection

from skein.protocol.coordinator.runs.workers.blame import Blame
from skein.protocol.log.history import JobHistory
from skein.protocol.messages.reports import DataOpened, Trouble
from skein.types import WorkerId

NUM_WITNESSES = 2


class Misfits:
    """Judges of one run what workers say of its job."""

    def __init__(self, job: JobHistory, blamed: Blame) -> None:
        self._job = job
        self._blamed = blamed
        self._witnesses: dict[WorkerId, str] = {}

    def judge(self, worker: WorkerId, trouble: Trouble, others: Collection[WorkerId]) -> str | None:
        """Reason why the job has failed; None: the worker is set aside.

        Args:
            others: workers that could have its place.
        """
        if trouble.is_fatal and self._job.version == 0:
            self._witnesses[worker] = trouble.reason
            if len(self._witnesses) >= NUM_WITNESSES or not others:
                return f"{worker}: {trouble.reason}"
        self._blamed.set_aside({worker: trouble.reason}, lasts=True)
        return None

    def opened(self, worker: WorkerId, report: DataOpened) -> None:
        """A worker that is to come could not open the data."""
        if report.error and report.job == self._job.job:
            self._blamed.set_aside({worker: report.error}, lasts=True)
